"""The exploration of the two-tier world: its scopes are proved, and planted bugs are refuted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from planted_bugs import plant
from test_two_tier_world import (
    a_reset_begins_no_era,
    nothing_is_adopted,
    other_meanings_are_believed,
    what_has_come_is_not_held,
)

from examples import of_today
from kvsm.check.explore.checked_model import ExplorationLimits
from kvsm.check.explore.counterexample import render
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.live_model import WorldScope
from kvsm.check.explore.model import Verdict
from kvsm.check.scopes.models import MODELS
from kvsm.check.scopes.tier_scopes import SCOPES, TiersModel
from kvsm.check.walks.drawn_options import draw_two_tier_options
from kvsm.check.worlds.tier_rank import EMPTY
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.check.worlds.world import Action
from kvsm.properties import Property
from kvsm.tiers import DiskTier, disk_tier

Plant = Callable[[pytest.MonkeyPatch], None]

ROUGH = TwoTierOptions(
    host_slots=2, disk_slots=2, ranks=2, failures=2, losses=1, resets=2, crashes=2, damages=1
)
"""All that may go wrong, with two ranks."""


def explored(scope: WorldScope, **limits: int) -> Verdict:
    found = MODELS["tiers"].explore(scope, ExplorationLimits(**limits))
    assert found.refutation is None, found.refutation
    return found.verdict


def test_nothing_is_broken_in_the_first_states() -> None:
    """The slow tests explore whole scopes, and `kvsm check` a small one of each model."""
    assert explored(SCOPES["small"], max_states=400) is Verdict.UNDETERMINED


@pytest.mark.slow
@pytest.mark.parametrize("scope", of_today(list(SCOPES), 4))
def test_no_order_of_copies_resets_and_crashes_breaks_a_property(scope: str) -> None:
    """Explore every order within the bounds of a scope, and check that the scope reaches its goals."""
    assert explored(SCOPES[scope], jobs=2) is Verdict.PROVED


@pytest.mark.slow
def test_the_names_of_host_slots_decide_nothing() -> None:
    """Without renaming, there are more states and the same verdict."""
    scope = msgspec.structs.replace(SCOPES["pairs"].options, most=1)
    found = [
        explore(TiersModel(WorldScope("pairs", scope), renamed=renamed), jobs=2) for renamed in (True, False)
    ]
    assert [one.verdict for one in found] == [Verdict.PROVED, Verdict.PROVED]
    assert found[0].states < found[1].states


# What is planted.


def the_host_does_not_lose(patch: pytest.MonkeyPatch) -> None:
    plant(patch, DiskTier.lose, "self.host.lose(copy.host)", "pass")


def the_disk_does_not_lose(patch: pytest.MonkeyPatch) -> None:
    plant(patch, DiskTier.lose, "self.disk.lose(copy.disk)", "pass")


def what_is_lost_keeps_its_places(patch: pytest.MonkeyPatch) -> None:
    """A lost copy may still read the slots of a place that another copy gets."""
    plant(patch, DiskTier.lose, "copy._replace(places=())", "copy")


def a_reset_cancels_no_plans(patch: pytest.MonkeyPatch) -> None:
    plant(patch, DiskTier.reset, "for job in planned:", "for job in ():")


def a_bad_store_is_good_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch,
        DiskTier.report,
        "self.disk.report(*report.arguments())",
        "self.disk.report(report.transfer, report.worker, True)",
    )


def a_bad_load_is_good_for_the_host(patch: pytest.MonkeyPatch) -> None:
    plant(patch, DiskTier.report, "report.good or to_disk", "True")


@pytest.mark.parametrize(
    ("bug", "broken", "steps"),
    [
        (the_host_does_not_lose, Property.PROGRESS, 4),
        (the_disk_does_not_lose, Property.CONSERVATION, 4),
        (what_is_lost_keeps_its_places, Property.CONSERVATION, 4),
        (a_reset_cancels_no_plans, Property.CONSERVATION, 8),
        (a_bad_store_is_good_for_the_disk, Property.FAILURE_IS_NOT_SUCCESS, 4),
        (a_bad_load_is_good_for_the_host, Property.FAILURE_IS_NOT_SUCCESS, 8),
        (nothing_is_adopted, Property.CONSERVATION, 5),
        (other_meanings_are_believed, Property.NO_STALE_DATA, 5),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_shortest_way_to_what_is_planted_is_found(
    bug: Plant, broken: Property, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fault is enough."""
    bug(monkeypatch)
    found = MODELS["tiers"].explore(SCOPES["small"], ExplorationLimits())
    assert found.refutation is not None
    assert found.refutation.finding.property is broken, found.refutation.finding
    assert len(found.refutation.path) == steps


@pytest.mark.slow
def test_a_block_that_the_host_has_and_that_gives_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lost store (S13) at rest: equally many slots on both tiers, and three keys that evict each other."""
    bounds = {"host_slots": 2, "disk_slots": 2, "prompts": 4, "failures": 0, "losses": 0}
    sound = {"resets": 0, "crashes": 0, "damages": 0}
    scope = WorldScope("hot", msgspec.structs.replace(SCOPES["small"].options, **bounds, **sound))
    monkeypatch.setattr(disk_tier, "spared", lambda *_: ())
    found = MODELS["tiers"].explore(scope, ExplorationLimits())
    assert found.refutation is not None
    assert found.refutation.finding.property is Property.STORED_ONCE
    assert len(found.refutation.path) == 14
    monkeypatch.undo()
    assert explored(scope, max_states=2500) is Verdict.UNDETERMINED


@pytest.mark.slow
def test_what_has_come_and_is_not_held_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match holds what it counts (S7), as soon as a request has waited for it."""
    what_has_come_is_not_held(monkeypatch)
    found = MODELS["tiers"].explore(SCOPES["waiting"], ExplorationLimits())
    assert found.refutation is not None
    assert found.refutation.finding.property is Property.MATCH_HOLDS


