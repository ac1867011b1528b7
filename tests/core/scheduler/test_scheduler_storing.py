"""What a step stores: eager and lazy, in chunks, under a policy, once, and without a hole.

Rows 1, 2, 3, 14, 15, 16 and 21 of the scheduler's behaviours; each test is named after its row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from sys import maxsize
from typing import Any
from unittest.mock import patch

import pytest
from core_life import begin_store, keys
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_traffic import (
    ACTS,
    FULL,
    MAMBA,
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
from kvsm.check.worlds.small_request import HASH_TOKENS, NULL, SmallRequest
from kvsm.core.ledger.canonical import NOBODY, Names, compared
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LookupResult, Offloader
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig, StepOutput, StoreMode
from kvsm.core.scheduler.free_queue import FreeQueueWalk, WalkState
from kvsm.core.scheduler.groups import KeyLayout, group_suffix
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig, SkipReason
from kvsm.ids import to_list

LAZY: dict[str, Any] = {"store": StoreMode.LAZY}


def blocks_stored(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def test_window_of_one_token_is_a_window() -> None:
    """A layer may look at the token itself and at no other."""
    group = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=1)
    assert SchedulerConfig(groups=(group,)).groups[0].first_needed_token(8) == 8
    with pytest.raises(ConfigError, match="group 0 has a window of 0 tokens"):
        SchedulerConfig(groups=(KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=0),))


# Row 1.


def test_eager_store_takes_blocks_of_the_current_step_on_a_later_one() -> None:
    """Order of copies (S12): the step that computes them has not run when it is decided."""
    engine = SmallEngine(chunk_tokens=8)
    request = engine.arrive(SmallRequest("r", range(20), 4))
    stored = [blocks_stored(engine.step()) for _ in range(4)]
    assert [len(blocks) for blocks in stored] == [0, 2, 2, 1]
    assert stored_keys(engine) == keys_of(request)[:5]


def test_eager_store_leaves_what_an_asynchronous_step_will_fill_in() -> None:
    """Order of copies (S12), B02: the engine counts placeholders as computed; they are not stored."""
    hand, request = Hand(), SmallRequest("r", range(6), 8)
    hand.admit(request, [0, 1, 2])
    for token in range(3):
        request.append(100 + token)
    request.num_computed_tokens, request.num_output_placeholders = 9, 2
    assert blocks_stored(hand.step(request)) == [0]
    request.num_output_placeholders = 1
    assert blocks_stored(hand.step(request)) == [1]


def test_eager_store_names_whose_the_blocks_are() -> None:
    """Each request is named once, with all its groups, in the order of the keys."""
    hand = Hand(FULL, SLIDING)
    first, second = SmallRequest("first", range(8), 9), SmallRequest("second", range(50, 54), 9)
    hand.admit(first, [0, 1], [2, 3])
    hand.admit(second, [4], [5])
    hand.compute(first)
    hand.compute(second)
    hand.step(first, second)
    (event,) = of_kind(hand, ev.StorePlanned)
    assert event.owners == (("first", 4), ("second", 2))
    assert [key[-1] for key in event.keys] == [0, 0, 1, 1, 0, 1]


def test_eager_store_passes_over_a_scheduled_request_that_is_over() -> None:
    """An asynchronous engine may name a request that has finished by then."""
    hand, request = Hand(), SmallRequest("r", range(5))
    hand.admit(request, [0, 1])
    hand.compute(request)
    assert blocks_stored(hand.step(SmallRequest("gone", range(5)), request)) == [0]


@pytest.mark.parametrize(("outputs", "stored"), [(2, 1), (3, 2)])
def test_eager_store_leaves_the_last_sampled_token(outputs: int, stored: int) -> None:
    """Correct bytes (S15), B17: generation ends on a block boundary, and the engine counts its last token as
    computed."""
    hand, request = Hand(), SmallRequest("r", range(6), outputs)
    hand.admit(request, [0, 1, 2])
    for token in range(outputs):
        request.append(100 + token)
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0, 1, 2]])
    assert blocks_stored(hand.step()) == list(range(stored))


def test_eager_store_takes_a_prompt_that_ends_on_a_boundary() -> None:
    """The prompt's last token was computed to sample the first output."""
    hand, request = Hand(), SmallRequest("r", range(8))
    hand.admit(request, [0, 1])
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0, 1]])
    assert blocks_stored(hand.step()) == [0, 1]


@given(ACTS, st.booleans(), st.sampled_from([3, 64]), st.sampled_from([0, 2]))
@settings(max_examples=examples(40))
def test_eager_store_reads_only_what_is_computed(
    acts: list[int], asynchronous: bool, chunk_tokens: int, drafts: int
) -> None:
    """Order of copies (S12), correct bytes (S15): when its copy may begin, every stored block holds the
    content of its key."""
    engine = SmallEngine(asynchronous=asynchronous, chunk_tokens=chunk_tokens, drafts=drafts)
    seen: list[TransferPlan] = []

    def check(engine: SmallEngine) -> None:
        if seen and seen[-1] is engine.plan:
            return
        seen.append(engine.plan)
        expected = {
            key: request.cells_of(place, HASH_TOKENS)
            for request in engine.requests.values()
            for place, key in enumerate(keys_of(request))
        }
        for job in engine.plan.stores:
            transfer = engine.core.ledger.transfers.get(job.transfer)
            for key, block in zip(transfer.keys if transfer else (), to_list(job.device_blocks)):
                assert engine.device[block][0] == expected[key]

    drive(engine, acts, check=check)


