"""Builds the fake CUDA driver (`driver.cpp`) and puts it where cuda-bindings looks for the real one.

A process that has loaded it has it for good, for a driver is looked for once. So it is loaded only where no
GPU is.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

SOURCE = Path(__file__).parent / "driver.cpp"
KERNEL = Path(__file__).parents[3] / "kvsm" / "cuda_io" / "copy.cu"

INVALID_VALUE = 1
ILLEGAL_ADDRESS = 700
NEWEST_WITHOUT_BATCH = 12060

_building = TemporaryDirectory(prefix="kvsm-fake-cuda-")
"""Removed when the process ends."""


class FakeDriver:
    """How tests control it, and what it has seen."""

    def __init__(self, file: Path) -> None:
        self._library = ctypes.CDLL(str(file), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        self._library.fake_calls.restype = ctypes.c_char_p

    def reset(self) -> None:
        """Forget calls, planned failures and queued compute. Memory stays as it is."""
        self._library.fake_reset()

    @property
    def calls(self) -> list[str]:
        """The calls since the reset, each with the arguments that matter."""
        return self._library.fake_calls().decode().splitlines()

    def fail(self, name: str, nth: int = 1, code: int = INVALID_VALUE) -> None:
        """Make the nth call of this name from now on fail without effect."""
        self._library.fake_fail(name.encode(), nth, code)

    def lose(self, code: int = ILLEGAL_ADDRESS) -> None:
        """Drop all queued work, and make every call from now on fail."""
        self._library.fake_lose(code)

    def set_version(self, version: int) -> None:
        self._library.fake_version(version)

    def page_lock(self, pool: np.ndarray) -> None:
        """As cuMemHostRegister, but repeatable, because memory of a deleted array may belong to another one
        later."""
        if pool.size:
            extent = (len(pool) - 1) * pool.strides[0] + pool.strides[-1] * pool.shape[-1]
            self._library.fake_page_lock(ctypes.c_uint64(pool.ctypes.data), ctypes.c_size_t(extent))

    def unlock_all(self) -> None:
        """No host memory is page-locked any more."""
        self._library.fake_unlock_all()

    def compute(self, target: np.ndarray, value: int, stream: int) -> None:
        """Queue the filling of contiguous memory, in place of a model's kernel."""
        assert self._library.fake_fill(*_pointers(target), value, ctypes.c_void_p(stream)) == 0

    def compute_reads(self, source: np.ndarray, target: np.ndarray, stream: int) -> None:
        """Queue the reading of contiguous memory into an array that a test can look at."""
        pointers = ctypes.c_uint64(target.ctypes.data), *_pointers(source)
        assert self._library.fake_read(*pointers, ctypes.c_void_p(stream)) == 0

    def run(self, stream: int) -> None:
        """Let a stream do all that is queued on it."""
        self._library.fake_run(ctypes.c_void_p(stream))

    # For who chooses when the device works; until the next reset.

    def choose_steps(self) -> None:
        """From now on a stream works only by `step`, or for who waits for it. A query runs nothing."""
        self._library.fake_stepped()

    def can_step(self, stream: int) -> bool:
        """Whether a stream has something queued that it can do now."""
        return bool(self._library.fake_can_step(ctypes.c_void_p(stream)))

    def step(self, stream: int) -> None:
        """Let a stream do its next operation."""
        self._library.fake_step(ctypes.c_void_p(stream))

    def left(self, stream: int) -> int:
        """How many operations a stream has not done."""
        return int(self._library.fake_left(ctypes.c_void_p(stream)))

    def is_reached(self, event: int) -> bool:
        """Whether who waits for an event may go on: it is done, or the device is lost."""
        return bool(self._library.fake_reached(ctypes.c_void_p(event)))

    @property
    def retained(self) -> int:
        """How many contexts are retained and not released."""
        return self._library.fake_retained()


def _pointers(array: np.ndarray) -> tuple[ctypes.c_uint64, ctypes.c_size_t]:
    return ctypes.c_uint64(array.ctypes.data), ctypes.c_size_t(array.nbytes)


def why_not() -> str:
    """What is missing here for the fake driver; empty if nothing is."""
    return "" if shutil.which("g++") else "no C++ compiler (g++) to build the fake CUDA driver with"


@functools.cache
def load_fake() -> FakeDriver:
    """Build and load it before cuda-bindings looks for a driver."""
    return FakeDriver(build_fake())


@functools.cache
def build_fake() -> Path:
    file = Path(_building.name) / "libcuda.so.1"
    options = (
        "-std=c++17 -O1 -shared -fPIC -Wall -Wextra -Werror -Wno-unknown-pragmas -Wl,-soname,libcuda.so.1"
    )
    kernel = f'-DKERNEL_SOURCE="{KERNEL}"'
    subprocess.run(["g++", *options.split(), kernel, "-o", str(file), str(SOURCE)], check=True)
    return file
