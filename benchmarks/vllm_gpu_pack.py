"""Pack vLLM's Python, what it needs, and kvsm, as wheels for a GPU machine without a network.

    python benchmarks/vllm_gpu_pack.py --present PACKAGES --output DIR

The machine has torch, Triton and more; PACKAGES lists these, one name a line, as `pip list --format=freeze`
prints them. The pack has the other packages that vLLM and kvsm need there, except those that only vLLM's
servers and parsers import (`LEFT_OUT`). vLLM's wheel has its Python alone: it is made from the source
distribution for no device, so no compiler runs. Its compiled operations are missing. Where vLLM's CUDA
platform imports them (`vllm/_C_stable_libtorch`), this wheel has `vllm_gpu_ops.py`, which registers
replacements.

On the machine, `SITE` is any empty directory:

    python3 -m pip install --no-index --no-deps --no-compile --target SITE DIR/*.whl
    PYTHONPATH=SITE python3 benchmarks/vllm_gpu.py
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

OPERATIONS = "vllm/_C_stable_libtorch.py"
"""Where vLLM's CUDA platform imports its compiled operations."""

PLACEHOLDER = "vllm/vllm_flash_attn/_vllm_fa2_C.py"
"""FlashAttention's compiled part, which vLLM imports on CUDA in any case. The one in the pack is empty."""

LARGEST_BYTES = 48 << 20
"""The largest pack. With the working tree it travels in one call of 64 MiB."""

LEFT_OUT = (
    "anthropic",
    "fastapi-cli",
    "lm-format-enforcer",
    "mcp",
    "mistral-common",
    "model-hosting-container-standards",
    "outlines-core",
    "prometheus-fastapi-instrumentator",
    "uvicorn",
    "watchfiles",
)
"""Packages of vLLM that `LLM` with a Llama does not import. What only they need is left out too."""

BUILD_TOOLS = (
    "torch==2.13.0",
    "setuptools<81",
    "setuptools_scm",
    "setuptools_rust",
    "packaging",
    "wheel",
    "jinja2",
)

NEWEST_GLIBC = 39
"""The machine's C library is 2.39 or newer. pip takes only wheels that were made for exactly a listed one."""

PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)), "manylinux2014_x86_64")

Fetch = Callable[[list[str]], Iterable[Path]]
"""Download wheels of these requirements, without what they need, and return their files."""


def names_in(listing: str) -> set[str]:
    """Return the canonical names in a list of packages. A version or a comment after the name is ignored."""
    lines = (line.partition("#")[0].strip() for line in listing.splitlines())
    return {canonicalize_name(re.split(r"[=<>!~ @\[;]", line)[0]) for line in lines if line}


def needs_of(wheel: Path, extras: Iterable[str], environment: Mapping[str, str]) -> list[Requirement]:
    """Return what a wheel needs in this environment (`packaging.markers`), with these extras."""
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        head = HeaderParser().parsestr(opened.read(name).decode())
    needed = map(Requirement, head.get_all("Requires-Dist", []))
    chosen = ["", *extras]
    return [
        one
        for one in needed
        if one.marker is None or any(one.marker.evaluate({**environment, "extra": extra}) for extra in chosen)
    ]


def closure(
    roots: Mapping[Path, tuple[str, ...]], present: set[str], fetch: Fetch, environment: Mapping[str, str]
) -> list[Path]:
    """Return the wheels that are needed by `roots`, needed by these, and so on, but not by name in `present`.

    roots: wheel -> the extras that are wanted of it.
    """
    found: list[Path] = []
    known = set(present)
    known.update(canonicalize_name(root.name.split("-")[0]) for root in roots)
    wanted = [one for root, extras in roots.items() for one in needs_of(root, extras, environment)]
    while wanted:
        asked: dict[str, Requirement] = {}
        for one in wanted:
            if (name := canonicalize_name(one.name)) not in known:
                asked.setdefault(name, one)
        known.update(asked)
        extras_of = {name: tuple(one.extras) for name, one in asked.items()}
        fetched = list(fetch([f"{one.name}{one.specifier}" for one in asked.values()])) if asked else []
        found += fetched
        wanted = []
        for wheel in fetched:
            name = canonicalize_name(wheel.name.split("-")[0])
            wanted += needs_of(wheel, extras_of.get(name, ()), environment)
    return found


