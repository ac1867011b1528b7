"""The CUDA driver calls that copies need, as Python functions that raise errors.

Most go through cuda-bindings, which releases the interpreter's lock (GIL) in every call. So a thread that
waits for the device, or for room in a stream's queue, does not stop other threads. These calls use ctypes on
the driver's entry points instead:

==========================  ==========================================================================
call                        why
==========================  ==========================================================================
cuMemcpyBatchAsync          takes the addresses of numpy arrays, so thousands of descriptors need no loop
                            and no Python objects; the GIL is released during the call
cuMemcpy2DAsync             one array of structs describes all rectangles, instead of one object each
cuMemcpyAsync               a loop over plain ints takes half the time of a loop over wrapped ones
cuLaunchKernel              passing its parameters takes a fifth of the time; releases the GIL during the call
events: record, query, and  they take a microsecond, in the thread that serves requests, and keep the GIL: a
pushing the context         thread that releases it gets it back late if another thread computes. This took
                            10 of the median 17 us to submit a transfer
==========================  ==========================================================================

Most calls need a current context in their thread. But PyTorch takes the thread's current context for its
current device, and the threads that call an engine belong to the caller. So `CudaContext` is pushed for each
call and popped again.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.geometry import Fragments, Rectangles
from kvsm.copies.host_pools.host_pool import PageLocking
from kvsm.errors import ConfigError, DeviceLost, KvsmError
from kvsm.events import Direction

BATCH_VERSION = 12080
"""First CUDA version with cuMemcpyBatchAsync. In this version the call has the parameter failIdx."""

_COPY_VERSION = 4000
"""CUDA version of the other copy calls: with 64-bit sizes, and addresses of either host or device."""

_NOT_READY = 600

_STICKY = frozenset(
    (
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    )
)
"""Errors after which every call of this process on the context fails, and queued work does not run."""


class CudaError(KvsmError):
    """An error of a CUDA driver call. `call`: name of the function; `error`: CUDA's name of the error."""

    def __init__(self, call: str, error: str, meaning: str, about: str = "") -> None:
        self.call, self.error = call, error
        super().__init__(f"{call} failed with {error}: {meaning}{f' ({about})' if about else ''}")


@functools.cache
def bindings() -> Any:
    """Return the initialized driver module of cuda-bindings. Raises `ConfigError` if it is missing, or if
    there is no GPU."""
    needs = "the CUDA copy engine needs"
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(f"{needs} cuda-bindings: pip install 'kvsm[cuda]' ({error})") from error
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # its type depends on the version of cuda-bindings
        raise ConfigError(
            f"{needs} the NVIDIA driver (libcuda.so.1), and found none; install it, or give the container "
            f"access to it: docker run --gpus all ({error})"
        ) from error
    if int(code):
        raise ConfigError(
            f"{needs} an NVIDIA GPU, and the driver found none that works: cuInit gave "
            f"{driver.CUresult(code).name}; nvidia-smi and CUDA_VISIBLE_DEVICES tell more"
        )
    return driver


