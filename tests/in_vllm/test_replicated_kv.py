"""KV cache that two ranks hold is kept on the host once, in vLLM."""

from __future__ import annotations

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

from kvsm.events import LoadPlanned, WorkerReported
from kvsm.log import LogReader
from kvsm.replay import verify_log
from kvsm.vllm import host_sharing
from kvsm.vllm.extra_config import ConnectorOptions, SpecOptions
from kvsm.vllm.host_sharing import kv_replicas, pool_path, spec_replicas
from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA
from kvsm.vllm.trial import TrialOutcome, connector_config, run_trial, spec_config

LATENT: Mapping[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    **{name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    **{name: LLAMA[name] for name in ("num_attention_heads", "vocab_size", "max_position_embeddings")},
    **{name: LLAMA[name] for name in ("rms_norm_eps", "torch_dtype", "bos_token_id", "eos_token_id")},
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "hidden_act": "silu",
}
"""A DeepSeek-V2 with dense layers: latent attention, which vLLM keeps whole on each rank."""

BLOCK_BYTES = {"llama": 2 * 2 * 2 * BLOCK_TOKENS * 32 * 4, "deepseek_v2": 2 * BLOCK_TOKENS * (512 + 64) * 4}
"""Bytes of a block of all heads: two layers of float32."""

HOST_BYTES = 16 << 20


class Case(NamedTuple):
    """An engine with two ranks. kv_heads: of its Llama; 0: it is a DeepSeek."""

    offload: str
    kv_heads: int
    options: Mapping[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        return {**LLAMA, "num_key_value_heads": self.kv_heads} if self.kv_heads else dict(LATENT)

    @property
    def capacity(self) -> int:
        """Blocks that fit, if each byte is kept once."""
        shape = BLOCK_BYTES[self.model["model_type"]]
        return HOST_BYTES // (shape * self.kv_heads // 2 if self.kv_heads else shape)

    def transfer(self, log: Path) -> dict[str, Any]:
        options = {"cpu_bytes_to_use": HOST_BYTES, "event_log": str(log), **self.options}
        return connector_config(**options) if self.offload == "KvsmConnector" else spec_config(**options)


VERIFIED: Mapping[str, Any] = {"verify_copies": True}

CANONICAL: Mapping[str, Any] = {"canonical_layout": True}

CASES = {
    "one head": Case("KvsmConnector", 1, VERIFIED),
    "canonical": Case("KvsmConnector", 2, {**VERIFIED, **CANONICAL}),
    "canonical spec": Case("KvsmSpec", 2, CANONICAL),
}


def served(model: dict[str, Any], transfer: dict[str, Any] | None) -> TrialOutcome:
    """Two ranks serve a part of the workload, which the device cannot hold."""
    rounds = [prompts[:14] for prompts in make_rounds()[:3]]
    return run_trial(make_trial(model, Row(ranks=2), rounds=rounds, kv_transfer=transfer), TIMEOUT_S)


@cache
def answers(kv_heads: int) -> list[list[int]]:
    """The answers without offload."""
    return served({**LLAMA, "num_key_value_heads": kv_heads}, None).tokens


def pool_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("kvsm-")}


@pytest.mark.parametrize(
    "name",
    ["one head", "canonical", pytest.param("canonical spec", marks=pytest.mark.slow)],
)
def test_ranks_share_a_host_pool(name: str, tmp_path: Path) -> None:
    """Tokens are those without offload, and host memory holds each byte once. No file is left."""
    case, before = CASES[name], pool_files()
    outcome = served(case.model, case.transfer(tmp_path))
    assert outcome.tokens == answers(case.kv_heads)
    assert outcome.metric("vllm:external_prefix_cache_hits") > 0
    assert outcome.metric("vllm:kvsm_capacity_blocks") == case.capacity
    assert outcome.metric("vllm:kvsm_transfers_ended", "failed") == 0
    assert pool_files() <= before
    (log,) = tmp_path.iterdir()
    verification = verify_log(log)
    assert verification.good, verification
    events = [*LogReader(log).events()]
    assert any(isinstance(event, LoadPlanned) for event in events)
    if case.offload == "KvsmConnector":
        assert {event.worker for event in events if isinstance(event, WorkerReported)} == {0, 1}


# Which ranks hold the same KV cache.


def configs(heads: int = 1, per_rank: int = 1, ranks: int = 2, **parallel: Any) -> tuple[Any, Any]:
    """vLLM's configuration of an engine with so many KV heads, and of its KV cache."""
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


def test_nothing_is_shared_without_a_directory() -> None:
    alone = ConnectorOptions(cpu_bytes_to_use=1, shared_pool_directory=None)
    assert kv_replicas(alone, *configs()) == 1
    spec = SimpleNamespace(replicated_layout=True, parallel=SimpleNamespace(world_size=2))
    assert spec_replicas(SpecOptions(cpu_bytes_to_use=1), spec) == 2
    assert spec_replicas(SpecOptions(cpu_bytes_to_use=1, shared_pool_directory=None), spec) == 1


def test_engines_and_connectors_have_files_of_their_own(tmp_path: Path) -> None:
    """Another start has another id, and two connectors of one engine have other options. No name leaves the
    directory, whatever id a user gives."""
    options = ConnectorOptions(cpu_bytes_to_use=1, shared_pool_directory=str(tmp_path))
    given = [("a", {}), ("b", {}), ("a", {"policy": "arc"}), ("../../a", {})]
    paths = {pool_path(options, name, extra) for name, extra in given}
    assert len(paths) == len(given)
    assert {path.parent for path in paths} == {tmp_path}
