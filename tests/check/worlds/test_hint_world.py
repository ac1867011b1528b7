"""The hint world: sessions get what they are promised, and each broken promise is detected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import msgspec
import pytest
from planted_bugs import evict_what_is_pinned, forget, plant

from kvsm.check.walks.walk import walk
from kvsm.check.worlds.hint_options import HintWorldOptions, draw_hint_options
from kvsm.check.worlds.hint_world import _HINTS, HintWorld
from kvsm.check.worlds.world import Action
from kvsm.core import native
from kvsm.core.scheduler.hits import HitSearch
from kvsm.core.scheduler.session_leases import SessionLeases
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import HintAnswered, HintOutcome, HintReason
from kvsm.properties import Property


def drawn_world(random: Random) -> HintWorld:
    return HintWorld(draw_hint_options(random))


def test_sessions_get_what_they_are_promised() -> None:
    result = walk(drawn_world, seed=1, operations=1_000)
    assert result.failure is None, result.failure


@pytest.mark.slow
def test_sessions_get_what_they_are_promised_long() -> None:
    result = walk(drawn_world, seed=2, operations=40_000)
    assert result.failure is None, result.failure


def test_a_walk_meets_every_outcome_and_reason() -> None:
    """So no case that the world should try is missed unnoticed."""
    outcomes, reasons = set[HintOutcome](), set[HintReason]()
    wanted = (set(HintOutcome), set(HintReason) - {HintReason.TOO_MANY_HOLDS})
    for seed in range(60):
        if (outcomes, reasons) == wanted:
            break
        random = Random(seed)
        world = drawn_world(random)
        for _ in range(100):
            if world._others() or world._left["hints"]:
                world.do(world.draw(random))
        answers = [event for event in world.events if isinstance(event, HintAnswered)]
        outcomes.update(event.outcome for event in answers)
        reasons.update(event.why for event in answers)
    assert (outcomes, reasons) == wanted


def test_equal_worlds_have_equal_fingerprints_and_a_pin_or_a_second_changes_them() -> None:
    one, other = (HintWorld(HintWorldOptions(slots=4, computes=1, hints=1)) for _ in range(2))
    for action in (("compute", 0), ("store", 0, 0, 1), ("hint", 0, 0, 0)):
        assert one.fingerprint() == other.fingerprint()
        assert one.do(action)
        assert one.fingerprint() != other.fingerprint()
        assert other.do(action)
    assert "session s0" in one.describe()
    assert one.do(("wait", 1))
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"length": 65}, {"share": 1.5}, {"policy": "no"}])
def test_options_that_make_no_world_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        HintWorld(HintWorldOptions(**wrong))  # type: ignore[arg-type]


def leased_world() -> HintWorld:
    """A world of two prompts of one block. Both are stored, and session s0 has the first."""
    world = HintWorld(HintWorldOptions(slots=4, computes=2, hints=2, loads=1))
    for action in (
        ("compute", 0),
        ("store", 0, 0, 1),
        ("compute", 1),
        ("store", 0, 0, 1),
        ("hint", 0, 0, 0),
    ):
        assert world.do(action)
    return world


def test_each_hint_and_the_next_expiry_may_happen() -> None:
    actions = leased_world().actions()
    hints = [action[1:] for action in actions if action[0] == "hint"]
    assert hints == [*product(range(2), range(2), range(len(_HINTS)))]
    assert ("wait", 0) in actions


@pytest.mark.parametrize(
    "action", [("hint", 2, 0, 0), ("hint", 0, 2, 0), ("hint", 0, 0, len(_HINTS)), ("loaded", 1, 1)], ids=str
)
def test_an_action_that_names_nothing_does_nothing(action: Action) -> None:
    """The world has two sessions, two prompts, and one rank, which loads."""
    world = leased_world()
    assert world.do(("load", 1))
    before = world.fingerprint()
    assert not world.do(action)
    assert world.fingerprint() == before


def forget_a_promise(world: HintWorld) -> None:
    world.kept.clear()


def end_a_lease_silently(world: HintWorld) -> None:
    world.host.core.finish(world.leases.leases["s0"].name)


def promise_more(world: HintWorld) -> None:
    world.kept["s0"].keys.add(world._keys[1][0])


def count_a_slot_twice(world: HintWorld) -> None:
    world.leases.held += 1


@pytest.mark.parametrize(
    ("change", "property", "says"),
    [
        (forget_a_promise, Property.ONE_RELEASE_PER_HOLD, r"\['s0'\] have leases, and the books say \[\]"),
        (end_a_lease_silently, Property.ONE_RELEASE_PER_HOLD, r"\[\] hold blocks"),
        (promise_more, Property.MATCH_HOLDS, "session s0 holds 1 blocks, and is promised 2 others"),
        (count_a_slot_twice, Property.PROGRESS, "leases hold 1 slots, count 2, and their share is 2"),
    ],
)
def test_leases_that_differ_from_the_books_are_reported(
    change: Callable[[HintWorld], None], property: Property, says: str
) -> None:
    world = leased_world()
    world._check_leases()
    change(world)
    with pytest.raises(PropertyBroken, match=says) as broken:
        world._check_leases()
    assert broken.value.property is property


def resting_world() -> HintWorld:
    world = leased_world()
    assert world.do(("wait", 0))
    world.check()
    return world


def test_at_rest_the_log_must_fold() -> None:
    world = resting_world()
    del world.host.log[-1]
    with pytest.raises(PropertyBroken):
        world.check()


def test_at_rest_each_lease_has_ended_in_the_log() -> None:
    world = resting_world()
    [end] = [event for event in world.host.log if getattr(event, "outcome", None) is HintOutcome.EXPIRED]
    place = world.host.log.index(end)
    world.host.log[place] = msgspec.structs.replace(end, lease="")
    with pytest.raises(PropertyBroken, match="began, and that"):
        world.check()


def test_both_bodies_make_the_same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native body knows nothing of leases: to it they are pins of requests, which it does not evict."""

    def logs() -> list[list[str]]:
        found = []
        for seed in range(12):
            random = Random(seed)
            world = drawn_world(random)
            for _ in range(60):
                if world._others() or world._left["hints"]:
                    world.do(world.draw(random))
            found.append([repr(event) for event in world.events])
        return found

    with_native = logs()
    monkeypatch.setattr(native, "WHY_NOT", "the Python body is tested")
    assert with_native == logs()
    assert sum(map(len, with_native)) > 1_000


