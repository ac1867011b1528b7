"""The shadow: the state of a declared protocol, changed by the declaration's own terms and by nothing else.

A `Conformance` says how a log is about a declaration. Its tables are total, and tests compare their keys:

- which variables the ledger keeps, which the log tells at times, and which neither of them knows;
- for each kind of event the actions that it is an instance of;
- for each variable of the ledger, how it is read;
- for each action that no event tells, whose it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvsm.check.conformance.cells import CellKey, MachineWords, Member, ProtocolCells
from kvsm.check.conformance.compiled import CompiledAction, Row, compile_action, index_cells
from kvsm.check.protocol.terms import Declaration, Term, Words
from kvsm.core.ledger import Ledger
from kvsm.errors import KvsmError
from kvsm.events import OffloadConfig, OffloadingEvent


class Keeper(Enum):
    """Who knows the value of a variable."""

    LEDGER = "the ledger's books have it: it is compared"
    TOLD = "the engine's books have it: the log tells what it must be when the ledger relies on it"
    ENGINE = "the engine alone knows it"
    MEMORY = "it is a fact about bytes and copies: no book has it"
    DISK = "it is a fact about the part of the log that a crash leaves"


TRACKED = (Keeper.LEDGER, Keeper.TOLD)
"""Whose variables the shadow has."""

Step = tuple[str, Sequence[Row]]
"""An action, and the parameters with which it is taken, one after the other."""


class CannotFollow(KvsmError):
    """A log cannot be compared with the declaration from here on."""


@dataclass(frozen=True)
class EventSteps:
    """What an event of one kind means in a declaration.

    says: how it does it, in one line for people.
    actions: the actions that it may be an instance of.
    steps: these actions with parameters, in order. It may look at the shadow, and at the ledger before the
        event. None: the declaration does not speak of such events, and nothing of it may change.
    """

    says: str
    actions: tuple[str, ...] = ()
    steps: Callable[[Shadow, Ledger, Any], Iterator[Step]] | None = None


UNSPOKEN = EventSteps("The protocol does not speak of it.")
"""No action of the protocol. If such an event changes a variable of the protocol, conformance fails."""


class LedgerBooks:
    """Reads the variables of a declaration from a ledger. A `Conformance` makes one for each ledger."""

    def values(self, variable: str, cells: Sequence[CellKey]) -> list[Any]:
        """The values of these cells, as `seen` gives them."""
        raise NotImplementedError

    def every(self, variable: str) -> dict[CellKey, Any]:
        """All cells that differ from the initial value."""
        raise NotImplementedError

    def seen(self, variable: str, values: list[Any]) -> list[Any]:
        """As much of these values of the shadow as the ledger can tell."""
        raise NotImplementedError

    def told(self, variable: str, value: Any) -> str | None:
        """What `seen` gives, for people; None if the value's domain says it."""
        raise NotImplementedError

    def known(self, variable: str, cells: list[CellKey]) -> list[CellKey]:
        """Those of these cells that the ledger has. It has none for things outside of its pools."""
        raise NotImplementedError

    def named_by(self, event: OffloadingEvent) -> Mapping[str, Sequence[CellKey]]:
        """The cells that an event without steps names: nothing of them may change."""
        raise NotImplementedError

    def heard(self, event: OffloadingEvent) -> None:
        """Note what an event tells that the ledger does not keep. Called before the ledger applies it."""
        raise NotImplementedError

    def noted(self) -> Any:
        """What was noted of events, for `resume`."""
        raise NotImplementedError

    def resume(self, noted: Any) -> None:
        """Take over what other books noted of events."""
        raise NotImplementedError

    def restart(self, shadow: Shadow) -> None:
        """Make of the shadow what a restart makes of the declaration's state. Called before the ledger
        applies the event."""
        raise NotImplementedError

    def begin(self, shadow: Shadow) -> None:
        """Give the shadow the ledger's state, on trust.

        Raises `CannotFollow` if the ledger lacks a part of it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Conformance:
    """How a log is about a declaration.

    keepers: who knows each variable.
    steps: what each kind of event means.
    unseen: each action that no event tells, and whose it is.
    members: the members of the index sets that have a bound, by name.
    named: a member of an index set for people.
    books: reads a ledger.
    under: the same for another configuration, with which another process goes on.
    """

    declared: Declaration
    keepers: Mapping[str, Keeper]
    steps: Mapping[type[OffloadingEvent], EventSteps]
    unseen: Mapping[str, str]
    members: Mapping[str, Sequence[Member]]
    named: Callable[[str, Member], str]
    books: Callable[[Ledger, Shadow], LedgerBooks]
    under: Callable[[OffloadConfig], Conformance]


@dataclass(frozen=True)
class Refusal:
    """The guard of an action does not hold."""

    action: str
    row: Row
    demand: Term


class Shadow:
    """The state of a declaration as far as a log tells it.

    cells: the tracked variables, by name.
    actions: the actions that some event tells, by name.
    taken: how often each action was taken.
    """

    def __init__(self, conformance: Conformance) -> None:
        self.conformance = conformance
        declared, members = conformance.declared, conformance.members
        tables: dict[int, MachineWords] = {}
        self.cells: dict[str, ProtocolCells] = {}
        for one in declared.variables:
            if conformance.keepers[one.name] in TRACKED:
                domain, table = one.domain, None
                if isinstance(domain, Words):
                    table = tables.setdefault(id(domain.machine), MachineWords(domain.machine))
                own = members.get(one.indices[0].name) if len(one.indices) == 1 else None
                self.cells[one.name] = ProtocolCells(one, table, own)
        told = {name for one in conformance.steps.values() for name in one.actions}
        actions = [one for one in declared.actions if one.name in told]
        index_cells(declared, actions, self.cells, members)
        self.actions: dict[str, CompiledAction] = {
            one.name: compile_action(declared, one, self.cells, members) for one in actions
        }
        self.taken: Counter[str] = Counter()

    def take(self, action: str, rows: Sequence[Row]) -> Refusal | None:
        """Take an action for each row in turn. Stops at the first row that its guard refuses."""
        compiled = self.actions[action]
        refused = compiled.take(rows)
        if refused is not None:
            row, place = refused
            return Refusal(action, row, compiled.demands[place])
        self.taken[action] += len(rows)
        return None

    def put(self, variable: str, values: Iterable[tuple[CellKey, Any]]) -> None:
        """Give cells their values, on trust."""
        put = self.cells[variable].put
        for cell, value in values:
            put(cell, value)

    def forget_all(self) -> None:
        """Give every cell its initial value."""
        for cells in self.cells.values():
            cells.clear()

    def saved(self) -> dict[str, dict[CellKey, Any]]:
        """The state, as `load` takes it."""
        return {name: dict(one.values) for name, one in self.cells.items()}

    def load(self, saved: Mapping[str, Mapping[CellKey, Any]]) -> None:
        """Take this state."""
        for name, values in saved.items():
            self.cells[name].clear()
            self.put(name, values.items())
            self.cells[name].touched.clear()
