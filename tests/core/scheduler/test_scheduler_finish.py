"""Finish, abort, preemption, circular waits and dead workers: properties over orders and times.

Rows 7, 8, 17 and 18 of the scheduler's behaviours; each test is named after its row. What one call does in
one state is in `test_scheduler_ending`; here are whole lives, mostly two that must come to the same.
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
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.offloader import LookupResult
from kvsm.core.scheduler import KVCacheGroup, LastStep, LoadEnded
from kvsm.events import Direction, SkipReason
from kvsm.ids import to_list
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState

WORKERS = st.sampled_from([1, 2])


def check_host(engine: SmallEngine) -> None:
    """Publish after commit (S2), correct bytes (S15): every block that can be read on the host holds the
    content of its key on every worker."""
    ledger = engine.core.ledger
    for key, slot in ledger.index.items():
        if ledger.readable(slot):
            for cells in engine.host[slot]:
                assert len(cells) == HASH_TOKENS
                assert cells[-1] == key[:-4], "S2/S15: a readable key has other bytes"


def loading(engine: SmallEngine, name: str = "r", tokens: int = 13) -> SmallRequest:
    """A request whose load of 8 tokens is in flight; the device has forgotten them."""
    finish_one(engine, "before", [*range(8)])
    engine.pool.forget()
    request = engine.arrive(SmallRequest(name, range(tokens), 3))
    engine.step()
    assert request.loading
    return request


def told(engine: SmallEngine, name: str) -> list[LoadEnded]:
    return [load for results in engine.results for load in results.loads if load.request == name]


def named(engine: SmallEngine) -> list[str]:
    return [name for results in engine.results for name in results.finished_sending if name != "before"]


# Row 7.


@pytest.mark.parametrize("given", [{}, {"aborted": False}, {"aborted": True}])
def test_finish_says_whether_it_was_an_abort(given: dict[str, bool]) -> None:
    """The log keeps what the engine said; by default a request is not aborted."""
    hand, request = Hand(), SmallRequest("r", range(5))
    hand.admit(request, [0, 1])
    hand.scheduler.request_finished(request, [[0, 1]], **given)
    (event,) = of_kind(hand, ev.RequestFinished)
    assert event.aborted is given.get("aborted", False)


def test_finish_frees_the_end_of_a_prefix_before_its_beginning() -> None:
    """A pool evicts what was freed first: the last block of a prefix whose store has ended."""
    pool, freed = SmallPool(64), list[int]()
    hand, request = Hand(pool=pool), SmallRequest("r", range(13))
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    plan = hand.step(request)
    pool.free_blocks = freed.extend
    hand.end(plan)
    assert freed == [2, 1, 0]


def test_finish_of_the_last_copy_brings_the_log_to_disk() -> None:
    """The log is on disk, for the engine may not step again for a long time."""
    hand, request, flushed = Hand(), SmallRequest("r", range(5)), list[int]()
    hand.admit(request, [0, 1])
    hand.compute(request)
    plan = hand.step(request)
    hand.log.flush = lambda: flushed.append(len(hand.log))
    hand.end(plan)
    assert flushed == [len(hand.log)]


@given(ACTS, st.booleans(), st.booleans(), WORKERS)
@settings(max_examples=examples(40))
def test_finish_twice_is_as_once(acts: list[int], references: bool, asynchronous: bool, workers: int) -> None:
    """Every call is legal (S8): a life in which every finish is said three times leaves the same log."""
    lives = []
    for times in (1, 3):
        engine = SmallEngine(
            device_blocks=16, host_blocks=8, references=references, asynchronous=asynchronous, workers=workers
        )
        finish = engine.finish

        def again(
            request: SmallRequest, *, aborted: bool = False, times: int = times, finish: Any = finish
        ) -> None:
            for time in range(times):
                finish(request, aborted=aborted != bool(time))

        engine.finish = again  # type: ignore[method-assign]
        drive(engine, acts)
        lives.append([*engine.log])
    assert lives[0] == lives[1]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 12), st.booleans(), st.sampled_from([3, 64]))
@settings(max_examples=examples(60))
def test_finish_stores_all_that_is_confirmed_and_no_more(
    prompt: int, outputs: int, steps: int, asynchronous: bool, chunk_tokens: int
) -> None:
    """Order of copies (S12), no doubled or lost store (S13): after an abort at any step, every full block of
    computed tokens is stored, and no other."""
    engine = SmallEngine(asynchronous=asynchronous, chunk_tokens=chunk_tokens)
    request = engine.arrive(SmallRequest("r", range(prompt), outputs))
    for _ in range(steps):
        engine.step()
    computed = request.num_computed_tokens - request.num_output_placeholders
    engine.finish(request, aborted=True)
    come_to_rest(engine)
    confirmed = min(computed, max(prompt, request.num_tokens - 1))
    assert stored_keys(engine) == keys_of(request)[: confirmed // HASH_TOKENS]
    check_host(engine)


@pytest.mark.parametrize("references", [False, True])
@pytest.mark.parametrize("good", [False, True])
def test_abort_leaves_a_load_wanted_and_reports_it_once(references: bool, good: bool) -> None:
    """No reuse in flight (S3), B05, B29: no rank's copy is cut short; its blocks stay unused until the last
    rank has reported."""
    engine = SmallEngine(references=references, workers=2)
    request = loading(engine)
    (transfer,) = engine.copies
    targets = to_list(engine.copies[transfer].job.device_blocks)
    engine.finish(request, aborted=True)
    engine.finish(request, aborted=True)
    engine.carry_out(transfer, 1, good=good)
    engine.hand_on()
    assert told(engine, "r") == []
    assert named(engine) == []
    assert not set(targets) & set(engine.pool.queue)
    assert engine.core.leased(targets)
    engine.carry_out(transfer, 0)
    engine.hand_on()
    assert told(engine, "r") == [LoadEnded("r", good, 8 if good else 0)]
    assert named(engine) == ([] if references else ["r"])
    assert set(targets) <= set(engine.pool.queue)
    come_to_rest(engine)
    assert len(told(engine, "r")) == 1


@pytest.mark.parametrize("references", [False, True])
def test_finish_before_the_same_steps_reports_is_as_after_them(references: bool) -> None:
    """Stale reports change nothing (S5), every call is legal (S8): the same keys are on the host, the same
    blocks are free, the same requests are named."""
    lives = []
    for early in (True, False):
        engine = SmallEngine(references=references, workers=2)
        request = engine.arrive(SmallRequest("r", range(11), 9))
        for _ in range(3):
            engine.step()
        assert engine.copies
        engine.carry_out_all()
        if early:
            engine.finish(request)
            engine.hand_on()
        else:
            engine.hand_on()
            engine.finish(request)
        come_to_rest(engine)
        lives.append(({*engine.core.ledger.index}, sorted(engine.pool.queue)))
    assert lives[0] == lives[1]
    assert lives[0][0] == {*keys_of(engine.requests["r"])[:3]}


@pytest.mark.parametrize("first", [0, 1])
def test_finish_names_its_blocks_when_the_last_copy_of_them_has_ended(first: int) -> None:
    """No reuse in flight (S3): two stores of one request end in either order. Another request's copy does not
    matter."""
    hand = Hand()
    other, request = SmallRequest("other", range(50, 54), 9), SmallRequest("r", range(8), 9)
    hand.admit(other, [30])
    hand.admit(request, [10, 11])
    hand.compute(other)
    hand.step(other)
    hand.compute(request, 4)
    stores = [*hand.step(request).stores]
    hand.compute(request)
    assert hand.scheduler.request_finished(request, [[10, 11]]) == (True, None)
    stores += hand.step().stores
    assert [to_list(job.device_blocks) for job in stores] == [[10], [11]]
    assert hand.report(stores[first].transfer).finished_sending == ()
    assert hand.scheduler.has_pending_work()
    assert hand.report(stores[1 - first].transfer).finished_sending == ("r",)
    assert hand.scheduler.update_connector_output([]).finished_sending == ()
    assert hand.core.ledger.transfers


def test_finish_of_a_name_used_again_forgets_no_block() -> None:
    """No reuse in flight (S3): the engine had not been told yet of the earlier request of this name."""
    hand = Hand()
    jobs = []
    for first, block in ((0, 10), (40, 11)):
        request = SmallRequest("r", range(first, first + 4), 9)
        hand.admit(request, [block])
        hand.compute(request)
        assert hand.scheduler.request_finished(request, [[block]]) == (True, None)
        jobs += hand.step().stores
    assert [to_list(job.device_blocks) for job in jobs] == [[10], [11]]
    assert hand.report(jobs[1].transfer).finished_sending == ()
    assert hand.report(jobs[0].transfer).finished_sending == ("r",)


@given(ACTS, st.booleans(), WORKERS, st.sampled_from([(FULL,), (FULL, SLIDING)]))
@settings(max_examples=examples(60))
def test_abort_at_any_time_harms_nobody_else(
    acts: list[int], references: bool, workers: int, groups: tuple[KVCacheGroup, ...]
) -> None:
    """Publish after commit (S2), no reuse in flight (S3), correct bytes (S15): others read the right bytes,
    the host holds the right bytes, every load is told once."""
    engine = SmallEngine(groups, device_blocks=26, host_blocks=9, references=references, workers=workers)
    drive(engine, acts, check=check_host)
    planned = [event.request for event in of_kind(engine, ev.LoadPlanned)]
    assert {name: len(told(engine, name)) for name in planned} == {
        name: planned.count(name) for name in planned
    }
    assert len(named(engine)) == len(set(named(engine)))


# Row 8.


def test_preemption_restarts_the_tables_and_cursors_of_every_group() -> None:
    """No doubled or lost store (S13): its new blocks are stored, and none of its old ones."""
    hand = Hand(FULL, SLIDING, core={"host_blocks": 4})
    request = SmallRequest("r", range(8), 9)
    hand.admit(request, [0, 1], [2, 3])
    hand.compute(request)
    hand.end(hand.step(request))
    assert hand.core.ledger.requests["r"].settled == (2, 2)
    hand.step(preempted={"r"})
    assert hand.core.ledger.requests["r"].settled == hand.core.ledger.requests["r"].offered == ()
    hand.store(SmallRequest("other", range(50, 58)), [30, 31], [32, 33])
    assert hand.admit(request, [20, 21], [22, 23]) == 0
    hand.compute(request)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [20, 21, 22, 23]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("references", [False, True])
def test_preemption_leaves_copies_what_they_touch_until_every_rank_has_ended(
    direction: Direction, references: bool
) -> None:
    """No reuse in flight (S3), order of copies (S12), B04: with references they are held; without, the step
    that gives them away waits for the copy."""
    engine = SmallEngine(references=references, workers=2, prefix_cache=False, device_blocks=8)
    if direction is Direction.LOAD:
        request = loading(engine)
    else:
        request = engine.arrive(SmallRequest("r", range(8), 9))
        engine.step()
        engine.step()
    (transfer,) = engine.copies
    held = to_list(engine.copies[transfer].job.device_blocks)
    engine.preempt(request)
    plan = engine.step(admit=False)
    if references:
        assert plan.flush == ()
        assert not set(held) & set(engine.pool.queue)
        engine.carry_out(transfer, 0)
        engine.hand_on()
        assert not set(held) & set(engine.pool.queue)
        engine.carry_out(transfer, 1)
        engine.hand_on()
    else:
        assert plan.flush == (transfer,)
    assert set(held) <= set(engine.pool.queue)
    come_to_rest(engine)
    assert request.finished
    check_host(engine)


def test_preemption_flushes_what_touches_its_blocks_and_nothing_else() -> None:
    """Another request's copy goes on beside the computation."""
    hand = Hand()
    first, second = SmallRequest("first", range(8), 9), SmallRequest("second", range(50, 58), 9)
    jobs = []
    for request, blocks in ((first, [0, 1]), (second, [2, 3])):
        hand.admit(request, blocks)
        hand.compute(request)
        jobs += hand.step(request).stores
    assert hand.step(preempted={"first"}).flush == (jobs[0].transfer,)


