"""The hand-over world: two real cores keep their promises in it, and each broken promise is detected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from planted_bugs import forget, plant

from examples import examples
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Verdict
from kvsm.check.scopes.models import MODELS
from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.targets import TARGETS
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions, draw_hand_over_options
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.world import Action
from kvsm.core.offloader import transferring
from kvsm.core.scheduler.hits import HitSearch
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import StorePlanned
from kvsm.properties import Property
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import Inbox

Plant = Callable[[pytest.MonkeyPatch], None]


def drawn_world(random: Random) -> HandOverWorld:
    return HandOverWorld(draw_hand_over_options(random))


def walked(seed: int, actions: int) -> tuple[HandOverWorld, list[Action]]:
    """Walk through a hand-over world. Returns the world and its actions."""
    random = Random(seed)
    world, drawn = drawn_world(random), list[Action]()
    while len(drawn) < actions and world.actions():
        drawn.append(world.draw(random))
        assert world.do(drawn[-1]), drawn[-1]
    return world, drawn


def test_two_engines_keep_every_promise() -> None:
    """The decode engine serves right bytes, whenever the prefill engine releases them (S2, S4, S9, S10)."""
    result = walk(drawn_world, seed=1, operations=1_500)
    assert result.failure is None, result.failure


def test_each_import_may_continue_and_each_answer_may_arrive() -> None:
    """Also the first one, and the only one."""
    random, met = Random(1), set[int]()
    for _ in range(6):
        world = drawn_world(random)
        for _ in range(150):
            found = world.actions()
            if not found:
                break
            expected = {(n, rank) for n, one in enumerate(world._imports) for rank in one.waiting}
            assert {(one[1], one[2]) for one in found if one[0] == "copy"} == expected
            waiting = {n for n, one in enumerate(world._answered) if one.readers < world.options.readers}
            assert {one[1] for one in found if one[0] == "arrive"} == waiting
            met.add(len(expected))
            world.do(world.draw(random))
    assert {0, 1} < met


@pytest.mark.slow
def test_two_engines_keep_every_promise_long() -> None:
    result = walk(drawn_world, seed=2, operations=40_000)
    assert result.failure is None, result.failure


def test_a_walk_meets_every_end_of_a_lease_and_imports_that_end_well_and_badly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So no case that the world should try is missed unnoticed."""
    ends, told, original = set(), [], LeaseTable.take_ended

    def take_ended(self: LeaseTable) -> list[tuple[str, LeaseEnd]]:
        ended = original(self)
        ends.update(end for _, end in ended)
        return ended

    monkeypatch.setattr(LeaseTable, "take_ended", take_ended)
    for seed in range(8):
        world, _ = walked(seed, 200)
        imports = {event.seq for event in world.events if isinstance(event, StorePlanned) and event.source}
        told += [
            event.good
            for event in world.events
            if getattr(event, "transfer", 0) in imports and event.kind == "WorkerReported"
        ]
    assert ends == set(LeaseEnd)
    assert min(told.count(True), told.count(False)) > 3


def test_the_same_actions_make_the_same_world() -> None:
    """Determinism (S11), so that a failure can be repeated and reduced."""
    first, actions = walked(5, 150)
    second, _ = walked(5, 150)
    assert msgspec.msgpack.encode(list(first.events)) == msgspec.msgpack.encode(list(second.events))
    assert first.fingerprint() == second.fingerprint()
    assert first.describe() == second.describe()
    kept = [action for place, action in enumerate(actions) if place % 3]
    assert rerun(lambda: drawn_world(Random(5)), kept).finding is None


def test_winding_down_ends_at_rest() -> None:
    """Progress (S9), from wherever a run stops."""
    for seed in range(4):
        world, _ = walked(seed, 60)
        while (action := world.wind_down()) is not None:
            assert world.do(action)
        world.check()
        assert not world.prefill.core.ledger.requests
        assert not world.decode.core.ledger.transfers


def at_rest(seed: int) -> HandOverWorld:
    world, _ = walked(seed, 60)
    while (action := world.wind_down()) is not None:
        world.do(action)
    world.check()
    return world


def pin_for_a_reader_that_came(world: HandOverWorld) -> None:
    one = world._answered[0]
    one.readers, one.sees_readers = 1, True
    world.outgoing._out[one.lease] = object()  # type: ignore[assignment]


def wait_for_nobody(world: HandOverWorld) -> None:
    world.incoming._by_ticket[99] = object()  # type: ignore[assignment]


