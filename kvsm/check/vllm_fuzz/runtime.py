"""Streams, events and copies as a worker of vLLM uses them, on a simulated device.

A worker of vLLM creates streams, lets them wait for events, and queues copies between addresses. Each rank of
the engine has a `Runtime`. While a rank acts, the classes `Stream` and `Event` belong to its runtime, as
CUDA's belong to the current device of a thread. A copy is up to `PIECES` steps of the device, which run only
when an action says so, or when a call waits for them. The race detector records every access.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from kvsm.check.worlds.check_counts import count_case
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.simulated import PIECES, SimulatedDevice, SimulatedEvent, SimulatedStream
from kvsm.events import Direction
from kvsm.ids import IdArray, listed
from kvsm.properties import Property

_ELAPSED_S = 1e-3
"""The time between any two events (s)."""


class Runtime:
    """The device of one rank.

    memory: its device blocks, one row each.
    """

    def __init__(self, memory: Any) -> None:
        rows = memory.numpy()
        self._first, self._row_bytes = int(rows.ctypes.data), rows.shape[1]
        self._end = self._first + rows.nbytes
        # A chooser of 0 runs compute first, and copies only if no compute can run.
        self.device = SimulatedDevice(rows, np.zeros((1, rows.shape[1]), rows.dtype), lambda _count: 0)
        self._current = self.device.compute
        self.has_stored = False
        """Whether a copy from the device was queued."""

    @property
    def current_stream(self) -> SimulatedStream:
        """The stream on which work is queued now: compute, unless `using` says otherwise."""
        return self._current

    @contextmanager
    def acting(self) -> Iterator[None]:
        """A `with` block in which new streams, events and copies belong to this runtime."""
        global _acting
        before, _acting = _acting, self
        try:
            yield
        finally:
            _acting = before

    @contextmanager
    def using(self, stream: SimulatedStream) -> Iterator[None]:
        """A `with` block in which this is the current stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def copy(self, stream: SimulatedStream, name: str, copies: Sequence[tuple[int, int, int]]) -> None:
        """Queue copies, each (source address, destination address, bytes)."""
        cuts = [len(copies) * piece // PIECES for piece in range(PIECES + 1)]
        for first, last in pairwise(cuts):
            if first < last:
                self._launch(stream, name, copies[first:last])

    def _launch(self, stream: SimulatedStream, name: str, copies: Sequence[tuple[int, int, int]]) -> None:
        reads = [source for source, _, _ in copies]
        writes = [destination for _, destination, _ in copies]

        def move() -> None:
            for source, destination, size in copies:
                ctypes.memmove(destination, source, size)

        count_case(Property.COPY_ORDER, "copies beside the compute of steps")
        self.has_stored |= not all(map(self._is_device, writes))
        stream.launch(
            name,
            [self._block(address) for address in reads if self._is_device(address)],
            [self._block(address) for address in writes if self._is_device(address)],
            move,
            (
                [address for address in reads if not self._is_device(address)],
                [address for address in writes if not self._is_device(address)],
            ),
        )

    def _is_device(self, address: int) -> bool:
        return bool(self._first <= address < self._end)

    def _block(self, address: int) -> int:
        return int((address - self._first) // self._row_bytes)


_acting: Runtime | None = None


def acting() -> Runtime:
    """The runtime of the rank that acts now."""
    assert _acting is not None, "a stream or an event was created while no rank acts"
    return _acting


class Event:
    """Replaces `torch.Event`."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.recorded: SimulatedEvent | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after the queued work."""
        self.recorded = _simulated(stream).record()

    def query(self) -> bool:
        """Whether the event is done, or was never recorded."""
        return self.recorded is None or self.recorded.done()

    def synchronize(self) -> None:
        """Run the device until the event is done."""
        if self.recorded is not None:
            self.recorded.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        if self.recorded is not None:
            _simulated(stream).wait(self.recorded)

    def elapsed_time(self, _end: Event) -> float:
        """The time to another event (ms); the same for all events."""
        return _ELAPSED_S * 1e3


class Stream:
    """Replaces `torch.cuda.Stream`, and the `Stream` of vLLM's platforms."""

    def __init__(self, *_args: object, simulated: SimulatedStream | None = None, **_options: object) -> None:
        device = acting().device
        self.simulated = device.new_stream("a stream of the connector") if simulated is None else simulated

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -1

    def wait_stream(self, other: Stream) -> None:
        """Let work that is queued from now on wait for all work that is queued in the other stream."""
        self.simulated.wait(other.simulated.record())

    def wait_event(self, event: Event) -> None:
        """Let work that is queued from now on wait for this event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the queued work, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Run the device until all queued work of the stream is done."""
        self.simulated.record().synchronize()


def current_stream(*_device: object) -> Stream:
    """Replaces `torch.cuda.current_stream`."""
    return Stream(simulated=acting().current_stream)


@contextmanager
def stream(one: Stream) -> Iterator[None]:
    """Replaces `torch.cuda.stream`."""
    with acting().using(one.simulated):
        yield


def _simulated(stream: Stream | None) -> SimulatedStream:
    return acting().current_stream if stream is None else stream.simulated


class PoolDevice:
    """A `StreamDevice` for kvsm's own copy engine: the device of a rank, with its own host pool.

    number: the number of the pool on this rank. It keeps the host blocks of different pools apart.
    """

    def __init__(self, runtime: Runtime, tensors: Any, host: Any, number: int) -> None:
        self._runtime, self._pools = runtime, NumpyPools(tensors, host)
        self._first = -(number + 1) << 32
        self.new_stream = runtime.device.new_stream
        self.new_submitter = runtime.device.new_submitter

    @property
    def layout(self) -> MemoryLayout:
        return self._pools.layout

    @property
    def compute(self) -> SimulatedStream:
        return self._runtime.device.compute

    def prepare(
        self,
        direction: Direction,  # noqa: ARG002 (a simulated copy needs no descriptors)
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> list[tuple[int, int]]:
        return list(zip(listed(device_blocks), listed(host_blocks)))

    def copy(
        self, stream: SimulatedStream, transfer: int, direction: Direction, prepared: list[tuple[int, int]]
    ) -> object:
        pairs = prepared
        cuts = [len(pairs) * piece // PIECES for piece in range(PIECES + 1)]
        for first, last in pairwise(cuts):
            if first < last:
                self._launch(stream, transfer, direction, pairs[first:last])
        return None

    def _launch(
        self, stream: SimulatedStream, transfer: int, direction: Direction, pairs: list[tuple[int, int]]
    ) -> None:
        device, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
        host = [self._first + slot for slot in slots]
        is_load = direction is Direction.LOAD
        count_case(Property.COPY_ORDER, "copies beside the compute of steps")
        self._runtime.has_stored |= not is_load
        stream.launch(
            f"{direction.name.lower()} {transfer}",
            () if is_load else device,
            device if is_load else (),
            partial(self._pools.copy, direction, np.array(device, np.int64), np.array(slots, np.int64)),
            (host, ()) if is_load else ((), host),
        )

    def close(self) -> None:
        """Do nothing: the rank still uses the device."""
