"""Engines of `real_scheduler` with vLLM's OffloadingConnector over `KvsmSpec`, or with kvsm's connector below
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import real_scheduler
from real_scheduler import Engine
from scheduler_shapes import Shape, changed
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvsm.vllm.offloading_connector import KvsmOffloadingConnector


class _WithSide:
    """Has the core where these engines look for it."""

    scheduler: Any
    connector_scheduler: Any

    @property
    def _side(self) -> Any:
        if self.connector_scheduler is None:
            return None  # A worker has none.
        manager = self.scheduler.manager
        return SimpleNamespace(_core=manager._engine_core, _disk=None, deadlines=manager.deadlines)


class SpecConnector(_WithSide, OffloadingConnector):
    """vLLM's connector."""


class ToldConnector(_WithSide, KvsmOffloadingConnector):
    """kvsm's connector. retired: the device blocks that it has retired."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self.retired: list[int] = []
        pool: Any = self._pool
        retire = pool.retire

        def noted(blocks: Sequence[int]) -> None:
            self.retired += blocks
            retire(blocks)

        pool.retire = noted


@contextmanager
def built_with_specs(connector: type[Any]) -> Iterator[None]:
    """Builds engines with `KvsmSpec` under this connector inside a `with` block."""
    configs = real_scheduler.make_configs

    def with_spec(shape: Shape, directory: str) -> tuple[Any, Any]:
        config, kv_cache = configs(shape, directory)
        given = config.kv_transfer_config
        options = {"offload_prompt_only": False, **given.kv_connector_extra_config}
        if connector is SpecConnector:
            options |= {"spec_name": "KvsmSpec", "spec_module_path": "kvsm.vllm"}
        settings = {"kv_connector": connector.__name__, "kv_connector_module_path": __name__}
        transfer = changed(given, **settings, kv_connector_extra_config=options)
        return changed(config, kv_transfer_config=transfer), kv_cache

    with ExitStack() as stack:
        stack.enter_context(patch.object(real_scheduler, "make_configs", with_spec))
        stack.enter_context(patch.object(real_scheduler, "KvsmConnector", connector))
        yield


class SpecEngine(Engine):
    """An engine whose scheduler has vLLM's connector over `KvsmSpec`.

    metadata: what the last scheduled step tells the workers.
    """

    _has_stepped = False
    """Whether a step was scheduled since the last reset."""

    connector: type[Any] = SpecConnector

    def __init__(self, shape: Shape, seed: int) -> None:
        with built_with_specs(self.connector):
            super().__init__(shape, seed)

    def schedule(self) -> bool:
        """Without a check of leases, because copies hold placeholders here. Races show a block that is
        overwritten."""
        if self.steps_under_way >= self.shape.most_steps or not self.scheduler.has_requests():
            return False
        output = self.scheduler.schedule()
        self._has_stepped = True
        self._scheduled.append(self._runner.step(output, self.scheduler.requests, self._truths))
        self.metadata = metadata = output.kv_connector_metadata
        self.counts["steps"] += 1
        self.counts["loads"] += len(metadata.load_jobs)
        self.counts["loads in a step"] += sum(
            getattr(job, "sync", False) for job in metadata.load_jobs.values()
        )
        self.counts["stores"] += len(metadata.store_jobs)
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        return True

    def reset(self, running: bool, connector: bool) -> None:
        """Reset as far as vLLM's OffloadingConnector allows.

        It asserts that a step lies between two resets, and that a preempted request loads nothing in the same
        step. So nothing must be left to load. After a reset it offers all blocks of a running request again,
        even blocks that have left the sliding window and hold the content of another request. So with a
        window no request may be running.
        """
        if not self._has_stepped:
            return
        self._has_stepped, wholes = False, self.counts["whole resets"]
        running = running or self.shape.groups > 1
        super().reset(running, connector)
        if running and self.counts["whole resets"] == wholes:
            super().reset_host()

    def _check_flushed(self, metadata: Any) -> None:
        """vLLM makes steps wait for other reasons too."""

    def _retired_device_blocks(self) -> list[int]:
        """None: a load is never given up towards vLLM."""
        return []

    def reset_host(self) -> None:
        if self._has_stepped and self.shape.groups == 1:
            self._has_stepped = False
            super().reset_host()


class ToldEngine(SpecEngine):
    """An engine with `KvsmOffloadingConnector`. Any reset may come at any time.

    stores: the device blocks of each store.
    """

    connector = ToldConnector

    def __init__(self, shape: Shape, seed: int) -> None:
        self.stores: list[list[int]] = []
        super().__init__(shape, seed)

    def schedule(self) -> bool:
        if not super().schedule():
            return False
        self.stores += [store.src_spec.block_ids.tolist() for store in self.metadata.store_jobs.values()]
        self.counts["failed loads"] += len(self.metadata.failed_loads)
        self._check_queue()
        return True

    def reset(self, running: bool, connector: bool) -> None:
        Engine.reset(self, running, connector)

    def reset_host(self) -> None:
        Engine.reset_host(self)

    def _retired_device_blocks(self) -> list[int]:
        retired: list[int] = sorted(self.scheduler.connector.retired)
        return retired
