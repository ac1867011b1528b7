"""Guided runs of a world: they begin in states that earlier runs have reached.

Half of the runs begin with a schedule of the corpus, or with a part of one, and continue at random. So a walk
spends more time near newly found states, and needs the luck to reach a rare state only once.

The schedule with which a run begins depends on the seed, the number of the run, and the corpus at the
beginning of the round (`kvsm.check.walks.rounds`). So equal seeds with equal corpora make equal runs, with
any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from kvsm.check.walks.walk import MakeWorld, NewlyReached, WalkedRun, WorldRuns
from kvsm.check.walks.watch import watching
from kvsm.check.worlds.world import Action, World
from kvsm.system.stopping import IsOver, never

GUIDED = 0.5
"""The share of runs that begin with a schedule."""


class Schedule(NamedTuple):
    """Actions, and the function that creates their world."""

    make: Callable[[], World]
    actions: tuple[Action, ...]


class GuidedRuns(WorldRuns):
    """Makes watched runs, some of which begin with one of the schedules.

    known: the features that count as reached already.
    """

    def __init__(
        self, make_world: MakeWorld, seed: int, schedules: Sequence[Schedule], known: Collection[str]
    ) -> None:
        super().__init__(make_world, seed)
        self._schedules, self._known = schedules, known

    def begin(self, number: int, random: Random) -> tuple[World, Sequence[Action]]:
        chance = chance_of(self.seed, number)
        place = picked(chance, len(self._schedules))
        if place is None:
            return super().begin(number, random)
        schedule = self._schedules[place]
        return schedule.make(), changed(schedule.actions, chance)

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        done: list[Action] = []
        with watching(done, self._known) as watch:
            world, result = self.make(number, done, is_over)
            watch.say(reached_by(world))
        if not watch.new:
            return result
        return WalkedRun(
            result.operations,
            result.most_in_flight,
            result.failure,
            (NewlyReached(number, frozenset(watch.new), tuple(done[: watch.length])),),
        )


def reached_by(world: World) -> Sequence[str]:
    """The events of its own that a world reports by its method `reached`, if it has one."""
    reached: Callable[[], Sequence[str]] | None = getattr(world, "reached", None)
    return () if reached is None else reached()


def chance_of(seed: int, number: int) -> Random:
    """The random numbers that choose a run's schedule; its actions are drawn from other ones."""
    return Random(f"{seed}/{number}/corpus")


def picked(chance: Random, many: int) -> int | None:
    """The index of the schedule, of `many`, with which a run begins; None if it begins with none."""
    return int(chance.random() * many) if many and chance.random() < GUIDED else None


def changed(actions: tuple[Action, ...], chance: Random) -> tuple[Action, ...]:
    """The schedule as it is, only its beginning, or the schedule without a piece of it."""
    way, first, last = chance.randrange(4), *sorted(chance.choices(range(len(actions) + 1), k=2))
    if way == 0:
        return actions[:last]
    if way == 1:
        return actions[:first] + actions[last:]
    return actions
