"""The random walk: many short runs of a world, each from a seed of its own.

A run draws a small configuration. With `swarm` it also draws a profile: most kinds of action happen as often
as the world draws them, some seldom, some never. Some bugs need a run in which something never happens (no
report fails, nothing is cancelled), and no fixed mixture of actions gives such runs. The run then does
actions, checks the world now and again, and winds down to rest.

Only the seed and the number of the run decide what happens in it, so these two numbers and the list of
actions describe a failure. Clocks and limits only decide how many runs there are. Several processes give the
same result as one, because runs are counted in order.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from kvsm.errors import PropertyBroken
from kvsm.executors.executor import Executor
from kvsm.executors.processes import ForkedProcesses
from kvsm.properties import Property
from kvsm.worlds.world import Action, Finding, World, finding_of

MakeWorld = Callable[[Random], World]
"""Makes a new world with a configuration drawn from the random numbers."""

FEWEST_ACTIONS, MOST_ACTIONS = 300, 2000
CHECK_EVERY = 250
"""Actions between two checks of the whole world, unless it has its own `check_every`."""
MOST_WINDING = 20_000
"""After this many actions the way to rest counts as endless."""
FEW_WINDING = 500
"""After this many actions the way to rest is searched for a cycle, which costs time."""
_BATCH = 8
"""Runs that a process makes at a time. Garbage is collected between batches; a run makes little of it."""
_SHARES = (0.0, 0.05, 0.3, 1.0, 1.0, 1.0)
_TRIES = 16


class WalkFailure(msgspec.Struct, frozen=True):
    """A run that ended in a finding, with the actions that happened in it."""

    run: int
    actions: tuple[Action, ...]
    finding: Finding


class WalkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a walk.

    next_run: the run to continue with.
    operations: as the world counts them, or else how many actions happened.
    most_in_flight: the most copies at once, if the world counts them.
    interrupted: whether Ctrl-C ended the walk.
    """

    seed: int
    next_run: int = 0
    runs: int = 0
    operations: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0
    interrupted: bool = False
    failure: WalkFailure | None = None

    @property
    def operations_per_second(self) -> float:
        """Operations per second of wall time."""
        return self.operations / self.seconds if self.seconds else 0.0


class _RunResult(msgspec.Struct, frozen=True):
    """What one run adds to a `WalkResult`."""

    operations: int
    most_in_flight: int
    failure: WalkFailure | None


def walk(
    make_world: MakeWorld,
    seed: int,
    *,
    first_run: int = 0,
    runs: int | None = None,
    operations: int | None = None,
    seconds: float | None = None,
    swarm: bool = True,
    jobs: int = 1,
    executor: Executor | None = None,
    progress: Callable[[WalkResult], None] | None = None,
) -> WalkResult:
    """Make runs from `first_run` on until one fails, a limit is reached, or Ctrl-C. Without a limit,
    endlessly.

    With `runs` or `operations` the result is the same every time, for any `jobs` and any executor.

    jobs: how many processes. They are forked, so `make_world` need not be picklable.
    executor: who makes the runs, in place of processes of this machine.
    progress: called after every run.

    Raises `ConfigError` if some runs lose one worker after the other.
    """
    result, start = WalkResult(seed=seed, next_run=first_run), time.monotonic()
    with _runs_of(_RunMaker(make_world, seed, swarm), first_run, jobs, executor) as made:
        try:
            for number, run in enumerate(made, first_run):
                result = msgspec.structs.replace(
                    result,
                    next_run=number + 1,
                    runs=result.runs + 1,
                    operations=result.operations + run.operations,
                    most_in_flight=max(result.most_in_flight, run.most_in_flight),
                    seconds=time.monotonic() - start,
                    failure=run.failure,
                )
                if progress is not None:
                    progress(result)
                if (
                    run.failure is not None
                    or (runs is not None and result.runs >= runs)
                    or (operations is not None and result.operations >= operations)
                    or (seconds is not None and result.seconds >= seconds)
                ):
                    break
        except KeyboardInterrupt:
            result = msgspec.structs.replace(result, interrupted=True)
    return result


def random_of(seed: int, run: int) -> Random:
    """The random numbers of a run. `make_world(random_of(seed, run))` makes its initial world."""
    return Random(f"{seed}/{run}")


