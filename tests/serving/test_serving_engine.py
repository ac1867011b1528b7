"""The serving engine: every run ends at rest, loads bring the right bytes, no block is reused too early."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.longest_hit import watch_answers
from kvsm.copies import CopyResult
from kvsm.copies.simulated import SimulatedStream
from kvsm.core.log import LogReader
from kvsm.core.plan import TransferPlan
from kvsm.core.policies import POLICIES
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import ConfigError, LogError, PropertyBroken
from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.serving import (
    RunOptions,
    RunResult,
    ServingRequest,
    ServingStatus,
    WorkloadRun,
    load_workload,
    run_workload,
)
from kvsm.serving import in_flight as in_flight_module
from kvsm.serving import workload_run as run_module
from kvsm.serving.disturbances import LONGEST_PATIENCE_STEPS, Disturbances
from kvsm.serving.traces import BLOCK_TOKENS, TraceRequest
from kvsm.serving.workload_run import LEDGER_BYTES_PER_BLOCK
from kvsm.states import LeaseState

SMALL: dict[str, Any] = {"copies": "simulated", "block_bytes": 64}
PRESSURE: dict[str, Any] = {**SMALL, "requests": 60, "device_blocks": 96, "host_blocks": 128}
"""Pools so small that requests are preempted, blocks are evicted, and offers find no room."""
LONGER: dict[str, Any] = {**PRESSURE, "requests": 100}
"""For what comes seldom."""

HYBRID = "full,sliding:4096/1024,mamba"


def request(
    ids: Sequence[int], output_length: int = 1, arrival_ms: float = 0.0, extra: int = 0
) -> TraceRequest:
    """Return a request with a prompt of the full blocks `ids` and `extra` further tokens."""
    tail = (1_000_000 + sum(ids),) if extra else ()
    return TraceRequest(arrival_ms, len(ids) * BLOCK_TOKENS + extra, output_length, (*ids, *tail))


def keys_of(run: WorkloadRun, ids: Sequence[int], group: int = 0) -> list[bytes]:
    """Return the keys of full blocks with these ids."""
    made = ServingRequest("x", request(ids), run.connector.config, BLOCK_TOKENS)
    return [one + group_suffix(group) for one in made.block_hashes]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., WorkloadRun]:
    """Make a run over given requests that a test can drive step by step."""
    numbers = iter(range(100))

    def make(requests: Sequence[TraceRequest], **options: Any) -> WorkloadRun:
        chosen = RunOptions(**{**SMALL, "device_blocks": 64, "host_blocks": 64, **options})
        return WorkloadRun(chosen, requests, str(tmp_path / f"log{next(numbers)}"))

    return make


def events(run: WorkloadRun) -> Iterator[ev.OffloadingEvent]:
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
    """All requests end, the log replays to the live state (S10), and the engine is at rest (S9)."""
    result = run_workload(RunOptions(**{**PRESSURE, "requests": 40}, policy=policy, workers=workers))
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


@pytest.mark.parametrize("copies", ["file", "host", "simulated"])
def test_failed_copies_cost_time_and_nothing_else(copies: str) -> None:
    """S6, S9: when a third of all copies fail, blocks are computed instead, and every request still ends."""
    result = run_workload(RunOptions(**{**PRESSURE, "copies": copies}, failure_rate=0.33))
    assert_whole(result)
    assert result.failed_loads > 0
    assert result.stores.failed > 0
    assert result.restarts == 0, "one group goes on with what it has"


def test_a_run_in_which_every_copy_fails_ends() -> None:
    """No livelock: with a host pool whose copies all fail, every request is computed."""
    result = run_workload(RunOptions(**PRESSURE, failure_rate=1.0))
    assert_whole(result)
    assert result.host_hit_tokens == result.blocks_loaded == result.blocks_stored == 0


@pytest.mark.parametrize("groups", [HYBRID, "mamba", "sliding:2000", "full,chunked:1024", "full/64"])
def test_hybrid_groups_are_served(groups: str) -> None:
    """S15 for each group on every rank, from the device and from the host, and loads that fail restart."""
    options = {**PRESSURE, "requests": 80, "device_blocks": 300, "host_blocks": 400, "groups": groups}
    if groups == "full/64":
        options.update(device_blocks=2400, host_blocks=3000)
    result = run_workload(RunOptions(**options, failure_rate=0.2))
    assert_whole(result)
    assert result.device_hit_tokens > 0
    assert result.host_hit_tokens > 0
    assert (result.restarts > 0) == (result.failed_loads > 0 and not groups.startswith("full/"))


def test_a_lazy_store_stores_less_and_still_hits() -> None:
    """A block that never nears eviction is never copied."""
    roomy: dict[str, Any] = {**PRESSURE, "requests": 40, "device_blocks": 3000, "host_blocks": 3000}
    tight: dict[str, Any] = {**PRESSURE, "host_blocks": 512}
    assert run_workload(RunOptions(**tight, store="lazy")).host_hit_tokens > 0
    lazy, eager = (run_workload(RunOptions(**roomy, store=store)) for store in ("lazy", "eager"))
    assert_whole(lazy)
    assert lazy.blocks_stored == 0 < eager.blocks_stored


def test_chunks_of_blocks_are_served() -> None:
    """Several device blocks a slot: prefixes that end inside a chunk are loaded in part (S15)."""
    result = run_workload(RunOptions(**PRESSURE, blocks_per_chunk=3, failure_rate=0.1))
    assert_whole(result)
    assert result.host_hit_tokens > 0
    assert result.failed_loads > 0


def test_resets_cost_hits_and_nothing_else() -> None:
    """S14: after each of many resets, amid copies, no earlier block is found, and every request ends."""
    often = run_workload(RunOptions(**LONGER, reset_every=30))
    never = run_workload(RunOptions(**LONGER))
    assert_whole(often)
    assert often.resets > 100
    assert often.host_hit_tokens < never.host_hit_tokens
    assert often.blocks_skipped["brought by a load of an older epoch"] > 0


def test_forced_preemptions_cost_time_and_nothing_else() -> None:
    """Requests lose their blocks in every state, loading ones too, and run again."""
    result = run_workload(RunOptions(**PRESSURE, preempt_rate=0.2))
    assert_whole(result)
    assert result.preemptions > 500


def test_a_store_threshold_stores_what_comes_again() -> None:
    """A key that is offered once is skipped, with a reason."""
    result = run_workload(RunOptions(**PRESSURE, store_threshold=2))
    assert_whole(result)
    assert result.blocks_skipped["offered too seldom"] > result.blocks_stored > 0


def test_without_patience_nothing_is_deferred() -> None:
    result = run_workload(RunOptions(**PRESSURE, seed=3, defer_ticks=0))
    assert_whole(result)
    assert result.deferrals == 0 < run_workload(RunOptions(**PRESSURE, seed=3)).deferrals


def test_requests_for_remote_decode_are_offloaded_in_full() -> None:
    """S16: with room on the host every block is stored; a skipped block has a reason."""
    roomy = run_workload(RunOptions(**{**LONGER, "host_blocks": 4096}, remote_decode=0.5))
    assert_whole(roomy)
    assert roomy.fully_offloaded == roomy.remote_decode
    assert 30 < roomy.remote_decode < 70
    tight = run_workload(RunOptions(**LONGER, remote_decode=1.0, failure_rate=0.3, store_threshold=3))
    assert_whole(tight)
    assert tight.remote_decode == tight.requests


def test_a_block_of_remote_decode_that_is_not_offered_is_seen(
    start: Callable[..., WorkloadRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S16 can fail: an offer that loses a block at the finish is reported, with request and key."""
    run = start([request([1, 2, 3], 2)], remote_decode=1.0)
    store = run.offloader.store

    def careless(owners: Any, keys: Any, blocks: Any, *_: Any, **__: Any) -> Any:
        [(name, count)] = owners
        return store(((name, count - 1),), keys[:-1], blocks[:-1])

    monkeypatch.setattr(run.offloader, "store", careless)
    run.serve()
    [violation] = run.engine.violations
    assert (violation.property, violation.requests) == (Property.FULL_OFFLOAD, ("r1",))
    assert keys_of(run, [1, 2, 3])[2].hex() in violation.message
    assert run.engine.scheduler.checks.fully_offloaded == 0


