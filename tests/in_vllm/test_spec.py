"""`KvsmSpec`: its options, its worker on real bytes, and vLLM's OffloadingConnector with it in an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import torch
import vllm.v1.kv_offload.cpu.common
import workloads
from hanging_copies import TIMEOUT_S, Clock, HangingCopyEngine
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from workloads import make_rounds, make_trial, reusable_tokens

from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.explain.verify.auditor import verify_log
from kvsm.vllm import KvsmSpec
from kvsm.vllm.extra_config import SpecOptions, parse
from kvsm.vllm.spec_manager import GIVEN_UP_AFTER, HostSlots
from kvsm.vllm.spec_stats import config_info
from kvsm.vllm.spec_worker import KvsmOffloadingWorker, block_rows, host_blocks
from kvsm.vllm.tiny_model import BLOCK_TOKENS, GEMMA, LLAMA
from kvsm.vllm.trial import Trial, run_trial, spec_config
from kvsm.vllm.versions import features

# Options.

BLOCK_BYTES = 1000


def config(ranks: int = 1, chunk: int = 1, rank: int = 0, **options: Any) -> OffloadingConfig:
    """The configuration as vLLM gives it to a spec."""
    given = {"spec_name": "KvsmSpec", "spec_module_path": "kvsm.vllm", "cpu_bytes_to_use": 10_500, **options}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0",), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config=given,
        engine_id="engine",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(16, chunk),
        parallel=OffloadingParallelConfig(rank, ranks, ranks, 1, 1, 1, 0, 1, None, False),
        canonical_layout=bool(options.get("canonical_layout", False)),
    )


@pytest.mark.parametrize(("ranks", "chunk", "slots"), [(1, 1, 10), (2, 1, 5), (1, 3, 3), (2, 2, 2)])
def test_host_memory_is_divided_over_ranks_and_chunks(ranks: int, chunk: int, slots: int) -> None:
    """Both sides count the same slots, each from its own configuration."""
    manager = KvsmSpec(config(ranks, chunk)).get_manager()
    core = manager._core.config
    assert (core.host_blocks, core.blocks_per_chunk, core.workers) == (slots, chunk, 1)
    assert core.block_bytes == BLOCK_BYTES * ranks
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(torch.zeros(4, BLOCK_BYTES, dtype=torch.int8), 8)], [])
    for rank in range(ranks):
        worker = KvsmSpec(config(ranks, chunk, rank)).get_worker(caches)
        assert worker._copies.engine.num_host_blocks == slots * chunk
        worker.shutdown()


def test_bytes_per_rank_are_as_many_as_bytes_of_all_ranks() -> None:
    """With four ranks, a quarter for each is the same memory."""
    alone = parse(SpecOptions, {"cpu_bytes_to_use_per_rank": 25})
    together = parse(SpecOptions, {"cpu_bytes_to_use": 100})
    assert alone.host_bytes(4) == together.host_bytes(4) == 100


def test_vllm_finds_the_spec_by_its_name() -> None:
    assert OffloadingSpecFactory.get_spec_cls(config().extra_config) is KvsmSpec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "lru"}, "'polcy'.*did you mean policy"),
        ({"store": "lazy"}, "'store', an option of KvsmConnector alone"),
        ({"verify_copies": True}, "verify_copies.*use KvsmOffloadingConnector"),
        ({"last_step": "flush"}, "last_step.*use KvsmOffloadingConnector"),
        ({"cpu_bytes_to_use": 999}, "less than the 1,000 bytes"),
        ({"policy": "mru"}, "mru"),
    ],
)
def test_what_cannot_work_is_said_at_start_up(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvsmSpec(config(**options)).get_manager()


def test_options_of_vllms_own_are_vllms() -> None:
    options = {"blocks_per_chunk": 2, "offload_prompt_only": False, "self_describing_kv_events": True}
    assert KvsmSpec(config(chunk=2, **options)).offload_prompt_only is False


def test_a_budget_for_loads_within_a_step_is_an_option_where_vllm_has_it() -> None:
    options = {"sync_load_budget_bytes": 1 << 20}
    if features().loads_within_steps:
        assert KvsmSpec(config(**options)).extra_config["sync_load_budget_bytes"] == 1 << 20
    else:
        with pytest.raises(ConfigError, match=r"sync_load_budget_bytes.*from vLLM 0\.33 on"):
            KvsmSpec(config(**options))


@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 400), st.integers(0, 3))
def test_the_pool_is_described_as_vllm_describes_its_own(
    chunk: int, ranks: int, longest: int, window: int
) -> None:
    """The same dashboards serve both. window: chunks of a second group; 0: it attends to all."""
    theirs = getattr(vllm.v1.kv_offload.cpu.common, "CPUOffloadingInfo", None)
    if theirs is None:
        assert config_info(config(ranks, chunk), 9)["cpu_num_chunks"] == 9
        return
    given = config(ranks, chunk)
    groups = (*given.groups, OffloadingGroupConfig(32, ("layer.1",), 1, window or None))
    given = replace(given, groups=groups, model=replace(given.model, max_model_len=longest))
    expected = theirs.from_config(given, 9, BLOCK_BYTES * chunk * ranks).as_config_info()
    assert config_info(given, 9) == expected
    assert KvsmSpec.config_info_keys({}) == tuple(expected)


def test_the_manager_tells_how_large_its_pool_is() -> None:
    manager = KvsmSpec(config(ranks=2, chunk=2)).get_manager()
    (labels,) = manager.config_info()
    assert labels["cpu_num_chunks"] == 2
    assert labels["cpu_kv_cache_size_bytes"] == 2 * 2 * 2 * BLOCK_BYTES


def test_a_model_without_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        KvsmSpec(replace(config(), worker_kv_bytes_per_block=0))


# The worker, on real bytes.


class Group(NamedTuple):
    """Blocks `first` to `first + size` of a request, in the device blocks after those of the previous
    group."""

    first: int
    size: int


GROUPS = st.lists(st.builds(Group, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).filter(
    lambda groups: any(group.size for group in groups)
)


def slot_of_each_block(groups: list[Group], chunk: int) -> list[tuple[int, int]]:
    """(ordinal of the slot, place in it) of each block. Counted one by one: each chunk that is met has a
    slot."""
    found, slots = [], -1
    for group in groups:
        chunks_met: dict[int, int] = {}
        for block in range(group.first, group.first + group.size):
            if block // chunk not in chunks_met:
                slots += 1
                chunks_met[block // chunk] = slots
            found.append((chunks_met[block // chunk], block % chunk))
    return found


def device_spec(groups: list[Group], blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, [group.size for group in groups], [group.first for group in groups])


@given(GROUPS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_block_has_its_place_in_its_chunk(groups: list[Group], chunk: int, random: Any) -> None:
    """Correct bytes (S15): chunks that begin late and end early, group after group."""
    expected = slot_of_each_block(groups, chunk)
    slots = random.sample(range(100), max(slot for slot, _ in expected) + 1)
    device = device_spec(groups, list(range(len(expected))))
    assert host_blocks(device, slots, chunk) == [slots[slot] * chunk + place for slot, place in expected]


@pytest.mark.parametrize("slots", [[4], [4, 5, 6]])
def test_slots_that_do_not_fit_the_blocks_are_refused(slots: list[int]) -> None:
    with pytest.raises(TransferFailed, match=f"vLLM names {len(slots)} slots.*which are 2 slots"):
        host_blocks(device_spec([Group(1, 4)], [0, 1, 2, 3]), slots, 3)


def bytes_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def finish(worker: KvsmOffloadingWorker, *jobs: int) -> None:
    worker.wait(set(jobs))
    assert sorted(one.job_id for one in worker.get_finished()) == sorted(jobs)


@given(GROUPS, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_load_brings_what_was_stored(groups: list[Group], chunk: int) -> None:
    """Correct bytes (S15): whole chunks are stored, and any part of them is loaded into other device
    blocks."""
    expected = slot_of_each_block(groups, chunk)
    num_slots = max(slot for slot, _ in expected) + 1
    caches = [bytes_of(layer, 2 * num_slots * chunk, 8 + layer) for layer in range(2)]
    tensors = [CanonicalKVCacheTensor(cache, cache.shape[1]) for cache in caches]
    worker = KvsmOffloadingWorker(0, tensors, num_slots + 2, chunk)
    slots = [num_slots + 1 - slot for slot in range(num_slots)]
    host = HostSlots(slots, num_slots + 2)
    whole = device_spec([Group(0, num_slots * chunk)], list(range(num_slots * chunk)))
    assert worker.submit_store(0, whole, host)
    finish(worker, 0)
    stored = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    target = num_slots * chunk
    loaded = device_spec(groups, list(range(target, target + len(expected))))
    assert worker.submit_load(1, host, loaded)
    finish(worker, 1)
    sources = [slot * chunk + place for slot, place in expected]
    for before, cache in zip(stored, caches):
        assert torch.equal(cache[target : target + len(sources)], before[sources])
        assert not cache[:target].any()
        assert not cache[target + len(sources) :].any()
    worker.shutdown()


@pytest.mark.parametrize(
    ("tensor", "page_bytes"),
    [
        (torch.arange(48, dtype=torch.float32).view(4, 3, 4), 48),
        (torch.arange(4 * 20, dtype=torch.int8).view(4, 20)[:, 4:], 10),
    ],
    ids=["more dimensions", "padded"],
)
def test_a_page_is_a_row(tensor: torch.Tensor, page_bytes: int) -> None:
    rows = block_rows(CanonicalKVCacheTensor(tensor, page_bytes))
    expected = torch.stack([block.contiguous().view(torch.int8).flatten()[:page_bytes] for block in tensor])
    assert torch.equal(rows, expected)
    rows.zero_()
    assert not torch.stack([block.contiguous().view(torch.int8).flatten() for block in tensor])[
        :, :page_bytes
    ].any()


def test_a_page_in_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        block_rows(CanonicalKVCacheTensor(torch.zeros(4, 6, 2, dtype=torch.int8).transpose(1, 2), 12))


def test_a_rank_with_smaller_blocks_has_as_many_slots_as_the_scheduler() -> None:
    """Pipeline stages may have different numbers of layers."""
    cache = bytes_of(0, 4, 8)
    worker = KvsmOffloadingWorker(1, [CanonicalKVCacheTensor(cache, 8)], 2, 1)
    expected = cache[0].clone()
    worker.submit_store(0, device_spec([Group(0, 1)], [0]), HostSlots([6], 7))
    finish(worker, 0)
    worker.submit_load(1, HostSlots([6], 7), device_spec([Group(0, 1)], [3]))
    finish(worker, 1)
    assert torch.equal(cache[3], expected)
    worker.shutdown()


def test_a_copy_that_failed_stops_the_engine() -> None:
    """Failure is not success (S6): vLLM's interface would take it for done."""
    worker = KvsmOffloadingWorker(3, [CanonicalKVCacheTensor(bytes_of(0, 4, 8), 8)], 2, 1)
    worker.submit_load(0, HostSlots([0], 2), device_spec([Group(0, 1)], [99]))
    worker.wait({0})
    with pytest.raises(TransferFailed, match=r"a load failed on rank 3: .*99.*KvsmConnector"):
        worker.get_finished()
    worker.shutdown()


