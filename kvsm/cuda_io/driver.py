"""The calls of the CUDA driver that copies need, each as a Python function that raises what went wrong.

Most go through cuda-bindings, which drops the interpreter's lock (GIL) in every call; so a thread that waits
for the device, or for room in a stream's queue, stops no other. These go to the driver's entry points by
ctypes instead:

==========================  ==========================================================================
call                        why
==========================  ==========================================================================
cuMemcpyBatchAsync          takes the addresses of numpy arrays, so thousands of descriptors cost no
                            loop and no Python object; the lock is dropped meanwhile
cuMemcpy2DAsync             one array of its structs is made for all rectangles, not an object for each;
cuMemcpyAsync               and a loop over plain ints takes half the time of one over wrapped ones
events: record, query, and  they take a microsecond and are made by the thread that serves requests. One
the context around them     that drops the lock for that long gets it back later, when another thread (the
                            submitter, say) computes meanwhile: of the 17 us that handing over a transfer
                            took in the middle, 10 were spent on that
==========================  ==========================================================================

A thread needs a current context for most calls. The threads that call an engine are not ours, and PyTorch
takes the current context for its current device: so `CudaContext` is pushed for a moment and popped again.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines.geometry import Fragments, Rectangles
from kvsm.copy_engines.host_pool import PageLocking
from kvsm.errors import ConfigError, DeviceLost, KvsmError
from kvsm.events import Direction

BATCH_VERSION = 12080
"""The driver that has cuMemcpyBatchAsync, and the form of it that is called here (that with failIdx)."""

_COPY_VERSION = 4000
"""The forms of the other copies that take all addresses alike, host or device, and 64-bit sizes."""

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
"""After these every call of the process on this context fails, and nothing that was queued runs."""


class CudaError(KvsmError):
    """A call that the CUDA driver refused. Attributes: `call`, `error` (CUDA's name of it)."""

    def __init__(self, call: str, error: str, meaning: str, about: str = "") -> None:
        self.call, self.error = call, error
        super().__init__(f"{call} failed with {error}: {meaning}{f' ({about})' if about else ''}")


@functools.cache
def bindings() -> Any:
    """cuda-bindings' driver module, initialised. Raises `ConfigError` where there is none, or no GPU."""
    needs = "the CUDA copy engine needs"
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(f"{needs} cuda-bindings: pip install 'kvsm[cuda]' ({error})") from error
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # which one depends on the version of cuda-bindings
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
    except ValueError:  # of a driver that is newer than cuda-bindings
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


def _call(name: str, *arguments: Any) -> Any:
    """A call through cuda-bindings; its value, if it has one. Raises `CudaError`, `DeviceLost`."""
    code, *values = getattr(bindings(), name)(*arguments)
    if int(code):
        raise _error(name, int(code))
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def _entry(name: str, version: int, prototype: Any) -> Any:
    """A driver's entry point in the form that `version` of CUDA had, as a ctypes function."""
    address, _status = _call("cuGetProcAddress", name.encode(), version, 0)
    if not int(address):
        raise ConfigError(f"the NVIDIA driver has no {name} of CUDA {version // 1000}; install a newer one")
    return prototype(int(address))


class _LockKeepingCalls:
    """The calls that keep the interpreter's lock; handles are plain ints."""

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
    """The primary context of a GPU: the one that PyTorch uses too, so both see each other's memory.

    As a context manager it is the current one of the thread inside, and what was is again after it.
    """

    def __init__(self, ordinal: int) -> None:
        found = int(_call("cuDeviceGetCount"))
        if ordinal >= found:
            raise ConfigError(f"device {ordinal} is asked for, and the driver shows {found} NVIDIA GPUs")
        self._device = _call("cuDeviceGet", ordinal)
        self._handle = int(_call("cuDevicePrimaryCtxRetain", self._device))
        self._popped = ctypes.c_void_p()
        self.name: str = _call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode()
        self.compute_capability = (
            self._attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            self._attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        )
        self.multiprocessors = self._attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
        self.driver_version = int(_call("cuDriverGetVersion"))

    def _attribute(self, name: str) -> int:
        attribute = getattr(bindings().CUdevice_attribute, name)
        return int(_call("cuDeviceGetAttribute", attribute, self._device))

    def __enter__(self) -> CudaContext:
        if code := _quick().push(self._handle):
            raise _error("cuCtxPushCurrent", code)
        return self

    def __exit__(self, *_: object) -> None:
        # A context that is lost pops too; there is nothing to say that the call inside has not said.
        _quick().pop(ctypes.addressof(self._popped))

    def make_current(self) -> None:
        """For the rest of the thread: it is ours. While the model's thread captures a CUDA graph, others may
        not allocate memory, say, unless they declare that they have nothing to do with it: else both fail."""
        _call("cuCtxSetCurrent", self._handle)
        modes = bindings().CUstreamCaptureMode
        _call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)

    def release(self) -> None:
        _call("cuDevicePrimaryCtxRelease", self._device)


