"""Compiles the copy kernel `copy.cu` with NVRTC, and prepares its launch.

DMA engines have a cost for each descriptor, which is too high for small fragments. A kernel that reads or
writes page-locked host memory has no descriptors. It needs two tables: the parts of a block, uploaded once
for a layout, and the pairs of a transfer, 8 bytes each, which it reads from page-locked memory while it runs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.geometry import joined
from kvsm.copies.layout import MemoryLayout
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.ids import IdArray

KERNEL_NAME = "kvsm_copy"

LANES, THREADS = 32, 1024
"""Threads that copy a part together, and threads of a thread block. `copy.cu` has the same numbers."""

PART_BYTES = 4096
"""Size of the longest part: each lane has 8 vectors of 16 bytes in flight."""


class KernelParameters(NamedTuple):
    """The parameters of the kernel, in order. `KERNEL_TYPES` are their C types; addresses are for the
    device."""

    pairs: int
    """Address of the table of `kernel_pairs`: page-locked, and unchanged until the kernel is over."""
    num_pairs: int
    parts: int
    """Address of the table of `kernel_parts`: device memory, 16-byte aligned, uploaded once for a layout."""
    num_parts: int
    host: int
    """Device address of the host pool."""
    host_stride: int
    to_host: int
    """1 for a store, 0 for a load."""
    vector_bytes: int


KERNEL_TYPES = (*(ctypes.c_void_p, ctypes.c_uint64) * 3, ctypes.c_int, ctypes.c_int)


def kernel_parts(layout: MemoryLayout) -> NDArray[np.uint64]:
    """Return the parts table. A row has the part's device address in block 0, its device stride, its offset
    in a host block, and its bytes.

    A row of a tensor is cut into parts of `PART_BYTES`, so that several warps share long rows.
    """
    whole = joined(layout)
    parts = [
        (rows.address + start, rows.stride, offset + start, min(PART_BYTES, rows.row_bytes - start))
        for rows, offset in zip(whole.tensors, whole.offsets)
        for start in range(0, rows.row_bytes, PART_BYTES)
    ]
    return np.array(parts, dtype=np.uint64)


def kernel_pairs(device_blocks: IdArray, host_blocks: IdArray) -> NDArray[np.uint32]:
    """Return the pairs table of a transfer. A row has the device block and the host block of a pair."""
    pairs = np.empty((len(device_blocks), 2), dtype=np.uint32)
    pairs[:, 0], pairs[:, 1] = device_blocks, host_blocks
    return pairs


def vector_bytes(layout: MemoryLayout) -> int:
    """Return the largest vector size, 16, 8, 4 or 1 bytes, that divides every address and size of the
    layout."""
    whole = joined(layout)
    together = whole.host.address | whole.host.stride
    for rows, offset in zip(whole.tensors, whole.offsets):
        together |= rows.address | rows.stride | rows.row_bytes | offset
    return next(width for width in (16, 8, 4, 1) if together % width == 0)


def grid(num_units: int, most_blocks: int) -> tuple[int, int]:
    """Return the launch size of the kernel: (thread blocks, threads of each).

    num_units: pairs times parts. No more thread blocks are launched than these need.
    most_blocks: limit of thread blocks, measured or from `guessed_thread_blocks`.
    """
    return max(1, min(most_blocks, -(-num_units // (THREADS // LANES)))), THREADS


def guessed_thread_blocks(multiprocessors: int) -> dict[Direction, int]:
    """Return the most thread blocks of a copy on a device that was not measured.

    A multiprocessor that copies is lost to compute, because a matrix product needs a whole one. So a thread
    block has the largest possible size: 128 KiB in flight for some 2 us, the time of a read over the bus and
    back. On an H200, with 132 multiprocessors, one block stores 37 GB/s, and two blocks load 49 GB/s, as
    reads across the bus wait longer.
    """
    return {
        Direction.STORE: max(1, multiprocessors // 132),
        Direction.LOAD: max(1, multiprocessors // 66),
    }


def most_thread_blocks(multiprocessors: int) -> int:
    """Return the most thread blocks that a measurement tries: a fortieth of the multiprocessors, so that both
    directions together take a twentieth of them from compute."""
    return max(1, multiprocessors // 40)


@cache
def compile_copy_kernel(compute_capability: tuple[int, int]) -> bytes:
    """Compile the kernel for a device, once for each compute capability. Returns a module image for
    `cuModuleLoadData`.

    It is machine code (CUBIN) if NVRTC supports the device. Otherwise it is PTX for the newest supported
    older device, and the driver compiles it. Raises `ConfigError` if NVRTC is missing, fails, or supports
    only newer devices.
    """
    nvrtc = load_nvrtc()
    known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    wanted = compute_capability[0] * 10 + compute_capability[1]
    older = [capability for capability in known if capability <= wanted]
    if not older:
        raise ConfigError(
            f"this NVRTC compiles for compute capability {min(known) / 10} and later, and the device has "
            f"{wanted / 10}; install the NVRTC of an earlier CUDA, or force another path"
        )
    exact = wanted in known
    option = f"--gpu-architecture={'sm' if exact else 'compute'}_{max(older)}"
    return _compiled(nvrtc, option, exact)


def load_nvrtc() -> Any:
    """Return the module of cuda-bindings for NVRTC, after loading its library. Raises `ConfigError`.

    cuda-bindings finds the library in the site-packages of this Python, but not in other directories of
    `sys.path`: of `pip install --target`, or of an environment that a `.pth` file adds. After a call that has
    not found it, cuda-bindings 13.0 does not look again, so it is loaded before the first call.
    """
    try:
        from cuda.bindings import nvrtc  # needed only with a GPU

        if not _is_found():
            _load_library(sys.path)
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the copy kernel needs NVRTC, and it cannot be loaded ({error}); install it with "
            "pip install 'kvsm[cuda]', or force another path"
        ) from error
    return nvrtc


def _is_found() -> bool:
    """Whether cuda-bindings finds the library without help."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # cuda-bindings 12.8 has another way

        load_nvidia_dynamic_lib("nvrtc")
    except (ImportError, RuntimeError):
        return False
    return True


def _load_library(directories: Iterable[str]) -> None:
    """Load NVRTC from a package in these directories, if one has it. Then cuda-bindings uses the loaded
    library.

    The library of CUDA 13.0 does not look for its builtins in its own directory, so they are loaded first.
    """
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        for directory in directories:
            for path in Path(directory).glob(f"nvidia/*/lib/{name}"):
                with suppress(OSError):
                    for library in (*path.parent.glob("libnvrtc-builtins.so.*"), path):
                        ctypes.CDLL(str(library))
                    return


def _compiled(nvrtc: Any, option: str, machine_code: bool) -> bytes:
    source = Path(__file__).with_name("copy.cu").read_bytes()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, b"copy.cu", 0, None, None))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, 1, [option.encode()])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ConfigError(f"NVRTC refuses copy.cu with {option}: {log.rstrip(bytes(1)).decode()}")
        of = "CUBIN" if machine_code else "PTX"
        image: bytes = b" " * _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{of}Size")(program))
        _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{of}")(program, image))  # writes into the bytes
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """Return the value of an NVRTC call. Raises `ConfigError` if the call failed."""
    result, *value = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ConfigError(f"NVRTC failed with {result.name}; force another path than the kernel")
    return value[0] if value else None