def _error(call: str, code: int, about: str = "") -> KvsmError:
    driver = bindings()
    try:
        name = str(driver.CUresult(code).name)
    except ValueError:  # an error code that this version of cuda-bindings lacks
        name = f"error {code}"
    text = driver.cuGetErrorString(driver.CUresult(code))[1] if name.startswith("CUDA_") else None
    meaning = text.decode() if isinstance(text, bytes) else "no description"
    if name in _STICKY:
        return DeviceLost(
            f"{call} failed with {name}: {meaning}. Nothing runs on this GPU any more for this process, and "
            "what failed may be a kernel of the model; restart the process (CUDA_LAUNCH_BLOCKING=1 or "
            "compute-sanitizer find a kernel at fault, dmesg shows errors of the hardware)"
        )
    return CudaError(call, name, meaning, about)


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function through cuda-bindings. Returns its value, a tuple of several values, or None.
    Raises `CudaError` or `DeviceLost`."""
    code, *values = getattr(bindings(), name)(*arguments)
    if int(code):
        raise _error(name, int(code))
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def _entry(name: str, version: int, prototype: Any) -> Any:
    """Return an entry point of the driver as a ctypes function. version: of CUDA, which decides its
    parameters."""
    address, _status = call("cuGetProcAddress", name.encode(), version, 0)
    if not int(address):
        raise ConfigError(f"the NVIDIA driver has no {name} of CUDA {version // 1000}; install a newer one")
    return prototype(int(address))


class _LockKeepingCalls:
    """Driver calls that keep the GIL. Handles are plain ints."""

    def __init__(self) -> None:
        def function(name: str, version: int, *arguments: Any) -> Any:
            return _entry(name, version, ctypes.PYFUNCTYPE(ctypes.c_int, *arguments))

        handle = ctypes.c_void_p
        self.push = function("cuCtxPushCurrent", 4000, handle)
        self.pop = function("cuCtxPopCurrent", 4000, handle)
        self.record = function("cuEventRecord", 2000, handle, handle)
        self.query = function("cuEventQuery", 2000, handle)
        self.wait = function("cuStreamWaitEvent", 3020, handle, handle, ctypes.c_uint)


@functools.cache
def _quick() -> _LockKeepingCalls:
    return _LockKeepingCalls()


class CudaContext:
    """The primary context of a GPU. PyTorch uses the same context, so both see each other's memory.

    Use `with` to make this context current; the previous one is restored on exit.
    """

    def __init__(self, ordinal: int) -> None:
        found = int(call("cuDeviceGetCount"))
        if not 0 <= ordinal < found:
            raise ConfigError(f"device {ordinal} is asked for, and the driver shows {found} NVIDIA GPUs")
        self._device = call("cuDeviceGet", ordinal)
        self._handle = int(call("cuDevicePrimaryCtxRetain", self._device))
        self._popped = ctypes.c_void_p()
        self.name: str = call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode()
        self.compute_capability = (
            self._attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        )
        self.multiprocessors = self._attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
        self.driver_version = int(call("cuDriverGetVersion"))

    def _attribute(self, name: str) -> int:
        attribute = getattr(bindings().CUdevice_attribute, name)
        return int(call("cuDeviceGetAttribute", attribute, self._device))

    def __enter__(self) -> CudaContext:
        if code := _quick().push(self._handle):
            raise _error("cuCtxPushCurrent", code)
        return self

    def __exit__(self, *_: object) -> None:
        # Popping a lost context works, and the call inside the `with` has already raised its error.
        _quick().pop(ctypes.addressof(self._popped))

    def make_current(self) -> None:
        """Make the context current for the rest of this thread. Only for threads of this engine.

        Also set the thread's capture mode to relaxed: otherwise its calls, such as an allocation, would fail
        while the model's thread captures a CUDA graph, and would make the capture fail, too.
        """
        call("cuCtxSetCurrent", self._handle)
        modes = bindings().CUstreamCaptureMode
        call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)

    def release(self) -> None:
        """Release the reference to the primary context."""
        call("cuDevicePrimaryCtxRelease", self._device)


# Streams and events. A handle is an int; stream 0 is the legacy default stream of the current context.


def create_stream() -> int:
    """Create a non-blocking stream of the current context, with the lowest priority.

    The priority only decides which stream's kernels start first, and PyTorch's streams have the lowest
    priority, too. Copies have no priorities.
    """
    least, _greatest = call("cuCtxGetStreamPriorityRange")
    flags = int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
    return int(call("cuStreamCreateWithPriority", flags, least))


def create_event(timed: bool) -> int:
    """Create an event of the current context. timed: whether it can measure time; a thread that waits for
    such an event sleeps instead of spinning."""
    kinds = bindings().CUevent_flags
    flags = kinds.CU_EVENT_BLOCKING_SYNC if timed else kinds.CU_EVENT_DISABLE_TIMING
    return int(call("cuEventCreate", int(flags)))


def record_event(event: int, stream: int) -> None:
    """Record an event behind everything that is queued on the stream."""
    if code := _quick().record(event, stream):
        raise _error("cuEventRecord", code)


def event_is_done(event: int) -> bool:
    """Whether all work before the event is over. Raises the error of that work, if it failed."""
    code = _quick().query(event)
    if code and code != _NOT_READY:
        raise _error("cuEventQuery", code)
    return bool(code != _NOT_READY)


def seconds_between(earlier: int, later: int) -> float:
    """Return the device time between two timed events (s). Both must be done."""
    return float(call("cuEventElapsedTime", earlier, later)) / 1e3


def wait_for_event(stream: int, event: int) -> None:
    """Make work that is queued on the stream from now on start after the event."""
    if code := _quick().wait(stream, event, 0):
        raise _error("cuStreamWaitEvent", code)


# Memory.


@functools.cache
def _first_context() -> CudaContext:
    return CudaContext(0)


def _some_context() -> AbstractContextManager[Any]:
    """Ensure a current context: the thread's own, or else that of device 0, which is never released."""
    return nullcontext() if int(call("cuCtxGetCurrent")) else _first_context()