def leave_a_connection_open(world: HandOverWorld) -> None:
    world.channel.open.append(object())  # type: ignore[arg-type]
    world._next_to_quiet = lambda: None  # type: ignore[method-assign]


def keep_a_request(world: HandOverWorld) -> None:
    world.decode.core.arrive("r")


def lose_an_event(world: HandOverWorld) -> None:
    world.prefill.core.ledger.step += 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_each_engine_is_checked(side: str) -> None:
    """Its ledger, and the bytes of what it serves."""
    world = at_rest(1)
    host = getattr(world, side)
    host.core.ledger.blocks.words[0] ^= 1 << 20
    with pytest.raises(PropertyBroken):
        world.check()
    host.core.ledger.blocks.words[0] ^= 1 << 20
    (slot, *_) = host.core.ledger.index.values()
    host.cells[-1][slot * world.options.blocks_per_chunk] = None
    with pytest.raises(PropertyBroken, match=f"the {side} engine serves key") as caught:
        world.check()
    assert caught.value.property is Property.PUBLISH_AFTER_COMMIT


@pytest.mark.parametrize(
    ("change", "breaks"),
    [
        (pin_for_a_reader_that_came, Property.ONE_RELEASE_PER_HOLD),
        (wait_for_nobody, Property.PROGRESS),
        (leave_a_connection_open, Property.PROGRESS),
        (keep_a_request, Property.PROGRESS),
        (lose_an_event, Property.EVENTS_ARE_STATE),
    ],
)
def test_what_is_left_at_rest_is_seen(change: Callable[[HandOverWorld], None], breaks: Property) -> None:
    world = at_rest(1)
    change(world)
    with pytest.raises(PropertyBroken) as caught:
        world.check()
    assert caught.value.property is breaks


def test_a_rank_ends_its_share_of_a_load_once() -> None:
    """The reduction of a failure leaves out actions, so others may no longer be possible."""
    seen = 0
    for seed in range(12):
        world, _ = walked(seed, 40)
        for side in [int(action[1]) for action in world.actions() if action[0] == "loaded"][:1]:
            load = (world.prefill, world.decode)[side].load
            assert load is not None
            assert not world.do(("loaded", side, 99, 1))
            for worker in list(load.waiting):
                assert world.do(("loaded", side, worker, 1))
                assert not world.do(("loaded", side, worker, 1))
            seen += 1
    assert seen


def test_a_lease_that_ends_now_pins_no_blocks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = next(
        world for seed in range(9) if (world := walked(seed, 80)[0]).leases._leases and world.check() is None
    )
    monkeypatch.setattr(OutgoingHandOvers, "look", lambda _: None)
    world._now = min(lease.until for lease in world.leases._leases.values())
    with pytest.raises(PropertyBroken, match=r"expired 0 s ago, but still pins blocks") as caught:
        world.do(("step",))
    assert caught.value.property is Property.ONE_RELEASE_PER_HOLD


def test_each_hand_over_is_described() -> None:
    described = 0
    for seed in range(6):
        world, _ = walked(seed, 80)
        leases = {f"hand-over {name}" for name in world.leases._leases}
        assert leases == {name for name in world.describe() if name.startswith("hand-over ")}
        described += len(leases)
    assert described > 3


def test_what_cannot_happen_changes_nothing() -> None:
    world = HandOverWorld()
    before = world.fingerprint()
    for action in (("store", 0, 0, 0, 1), ("serve", 0), ("copy", 0, 0, 1), ("compute", 0, 9), ("nonsense",)):
        assert not world.do(action)
    assert world.fingerprint() == before


def test_options_of_a_file_are_checked() -> None:
    """The options of a failure come from a file that may be written by hand."""
    with pytest.raises(ConfigError, match="prompts is 99; it must be from 1 to 16"):
        HandOverWorldOptions(prompts=99)
    for name in ("prefill_slots", "decode_slots", "workers", "blocks_per_chunk", "prompts", "length"):
        assert HandOverWorldOptions(**{name: 16})
        for wrong in (0, 17):
            with pytest.raises(ConfigError, match=f"{name} is {wrong}; "):
                HandOverWorldOptions(**{name: wrong})


# Each promise, broken once.


def believe_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode engine uses its copy although the lease of the source has expired."""
    plant(monkeypatch, IncomingHandOvers._judged, "if not held:", "if False:")


def believe_before_it_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, IncomingHandOvers.keep_back, "if not self._by_transfer:", "if True:")


def confirm_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine answers "held all along" for a lease that it has already dropped."""
    plant(
        monkeypatch,
        LeaseTable.give_back,
        "lease = self._leases.get(name)\n",
        "lease = self._leases.get(name)\n        if lease is None:\n"
        "            return GivenBack(held=True)\n",
    )


