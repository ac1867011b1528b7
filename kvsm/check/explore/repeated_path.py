"""Repeat a path that was found with budgets.

The explorer takes an action once for all states that differ only in their budgets, on the first of them that
it met. Actions name things by position, and the same thing may have another position in another state of the
same fingerprint: reports wait in another order, or another worker has done what this one did. So a path from
the explorer names the right kinds of actions, and perhaps not the right positions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from kvsm.check.explore.budgets import Left, ModelBudgets
from kvsm.check.explore.expansion import Expander, Task
from kvsm.check.explore.model import Model
from kvsm.check.worlds.world import Finding


class PathStep(NamedTuple):
    """An action with what is left before it. after: the fingerprint that it leads to, without the budgets,
    faded if `is_faded`; None for an action that breaks something."""

    action: Any
    left: Left
    after: Hashable
    is_faded: bool


class PathNotRepeated(Exception):
    """Some state on a path has no action that leads to the next one: equal fingerprints hide a difference."""


def repeated(
    model: Model[Any, Any],
    budgets: ModelBudgets,
    start: int,
    steps: Iterable[PathStep],
    broken: Finding | None,
) -> tuple[tuple[Any, ...], Finding | None]:
    """Repeat a path from an initial state. Returns its actions by the right names, and what the last one
    broke.

    broken: what it broke when it was found.

    Raises `PathNotRepeated`.
    """
    expander = Expander(model, budgets, ())
    saved = model.save(list(model.initial())[start])
    path: list[Any] = []
    for step in steps:
        for action in _alike(model.actions(model.load(saved)), step.action):
            found = expander.expand(Task(saved, [(action, step.left)]))
            if step.after is None and found.broken is not None and broken is not None:
                if found.broken[1].property == broken.property:
                    return (*path, action), found.broken[1]
            elif found.broken is None and found.new:
                (fingerprint, seen), *_ = found.new.items()
                if step.after == (seen.faded if step.is_faded else fingerprint):
                    saved = seen.saved
                    path.append(action)
                    break
        else:
            raise PathNotRepeated
    return tuple(path), broken


def _alike(actions: Iterable[Any], action: Any) -> Iterator[Any]:
    """The action, if it is among these, and then the others of its name."""
    actions = list(actions)
    if action in actions:
        yield action
    if isinstance(action, tuple):
        yield from (other for other in actions if other[0] == action[0] and other != action)
