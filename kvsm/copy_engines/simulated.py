"""A device on which everything happens as late, and in whatever order, as somebody chooses.

Nothing here has a thread or a clock. What a GPU and a submitting thread would do by themselves are steps
that wait to be run, one at a time: the submitter's next call, and of each stream what stands at its head.

=============  ==================================================================================
step           what it does
=============  ==================================================================================
call           the submitter runs what was put first
kernel         does all that it does to the memory
piece          copies a part of a transfer; the parts come in any order, and read their ids only then
failure        ends a copy as failed; what is left of it is never copied
event          is recorded, and done from now on
=============  ==================================================================================

A wait is no step: it keeps what stands behind it from being one. Nor are the starts of kernels and copies,
of which nobody could see anything. Streams are in order, and otherwise free of each other, as on hardware.
Whoever chooses is a function from n to one of n possible steps: a seeded generator, Hypothesis, a search
through all schedules. All accesses go to a race detector, which sees what is unordered even where the bytes
came out right (`races.py` says what it does not see).

The ids of a copy are memory too. What `copy` returns is held only weakly here: an engine that drops it, or
writes into the arrays, while the copy is still to come has raced with the copy (B37). An array counts as
one table with all of its views, and as written anew by whoever hands it to `copy`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, pairwise
from random import Random
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines.interface import CopyResult
from kvsm.copy_engines.pools import NumpyPools
from kvsm.copy_engines.races import Clock, ClockedOperation, Location, Race, RaceDetector
from kvsm.copy_engines.streams import StreamCopyEngine
from kvsm.errors import DeviceLost, PropertyBroken, described
from kvsm.events import Direction
from kvsm.ids import IdArray, listed
from kvsm.properties import Property

PIECES = 3
"""A copy is cut into up to this many pieces."""

LONGEST_QUEUE = 1024
"""Work that compute may be behind by. A launch beyond that waits, as on hardware; else a host that waits for
no copy would queue its whole life."""

LONGEST_POLLS = 4
"""A transfer of a `SimulatedCopyEngine` ends in one of this many calls of `poll` after its submission."""


class SimulatedStep(NamedTuple):
    """Something that may happen next. place: which of those that its source offers."""

    source: SimulatedStream | SimulatedSubmitter
    place: int

    def __str__(self) -> str:
        return self.source.described(self.place)


class SimulatedEvent:
    """A place in a stream; see `streams.StreamEvent`. error: of the copy right before it."""

    __slots__ = ("_clock", "_device", "error", "is_recorded", "name")

    def __init__(self, device: SimulatedDevice, name: str, clock: Clock) -> None:
        self._device, self._clock, self.name = device, clock, name
        self.is_recorded = False
        self.error: Exception | None = None

    def done(self) -> bool:
        self._device.check_alive()
        if not self.is_recorded:
            return False
        self._device.acting.learn(self._clock)
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Run steps until it is done. Raises `PropertyBroken` (S9) if it never will be."""
        self._device.run_until(self.name, self.is_over)
        self.done()

    def is_over(self) -> bool:
        self._device.check_alive()
        return self.is_recorded

    def seconds_after(self, _earlier: Any) -> float:
        return 0.0

    def clock(self) -> Clock:
        """What is over when the event is done."""
        return self._clock


class _QueuedWork(Protocol):
    """What stands in a stream, with the steps that it consists of."""

    @property
    def name(self) -> str: ...

    def choices(self) -> int:
        """How many steps it offers now, any of which may be next."""

    def run(self, place: int) -> bool:
        """Run one of them. Whether all of it is over."""


