"""Budgets: what a state has left, apart from what it is.

Budgets limit the disturbances of a world, and the code under test never sees them. So two states that differ
only in their budgets act alike: an action that both can afford leads both to the same state, again apart from
their budgets. The explorer takes such an action once. It still counts both states, and takes only actions
that a state can afford.

    budgets = model.budgets
    budgets.whole                           # (1, 0, 2, 3): of failures, of resets, ..., and of all together
    budgets.spends(("fail", 0, 1))          # 0: the place of the budget for failures
    budgets.spent((1, 0, 2, 3), 0)          # (0, 0, 2, 2)

A model without budgets has `NoBudgets`: each of its states stands for itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from kvsm.check.explore.model import Model

Left = tuple[int, ...]
"""What is left of each budget, in a fixed order."""

FREE = -1
"""Stands for the budget of an action that spends none, and for an action that cannot be afforded."""


class ModelBudgets(Protocol):
    """The budgets of a model.

    What is left decides which actions a state can afford. It may decide two things more:

    remembered: after an action, a state may have forgotten what matters only while something is left of one
        of these budgets.
    fading: as soon as this budget is used up, a state is compared without what matters only for it, but has
        not forgotten it. None: there is no such budget.
    """

    whole: Left
    """What an initial state has left."""
    remembered: tuple[int, ...]
    fading: int | None

    def set_left(self, state: Any, left: Left) -> None:
        """Change what a state has left. The state has just been loaded, or has been saved already."""

    def spends(self, action: Any) -> int:
        """The place of the budget that an action spends, or `FREE`."""

    def spent(self, left: Left, budget: int) -> Left:
        """What is left after an action that spends this budget, of which something is left."""

    def fingerprint(self, state: Any) -> Hashable:
        """The model's fingerprint of a state with whole budgets, without what is left."""

    def faded(self, state: Any, fingerprint: Any) -> Hashable:
        """The same, without what matters only for the `fading` budget. fingerprint: the state's."""


class NoBudgets:
    """The budgets of a model that has none, or whose states shall stand for themselves."""

    whole: Left = ()
    remembered: tuple[int, ...] = ()
    fading: int | None = None

    def __init__(self, model: Model[Any, Any]) -> None:
        self.fingerprint = model.fingerprint

    def set_left(self, _state: Any, _left: Left) -> None:
        return None

    def spends(self, _action: Any) -> int:
        return FREE

    def spent(self, left: Left, _budget: int) -> Left:
        return left

    def faded(self, _state: Any, fingerprint: Hashable) -> Hashable:
        return fingerprint


def budgets_of(model: Model[Any, Any]) -> ModelBudgets:
    """The attribute `budgets` of a model, if it has one."""
    budgets: ModelBudgets | None = getattr(model, "budgets", None)
    return NoBudgets(model) if budgets is None else budgets


class Rest:
    """One value of what is left, of all that a search meets.

    memory: whether something is left of each remembered budget.
    is_faded: whether the fading budget is used up.
    """

    __slots__ = ("after", "is_faded", "left", "memory")

    def __init__(self, left: Left, budgets: ModelBudgets) -> None:
        self.left, self.memory = left, tuple(left[place] > 0 for place in budgets.remembered)
        self.is_faded = budgets.fading is not None and not left[budgets.fading]
        self.after: list[int] = []
        """The number of the rest after an action, by the budget that the action spends; `FREE` if it cannot
        be afforded. Its last item is the rest itself, so `FREE` leads there."""


class Rests:
    """The rests that a search has met, by number."""

    def __init__(self, budgets: ModelBudgets) -> None:
        self._budgets = budgets
        self._numbers: dict[Left, int] = {}
        self._rests: list[Rest] = []

    def number(self, left: Left) -> int:
        """The number of a rest."""
        number = self._numbers.setdefault(left, len(self._rests))
        if number == len(self._rests):
            self._rests.append(Rest(left, self._budgets))
        return number

    def __getitem__(self, number: int) -> Rest:
        rest = self._rests[number]
        if not rest.after:
            left, spent = rest.left, self._budgets.spent
            rest.after = [
                self.number(spent(left, budget)) if left[budget] > 0 else FREE for budget in range(len(left))
            ]
            rest.after.append(number)
        return rest
