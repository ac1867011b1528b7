"""The serving engine: all ends at rest, loads bring the right bytes, nothing is handed out early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsm import events as ev
from kvsm.engine import (
    BlockPool,
    Request,
    RequestStatus,
    Run,
    RunOptions,
    RunResult,
    load_workload,
    run_workload,
)
from kvsm.engine import copies as copies_module
from kvsm.engine.content import DeviceContent
from kvsm.engine.copies import Copies
from kvsm.errors import ConfigError, LogError, PropertyBroken
from kvsm.events import Direction
from kvsm.log import LogReader
from kvsm.plan import TransferPlan, WorkerReport
from kvsm.policies import POLICIES
from kvsm.states import LeaseTrigger
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.words import StateWords
from kvsm.traces import BLOCK_TOKENS, TraceRequest, block_keys

SMALL: dict[str, Any] = {"copies": "simulated", "block_bytes": 64}
PRESSURE: dict[str, Any] = {**SMALL, "requests": 300, "device_blocks": 96, "host_blocks": 128}
"""Pools so small that there are preemptions, evictions and offers that find no room."""


def request(
    ids: Sequence[int], output_length: int = 1, arrival_ms: float = 0.0, extra: int = 0
) -> TraceRequest:
    """A request of `ids` full blocks of prompt, and `extra` tokens behind them."""
    tail = (1_000_000 + sum(ids),) if extra else ()
    return TraceRequest(arrival_ms, len(ids) * BLOCK_TOKENS + extra, output_length, (*ids, *tail))


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Run]:
    """Makes a run over given requests that a test can drive step by step."""
    numbers = iter(range(100))

    def make(requests: Sequence[TraceRequest], **options: Any) -> Run:
        chosen = RunOptions(**{**SMALL, "device_blocks": 64, "host_blocks": 64, **options})
        return Run(chosen, requests, str(tmp_path / f"log{next(numbers)}"))

    return make


def events(run: Run) -> Iterator[ev.OffloadingEvent]:
    for batch in LogReader(run.directory).batches():
        yield from batch


def assert_whole(result: RunResult) -> None:
    assert result.violations == ()
    assert result.digest == result.replayed_digest
    assert result.finished + result.aborted == result.requests
    assert result.good


# Whole runs.


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_a_workload_under_pressure(policy: str, workers: int) -> None:
    """All requests end, the log proves itself (S10), and nothing is left (S9)."""
    result = run_workload(RunOptions(**PRESSURE, policy=policy, workers=workers))
    assert_whole(result)
    assert result.preemptions > 0
    assert result.blocks_evicted > 0
    assert result.host_hit_tokens > 0
    assert result.device_hit_tokens > 0


def test_threads_that_copy_bring_the_right_bytes() -> None:
    """S15 with real threads, and blocks whose size is no multiple of a word."""
    result = run_workload(RunOptions(**{**PRESSURE, "copies": "host", "block_bytes": 1001}))
    assert_whole(result)
    assert result.blocks_loaded > 0
    assert result.loads.bytes == result.blocks_loaded * 1001 * 2


def test_failed_copies_cost_time_and_nothing_else() -> None:
    """S6, S9: when a third of all copies fail, blocks are computed instead, and every request still ends."""
    result = run_workload(RunOptions(**PRESSURE, failure_rate=0.33))
    assert_whole(result)
    assert result.failed_loads > 0
    assert result.stores.failed > 0


def test_a_run_in_which_every_copy_fails_ends() -> None:
    """No livelock: a host pool that never works is a host pool that never hits."""
    result = run_workload(RunOptions(**PRESSURE, failure_rate=1.0))
    assert_whole(result)
    assert result.host_hit_tokens == result.blocks_loaded == result.blocks_stored == 0


def test_the_last_copies_are_flushed(start: Callable[..., Run]) -> None:
    """S17: when no request is left, what is under way is asked to end before the engine stops stepping."""
    run = start([request([1, 2, 3])])
    run.serve()
    kinds = [event.kind for event in events(run)]
    assert kinds.index("FlushRequested") > kinds.index("RequestFinished")
    assert_whole(run.prove())


def test_the_log_can_be_kept(tmp_path: Path) -> None:
    """A run with a log directory leaves a log; a second run refuses to write into it."""
    options = RunOptions(**SMALL, requests=5, log=str(tmp_path / "log"))
    result = run_workload(options)
    assert result.log_events == sum(map(len, LogReader(tmp_path / "log").batches()))
    with pytest.raises(LogError, match="holds a log already"):
        run_workload(options)


def test_a_state_that_the_log_does_not_give_is_seen(start: Callable[..., Run]) -> None:
    """S10: the verdict compares with the live state, so a change that was no event fails the run."""
    run = start([request([1, 2])])
    run.serve()
    run.offloader.ledger.tick += 1
    result = run.prove()
    assert result.digest != result.replayed_digest
    assert not result.good


_WORKLOADS = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 8), st.integers(0, 511), st.integers(1, 1400), st.integers(0, 400)
    ),
    min_size=1,
    max_size=14,
)
"""(conversation, full blocks, tokens behind them, output, ms after the one before)."""


def serve_with_aborts(
    tmp_path: Path,
    drawn: list[tuple[int, int, int, int, int]],
    seed: int,
    failure_rate: float,
    abort_rate: float,
) -> None:
    """Serve with prefixes shared inside a conversation, aborting by a seeded coin at every step."""
    requests, arrival = [], 0
    for conversation, blocks, extra, output, gap in drawn:
        arrival += gap
        ids = range(conversation * 100, conversation * 100 + blocks)
        requests.append(request(ids, output, arrival, extra))
    options = RunOptions(
        **SMALL, device_blocks=13, host_blocks=16, seed=seed, failure_rate=failure_rate, workers=1 + seed % 2
    )
    run, random = Run(options, requests, str(tmp_path / "log")), Random(seed)
    step = run.engine.step

    def step_and_abort() -> bool:
        going = step()
        if random.random() < abort_rate:
            run.engine.abort(f"r{random.randint(1, len(requests))}")
            # The abort may have been the last thing that was left to do.
        return going or bool(run.engine.scheduler.unfinished) or len(run.engine._copies) > 0

    run.engine.step = step_and_abort  # type: ignore[method-assign]
    run.serve()
    assert_whole(run.prove())


@settings(max_examples=40, deadline=None)
@given(_WORKLOADS, st.integers(0, 1 << 20), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.02, 0.2]))
def test_any_small_workload_ends_at_rest(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, int, int, int]],
    seed: int,
    failure_rate: float,
    abort_rate: float,
) -> None:
    """S3, S4, S9, S15 for whatever arrives, fails and is aborted, in pools that barely hold one request."""
    serve_with_aborts(tmp_path_factory.mktemp("run"), drawn, seed, failure_rate, abort_rate)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(_WORKLOADS, st.integers(0, 1 << 20), st.floats(0, 1), st.floats(0, 0.5))
def test_any_small_workload_ends_at_rest_slow(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[int, int, int, int, int]],
    seed: int,
    failure_rate: float,
    abort_rate: float,
) -> None:
    """The same, for long."""
    serve_with_aborts(tmp_path_factory.mktemp("run"), drawn, seed, failure_rate, abort_rate)


# What a request computes, stores and loads.


def test_the_last_sampled_token_is_never_computed(start: Callable[..., Run]) -> None:
    """A block that only the last sampled token would fill is not full, and is not stored."""
    short, long = start([request([], 1, extra=511)]), start([request([], 2, extra=511)])
    short.serve()
    long.serve()
    assert (short.engine.stored_blocks, long.engine.stored_blocks) == (0, 1)


def test_each_step_of_a_running_request_is_one_token(start: Callable[..., Run]) -> None:
    """Counting lazily comes to the same as counting each step, across preemptions; no request stands twice
    in a batch."""
    outputs = {f"r{number}": 200 * number for number in range(1, 11)}
    run = start([request([one], one * 200, extra=511 - one * 45) for one in range(1, 11)], device_blocks=12)
    scheduler, schedule = run.engine.scheduler, run.engine.scheduler.schedule
    sampled = dict.fromkeys(outputs, 0)

    def counted(step: int) -> Any:
        decoding = {name for name, one in scheduler.running.items() if one.status is RequestStatus.DECODE}
        batch = schedule(step)
        for name, one in scheduler.running.items():
            sampled[name] += name in decoding or one.status is RequestStatus.DECODE
        names = [one.name for one in scheduler._batch]
        assert len(set(names)) == len(names)
        return batch

    scheduler.schedule = counted  # type: ignore[method-assign]
    run.serve()
    assert scheduler.counts.preemptions > 3
    assert sampled == outputs
    assert_whole(run.prove())


def test_a_match_leaves_a_token_to_compute(start: Callable[..., Run]) -> None:
    """S18: a prompt that is cached as a whole still computes its last block."""
    run = start([request([1, 2, 3]), request([1, 2, 3], arrival_ms=10_000)])
    run.serve()
    counts = run.engine.scheduler.counts
    assert counts.device_hit_tokens == 2 * BLOCK_TOKENS
    assert counts.computed_tokens == 4 * BLOCK_TOKENS


def test_only_written_blocks_are_offered(start: Callable[..., Run]) -> None:
    """S12: at the moment of the offer the device block holds its content, on every rank."""
    run = start([request([1, 2, 3, 4], 1200, extra=100), request([1, 2, 9], 600, arrival_ms=3000)], workers=2)
    content, prepare = run.engine._content, run.offloader.prepare_store
    offered = 0

    def checked(name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> Any:
        nonlocal offered
        offered += len(keys)
        assert content.mismatches(blocks, keys) == []
        return prepare(name, keys, blocks)

    run.offloader.prepare_store = checked  # type: ignore[method-assign]
    run.serve()
    assert offered >= 6


def test_a_block_that_the_device_lost_is_loaded(start: Callable[..., Run]) -> None:
    """The host serves what was evicted from the device, and a good load counts as a host hit."""
    run = start(
        [request(range(6)), request(range(10, 16), 1, 1000), request(range(6), 1, 2000)], device_blocks=8
    )
    run.serve()
    counts = run.engine.scheduler.counts
    assert counts.host_hit_tokens + counts.device_hit_tokens == 5 * BLOCK_TOKENS
    assert counts.host_hit_tokens > 0
    assert_whole(run.prove())


def load_case(start: Callable[..., Run], **options: Any) -> tuple[Run, Request]:
    """A run that stands where its third request has just begun to load."""
    run = start(
        [request(range(6)), request(range(10, 18), 1, 1000), request(range(6), 1, 2000)],
        device_blocks=8,
        **options,
    )
    while not any(one.status is RequestStatus.LOADING for one in run.engine.scheduler.running.values()):
        assert run.engine.step()
    [loading] = run.engine.scheduler.running.values()
    return run, loading


def test_a_flipped_byte_on_the_host_is_seen(start: Callable[..., Run]) -> None:
    """S15: one wrong byte between store and load is a violation that names key, worker and block."""
    run, loading = load_case(start)
    [transfer] = run.offloader.ledger.transfers.values()
    run.host_pools[1][transfer.slots[2], 17] ^= 1
    run.serve()
    result = run.prove()
    [violation] = result.violations
    assert violation.property_id == "S15"
    assert f"{loading.name}: on worker 1" in violation.message
    assert block_keys([2])[0].hex() in violation.message
    assert not result.good


def test_an_abort_in_mid_load_frees_blocks_only_when_the_copy_has_ended(start: Callable[..., Run]) -> None:
    """S3: a copy still writes these blocks; they are free when it has ended, not before."""
    run, loading = load_case(start)
    [transfer] = run.offloader.ledger.transfers.values()
    targets = list(transfer.device_blocks)
    run.engine.abort(loading.name)
    run.engine.abort(loading.name)
    pool = run.engine.scheduler.pool
    assert not any(map(pool.is_free, targets))
    run.serve()
    assert all(map(pool.is_free, targets))
    result = run.prove()
    assert (result.finished, result.aborted) == (2, 1)
    assert_whole(result)


def test_a_failed_load_is_computed(start: Callable[..., Run]) -> None:
    """S6: the request computes what did not arrive; nothing of it counts as a hit."""
    run, loading = load_case(start)
    [transfer] = run.offloader.ledger.transfers
    run._workers[0]._engine.fail(transfer)  # type: ignore[attr-defined]
    counts, pool = run.engine.scheduler.counts, run.engine.scheduler.pool
    computed = counts.computed_tokens
    while not counts.failed_loads:
        run.engine.step()
    assert pool.get_computed_blocks(block_keys(range(5))) == [], (
        "the device does not cache what did not arrive"
    )
    run.serve()
    assert loading.status is RequestStatus.FINISHED
    assert (counts.failed_loads, counts.host_hit_tokens) == (1, 0)
    assert counts.computed_tokens - computed == loading.input_length - counts.device_hit_tokens
    assert_whole(run.prove())


def test_a_refused_load_is_computed(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is reached costs a hit, not a request: its pins are given back."""
    run = start(
        [request(range(6)), request(range(10, 18), 1, 1000), request(range(6), 1, 2000)], device_blocks=8
    )
    while run.engine.scheduler.counts.finished < 2:
        run.engine.step()
    while len(run.engine._copies):
        run.engine.step()
    monkeypatch.setattr(run.offloader, "config", _WithoutTransfers(run.offloader.config))
    while "r3" not in run.engine.scheduler.running:
        run.engine.step()
    assert len(run.offloader.ledger.requests["r3"].pins) == 0
    run.serve()
    assert run.engine.scheduler.counts.host_hit_tokens == 0
    assert_whole(run.prove())


