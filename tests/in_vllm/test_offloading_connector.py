"""`KvsmOffloadingConnector` under vLLM's real schedulers: failed and lost copies, resets, and the last step.

The engines come from `real_scheduler`, so every step is checked: content, the order of copies and compute,
and the ledger. At the end every client has its tokens, nothing is left, and the log folds to the same state.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import real_scheduler
import torch
from hanging_copies import TIMEOUT_S, Clock, HangingCopyEngine
from scheduler_shapes import BLOCK_TOKENS, Shape, changed, make_configs
from spec_engine import SpecConnector, SpecEngine, ToldEngine, built_with_specs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_offload.base import CanonicalKVCacheTensor, GPULoadStoreSpec

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.errors import ConfigError
from kvsm.vllm import KvsmOffloadingConnector, reported_manager, spec
from kvsm.vllm.spec_manager import HostSlots
from kvsm.vllm.spec_worker import ReportingWorker
from kvsm.vllm.versions import features

PROMPT = 16
"""Tokens of the prompts that are stored and loaded here."""

BLOCKS = PROMPT // BLOCK_TOKENS


def served(shape: Shape, seed: int = 0) -> ToldEngine:
    """An engine that has served a prompt and has it in host memory only."""
    engine = ToldEngine(shape, seed)
    engine.arrive(0, PROMPT, 0, 1)
    engine.drain()
    engine.reset(running=False, connector=False)
    assert engine.counts["stores"]
    return engine


def ask_again(engine: ToldEngine) -> tuple[int, int]:
    """Ask the same prompt with one token more. Returns (job, transfer) of the load."""
    engine.arrive(0, PROMPT, 1, 3)
    assert engine.schedule()
    ((job, load),) = engine.metadata.load_jobs.items()
    return job, load.src_spec.transfer


def stored(shape: Shape, seed: int = 0, outputs: int = 8) -> tuple[ToldEngine, int, int]:
    """(an engine with the first store of a running request in flight, its job, its transfer)."""
    engine = ToldEngine(shape, seed)
    engine.arrive(0, PROMPT, 0, outputs)
    engine.schedule()
    while not engine.metadata.store_jobs:
        engine.deliver()
        engine.schedule()
    ((job, store),) = engine.metadata.store_jobs.items()
    return engine, job, store.dst_spec.transfer


def end(engine: ToldEngine) -> None:
    engine.drain()
    engine.close()


# Failed copies.


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_failed_load_is_computed(is_async: bool, shards: int) -> None:
    """Failure is not success (S6): one rank fails. The request hears of it once, and its tokens are right.

    What it computes is stored again.
    """
    engine = served(Shape(is_async=is_async, shards=shards))
    job, _ = ask_again(engine)
    before = engine.counts["stores"]
    engine.ranks[-1].device.failing[job] = 0
    engine.drain()
    assert (engine.counts["failed loads"], engine.counts["loads"]) == (1, 1)
    assert len(engine.told["r1"]) == 3
    assert engine.counts["stores"] > before
    assert len(engine.ledger.index) == BLOCKS
    end(engine)


def test_failed_load_ends_the_request_where_that_is_asked_for() -> None:
    """Failure is not success (S6): with `fail` the client gets an error, and nothing of the request is
    left."""
    engine = served(Shape(is_async=True, on_failed_load="fail"))
    job, _ = ask_again(engine)
    engine.ranks[0].device.failing[job] = 0
    end(engine)
    assert (engine.counts["errors"], engine.told["r1"]) == (1, [])


def test_request_whose_load_failed_blocks_no_other() -> None:
    """Progress (S9): vLLM leaves the request in the queue of requests that hold blocks, without blocks.

    If no blocks are free, the requests behind it would wait forever (`ToldEngine.schedule` checks it).
    """
    engine = served(Shape(is_async=True))
    job, _ = ask_again(engine)
    engine.ranks[0].device.failing[job] = 0
    while not engine.counts["failed loads"]:
        engine.step()
    with patch.object(engine.scheduler.kv_cache_manager, "allocate_slots", return_value=None) as refused:
        for _ in range(4):
            engine.step()
    assert refused.called
    end(engine)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_store_that_failed_is_made_again(shards: int) -> None:
    """Publish after commit (S2): what one rank could not copy is not matched. The request that still runs
    offers it again in the next step, and then it is."""
    engine, job, _ = stored(Shape(shards=shards, host_blocks=40))
    engine.ranks[-1].device.failing[job] = 0
    steps = 0
    while engine.metadata.store_jobs.keys() <= {job}:
        assert not any(engine.ledger.readable(slot) for slot in engine.ledger.index.values())
        engine.deliver()
        engine.schedule()
        steps += 1
    assert steps < 8, "it is offered while the request runs"
    engine.drain()
    assert len(engine.ledger.index) >= BLOCKS
    assert engine._core.metrics.values()["transfers_ended"]["store"]["failed"] == 1
    end(engine)


def test_a_store_that_fails_each_time_is_made_again_once() -> None:
    """Progress (S9): a request is not busy with the same store forever."""
    engine = ToldEngine(Shape(failing=1.0, host_blocks=40), seed=0)
    engine.arrive(0, PROMPT, 0, 12)
    end(engine)
    of_blocks = [store for store in engine.stores if len(store) == BLOCKS]
    assert len(of_blocks) == 2, engine.stores


def test_a_load_of_nothing_has_ended() -> None:
    """Progress (S9): vLLM's connector makes a job of it, without a transfer, and vLLM waits for its end."""
    engine = served(Shape())
    connector = engine.scheduler.connector
    give = connector.update_state_after_alloc

    def all_are_there(request: Any, blocks: Any, tokens: int) -> None:
        for block in blocks.blocks[0]:
            block._block_hash = b"there"
        give(request, blocks, tokens)
        for block in blocks.blocks[0]:
            block._block_hash = None

    with patch.object(connector, "update_state_after_alloc", all_are_there):
        engine.arrive(0, PROMPT, 1, 3)
        engine.schedule()
    ((_, load),) = engine.metadata.load_jobs.items()
    assert load.src_spec.transfer == len(load.dst_spec.block_ids) == 0
    engine.deliver()
    assert engine.scheduler.finished_recving_kv_req_ids == {"r1"}
    engine.abort(0)
    end(engine)


