"""A world with an auditor beside each of its cores: a second book, and a state that was saved and goes on.

The auditor folds each event once more, into a ledger of its own, and lets the second book follow
(`kvsm.explain.verify.witness`). The action "save" restores a snapshot of the live ledger. The copy must equal
its origin in every field, not only as a snapshot: a snapshot that forgets a field is equal to itself. From
then on the copy folds the events in the place of the auditor's ledger, so a difference that shows late is
seen, too. The auditor's ledgers have the Python body of the fold. So where the live ones have the native
body, the two are compared field by field.
- events are state (S10): the fold of the log, from its start or from any snapshot, is the live ledger, field
  by field;
- what the second book finds in an event, or in what the fold made of it, is broken as it says.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsm.check.worlds.world import Action, World
from kvsm.check.worlds.wrapped import WrappedWorld
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import Violation, check_ledger
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.explain.verify.witness import Witness
from kvsm.properties import Property
from kvsm.states.words import StateWords

SAVE: Action = ("save",)
_SAVES = 0.02
"""Share of the drawn actions that are a save."""


class AuditedCore(NamedTuple):
    """A core of a world: its ledger, and the log from its first event on. None: it has no log."""

    ledger: Ledger
    log: Sequence[OffloadingEvent] | None


# Field by field.


def difference(one: object, other: object, where: str = "") -> str | None:
    """The first field in which two objects differ, with both values; None if there is none.

    A dict has no order, an `OrderedDict` has one. Ids may stand in a tuple or in an array.
    """
    if one is other:
        return None
    mine, theirs = _fields(one), _fields(other)
    if mine is None or theirs is None:
        return None if mine is theirs and one == other else f"{where}: {one!r} and {other!r}"
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys(), key=repr)
        return f"{where}: only one has {odd[0]!r}"
    found = (difference(mine[name], theirs[name], f"{where}.{name}" if where else str(name)) for name in mine)
    return next((line for line in found if line is not None), None)


def _fields(thing: Any) -> Mapping[Any, Any] | None:
    """What an object is made of, by name; None for a value."""
    if isinstance(thing, SlotQueue):
        return {"length": len(thing), "order": thing.order().tolist()}
    if isinstance(thing, KeyQueue):
        return {"capacity": thing.capacity, "keys": list(thing)}
    if isinstance(thing, StateWords):
        return {"words": thing.words, "totals": thing.totals}
    if isinstance(thing, np.ndarray | array | bytearray):
        thing = thing.tolist() if not isinstance(thing, bytearray) else list(thing)
    if isinstance(thing, OrderedDict):
        return (
            {"items": list(thing.items())}
            if not vars(thing)
            else {**vars(thing), "items": list(thing.items())}
        )
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, Set):
        return dict.fromkeys(thing)
    if isinstance(thing, list | tuple):
        return dict(enumerate(thing))
    if isinstance(thing, msgspec.Struct):
        return {name: getattr(thing, name) for name in thing.__struct_fields__}
    return _attributes(thing)


def _attributes(thing: Any) -> Mapping[Any, Any] | None:
    """The attributes of an object of our own; None for values, and for what is shared or only called."""
    if not type(thing).__module__.startswith("kvsm.") or isinstance(thing, int | str | bytes):
        return None
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}


def ledger_difference(one: Ledger, other: Ledger) -> str | None:
    """The first field in which two ledgers differ. The key of a slot counts while the index names it."""

    def told(ledger: Ledger) -> dict[str, Any]:
        left_out = {"listener", "key_of", "generation_view"}
        fields = {name: value for name, value in vars(ledger).items() if name not in left_out}
        return fields | {"key_of": {slot: ledger.key_of[slot] for slot in ledger.index.values()}}

    return difference(told(one), told(other))


# The auditor.


class CoreAuditor:
    """Follows the events of one core."""

    def __init__(self, core: AuditedCore) -> None:
        self._log = core.log
        with native.without():
            self._copy = Ledger(core.ledger.config)
        self._witness = Witness(core.ledger.config)
        self._read = 0
        self._last: OffloadingEvent | None = None
        self.follow()

    def follows(self, core: AuditedCore) -> bool:
        """Whether the core's log is the one that was followed so far. A crash takes events back."""
        if core.log is not self._log:
            return False
        return core.log is None or not self._read or core.log[self._read - 1 : self._read] == [self._last]

    def follow(self) -> bool:
        """Fold what has happened. Returns whether anything has. Raises `PropertyBroken`."""
        news = self._log[self._read :] if self._log is not None else ()
        for event in news:
            _raise_first(self._witness.follow(event))
            self._copy.apply(event)
            _raise_first(self._witness.compare(self._copy))
            self._read, self._last = self._read + 1, event
        return bool(news)

    def check(self, ledger: Ledger) -> None:
        """Compare everything. Raises `PropertyBroken`."""
        if self._log is None:
            return
        _raise_first([*self._witness.compare_all(self._copy), *check_ledger(self._copy)])
        differs = ledger_difference(ledger, self._copy)
        if differs is not None:
            message = f"the live ledger differs from the fold of its log in {differs}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def save(self, ledger: Ledger) -> None:
        """Save and restore. The copy goes on. Raises `PropertyBroken`."""
        with native.without():
            copy = restore(snapshot(ledger))
        differs = ledger_difference(ledger, copy)
        if differs is not None:
            message = f"a ledger that was saved and restored differs from its origin in {differs}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        self._copy = copy


def _raise_first(violations: Sequence[Violation]) -> None:
    for violation in violations:
        raise PropertyBroken(violation.property, f"the second book: {violation.message}")


class AuditedWorld(WrappedWorld):
    """A `World`: another one, and auditors beside its cores. cores: its cores now, always equally many."""

    check_every = 25

    def __init__(self, world: World, cores: Callable[[], Sequence[AuditedCore]]) -> None:
        super().__init__(world)
        self._cores = cores
        self._auditors = [CoreAuditor(core) for core in cores()]

    def actions(self) -> list[Action]:
        return [SAVE, *self.world.actions()]

    def draw(self, random: Random) -> Action:
        return SAVE if random.random() < _SAVES else self.world.draw(random)

    def do(self, action: Action) -> bool:
        if action == SAVE:
            for auditor, core in self._pairs():
                auditor.save(core.ledger)
            return True
        done = self.world.do(action)
        # A call that led to nothing may be an event.
        followed = [auditor.follow() for auditor, _ in self._pairs()]
        return done or any(followed)

    def _pairs(self) -> Iterator[tuple[CoreAuditor, AuditedCore]]:
        """Each core with its auditor. Another process begins with other ones."""
        for place, core in enumerate(self._cores()):
            if not self._auditors[place].follows(core):
                self._auditors[place] = CoreAuditor(core)
            yield self._auditors[place], core

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""
        super().check()
        for auditor, core in self._pairs():
            auditor.check(core.ledger)