def add_file(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel, and to its RECORD. Raises `FileExistsError` if the wheel has it."""
    with ZipFile(wheel) as old:
        if name in old.namelist():
            raise FileExistsError(f"{wheel.name} has {name}")
        (record,) = (one for one in old.namelist() if one.endswith(".dist-info/RECORD"))
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        row = io.StringIO()
        csv.writer(row, lineterminator="\n").writerow([name, f"sha256={digest}", len(content)])
        packed = wheel.with_suffix(".packed")
        with ZipFile(packed, "w", ZIP_DEFLATED, compresslevel=9) as new:
            for info in old.infolist():
                body = old.read(info)
                new.writestr(
                    info.filename, body + row.getvalue().encode() if info.filename == record else body
                )
            new.writestr(name, content)
    packed.replace(wheel)


def compiled_files(wheel: Path) -> list[str]:
    """Return the names of the shared libraries in a wheel."""
    with ZipFile(wheel) as opened:
        return [name for name in opened.namelist() if name.endswith(".so") or ".so." in name]


def target_environment(python: str) -> dict[str, str]:
    """Return the environment of the target machine for markers. python: such as `3.12`."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


def pip(*arguments: str | Path, python: str = sys.executable, **variables: str) -> None:
    """Run pip. variables: more environment variables. Raises `click.ClickException` if it fails."""
    quiet = ("--quiet", "--disable-pip-version-check")
    command = [python, "-m", "pip", *quiet, *map(str, arguments)]
    if subprocess.run(command, env={**os.environ, **variables}).returncode:
        raise click.ClickException(f"pip {' '.join(map(str, arguments))} failed")


def build_vllm(version: str, output: Path, scratch: Path) -> Path:
    """Make vLLM's wheel for no device, with the replaced operations in it."""
    subprocess.run([sys.executable, "-m", "venv", scratch / "tools"], check=True)
    python = str(scratch / "tools" / "bin" / "python")
    pip("install", *BUILD_TOOLS, python=python)
    options = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm")
    variables = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    pip("download", *options, "--dest", scratch, f"vllm=={version}", python=python, **variables)
    (source,) = scratch.glob("vllm-*.tar.gz")
    # pip must not take a wheel of the same source distribution that was made for another device.
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir")
    pip("wheel", *options, "--wheel-dir", output, source, python=python, **variables)
    (wheel,) = output.glob("vllm-*.whl")
    # Made for no device it has no compiled part, and so fits every Python.
    tags = ("--remove", "--python-tag=py3", "--abi-tag=none", "--platform-tag=any")
    subprocess.run([python, "-m", "wheel", "tags", *tags, wheel], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = output.glob("vllm-*.whl")
    if compiled := compiled_files(wheel):
        raise click.ClickException(f"vLLM's wheel has compiled parts: {', '.join(compiled)}")
    add_file(wheel, OPERATIONS, (ROOT / "benchmarks" / "vllm_gpu_ops.py").read_bytes())
    add_file(wheel, PLACEHOLDER, b'"""Not packed: FlashAttention is not chosen."""\n')
    return wheel


@click.command(help=__doc__)
@click.option("--vllm", "version", default="0.33.0", show_default=True, help="The version of vLLM.")
@click.option("--python", "target", default="3.12", show_default=True, help="The machine's Python.")
@click.option(
    "--present", type=click.Path(path_type=Path, exists=True), required=True, help="What the machine has."
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="An empty directory.")
def main(version: str, target: str, present: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise click.ClickException(f"{output} is not empty")

    def fetch(requirements: list[str]) -> list[Path]:
        before = set(output.iterdir())
        machine = ["--python-version", target, "--implementation", "cp"]
        for platform in PLATFORMS:
            machine += ["--platform", platform]
        pip("download", "--no-deps", "--only-binary=:all:", *machine, "--dest", output, *requirements)
        return sorted(set(output.iterdir()) - before)

    with TemporaryDirectory(prefix="kvsm-vllm-gpu-pack-") as scratch:
        vllm = build_vllm(version, output, Path(scratch))
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", output, ROOT, KVSM_NATIVE="1")
    (kvsm,) = output.glob("kvsm-*.whl")
    present_names = names_in(present.read_text()) | set(LEFT_OUT)
    closure({vllm: (), kvsm: ("cuda",)}, present_names, fetch, target_environment(target))
    sizes = {wheel.name: wheel.stat().st_size for wheel in output.iterdir()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        click.echo(f"{size / 2**20:8.2f} MiB  {name}")
    total = sum(sizes.values())
    click.echo(f"{total / 2**20:8.2f} MiB  {len(sizes)} wheels together")
    if total > LARGEST_BYTES:
        raise click.ClickException(f"the pack is larger than {LARGEST_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
