"""Finds two accesses to the same memory, one of them a write, that nothing orders (S12).

Whoever does one thing after another is an actor: a stream of a device, a thread of the host. Each actor has
a vector clock: how many operations of every actor are over for sure when its next one begins. An operation
gets its clock when it is queued, and so from what orders it: the operation before it in its stream, what
its caller knew, the events that its stream was told to wait for. Its accesses are told when it runs. Two
accesses race if the clock of neither operation counts the other, whatever the order in which they ran: one
schedule shows the races of all schedules with the same calls. (The clocks are Lamport's, Fidge's and
Mattern's; keeping only the last write of a place and the reads since is Flanagan and Freund's FastTrack.)

What it verifies: of the accesses that it was told of, no two to one place are unordered with a write among
them. The parts of a batch are unordered among themselves.

What it does not verify: accesses that nobody told it of; that bytes are right (an order may be the wrong
one: a store before the compute that it was meant for); other calls than those of this run, which a
different answer of `poll` could have led to; and after its first race at a place, further ones there.
"""

from __future__ import annotations

from typing import NamedTuple

Clock = dict[int, int]
"""For each actor, by its index, how many of its operations are over. Without those of which none is."""

Location = tuple[str, int]
"""A place in memory that is accessed as a whole: what it is, and which one. Different ones share no byte."""


class Race(NamedTuple):
    """Two accesses to a location that nothing orders, in the order in which they happened to run."""

    location: Location
    first: str
    second: str

    def __str__(self) -> str:
        what, which = self.location
        return f"{what} {which}: {self.first} it and {self.second} it, and nothing orders the two"


class Actor:
    """Does its operations one after the other. `clock`: what is over when its next one begins."""

    __slots__ = ("clock", "index", "name")

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """What is queued here from now on happens after all that this clock counts."""
        own = self.clock
        for actor, number in clock.items():
            if number > own.get(actor, 0):
                own[actor] = number


class ClockedOperation:
    """The `number`th thing that an actor does. name: for people."""

    __slots__ = ("actor", "clock", "name", "number")

    def __init__(self, actor: Actor, name: str, is_batch: bool = False) -> None:
        """To be made when it is queued. is_batch: its own accesses are unordered too."""
        self.name, self.actor = name, actor.index
        self.number = actor.clock.get(self.actor, 0) + 1
        self.clock = actor.clock.copy()
        actor.clock[self.actor] = self.number
        if not is_batch:
            self.clock[self.actor] = self.number

    def is_before(self, other: ClockedOperation) -> bool:
        return self.number <= other.clock.get(self.actor, 0)


class _Accesses:
    """The last write to a location, and the last read of each actor since."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: ClockedOperation | None = None
        self.reads: dict[int, ClockedOperation] = {}


class RaceDetector:
    """`races`: all that were found, in the order in which they were."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._actors = 0
        self._accesses: dict[Location, _Accesses] = {}

    def new_actor(self, name: str) -> Actor:
        self._actors += 1
        return Actor(name, self._actors)

    def reads(self, operation: ClockedOperation, location: Location) -> None:
        accesses = self._accesses_of(location)
        if accesses.write is not None and not accesses.write.is_before(operation):
            self._found(location, accesses.write, "writes", operation, "reads")
        accesses.reads[operation.actor] = operation

    def writes(self, operation: ClockedOperation, location: Location) -> None:
        accesses = self._accesses_of(location)
        if accesses.write is not None and not accesses.write.is_before(operation):
            self._found(location, accesses.write, "writes", operation, "writes")
        for read in accesses.reads.values():
            if not read.is_before(operation):
                self._found(location, read, "reads", operation, "writes")
        accesses.write, accesses.reads = operation, {}

    def forget(self, location: Location) -> None:
        """Nothing has this location any more."""
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
