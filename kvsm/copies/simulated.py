"""A simulated device with streams: a chooser decides when, and in which order, everything happens.

There are no threads and no clock. All that a GPU and a submitting thread would do by themselves are steps,
run one at a time: the next call of a submitter, or the work at the head of a stream.

=============  ==================================================================================
step           what it does
=============  ==================================================================================
call           the submitter runs its oldest call
kernel         does all its accesses to memory
piece          copies a part of a transfer; the parts run in any order, and each reads its ids then
failure        ends a copy as failed; the rest of it is never copied
event          is recorded, and done from now on
=============  ==================================================================================

A wait is not a step: it makes the work behind it impossible until its event is recorded. Each stream is in
order, and independent of the others except for waits, as on hardware. A chooser is a function that gets the
number n of possible steps and returns an index below n: a seeded generator, Hypothesis, or a search through
all schedules. A race detector gets every access. It also finds unordered accesses whose bytes came out right;
`races.py` says what it does not find.

The ids of a copy are memory, too. The device holds the return value of `copy` only weakly: an engine that
drops it, or writes into the arrays of ids, before the copy has run has raced with the copy (B37). For the
race detector an array and all its views are one location, which is written when it is passed to `copy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, pairwise
from random import Random
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.races import Clock, ClockedOperation, Location, Race, RaceDetector
from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.streams import StreamCopyEngine
from kvsm.errors import DeviceLost, PropertyBroken, described
from kvsm.events import Direction
from kvsm.ids import IdArray, listed
from kvsm.properties import Property

PIECES = 3
"""Most pieces of a copy."""

LONGEST_QUEUE = 1024
"""Most work items in the queue of compute. A further launch waits, as on hardware. Otherwise a host that
waits for no copy would queue work without limit."""

LONGEST_POLLS = 4
"""A transfer of a `SimulatedCopyEngine` ends within this many calls of `poll` after its submission."""


class SimulatedStep(NamedTuple):
    """A step that is possible next. place: its index among the steps of its source."""

    source: SimulatedStream | SimulatedSubmitter
    place: int

    def __str__(self) -> str:
        return self.source.described(self.place)


class SimulatedEvent:
    """A `StreamEvent`.

    error: the error of the copy right before it; None if there is none.
    clock: the operations that are over once the event is done.
    """

    __slots__ = ("_device", "clock", "error", "is_recorded", "name")

    def __init__(self, device: SimulatedDevice, name: str, clock: Clock) -> None:
        self._device, self.name, self.clock = device, name, clock
        self.is_recorded = False
        self.error: Exception | None = None

    def done(self) -> bool:
        if not self.is_over():
            return False
        self._device.acting.learn(self.clock)
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Run steps until the event is done. Raises `PropertyBroken` (progress, S9) if it never will be."""
        self._device.run_until(self.name, self.is_over)
        self.done()

    def is_over(self) -> bool:
        """Whether the event is recorded. Unlike `done` this raises no error of a copy."""
        self._device.check_alive()
        return self.is_recorded

    def seconds_after(self, _earlier: Any) -> float:
        return 0.0


