"""What the host serves of a request: the hit, what is accepted of it, its load, and its content.

Rows 4, 5, 6, 13 and 22 of the scheduler's behaviours; each test is named after its row.
"""

from __future__ import annotations

from sys import maxsize
from typing import Any

import pytest
from core_life import load, store
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import (
    ACTS,
    FULL,
    MAMBA,
    SLIDING,
    WIDE,
    Hand,
    come_to_rest,
    drive,
    finish_one,
    keys_of,
    of_kind,
    stored_keys,
)

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.longest_hit import Prompt
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.check.worlds.small_request import HASH_TOKENS, NULL, SmallRequest
from kvsm.core import native
from kvsm.core.offloader import LookupResult
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LoadEnded, SchedulerConfig, StoreMode
from kvsm.core.scheduler.groups import KeyLayout, group_suffix
from kvsm.core.scheduler.hits import HitSearch
from kvsm.core.scheduler.offer_batch import OfferBatch
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import ConfigError, LimitReached
from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.states.request import RequestState


def hand_with(prompt: range, *groups: KVCacheGroup, **options: Any) -> Hand:
    """A scheduler whose host has a finished request of this prompt, in all groups."""
    hand = Hand(*groups, **options)
    tables, first = [], 0
    for group in groups or (FULL,):
        blocks = len(prompt) // group.block_tokens
        tables.append([*range(first, first + blocks)])
        first += blocks
    hand.store(SmallRequest("stored", prompt), *tables)
    return hand


def match(hand: Hand, request: SmallRequest, local: int = 0) -> int | None:
    return hand.scheduler.get_num_new_matched_tokens(request, local)[0]


def pins(hand: Hand, name: str) -> int:
    entry = hand.core.ledger.requests[name]
    return len(hand.core.ledger.live_pins(entry))


def begin_store(hand: Hand, request: SmallRequest, *tables: list[int]) -> int:
    """A finished request whose store is in flight."""
    hand.admit(request, *tables)
    hand.compute(request)
    hand.scheduler.request_finished(request, tables)
    (job,) = hand.step().stores
    return job.transfer


# Row 4.


@pytest.mark.parametrize("local", [0, 4, 8, 12])
def test_match_is_the_longest_prefix_beyond_what_the_device_has(local: int) -> None:
    hand = hand_with(range(12))
    request = SmallRequest("r", range(20))
    assert hand.scheduler.get_num_new_matched_tokens(request, local) == (12 - local, local < 12)


def test_match_of_what_can_load_nothing_is_recorded_once() -> None:
    """The device has all but the token that is left to compute. Without the event, the log would show fewer
    hits on the device than there were."""
    hand = Hand()
    request = SmallRequest("r", range(9))
    hand.scheduler.add_request(request)
    assert match(hand, request, local=8) == match(hand, request, local=8) == 0
    assert [(one.asked, one.on_device, one.on_host) for one in of_kind(hand, ev.HitMatched)] == [(2, 2, 0)]


def test_match_asks_for_no_part_of_a_chunk_that_the_device_has() -> None:
    """The device has half of the first chunk, and the host has nothing."""
    hand = Hand(core={"blocks_per_chunk": 2})
    assert match(hand, SmallRequest("r", range(9)), local=HASH_TOKENS) == 0


def test_match_ends_at_the_first_hole() -> None:
    """The second block is not on the host; the third is."""
    hand = Hand()
    hand.store(SmallRequest("stored", range(12)), [0, 1, 2])
    hand.core.match("other", keys_of(SmallRequest("same", range(12)))[1:2])
    job = hand.core.prepare_load("other", [9])
    assert job is not None
    hand.core.submit([job.transfer])
    hand.core.report(job.transfer, 0, False)
    assert match(hand, SmallRequest("r", range(12))) == 4


@pytest.mark.parametrize(("tokens", "found"), [(12, 8), (13, 12), (9, 8), (8, 4), (4, 0), (5, 4), (3, 0)])
def test_match_leaves_a_token_to_compute(tokens: int, found: int) -> None:
    """One token left (S18)."""
    assert match(hand_with(range(12)), SmallRequest("r", range(tokens))) == found


def test_match_holds_its_hits_until_they_are_used() -> None:
    """A match holds what it counts (S7), B06: the load finds every block that the match counted."""
    hand = hand_with(range(8), core={"host_blocks": 2})
    request = SmallRequest("r", range(9))
    assert match(hand, request) == 8
    hand.store(SmallRequest("other", range(50, 58)), [10, 11])
    assert hand.core.lookup(keys_of(request)[1]) is LookupResult.HIT
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 8)
    (job,) = hand.step().loads
    assert to_list(job.device_blocks) == [20, 21]


@pytest.mark.parametrize("how", ["nothing accepted", "finished", "preempted"])
def test_match_holds_its_hits_until_they_are_released(how: str) -> None:
    """One release per hold (S4), B31: a hit that the engine does not use is given back."""
    hand = hand_with(range(8), core={"host_blocks": 2})
    request = SmallRequest("r", range(9))
    match(hand, request)
    if how == "nothing accepted":
        hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 0)
    elif how == "finished":
        hand.scheduler.request_finished(request, [])
    else:
        hand.step(preempted={"r"})
    hand.store(SmallRequest("other", range(50, 58)), [10, 11])
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.MISS


def test_match_replaces_the_one_before() -> None:
    """By then the device has one block more."""
    hand = hand_with(range(12))
    request = SmallRequest("r", range(20))
    assert match(hand, request) == 12
    assert pins(hand, "r") == 3
    assert match(hand, request, 4) == 8
    assert pins(hand, "r") == 2
    assert match(hand, request, 12) == 0
    assert pins(hand, "r") == 0


@pytest.mark.parametrize("prompt", [range(20), range(50, 70)])
def test_match_asked_again_with_the_same_answer_is_no_event(prompt: range) -> None:
    """Both for a hit and a miss: an engine asks at every step for a request that is blocked."""
    hand = hand_with(range(12))
    request = SmallRequest("r", prompt)
    found = match(hand, request)
    hand.step()
    before = len(hand.log)
    for _ in range(3):
        assert match(hand, request) == found
        hand.step()
    assert len(hand.log) == before


def test_match_waits_for_the_store_that_it_needs_and_for_no_other() -> None:
    """B08: a block that is being stored is neither a hit nor a miss. The wait names its transfer."""
    hand = Hand()
    needed = begin_store(hand, SmallRequest("a", range(8)), [0, 1])
    other = begin_store(hand, SmallRequest("b", range(50, 58)), [2, 3])
    request = SmallRequest("r", range(9))
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert hand.core.ledger.requests["r"].awaits == needed
    hand.report(other)
    assert match(hand, request) is None
    hand.report(needed)
    assert match(hand, request) == 8


