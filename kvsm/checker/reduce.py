"""Reduction: from all that was done in a run to the few actions that it takes.

Actions name things by their place, so that a run from which some were left out is a run still, only another
one: each candidate is simply done, on a fresh world, and counts if it breaks the same property. First whole
kinds are left out, then all that concerns one thing, then ever smaller pieces down to single actions
(delta debugging: Zeller and Hildebrandt, 2002), and last the numbers are made small. What comes out is
minimal: no single action of it can be left out. It need not be the shortest that there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvsm.checker.walk import rest
from kvsm.errors import KvsmError
from kvsm.worlds.world import Action, Finding, World, finding_of

MOST_RERUNS = 4000


class Rerun(msgspec.Struct, frozen=True):
    """actions: those that happened, up to the one that failed. finding: None if nothing failed."""

    world: World
    actions: tuple[Action, ...]
    finding: Finding | None


class Reduction(msgspec.Struct, frozen=True):
    """actions: the fewest that were found. finding: theirs. reruns: how many it took."""

    actions: tuple[Action, ...]
    finding: Finding
    reruns: int


class NotRepeated(KvsmError):
    """A failure that does not come again when the same is done: something outside decides, too."""


def rerun(make_world: Callable[[], World], actions: Sequence[Action], *, to_rest: bool = False) -> Rerun:
    """Do all this in a fresh world, and look at everything at the end. What cannot happen is left out.

    to_rest: then wind down, and look again. What happens on the way is none of the actions.
    """
    world = make_world()
    done: list[Action] = []
    try:
        for action in actions:
            done.append(action)
            if not world.do(action):
                done.pop()
        world.check()
        if to_rest:
            rest(world, [])
    except Exception as error:  # Whatever the real code raises is what is looked for.
        return Rerun(world, tuple(done), finding_of(error))
    return Rerun(world, tuple(done), None)


def reduce(
    make_world: Callable[[], World],
    actions: Sequence[Action],
    finding: Finding,
    *,
    most_reruns: int = MOST_RERUNS,
) -> Reduction:
    """As few of these actions as break the same property. Raises `NotRepeated` if all of them do not.

    make_world: a fresh world each time, of the configuration in which they failed.
    """
    reducer = _Reducer(make_world, finding, most_reruns)
    # What is wrong with the way to rest is seen there alone. All else is shorter told without that way.
    if not reducer.fails(list(actions)) and not reducer.fails_on_the_way_to_rest(list(actions)):
        raise NotRepeated(f"{len(actions)} actions broke {finding.property}, and done again they do not")
    reducer.leave_out_kinds()
    reducer.leave_out_things()
    reducer.leave_out_pieces()
    reducer.make_numbers_small()
    return Reduction(tuple(reducer.best), reducer.finding, reducer.reruns)


class _Reducer:
    """best: the shortest failing list so far. A candidate that fails takes its place, cut behind the failure
    and without what could not happen."""

    def __init__(self, make_world: Callable[[], World], finding: Finding, most_reruns: int) -> None:
        self._make_world, self.finding, self._most_reruns = make_world, finding, most_reruns
        self.best: list[Action] = []
        self.reruns = 0
        self._to_rest = False

    def fails(self, candidate: list[Action]) -> bool:
        if self.reruns >= self._most_reruns:
            return False
        self.reruns += 1
        outcome = rerun(self._make_world, candidate, to_rest=self._to_rest)
        if outcome.finding is None or outcome.finding.property != self.finding.property:
            return False
        self.best, self.finding = list(outcome.actions), outcome.finding
        return True

    def fails_on_the_way_to_rest(self, candidate: list[Action]) -> bool:
        """From here on each candidate is wound down."""
        self._to_rest = True
        return self.fails(candidate)

    def leave_out_kinds(self) -> None:
        """The most frequent first: what is left is quicker to repeat."""
        for (name,), _ in Counter(action[:1] for action in self.best).most_common():
            self.fails([action for action in self.best if action[0] != name])

    def leave_out_things(self) -> None:
        """Each kind's actions on one request, one copy, one place."""
        for thing, _ in Counter(action[:2] for action in self.best if len(action) > 1).most_common():
            self.fails([action for action in self.best if action[:2] != thing])

    def leave_out_pieces(self) -> None:
        """Delta debugging: halves, quarters, ... single actions, and these until none can be left out."""
        size = max(1, len(self.best) // 2)
        while True:
            before = len(self.best)
            start = 0
            while start < len(self.best):
                if not self.fails(self.best[:start] + self.best[start + size :]):
                    start += size
            if size > 1:
                size //= 2
            elif len(self.best) == before or self.reruns >= self._most_reruns:
                return

    def make_numbers_small(self) -> None:
        """0 says less than 5. A list may become shorter by it, but never longer."""
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