def test_aborted_requests_are_gone() -> None:
    """A third of the requests are aborted, at any time; the others are served."""
    result = run_workload(RunOptions(**PRESSURE, abort_rate=0.33))
    assert_whole(result)
    assert 0.15 * result.requests < result.aborted < 0.4 * result.requests


def test_disturbances_follow_from_the_seed() -> None:
    """S11: in any order of requests; a rate of 0 draws none."""
    names = [f"r{number}" for number in range(2000)]
    options = RunOptions(seed=1, abort_rate=0.25, remote_decode=0.5)
    one = Disturbances(options)
    drawn = {name: (one.patience_steps(name), one.is_for_remote_decode(name)) for name in names}
    again = Disturbances(options)
    assert drawn == {n: (again.patience_steps(n), again.is_for_remote_decode(n)) for n in reversed(names)}
    patience = [steps for steps, _ in drawn.values() if steps is not None]
    assert 400 < len(patience) < 600
    assert min(patience) >= 1
    assert max(patience) <= LONGEST_PATIENCE_STEPS
    assert 900 < sum(remote for _, remote in drawn.values()) < 1100
    none = Disturbances(RunOptions(seed=1))
    assert none.patience_steps("r1") is none.preempts(9) is None
    assert not none.is_for_remote_decode("r1")
    assert not any(map(none.resets, range(100)))
    assert [step for step in range(10) if Disturbances(RunOptions(reset_every=4)).resets(step)] == [4, 8]