def test_match_is_woken_by_a_failed_store_too() -> None:
    hand = Hand()
    needed = begin_store(hand, SmallRequest("a", range(8)), [0, 1])
    request = SmallRequest("r", range(9))
    assert match(hand, request) is None
    hand.report(needed, good=False)
    assert match(hand, request) == 0


def test_match_waits_for_a_load_of_the_same_key_for_another_request() -> None:
    """No doubled or lost store (S13), B09: when the load has ended, the device has the block."""
    hand = hand_with(range(8))
    first, second = SmallRequest("first", range(9)), SmallRequest("second", range(9))
    hand.admit(first, [20, 21, 22])
    (job,) = hand.step().loads
    assert match(hand, second) is None
    assert hand.core.ledger.requests["second"].awaits == job.transfer
    hand.report(job.transfer)
    assert match(hand, second, 8) == 0


@pytest.mark.parametrize("ticks", [1, 5])
def test_match_waits_so_many_ticks_and_no_longer(ticks: int) -> None:
    """Progress (S9): a wait is bounded, even over several transfers in a row."""
    hand = Hand(core={"defer_ticks": ticks})
    begin_store(hand, SmallRequest("a", range(8)), [0, 1])
    request = SmallRequest("r", range(9))
    for _ in range(ticks):
        assert match(hand, request) is None
        hand.step()
    assert match(hand, request) == 0


def test_match_never_waits_where_the_configuration_says_recompute() -> None:
    """The part that can be read is still a hit."""
    hand = Hand(core={"defer_ticks": 0})
    hand.store(SmallRequest("stored", range(4)), [0])
    begin_store(hand, SmallRequest("a", range(12), skip_reading=True), [0, 1, 2])
    assert match(hand, SmallRequest("r", range(13))) == 4


def test_match_that_waits_loads_nothing_yet() -> None:
    """A match holds what it counts (S7): the engine is told to ask again, at the first question and at the
    next."""
    hand = Hand()
    begin_store(hand, SmallRequest("a", range(12), skip_reading=True), [0, 1, 2])
    request = SmallRequest("r", range(13))
    answers = [hand.scheduler.get_num_new_matched_tokens(request, 0) for _ in range(2)]
    assert answers == [(None, False)] * 2


def test_match_promises_nothing_that_cannot_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match holds what it counts (S7): a block that has as many pins as can be counted is computed."""

    def full(*_: object) -> None:
        raise LimitReached("one pin too many")

    hand = hand_with(range(8))
    monkeypatch.setattr(hand.core, "pin", full)
    assert hand.scheduler.get_num_new_matched_tokens(SmallRequest("r", range(9)), 0) == (0, False)


def test_match_promises_no_load_where_there_are_as_many_transfers_as_may_be() -> None:
    """A match holds what it counts (S7): a load that cannot be planned is not promised. It is, once a
    transfer has ended."""
    hand = hand_with(range(8), core={"max_live_transfers": 1})
    transfer = begin_store(hand, SmallRequest("other", range(50, 58)), [10, 11])
    request = SmallRequest("r", range(9))
    assert match(hand, request) == 0
    assert pins(hand, "r") == 0
    hand.report(transfer)
    assert match(hand, request) == 8


def test_match_needs_nothing_of_what_the_device_has() -> None:
    """The host lacks the first block; the device has it."""
    hand = Hand()
    keys = keys_of(SmallRequest("same", range(12)))
    job = hand.core.prepare_store("other", keys[1:], [1, 2]).job
    assert job is not None
    hand.core.submit([job.transfer])
    hand.core.report(job.transfer, 0, True)
    assert match(hand, SmallRequest("r", range(13))) == 0
    assert match(hand, SmallRequest("s", range(13)), local=4) == 8


@pytest.mark.parametrize("local", [0, 1, 2])
def test_match_of_blocks_of_one_token(local: int) -> None:
    """A block of one token works like any other."""
    config = SchedulerConfig(groups=(KVCacheGroup(1),), hash_tokens=1)
    keys = [b"%d" % number for number in range(3)]
    for held in range(4):
        lookup = HitSearch(config, 1, [keys], local)
        for limit in range(local, 4):
            expected = max(local, min(limit, held)) if held > local else local
            assert lookup.longest_hit(limit, keys[:held].__contains__) == expected


def test_match_gives_its_pins_back_when_nothing_may_be_loaded_any_more() -> None:
    """One release per hold (S4): asked again when the device has more, the match is empty and holds
    nothing."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(9))
    assert match(hand, request) == 8
    assert match(hand, request, local=8) == 0
    assert pins(hand, "r") == 0


def test_match_records_the_first_key_that_was_missing() -> None:
    hand = hand_with(range(8))
    request = SmallRequest("r", range(20))
    match(hand, request)
    (event,) = [event for event in of_kind(hand, ev.HitMatched) if event.request == "r"]
    assert event.missed == keys_of(request)[2]


def test_match_that_ends_at_its_own_limit_records_no_missing_key() -> None:
    """No key is to blame for the end of the hit."""
    hand = hand_with(range(4))
    match(hand, SmallRequest("r", range(20), 1, {"max_load_tokens": 4}))
    (event,) = [event for event in of_kind(hand, ev.HitMatched) if event.request == "r"]
    assert event.missed is None


@given(ACTS, st.sampled_from([0, 1, 4]))
@settings(max_examples=examples(40))
def test_match_waits_within_its_bound_under_any_traffic(acts: list[int], ticks: int) -> None:
    """Progress (S9): a request is deferred for a live transfer alone, and no longer than its bound."""
    engine = SmallEngine(device_blocks=20, prefix_cache=False, core={"defer_ticks": ticks})

    def check(engine: SmallEngine) -> None:
        ledger = engine.core.ledger
        for request in ledger.deferred.values():
            assert request.awaits in ledger.transfers
            assert ledger.tick < request.patience <= ledger.tick + ticks

    drive(engine, acts, check=check)


# Row 5.


