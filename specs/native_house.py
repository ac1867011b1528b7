"""A copy of this checkout in a scratch directory, with a native body of its own.

Tests and tools use it to run the usual programs with a body that was built otherwise: with sanitizers, with
counters of the lines that run, or from changed C text. The checkout itself is not changed.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from kvsm.core.native.sources import digest_of_sources

ROOT = Path(__file__).resolve().parents[1]
NATIVE = Path("kvsm", "core", "native")
COMPILER = shutil.which("gcc")

RELEASE = ("-O2", "-fvisibility=hidden")
"""The flags of `setup.py`."""
SANITIZERS = (
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


class House:
    """A copy of the checkout.

    place: its root. The C text is copied, too: it may be changed there before `build`.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._defined: list[str] = []
        self._linked: list[Path] = []
        place.mkdir(parents=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "kvsm", place / "kvsm", ignore=ignored)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
            shutil.copy(ROOT / name, place / name)
        for name in ("tests", "specs", "docs"):
            (place / name).symlink_to(ROOT / name)

    @property
    def native(self) -> Path:
        """The directory of the C files."""
        return self.place / NATIVE

    @property
    def body(self) -> Path:
        """The file of the native body."""
        return self.native / f"_body{sysconfig.get_config_var('EXT_SUFFIX')}"

    @cached_property
    def digest(self) -> str:
        """The digest of the C files when the first of them was compiled: `kvsm.core.native` compares it."""
        return digest_of_sources(self.native)

    def count_memory(self) -> None:
        """Let later builds count their allocations, and fail one on request (`counted_memory.c`)."""
        source = shutil.copy(ROOT / "tests" / "support" / "counted_memory.c", self.place)
        self._linked = [self.compile(Path(source))]
        self._defined = [f"-D{name}=counted_{name}" for name in ("malloc", "calloc", "realloc", "free")]

    def build(self, *flags: str) -> None:
        """Compile all C files, and link them. Raises `BuildError` with what the compiler says."""
        self.link([self.compile(source, *flags) for source in sorted(self.native.glob("*.c"))], *flags)

    def compile(self, source: Path, *flags: str) -> Path:
        """Compile a C file. Returns the object file, beside it."""
        digest = f'-DSOURCES_DIGEST="{self.digest}"'
        include = f"-I{sysconfig.get_paths()['include']}"
        chosen = ["-std=c11", "-fPIC", *flags, *self._defined, include, digest]
        _compiler(*chosen, "-c", source.name, cwd=source.parent)
        return source.with_suffix(".o")

    def link(self, objects: list[Path], *flags: str) -> None:
        _compiler(
            "-shared", *flags, *map(str, [*objects, *self._linked]), "-o", str(self.body), cwd=self.native
        )

    def run(
        self,
        *arguments: str,
        seconds: float | None = None,
        cpu_seconds: int | None = None,
        more: Mapping[str, str] | None = None,
        less: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in this copy. If its native body cannot be loaded, that is an error. Raises
        `TimeoutExpired`.

        cpu_seconds: a process that uses more CPU time ends by SIGXCPU.
        more: additional environment variables. less: variables that are not passed on.
        """
        limit = None if cpu_seconds is None else partial(_limit_cpu, cpu_seconds)
        search = [self.place, self.place / "tests" / "support", self.place / "specs"]
        path = os.pathsep.join(map(str, search))
        passed = {name: value for name, value in os.environ.items() if name not in less}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.place,
            env={**passed, "KVSM_NATIVE": "1", "PYTHONPATH": path, **(more or {})},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            preexec_fn=limit,
            check=False,
        )


class Bench:
    """A copy of the checkout whose C text can be changed in one file at a time, and is then rebuilt fast."""

    def __init__(self, house: House, *flags: str) -> None:
        self.house, self.flags = house, flags
        house.build(*flags)
        self.objects = {path: path.read_bytes() for path in sorted(house.native.glob("*.o"))}

    @contextmanager
    def changed(self, file: str, text: bytes) -> Iterator[bool]:
        """In this `with` block, the body has this text of a file. Yields whether its object code differs.

        Raises `BuildError` if the compiler refuses the text.
        """
        source = self.house.native / file
        original = source.read_bytes()
        chosen = [source] if source.suffix == ".c" else [path.with_suffix(".c") for path in self.objects]
        source.write_bytes(text)
        try:
            for path in chosen:
                self.house.compile(path, *self.flags)
            source.write_bytes(original)  # the body compares its digest with the C text beside it
            self.house.link([*self.objects], *self.flags)
            yield any(path.read_bytes() != code for path, code in self.objects.items())
        finally:
            source.write_bytes(original)
            for path, code in self.objects.items():
                path.write_bytes(code)


class BuildError(Exception):
    """The compiler refused; its message."""


def sanitized(house: House) -> dict[str, str] | None:
    """The environment for a body with `SANITIZERS`; None: this gcc has no AddressSanitizer."""
    library = _compiler("-print-file-name=libasan.so", cwd=house.place).strip()
    if "/" not in library:
        return None
    return {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
    }


def _limit_cpu(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def _compiler(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([str(COMPILER), *arguments], cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise BuildError(done.stderr[-6000:])
    return done.stdout
