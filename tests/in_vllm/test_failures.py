"""Failures: of loads, of one rank of two, of a worker's process, of the log's disk, and of a user's
options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import lost_reports
from scenes import (
    HOST_BYTES,
    MAX_TOKENS,
    POOL,
    PROMPTS,
    expected,
    play,
    search_path,
    steered,
    steered_spec,
)
from scheduler_shapes import Shape, changed, make_configs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvsm.core.log import LogReader
from kvsm.errors import ConfigError
from kvsm.events import LoadPlanned, WorkerReported
from kvsm.explain.story import Verification, verify_log
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.trial import Trial, TrialFailed, connector_config, run_trial

THRASHING: Mapping[str, Any] = {"num_gpu_blocks_override": 40}
"""Arguments of the engine: too few device blocks for five of the prompts."""

TWO_RANKS: Mapping[str, Any] = {**THRASHING, "tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def _engines_find_the_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path())


def trial(kv_transfer: dict[str, Any], engine: Mapping[str, Any] = POOL, in_process: bool = True) -> Trial:
    """Three rounds of the same prompts. After the first one, all of them are stored."""
    return Trial(
        rounds=[PROMPTS, PROMPTS, PROMPTS],
        max_tokens=MAX_TOKENS,
        kv_transfer=kv_transfer,
        engine=dict(engine),
        in_process=in_process,
    )


def verified(parent: Path) -> tuple[Path, Verification]:
    """The only log in this directory, which breaks no property."""
    (log,) = parent.iterdir()
    verification = verify_log(log)
    assert not verification.violations, verification.breakage
    assert verification.damage is None
    return log, verification


# Loads.


def test_a_failed_load_ends_its_request_where_vllm_is_told_so(tmp_path: Path) -> None:
    """With `kv_load_failure_policy` `fail`, only these requests end with vLLM's error, and nothing leaks."""
    told = play(["fail_loads"], tmp_path, load_failure="fail")
    right = expected("llama")
    failed = [answer for answer in told.answers if answer[2] == "error"]
    assert sorted(number for number, _, _ in failed) == [0, 1, 2, 3, 4, 5]
    assert [tokens for _, tokens, _ in failed] == [[]] * 6
    good = [answer for answer in told.answers if answer[2] != "error"]
    assert len(good) == 12
    assert all((tokens, why) == (right[number], "length") for number, tokens, why in good)
    assert told.left == []
    assert verified(tmp_path)[1].digest == told.digest


def test_one_rank_of_two_fails(tmp_path: Path) -> None:
    """Publish after commit (S2): a block that one rank could not copy is not matched. Tokens are
    unchanged."""
    half = steered(name="OneRankFailsConnector", event_log=str(tmp_path))
    outcome = run_trial(trial(half, TWO_RANKS, in_process=False))
    assert outcome.tokens == expected("llama") * 3
    log, verification = verified(tmp_path)
    assert verification.good
    loads, ended = set(), set()
    for event in LogReader(log).events():
        if isinstance(event, LoadPlanned):
            loads.add(event.seq)
        elif isinstance(event, WorkerReported):
            ended.add((event.transfer in loads, event.worker, event.good))
            assert bool(event.error) == (not event.good), "the log says why"
    # Both stores and loads.
    of_each = {(0, True), (1, True), (1, False)}
    assert ended == {(is_load, *end) for is_load in (False, True) for end in of_each}
    assert outcome.metric("vllm:kvsm_transfers_ended", "failed") > 0


# Processes.


def test_a_worker_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    """It ends with vLLM's error and does not hang. The log up to then is good."""
    dying = steered(name="DyingConnector", event_log=str(tmp_path))
    with pytest.raises(TrialFailed) as failed:
        run_trial(trial(dying, TWO_RANKS, in_process=False))
    assert "EngineDeadError" in failed.value.said
    log, verification = verified(tmp_path)
    assert verification.condition.complete
    loads = [event for event in LogReader(log).events() if isinstance(event, LoadPlanned)]
    assert loads, "it was killed before its first load"