@pytest.mark.parametrize("accepted", [0, 4, 8, 12])
def test_partial_acceptance_releases_the_rest(accepted: int) -> None:
    """One release per hold (S4), a match holds what it counts (S7): what is loaded is read; what is not
    accepted is no longer held."""
    hand = hand_with(range(12))
    request = SmallRequest("r", range(20))
    assert match(hand, request) == 12
    hand.scheduler.update_state_after_alloc(request, [[*range(20, 25)]], accepted)
    loaded = [block for job in hand.step().loads for block in to_list(job.device_blocks)]
    assert loaded == [*range(20, 20 + accepted // 4)]
    assert pins(hand, "r") == 0
    others = [hand.core.ledger.index[key] for key in keys_of(request)[accepted // 4 : 3]]
    assert all(slot in hand.core.ledger.policy for slot in others)


def test_partial_acceptance_of_a_hybrid_hit_loads_the_window_before_its_own_end() -> None:
    """Correct bytes (S15): to accept less than was matched takes other blocks of a sliding window."""
    hand = Hand(FULL, SLIDING)
    stored = SmallRequest("stored", range(24))
    hand.admit(stored, [*range(6)], [*range(10, 16)])
    for computed in (12, 24):
        hand.compute(stored, computed)
        hand.end(hand.step(stored))
    request = SmallRequest("r", range(30))
    assert match(hand, request) == 24
    hand.scheduler.update_state_after_alloc(request, [[*range(20, 28)], [NULL, 41, 42, *range(43, 48)]], 12)
    (job,) = hand.step().loads
    index = hand.core.ledger.index
    expected = [index[key] for key in keys_of(request)[:3] + keys_of(request, 1)[1:3]]
    assert to_list(job.device_blocks) == [20, 21, 22, 41, 42]
    assert to_list(job.host_blocks) == expected


@given(ACTS, st.sampled_from([(FULL,), (FULL, SLIDING), (WIDE, SLIDING, FULL)]), st.sampled_from([1, 2]))
@settings(max_examples=examples(60))
def test_partial_acceptance_under_any_traffic(
    acts: list[int], groups: tuple[KVCacheGroup, ...], chunk: int
) -> None:
    """Correct bytes (S15): a request reads what it accepted, and computes the rest."""
    engine = SmallEngine(
        groups, device_blocks=40, host_blocks=12, prefix_cache=False, core={"blocks_per_chunk": chunk}
    )
    drive(engine, acts, without=("reset", "fail"))


def test_partial_acceptance_of_a_hybrid_hit_that_nothing_serves_is_reported_as_failed() -> None:
    """Failure is not success (S6): the window before the shorter end is not on the host, so the engine is
    told that its load failed."""
    hand = hand_with(range(24), FULL, SLIDING)
    request = SmallRequest("r", range(30))
    assert match(hand, request) == 24
    hand.scheduler.update_state_after_alloc(request, [[*range(20, 28)], [NULL, *range(41, 48)]], 12)
    assert not hand.step().loads
    assert hand.scheduler.update_connector_output([]).loads == (LoadEnded("r", False, 0),)
    assert pins(hand, "r") == 0


# Row 6.


def test_load_leases_its_device_blocks_until_every_worker_has_reported() -> None:
    """No reuse in flight (S3), order of copies (S12), B05: this holds whatever happens to the request."""
    hand = hand_with(range(8), core={"workers": 3})
    request = SmallRequest("r", range(9))
    hand.admit(request, [20, 21, 22])
    (job,) = hand.step().loads
    hand.report(job.transfer, 0)
    assert hand.scheduler.request_finished(request, [[20, 21, 22]], aborted=True)[0]
    results = hand.report(job.transfer, 2)
    assert hand.core.leased([20])
    assert not results.loads
    assert not results.finished_sending
    results = hand.report(job.transfer, 1)
    assert not hand.core.leased([20, 21])
    assert results.loads == (LoadEnded("r", True, 8),)
    assert results.finished_sending == ("r",)


def test_load_that_is_refused_leaves_blocks_that_are_waited_for() -> None:
    """No reuse in flight (S3): without references, a store still reads what the request now computes into."""
    hand = hand_with(range(4))
    other, request = SmallRequest("other", range(50, 54), 9), SmallRequest("r", range(5))
    hand.admit(other, [20])
    hand.compute(other)
    (store,) = hand.step(other).stores
    hand.scheduler.request_finished(other, [[20]])
    assert hand.admit(request, [20, 21]) == 4
    assert hand.scheduler.update_connector_output([]).loads == (LoadEnded("r", False, 0),)
    assert store.transfer in hand.step(request).flush


def test_load_that_failed_leaves_nothing_where_layers_look_back_less_far() -> None:
    """Failure is not success (S6): the engine gave blocks for the end of the load alone, and the request
    cannot go on before it."""
    hand = hand_with(range(16), SLIDING)
    request = SmallRequest("r", range(17))
    assert hand.admit(request, [-1, -1, 22, 23, 24], local=8) == 8
    (job,) = hand.step().loads
    assert hand.report(job.transfer, good=False).loads == (LoadEnded("r", False, 0),)


@pytest.mark.parametrize(("groups", "kept"), [((FULL,), 4), ((FULL, SLIDING), 0)])
def test_load_that_failed_tells_the_first_bad_token_once_its_keys_are_gone(
    groups: tuple[KVCacheGroup, ...], kept: int
) -> None:
    """Failure is not success (S6), B27, B28, B33: with several groups the whole load counts as failed."""
    hand = hand_with(range(12), *groups)
    request = SmallRequest("r", range(13))
    tables = [[*range(20 + 10 * index, 24 + 10 * index)] for index in range(len(groups))]
    assert hand.admit(request, *tables, local=4) == 8
    (job,) = hand.step().loads
    results = hand.report(job.transfer, good=False)
    assert results.loads == (LoadEnded("r", False, kept),)
    assert hand.core.lookup(keys_of(request)[1]) is LookupResult.MISS
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT
    assert hand.report(job.transfer, good=False).loads == ()


def test_load_that_failed_is_not_matched_again() -> None:
    """Progress (S9): no livelock of match, fail, match."""
    engine = SmallEngine(prefix_cache=False)
    finish_one(engine, "first", [*range(12)])
    request = engine.arrive(SmallRequest("second", range(12), 3))
    loads = 0
    for _ in range(20):
        for transfer, copy in list(engine.copies.items()):
            loads += copy.job.direction is Direction.LOAD
            engine.carry_out(transfer, good=copy.job.direction is Direction.STORE)
        engine.step()
    assert loads == 1
    assert request.finished


def test_load_of_a_preempted_request_is_not_begun_twice() -> None:
    """B18, every call is legal (S8): re-admitted while its load runs, it waits for it."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(9))
    hand.admit(request, [20, 21, 22])
    (job,) = hand.step().loads
    hand.step(preempted={"r"})
    assert match(hand, request) is None
    assert hand.core.ledger.requests["r"].awaits == job.transfer
    assert hand.report(job.transfer).loads == (LoadEnded("r", True, 8),)
    assert hand.admit(request, [30, 31, 32]) == 8
    assert len(hand.step().loads) == 1


def test_request_that_is_preempted_again_waits_again_for_its_load() -> None:
    """It stopped waiting, computed, and was preempted: it may wait for what is in flight as at first."""
    hand = hand_with(range(8), core={"defer_ticks": 1})
    request = SmallRequest("r", range(9))
    hand.admit(request, [20, 21, 22])
    (job,) = hand.step().loads
    hand.step(preempted={"r"})
    assert match(hand, request) is None
    hand.step()
    assert hand.admit(request, [30, 31, 32]) == 0
    hand.step(preempted={"r"})
    assert match(hand, request) is None
    hand.report(job.transfer)
    assert match(hand, request) == 8


def test_load_of_a_promise_that_was_voided_is_reported_as_failed() -> None:
    """Failure is not success (S6), a match holds what it counts (S7): the cache was reset between the match
    and the allocation."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(9))
    assert match(hand, request) == 8
    hand.scheduler.reset_cache()
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 8)
    assert not hand.step().loads
    results = hand.scheduler.update_connector_output([])
    assert results.loads == (LoadEnded("r", False, 0),)
    assert hand.scheduler.update_connector_output([]).loads == ()


def test_load_of_a_pin_that_another_failed_load_voided_is_reported_as_failed() -> None:
    """Failure is not success (S6): two requests matched before either of them was loaded."""
    hand = hand_with(range(8))
    first, second = SmallRequest("first", range(9)), SmallRequest("second", range(9))
    assert match(hand, first) == match(hand, second) == 8
    hand.scheduler.update_state_after_alloc(first, [[20, 21, 22]], 8)
    (job,) = hand.step().loads
    hand.report(job.transfer, good=False)
    hand.scheduler.update_state_after_alloc(second, [[30, 31, 32]], 8)
    assert hand.scheduler.update_connector_output([]).loads == (LoadEnded("second", False, 0),)


def test_load_of_a_promise_that_was_voided_fails_though_the_key_is_back() -> None:
    """Failure is not success (S6): what is in the new slot was not matched, and is not pinned."""
    hand = hand_with(range(12))
    request = SmallRequest("r", range(13))
    assert match(hand, request) == 12
    load(hand.core, "other", [keys_of(request)[2]], 20)
    (transfer,) = hand.core.ledger.transfers
    hand.core.fail_load(transfer)
    store(hand.core, "again", [keys_of(request)[2]], 21)
    hand.scheduler.update_state_after_alloc(request, [[30, 31, 32, 33]], 12)
    assert hand.step().loads == ()
    (ended,) = hand.scheduler.update_connector_output([]).loads
    assert not ended.good


def test_load_into_block_tables_of_other_groups_is_refused() -> None:
    """An engine that forgets a group would read what was never loaded."""
    hand, request = Hand(FULL, SLIDING), SmallRequest("r", range(9))
    assert match(hand, request) == 0
    with pytest.raises(ValueError, match="there are 2 KV cache groups"):
        hand.scheduler.update_state_after_alloc(request, [[0, 1, 2]], 0)


def test_load_may_not_be_read_or_stored_before_it_has_landed() -> None:
    """Order of copies (S12): tokens of a load under way are not confirmed, whatever the engine counts."""
    hand = Hand(KVCacheGroup(HASH_TOKENS), core={"store_threshold": 1})
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21, 22, 23])
    hand.compute(request)
    plan = hand.step(request)
    assert not plan.stores
    hand.end(plan, good=False)
    request.num_computed_tokens = 0
    assert not hand.step(request).stores
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [20, 21, 22, 23]


def test_load_that_failed_brought_nothing_that_is_stored_before_the_engine_has_fallen_back() -> None:
    """Order of copies (S12): the engine was told after it had decided its next step."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21, 22, 23])
    hand.compute(request)
    hand.end(hand.step(request), good=False)
    assert not hand.step(request).stores
    hand.scheduler.request_finished(request, [[20, 21, 22, 23]])
    assert not hand.step().stores


def test_load_that_failed_is_stored_from_the_step_on_in_which_the_engine_falls_back() -> None:
    """Full offload (S16): even if the request had something to offer in an earlier step."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21, 22, 23])
    hand.compute(request)
    hand.end(hand.step(request), good=False)
    assert not hand.step(request).stores
    request.num_computed_tokens = 0
    assert not hand.step(request).stores
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [20, 21, 22, 23]


def test_load_that_failed_while_a_reset_drains_is_computed_and_stored_after_it() -> None:
    """Full offload (S16): a step that stores nothing still sees that the engine's count fell back."""
    hand = hand_with(range(8))
    store = begin_store(hand, SmallRequest("other", range(50, 54)), [10])
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21, 22, 23])
    (load,) = hand.step(request).loads
    assert not hand.scheduler.reset_cache()
    hand.report(load.transfer, good=False)
    request.num_computed_tokens = 0
    assert not hand.step(request).stores
    hand.compute(request)
    hand.report(store)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [20, 21, 22, 23]


