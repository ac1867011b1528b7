"""All state of a simulated device and its engine that decides their future, as one plain value.

Two devices and engines with equal values have the same future behaviour. What is omitted or replaced, and
why:

- ids of transfers and events are replaced by their position, because they are only compared for equality;
- a vector clock matters only by the accesses that it covers. Accesses that were made or are queued are
  compared with all existing clocks: those of actors, of queued work, and of events on which some work still
  waits. Any future clock is a union of these. So an access that all of them cover cannot race any more, and
  is omitted;
- which actor made an access is omitted: a later access of the same actor replaces it, and covers everything
  that it covered;
- the time at which a copy began is omitted: it is only used for statistics.

This file reads private attributes of the device and the engine, because no other code needs all of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsm.copies.races import Clock, ClockedOperation
from kvsm.copies.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream
from kvsm.copies.streams import StreamCopyEngine

Value = tuple[Any, ...]
"""A nested tuple of numbers and strings."""


def value_of(device: SimulatedDevice, engine: StreamCopyEngine, mark: SimulatedEvent | None = None) -> Value:
    """The state of a device and its engine, without the bytes in memory and without the actions of kernels.

    mark: a mark that the caller may still pass to `submit`; None if there is none.
    """
    return _StateReading(device, engine).value(mark)


class _StateReading:
    """A walk over all state in a fixed order. It numbers events, and collects clocks and queued work."""

    def __init__(self, device: SimulatedDevice, engine: StreamCopyEngine) -> None:
        self._device, self._engine = device, engine
        self._ranks = {transfer: rank for rank, transfer in enumerate(engine._live)}
        self._events: dict[SimulatedEvent, int] = {}
        self._clocks: list[Clock] = [device.acting.clock]
        self._queued: list[ClockedOperation] = []

    def value(self, mark: SimulatedEvent | None) -> Value:
        kept = -1 if mark is None else self._name(mark)
        submitters = tuple(self._submitter(one) for one in self._device.submitters)
        streams = tuple(self._stream(one) for one in self._device._streams)
        transfers = tuple(self._transfer(one) for one in self._engine._live.values())
        finished = tuple((self._ranks[one.transfer], one.good) for one in self._engine._finished)
        # Last, when all events are numbered and all clocks are collected.
        events = tuple((one.is_recorded, one.error is not None) for one in self._events)
        return kept, submitters, streams, transfers, finished, events, self._engine._closed, *self._orders()

    def _submitter(self, submitter: Any) -> Value:
        self._clocks.append(submitter._actor.clock)
        calls = []
        for clock, call in submitter._calls:
            self._clocks.append(clock)
            calls.append(self._ranks[call.args[0].job.transfer])
        return tuple(calls)

    def _stream(self, stream: SimulatedStream) -> Value:
        self._clocks.append(stream._actor.clock)
        queue = tuple((self._names(awaited), self._work(work)) for awaited, work in stream._queue)
        return queue, self._names(stream._awaited), stream.error is not None

    def _work(self, work: Any) -> Value:
        """Queued work of a stream: the recording of an event, a kernel or a copy."""
        event = getattr(work, "_event", None)
        if event is not None:
            return ("event", self._name(event))
        operation = work._operation
        self._clocks.append(operation.clock)
        self._queued.append(operation)
        if not hasattr(work, "_left"):
            return ("kernel",)
        left = tuple((piece.start, piece.stop) for piece in work._left)
        return ("copy", self._ranks.get(work._transfer, -1), left, work._pieces_done, work._table() is None)

    def _transfer(self, transfer: Any) -> Value:
        issued = transfer in self._engine._issued[transfer.job.direction]
        after = self._name(transfer.after) if transfer.end is None else -1
        end = self._name(transfer.end) if transfer.end is not None else -1
        job = transfer.job
        fails = self._device.failing.get(job.transfer, -1)
        pairs = (int(job.direction), tuple(job.device_blocks), tuple(job.host_blocks))
        return *pairs, after, end, issued, transfer.ended, bool(transfer.error), fails

    def _names(self, events: Iterable[SimulatedEvent]) -> Value:
        return tuple(self._name(one) for one in events if not one.is_recorded)

    def _name(self, event: SimulatedEvent) -> int:
        if event not in self._events:
            self._events[event] = len(self._events)
            self._clocks.append(event.clock)
        return self._events[event]

    def _orders(self) -> Value:
        """For each access the clocks that do not cover it, one bit for each clock."""
        accesses = []
        for location, one in sorted(self._device.detector._accesses.items()):
            write = self._uncounted(one.write) if one.write is not None else 0
            reads = sorted({self._uncounted(read) for read in one.reads.values()} - {0})
            if write or reads:
                accesses.append((location, write, tuple(reads)))
        return tuple(accesses), tuple(self._uncounted(one) for one in self._queued)

    def _uncounted(self, operation: ClockedOperation) -> int:
        actor, number = operation.actor, operation.number
        return sum(1 << bit for bit, clock in enumerate(self._clocks) if clock.get(actor, 0) < number)