def keep_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        OutgoingHandOvers._pin,
        "self._core.pin(out.name, slots, None, 0, 0, 0)",
        "pass",
    )
    plant(monkeypatch, OutgoingHandOvers._hold_or_revoke, "if entry is None or", "if entry is not None and")


def forget_readers_in_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, OutgoingHandOvers.reset)
    forget(monkeypatch, OutgoingHandOvers._hold_or_revoke)


def offer_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt can be claimed before its last stores have ended."""
    plant(
        monkeypatch,
        OutgoingHandOvers._prepare,
        "elif len(here) == len(wanted):",
        "elif True:",
    )


def copy_the_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, IncomingHandOvers._begin, "slots[place] * chunk", "slots[-1 - place] * chunk")


def keep_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        OutgoingHandOvers._release_ended,
        "self._core.finish(out.name, aborted=given_up, hand_over=end.value)",
        "pass",
    )


def decline_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine declines a hand-over without a message."""
    plant(
        monkeypatch,
        IncomingHandOvers._give_up,
        "self._claims.give_back(one.ticket, read=False, had=had)",
        "pass",
    )


def had_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that already has all blocks reports that it gives up the hand-over."""
    plant(monkeypatch, IncomingHandOvers._give_up, "had=had", "had=False")


def count_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import is confirmed when its first rank has copied."""
    plant(
        monkeypatch,
        IncomingHandOvers.keep_back,
        "< self._core.config.workers:",
        "< 1:",
    )


def end_one_lease_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look ends only the first of several expired leases."""
    plant(monkeypatch, LeaseTable.expire, "while self._first_is_overdue():", "if self._first_is_overdue():")


def let_imports_leave_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs leave for the ranks before the log says so."""
    plant(monkeypatch, transferring.submit, "core.flush_log(LogFlush.JOBS_LEAVE)", "pass")


def copy_from_slots_that_no_pool_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine does not check the slot numbers of a prefill engine."""
    plant(monkeypatch, IncomingHandOvers._why_unfit, "if group.slots and not", "if False and not")


def believe_the_shape_of_an_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        IncomingHandOvers._why_unfit,
        "(span.first, span.last - span.first) != (group.first, len(group.slots))",
        "False",
    )


def take_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine accepts the answer to another question."""
    plant(
        monkeypatch,
        Inbox.answer,
        "if isinstance(answer, GivenBack) is not isinstance(asked, GiveBack):",
        "if False:",
    )


def serve_who_does_not_know_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, LeaseTable.claim, "if not compare_digest(lease.prompt, asked.prompt) or", "if")


def let_anybody_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, LeaseTable.decline, "and compare_digest(lease.prompt, asked.prompt)", "")


def pin_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        OutgoingHandOvers._make_room,
        "for other in [one for one in self._out if one != lease]:",
        "return True\n    for other in []:",
    )


def forget_what_others_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that two hand-overs pin counts as free when one of them ends."""
    plant(
        monkeypatch,
        OutgoingHandOvers._unpin,
        "self._held -= self._new_among(out.slots)",
        "self._held -= len(out.slots)",
    )


def hand_over_more_than_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, HitSearch.longest_hit_within, "while end and", "while False and")
    plant(monkeypatch, OutgoingHandOvers._make_room, "return False", "return True")


def miss_the_end_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over that waits for a store is never checked again."""
    plant(monkeypatch, OutgoingHandOvers.look, "self._ended_at != ledger.ended_at", "False")


def wait_for_the_wrong_store(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OutgoingHandOvers._prepare, "ledger.generation[missing]", "max(ledger.transfers)")


