"""Explores a model: every action in every reachable state, breadth first.

    found = explore(model, jobs=2)
    found.verdict                       # PROVED, REFUTED or UNDETERMINED

A level holds the states that are equally many actions away from the start. Levels are expanded one after the
other, and the states of a level in order. So the first finding is a shortest one, and does not depend on
`jobs`. States are identified by their fingerprints.

States that differ only in what is left of their budgets have one form (`kvsm.check.explore.budgets`). The
explorer keeps the first state of a form that it met, and what each action has led to. An action is taken, and
checked, when the first state of its form can afford it. For a state the explorer keeps its form, the state
before it, the action between, and the state that winding down leads to: less than 200 bytes.

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
from kvsm.check.explore.budgets import FREE, ModelBudgets, NoBudgets, Rest, Rests, budgets_of
from kvsm.check.explore.coverage import TableEdge
from kvsm.check.explore.expansion import (
    Expander,
    Expansion,
    NewState,
    Processes,
    Task,
    collecting_young_objects,
)
from kvsm.check.explore.expansion_tasks import ExpansionTasks
from kvsm.check.explore.model import INTERRUPT, Exploration, Model, Refutation, Verdict
from kvsm.check.explore.repeated_path import PathNotRepeated, PathStep, repeated
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
    limits = max_states, max_depth, max_seconds
    try:
        return _explored(_ExplorerSearch(model, budgets_of(model), *limits, progress), jobs, executor)
    except PathNotRepeated:
        return _explored(_ExplorerSearch(model, NoBudgets(model), *limits, progress), jobs, executor)


def _explored(search: _ExplorerSearch, jobs: int, executor: Executor | None) -> Exploration:
    coverage.forget()
    with (
        collecting_young_objects(),
        noticing_interrupts(search),
        _expanding(search, jobs, executor) as (expand, edges_elsewhere),
    ):
        search.run(expand)
        edges = coverage.taken() | edges_elsewhere()
    return search.exploration(edges)


Expand = Callable[[list[Task]], Iterable[Expansion]]


@contextmanager
def _expanding(
    search: _ExplorerSearch, jobs: int, executor: Executor | None
) -> Iterator[tuple[Expand, Callable[[], set[TableEdge]]]]:
    """Yield a function that takes tasks, and one that returns the edges taken in other processes."""
    model, budgets = search.model, search.budgets
    if executor is not None:
        with ExpansionTasks(model, budgets, executor) as tasks:
            yield tasks.expand, tasks.edges
        return
    if jobs == 1:
        expander = Expander(model, budgets, search.known)
        yield (lambda tasks: map(expander.expand, tasks)), set
        return
    with Processes(model, budgets, jobs) as processes:
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
    """Ends a search with a finding. number: the state before the last action. via: the number of the last
    action; None if an initial state is broken."""

    def __init__(self, number: int, via: int | None, finding: Finding) -> None:
        self.number, self.via, self.finding = number, via, finding


_UNKNOWN, _ASKED, _NOWHERE = -3, -2, -1
"""Stand for the state after an action: it was not taken yet, it is being taken, it does not apply."""

_REST_BITS = 32
"""A state is the number of what it is, and in so many bits the number of its rest."""


class _Form:
    """What states have in common that differ only in their budgets. is_of: what the states are as long as the
    fading budget has something left, and after that: two numbers."""

    __slots__ = ("after", "is_of", "moves", "seen")

    def __init__(self, seen: NewState, moves: list[tuple[int, int]], is_of: tuple[int, int]) -> None:
        self.seen, self.is_of = seen, is_of
        self.moves = moves
        """The number of each action, and the budget that it spends."""
        self.after: dict[tuple[bool, ...], list[int]] = {}
        """The form after each action, by the memory of the rest after it (`Rest.memory`)."""

    def row(self, memory: tuple[bool, ...]) -> list[int]:
        """The forms after each action, with this memory."""
        row = self.after.get(memory)
        if row is None:
            row = self.after[memory] = [_UNKNOWN] * len(self.moves)
        return row


class _ExplorerSearch:
    """A search and its results so far. States are numbered in the order in which they were first seen."""

    def __init__(
        self,
        model: Model[Any, Any],
        budgets: ModelBudgets,
        max_states: int | None,
        max_depth: int | None,
        max_seconds: float | None,
        progress: Callable[[ExplorationProgress], None] | None,
    ) -> None:
        self.model, self.budgets, self._report = model, budgets, progress
        self._max_states, self._max_depth, self._max_seconds = max_states, max_depth, max_seconds
        self.known: dict[Hashable, int] = {}
        """Fingerprint without budgets -> number of the form."""
        self._forms: list[_Form] = []
        self._rests = Rests(budgets)
        self._faded: dict[Hashable, int] = {}
        """Faded fingerprint -> its number."""
        self._numbers: dict[int, int] = {}
        """What a state is, and its rest -> number of the state."""
        self._form_of, self._rest_of = array("q"), array("q")
        """For each state the number of its form, of all forms that it has the first that was seen, and of its
        rest."""
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
            self._first_level()
            while self._expanded < len(self._form_of):
                if self._depth == self._max_depth:
                    raise _SearchLimit(f"the depth of {self._depth:,} actions")
                self._next_level(expand)
        except _SearchLimit as limit:
            self._limit = str(limit)
        except _SearchFinding as broken:
            start, path, finding = self._path(broken.number, broken)
            self._refutation = Refutation(finding or broken.finding, path, start)

    def exploration(self, edges: set[TableEdge]) -> Exploration:
        """The result of the search."""
        if self._refutation is None:
            self._wind_down()
        of_kind = [one for one in self.model.requirements if one.kind is Kind.SOMETIMES]
        reached = [one for bit, one in enumerate(of_kind) if self._reached >> bit & 1]
        unreached = [one for one in of_kind if one not in reached]
        missed = next((one for one in unreached if one.required), None)
        if self._refutation is None and not self._limit and missed is not None:
            self._refutation = Refutation(Finding(missed.name, f"is never reached: {missed.says}"), ())
        verdict = Verdict.REFUTED if self._refutation else Verdict.PROVED
        if self._limit and verdict is Verdict.PROVED:
            verdict = Verdict.UNDETERMINED
        return Exploration(
            model=self.model.name,
            bounds=self.model.bounds,
            verdict=verdict,
            states=len(self._form_of),
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

    def _first_level(self) -> None:
        expander = Expander(self.model, self.budgets, ())
        whole = self._rests.number(self.budgets.whole)
        for place, state in enumerate(self.model.initial()):
            fingerprint = self.budgets.fingerprint(state)
            if fingerprint in self.known:
                continue
            form = self.known[fingerprint] = len(self.known)
            self._add(self._key(form, whole), form, whole, -1, place)
            finding = expander.broken(state)
            if finding is not None:
                raise _SearchFinding(len(self._form_of) - 1, None, finding)
            self._reached |= expander.reached(state)
            self._enter(expander.seen(state, fingerprint))
        if not self._forms:
            raise ConfigError(f"model {self.model.name}: it begins nowhere, so there is nothing to explore")

    def _enter(self, seen: NewState) -> None:
        """Add a form."""
        ids, taken, moves = self._actions, self._taken, []
        for action in seen.actions:
            via = ids.get(action)
            if via is None:
                via = ids[action] = len(taken)
                taken.append(0)
            moves.append((via, self.budgets.spends(action)))
        faded = self._faded.setdefault(seen.faded, len(self._faded))
        self._forms.append(_Form(seen, moves, (2 * len(self._forms), 2 * faded + 1)))

    def _next_level(self, expand: Expand) -> None:
        """Expand the states of the current level."""
        level = range(self._expanded, len(self._form_of))
        asked = {number: wanted for number in level if (wanted := self._unknown(number))}
        expansions = iter(expand([self._task(number, wanted) for number, wanted in asked.items()]))
        for number in level:
            broken = None
            if number in asked:
                broken = self._learn(next(expansions), asked[number])
            self._merge(number, broken)
            self._expanded += 1
            self._look_at_the_clock()
        if self._expanded < len(self._form_of):
            self._depth += 1

    def _unknown(self, number: int) -> list[tuple[list[int], int]]:
        """The actions of a state that were never taken, each as its place and the row that waits for it."""
        form, rest = self._form_and_rest(number)
        unknown = []
        for place, (_, budget) in enumerate(form.moves):
            after = rest.after[budget]
            if after != FREE:
                row = form.row(self._rests[after].memory)
                if row[place] == _UNKNOWN:
                    row[place] = _ASKED
                    unknown.append((row, place))
        return unknown

    def _form_and_rest(self, number: int) -> tuple[_Form, Rest]:
        return self._forms[self._form_of[number]], self._rests[self._rest_of[number]]

    def _task(self, number: int, wanted: list[tuple[list[int], int]]) -> Task:
        form, rest = self._form_and_rest(number)
        return Task(form.seen.saved, [(form.seen.actions[place], rest.left) for _, place in wanted])

    def _learn(self, expansion: Expansion, wanted: list[tuple[list[int], int]]) -> tuple[int, Finding] | None:
        """Enter what the actions of a task lead to. Returns the place of an action that breaks something, and
        what it breaks."""
        self._reached |= expansion.reached
        known = self.known
        for (row, place), fingerprint in zip(wanted, expansion.after):
            if fingerprint is None:
                row[place] = _NOWHERE
                continue
            form = known.setdefault(fingerprint, len(self._forms))
            if form == len(self._forms) and fingerprint in expansion.new:  # else it is the broken state
                self._enter(expansion.new[fingerprint])
            row[place] = form
        if expansion.broken is None:
            return None
        return wanted[expansion.broken[0]][1], expansion.broken[1]

    def _merge(self, parent: int, broken: tuple[int, Finding] | None) -> None:
        """Add the states after each action of a state. broken: what an action breaks, with its place."""
        form, rest = self._form_and_rest(parent)
        numbers, taken, rests, rows = self._numbers, self._taken, self._rests, form.after
        wind_down = form.seen.wind_down
        for place, (via, budget) in enumerate(form.moves):
            left = rest.after[budget]
            if left == FREE:
                continue
            after = rows[rests[left].memory][place]
            if after >= 0:
                taken[via] += 1
                key = self._key(after, left)
                if key not in numbers:
                    self._add(key, after, left, parent, via)
                if place == wind_down:
                    self._winding[parent] = numbers[key]
            if broken is not None and place == broken[0]:
                raise _SearchFinding(parent, via, broken[1])
        self._holds[parent] = form.seen.holds
        if wind_down < 0:
            self._winding[parent] = END

    def _key(self, form: int, rest: int) -> int:
        """What a state is, and its rest, as one number. A broken state has no form, and no equal."""
        is_of = self._forms[form].is_of[self._rests[rest].is_faded] if form < len(self._forms) else 2 * form
        return is_of << _REST_BITS | rest

    def _add(self, key: int, form: int, rest: int, parent: int, via: int) -> None:
        if len(self._form_of) == self._max_states:
            raise _SearchLimit(f"{self._max_states:,} states")
        self._numbers[key] = len(self._form_of)
        self._form_of.append(form)
        self._rest_of.append(rest)
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
            states, seconds = len(self._form_of), now - self._started
            queue = states - self._expanded
            self._report(ExplorationProgress(states, sum(self._taken), self._depth, queue, seconds))
        if self._max_seconds is not None and now - self._started >= self._max_seconds:
            raise _SearchLimit(f"{self._max_seconds:,g} seconds")

    def _wind_down(self) -> None:
        """Check each "eventually" on the explored states."""
        of_kind = [one for one in self.model.requirements if one.kind is Kind.EVENTUALLY]
        for bit, one in enumerate(of_kind):
            found = wind_down(self._winding, bytes(mask >> bit & 1 for mask in self._holds))
            if found.way:
                what = "enters a cycle" if found.circle >= 0 else "stops where it does not hold"
                start, path, _ = self._path(found.way[0])
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
        model = self.model
        state, winding = list(model.initial())[start], []
        for action in path:
            state = model.next(state, action)
        for _ in range(steps):
            winding.append(model.wind_down(state))
            state = model.next(state, winding[-1])
        return tuple(winding)

    def _path(
        self, number: int, broken: _SearchFinding | None = None
    ) -> tuple[int, tuple[Any, ...], Finding | None]:
        """The initial state that led to a state, the actions between, and what the last one broke."""
        by_id, fingerprints = list(self._actions), list(self.known)
        steps = []
        if broken is not None and broken.via is not None:
            steps = [PathStep(by_id[broken.via], self._form_and_rest(number)[1].left, None, False)]
        while (parent := self._parents[number]) >= 0:
            form, rest = self._form_and_rest(number)
            after = form.seen.faded if rest.is_faded else fingerprints[self._form_of[number]]
            left = self._form_and_rest(parent)[1].left
            steps.append(PathStep(by_id[self._via[number]], left, after, rest.is_faded))
            number = parent
        start, finding = self._via[number], None if broken is None else broken.finding
        if not self.budgets.whole:  # each state stands for itself, so the path is right as it is
            return start, tuple(step.action for step in reversed(steps)), finding
        return start, *repeated(self.model, self.budgets, start, reversed(steps), finding)

    def _counts_by_name(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for action, count in zip(self._actions, self._taken):
            name = str(action[0]) if isinstance(action, tuple) and action else str(action)
            counts[name] = counts.get(name, 0) + count
        return dict(sorted(counts.items()))