def test_request_that_loaded_all_it_has_is_asked_when_another_chunk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step after many loads costs no more than another one. The engine gives the request more blocks then,
    for the tokens that it computes: that changes nothing."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(15))
    assert hand.admit(request, [20, 21, 22, 23]) == 8
    hand.end(hand.step())
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22, 23]], 0)
    asked, collect = list[int](), OfferBatch.collect

    def counted(batch: OfferBatch, tracked: TrackedRequest, **how: Any) -> None:
        asked.append(tracked.request.num_computed_tokens)
        collect(batch, tracked, **how)

    monkeypatch.setattr(OfferBatch, "collect", counted)
    stores = []
    for computed in range(8, 15):
        request.num_computed_tokens = computed
        stores += [to_list(job.device_blocks) for job in hand.step(request).stores]
    assert (asked, stores) == ([12], [[22]])


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("kept", range(13))
def test_keys_are_those_of_the_hashes_that_the_engine_has_now(kept: int, chunk: int) -> None:
    """Correct bytes (S15): a resumed request replaces its last hashes with hashes of the new tokens. Keys of
    hashes that stay are not made again: a request that waits asks in each step."""
    config = SchedulerConfig(groups=(FULL, WIDE), hash_tokens=HASH_TOKENS)
    request = SmallRequest("r", range(HASH_TOKENS))
    for size in range(13):
        tracked = TrackedRequest(request, config, KeyLayout.of(config, chunk))
        request.block_hashes = [b"old%d" % number for number in range(12)]
        before = [view[:] for view in tracked.chunk_keys()]
        request.block_hashes = request.block_hashes[:kept] + [b"new%d" % n for n in range(kept, size)]
        for group, view in enumerate(tracked.chunk_keys()):
            old, new, stride = before[group], view[:], (chunk, 2 * chunk)[group]
            ends = request.block_hashes[stride - 1 :: stride]
            assert new == tracked.all_keys()[group] == [end + group.to_bytes(4, "big") for end in ends]
            staying = kept // stride
            assert [id(key) for key in new[:staying]] == [id(key) for key in old[:staying]]


