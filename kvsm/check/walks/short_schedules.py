"""Run every short schedule of a world, in order of length: complete where a random walk is not.

A schedule is a list of actions from a small alphabet. Each schedule runs in a fresh world, which is then
brought to rest and checked. Schedules of equal length are sorted by the number of switches between actors,
because few switches are enough for most bugs (Musuvathi and Qadeer, 2007). If the last action of a schedule
cannot happen, the schedule equals a shorter one. Then it is skipped, with all schedules that begin with it.
Schedules that begin with a failed one are skipped, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.walk import WalkFailure
from kvsm.check.worlds.world import Action, Finding, World
from kvsm.system.executors.executor import Executor
from kvsm.system.stopping import IsOver, never

Schedule = tuple[Action, ...]
_CHUNK = 16
"""Schedules in one task of a worker process."""


class ScheduleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a search.

    length: the present length of schedules.
    schedules, actions: how many schedules have run, and their number of actions.
    skipped: how many schedules were equal to a shorter one.
    seconds: time since the search began.
    complete: the length up to which all schedules have run.
    """

    length: int = 0
    schedules: int = 0
    actions: int = 0
    skipped: int = 0
    seconds: float = 0.0
    complete: int = 0


class _Outcome(msgspec.Struct, frozen=True):
    """The outcome of one schedule. happened: whether all of its actions could happen."""

    happened: bool
    finding: Finding | None


def search(
    make_world: Callable[[], World],
    alphabet: Sequence[Action],
    actor: Callable[[Action], str],
    most: int,
    executor: Executor | None = None,
    is_over: IsOver = never,
) -> Iterator[tuple[ScheduleCounts, WalkFailure | None]]:
    """Run every schedule of at most `most` actions. Yields (counts, failure or None) after each schedule.

    The order and the findings are the same for any executor. `WalkFailure.run` is the number of the schedule.

    actor: returns the actor of an action.
    executor: where the schedules run; None for this process.
    is_over: asked between two schedules; the search ends when it returns True.
    """
    counts, began = ScheduleCounts(), time.monotonic()
    prefixes: list[Schedule] = [()]
    for length in range(1, most + 1):
        longer = [(*prefix, action) for prefix in prefixes for action in alphabet]
        longer.sort(key=lambda schedule: _changes(schedule, actor))
        prefixes = []
        with _outcomes(make_world, longer, executor, is_over) as outcomes:
            for schedule, outcome in zip(longer, outcomes):
                counts = msgspec.structs.replace(
                    counts,
                    length=length,
                    schedules=counts.schedules + outcome.happened,
                    actions=counts.actions + length * outcome.happened,
                    skipped=counts.skipped + (not outcome.happened),
                    seconds=time.monotonic() - began,
                )
                if outcome.finding is not None:
                    yield counts, WalkFailure(counts.schedules, schedule, outcome.finding)
                    continue
                if outcome.happened:
                    prefixes.append(schedule)
                yield counts, None
        if is_over():
            return
        counts = msgspec.structs.replace(counts, complete=length)
        yield counts, None


def _changes(schedule: Schedule, actor: Callable[[Action], str]) -> int:
    return sum(actor(one) != actor(other) for one, other in itertools.pairwise(schedule))


@contextmanager
def _outcomes(
    make_world: Callable[[], World],
    schedules: Sequence[Schedule],
    executor: Executor | None,
    is_over: IsOver,
) -> Iterator[Iterator[_Outcome]]:
    task = partial(_outcomes_of, make_world)
    if executor is None:
        yield (task([one])[0] for one in itertools.takewhile(lambda _: not is_over(), schedules))
        return
    chunks = (schedules[first : first + _CHUNK] for first in range(0, len(schedules), _CHUNK))
    made = executor.results(task, chunks, name="the schedules from {0[0]} on".format, is_over=is_over)
    with made as results:
        yield (outcome for outcomes in results for outcome in outcomes)


def _outcomes_of(make_world: Callable[[], World], schedules: Sequence[Schedule]) -> list[_Outcome]:
    return [_outcome(make_world, one) for one in schedules]


def _outcome(make_world: Callable[[], World], schedule: Schedule) -> _Outcome:
    done = rerun(make_world, schedule, to_rest=True)
    return _Outcome(len(done.actions) == len(schedule), done.finding)