# Copies that one rank never reports.


@pytest.mark.parametrize("shards", [1, 2])
def test_lost_load_is_computed(shards: int) -> None:
    """Progress (S9): a rank never reports its copy. When its time is up, the request hears of it once.

    The blocks of the load are not reused, and the prefix cache can be reset although they are held.
    """
    engine = served(Shape(is_async=True, shards=shards))
    _, load = ask_again(engine)
    engine.ranks[-1].silent.add(load)
    engine.drain()
    assert (engine.counts["failed loads"], engine.counts["loads"]) == (1, 1)
    assert len(engine.told["r1"]) == 3
    assert engine.counts["retired device blocks"] == engine.counts["retired slots"] == BLOCKS
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    end(engine)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_lost_load_may_end_its_request_or_find_it_aborted(aborts: bool) -> None:
    """With `fail` the client gets an error. An aborted request is held no longer than its load."""
    engine = served(Shape(is_async=True, on_failed_load="fail"))
    _, load = ask_again(engine)
    engine.ranks[0].silent.add(load)
    if aborts:
        engine.abort(0)
    end(engine)
    assert (engine.counts["errors"], engine.told["r1"]) == (not aborts, [])


def test_a_lost_store_does_not_stop_the_cache() -> None:
    """Progress (S9): vLLM's connector forgets its job, so the engine becomes idle, and a reset succeeds."""
    engine, _, store = stored(Shape(is_async=True, shards=2, host_blocks=160), outputs=1)
    engine.ranks[1].silent.add(store)
    engine.drain()
    assert engine.clock.now < 2 * TIMEOUT_S
    assert (engine.counts["retired slots"], engine.counts["retired device blocks"]) == (BLOCKS, 0)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    end(engine)


