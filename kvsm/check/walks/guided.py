"""Runs of a world that begin in places which earlier runs have reached.

Half of the runs begin with a schedule of the corpus, or with a part of one, and go on at random. So a walk
spends its time where something new was found, and a state that takes a dozen lucky draws is drawn once.

Which schedule a run begins with depends on the seed, the number of the run, and the corpus as it was when the
round began (`kvsm.check.walks.rounds`). So equal seeds with equal corpora make equal runs, in any number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from kvsm.check.walks.walk import MakeWorld, NewlyReached, WalkedRun, WorldRuns
from kvsm.check.walks.watch import watching
from kvsm.check.worlds.world import Action, World

GUIDED = 0.5
"""The share of runs that begin with a schedule."""


class Schedule(NamedTuple):
    """Actions, and what makes the world in which they happened."""

    make: Callable[[], World]
    actions: tuple[Action, ...]


class GuidedRuns(WorldRuns):
    """Runs that are watched. Some of them begin with one of the schedules.

    known: features that are not new.
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

    def run(self, number: int) -> WalkedRun:
        done: list[Action] = []
        with watching(done, self._known) as watch:
            world, result = self.make(number, done)
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
    """What a world says itself that it has reached."""
    say: Callable[[], Sequence[str]] | None = getattr(world, "reached", None)
    return () if say is None else say()


def chance_of(seed: int, number: int) -> Random:
    """The random numbers that decide how a run begins. Its actions have others."""
    return Random(f"{seed}/{number}/corpus")


def picked(chance: Random, many: int) -> int | None:
    """Which of the schedules a run begins with; None if with none of them."""
    return int(chance.random() * many) if many and chance.random() < GUIDED else None


def changed(actions: tuple[Action, ...], chance: Random) -> tuple[Action, ...]:
    """A schedule as it is, the beginning of it, or all but a piece of it."""
    way, first, last = chance.randrange(4), *sorted(chance.choices(range(len(actions) + 1), k=2))
    if way == 0:
        return actions[:last]
    if way == 1:
        return actions[:first] + actions[last:]
    return actions