@given(st.lists(st.tuples(st.integers(3, 30), st.integers(1, 12)), min_size=1, max_size=5), st.booleans())
@settings(max_examples=examples(40))
def test_eager_store_takes_every_block_in_the_end(sizes: list[tuple[int, int]], asynchronous: bool) -> None:
    """No doubled or lost store (S13): if nothing fails and there is room, every confirmed block is stored."""
    engine = SmallEngine(device_blocks=64, host_blocks=64, asynchronous=asynchronous, chunk_tokens=7)
    for number, (prompt, outputs) in enumerate(sizes):
        engine.arrive(SmallRequest(f"r{number}", range(100 * number, 100 * number + prompt), outputs))
    come_to_rest(engine)
    for request in engine.requests.values():
        confirmed = max(request.num_prompt_tokens, request.num_tokens - 1)
        for key in keys_of(request)[: confirmed // HASH_TOKENS]:
            assert engine.core.lookup(key) is LookupResult.HIT
    assert len(stored_keys(engine)) == len(set(stored_keys(engine)))


# Row 2.


@pytest.mark.parametrize("end", ["completed", "failed", "lost"])
def test_in_flight_dedupe_is_by_device_block_and_for_the_life_of_the_transfer(end: str) -> None:
    """No doubled or lost store (S13), B01: this holds over steps and under any key; every end of the copy
    releases the block."""
    hand = Hand(core={"transfer_ticks": 5})
    first, second = SmallRequest("first", range(4)), SmallRequest("second", range(50, 60), 5)
    hand.admit(first, [7])
    hand.compute(first)
    hand.scheduler.request_finished(first, [[7]])
    (job,) = hand.step().stores
    hand.admit(second, [7, 8, 9])
    hand.compute(second)
    for _ in range(3):
        assert 7 not in blocks_stored(hand.step(second))
    if end == "lost":
        assert [blocks_stored(hand.step(second)) for _ in range(2)][-1] == [7]
    else:
        hand.report(job.transfer, good=end == "completed")
        assert blocks_stored(hand.step(second)) == [7]


def test_in_flight_dedupe_leaves_a_device_hit_of_another_request_alone() -> None:
    """No doubled or lost store (S13), B01: the next step's request hits the block in the device's prefix
    cache."""
    engine = SmallEngine()
    engine.arrive(SmallRequest("first", range(10), 8))
    engine.step()
    engine.step()
    engine.arrive(SmallRequest("second", range(10), 8))
    for _ in range(4):
        engine.step()
    assert len(stored_keys(engine)) == len(set(stored_keys(engine))) > 2
    come_to_rest(engine)


@pytest.mark.parametrize("good", [True, False])
def test_in_flight_dedupe_holds_the_cursor_of_another_block_with_the_same_key(good: bool) -> None:
    """No doubled or lost store (S13): the second store is deferred, and made if the first one fails."""
    hand = Hand(core={"defer_ticks": 0})
    first, second = SmallRequest("first", range(9), 5), SmallRequest("second", range(9), 5)
    hand.admit(first, [0, 1, 2])
    hand.admit(second, [3, 4, 5])
    hand.compute(first)
    (job,) = hand.step(first).stores
    hand.compute(second)
    assert not hand.step(second).stores
    entry = hand.core.ledger.requests["second"]
    assert (entry.settled, entry.offered) == ((0,), (2,))
    hand.report(job.transfer, good=good)
    assert blocks_stored(hand.step(second)) == ([] if good else [3, 4])
    assert hand.core.ledger.requests["second"].settled == (2,)


def test_in_flight_dedupe_retries_a_request_that_is_not_scheduled() -> None:
    """No doubled or lost store (S13): the first store fails while the engine has nothing to compute for the
    second request."""
    hand = Hand(core={"defer_ticks": 0})
    first, second = SmallRequest("first", range(9), 5), SmallRequest("second", range(9), 5)
    hand.admit(first, [0, 1, 2])
    hand.admit(second, [3, 4, 5])
    hand.compute(first)
    (job,) = hand.step(first).stores
    hand.compute(second)
    hand.step(second)
    hand.report(job.transfer, good=False)
    assert blocks_stored(hand.step()) == [3, 4]


@given(ACTS, st.booleans(), st.booleans())
@settings(max_examples=examples(40))
def test_in_flight_dedupe_under_any_traffic(acts: list[int], references: bool, prefix_cache: bool) -> None:
    """No doubled or lost store (S13): no two live stores read one device block, or write one key."""
    engine = SmallEngine(
        references=references, prefix_cache=prefix_cache, device_blocks=20, core={"defer_ticks": 2}
    )

    def check(engine: SmallEngine) -> None:
        stores = [
            one
            for one in engine.core.ledger.transfers.values()
            if one.keys and one.epoch == engine.core.ledger.epoch
        ]
        blocks = [block for one in stores for block in to_list(one.device_blocks)]
        keys = [key for one in stores for key in one.keys]
        assert len(blocks) == len(set(blocks))
        assert len(keys) == len(set(keys))

    drive(engine, acts, check=check)


# Row 3.


def lazy_engine(target: int, **options: Any) -> SmallEngine:
    return SmallEngine(lazy_target_blocks=target, **LAZY, **options)


def watch_target(engine: SmallEngine, target: int) -> None:
    """Check after every decided step that the head of the free queue is safe."""
    build, ledger, pool = engine.scheduler.build_connector_meta, engine.core.ledger, engine.pool

    def watched(output: StepOutput) -> TransferPlan:
        walked = pool.queue[: 2 * target]
        plan = build(output)
        unsafe = [
            block
            for block in walked[:target]
            if (key := pool.key_of(block)) is not None
            and key not in ledger.index
            and ledger.provenance.stale.get(block) != key
        ]
        if unsafe and not ledger.draining():
            kept = {ledger.index.get(pool.key_of(block) or b"") for block in walked}
            evictable = [slot for slot in range(ledger.config.host_blocks) if slot in ledger.policy]
            room = len(ledger.free) + len(set(evictable) - kept)
            walk = engine.scheduler.walk
            assert walk is not None
            full = not room or len(ledger.transfers) == ledger.config.max_live_transfers
            assert full or not walk.state.store_budget
        return plan

    engine.scheduler.build_connector_meta = watched  # type: ignore[method-assign]


@given(
    ACTS,
    st.sampled_from([2, 5, 9]),
    st.integers(0, 12),
    st.sampled_from([14, 20, 40]),
    st.sampled_from([2, 50]),
    st.booleans(),
    st.sampled_from([None, {"do_remote_decode": True}]),
)
@settings(max_examples=examples(150))
def test_lazy_store_honours_its_target_at_every_step(
    acts: list[int],
    target: int,
    more: int,
    device_blocks: int,
    live: int,
    asynchronous: bool,
    parameters: dict[str, Any] | None,
) -> None:
    """Progress (S9), B23: the first `lazy_target_blocks` of the free queue hold nothing, or what is on the
    host or on its way there. Two exceptions: no room is left that the next blocks in the queue do not need;
    and the store budget is spent, because the host is so small that blocks evict each other."""
    engine = lazy_engine(
        target,
        host_blocks=2 * target + more,
        device_blocks=device_blocks,
        asynchronous=asynchronous,
        core={"max_live_transfers": live},
    )
    watch_target(engine, target)
    drive(engine, acts, parameters=parameters)


def test_lazy_store_prefers_the_head_to_what_stands_far_behind() -> None:
    """A full host keeps what is near eviction on the device; what is far from it makes room."""
    engine = lazy_engine(
        2, host_blocks=4, device_blocks=14, asynchronous=True, core={"max_live_transfers": 2}
    )
    watch_target(engine, 2)
    drive(engine, [1625, 2, 496, 572, 2, 470, 1495, 4000, 0, 143])


def test_lazy_store_knows_what_it_has_evicted_itself() -> None:
    """No doubled or lost store (S13): the walk met block 2 while the host had it. Then it stored block 1, and
    the host lost block 2 for that. Block 2 is stored again before it is taken."""
    queue = Queue(3, target=1, host_blocks=2)
    queue.core.store((), [queue.key(2), queue.key(0)], [3, 4])
    (transfer,) = queue.core.ledger.transfers
    queue.core.submit([transfer])
    queue.core.report(transfer, 0, True)
    assert queue.store() == [1]
    assert queue.key(2) not in queue.core.ledger.index
    queue.end()
    assert queue.take(1) == []
    assert queue.store() == [2]


def test_lazy_store_waits_until_blocks_near_eviction() -> None:
    """As long as blocks without content stand before them, nothing is stored."""
    engine = lazy_engine(4, device_blocks=32)
    finish_one(engine, "first", [*range(40)])
    assert not stored_keys(engine)
    finish_one(engine, "second", [*range(100, 164)])
    assert stored_keys(engine)


def test_lazy_store_takes_nothing_at_the_end_of_a_request() -> None:
    engine = lazy_engine(1, device_blocks=64)
    engine.arrive(SmallRequest("r", range(40), 3))
    come_to_rest(engine)
    assert not stored_keys(engine)


class Queue:
    """A pool of blocks with content, their walk, and an engine that takes blocks from the head."""

    def __init__(
        self,
        blocks: int,
        target: int,
        host_blocks: int = 32,
        log: MemoryLog | None = None,
        pool: SmallPool | None = None,
    ) -> None:
        self.pool = pool or SmallPool(blocks)
        config = OffloadConfig(host_blocks=host_blocks, device_blocks=2 * blocks)
        self.core = Offloader(config, log, clock_ns=lambda: 0)
        self.walk = FreeQueueWalk(self.core, self.pool, target)
        self.live: tuple[int, list[int]] | None = None
        for block in range(blocks):
            self.pool.cache(block, self.key(block))

    def key(self, block: int) -> bytes:
        return b"block-%04d" % block + bytes(4)

    def store(self) -> list[int]:
        """One step: the blocks that the walk stores. Their copy stays in flight."""
        job = self.walk.store()
        if job is None:
            return []
        self.core.submit([job.transfer])
        blocks = to_list(job.device_blocks)
        self.pool.touch(blocks)
        self.live = job.transfer, blocks
        return blocks

    def end(self, *, good: bool = True) -> None:
        """End the copy of the last store, if there is one. Its blocks go to the tail."""
        if self.live is None:
            return
        (transfer, blocks), self.live = self.live, None
        self.core.report(transfer, 0, good)
        self.pool.free_blocks(blocks[::-1])

    def reset(self, *, forgets: bool = True) -> None:
        """The pool forgets its keys, if so, and the walk restarts. Then the same content is cached again."""
        cached = list(self.pool.caches.items())
        if forgets:
            self.pool.forget()
        self.walk.restart()
        for block, key in cached:
            self.pool.cache(block, key)

    def take(self, count: int) -> list[int]:
        """A request gets blocks. Returns those whose content is lost, because the host lacks it."""
        lost = [
            block
            for block in self.pool.queue[:count]
            if (key := self.pool.key_of(block)) is not None and self.core.lookup(key) is not LookupResult.HIT
        ]
        self.walk.taken(self.pool.take(count))
        return lost


def test_lazy_store_goes_on_where_its_blocks_went_to_the_tail() -> None:
    """Progress (S9), B23: the blocks stored last are at the tail now, and those behind them at the head."""
    queue = Queue(12, 2)
    assert queue.store() == [0, 1, 2, 3]
    queue.end()
    assert queue.pool.queue[-4:] == [3, 2, 1, 0]
    assert queue.store() == [4, 5, 6, 7]


def test_lazy_store_goes_on_where_its_blocks_were_taken() -> None:
    queue = Queue(12, 2)
    queue.store()
    queue.end()
    queue.pool.touch([4, 5, 0])
    queue.walk.taken([4, 5, 0])
    assert queue.store() == [6, 7, 8, 9]


def test_lazy_store_goes_on_where_a_block_was_moved() -> None:
    """A request hits a block in the middle of the queue, and returns it to the tail."""
    queue = Queue(12, 2)
    queue.pool.touch([1])
    queue.pool.free_blocks([1])
    queue.walk.taken([1])
    assert queue.store() == [0, 2, 3, 4]


def test_lazy_store_walks_again_only_when_blocks_have_left() -> None:
    """A walk lasts until its surplus of safe blocks has been taken."""
    queue = Queue(12, 2)
    for _ in range(3):
        queue.store()
        queue.end()
    walks = []
    queue.pool.free_queue = lambda: walks.append(1) or iter(queue.pool.queue)  # type: ignore[method-assign, func-returns-value]
    assert [queue.store() for _ in range(5)] == [[]] * 5
    queue.take(2)
    queue.store()
    assert walks == []
    queue.take(1)
    queue.store()
    assert len(walks) == 1


def test_lazy_store_walks_once_when_the_host_has_lost_a_key() -> None:
    """An idle step costs no walk, even if the loss was the last event before the walk."""
    queue = Queue(12, 2)
    for _ in range(3):
        queue.store()
        queue.end()
    queue.core.fail_store(begin_store(queue.core, "r", keys(1), 20))
    walks = []
    queue.pool.free_queue = lambda: walks.append(1) or iter(queue.pool.queue)  # type: ignore[method-assign, func-returns-value]
    assert [queue.store() for _ in range(3)] == [[]] * 3
    assert len(walks) == 1


def test_step_in_which_nothing_is_computed_yet_is_no_offer() -> None:
    """What the host loses for a request's first store is nothing of its own. So at its end it looks for
    nothing of it."""
    hand = Hand(core={"host_blocks": 4})
    hand.store(SmallRequest("old", range(50, 66)), [0, 1, 2, 3])
    request = SmallRequest("r", range(16))
    hand.admit(request, [20, 21, 22, 23])
    hand.step(request)
    assert not hand.core.ledger.requests["r"].offered
    hand.compute(request)
    hand.end(hand.step(request))
    tracked, ledger = hand.scheduler.state.tracked["r"], hand.core.ledger
    assert of_kind(hand, ev.BlocksEvicted)
    assert tracked.watched_from >= ledger.forgotten_at


class PoolOfMany(SmallPool):
    """It answers for many blocks at once."""

    asked = 0

    def keys_of(self, blocks: Sequence[int]) -> list[bytes | None]:
        self.asked += 1
        return [SmallPool.key_of(self, block) for block in blocks]

    def key_of(self, block: int) -> bytes | None:
        raise AssertionError(f"it was asked for the key of block {block} alone")


def test_lazy_store_asks_a_pool_for_many_keys_at_once() -> None:
    """If it can answer: `keys_of` is no method of DevicePool."""
    one, many = Queue(12, 3, 5), Queue(12, 3, 5, pool=PoolOfMany(12))
    for _ in range(4):
        assert one.store() == many.store()
        for queue in (one, many):
            queue.end()
            queue.walk.taken(queue.pool.take(2))
    assert isinstance(many.pool, PoolOfMany)
    assert many.pool.asked > 0


def test_lazy_store_asks_seldom_if_it_lacks_one_safe_block() -> None:
    """The last safe block may stand behind many that are not."""
    pool = PoolOfMany(250)
    queue = Queue(250, 50, 300, pool=pool)
    pool.forget()
    for block in range(99, 249):
        pool.cache(block, queue.key(block))
    assert len(queue.store()) == 100
    assert pool.asked <= 5


class CheckedWalk(FreeQueueWalk):
    """Compares each walk with one that remembers nothing, and with one that looks at one block at a time."""

    def _walk(self) -> tuple[list[bytes], list[int], list[int]]:
        found = super()._walk()
        known, self.state.known_safe = self.state.known_safe, set()
        assert found == super()._walk()
        with patch("kvsm.core.scheduler.free_queue.PIECE", 1):
            self.state.known_safe = set()
            assert found == super()._walk()
        self.state.known_safe = known
        return found


@given(
    acts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 11), st.integers(1, 6)), max_size=60),
    host_blocks=st.sampled_from([3, 8, 64]),
)
@settings(max_examples=examples(200))
@example(  # blocks are written, and then near eviction again
    acts=[*[(0, 0, 1)] * 3, (2, 1, 6), (3, 0, 1), (0, 0, 1), (2, 0, 6), (0, 0, 1)], host_blocks=64
)
def test_lazy_store_finds_what_a_walk_without_memory_finds(
    acts: list[tuple[int, int, int]], host_blocks: int
) -> None:
    """No lost store (S13): whatever blocks are taken, written, moved and given back, whatever copies fail and
    whatever the host evicts or forgets, a block that is remembered as safe is safe."""
    with patch("kvsm.core.scheduler.free_queue.PIECE", 2):
        queue = Queue(12, 3, host_blocks)
        queue.walk = CheckedWalk(queue.core, queue.pool, 3)
        held: list[int] = []
        for number, (act, place, count) in enumerate(acts):
            free = queue.pool.queue
            if act <= 1:
                queue.end(good=act == 0)
                queue.store()
            elif act == 2:
                taken = queue.pool.take(min(count, len(free)))
                queue.walk.taken(taken)
                for block in taken if place % 2 else ():
                    queue.pool.cache(block, queue.key(100 + 100 * number + block))
                held += taken
            elif act == 3:
                queue.pool.free_blocks(held)
                held.clear()
            elif act == 4 and free:
                # Somebody else holds a block, and nobody says so.
                moved = [free[place % len(free)]]
                queue.pool.touch(moved)
                queue.pool.free_blocks(moved)
            elif act == 5:
                queue.core.prepare_store("r", [queue.key(number + 50)], [20])
                for transfer in set(queue.core.ledger.transfers) - {queue.live and queue.live[0]}:
                    queue.core.cancel(transfer)
            elif act == 6:
                queue.core.reset()
                queue.reset(forgets=place % 2 == 0)