def test_a_core_that_sleeps_through_its_signal_is_woken(tmp_path: Path) -> None:
    """If a signal comes just before the main thread falls asleep, Python handles it only when something wakes
    the thread. Otherwise vLLM would kill its core after a minute, and the log would not be closed."""
    deaf = steered(name="DeafConnector", event_log=str(tmp_path))
    run_trial(trial(deaf, in_process=False))
    assert verified(tmp_path)[1].condition.notes() == []


def test_a_core_that_is_killed_at_its_end_is_a_failed_trial(tmp_path: Path) -> None:
    """Its tokens were right, but its log is not closed."""
    killed = steered(name="KilledConnector", event_log=str(tmp_path))
    with pytest.raises(TrialFailed, match=r"vLLM's core ended with exit code -9"):
        run_trial(trial(killed, in_process=False))


def test_a_trial_ends_well_where_the_environment_keeps_the_core_in_its_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM obeys its variable, and such a core has no process to wait for."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    run_trial(trial(steered(event_log=str(tmp_path)), in_process=False))
    assert verified(tmp_path)[1].condition.notes() == []


# Copies that one rank of two never reports.

TIMEOUT_S = 5.0


def test_a_lost_report_stops_nothing_for_long(tmp_path: Path) -> None:
    """Progress (S9): when its time is up, the caches can be reset, and later requests store and load.

    The second rank loses a store, and a load, whose request is recomputed.
    """
    options = {"transfer_timeout_s": TIMEOUT_S, "event_log": str(tmp_path)}
    told = lost_reports.run(steered(name="LosingConnector", **options))
    assert told.tokens == [expected("llama")] * (2 + lost_reports.ROUNDS)
    assert told.reset_after_s < 10 * TIMEOUT_S
    assert told.after["vllm:kvsm_transfers_ended{lost}"] >= 2
    assert told.after["vllm:kvsm_retired_blocks"] >= 2
    assert told.after["vllm:kvsm_retired_device_blocks"] > 0
    for what in ("vllm:kvsm_blocks_stored", "vllm:kvsm_blocks_loaded"):
        assert told.after[what] > told.before[what], what
    assert verified(tmp_path)[1].good


# The log's disk.


