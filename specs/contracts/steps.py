"""One step of a machine in two ways: by the code, and by a plain reading of the machine's rows.

`taken` calls `Machine.step`, from which the tables of the hot path are computed. `by_rows` reads the same
rows without any code of `taken`: without precomputed ranges and without a dense table.
"""

from __future__ import annotations

from kvsm.states import Machine
from kvsm.states.machine import VOID, Row, UndefinedStep

Step = tuple[int, ...] | None
"""State and counters after a step; None if the step was refused."""


def taken(machine: Machine, state: int, counts: tuple[int, ...], trigger: int) -> Step:
    """The step that the code takes."""
    try:
        target, after = machine.step(state, counts, trigger)
    except UndefinedStep:
        return None
    return (target, *after)


def by_rows(machine: Machine, state: int, counts: tuple[int, ...], trigger: int) -> Step:
    """The step by the first matching row: it names the state and the trigger, its guard holds, and its effect
    keeps every counter within its limit."""
    for row in machine.rows:
        if trigger == row.trigger and any(state == source for source in row.sources):
            after = _effect(machine, row, counts)
            if after is not None:
                return (state if row.target is None else int(row.target), *after)
    return None


def _effect(machine: Machine, row: Row, counts: tuple[int, ...]) -> tuple[int, ...] | None:
    after = []
    for counter, count in zip(machine.counters, counts):
        least, most = row.when.get(counter.name, (0, counter.limit))
        effect = row.then.get(counter.name, 0)
        value = 0 if effect == VOID else count + effect
        if count < least or count > most or value < 0 or value > counter.limit:
            return None
        after.append(value)
    return tuple(after)
