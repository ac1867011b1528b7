"""A state machine as data: one table, from which each step follows.

A machine has states, triggers, counters with limits, and rows. A row says: in one of `sources`, on
`trigger`, if the counters are within `when`, go to `target` and change the counters by `then`. Everything
else is derived from the rows: the words and memos of the hot path (`words.py`), the same machine for the
library `transitions` (`reference.py`), and the diagrams (`kvsm/explain/diagrams.py`).

Two things hold for every machine:

- At most one row matches a (state, trigger, counters) triple. This is checked when a machine is declared.
- An effect never takes a counter out of its range: a row that would do so does not match. So reaching a limit
  is an illegal transition, and never an overflow into the next field of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product

from kvsm.errors import ConfigError

VOID = "void"
"""Effect on a counter: set it to zero."""


class UndefinedStep(Exception):
    """No row matches. Internal: `StateWords` and the ledger turn it into `IllegalTransition`."""


@dataclass(frozen=True)
class Counter:
    """A count that belongs to a state, from 0 to `limit`, such as the number of pins."""

    name: str
    bits: int

    @property
    def limit(self) -> int:
        """The largest count."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Row:
    """One line of a table.

    why: the reason, for people.
    when: counter -> (least, most) value before the step.
    then: counter -> amount added to it, or `VOID`.
    """

    sources: tuple[IntEnum, ...]
    trigger: IntEnum
    target: IntEnum | None
    """None: the state stays as it is."""
    why: str
    when: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    then: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arc:
    """A row for one source state, in the dense table. Its ranges also keep the counters within their
    limits."""

    target: int
    ranges: tuple[tuple[int, int], ...]
    deltas: tuple[int | None, ...]
    row: int

    def admits(self, counts: tuple[int, ...]) -> bool:
        """Whether the counters are in range."""
        return all(low <= count <= high for count, (low, high) in zip(counts, self.ranges, strict=True))


class Machine:
    """States, triggers, counters and rows; `dense[trigger][state]` lists the arcs that may apply."""

    def __init__(
        self,
        name: str,
        states: type[IntEnum],
        triggers: type[IntEnum],
        counters: tuple[Counter, ...],
        rows: tuple[Row, ...],
    ) -> None:
        self.name, self.states, self.triggers = name, states, triggers
        self.counters, self.rows = counters, rows
        self.initial: IntEnum = next(iter(states))
        self.dense: tuple[tuple[tuple[Arc, ...], ...], ...] = tuple(
            tuple(tuple(self._arcs(state, trigger)) for state in states) for trigger in triggers
        )
        self._signed: tuple[object, str] = None, ""
        """The table whose signature was computed last, and that signature: each new core needs it."""
        self._check()

    def step(self, state: int, counts: tuple[int, ...], trigger: int) -> tuple[int, tuple[int, ...]]:
        """Return (state, counts) after the one arc that applies.

        Raises `UndefinedStep` if no arc applies, and `ValueError` unless there is one count for each counter.
        """
        for arc in self.dense[trigger][state]:
            if arc.admits(counts):
                after = tuple(
                    0 if delta is None else count + delta for count, delta in zip(counts, arc.deltas)
                )
                return arc.target, after
        raise UndefinedStep

    def signature(self) -> str:
        """The table as text, equal for equal tables."""
        if self._signed[0] is not self.dense:
            self._signed = self.dense, self._signature()
        return self._signed[1]

    def _signature(self) -> str:
        lines = [f"machine {self.name}"]
        lines += [f"state {state.value} {state.name}" for state in self.states]
        lines += [f"counter {counter.name} {counter.bits}" for counter in self.counters]
        for trigger in self.triggers:
            for state in self.states:
                for arc in self.dense[trigger][state]:
                    lines.append(f"{trigger.name} {state.name} {arc.target} {arc.ranges} {arc.deltas}")
        return "\n".join(lines)

    def _arcs(self, state: IntEnum, trigger: IntEnum) -> list[Arc]:
        arcs = []
        for number, row in enumerate(self.rows):
            if row.trigger != trigger or state not in row.sources:
                continue
            ranges, deltas = [], []
            for counter in self.counters:
                low, high = row.when.get(counter.name, (0, counter.limit))
                effect = row.then.get(counter.name, 0)
                delta = None if isinstance(effect, str) else effect
                if delta is not None:
                    low, high = max(low, -delta), min(high, counter.limit - delta)
                ranges.append((low, high))
                deltas.append(delta)
            target = state if row.target is None else row.target
            arcs.append(Arc(int(target), tuple(ranges), tuple(deltas), number))
        return arcs

    def _check(self) -> None:
        names = {counter.name for counter in self.counters}
        for row in self.rows:
            unknown = (set(row.when) | set(row.then)) - names
            if unknown or any(effect != VOID for effect in row.then.values() if isinstance(effect, str)):
                raise ConfigError(f"machine {self.name}: row {row} names an unknown counter or effect")
        for trigger, state in product(self.triggers, self.states):
            arcs = self.dense[trigger][state]
            for index, first in enumerate(arcs):
                for second in arcs[index + 1 :]:
                    if all(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(first.ranges, second.ranges)):
                        raise ConfigError(
                            f"machine {self.name}: two rows match {state.name} on {trigger.name}"
                        )