def test_lazy_store_stores_and_passes_no_more_of_a_piece_than_it_may() -> None:
    """The budget of stores ends within a piece of new blocks, and a walk within a piece of safe ones."""
    queue = Queue(200, 50, host_blocks=400)
    queue.walk.state.store_budget = 70
    assert queue.store() == list(range(70))
    queue = Queue(100, 20, host_blocks=200)
    for _ in range(4):
        queue.store()
        queue.end()
    queue.walk.state.known_safe.clear()
    assert queue.walk._walk() == ([], [], queue.pool.queue[:40])


def test_lazy_store_looks_at_no_key_that_it_knows() -> None:
    """A block that stays in the queue is looked at once, not in each walk."""
    queue = Queue(100, 20, host_blocks=200)
    for _ in range(4):
        queue.store()
        queue.end()
    queue.take(21)
    looked, key_of = list[int](), queue.pool.key_of
    queue.pool.key_of = lambda block: looked.append(block) or key_of(block)  # type: ignore[method-assign, func-returns-value]
    queue.walk.state.walk_due_in = 0
    assert queue.store() == []
    assert not looked


def test_lazy_store_is_compared_by_when_it_walks_next() -> None:
    """Two worlds whose next walk is due at the same time are one state, whatever happened before."""
    queue = Queue(12, 2)
    ledger = queue.core.ledger
    names = Names(ledger, {}, {}, {}, {})
    state = WalkState(store_budget=5, walk_due_in=3, walked_at=ledger.forgotten_at)
    assert compared(state, names) == [5, 3, None, ()]
    queue.core.fail_store(begin_store(queue.core, "r", keys(1), 20))
    assert compared(state, names) == [5, 0, None, ()]