def test_the_last_copies_are_flushed(start: Callable[..., WorkloadRun]) -> None:
    """S17: when no request is left, transfers are flushed before the engine stops stepping."""
    run = start([request([1, 2, 3])])
    run.serve()
    kinds = [event.kind for event in events(run)]
    assert kinds.index("FlushRequested") > kinds.index("RequestFinished")
    assert_whole(run.prove())


def test_a_last_step_that_does_not_flush_is_seen(start: Callable[..., WorkloadRun]) -> None:
    """S17 can fail: a transfer that is left out of the last plan is named."""
    run = start([request([1, 2, 3])])
    build = run.connector.build_connector_meta

    def forgetful(output: Any) -> TransferPlan:
        planned = build(output)
        return TransferPlan(planned.loads, planned.stores, planned.flush[1:])

    run.connector.build_connector_meta = forgetful  # type: ignore[method-assign]
    run.serve()
    violation = run.engine.violations[0]
    assert violation.property == Property.LAST_STEP
    assert len(violation.transfers) == 1


def test_an_engine_may_go_on_stepping_instead(start: Callable[..., WorkloadRun]) -> None:
    """S17 with keep-stepping: nothing is flushed. The engine steps until no work is pending."""
    run = start([request([1, 2, 3]), request([4], 1, 5000)], last_step="keep-stepping")
    run.serve()
    assert "FlushRequested" not in {event.kind for event in events(run)}
    assert not run.connector.has_pending_work()
    assert run.engine.in_flight.blocks[Direction.STORE] == 4
    assert_whole(run.prove())


def test_the_log_can_be_kept(tmp_path: Path) -> None:
    """A run with a log directory leaves a log; a second run refuses to write into it."""
    options = RunOptions(**SMALL, requests=5, log=str(tmp_path / "log"))
    result = run_workload(options)
    assert result.log_events == sum(map(len, LogReader(tmp_path / "log").batches()))
    with pytest.raises(LogError, match="holds a log already"):
        run_workload(options)


def test_a_state_that_the_log_does_not_give_is_seen(start: Callable[..., WorkloadRun]) -> None:
    """S10: the verdict compares with the live state, so a change without an event fails the run."""
    run = start([request([1, 2])])
    run.serve()
    run.offloader.ledger.tick += 1
    result = run.prove()
    assert result.digest != result.replayed_digest
    assert not result.good


# Any run.

_BLOCK = 4
_MOST_STEPS = 3_000
_GROUPS = (
    "full",
    "full/8",
    "full/2",
    "sliding:10",
    "sliding:5/2",
    "mamba",
    "full,sliding:9/8",
    "full,mamba",
    "sliding:12,mamba/8",
    "full,sliding:6/2,mamba",
    "full/8,full",
    "full,sliding:1",
)


@st.composite
def workloads(draw: st.DrawFn) -> list[TraceRequest]:
    """Requests that share prefixes in a few conversations, of a few tiny blocks."""
    requests, arrival = [], 0
    for number in range(draw(st.integers(1, 14))):
        conversation, blocks = draw(st.integers(0, 3)), draw(st.integers(0, 9))
        extra, output = draw(st.integers(0 if blocks else 1, _BLOCK - 1)), draw(st.integers(1, 24))
        arrival += draw(st.integers(0, 300))
        ids = tuple(range(conversation * 100, conversation * 100 + blocks))
        tail = (1_000_000 + number,) if extra else ()
        requests.append(TraceRequest(arrival, blocks * _BLOCK + extra, output, ids + tail))
    return requests


