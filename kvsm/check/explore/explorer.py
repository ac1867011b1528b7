"""Explores a model: every action in every reachable state, breadth first.

    found = explore(model, jobs=2)
    found.verdict                       # PROVED, REFUTED or UNDETERMINED

A level holds the states that are equally many actions away from the start. Levels are expanded one after the
other, and the states of a level in order. So the first finding is a shortest one, and does not depend on
`jobs`. States are identified by their fingerprints. For a visited state the explorer keeps the fingerprint,
the state before it, the action between, and the state that winding down leads to: less than 250 bytes if a
fingerprint has 16. Saved states are kept only for the current level and the next.

Prior art: Stateright explores the code itself through four small functions, and TLC and Murphi go level by
level to find a shortest counterexample. Different here: each state points to where winding down leads, so
checking progress (S9) is one pass over these pointers and needs no search for fair cycles.

A limit: states with equal fingerprints count as one state, and an "always" is checked in the first of them
only. The explorer trusts the model that they are equal.
"""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from kvsm.check.explore import coverage
from kvsm.check.explore.coverage import TableEdge
from kvsm.check.explore.expansion import Expander, Expansion, Processes, collecting_young_objects
from kvsm.check.explore.expansion_tasks import ExpansionTasks
from kvsm.check.explore.model import INTERRUPT, Exploration, Model, Refutation, Verdict
from kvsm.check.explore.winding import END, UNEXPLORED, wind_down
from kvsm.check.worlds.requirement import Kind
from kvsm.check.worlds.world import Finding
from kvsm.errors import ConfigError
from kvsm.system.executors.executor import Executor

PROGRESS_SECONDS = 0.25
"""The shortest time between two calls of `progress`."""


class ExplorationProgress(msgspec.Struct, frozen=True):
    """How far an exploration has come. queue: how many states were seen and not yet expanded."""

    states: int
    transitions: int
    depth: int
    queue: int
    seconds: float

    @property
    def states_per_second(self) -> float:
        """States found per second of wall time."""
        return self.states / self.seconds if self.seconds else 0.0