FULL: Mapping[str, Callable[..., dict[str, Any]]] = {
    "FullDiskConnector": partial(steered, name="FullDiskConnector"),
    "FullDiskRecordingSpec": partial(steered_spec, "FullDiskRecordingSpec"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_degrades_the_log_and_not_the_engine(name: str, tmp_path: Path) -> None:
    """`continue`: tokens and hits are as usual. The log is good up to the failure, and says where it ends;
    the metrics say that it is broken."""
    outcome = run_trial(trial(FULL[name](event_log=str(tmp_path)), THRASHING))
    assert outcome.tokens == expected("llama") * 3
    assert outcome.metric("vllm:external_prefix_cache_hits") > 0
    assert outcome.metric("vllm:kvsm_log_broken") == 1
    assert outcome.metric("vllm:kvsm_log_events_dropped") > 50
    _, verification = verified(tmp_path)
    assert verification.condition.broken_from == verification.last + 1
    assert not verification.good


def test_a_deleted_log_is_noticed(tmp_path: Path) -> None:
    """No write fails: the file is still there for the process that writes it. The log begins again."""
    outcome = run_trial(trial(steered(name="DeletedLogConnector", event_log=str(tmp_path)), THRASHING))
    assert outcome.tokens == expected("llama") * 3
    assert outcome.metric("vllm:kvsm_log_events_dropped") > 20
    (log,) = tmp_path.iterdir()
    assert LogReader(log).head.seq >= outcome.metric("vllm:kvsm_log_events_dropped")


def test_a_full_disk_stops_the_engine_if_asked(tmp_path: Path) -> None:
    """`stop`: no decision goes unrecorded."""
    full = steered(name="FullDiskConnector", event_log=str(tmp_path), log_on_failure="stop")
    with pytest.raises(TrialFailed, match=r"LogWriteFailed.* could not be written"):
        run_trial(trial(full, THRASHING))
    assert verified(tmp_path)[1].condition.complete


# Configuration.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give the size of host memory"),
        ({"cpu_bytes_to_use": 1, "cpu_bytes_to_use_per_rank": 1}, "and not both"),
        ({"cpu_bytes_to_use": 0}, r"`int` >= 1.*cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1, "lazy_offload": True}, "lazy_offload.*vLLM.*'store': .*lazy"),
        ({"cpu_bytes_to_use": 1, "polcy": "arc"}, "'polcy', which kvsm does not know; did you mean policy"),
        ({"cpu_bytes_to_use": 1, "zzz": 1}, r"'zzz'.* not know\. It knows: .*cpu_bytes_to_use, "),
        ({"cpu_bytes_to_use": "much"}, r"cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 1, "store": "often"}, r"'often'.*store"),
        ({"cpu_bytes_to_use": 1, "log_on_failure": "shrug"}, r"'shrug'.*log_on_failure"),
        ({"cpu_bytes_to_use": 1, "lazy_target_blocks": 4}, "lazy_target_blocks is for a lazy store"),
        ({"cpu_bytes_to_use": 1, "store": "lazy", "store_threshold": 2}, "a lazy store has none"),
        (
            {"cpu_bytes_to_use": 1, "canonical_layout": True, "hand_over_directory": "/dev/shm/m"},
            "with hand_over_directory each rank hands over a pool of its own; omit one of them",
        ),
        (
            {"cpu_bytes_to_use": 1, "pool_dir": "/dev/shm/p", "hand_over_directory": "/dev/shm/m"},
            "pool_dir: a pool that is handed over to other engines ends with its process",
        ),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(ConnectorOptions, options)


def test_options_of_others_are_ignored() -> None:
    assert parse(ConnectorOptions, {"cpu_bytes_to_use": "64", "spec_name": "x"}, others=["spec_name"]) == (
        ConnectorOptions(cpu_bytes_to_use=64)
    )


@pytest.mark.parametrize(
    ("options", "engine", "message"),
    [
        ({"polcy": "arc"}, {}, "'polcy', which kvsm does not know; did you mean policy"),
        ({"event_log": "in a file"}, {}, "event_log: no directory can be made in .*Not a directory"),
        ({"cpu_bytes_to_use": 100}, {}, "cpu_bytes_to_use is 100 for all ranks: .* give at least"),
        ({}, {"enable_prefix_caching": False}, "kvsm offloads what the prefix cache holds; enable it"),
    ],
    ids=["unknown option", "no log directory", "too little memory", "no prefix cache"],
)
def test_the_engine_does_not_start(
    options: dict[str, Any], engine: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The error's last lines, which a user sees, contain the reason."""
    file = tmp_path / "file"
    file.write_text("")
    if "event_log" in options:
        options = {"event_log": str(file / options["event_log"]), "log_on_failure": "stop"}
    kvsm = connector_config(**{"cpu_bytes_to_use": HOST_BYTES, **options})
    with pytest.raises(TrialFailed, match=message):
        run_trial(Trial(rounds=[], kv_transfer=kvsm, engine={**POOL, **engine}))


def test_ranks_that_each_have_a_scheduler_are_refused(tmp_path: Path) -> None:
    """None of these schedulers would get the reports of other ranks' copies."""
    config, kv_cache = make_configs(Shape(shards=2), str(tmp_path))
    parallel = changed(config.parallel_config, distributed_executor_backend="external_launcher")
    with pytest.raises(ConfigError, match="external_launcher"):
        KvsmConnector(changed(config, parallel_config=parallel), KVConnectorRole.SCHEDULER, kv_cache)