def test_a_step_does_not_compute_without_the_load_that_it_waits_for() -> None:
    """Failure is not success (S6): nothing asks for results before the step computes."""
    worker = KvsmOffloadingWorker(3, [CanonicalKVCacheTensor(bytes_of(0, 4, 8), 8)], 2, 1)
    worker.submit_load(0, HostSlots([0], 2), device_spec([Group(0, 1)], [99]), expedited=True)
    with pytest.raises(TransferFailed, match=r"a load for which a step waits failed on rank 3: .*99"):
        worker.wait({0})
    worker.shutdown()


def test_a_step_waits_only_for_a_load_that_has_ended() -> None:
    """Failure is not success (S6): the load that hangs is given up, and its step never computes."""
    clock = Clock()
    worker, hanging = hanging_worker(Direction.LOAD, clock, expedited=True)
    with pytest.raises(TransferFailed, match=r"loads \[7\].*have not ended on rank 0 for 40 s"):
        worker.wait({7})
    hanging.let_go()
    worker.shutdown()


def test_waiting_for_what_is_over_returns() -> None:
    """vLLM waits for jobs that have ended, and for jobs that this rank never got."""
    worker = KvsmOffloadingWorker(0, [CanonicalKVCacheTensor(bytes_of(0, 4, 8), 8)], 2, 1)
    worker.submit_store(0, device_spec([Group(0, 1)], [0]), HostSlots([0], 2))
    finish(worker, 0)
    worker.wait({0, 17})
    worker.shutdown()


