"""Which edges of the machine tables were taken: what a search has been through, and what it has not.

An edge is a row of a table for one source state. No hook is needed to see them: the memo of a trigger is
filled from the table the first time that a word is met (`kvsm.states.words`), so a memo that was emptied
before a search holds afterwards just the words that took this trigger.

What it does not see: how often. And a step that was looked up for an event which was then refused counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvsm.states import MACHINES, Machine
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.machine import Arc
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import Codec

CODECS: tuple[Codec, ...] = (BLOCK_WORDS, TRANSFER_WORDS, LEASE_WORDS, REQUEST_WORDS)


class TableEdge(NamedTuple):
    """A row of a machine's table, from one of its sources. why: as the table has it."""

    machine: str
    source: str
    trigger: str
    target: str
    why: str

    def __str__(self) -> str:
        return f"{self.machine} {self.source} --{self.trigger}--> {self.target} ({self.why})"


def all_edges(machine: Machine) -> tuple[TableEdge, ...]:
    """Of a machine, in the order of its triggers and states."""
    return tuple(
        edge_of(machine, state, trigger, arc)
        for trigger in machine.triggers
        for state in machine.states
        for arc in machine.dense[trigger][state]
    )


def edge_of(machine: Machine, state: int, trigger: int, arc: Arc) -> TableEdge:
    """state, trigger: their numbers, with the arc that applied to them."""
    states, why = machine.states, machine.rows[arc.row].why
    return TableEdge(
        machine.name, states(state).name, machine.triggers(trigger).name, states(arc.target).name, why
    )


def never_taken(taken: Collection[TableEdge], machines: Iterable[str] = MACHINES) -> tuple[TableEdge, ...]:
    """Edges of these machines that are not among those taken, in the order of the tables."""
    return tuple(edge for name in machines for edge in all_edges(MACHINES[name]) if edge not in taken)


def forget() -> None:
    """From here on `taken` counts anew, in this process."""
    for codec in CODECS:
        for memo in codec.next:
            memo.clear()


def taken() -> set[TableEdge]:
    """The edges that were taken since `forget`, in this process."""
    edges: set[TableEdge] = set()
    for codec in CODECS:
        machine = codec.machine
        for trigger, memo in zip(machine.triggers, codec.next, strict=True):
            for word in memo:
                state, counts = codec.decode(word)
                arcs = machine.dense[trigger][state]
                edges.update(edge_of(machine, state, trigger, one) for one in arcs if one.admits(counts))
    return edges