class _EventRecording:
    def __init__(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        self._stream, self._event, self.name = stream, event, event.name

    def choices(self) -> int:
        return 1

    def run(self, _place: int) -> bool:
        self._event.error, self._stream.error = self._stream.error, None
        self._event.is_recorded = True
        return True


class _SimulatedKernel:
    def __init__(
        self,
        detector: RaceDetector,
        operation: ClockedOperation,
        reads: Iterable[int],
        writes: Iterable[int],
        action: Callable[[], object] | None,
    ) -> None:
        self._detector, self._operation, self.name = detector, operation, operation.name
        self._reads, self._writes, self._action = tuple(reads), tuple(writes), action

    def choices(self) -> int:
        return 1

    def run(self, _place: int) -> bool:
        for block in self._reads:
            self._detector.reads(self._operation, ("device block", block))
        for block in self._writes:
            self._detector.writes(self._operation, ("device block", block))
        if self._action is not None:
            self._action()
        return True


class _IdTable:
    """The ids of a copy. locations: of its arrays; a tuple has none, for nobody can change it."""

    __slots__ = ("__weakref__", "device_blocks", "host_blocks", "locations")

    def __init__(self, device_blocks: IdArray, host_blocks: IdArray, locations: list[Location]) -> None:
        self.device_blocks, self.host_blocks, self.locations = device_blocks, host_blocks, locations


class _SimulatedCopy:
    def __init__(
        self,
        stream: SimulatedStream,
        operation: ClockedOperation,
        direction: Direction,
        transfer: int,
        table: _IdTable,
    ) -> None:
        self._stream, self._operation, self.name = stream, operation, operation.name
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
        except Exception as error:  # as on a GPU: the next event tells, and the stream goes on
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
    """A queue of work that is done in order; see `streams.DeviceStream`."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name = device, f"stream {name!r}"
        self.error: Exception | None = None
        """Of the copy that ended last, until an event has taken it."""
        self._actor = device.detector.new_actor(self.name)
        self._queue: deque[tuple[tuple[SimulatedEvent, ...], _QueuedWork]] = deque()
        """Work, oldest first, and what it waits for."""
        self._awaited: tuple[SimulatedEvent, ...] = ()
        """What the next work will wait for."""

    def record(self) -> SimulatedEvent:
        self._begin()
        event = SimulatedEvent(self.device, self.device.new_event_name(self.name), self._actor.clock.copy())
        self._put(_EventRecording(self, event))
        return event

    def wait(self, event: SimulatedEvent) -> None:
        self._begin()
        self._actor.learn(event.clock())
        self._awaited = (*self._awaited, event)

    def launch(
        self,
        name: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        action: Callable[[], object] | None = None,
    ) -> None:
        """Queue a kernel. reads, writes: the device blocks that it accesses, for the race detector. action:
        what it does to them."""
        self._begin()
        operation = ClockedOperation(self._actor, f"kernel {name!r} on {self.name}")
        self._put(_SimulatedKernel(self.device.detector, operation, reads, writes, action))

    def copy(self, direction: Direction, transfer: int, table: _IdTable) -> None:
        """Queue a copy: what is left to do of `SimulatedDevice.copy`."""
        self._begin()
        name = f"{direction.name.lower()} {transfer} on {self.name}"
        if len(table.host_blocks):
            operation = ClockedOperation(self._actor, name, is_batch=True)
            self._put(_SimulatedCopy(self, operation, direction, transfer, table))

    @property
    def backlog(self) -> int:
        """How much work is queued; a copy may take several steps."""
        return len(self._queue)

    def copies(self) -> list[str]:
        """Those that are not over, by name."""
        return [work.name for _, work in self._queue if isinstance(work, _SimulatedCopy)]

    def choices(self) -> int:
        """How many steps are possible here now."""
        if not self._queue:
            return 0
        awaited, work = self._queue[0]
        return work.choices() if all(event.is_recorded for event in awaited) else 0

    def run(self, place: int) -> None:
        if self._queue[0][1].run(place):
            self._queue.popleft()

    def described(self, place: int) -> str:
        """A step of this stream, for people."""
        return f"{self._queue[0][1].name}, choice {place} of {self.choices()}"

    def awaited(self) -> str:
        """The events that keep this stream from going on, for people."""
        events = self._queue[0][0] if self._queue else ()
        return ", ".join(event.name for event in events if not event.is_recorded)

    def _begin(self) -> None:
        self.device.check_alive()
        self._actor.learn(self.device.acting.clock)

    def _put(self, work: _QueuedWork) -> None:
        self._queue.append((self._awaited, work))
        self._awaited = ()


class SimulatedSubmitter:
    """A thread of the host, each call of which is a step; see `streams.Submitter`."""

    def __init__(self, device: SimulatedDevice, name: str, died: Callable[[str], None]) -> None:
        self._device, self._died = device, died
        self._actor = device.detector.new_actor(f"submitter {name!r}")
        self._calls: deque[tuple[Clock, Callable[[], None]]] = deque()
        self._stopped = False

    def put(self, call: Callable[[], None]) -> None:
        if not self._stopped:
            self._calls.append((self._device.acting.clock.copy(), call))

    def flush(self) -> None:
        """Run steps until all its calls have run."""
        self._device.run_until(f"the last call of {self._actor.name}", lambda: not self._calls)
        self._device.acting.learn(self._actor.clock)

    def close(self) -> None:
        self.flush()
        self._stopped = True

    def die(self, reason: str) -> None:
        """Stop without having been told to: what has not run never will."""
        self._stopped = True
        self._calls.clear()
        self._died(reason)

    @property
    def backlog(self) -> int:
        return len(self._calls)

    def choices(self) -> int:
        """How many steps are possible here now."""
        return 1 if self._calls else 0

    def run(self, _place: int) -> None:
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
        """A step of the submitter, for people."""
        return f"the next call of {self._actor.name}"


class SimulatedDevice:
    """A `StreamDevice` in numpy arrays (see `NumpyPools`), for one thread.

    choose: from n to one of 0 .. n - 1, the step to run next; asked where there is more than one. pieces: a
    copy is cut into up to this many. Attributes: `detector`; `submitters`; `acting`, the thread of the host
    whose turn it is; `failing`: for each transfer that is to fail, after how many pieces.
    """

    def __init__(self, device: Any, host: Any, choose: Callable[[int], int], pieces: int = PIECES) -> None:
        self.pools = NumpyPools(device, host)
        self.pieces = pieces
        self.detector = RaceDetector()
        self.acting = self.detector.new_actor("the host")
        self.submitters: list[SimulatedSubmitter] = []
        self.failing: dict[int, int] = {}
        self._choose = choose
        self._lost = ""
        self._streams: list[SimulatedStream] = []
        self._event_numbers, self._table_numbers = count(), count()
        self._tables: dict[int, tuple[ref[NDArray[np.int64]], Location]] = {}
        """The arrays of ids that were seen, by their identity while they live."""
        self._compute = self.new_stream("compute")

    @property
    def num_device_blocks(self) -> int:
        return self.pools.layout.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.pools.layout.num_host_blocks

    @property
    def block_bytes(self) -> int:
        return self.pools.layout.block_bytes

    @property
    def compute(self) -> SimulatedStream:
        return self._compute

    @property
    def races(self) -> list[Race]:
        return self.detector.races

    def new_stream(self, name: str) -> SimulatedStream:
        self._streams.append(SimulatedStream(self, name))
        return self._streams[-1]

    def new_submitter(self, name: str, died: Callable[[str], None]) -> SimulatedSubmitter:
        self.submitters.append(SimulatedSubmitter(self, name, died))
        return self.submitters[-1]

    def copy(
        self,
        stream: SimulatedStream,
        transfer: int,
        direction: Direction,
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> object:
        arrays = [ids for ids in (device_blocks, host_blocks) if isinstance(ids, np.ndarray)]
        table = _IdTable(device_blocks, host_blocks, [self._location(ids) for ids in arrays])
        filling = ClockedOperation(
            self.acting, f"{self.acting.name}, for {direction.name.lower()} {transfer},"
        )
        for location in table.locations:
            self.detector.writes(filling, location)
        stream.copy(direction, transfer, table)
        return table

    def close(self) -> None:
        """Raises `PropertyBroken` (S3) if a copy is still to touch memory that may be given back now."""
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
        """Queue a kernel for compute; see `SimulatedStream.launch`. Runs steps where it is too far behind."""
        self.run_until(f"room for kernel {name!r}", self._has_room)
        self._compute.launch(name, reads, writes, action)

    def synchronize(self) -> None:
        """Run steps until compute has done all that is queued for it."""
        self._compute.record().synchronize()

    @property
    def backlog(self) -> int:
        """How much work is queued; a copy may take several steps."""
        return sum(source.backlog for source in self._sources())

    def steps(self) -> list[SimulatedStep]:
        """What may happen next, in an order that depends on nothing but what was done before."""
        return [
            SimulatedStep(source, place) for source in self._sources() for place in range(source.choices())
        ]

    def run(self, step: SimulatedStep) -> None:
        """Let one of `steps()` happen."""
        step.source.run(step.place)

    def step(self) -> bool:
        """Let happen what is chosen. False if nothing can."""
        steps = self.steps()
        if steps:
            self.run(steps[self._choose(len(steps)) if len(steps) > 1 else 0])
        return bool(steps)

    def run_until(self, what: str, is_over: Callable[[], bool]) -> None:
        """Run steps until this is over. Raises `PropertyBroken` (S9) if no step is left."""
        while not is_over():
            if not self.step():
                waits = [(stream.name, stream.awaited()) for stream in self._streams]
                told = "; ".join(f"{name} waits for {awaited}" for name, awaited in waits if awaited)
                raise PropertyBroken(Property.PROGRESS, f"{what} never comes: {told or 'nothing is queued'}")

    def lose(self, reason: str) -> None:
        """From now on nothing touches memory, and whatever is asked of the device raises `DeviceLost`."""
        self._lost = reason

    def check_alive(self) -> None:
        if self._lost:
            raise DeviceLost(self._lost)

    def host_reads(self, what: str, host_blocks: Iterable[int]) -> None:
        """The running thread of the host reads these itself, now. what: for people."""
        operation = ClockedOperation(self.acting, f"{what} on {self.acting.name}")
        for block in host_blocks:
            self.detector.reads(operation, ("host block", block))

    def host_writes(self, what: str, host_blocks: Iterable[int]) -> None:
        """The running thread of the host writes these itself, now."""
        operation = ClockedOperation(self.acting, f"{what} on {self.acting.name}")
        for block in host_blocks:
            self.detector.writes(operation, ("host block", block))

    def new_event_name(self, stream: str) -> str:
        return f"event {next(self._event_numbers)} of {stream}"

    def dropped_ids(self, copy: str, transfer: int) -> Exception:
        """A copy comes to read ids that nobody has kept: a race, and the copy's error."""
        race = Race(("id table of transfer", transfer), "whoever dropped it too early frees", f"{copy} reads")
        self.races.append(race)
        return RuntimeError(str(race))

    def _sources(self) -> list[SimulatedSubmitter | SimulatedStream]:
        return [*self.submitters, *(() if self._lost else self._streams)]

    def _has_room(self) -> bool:
        self.check_alive()
        return self._compute.backlog < LONGEST_QUEUE

    def _location(self, ids: NDArray[np.int64]) -> Location:
        """The memory of these ids: that of the array of which they are a view, if they are one."""
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
    """A `CopyEngine` for one thread, whose device and submitter go on by a seed, when they are polled or
    waited for. The same calls on the same seed give the same results, in every process.

    A transfer behind a mark of this engine ends within `LONGEST_POLLS` calls of `poll`. `simulated`: the
    device. Every call that lets it go on raises `PropertyBroken` (S12) once it has found a race: the bytes
    may be wrong, and who does not look must not miss it. Ends are kept for whoever goes on all the same.
    """

    def __init__(self, device: Any, host: Any, seed: int) -> None:
        self._random = Random(seed)
        self._polls = 0
        self.simulated = SimulatedDevice(device, host, self._below)
        super().__init__(self.simulated)

    @property
    def races(self) -> list[Race]:
        return self.simulated.detector.races

    def poll(self) -> list[CopyResult]:
        self._polls += 1
        device = self.simulated
        if self._polls % LONGEST_POLLS:
            # One call of the submitter becomes several steps: up to four times, so that all may end at once.
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
