"""The random walk: many short runs of a world, each from its own seed.

A run draws a small configuration. With `swarm` it also draws a profile: most kinds of action happen as often
as the world draws them, some rarely, some never. Some bugs need a run without a kind of action (no failed
report, no cancelled copy), and a fixed mix of actions gives no such runs. The run then does actions, checks
the world at intervals, and winds down to rest.

A run is determined by the seed and its number, so these two numbers and the list of actions describe a
failure. Clocks and limits affect only the number of runs. Several processes give the same result as one,
because runs are counted in order.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Protocol, runtime_checkable

import msgspec

from kvsm.check.walks.shard import WHOLE, Shard
from kvsm.check.worlds.world import Action, Finding, World, finding_of
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.system.executors.executor import Executor
from kvsm.system.executors.forked import ForkedProcesses
from kvsm.system.stopping import CutShort, IsOver, go_on_unless, never

MakeWorld = Callable[[Random], World]
"""Creates a new world with a configuration drawn from the random numbers."""

FEWEST_ACTIONS, MOST_ACTIONS = 300, 2000
"""The range of the number of actions in a run."""
CHECK_EVERY = 250
"""Actions between two checks of the whole world, unless it has its own `check_every`."""
MOST_WINDING = 20_000
"""After this number of actions winding down counts as endless."""
FEW_WINDING = 500
"""After this number of actions winding down also looks for a cycle, which costs time."""
_BATCH = 8
"""Runs in one task of a process. Garbage is collected between tasks only, because a run makes little."""
_SHARES = (0.0, 0.05, 0.3, 1.0, 1.0, 1.0)
_TRIES = 16


class WalkFailure(msgspec.Struct, frozen=True):
    """A run that ended in a finding, with the actions that happened in it."""

    run: int
    actions: tuple[Action, ...]
    finding: Finding


class WalkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a walk.

    next_run: the number of the run to continue with.
    operations: the world's own count of operations, or else the number of actions.
    most_in_flight: the most copies at once, if the world counts them.
    interrupted: whether `is_over` or Ctrl-C ended the walk.
    reached: the runs that reached new features, if runs are watched (`kvsm.check.walks.guided`).
    """

    seed: int
    next_run: int = 0
    runs: int = 0
    operations: int = 0
    seconds: float = 0.0
    most_in_flight: int = 0
    interrupted: bool = False
    failure: WalkFailure | None = None
    reached: tuple[NewlyReached, ...] = ()

    def and_(self, run: WalkedRun, next_run: int, seconds: float) -> WalkResult:
        """Return these totals plus those of a further run."""
        return msgspec.structs.replace(
            self,
            next_run=next_run,
            runs=self.runs + 1,
            operations=self.operations + run.operations,
            most_in_flight=max(self.most_in_flight, run.most_in_flight),
            seconds=seconds,
            failure=run.failure,
            reached=self.reached + run.reached,
        )

    @property
    def operations_per_second(self) -> float:
        """Operations per second of wall time."""
        return self.operations / self.seconds if self.seconds else 0.0


class NewlyReached(msgspec.Struct, frozen=True):
    """A run that reached new features.

    features: the names of the new features.
    actions: the actions up to the one that reached the last new feature.
    choices: for a Hypothesis machine, in place of actions: the bytes that it drew from.
    """

    run: int
    features: frozenset[str]
    actions: tuple[Action, ...] = ()
    choices: bytes = b""


class WalkedRun(msgspec.Struct, frozen=True):
    """The result of one run, to be added to a `WalkResult`."""

    operations: int
    most_in_flight: int
    failure: WalkFailure | None
    reached: tuple[NewlyReached, ...] = ()


def walk(
    make_world: MakeWorld | RunMaker,
    seed: int,
    *,
    first_run: int = 0,
    runs: int | None = None,
    operations: int | None = None,
    seconds: float | None = None,
    swarm: bool = True,
    jobs: int = 1,
    executor: Executor | None = None,
    shard: Shard = WHOLE,
    progress: Callable[[WalkResult], None] | None = None,
    is_over: IsOver = never,
) -> WalkResult:
    """Make runs from number `first_run` on, until one fails, a limit is reached, or the walk is over.

    With `runs` or `operations` the result is the same every time, for any `jobs` and any executor.

    make_world: creates the world of a run; or a `RunMaker`, which makes the runs itself.
    runs: the number of runs of the whole walk. A shard makes only those that belong to it.
    jobs: the number of processes. They are forked, so `make_world` need not be picklable.
    executor: where the runs are made; None for processes on this machine.
    seconds: there is one run at least. A later one under way at the end is cut short, and does not count.
    progress: called after every run.
    is_over: asked between two actions of a run, and while other processes make the runs.

    Raises `ConfigError` if the same runs lose several workers, one after the other.
    """
    maker = make_world if isinstance(make_world, RunMaker) else WorldRuns(make_world, seed, swarm)
    result, start = WalkResult(seed=seed, next_run=first_run), time.monotonic()
    first, end = shard.place(first_run), None if runs is None else first_run + runs
    if end is not None and shard.place(end) == first:  # none of these runs belongs to the shard
        return msgspec.structs.replace(result, next_run=end)

    def ends() -> bool:
        late = seconds is not None and result.runs > 0 and time.monotonic() - start >= seconds
        return late or is_over()

    of_shard = maker if shard == WHOLE else _ShardRuns(maker, shard)
    with _runs_of(of_shard, first, jobs, executor, ends) as made:
        try:
            for place, run in enumerate(made, first):
                is_last = end is not None and shard.place(end) == place + 1
                next_run = shard.run(place) + 1 if end is None or not is_last else end
                result = result.and_(run, next_run, time.monotonic() - start)
                if progress is not None:
                    progress(result)
                if (
                    run.failure is not None
                    or is_last
                    or (operations is not None and result.operations >= operations)
                    or ends()
                ):
                    break
        except CutShort:
            pass
        except KeyboardInterrupt:
            return msgspec.structs.replace(result, interrupted=True)
    return msgspec.structs.replace(result, interrupted=is_over(), seconds=time.monotonic() - start)