@given(
    asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    sizes=st.lists(st.integers(0, 9), min_size=1),
    chunk=st.sampled_from([1, 2, 3]),
)
def test_keys_are_the_same_in_whatever_pieces_they_are_asked_for(
    asked: list[tuple[int, int]], sizes: list[int], chunk: int
) -> None:
    """Correct bytes (S15): keys are made when they are asked for, and the engine may replace its last hashes
    between two questions. No key of a replaced hash may be left before keys of new ones."""
    config = SchedulerConfig(groups=(FULL,), hash_tokens=HASH_TOKENS)
    request = SmallRequest("r", range(HASH_TOKENS))
    tracked = TrackedRequest(request, config, KeyLayout.of(config, chunk))
    for turn, size in enumerate(sizes):
        # From here on the hashes are others: a hash covers all tokens before its end.
        request.block_hashes = [*request.block_hashes[:size], *(b"%d-%d" % (turn, n) for n in range(size, 9))]
        keys = [one + bytes(4) for one in request.block_hashes[chunk - 1 :: chunk]]
        for first, last in asked[turn :: len(sizes)]:
            assert tracked.make_keys(0, first, last) == keys[first:last]
            (view,) = tracked.chunk_keys()
            assert (len(view), view[first:last]) == (len(keys), keys[first:last])


@pytest.mark.usefixtures("_python_folds")
def test_match_makes_no_more_keys_than_it_looks_at() -> None:
    """A long prompt that misses costs no more than a short one."""
    hand = Hand()
    request = SmallRequest("r", range(4000))
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert len(hand.scheduler.state.tracked["r"].asked_keys[0]) == 1