class _WithoutTransfers:
    """A configuration under which no transfer may be live."""

    max_live_transfers = 0

    def __init__(self, config: ev.OffloadConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def test_a_request_that_waits_for_a_block_is_passed(start: Callable[..., Run]) -> None:
    """What a request needs is being stored by another: it waits for that, others go first, then it loads."""
    run = start([request([1, 2]), request([8, 9]), request(range(100, 164))])
    scheduler, [key] = run.engine.scheduler, block_keys([1])
    [block] = scheduler.pool.get_new_blocks(1)
    run.engine._content.write([block], [key])
    prepared = run.offloader.prepare_store("other", [key], [block])
    assert prepared.plan is not None
    scheduler._carry(prepared.plan, Request("other", request([1])), [key], [block])
    scheduler.pool.free_blocks([block])
    run.offloader.finish("other")
    run.engine.step()
    assert list(scheduler.running) == ["r2"]
    assert [one.name for one in scheduler.waiting] == ["r1", "r3"], "and the third has no room"
    run.serve()
    assert scheduler.counts.deferrals == 1
    assert scheduler.counts.host_hit_tokens == BLOCK_TOKENS
    assert_whole(run.prove())


def test_a_deferred_block_is_offered_again(start: Callable[..., Run]) -> None:
    """S13: of two that compute the same block at once, the second one's offer waits for the first store."""
    run = start([request([1, 2], 600), request([1, 2], 600)])
    offers: list[tuple[str, int]] = []
    prepare = run.offloader.prepare_store

    def noted(name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> Any:
        prepared = prepare(name, keys, blocks)
        offers.append((name, prepared.resident))
        return prepared

    run.offloader.prepare_store = noted  # type: ignore[method-assign]
    run.serve()
    assert run._log.skipped == {"key in flight": 2}
    assert ("r2", 2) in offers, "offered again when the first store had ended, and found resident"
    assert_whole(run.prove())


# What cannot be run.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device_blocks": 0}, "device_blocks is 0; it must be from 1"),
        ({"host_blocks": 0}, "host_blocks is 0"),
        ({"block_bytes": 0}, "block_bytes is 0; it must be from 1"),
        ({"block_bytes": -5}, "block_bytes is -5"),
        ({"workers": 0}, "workers is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"time_scale": -1.0}, "time_scale is -1"),
        ({"time_scale": float("nan")}, "time_scale is nan"),
        ({"copies": "quantum"}, "choose one of host, simulated, cuda"),
        ({"copies": "cuda"}, "does not have yet"),
        ({"failure_rate": 0.5}, "simulated copies only"),
        ({"failure_rate": 1.5, "copies": "simulated"}, "failure_rate is 1.5"),
        ({"policy": "random"}, "policy 'random'"),
        ({"device_blocks": 10}, "device_blocks is 10; request"),
        ({"host_blocks": 10}, "host_blocks is 10; request"),
        ({"block_bytes": 1 << 30}, "this machine has"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """One line that names the option, its value and the bound; nothing was made."""
    with pytest.raises(ConfigError) as caught:
        run_workload(RunOptions(**options, log=str(tmp_path / "log")))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "log").exists()


def test_a_bound_is_met_exactly() -> None:
    """Pools of exactly the largest request's size are accepted, one block less is not."""
    needed = max(one.blocks for one in load_workload(RunOptions(requests=20)))
    result = run_workload(RunOptions(**SMALL, requests=20, device_blocks=needed, host_blocks=needed))
    assert_whole(result)
    with pytest.raises(ConfigError):
        load_workload(RunOptions(requests=20, device_blocks=needed - 1))


# The block pool.


def pool_of(size: int) -> tuple[BlockPool, StateWords]:
    leases = StateWords(LEASE_WORDS, size)
    return BlockPool(leases), leases


def test_a_block_under_a_copy_is_not_handed_out() -> None:
    """S3: the reference count may say free; if the ledger knows of a copy, the pool refuses."""
    pool, leases = pool_of(2)
    leases.words[0] = LEASE_WORDS.step(leases.words[0], LeaseTrigger.BEGIN_READ, 0, 1)
    with pytest.raises(PropertyBroken, match=r"S3: device block 0 is free, but a copy holds it: READING"):
        pool.get_new_blocks(1)


def test_a_block_is_not_given_back_twice() -> None:
    """S4: a release too many is an error, not a count below zero."""
    pool, _ = pool_of(2)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    with pytest.raises(PropertyBroken, match="S4"):
        pool.free_blocks(blocks[:1])


def test_a_free_block_serves_hits_until_it_is_taken() -> None:
    """The block that was freed first is taken first, and only then is its content forgotten."""
    pool, _ = pool_of(3)
    keys = block_keys(range(3))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, keys)
    pool.free_blocks(blocks[::-1])
    assert pool.get_computed_blocks(keys) == blocks
    assert pool.get_new_blocks(1) == [blocks[2]]
    assert pool.get_computed_blocks(keys) == blocks[:2]
    pool.touch(blocks[:1])
    assert pool.get_new_blocks(1) == [blocks[1]]
    assert pool.get_computed_blocks(keys) == blocks[:1]
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
    assert pool.get_cached_block(key) == first


# Content.


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 39), st.integers(1, 255), st.integers(0, 1))
def test_any_flipped_byte_is_a_mismatch(size: int, block: int, byte: int, flip: int, rank: int) -> None:
    """The check of S15 can fail: whichever byte of whichever block, for any size of block."""
    pools = [np.zeros((4, size), np.uint8) for _ in range(2)]
    content, keys = DeviceContent(pools), block_keys(range(4))
    content.write(range(4), keys)
    assert content.mismatches(range(4), keys) == []
    pools[rank][block, byte % size] ^= flip
    assert content.mismatches(range(4), keys) == [(rank, block)]


