"""The check of the wheels finds each fault that a user of an index would meet."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from check_wheels import (
    BODY,
    COMMANDS,
    NATIVE,
    TAGS,
    digest_of_sources,
    main,
    problems,
    read_library,
    read_source,
    read_wheel,
)
from places import ROOT
from small_library import AARCH64, X86_64, small_library

INFO = "kvsm-1.0.dist-info"
MACHINES = {"EM_X86_64": X86_64, "EM_AARCH64": AARCH64}
INTEL, ARM, PURE = TAGS

METADATA = "\n".join(
    [
        "Metadata-Version: 2.4",
        "Name: kvsm",
        "Version: 1.0",
        "Summary: an offload core",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Keywords: vllm",
        "Requires-Python: >=3.10",
        *(f"Project-URL: {name}, https://example.org" for name in ("Documentation", "Source", "Changelog")),
        "Project-URL: Issues, https://example.org",
        "Classifier: Development Status :: 4 - Beta",
        "Classifier: Intended Audience :: Developers",
        "Classifier: Topic :: System",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: C",
        "Description-Content-Type: text/markdown",
        "",
        "words " * 200,
    ]
)

SOURCE = {
    "PKG-INFO": METADATA.encode(),
    "kvsm.egg-info/entry_points.txt": "\n".join(COMMANDS).encode(),
    "kvsm/__init__.py": b"",
    "kvsm/py.typed": b"",
    f"{NATIVE}body.h": b"int body;",
    f"{NATIVE}module.c": b"int module;",
    "tests/test_it.py": b"",
}
"""What is in the source distribution of a small kvsm."""

Files = dict[str, bytes]


def good_wheel(tag: str) -> Files:
    wheel = f"Root-Is-Purelib: {'false' if TAGS[tag] else 'true'}\nTag: {tag}\n"
    files = {path: content for path, content in SOURCE.items() if path.startswith("kvsm/")} | {
        f"{INFO}/METADATA": METADATA.encode(),
        f"{INFO}/WHEEL": wheel.encode(),
        f"{INFO}/entry_points.txt": "\n".join(COMMANDS).encode(),
    }
    if TAGS[tag]:
        files[BODY] = good_body(MACHINES[TAGS[tag]])
    return files


def good_body(machine: int = X86_64, **parts: object) -> bytes:
    return small_library(machine, **parts, data=digest_of_sources(SOURCE).encode())  # type: ignore[arg-type]


def write_all(directory: Path, tag: str = "", change: Callable[[Files], object] = lambda _: None) -> Path:
    """Write a source distribution and its wheels. `change` changes the wheel with this tag, or the source."""
    source = dict(SOURCE)
    if not tag:
        change(source)
    with tarfile.open(directory / "kvsm-1.0.tar.gz", "w:gz") as archive:
        for path, content in source.items():
            entry = tarfile.TarInfo(f"kvsm-1.0/{path}")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    for one in TAGS:
        files = good_wheel(one)
        if one == tag:
            change(files)
        with zipfile.ZipFile(directory / f"kvsm-1.0-{one}.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)
    return directory


def found(directory: Path) -> list[str]:
    return list(problems(directory, frozenset(SOURCE)))


def test_a_complete_directory_has_no_problem(tmp_path: Path) -> None:
    assert found(write_all(tmp_path)) == []


def without(path: str) -> Callable[[Files], object]:
    return lambda files: files.pop(path)


def replaced(path: str, old: str, new: str) -> Callable[[Files], object]:
    def change(files: Files) -> None:
        assert old.encode() in files[path]
        files[path] = files[path].replace(old.encode(), new.encode())

    return change


def added(path: str, content: bytes = b"x") -> Callable[[Files], object]:
    return lambda files: files.update({path: content})


@pytest.mark.parametrize(
    ("tag", "change", "problem"),
    [
        (PURE, without("kvsm/py.typed"), "kvsm/py.typed is missing"),
        (PURE, without(f"{NATIVE}module.c"), f"{NATIVE}module.c is missing"),
        (INTEL, without(BODY), f"{BODY} is missing"),
        (PURE, added(BODY), f"{BODY} does not belong into a wheel"),
        (PURE, added("tests/test_it.py", b""), "tests/test_it.py does not belong into a wheel"),
        (PURE, added("kvsm/old.py"), "kvsm/old.py does not belong into a wheel"),
        (PURE, added("kvsm/__init__.py"), "kvsm/__init__.py differs from the source distribution"),
        (ARM, replaced(f"{INFO}/WHEEL", ARM, INTEL), f"WHEEL names the tags ['{INTEL}']"),
        (ARM, replaced(f"{INFO}/WHEEL", "false", "true"), "WHEEL says Root-Is-Purelib: true"),
        (PURE, replaced(f"{INFO}/WHEEL", "true", "false"), "WHEEL says Root-Is-Purelib: false"),
        (PURE, replaced(f"{INFO}/METADATA", "Keywords: vllm\n", ""), "METADATA has no Keywords"),
        (PURE, replaced(f"{INFO}/METADATA", "Issues,", "Bugs,"), "METADATA has no link to Issues"),
        (PURE, replaced(f"{INFO}/METADATA", "Topic ::", "Tropic ::"), "METADATA has no classifier Topic"),
        (
            PURE,
            replaced(f"{INFO}/METADATA", "Keywords", "Classifier: License :: MIT\nKeywords"),
            "METADATA has a classifier of a license; License-Expression replaces it",
        ),
        (PURE, replaced(f"{INFO}/METADATA", "words ", ""), "METADATA has no description in Markdown"),
        (PURE, replaced(f"{INFO}/entry_points.txt", "pytest11", "x"), "entry_points.txt lacks [pytest11]"),
    ],
)
def test_a_fault_of_a_wheel_is_named(
    tag: str, change: Callable[[Files], object], problem: str, tmp_path: Path
) -> None:
    assert found(write_all(tmp_path, tag, change)) == [f"kvsm-1.0-{tag}.whl: {problem}"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (good_body(AARCH64), "the native body is for EM_AARCH64, not for EM_X86_64"),
        (
            good_body(undefined=["PyErr_GetRaisedException", "_PyLong_New", "memcpy"]),
            "the native body needs PyErr_GetRaisedException, which the stable ABI has since 3.12, not 3.11\n"
            "the native body needs _PyLong_New, which is not in the stable ABI",
        ),
        (good_body(undefined=["PyObject_GetBuffer", "Py_IncRef", "_Py_Dealloc", "_Py_NoneStruct"]), ""),
        (good_body(glibc=["2.17", "2.28", "2.28"]), ""),
        (good_body(glibc=["2.9", "2.34"]), "the native body needs glibc 2.34; the tag promises 2.28"),
        (
            good_body(needed=["libc.so.6", "libpthread.so.0", "libpython3.11.so.1.0"]),
            "the native body loads libpython3.11.so.1.0, which not every Linux has",
        ),
        (
            good_body(run_path="/opt/python/lib"),
            "the native body looks for libraries in /opt/python/lib, a path of the build machine",
        ),
        (
            good_body(exported=["PyInit__body", "commit"]),
            "the native body exports commit; another library's symbol could replace it",
        ),
        (
            small_library(data=b"another digest"),
            "the native body was built from other C sources than the wheel has; kvsm would not load it",
        ),
        (b"text", f"{BODY} is no shared library: Magic number does not match"),
    ],
)
def test_a_fault_of_the_native_body_is_named(body: bytes, problem: str, tmp_path: Path) -> None:
    expected = [f"kvsm-1.0-{INTEL}.whl: {line}" for line in problem.splitlines()]
    assert found(write_all(tmp_path, INTEL, added(BODY, body))) == expected


def test_a_file_that_git_does_not_track_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, change=added("tests/x.txt"))
    assert found(tmp_path) == [
        "kvsm-1.0.tar.gz: tests/x.txt is not in the repository; remove it from the checkout, and build again"
    ]
    assert list(problems(tmp_path, None)) == []


def test_a_source_distribution_without_its_metadata_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, change=without("PKG-INFO"))
    assert "kvsm-1.0.tar.gz: METADATA has no Name" in found(tmp_path)


def test_a_file_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / f"kvsm-1.0-{ARM}.whl").rename(tmp_path / "kvsm-1.0-cp311-abi3-linux_aarch64.whl")
    assert found(tmp_path) == [
        f"kvsm-1.0-{ARM}.whl is missing",
        "kvsm-1.0-cp311-abi3-linux_aarch64.whl does not belong here",
    ]
    assert main(tmp_path) == 1
    (tmp_path / "kvsm-1.0.tar.gz").unlink()
    assert found(tmp_path) == [f"{tmp_path} has 0 source distributions; it must have one"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """The small library has the parts that the faults above change."""
    write_all(tmp_path)
    assert read_source(tmp_path / "kvsm-1.0.tar.gz") == SOURCE
    library = read_library(read_wheel(tmp_path / f"kvsm-1.0-{ARM}.whl")[BODY])
    assert library.machine == "EM_AARCH64"
    assert library.exported == {"PyInit__body"}
    assert library.undefined == {"PyModule_Create2", "memcpy"}
    assert library.glibc == {(2, 17)}
    assert library.needed == {"libc.so.6"}
    assert library.search_path == ""


@pytest.mark.skipif(not list((ROOT / NATIVE).glob("_body*.so")), reason="the native body was not built here")
def test_the_native_body_that_is_built_here_is_read() -> None:
    """A real library, from a compiler: the reader does not only know the small one."""
    [body] = (ROOT / NATIVE).glob("_body*.so")
    library = read_library(body.read_bytes())
    assert library.exported == {"PyInit__body"}
    assert {"PyImport_ImportModule", "PyObject_GetAttrString"} <= library.undefined
    assert "libc.so.6" in library.needed
    assert library.glibc