@pytest.mark.skipif(bool(native.WHY_NOT), reason="the native body looks for keys that Python does not make")
def test_match_makes_one_key_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys before it are the index's own; the one that lacks is told to the log."""
    made: list[bytes] = []
    make_keys = TrackedRequest.make_keys

    def noted(tracked: TrackedRequest, group: int, first: int, last: int) -> list[bytes]:
        made.extend(keys := make_keys(tracked, group, first, last))
        return keys

    hand = hand_with(range(48))
    monkeypatch.setattr(TrackedRequest, "make_keys", noted)
    asking = SmallRequest("asking", [*range(40), *range(20)])
    assert match(hand, asking) == 40
    assert made == [keys_of(asking)[40 // HASH_TOKENS]]


@pytest.mark.skipif(bool(native.WHY_NOT), reason="the native body looks for keys that Python does not make")
def test_miss_at_the_first_key_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most misses are such, and the engine makes many of them."""
    hand = hand_with(range(48))
    monkeypatch.setattr(HitSearch, "longest_hit", None)
    asking = SmallRequest("asking", range(100, 140))
    assert match(hand, asking) == 0
    (matched,) = [event for event in of_kind(hand, ev.HitMatched) if event.request == "asking"]
    assert matched.missed == keys_of(asking)[0]


@given(
    st.lists(st.integers(0, 1), max_size=6),
    st.integers(0, 24),
    st.sampled_from([1, 2]),
    st.integers(0, 24),
)
@settings(max_examples=examples(100))
def test_short_way_to_a_miss_answers_as_the_search_does(
    there: list[int], local: int, chunk: int, most: int
) -> None:
    """Stored, so served (S15): whatever the host has, the device has, and the request may load."""
    answers = []
    for is_short in (True, False):
        hand = Hand(core={"blocks_per_chunk": chunk})
        hand.scheduler._needs_first_key = is_short
        request = SmallRequest("asking", range(24), parameters={"max_load_tokens": most})
        keys = [one + bytes(4) for one in request.block_hashes[chunk - 1 :: chunk]]
        stored = [key for key, is_there in zip(keys, there) if is_there]
        if stored:
            store(hand.core, "stored", stored)
        answers.append((match(hand, request, local), list(hand.log)[-1]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("lost", range(6))
@pytest.mark.parametrize("finds_prefix", [True, False])
def test_chunk_that_the_host_has_lost_is_found(
    lost: int, finds_prefix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored once (S13): a request at its end offers again what the host has lost, wherever that is."""
    index = hand_with(range(24)).core.ledger.index
    config = SchedulerConfig(groups=(FULL,), hash_tokens=HASH_TOKENS)
    request = SmallRequest("r", range(24))
    tracked = TrackedRequest(request, config, KeyLayout.of(config, 1))
    if not finds_prefix:
        monkeypatch.setattr(TrackedRequest, "find_prefix", lambda *_: None)
    elif not native.WHY_NOT:
        monkeypatch.setattr(TrackedRequest, "make_keys", None)  # The native body makes none in Python.
    assert not tracked.lacks_a_key(index, (6,), config)
    del index[keys_of(request)[lost]]
    assert tracked.lacks_a_key(index, (6,), config)
    assert not tracked.lacks_a_key(index, (lost,), config)


def test_request_that_has_its_blocks_keeps_no_keys() -> None:
    """They would be of no use: what it stores is made of the hashes that the engine has then."""
    hand = Hand()
    for name, hit in (("miss", 0), ("hit", 12)):
        request = SmallRequest(name, range(16))
        assert hand.admit(request, [20, 21, 22, 23]) == hit
        assert hand.scheduler.state.tracked[name].asked_keys == [[]]
        hand.compute(request)
        hand.end(hand.step(request))


@given(ACTS, st.booleans(), st.sampled_from([1, 2]), st.sampled_from([(FULL,), (FULL, SLIDING)]))
@settings(max_examples=examples(60))
def test_load_is_reported_once_whatever_happens(
    acts: list[int], references: bool, workers: int, groups: tuple[KVCacheGroup, ...]
) -> None:
    """Failure is not success (S6), order of copies (S12), correct bytes (S15): the engine hears once of every
    load, planned or voided; requests read the right bytes."""
    engine = SmallEngine(
        groups, device_blocks=32, host_blocks=12, workers=workers, references=references, prefix_cache=False
    )
    drive(engine, acts)
    told = [load.request for results in engine.results for load in results.loads]
    planned = [event.request for event in of_kind(engine, ev.LoadPlanned)]
    assert {name: told.count(name) for name in planned} == {name: planned.count(name) for name in planned}


# Row 13.


GROUPS = st.lists(
    st.sampled_from(
        [
            FULL,
            WIDE,
            SLIDING,
            MAMBA,
            KVCacheGroup(2 * HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=1),
            KVCacheGroup(2 * HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=11),
        ]
    ),
    min_size=1,
    max_size=4,
)


def test_no_key_is_told_as_missed_if_a_group_has_no_hash_behind_it() -> None:
    """With it the hit would be no longer: the second group has hashes of 32 tokens."""
    groups = KVCacheGroup(4), KVCacheGroup(8)
    keys = [[b"a%d" % place for place in range(5)], [b"b0", b"b1"]]
    held = {key for table in keys for key in table} - {b"a4"}
    lookup = HitSearch(SchedulerConfig(groups=groups, hash_tokens=HASH_TOKENS), 2, keys, 0)
    assert lookup.longest_hit(40, held.__contains__) == 32
    assert lookup.lacking is None


@given(
    GROUPS, st.integers(0, 40), st.integers(0, 3), st.sampled_from([1, 2]), st.randoms(use_true_random=False)
)
@settings(max_examples=examples(300))
def test_hybrid_groups_hit_is_the_longest_that_all_serve(
    groups: list[KVCacheGroup], limit: int, local: int, chunk: int, random: Any
) -> None:
    """The search gives what trying every end gives, from the longest on."""
    if any(group.kind is GroupKind.MAMBA for group in groups):
        chunk = 1
    config = SchedulerConfig(groups=tuple(groups), hash_tokens=HASH_TOKENS)
    start = local * config.alignment
    prompt = Prompt(config.groups, [b"%d" % token for token in range(limit + 1)], chunk)
    keys = [
        [key for token in range(0, limit, group.block_tokens * chunk) if (key := prompt.key(index, token))]
        for index, group in enumerate(groups)
    ]
    rate = random.random()
    held = {key for table in keys for key in table if random.random() < rate**0.3}
    lookup = HitSearch(config, chunk, keys, start)
    every = range(limit - limit % config.alignment, start, -config.alignment)
    longest = lookup.longest_hit(limit, held.__contains__)
    assert longest == prompt.longest_hit(start, maxsize, held.__contains__)
    # The keys of a group continue the one before them if the group cannot be used without it.
    place = 0
    for group, table, (first, last) in zip(groups, keys, lookup.needed(longest) if longest > start else ()):
        assert lookup.needed_keys(longest)[place : place + last - first] == table[first:last]
        if first < last:
            before = table[first - 1] if first and group.kind is GroupKind.FULL else b""
            assert lookup.parents(longest)[place] == before
        place += last - first
    # The key that is told as missed stands in the way of a longer hit. None is told if none could be longer.
    longer = [lookup.needed(end) for end in every if end > longest]
    needed = {
        key
        for spans in longer
        if all(first == last or last <= len(table) for table, (first, last) in zip(keys, spans))
        for table, (first, last) in zip(keys, spans)
        for key in table[first:last]
    }
    assert lookup.lacking in needed - held if needed else lookup.lacking is None


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("others", [(), (FULL,)])
def test_hybrid_groups_read_no_chunk_that_is_not_full(others: tuple[KVCacheGroup, ...], chunk: int) -> None:
    """Chunks of local attention that are no multiple of a block: where an end is rounded down to a block, the
    layers read tokens that the larger end did not need."""
    local = KVCacheGroup(2 * HASH_TOKENS, GroupKind.CHUNKED_LOCAL, window=15)
    config = SchedulerConfig(groups=(*others, local), hash_tokens=HASH_TOKENS)
    for limit in range(48):
        prompt = Prompt(config.groups, [b"%d" % token for token in range(limit + 1)], chunk)
        keys = [
            [
                key
                for token in range(0, limit, group.block_tokens * chunk)
                if (key := prompt.key(index, token))
            ]
            for index, group in enumerate(config.groups)
        ]
        held = {key for table in keys for key in table}
        longest = HitSearch(config, chunk, keys, 0).longest_hit(limit, held.__contains__)
        assert longest == prompt.longest_hit(0, maxsize, held.__contains__)


def test_missed_key_may_be_one_whose_store_is_in_flight() -> None:
    """A request that waited long enough goes on without it. The log must not blame the key behind it."""
    hand = Hand(FULL, core={"defer_ticks": 1})
    stored = SmallRequest("stored", range(12))
    hand.admit(stored, [0, 1])
    hand.compute(stored, 8)
    hand.step(stored)
    asking = SmallRequest("asking", range(16))
    assert hand.scheduler.get_num_new_matched_tokens(asking, 0) == (None, False)
    hand.step()
    assert hand.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)
    *_, answer = of_kind(hand, ev.HitMatched)
    assert answer.missed == asking.block_hashes[0] + group_suffix(0)


def test_no_key_is_missed_if_only_the_last_token_is_left_to_compute() -> None:
    """One token left (S18): the last block of a prompt is never asked for, so nothing of it is missing."""
    hand = Hand(FULL)
    stored = SmallRequest("stored", range(8))
    hand.admit(stored, [0, 1])
    hand.compute(stored, 4)
    hand.end(hand.step(stored))
    assert hand.scheduler.get_num_new_matched_tokens(SmallRequest("asking", range(8)), 0) == (4, True)
    *_, answer = of_kind(hand, ev.HitMatched)
    assert answer.missed is None


def test_hybrid_groups_are_asked_until_all_serve_the_same_end() -> None:
    """A match holds what it counts (S7): the second group's answer may be one that the first cannot serve."""
    config = SchedulerConfig(groups=(MAMBA, MAMBA), hash_tokens=HASH_TOKENS)
    keys = [[b"%d-%d" % (group, place) for place in range(4)] for group in range(2)]
    held = {keys[0][0], keys[0][2], keys[1][0], keys[1][1]}
    assert HitSearch(config, 1, keys, 0).longest_hit(4 * HASH_TOKENS, held.__contains__) == HASH_TOKENS


@pytest.mark.parametrize(
    ("held", "end"), [({2, 3}, 4), ({1, 3}, 0), ({0, 1, 3}, 2), ({0, 2, 3}, 4), ({3}, 0)]
)
def test_hybrid_groups_need_every_block_of_a_window(held: set[int], end: int) -> None:
    """Correct bytes (S15): the last 5 tokens before the end lie in two blocks of four tokens."""
    config = SchedulerConfig(groups=(SLIDING,), hash_tokens=HASH_TOKENS)
    keys = [b"%d" % place for place in range(4)]
    search = HitSearch(config, 1, [keys], 0)
    assert (
        search.longest_hit(4 * HASH_TOKENS, {keys[place] for place in held}.__contains__) == end * HASH_TOKENS
    )


def test_hybrid_groups_need_nothing_for_a_window_of_one_token() -> None:
    """Not even the chunk in which the hit ends."""
    one_token = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=1)
    config = SchedulerConfig(groups=(FULL, one_token), hash_tokens=HASH_TOKENS)
    keys = [[b"%d-%d" % (group, place) for place in range(2)] for group in range(2)]
    search = HitSearch(config, 2, keys, 0)
    assert search.longest_hit(3 * HASH_TOKENS, set(keys[0]).__contains__) == 3 * HASH_TOKENS
    assert search.needed_keys(3 * HASH_TOKENS) == keys[0]