def test_a_report_that_comes_too_late_is_rejected() -> None:
    """Stale reports change nothing (S5): the load has failed by then, and fails only once."""
    engine = served(Shape(is_async=True, shards=2))
    _, load = ask_again(engine)
    engine.ranks[1].silent.add(load)
    engine.drain()
    before = sum(engine._core.metrics.values()["reports_rejected"].values())
    engine.ranks[1].speak()
    engine.arrive(2, PROMPT, 1, 3)
    end(engine)
    assert sum(engine._core.metrics.values()["reports_rejected"].values()) == before + 1
    assert (engine.counts["failed loads"], len(engine.told["r1"])) == (1, 3)


def test_a_loss_names_what_is_lost() -> None:
    """The warning has the transfer, its direction, the silent ranks, the request and what is retired."""
    engine = served(Shape(is_async=True, shards=2))
    _, load = ask_again(engine)
    engine.ranks[1].silent.add(load)
    with patch.object(reported_manager.log, "warning") as warned:
        end(engine)
    (((text, *values), _),) = warned.call_args_list
    assert text % tuple(values) == (
        f"kvsm: transfer {load} (a load) is given up: ranks [1] have not reported it for 20 s. 4 host slots "
        "and the device blocks of the load are retired: they are not used again until the engine restarts. "
        "The load of request r1 has failed"
    )


# Resets.


@pytest.mark.parametrize("is_async", [False, True])
def test_two_resets_need_no_step_between_them(is_async: bool) -> None:
    """vLLM's own connector fails an assertion at the second one, and its engine is dead."""
    engine, _, _ = stored(Shape(is_async=is_async, host_blocks=40))
    for _ in range(2):
        engine.reset_host()
    engine.deliver()
    for _ in range(2):
        engine.reset(running=True, connector=True)
    engine.drain()
    assert len(engine.told["r0"]) == 8
    end(engine)


def test_what_ends_between_two_resets_is_not_stored() -> None:
    """No stale data (S14). The first reset leaves the device's blocks, because a request runs. It is aborted,
    and the second one succeeds: what the request has computed is old, and must not be stored later."""
    world = VllmWorld(EngineShape(connector="KvsmOffloadingConnector"))
    asked, reset, another = ("arrive", 0, 12, 1, 4, 0), ("reset", 0, 1), ("arrive", 2, 1, 1, 1, 0)
    settled = [("settle",)] * 3
    for action in (asked, ("settle",), reset, ("abort", 0), reset, another, *settled, ("reset", 0, 0), asked):
        assert world.do(action), action
    while (action := world.wind_down()) is not None:
        world.do(action)
        world.check()


def with_running_requests_reset(engine: SpecEngine) -> SpecEngine:
    """This engine, after a reset that has preempted a request whose blocks are on the host."""
    engine.arrive(0, PROMPT, 0, 8)
    while not engine.ledger.index or engine.ledger.transfers:
        engine.step()
    while engine.steps_under_way:
        engine.deliver()
    assert engine.scheduler.running
    real_scheduler.Engine.reset(engine, running=True, connector=False)
    return engine


@pytest.mark.parametrize("is_async", [False, True])
def test_running_requests_may_be_reset_and_load_at_once(is_async: bool) -> None:
    """The host keeps their blocks."""
    engine = ToldEngine(Shape(is_async=is_async, host_blocks=160), seed=0)
    end(with_running_requests_reset(engine))
    assert engine.counts["loads"] == 1
    assert len(engine.told["r0"]) == 8


