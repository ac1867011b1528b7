"""Reduce the actions of a failed run to the few that are needed to fail.

Actions name things by their position, so a run without some of its actions is still a valid run. Each
candidate is run in a fresh world, and accepted if it breaks the same property. Reduction first removes whole
kinds of action, then all actions on one thing, then ever smaller pieces down to single actions (delta
debugging: Zeller and Hildebrandt, 2002). Last it makes numbers smaller. The result is minimal in that no
single action can be removed. A shorter failing run may still exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from kvsm.check.walks.walk import rest
from kvsm.check.worlds.world import Action, Finding, World, finding_of
from kvsm.errors import KvsmError
from kvsm.system.stopping import CutShort, IsOver, go_on_unless, never

Item = TypeVar("Item")

MOST_RERUNS = 4000
"""The limit of reruns in one reduction."""


class Rerun(msgspec.Struct, frozen=True):
    """The outcome of actions in a fresh world.

    actions: the actions that happened, up to the failing one.
    finding: the failure; None if nothing failed.
    """

    world: World
    actions: tuple[Action, ...]
    finding: Finding | None


class Reduction(msgspec.Struct, frozen=True):
    """The result of a reduction: the fewest actions that still fail.

    reruns: the number of reruns that it took.
    minimal: whether no single action can be removed; False: a limit ended the reduction before.
    """

    actions: tuple[Action, ...]
    finding: Finding
    reruns: int
    minimal: bool


class NotRepeated(KvsmError):
    """The same actions do not repeat a failure, so it depends on something else, too."""


def rerun(
    make_world: Callable[[], World],
    actions: Sequence[Action],
    *,
    to_rest: bool = False,
    is_over: IsOver = never,
) -> Rerun:
    """Run these actions in a fresh world, then check everything. Actions that cannot happen are skipped.

    to_rest: wind down afterwards and check again. The actions of winding down are not recorded.
    is_over: asked between two actions. Raises `CutShort` if it returns True.
    """
    world = make_world()
    done: list[Action] = []
    try:
        for action in actions:
            go_on_unless(is_over)
            done.append(action)
            if not world.do(action):
                done.pop()
        world.check()
        if to_rest:
            rest(world, [], is_over)
    except Exception as error:  # whatever the real code raises is a finding
        return Rerun(world, tuple(done), finding_of(error))
    return Rerun(world, tuple(done), None)


def reduce(
    make_world: Callable[[], World],
    actions: Sequence[Action],
    finding: Finding,
    *,
    most_reruns: int = MOST_RERUNS,
    is_over: IsOver = never,
) -> Reduction:
    """Reduce actions to few ones that break the same property at the same place.

    Raises `NotRepeated` if all actions together do not break it again.

    make_world: creates a fresh world with the configuration of the failed run.
    is_over: asked between two actions, after a first run of all actions. If it returns True, the smallest
        failure so far is returned.
    """
    reducer = _Reducer(make_world, finding, most_reruns)
    # Wind down only if the failure does not show otherwise: without winding down the reduced run is shorter.
    if not reducer.fails(list(actions)) and not reducer.fails_on_the_way_to_rest(list(actions)):
        raise NotRepeated(f"{len(actions)} actions broke {finding.property}, and done again they do not")
    reducer.is_over = is_over
    is_minimal = False
    with suppress(CutShort):
        reducer.leave_out_kinds()
        reducer.leave_out_things()
        reducer.leave_out_pieces()
        reducer.make_numbers_small()
        is_minimal = reducer.reruns < most_reruns
    return Reduction(tuple(reducer.best), reducer.finding, reducer.reruns, is_minimal)


def reduce_pieces(
    items: Sequence[Item], tried: Callable[[Sequence[Item]], Sequence[Item] | None]
) -> Sequence[Item]:
    """Delta debugging: remove halves, quarters, and so on; then single items, until none can be removed.

    tried: tries a candidate. Returns the items to continue with if the candidate still fails, otherwise None.
        It may raise `StopIteration` to end the search.
    """
    best, size = items, max(1, len(items) // 2)
    while True:
        before, start = len(best), 0
        while start < len(best):
            try:
                fewer = tried([*best[:start], *best[start + size :]])
            except StopIteration:
                return best
            if fewer is None:
                start += size
            else:
                best = fewer
        if size > 1:
            size //= 2
        elif len(best) == before:
            return best


class _Reducer:
    """The state of a reduction. best: the shortest failing list so far.

    A failing candidate replaces `best`, cut after the failure and without actions that could not happen.
    """

    def __init__(self, make_world: Callable[[], World], finding: Finding, most_reruns: int) -> None:
        self._make_world, self.finding, self._most_reruns = make_world, finding, most_reruns
        self.is_over: IsOver = never
        self.best: list[Action] = []
        self.reruns = 0
        self._to_rest = False

    def fails(self, candidate: list[Action]) -> bool:
        if self.reruns >= self._most_reruns:
            return False
        self.reruns += 1
        outcome = rerun(self._make_world, candidate, to_rest=self._to_rest, is_over=self.is_over)
        if outcome.finding is None or not outcome.finding.is_like(self.finding):
            return False
        self.best, self.finding = list(outcome.actions), outcome.finding
        return True

    def fails_on_the_way_to_rest(self, candidate: list[Action]) -> bool:
        """Whether the candidate fails while it winds down. Later candidates are wound down as well."""
        self._to_rest = True
        return self.fails(candidate)

    def leave_out_kinds(self) -> None:
        """Try to remove each kind of action, the most frequent first, so that later reruns are faster."""
        for (name,), _ in Counter(action[:1] for action in self.best).most_common():
            self.fails([action for action in self.best if action[0] != name])

    def leave_out_things(self) -> None:
        """Try to remove all actions of one kind on one request, copy or place."""
        for thing, _ in Counter(action[:2] for action in self.best if len(action) > 1).most_common():
            self.fails([action for action in self.best if action[:2] != thing])

    def leave_out_pieces(self) -> None:
        """Try to remove halves, quarters, and so on; then single actions."""
        reduce_pieces(self.best, self._tried)

    def _tried(self, candidate: Sequence[Action]) -> list[Action] | None:
        if self.reruns >= self._most_reruns:
            raise StopIteration
        return self.best if self.fails(list(candidate)) else None

    def make_numbers_small(self) -> None:
        """Try 0 and 1 in place of larger numbers. This may shorten the list, and never lengthens it."""
        for place in range(len(self.best)):
            for number in range(1, len(self.best[place]) if place < len(self.best) else 0):
                self._make_small(place, number)

    def _make_small(self, place: int, number: int) -> None:
        for smaller in (0, 1):
            if place >= len(self.best) or number >= len(self.best[place]):
                return
            action = self.best[place]
            old = action[number]
            if not isinstance(old, int) or old <= smaller:
                return
            changed = (*action[:number], smaller, *action[number + 1 :])
            if self.fails([*self.best[:place], changed, *self.best[place + 1 :]]):
                return