def test_preemption_in_the_step_that_admitted_flushes_the_load_that_leaves_with_it() -> None:
    """No reuse in flight (S3), order of copies (S12): the load is planned, another request gets its blocks in
    the same step, and nothing holds them."""
    hand = Hand()
    hand.store(SmallRequest("before", range(8)), [0, 1])
    runs = SmallRequest("runs", range(50, 58), 9)
    hand.admit(runs, [30, 31])
    hand.compute(runs)
    hand.admit(SmallRequest("r", range(13), 9), [10, 11, 12, 13])
    plan = hand.step(runs, preempted={"r"}, new_block_ids={"runs": [[10]]})
    (job,) = plan.loads
    assert to_list(job.device_blocks) == [10, 11]
    assert job.transfer in plan.flush


@given(st.permutations([0, 1]), st.booleans(), st.booleans(), st.sampled_from([0, 6]), st.integers(0, 3))
@settings(max_examples=examples(40))
def test_preemption_and_admission_again_while_its_own_load_runs(
    ranks: list[int], references: bool, good: bool, defer_ticks: int, between: int
) -> None:
    """Order of copies (S12), correct bytes (S15), B18: it waits for that load, or computes; never are two of
    its loads in flight."""
    engine = SmallEngine(
        references=references, workers=2, prefix_cache=False, core={"defer_ticks": defer_ticks}
    )
    request = loading(engine)
    (transfer,) = engine.copies
    engine.preempt(request)
    for rank in ranks:
        for _ in range(between):
            engine.step()
            loads = [copy for copy in engine.copies.values() if copy.job.direction is Direction.LOAD]
            assert len(loads) <= 1
        engine.carry_out(transfer, rank, good=good)
        engine.hand_on()
    come_to_rest(engine)
    assert request.finished
    planned = [event.request for event in of_kind(engine, ev.LoadPlanned)]
    assert len(told(engine, "r")) == planned.count("r")


