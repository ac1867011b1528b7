"""Every schedule of a scenario within a bound of preemptions, the fewest first.

A schedule is explored by running it. The run records its choices; each option that it did not take
begins another schedule. Schedules that cost no further preemption are run next, the others after all cheaper
ones. So each schedule is run once, and the first finding needs the fewest preemptions.

Prior art: CHESS (Musuvathi and Qadeer, PLDI 2007) bounds preemptions and not depth, because most bugs need
two at most, and the number of schedules grows as a power whose exponent is the bound. Where many threads
wait, the free choices alone are too many: then each deviation from a fixed order counts (delay bounding:
Emmi, Qadeer and Rakamaric, POPL 2011).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from kvsm.check.explore.explorer import PROGRESS_SECONDS, ExplorationProgress, noticing_interrupts
from kvsm.check.explore.model import INTERRUPT, Exploration, Refutation, Verdict
from kvsm.check.threads.control import ChoicePoint, Deviations
from kvsm.check.threads.scenario import ScenarioRuns, ThreadScope, controlled
from kvsm.check.worlds.world import Finding
from kvsm.errors import ConfigError
from kvsm.system.executors.executor import Executor

_BATCH = 2
"""How many schedules a worker is given at once. It also runs all that these lead to without a preemption,
which may be hundreds. Few, because a limit or Ctrl-C waits for the first answer."""


class _Schedule(NamedTuple):
    """deviations: its choices. signature: of the run up to the last of them, to check that it repeats."""

    deviations: Deviations
    signature: int


class _Explored(NamedTuple):
    """A schedule that was run.

    points: the choices after its last deviation.
    reached: the words that the scenario noted.
    """

    deviations: Deviations
    points: list[ChoicePoint]
    steps: int
    reached: frozenset[str]
    finding: Finding | None

    def others(self, free: bool) -> Iterator[_Schedule]:
        """Yield the schedules that first differ from this one at one of `points`.

        free: those that cost no further preemption; otherwise those that cost one more.
        """
        for point in self.points:
            options = range(1, point.free) if free else range(max(1, point.free), point.options)
            for option in options:
                yield _Schedule((*self.deviations, (point.number, option)), point.signature)


def _explored(runs: ScenarioRuns, schedules: Iterable[_Schedule]) -> Iterator[_Explored]:
    """Run each of these schedules, and right after it all that first differ from it at no further cost."""
    waiting = [iter(schedules)]
    while waiting:
        schedule = next(waiting[-1], None)
        if schedule is None:
            waiting.pop()
            continue
        outcome, signature = runs.run(schedule.deviations)
        if signature != schedule.signature:
            raise ConfigError(
                f"{runs.says}: the same schedule went another way the second time; a scenario must decide "
                f"nothing by clocks, random numbers or the order of sets"
            )
        one = _Explored(schedule.deviations, outcome.points, outcome.steps, outcome.reached, outcome.finding)
        yield one
        if any(point.free > 1 for point in one.points):
            waiting.append(one.others(free=True))


def _batch_explored(runs: ScenarioRuns, is_last: bool, batch: Sequence[_Schedule]) -> list[_Explored]:
    """The task of a worker: as `_explored`, until something is broken. is_last: drop the choices."""
    explored = []
    for one in _explored(runs, batch):
        explored.append(one._replace(points=[]) if is_last else one)
        if one.finding is not None:
            break
    return explored


class _ScheduleSearch:
    """A search over the schedules of a scope, and its results so far."""

    def __init__(
        self,
        scope: ThreadScope,
        runs: ScenarioRuns,
        executor: Executor | None,
        max_states: int | None,
        max_seconds: float | None,
        progress: Callable[[ExplorationProgress], None] | None,
    ) -> None:
        self._scope, self._runs, self._executor, self._report = scope, runs, executor, progress
        self._max_states, self._max_seconds = max_states, max_seconds
        self._started = self._reported = time.monotonic()
        self.is_interrupted = False
        self.schedules = self.steps = self.longest = 0
        self.by_preemptions: Counter[int] = Counter()
        self.reached: set[str] = set()
        self.limit = ""
        self.refutation: Refutation | None = None

    def run(self) -> None:
        """Search until all is run, a limit is reached or something is broken."""
        level: list[_Explored] = []
        for preemptions in range(self._scope.preemptions + 1):
            waiting: Iterator[_Schedule] = iter([_Schedule((), 0)])
            if preemptions:
                waiting = (other for one in level for other in one.others(free=False))
            level = self._level(waiting, preemptions)
            if self.limit or self.refutation is not None:
                return

    def _level(self, waiting: Iterator[_Schedule], preemptions: int) -> list[_Explored]:
        """Run these schedules, and all that differ from them at no further cost."""
        level, broken = list[_Explored](), None
        is_last = preemptions == self._scope.preemptions
        with self._exploring(waiting, preemptions, is_last) as explored:
            for one in explored:
                if self._is_at_limit():
                    break
                self.schedules += 1
                self.by_preemptions[preemptions] += 1
                self.steps += one.steps
                self.longest = max(self.longest, one.steps)
                self.reached |= one.reached
                if one.finding is not None:
                    broken = one
                    break
                if not is_last:
                    level.append(one)
        if broken is not None and broken.finding is not None:
            deviations = self._reduced(broken.deviations, broken.finding)
            finding = self._runs.run(deviations)[0].finding or broken.finding
            self.refutation = Refutation(finding, deviations)
        return level

    @contextmanager
    def _exploring(
        self, waiting: Iterator[_Schedule], preemptions: int, is_last: bool
    ) -> Iterator[Iterator[_Explored]]:
        """The same schedules in the same order, in this process or in others."""
        if self._executor is None or not preemptions:
            yield _explored(self._runs, waiting)
            return
        task = partial(_batch_explored, self._runs, is_last)
        batches = iter(lambda: list(islice(waiting, _BATCH)), [])
        with self._executor.results(task, batches, name=lambda _: "schedules of model threads") as results:
            yield chain.from_iterable(results)

    def _reduced(self, deviations: Deviations, finding: Finding) -> Deviations:
        """The schedule without the deviations that the finding does not need."""
        for place in reversed(range(len(deviations))):
            fewer = (*deviations[:place], *deviations[place + 1 :])
            again = self._runs.run(fewer)[0].finding
            if again is not None and again.is_like(finding):
                return self._reduced(fewer, finding)
        return deviations

    def _is_at_limit(self) -> bool:
        now = time.monotonic()
        seconds = now - self._started
        if self.is_interrupted:
            self.limit = INTERRUPT
        elif self.schedules == self._max_states:
            self.limit = f"{self.schedules:,} schedules"
        elif self._max_seconds is not None and seconds >= self._max_seconds:
            self.limit = f"{self._max_seconds:,g} seconds"
        elif self._report is not None and now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._report(ExplorationProgress(self.schedules, self.steps, self.longest, 0, seconds))
        return bool(self.limit)

    def exploration(self) -> Exploration:
        """The result of the search."""
        notable = self._scope.scenario.notable
        unreached = tuple(word for word in notable if word not in self.reached)
        if self._scope.required and self.refutation is None and not self.limit and unreached:
            self.refutation = Refutation(Finding(unreached[0], "no schedule reaches it"), ())
        verdict = (
            Verdict.REFUTED if self.refutation else Verdict.UNDETERMINED if self.limit else Verdict.PROVED
        )
        return Exploration(
            model="threads",
            bounds=self._scope.told,
            verdict=verdict,
            states=self.schedules,
            transitions=self.steps,
            depth=self.longest,
            seconds=time.monotonic() - self._started,
            limit=self.limit,
            refutation=self.refutation,
            reached=tuple(word for word in notable if word in self.reached),
            unreached=unreached,
            actions={f"with {number} preemptions": count for number, count in self.by_preemptions.items()},
        )


def explore_schedules(
    scope: ThreadScope,
    *,
    executor: Executor | None = None,
    max_states: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[ExplorationProgress], None] | None = None,
) -> Exploration:
    """Run every schedule of a scope within its bound, or until something is broken.

    In the result a state is a schedule, and a transition a step of a thread.

    executor: forked processes that run the schedules; None: this one. The result is the same.
    max_states: how many schedules at most.

    Raises `ConfigError` if the scenario does not do the same when its threads run in the same order.
    """
    with controlled(scope) as runs:
        search = _ScheduleSearch(scope, runs, executor, max_states, max_seconds, progress)
        with noticing_interrupts(search):
            search.run()
    return search.exploration()