def test_lazy_store_goes_on_when_there_is_room_again() -> None:
    """Progress (S9): the host was full of blocks that are copied."""
    queue = Queue(12, 4, host_blocks=3)
    assert queue.store() == [0, 1, 2]
    assert queue.store() == []
    queue.end(good=False)
    assert queue.store() == [3, 4, 5]


def test_lazy_store_goes_on_when_pins_have_made_room_and_no_transfer_ended() -> None:
    """Progress (S9): a match holds the whole host, and is released."""
    queue = Queue(12, 4, host_blocks=3)
    held_by_a_match(queue, 3)
    assert queue.store() == []
    queue.core.release("r")
    assert queue.store() == [0, 1, 2]


def held_by_a_match(queue: Queue, keys: int) -> None:
    """The host is full of this number of keys, and request r holds them all."""
    old = [b"old-%d" % number + bytes(4) for number in range(keys)]
    job = queue.core.prepare_store("r", old, [9, 10, 11][:keys]).job
    assert job is not None
    queue.core.submit([job.transfer])
    queue.core.report(job.transfer, 0, True)
    queue.core.match("r", old)


@pytest.mark.parametrize("target", [1, 2])
def test_lazy_store_goes_on_for_one_block_that_lacks_among_many_that_are_safe(target: int) -> None:
    """Progress (S9): enough blocks can be evicted, but not in the policy's order."""
    queue = Queue(12, target, host_blocks=3)
    for block in range(1, 12):
        queue.pool.cached.pop(queue.pool.caches.pop(block))
    held_by_a_match(queue, 3)
    assert queue.store() == []
    queue.core.release("r")
    assert queue.store() == [0]


def test_lazy_store_that_found_no_room_asks_again_only_when_there_may_be_some() -> None:
    """Progress (S9): an idle engine rests, and so does its log."""
    log = MemoryLog()
    queue = Queue(12, 4, host_blocks=3, log=log)
    held_by_a_match(queue, 3)
    assert queue.store() == []
    before = len(log)
    assert [queue.store() for _ in range(3)] == [[]] * 3
    assert len(log) == before


def test_lazy_store_keeps_even_one_block_safe_from_the_first_step_on() -> None:
    """This holds for the first step after a restart too."""
    queue = Queue(12, 1)
    assert queue.store() == [0, 1]
    queue.end()
    queue.reset()
    assert queue.store() == [2, 3]


def test_lazy_store_that_has_room_for_all_touches_nothing() -> None:
    """What is on the host keeps its place in the order of eviction, unless something is evicted."""
    log = MemoryLog()
    queue = Queue(12, 2, host_blocks=6, log=log)
    assert queue.store() == [0, 1, 2, 3]
    queue.end()
    queue.pool.queue[:] = [0, 1, 4, 5, 2, 3, *range(6, 12)]
    assert queue.store() == [4, 5]
    assert not [event for event in log if isinstance(event, ev.BlocksTouched)]


def test_lazy_store_stores_again_what_the_host_lost_meanwhile() -> None:
    """Every block comes by the head before it is taken. Here its copy was evicted after the walk."""
    queue = Queue(12, 4, host_blocks=8)
    assert queue.store() == [0, 1, 2, 3, 4, 5, 6, 7]
    queue.end()
    queue.pool.queue.sort()
    assert queue.store() == []
    others = [b"other-%d" % number + bytes(4) for number in range(2)]
    prepared = queue.core.prepare_store("r", others, [10, 11])
    assert prepared.job is not None
    lost = [int(key[6:10]) for key in prepared.evicted]
    queue.core.submit([prepared.job.transfer])
    queue.core.report(prepared.job.transfer, 0, True)
    assert queue.store() == sorted(lost)


def test_lazy_store_evicts_nothing_that_stands_at_the_head() -> None:
    """A block that the engine takes next is not evicted on the host for a later one."""
    queue = Queue(16, 4, host_blocks=4)
    assert queue.store() == [0, 1, 2, 3]
    queue.end()
    queue.pool.queue.sort()
    queue.walk.restart()
    assert queue.store() == []
    assert not queue.take(4)


def test_lazy_store_keeps_the_order_of_what_it_stored() -> None:
    """To store a block moves it to the tail: it outlives what was freed before its copy ended, and the
    blocks of one store come back from the last to the first, as a request's do."""
    engine = lazy_engine(4, device_blocks=12, host_blocks=32)
    finish_one(engine, "first", [*range(32)])
    finish_one(engine, "second", [*range(100, 104)])
    stored = [set(to_list(event.device_blocks)) for event in of_kind(engine, ev.StorePlanned)]
    assert stored
    for blocks in stored:
        places = [engine.pool.queue.index(block) for block in blocks]
        assert max(places) - min(places) == len(blocks) - 1
    last = [engine.pool.queue.index(next(iter(blocks))) for blocks in stored]
    assert all(before < after for before, after in pairwise(last))


