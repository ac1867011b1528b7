"""The parts of the serving engine on their own: the block pool, the block tables, content, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction
from kvsm.serving import ServingBlockPool, ServingRequest
from kvsm.serving import in_flight as in_flight_module
from kvsm.serving.block_tables import BlockTables, peak_blocks
from kvsm.serving.content import DeviceContent, Mismatch
from kvsm.serving.in_flight import TransfersInFlight
from kvsm.serving.ranks import Rank, make_rank
from kvsm.serving.run_options import RunOptions, parse_groups
from kvsm.serving.traces import TraceRequest, prompt_hashes
from kvsm.states import LeaseTrigger
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.words import StateWords


def block_keys(ids: Sequence[int], group: int = 0) -> list[bytes]:
    request = TraceRequest(0, max(1, len(ids)), 1, tuple(ids))
    return [one + group_suffix(group) for one in prompt_hashes(request, 1, 1)]


# The block pool.


def pool_of(size: int) -> tuple[ServingBlockPool, StateWords]:
    leases = StateWords(LEASE_WORDS, size)
    return ServingBlockPool(leases), leases


def test_a_block_under_a_copy_is_not_handed_out() -> None:
    """S3: if the ledger has a copy that touches a block, the pool refuses it, even without references."""
    pool, leases = pool_of(2)
    leases.words[0] = LEASE_WORDS.step(leases.words[0], LeaseTrigger.BEGIN_READ, 0, 1)
    with pytest.raises(
        PropertyBroken,
        match=r"no reuse in flight \(S3\): device block 0 is free, but a copy holds it: READING",
    ):
        pool.get_new_blocks(1)


def test_a_block_is_not_given_back_twice() -> None:
    """S4: one release too many is an error, not a negative count."""
    pool, _ = pool_of(2)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    with pytest.raises(PropertyBroken, match=r"one release per hold \(S4\)"):
        pool.free_blocks(blocks[:1])


def test_a_free_block_serves_hits_until_it_is_taken() -> None:
    """The block that was freed first is taken first, and only then is its content forgotten."""
    pool, _ = pool_of(3)
    keys = block_keys(range(3))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, keys)
    pool.free_blocks(blocks[::-1])
    assert list(pool.free_queue()) == blocks[::-1]
    assert list(map(pool.cached_block, keys)) == blocks
    assert pool.get_new_blocks(1) == [blocks[2]]
    assert list(map(pool.cached_block, keys)) == [*blocks[:2], None]
    pool.touch(blocks[:1])
    assert pool.get_new_blocks(1) == [blocks[1]]
    assert list(map(pool.cached_block, keys)) == [blocks[0], None, None]
    assert [pool.key_of(blocks[0]), pool.key_of(blocks[1])] == [keys[0], None]
    assert pool.num_free_blocks == 0


def test_of_two_blocks_with_one_key_the_first_serves() -> None:
    """A key that is computed twice stays with the first block, also when the second one goes."""
    pool, _ = pool_of(2)
    first, second = pool.get_new_blocks(2)
    [key] = block_keys([1])
    pool.cache_full_blocks([first], [key])
    pool.cache_full_blocks([second], [key])
    pool.free_blocks([second])
    assert pool.get_new_blocks(1) == [second]
    assert pool.cached_block(key) == first
    assert pool.key_of(second) is None


def test_a_retired_block_is_never_handed_out() -> None:
    """S3: a lost copy may write the block at any later time, so the block is no longer counted as held."""
    pool, leases = pool_of(2)
    [lost] = pool.get_new_blocks(1)
    for trigger in (LeaseTrigger.BEGIN_WRITE, LeaseTrigger.LOSE):
        leases.words[lost] = LEASE_WORDS.step(leases.words[lost], trigger, 0, 1)
    assert pool.held_blocks() == []
    assert pool.get_new_blocks(1) == [1 - lost]
    assert pool.held_blocks() == [1 - lost]
    assert pool.num_free_blocks == 0
    pool.free_blocks([lost])
    with pytest.raises(
        PropertyBroken,
        match=r"no reuse in flight \(S3\): device block \d is free, but a copy holds it: RETIRED",
    ):
        pool.get_new_blocks(1)


def test_a_reset_pool_serves_nothing() -> None:
    """A held block keeps its content for its holders, and no other request finds it. Another block can cache
    its key."""
    pool, _ = pool_of(3)
    keys = block_keys(range(2))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, keys)
    assert not pool.reset_prefix_cache()
    assert [pool.cached_block(keys[0]), pool.key_of(blocks[0])] == [None, None]
    assert not any(map(pool.is_free, blocks))
    [other] = pool.get_new_blocks(1)
    pool.cache_full_blocks([other], keys[:1])
    assert pool.cached_block(keys[0]) == other
    pool.free_blocks([*blocks, other])
    assert pool.reset_prefix_cache()
    assert pool.cached_block(keys[0]) is None


# Block tables.

TABLES = (
    (KVCacheGroup(4), [0, 1, 2, 3, 4, 5]),
    (KVCacheGroup(4, GroupKind.SLIDING_WINDOW, 6), [4, 5]),
    (KVCacheGroup(4, GroupKind.SLIDING_WINDOW, 2), [5]),
    (KVCacheGroup(4, GroupKind.CHUNKED_LOCAL, 16), [4, 5]),
    (KVCacheGroup(4, GroupKind.CHUNKED_LOCAL, 10), [5]),
    (KVCacheGroup(4, GroupKind.MAMBA), [5]),
)
"""A group, and the places that a request of 21 computed tokens keeps."""


@pytest.mark.parametrize(("group", "kept"), TABLES)
def test_what_no_token_looks_at_is_given_back(group: KVCacheGroup, kept: list[int]) -> None:
    """A block is freed when all its tokens are before the window; its entry becomes the null block."""
    pool, _ = pool_of(16)
    config = SchedulerConfig(groups=(group,))
    cache = BlockTables(pool, config, 64)
    request = ServingRequest("r", TraceRequest(0, 30, 1, tuple(range(8))), config, 4)
    assert cache.place(request, 0, 0, 21)
    request.num_computed_tokens = 21
    cache.cache_blocks(request)
    cache.remove_skipped_blocks(request)
    cache.remove_skipped_blocks(request)
    assert [place for place, block in enumerate(request.tables[0]) if block != config.null_block] == kept
    assert pool.num_free_blocks == 16 - len(kept)
    assert len(cache.needed_blocks(request)[0]) == len([place for place in kept if place < 5])
    assert cache.longest_hit(request) == 20, "what was given back is found until it is taken"
    cache.free(request)
    assert pool.num_free_blocks == 16


_GROUPS = st.lists(
    st.builds(
        KVCacheGroup,
        st.sampled_from([4, 8]),
        st.sampled_from(list(GroupKind)),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(100))
@given(groups=_GROUPS, prompt=st.integers(1, 120), budget=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_request_never_holds_more_than_its_peak(
    groups: list[KVCacheGroup], prompt: int, budget: int, seed: int
) -> None:
    """A pool of the peak's size serves a request in chunks of any length, while the states of the last step
    are still held."""
    config = SchedulerConfig(groups=tuple(groups), hash_tokens=4)
    pool, _ = pool_of(sum(peak_blocks(group, prompt, budget) for group in groups))
    cache, random = BlockTables(pool, config, budget), Random(seed)
    request = ServingRequest("r", TraceRequest(0, prompt, 1, tuple(range(-(-prompt // 4)))), config, 4)
    assert cache.has_room(request, 0)
    assert cache.place(request, 0, 0, 0)
    held: list[int] = []
    while request.num_computed_tokens < prompt:
        chunk = min(random.randint(1, budget), prompt - request.num_computed_tokens)
        cache.remove_skipped_blocks(request)
        assert cache.grow(request, request.num_computed_tokens + chunk) is not None
        pool.free_blocks(held)
        before = request.num_computed_tokens
        request.num_computed_tokens += chunk
        cache.cache_blocks(request)
        held = [block for _, block, _ in cache.completed_states(request, before, before + chunk)]
        pool.touch(held)
    pool.free_blocks(held)
    cache.free(request)
    assert pool.num_free_blocks == pool.num_blocks


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("full", (KVCacheGroup(512),)),
        (
            "full, sliding:4096/1024,mamba",
            (
                KVCacheGroup(512),
                KVCacheGroup(1024, GroupKind.SLIDING_WINDOW, 4096),
                KVCacheGroup(512, GroupKind.MAMBA),
            ),
        ),
        ("chunked:8192/64", (KVCacheGroup(64, GroupKind.CHUNKED_LOCAL, 8192),)),
        ("mamba/64", (KVCacheGroup(64, GroupKind.MAMBA),)),
    ],
)
def test_groups_are_read(spec: str, groups: tuple[KVCacheGroup, ...]) -> None:
    assert parse_groups(spec, 512) == groups


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "'' is no group; write full, sliding:WINDOW, chunked:WINDOW or mamba, with /TOKENS"),
        ("full,,mamba", "'' is no group"),
        ("local", "'local' is no group"),
        ("sliding", "'sliding' is no group"),
        ("chunked:0", "'chunked:0' has a window of 0 tokens; at least 1"),
        ("full:4", "'full:4' is no group"),
        ("sliding:x", "'sliding:x' is no group"),
        ("sliding:0", "'sliding:0' has a window of 0 tokens; at least 1"),
        ("full/0", "'full/0' has blocks of 0 tokens; they must divide 512"),
        ("full/500", "'full/500' has blocks of 500 tokens"),
        ("full/-4", "'full/-4' is no group"),
        ("full/ 4", "'full/ 4' is no group"),
    ],
)
def test_groups_that_cannot_be_read_are_named(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_groups(spec, 512)
    assert str(caught.value).startswith(f"groups is {spec!r}: ")
    assert says in str(caught.value)


# Content.


def host_rank(blocks: int, block_bytes: int) -> Rank:
    return make_rank(RunOptions(device_blocks=blocks, host_blocks=1, block_bytes=block_bytes), 0)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 39), st.integers(1, 255), st.integers(0, 1))
def test_any_flipped_byte_is_a_mismatch(size: int, block: int, byte: int, flip: int, rank: int) -> None:
    """The check of S15 can fail: for any byte of any block, of any size."""
    ranks = [host_rank(4, size) for _ in range(2)]
    content, keys = DeviceContent(ranks), block_keys(range(4))
    content.write(range(4), keys)
    content.check(range(4), keys, "abcd")
    assert content.mismatches() == []
    ranks[rank].device[block, byte % size] ^= flip
    content.check(range(4), keys, "abcd")
    assert content.mismatches() == [Mismatch(rank, block, keys[block], "abcd"[block])]


def test_ranks_keys_and_groups_have_different_bytes() -> None:
    """A copy from another rank, of another key, or of another group's block of the same tokens is
    detected."""
    ranks = [host_rank(3, 16) for _ in range(2)]
    content, keys = DeviceContent(ranks), [*block_keys(range(2)), *block_keys([0], group=1)]
    content.write([0, 1, 2], keys)
    assert len({rank.device[block].tobytes() for rank in ranks for block in range(3)}) == 6
    content.check([0, 1], keys[1::-1], "xx")
    assert [one[:2] for one in content.mismatches()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    content.check([0], keys[2:], "y")
    assert [one[:2] for one in content.mismatches()[4:]] == [(0, 0), (1, 0)]


def test_what_a_simulated_rank_computes_comes_later_and_in_order() -> None:
    """S12: as on a GPU, a launched kernel has not run yet. A check sees what was written before it."""
    rank = make_rank(RunOptions(device_blocks=2, host_blocks=2, copies="simulated"), 0)
    content, keys = DeviceContent([rank]), block_keys(range(2))
    content.write([0, 1], keys)
    content.check([0, 1], keys, "ab")
    content.write([0, 1], keys[::-1])
    assert not rank.device.any()
    assert content.mismatches() == []
    content.check([1, 0], keys, "ab")
    assert content.mismatches() == []


# Transfers under way.


class ScriptedWorker:
    """Reports what the test says, when the test says."""

    def __init__(self, *polls: list[WorkerReport]) -> None:
        self.polls = list(polls)

    def start(self, plan: TransferPlan) -> None:
        pass

    def poll(self) -> list[WorkerReport]:
        return self.polls.pop(0) if self.polls else []


def plan(*transfers: int, blocks: int = 1, flush: tuple[int, ...] = ()) -> TransferPlan:
    ids = tuple(range(blocks))
    loads = tuple(TransferJob(transfer, Direction.LOAD, ids, ids) for transfer in transfers)
    return TransferPlan(loads, (), flush)


def test_reports_come_in_a_fixed_order_whatever_the_workers_do() -> None:
    """S11: reports come by transfer and worker, at the step that follows from the size; early ones are kept.
    Only transfers that ended well on all workers count as copied."""
    first = ScriptedWorker(
        [WorkerReport(3, 0, True), WorkerReport(2, 0, True)], [], [WorkerReport(1, 0, False)]
    )
    second = ScriptedWorker(
        [WorkerReport(1, 1, True)], [WorkerReport(3, 1, True)], [WorkerReport(2, 1, True)]
    )
    copies = TransfersInFlight([second, first])  # type: ignore[list-item]
    copies.start(plan(2, 1, blocks=3), step=4)
    copies.start(plan(3, blocks=3), step=5)
    assert copies.collect(4) == []
    assert [(one.transfer, one.worker) for one in copies.collect(5)] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(one.transfer, one.worker) for one in copies.collect(6)] == [(3, 0), (3, 1)]
    assert len(copies) == 0
    assert copies.blocks == {Direction.LOAD: 6, Direction.STORE: 0}


def test_a_silent_worker_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """S9: every wait has a bound, and the error names the transfers."""
    monkeypatch.setattr(in_flight_module, "OVERDUE_SECONDS", 0.0)
    copies = TransfersInFlight([ScriptedWorker()])  # type: ignore[list-item]
    copies.start(plan(7), step=0)
    with pytest.raises(PropertyBroken, match=r"progress \(S9\): no report for 0 s of transfers 7"):
        copies.collect(1)


def test_what_is_flushed_is_due_in_the_next_step() -> None:
    """S17: a flushed transfer does not wait for its modelled step; others do."""
    reports = [WorkerReport(one, 0, True) for one in (1, 2, 3)]
    copies = TransfersInFlight([ScriptedWorker(reports)])  # type: ignore[list-item]
    copies.start(plan(1, 2, blocks=200), step=0)
    copies.start(plan(3, blocks=200, flush=(1, 3, 99)), step=1)
    assert [one.transfer for one in copies.collect(2)] == [1, 3]
    assert [one.transfer for one in copies.collect(4)] == [2]
