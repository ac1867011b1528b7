"""How requests, steps, copies and the cache end, and what goes on after that.

Rows 7, 8, 9, 10, 11, 17 and 18 of the scheduler's behaviours; each test is named after its row.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import (
    ACTS,
    FULL,
    SLIDING,
    Hand,
    come_to_rest,
    drive,
    finish_one,
    keys_of,
    of_kind,
    skipped,
    stored_keys,
)

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.offloader import LookupResult
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import KVCacheGroup, LastStep, LoadEnded, StepOutput, StoreMode
from kvsm.events import Direction, SkipReason
from kvsm.ids import to_list
from kvsm.states.block import BlockState
from kvsm.states.transfer import TransferState

REMOTE = {"do_remote_decode": True}


def at_rest(hand: Hand) -> bool:
    return not check_ledger(hand.core.ledger) and not check_rest(hand.core.ledger)


def stored_blocks(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def lives(hand: Hand, state: str) -> tuple[SmallRequest, list[int]]:
    """A request in this state of its life, of 13 tokens, of which the host has 8; and the blocks it has."""
    hand.store(SmallRequest("before", range(8)), [0, 1])
    request, blocks = SmallRequest("r", range(13), 9), [10, 11, 12, 13]
    if state == "deferred":
        other = SmallRequest("other", range(12), skip_reading=True)
        hand.admit(other, [5, 6, 7])
        hand.compute(other)
        hand.step(other)
    if state != "unknown":
        hand.scheduler.add_request(request)
    if state in ("unknown", "arrived"):
        return request, []
    if state in ("matched", "deferred"):
        hand.scheduler.get_num_new_matched_tokens(request, 0)
        return request, []
    hand.admit(request, blocks)
    if state == "planned":
        return request, blocks
    plan = hand.step()
    if state == "loading":
        return request, blocks
    hand.end(plan)
    if state == "preempted":
        hand.step(preempted={"r"})
        return request, []
    hand.compute(request)
    if state == "storing":
        hand.step(request)
    return request, blocks


STATES = [
    "unknown",
    "arrived",
    "matched",
    "deferred",
    "planned",
    "loading",
    "running",
    "storing",
    "preempted",
]


# Row 7.


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("references", [False, True])
def test_finish_abort_is_legal_in_every_state_and_twice_as_once(
    state: str, aborted: bool, references: bool
) -> None:
    """Every call is legal (S8), progress (S9), B19, B20, B30."""
    pool = SmallPool(64) if references else None
    hand = Hand(pool=pool)
    request, blocks = lives(hand, state)
    kept, _ = hand.scheduler.request_finished(request, [blocks] if blocks else [], aborted=aborted)
    before = len(hand.log)
    assert hand.scheduler.request_finished(request, [blocks] if blocks else [], aborted=not aborted) == (
        False,
        None,
    )
    assert len(hand.log) == before
    if references:
        assert not kept
    sent: list[str] = []
    for transfer in list(hand.core.ledger.transfers):
        hand.step()
        sent += hand.report(transfer).finished_sending
    hand.end(hand.step())
    sent += hand.scheduler.update_connector_output([]).finished_sending
    assert sent.count("r") == int(kept)
    if state == "deferred":
        hand.scheduler.request_finished(SmallRequest("other", range(12)), [])
    hand.end(hand.step())
    assert at_rest(hand)
    assert not hand.scheduler.has_pending_work()


@pytest.mark.parametrize("good", [True, False])
def test_finish_abort_leaves_a_load_under_way_and_it_is_reported_once(good: bool) -> None:
    """No reuse in flight (S3), B05, B29: the copy still writes; the engine still hears of its end."""
    hand = Hand()
    request, blocks = lives(hand, "loading")
    (transfer,) = hand.core.ledger.transfers
    assert hand.scheduler.request_finished(request, [blocks], aborted=True)[0]
    assert hand.core.ledger.transfers[transfer].state is TransferState.SUBMITTED
    assert hand.core.leased([10, 11])
    results = hand.report(transfer, good=good)
    assert results.loads == (LoadEnded("r", good, 8 if good else 0),)
    assert results.finished_sending == ("r",)
    assert hand.report(transfer, good=good).loads == ()


def test_finish_abort_leaves_its_stores_wanted() -> None:
    """No doubled or lost store (S13): what an aborted request stored can be hit."""
    hand = Hand()
    request, blocks = lives(hand, "storing")
    hand.scheduler.request_finished(request, [blocks], aborted=True)
    (transfer,) = hand.core.ledger.transfers
    hand.report(transfer)
    assert hand.scheduler.get_num_new_matched_tokens(SmallRequest("next", range(20)), 0) == (12, True)


def test_finish_abort_may_come_before_the_reports_of_the_same_step() -> None:
    """The worker has reported, and the engine finishes the request before it hands the report on."""
    hand = Hand()
    request, blocks = lives(hand, "storing")
    (transfer,) = hand.core.ledger.transfers
    kept, _ = hand.scheduler.request_finished(request, [blocks])
    assert kept
    assert hand.report(transfer).finished_sending == ("r",)
    assert hand.core.lookup(keys_of(request)[2]) is LookupResult.HIT


def test_finish_abort_stores_what_is_confirmed_under_lease() -> None:
    """No reuse in flight (S3): the engine has its blocks back while the copy reads them; nobody writes
    there."""
    hand = Hand()
    request, blocks = lives(hand, "running")
    kept, _ = hand.scheduler.request_finished(request, [blocks])
    assert kept
    assert hand.core.leased([12])
    plan = hand.step()
    assert stored_blocks(plan) == [12]
    assert not hand.scheduler.update_connector_output([]).finished_sending
    (job,) = plan.stores
    assert hand.report(job.transfer).finished_sending == ("r",)


def test_finish_abort_lets_blocks_go_at_once_where_references_protect_them() -> None:
    pool = SmallPool(64)
    hand = Hand(pool=pool)
    pool.touch([0, 1, 10, 11, 12, 13])
    request, blocks = lives(hand, "running")
    assert hand.scheduler.request_finished(request, [blocks]) == (False, None)
    pool.free_blocks(blocks)
    assert [pool.references[block] for block in blocks] == [0, 0, 1, 0]
    hand.end(hand.step())
    assert pool.references[12] == 0


@given(ACTS, st.booleans(), st.booleans(), st.sampled_from([1, 2]))
@settings(max_examples=examples(60))
def test_finish_abort_under_any_traffic(
    acts: list[int], references: bool, asynchronous: bool, workers: int
) -> None:
    """No reuse in flight (S3), one release per hold (S4), every call is legal (S8): no block is taken under a
    copy, none is released twice, and all kept blocks are named once."""
    engine = SmallEngine(
        device_blocks=16, host_blocks=8, references=references, asynchronous=asynchronous, workers=workers
    )
    kept: list[str] = []
    finished = engine.scheduler.request_finished

    def watched(request: Any, *arguments: Any, **more: Any) -> Any:
        answer = finished(request, *arguments, **more)
        kept.extend([request.request_id] if answer[0] else [])
        return answer

    engine.scheduler.request_finished = watched  # type: ignore[method-assign]
    drive(engine, acts)
    assert sorted(kept) == sorted(name for results in engine.results for name in results.finished_sending)
    assert not (references and kept)


# Row 8.


def test_preemption_restarts_the_block_table_and_the_cursors() -> None:
    """No doubled or lost store (S13): with new blocks it offers everything again."""
    hand = Hand(core={"host_blocks": 3})
    request = SmallRequest("r", range(12), 9)
    hand.admit(request, [0, 1, 2])
    hand.compute(request)
    hand.end(hand.step(request))
    assert hand.core.ledger.requests["r"].settled == (3,)
    hand.step(preempted={"r"})
    assert hand.core.ledger.requests["r"].settled == ()
    hand.store(SmallRequest("other", range(50, 62)), [20, 21, 22])
    assert hand.admit(request, [5, 6, 7]) == 0
    hand.compute(request)
    assert stored_blocks(hand.step(request)) == [5, 6, 7]


def test_preemption_asks_for_a_flush_where_no_references_protect_the_blocks() -> None:
    """No reuse in flight (S3), B04: the engine gives the block away in this very step."""
    hand = Hand()
    lives(hand, "storing")
    (transfer,) = hand.core.ledger.transfers
    assert hand.step(preempted={"r"}).flush == (transfer,)


def test_a_preemption_that_was_told_early_is_noted_for_one_step() -> None:
    """A request that asks again was preempted. The note must be gone when a later step preempts it again."""
    hand, request = Hand(pool=SmallPool(64)), SmallRequest("r", range(13), 9)
    hand.admit(request, [0, 1, 2, 3])
    hand.scheduler.get_num_new_matched_tokens(request, 0)
    assert hand.scheduler.state.preempted == {"r"}
    hand.step()
    assert not hand.scheduler.state.preempted


def test_preemption_asks_for_no_flush_where_references_do() -> None:
    hand = Hand(pool=SmallPool(64))
    lives(hand, "storing")
    assert hand.core.ledger.transfers
    assert hand.step(preempted={"r"}).flush == ()


def test_preemption_flushes_what_is_given_to_others_too() -> None:
    """No reuse in flight (S3): a block of a finished request's copy is given to one that runs, and to one
    that is admitted."""
    hand = Hand(last_step=LastStep.KEEP_STEPPING)
    first, runs = SmallRequest("first", range(4)), SmallRequest("runs", range(50, 60), 9)
    hand.admit(first, [7])
    hand.compute(first)
    hand.admit(runs, [20])
    hand.scheduler.request_finished(first, [[7]])
    (job,) = hand.step().stores
    assert hand.step(new_block_ids={"runs": [[7]]}).flush == (job.transfer,)
    hand.admit(SmallRequest("new", range(90, 95)), [7, 8])
    assert hand.step().flush == (job.transfer,)


def test_preemption_flushes_for_each_of_those_preempted_in_one_step() -> None:
    """No reuse in flight (S3): copies of both requests read blocks that the engine may give away now."""
    hand = Hand(last_step=LastStep.KEEP_STEPPING)
    stores = []
    for name, block in [("first", 7), ("second", 8)]:
        request = SmallRequest(name, range(block * 4, block * 4 + 4), 9)
        hand.admit(request, [block])
        hand.compute(request)
        stores += [job.transfer for job in hand.step(request).stores]
    assert len(stores) == 2
    assert list(hand.step(preempted={"first", "second"}).flush) == stores


def test_preemptions_of_one_step_are_logged_in_one_order() -> None:
    """Determinism (S11): vLLM gives a set of names, whose order depends on the process."""
    logs = []
    for order in ("first", "second"), ("second", "first"):
        hand = Hand()
        for name, block in [("first", 7), ("second", 8)]:
            hand.admit(SmallRequest(name, range(block * 4, block * 4 + 4), 9), [block])
        hand.step(preempted=dict.fromkeys(order))
        logs.append([*hand.log])
    assert [type(event) for event in logs[0]].count(ev.RequestPreempted) == 2
    assert logs[0] == logs[1]


def test_preemption_flushes_for_each_of_those_admitted_in_one_step() -> None:
    """No reuse in flight (S3): two requests get blocks that copies of finished ones read."""
    hand = Hand(last_step=LastStep.KEEP_STEPPING)
    for name, block in [("first", 7), ("second", 8)]:
        request = SmallRequest(name, range(block * 4, block * 4 + 4))
        hand.admit(request, [block])
        hand.compute(request)
        hand.scheduler.request_finished(request, [[block]])
    stores = [job.transfer for job in hand.step().stores]
    hand.admit(SmallRequest("new", range(90, 93)), [7])
    hand.admit(SmallRequest("newer", range(95, 98)), [8])
    assert list(hand.step().flush) == stores


@pytest.mark.parametrize("state", ["planned", "loading", "storing", "running"])
def test_preemption_and_admission_again_with_copies_in_flight(state: str) -> None:
    """B18, every call is legal (S8)."""
    hand = Hand()
    request, _ = lives(hand, state)
    hand.step(preempted={"r"})
    found = hand.admit(request, [30, 31, 32, 33])
    hand.step()
    for transfer in [*hand.core.ledger.transfers]:
        hand.report(transfer)
    if found is None:
        found = hand.admit(request, [30, 31, 32, 33])
    assert found == (12 if state == "storing" else 8)
    hand.end(hand.step())
    hand.compute(request)
    hand.end(hand.step(request))
    hand.scheduler.request_finished(request, [[30, 31, 32, 33]])
    hand.end(hand.step())
    assert at_rest(hand)


@given(ACTS, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_preemption_under_any_traffic(acts: list[int], references: bool, prefix_cache: bool) -> None:
    """No reuse in flight (S3), order of copies (S12), correct bytes (S15): with so few blocks that requests
    keep taking them from each other."""
    engine = SmallEngine(
        device_blocks=9,
        host_blocks=10,
        references=references,
        prefix_cache=prefix_cache,
        chunk_tokens=8,
    )
    drive(engine, acts, without=("reset",))


# Row 9.


def in_flight_three_ways(**options: Any) -> tuple[Hand, list[int], SmallRequest]:
    """A store and a load of aborted requests are in flight, and a last request is about to finish with
    something to store."""
    hand = Hand(**options)
    loading, blocks = lives(hand, "loading")
    storing = SmallRequest("storing", range(60, 64))
    hand.admit(storing, [20])
    last = SmallRequest("last", range(80, 84))
    hand.admit(last, [30])
    hand.compute(storing)
    hand.step(storing)
    hand.compute(last)
    hand.scheduler.request_finished(loading, [blocks], aborted=True)
    hand.scheduler.request_finished(storing, [[20]], aborted=True)
    return hand, list(hand.core.ledger.transfers), last


def test_last_step_flushes_everything_in_that_step() -> None:
    """Flush at last step (S17), B21: both directions, and what is planned in this step."""
    hand, before, last = in_flight_three_ways()
    assert len(before) == 2
    assert hand.step(last).flush == ()
    assert hand.core.ledger.transfers.keys() > {*before}
    hand.scheduler.request_finished(last, [[30]])
    assert hand.step().flush == tuple(hand.core.ledger.transfers)


def test_last_step_flushes_what_it_plans_itself() -> None:
    hand, before, last = in_flight_three_ways()
    hand.scheduler.request_finished(last, [[30]])
    plan = hand.step()
    (job,) = plan.stores
    assert plan.flush == (*before, job.transfer)


def test_last_step_is_none_while_a_request_waits() -> None:
    """The engine has steps to come, so nobody needs to wait."""
    hand, _, last = in_flight_three_ways()
    hand.scheduler.add_request(SmallRequest("waits", range(5)))
    hand.scheduler.request_finished(last, [[30]])
    assert hand.step().flush == ()


def test_last_step_keeps_the_engine_stepping_by_configuration() -> None:
    """Flush at last step (S17): `has_pending_work` counts stores, loads, those of aborted requests, and those
    that drain."""
    hand, before, last = in_flight_three_ways(last_step=LastStep.KEEP_STEPPING)
    hand.scheduler.request_finished(last, [[30]])
    assert hand.step().flush == ()
    assert not hand.scheduler.reset_cache()
    for transfer in list(hand.core.ledger.transfers):
        assert hand.scheduler.has_pending_work()
        hand.step()
        hand.report(transfer)
    assert not hand.scheduler.has_pending_work()
    assert len(before) == 2


def test_last_step_counts_what_the_engine_has_yet_to_hear() -> None:
    """A promise that was voided: no copy is under way, and its request waits for an answer."""
    hand = Hand()
    request, _ = lives(hand, "matched")
    hand.scheduler.reset_cache()
    hand.scheduler.update_state_after_alloc(request, [[10, 11, 12, 13]], 8)
    assert hand.scheduler.has_pending_work()
    assert hand.scheduler.update_connector_output([]).loads
    assert not hand.scheduler.has_pending_work()


@given(ACTS, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_last_step_under_any_traffic(acts: list[int], references: bool, asynchronous: bool) -> None:
    """Flush at last step (S17): a step that is decided without an unfinished request leaves no copy
    behind."""
    engine = SmallEngine(references=references, asynchronous=asynchronous, device_blocks=20)
    build = engine.scheduler.build_connector_meta

    def watched(output: StepOutput) -> TransferPlan:
        plan = build(output)
        if all(request.finished for request in engine.requests.values()):
            assert set(plan.flush) == set(engine.core.ledger.transfers)
        return plan

    engine.scheduler.build_connector_meta = watched  # type: ignore[method-assign]
    drive(engine, acts)


# Row 10.


@pytest.mark.parametrize("remote", [False, True])
def test_remote_decode_offers_every_full_block(remote: bool) -> None:
    """Full offload (S16): what the device had, what the host had, and what was computed, to the end of the
    request."""
    engine = SmallEngine(host_blocks=4)
    finish_one(engine, "first", [*range(17)], 3)
    finish_one(engine, "other", [*range(100, 117)])
    request = engine.arrive(SmallRequest("r", range(24), 1, REMOTE if remote else None))
    engine.run()
    assert engine.core.lookup(keys_of(request)[0]) is LookupResult.HIT
    unstored = {*keys_of(request)} - {*engine.core.ledger.index}
    assert unstored <= {*skipped(engine, SkipReason.POOL_FULL)}


def test_remote_decode_offers_at_its_finish_what_was_refused_before() -> None:
    """Full offload (S16), B20: the host was full, and has room at the finish."""
    hand = Hand(core={"host_blocks": 2})
    first = SmallRequest("first", range(50, 58), 9)
    hand.admit(first, [0, 1])
    hand.compute(first)
    (job,) = hand.step(first).stores
    request = SmallRequest("r", range(9), 1, REMOTE)
    hand.admit(request, [10, 11, 12])
    hand.compute(request)
    assert not hand.step(request).stores
    assert skipped(hand, SkipReason.POOL_FULL) == keys_of(request)
    hand.report(job.transfer)
    hand.scheduler.request_finished(request, [[10, 11, 12]])
    assert stored_blocks(hand.step()) == [10, 11]


@given(
    tokens=st.integers(1, 16),
    parameters=st.sampled_from([None, REMOTE]),
    draining=st.booleans(),
    steps=st.integers(0, 3),
)
@settings(max_examples=examples(40))
def test_a_name_that_is_used_again_under_a_load_stores_its_blocks(
    tokens: int, parameters: dict[str, Any] | None, draining: bool, steps: int
) -> None:
    """Full offload (S16), no lost store (S13): the load of an aborted request with this name is in flight, so
    that request still has the cursors of the name. At its own end the next request with the name stores all
    of its blocks, or the log has the reason."""
    hand = Hand()
    hand.store(SmallRequest("before", range(100, 108)), [40, 41])
    aborted = SmallRequest("r", range(100, 112))
    assert hand.admit(aborted, [50, 51, 52]) == 8
    hand.scheduler.request_finished(aborted, [[50, 51, 52]], aborted=True)
    if draining:
        hand.step()
        hand.scheduler.reset_cache()
    request = SmallRequest("r", range(tokens), 3, parameters)
    table = [*range(-(-request.num_tokens // 4))]
    hand.admit(request, table)
    hand.compute(request)
    for _ in range(steps):
        hand.step(request)
    hand.scheduler.request_finished(request, [table])
    settled = {*hand.core.ledger.index, *skipped(hand, SkipReason.DRAINING)}
    assert settled >= {*keys_of(request)[: tokens // 4]}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"store": StoreMode.LAZY}, {}),
        ({"prompt_only": True}, {}),
        ({"core": {"store_threshold": 3}}, {}),
        ({}, {"offload": False}),
        ({}, {"max_offload_tokens": 4}),
    ],
)
def test_remote_decode_comes_before_every_policy(options: dict[str, Any], more: dict[str, Any]) -> None:
    """Full offload (S16): the decoder needs the whole request."""
    engine = SmallEngine(**options)
    request = finish_one(engine, "r", [*range(10)], 8, parameters={**REMOTE, **more})
    assert stored_keys(engine) == keys_of(request)[:4]


@given(ACTS, st.sampled_from([(FULL,), (FULL, SLIDING)]), st.sampled_from([6, 30]), st.booleans())
@settings(max_examples=examples(60))
def test_remote_decode_under_any_traffic(
    acts: list[int], groups: tuple[KVCacheGroup, ...], host_blocks: int, asynchronous: bool
) -> None:
    """Full offload (S16): the small engine checks it at the end of each of these requests."""
    engine = SmallEngine(groups, device_blocks=36, host_blocks=host_blocks, asynchronous=asynchronous)
    drive(engine, acts, parameters=REMOTE)


# Row 11.


@pytest.mark.parametrize("state", STATES)
def test_reset_is_legal_at_any_time_and_twice(state: str) -> None:
    """Every call is legal (S8), no stale data (S14): nothing older can be matched; a reset is idempotent."""
    hand = Hand()
    request, blocks = lives(hand, state)
    hand.scheduler.reset_cache()
    before = len(hand.log)
    hand.scheduler.reset_cache()
    assert len(hand.log) == before
    assert not hand.core.ledger.index
    assert check_ledger(hand.core.ledger) == []
    hand.scheduler.request_finished(request, [blocks] if blocks else [], aborted=True)
    hand.scheduler.request_finished(SmallRequest("other", range(12)), [])
    for transfer in list(hand.core.ledger.transfers):
        hand.report(transfer)
    hand.end(hand.step())
    hand.scheduler.update_connector_output([])
    assert hand.scheduler.reset_cache()
    assert at_rest(hand)


def test_reset_takes_back_what_has_not_left() -> None:
    """No stale data (S14): a load and a store that were planned for the next step."""
    pool = SmallPool(64)
    hand = Hand(pool=pool)
    request, _ = lives(hand, "planned")
    last = SmallRequest("last", range(80, 84))
    hand.admit(last, [30])
    hand.compute(last)
    hand.scheduler.request_finished(last, [[30]])
    assert pool.references[30] == pool.references[10] == 1
    assert hand.scheduler.reset_cache()
    assert pool.references[30] == pool.references[10] == 0
    plan = hand.step()
    assert not plan.loads
    assert not plan.stores
    assert hand.scheduler.update_connector_output([]).loads == (LoadEnded("r", False, 0),)
    assert request.num_tokens == 13


def test_reset_lets_running_requests_be_stored_again_but_not_what_an_older_load_brought() -> None:
    """No stale data (S14), B24: the blocks of the load hold bytes from before the reset; computed blocks do
    not."""
    hand = Hand()
    request, _ = lives(hand, "running")
    hand.end(hand.step(request))
    hand.scheduler.reset_cache()
    assert stored_blocks(hand.step(request)) == [12]
    assert skipped(hand, SkipReason.OLDER_EPOCH) == keys_of(request)[:2]


def test_reset_lets_a_device_block_be_stored_once_it_was_computed_anew() -> None:
    """What the request computes in the same blocks after a preemption is of this epoch."""
    hand = Hand()
    request, blocks = lives(hand, "running")
    hand.scheduler.reset_cache()
    hand.step(preempted={"r"})
    assert hand.admit(request, blocks) == 0
    hand.compute(request)
    assert stored_blocks(hand.step(request)) == [10, 11, 12]


def test_reset_does_not_let_a_finish_store_while_it_drains() -> None:
    """Progress (S9): so the reset comes to an end; what is not stored is recorded."""
    hand = Hand()
    request, blocks = lives(hand, "storing")
    hand.scheduler.reset_cache()
    hand.scheduler.request_finished(request, [blocks])
    assert not hand.step().stores
    (event,) = [one for one in of_kind(hand, ev.StoreSkipped) if one.reason == SkipReason.DRAINING]
    assert event.owners == (("r", len(event.keys)),)


def test_reset_leaves_nobody_waiting() -> None:
    """Progress (S9), B15: a request that waited for an older store asks again, and is answered."""
    hand = Hand()
    request, _ = lives(hand, "deferred")
    hand.scheduler.reset_cache()
    (transfer,) = hand.core.ledger.transfers
    hand.report(transfer)
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@given(ACTS, st.booleans(), st.sampled_from([StoreMode.EAGER, StoreMode.LAZY]))
@settings(max_examples=examples(60))
def test_reset_under_any_traffic(acts: list[int], prefix_cache: bool, store: StoreMode) -> None:
    """No stale data (S14): what can be matched was stored after the last reset, from what was computed or
    loaded after it."""
    engine = SmallEngine(
        device_blocks=20, host_blocks=8, prefix_cache=prefix_cache, store=store, lazy_target_blocks=4
    )

    def check(engine: SmallEngine) -> None:
        resets = [event.seq for event in of_kind(engine, ev.CacheReset)]
        for slot in engine.core.ledger.index.values():
            assert engine.core.ledger.generation[slot] > (resets[-1] if resets else 0)

    drive(engine, [*acts, 12, *acts], check=check)


# Row 17.


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_deadlock_freedom_of_partial_holders(prefix_cache: bool) -> None:
    """Progress (S9), B22: two requests hold the blocks of their loads, neither can get the rest; the host is
    full of their pins, so that nothing can be stored; a third waits for a load of theirs. All finish."""
    engine = SmallEngine(device_blocks=9, host_blocks=6, prefix_cache=prefix_cache, chunk_tokens=8)
    first, second = [*range(12)], [*range(100, 112)]
    finish_one(engine, "a", first)
    finish_one(engine, "b", second)
    engine.pool.forget()
    requests = [
        SmallRequest("c", [*first, *range(200, 212)], 4),
        SmallRequest("d", [*second, *range(300, 312)], 4),
        SmallRequest("e", [*first, *range(400, 404)], 4),
    ]
    for request in requests:
        engine.arrive(request)
    engine.step()
    loads = [copy for copy in engine.copies.values() if copy.job.direction is Direction.LOAD]
    assert len(loads) == 2
    assert engine.core.ledger.requests["e"].awaits in engine.copies
    assert len(engine.pool.queue) < 6
    assert not engine.core.ledger.free
    assert len(engine.core.ledger.policy) == 0
    engine.step()
    come_to_rest(engine)
    assert all(request.finished for request in requests)
    assert of_kind(engine, ev.RequestPreempted)


@given(ACTS, st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 64]), st.booleans())
@settings(max_examples=examples(60))
def test_deadlock_freedom_under_any_traffic(
    acts: list[int], host_blocks: int, ticks: int, prefix_cache: bool
) -> None:
    """Progress (S9): a request that waits holds no pin and no device block, so no circle can close."""
    engine = SmallEngine(
        device_blocks=9, host_blocks=host_blocks, prefix_cache=prefix_cache, core={"defer_ticks": ticks}
    )

    def check(engine: SmallEngine) -> None:
        for entry in engine.core.ledger.deferred.values():
            assert not len(entry.pins)
            assert not any(engine.requests[entry.name].tables)

    drive(engine, acts, check=check)


# Row 18.


@pytest.mark.parametrize("direction", list(Direction))
def test_worker_death_that_is_reported_fails_the_transfer(direction: Direction) -> None:
    """Failure is not success (S6), B25: the part that was copied counts for nothing."""
    hand = Hand(core={"workers": 2})
    request, _ = lives(hand, "loading" if direction is Direction.LOAD else "storing")
    (transfer,) = hand.core.ledger.transfers
    hand.report(transfer, 0)
    results = hand.report(transfer, 1, good=False)
    assert hand.core.lookup(keys_of(request)[0 if direction is Direction.LOAD else 2]) is LookupResult.MISS
    assert results.loads == ((LoadEnded("r", False, 0),) if direction is Direction.LOAD else ())
    assert not hand.core.ledger.transfers


@pytest.mark.parametrize("references", [False, True])
def test_worker_death_in_silence_is_found_at_its_bound_and_a_load_is_told(references: bool) -> None:
    """Progress (S9), B25: the load is lost, its request hears once, and what may still be written is not used
    again."""
    pool = SmallPool(64) if references else None
    hand = Hand(pool=pool, core={"workers": 2, "transfer_ticks": 4})
    request, blocks = lives(hand, "loading")
    (transfer,) = hand.core.ledger.transfers
    hand.report(transfer, 0)
    told: list[LoadEnded] = []
    for step in range(6):
        assert bool(told) == (step > 3)
        hand.step()
        told += hand.scheduler.update_connector_output([]).loads
    assert told == [LoadEnded("r", False, 0, lost=True)]
    assert [event.transfer for event in of_kind(hand, ev.TransferLost)] == [transfer]
    if pool is not None:
        assert pool.references[10] == 1
    assert hand.core.leased([10])
    # Its worker speaks up after all: too late.
    hand.report(transfer, 1)
    assert len(of_kind(hand, ev.ReportRejected)) == 1
    hand.scheduler.request_finished(request, [blocks], aborted=True)
    assert not hand.scheduler.has_pending_work()
    assert at_rest(hand)


def test_worker_death_in_silence_frees_the_device_blocks_of_a_store() -> None:
    """Progress (S9): only its slots are retired; a late copy reads the device, and writes nowhere else."""
    pool = SmallPool(64)
    hand = Hand(pool=pool, core={"transfer_ticks": 2, "host_blocks": 3})
    request, blocks = lives(hand, "storing")
    hand.step()
    hand.step()
    assert not hand.core.ledger.transfers
    assert pool.references[12] == 0
    retired = [slot for slot in range(3) if hand.core.ledger.blocks.state(slot) is BlockState.RETIRED]
    assert len(retired) == 1
    hand.scheduler.request_finished(request, [blocks])
    assert at_rest(hand)


def test_worker_death_leaves_an_engine_that_goes_on() -> None:
    """Progress (S9): every earlier copy is lost; later requests are stored and served from what is left."""
    engine = SmallEngine(device_blocks=40, host_blocks=20, prefix_cache=False, core={"transfer_ticks": 3})
    engine.arrive(SmallRequest("first", range(12), 3))
    for _ in range(9):
        engine.step()
        engine.copies.clear()
    assert of_kind(engine, ev.TransferLost)
    finish_one(engine, "second", [*range(12)], 3)
    third = engine.arrive(SmallRequest("third", range(13)))
    engine.step()
    assert third.loading
    come_to_rest(engine)


@given(ACTS, st.sampled_from([2, 9]))
@settings(max_examples=examples(60))
def test_worker_death_under_any_traffic(acts: list[int], ticks: int) -> None:
    """No reuse in flight (S3), progress (S9), correct bytes (S15): copies end late, or are reported late,
    after they were given up."""
    engine = SmallEngine(device_blocks=40, host_blocks=20, workers=2, core={"transfer_ticks": ticks})
    drive(engine, acts, without=("carry out all",))
