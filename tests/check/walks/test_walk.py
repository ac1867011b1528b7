"""The walk: seed and run number decide everything, however it is interrupted, resumed or parallelised."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from planted_bugs import free_slots_under_copies
from toy_worlds import Counting

from kvsm.check.walks import walk as walking
from kvsm.check.walks.targets import TARGETS, draw_case
from kvsm.check.walks.walk import FEWEST_ACTIONS, MOST_ACTIONS, WalkResult, random_of, walk
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.world import Action, Finding, World
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property


def drawn_world(random: Random) -> CoreWorld:
    return CoreWorld(draw_options(random))


def totals(result: WalkResult) -> tuple[int, ...]:
    """Everything but the time that it took."""
    return result.next_run, result.runs, result.operations, result.most_in_flight


def test_the_same_seed_is_the_same_walk() -> None:
    """Determinism (S11). Another seed gives another walk."""
    first, second = walk(drawn_world, 5, runs=1), walk(drawn_world, 5, runs=1)
    assert totals(first) == totals(second)
    assert totals(walk(drawn_world, 6, runs=1)) != totals(first)


def test_a_resumed_walk_gives_the_result_of_an_uninterrupted_one() -> None:
    whole = walk(drawn_world, 7, runs=3)
    first = walk(drawn_world, 7, runs=1)
    rest = walk(drawn_world, 7, first_run=first.next_run, runs=2)
    assert rest.next_run == whole.next_run == 3
    assert first.operations + rest.operations == whole.operations


def test_more_processes_give_the_same_result() -> None:
    assert totals(walk(drawn_world, 8, runs=4, jobs=2)) == totals(walk(drawn_world, 8, runs=4))


def test_the_first_failing_run_is_reported_for_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes are forked, so they contain the bug that is planted here."""
    free_slots_under_copies(monkeypatch)
    alone, together = walk(drawn_world, 3, runs=40).failure, walk(drawn_world, 3, runs=40, jobs=2).failure
    assert alone is not None
    assert alone == together


class _Fatal(Counting):
    """Kills its process, but not that of the tests."""

    tests = os.getpid()

    def draw(self, random: Random) -> Action:
        if os.getpid() != self.tests:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().draw(random)


def test_runs_that_kill_every_process_are_told() -> None:
    """Otherwise the walk would make them endlessly."""
    with pytest.raises(ConfigError, match=r"runs 0 to 7: 3 workers were lost at it, .* try fewer --jobs"):
        walk(lambda _: _Fatal(most=10**6), 1, runs=1, jobs=2)


def test_a_process_that_is_killed_changes_no_result(tmp_path: Path) -> None:
    """Its runs are made again by another one."""
    alone = walk(lambda random: drawn_world(random), 8, runs=10)

    def make(random: Random) -> CoreWorld:
        with suppress(FileExistsError):
            (tmp_path / "killed").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn_world(random)

    assert totals(walk(make, 8, runs=10, jobs=2)) == totals(alone)
    assert (tmp_path / "killed").exists()


def test_a_limit_ends_the_walk() -> None:
    """The walk ends after the run that reaches the limit; it has at least one run."""
    result = walk(drawn_world, 9, operations=1000)
    assert 1000 <= result.operations < 1000 + 4 * MOST_ACTIONS
    assert walk(drawn_world, 9, seconds=0).runs == 1


def test_ctrl_c_keeps_what_was_done() -> None:
    """Continuing at `next_run` repeats no run and misses none."""

    def press(result: WalkResult) -> None:
        if result.runs > 1:
            raise KeyboardInterrupt

    result = walk(drawn_world, 7, progress=press)
    assert result.interrupted
    assert result.failure is None
    assert totals(result) == totals(walk(drawn_world, 7, runs=result.runs))


def test_a_failure_lists_what_happened_and_nothing_else() -> None:
    """The raising action comes last. Actions that could not happen are left out."""
    failure = walk(lambda _: Counting(most=3), 1, runs=1).failure
    assert failure is not None
    assert failure.finding == Finding(Property.CONSERVATION, "it is 4, above 3")
    heights = list(accumulate(1 if kind == "up" else -1 for kind, *_ in failure.actions))
    assert min(heights) >= 0
    assert [height > 3 for height in heights] == [False] * (len(heights) - 1) + [True]


# Swarm.


def kinds_in(run: int, **options: Any) -> set[str | int]:
    """The kinds of action that happened in one run."""
    worlds: list[_Watched] = []

    def make(random: Random) -> _Watched:
        worlds.append(_Watched(draw_options(random)))
        return worlds[-1]

    walk(make, 1, first_run=run, runs=1, **options)
    return worlds[0].kinds


