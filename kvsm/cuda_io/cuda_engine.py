"""The CUDA engine: transfers as copies on two streams of an NVIDIA GPU.

`StreamCopyEngine` ensures the order of copies (S12). This file implements streams, events and copies on a
GPU. Threads:

=============  ===========================================================================================
the caller's   records the mark of a transfer; plans a small copy and passes it to the driver, or passes a
               large one to its submitter; queries events; in `wait`, polls for 50 us before it sleeps
submitters     one for each direction: plans the descriptors and passes them to the driver, in about half a
               microsecond for each
=============  ===========================================================================================

Needs an NVIDIA GPU, its driver and cuda-bindings (pip install 'kvsm[cuda]'); ROCm and XPU are not supported.
Without cuMemcpyBatchAsync (drivers before CUDA 12.8) each run of blocks takes a separate call. A host pool
that is not page-locked works, several times slower and without the copy kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread, get_ident
from typing import Any

import msgspec

from kvsm.copies.geometry import CopyPlanner
from kvsm.copies.layout import make_layout, tensors_of
from kvsm.copies.streams import StreamCopyEngine
from kvsm.cuda_io import driver
from kvsm.cuda_io.copier import Copier, CopyCalls, PreparedCopy, cached_path_table, log
from kvsm.cuda_io.driver import CudaContext
from kvsm.cuda_io.paths import CopyPath, PathTable
from kvsm.errors import ConfigError, DeviceLost, described
from kvsm.events import Direction
from kvsm.ids import IdArray

SPINS = 50
"""How many times a waiting thread queries an event before it sleeps. A query takes about 1 us, and waking a
thread some 50 us."""


class CudaStatistics(msgspec.Struct, frozen=True):
    """The hardware and the copy paths of a CUDA engine, and how often each path was taken.

    device: name of the GPU.
    driver_version: the CUDA version of the driver, 12080 for 12.8.
    page_locked: whether the host pool is page-locked.
    available: the paths that this GPU, driver and host pool allow.
    transfers: number of transfers by each available path.
    """

    device: str
    driver_version: int
    page_locked: bool
    available: tuple[CopyPath, ...]
    transfers: dict[CopyPath, int]


class CudaEvent:
    """A `StreamEvent`. When this object is freed, a later event reuses its handle; streams that wait for this
    event still wait for its own place."""

    __slots__ = ("_events", "handle")

    def __init__(self, events: _CudaEventPool, handle: int) -> None:
        self._events, self.handle = events, handle

    def done(self) -> bool:
        with self._events.context:
            return driver.event_is_done(self.handle)

    def synchronize(self) -> None:
        with self._events.context:
            for _ in range(SPINS):
                if driver.event_is_done(self.handle):
                    return
            driver.call("cuEventSynchronize", self.handle)

    def seconds_after(self, earlier: CudaEvent) -> float:
        with self._events.context:
            return driver.seconds_between(earlier.handle, self.handle)

    def __del__(self) -> None:
        self._events.free.append(self.handle)


class _CudaEventPool:
    """Events of one kind, created on demand and reused."""

    def __init__(self, context: CudaContext, timed: bool) -> None:
        self.context = context
        self.free: list[int] = []
        self._timed = timed

    def record(self, stream: int) -> CudaEvent:
        """Record an event. The context must be current."""
        try:
            handle = self.free.pop()
        except IndexError:
            handle = driver.create_event(self._timed)
        event = CudaEvent(self, handle)
        driver.record_event(handle, stream)
        return event

    def close(self) -> None:
        while self.free:
            driver.call("cuEventDestroy", self.free.pop())


class CudaStream:
    """A `DeviceStream`: a stream of this engine, or the model's compute stream.

    context: entered for each call. For the engine's own streams it does nothing: only submitters and callers
        with a claim use them, and both have made the GPU's context current.
    """

    __slots__ = ("_context", "_events", "handle")

    def __init__(self, handle: int, events: _CudaEventPool, context: AbstractContextManager[Any]) -> None:
        self.handle, self._events, self._context = handle, events, context

    def record(self) -> CudaEvent:
        with self._context:
            return self._events.record(self.handle)

    def wait(self, event: CudaEvent) -> None:
        with self._context:
            driver.wait_for_event(self.handle, event.handle)


class ThreadSubmitter:
    """A `Submitter`: a thread that runs one call after another, and lends its turn to callers who claim it.

    died: called with the reason if a call has raised.
    prepare: called in the thread first.
    in_caller: entered for a call that its caller runs.
    settle: called when a call has raised, before `died`. It must wait for device work that the call has
        queued, because the engine has no event behind that work.
    """

    def __init__(
        self,
        name: str,
        died: Callable[[str], None],
        prepare: Callable[[], None],
        in_caller: AbstractContextManager[Any],
        settle: Callable[[], None],
    ) -> None:
        self._died, self._prepare, self._in_caller, self._settle = died, prepare, in_caller, settle
        self._queue: SimpleQueue[Callable[[], None] | Event | None] = SimpleQueue()
        self._lock = Lock()
        self._dead = False
        """Whether no more calls run. Guarded by the lock."""
        self._unfinished = 0
        """Number of calls that are queued, claimed or running. Guarded by the lock."""
        self._turn = Lock()
        """Held while a call runs; for a claimed call, from the claim on. Taken before the lock, except by
        `claim`: then no call is unfinished."""
        self._claimant = 0
        """Identity of the thread that has claimed the turn; 0: none has."""
        self._over = Event()
        """Set when the thread has run its last call, and after `died`."""
        # A daemon: a process that ends without closing the engine must not hang behind it.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._dead:
                self._unfinished += 1
                self._queue.put(call)

    def claim(self) -> bool:
        with self._lock:
            if self._dead or self._unfinished:
                return False
            self._unfinished, self._claimant = 1, get_ident()
            self._turn.acquire()
        return True

    def run_claimed(self, call: Callable[[], None]) -> None:
        try:
            with self._in_caller:
                call()
        except BaseException as error:  # of the call, or of a device that is lost
            self._die(f"queuing a copy failed: {described(error)}")
            self._queue.put(None)
            if not isinstance(error, Exception):
                raise
        finally:
            self._claimant = 0
            self._turn.release()
            with self._lock:
                self._unfinished -= 1

    def flush(self) -> None:
        self._end_lost_claim()
        reached = Event()
        with self._lock:
            dead = self._dead
            if not dead:
                self._queue.put(reached)
        (self._over if dead else reached).wait()

    def close(self) -> None:
        self._end_lost_claim()
        with self._lock:
            if not self._dead:
                self._queue.put(None)
        self._thread.join()

    def _end_lost_claim(self) -> None:
        """End this thread's claim if an interrupt (Ctrl-C) came before `run_claimed`. Nothing else would end
        the claim, because the thread has left `submit`."""
        if self._claimant == get_ident():
            self._claimant = 0
            self._die("a caller was interrupted before it queued its copy")
            self._queue.put(None)
            with suppress(RuntimeError):  # interrupted before it had the turn
                self._turn.release()

    def _run(self) -> None:
        reason = ""
        try:
            self._prepare()
            while (call := self._queue.get()) is not None:
                with self._turn:
                    if isinstance(call, Event):
                        call.set()
                        continue
                    if self._dead:
                        break
                    call()
                with self._lock:
                    self._unfinished -= 1
        except BaseException as error:  # passed to `died`, because this thread has no caller
            reason = f"the submitting thread died of {described(error)}"
        self._die(reason)
        self._over.set()
        while not self._queue.empty():  # a flush may wait behind calls that will not run
            call = self._queue.get()
            if isinstance(call, Event):
                call.set()

    def _die(self, reason: str) -> None:
        """Run no more calls. reason: why the submitter failed; empty if it was closed."""
        with self._lock:
            self._dead = True
        if reason:
            log.error("%s", reason)
            with suppress(Exception):
                self._settle()
            self._died(reason)


class CudaDevice:
    """A `StreamDevice`: an NVIDIA GPU with the pools of one rank. Its parameters are those of
    `CudaCopyEngine`."""

    def __init__(
        self,
        tensors: Any,
        host: Any,
        compute: Callable[[], int] | None = None,
        path: CopyPath | None = None,
        path_table: PathTable | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        tensors = tensors_of(tensors)
        self.layout, _places = make_layout(tensors, host, offsets)
        ordinal = _ordinal(tensors)
        self._compute = compute or _current_stream_of(tensors[0])
        self._memory = (tensors, host)
        """References that keep the pools alive while the device accesses them."""
        self._context = CudaContext(ordinal)
        self._marks, self._ends = (
            _CudaEventPool(self._context, timed=False),
            _CudaEventPool(self._context, timed=True),
        )
        self._streams: list[CudaStream] = []
        self._planner = CopyPlanner(self.layout)
        with self._context:
            self._calls = CopyCalls(self._context)
            self._copier = Copier(self._calls, self.layout)
        self._transfers = dict.fromkeys(self._copier.available, 0)
        self._counting = Lock()
        try:
            self._choose = self._chooser(path, path_table)
        except BaseException:
            self.close()
            raise
        self._log_paths([path] if path else self._copier.available)

    @property
    def compute(self) -> CudaStream:
        return CudaStream(self._compute(), self._marks, self._context)

    def new_stream(self, name: str) -> CudaStream:  # noqa: ARG002 (the driver has no names for streams)
        with self._context:
            stream = CudaStream(driver.create_stream(), self._ends, nullcontext())
        self._streams.append(stream)
        return stream

    def new_submitter(self, name: str, died: Callable[[str], None]) -> ThreadSubmitter:
        return ThreadSubmitter(name, died, self._context.make_current, self._context, self._settle)

    def prepare(
        self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray
    ) -> PreparedCopy | None:
        """Choose the path of a copy, and make its descriptors. None: there are no pairs."""
        if not len(device_blocks):
            return None
        plan = self._planner.plan(direction, device_blocks, host_blocks)
        path = self._choose(direction, *plan.shape)
        return self._copier.prepare(path, direction, plan, device_blocks, host_blocks)

    def copy(
        self,
        stream: CudaStream,
        transfer: int,  # noqa: ARG002 (only names the copy on a simulated device)
        direction: Direction,  # noqa: ARG002 (the prepared copy has it)
        prepared: PreparedCopy | None,
    ) -> Any:
        """Queue the copy. Returns the descriptors, or the table that the kernel reads."""
        if prepared is None:
            return None
        with self._counting:
            self._transfers[prepared.path] += 1
        prepared.queue(stream.handle)
        return prepared.keep

    def statistics(self) -> CudaStatistics:
        """Return the statistics of this device."""
        context, copier = self._context, self._copier
        return CudaStatistics(
            context.name,
            context.driver_version,
            copier.page_locked,
            copier.available,
            dict(self._transfers),
        )

    def close(self) -> None:
        with suppress(DeviceLost), self._context:  # on a lost GPU there is nothing to release
            for stream in self._streams:
                driver.call("cuStreamDestroy", stream.handle)
            self._marks.close()
            self._ends.close()
            self._copier.close()
            self._calls.close()
        with suppress(DeviceLost):
            self._context.release()

    def _settle(self) -> None:
        with self._context:
            for stream in self._streams:
                driver.call("cuStreamSynchronize", stream.handle)

    def _chooser(
        self, path: CopyPath | None, path_table: PathTable | None
    ) -> Callable[[Direction, int, int, int], CopyPath]:
        """Return a function that chooses the path of a copy from its direction and shape."""
        available = self._copier.available
        if path is None:
            with self._context:
                path_table = path_table or cached_path_table(self._context, self._calls)
        if path_table is not None and path_table.thread_blocks is not None:
            self._copier.thread_blocks = path_table.thread_blocks.by_direction()
        if path is None:
            assert path_table is not None
            return path_table.only(available).choose
        if path not in available:
            raise ConfigError(f"path {path.value} is asked for: {self._why_not(path)}")
        forced = path
        return lambda *_: forced

    def _why_not(self, path: CopyPath) -> str:
        if path is CopyPath.BATCH:
            return (
                f"the driver has CUDA {_dotted(self._context.driver_version)}, and cuMemcpyBatchAsync came "
                f"with {_dotted(driver.BATCH_VERSION)}; install a newer driver, or use path runs"
            )
        if not self._copier.page_locked:
            return "the host pool is not page-locked, so no kernel can reach it; see driver.register_host"
        return "the copy kernel could not be built; the log says why"

    def _log_paths(self, paths: Sequence[CopyPath]) -> None:
        """Log the paths that copies may take. Warn if batches or page-locking are unavailable."""
        device = f"{self._context.name} (driver {_dotted(self._context.driver_version)})"
        log.info("%s copies by %s", device, ", ".join(path.value for path in paths))
        if CopyPath.BATCH not in self._copier.available:
            log.warning("%s: %s", device, self._why_not(CopyPath.BATCH))
        if not self._copier.page_locked and self.layout.num_host_blocks:
            log.warning("%s: the host pool is not page-locked; copies will be several times slower", device)


class CudaCopyEngine(StreamCopyEngine):
    """A `CopyEngine` on an NVIDIA GPU, between tensors on it and a pool in host memory.

    tensors: the device pool, one tensor or several; a block is one row of each.
    host: the host pool, a numpy array or a torch CPU tensor. Copies are slower if it is not page-locked.
    compute: called for each mark; returns the handle of the CUDA stream on which the model computes. None:
        PyTorch's current stream of the calling thread.
    path: the path that all copies take; None: chosen for each copy by `path_table`.
    path_table: which copy takes which path, and the thread blocks of the kernel. None: measured once for each
        kind of GPU and driver, and cached in a file; if `path` is given, the thread blocks are guessed.
    offsets: where the part of each tensor begins in a row of the host pool (bytes); None: one after another.

    All methods may be called from any thread. Raises `ConfigError` if the pools do not match, or if the
    requirements in the module's docstring are not met.
    """

    def __init__(
        self,
        tensors: Any,
        host: Any,
        compute: Callable[[], int] | None = None,
        path: CopyPath | None = None,
        path_table: PathTable | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        self._cuda = CudaDevice(tensors, host, compute, path, path_table, offsets)
        super().__init__(self._cuda)

    def statistics(self) -> CudaStatistics:
        """Return the hardware and the copy paths, and how often each path was taken."""
        return self._cuda.statistics()


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _ordinal(tensors: Sequence[Any]) -> int:
    """Return the number of the GPU that all tensors are on. Objects that are no torch tensors count as being
    on GPU 0."""
    ordinals = {
        _tensor_ordinal(place, tensor) if hasattr(tensor, "data_ptr") else 0
        for place, tensor in enumerate(tensors)
    }
    if len(ordinals) > 1:
        raise ConfigError(f"the device tensors are on GPUs {sorted(ordinals)}; an engine serves one")
    return ordinals.pop()


def _tensor_ordinal(place: int, tensor: Any) -> int:
    import torch  # installed, as there is a tensor

    kind, is_rocm = tensor.device.type, torch.version.hip is not None
    if kind != "cuda" or is_rocm:
        found = "on ROCm" if is_rocm else f"on {kind}"
        raise ConfigError(
            f"device tensor {place} is {found}; the CUDA copy engine needs an NVIDIA GPU (pools that are "
            "both in host memory are for HostCopyEngine)"
        )
    return int(tensor.device.index)


def _current_stream_of(tensor: Any) -> Callable[[], int]:
    if not hasattr(tensor, "data_ptr"):
        raise ConfigError(
            "give compute, the stream to order copies behind: the device pool is no torch tensor"
        )
    import torch

    device = tensor.device
    return lambda: int(torch.cuda.current_stream(device).cuda_stream)