@st.composite
def options_for(draw: st.DrawFn, requests: Sequence[TraceRequest]) -> RunOptions:
    """Draw any options that are legal together, with pools for one request or a little more."""
    groups = draw(st.sampled_from(_GROUPS))
    chosen: dict[str, Any] = {
        "block_tokens": _BLOCK,
        "block_bytes": 16,
        "copies": "simulated",
        "groups": groups,
        "seed": draw(st.integers(0, 1 << 20)),
        "workers": draw(st.integers(1, 3)),
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "store": draw(st.sampled_from(["eager", "eager", "lazy"])),
        "last_step": draw(st.sampled_from(["flush", "keep-stepping"])),
        "defer_ticks": draw(st.sampled_from([0, 2, 64])),
        "remote_decode": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "abort_rate": draw(st.sampled_from([0.0, 0.3])),
        "preempt_rate": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "failure_rate": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "reset_every": draw(st.sampled_from([0, 0, 1, 3, 7, 20])),
    }
    if chosen["store"] == "eager":
        chosen["store_threshold"] = draw(st.integers(1, 2))
        chosen["blocks_per_chunk"] = 1 if "mamba" in groups else draw(st.integers(1, 3))
    tokens = max(one.input_length + one.output_length for one in requests)
    least = RunOptions(**chosen).least_pools(tokens)
    least["device_blocks"] += draw(st.sampled_from([0, 1, 5, 20]))
    least["host_blocks"] += draw(st.sampled_from([0, 4, 30]))
    return RunOptions(**chosen, **least)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[TraceRequest], RunOptions]:
    requests = draw(workloads())
    return requests, draw(options_for(requests))


def serve_anything(directory: Path, requests: list[TraceRequest], options: RunOptions) -> None:
    """Serve in a bounded number of steps, and check all properties of a good run. Each answer of the
    scheduler must be the longest hit."""
    run = WorkloadRun(options, requests, str(directory / "log"))
    watch_answers(run.connector)
    step = run.engine.step

    def bounded() -> bool:
        assert run.engine.steps < _MOST_STEPS, "the engine does not come to rest (S9)"
        return step()

    run.engine.step = bounded  # type: ignore[method-assign]
    run.serve()
    assert_whole(run.prove())


@settings(max_examples=examples(25))
@given(runs())
def test_any_run_is_good(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[TraceRequest], RunOptions]
) -> None:
    """S3, S4, S9, S10, S14 to S18 hold for any requests and failures, under any options, in tiny pools."""
    serve_anything(tmp_path_factory.mktemp("run"), *drawn)


@pytest.mark.slow
@settings(max_examples=250)
@given(runs())
def test_any_run_is_good_slow(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[TraceRequest], RunOptions]
) -> None:
    """The same, with more examples."""
    serve_anything(tmp_path_factory.mktemp("run"), *drawn)


# What a request computes, stores and loads.


def test_the_last_sampled_token_is_never_computed(start: Callable[..., WorkloadRun]) -> None:
    """A block that only the last sampled token would fill is not full, and is not stored."""
    short, long = start([request([], 1, extra=511)]), start([request([], 2, extra=511)])
    short.serve()
    long.serve()
    stored = [run.engine.in_flight.blocks[Direction.STORE] for run in (short, long)]
    assert stored == [0, 1]


@pytest.mark.parametrize("groups", ["full", "full/64,sliding:700"])
def test_each_step_of_a_running_request_is_one_token(start: Callable[..., WorkloadRun], groups: str) -> None:
    """Counts that are updated lazily equal counts step by step, across preemptions. No request is in a batch
    twice."""
    outputs = {f"r{number}": 200 * number for number in range(1, 11)}
    trace = [request([one], one * 200, extra=511 - one * 45) for one in range(1, 11)]
    run = start(trace, device_blocks=12 if groups == "full" else 90, host_blocks=400, groups=groups)
    scheduler, compute = run.engine.scheduler, run.engine.scheduler.compute
    sampled = dict.fromkeys(outputs, 0)

    def counted(step: int) -> Any:
        decoding = {name for name, one in scheduler.running.items() if one.status is ServingStatus.DECODE}
        batch = compute(step)
        for name, one in scheduler.running.items():
            sampled[name] += name in decoding or one.status is ServingStatus.DECODE
        names = [one.request_id for one, _ in scheduler._batch]
        assert len(set(names)) == len(names)
        return batch

    scheduler.compute = counted  # type: ignore[method-assign]
    run.serve()
    assert scheduler.counts.preemptions > 3
    assert sampled == outputs
    assert_whole(run.prove())


