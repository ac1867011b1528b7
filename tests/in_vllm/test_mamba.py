"""Models with mamba layers: vLLM's real scheduler and cache manager beside `KvsmConnector`, without a model.

The states of a mamba group (`--mamba-cache-mode align`) are simulated nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from scheduler_shapes import BLOCK_TOKENS, Shape, changed, make_configs, make_scheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.plan import WorkerReport
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.vllm.step_messages import StepReports

SHAPE = Shape(device_blocks=24, host_blocks=64, step_tokens=2 * BLOCK_TOKENS)
MAMBA = 1
"""The index of its group."""


class Engine:
    """Serves one request after the other, step by step. A copy ends in the step that starts it."""

    def __init__(self, directory: Path) -> None:
        init_none_hash(sha256)
        config, _ = make_configs(SHAPE, str(directory))
        config = changed(config, cache_config=changed(config.cache_config, mamba_cache_mode="align"))
        self.scheduler = make_scheduler(SHAPE, config, _kv_cache())
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.core = self.scheduler.connector._side._core.offloader
        self.offered: list[set[int]] = []
        """For each step, the device blocks of the states that vLLM offered in it."""
        self.stored: list[set[int]] = []
        """For each step, the device blocks that stores begin to read before it computes."""
        self.loaded: list[set[int]] = []
        """For each step, the device blocks that loads write."""

    def serve(self, name: str, tokens: list[int]) -> None:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=None)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=hasher))
        while self.scheduler.has_requests():
            self.step()

    def step(self) -> None:
        manager = self.scheduler.kv_cache_manager
        take = manager.take_boundary_state_offloads
        seen: set[int] = set()

        def taken() -> Any:
            found = take()
            seen.update(block for states in found.values() for _, block, _ in states)
            return found

        with patch.object(manager, "take_boundary_state_offloads", taken):
            output = self.scheduler.schedule()
        plan = output.kv_connector_metadata.plan
        self.offered.append(seen)
        self.stored.append({block for job in plan.stores for block in listed(job.pairs()[0])})
        self.loaded.append({block for job in plan.loads for block in listed(job.pairs()[0])})
        reports = tuple(WorkerReport(job.transfer, 0, True) for job in (*plan.loads, *plan.stores))
        done = KVConnectorOutput(kv_connector_worker_meta=StepReports(reports) if reports else None)
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, places, sampled_token_ids=sampled, kv_connector_output=done)
        )


def _kv_cache() -> KVCacheConfig:
    full = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    state = MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((full.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    size = SHAPE.device_blocks * full.page_size_bytes
    groups = [KVCacheGroupSpec(["attention"], full), KVCacheGroupSpec(["mamba"], state)]
    tensors = [
        KVCacheTensor(size, group.layer_names, layer_stride=size, block_stride=full.page_size_bytes)
        for group in groups
    ]
    return KVCacheConfig(SHAPE.device_blocks, tensors, groups)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.scheduler.shutdown()


def of_mamba(engine: Engine) -> int:
    """How many states can be matched."""
    suffix = MAMBA.to_bytes(GROUP_INDEX_BYTES, "big")
    return sum(key.endswith(suffix) for key in engine.core.ledger.index)


PROMPT = list(range(10, 10 + 6 * BLOCK_TOKENS + 1))


def test_a_state_is_stored_behind_the_step_that_computes_it(engine: Engine) -> None:
    """Order of copies (S12): vLLM offers a state in the step that computes it, before it has computed."""
    engine.serve("r", PROMPT)
    assert any(engine.offered)
    for offered, stored in zip(engine.offered, engine.stored):
        assert not offered & stored
    assert of_mamba(engine) == sum(map(len, engine.offered))


def test_a_state_that_was_stored_is_loaded(engine: Engine) -> None:
    """A hit needs the blocks of the attention layers, and only the state at its end."""
    engine.serve("first", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.loaded.clear()
    engine.serve("second", PROMPT)
    # Six blocks of attention, and the state at their end.
    assert [len(blocks) for blocks in engine.loaded if blocks] == [7]


def test_nothing_stays_held(engine: Engine) -> None:
    """One release per hold (S4), also for states that were offered when a reset came."""
    engine.serve("first", PROMPT)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    sampling.update_from_generation_config({}, eos_token_id=None)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    engine.scheduler.add_request(Request("second", PROMPT[::-1], sampling, None, block_hasher=hasher))
    engine.step()
    assert engine.offered[-1]
    engine.scheduler.reset_connector_cache()
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.pool.get_num_free_blocks() == SHAPE.device_blocks - 1
    assert Direction.STORE not in {one.direction for one in engine.core.ledger.transfers.values()}
