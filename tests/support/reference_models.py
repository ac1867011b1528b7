"""The state machines run by the library `transitions`, to compare with kvsm's own implementation.

`kvsm/states/words.py` runs a table fast, with precomputed ranges, packed words and memos. A `ReferenceModel`
reads the same rows and shares none of that: counters are attributes of a model, guards are conditions,
effects are callbacks. So an error in the fast path goes unnoticed only if it is made twice, in two different
ways.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial

import transitions

from kvsm.states.machine import Machine, Row, UndefinedStep
from kvsm.states.reference import library_machine


class ReferenceModel:
    """An instance of `machine`: its `state`, and one attribute per counter."""

    state: IntEnum

    def __init__(self, machine: Machine, counts: dict[str, int]) -> None:
        self.machine = machine
        for counter in machine.counters:
            setattr(self, counter.name, counts.pop(counter.name, 0))
        if counts:
            raise TypeError(f"machine {machine.name} has no counter {', '.join(sorted(counts))}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the counters' values, in the machine's order."""
        return tuple(getattr(self, counter.name) for counter in self.machine.counters)

    def step(self, trigger: IntEnum) -> None:
        """Take the trigger, or raise `UndefinedStep` without a change.

        `transitions` refuses in two ways: it raises if no row leaves the state, and returns False if every
        condition failed. Both raise here.
        """
        try:
            taken = self.trigger(trigger.name)  # type: ignore[attr-defined]
        except transitions.MachineError:
            taken = False
        if not taken:
            raise UndefinedStep(f"{self.machine.name}: {trigger.name} in {self.state.name}{self.counts}")

    def admits(self, row: Row) -> bool:
        """Whether a row's guard holds, and its effect stays within every counter's limit."""
        for counter in self.machine.counters:
            count = getattr(self, counter.name)
            low, high = row.when.get(counter.name, (0, counter.limit))
            if not (low <= count <= high and 0 <= _after(count, row, counter.name) <= counter.limit):
                return False
        return True

    def change(self, row: Row) -> None:
        """Apply a row's effect to the counters."""
        for name in row.then:
            setattr(self, name, _after(getattr(self, name), row, name))


def reference_model(machine: Machine, **counts: int) -> ReferenceModel:
    """Return a model of `machine`.

    counts: the initial counters; absent ones start at 0.

    `transitions` also gives the model a method for each trigger.
    """
    model = ReferenceModel(machine, counts)
    library_machine(
        transitions.Machine,
        machine,
        lambda row: {"conditions": partial(model.admits, row), "after": partial(model.change, row)},
        model=model,
    )
    return model


def _after(count: int, row: Row, counter: str) -> int:
    effect = row.then.get(counter, 0)
    return 0 if isinstance(effect, str) else count + effect
