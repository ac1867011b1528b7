"""A race detector: finds two unordered accesses to one location, at least one a write (order of copies, S12).

An actor executes its operations in order: a stream of a device, or a thread of the host. Each actor has a
vector clock: for every actor, the number of operations that are certainly over when its own next operation
begins. An operation gets its clock when it is queued: from the operation before it in its stream, the clock
of the calling thread, and the events that its stream waits for. Its accesses are reported when it runs. Two
accesses race if neither operation's clock includes the other operation, whichever ran first. So a single
schedule reveals the races of all schedules with the same calls. (The clocks are Lamport's, Fidge's and
Mattern's. Keeping only the last write of a location and the reads since then is Flanagan and Freund's
FastTrack.)

Verified: no two reported accesses to one location are unordered, unless both are reads. The parts of a batch
are unordered among themselves.

Not verified: accesses that are not reported; whether bytes are right (accesses may be ordered the wrong way
round: a store before the compute whose result it should copy); runs with other calls, in which `poll`
returned other results; and further races at a location after its first race.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Clock = dict[int, int]
"""Index of an actor -> number of its operations that are over. An absent actor has 0."""

Location = tuple[str, int]
"""Memory that is accessed as a whole: its kind, such as "host block", and its number. Locations do not
overlap."""


class Race(NamedTuple):
    """Two unordered accesses to a location, in the order in which they ran."""

    location: Location
    first: str
    second: str

    def __str__(self) -> str:
        what, which = self.location
        return f"{what} {which}: {self.first} it and {self.second} it, and nothing orders the two"


class Actor:
    """A stream or a thread. `clock`: the operations that are over when its next operation begins."""

    __slots__ = ("clock", "index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """Order all later operations of this actor after the operations that `clock` counts."""
        own = self.clock
        for actor, number in clock.items():
            if number > own.get(actor, 0):
                own[actor] = number


class ClockedOperation:
    """One operation of an actor, with its vector clock. Create it when the operation is queued.

    name: for messages.
    is_batch: whether the operation's own accesses are unordered among themselves.
    """

    __slots__ = ("actor", "clock", "name", "number")

    def __init__(self, actor: Actor, name: str, is_batch: bool = False) -> None:
        self.name, self.actor = name, actor.index
        self.number = actor.clock.get(self.actor, 0) + 1
        self.clock = actor.clock.copy()
        actor.clock[self.actor] = self.number
        if not is_batch:
            self.clock[self.actor] = self.number

    def is_before(self, other: ClockedOperation) -> bool:
        """Whether `other` can begin only after this operation is over."""
        return self.number <= other.clock.get(self.actor, 0)


class _Accesses:
    """The last write to a location, and each actor's last read since that write."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: ClockedOperation | None = None
        self.reads: dict[int, ClockedOperation] = {}


class RaceDetector:
    """Checks all reported accesses. `races`: the races found, oldest first."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._actors = 0
        self._accesses: dict[Location, _Accesses] = {}

    def new_actor(self, name: str) -> Actor:
        """Return a new actor with an empty clock."""
        self._actors += 1
        return Actor(name, self._actors)

    def reads(self, operation: ClockedOperation, location: Location) -> None:
        """Report that the operation reads this location now."""
        accesses = self._accesses_of(location)
        if accesses.write is not None and not accesses.write.is_before(operation):
            self._found(location, accesses.write, "writes", operation, "reads")
        accesses.reads[operation.actor] = operation

    def writes(self, operation: ClockedOperation, location: Location) -> None:
        """Report that the operation writes this location now."""
        accesses = self._accesses_of(location)
        if accesses.write is not None and not accesses.write.is_before(operation):
            self._found(location, accesses.write, "writes", operation, "writes")
        for read in accesses.reads.values():
            if not read.is_before(operation):
                self._found(location, read, "reads", operation, "writes")
        accesses.write, accesses.reads = operation, {}

    def accesses(
        self, operation: ClockedOperation, what: str, reads: Iterable[int], writes: Iterable[int]
    ) -> None:
        """Report that the operation reads, and then writes, these locations of kind `what` now."""
        for number in reads:
            self.reads(operation, (what, number))
        for number in writes:
            self.writes(operation, (what, number))

    def forget(self, location: Location) -> None:
        """Drop a location whose memory was freed."""
        self._accesses.pop(location, None)

    def _accesses_of(self, location: Location) -> _Accesses:
        accesses = self._accesses.get(location)
        if accesses is None:
            accesses = self._accesses[location] = _Accesses()
        return accesses

    def _found(
        self, location: Location, first: ClockedOperation, did: str, second: ClockedOperation, does: str
    ) -> None:
        self.races.append(Race(location, f"{first.name} {did}", f"{second.name} {does}"))