Plant = Callable[[pytest.MonkeyPatch], None]


def planted(function: Callable[..., object], old: str, new: str) -> Plant:
    return lambda patch: plant(patch, function, old, new)


BUGS: dict[str, tuple[Plant, set[Property]]] = {
    "a leased block can be evicted": (evict_what_is_pinned, set(Property)),
    "a lease pins nothing": (
        planted(SessionLeases._hold, "self._core.pin(lease.name, here, None, 0, 0, 0)", "pass"),
        {Property.MATCH_HOLDS},
    ),
    "blocks that arrive later are not pinned": (
        planted(SessionLeases.look, "if voided or lease.waits", "if voided"),
        {Property.MATCH_HOLDS, Property.ONE_RELEASE_PER_HOLD, Property.PROGRESS},
    ),
    "a lease outlives its time": (
        planted(SessionLeases.look, "self._ends[0][0] <= now", "self._ends[0][0] < now"),
        {Property.ONE_RELEASE_PER_HOLD},
    ),
    "a lease ends too early": (
        planted(SessionLeases.look, "self._ends[0][0] <= now", "self._ends[0][0] <= now + 5"),
        {Property.ONE_RELEASE_PER_HOLD, Property.MATCH_HOLDS},
    ),
    "no lease is crowded out": (
        forget_room := lambda patch: forget(patch, SessionLeases._make_room),
        set(Property),
    ),
    "the newest lease is crowded out": (
        planted(
            SessionLeases._make_room, "next(iter(self.leases.values()))", "list(self.leases.values())[-1]"
        ),
        {Property.ONE_RELEASE_PER_HOLD, Property.MATCH_HOLDS},
    ),
    "a session gets all of the share": (
        planted(SessionLeases._wanted, "self.most_of_one, limit", "self.most_slots, limit"),
        {Property.MATCH_HOLDS},
    ),
    "the tail is kept instead of nothing": (
        planted(HitSearch.longest_hit_within, "shorter[fitting - 1]", "shorter[fitting - 2]"),
        {Property.MATCH_HOLDS, Property.LEGAL_CALLS},
    ),
    "the share is not given back": (
        planted(SessionLeases._end, "self._count(lease, ())", "pass"),
        {Property.PROGRESS, Property.MATCH_HOLDS, Property.ONE_RELEASE_PER_HOLD},
    ),
    "the pins are not given back": (
        planted(
            SessionLeases._end,
            "self._core.finish(lease.name, aborted=outcome is HintOutcome.REVOKED)",
            "pass",
        ),
        {Property.ONE_RELEASE_PER_HOLD},
    ),
    "the end of a lease is not told": (
        planted(SessionLeases._end, "self._record(lease, outcome)", "pass"),
        {Property.EVENTS_ARE_STATE},
    ),
    "a replaced lease goes on": (
        planted(SessionLeases._lease, "if old is not None:", "if False:"),
        set(Property),
    ),
    "a clipped hint is told as accepted": (
        planted(SessionLeases._lease, "HintOutcome.CLIPPED if wanted.why else", ""),
        {Property.MATCH_HOLDS},
    ),
    "keys that are lost stay in the lease": (
        planted(SessionLeases._hold, "if key in index]", "if key in index or lease.waits]"),
        set(Property),
    ),
    "a lease survives its blocks": (
        planted(SessionLeases._hold, "return bool(slots)", "return True"),
        {Property.ONE_RELEASE_PER_HOLD},
    ),
}


_QUICK_SEEDS = (4, 8, 7, 3)
"""Seeds that find most of the bugs in a few actions."""


@pytest.mark.parametrize("name", BUGS)
def test_a_broken_promise_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_it, properties = BUGS[name]
    plant_it(monkeypatch)
    for seed in (*_QUICK_SEEDS, *range(10, 40)):
        failure = walk(drawn_world, seed=seed, operations=300).failure
        if failure is not None:
            assert failure.finding.property in properties, failure.finding
            return
    pytest.fail(f"forty walks do not see that {name}")
