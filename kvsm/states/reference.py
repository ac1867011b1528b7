"""The same machines, built with the library `transitions`.

`kvsm/explain/diagrams.py` draws them with it, and tests compare them with `words.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import transitions

from kvsm.states.machine import Machine, Row

Groups = Mapping[str, tuple[IntEnum, ...]]
"""Group name -> its states, which a row may leave together. No state is in two groups."""


def library_machine(
    kind: type[transitions.Machine],
    machine: Machine,
    options: Callable[[Row], dict[str, Any]],
    *,
    groups: Groups | None = None,
    **named: Any,
) -> transitions.Machine:
    """Build a machine of `transitions`, with a transition for each row.

    kind: the class of `transitions` to build.
    options: returns the arguments of a row's transition besides trigger, source and target.
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
    """Return the source states of a row. A group of which the row leaves all states stands for these
    states."""
    sources: Sequence[IntEnum | str] = row.sources
    for name, members in groups.items():
        if row.target is not None and row.target not in members and set(members) <= set(sources):
            sources = [name, *(state for state in sources if state not in members)]
    return list(sources)