def stored_after_a_reset(engine: SpecEngine) -> tuple[set[int], set[int]]:
    """(device blocks that have left the window of a request and that others compute into, device blocks that
    this request stores after a reset of the host)."""
    engine.arrive(0, PROMPT, 0, 30)
    for _ in range(12):
        engine.step()
    taken: set[int] = set()
    for number in range(40):
        if not number % 4:
            engine.arrive(2 + number % 3 * 2, 8, number, 4)
        engine.step()
        tables = engine.scheduler.kv_cache_manager.get_block_ids
        others = [one for name, one in engine.scheduler.requests.items() if name != "r0"]
        now = {block for one in others for table in tables(one.request_id) for block in table if block}
        taken = now & set(engine.scheduler.connector.scheduler._req_status["r0"].group_states[1].block_ids)
        if taken:
            break
    assert taken, "no request got a block that has left the window"
    real_scheduler.Engine.reset_host(engine)
    assert engine.schedule()
    stores = [one for one in engine.metadata.store_jobs.values() if one.req_id == "r0"]
    return taken, {block for one in stores for block in one.src_spec.block_ids.tolist()}


WINDOWS = Shape(groups=2, device_blocks=26, host_blocks=160)


def test_a_reset_offers_no_block_that_has_left_the_window() -> None:
    """Correct bytes (S15): other requests compute into such blocks."""
    engine = ToldEngine(WINDOWS, seed=0)
    taken, stored_blocks = stored_after_a_reset(engine)
    assert stored_blocks
    assert taken.isdisjoint(stored_blocks)
    end(engine)


# Faults of vLLM's own connector that docs/vllm.md names. If one of these tests fails, vLLM has mended it.


def test_vllms_own_connector_offers_blocks_that_have_left_the_window() -> None:
    engine = SpecEngine(WINDOWS, seed=0)
    taken, stored_blocks = stored_after_a_reset(engine)
    assert taken & stored_blocks
    engine.discard()


def test_vllms_own_connector_fails_when_a_preempted_request_loads() -> None:
    """Only in vLLM 0.32, which does not tell of flushed resets either."""
    engine = with_running_requests_reset(SpecEngine(Shape(host_blocks=160), seed=0))
    if features().tells_of_flushed_resets:
        end(engine)
        return
    with pytest.raises(AssertionError):
        engine.drain()
    engine.discard()


def test_vllms_own_connector_has_the_fault() -> None:
    """So a user of it is warned at start-up. When it is mended, the warning can go."""
    with patch.object(spec.log, "warning") as warned:
        engine = SpecEngine(Shape(host_blocks=40), seed=0)
    assert "two resets of the cache in a row" in warned.call_args[0][0]
    engine.arrive(0, PROMPT, 0, 8)
    while not engine.counts["stores"]:
        engine.step()
    engine.scheduler.reset_connector_cache()
    with pytest.raises(AssertionError):
        engine.scheduler.reset_connector_cache()
    engine.discard()


# Any order of acts.


SHAPES = {
    "a failing rank of two": Shape(shards=2, device_blocks=26, host_blocks=80, failing=0.2),
    "asynchronous, failing, in chunks": Shape(
        is_async=True, device_blocks=26, host_blocks=40, failing=0.2, extra={"blocks_per_chunk": 2}
    ),
    "a sliding window": Shape(is_async=True, groups=2, device_blocks=40, host_blocks=160, failing=0.1),
    "hanging": Shape(is_async=True, shards=2, device_blocks=48, host_blocks=160, hanging=0.15),
    "hanging stages": Shape(
        stages=2, groups=2, device_blocks=48, host_blocks=80, hanging=0.15, on_failed_load="fail"
    ),
}

LIVES, ACTS = 3, 250


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_happens_the_words_are_right(name: str) -> None:
    """Copies fail and hang, and any reset may come at any time: content, order and leases are right."""
    shape, happened = SHAPES[name], Counter[str]()
    for seed in range(LIVES):
        happened += live(seed, shape)
    for what in ("stores", "resets", "host resets"):
        assert happened[what], what
    assert happened["retired slots"] or not shape.hanging
    assert happened["failed loads"] or not shape.failing