@given(ACTS, st.booleans(), st.booleans(), WORKERS)
@settings(max_examples=examples(60))
def test_preemption_stores_only_from_blocks_that_the_request_has_now(
    acts: list[int], references: bool, asynchronous: bool, workers: int
) -> None:
    """Publish after commit (S2), no reuse in flight (S3), correct bytes (S15): with few blocks and small
    chunks, every stored block holds the content of its key."""
    engine = SmallEngine(
        device_blocks=9,
        host_blocks=10,
        references=references,
        asynchronous=asynchronous,
        workers=workers,
        chunk_tokens=5,
    )
    drive(engine, acts, check=check_host)


# Row 17.


def circle(references: bool, host_blocks: int, defer_ticks: int) -> tuple[SmallEngine, list[SmallRequest]]:
    """Two requests load, and two others need first what one of these holds. The device has room for one
    request at a time, and the loads read the whole host."""
    engine = SmallEngine(
        device_blocks=8,
        host_blocks=host_blocks,
        references=references,
        prefix_cache=False,
        core={"defer_ticks": defer_ticks},
    )
    left, right = [*range(12)], [*range(100, 112)]
    finish_one(engine, "a", left)
    finish_one(engine, "b", right)
    requests = [
        SmallRequest("c", [*left, *range(200, 212)], 4),
        SmallRequest("d", [*right, *range(300, 312)], 4),
        SmallRequest("e", [*left, *range(400, 404)], 4),
        SmallRequest("f", [*right, *range(500, 504)], 4),
    ]
    for request in requests[:2]:
        engine.arrive(request)
    engine.step()
    assert [copy.job.direction for copy in engine.copies.values()] == [Direction.LOAD] * 2
    for request in requests[2:]:
        engine.arrive(request)
    return engine, requests


