"""Check the files that a package index takes: the source distribution and the wheels that `.ci/wheels` makes.

    python specs/check_wheels.py DIRECTORY

Prints each problem. The native body is read as a file and not loaded, so wheels for other machines are
checked too. This does not show that a wheel runs.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from abi3info import DATAS, FUNCTIONS
from abi3info.models import PyVersion, Symbol
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).resolve().parents[1]

NATIVE = "kvsm/core/native/"
BODY = f"{NATIVE}_body.abi3.so"

TAGS = {
    "cp311-abi3-manylinux_2_28_x86_64": "EM_X86_64",
    "cp311-abi3-manylinux_2_28_aarch64": "EM_AARCH64",
    "py3-none-any": "",
}
"""Tag of a wheel that must exist -> the machine of its native body, as ELF names it; empty if it has no
native body."""

SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d+")
"""Libraries that a native body may load. They belong to glibc, so each system that fits the tag has them."""

FIELDS = ("Name", "Version", "Summary", "License-Expression", "License-File", "Keywords", "Requires-Python")
LINKS = ("Documentation", "Source", "Changelog", "Issues")
CLASSIFIERS = ("Development Status", "Intended Audience", "Topic", "Operating System", "Programming Language")
COMMANDS = ("kvsm = kvsm.cli:main", "[vllm.general_plugins]", "[pytest11]")
"""Required metadata: fields, links, prefixes of classifiers, and entry points."""


class Library(NamedTuple):
    """The properties of a shared library, as its ELF file states them.

    machine: as ELF names it.
    exported, undefined: names of the symbols that it defines for others, and of those that it needs.
    glibc: the versions of glibc that it needs.
    needed: the libraries that it loads.
    search_path: where it tells the loader to look for them; empty if it leaves that to the system.
    """

    machine: str
    exported: frozenset[str]
    undefined: frozenset[str]
    glibc: frozenset[tuple[int, ...]]
    needed: frozenset[str]
    search_path: str


def read_library(content: bytes) -> Library:
    """Read a shared library. Raises `ValueError` if the file is not one."""
    try:
        elf = ELFFile(io.BytesIO(content))
    except Exception as error:
        raise ValueError(f"no shared library: {error}") from None
    symbols = [symbol for symbol in _section(elf, ".dynsym").iter_symbols() if symbol.name]
    undefined = frozenset(symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF")
    dynamic = list(_section(elf, ".dynamic").iter_tags())
    return Library(
        elf["e_machine"],
        frozenset(symbol.name for symbol in symbols) - undefined,
        undefined,
        frozenset(_glibc_versions(elf)),
        frozenset(tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"),
        "".join(getattr(tag, "rpath", "") or getattr(tag, "runpath", "") for tag in dynamic),
    )


def _section(elf: ELFFile, name: str) -> Any:
    section = elf.get_section_by_name(name)
    if section is None:
        raise ValueError(f"no shared library: it has no {name}")
    return section


def _glibc_versions(elf: ELFFile) -> Iterator[tuple[int, ...]]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if found := re.fullmatch(r"GLIBC_([\d.]+)", version.name):
                        yield tuple(map(int, found[1].split(".")))


def library_problems(library: Library, tag: str) -> Iterator[str]:
    """Yield a message for each way in which a native body does not fit the tag of its wheel."""
    if library.machine != TAGS[tag]:
        yield f"the native body is for {library.machine}, not for {TAGS[tag]}"
    python = PyVersion(3, int(re.findall(r"^cp3(\d+)", tag)[0]))
    for name in sorted(library.undefined):
        known = FUNCTIONS.get(Symbol(name)) or DATAS.get(Symbol(name))
        if known is None and name.startswith(("Py", "_Py")):
            yield f"the native body needs {name}, which is not in the stable ABI"
        elif known is not None and known.added > python:
            yield f"the native body needs {name}, which the stable ABI has since {known.added}, not {python}"
    glibc = tuple(map(int, re.findall(r"manylinux_(\d+)_(\d+)", tag)[0]))
    if newer := [version for version in library.glibc if version > glibc]:
        yield f"the native body needs glibc {_dotted(max(newer))}; the tag promises {_dotted(glibc)}"
    yield from (
        f"the native body loads {name}, which not every Linux has"
        for name in sorted(library.needed)
        if not SYSTEM_LIBRARIES.fullmatch(name)
    )
    if library.search_path:
        yield f"the native body looks for libraries in {library.search_path}, a path of the build machine"
    if others := sorted(library.exported - {"PyInit__body"}):
        yield f"the native body exports {', '.join(others)}; another library's symbol could replace it"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def metadata_problems(metadata: Message, entry_points: str) -> Iterator[str]:
    """Yield a message for each missing part of a distribution's metadata."""
    yield from (f"METADATA has no {field}" for field in FIELDS if not metadata[field])
    links = {link.split(",")[0] for link in metadata.get_all("Project-URL", [])}
    yield from (f"METADATA has no link to {name}" for name in LINKS if name not in links)
    classifiers = metadata.get_all("Classifier", [])
    for group in CLASSIFIERS:
        if not any(one.startswith(f"{group} ::") for one in classifiers):
            yield f"METADATA has no classifier {group}"
    if any(one.startswith("License ::") for one in classifiers):
        yield "METADATA has a classifier of a license; License-Expression replaces it"
    if metadata["Description-Content-Type"] != "text/markdown" or len(str(metadata.get_payload())) < 1000:
        yield "METADATA has no description in Markdown"
    yield from (f"entry_points.txt lacks {one}" for one in COMMANDS if one not in entry_points)


