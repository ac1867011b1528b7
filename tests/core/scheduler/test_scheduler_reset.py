"""The last step, remote decode, reset and ranks on the small engine, over whole lives.

Rows 9, 10, 11 and 12 of the scheduler's behaviours; each test is named after its row. What one call does in
one state is in `test_scheduler_ending` and `test_scheduler_ranks`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
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
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.copies.simulated import SimulatedCopyEngine
from kvsm.copies.worker import Worker, smallest_host_pool
from kvsm.core.offloader import LookupResult
from kvsm.core.plan import TransferPlan, WorkerReport
from kvsm.core.scheduler import KVCacheGroup, LastStep, LoadEnded, StepOutput, StepResults, StoreMode
from kvsm.errors import ConfigError
from kvsm.events import Direction, SkipReason
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.transfer import TransferState

REMOTE = {"do_remote_decode": True}


def blocks_stored(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def three_in_flight(last_step: LastStep) -> tuple[Hand, SmallRequest]:
    """A load of an aborted request, a store of a finished one, and one that is planned."""
    hand = Hand(last_step=last_step, core={"workers": 2})
    hand.store(SmallRequest("before", range(8)), [0, 1])
    loads, stores = SmallRequest("loads", range(13), 9), SmallRequest("stores", range(50, 54), 9)
    hand.admit(loads, [10, 11, 12, 13])
    hand.admit(stores, [20])
    hand.compute(stores)
    hand.step(stores)
    hand.scheduler.request_finished(loads, [[10, 11, 12, 13]], aborted=True)
    hand.scheduler.request_finished(stores, [[20]])
    last = SmallRequest("last", range(80, 84), 9)
    hand.admit(last, [30])
    hand.step(last)
    hand.compute(last)
    hand.scheduler.request_finished(last, [[30]])
    return hand, last


# Row 9.


def test_last_step_flushes_loads_stores_and_what_it_plans() -> None:
    """Flush at last step (S17), B21: nothing is in flight behind the last step, if so configured."""
    hand, _ = three_in_flight(LastStep.FLUSH)
    states = [one.state for one in hand.core.ledger.transfers.values()]
    assert sorted(states) == sorted([TransferState.SUBMITTED, TransferState.SUBMITTED, TransferState.PLANNED])
    plan = hand.step()
    assert blocks_stored(plan) == [30]
    assert sorted(plan.flush) == sorted(hand.core.ledger.transfers)
    assert len(plan.flush) == 3
    assert {hand.core.ledger.transfers[one].direction for one in plan.flush} == {*Direction}


def test_last_step_flushes_what_a_reset_abandoned() -> None:
    """Flush at last step (S17): a draining copy is a copy too."""
    hand, _ = three_in_flight(LastStep.FLUSH)
    assert not hand.scheduler.reset_cache()
    assert {one.state for one in hand.core.ledger.transfers.values()} == {TransferState.ABANDONED}
    assert sorted(hand.step().flush) == sorted(hand.core.ledger.transfers)


@pytest.mark.parametrize("reset", [False, True])
def test_last_step_has_pending_work_until_every_rank_has_reported(reset: bool) -> None:
    """Flush at last step (S17): stores, loads, those of aborted requests, and those that a reset
    abandoned."""
    hand, _ = three_in_flight(LastStep.KEEP_STEPPING)
    plan = hand.step()
    assert blocks_stored(plan) == [30]
    assert plan.flush == ()
    if reset:
        hand.scheduler.reset_cache()
    for transfer in [*hand.core.ledger.transfers]:
        for worker in range(2):
            assert hand.scheduler.has_pending_work()
            assert hand.step().flush == ()
            hand.report(transfer, worker)
    assert not hand.scheduler.has_pending_work()


@pytest.mark.parametrize("last_step", list(LastStep))
def test_last_step_of_a_waiting_request_is_still_to_come(last_step: LastStep) -> None:
    """Flush at last step (S17): a request that has never been scheduled is unfinished."""
    hand, _ = three_in_flight(last_step)
    waits = SmallRequest("waits", range(200, 203))
    hand.scheduler.add_request(waits)
    assert hand.step().flush == ()
    hand.scheduler.request_finished(waits, [], aborted=True)
    assert bool(hand.step().flush) == (last_step is LastStep.FLUSH)


@given(ACTS, st.sampled_from(list(LastStep)), st.booleans())
@settings(max_examples=examples(40))
def test_last_step_of_any_traffic_leaves_nothing(
    acts: list[int], last_step: LastStep, references: bool
) -> None:
    """Flush at last step (S17): at every step without a request all is flushed, or work is pending while a
    copy runs."""
    engine = SmallEngine(references=references, device_blocks=20, last_step=last_step)
    build = engine.scheduler.build_connector_meta

    def watched(output: StepOutput) -> TransferPlan:
        plan = build(output)
        live = set(engine.core.ledger.transfers)
        if all(request.finished for request in engine.requests.values()):
            assert live <= set(plan.flush) or last_step is LastStep.KEEP_STEPPING
        assert engine.scheduler.has_pending_work() or not live
        return plan

    engine.scheduler.build_connector_meta = watched  # type: ignore[method-assign]
    drive(engine, acts)
    assert not engine.scheduler.has_pending_work()


@given(st.integers(4, 20), st.integers(0, 3), st.booleans())
@settings(max_examples=examples(30))
def test_last_step_of_an_engine_that_stops_all_the_same_loses_only_time(
    length: int, steps: int, references: bool
) -> None:
    """Progress (S9), flush at last step (S17): copies and reports wait for the next request; then everything
    is as if the engine had stepped on."""
    indices = []
    for stops in (False, True):
        engine = SmallEngine(
            references=references, prefix_cache=False, last_step=LastStep.KEEP_STEPPING, chunk_tokens=8
        )
        request = engine.arrive(SmallRequest("r", range(length), 9))
        for _ in range(steps + 1):
            engine.step()
        engine.finish(request, aborted=True)
        if not stops:
            come_to_rest(engine)
        # One that stops makes no step, and hands on no report.
        engine.arrive(SmallRequest("next", [*range(length), 500]))
        come_to_rest(engine)
        indices.append({*engine.core.ledger.index})
    assert indices[0] == indices[1]


# Row 10.


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(3, 24), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from(list(StoreMode)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=examples(60))
def test_remote_decode_is_all_on_the_host_by_the_step_after_its_finish(
    lives: list[tuple[int, int, int]], store: StoreMode, prefix_cache: bool, asynchronous: bool
) -> None:
    """Full offload (S16): computed blocks, device hits and host hits alike, in every store mode, if there is
    room."""
    engine = SmallEngine(
        device_blocks=60,
        host_blocks=60,
        store=store,
        lazy_target_blocks=4,
        prefix_cache=prefix_cache,
        asynchronous=asynchronous,
        chunk_tokens=9,
    )
    for number, (prompt, length, outputs) in enumerate(lives):
        tokens = [*range(8), *range(100 * prompt, 100 * prompt + length)][:length]
        request = finish_one(engine, f"r{number}", tokens, outputs, parameters=REMOTE)
        confirmed = max(length, request.num_tokens - 1)
        for key in keys_of(request)[: confirmed // HASH_TOKENS]:
            assert engine.core.lookup(key) is LookupResult.HIT


@pytest.mark.parametrize("remote", [True, False])
def test_remote_decode_offers_device_hits_that_the_host_lacks(remote: bool) -> None:
    """Full offload (S16): the device computed them for a request that stored nothing."""
    engine = SmallEngine(store=StoreMode.LAZY, lazy_target_blocks=1, device_blocks=40)
    finish_one(engine, "device", [*range(8)], parameters={"offload": False})
    assert not stored_keys(engine)
    request = finish_one(engine, "r", [*range(13)], parameters=REMOTE if remote else None)
    assert request.finished
    assert stored_keys(engine) == (keys_of(request)[:3] if remote else [])


def test_remote_decode_offers_host_hits_that_were_evicted_since() -> None:
    """Full offload (S16): the host had them at the match, and lost them while the request ran."""
    engine = SmallEngine(host_blocks=4, device_blocks=60)
    finish_one(engine, "before", [*range(8)])
    engine.pool.forget()
    request = engine.arrive(SmallRequest("r", range(13), 40, REMOTE))
    engine.step()
    assert request.loading
    for number in range(1, 6):
        other = engine.arrive(SmallRequest(f"o{number}", range(100 * number, 100 * number + 8)))
        while not other.finished:
            engine.carry_out_all()
            engine.hand_on()
            engine.step()
    assert engine.core.lookup(keys_of(request)[0]) is LookupResult.MISS
    before = len(engine.log)
    engine.carry_out_all()
    engine.hand_on()
    engine.finish(request)
    planned = [event for event in engine.log[before:] if isinstance(event, ev.StorePlanned)]
    skips = [event for event in engine.log[before:] if isinstance(event, ev.StoreSkipped)]
    offered = {key for event in (*planned, *skips) for key in event.keys}
    assert {*keys_of(request)[:2]} <= offered | {*engine.core.ledger.index}
    assert keys_of(request)[0] in stored_keys(engine)[2:]
    come_to_rest(engine)


def test_remote_decode_counts_what_is_resident_and_touches_it() -> None:
    """Full offload (S16): nothing is copied twice, and touched blocks are not evicted next."""
    engine = SmallEngine(host_blocks=4, prefix_cache=False)
    finish_one(engine, "same", [*range(8)])
    finish_one(engine, "other", [*range(100, 108)])
    request = engine.arrive(SmallRequest("r", range(8), 1, REMOTE, skip_reading=True))
    come_to_rest(engine)
    assert len(stored_keys(engine)) == 4
    finish_one(engine, "new", [*range(200, 208)])
    assert all(engine.core.lookup(key) is LookupResult.HIT for key in keys_of(request)[:2])
    assert engine.core.lookup(keys_of(engine.requests["other"])[0]) is LookupResult.MISS


def test_remote_decode_that_finds_no_room_is_told_why() -> None:
    """Full offload (S16): every block of it is resident, in flight, or was skipped with a reason."""
    engine = SmallEngine(host_blocks=2)
    request = finish_one(engine, "r", [*range(17)], parameters=REMOTE)
    reasons = {*skipped(engine, SkipReason.POOL_FULL)}
    assert {*keys_of(request)[:4]} <= {*engine.core.ledger.index} | reasons
    assert reasons


def test_remote_decode_touches_at_its_finish_what_it_stored_itself() -> None:
    """Full offload (S16): blocks that were used later are evicted before it."""
    hand = Hand(core={"host_blocks": 4})
    request = SmallRequest("r", range(8), 9, REMOTE)
    hand.admit(request, [10, 11])
    hand.compute(request)
    hand.end(hand.step(request))
    hand.store(SmallRequest("other", range(50, 58)), [20, 21])
    hand.scheduler.request_finished(request, [[10, 11]])
    hand.store(SmallRequest("new", range(80, 88)), [30, 31])
    assert [hand.core.lookup(key) for key in keys_of(request)] == [LookupResult.HIT] * 2


@pytest.mark.parametrize(("value", "stored"), [(True, 4), (False, 2), (None, 2)])
def test_remote_decode_comes_before_prompt_only_if_it_is_asked_for(value: object, stored: int) -> None:
    """A request that sets the parameter to false is stored like any other."""
    engine = SmallEngine(prompt_only=True)
    request = finish_one(engine, "r", [*range(8)], 9, parameters={"do_remote_decode": value})
    assert stored_keys(engine) == keys_of(request)[:stored]


# Row 11.


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("references", [False, True])
def test_reset_quarantines_what_copies_under_way_touch(direction: Direction, references: bool) -> None:
    """No reuse in flight (S3), no stale data (S14): their slots and device blocks stay unused until every
    rank has reported, and are free then."""
    hand = Hand(pool=SmallPool(64) if references else None, core={"host_blocks": 2, "workers": 2})
    request = SmallRequest("r", range(13), 9)
    if direction is Direction.LOAD:
        hand.store(SmallRequest("before", range(8)), [0, 1])
        hand.admit(request, [10, 11, 12, 13])
    else:
        hand.admit(request, [10, 11, 12, 13])
        hand.compute(request, 8)
    plan = hand.step(request)
    (job,) = (*plan.loads, *plan.stores)
    epoch = hand.core.ledger.epoch
    assert hand.scheduler.reset_cache() is False
    assert hand.core.ledger.epoch == epoch + 1
    assert not hand.core.ledger.index
    assert not len(hand.core.ledger.free)
    assert hand.core.leased([10, 11])
    assert hand.report(job.transfer, 1).drained is False
    assert not len(hand.core.ledger.free)
    results = hand.report(job.transfer, 0)
    assert results.drained is True
    assert results.loads == ((LoadEnded("r", False, 0),) if direction is Direction.LOAD else ())
    assert len(hand.core.ledger.free) == 2
    assert not hand.core.leased([10, 11])
    assert not hand.core.ledger.index
    assert hand.scheduler.reset_cache() is True


@pytest.mark.parametrize("references", [False, True])
def test_reset_gives_back_what_a_finish_planned(references: bool) -> None:
    """Progress (S9): the store of the finish was planned, and never leaves."""
    pool = SmallPool(64) if references else None
    hand, request = Hand(pool=pool), SmallRequest("r", range(4), 9)
    hand.admit(request, [10])
    hand.compute(request)
    assert hand.scheduler.request_finished(request, [[10]]) == (not references, None)
    assert hand.scheduler.reset_cache()
    assert hand.scheduler.has_pending_work() == (not references)
    sent = hand.scheduler.update_connector_output([]).finished_sending
    assert sent == (() if references else ("r",))
    assert not hand.core.leased([10])
    assert not hand.scheduler.has_pending_work()
    assert hand.step().stores == ()


def test_reset_lets_a_running_request_offer_its_old_blocks_at_once() -> None:
    """No doubled or lost store (S13): at once, not when it has computed another block."""
    hand, request = Hand(), SmallRequest("r", range(9), 9)
    hand.admit(request, [10, 11, 12])
    hand.compute(request)
    hand.end(hand.step(request))
    assert hand.scheduler.reset_cache()
    assert blocks_stored(hand.step(request)) == [10, 11]


@given(ACTS, st.integers(1, 3), st.booleans(), st.sampled_from([1, 2]))
@settings(max_examples=examples(50))
def test_reset_twice_is_as_once_at_any_time(
    acts: list[int], times: int, references: bool, workers: int
) -> None:
    """Every call is legal (S8), no stale data (S14): a life in which every reset is repeated leaves the same
    log. Each answer says whether nothing drains."""
    logs = []
    for calls in (1, 1 + times):
        engine = SmallEngine(device_blocks=16, host_blocks=8, references=references, workers=workers)
        reset = engine.scheduler.reset_cache

        def again(calls: int = calls, reset: object = reset, engine: SmallEngine = engine) -> bool:
            answers = {reset() for _ in range(calls)}  # type: ignore[operator]
            assert answers == {not engine.core.ledger.draining()}
            assert not engine.core.ledger.index
            return answers.pop()

        engine.scheduler.reset_cache = again  # type: ignore[method-assign]
        # The first reset finds a store under way.
        drive(engine, [26, 2, 2, 12, *acts, 12, *acts])
        assert of_kind(engine, ev.CacheReset)
        logs.append([*engine.log])
    assert logs[0] == logs[1]


@given(st.integers(1, 6), st.integers(0, 4), st.booleans(), st.booleans())
@settings(max_examples=examples(40))
def test_reset_lets_a_running_request_go_on_being_stored(
    before: int, drains: int, references: bool, asynchronous: bool
) -> None:
    """No doubled or lost store (S13), no stale data (S14): what it computed before and after the reset. The
    drain delays that, and loses nothing."""
    engine = SmallEngine(references=references, asynchronous=asynchronous, chunk_tokens=6)
    request = engine.arrive(SmallRequest("r", range(17), 12))
    for _ in range(before):
        engine.step()
    engine.reset()
    for _ in range(drains):
        engine.step()
    come_to_rest(engine)
    confirmed = max(request.num_prompt_tokens, request.num_tokens - 1)
    for key in keys_of(request)[: confirmed // HASH_TOKENS]:
        assert engine.core.lookup(key) is LookupResult.HIT
        assert engine.host[engine.core.ledger.index[key]][0][-1] == key[:-4]


@pytest.mark.parametrize("resets", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_reset_keeps_out_what_an_older_load_brought(resets: int, prefix_cache: bool) -> None:
    """No stale data (S14), B24: for the request that loaded it, and for the next one that hits it on the
    device. What they computed is stored."""
    engine = SmallEngine(prefix_cache=prefix_cache)
    finish_one(engine, "before", [*range(8)])
    engine.pool.forget()
    request = engine.arrive(SmallRequest("r", range(17), 9))
    engine.step()
    assert request.loading
    engine.carry_out_all()
    engine.hand_on()
    engine.step()
    for _ in range(resets):
        engine.scheduler.reset_cache()
    come_to_rest(engine)
    assert [engine.core.lookup(key) for key in keys_of(request)[:4]] == [LookupResult.MISS] * 2 + [
        LookupResult.HIT
    ] * 2
    assert {*skipped(engine, SkipReason.OLDER_EPOCH)} == {*keys_of(request)[:2]}
    again = finish_one(engine, "again", [*range(17)], 2, parameters=REMOTE)
    found = LookupResult.MISS if prefix_cache else LookupResult.HIT
    assert engine.core.lookup(keys_of(again)[0]) is found


def test_reset_keeps_out_what_an_older_load_brought_to_a_request_that_is_given_more() -> None:
    """No stale data (S14): when its load has ended, the engine names all its blocks again. The blocks that it
    had are not new, so their content is as old as before."""
    hand = Hand()
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21])
    hand.end(hand.step())
    assert hand.scheduler.reset_cache()
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22, 23]], 0)
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [22, 23]
    assert skipped(hand, SkipReason.OLDER_EPOCH) == keys_of(request)[:2]


class KeepsKeysOfHeldBlocks(SmallPool):
    """A pool whose reset forgets only the keys of free blocks."""

    def forget(self) -> None:
        held = {block: key for block, key in self.caches.items() if self.references[block]}
        super().forget()
        self.caches |= held


def test_reset_keeps_out_what_the_pool_still_says_that_it_caches(caplog: pytest.LogCaptureFixture) -> None:
    """No stale data (S14): a lazy store asks the pool for keys, and a wrong pool has keys from before the
    reset. A key is used again once a request has been given the block and has computed into it."""
    pool = KeepsKeysOfHeldBlocks(6)
    hand = Hand(pool=pool, core={"device_blocks": 6}, store=StoreMode.LAZY, lazy_target_blocks=6)
    old = SmallRequest("old", range(9))
    blocks = pool.take(2)
    hand.admit(old, blocks)
    hand.compute(old)
    keys = keys_of(old)[:2]
    for block, key in zip(blocks, keys):
        pool.cache(block, key)
    pool.forget()
    hand.scheduler.reset_cache()
    [warning] = caplog.messages
    assert "the device pool still has keys of 2 blocks, such as block 0" in warning
    hand.scheduler.request_finished(old, [blocks])
    pool.free_blocks(blocks)
    assert blocks_stored(hand.step()) == []

    new = SmallRequest("new", range(9))
    pool.queue.sort()
    taken = pool.take(1)
    hand.admit(new, taken)
    pool.cache(taken[0], keys[0])
    hand.scheduler.request_finished(new, [taken])
    pool.free_blocks(taken)
    assert blocks_stored(hand.step()) == taken == [0]


class RaisesOnce(KeepsKeysOfHeldBlocks):
    raises = False

    def key_of(self, block: int) -> bytes | None:
        if self.raises:
            self.raises = False
            raise RuntimeError("no key")
        return super().key_of(block)


def test_a_pool_that_raises_leaves_the_cache_as_it_was() -> None:
    """No stale data (S14): the content of the host ends only when it is known which keys of the pool are
    outdated. The engine may call again."""
    pool = RaisesOnce(6)
    hand = Hand(pool=pool, core={"device_blocks": 6}, store=StoreMode.LAZY, lazy_target_blocks=6)
    old = SmallRequest("old", range(9))
    blocks = pool.take(2)
    hand.admit(old, blocks)
    hand.compute(old)
    for block, key in zip(blocks, keys_of(old)):
        pool.cache(block, key)
    hand.scheduler.request_finished(old, [blocks])
    pool.free_blocks(blocks)
    assert blocks_stored(hand.step())
    pool.raises = True
    with pytest.raises(RuntimeError, match="no key"):
        hand.scheduler.reset_cache()
    assert not of_kind(hand, ev.CacheReset)
    hand.scheduler.reset_cache()
    assert len(of_kind(hand, ev.CacheReset)) == 1


class KnowsItsBlocks(KeepsKeysOfHeldBlocks):
    """A pool that raises an error if it is asked for a block that it does not have."""

    def key_of(self, block: int) -> bytes | None:
        _ = self.references[block]
        return super().key_of(block)


def test_reset_asks_for_the_blocks_of_the_pool_and_of_copies(caplog: pytest.LogCaptureFixture) -> None:
    """With a disk tier the core has more device blocks than the pool: the others stand for the disk. A wrong
    pool may also keep the old key of a block that no request but a copy holds (no stale data, S14)."""
    pool = KnowsItsBlocks(6)
    hand = Hand(pool=pool, core={"device_blocks": 9}, store=StoreMode.LAZY, lazy_target_blocks=6)
    spilled, key = keys_of(SmallRequest("old", range(9)))[:2]
    job = hand.core.prepare_store("r", [spilled], [5]).job
    assert job is not None
    hand.core.submit([job.transfer])
    hand.core.report(job.transfer, 0, True)
    hand.core.arrive("to the disk", "disk")
    hand.core.match("to the disk", [spilled])
    job = hand.core.prepare_load("to the disk", [8], target="disk")
    assert job is not None
    hand.core.submit([job.transfer])

    pool.cache(0, key)
    plan = hand.step()
    assert blocks_stored(plan) == [0]
    pool.forget()
    hand.scheduler.reset_cache()
    hand.core.finish("to the disk")
    hand.scheduler.reset_cache()
    assert "such as block 0" in caplog.text
    hand.end(plan)
    hand.core.report(job.transfer, 0, True)
    assert not hand.core.ledger.transfers
    assert blocks_stored(hand.step()) == []


def test_reset_fails_a_load_under_way_and_its_request_computes() -> None:
    """Failure is not success (S6), no stale data (S14): its bytes count for nothing. The engine hears once,
    when the copy has ended."""
    engine = SmallEngine(prefix_cache=False, workers=2)
    finish_one(engine, "before", [*range(8)])
    request = engine.arrive(SmallRequest("r", range(13)))
    engine.step()
    assert request.loading
    assert engine.reset() is False
    engine.step()
    loads = [load for results in engine.results for load in results.loads]
    assert loads == []
    come_to_rest(engine)
    loads = [load for results in engine.results for load in results.loads]
    assert loads == [LoadEnded("r", False, 0)]
    assert request.finished


@given(ACTS, st.booleans(), st.sampled_from([(FULL,), (FULL, SLIDING)]))
@settings(max_examples=examples(50))
def test_reset_is_said_to_be_done_when_it_is(
    acts: list[int], references: bool, groups: tuple[KVCacheGroup, ...]
) -> None:
    """Progress (S9): `drained` is true exactly when no abandoned copy is left. Until then nothing new is
    begun."""
    engine = SmallEngine(groups, device_blocks=30, host_blocks=9, references=references)

    update, build = engine.scheduler.update_connector_output, engine.scheduler.build_connector_meta

    def abandoned() -> bool:
        transfers = engine.core.ledger.transfers.values()
        return any(one.state is TransferState.ABANDONED for one in transfers)

    def updated(reports: Sequence[WorkerReport]) -> StepResults:
        results = update(reports)
        assert results.drained == (not abandoned())
        return results

    def built(output: StepOutput) -> TransferPlan:
        plan = build(output)
        assert not (abandoned() and (plan.loads or plan.stores))
        return plan

    engine.scheduler.update_connector_output = updated  # type: ignore[method-assign, assignment]
    engine.scheduler.build_connector_meta = built  # type: ignore[method-assign]
    drive(engine, [26, 2, 2, 12, *acts, 12, *acts])
    assert of_kind(engine, ev.CacheReset)


# Row 12.


@given(ACTS, st.sampled_from([2, 3]), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(50))
def test_ranks_reports_split_over_steps_out_of_order_and_doubled_change_nothing(
    acts: list[int], workers: int, references: bool, chance: random.Random
) -> None:
    """Publish after commit (S2), stale reports change nothing (S5), correct bytes (S15): reports arrive
    split, shuffled, late and doubled. A transfer ends once, with the report of its last rank."""
    engine = SmallEngine(device_blocks=20, host_blocks=9, workers=workers, references=references)
    update = engine.scheduler.update_connector_output
    late: list[WorkerReport] = []
    past: list[WorkerReport] = []
    heard: dict[int, set[int]] = {}

    def scrambled(reports: Sequence[WorkerReport]) -> StepResults:
        late.extend(reports)
        chance.shuffle(late)
        # Some stay behind for a later step, as long as there is one to come.
        count = len(late) if not chance.randrange(3) else chance.randrange(len(late) + 1)
        now, late[:] = late[:count], late[count:]
        said = [*now, *chance.sample(past, min(len(past), 2))]
        chance.shuffle(said)
        past.extend(now)
        for report in now:
            heard.setdefault(report.transfer, set()).add(report.worker)
        return update(said)

    engine.scheduler.update_connector_output = scrambled  # type: ignore[method-assign, assignment]

    def check(engine: SmallEngine) -> None:
        for transfer in engine.core.ledger.transfers:
            assert len(heard.get(transfer, ())) < workers
        ledger = engine.core.ledger
        for key, slot in ledger.index.items():
            if ledger.readable(slot):
                assert all(cells[-1] == key[:-4] for cells in engine.host[slot]), (
                    Property.PUBLISH_AFTER_COMMIT
                )

    drive(engine, acts, check=check)
    ended = [event.transfer for event in of_kind(engine, ev.WorkerReported)]
    assert all(ended.count(transfer) == workers for transfer in ended)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_ranks_fail_everywhere_if_one_fails(direction: Direction, failed: int) -> None:
    """Failure is not success (S6): the good shards of the others count for nothing. The failure is told when
    all have ended."""
    engine = SmallEngine(workers=3, prefix_cache=False)
    finish_one(engine, "before", [*range(8)])
    if direction is Direction.LOAD:
        request, key = engine.arrive(SmallRequest("r", range(13), 3)), 0
        engine.step()
    else:
        request, key = engine.arrive(SmallRequest("r", range(100, 108), 9)), 0
        engine.step()
        engine.step()
    (transfer,) = engine.copies
    for worker in range(3):
        assert transfer in engine.core.ledger.transfers
        engine.carry_out(transfer, worker, good=worker != failed)
        engine.hand_on()
    assert transfer not in engine.core.ledger.transfers
    assert engine.core.lookup(keys_of(request)[key]) is LookupResult.MISS
    loads = [load for results in engine.results for load in results.loads]
    assert loads == ([LoadEnded("r", False, 0)] if direction is Direction.LOAD else [])
    come_to_rest(engine)
    assert engine.core.lookup(keys_of(request)[key]) is LookupResult.HIT


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 3))
@settings(max_examples=examples(20))
def test_ranks_of_different_pools_agree_on_the_smallest(sizes: list[int], chunk: int) -> None:
    """Every place in a plan exists on every rank, and the smallest rank is used whole."""
    device = np.zeros((16 * chunk, 8), dtype=np.uint8)
    workers = [
        Worker(rank, SimulatedCopyEngine(device, np.zeros((size, 8), dtype=np.uint8), seed=0))
        for rank, size in enumerate(sizes)
    ]
    smallest = smallest_host_pool(workers)
    assert smallest == min(sizes)
    slots = smallest // chunk
    if not slots:
        with pytest.raises(ConfigError, match="host_blocks"):
            Hand(core={"host_blocks": slots})
        return
    hand = Hand(
        core={
            "host_blocks": slots,
            "device_blocks": 16 * chunk,
            "workers": len(sizes),
            "blocks_per_chunk": chunk,
        }
    )
    request = SmallRequest("r", range(16 * chunk * HASH_TOKENS))
    hand.admit(request, [*range(16 * chunk)])
    hand.compute(request)
    plan = hand.step(request)
    (job,) = plan.stores
    assert sorted(to_list(job.host_blocks)) == [*range(slots * chunk)]
    for worker in workers:
        worker.start(plan)
        worker.wait([job.transfer])
        reports = worker.poll()
        assert [report.good for report in reports] == [True]
        hand.scheduler.update_connector_output(reports)
    assert len(hand.core.ledger.index) == slots


def test_reset_of_an_idle_engine_is_in_its_log_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are state (S10): the log is on disk, for no step may come for a long time."""
    engine = SmallEngine()
    engine.arrive(SmallRequest("a", range(8)))
    engine.run()
    flushed: list[str] = []
    monkeypatch.setattr(engine.log, "flush", lambda: flushed.append(engine.log[-1].kind))
    assert engine.reset()
    assert flushed[-1:] == ["CacheReset"]
