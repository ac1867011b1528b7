"""Scopes made by rule: every pair of values meets, the code is proved, and what is left out is named."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from click.testing import CliRunner
from museum import EXHIBITS
from museum.small_scopes import MISSED, REFUTED_BY
from planted_bugs import forget

from examples import drawn_today
from kvsm.check.explore.coverage import all_edges
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Verdict
from kvsm.check.scopes.covering import covering
from kvsm.check.scopes.models import MODELS
from kvsm.check.scopes.serving_pairs import PAIRS, PARAMETERS, excluded
from kvsm.check.scopes.serving_scopes import SCOPES, ServingModel
from kvsm.check.scopes.untaken import UNTAKEN
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.cli import main
from kvsm.core.ledger import requests
from kvsm.core.policies import POLICIES, make_policy
from kvsm.errors import ConfigError
from kvsm.states import MACHINES

MOST_STATES = 4000
"""Of a scope in the tests of the day. The largest have some ten thousand."""


# The rows.


def test_every_pair_of_values_is_in_a_row_unless_it_is_excluded() -> None:
    rows = covering(PARAMETERS, excluded)
    for one, other in combinations(PARAMETERS, 2):
        met = {(row[one], row[other]) for row in rows}
        wanted = {
            pair
            for pair in product(PARAMETERS[one], PARAMETERS[other])
            if not excluded({one: pair[0], other: pair[1]})
        }
        assert met == wanted, (one, other)
    assert len(rows) == len(PAIRS) == 79


def test_a_pair_that_fits_in_no_row_is_told() -> None:
    def never(pair: dict[str, Any]) -> bool:
        return pair.get("a") == 1 and "c" in pair

    with pytest.raises(ConfigError, match="no row can have a 1 and b 1; exclude this pair, or less"):
        covering({"a": (1, 2), "b": (1, 2), "c": (1,)}, never)


# The scopes.


@pytest.mark.parametrize(
    ("name", "states"), [("pairs-03", 613), ("pairs-05", 364), ("pairs-07", 279), ("pairs-08", 70)]
)
def test_state_counts_are_pinned(name: str, states: int) -> None:
    found = explore(ServingModel(PAIRS[name]))
    assert (found.verdict, found.states) == (Verdict.PROVED, states)


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn_today(sorted(PAIRS), 6))
def test_nothing_is_refuted_in_scopes_of_the_day(name: str) -> None:
    """S1 to S18, as far as the world sees them. `kvsm check serving --scope pairs` explores all of them."""
    assert explore(ServingModel(PAIRS[name]), max_states=MOST_STATES).refutation is None


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn_today(["aborts", "losing", "no-references", "hybrid"], 1))
def test_verdict_is_the_same_with_numbered_workers(name: str) -> None:
    """Workers that differ in nothing but their numbers are one and the same."""
    numbered = explore(ServingModel(SCOPES[name], renamed=False))
    renamed = explore(ServingModel(SCOPES[name]))
    assert (numbered.verdict, numbered.reached) == (renamed.verdict, renamed.reached)
    assert set(numbered.edges) == set(renamed.edges)
    assert numbered.states > 1.3 * renamed.states


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_world_has_the_idle_blocks_of_the_saved_one(policy: str) -> None:
    """Policies that count uses lost what was stored after a world was loaded: their counts have two views."""
    options = ServingOptions(policy=policy)
    world = ServingWorld(options, keep_events=False)
    world.do(("arrive",))
    while not len(world.engine.core.ledger.policy):
        action = world.wind_down()
        assert action is not None
        world.do(action)
    saver = Saver(ServingWorld(options, keep_events=False))
    loaded = saver.load(saver.save(world)).engine.core.ledger.policy
    [empty] = [slot for slot in range(options.slots) if slot not in loaded]
    loaded.admitted((empty,), (b"another key",))
    restored = make_policy(policy, options.slots)
    restored.restore(loaded.snapshot())
    assert empty in restored


# The edges of the tables.


def test_what_is_named_are_edges() -> None:
    machines = MODELS["serving"].machines
    assert UNTAKEN.keys() <= {edge.name for name in machines for edge in all_edges(MACHINES[name])}


ENOUGH = (
    *("any-two", "shared", "small", "restarts-losing", "hybrid", "preemptions"),
    *("pairs-31", "triples-038"),
)
"""Scopes that together take every edge that any small scope takes."""


@pytest.mark.slow
def test_each_edge_is_taken_by_a_small_scope_or_named_with_a_reason() -> None:
    """`test_serving_world.py` explores the other small scopes: they take no edge of `UNTAKEN`."""
    scopes = MODELS["serving"].scopes
    taken = {edge.name for name in ENOUGH for edge in explore(ServingModel(scopes[name])).edges}
    edges = {edge.name for name in MODELS["serving"].machines for edge in all_edges(MACHINES[name])}
    assert taken & edges == edges - UNTAKEN.keys()


# The museum.


def test_each_of_the_first_forty_exhibits_is_refuted_or_missed_for_a_reason() -> None:
    assert sorted([*REFUTED_BY, *MISSED]) == list(EXHIBITS)[:40]


@pytest.mark.slow
@pytest.mark.parametrize("id", drawn_today(sorted(REFUTED_BY), 5))
def test_a_small_scope_alone_refutes_the_exhibit(id: str) -> None:
    scope = MODELS["serving"].scopes[REFUTED_BY[id]]
    with EXHIBITS[id].put_back():
        assert explore(ServingModel(scope)).verdict is Verdict.REFUTED


# The command.


def test_the_command_explores_a_family_and_tells_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODELS["serving"]), "families", {"pairs": ("pairs-05", "pairs-08")})
    result = CliRunner().invoke(main, ["check", "serving", "--scope", "pairs", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("serving, pairs-05: PROVED, ")
    assert "serving, pairs: 2 of 2 scopes" in lines
    assert any(
        line.startswith("    never taken: block FREE --INVALIDATE--> FREE: what a reset") for line in lines
    )


def test_a_family_ends_with_its_first_refutation(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, requests.wake)
    monkeypatch.setattr(type(MODELS["serving"]), "families", {"pairs": ("evictions", "pairs-01")})
    result = CliRunner().invoke(main, ["check", "serving", "--scope", "pairs", "--jobs", "1"])
    assert result.exit_code == 1
    assert "serving, pairs: 1 of 2 scopes" in result.stdout


def test_the_list_tells_a_family_in_one_line() -> None:
    listed = CliRunner().invoke(main, ["check", "--list"]).stdout.splitlines()
    assert "  pairs: 79 scopes, pairs-01 to pairs-79" in listed
    assert not any(line.startswith("  pairs-01") for line in listed)