class _RunMaker:
    """Makes runs; holds all that decides what happens in them."""

    def __init__(self, make_world: MakeWorld, seed: int, swarm: bool) -> None:
        self.make_world, self.seed, self.swarm = make_world, seed, swarm

    def run(self, number: int) -> _RunResult:
        """Make the run with this number."""
        random = random_of(self.seed, number)
        world = self.make_world(random)
        draw = _swarm_of(world, f"{self.seed}/{number}") if self.swarm else _draw
        done: list[Action] = []
        check_every = getattr(world, "check_every", CHECK_EVERY)
        try:
            for place in range(random.randint(FEWEST_ACTIONS, MOST_ACTIONS)):
                try:
                    action = draw(world, random)
                except IndexError:  # from `Random.choice`: there is nothing to choose from
                    break
                _do(world, action, done)
                if place % check_every == check_every - 1:
                    world.check()
            world.check()
            rest(world, done)
        except Exception as error:  # whatever the real code raises is a finding
            return _run_of(world, done, WalkFailure(number, tuple(done), finding_of(error)))
        return _run_of(world, done, None)

    def batch(self, first: int) -> list[_RunResult]:
        """A batch of runs from `first` on. It ends early after a failed run."""
        made: list[_RunResult] = []
        while len(made) < _BATCH and not (made and made[-1].failure):
            made.append(self.run(first + len(made)))
        gc.collect()
        return made


def rest(world: World, done: list[Action]) -> None:
    """Wind down, then check the world. Appends the actions to `done`.

    Raises `PropertyBroken` (progress, S9) if the way to rest does not end. Then `done` is as it was before,
    because the way is always the same.
    """
    began, seen = len(done), set[bytes]()
    for number in range(MOST_WINDING):
        action = world.wind_down()
        if action is None:
            world.check()
            return
        happened = len(done)
        _do(world, action, done)
        if len(done) == happened:
            raise PropertyBroken(Property.PROGRESS, f"{action} should lead to rest, and cannot happen")
        if number >= FEW_WINDING:
            fingerprint = world.fingerprint()
            if fingerprint in seen:
                break
            seen.add(fingerprint)
    message = f"after {len(done) - began} actions towards rest it is not at rest"
    del done[began:]
    raise PropertyBroken(Property.PROGRESS, message)


def _do(world: World, action: Action, done: list[Action]) -> None:
    """Do an action and record it. An action that raises stays recorded, as the last one."""
    done.append(action)
    if not world.do(action):
        done.pop()


def _draw(world: World, random: Random) -> Action:
    return world.draw(random)


def _run_of(world: World, done: list[Action], failure: WalkFailure | None) -> _RunResult:
    operations = getattr(world, "operations", len(done))
    return _RunResult(operations, getattr(world, "most_in_flight", 0), failure)


@runtime_checkable
class Favouring(Protocol):
    """A world that applies a profile itself, which is faster than drawing and discarding actions."""

    def favour(self, share: Callable[[str], float]) -> None:
        """Draw only this share of each kind of action."""


def _swarm_of(world: World, seed: str) -> Callable[[World, Random], Action]:
    """A function that draws actions by the profile of this run.

    The share of a kind depends on its name, not on when it is drawn first.
    """

    def share(name: str) -> float:
        return Random(f"{seed}/{name}").choice(_SHARES)

    if isinstance(world, Favouring):
        world.favour(share)
        return _draw
    shares: dict[str, float] = {}

    def draw(world: World, random: Random) -> Action:
        for _ in range(_TRIES):
            action = world.draw(random)
            name = str(action[0])
            if name not in shares:
                shares[name] = share(name)
            if random.random() < shares[name]:
                break
        return action  # after too many tries any action will do: a run must go on

    return draw


@contextmanager
def _runs_of(
    task: _RunMaker, first_run: int, jobs: int, executor: Executor | None
) -> Iterator[Iterator[_RunResult]]:
    """An endless series of runs in order, made in this process or in others."""
    if executor is None and jobs > 1:
        executor = ForkedProcesses(jobs)
    if executor is not None:
        firsts = count(first_run, _BATCH)
        with executor.results(partial(_batch_of, task), firsts, name=_batch_named) as batches:
            yield (run for batch in batches for run in batch)
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield _one_by_one(task, first_run)
    finally:
        if was_enabled:
            gc.enable()


def _one_by_one(task: _RunMaker, first_run: int) -> Iterator[_RunResult]:
    for number in count(first_run):
        yield task.run(number)
        if not number % _BATCH:
            gc.collect()


def _batch_of(task: _RunMaker, first: int) -> list[_RunResult]:
    gc.disable()  # a batch collects when it ends
    try:
        return task.batch(first)
    finally:
        gc.enable()


def _batch_named(first: int) -> str:
    return f"runs {first} to {first + _BATCH - 1}"