# Streams and events. A handle is an int; of a stream, 0 is the legacy default stream of the current context.


def create_stream() -> int:
    """A stream of the current context that waits for no other by itself. Kernels of streams with a higher
    priority start before its own; but the least priority is also what streams have that ask for none, as
    PyTorch's do, and copies have no priorities."""
    least, _greatest = _call("cuCtxGetStreamPriorityRange")
    flags = int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
    return int(_call("cuStreamCreateWithPriority", flags, least))


def synchronize_stream(stream: int) -> None:
    _call("cuStreamSynchronize", stream)


def destroy_stream(stream: int) -> None:
    _call("cuStreamDestroy", stream)


def create_event(timed: bool) -> int:
    """An event of the current context. A thread that waits for it sleeps: it is one of those that serve."""
    kinds = bindings().CUevent_flags
    flags = kinds.CU_EVENT_BLOCKING_SYNC if timed else kinds.CU_EVENT_DISABLE_TIMING
    return int(_call("cuEventCreate", int(flags)))


def record_event(event: int, stream: int) -> None:
    if code := _quick().record(event, stream):
        raise _error("cuEventRecord", code)


def event_is_done(event: int) -> bool:
    """Whether all that was queued before it is over. Raises also what went wrong with that."""
    code = _quick().query(event)
    if code and code != _NOT_READY:
        raise _error("cuEventQuery", code)
    return bool(code != _NOT_READY)


def synchronize_event(event: int) -> None:
    _call("cuEventSynchronize", event)


def seconds_between(earlier: int, later: int) -> float:
    """Device time between two timed events that are done."""
    return float(_call("cuEventElapsedTime", earlier, later)) / 1e3


def wait_for_event(stream: int, event: int) -> None:
    """Let what is queued on the stream from now on start after the event."""
    if code := _quick().wait(stream, event, 0):
        raise _error("cuStreamWaitEvent", code)


def destroy_event(event: int) -> None:
    _call("cuEventDestroy", event)


# Memory.


@functools.cache
def _first_context() -> CudaContext:
    return CudaContext(0)


def _some_context() -> AbstractContextManager[Any]:
    """The context that the thread has; where it has none, that of device 0, which is then kept."""
    return nullcontext() if int(_call("cuCtxGetCurrent")) else _first_context()


def register_host(address: int, size: int) -> None:
    """Page-lock host memory and map it into the address space of every context."""
    flags = bindings()
    portable = flags.CU_MEMHOSTREGISTER_PORTABLE | flags.CU_MEMHOSTREGISTER_DEVICEMAP
    with _some_context():
        _call("cuMemHostRegister", address, size, portable)


def unregister_host(address: int) -> None:
    """Undo `register_host`. Nothing on the device may use the memory any more."""
    with _some_context():
        _call("cuMemHostUnregister", address)


def device_address(host_address: int) -> int | None:
    """Where a kernel finds this byte of host memory; None if it is not page-locked and mapped."""
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    try:
        return int(_call("cuPointerGetAttribute", attribute, host_address))
    except CudaError:
        return None


def allocate_device(size: int) -> int:
    return int(_call("cuMemAlloc", size))


def free_device(address: int) -> None:
    _call("cuMemFree", address)


