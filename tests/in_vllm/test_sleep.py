"""The connector's worker before and after vLLM's sleep mode, which takes the memory of the KV cache away.

A CPU has no sleep mode, so the tests call what vLLM's worker calls, and move the KV cache themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from scheduler_shapes import BLOCK_TOKENS, WORD_BYTES, Shape, make_configs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.events import Direction
from kvsm.vllm import KvsmConnector
from kvsm.vllm.step_messages import StepPlan

BLOCKS = 32


class Rank(NamedTuple):
    """A worker's connector and its KV cache, one row a block."""

    connector: Any
    cache: torch.Tensor

    def copy(self, transfer: int, direction: Direction, device: int, host: int) -> None:
        """Begin a copy of one block in a step."""
        job = TransferJob(transfer, direction, (device,), (host,))
        is_load = direction is Direction.LOAD
        plan = TransferPlan(loads=(job,)) if is_load else TransferPlan(stores=(job,))
        self.connector.bind_connector_metadata(StepPlan(16, plan))

    def reports(self, number: int) -> dict[int, bool]:
        """Return the next reports: transfer -> whether it was good. They may take several steps."""
        found: dict[int, bool] = {}
        while len(found) < number:
            meta = self.connector.build_connector_worker_meta()
            if meta is not None:
                found.update({one.transfer: one.good for one in meta.reports})
        return found

    def move(self) -> torch.Tensor:
        """Give the KV cache other memory, without its content. Returns what it had."""
        before = torch.empty(0, dtype=torch.int8).set_(
            self.cache.untyped_storage(), 0, self.cache.shape, self.cache.stride()
        )
        self.cache.set_(torch.zeros_like(self.cache).untyped_storage(), 0, before.shape, before.stride())
        return before


@pytest.fixture(params=[False, True], ids=["plain", "verified"])
def rank(request: Any, tmp_path: Path) -> Iterator[Rank]:
    shape = Shape(extra={"verify_copies": request.param})
    config, kv_cache = make_configs(shape, str(tmp_path))
    connector = KvsmConnector(config, KVConnectorRole.WORKER, kv_cache)
    content = torch.arange(BLOCKS * BLOCK_TOKENS * WORD_BYTES, dtype=torch.int32) % 251 - 100
    cache = content.to(torch.int8).view(BLOCKS, BLOCK_TOKENS * WORD_BYTES)
    connector.register_kv_caches({"layer.0": cache})
    yield Rank(connector, cache)
    connector.shutdown()


def test_nothing_touches_the_kv_cache_of_an_engine_that_sleeps(rank: Rank) -> None:
    """Order of copies (S12): the memory may be unmapped when the call returns. The report comes later."""
    rank.copy(1, Direction.STORE, 3, 5)
    rank.connector.unregister_kv_caches()
    rank.cache.zero_()
    rank.connector.unregister_kv_caches()
    rank.connector.restore_kv_caches()
    rank.copy(2, Direction.LOAD, 7, 5)
    assert rank.reports(2) == {1: True, 2: True}
    assert rank.cache[7].tolist() == [number % 251 - 100 for number in range(96, 128)]


def test_a_kv_cache_that_moved_is_copied_from_its_new_place(rank: Rank) -> None:
    """Correct bytes (S15): the host pool keeps its blocks, and the old memory is not touched any more."""
    expected = rank.cache[3].clone()
    rank.copy(1, Direction.STORE, 3, 5)
    rank.connector.unregister_kv_caches()
    before = rank.move()
    untouched = before.clone()
    rank.connector.restore_kv_caches()
    rank.copy(2, Direction.LOAD, 7, 5)
    rank.cache[9] = 17
    rank.copy(3, Direction.STORE, 9, 6)
    assert rank.reports(3) == {1: True, 2: True, 3: True}
    rank.copy(4, Direction.LOAD, 10, 6)
    assert rank.reports(1) == {4: True}
    assert torch.equal(rank.cache[7], expected)
    assert torch.equal(rank.cache[10], rank.cache[9])
    assert torch.equal(before, untouched)


def test_statistics_go_on_after_a_move(rank: Rank) -> None:
    """Counters never fall: what was counted before is not counted again."""
    rank.copy(1, Direction.STORE, 3, 5)
    rank.reports(1)
    first = rank.connector.get_kv_connector_stats()
    rank.move()
    rank.connector.restore_kv_caches()
    rank.copy(2, Direction.STORE, 4, 6)
    rank.reports(1)
    second = rank.connector.get_kv_connector_stats()
    assert first.data["copied_bytes"] == second.data["copied_bytes"]


def test_a_connector_without_kv_caches_sleeps_too(tmp_path: Path) -> None:
    """vLLM may sleep before the first step."""
    config, kv_cache = make_configs(Shape(), str(tmp_path))
    connector = KvsmConnector(config, KVConnectorRole.WORKER, kv_cache)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert connector.build_connector_worker_meta() is None
