"""Scopes in which any three values meet, and what the small world does and checks for them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from click.testing import CliRunner
from museum import EXHIBITS

from examples import drawn_today
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Verdict
from kvsm.check.scopes.covering import covering
from kvsm.check.scopes.serving_pairs import PARAMETERS
from kvsm.check.scopes.serving_scopes import SCOPES, ServingModel
from kvsm.check.scopes.serving_triples import OTHERWISE, TIMING, TRIPLES, excluded
from kvsm.check.worlds.mistakes import load_over_a_copy, may_load_over_a_copy
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.cli import main
from kvsm.core.ledger.invariants import check_ledger
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

MOST_STATES = 4000


def test_any_three_values_are_in_a_row_unless_two_are_excluded() -> None:
    rows = covering(TIMING, excluded, strength=3)
    for names in combinations(TIMING, 3):
        met = {tuple(row[name] for name in names) for row in rows}
        wanted = {
            values
            for values in product(*(TIMING[name] for name in names))
            if not excluded(dict(zip(names, values)))
        }
        assert met == wanted, names
    assert len(rows) == len(TRIPLES) == 119


def test_each_parameter_of_a_scope_has_a_value() -> None:
    assert {*TIMING, *OTHERWISE, "another"} == PARAMETERS.keys()


@pytest.mark.parametrize(
    ("name", "states"), [("triples-040", 523), ("triples-054", 380), ("triples-109", 46)]
)
def test_state_counts_are_pinned(name: str, states: int) -> None:
    found = explore(ServingModel(TRIPLES[name]))
    assert (found.verdict, found.states) == (Verdict.PROVED, states)


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn_today(sorted(TRIPLES), 6))
def test_nothing_is_refuted_in_scopes_of_the_day(name: str) -> None:
    """S1 to S18, as far as the world sees them. `kvsm check serving --scope triples` explores all of them."""
    assert explore(ServingModel(TRIPLES[name]), max_states=MOST_STATES).refutation is None


def test_the_list_tells_the_family_in_one_line() -> None:
    listed = CliRunner().invoke(main, ["check", "--list"]).stdout.splitlines()
    assert "  triples: 119 scopes, triples-001 to triples-119" in listed


# What the world does and checks.


def _under_a_copy() -> ServingWorld:
    """A world with a readable block, while a copy reads another one."""
    world = ServingWorld(TRIPLES["triples-109"].options)
    for action in (("arrive",), ("step",), ("step",), ("arrive",)):
        assert world.do(action)
    while not may_load_over_a_copy(world.engine.core):
        action = world.wind_down()
        assert action is not None
        assert world.do(action)
    return world


def test_a_load_over_a_copy_is_refused_and_nothing_changes() -> None:
    """Conservation (S1)."""
    core = _under_a_copy().engine.core
    before = dict(core.ledger.index), list(core.ledger.requests), list(core.ledger.transfers)
    assert load_over_a_copy(core)
    assert (dict(core.ledger.index), list(core.ledger.requests), list(core.ledger.transfers)) == before
    assert not check_ledger(core.ledger)


def test_a_refused_load_that_keeps_what_it_took_is_seen() -> None:
    world = _under_a_copy()
    with EXHIBITS["B40"].put_back(), pytest.raises(PropertyBroken) as broken:
        load_over_a_copy(world.engine.core)
    assert broken.value.property is Property.ONE_RELEASE_PER_HOLD


def test_a_match_that_outlives_its_blocks_is_seen() -> None:
    """One release per hold (S4)."""
    with EXHIBITS["B31"].put_back():
        refutation = explore(ServingModel(SCOPES["preemptions"])).refutation
    assert refutation is not None
    assert refutation.finding.property is Property.ONE_RELEASE_PER_HOLD


def test_a_saved_world_keeps_a_field_that_it_was_not_made_with() -> None:
    """A change of the code may remember something in a field of its own; the checker forgot it."""
    world = ServingWorld(ServingOptions(), keep_events=False)
    saver = Saver(ServingWorld(ServingOptions(), keep_events=False))
    world.engine.core.remembered = {1: (b"key",)}  # type: ignore[attr-defined]
    core = saver.load(saver.save(world)).engine.core
    assert vars(core)["remembered"] == {1: (b"key",)}
    assert not hasattr(saver.load(saver.save(ServingWorld(ServingOptions()))).engine.core, "remembered")