def allocate_host(size: int) -> int:
    """Page-locked host memory that kernels can read: its address for host and device."""
    flags = bindings()
    portable = flags.CU_MEMHOSTALLOC_PORTABLE | flags.CU_MEMHOSTALLOC_DEVICEMAP
    return int(_call("cuMemHostAlloc", size, portable))


def free_host(address: int) -> None:
    _call("cuMemFreeHost", address)


def upload(target: int, source: NDArray[Any]) -> None:
    """Copy an array to device memory, and return when it is there."""
    _call("cuMemcpyHtoD", target, source.ctypes.data, source.nbytes)
    # The call may return when it has read the array. Its bytes are then under way on the default stream, and
    # our streams do not wait for that one.
    synchronize_stream(0)


CUDA_PAGE_LOCKING = PageLocking(register_host, unregister_host)
"""How a `HostPool` is page-locked for NVIDIA GPUs."""


# Copies.


class RunsCopy:
    """cuMemcpyAsync, once for each fragment."""

    def __init__(self) -> None:
        handle, size = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, handle, handle, size, handle)
        self._function = _entry("cuMemcpyAsync", _COPY_VERSION, prototype)

    def __call__(self, fragments: Fragments, stream: int) -> None:
        function = self._function
        rows = zip(*(column.tolist() for column in fragments))
        for place, (source, target, size) in enumerate(rows):
            if code := function(target, source, size, stream):
                raise _error("cuMemcpyAsync", code, f"copy {place} of {len(fragments.sizes)}")


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which sources are read; hints of place are for managed memory only."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class BatchCopy:
    """cuMemcpyBatchAsync. Raises `ConfigError` where the driver has none; see `BATCH_VERSION`.

    The order in which sources are read is part of S12. A store must read its sources in stream order: compute
    writes them until the mark that its stream waits for. A load reads host rows that have been there since
    their store was reported, and stay till its own end; so it may read them as early as the driver likes,
    and only its writes wait.
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
        """Queue these copies, at least one, in no order among themselves."""
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
            ("memory_type", "u8"),  # an enum of 4 bytes, and 4 that align the next
            ("host", "u8"),
            ("device", "u8"),
            ("array", "u8"),
            ("pitch", "u8"),
        )
    ]
    + [("width", "u8"), ("height", "u8")]
)
"""CUDA_MEMCPY2D as 64-bit Linux lays it out."""


class PitchedCopy:
    """cuMemcpy2DAsync, once for each rectangle."""

    def __init__(self) -> None:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._function = _entry("cuMemcpy2DAsync", _COPY_VERSION, prototype)
        self._unified = int(bindings().CUmemorytype.CU_MEMORYTYPE_UNIFIED)

    def __call__(self, rectangles: Rectangles, stream: int) -> NDArray[Any]:
        """Queue these copies. The answer is the array that describes them to the driver."""
        table = np.zeros(len(rectangles.widths), dtype=_PITCHED)
        table["source_memory_type"] = table["target_memory_type"] = self._unified
        table["source_device"], table["source_pitch"] = rectangles.sources, rectangles.source_pitches
        table["target_device"], table["target_pitch"] = rectangles.targets, rectangles.target_pitches
        table["width"], table["height"] = rectangles.widths, rectangles.heights
        first, function = table.ctypes.data, self._function
        for place in range(len(table)):
            if code := function(first + place * table.itemsize, stream):
                raise _error("cuMemcpy2DAsync", code, f"rectangle {place} of {len(table)}")
        return table


# Kernels.


def load_module(image: bytes) -> int:
    """Load a cubin, or PTX, into the current context."""
    return int(_call("cuModuleLoadData", image))


def unload_module(module: int) -> None:
    _call("cuModuleUnload", module)


def find_kernel(module: int, name: str) -> int:
    return int(_call("cuModuleGetFunction", module, name.encode()))


def launch(
    kernel: int, blocks: int, threads: int, stream: int, values: tuple[Any, ...], types: tuple[Any, ...]
) -> None:
    """Queue a kernel of one dimension. types: the ctypes type of each of its parameters."""
    _call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0)