def test_a_match_leaves_a_token_to_compute(start: Callable[..., WorkloadRun]) -> None:
    """S18: a prompt that is cached as a whole still computes its last block."""
    run = start([request([1, 2, 3]), request([1, 2, 3], arrival_ms=10_000)])
    run.serve()
    counts = run.engine.scheduler.counts
    assert counts.device_hit_tokens == 2 * BLOCK_TOKENS
    assert counts.computed_tokens == 4 * BLOCK_TOKENS


def test_a_match_of_the_whole_prompt_is_seen(start: Callable[..., WorkloadRun]) -> None:
    """S18 can fail: the check names request and tokens."""
    run = start([request([1, 2, 3])])
    run.connector.get_num_new_matched_tokens = lambda one, hit: (one.num_tokens - hit, False)  # type: ignore[method-assign]
    run.engine.step()
    violation = run.engine.violations[0]
    assert violation.property == Property.ONE_TOKEN_LEFT
    assert "request r1 has 1536 tokens, and 1536 of them are matched" in violation.message


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_only_written_blocks_are_offered(start: Callable[..., WorkloadRun], groups: str) -> None:
    """S12: at the moment of the offer the device block holds its content, on every rank."""
    trace = [request(range(4), 1200, extra=100), request([0, 1, 9], 600, arrival_ms=3000)]
    run = start(trace, workers=2, groups=groups)
    content, store = run.engine._content, run.offloader.store
    offered = 0

    def checked(owners: Any, keys: Sequence[bytes], blocks: Sequence[int], *rest: Any, **named: Any) -> Any:
        nonlocal offered
        offered += len(keys)
        content.check(blocks, keys, ["the offer"] * len(keys))
        assert content.mismatches() == []
        return store(owners, keys, blocks, *rest, **named)

    run.offloader.store = checked  # type: ignore[method-assign]
    run.serve()
    assert offered >= 6
    assert_whole(run.prove())


def test_a_state_is_handed_over_at_each_boundary(start: Callable[..., WorkloadRun]) -> None:
    """Mamba: one state per block of prompt and output tokens, held while it is offered."""
    run = start([request([1, 2], 1200, extra=100)], groups="mamba")
    build, handed = run.connector.build_connector_meta, []

    def noted(output: Any) -> TransferPlan:
        for group, block, tokens in output.boundary_states.get("r1", ()):
            assert group == 0
            assert not run.engine.scheduler.pool.is_free(block)
            handed.append(tokens)
        return build(output)

    run.connector.build_connector_meta = noted  # type: ignore[method-assign]
    run.serve()
    assert handed == [512, 1024, 1536, 2048]
    assert run.engine.in_flight.blocks[Direction.STORE] == 4


def test_a_window_is_all_that_is_held(start: Callable[..., WorkloadRun]) -> None:
    """Sliding window: while a long request decodes, the blocks that have left the window are free."""
    run = start([request(range(40), 3000)], groups="sliding:1024", device_blocks=24)
    pool, running, held = run.engine.scheduler.pool, run.engine.scheduler.running, []
    while run.engine.step():
        if running and running["r1"].status is ServingStatus.DECODE:
            held.append(pool.num_blocks - pool.num_free_blocks)
    assert len(held) == 3000
    assert max(held[100:]) <= 4, "two blocks of the window, the one that is filled, and one that is stored"
    assert run.engine.scheduler.counts.preemptions == 0


def test_a_block_that_the_device_lost_is_loaded(start: Callable[..., WorkloadRun]) -> None:
    """The host serves what was evicted from the device, and a good load counts as a host hit."""
    run = start(
        [request(range(6)), request(range(10, 16), 1, 1000), request(range(6), 1, 2000)], device_blocks=8
    )
    run.serve()
    counts = run.engine.scheduler.counts
    assert counts.host_hit_tokens + counts.device_hit_tokens == 5 * BLOCK_TOKENS
    assert counts.host_hit_tokens > 0
    assert_whole(run.prove())


def load_case(start: Callable[..., WorkloadRun], **options: Any) -> tuple[WorkloadRun, ServingRequest, int]:
    """A run whose third request has just begun to load; the request, and its transfer."""
    trace = [request(range(6)), request(range(10, 18), 1, 1000), request(range(6), 1, 2000)]
    run = start(trace, **{"device_blocks": 8, **options})
    while not any(one.status is ServingStatus.LOADING for one in run.engine.scheduler.running.values()):
        assert run.engine.step()
    [loading] = run.engine.scheduler.running.values()
    [transfer] = run.offloader.ledger.transfers
    return run, loading, transfer