def test_lazy_store_loses_nothing_as_long_as_half_of_the_queue_is_safe() -> None:
    """Progress (S9): a stored block comes by the head twice, and is taken the second time. So half of what
    the walk sees is safe, even if each step takes `target` blocks."""
    queue = Queue(64, 4, host_blocks=64)
    for block in range(0, 64, 2):
        queue.pool.cached.pop(queue.pool.caches.pop(block))
    for _ in range(16):
        queue.store()
        assert queue.take(4) == []
        queue.end()


@given(ACTS, st.sampled_from([1, 3]), st.sampled_from([2, 8]))
@settings(max_examples=examples(30))
def test_lazy_store_rests_on_a_small_host(acts: list[int], host_blocks: int, target: int) -> None:
    """Progress (S9): blocks that evict each other from the host are not stored without end. The budget is the
    blocks of the device, and one more for each block that is taken."""
    engine = lazy_engine(target, host_blocks=host_blocks, device_blocks=14)
    drive(engine, acts)
    for _ in range(60):
        engine.carry_out_all()
        engine.step()
    before = len(engine.log)
    for _ in range(5):
        engine.step()
    assert not of_kind_since(engine, before)


def of_kind_since(engine: SmallEngine, start: int) -> list[ev.OffloadingEvent]:
    return [event for event in engine.log[start:] if isinstance(event, ev.StorePlanned)]


def test_lazy_store_that_always_fails_rests() -> None:
    """Progress (S9): an idle engine does not retry without end."""
    queue = Queue(12, 4)
    tries = 0
    while queue.store():
        queue.end(good=False)
        tries += 1
        assert tries <= 24
    assert queue.store() == []
    queue.walk.taken([0, 1])
    assert len(queue.store()) == 2


def test_lazy_store_that_failed_is_made_again_when_its_blocks_near_eviction() -> None:
    """No doubled or lost store (S13): the copy's end puts its blocks at the tail of the queue."""
    queue = Queue(16, 4)
    assert queue.store() == [*range(8)]
    queue.end(good=False)
    assert queue.store() == [*range(8, 16)]
    queue.end()
    assert sorted(queue.store()) == [*range(8)]


def test_lazy_store_needs_a_pool_and_single_blocks() -> None:
    with pytest.raises(ConfigError, match="bind_gpu_block_pool"):
        Hand(**LAZY).step()
    with pytest.raises(ConfigError, match="blocks_per_chunk"):
        Hand(core={"blocks_per_chunk": 2}, **LAZY)
    with pytest.raises(ConfigError, match="store_threshold"):
        Hand(core={"store_threshold": 2}, **LAZY)


# Row 14.


def test_chunks_hold_several_blocks_and_only_whole_ones_are_stored() -> None:
    hand, request = Hand(core={"blocks_per_chunk": 3}), SmallRequest("r", range(33), 3)
    hand.admit(request, [*range(20, 29)])
    hand.compute(request, 28)
    (job,) = hand.step(request).stores
    assert to_list(job.device_blocks) == [*range(20, 26)]
    assert to_list(job.host_blocks) == [0, 1, 2, 3, 4, 5]
    assert stored_keys(hand) == keys_of(request, tokens=12)[:2]


@pytest.mark.parametrize("local", [0, 1, 2, 3, 4, 5])
def test_chunks_whose_first_block_the_device_has_are_loaded_in_part(local: int) -> None:
    """The device's hit ends anywhere in a chunk: only the blocks behind it are copied."""
    hand = Hand(core={"blocks_per_chunk": 3})
    hand.store(SmallRequest("first", range(24)), [*range(6)])
    second = SmallRequest("second", range(30))
    assert hand.admit(second, [*range(40, 48)], local=4 * local) == 24 - 4 * local
    (job,) = hand.step().loads
    assert to_list(job.device_blocks) == [*range(40 + local, 46)]
    assert to_list(job.host_blocks) == [*range(local, 6)]


@pytest.mark.parametrize(
    ("computed", "stored"),
    [(8, [10, 11]), (13, [10, 11]), (14, []), (16, [12, 13]), (21, [12, 13]), (22, []), (24, [14, 15])],
)
def test_chunks_that_have_left_their_window_are_passed_over(computed: int, stored: list[int]) -> None:
    """The next token needs 10 before it. A chunk is passed over if its first block has left the window."""
    sliding = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=11)
    hand, request = Hand(sliding, core={"blocks_per_chunk": 2}), SmallRequest("r", range(30), 3)
    hand.admit(request, [*range(10, 18)])
    hand.compute(request, computed)
    assert blocks_stored(hand.step(request)) == stored


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_what_a_pool_does_not_know_is_not_stored_from_a_window(has_prefix_cache: bool) -> None:
    """A pool without a prefix cache cannot say whether a block still holds the window's content (S15)."""
    sliding = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=6)
    pool, request = SmallPool(16), SmallRequest("r", range(9), 3)
    hand = Hand(KVCacheGroup(HASH_TOKENS), sliding, pool=pool)
    full, window = pool.take(3), pool.take(3)
    hand.admit(request, full, window)
    hand.compute(request)
    for place in range(2) if has_prefix_cache else ():
        pool.cache(window[place], request.block_hashes[place] + group_suffix(1))
    assert blocks_stored(hand.step(request)) == [*full[:2], *(window[:2] if has_prefix_cache else [])]


def test_chunks_with_a_block_that_is_none_are_passed_over() -> None:
    """The engine gives the request no block where its layers need none."""
    sliding = KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=40)
    hand, request = Hand(sliding, core={"blocks_per_chunk": 2}), SmallRequest("r", range(16), 3)
    hand.admit(request, [NULL, 11, 12, 13])
    hand.compute(request)
    assert blocks_stored(hand.step(request)) == [12, 13]


@pytest.mark.parametrize("local", [0, 4, 8])
def test_chunks_that_are_loaded_whole_name_no_parts(local: int) -> None:
    """A common load makes a short event."""
    hand = Hand(core={"blocks_per_chunk": 2})
    hand.store(SmallRequest("first", range(24)), [*range(6)])
    hand.admit(SmallRequest("second", range(30)), [*range(40, 48)], local=local)
    hand.step()
    (event,) = of_kind(hand, ev.LoadPlanned)
    assert to_list(event.parts) == ([1, 2, 3, 4, 5] if local == 4 else [])


def test_chunks_end_where_the_match_must_leave_a_token() -> None:
    """One token left (S18): a hit may end within a chunk."""
    hand = Hand(core={"blocks_per_chunk": 3})
    hand.store(SmallRequest("first", range(24)), [*range(6)])
    assert hand.admit(SmallRequest("second", range(24)), [*range(40, 46)]) == 20
    (job,) = hand.step().loads
    assert to_list(job.host_blocks) == [0, 1, 2, 3, 4]


@given(ACTS, st.sampled_from([2, 3]), st.booleans(), st.sampled_from([(FULL,), (FULL, SLIDING)]))
@settings(max_examples=examples(60))
def test_chunks_under_any_traffic(
    acts: list[int], chunk: int, references: bool, groups: tuple[KVCacheGroup, ...]
) -> None:
    """Correct bytes (S15): what is loaded in chunks, or in parts of them, is what the request reads."""
    engine = SmallEngine(
        groups, device_blocks=36, host_blocks=12, references=references, core={"blocks_per_chunk": chunk}
    )
    drive(engine, acts)


def test_chunks_are_for_attention() -> None:
    with pytest.raises(ConfigError, match="mamba"):
        Hand(FULL, MAMBA, core={"blocks_per_chunk": 2})