class _QueuedWork:
    """Work in a stream: one step, unless `choices` and `run` say otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name

    def choices(self) -> int:
        """The number of steps of this work that are possible now, in any order."""
        return 1

    def run(self, place: int) -> bool:
        """Run the possible step with index `place`. Returns whether all of the work is over."""
        raise NotImplementedError


class _EventRecording(_QueuedWork):
    def __init__(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        super().__init__(event.name)
        self._stream, self._event = stream, event

    def run(self, _place: int) -> bool:
        self._event.error, self._stream.error = self._stream.error, None
        self._event.is_recorded = True
        return True


class _SimulatedKernel(_QueuedWork):
    def __init__(
        self,
        detector: RaceDetector,
        operation: ClockedOperation,
        reads: Iterable[int],
        writes: Iterable[int],
        action: Callable[[], object] | None,
        on_host: tuple[Iterable[int], Iterable[int]],
    ) -> None:
        super().__init__(operation.name)
        self._detector, self._operation = detector, operation
        self._reads, self._writes, self._action = tuple(reads), tuple(writes), action
        self._on_host = on_host

    def run(self, _place: int) -> bool:
        self._detector.accesses(self._operation, "device block", self._reads, self._writes)
        self._detector.accesses(self._operation, "host block", *self._on_host)
        if self._action is not None:
            self._action()
        return True


class _IdTable:
    """The ids of a copy. locations: those of its arrays, for the race detector. A tuple of ids has none,
    because it cannot change."""

    __slots__ = ("__weakref__", "device_blocks", "host_blocks", "locations")

    def __init__(self, device_blocks: IdArray, host_blocks: IdArray, locations: list[Location]) -> None:
        self.device_blocks, self.host_blocks, self.locations = device_blocks, host_blocks, locations


class _SimulatedCopy(_QueuedWork):
    def __init__(
        self,
        stream: SimulatedStream,
        operation: ClockedOperation,
        direction: Direction,
        transfer: int,
        table: _IdTable,
    ) -> None:
        super().__init__(operation.name)
        self._stream, self._operation = stream, operation
        self._direction, self._transfer, self._table = direction, transfer, ref(table)
        blocks, pieces = len(table.host_blocks), stream.device.pieces
        cuts = [blocks * piece // pieces for piece in range(pieces + 1)]
        self._left = [slice(first, last) for first, last in pairwise(cuts) if first < last]
        self._pieces_done = 0

    def choices(self) -> int:
        return 1 if self._fails_now() else len(self._left)

    def run(self, place: int) -> bool:
        try:
            if self._fails_now():
                raise RuntimeError(f"{self.name} was made to fail after {self._pieces_done} pieces")
            self._copy(self._left.pop(place))
        except Exception as error:  # as on a GPU: the next event raises it, and the stream continues
            self._stream.error = error
            return True
        self._pieces_done += 1
        return not self._left and not self._fails_now()

    def _fails_now(self) -> bool:
        return self._stream.device.failing.get(self._transfer) == self._pieces_done

    def _copy(self, piece: slice) -> None:
        device, operation, table = self._stream.device, self._operation, self._table()
        detector = device.detector
        if table is None:
            raise device.dropped_ids(self.name, self._transfer)
        for location in table.locations:
            detector.reads(operation, location)
        device_blocks, host_blocks = table.device_blocks[piece], table.host_blocks[piece]
        from_device, to_host = detector.reads, detector.writes
        if self._direction is Direction.LOAD:
            from_device, to_host = to_host, from_device
        for device_block, host_block in zip(listed(device_blocks), listed(host_blocks)):
            from_device(operation, ("device block", device_block))
            to_host(operation, ("host block", host_block))
        device.pools.copy(self._direction, device_blocks, host_blocks)


class SimulatedStream:
    """A `DeviceStream` whose work is run step by step."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name = device, f"stream {name!r}"
        self.error: Exception | None = None
        """The error of the last copy, until the next event takes it."""
        self._actor = device.detector.new_actor(self.name)
        self._queue: deque[tuple[tuple[SimulatedEvent, ...], _QueuedWork]] = deque()
        """The events that each work waits for, and the work, oldest first."""
        self._awaited: tuple[SimulatedEvent, ...] = ()
        """The events that the next queued work will wait for."""

    def record(self) -> SimulatedEvent:
        self._begin()
        event = SimulatedEvent(self.device, self.device.new_event_name(self.name), self._actor.clock.copy())
        self._put(_EventRecording(self, event))
        return event

    def wait(self, event: SimulatedEvent) -> None:
        self._begin()
        self._actor.learn(event.clock)
        self._awaited = (*self._awaited, event)

    def launch(
        self,
        name: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        action: Callable[[], object] | None = None,
        on_host: tuple[Iterable[int], Iterable[int]] = ((), ()),
    ) -> None:
        """Queue a kernel.

        reads, writes: the device blocks that the kernel accesses, for the race detector.
        action: called when the kernel runs.
        on_host: the host blocks that the kernel reads, and those that it writes.
        """
        self._begin()
        operation = ClockedOperation(self._actor, f"kernel {name!r} on {self.name}")
        self._put(_SimulatedKernel(self.device.detector, operation, reads, writes, action, on_host))

    def copy(self, direction: Direction, transfer: int, table: _IdTable) -> None:
        """Queue a copy, for `SimulatedDevice.copy`."""
        self._begin()
        name = f"{direction.name.lower()} {transfer} on {self.name}"
        if len(table.host_blocks):
            operation = ClockedOperation(self._actor, name, is_batch=True)
            self._put(_SimulatedCopy(self, operation, direction, transfer, table))

    @property
    def backlog(self) -> int:
        """Number of queued work items. A copy may take several steps."""
        return len(self._queue)

    def copies(self) -> list[str]:
        """The names of the copies that are not over."""
        return [work.name for _, work in self._queue if isinstance(work, _SimulatedCopy)]

    def choices(self) -> int:
        """The number of steps of this stream that are possible now."""
        if not self._queue:
            return 0
        awaited, work = self._queue[0]
        return work.choices() if all(event.is_recorded for event in awaited) else 0

    def run(self, place: int) -> None:
        """Run the possible step with index `place`."""
        if self._queue[0][1].run(place):
            self._queue.popleft()

    def described(self, place: int) -> str:
        """Describe a step of this stream for people."""
        return f"{self._queue[0][1].name}, choice {place} of {self.choices()}"

    def awaited(self) -> str:
        """Name the events that this stream waits for, for people."""
        events = self._queue[0][0] if self._queue else ()
        return ", ".join(event.name for event in events if not event.is_recorded)

    def _begin(self) -> None:
        self.device.check_alive()
        self._actor.learn(self.device.acting.clock)

    def _put(self, work: _QueuedWork) -> None:
        self._queue.append((self._awaited, work))
        self._awaited = ()


