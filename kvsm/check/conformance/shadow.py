"""The shadow: the state of a declared protocol, changed by the declaration's own terms and by nothing else.

A `Conformance` relates the events of a log to a declaration. Its tables are total, and tests compare their
keys:

- where the value of each variable is found: in the ledger, at times in the log, or in neither;
- for each kind of event, the actions that it is an instance of;
- for each variable of the ledger, how it is read;
- for each action that no event records, which component performs it.
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
    """Which component holds the value of a variable."""

    LEDGER = "the ledger's books have it: it is compared"
    TOLD = "the engine's books have it: the log tells what it must be when the ledger relies on it"
    ENGINE = "the engine alone knows it"
    MEMORY = "it is a fact about bytes and copies: no book has it"
    DISK = "it is a fact about the part of the log that a crash leaves"


TRACKED = (Keeper.LEDGER, Keeper.TOLD)
"""The shadow tracks the variables of these keepers."""

Step = tuple[str, Sequence[Row]]
"""An action, and the parameters with which it is taken, one after the other."""


class CannotFollow(KvsmError):
    """A log cannot be compared with the declaration from here on."""


@dataclass(frozen=True)
class EventSteps:
    """What an event of one kind means in a declaration.

    says: the meaning in one line, for people.
    actions: the actions that it may be an instance of.
    steps: these actions with parameters, in order. It may read the shadow, and the ledger before the
        event. None: the declaration does not model such events, and none of its variables may change.
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
        """Reduce these values of the shadow to what the ledger can distinguish."""
        raise NotImplementedError

    def told(self, variable: str, value: Any) -> str | None:
        """Print a result of `seen`; None if the domain of the variable prints it."""
        raise NotImplementedError

    def known(self, variable: str, cells: list[CellKey]) -> list[CellKey]:
        """Return the cells that the ledger has; it has no cells for things outside of its pools."""
        raise NotImplementedError

    def named_by(self, event: OffloadingEvent) -> Mapping[str, Sequence[CellKey]]:
        """Return the cells that an event without steps names: none of them may change."""
        raise NotImplementedError

    def heard(self, event: OffloadingEvent) -> None:
        """Note facts of an event that the ledger does not keep. Called before the ledger applies it."""
        raise NotImplementedError

    def noted(self) -> Any:
        """What was noted of events, for `resume`."""
        raise NotImplementedError

    def resume(self, noted: Any) -> None:
        """Take over what other books noted of events."""
        raise NotImplementedError

    def restart(self, shadow: Shadow) -> None:
        """Apply the declaration's restart to the shadow. Called before the ledger applies the event."""
        raise NotImplementedError

    def begin(self, shadow: Shadow) -> None:
        """Give the shadow the ledger's state, on trust.

        Raises `CannotFollow` if the ledger lacks a part of it.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Conformance:
    """How the events of a log relate to a declaration.

    keepers: where each variable's value is found.
    steps: what each kind of event means.
    unseen: each action that no event records -> which component performs it.
    members: the members of the index sets that have a bound, by name.
    named: a member of an index set for people.
    books: reads a ledger.
    under: makes the same for the configuration of the next process.
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
    """The part of a declaration's state that a log determines.

    cells: the tracked variables, by name.
    actions: the actions that some event records, by name.
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
