"""KV cache that two ranks hold is kept on the host once, in vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from scheduler_shapes import Shape, changed, make_configs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec
from workloads import TIMEOUT_S, Row, make_rounds, make_trial

from kvsm.core.log import LogReader
from kvsm.events import LoadPlanned, WorkerReported
from kvsm.explain.story import verify_log
from kvsm.vllm import host_sharing
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.host_sharing import kv_replicas, pool_path
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA
from kvsm.vllm.trial import TrialOutcome, connector_config, run_trial

HEAD_BYTES = 2 * BLOCK_TOKENS * 2 * 32 * 4
"""Bytes of a block of one KV head: two layers of float32."""

HOST_BYTES = 16 << 20


class Case(NamedTuple):
    """An engine with two ranks. kv_heads: of its Llama."""

    kv_heads: int
    options: Mapping[str, Any]

    def transfer(self, logs: Path) -> dict[str, Any]:
        options = {"cpu_bytes_to_use": HOST_BYTES, "event_log": str(logs), **self.options}
        return connector_config(**options) | {"engine_id": f"kvsm-test-{os.getpid()}"}


CASES = {
    "one head": Case(1, {"verify_copies": True}),
    "canonical": Case(2, {"verify_copies": True, "canonical_layout": True}),
}


def served(kv_heads: int, transfer: dict[str, Any] | None) -> TrialOutcome:
    """Two ranks serve a part of the workload, which the device cannot hold."""
    rounds = [prompts[:14] for prompts in make_rounds()[:3]]
    model = {**LLAMA, "num_key_value_heads": kv_heads}
    return run_trial(make_trial(model, Row(ranks=2), rounds=rounds, kv_transfer=transfer), TIMEOUT_S)


@cache
def answers(kv_heads: int) -> list[list[int]]:
    """The answers without offload."""
    return served(kv_heads, None).tokens


@pytest.mark.parametrize("name", CASES)
def test_ranks_share_a_host_pool(name: str, tmp_path: Path) -> None:
    """Tokens are those without offload, and host memory holds each byte once. No file is left."""
    case, logs = CASES[name], tmp_path / "logs"
    transfer = case.transfer(logs)
    outcome = served(case.kv_heads, transfer)
    assert outcome.tokens == answers(case.kv_heads)
    assert outcome.metric("vllm:external_prefix_cache_hits") > 0
    assert outcome.metric("vllm:kvsm_capacity_blocks") == HOST_BYTES // (case.kv_heads * HEAD_BYTES)
    assert outcome.metric("vllm:kvsm_transfers_ended", "failed") == 0
    assert not pool_path(transfer["engine_id"], transfer["kv_connector_extra_config"]).exists()
    (log,) = logs.iterdir()
    verification = verify_log(log)
    assert verification.good, verification
    events = [*LogReader(log).events()]
    assert any(isinstance(event, LoadPlanned) for event in events)
    assert {event.worker for event in events if isinstance(event, WorkerReported)} == {0, 1}


# Which ranks hold the same KV cache.


def configs(heads: int = 1, per_rank: int = 1, ranks: int = 2, **parallel: Any) -> tuple[Any, Any]:
    """vLLM's configuration of an engine with this number of KV heads, and of its KV cache."""
    config, kv_cache = make_configs(Shape(shards=2), "/unused")
    changes = {"tensor_parallel_size": ranks, "world_size": ranks, "distributed_executor_backend": "mp"}
    settings = changed(config.parallel_config, **{**changes, **parallel})
    text = SimpleNamespace(num_key_value_heads=heads)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads, hf_text_config=text)
    for group in kv_cache.kv_cache_groups:
        object.__setattr__(group.kv_cache_spec, "num_kv_heads", per_rank)
    return SimpleNamespace(parallel_config=settings, model_config=model), kv_cache


OPTIONS = ConnectorOptions(cpu_bytes_to_use=1)


