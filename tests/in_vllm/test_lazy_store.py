"""A lazy store in vLLM: what is evicted from the device is on the host before."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld


def test_a_step_in_which_each_request_begins_a_block_evicts_nothing_that_the_host_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full offload (S16). Sixteen tokens are a block of four requests, or a block each of sixteen."""
    shape = EngineShape(
        connector="KvsmConnector",
        extra={"store": "lazy"},
        most_running=16,
        step_tokens=16,
        device_blocks=200,
        host_blocks=2000,
    )
    world = VllmWorld(shape)
    world.do(("settle",))
    index = world.scheduler.connector._side._core.offloader.ledger.index
    pool = world.scheduler.kv_cache_manager.block_pool
    evicted: list[bool] = []
    evict = pool._maybe_evict_cached_block

    def noted(block: Any, *more: Any) -> Any:
        if block.block_hash is not None:
            evicted.append(block.block_hash in index)
        return evict(block, *more)

    monkeypatch.setattr(pool, "_maybe_evict_cached_block", noted)
    for wave in range(12):
        for number in range(16):
            prompt = [wave * 20 + number + 1] * (3 + number // 5)
            world.add_request(f"w{wave}_{number}", prompt, 14, 0)
        for _ in range(60):
            world.do(("settle",))
            if not world.scheduler.has_unfinished_requests():
                break
    assert len(evicted) > 100
    assert all(evicted)