def hanging_worker(
    direction: Direction, clock: Clock, **named: bool
) -> tuple[KvsmOffloadingWorker, HangingCopyEngine]:
    """A worker whose jobs in this direction hang, and that gives them up after twice the timeout. named: what
    else `submit_load` is told."""
    caches = [CanonicalKVCacheTensor(bytes_of(0, 4, 8), 8)]
    worker = KvsmOffloadingWorker(0, caches, 2, 1, GIVEN_UP_AFTER * TIMEOUT_S)
    worker.clock, worker.pause = clock.read, lambda _: clock.advance(1)
    rows, engine = [caches[0].tensor], worker._copies.engine
    hanging = HangingCopyEngine(engine, (rows, []), clock, Random(0), 1.0, True, 9, never=True)
    worker._copies = worker._copies._replace(engine=hanging)
    submit = worker.submit_store if direction is Direction.STORE else worker.submit_load
    device, host = device_spec([Group(0, 1)], [0]), HostSlots([0], 2)
    submit(7, *((device, host) if direction is Direction.STORE else (host, device)), **named)
    return worker, hanging


def test_a_store_that_hangs_is_given_up_and_reported_once() -> None:
    """Progress (S9): vLLM remembers a job until each rank has reported it. A late end is not told."""
    clock = Clock()
    worker, hanging = hanging_worker(Direction.STORE, clock)
    clock.advance(2 * TIMEOUT_S - 1)
    assert worker.get_finished() == []
    clock.advance(1)
    assert [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()] == [
        (7, True, None)
    ]
    hanging.let_go()
    worker._copies.engine.wait([7])
    assert worker.get_finished() == []
    worker.shutdown()


