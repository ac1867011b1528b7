"""The random walk: many short runs of a world, each from a seed of its own.

A run draws a small configuration, and with `swarm` a profile: most kinds of action as often as the world
draws them, some seldom, some not at all. Bugs hide in runs in which something never happens (no report
ever fails, nothing is ever cancelled), and no fixed mixture has such runs. Then it lets things happen, has
the world look at everything now and again, and winds down to rest.

Nothing but (seed, number of the run) decides what is done in a run: so a failure is these two numbers and
the list of its actions. Clocks and limits only decide how many runs there are. With several processes the
runs are counted in their order, and the result is the same.
"""

from __future__ import annotations

import gc
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import active_children, get_context
from multiprocessing.pool import AsyncResult
from multiprocessing.process import BaseProcess
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property
from kvsm.worlds.world import Action, Finding, World, finding_of

MakeWorld = Callable[[Random], World]
"""A new world, of a configuration that it draws."""

FEWEST_ACTIONS, MOST_ACTIONS = 300, 2000
CHECK_EVERY = 250
"""Actions from one look at everything to the next, unless the world has a `check_every` of its own."""
MOST_WINDING = 20_000
"""Actions on the way to rest, after which it counts as endless."""
FEW_WINDING = 500
"""Actions on the way to rest, after which it is worth the time to see whether it goes round in a circle."""
_BATCH = 8
"""Runs that a process makes at a time. Garbage is collected in between: within a run there is little."""
_LOOK_AFTER_S = 1.0
"""So long without a batch, and it is looked whether the processes are there."""
_SHARES = (0.0, 0.05, 0.3, 1.0, 1.0, 1.0)
_TRIES = 16


class WalkFailure(msgspec.Struct, frozen=True):
    """A run that ended in a finding, with all that was done in it, what could not happen left out."""

    run: int
    actions: tuple[Action, ...]
    finding: Finding


class WalkResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a walk came to. next_run: go on with it. operations: what was done and compared, as the world
    counts it, or else actions that happened. most_in_flight: copies at once, if the world counts them.
    interrupted: by Ctrl-C."""

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
        return self.operations / self.seconds if self.seconds else 0.0


class _RunResult(msgspec.Struct, frozen=True):
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
    progress: Callable[[WalkResult], None] | None = None,
) -> WalkResult:
    """Make runs from `first_run` on until one fails, or a limit is reached, or Ctrl-C. Without a limit: on.

    With `runs` or `operations` the result is the same every time, whatever `jobs` is. jobs: processes;
    forked, so that `make_world` may be anything. progress: called after every run. Raises `ConfigError` if
    a process is killed.
    """
    result, start = WalkResult(seed=seed, next_run=first_run), time.monotonic()
    with _runs_of(_RunMaker(make_world, seed, swarm), first_run, jobs) as made:
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
    """What a run draws from. `make_world(random_of(seed, run))` is its world as it was at first."""
    return Random(f"{seed}/{run}")


Batch = AsyncResult[list[_RunResult]]
"""Runs that a process is making."""


class _RunMaker:
    """One run, and all that decides what happens in it."""

    def __init__(self, make_world: MakeWorld, seed: int, swarm: bool) -> None:
        self.make_world, self.seed, self.swarm = make_world, seed, swarm

    def run(self, number: int) -> _RunResult:
        random = random_of(self.seed, number)
        world = self.make_world(random)
        draw = _swarm_of(world, f"{self.seed}/{number}") if self.swarm else _draw
        done: list[Action] = []
        check_every = getattr(world, "check_every", CHECK_EVERY)
        try:
            for place in range(random.randint(FEWEST_ACTIONS, MOST_ACTIONS)):
                try:
                    action = draw(world, random)
                except IndexError:  # Of `Random.choice`: there is nothing to choose from.
                    break
                _do(world, action, done)
                if place % check_every == check_every - 1:
                    world.check()
            world.check()
            rest(world, done)
        except Exception as error:  # Whatever the real code raises is what is looked for.
            return _run_of(world, done, WalkFailure(number, tuple(done), finding_of(error)))
        return _run_of(world, done, None)

    def batch(self, first: int) -> list[_RunResult]:
        """Runs from `first` on; none after one that failed."""
        made: list[_RunResult] = []
        while len(made) < _BATCH and not (made and made[-1].failure):
            made.append(self.run(first + len(made)))
        gc.collect()
        return made


def rest(world: World, done: list[Action]) -> None:
    """Wind down, and look at what is left. Raises `PropertyBroken` (S9) if there is no end to it: then `done`
    ends where it began, for the way is always the same."""
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
    """The action stands among those done while it happens: if it raises, it is the last one."""
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
    """A world that draws by a profile itself, which is quicker than to draw and throw away."""

    def favour(self, share: Callable[[str], float]) -> None:
        """Draw of each kind of action only this share."""


def _swarm_of(world: World, seed: str) -> Callable[[World, Random], Action]:
    """How large a part of what the world draws of each kind may happen in this run. The share hangs on the
    name of the kind, and not on when it turns up."""

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
        return action  # If nothing that is wanted can be drawn, the last one: a run does not stop.

    return draw


@contextmanager
def _runs_of(task: _RunMaker, first_run: int, jobs: int) -> Iterator[Iterator[_RunResult]]:
    """Endless runs, in their order, made here or by processes."""
    if jobs > 1:
        others = set(active_children())
        with get_context("fork").Pool(jobs, _begin_process, (task,)) as pool:
            processes = set(active_children()) - others
            made = _in_order(lambda first: pool.apply_async(_batch_of_process, (first,)), first_run, jobs)
            yield (run for batch in made for run in _awaited(batch, processes))
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


def _in_order(begin: Callable[[int], Batch], first_run: int, jobs: int) -> Iterator[Batch]:
    waiting: deque[Batch] = deque()
    for first in count(first_run, _BATCH):
        waiting.append(begin(first))
        if len(waiting) > 2 * jobs:
            yield waiting.popleft()


def _awaited(batch: Batch, processes: set[BaseProcess]) -> list[_RunResult]:
    """A pool puts another process in the place of one that was killed, and never tells of its batch."""
    while not batch.ready():
        batch.wait(_LOOK_AFTER_S)
        if not batch.ready() and not processes <= set(active_children()):
            raise ConfigError("a process of the walk was killed, maybe for want of memory; try fewer --jobs")
    return batch.get()


_task_of_process: _RunMaker
"""Inherited by fork: a world's maker need not be one that can be sent."""


def _begin_process(task: _RunMaker) -> None:
    global _task_of_process
    _task_of_process = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gc.freeze()


def _batch_of_process(first: int) -> list[_RunResult]:
    return _task_of_process.batch(first)
