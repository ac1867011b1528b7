"""Budgets: an action is taken once for all states that differ in nothing else. Verdicts are those of a
search that takes each state for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from planted_bugs import evict_what_is_pinned, forget, take_doubled_reports
from toy_models import Plain, always, eventually, sometimes

from kvsm.check.explore.budgets import FREE, Left, Rests
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.live_model import WorldScope
from kvsm.check.explore.model import Exploration, Verdict
from kvsm.check.scopes.serving_pairs import PAIRS
from kvsm.check.scopes.serving_scopes import SCOPES, ServingModel
from kvsm.check.scopes.serving_triples import TRIPLES
from kvsm.check.worlds.requirement import Requirement
from kvsm.core.ledger import requests
from kvsm.core.plan import WorkerReport
from kvsm.system.executors.forked import ForkedProcesses

Patch = pytest.MonkeyPatch


def facts(found: Exploration) -> Exploration:
    """Everything but the time that it took."""
    return structs.replace(found, seconds=0)


def forget_to_wake(patch: Patch) -> None:
    """A request that waits for a copy is not notified of its end."""
    forget(patch, requests.wake)


class Purse(Plain):
    """A graph whose actions of some names spend budgets: a state is [node, what is left]."""

    def __init__(
        self,
        edges: dict[int, dict[str, int]],
        requirements: Sequence[Requirement[Any]] = (),
        whole: Left = (1, 2),
        costs: str = "ab",
    ) -> None:
        self.edges, self.requirements, self.whole, self.costs = edges, requirements, whole, costs
        self.taken: Counter[tuple[int, str]] = Counter()
        self.budgets: PurseBudgets | None = PurseBudgets(self)

    def initial(self) -> Iterable[Any]:
        return [[0, self.whole]]

    def actions(self, state: Any) -> Iterable[Any]:
        node, left = state
        budget = self.costs.find
        return [name for name in self.edges.get(node, {}) if budget(name) < 0 or left[budget(name)]]

    def next(self, state: Any, action: Any) -> Any:
        self.taken[state[0], action] += 1
        return [self.edges[state[0]][action], PurseBudgets(self).paid(state[1], action)]

    def fingerprint(self, state: Any) -> Any:
        return tuple(state)

    def load(self, saved: Any) -> Any:
        return list(saved)

    def wind_down(self, state: Any) -> Any:
        return "d" if "d" in self.edges.get(state[0], {}) else None


class PurseBudgets:
    remembered = ()
    fading = None

    def __init__(self, model: Purse) -> None:
        self.whole, self._costs = model.whole, model.costs

    def set_left(self, state: Any, left: Left) -> None:
        state[1] = left

    def spends(self, action: str) -> int:
        return self._costs.find(action)

    def spent(self, left: Left, budget: int) -> Left:
        return tuple(count - (place == budget) for place, count in enumerate(left))

    def paid(self, left: Left, action: str) -> Left:
        budget = self.spends(action)
        return left if budget == FREE else self.spent(left, budget)

    def fingerprint(self, state: Any) -> Any:
        return state[0]

    def faded(self, _state: Any, fingerprint: Any) -> Any:
        return fingerprint


def without_budgets(model: Any) -> Any:
    model.budgets = None
    return model


graphs = st.dictionaries(
    st.integers(0, 6), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 6), max_size=4), max_size=7
)


@given(graphs, st.integers(0, 6))
def test_any_graph_has_the_result_of_a_search_without_sharing(
    edges: dict[int, dict[str, int]], special: int
) -> None:
    requirements: list[Requirement[Any]] = [
        always(lambda state: state[0] != special),
        eventually(lambda state: state[0] != special),
        sometimes(lambda state: state[0] == special, "special", required=False),
    ]
    for chosen in ([], requirements[:1], requirements[1:]):
        shared, alone = explore(Purse(edges, chosen)), explore(without_budgets(Purse(edges, chosen)))
        assert facts(shared) == facts(alone)


def test_an_action_is_taken_once_for_all_that_can_afford_it() -> None:
    ring = {0: {"a": 1, "c": 1}, 1: {"b": 0, "c": 0}}
    model, alone = Purse(ring), without_budgets(Purse(ring))
    assert explore(model).transitions == explore(alone).transitions == sum(alone.taken.values()) == 19
    assert set(model.taken.values()) == {1}


def test_rests_are_numbered_once() -> None:
    rests = Rests(PurseBudgets(Purse({})))
    whole = rests.number((1, 1))
    one, other = rests[whole].after[:2]
    assert [rests[number].left for number in (one, other)] == [(0, 1), (1, 0)]
    assert rests[one].after == [FREE, rests[other].after[0], one]


class TwoWays(Plain):
    """Two ways to a room with a row of two doors: "skip", which costs, and two walks. The row begins at the
    other end if one walks. To open a door costs, too, so only who has walked can. Behind one door is a wolf.

    A state is [room, row of doors, what is left]. is_hidden: the wolf is there only for who has skipped.
    """

    def __init__(self, is_hidden: bool = False) -> None:
        self.requirements = (always(lambda state: state[0] != "a wolf"),)
        self.budgets, self._is_hidden = TwoWaysBudgets(), is_hidden

    def initial(self) -> Iterable[Any]:
        return [["start", [], (1,)]]

    def actions(self, state: Any) -> Iterable[Any]:
        room, row, (left,) = state
        skips = [("skip",)] if room == "start" and left else []
        walks = [("walk",)] if room in ("start", "half way") else []
        opens = [("open", place) for place in range(len(row)) if left]
        return [*skips, *walks, *opens]

    def next(self, state: Any, action: Any) -> Any:
        room, row, left = state
        match action:
            case ("skip",):
                return ["doors", ["wolf", "sheep"], (0,)]
            case ("walk",) if room == "start":
                return ["half way", [], left]
            case ("walk",):
                return ["doors", ["sheep", "wolf"], left]
        has_wolf = row[action[1]] == "wolf" and not (self._is_hidden and row[0] == "sheep")
        return ["a wolf" if has_wolf else "no wolf", [], (0,)]

    def fingerprint(self, state: Any) -> Any:
        return state[0], state[2]

    def load(self, saved: Any) -> Any:
        return list(saved)


class TwoWaysBudgets(PurseBudgets):
    def __init__(self) -> None:
        self.whole = (1,)

    def set_left(self, state: Any, left: Left) -> None:
        state[2] = left

    def spends(self, action: Any) -> int:
        return FREE if action[0] == "walk" else 0

    def fingerprint(self, state: Any) -> Any:
        return state[0]


def test_a_path_names_things_by_their_places_on_this_path() -> None:
    """The search opens a door of the row that it met first, which begins at the other end."""
    found = explore(TwoWays())
    assert found.refutation is not None
    assert found.refutation.path == (("walk",), ("walk",), ("open", 1))


def test_a_finding_that_cannot_be_repeated_is_searched_without_sharing() -> None:
    """The fingerprints hide which of two equal states has the wolf. Nobody can open that door."""
    assert explore(TwoWays(is_hidden=True)).verdict is Verdict.PROVED


# The serving world.

SMALL = {name: scope for name, scope in SCOPES.items() if not name.startswith("full")}


def both(scope: WorldScope, max_states: int | None = None) -> list[Exploration]:
    """The results with sharing and without."""
    models = ServingModel(scope), without_budgets(ServingModel(scope))
    return [facts(explore(model, max_states=max_states)) for model in models]


@pytest.mark.parametrize("name", ["evictions", "aborts", "restarts-losing"])
def test_serving_has_the_result_of_a_search_without_sharing(name: str) -> None:
    shared, alone = both(SCOPES[name])
    assert shared == alone


def test_processes_and_tasks_share_actions_with_the_same_result() -> None:
    scope = SCOPES["aborts"]
    alone = facts(explore(ServingModel(scope)))
    assert facts(explore(ServingModel(scope), jobs=2)) == alone
    assert facts(explore(ServingModel(scope), executor=ForkedProcesses(2))) == alone


@pytest.mark.slow
@pytest.mark.parametrize("family", [SMALL, PAIRS, TRIPLES], ids=["small", "pairs", "triples"])
def test_all_of_serving_has_the_results_of_searches_without_sharing(family: Mapping[str, WorldScope]) -> None:
    """Except for edges: a FREE slot counts as an EVICTED one, and an action is taken from one of them. And
    counts differ a little where states have one fingerprint and their successors two: the slots of a copy
    that was given up are named by their numbers."""
    for scope in family.values():
        shared, alone = both(scope, max_states=4_000)
        assert shared.states == pytest.approx(alone.states, rel=0.005)
        assert shared.transitions == pytest.approx(alone.transitions, rel=0.005)
        counted = {"edges": (), "actions": {}, "states": 0, "transitions": 0}
        assert structs.replace(shared, **counted) == structs.replace(alone, **counted)


@pytest.mark.parametrize(
    ("bug", "scope"),
    [(forget_to_wake, "aborts"), (take_doubled_reports, "aborts"), (evict_what_is_pinned, "evictions")],
)
def test_a_planted_bug_has_the_same_shortest_path(
    bug: Callable[[Patch], None], scope: str, monkeypatch: Patch
) -> None:
    bug(monkeypatch)
    shared, alone = both(SCOPES[scope])
    assert shared.refutation is not None
    assert shared.refutation == alone.refutation


def test_what_no_repeat_is_left_for_does_not_tell_states_apart() -> None:
    """Which report ended a copy matters while a report can be repeated."""
    model = ServingModel(SCOPES["aborts"])
    [world] = model.initial()
    before = model.budgets.fingerprint(world)
    world.over = WorkerReport(1, 0, True)
    after = model.budgets.fingerprint(world)
    assert after != before
    assert model.budgets.faded(world, after) == before