# Row 15.


def test_store_policy_threshold_stores_at_the_nth_offer() -> None:
    """Offers are counted by request: the steps of one request count once."""
    engine = SmallEngine(prefix_cache=False, core={"store_threshold": 3})
    for number in range(3):
        assert not stored_keys(engine)
        finish_one(engine, f"r{number}", [*range(10)], 4)
    assert stored_keys(engine) == keys_of(engine.requests["r0"])[:2]
    seldom = [one for one in of_kind(engine, ev.StoreSkipped) if one.reason == SkipReason.BELOW_THRESHOLD]
    counts = [("r0", 2), ("r0", 1), ("r1", 2), ("r1", 1), ("r2", 1)]
    assert [one.owners for one in seldom] == [(owner,) for owner in counts]


def test_store_policy_threshold_remembers_so_many_keys() -> None:
    engine = SmallEngine(host_blocks=2, prefix_cache=False, core={"store_threshold": 2})
    finish_one(engine, "first", [*range(8)])
    finish_one(engine, "second", [*range(100, 116)])
    assert len(engine.core.ledger.offers.times) == 4
    finish_one(engine, "third", [*range(8)])
    assert not stored_keys(engine)
    finish_one(engine, "fourth", [*range(8)])
    assert stored_keys(engine) == keys_of(engine.requests["first"])[:2]


def test_store_policy_threshold_does_not_hold_for_a_remote_decode() -> None:
    """Full offload (S16): the decoder needs the whole request."""
    engine = SmallEngine(core={"store_threshold": 3})
    finish_one(engine, "r", [*range(8)], parameters={"do_remote_decode": True})
    assert stored_keys(engine) == keys_of(engine.requests["r"])[:2]


def test_store_policy_prompt_only() -> None:
    engine = SmallEngine(prompt_only=True)
    request = finish_one(engine, "r", [*range(10)], 12)
    assert stored_keys(engine) == keys_of(request)[:2]


def test_store_policy_prompt_only_stores_each_part_of_a_session() -> None:
    """The prompt of a session grows when the part before is answered. The answers become part of it."""
    hand = Hand(prompt_only=True)
    session = SmallRequest("session", range(8), 5)
    hand.admit(session, [0, 1])
    hand.compute(session)
    assert blocks_stored(hand.step(session)) == [0, 1]
    for token in range(50, 55):
        session.append(token)
    hand.compute(session, 12)
    assert not hand.step(session).stores, "an answer is stored"
    # The engine drops the token sampled last, and adds the next part: now all of it is the prompt.
    for token in range(60, 63):
        session.append(token)
    session.num_prompt_tokens = session.num_tokens
    hand.scheduler.update_state_after_alloc(session, [[0, 1, 2, 3]], 0)
    hand.compute(session)
    assert blocks_stored(hand.step(session)) == [2, 3]


@pytest.mark.parametrize(("most", "stored"), [(0, 0), (7, 1), (8, 2), (1000, 5)])
def test_store_policy_max_tokens(most: int, stored: int) -> None:
    engine = SmallEngine()
    request = finish_one(engine, "r", [*range(10)], 12, parameters={"max_offload_tokens": most})
    assert stored_keys(engine) == keys_of(request)[:stored]


def test_store_policy_switch_of_a_request() -> None:
    engine = SmallEngine()
    finish_one(engine, "off", [*range(10)], 12, parameters={"offload": False})
    assert not stored_keys(engine)
    finish_one(engine, "on", [*range(10)], 12, parameters={"offload": True})
    assert stored_keys(engine)


@pytest.mark.parametrize(
    ("hashes", "blocks", "full"), [(3, 3, 3), (2, 3, 2), (3, 2, 2), (0, 3, 0), (3, 0, 0)]
)
def test_store_policy_takes_what_has_a_hash_and_a_block(hashes: int, blocks: int, full: int) -> None:
    """No stale data (S14): an engine may hash later than it computes, and may have freed the blocks."""
    config = SchedulerConfig(groups=(FULL,))
    request = SmallRequest("r", range(12))
    tracked = TrackedRequest(request, config, KeyLayout.of(config, 1))
    request.num_computed_tokens = 12
    request.block_hashes = request.block_hashes[:hashes]
    tracked.tables = [[*range(blocks)]]
    assert tracked.full_chunks(config, 1, finished=False) == (full,)


@pytest.mark.parametrize(("most", "next_offer"), [(12, 12), (9, 12), (8, maxsize), (7, maxsize)])
def test_store_policy_max_tokens_reached_means_never_asked_again(most: int, next_offer: int) -> None:
    """A long answer of a request that may store no more costs nothing in its steps."""
    config = SchedulerConfig(groups=(FULL,))
    request = SmallRequest("r", range(20), parameters={"max_offload_tokens": most})
    tracked = TrackedRequest(request, config, KeyLayout.of(config, 1))
    request.num_computed_tokens = 8
    tracked.full_chunks(config, 1, finished=False)
    assert tracked.next_offer == next_offer


def test_store_policy_switch_means_no_token_at_all() -> None:
    """Blocks may hold one token."""
    config = SchedulerConfig(groups=(KVCacheGroup(1),))
    off = SmallRequest("off", range(4), parameters={"offload": False})
    assert TrackedRequest(off, config, KeyLayout.of(config, 1)).max_store_tokens == 0