def live(seed: int, shape: Shape) -> Counter[str]:
    """Run one engine until its end."""
    random, engine = Random(f"told {seed}"), ToldEngine(shape, seed)
    try:
        for _ in range(ACTS):
            if random.random() < 0.01:
                engine.reset(running=True, connector=random.random() < 0.5)
            real_scheduler.act(engine, random)
            engine.check()
        end(engine)
    except BaseException as error:
        engine.discard()
        error.args = (f"live({seed}, {shape}): {error}", *error.args[1:])
        raise
    return engine.counts


# The last step.


def drop_all(engine: ToldEngine) -> None:
    """All clients disconnect."""
    while any(not request.is_finished() for request in engine.scheduler.requests.values()):
        engine.abort(0)


def take_steps_under_way(engine: ToldEngine) -> None:
    while engine.steps_under_way:
        engine.deliver()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_flushed_last_step_leaves_no_copy(is_async: bool) -> None:
    """Flush at last step (S17): stores, loads, and copies of requests that were preempted or aborted."""
    happened = Counter[str]()
    for seed in range(8):
        shape = Shape(is_async=is_async, device_blocks=26, host_blocks=160, extra={"last_step": "flush"})
        random, engine = Random(f"last step {seed}"), ToldEngine(shape, seed)
        for _ in range(6):
            for _ in range(4):
                engine.arrive(2 * random.randrange(3), 16, 8, random.randint(1, 20))
            for _ in range(random.choice([1, 1, 3, 24])):
                engine.step()
            drop_all(engine)
            take_steps_under_way(engine)
            in_flight = [one.direction.name for one in engine.ledger.transfers.values()]
            happened.update(in_flight)
            if engine.schedule():
                take_steps_under_way(engine)
            assert not engine.ledger.transfers, f"seed {seed}: {in_flight} were in flight"
            assert not engine.schedule() or in_flight, "and the engine stops"
            take_steps_under_way(engine)
            engine.scheduler.reset_prefix_cache()
        happened += engine.counts
        end(engine)
    for what in ("STORE", "LOAD", "preemptions"):
        assert happened[what], what


def test_a_kept_stepping_engine_takes_steps_until_all_is_reported() -> None:
    """Flush at last step (S17): no step waits, and the engine is told that work is pending."""
    engine, _, _ = stored(Shape(host_blocks=40), outputs=1)
    drop_all(engine)
    engine.step()
    assert not engine.metadata.jobs_to_flush
    while engine.ledger.transfers:
        assert engine.scheduler.has_requests()
        engine.step()
    end(engine)


# The worker.


def worker_with_a_block(**options: Any) -> tuple[ReportingWorker, torch.Tensor]:
    """(a worker with one block in slot 0, the device's blocks)."""
    blocks = torch.arange(32, dtype=torch.int8).view(4, 8)
    worker = ReportingWorker(1, [CanonicalKVCacheTensor(blocks, 8)], 2, 1, **options)
    worker.submit_store(0, GPULoadStoreSpec([3], [1], [0]), HostSlots([0], 2, 7))
    return worker, blocks


def test_a_load_of_other_bytes_is_an_error() -> None:
    """Correct bytes (S15): with `verify_copies`, a change in host memory is noticed, and no engine stops."""
    worker, _ = worker_with_a_block(verify=True)
    worker.wait({0})
    assert [one.job_id for one in worker.get_finished()] == [0]
    assert worker.take_errors() == {}
    worker._copies.pool.blocks[0][0] ^= 1
    worker.submit_load(1, HostSlots([0], 2, 8), GPULoadStoreSpec([0], [1], [0]))
    worker.wait({1})
    assert [one.job_id for one in worker.get_finished()] == [1]
    assert "checksum" in worker.take_errors()[1]
    assert worker.take_errors() == {}
    worker.shutdown()


