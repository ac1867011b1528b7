"""The same machine in another voice: each table as the library `transitions` runs it.

`words.py` runs a table fast, through ranges resolved beforehand, packed words and memos. This module
reads the same rows by a second route that shares none of that: counters are attributes of a model,
guards are conditions, effects are callbacks. The two are driven side by side by a property test, so
that an error in the fast path has to be made twice, in two different ways, to pass.

A step costs microseconds here, and nanoseconds there: this is for checking and for exploring by hand.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import Any

import transitions

from kvsm.states.machine import Machine, Row, UndefinedStep


class ReferenceModel:
    """One thing that lives by `machine`: `state`, and one attribute for each of the machine's counters."""

    state: IntEnum

    def __init__(self, machine: Machine, counts: dict[str, int]) -> None:
        self.machine = machine
        for counter in machine.counters:
            setattr(self, counter.name, counts.pop(counter.name, 0))
        if counts:
            raise TypeError(f"machine {machine.name} has no counter {', '.join(sorted(counts))}")

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, counter.name) for counter in self.machine.counters)

    def step(self, trigger: IntEnum) -> None:
        """Take the trigger, or raise `UndefinedStep` and stay as it was.

        `transitions` has two ways to refuse: it raises when no row leaves the state, and answers False
        when every condition failed. Here the two are one.
        """
        try:
            taken = self.trigger(trigger.name)  # type: ignore[attr-defined]
        except transitions.MachineError:
            taken = False
        if not taken:
            raise UndefinedStep(f"{self.machine.name}: {trigger.name} in {self.state.name}{self.counts}")

    def admits(self, row: Row) -> bool:
        """The condition of a row: its guard holds, and its effect stays within every counter's limit."""
        for counter in self.machine.counters:
            count = getattr(self, counter.name)
            low, high = row.when.get(counter.name, (0, counter.limit))
            if not (low <= count <= high and 0 <= _after(count, row, counter.name) <= counter.limit):
                return False
        return True

    def change(self, row: Row) -> None:
        """The effect of a row."""
        for name in row.then:
            setattr(self, name, _after(getattr(self, name), row, name))


def reference_model(machine: Machine, state: IntEnum | None = None, **counts: int) -> ReferenceModel:
    """A model of `machine` in `state` (None: the initial one), with these counts (absent: 0).

    Each trigger is also a method of the model by its own name, as `transitions` makes them, and
    `model.get_triggers` of the library's machine tells which ones a state knows.
    """
    model = ReferenceModel(machine, counts)
    transitions.Machine(
        model,
        states=machine.states,
        initial=machine.initial if state is None else state,
        transitions=[_transition(model, row) for row in machine.rows],
        auto_transitions=False,
    )
    return model


def _transition(model: ReferenceModel, row: Row) -> dict[str, Any]:
    return {
        "trigger": row.trigger.name,
        "source": list(row.sources),
        "dest": "=" if row.target is None else row.target,
        "conditions": partial(model.admits, row),
        "after": partial(model.change, row),
    }


def _after(count: int, row: Row, counter: str) -> int:
    effect = row.then.get(counter, 0)
    return 0 if isinstance(effect, str) else count + effect