def fail(run: WorkloadRun, transfer: int, rank: int = 0) -> None:
    """Let the copy of one worker fail."""
    engine = run.ranks[rank].engine
    poll = engine.poll

    def failing() -> list[CopyResult]:
        results = poll()
        return [
            replace(one, good=False, error="made to fail") if one.transfer == transfer else one
            for one in results
        ]

    engine.poll = failing  # type: ignore[method-assign]


def flip_case(start: Callable[..., WorkloadRun], **options: Any) -> tuple[WorkloadRun, bytes]:
    """A run and a key. The host pool of worker 1 has one wrong byte in the block of that key, which the third
    request will load."""
    trace = [request(range(6)), request(range(10, 18), 1, 1000), request(range(6), 1, 2000)]
    run = start(trace, device_blocks=8, **options)
    while run.engine.arrived < 2 or run.engine.scheduler.unfinished:
        assert run.engine.step()
    key = keys_of(run, range(6))[2]
    run.ranks[1].host.blocks[run.offloader.ledger.index[key], 17] ^= 1
    return run, key


def test_a_flipped_byte_on_the_host_is_seen(start: Callable[..., WorkloadRun]) -> None:
    """S15: one wrong byte between store and load is a violation that names key, worker and block."""
    run, key = flip_case(start)
    run.serve()
    result = run.prove()
    violation = result.violations[0]
    assert {one.property for one in result.violations} == {Property.CORRECT_BYTES}
    assert "request r3: on worker 1" in violation.message
    assert key.hex() in violation.message
    assert not result.good


@pytest.mark.parametrize("copies", ["host", "simulated"])
def test_a_wrong_byte_is_a_failed_load_where_copies_are_verified(
    start: Callable[..., WorkloadRun], copies: str
) -> None:
    """S15: the load fails, its keys leave the index, and the request computes the missing tokens."""
    run, _ = flip_case(start, verify_copies=True, copies=copies)
    run.serve()
    result = run.prove()
    assert_whole(result)
    assert result.failed_loads == 1
    assert result.verified is not None
    assert result.verified.mismatched == 1


@pytest.mark.parametrize(("stream", "copy"), [("kvsm store", "store"), ("kvsm load", "load")])
def test_a_copy_that_does_not_wait_for_compute_is_seen(
    monkeypatch: pytest.MonkeyPatch, stream: str, copy: str
) -> None:
    """S12 can fail, in a run like any other: without its wait a store reads what compute writes (B02), and a
    load writes what compute reads (B03)."""
    wait = SimulatedStream.wait
    monkeypatch.setattr(
        SimulatedStream, "wait", lambda self, event: None if stream in self.name else wait(self, event)
    )
    with pytest.raises(
        PropertyBroken,
        match=rf"order of copies \(S12\): device block \d+: .*compute.* {copy} .*nothing orders",
    ):
        run_workload(RunOptions(**{**LONGER, "host_blocks": 400}))


def test_a_flipped_byte_on_the_device_is_seen(start: Callable[..., WorkloadRun]) -> None:
    """S15: blocks found on the device are checked like loaded ones."""
    run = start([request([1, 2, 3]), request([1, 2, 3], arrival_ms=10_000)])
    while run.engine.scheduler.unfinished or run.engine.arrived < 1:
        run.engine.step()
    block = run.engine.scheduler.pool.cached_block(keys_of(run, [1])[0])
    assert block is not None
    run.ranks[0].device[block, 5] ^= 1
    run.serve()
    assert [(one.property, one.device_blocks) for one in run.engine.violations] == [
        (Property.CORRECT_BYTES, (block,))
    ]


def test_an_abort_in_mid_load_frees_blocks_only_when_the_copy_has_ended(
    start: Callable[..., WorkloadRun],
) -> None:
    """S3: a copy still writes these blocks; they are free when it has ended, not before."""
    run, loading, transfer = load_case(start)
    targets = to_list(run.offloader.ledger.transfers[transfer].device_blocks)
    run.engine.abort(loading.request_id)
    run.engine.abort(loading.request_id)
    pool = run.engine.scheduler.pool
    assert not any(map(pool.is_free, targets))
    run.serve()
    assert all(map(pool.is_free, targets))
    result = run.prove()
    assert (result.finished, result.aborted) == (2, 1)
    assert_whole(result)