@pytest.mark.parametrize(
    ("bug", "properties", "seed"),
    [
        (believe_what_was_given_up, "S2", 17),
        (believe_before_it_is_confirmed, "S2", 17),
        (confirm_what_has_ended, "S2", 16),
        (keep_no_pin, "S2", 26),
        (forget_readers_in_a_reset, "S2 S9", 2),
        (offer_what_is_in_flight, "S2", 2),
        (copy_the_wrong_slots, "S2", 2),
        (keep_a_pin, "S4 S9", 1),
        (decline_in_silence, "S4 S9", 17),
        (had_is_given_up, "S10", 16),
        (count_one_rank, "S2 S9", 1),
        (end_one_lease_at_a_time, "S4", 1),
        (let_imports_leave_unwritten, "S10", 1),
        (pin_without_bound, "S9", 26),
        (forget_what_others_pin, "S9", 31),
        (hand_over_more_than_the_share, "S9", 18),
        (miss_the_end_of_a_store, "S9", 2),
        (wait_for_the_wrong_store, "S9", 13),
    ],
)
def test_a_walk_finds(bug: Plant, properties: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds find each bug early; a bug that needs luck is found within 60,000 operations."""
    bug(monkeypatch)
    failure = walk(drawn_world, seed=seed, operations=60_000).failure
    assert failure is not None
    assert failure.finding.property.id in properties.split(), failure.finding


def among_liars(random: Random) -> HandOverWorld:
    """Return a world in which most answers are lies."""
    return HandOverWorld(msgspec.structs.replace(draw_hand_over_options(random), lies=400))


@pytest.mark.parametrize(
    ("bug", "properties", "seed"),
    [
        (copy_from_slots_that_no_pool_has, "S8", 6),
        (believe_the_shape_of_an_offer, "S8", 9),
        pytest.param(take_any_answer, "S9", 8, marks=pytest.mark.slow),
        (serve_who_does_not_know_the_prompt, "S7", 11),
        (let_anybody_decline, "S7", 7),
    ],
)
def test_a_walk_among_liars_finds(
    bug: Plant, properties: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    failure = walk(among_liars, seed=seed, operations=60_000).failure
    assert failure is not None
    assert failure.finding.property.id in properties.split(), failure.finding


def test_liars_break_no_promise() -> None:
    result = walk(among_liars, seed=1, operations=examples(10_000))
    assert result.failure is None, result.failure


LONG = HandOverWorldOptions(prefill_slots=16, decode_slots=16, blocks_per_chunk=2, length=16, lies=1)
"""So many blocks that events and jobs pack them."""


def lie_at_the_end_of(way: Sequence[Action], number: int) -> HandOverWorld:
    world = HandOverWorld(LONG)
    for action in (*way, ("lie", 0, number)):
        assert world.do(action), action
    return world


CLAIMED = (("compute", 0, 0), ("store", 0, 0, 0, 1), ("offer", 0), ("arrive", 0))
COPIED = (*CLAIMED, ("serve", 0), ("look",), ("copy", 0, 0, 1))


@pytest.mark.parametrize(("way", "count"), [(CLAIMED, 260), (COPIED, 110)])
def test_after_each_lie_of_a_prefill_engine_nothing_is_left_and_nothing_is_believed(
    way: Sequence[Action], count: int
) -> None:
    """Wrong answers to a claim, and to the question whether the blocks were held, of every type and size."""
    for number in range(count):
        world = lie_at_the_end_of(way, number)
        while (action := world.wind_down()) is not None:
            assert world.do(action), (number, action)
        world.check()
        assert not world.decode.core.ledger.transfers
        assert not world.decode.core.ledger.index


def test_the_share_of_hand_overs_is_the_oldest_ones_loss() -> None:
    """The oldest unclaimed hand-over goes first; a claimed one stays."""
    world = HandOverWorld(
        HandOverWorldOptions(
            prefill_slots=4, prompts=4, decode_slots=4, hand_overs=4, readers=1, computes=4, share=0.5
        )
    )
    for prompt in range(3):
        for action in (("compute", 0, prompt), ("store", 0, 0, 0, 1), ("offer", prompt)):
            assert world.do(action)
        if prompt == 0:
            assert world.do(("arrive", 0))
            assert world.do(("serve", 0))
    # The first one is read, so the third takes the place of the second.
    assert list(world.outgoing._out) == ["00000001", "00000003"]
    ends = [getattr(event, "hand_over", "") for event in world.prefill.log]
    assert ends.count(LeaseEnd.CROWDED_OUT.value) == 1
    assert world.do(("compute", 0, 3))
    assert world.do(("store", 0, 0, 0, 1))
    assert world.do(("offer", 3))
    assert list(world.outgoing._out) == ["00000001", "00000004"]


BOTH_HAVE = (
    *(("compute", 0, 0), ("store", 0, 0, 0, 1), ("offer", 0), ("compute", 1, 0), ("store", 1, 0, 0, 1)),
    *(("compute", 0, 1), ("store", 0, 0, 0, 1), ("offer", 1)),
)
"""Two prompts are handed over, and the decode engine has the first of them."""

TWO_OFFERS = (*BOTH_HAVE, ("arrive", 1), ("arrive", 0), ("serve", 0), ("serve", 1), ("look",))
"""Two offers are judged in one step. The import of the first evicts what the second brings."""


def test_an_offer_is_judged_by_what_the_engine_holds_after_the_offers_before_it() -> None:
    """The first import evicts the blocks of the second offer: that offer is given up, not reported as had."""
    options = HandOverWorldOptions(prefill_slots=2, computes=2, decodes=1, hand_overs=2)
    assert rerun(lambda: HandOverWorld(options), TWO_OFFERS).finding is None
    world = HandOverWorld(options)
    for action in TWO_OFFERS:
        assert world.do(action), action
    assert (
        [one.question for one in world.channel.left]
        == [msgspec.structs.replace(one.claim, wanted=False) for one in world.channel.left]
        != []
    )


@pytest.mark.parametrize("says", [True, False])
def test_what_the_decode_engine_says_that_it_had_is_checked(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode engine that claims blocks which it lacks, or gives up blocks that it has, is detected."""
    give_up = IncomingHandOvers._give_up

    def lie(self: IncomingHandOvers, one: Any, *, had: bool = False) -> None:  # noqa: ARG001
        give_up(self, one, had=says)

    monkeypatch.setattr(IncomingHandOvers, "_give_up", lie)
    options = HandOverWorldOptions(prefill_slots=2, decode_slots=1, computes=2, decodes=1, hand_overs=2)
    way = TWO_OFFERS if says else (*BOTH_HAVE, ("arrive", 0), ("serve", 0), ("look",))
    finding = rerun(lambda: HandOverWorld(options), way).finding
    assert finding is not None
    assert finding.property is Property.EVENTS_ARE_STATE
    assert ("has the blocks" if says else "has given up") in str(finding)


# Proved within bounds.


WAY = (
    *(("compute", 0, 0), ("store", 0, 0, 0, 1), ("offer", 0), ("arrive", 0), ("serve", 0), ("look",)),
    *(("wait", 0), ("step",), ("compute", 0, 1), ("copy", 0, 0, 1), ("serve", 0), ("look",)),
)
"""A copy that is too late: the blocks were given up, and others are written there."""


def test_a_copy_that_is_too_late_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest way to wrong bytes, if a decode engine used its copy without a confirmation."""
    assert rerun(HandOverWorld, WAY).finding is None
    believe_what_was_given_up(monkeypatch)
    finding = rerun(HandOverWorld, WAY).finding
    assert finding is not None
    assert finding.property is Property.PUBLISH_AFTER_COMMIT


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["small", "resets", "ranks", "faults"])
def test_no_order_of_claims_copies_and_expiry_shows_wrong_bytes(scope: str) -> None:
    """Every order within the bounds of a scope."""
    model = MODELS["hand-over"]
    result = explore(model.model(model.scopes[scope]))
    assert result.verdict is Verdict.PROVED, result.refutation
    assert result.states >= 590


@pytest.mark.slow
def test_the_exploration_finds_the_shortest_way_to_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that uses blocks after their release is refuted."""
    believe_what_was_given_up(monkeypatch)
    model = MODELS["hand-over"]
    result = explore(model.model(model.scopes["small"]))
    assert result.verdict is Verdict.REFUTED
    assert result.refutation is not None
    assert result.refutation.path == WAY


def test_states_with_one_fingerprint_have_one_future() -> None:
    """In each sampled pair, both states have the same actions, which lead to the same states."""
    model = MODELS["hand-over"].model(HandOverWorldOptions(workers=2, length=2, prefill_slots=2, readers=2))
    random, first_paths, pairs = Random(3), dict[bytes, tuple[Action, ...]](), 0
    for _ in range(60):
        state = next(iter(model.initial()))
        for _ in range(14):
            known = first_paths.setdefault(model.fingerprint(state), state.path)
            if known != state.path and pairs < 40:
                pairs += 1
                actions = model.actions(state)
                assert model.actions(model.load(known)) == actions
                for action in random.sample(actions, min(3, len(actions))):
                    ends = [model.next(model.load(path), action) for path in (known, state.path)]
                    assert None not in ends
                    assert len({model.fingerprint(end) for end in ends}) == 1, (known, state.path, action)
            if not (possible := model.actions(state)):
                break
            state = model.next(state, random.choice(possible))
    assert pairs == 40


def test_it_is_a_target_of_the_walk() -> None:
    assert TARGETS["hand-over"].world is HandOverWorld