@given(
    st.permutations([0, 1]),
    st.tuples(st.booleans(), st.booleans()),
    st.tuples(st.booleans(), st.booleans()),
    st.booleans(),
    st.sampled_from([6, 9]),
    st.sampled_from([0, 5, 64]),
    st.integers(0, 3),
)
@settings(max_examples=examples(60))
def test_deadlock_freedom_whatever_way_the_copies_of_a_circle_end(
    order: list[int],
    good: tuple[bool, bool],
    preempted: tuple[bool, bool],
    references: bool,
    host_blocks: int,
    defer_ticks: int,
    between: int,
) -> None:
    """Progress (S9), B22: all four finish, in either order, with good or bad loads, preempted or not."""
    engine, requests = circle(references, host_blocks, defer_ticks)
    loads = [*engine.copies]
    for request, taken in zip(requests, preempted):
        if taken:
            engine.preempt(request)
    for place in order:
        for _ in range(between):
            engine.step()
        engine.carry_out(loads[place], good=good[place])
        engine.hand_on()
    come_to_rest(engine)
    assert all(request.finished and not request.aborted for request in requests)


def test_deadlock_freedom_the_circle_is_there() -> None:
    """The scene of the test before: every request waits for a copy, the host is full of what they hold, and
    no request fits beside the others."""
    engine, requests = circle(True, 6, 64)
    loads = [*engine.copies]
    engine.step()
    ledger = engine.core.ledger
    assert [ledger.requests[name].awaits for name in "ef"] == loads
    assert not len(ledger.free)
    assert not len(ledger.policy)
    for request in requests[:2]:
        engine.preempt(request)
    engine.step()
    assert [ledger.requests[name].awaits for name in "cd"] == loads
    assert len(engine.pool.queue) < -(-requests[0].num_tokens // HASH_TOKENS)


def test_deadlock_freedom_of_requests_that_hold_what_the_others_store_needs() -> None:
    """Progress (S9): two waiting requests pin the whole host, and get no device blocks. The request that has
    the blocks goes on without storing, and they come after it."""
    engine = SmallEngine(device_blocks=9, host_blocks=6, prefix_cache=False, chunk_tokens=8)
    for name, start in (("a", 0), ("b", 100)):
        finish_one(engine, name, [*range(start, start + 12)])
    big = engine.arrive(SmallRequest("big", range(500, 524), 6))
    engine.step()
    assert len(engine.pool.queue) == 7
    waits = [engine.arrive(SmallRequest(f"w{n}", range(n, n + 30), 4)) for n in (0, 100)]
    for request, blocks in zip(waits, ([0, 4, 8], [100, 104, 108])):
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (len(blocks) * HASH_TOKENS, True)
    assert not len(engine.core.ledger.policy)
    for _ in range(4):
        engine.step(admit=False)
    assert set(skipped(engine, SkipReason.POOL_FULL)) >= {*keys_of(big)[:2]}
    come_to_rest(engine)
    assert all(request.finished for request in (big, *waits))


@pytest.mark.parametrize("direction", list(Direction))
def test_deadlock_freedom_of_a_wait_whose_copy_never_ends(direction: Direction) -> None:
    """Progress (S9), B22: a request that waits computes after its bound, however long the copy takes."""
    engine = SmallEngine(prefix_cache=False, core={"defer_ticks": 3, "transfer_ticks": 0})
    if direction is Direction.LOAD:
        loading(engine)
    else:
        engine.arrive(SmallRequest("r", range(8), 99))
        engine.step()
        engine.step()
    request = engine.arrive(SmallRequest("waits", range(11)))
    for step in range(6):
        engine.step()
        assert step > 2 or request in engine.waiting
    # What is being loaded for another can be read already; what is being stored cannot.
    assert request.loading if direction is Direction.LOAD else request.finished


# Row 18.


def lose_a_store(engine: SmallEngine) -> None:
    """A request stores two blocks, no worker reports, and it is aborted."""
    request = engine.arrive(SmallRequest("lost", range(700, 708), 99))
    for _ in range(4):
        engine.step()
        engine.copies.clear()
    assert len(of_kind(engine, ev.TransferLost)) == 1
    engine.finish(request, aborted=True)
    come_to_rest(engine)


def test_worker_death_is_found_at_its_bound_and_not_before() -> None:
    """Progress (S9): each transfer may be in flight for this number of ticks."""
    engine = SmallEngine(core={"transfer_ticks": 5})
    engine.arrive(SmallRequest("r", range(100, 108), 99))
    engine.step()
    engine.step()
    (first,) = engine.copies
    for _ in range(5):
        assert not of_kind(engine, ev.TransferLost)
        engine.step()
    assert [event.transfer for event in of_kind(engine, ev.TransferLost)] == [first]
    assert len(engine.core.ledger.transfers) == 1


def test_worker_death_retires_the_memory_and_keeps_its_references_for_ever() -> None:
    """No reuse in flight (S3): nobody gets a device block or a slot that a lost copy may still write."""
    engine = SmallEngine(device_blocks=14, host_blocks=6, prefix_cache=False, core={"transfer_ticks": 2})
    request = loading(engine)
    (transfer,) = engine.copies
    job = engine.copies[transfer].job
    targets = to_list(job.device_blocks)
    engine.copies.clear()
    for _ in range(3):
        engine.step(admit=False)
    assert told(engine, "r") == [LoadEnded("r", False, 0, lost=True)]
    ledger = engine.core.ledger
    assert [ledger.leases.state(block) for block in targets] == [LeaseState.RETIRED] * 2
    for number in range(6):
        finish_one(engine, f"n{number}", [*range(1000 * number, 1000 * number + 30)], 2)
        assert not set(targets) & set(engine.pool.queue)
        assert check_ledger(ledger) == []
    assert [engine.pool.references[block] for block in targets] == [1, 1]
    assert request.finished


@pytest.mark.parametrize("when", ["before the step", "in the step"])
def test_a_lost_load_is_awaited_before_its_blocks_are_written(when: str) -> None:
    """No reuse in flight (S3): an engine without references has freed the blocks of a preempted request when
    it hears that the load into them was lost, and gives them to the next request."""
    engine = SmallEngine(references=False, prefix_cache=False, device_blocks=4, core={"transfer_ticks": 1})
    finish_one(engine, "stores", [*range(9)])
    request = engine.arrive(SmallRequest("loads", [*range(10)]))
    engine.step()
    (load,) = engine.copies
    targets = to_list(engine.copies[load].job.device_blocks)
    if when == "before the step":
        engine.scheduler.lose(load)
    engine.preempt(request)
    engine.finish(request, aborted=True)
    other = engine.arrive(SmallRequest("writes", range(100, 109), 4))
    plan = engine.step()
    assert {*targets} & {*other.tables[0]}
    assert len(of_kind(engine, ev.TransferLost)) == 1
    assert plan.flush == (load,)
    engine.run()
    assert other.finished, "it has read its own bytes, not those of the late copy"


def test_worker_death_takes_the_host_slots_of_a_store_for_ever() -> None:
    """No reuse in flight (S3): a late copy may still write there; the rest of the pool stays in use."""
    engine = SmallEngine(host_blocks=4, prefix_cache=False, core={"transfer_ticks": 2})
    lose_a_store(engine)
    ledger = engine.core.ledger
    retired = [slot for slot in range(4) if ledger.blocks.state(slot) is BlockState.RETIRED]
    assert len(retired) == 2
    for number in range(4):
        finish_one(engine, f"n{number}", [*range(1000 * number, 1000 * number + 12)])
    assert not set(ledger.index.values()) & set(retired)
    assert len(ledger.index) == 2


def test_worker_death_that_took_the_whole_host_leaves_an_engine_without_offload() -> None:
    """Progress (S9): every slot is retired; requests come and go, and the reason why nothing is stored is
    recorded."""
    engine = SmallEngine(host_blocks=2, prefix_cache=False, core={"transfer_ticks": 2})
    lose_a_store(engine)
    request = finish_one(engine, "next", [*range(9)], 3)
    assert request.finished
    assert not engine.core.ledger.index
    assert set(skipped(engine, SkipReason.POOL_FULL)) >= {*keys_of(request)[:2]}
    come_to_rest(engine)


@pytest.mark.parametrize("references", [False, True])
@pytest.mark.parametrize("when", ["aborted", "preempted", "reset"])
def test_worker_death_is_told_once_whatever_became_of_the_request(when: str, references: bool) -> None:
    """Progress (S9), B25: this holds for requests aborted, preempted or reset meanwhile; late reports change
    nothing."""
    pool = SmallPool(64) if references else None
    hand = Hand(
        pool=pool,
        last_step=LastStep.KEEP_STEPPING,
        core={"workers": 2, "transfer_ticks": 3, "defer_ticks": 0},
    )
    hand.store(SmallRequest("before", range(8)), [0, 1])
    request, blocks = SmallRequest("r", range(13), 9), [10, 11, 12, 13]
    hand.admit(request, blocks)
    (job,) = hand.step().loads
    hand.report(job.transfer, 1)
    if when == "aborted":
        hand.scheduler.request_finished(request, [blocks], aborted=True)
    elif when == "preempted":
        hand.step(preempted={"r"})
    else:
        assert hand.scheduler.reset_cache() is False
    loads: list[LoadEnded] = []
    for _ in range(4):
        hand.step()
        loads += hand.scheduler.update_connector_output([]).loads
    assert loads == [LoadEnded("r", False, 0, lost=True)]
    before = len(hand.core.ledger.index)
    assert hand.report(job.transfer, 0).loads == ()
    assert len(hand.core.ledger.index) == before
    assert hand.scheduler.update_connector_output([]).drained
    if pool is not None:
        assert [pool.references[block] for block in (10, 11)] == [1, 1]
    hand.scheduler.request_finished(request, [], aborted=True)
    assert not hand.scheduler.has_pending_work()
    assert check_ledger(hand.core.ledger) == []


@pytest.mark.parametrize("lost", [False, True])
def test_worker_death_takes_what_the_device_had_too(lost: bool) -> None:
    """No reuse in flight (S3): after a lost load the request needs other blocks and starts over; after a
    failed one it keeps its device hit."""
    hand = Hand(core={"transfer_ticks": 2})
    hand.store(SmallRequest("before", range(8)), [0, 1])
    hand.admit(SmallRequest("r", range(13)), [0, 11, 12, 13], local=4)
    (job,) = hand.step().loads
    if lost:
        hand.step()
        hand.step()
    loads = hand.report(job.transfer, good=False).loads
    assert loads == (LoadEnded("r", False, 0 if lost else 4, lost=lost),)


def test_worker_death_wakes_who_waits_for_the_lost_store() -> None:
    """Progress (S9): the key will never be stored; the request computes and goes on."""
    hand = Hand(core={"transfer_ticks": 3, "defer_ticks": 64})
    first = SmallRequest("first", range(8), skip_reading=True)
    hand.admit(first, [0, 1])
    hand.compute(first)
    hand.step(first)
    waits = SmallRequest("waits", range(13))
    assert hand.admit(waits, [10, 11, 12, 13]) is None
    for _ in range(3):
        hand.step()
    assert hand.admit(waits, [10, 11, 12, 13]) == 0
    assert hand.core.lookup(keys_of(first)[0]) is LookupResult.MISS


@given(ACTS, st.sampled_from([(FULL,), (FULL, SLIDING)]), st.sampled_from([2, 5]), st.booleans())
@settings(max_examples=examples(50))
def test_worker_death_leaves_retired_blocks_with_their_holder(
    acts: list[int], groups: tuple[KVCacheGroup, ...], ticks: int, prefix_cache: bool
) -> None:
    """No reuse in flight (S3), one release per hold (S4): under any traffic, a retired device block is always
    held, and no table written after its loss names it."""
    engine = SmallEngine(
        groups, device_blocks=44, host_blocks=24, prefix_cache=prefix_cache, core={"transfer_ticks": ticks}
    )

    def check(engine: SmallEngine) -> None:
        leases = engine.core.ledger.leases
        waits = {load.request for results in engine.results for load in results.loads}
        for block in range(44 if any(leases.words) else 0):
            if leases.state(block) is LeaseState.RETIRED:
                assert engine.pool.references[block] > 0
                for request in engine.running.values():
                    if request.request_id in waits and not request.loading:
                        assert all(block not in table for table in request.tables)
        check_host(engine)

    drive(engine, acts, without=("carry out all",), check=check)