def explore(
    model: Model[Any, Any],
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    max_states: int | None = None,
    max_depth: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[ExplorationProgress], None] | None = None,
) -> Exploration:
    """Explore every reachable state within the limits, until something is broken.

    A limit that is reached, or Ctrl-C, leaves the verdict undetermined.

    jobs: how many processes. They are forked, so start no threads before.
    executor: expands the states instead of processes of this machine. The result is the same.
    progress: called a few times a second.

    Raises `ConfigError` for an unusable limit, and whatever the model raises outside of `next` and of its
    requirements.
    """
    for name, value in (("jobs", jobs), ("max_states", max_states), ("max_depth", max_depth)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    search = _ExplorerSearch(model, max_states, max_depth, max_seconds, progress)
    coverage.forget()
    with (
        collecting_young_objects(),
        noticing_interrupts(search),
        _expanding(model, jobs, executor, search) as (expand, edges_elsewhere),
    ):
        search.run(expand)
        edges = coverage.taken() | edges_elsewhere()
    return search.exploration(edges)


Expand = Callable[[list[Any]], Iterable[Expansion]]


@contextmanager
def _expanding(
    model: Model[Any, Any], jobs: int, executor: Executor | None, search: _ExplorerSearch
) -> Iterator[tuple[Expand, Callable[[], set[TableEdge]]]]:
    """Yield a function that expands a level, and one that returns the edges taken in other processes."""
    if executor is not None:
        with ExpansionTasks(model, executor) as tasks:
            yield tasks.expand, tasks.edges
        return
    if jobs == 1:
        expander = Expander(model, search.numbers)
        yield (lambda level: map(expander.expand, level)), set
        return
    with Processes(model, jobs) as processes:
        yield processes.expand, processes.edges


class Interruptible(Protocol):
    """A search that polls `is_interrupted` and ends when it is true."""

    is_interrupted: bool


@contextmanager
def noticing_interrupts(search: Interruptible) -> Iterator[None]:
    """The first Ctrl-C ends the search and keeps its results; the second one works as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def notice(_number: int, _frame: object) -> None:
        search.is_interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _SearchLimit(Exception):
    """Ends an unfinished search at a limit."""


class _SearchFinding(Exception):
    """Ends a search with a finding. number: the state before the last action."""

    def __init__(self, number: int, actions: tuple[Any, ...], finding: Finding) -> None:
        self.number, self.actions, self.finding = number, actions, finding


class _ExplorerSearch:
    """A search and its results so far. States are numbered in the order in which they were first seen."""

    def __init__(
        self,
        model: Model[Any, Any],
        max_states: int | None,
        max_depth: int | None,
        max_seconds: float | None,
        progress: Callable[[ExplorationProgress], None] | None,
    ) -> None:
        self._model, self._report = model, progress
        self._max_states, self._max_depth, self._max_seconds = max_states, max_depth, max_seconds
        self.numbers: dict[Hashable, int] = {}
        """Fingerprint -> number of the state."""
        self._parents, self._via = array("q"), array("q")
        """For each state the numbers of its parent and of the action between; for an initial state -1 and its
        place among the initial states."""
        self._winding, self._holds = array("q"), bytearray()
        """For each state the next one on the way to rest, and as bits the "eventually" that hold in it."""
        self._actions: dict[Any, int] = {}
        """Action -> its number. Equal actions are kept once."""
        self._taken: list[int] = []
        """How often each action was taken, by its number."""
        self._reached = 0
        self._depth = self._expanded = 0
        self._started = self._reported = time.monotonic()
        self.is_interrupted = False
        self._limit = ""
        self._refutation: Refutation | None = None

    def run(self, expand: Expand) -> None:
        """Search level by level until all is seen, a limit is reached or something is broken."""
        try:
            level = self._first_level()
            while level:
                if self._depth == self._max_depth:
                    raise _SearchLimit(f"the depth of {self._depth:,} actions")
                level = self._next_level(expand(level))
        except _SearchLimit as limit:
            self._limit = str(limit)
        except _SearchFinding as broken:
            start, path = self._path(broken.number)
            self._refutation = Refutation(broken.finding, path + broken.actions, start)

    def exploration(self, edges: set[TableEdge]) -> Exploration:
        """The result of the search."""
        if self._refutation is None:
            self._wind_down()
        of_kind = [one for one in self._model.requirements if one.kind is Kind.SOMETIMES]
        reached = [one for bit, one in enumerate(of_kind) if self._reached >> bit & 1]
        unreached = [one for one in of_kind if one not in reached]
        missed = next((one for one in unreached if one.required), None)
        if self._refutation is None and not self._limit and missed is not None:
            self._refutation = Refutation(Finding(missed.name, f"is never reached: {missed.says}"), ())
        verdict = Verdict.REFUTED if self._refutation else Verdict.PROVED
        if self._limit and verdict is Verdict.PROVED:
            verdict = Verdict.UNDETERMINED
        return Exploration(
            model=self._model.name,
            bounds=self._model.bounds,
            verdict=verdict,
            states=len(self.numbers),
            transitions=sum(self._taken),
            depth=self._depth,
            seconds=time.monotonic() - self._started,
            limit=self._limit,
            refutation=self._refutation,
            reached=tuple(str(one.name) for one in reached),
            unreached=tuple(str(one.name) for one in unreached),
            actions=self._counts_by_name(),
            edges=tuple(sorted(edges)),
        )

    def _first_level(self) -> list[Any]:
        expander = Expander(self._model, ())
        level = []
        for place, state in enumerate(self._model.initial()):
            fingerprint = self._model.fingerprint(state)
            if fingerprint in self.numbers:
                continue
            self._add(fingerprint, -1, place)
            finding = expander.broken(state)
            if finding is not None:
                raise _SearchFinding(len(self.numbers) - 1, (), finding)
            self._reached |= expander.reached(state)
            level.append(self._model.save(state))
        if not level:
            raise ConfigError(f"model {self._model.name}: it begins nowhere, so there is nothing to explore")
        return level

    def _next_level(self, expansions: Iterable[Expansion]) -> list[Any]:
        """Return the states of the next level. The current level is numbered from `_expanded` on."""
        level: list[Any] = []
        for expansion in expansions:
            self._merge(expansion, level)
            self._look_at_the_clock()
        if level:
            self._depth += 1
        return level

    def _merge(self, expansion: Expansion, level: list[Any]) -> None:
        numbers, ids, taken = self.numbers, self._actions, self._taken
        parent = self._expanded
        self._reached |= expansion.reached
        for action, fingerprint in expansion.moves:
            via = ids.get(action)
            if via is None:
                via = ids[action] = len(taken)
                taken.append(0)
            taken[via] += 1
            if fingerprint not in numbers:
                self._add(fingerprint, parent, via)
                if fingerprint in expansion.new:  # else it is the broken state
                    level.append(expansion.new[fingerprint])
        if expansion.broken is not None:
            action, finding = expansion.broken
            raise _SearchFinding(parent, (action,), finding)
        self._holds[parent] = expansion.holds
        place = expansion.wind_down
        self._winding[parent] = END if place < 0 else numbers[expansion.moves[place][1]]
        self._expanded += 1

    def _add(self, fingerprint: Hashable, parent: int, via: int) -> None:
        if len(self.numbers) == self._max_states:
            raise _SearchLimit(f"{self._max_states:,} states")
        self.numbers[fingerprint] = len(self.numbers)
        self._parents.append(parent)
        self._via.append(via)
        self._winding.append(UNEXPLORED)
        self._holds.append(0)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self.is_interrupted:
            raise _SearchLimit(INTERRUPT)
        if self._report is not None and now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            states, seconds = len(self.numbers), now - self._started
            queue = states - self._expanded
            self._report(ExplorationProgress(states, sum(self._taken), self._depth, queue, seconds))
        if self._max_seconds is not None and now - self._started >= self._max_seconds:
            raise _SearchLimit(f"{self._max_seconds:,g} seconds")

    def _wind_down(self) -> None:
        """Check each "eventually" on the explored states."""
        of_kind = [one for one in self._model.requirements if one.kind is Kind.EVENTUALLY]
        for bit, one in enumerate(of_kind):
            found = wind_down(self._winding, bytes(mask >> bit & 1 for mask in self._holds))
            if found.way:
                what = "enters a cycle" if found.circle >= 0 else "stops where it does not hold"
                start, path = self._path(found.way[0])
                circle = len(path) + found.circle if found.circle >= 0 else -1
                steps = len(found.way) - (found.circle < 0)
                self._refutation = Refutation(
                    Finding(one.name, f"winding down {what}: {one.says}"),
                    path + self._winding_actions(start, path, steps),
                    start,
                    circle,
                )
                return

    def _winding_actions(self, start: int, path: tuple[Any, ...], steps: int) -> tuple[Any, ...]:
        """The actions that wind down after a path. The search kept only the states that they lead to."""
        model = self._model
        state, winding = list(model.initial())[start], []
        for action in path:
            state = model.next(state, action)
        for _ in range(steps):
            winding.append(model.wind_down(state))
            state = model.next(state, winding[-1])
        return tuple(winding)

    def _path(self, number: int) -> tuple[int, tuple[Any, ...]]:
        """The initial state that led to a state, and the actions between."""
        by_id = list(self._actions)
        path = []
        while self._parents[number] >= 0:
            path.append(by_id[self._via[number]])
            number = self._parents[number]
        return self._via[number], tuple(reversed(path))

    def _counts_by_name(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for action, count in zip(self._actions, self._taken):
            name = str(action[0]) if isinstance(action, tuple) and action else str(action)
            counts[name] = counts.get(name, 0) + count
        return dict(sorted(counts.items()))