def test_hybrid_groups_load_what_each_looks_back_at() -> None:
    """Full attention needs all blocks, a sliding window those of its last 5 tokens, mamba the last state."""
    hand = Hand(FULL, SLIDING, MAMBA)
    stored = SmallRequest("stored", range(24))
    tables = [[*range(6)], [*range(10, 16)], [*range(20, 26)]]
    hand.admit(stored, *tables)
    hand.compute(stored)
    states = [(2, block, 4 * place + 4) for place, block in enumerate(tables[2])]
    hand.end(hand.step(stored, boundary_states={"stored": states}))
    hand.scheduler.request_finished(stored, tables)
    request = SmallRequest("r", range(30))
    assert match(hand, request) == 24
    given = [[*range(30, 38)], [NULL] * 4 + [44, 45, 46, 47], [NULL] * 5 + [55, 56, 57]]
    hand.scheduler.update_state_after_alloc(request, given, 24)
    (job,) = hand.step().loads
    index = hand.core.ledger.index
    expected = keys_of(request)[:6] + keys_of(request, 1)[4:6] + keys_of(request, 2)[5:6]
    assert to_list(job.device_blocks) == [30, 31, 32, 33, 34, 35, 44, 45, 55]
    assert to_list(job.host_blocks) == [index[key] for key in expected]


def test_hybrid_groups_skip_freed_and_null_blocks() -> None:
    """Blocks that left a sliding window no longer hold content of this request."""
    pool = SmallPool(64)
    hand = Hand(FULL, SLIDING, pool=pool)
    request = SmallRequest("r", range(16), 5)
    hand.admit(request, [0, 1, 2, 3], [NULL, 11, 12, 13])
    keys = keys_of(request, 1)
    for block, key in [(11, b"another's"), (12, keys[2]), (13, keys[3])]:
        pool.cache(block, key)
    hand.compute(request)
    hand.step(request)
    assert [key for key in stored_keys(hand) if key[-1] == 1] == keys[2:]


@pytest.mark.parametrize("finished", [False, True])
def test_hybrid_groups_store_what_has_left_the_window_from_where_the_pool_has_it(finished: bool) -> None:
    """The request's own block comes first; for a block that it gave up, one of the same content is looked
    up."""
    pool = SmallPool(64)
    hand = Hand(SLIDING, pool=pool)
    request = SmallRequest("r", range(12), 5)
    hand.admit(request, [NULL, 11, 12])
    for block, key in zip((30, 31, 32), keys_of(request), strict=True):
        pool.cache(block, key)
    pool.caches.update(zip((11, 12), keys_of(request)[1:], strict=True))
    hand.compute(request)
    if finished:
        hand.scheduler.request_finished(request, [[NULL, 11, 12]])
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [30, 11, 12]
    assert stored_keys(hand) == keys_of(request)


def test_hybrid_groups_skip_what_has_left_the_window_where_no_pool_tells() -> None:
    hand = Hand(FULL, SLIDING)
    request = SmallRequest("r", range(17), 5)
    hand.admit(request, [0, 1, 2, 3, 4], [10, 11, 12, 13, 14])
    hand.compute(request)
    hand.step(request)
    assert [key for key in stored_keys(hand) if key[-1] == 1] == keys_of(request, 1)[3:]


def test_hybrid_groups_count_a_shared_device_block_once() -> None:
    """One release per hold (S4), B10: the block stands at two positions. It is held once, stored under its
    other key when that copy has ended, and released as often as it was held."""
    pool = SmallPool(16)
    hand = Hand(FULL, FULL, pool=pool)
    request = SmallRequest("r", range(8), 5)
    pool.touch([1, 2, 3])
    hand.admit(request, [1, 2, 3], [1, 2, 3])
    hand.compute(request)
    plan = hand.step(request)
    (job,) = plan.stores
    assert to_list(job.device_blocks) == [1, 2]
    assert pool.references[1] == 2
    hand.end(plan)
    second = hand.step(request)
    assert [to_list(job.device_blocks) for job in second.stores] == [[1, 2]]
    hand.end(second)
    assert pool.references[1] == 1
    assert sorted(stored_keys(hand)) == sorted(keys_of(request) + keys_of(request, 1))


def test_hybrid_groups_take_mamba_states_only_where_they_are_handed_over() -> None:
    """A state whose prefix has no hash is not stored; nor is a null block."""
    hand = Hand(MAMBA)
    request = SmallRequest("r", range(16), 5)
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    assert not hand.step(request).stores
    states = [(0, 1, 8), (0, 2, 10), (0, NULL, 12), (0, 3, 99)]
    (job,) = hand.step(request, boundary_states={"r": states}).stores
    assert to_list(job.device_blocks) == [1]
    assert stored_keys(hand) == keys_of(request)[1:2]


def test_hybrid_groups_name_a_state_by_a_prefix_that_has_a_hash() -> None:
    """No key: an empty prefix, one that ends within a hash's tokens, and one that ends behind the last
    hash."""
    config = SchedulerConfig(groups=(FULL, MAMBA), hash_tokens=4)
    tracked = TrackedRequest(SmallRequest("r", range(14)), config, KeyLayout.of(config, 1))
    keys = keys_of(SmallRequest("same", range(14)), 1)
    named = {tokens: key for tokens in range(20) if (key := tracked.key_at(1, tokens, 4)) is not None}
    assert named == {4: keys[0], 8: keys[1], 12: keys[2]}


def test_hybrid_groups_store_what_stands_behind_a_mamba_group() -> None:
    """No chunk of one request is offered, and every chunk of the other."""
    hand = Hand(MAMBA, FULL)
    request = SmallRequest("r", range(8), 5)
    hand.admit(request, [0, 1], [2, 3])
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [2, 3]


def test_hybrid_groups_pass_over_a_state_whose_request_is_over() -> None:
    """The step's output may name a request that has finished by then."""
    hand = Hand(MAMBA)
    assert not hand.step(boundary_states={"gone": [(0, 1, 8)]})


@pytest.mark.parametrize("remote", [False, True])
def test_hybrid_groups_store_a_state_at_its_boundary_only_if_they_store_eagerly(remote: bool) -> None:
    """Full offload (S16): a lazy store waits for a block to near eviction, unless a decoder elsewhere waits
    for it."""
    pool = SmallPool(16)
    pool.touch(range(4))
    hand = Hand(MAMBA, pool=pool, store=StoreMode.LAZY, lazy_target_blocks=1)
    request = SmallRequest("r", range(16), 5, {"do_remote_decode": remote})
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    plan = hand.step(request, boundary_states={"r": [(0, 1, 8)]})
    assert [to_list(job.device_blocks) for job in plan.stores] == [[1]] * remote