def test_ranks_and_keys_have_different_bytes() -> None:
    """A copy from another rank, or of another key, does not pass."""
    pools = [np.zeros((2, 16), np.uint8) for _ in range(2)]
    content, keys = DeviceContent(pools), block_keys(range(2))
    content.write([0, 1], keys)
    assert len({pool[block].tobytes() for pool in pools for block in range(2)}) == 4
    assert content.mismatches([0, 1], keys[::-1]) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# Copies under way.


class ScriptedWorker:
    """Reports what it is told to, when it is told to."""

    def __init__(self, *polls: list[WorkerReport]) -> None:
        self.polls = list(polls)

    def submit(self, plans: Sequence[TransferPlan]) -> None:
        pass

    def poll(self) -> list[WorkerReport]:
        return self.polls.pop(0) if self.polls else []


def plan(transfer: int) -> TransferPlan:
    return TransferPlan(transfer, Direction.LOAD, (transfer,), (transfer,))


def test_reports_come_in_a_fixed_order_whatever_the_workers_do() -> None:
    """S11: by transfer and worker, at the step that follows from the size; early ones are kept."""
    first = ScriptedWorker(
        [WorkerReport(3, 0, True), WorkerReport(2, 0, True)], [], [WorkerReport(1, 0, False)]
    )
    second = ScriptedWorker(
        [WorkerReport(1, 1, True)], [WorkerReport(3, 1, True)], [WorkerReport(2, 1, True)]
    )
    copies = Copies([second, first])  # type: ignore[list-item]
    copies.submit([plan(2), plan(1)], step=4)
    copies.submit([plan(3)], step=5)
    assert copies.collect(4) == []
    assert [(one.transfer, one.worker) for one in copies.collect(5)] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(one.transfer, one.worker) for one in copies.collect(6)] == [(3, 0), (3, 1)]
    assert len(copies) == 0


def test_a_silent_worker_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """S9: no wait is for ever; the error names the transfers."""
    monkeypatch.setattr(copies_module, "OVERDUE_SECONDS", 0.0)
    copies = Copies([ScriptedWorker()])  # type: ignore[list-item]
    copies.submit([plan(7)], step=0)
    with pytest.raises(PropertyBroken, match="S9: no report for 0 s of transfers 7"):
        copies.collect(1)


def test_hastened_copies_are_due_at_once() -> None:
    """S17: after the last request nothing waits for its modelled step."""
    copies = Copies([ScriptedWorker([WorkerReport(1, 0, True)])])  # type: ignore[list-item]
    copies.submit([TransferPlan(1, Direction.STORE, tuple(range(16)), tuple(range(16)))], step=0)
    copies.hasten(1)
    assert [one.transfer for one in copies.collect(1)] == [1]
