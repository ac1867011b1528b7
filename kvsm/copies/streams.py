"""The copy engine for devices with streams and events: a GPU, and the simulated device.

This file decides the order of copies and compute, and how transfers end. The device decides how bytes are
copied. The same code runs on a GPU and under the race detector of `simulated.py`. Five orders make the order
of copies (S12):

===========================  =======================================  =================================
what                         happens after                            because
===========================  =======================================  =================================
a store reads a block        compute wrote it                         the store stream waits for a mark
                                                                      that was made after that compute
                                                                      was queued
a load writes a block        compute of its former owner read it      the load stream waits for the mark
compute reads a block        its load                                 the load's result was polled before
                                                                      that compute was queued, or compute
                                                                      was held (`hold_compute`)
compute overwrites a block   its store read it                        likewise; the ledger's lease forbids
                                                                      it until then
a transfer touches a slot    the slot's previous transfer             likewise; the ledger's block states
                                                                      forbid it until then
===========================  =======================================  =================================

Other systems start a store when the host sees the *end of the step* (B02), or start a load as soon as its
target is free in the host's records (B03). Both are wrong on a device that is a step behind its host.

Queuing a copy on a device takes time that grows with its pieces. So a submitter, not the caller, queues
large copies, one after another. Queuing a small copy takes less time than waking a thread, so the caller
queues it, unless an earlier copy of its direction is not queued yet: copies of a direction keep their order.
Each direction has its own submitter: a load, for which a request waits, does not wait for the descriptors of
a large store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol

from kvsm.copies.copy_engine import CopyResult, check_accepted
from kvsm.copies.geometry import joined
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.pairs import checked_pairs
from kvsm.core.plan import TransferJob
from kvsm.errors import DeviceLost, TransferFailed, described
from kvsm.events import Direction
from kvsm.ids import IdArray, count

DIRECT_PIECES = 256
"""Most pieces of a copy that the caller of `submit` queues itself."""


class StreamEvent(Protocol):
    """A point in a stream. It is done when all work that was queued before it is over."""

    def done(self) -> bool:
        """Whether the event is done. Raises `DeviceLost`, or the error of a copy right before the event."""

    def synchronize(self) -> None:
        """Block until the event is done. Raises as `done` does."""

    def seconds_after(self, earlier: Any) -> float:
        """Return the device time since an earlier event of this stream (s). Both must be done."""


class DeviceStream(Protocol):
    """A queue of work that the device does in order."""

    def record(self) -> StreamEvent:
        """Return a new event behind all work queued so far."""

    def wait(self, event: Any) -> None:
        """Make work that is queued from now on start after the event. Returns at once."""


class Submitter(Protocol):
    """Runs calls one at a time, in the order of `put` and `claim`: calls of `put` outside the calling thread,
    claimed calls in it."""

    def put(self, call: Callable[[], None]) -> None:
        """Queue the call. Never waits."""

    def claim(self) -> bool:
        """Claim the right to run the next call in this thread, unless an earlier call is queued or running.
        Returns whether it was claimed. Then the caller must use `run_claimed`; queued calls wait for it."""

    def run_claimed(self, call: Callable[[], None]) -> None:
        """Run the call in this thread, after a claim. If the call raises, the submitter stops by itself."""

    def flush(self) -> None:
        """Return when each queued call has run, or never will because the submitter died."""

    def close(self) -> None:
        """Run all queued calls, then stop. Idempotent."""


class StreamDevice(Protocol):
    """A device with streams, which copies between the two pools of one rank."""

    @property
    def layout(self) -> MemoryLayout:
        """Where the blocks of both pools are."""

    @property
    def compute(self) -> DeviceStream:
        """The stream on which the LLM engine currently computes."""

    def new_stream(self, name: str) -> DeviceStream:
        """Return a new stream with a lower priority than compute."""

    def new_submitter(self, name: str, died: Callable[[str], None]) -> Submitter:
        """Return a new submitter. died: called with the reason if the submitter stops by itself."""

    def prepare(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> Any:
        """Plan the copy of these checked pairs, and make its descriptors. Queues nothing."""

    def copy(self, stream: Any, transfer: int, direction: Direction, prepared: Any) -> Any:
        """Queue on `stream` a copy that `prepare` has planned.

        Returns an object that owns the memory which the device still reads, such as the ids. The engine keeps
        this object until the copy is over (B37). Raises if the device refuses; a part of the copy may be
        queued then.
        """

    def close(self) -> None:
        """Release the resources of the device. No work is queued, and none will be."""


@dataclass(slots=True, eq=False)
class _StreamTransfer:
    """A live transfer.

    after: the mark behind which it runs.
    begin, end: events right before and after its copy; None until they are recorded. The copy is planned
        before `begin`.
    ended: whether it has a result.
    keep: owns the memory that the device reads during the copy.
    """

    job: TransferJob
    after: StreamEvent
    begin: StreamEvent | None = None
    end: StreamEvent | None = None
    ended: bool = False
    error: str = ""
    keep: Any = None


class StreamCopyEngine:
    """A `CopyEngine` over a device with streams. All methods may be called from any thread.

    Closing the engine closes the device.
    """

    def __init__(self, device: StreamDevice) -> None:
        self._device = device
        self._pieces_of_block = len(joined(device.layout).tensors)
        self._streams = {way: device.new_stream(f"kvsm {way.name.lower()}") for way in Direction}
        self._lock = Lock()
        self._live: dict[int, _StreamTransfer] = {}
        self._issued: dict[Direction, deque[_StreamTransfer]] = {way: deque() for way in Direction}
        """Transfers queued on the device and not over yet, oldest first. A stream ends them in this order."""
        self._finished: list[CopyResult] = []
        self._closed = self._device_closed = False
        self._closing = Lock()
        self._broken = ""
        self._submitters = {
            way: device.new_submitter(f"kvsm {way.name.lower()}", partial(self._submitter_died, way))
            for way in Direction
        }

    @property
    def num_device_blocks(self) -> int:
        return self._device.layout.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._device.layout.num_host_blocks

    def mark(self) -> StreamEvent:
        return self._device.compute.record()

    def submit(self, job: TransferJob, after: Any = None) -> None:
        with self._lock:
            check_accepted(job.transfer, self._live, self._broken, self._closed)
            transfer = _StreamTransfer(job, self._own_mark(job) if after is None else after)
            is_small = self._is_small(job)  # first: it may raise
            self._live[job.transfer] = transfer
            submitter, issue = self._submitters[job.direction], partial(self._issue, transfer)
            is_claimed = is_small and submitter.claim()
            if not is_claimed:
                submitter.put(issue)
        if is_claimed:
            submitter.run_claimed(issue)

    def hold_compute(self, transfers: Iterable[int]) -> None:
        # Only wait for recorded events: a device treats an unrecorded event as done.
        compute = self._device.compute
        with suppress(DeviceLost):  # a lost device runs no compute, and the transfers end as bad
            for transfer in self._issued_among(transfers):
                if transfer.end is not None:
                    compute.wait(transfer.end)

    def poll(self) -> list[CopyResult]:
        with self._lock:
            self._collect()
            finished, self._finished = self._finished, []
            for result in finished:
                del self._live[result.transfer]
        return finished

    def wait(self, transfers: Iterable[int]) -> None:
        for transfer in self._issued_among(transfers):
            if transfer.end is None or transfer.ended:
                continue
            try:
                transfer.end.synchronize()
            except Exception:
                with self._lock:
                    self._collect()
                if not transfer.ended:  # the error belongs to no transfer, so no result reports it
                    raise
        with self._lock:
            self._collect()

    def drain(self) -> None:
        self.wait(list(self._live))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        # A second call also waits, and finishes the close if the first call was interrupted (Ctrl-C).
        self.drain()
        with self._closing:
            for submitter in self._submitters.values():
                submitter.close()
            if not self._device_closed:
                self._device_closed = True
                self._device.close()

    def _is_small(self, job: TransferJob) -> bool:
        """Whether queuing the copy takes its caller less time than waking a thread."""
        return count(job.host_blocks) * self._pieces_of_block <= DIRECT_PIECES

    def _own_mark(self, job: TransferJob) -> StreamEvent:
        """Return a new mark for a job. Raises `TransferFailed`, as a transfer cannot start without a mark."""
        try:
            return self.mark()
        except Exception as error:
            if isinstance(error, DeviceLost):
                self._break(str(error))
            raise TransferFailed(f"transfer {job.transfer}: {described(error)}; make a new engine") from error

    def _issued_among(self, transfers: Iterable[int]) -> list[_StreamTransfer]:
        """Return the live transfers among these, once the submitters have queued them: each has an `end`
        event, or has ended."""
        with self._lock:
            named = [self._live[transfer] for transfer in transfers if transfer in self._live]
        for direction in {transfer.job.direction: None for transfer in named if transfer.end is None}:
            self._submitters[direction].flush()
        return named

    def _issue(self, transfer: _StreamTransfer) -> None:
        """Queue a transfer on the device. Runs in the submitter, or in the caller after a claim."""
        job, device, stream = transfer.job, self._device, self._streams[transfer.job.direction]
        interrupt = None
        try:
            pairs = checked_pairs(job, self.num_device_blocks, self.num_host_blocks)
            prepared = device.prepare(job.direction, *pairs)
            stream.wait(transfer.after)
            transfer.begin = stream.record()
            transfer.keep = device.copy(stream, job.transfer, job.direction, prepared)
        except BaseException as error:  # whatever it is, the transfer must end
            transfer.error = described(error)
            interrupt = None if isinstance(error, Exception) else error
        # Also after a refused copy: a queued part of it touches memory until this event.
        try:
            end = stream.record()
        except DeviceLost as error:
            with self._lock:
                self._break(str(error))
        else:
            with self._lock:
                transfer.end = end
                if not transfer.ended:
                    self._issued[job.direction].append(transfer)
        if interrupt is not None:  # Ctrl-C, in a caller
            raise interrupt

    def _collect(self) -> None:
        """End the transfers whose copies are over."""
        for issued in self._issued.values():
            while issued and self._is_over(issued[0]):
                self._end(issued.popleft())

    def _is_over(self, transfer: _StreamTransfer) -> bool:
        assert transfer.end is not None
        try:
            return transfer.end.done()
        except DeviceLost as error:
            self._break(str(error))
            return False
        except Exception as error:
            transfer.error = transfer.error or described(error)
            return True

    def _end(self, transfer: _StreamTransfer) -> None:
        job, good, lasted = transfer.job, not transfer.error, None
        if good and transfer.begin is not None and transfer.end is not None:
            # A copy is good without its time. The host cannot tell when it began, so `began` stays None.
            with suppress(Exception):
                lasted = transfer.end.seconds_after(transfer.begin) or None  # a simulated device has no clock
        copied = count(job.host_blocks) * self._device.layout.block_bytes if good else 0
        transfer.ended, transfer.keep = True, None
        ended = job.transfer, job.direction, good, transfer.error
        self._finished.append(CopyResult(*ended, copied, lasted or 0.0, None, lasted))

    def _submitter_died(self, direction: Direction, reason: str) -> None:
        """Fail the transfers of this direction that are not queued on the device yet. Queued ones still end
        by themselves."""
        with self._lock:
            self._broken = self._broken or reason
            live = self._live.values()
            self._fail([each for each in live if each.job.direction is direction and each.end is None])

    def _break(self, reason: str) -> None:
        """Fail all transfers: the device is lost, and touches no memory any more."""
        self._broken = reason
        for issued in self._issued.values():
            issued.clear()
        self._fail(self._live.values())

    def _fail(self, transfers: Iterable[_StreamTransfer]) -> None:
        for transfer in transfers:
            if not transfer.ended:
                transfer.error = transfer.error or self._broken
                self._end(transfer)
