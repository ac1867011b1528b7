"""Finds two accesses to the same memory, one of them a write, that nothing orders: the order of copies (S12).

An actor does one thing after another: a stream of a device, a thread of the host. Each actor has a vector
clock: how many operations of every actor are certainly over when its next one begins. An operation gets its
clock when it is queued, from what orders it: the operation before it in its stream, what its caller knew, the
events that its stream waits for. Its accesses are told when it runs. Two accesses race if neither operation's
clock counts the other operation, in whatever order they ran. So one schedule shows the races of all schedules
with the same calls. (The clocks are Lamport's, Fidge's and Mattern's. Keeping only the last write of a place
and the reads since then is Flanagan and Freund's FastTrack.)

Verified: among the accesses that it was told, no two to one place are unordered with a write among them. The
parts of a batch are unordered among themselves.

Not verified: accesses that it was not told; whether bytes are right (the order may be the wrong one: a store
before the compute that it was meant for); calls of another run, in which `poll` answered differently; and
further races at a place after its first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Clock = dict[int, int]
"""For each actor, by its index, how many of its operations are over; without actors that have none."""

Location = tuple[str, int]
"""A place in memory that is accessed as a whole: what it is, and which one. Two locations share no byte."""


class Race(NamedTuple):
    """Two unordered accesses to a location, in the order in which they happened to run."""

    location: Location
    first: str
    second: str

    def __str__(self) -> str:
        what, which = self.location
        return f"{what} {which}: {self.first} it and {self.second} it, and nothing orders the two"


class Actor:
    """Does its operations one after another. `clock`: what is over when its next one begins."""

    __slots__ = ("clock", "index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """What is queued here from now on happens after everything that this clock counts."""
        own = self.clock
        for actor, number in clock.items():
            if number > own.get(actor, 0):
                own[actor] = number


class ClockedOperation:
    """The `number`th thing that an actor does. Make it when it is queued.

    name: for people.
    is_batch: whether its own accesses are unordered too.
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
        """Whether the other one can begin only after this one is over."""
        return self.number <= other.clock.get(self.actor, 0)


class _Accesses:
    """The last write to a location, and the last read of each actor since then."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: ClockedOperation | None = None
        self.reads: dict[int, ClockedOperation] = {}


class RaceDetector:
    """Hears of all accesses. `races`: the races that were found, oldest first."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._actors = 0
        self._accesses: dict[Location, _Accesses] = {}

    def new_actor(self, name: str) -> Actor:
        """An actor with a clock of its own."""
        self._actors += 1
        return Actor(name, self._actors)

    def reads(self, operation: ClockedOperation, location: Location) -> None:
        """The operation reads this location now."""
        accesses = self._accesses_of(location)
        if accesses.write is not None and not accesses.write.is_before(operation):
            self._found(location, accesses.write, "writes", operation, "reads")
        accesses.reads[operation.actor] = operation

    def writes(self, operation: ClockedOperation, location: Location) -> None:
        """The operation writes this location now."""
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
        """The operation reads and then writes these locations of one kind now."""
        for which in reads:
            self.reads(operation, (what, which))
        for which in writes:
            self.writes(operation, (what, which))

    def forget(self, location: Location) -> None:
        """The location does not exist any more."""
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
