"""The engine of devices that have streams and events: a GPU, and the device that simulates one.

This file decides what happens after what, and how transfers end. How bytes move is up to the device. The same
lines run on a GPU and under the race detector of `simulated.py`. Five orders make the order of copies (S12):

===========================  =======================================  =================================
what                         happens after                            because
===========================  =======================================  =================================
a store reads a block        compute wrote it                         the store stream waits for a mark
                                                                      that was made after that compute
                                                                      was queued
a load writes a block        compute of its former owner read it      the load stream waits for the mark
compute reads a block        its load                                 the load was polled before that
                                                                      compute was queued, or compute was
                                                                      held (`hold_compute`)
compute overwrites a block   its store read it                        likewise: the lease of the ledger
a transfer touches a slot    the transfer that had it before          likewise: the states of the ledger
===========================  =======================================  =================================

Other systems order a store behind the *end of the step* on the host's books (B02), or start a load as soon as
its target was free there (B03). Both are wrong on a device that is a step behind its host.

Handing a copy to a device takes time that grows with its blocks, so the caller does not do it. A submitter
does, one transfer after another. Each direction has its own submitter: a load, for which a request waits,
does not stand behind the descriptors of a large store.
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
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.pairs import checked_pairs
from kvsm.core.plan import TransferJob
from kvsm.errors import DeviceLost, TransferFailed, described
from kvsm.events import Direction
from kvsm.ids import IdArray, count


class StreamEvent(Protocol):
    """A place in a stream. It is done when everything that was queued before it is over."""

    def done(self) -> bool:
        """Whether it is done. Raises `DeviceLost`, or the error of a copy right before it."""

    def synchronize(self) -> None:
        """Block until it is done. Raises as `done` does."""

    def seconds_after(self, earlier: Any) -> float:
        """Device time between two events of one stream that are done."""


class DeviceStream(Protocol):
    """A queue of work that the device does in order."""

    def record(self) -> StreamEvent:
        """A new event behind all that is queued so far."""

    def wait(self, event: Any) -> None:
        """Make work that is queued from now on start after the event. Returns at once."""


class Submitter(Protocol):
    """Runs calls one after another, in the order in which they were put, beside the thread that puts them."""

    def put(self, call: Callable[[], None]) -> None:
        """Run this later. Never waits."""

    def flush(self) -> None:
        """Return when each call that was put before has run, or never will."""

    def close(self) -> None:
        """Run what was put, then nothing more. Idempotent."""


class StreamDevice(Protocol):
    """A device, and the two pools of one rank between which it copies."""

    @property
    def layout(self) -> MemoryLayout:
        """Where the blocks of both pools are."""

    @property
    def compute(self) -> DeviceStream:
        """The stream on which the engine computes now."""

    def new_stream(self, name: str) -> DeviceStream:
        """A stream that gives way to compute."""

    def new_submitter(self, name: str, died: Callable[[str], None]) -> Submitter:
        """What hands copies to the device. died: called with the reason if it ever stops by itself."""

    def copy(
        self,
        stream: Any,
        transfer: int,
        direction: Direction,
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> Any:
        """Queue the copy of these checked pairs.

        Returns what the device still reads after the call; the engine keeps it until the copy is over (B37).
        Raises if the device refuses. A part of the copy may be queued then.
        """

    def close(self) -> None:
        """Give back what the device holds. Nothing is queued any more."""


@dataclass(slots=True, eq=False)
class _StreamTransfer:
    """A live transfer. `end` is set once it was issued; `keep` is what the device reads meanwhile."""

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
        self._streams = {one: device.new_stream(f"kvsm {one.name.lower()}") for one in Direction}
        self._lock = Lock()
        self._live: dict[int, _StreamTransfer] = {}
        self._issued: dict[Direction, deque[_StreamTransfer]] = {one: deque() for one in Direction}
        """Handed to the device and not over yet, oldest first: a stream ends them in this order."""
        self._finished: list[CopyResult] = []
        self._closed = self._device_closed = False
        self._closing = Lock()
        self._broken = ""
        self._submitters = {
            one: device.new_submitter(f"kvsm {one.name.lower()}", partial(self._submitter_died, one))
            for one in Direction
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
            self._live[job.transfer] = transfer
            self._submitters[job.direction].put(partial(self._issue, transfer))

    def hold_compute(self, transfers: Iterable[int]) -> None:
        # A device takes an event that is not recorded yet for done, so it cannot wait for one.
        compute = self._device.compute
        with suppress(DeviceLost):  # no compute is left to be held, and the transfers end as bad
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
                if not transfer.ended:  # the error is not the transfer's own, and nobody has heard of it
                    raise
        with self._lock:
            self._collect()

    def drain(self) -> None:
        self.wait(list(self._live))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        # A second caller waits as the first does, and finishes the close if that one was interrupted
        # (Ctrl-C).
        self.drain()
        with self._closing:
            for submitter in self._submitters.values():
                submitter.close()
            if not self._device_closed:
                self._device_closed = True
                self._device.close()

    def _own_mark(self, job: TransferJob) -> StreamEvent:
        """A new mark. A transfer cannot start without one: raises `TransferFailed`."""
        try:
            return self.mark()
        except Exception as error:
            if isinstance(error, DeviceLost):
                self._break(str(error))
            raise TransferFailed(f"transfer {job.transfer}: {described(error)}; make a new engine") from error

    def _issued_among(self, transfers: Iterable[int]) -> list[_StreamTransfer]:
        """The live ones among these, once each has its end recorded or is over."""
        with self._lock:
            named = [self._live[one] for one in transfers if one in self._live]
        for direction in {transfer.job.direction: None for transfer in named if transfer.end is None}:
            self._submitters[direction].flush()
        return named

    def _issue(self, transfer: _StreamTransfer) -> None:
        """Hand a transfer to the device. The submitter runs this."""
        job, device, stream = transfer.job, self._device, self._streams[transfer.job.direction]
        try:
            pairs = checked_pairs(job, self.num_device_blocks, self.num_host_blocks)
            stream.wait(transfer.after)
            transfer.begin = stream.record()
            transfer.keep = device.copy(stream, job.transfer, job.direction, *pairs)
        except BaseException as error:  # whatever it is, the transfer must end and the submitter must live
            transfer.error = described(error)
        # Also behind a refused copy: a part of it may be queued, and touches memory until then.
        try:
            end = stream.record()
        except DeviceLost as error:
            with self._lock:
                self._break(str(error))
            return
        with self._lock:
            transfer.end = end
            if not transfer.ended:
                self._issued[job.direction].append(transfer)

    def _collect(self) -> None:
        """End what the device has done."""
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
            # A time that cannot be measured does not make the copy bad. The host does not know when it began.
            with suppress(Exception):
                lasted = transfer.end.seconds_after(transfer.begin) or None  # a simulated device has no clock
        copied = count(job.host_blocks) * self._device.layout.block_bytes if good else 0
        transfer.ended, transfer.keep = True, None
        ended = job.transfer, job.direction, good, transfer.error
        self._finished.append(CopyResult(*ended, copied, lasted or 0.0, None, lasted))

    def _submitter_died(self, direction: Direction, reason: str) -> None:
        """What the device already has still ends by itself. What this submitter did not hand over never
        will."""
        with self._lock:
            self._broken = self._broken or reason
            live = self._live.values()
            self._fail([one for one in live if one.job.direction is direction and one.end is None])

    def _break(self, reason: str) -> None:
        """The device is gone, and touches nothing any more."""
        self._broken = reason
        for issued in self._issued.values():
            issued.clear()
        self._fail(self._live.values())

    def _fail(self, transfers: Iterable[_StreamTransfer]) -> None:
        for transfer in transfers:
            if not transfer.ended:
                transfer.error = transfer.error or self._broken
                self._end(transfer)