@pytest.mark.parametrize(
    ("heads", "per_rank", "ranks", "replicas"),
    [(1, 1, 2, 2), (1, 1, 4, 4), (2, 1, 4, 2), (2, 1, 2, 1), (4, 2, 2, 1), (3, 1, 4, 1), (1, 2, 2, 1)],
)
def test_fewer_heads_than_ranks_are_the_same_on_some(
    heads: int, per_rank: int, ranks: int, replicas: int
) -> None:
    """A rank of a model with as many heads has one of its own. What does not add up is not shared."""
    assert kv_replicas(OPTIONS, *configs(heads, per_rank, ranks)) == replicas


def test_latent_attention_is_the_same_on_all_ranks() -> None:
    """vLLM says so itself."""
    config, kv_cache = configs(heads=128)
    kv_cache.kv_tp_replicas = 2
    assert kv_replicas(OPTIONS, config, kv_cache) == 2


def test_a_model_whose_layers_may_differ_is_not_shared() -> None:
    """One head of some layers says nothing of the others: wrong KV cache would be served."""
    config, kv_cache = configs()
    config.model_config.hf_text_config.num_global_key_value_heads = 2
    assert kv_replicas(OPTIONS, config, kv_cache) == 1
    config, kv_cache = configs()
    config.model_config.hf_text_config.block_configs = []
    assert kv_replicas(OPTIONS, config, kv_cache) == 1
    config, kv_cache = configs()
    spec = kv_cache.kv_cache_groups[0].kv_cache_spec
    latent = MLAAttentionSpec(
        block_size=spec.block_size, num_kv_heads=1, head_size=spec.head_size, dtype=spec.dtype
    )
    kv_cache.kv_cache_groups.append(KVCacheGroupSpec(["latent"], latent))
    assert kv_replicas(OPTIONS, config, kv_cache) == 1


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"distributed_executor_backend": "ray"}, "the executor ray may start them on several machines"),
        ({"nnodes": 2}, "they are on several machines"),
    ],
)
def test_ranks_on_several_machines_keep_a_copy_each_and_say_so(
    parallel: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(host_sharing.log, "warning", lambda *words: said.append(words))
    assert kv_replicas(OPTIONS, *configs(**parallel)) == 1
    assert [words[1:] for words in said] == [(2, reason)]


@pytest.mark.parametrize("parallel", [{"decode_context_parallel_size": 2}, {"world_size": 4}])
def test_context_parallel_ranks_and_pipeline_stages_are_no_replicas(parallel: dict[str, Any]) -> None:
    """They hold other tokens, or other layers."""
    assert kv_replicas(OPTIONS, *configs(**parallel)) == 1


@pytest.mark.parametrize(
    ("directories", "reason"),
    [
        (
            {"hand_over_directory": "/dev/shm/m"},
            "with hand_over_directory each rank hands over a pool of its own",
        ),
        ({"disk_dir": "/a", "disk_bytes": 1 << 20}, "with disk_dir each rank has a pool of its own"),
    ],
)
def test_nothing_is_shared_with_a_hand_over_directory_or_a_disk_tier(
    directories: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start says what that costs."""
    for name in ("vllm", "vllm.kvsm"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    options = ConnectorOptions(cpu_bytes_to_use=1, **directories)
    with caplog.at_level(logging.WARNING, "vllm.kvsm"):
        assert kv_replicas(options, *configs()) == 1
    assert caplog.messages == [
        f"kvsm: 2 ranks hold the same KV cache, and each keeps its own copy in host memory: {reason}"
    ]


def test_engines_and_connectors_have_files_of_their_own() -> None:
    """Another start has another id, and two connectors of one engine have other options. No name leaves the
    directory, whatever id a user gives."""
    given = [("a", {}), ("b", {}), ("a", {"policy": "arc"}), ("../../a", {})]
    paths = {pool_path(name, extra) for name, extra in given}
    assert len(paths) == len(given)
    assert {path.parent for path in paths} == {host_sharing.SHARED_MEMORY}