def test_a_preemption_in_mid_load_waits_for_the_copy(
    start: Callable[..., WorkloadRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3, S8: its load is not started twice, and the end of the old load changes nothing."""
    monkeypatch.setitem(in_flight_module.HOST_LATENCY, Direction.LOAD, in_flight_module.Latency(5, 64))
    run, loading, transfer = load_case(start, device_blocks=12)
    targets = to_list(run.offloader.ledger.transfers[transfer].device_blocks)
    run.engine.scheduler.preempt(loading, run.engine.steps)
    assert not any(map(run.engine.scheduler.pool.is_free, targets))
    run.serve()
    assert loading.status is ServingStatus.FINISHED
    assert run.engine.scheduler.counts.deferrals >= 1
    assert_whole(run.prove())


def test_a_failed_load_is_computed(start: Callable[..., WorkloadRun]) -> None:
    """S6: the request computes the tokens of the failed load, which count as no hit."""
    run, loading, transfer = load_case(start)
    fail(run, transfer)
    counts, pool = run.engine.scheduler.counts, run.engine.scheduler.pool
    computed = counts.computed_tokens
    while not counts.failed_loads:
        run.engine.step()
    assert not any(map(pool.cached_block, keys_of(run, range(5)))), "the device caches nothing that is wrong"
    run.serve()
    assert loading.status is ServingStatus.FINISHED
    assert (counts.failed_loads, counts.host_hit_tokens, counts.restarts) == (1, 0, 0)
    assert counts.computed_tokens - computed == loading.num_prompt_tokens - counts.device_hit_tokens
    assert_whole(run.prove())


def test_a_failed_load_of_several_groups_restarts_the_request(start: Callable[..., WorkloadRun]) -> None:
    """S6: blocks of one group do not help another one, so the request gets new blocks."""
    run, loading, transfer = load_case(start, groups="full,sliding:1024", device_blocks=19, workers=2)
    fail(run, transfer, rank=1)
    run.serve()
    counts = run.engine.scheduler.counts
    assert (counts.failed_loads, counts.restarts, counts.preemptions, loading.preemptions) == (1, 1, 0, 1)
    assert_whole(run.prove())


def test_a_lost_load_retires_its_blocks(
    start: Callable[..., WorkloadRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3, S9: a copy that is never reported may still write. The request gets other blocks, and the old ones
    are not used again. A late report changes nothing."""
    monkeypatch.setitem(in_flight_module.HOST_LATENCY, Direction.LOAD, in_flight_module.Latency(5, 64))
    run, loading, transfer = load_case(start, device_blocks=12)
    targets = to_list(run.offloader.ledger.transfers[transfer].device_blocks)

    def once() -> list[Any]:
        ended = run.offloader.lose(transfer)
        return [] if ended is None else [ended]

    monkeypatch.setattr(run.offloader, "lose_overdue", once)
    run.serve()
    result = run.prove()
    assert loading.status is ServingStatus.FINISHED
    assert (result.failed_loads, result.lost_loads, result.restarts, result.transfers_lost) == (1, 1, 1, 1)
    states = Counter(run.offloader.ledger.leases.state(block) for block in range(12))
    assert states == {LeaseState.RETIRED: len(targets), LeaseState.NONE: 12 - len(targets)}
    assert not any(map(run.engine.scheduler.pool.is_free, targets))
    assert {one.reason for one in events(run) if isinstance(one, ev.ReportRejected)} == {
        ev.RejectReason.STALE
    }
    assert_whole(result)


def test_a_reset_in_mid_load_fails_it(start: Callable[..., WorkloadRun]) -> None:
    """S14: the loaded bytes belong to an older epoch, so the request computes its tokens."""
    run, loading, _ = load_case(start)
    assert not run.engine.reset_cache(), "a copy is under way"
    while run.engine.step():
        pass
    counts = run.engine.scheduler.counts
    assert (counts.failed_loads, counts.host_hit_tokens) == (1, 0)
    assert loading.status is ServingStatus.FINISHED
    assert run.engine.reset_cache(), "none is"
    assert run.offloader.ledger.index == {}


def test_a_request_that_waits_for_a_block_is_passed(start: Callable[..., WorkloadRun]) -> None:
    """A block that a request needs is being loaded for another request. It waits, later requests are admitted
    first, and then it finds the block on the device."""
    trace = [
        request(range(6)),
        request(range(10, 22), 1, 1000),
        request(range(6), 1, 2000),
        request(range(6), 1, 2000),
        request([30], 1, 2000),
    ]
    run = start(trace, device_blocks=12)
    while run.engine.arrived < 5:
        run.engine.step()
    scheduler = run.engine.scheduler
    assert list(scheduler.running) == ["r3", "r5"]
    assert [one.request_id for one in scheduler.waiting] == ["r4"]
    run.serve()
    assert scheduler.counts.deferrals >= 1
    assert scheduler.counts.device_hit_tokens >= 5 * BLOCK_TOKENS
    assert_whole(run.prove())


def test_a_deferred_block_is_offered_again(start: Callable[..., WorkloadRun]) -> None:
    """S13: two requests compute the same block at once. The second offer waits for the store of the first
    one; when that store fails, the second request's block is stored."""
    run = start([request([1, 2], 600), request([1, 2], 600)])
    while not run.offloader.ledger.transfers:
        run.engine.step()
    [first] = run.offloader.ledger.transfers
    fail(run, first)
    run.serve()
    plans = [event for event in events(run) if isinstance(event, ev.StorePlanned)]
    assert plans[0].owners == (("r1", 2),)
    assert any(
        set(one.keys) == set(plans[0].keys) and set(one.device_blocks).isdisjoint(plans[0].device_blocks)
        for one in plans[1:]
    )
    result = run.prove()
    assert result.blocks_skipped["key in flight"] == 2
    assert_whole(result)


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
        ({"copies": "quantum"}, "choose one of host, "),
        ({"failure_rate": 1.5}, "failure_rate is 1.5; it must be from 0 to 1"),
        ({"abort_rate": -0.5}, "abort_rate is -0.5"),
        ({"remote_decode": 2.0}, "remote_decode is 2"),
        ({"preempt_rate": 1.0}, "preempt_rate is 1.0; it must be from 0 to 0.9"),
        ({"reset_every": -1}, "reset_every is -1"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"store": "sometimes"}, "store is 'sometimes'; choose one of eager, lazy"),
        ({"last_step": "stop"}, "last_step is 'stop'; choose one of flush, keep-stepping"),
        ({"store_threshold": 0}, "store_threshold is 0"),
        ({"defer_ticks": -1}, "defer_ticks is -1"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk is 0"),
        ({"groups": "full,local"}, "'local' is no group"),
        ({"groups": "mamba", "blocks_per_chunk": 2}, "a mamba group has one state a block"),
        ({"store": "lazy", "blocks_per_chunk": 2}, "it needs blocks_per_chunk 1"),
        ({"store": "lazy", "store_threshold": 2}, "a lazy store has none"),
        ({"policy": "random"}, "policy 'random'"),
        ({"device_blocks": 10}, "device_blocks is 10; request"),
        ({"host_blocks": 10}, "host_blocks is 10; request"),
        ({"block_bytes": 1 << 30}, "this machine has"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """One line names the option, its value and the bound, and no file is created."""
    with pytest.raises(ConfigError) as caught:
        run_workload(RunOptions(**options, log=str(tmp_path / "log")))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "log").exists()


def test_memory_that_is_taken_or_denied_to_this_process_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container gets less than the machine has. The device pool of a GPU is not memory of the host."""
    pools = {"requests": 1, "device_blocks": 1024, "host_blocks": 512, "block_bytes": 4096, "workers": 1}
    ledger = LEDGER_BYTES_PER_BLOCK * 1536
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(run_module, "available_memory_bytes", lambda: 512 * 4096 + ledger)
    with pytest.raises(ConfigError, match=r"the pools take 0\.0 GB and this machine has 0\.0 left"):
        run_workload(RunOptions(**pools))
    with pytest.raises(ConfigError, match="needs torch"):
        run_workload(RunOptions(**pools, copies="cuda"))


@pytest.mark.parametrize("groups", ["full", HYBRID])
def test_a_bound_is_met_exactly(groups: str) -> None:
    """Pools of exactly the largest request's size are accepted, one block less is not."""
    options: dict[str, Any] = {**SMALL, "requests": 20, "groups": groups}
    longest = max(one.input_length + one.output_length for one in load_workload(RunOptions(**options)))
    least = RunOptions(**options).least_pools(longest)
    assert_whole(run_workload(RunOptions(**options, **least)))
    for name in least:
        with pytest.raises(ConfigError, match=f"{name} is {least[name] - 1}; request"):
            load_workload(RunOptions(**options, **{**least, name: least[name] - 1}))
