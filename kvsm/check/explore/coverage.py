"""Which edges of the machine tables a search has taken, and which it has not.

An edge is a row of a table for one source state. No hook is needed to see edges: `kvsm.states.words` fills
the memo of a trigger from the table when a word is met for the first time. A memo that was emptied before a
search therefore holds exactly the words that took this trigger.

The native body has no memo, and records each arc that it takes.

Not counted: how often an edge was taken. A step that was looked up for a refused event counts as taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvsm.core import native
from kvsm.states import MACHINES, Machine
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.machine import Arc
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import Codec

CODECS: tuple[Codec, ...] = (BLOCK_WORDS, TRANSFER_WORDS, LEASE_WORDS, REQUEST_WORDS)


class TableEdge(NamedTuple):
    """A row of a machine's table, from one of its sources. why: the reason that the table gives."""

    machine: str
    source: str
    trigger: str
    target: str
    why: str

    @property
    def name(self) -> str:
        """The edge without its reason."""
        return f"{self.machine} {self.source} --{self.trigger}--> {self.target}"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def all_edges(machine: Machine) -> tuple[TableEdge, ...]:
    """All edges of a machine, in the order of its triggers and states."""
    return tuple(
        edge_of(machine, state, trigger, arc)
        for trigger in machine.triggers
        for state in machine.states
        for arc in machine.dense[trigger][state]
    )


def edge_of(machine: Machine, state: int, trigger: int, arc: Arc) -> TableEdge:
    """The edge of an arc. state, trigger: their numbers."""
    states, why = machine.states, machine.rows[arc.row].why
    return TableEdge(
        machine.name, states(state).name, machine.triggers(trigger).name, states(arc.target).name, why
    )


def never_taken(taken: Collection[TableEdge], machines: Iterable[str] = MACHINES) -> tuple[TableEdge, ...]:
    """The edges of these machines that are not in `taken`, in the order of the tables."""
    return tuple(edge for name in machines for edge in all_edges(MACHINES[name]) if edge not in taken)


def forget() -> None:
    """Clear the edges that this process has taken so far."""
    native.forget()
    for codec in CODECS:
        for memo in codec.next:
            memo.clear()


def taken() -> set[TableEdge]:
    """The edges that this process has taken since `forget`."""
    edges: set[TableEdge] = set()
    for codec in CODECS:
        machine = codec.machine
        for trigger, memo in zip(machine.triggers, codec.next, strict=True):
            for word in memo:
                state, counts = codec.decode(word)
                arcs = machine.dense[trigger][state]
                edges.update(edge_of(machine, state, trigger, arc) for arc in arcs if arc.admits(counts))
    for name, places in native.arcs_taken().items():
        in_order = all_edges(MACHINES[name])
        edges.update(in_order[place] for place in places)
    return edges