def register_host(address: int, size: int) -> None:
    """Page-lock host memory and map it into the address space of every context."""
    flags = bindings()
    portable = flags.CU_MEMHOSTREGISTER_PORTABLE | flags.CU_MEMHOSTREGISTER_DEVICEMAP
    with _some_context():
        call("cuMemHostRegister", address, size, portable)


def unregister_host(address: int) -> None:
    """Undo `register_host`. No queued device work may use the memory."""
    with _some_context():
        call("cuMemHostUnregister", address)


def device_address(host_address: int) -> int | None:
    """Return the device address of a byte of host memory. None if it is not page-locked and mapped."""
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    try:
        return int(call("cuPointerGetAttribute", attribute, host_address))
    except CudaError:
        return None


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread make any call, such as an allocation, while another thread captures a CUDA graph."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def allocate_device(size: int) -> int:
    """Allocate device memory of `size` bytes, and return its address."""
    return int(call("cuMemAlloc", size))


def allocate_host(size: int) -> int:
    """Allocate page-locked host memory of `size` bytes that kernels can read. Returns its address, which is
    the same for host and device."""
    flags = bindings()
    portable = flags.CU_MEMHOSTALLOC_PORTABLE | flags.CU_MEMHOSTALLOC_DEVICEMAP
    return int(call("cuMemHostAlloc", size, portable))


def upload(target: int, source: NDArray[Any]) -> None:
    """Copy an array to device memory, and return when it is there."""
    call("cuMemcpyHtoD", target, source.ctypes.data, source.nbytes)
    # The call may return before the bytes are on the device: they may still be in flight on the default
    # stream, and this engine's streams do not wait for that stream.
    call("cuStreamSynchronize", 0)


CUDA_PAGE_LOCKING = PageLocking(register_host, unregister_host)
"""The functions with which a `HostPool` is page-locked for NVIDIA GPUs."""


# Copies.


