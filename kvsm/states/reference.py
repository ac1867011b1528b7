"""The same machines, as the library `transitions` understands them: to check the tables, and to draw them.

`words.py` runs a table fast, through ranges resolved beforehand, packed words and memos. A `ReferenceModel`
reads the same rows and shares none of that: counters are attributes of a model, guards are conditions,
effects are callbacks. A property test drives the two side by side, so an error in the fast path passes only
if it is made twice, in two different ways. A step costs microseconds here, and nanoseconds there.

`kvsm/explain/diagrams.py` lets `transitions` draw what `library_machine` builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import transitions

from kvsm.states.machine import Machine, Row, UndefinedStep

Groups = Mapping[str, tuple[IntEnum, ...]]
"""States that rows leave together, by the group's name. No state is in two groups."""


def library_machine(
    kind: type[transitions.Machine],
    machine: Machine,
    options: Callable[[Row], dict[str, Any]],
    *,
    groups: Groups | None = None,
    **named: Any,
) -> transitions.Machine:
    """A machine of `transitions` with a transition for each row.

    kind: the class to build, of those that `transitions` has.
    options: what a row's transition has besides trigger, source and target.
    groups: states to nest, if `kind` can. A row that leaves all states of a group leaves the group.
    named: other arguments of `kind`.
    """
    groups = groups or {}
    first = machine.initial
    group_of = {state: name for name, members in groups.items() for state in members}
    states: list[Any] = [{"name": name, "children": list(members)} for name, members in groups.items()]
    states += [state for state in machine.states if state not in group_of]
    rows = [
        {
            "trigger": row.trigger.name,
            "source": _sources(row, groups),
            "dest": "=" if row.target is None else row.target,
            **options(row),
        }
        for row in machine.rows
    ]
    return kind(
        states=states,
        transitions=rows,
        initial=f"{group_of[first]}_{first.name}" if first in group_of else first,
        auto_transitions=False,
        **named,
    )


def _sources(row: Row, groups: Groups) -> list[IntEnum | str]:
    """The row's states; a whole group that the row leaves is named instead of its states."""
    sources: Sequence[IntEnum | str] = row.sources
    for name, members in groups.items():
        if row.target is not None and row.target not in members and set(members) <= set(sources):
            sources = [name, *(state for state in sources if state not in members)]
    return list(sources)


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
        """The counters' values, in the machine's order."""
        return tuple(getattr(self, counter.name) for counter in self.machine.counters)

    def step(self, trigger: IntEnum) -> None:
        """Take the trigger, or raise `UndefinedStep` and stay as it was.

        `transitions` refuses in two ways: it raises if no row leaves the state, and answers False if every
        condition failed. Both raise here.
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


def reference_model(machine: Machine, **counts: int) -> ReferenceModel:
    """A model of `machine`.

    counts: the counters to start with; a counter that is absent starts at 0.

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
