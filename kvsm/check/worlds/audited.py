"""A world with an auditor for each of its cores, which checks each event and each saved state.

The auditor folds each event again, into its own ledger, and compares the result with the second book of `kvsm
verify` (`kvsm.explain.verify.witness`). The action "save" takes a snapshot of the live ledger and restores
it. The restored ledger must equal the live one in every field: comparing snapshots would miss a field that
the snapshot omits. From then on the restored ledger replaces the auditor's own and folds the events, so a
difference that shows only later is found, too. The auditor's ledgers use the Python body of the fold. So if
the live ones use the native body, the two bodies are compared field by field.

- events are state (S10): the fold of the log, from its start or from any snapshot, equals the live ledger,
  field by field;
- any other property that the second book finds broken, by an event or by the ledger after it.
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
from kvsm.core.policies.block_tree import BlockTree
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.explain.verify.witness import Witness
from kvsm.properties import Property
from kvsm.states.words import StateWords

SAVE: Action = ("save",)
_SAVES = 0.02
"""The share of saves among the drawn actions."""


class AuditedCore(NamedTuple):
    """A core of a world: its ledger, and its whole log; None if it has no log."""

    ledger: Ledger
    log: Sequence[OffloadingEvent] | None


# Field by field.


def difference(one: object, other: object, where: str = "") -> str | None:
    """The first field in which two objects differ, with both values; None if they are equal.

    The order of a dict is ignored, that of an `OrderedDict` is not. A tuple of ids equals an array of them.
    """
    if one is other or (isinstance(one, array) and isinstance(other, array) and one == other):
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
    """The parts of an object, by name, index or key; None for a plain value, which has no parts."""
    if isinstance(thing, SlotQueue):
        return {"length": len(thing), "order": thing.order().tolist()}
    if isinstance(thing, KeyQueue):
        return {"capacity": thing.capacity, "keys": list(thing)}
    if isinstance(thing, BlockTree):
        return {"column": thing.column.values.tolist()}
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
    """The attributes of an instance of a kvsm class; None for values and for all other objects."""
    if not type(thing).__module__.startswith("kvsm.") or isinstance(thing, int | str | bytes):
        return None
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}


def ledger_difference(one: Ledger, other: Ledger) -> str | None:
    """The first field in which two ledgers differ. Keys of slots that the index does not name are ignored."""

    def compared_fields(ledger: Ledger) -> dict[str, Any]:
        left_out = {"listener", "key_of", "generation_view"}
        fields = {name: value for name, value in vars(ledger).items() if name not in left_out}
        return fields | {"key_of": {slot: ledger.key_of[slot] for slot in ledger.index.values()}}

    return difference(compared_fields(one), compared_fields(other))


# The auditor.


class CoreAuditor:
    """Checks the events of one core: a second ledger and a second book that follow its log."""

    def __init__(self, core: AuditedCore) -> None:
        self._log = core.log
        with native.without():
            self._copy = Ledger(core.ledger.config)
        self._witness = Witness(core.ledger.config)
        self._read = 0
        self._last: OffloadingEvent | None = None
        self.follow()

    def follows(self, core: AuditedCore) -> bool:
        """Whether the core's log still contains all followed events. A crash loses some."""
        if core.log is not self._log:
            return False
        return core.log is None or not self._read or core.log[self._read - 1 : self._read] == [self._last]

    def follow(self) -> bool:
        """Fold and check the new events. Returns whether there were any. Raises `PropertyBroken`."""
        news = self._log[self._read :] if self._log is not None else ()
        for event in news:
            _raise_first(self._witness.follow(event))
            self._copy.apply(event)
            _raise_first(self._witness.compare(self._copy))
            self._read, self._last = self._read + 1, event
        return bool(news)

    def check(self, ledger: Ledger) -> None:
        """Compare the live ledger with the auditor's, and that with the book. Raises `PropertyBroken`."""
        if self._log is None:
            return
        _raise_first([*self._witness.compare_all(self._copy), *check_ledger(self._copy)])
        differs = ledger_difference(ledger, self._copy)
        if differs is not None:
            message = f"the live ledger differs from the fold of its log in {differs}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def save(self, ledger: Ledger) -> None:
        """Save and restore the live ledger; the copy replaces the auditor's. Raises `PropertyBroken`."""
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
    """A `World` around another one, with an auditor for each core.

    cores: returns the present cores of the inner world; their number never changes.
    """

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
        # An action that the world calls impossible may have emitted an event all the same.
        followed = [auditor.follow() for auditor, _ in self._pairs()]
        return done or any(followed)

    def _pairs(self) -> Iterator[tuple[CoreAuditor, AuditedCore]]:
        """Each core with its auditor. A core with another log, as after a crash, gets a new auditor."""
        for place, core in enumerate(self._cores()):
            if not self._auditors[place].follows(core):
                self._auditors[place] = CoreAuditor(core)
            yield self._auditors[place], core

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""
        super().check()
        for auditor, core in self._pairs():
            auditor.check(core.ledger)