def wheel_problems(tag: str, files: Mapping[str, bytes], source: Mapping[str, bytes]) -> Iterator[str]:
    """Compare a wheel with the source distribution.

    files, source: path -> content.
    """
    info = next((path.split("/")[0] for path in files if path.endswith(".dist-info/METADATA")), "no METADATA")
    wheel = Parser().parsestr(files.get(f"{info}/WHEEL", b"").decode())
    if wheel.get_all("Tag") != [tag]:
        yield f"WHEEL names the tags {wheel.get_all('Tag')}"
    if wheel["Root-Is-Purelib"] != str(not TAGS[tag]).lower():
        yield f"WHEEL says Root-Is-Purelib: {wheel['Root-Is-Purelib']}"
    expected = {path for path in source if path.startswith("kvsm/")} | ({BODY} if TAGS[tag] else set())
    found = {path for path in files if not path.startswith(f"{info}/")}
    yield from (f"{path} is missing" for path in sorted(expected - found))
    yield from (f"{path} does not belong into a wheel" for path in sorted(found - expected))
    for path in sorted(found & source.keys()):
        if files[path] != source[path]:
            yield f"{path} differs from the source distribution"
    yield from metadata_problems(
        Parser().parsestr(files.get(f"{info}/METADATA", b"").decode()),
        files.get(f"{info}/entry_points.txt", b"").decode(),
    )
    if TAGS[tag] and BODY in found:
        yield from body_problems(tag, files)


def body_problems(tag: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Check the native body of a wheel. It contains a digest of the sources from which it was built."""
    try:
        library = read_library(files[BODY])
    except ValueError as error:
        yield f"{BODY} is {error}"
        return
    yield from library_problems(library, tag)
    if digest_of_sources(files).encode() not in files[BODY]:
        yield "the native body was built from other C sources than the wheel has; kvsm would not load it"


def digest_of_sources(files: Mapping[str, bytes]) -> str:
    """Return the digest of the C sources among these files, which kvsm compares before it loads a native
    body."""
    with TemporaryDirectory() as folder:
        for path, content in files.items():
            if path.startswith(NATIVE) and path.endswith((".c", ".h")):
                (Path(folder) / path.removeprefix(NATIVE)).write_bytes(content)
        sources = run_path(str(ROOT / NATIVE / "sources.py"))
        digest: str = sources["digest_of_sources"](Path(folder))
    return digest


MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|kvsm\.egg-info/.*")


def source_problems(source: Mapping[str, bytes], tracked: frozenset[str] | None) -> Iterator[str]:
    """Yield a message for each file of the source distribution that is not in the repository, and for its
    metadata.

    tracked: the files that git tracks; None if this is no repository.
    """
    for path in sorted(source.keys() - (source.keys() if tracked is None else tracked)):
        if not MADE_BY_SETUPTOOLS.fullmatch(path):
            yield f"{path} is not in the repository; remove it from the checkout, and build again"
    yield from metadata_problems(
        Parser().parsestr(source.get("PKG-INFO", b"").decode()),
        source.get("kvsm.egg-info/entry_points.txt", b"").decode(),
    )


def _tracked() -> frozenset[str] | None:
    if not (ROOT / ".git").exists():
        return None
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(listed.stdout.splitlines())


def read_source(path: Path) -> dict[str, bytes]:
    """Return path -> content of the files of a source distribution, without its top directory."""
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        return {
            member.name.partition("/")[2]: file.read()
            for member in members
            if (file := archive.extractfile(member)) is not None
        }


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return path -> content of the files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def problems(directory: Path, tracked: frozenset[str] | None) -> Iterator[str]:
    """Yield a message for each problem of the files in this directory."""
    sources = sorted(directory.glob("kvsm-*.tar.gz"))
    if len(sources) != 1:
        yield f"{directory} has {len(sources)} source distributions; it must have one"
        return
    stem = sources[0].name.removesuffix(".tar.gz")
    wanted = {sources[0].name: "", **{f"{stem}-{tag}.whl": tag for tag in TAGS}}
    present = {path.name for path in directory.iterdir()}
    yield from (f"{name} is missing" for name in wanted if name not in present)
    yield from (f"{name} does not belong here" for name in sorted(present - wanted.keys()))
    source = read_source(sources[0])
    yield from (f"{sources[0].name}: {problem}" for problem in source_problems(source, tracked))
    for name, tag in wanted.items():
        if tag and name in present:
            found = wheel_problems(tag, read_wheel(directory / name), source)
            yield from (f"{name}: {problem}" for problem in found)


def main(directory: Path) -> int:
    """Print the problems, and return the exit code."""
    found = list(problems(directory, _tracked()))
    for line in found:
        print(line)
    if not found:
        print(f"{directory}: the source distribution and {len(TAGS)} wheels are complete")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python specs/check_wheels.py DIRECTORY")
    sys.exit(main(Path(sys.argv[1])))