class RunsCopy:
    """Copies with cuMemcpyAsync, one call for each fragment: (source, target, bytes)."""

    def __init__(self) -> None:
        handle, size = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, handle, handle, size, handle)
        self._function = _entry("cuMemcpyAsync", _COPY_VERSION, prototype)

    def __call__(self, fragments: Sequence[tuple[int, int, int]], stream: int) -> None:
        function = self._function
        for place, (source, target, size) in enumerate(fragments):
            if code := function(target, source, size, stream):
                raise _error("cuMemcpyAsync", code, f"copy {place} of {len(fragments)}")


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the access order of the sources. The location hints are only for managed memory,
    and stay zero."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class BatchCopy:
    """Copies with cuMemcpyBatchAsync. Raises `ConfigError` if the driver lacks it; see `BATCH_VERSION`.

    The time at which sources are read is part of the order of copies (S12). A store must read them in stream
    order, because compute may write them until the mark that the store's stream waits for. A load reads host
    rows whose store was reported, and which do not change until the load has ended. So the driver may read
    them at any time; only the writes are in stream order.
    """

    def __init__(self) -> None:
        handle, size = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, handle, handle, handle, size, handle, handle, size, handle, handle
        )
        self._function = _entry("cuMemcpyBatchAsync", BATCH_VERSION, prototype)
        orders = bindings().CUmemcpySrcAccessOrder
        self._attributes = {
            Direction.STORE: _BatchAttributes(int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)),
            Direction.LOAD: _BatchAttributes(int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY)),
        }
        self._first = ctypes.c_size_t(0)

    def __call__(self, fragments: Fragments, direction: Direction, stream: int) -> None:
        """Queue these copies, at least one. They may run in any order."""
        sources, targets, sizes = fragments
        failed = ctypes.c_size_t(2**64 - 1)
        code = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes[direction]),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code:
            at, about = failed.value, f"a batch of {len(sizes)} copies"
            if at < len(sizes):
                about = (
                    f"copy {at} of {len(sizes)}: {sizes[at]} bytes from {sources[at]:#x} to {targets[at]:#x}"
                )
            raise _error("cuMemcpyBatchAsync", code, about)


_PITCHED = np.dtype(
    [
        (f"{side}_{field}", kind)
        for side in ("source", "target")
        for field, kind in (
            ("x", "u8"),
            ("y", "u8"),
            ("memory_type", "u8"),  # an enum of 4 bytes, and 4 bytes of padding
            ("host", "u8"),
            ("device", "u8"),
            ("array", "u8"),
            ("pitch", "u8"),
        )
    ]
    + [("width", "u8"), ("height", "u8")]
)
"""The layout of the C struct CUDA_MEMCPY2D on 64-bit Linux."""


class PitchedCopy:
    """Copies with cuMemcpy2DAsync, one call for each rectangle."""

    def __init__(self) -> None:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._function = _entry("cuMemcpy2DAsync", _COPY_VERSION, prototype)
        self._unified = int(bindings().CUmemorytype.CU_MEMORYTYPE_UNIFIED)

    def table(self, rectangles: Rectangles) -> NDArray[Any]:
        """Return the descriptors of these copies."""
        table = np.zeros(len(rectangles.widths), dtype=_PITCHED)
        table["source_memory_type"] = table["target_memory_type"] = self._unified
        table["source_device"], table["source_pitch"] = rectangles.sources, rectangles.source_pitches
        table["target_device"], table["target_pitch"] = rectangles.targets, rectangles.target_pitches
        table["width"], table["height"] = rectangles.widths, rectangles.heights
        return table

    def __call__(self, table: NDArray[Any], stream: int) -> None:
        """Queue copies. The table must not change until they are over."""
        first, function = table.ctypes.data, self._function
        for place in range(len(table)):
            if code := function(first + place * table.itemsize, stream):
                raise _error("cuMemcpy2DAsync", code, f"rectangle {place} of {len(table)}")


class KernelLaunch:
    """Launches one kernel with cuLaunchKernel.

    types: the C types of its parameters, in order.
    """

    def __init__(self, kernel: int, types: Sequence[Any]) -> None:
        handle, unsigned = ctypes.c_void_p, ctypes.c_uint
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, handle, *[unsigned] * 7, handle, handle, handle)
        self._function = _entry("cuLaunchKernel", _COPY_VERSION, prototype)
        self._kernel, self._types = kernel, tuple(types)
        self._pointers = handle * len(self._types)

    def __call__(self, grid: tuple[int, int], parameters: Sequence[int], stream: int) -> None:
        """Queue the kernel. grid: (thread blocks, threads of each). The driver copies the parameters."""
        values = [kind(value) for kind, value in zip(self._types, parameters)]
        pointers = self._pointers(*map(ctypes.addressof, values))
        blocks, threads = grid
        if code := self._function(
            self._kernel, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(pointers), None
        ):
            raise _error("cuLaunchKernel", code)