def test_a_load_that_hangs_is_never_reported_before_its_end() -> None:
    """Failure is not success (S6): its request would read the blocks."""
    clock = Clock()
    worker, hanging = hanging_worker(Direction.LOAD, clock)
    clock.advance(100 * TIMEOUT_S)
    worker.wait({7})
    assert worker.get_finished() == []
    hanging.let_go()
    worker._copies.engine.wait([7])
    assert [one.job_id for one in worker.get_finished()] == [7]
    worker.shutdown()


@pytest.mark.parametrize("direction", Direction)
def test_no_step_waits_for_a_hanging_copy_without_end(direction: Direction) -> None:
    """vLLM makes a step wait for a job when its device blocks change hands, and after a reset."""
    clock = Clock()
    worker, _ = hanging_worker(direction, clock)
    worker.wait({7})
    assert clock.now == 2 * TIMEOUT_S
    assert len(worker.get_finished()) == (direction is Direction.STORE)
    worker.shutdown()


# In vLLM's engine.

ROOMY, TIGHT = 64 << 20, 3 << 20

ROUNDS = make_rounds()[:2]
"""The first rounds of the reference."""

ASKED = sum(map(len, ROUNDS))


class Row(NamedTuple):
    """One engine."""

    model: dict[str, Any] = LLAMA
    policy: str = "lru"
    ranks: int = 1
    chunk: int = 1
    host_bytes: int = ROOMY
    batched_tokens: int = 512


def trial(row: Row, kv_transfer: dict[str, Any]) -> Trial:
    given = workloads.Row(ranks=row.ranks, batched_tokens=row.batched_tokens)
    return msgspec.structs.replace(make_trial(row.model, given, kv_transfer=kv_transfer), rounds=ROUNDS)


ENGINES = {
    "lru": Row(),
    "arc in a tight pool, chunks of two, split prefills": Row(
        policy="arc", chunk=2, host_bytes=TIGHT, batched_tokens=128
    ),
    "two ranks": Row(ranks=2, host_bytes=TIGHT),
    "sliding window": Row(GEMMA),
}


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_an_engine_without_offload(name: str, engines: Any, tmp_path: Path) -> None:
    """Correct bytes (S15): the tokens are right, blocks were loaded from the host, and the log verifies."""
    row = ENGINES[name]
    options = {"cpu_bytes_to_use": row.host_bytes, "policy": row.policy, "blocks_per_chunk": row.chunk}
    plain = engines.reference(row.model, row.ranks)
    outcome = run_trial(trial(row, spec_config(event_log=str(tmp_path), **options)))
    assert outcome.tokens == plain.tokens[:ASKED]
    loaded = outcome.metric("vllm:external_prefix_cache_hits")
    assert loaded > 0
    assert outcome.metric("vllm:prompt_tokens_cached_by_source", "source=host") == loaded
    assert sum(outcome.cached_tokens) > sum(plain.cached_tokens[:ASKED])
    stored_blocks = outcome.metric("vllm:kvsm_blocks_stored")
    assert outcome.metric("vllm:kvsm_blocks_loaded") * row.chunk * BLOCK_TOKENS >= loaded
    assert outcome.metric("vllm:kv_offload_store_bytes") > 0
    assert stored_blocks > 100
    if row.host_bytes == ROOMY:
        assert outcome.metric("vllm:kvsm_resident_blocks") == stored_blocks
    else:
        assert outcome.metric("vllm:kvsm_blocks_evicted") > 0
    if row == Row():
        assert sum(outcome.cached_tokens) > 0.9 * reusable_tokens(ROUNDS, BLOCK_TOKENS)
    (log,) = tmp_path.iterdir()
    verification = verify_log(log)
    assert not verification.violations
    assert verification.damage is None
    assert verification.events > 100