@pytest.mark.parametrize("value", ["many", -1, 2.5, True])
def test_store_policy_that_a_client_got_wrong_is_told_and_ignored(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SmallEngine()
    with caplog.at_level(logging.WARNING, logger="kvsm"):
        request = finish_one(engine, "r", [*range(9)], parameters={"max_offload_tokens": value})
    assert caplog.messages == [f"request r: max_offload_tokens is {value!r}, not a number of tokens; ignored"]
    assert stored_keys(engine) == keys_of(request)[:2]


def test_store_policy_pool_full_is_counted_once_and_retried_when_a_copy_ends() -> None:
    """No doubled or lost store (S13): the host is full of stores in flight."""
    engine = SmallEngine(host_blocks=2)
    engine.arrive(SmallRequest("first", range(9), 30))
    engine.step()
    engine.step()
    second = engine.arrive(SmallRequest("second", range(50, 59), 30))
    for _ in range(4):
        engine.step()
    assert skipped(engine, SkipReason.POOL_FULL)[:2] == keys_of(second)[:2]
    assert skipped(engine, SkipReason.POOL_FULL).count(keys_of(second)[0]) == 1
    engine.carry_out_all()
    engine.hand_on()
    engine.step()
    assert keys_of(second)[0] in stored_keys(engine)


def test_store_policy_pool_full_is_told_once_for_each_block_and_again_at_the_end() -> None:
    """Full offload (S16): for a request that waits, only new blocks are recorded as skipped, and all of them
    once more when it is over. Another request in the same offer is recorded by itself."""
    hand = Hand(core={"host_blocks": 2})
    first, other = SmallRequest("first", range(8), 9), SmallRequest("other", range(200, 208), 9)
    waiting = SmallRequest("waiting", range(50, 66), 9)
    for request, blocks in ((first, [0, 1, 2]), (waiting, [3, 4, 5, 6, 7]), (other, [8, 9, 10])):
        hand.admit(request, blocks)
    hand.compute(first)
    assert blocks_stored(hand.step(first)) == [0, 1]
    hand.compute(waiting, 9)
    hand.step(waiting)
    hand.compute(other)
    hand.compute(waiting, 13)
    hand.step(other, waiting)
    told = [*keys_of(waiting)[:2], *keys_of(other), keys_of(waiting)[2]]
    assert skipped(hand, SkipReason.POOL_FULL) == told
    hand.scheduler.request_finished(waiting, [[3, 4, 5, 6, 7]])
    assert skipped(hand, SkipReason.POOL_FULL) == told + keys_of(waiting)[:3]


def test_store_policy_counts_offers_only_where_a_threshold_asks_for_it() -> None:
    hand = Hand(FULL, SLIDING)
    hand.store(SmallRequest("r", range(8)), [0, 1], [2, 3])
    assert stored_keys(hand)
    assert not of_kind(hand, ev.OffersCounted)


@pytest.mark.parametrize(("most", "stored"), [(7, []), (8, [1]), (11, [1]), (12, [1, 2])])
def test_store_policy_max_tokens_holds_for_states_that_are_handed_over(most: int, stored: list[int]) -> None:
    hand = Hand(MAMBA)
    request = SmallRequest("r", range(16), 5, {"max_offload_tokens": most})
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    assert blocks_stored(hand.step(request, boundary_states={"r": [(0, 1, 8), (0, 2, 12)]})) == stored


def test_retry_stamp_counts_slots_that_nothing_holds() -> None:
    """Free slots and those that may be evicted count alike."""
    hand = Hand()
    ledger = hand.core.ledger
    assert RetryStamp.of(ledger) == (0, 16)
    hand.store(SmallRequest("r", range(12)), [0, 1, 2])
    assert RetryStamp.of(ledger) == (ledger.ended_at, 16)
    hand.scheduler.get_num_new_matched_tokens(SmallRequest("reads", range(9)), 0)
    assert RetryStamp.of(ledger) == (ledger.ended_at, 14)


def test_store_policy_pool_full_is_not_offered_again_until_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle step costs no offer, however much waits."""
    hand, request = Hand(core={"host_blocks": 1}), SmallRequest("r", range(9))
    hand.admit(request, [0, 1, 2])
    hand.compute(request)
    plan = hand.step(request)
    assert blocks_stored(plan) == [0]
    offers = []
    core = hand.scheduler.offloader
    store = core.store

    def counted(*arguments: Any, **named: Any) -> Any:
        offers.append(arguments)
        return store(*arguments, **named)

    monkeypatch.setattr(core, "store", counted)
    hand.step()
    hand.step()
    assert offers == []
    hand.end(plan)
    assert blocks_stored(hand.step()) == [1]
    assert len(offers) == 1


@pytest.mark.parametrize("tokens", [5, 9])
def test_store_policy_what_an_offer_named_makes_room_in_the_next_one(tokens: int) -> None:
    """No doubled or lost store (S13): an offer evicts nothing that it names itself. So a chunk waits although
    the host has a slot that another request of the same offer named. It does not wait until a copy ends.

    tokens: of the other request. With 9 it has a chunk that waits, too.
    """
    hand = Hand(core={"host_blocks": 1})
    hand.store(SmallRequest("old", range(4)), [0])
    other = SmallRequest("other", range(tokens), 9)
    waiting = SmallRequest("waiting", range(50, 55), 9)
    for request, blocks in ((other, [1, 2, 3]), (waiting, [4, 5])):
        hand.scheduler.get_num_new_matched_tokens(request, 0)
        hand.scheduler.update_state_after_alloc(request, [blocks], 0)
        hand.compute(request)
    assert not hand.step(other, waiting).stores
    assert blocks_stored(hand.step()) == [4 if tokens == 5 else 2]


def test_retry_stamp_is_compared_only_until_a_transfer_ends() -> None:
    """All later stamps differ from it then, whatever it says of slots."""
    hand = Hand()
    ledger = hand.core.ledger
    assert RetryStamp(ledger.ended_at, 3).seen(ledger) == 3
    hand.store(SmallRequest("r", range(12)), [0, 1, 2])
    assert RetryStamp(0, 3).seen(ledger) == NOBODY


def test_store_policy_pool_full_of_pins_is_retried_when_they_are_given_back() -> None:
    """No doubled or lost store (S13): a request that the engine cannot place holds the whole host, and is
    aborted. No transfer ends."""
    hand = Hand(core={"host_blocks": 2})
    hand.store(SmallRequest("old", range(8)), [0, 1])
    waiting, running = SmallRequest("waiting", range(9)), SmallRequest("running", range(50, 58), 9)
    hand.scheduler.get_num_new_matched_tokens(waiting, 0)
    hand.admit(running, [2, 3, 4])
    hand.compute(running)
    assert not hand.step(running).stores
    hand.scheduler.request_finished(waiting, [], aborted=True)
    assert blocks_stored(hand.step(running)) == [2, 3]


def test_store_policy_too_many_transfers_is_counted_and_retried() -> None:
    hand = Hand(core={"max_live_transfers": 1})
    first, second = SmallRequest("first", range(9), 5), SmallRequest("second", range(50, 59), 5)
    hand.admit(first, [0, 1, 2])
    hand.admit(second, [3, 4, 5])
    hand.compute(first)
    plan = hand.step(first)
    hand.compute(second)
    assert not hand.step(second).stores
    assert [event.reason for event in of_kind(hand, ev.StoreSkipped)] == [SkipReason.TOO_MANY_TRANSFERS]
    hand.end(plan)
    assert blocks_stored(hand.step(second)) == [3, 4]


# Row 16.


@pytest.mark.parametrize("remote", [False, True])
def test_evicted_under_a_request_is_stored_again_when_offered(remote: bool) -> None:
    """No doubled or lost store (S13): the host has lost a block that the running request had stored."""
    hand = Hand(core={"host_blocks": 3})
    long = SmallRequest("long", range(9), 9, {"do_remote_decode": True} if remote else None)
    hand.admit(long, [0, 1, 2, 3])
    hand.compute(long)
    hand.end(hand.step(long))
    hand.store(SmallRequest("other", range(50, 62)), [10, 11, 12])
    assert hand.core.lookup(keys_of(long)[0]) is LookupResult.MISS
    hand.scheduler.request_finished(long, [[0, 1, 2, 3]])
    assert blocks_stored(hand.step()) == [0, 1]


def test_evicted_under_a_request_is_stored_when_another_request_offers_it() -> None:
    hand = Hand(core={"host_blocks": 3})
    long = SmallRequest("long", range(9), 9)
    hand.admit(long, [0, 1, 2, 3])
    hand.compute(long)
    hand.end(hand.step(long))
    hand.store(SmallRequest("other", range(50, 62)), [10, 11, 12])
    same = SmallRequest("same", range(9), 9)
    hand.admit(same, [0, 1, 20], local=8)
    hand.compute(same)
    assert blocks_stored(hand.step(same)) == [0, 1]


def test_evicted_just_before_a_request_gets_its_blocks_is_none_of_its_keys() -> None:
    """What the host forgot before is not what this request has stored since."""
    hand, request = Hand(), SmallRequest("r", range(9))
    hand.scheduler.get_num_new_matched_tokens(request, 0)
    hand.core.fail_store(begin_store(hand.core, "other", keys(1), 20))
    hand.admit(request, [0, 1, 2])
    assert hand.core.ledger.forgotten_at == hand.core.ledger.seq - 1  # RequestAdmitted follows
    hand.compute(request)
    hand.end(hand.step(request))
    hand.scheduler.request_finished(request, [[0, 1, 2]])
    assert of_kind(hand, ev.BlocksTouched) == []


def test_evicted_under_a_request_that_has_lost_nothing_offers_nothing_again() -> None:
    """The end of a request makes no event if the host has all its blocks."""
    hand = Hand()
    request = SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    hand.end(hand.step(request))
    before = len(hand.log)
    hand.scheduler.request_finished(request, [[0, 1, 2, 3]])
    assert [event.kind for event in hand.log[before:]] == ["RequestFinished"]


def loaded(hand: Hand, device: int) -> SmallRequest:
    """A request of 25 tokens. `device` of them are on the device, those up to 16 were loaded, and the others
    were computed."""
    hand.store(SmallRequest("old", range(16)), [10, 11, 12, 13])
    request = SmallRequest("r", range(25), 9)
    assert hand.admit(request, [*range(7)], local=device) == 16 - device
    hand.end(hand.step())
    hand.compute(request)
    return request


@pytest.mark.parametrize("device", [0, 8])
def test_eager_store_does_not_offer_what_the_load_has_brought(device: int) -> None:
    """The host had these blocks just now. What the device had is offered, so that the host keeps it."""
    hand = Hand()
    request = loaded(hand, device)
    assert blocks_stored(hand.step(request)) == [4, 5]
    touched = [len(to_list(event.slots)) for event in of_kind(hand, ev.BlocksTouched)]
    assert touched == ([device // HASH_TOKENS] if device else [])


def test_eager_store_offers_at_the_end_what_a_load_has_brought_and_the_host_has_lost() -> None:
    """No lost store (S13): the request still has these blocks on the device."""
    hand = Hand(core={"host_blocks": 8})
    request = loaded(hand, 0)
    hand.end(hand.step(request))
    hand.store(SmallRequest("other", range(100, 120)), [20, 21, 22, 23, 24])
    lost = [key for key in keys_of(request) if hand.core.lookup(key) is LookupResult.MISS]
    assert lost
    hand.scheduler.request_finished(request, [[*range(7)]])
    assert stored_keys(hand)[-len(lost) :] == lost


def test_evicted_for_the_first_offer_may_be_what_a_load_has_brought() -> None:
    """No lost store (S13): the offer made room with a loaded block, which it did not name. It is missed."""
    hand = Hand(core={"host_blocks": 5})
    request = loaded(hand, 0)
    hand.end(hand.step(request))
    assert [key for key in keys_of(request)[:4] if hand.core.lookup(key) is LookupResult.MISS]
    before = len(hand.log)
    hand.scheduler.request_finished(request, [[*range(7)]])
    assert "BlocksTouched" in [event.kind for event in hand.log[before:]]


def test_evicted_for_the_first_offer_of_a_request_is_none_of_its_keys() -> None:
    """In a full pool each first offer evicts. The end of the request looks no key up because of that."""
    hand = Hand(core={"host_blocks": 3})
    hand.store(SmallRequest("old", range(50, 58)), [10, 11])
    request = SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    hand.step(request)
    watched_from = hand.scheduler.state.tracked["r"].watched_from
    assert of_kind(hand, ev.BlocksEvicted)
    assert hand.core.ledger.forgotten_at < watched_from


def test_evicted_under_a_request_but_of_another_offers_nothing_again() -> None:
    """The end of a request makes no event if the host has all its blocks, whatever else it has lost."""
    hand = Hand(core={"host_blocks": 3})
    hand.store(SmallRequest("old", range(50, 58)), [10, 11])
    request = SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2, 3])
    hand.compute(request)
    hand.end(hand.step(request))
    assert of_kind(hand, ev.BlocksEvicted)
    before = len(hand.log)
    hand.scheduler.request_finished(request, [[0, 1, 2, 3]])
    assert [event.kind for event in hand.log[before:]] == ["RequestFinished"]


@given(ACTS, st.booleans(), st.booleans(), st.sampled_from(StoreMode))
@settings(max_examples=examples(40))
def test_a_step_that_decides_nothing_is_as_if_it_had_looked_at_everything(
    acts: list[int], references: bool, asynchronous: bool, store: StoreMode
) -> None:
    """Two lives, of which one takes the long way in every step, leave the same log."""
    lives = []
    for short in (True, False):
        engine = SmallEngine(
            host_blocks=3,
            references=references or store is StoreMode.LAZY,
            asynchronous=asynchronous,
            store=store,
        )
        if not short:
            engine.scheduler._decides_nothing = lambda _: False  # type: ignore[method-assign]
        drive(engine, acts)
        lives.append([*engine.log])
    assert lives[0] == lives[1]


# Row 21.


def test_speculative_decoding_never_confirms_a_draft() -> None:
    """Correct bytes (S15): the engine counts drafts as computed until they are verified; they are
    placeholders."""
    hand, request = Hand(), SmallRequest("r", range(6), 9)
    hand.admit(request, [0, 1, 2])
    request.append(100)
    request.num_computed_tokens, request.num_output_placeholders = 6 + 3, 3
    assert blocks_stored(hand.step(request)) == [0]
    # The drafts were rejected: the count falls back to what is right.
    request.num_computed_tokens, request.num_output_placeholders = 7, 0
    assert blocks_stored(hand.step(request)) == []
    for token in range(2):
        request.append(200 + token)
    request.num_computed_tokens = 8
    assert blocks_stored(hand.step(request)) == [1]


@given(ACTS, st.sampled_from([1, 3, 6]), st.booleans(), st.booleans())
@settings(max_examples=examples(40))
def test_speculative_decoding_stores_no_rejected_draft(
    acts: list[int], drafts: int, drafter: bool, asynchronous: bool
) -> None:
    """Correct bytes (S15): requests read, and the host holds, no token of a rejected draft."""
    groups = (KVCacheGroup(HASH_TOKENS, drafter=drafter),)
    engine = SmallEngine(groups, drafts=drafts, asynchronous=asynchronous)

    def check(engine: SmallEngine) -> None:
        for key, slot in engine.core.ledger.index.items():
            if engine.core.ledger.readable(slot):
                assert engine.host[slot][0][-1] == key[:-4]

    drive(engine, acts, check=check)


def test_speculative_decoding_leaves_the_drafters_last_block_out_and_no_hole() -> None:
    """The last block of a drafter is stored when the next one is full, and at the end of the request."""
    hand = Hand(KVCacheGroup(HASH_TOKENS, drafter=True))
    request = SmallRequest("r", range(8), 30)
    hand.admit(request, [0, 1, 2, 3, 4])
    hand.compute(request)
    assert blocks_stored(hand.step(request)) == [0, 1]
    stored = []
    for token in range(9):
        request.append(100 + token)
        hand.compute(request, request.num_tokens - 1)
        stored.append(blocks_stored(hand.step(request)))
        settled = hand.core.ledger.requests["r"].settled
        assert settled == (max(2, request.num_computed_tokens // HASH_TOKENS - 1),)
    assert [blocks for blocks in stored if blocks] == [[2]]
    hand.scheduler.request_finished(request, [[0, 1, 2, 3, 4]])
    assert blocks_stored(hand.step()) == [3]


def test_speculative_decoding_leaves_other_groups_alone() -> None:
    """Only the drafter's group gives up its last block."""
    hand = Hand(FULL, KVCacheGroup(HASH_TOKENS, drafter=True))
    request = SmallRequest("r", range(6), 30)
    hand.admit(request, [0, 1, 2], [10, 11, 12])
    for token in range(3):
        request.append(100 + token)
    hand.compute(request, 8)
    assert blocks_stored(hand.step(request)) == [0, 1, 10]