@pytest.mark.parametrize(
    ("group", "first"),
    [
        (KVCacheGroup(4), [0, 0, 0]),
        (KVCacheGroup(4, GroupKind.SLIDING_WINDOW, window=3), [0, 0, 5]),
        (KVCacheGroup(4, GroupKind.CHUNKED_LOCAL, window=7), [0, 0, 7]),
        (KVCacheGroup(4, GroupKind.MAMBA), [0, 1, 6]),
    ],
    ids=lambda value: value.kind.value if isinstance(value, KVCacheGroup) else "",
)
def test_hybrid_groups_look_back_so_far(group: KVCacheGroup, first: list[int]) -> None:
    """The token at `end` needs window - 1 tokens before it in a sliding window, those of its chunk in chunked
    local attention, one state in mamba."""
    assert [group.first_needed_token(end) for end in (0, 2, 7)] == first


def test_hybrid_groups_end_a_hit_where_a_mamba_state_is() -> None:
    hand = Hand(MAMBA)
    request = SmallRequest("stored", range(16), 5)
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    hand.end(hand.step(request, boundary_states={"stored": [(0, 1, 8)]}))
    assert match(hand, SmallRequest("r", range(16))) == 8


def test_hybrid_groups_carry_their_index_in_the_key_and_share_events() -> None:
    """One event holds blocks of several sizes; no two groups share a key."""
    hand = hand_with(range(16), FULL, WIDE)
    (event,) = of_kind(hand, ev.StorePlanned)
    request = SmallRequest("r", range(16))
    assert list(event.keys) == keys_of(request) + keys_of(request, 1, 8)
    assert set(keys_of(request)).isdisjoint(keys_of(request, 1))


@given(
    ACTS,
    st.sampled_from([(FULL, SLIDING), (WIDE, SLIDING, FULL), (SLIDING,), (FULL, WIDE)]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=examples(80))
def test_hybrid_groups_under_any_traffic(
    acts: list[int], groups: tuple[KVCacheGroup, ...], references: bool, prefix_cache: bool
) -> None:
    """Order of copies (S12), correct bytes (S15): every layer reads the right bytes."""
    engine = SmallEngine(
        groups, device_blocks=44, host_blocks=16, references=references, prefix_cache=prefix_cache
    )
    drive(engine, acts)


# Row 22.


@pytest.mark.parametrize("extras", [b"adapter", b"salt", b"image"])
def test_keys_tell_contents_apart_that_have_the_same_tokens(extras: bytes) -> None:
    """Correct bytes (S15): the engine's hash covers the LoRA adapter, the cache salt and the images."""
    hand = hand_with(range(8))
    assert match(hand, SmallRequest("other", range(9), extras=extras)) == 0
    assert match(hand, SmallRequest("same", range(9))) == 8


@given(ACTS)
@settings(max_examples=examples(30))
def test_keys_never_share_content_between_adapters(acts: list[int]) -> None:
    """Correct bytes (S15): requests of three adapters with the same prompts each read their own bytes."""
    engine = SmallEngine(device_blocks=24, host_blocks=12, prefix_cache=False)
    arrive = engine.arrive

    def arrive_with_adapter(request: SmallRequest) -> SmallRequest:
        adapter = bytes([len(engine.requests) % 3])
        return arrive(
            SmallRequest(request.request_id, request.all_token_ids, request.outputs, extras=adapter)
        )

    engine.arrive = arrive_with_adapter  # type: ignore[method-assign]
    drive(engine, acts)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_keys_follow_the_block_size_of_decode_context_parallel_ranks(ranks: int) -> None:
    """Ranks that share a sequence hold one larger block together. Its key is the hash at its end."""
    group = KVCacheGroup(HASH_TOKENS * ranks)
    hand = hand_with(range(32), group)
    request = SmallRequest("r", range(33))
    assert stored_keys(hand) == keys_of(request, tokens=4 * ranks)
    assert hand.admit(request, [*range(20, 29)]) == 32
    (job,) = hand.step().loads
    assert len(to_list(job.device_blocks)) == 8 // ranks


def test_keys_need_blocks_of_whole_hashes() -> None:
    with pytest.raises(ConfigError, match="whole hashes"):
        Hand(KVCacheGroup(6))


def test_keys_of_requests_that_must_not_read_are_only_stored() -> None:
    """The request computes what the host has, holds nothing for it, and stores what it computes."""
    hand = hand_with(range(8))
    request = SmallRequest("r", range(13), skip_reading=True)
    assert hand.admit(request, [20, 21, 22, 23]) == 0
    assert hand.core.ledger.requests["r"].state is RequestState.RUNNING
    hand.compute(request)
    plan = hand.step(request)
    assert not plan.loads
    assert [to_list(job.device_blocks) for job in plan.stores] == [[22]]


def test_keys_of_requests_that_load_little() -> None:
    """`max_load_tokens` bounds a hit."""
    hand = hand_with(range(12))
    assert match(hand, SmallRequest("r", range(13), 1, {"max_load_tokens": 9})) == 8
    assert match(hand, SmallRequest("q", range(13), 1, {"max_load_tokens": 0})) == 0


def test_match_comes_to_rest() -> None:
    """Progress (S9): a preempted request that waits for its own load goes on when that has failed."""
    engine = SmallEngine(prefix_cache=False)
    finish_one(engine, "first", [*range(12)])
    request = engine.arrive(SmallRequest("second", range(13), 3))
    engine.step()
    (transfer,) = engine.copies
    engine.preempt(request)
    engine.step()
    engine.carry_out(transfer, good=False)
    come_to_rest(engine)
    assert request.finished


@pytest.mark.parametrize("window", [1, 2 * HASH_TOKENS])
def test_a_hit_of_which_no_layer_reads_a_token_is_not_offered(window: int) -> None:
    """Progress (S9): its load would copy nothing and fail, and the engine would ask for it in every step.

    A walk found it: a window of one token, or a chunk of chunked local attention that begins at the end.
    """
    kind = GroupKind.SLIDING_WINDOW if window == 1 else GroupKind.CHUNKED_LOCAL
    engine = SmallEngine((KVCacheGroup(HASH_TOKENS, kind, window),), prefix_cache=False)
    engine.arrive(SmallRequest("asking", range(2 * HASH_TOKENS + 1)))
    engine.run(20)
    assert not of_kind(engine, ev.LoadPlanned)