def random_of(seed: int, run: int) -> Random:
    """The random numbers of a run. `make_world(random_of(seed, run))` creates its initial world."""
    return Random(f"{seed}/{run}")


class RunMaker(ABC):
    """Makes runs. Its fields, with the number of a run, determine the run."""

    @abstractmethod
    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        """Make the run with this number. Its outcome must depend on nothing else.

        is_over: asked between two steps. Raises `CutShort` if it returns True.
        """

    def batch(self, first: int) -> list[WalkedRun]:
        """Make a batch of runs from number `first` on. It ends early after a failed run."""
        made: list[WalkedRun] = []
        while len(made) < _BATCH and not (made and made[-1].failure):
            made.append(self.run(first + len(made)))
        gc.collect()
        return made


class _ShardRuns(RunMaker):
    """The runs of a shard. Their numbers here are their places in the shard."""

    def __init__(self, maker: RunMaker, shard: Shard) -> None:
        self._maker, self._shard = maker, shard

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        return self._maker.run(self._shard.run(number), is_over)


class WorldRuns(RunMaker):
    """Makes runs of a world. `kvsm.check.walks.guided` lets them begin in states of earlier runs."""

    def __init__(self, make_world: MakeWorld, seed: int, swarm: bool = True) -> None:
        self.make_world, self.seed, self.swarm = make_world, seed, swarm

    def begin(self, number: int, random: Random) -> tuple[World, Sequence[Action]]:  # noqa: ARG002
        """The world of a run, and the actions to do before any is drawn."""
        return self.make_world(random), ()

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        """Make the run with this number."""
        return self.make(number, [], is_over)[1]

    def make(self, number: int, done: list[Action], is_over: IsOver = never) -> tuple[World, WalkedRun]:
        """Make the run with this number, and append its actions to `done` as they happen."""
        random = random_of(self.seed, number)
        world, planned = self.begin(number, random)
        draw = _swarm_of(world, f"{self.seed}/{number}") if self.swarm else _draw
        check_every = getattr(world, "check_every", CHECK_EVERY)
        try:
            for action in planned:
                go_on_unless(is_over)
                _do(world, action, done)
            for place in range(random.randint(FEWEST_ACTIONS, MOST_ACTIONS)):
                go_on_unless(is_over)
                try:
                    action = draw(world, random)
                except IndexError:  # from `Random.choice`: no action is left
                    break
                _do(world, action, done)
                if place % check_every == check_every - 1:
                    world.check()
            world.check()
            rest(world, done, is_over)
        except Exception as error:  # whatever the real code raises is a finding
            failure = WalkFailure(number, tuple(done), finding_of(error))
            return world, _run_of(world, done, failure)
        return world, _run_of(world, done, None)


def rest(world: World, done: list[Action], is_over: IsOver = never) -> None:
    """Wind down, then check the world. Appends the actions to `done`.

    Raises `CutShort`; and `PropertyBroken` (progress, S9) if winding down does not end. Then it removes its
    actions from `done`, because they follow from the state before them.
    """
    began, seen = len(done), set[bytes]()
    for number in range(MOST_WINDING):
        go_on_unless(is_over)
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
    """Do an action and record it in `done`. An action that raises is recorded as the last one."""
    done.append(action)
    if not world.do(action):
        done.pop()


def _draw(world: World, random: Random) -> Action:
    return world.draw(random)


def _run_of(world: World, done: list[Action], failure: WalkFailure | None) -> WalkedRun:
    operations = getattr(world, "operations", len(done))
    return WalkedRun(operations, getattr(world, "most_in_flight", 0), failure)


@runtime_checkable
class Favouring(Protocol):
    """A world that can apply a profile itself, which is faster than discarding drawn actions."""

    def favour(self, share: Callable[[str], float]) -> None:
        """Scale the frequency of each kind of action by `share(name)`."""


def _swarm_of(world: World, seed: str) -> Callable[[World, Random], Action]:
    """A function that draws actions by the profile of a run.

    seed: seeds the profile. The share of a kind of action depends only on the seed and its name.
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
        return action  # after too many tries accept any action: the run must continue

    return draw


@contextmanager
def _runs_of(
    task: RunMaker, first_run: int, jobs: int, executor: Executor | None, is_over: IsOver
) -> Iterator[Iterator[WalkedRun]]:
    """An endless iterator over the runs in order, made in this process or in others."""
    if executor is None and jobs > 1:
        executor = ForkedProcesses(jobs)
    if executor is not None:
        firsts = count(first_run, _BATCH)
        made = executor.results(partial(_batch_of, task), firsts, name=_batch_named, is_over=is_over)
        with made as batches:
            yield (run for batch in batches for run in batch)
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield _one_by_one(task, first_run, is_over)
    finally:
        if was_enabled:
            gc.enable()


def _one_by_one(task: RunMaker, first_run: int, is_over: IsOver) -> Iterator[WalkedRun]:
    for number in count(first_run):
        yield task.run(number, is_over)
        if not number % _BATCH:
            gc.collect()


def _batch_of(task: RunMaker, first: int) -> list[WalkedRun]:
    gc.disable()  # `batch` collects at its end
    try:
        return task.batch(first)
    finally:
        gc.enable()


def _batch_named(first: int) -> str:
    return f"runs {first} to {first + _BATCH - 1}"
