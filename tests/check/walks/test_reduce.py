"""Reduction: a failure is reduced to the few actions that it takes, and always to the same ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planted_bugs import evict_what_is_pinned, free_slots_under_copies, take_doubled_reports
from toy_worlds import Counting

from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.reduce import NotRepeated, reduce, rerun
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import random_of, walk
from kvsm.check.worlds.world import Action, Finding
from kvsm.properties import Property

ABOVE = Finding(Property.CONSERVATION, "above")


def found_and_reduced(seed: int, target: str = "core") -> tuple[int, tuple[Action, ...]]:
    """How long the failing run was, and its reduction."""
    failure = walk(lambda random: draw_case(target, random).make(), seed, runs=60).failure
    assert failure is not None
    walked = WorldTarget(target)
    saved = walked.reduced(walked.unreduced(seed, failure, ()))
    replayed = rerun(saved.case().make, saved.actions)
    assert replayed.finding == saved.finding()
    assert replayed.actions == saved.actions
    return len(failure.actions), saved.actions


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("bug", "fewest", "most"),
    [
        # A store, its submission, a report and the same report; with three workers there may be one more.
        (take_doubled_reports, 4, 5),
        # A store, its submission, a report of each worker, a match.
        (evict_what_is_pinned, 4, 6),
        # A store, its submission, a reset.
        (free_slots_under_copies, 3, 3),
    ],
)
def test_a_planted_bug_is_reduced_to_few_actions(
    bug: Callable[[pytest.MonkeyPatch], None],
    fewest: int,
    most: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From hundreds of actions, for any seed."""
    bug(monkeypatch)
    _, actions = found_and_reduced(seed)
    assert fewest <= len(actions) <= most, actions


def test_a_reduction_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From hundreds of actions to exactly these three."""
    free_slots_under_copies(monkeypatch)
    found, actions = found_and_reduced(seed=0)
    assert found > 50
    assert actions == (("store", 0, 0, 0, 0, 0, 0, 1), ("submit", 0), ("reset",))


def test_no_single_action_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    take_doubled_reports(monkeypatch)
    failure = walk(lambda random: draw_case("core", random).make(), 1, runs=60).failure
    assert failure is not None
    core = WorldTarget("core")
    saved = core.reduced(core.unreduced(1, failure, ()))
    for place in range(len(saved.actions)):
        fewer = saved.actions[:place] + saved.actions[place + 1 :]
        outcome = rerun(saved.case().make, fewer)
        assert outcome.finding is None or outcome.finding.property != saved.property


# On a world that fits in the head.


def test_noise_and_large_numbers_are_removed() -> None:
    """Kinds that change nothing, pairs that undo each other, and needlessly large numbers."""
    noisy: list[Action] = [("look", 3), ("up", 2), ("down",), ("look", 1), ("up", 0)] * 20
    reduction = reduce(lambda: Counting(most=4), noisy, ABOVE)
    assert reduction.actions == (("up", 1), ("up", 2))
    assert reduction.finding == Finding(Property.CONSERVATION, "it is 5, above 4")


def test_actions_after_the_failure_are_removed() -> None:
    actions: list[Action] = [("up", 0)] * 3 + [("down",)] * 50
    assert reduce(lambda: Counting(most=2), actions, ABOVE).actions == (("up", 0),) * 3


def test_numbers_become_small() -> None:
    assert reduce(lambda: Counting(most=0), [("up", 7)], ABOVE).actions == (("up", 0),)


def test_another_property_is_another_bug() -> None:
    """A shorter run that breaks something else is not this failure."""

    class Worse(Counting):
        def do(self, action: Action) -> bool:
            if action == ("down",) and not self.number:
                raise ZeroDivisionError
            return super().do(action)

    actions: list[Action] = [("up", 0), ("down",), ("up", 0), ("up", 0)]
    assert reduce(lambda: Worse(most=1), actions, ABOVE).actions == (("up", 0), ("up", 0))


def test_reruns_are_bounded() -> None:
    """The best result so far is still a failure."""
    actions: list[Action] = [("up", 0), ("look",)] * 200
    reduction = reduce(lambda: Counting(most=20), actions, ABOVE, most_reruns=5)
    assert reduction.reruns == 5
    assert rerun(lambda: Counting(most=20), reduction.actions).finding == reduction.finding


def test_a_long_list_takes_few_reruns() -> None:
    """Three of 20,000 actions matter. Whole kinds are removed at once, the rest in halves."""
    noise: list[Action] = [("look", number % 7) for number in range(10_000)]
    actions = [*noise, ("up", 0), *noise, ("up", 0), ("up", 0)]
    reduction = reduce(lambda: Counting(most=2), actions, ABOVE)
    assert reduction.actions == (("up", 0),) * 3
    assert reduction.reruns < 20


def test_a_failure_that_is_not_repeated_is_reported() -> None:
    """Determinism (S11): something outside of the actions decides, too."""
    with pytest.raises(NotRepeated, match=r"1 actions broke conservation \(S1\), and done again they do not"):
        reduce(lambda: Counting(most=9), [("up", 0)], ABOVE)


class Stuck(Counting):
    """From five on it cannot wind down."""

    def wind_down(self) -> Action | None:
        return ("look",) if self.number >= 5 else super().wind_down()


def test_a_world_that_never_rests_is_reduced_to_what_led_there() -> None:
    """Progress (S9). Each candidate is wound down, and these actions are not part of the result."""
    failure = walk(lambda _: Stuck(most=10**6), 1, runs=1).failure
    assert failure is not None
    assert failure.finding.property == Property.PROGRESS
    reduction = reduce(lambda: Stuck(most=10**6), failure.actions, failure.finding)
    assert reduction.finding.property == Property.PROGRESS
    assert reduction.actions == (("up", 0),) * 5
    assert rerun(lambda: Stuck(most=10**6), reduction.actions).finding is None
    assert rerun(lambda: Stuck(most=10**6), reduction.actions, to_rest=True).finding == reduction.finding


@pytest.mark.parametrize("run", range(10))
def test_a_run_is_repeated_by_the_actions_that_happened(run: int) -> None:
    """Otherwise a failure could not be reduced: an action that "did not happen" must have changed nothing."""
    random = random_of(1, run)
    case = draw_case("core", random)
    world, done = case.make(), []
    for _ in range(300):
        action = world.draw(random)
        if world.do(action):
            done.append(action)
    world.check()
    outcome = rerun(case.make, done)
    assert outcome.actions == tuple(done)
    assert outcome.world.fingerprint() == world.fingerprint()