def test_a_store_for_which_a_step_no_longer_waited_has_failed() -> None:
    """Publish after commit (S2): the step may have overwritten what the store still read."""
    clock = Clock()
    worker, blocks = worker_with_a_block(patience_s=TIMEOUT_S)
    worker.wait({0})
    worker.get_finished()
    worker.clock, worker.pause = clock.read, lambda _: clock.advance(1)
    hanging = HangingCopyEngine(
        worker._copies.engine, ([blocks], []), clock, Random(0), 1.0, False, 9, never=True
    )
    worker._copies = worker._copies._replace(engine=hanging)
    worker.submit_store(1, GPULoadStoreSpec([2], [1], [0]), HostSlots([1], 2, 9))
    worker.wait({1})
    assert clock.now == TIMEOUT_S
    assert worker.get_finished() == []
    hanging.let_go()
    hanging.wait([1])
    assert [one.job_id for one in worker.get_finished()] == [1]
    assert "took too long" in worker.take_errors()[1]
    worker.shutdown()


# Configuration.


def made(directory: Path, **extra: Any) -> Any:
    """The scheduler's side of such a connector."""
    config, kv_cache = make_configs(Shape(extra=extra), str(directory))
    return KvsmOffloadingConnector(config, KVConnectorRole.SCHEDULER, kv_cache)


def test_vllm_finds_the_connector_and_its_spec(tmp_path: Path) -> None:
    """A MultiConnector looks for it by its name alone. It needs no name of a spec."""
    found = KVConnectorFactory.get_connector_class_by_name("KvsmOffloadingConnector")
    assert found is KvsmOffloadingConnector
    core = made(tmp_path).scheduler.manager._core.config
    assert core.workers == 1
    config, kv_cache = make_configs(Shape(shards=2), str(tmp_path))
    two = KvsmOffloadingConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
    assert two.scheduler.manager._core.config.workers == 2


@pytest.mark.parametrize("options", [{"verify_copies": True}, {"last_step": "flush"}])
def test_what_needs_this_connector_is_refused_under_vllms_own(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = options
    with built_with_specs(SpecConnector):
        config, kv_cache = real_scheduler.make_configs(Shape(extra=options), str(tmp_path))
    with pytest.raises(ConfigError, match=f"{name}.*KvsmOffloadingConnector"):
        SpecConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
    made(tmp_path, **options)


def test_another_spec_is_refused(tmp_path: Path) -> None:
    config, kv_cache = make_configs(Shape(), str(tmp_path))
    extra = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    transfer = changed(config.kv_transfer_config, kv_connector_extra_config=extra)
    config = changed(config, kv_transfer_config=transfer)
    with pytest.raises(ConfigError, match="KvsmOffloadingConnector is for KvsmSpec"):
        KvsmOffloadingConnector(config, KVConnectorRole.SCHEDULER, kv_cache)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("cache_config", {"enable_prefix_caching": False}, "offloads what the prefix cache holds"),
        ("parallel_config", {"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_what_the_spec_learns_from_its_workers_is_refused_under_vllms_own(
    part: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """vLLM makes a worker's connector where its configuration is known."""
    with built_with_specs(SpecConnector):
        config, kv_cache = real_scheduler.make_configs(Shape(shards=2), str(tmp_path))
    config = changed(config, **{part: changed(getattr(config, part), **change)})
    with set_current_vllm_config(config), pytest.raises(ConfigError, match=message):
        SpecConnector(config, KVConnectorRole.WORKER, kv_cache)


def test_ranks_that_each_have_a_scheduler_are_refused(tmp_path: Path) -> None:
    """None of these schedulers would hear of the other ranks' copies."""
    config, kv_cache = make_configs(Shape(shards=2), str(tmp_path))
    parallel = changed(config.parallel_config, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="external_launcher"):
        KvsmOffloadingConnector(
            changed(config, parallel_config=parallel), KVConnectorRole.SCHEDULER, kv_cache
        )