class SimulatedSubmitter:
    """A `Submitter` that stands for a host thread. Each of its calls is a step."""

    def __init__(self, device: SimulatedDevice, name: str, died: Callable[[str], None]) -> None:
        self._device, self._died = device, died
        self._actor = device.detector.new_actor(f"submitter {name!r}")
        self._calls: deque[tuple[Clock, Callable[[], None]]] = deque()
        self._stopped = False

    def put(self, call: Callable[[], None]) -> None:
        if not self._stopped:
            self._calls.append((self._device.acting.clock.copy(), call))

    def claim(self) -> bool:
        return self._device.claims and not (self._calls or self._stopped)

    def run_claimed(self, call: Callable[[], None]) -> None:
        acting = self._device.acting
        acting.learn(self._actor.clock)
        try:
            call()
        except Exception as error:
            self.die(f"{acting.name} failed to queue a copy: {described(error)}")
        self._actor.learn(acting.clock)

    def flush(self) -> None:
        """Run steps until all calls of this submitter have run."""
        self._device.run_until(f"the last call of {self._actor.name}", lambda: not self._calls)
        self._device.acting.learn(self._actor.clock)

    def close(self) -> None:
        self.flush()
        self._stopped = True

    def die(self, reason: str) -> None:
        """Simulate the death of the thread: queued calls never run."""
        self._stopped = True
        self._calls.clear()
        self._died(reason)

    @property
    def backlog(self) -> int:
        """Number of queued calls."""
        return len(self._calls)

    def choices(self) -> int:
        """The number of steps of this submitter that are possible now."""
        return 1 if self._calls else 0

    def run(self, _place: int) -> None:
        """Run the oldest call."""
        clock, call = self._calls.popleft()
        self._actor.learn(clock)
        device = self._device
        before, device.acting = device.acting, self._actor
        try:
            call()
        except Exception as error:
            self.die(f"{self._actor.name} died of {described(error)}")
        finally:
            device.acting = before

    def described(self, _place: int) -> str:
        """Describe the step of this submitter for people."""
        return f"the next call of {self._actor.name}"