class _Watched(CoreWorld):
    kinds: set[str | int]

    def do(self, action: Action) -> bool:
        self.kinds = {*getattr(self, "kinds", ()), action[0]}
        return super().do(action)


def test_swarm_leaves_out_different_actions_in_each_run() -> None:
    everything = kinds_in(0, swarm=False)
    profiles = [everything - kinds_in(run) for run in range(4)]
    assert all(profiles)
    assert len({frozenset(one) for one in profiles}) == 4


def test_a_world_without_profiles_is_drawn_from_more_often() -> None:
    """Kinds that a run leaves out are drawn and discarded, so in some run `down` never happens."""
    seen = set()
    for run in range(12):
        world = Counting(most=10**6)
        world.wind_down = lambda: None  # type: ignore[method-assign]
        walk(lambda _, world=world: world, 1, first_run=run, runs=1)
        seen.add("down" in world.kinds)
    assert seen == {True, False}


# The way to rest.


class _Restless(Counting):
    def __init__(self, winding: Action) -> None:
        super().__init__(most=10**6)
        self.winding = winding

    def wind_down(self) -> Action | None:
        return self.winding


@pytest.mark.parametrize(
    ("winding", "message"),
    [(("up", 0), "not at rest"), (("nothing",), "cannot happen")],
    ids=["endless", "impossible"],
)
def test_a_world_that_does_not_come_to_rest_is_a_finding(
    winding: Action, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress (S9)."""
    monkeypatch.setattr(walking, "MOST_WINDING", 50)
    failure = walk(lambda _: _Restless(winding), 1, runs=1).failure
    assert failure is not None
    assert failure.finding.property == Property.PROGRESS
    assert message in failure.finding.message


def test_a_cycle_on_the_way_to_rest_is_noticed() -> None:
    """Progress (S9). It is noticed long before the limit, and the actions end where the way begins."""
    failure = walk(lambda _: _Restless(("look",)), 1, runs=1).failure
    assert failure is not None
    assert str(failure.finding) == "progress (S9): after 502 actions towards rest it is not at rest"
    assert ("look",) not in failure.actions


def test_an_error_of_any_kind_is_a_finding() -> None:
    """Every call is legal (S8), so any exception of the real code is a finding."""

    class Broken(Counting):
        def check(self) -> None:
            raise ZeroDivisionError("by zero")

    failure = walk(lambda _: Broken(most=10**6), 1, runs=1).failure
    assert failure is not None
    assert failure.finding.property == Property.LEGAL_CALLS
    assert "ZeroDivisionError: by zero" in failure.finding.message


def test_a_run_ends_when_nothing_can_happen() -> None:
    """`Random.choice` raises for an empty list, which is no failure of the world."""

    class Short(Counting):
        def draw(self, random: Random) -> Action:
            return random.choice([("up", 0)] if self.number < 5 else [])

    result = walk(lambda _: Short(most=10**6), 1, runs=3)
    assert result.failure is None
    assert result.operations == 3 * (5 + 5)


# The targets.


def test_every_target_gets_its_share() -> None:
    cases = [draw_case("all", random_of(1, run)).target for run in range(300)]
    assert set(cases) == set(TARGETS)
    assert cases.count("core") > cases.count("serving") > cases.count("copies")


def test_a_case_makes_the_same_world_each_time() -> None:
    for target in TARGETS:
        case = draw_case(target, random_of(2, 0))
        made: list[World] = [case.make(), case.make()]
        assert made[0] is not made[1]
        assert made[0].draw(Random(0)) == made[1].draw(Random(0))


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_of_the_unmutated_code_comes_to_rest(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9). States are compared from the first action towards rest: a walk found a KeyError, because
    the walked class had not declared how it is compared."""
    monkeypatch.setattr(walking, "FEW_WINDING", 0)
    monkeypatch.setattr(walking, "MOST_ACTIONS", FEWEST_ACTIONS)
    result = walk(lambda random: draw_case(target, random).make(), 1, runs=1)
    assert result.failure is None, result.failure


def test_a_finding_names_the_broken_property() -> None:
    class Named(Counting):
        def check(self) -> None:
            raise PropertyBroken(Property.CORRECT_BYTES, "other bytes")

    make: Callable[[Random], World] = lambda _: Named(most=10**6)  # noqa: E731
    failure = walk(make, 1, runs=1).failure
    assert failure is not None
    assert str(failure.finding) == "correct bytes (S15): other bytes"