def test_a_refutation_is_told_and_its_events_are_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    the_disk_does_not_lose(monkeypatch)
    model, scope = MODELS["tiers"], SCOPES["small"]
    found = model.explore(scope, ExplorationLimits())
    assert found.refutation is not None
    told = render(model.retell(scope, found.refutation))
    assert told.startswith(
        "tiers: conservation (S1) is broken, in 4 steps\nwithin 1 host slots, 1 disk slots"
    )
    assert "\n  4. lose 0\n" in told
    assert [event.kind for event in model.events(scope, found.refutation)][-1] == "TransferLost"


def test_what_a_reset_has_forgotten_comes_back_if_no_era_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stale data (S14): the failure needs a reset and a crash."""
    a_reset_begins_no_era(monkeypatch)
    found = MODELS["tiers"].explore(SCOPES["restarts"], ExplorationLimits())
    assert found.refutation is not None
    assert found.refutation.finding.property is Property.NO_STALE_DATA


# What the explorer trusts.


def walked(random: Random, actions: int) -> list[Action]:
    """Return the successful actions of a walk through a world with many faults."""
    world, done = TwoTierWorld(ROUGH), list[Action]()
    while len(done) < actions:
        action = random.choice(world.actions())
        if world.do(action):
            done.append(action)
    return done


def made(actions: list[Action]) -> TwoTierWorld:
    world = TwoTierWorld(ROUGH)
    for action in actions:
        world.do(action)
    return world


def test_a_world_that_is_loaded_is_the_world_that_was_saved() -> None:
    """Every action leads to the same state in both worlds, and does not change the saved one."""
    model, random = TiersModel(WorldScope("rough", ROUGH)), Random(1)
    for length in range(0, 60, 6):
        world = made(walked(random, length))
        saved, before = model.save(world), model.fingerprint(world)
        again = model.load(saved)
        assert model.fingerprint(again) == before
        assert model.actions(again) == model.actions(world)
        for action in random.sample(model.actions(world), 3):
            one, other = model.load(saved), model.load(saved)
            assert one.do(action) == other.do(action)
            assert model.fingerprint(one) == model.fingerprint(other)
            assert model.fingerprint(again) == before


def test_states_with_one_fingerprint_have_one_future() -> None:
    """In each sampled pair, both states have the same actions, which lead to the same states."""
    scope = SCOPES["restarts"].options
    random, first, pairs = Random(3), dict[bytes, list[Action]](), 0

    def reached(path: list[Action]) -> TwoTierWorld:
        world = TwoTierWorld(scope)
        for action in path:
            world.do(action)
        return world

    while pairs < 40:
        world, path = TwoTierWorld(scope), list[Action]()
        for _ in range(16):
            known = first.setdefault(world.fingerprint(), path.copy())
            if known != path:
                pairs += 1
                other = reached(known)
                assert other.actions() == world.actions()
                for action in random.sample(world.actions(), min(3, len(world.actions()))):
                    ends = [reached(known), reached(path)]
                    assert ends[0].do(action) == ends[1].do(action)
                    assert ends[0].fingerprint() == ends[1].fingerprint(), (known, path, action)
            action = random.choice(world.actions())
            if world.do(action):
                path.append(action)


def test_states_differ_if_a_lost_copy_may_write_another_slot() -> None:
    world, states = TwoTierWorld(ROUGH), set[bytes]()
    for where in ("host", "disk"):
        for slot in range(2):
            world._late = [(where, [slot])]
            states.add(world.fingerprint())
    assert len(states) == 4


def test_all_that_is_written_is_described() -> None:
    """The last block of a counterexample shows it: each place of each rank, each copy, and what waits."""
    kinds = set[str]()
    for seed in range(6):
        world, random = TwoTierWorld(draw_two_tier_options(Random(seed))), Random(seed)
        for _ in range(60):
            world.do(world.draw(random))
        expected = {"era"} | {f"copy {transfer} of the disk" for transfer in world.tier.copies}
        expected |= {"keys that wait for the disk"} if world.tier._waiting else set()
        for number, rank in enumerate(world.ranks):
            for kind, values in (("device block", rank.device), ("host slot", rank.host)):
                there = (place for place, value in enumerate(values) if value is not None)
                expected |= {f"{kind} {place} of rank {number}" for place in there}
            there = (place for place, slot in enumerate(rank.disk) if slot != EMPTY)
            expected |= {f"disk slot {place} of rank {number}" for place in there}
        described = world.describe()
        assert {name for name in described if not name.startswith(("host: ", "disk: "))} == expected
        assert {name[:6] for name in described if ": " in name} == {"host: ", "disk: "}
        kinds |= {name.split()[0] for name in expected}
    assert kinds == {"era", "copy", "keys", "device", "host", "disk"}