class SimulatedDevice:
    """A `StreamDevice` whose memory is numpy arrays (see `NumpyPools`), for one thread.

    device, host: the pools.
    choose: called with the number of possible steps n > 1; returns the index of the next step, below n.
    pieces: most pieces of a copy.
    claims: whether a caller may queue a small copy itself, as on a GPU. By default submitters queue all
        copies, which allows more schedules.

    Attributes: `detector`; `submitters`; `acting`, the actor of the host thread that runs now; `failing`: set
    to {transfer: pieces} to make a copy fail after so many pieces.
    """

    def __init__(
        self, device: Any, host: Any, choose: Callable[[int], int], pieces: int = PIECES, claims: bool = False
    ) -> None:
        self.pools = NumpyPools(device, host)
        self.pieces, self.claims = pieces, claims
        self.detector = RaceDetector()
        self.acting = self.detector.new_actor("the host")
        self.submitters: list[SimulatedSubmitter] = []
        self.failing: dict[int, int] = {}
        self._choose = choose
        self._lost = ""
        self._streams: list[SimulatedStream] = []
        self._event_numbers, self._table_numbers = count(), count()
        self._tables: dict[int, tuple[ref[NDArray[np.int64]], Location]] = {}
        """`id` of each live array of block ids -> a weak reference to it, and its location."""
        self._compute = self.new_stream("compute")

    @property
    def layout(self) -> MemoryLayout:
        return self.pools.layout

    @property
    def compute(self) -> SimulatedStream:
        return self._compute

    @property
    def races(self) -> list[Race]:
        """The races that were found, oldest first."""
        return self.detector.races

    def new_stream(self, name: str) -> SimulatedStream:
        self._streams.append(SimulatedStream(self, name))
        return self._streams[-1]

    def new_submitter(self, name: str, died: Callable[[str], None]) -> SimulatedSubmitter:
        self.submitters.append(SimulatedSubmitter(self, name, died))
        return self.submitters[-1]

    def prepare(
        self,
        direction: Direction,  # noqa: ARG002 (a simulated copy needs no descriptors)
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> tuple[IdArray, IdArray]:
        return device_blocks, host_blocks

    def copy(
        self,
        stream: SimulatedStream,
        transfer: int,
        direction: Direction,
        prepared: tuple[IdArray, IdArray],
    ) -> object:
        device_blocks, host_blocks = prepared
        arrays = [ids for ids in (device_blocks, host_blocks) if isinstance(ids, np.ndarray)]
        table = _IdTable(device_blocks, host_blocks, [self._location(ids) for ids in arrays])
        purpose = f"for {direction.name.lower()} {transfer}"
        filling = ClockedOperation(self.acting, f"{self.acting.name}, {purpose},")
        for location in table.locations:
            self.detector.writes(filling, location)
        stream.copy(direction, transfer, table)
        return table

    def close(self) -> None:
        """Raise `PropertyBroken` (no reuse in flight, S3) if a copy is not over: its memory may be freed
        after this call."""
        left = [copy for stream in self._streams for copy in stream.copies()]
        if left and not self._lost:
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT,
                f"the device was closed before these were over: {', '.join(left)}",
            )

    def launch(
        self,
        name: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        action: Callable[[], object] | None = None,
    ) -> None:
        """Queue a kernel on the compute stream; see `SimulatedStream.launch`. If the queue is full, run steps
        first."""
        self.run_until(f"room for kernel {name!r}", self._has_room)
        self._compute.launch(name, reads, writes, action)

    def synchronize(self) -> None:
        """Run steps until all queued compute is over."""
        self._compute.record().synchronize()

    @property
    def backlog(self) -> int:
        """Number of queued calls and work items. A copy may take several steps."""
        return sum(source.backlog for source in self._sources())

    def steps(self) -> list[SimulatedStep]:
        """Return the possible steps. Their order depends only on the calls and steps so far."""
        sources = self._sources()
        return [SimulatedStep(source, place) for source in sources for place in range(source.choices())]

    def run(self, step: SimulatedStep) -> None:
        """Run one of `steps()`."""
        step.source.run(step.place)

    def step(self) -> bool:
        """Run the step that the chooser selects. Returns False if no step is possible."""
        steps = self.steps()
        if steps:
            self.run(steps[self._choose(len(steps)) if len(steps) > 1 else 0])
        return bool(steps)

    def run_until(self, what: str, is_over: Callable[[], bool]) -> None:
        """Run steps until `is_over()`. Raises `PropertyBroken` (progress, S9) if no step is possible before.

        what: names what is awaited, for the error.
        """
        while not is_over():
            if not self.step():
                waits = [(stream.name, stream.awaited()) for stream in self._streams]
                why = "; ".join(f"{name} waits for {awaited}" for name, awaited in waits if awaited)
                raise PropertyBroken(Property.PROGRESS, f"{what} never comes: {why or 'nothing is queued'}")

    def lose(self, reason: str) -> None:
        """Lose the device: its streams touch no memory any more, and every call to it raises `DeviceLost`."""
        self._lost = reason

    def check_alive(self) -> None:
        """Raise `DeviceLost` if the device is lost."""
        if self._lost:
            raise DeviceLost(self._lost)

    def host_accesses(self, what: str, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """Report that the acting host thread itself reads and writes these host blocks now. what: for
        messages."""
        operation = ClockedOperation(self.acting, f"{what} on {self.acting.name}")
        self.detector.accesses(operation, "host block", reads, writes)

    def new_event_name(self, stream: str) -> str:
        """Return a unique name for the next event of a stream."""
        return f"event {next(self._event_numbers)} of {stream}"

    def dropped_ids(self, copy: str, transfer: int) -> Exception:
        """Return the error of a copy whose ids were freed before it read them, and record it as a race."""
        race = Race(("id table of transfer", transfer), "the owner that dropped it frees it", f"{copy} reads")
        self.races.append(race)
        return RuntimeError(str(race))

    def _sources(self) -> list[SimulatedSubmitter | SimulatedStream]:
        return [*self.submitters, *(() if self._lost else self._streams)]

    def _has_room(self) -> bool:
        self.check_alive()
        return self._compute.backlog < LONGEST_QUEUE

    def _location(self, ids: NDArray[np.int64]) -> Location:
        """Return the location of an array of ids. A view has the location of its base."""
        while isinstance(ids.base, np.ndarray):
            ids = ids.base
        identity = id(ids)
        if identity not in self._tables:
            location = ("id table", next(self._table_numbers))

            def freed(_array: object) -> None:
                del self._tables[identity]
                self.detector.forget(location)

            self._tables[identity] = ref(ids, freed), location
        return self._tables[identity][1]


class SimulatedCopyEngine(StreamCopyEngine):
    """A `CopyEngine` on a simulated device, for one thread. A seed decides which steps run in each `poll` and
    `wait`, so the same calls with the same seed give the same results in every process.

    A transfer behind a mark of this engine ends within `LONGEST_POLLS` calls of `poll`. `simulated` is the
    device. After the first race, every call that runs steps raises `PropertyBroken` (order of copies, S12),
    because the bytes may be wrong. The results stay available to callers that catch it.
    """

    def __init__(self, device: Any, host: Any, seed: int) -> None:
        self._random = Random(seed)
        self._polls = 0
        self.simulated = SimulatedDevice(device, host, self._below)
        super().__init__(self.simulated)

    @property
    def races(self) -> list[Race]:
        """The races that were found, oldest first."""
        return self.simulated.races

    def poll(self) -> list[CopyResult]:
        self._polls += 1
        device = self.simulated
        if self._polls % LONGEST_POLLS:
            # A queued call leads to more steps: with 4 steps for each queued item, all of them can end.
            for _ in range(self._below(4 * device.backlog + 1)):
                device.step()
        else:
            while device.step():
                pass
        self._check_order()
        return super().poll()

    def hold_compute(self, transfers: Iterable[int]) -> None:
        super().hold_compute(transfers)
        self._check_order()

    def wait(self, transfers: Iterable[int]) -> None:
        super().wait(transfers)
        self._check_order()

    def _below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def _check_order(self) -> None:
        if self.races:
            raise PropertyBroken(Property.COPY_ORDER, str(self.races[0]))
