"""vLLM's real schedulers and its own OffloadingConnector over `KvsmSpec`, with copies that end by a seed.

These are the engines of `real_scheduler` with the other connector. Their content is checked word by word,
copies and compute are checked for races, and caches are reset under load. No copy fails here, because this
interface has no failed copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import real_scheduler
from real_scheduler import Engine
from scheduler_shapes import Shape, changed
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvsm.vllm import worker_side
from kvsm.vllm.rank_copies import RankCopies
from kvsm.vllm.trial import spec_config


class SpecConnector(OffloadingConnector):
    """vLLM's connector, with the core where these engines look for it."""

    @property
    def _side(self) -> Any:
        manager: Any = self.scheduler.manager
        return SimpleNamespace(_core=manager._engine_core, deadlines=manager.deadlines)


@contextmanager
def built_with_specs() -> Iterator[None]:
    """Builds engines with `KvsmSpec` inside a `with` block."""
    configs = real_scheduler.make_configs

    def with_spec(shape: Shape, directory: str) -> tuple[Any, Any]:
        config, kv_cache = configs(shape, directory)
        given = config.kv_transfer_config
        settings = spec_config(offload_prompt_only=False, **given.kv_connector_extra_config)
        settings |= {"kv_connector": SpecConnector.__name__, "kv_connector_module_path": __name__}
        transfer = changed(given, **settings)
        return changed(config, kv_transfer_config=transfer), kv_cache

    def copies(tensors: Sequence[Any], host_blocks: int, verify: bool) -> RankCopies:
        # Looked up by this name, because a rank puts its simulated copies there.
        return worker_side.make_copies(tensors, host_blocks, verify)

    with ExitStack() as stack:
        stack.enter_context(patch.object(real_scheduler, "make_configs", with_spec))
        stack.enter_context(patch.object(real_scheduler, "KvsmConnector", SpecConnector))
        stack.enter_context(patch("kvsm.vllm.spec_worker.make_copies", copies))
        yield


class SpecEngine(Engine):
    """An engine whose scheduler has vLLM's connector over `KvsmSpec`."""

    _has_stepped = False
    """Whether a step was scheduled since the last reset."""

    def __init__(self, shape: Shape, seed: int) -> None:
        with built_with_specs():
            super().__init__(shape, seed)

    def schedule(self) -> bool:
        """Without a check of leases, because copies hold placeholders here. Races show a block that is
        overwritten."""
        if self.steps_under_way >= self.shape.most_steps or not self.scheduler.has_requests():
            return False
        output = self.scheduler.schedule()
        self._has_stepped = True
        self._scheduled.append(self._runner.step(output, self.scheduler.requests, self._truths))
        metadata = output.kv_connector_metadata
        self.counts["loads"] += len(metadata.load_jobs)
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
        """The spec keeps stepping."""

    def _retired_device_blocks(self) -> list[int]:
        """None: a load is never given up towards vLLM."""
        return []

    def reset_host(self) -> None:
        if self._has_stepped and self.shape.groups == 1:
            self._has_stepped = False
            super().reset_host()


SHAPES = {
    "small": Shape(device_blocks=26, host_blocks=12),
    "chunks": Shape(device_blocks=26, host_blocks=80, extra={"blocks_per_chunk": 2}),
    "sliding window": Shape(groups=2, device_blocks=40, host_blocks=160),
    "asynchronous": Shape(is_async=True, device_blocks=26, host_blocks=40, extra={"policy": "arc"}),
    "ranks in a pipeline": Shape(stages=2, shards=2, device_blocks=26, host_blocks=160),
    "seldom offered": Shape(is_async=True, device_blocks=26, host_blocks=80, extra={"store_threshold": 2}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_happens_the_words_are_right(name: str) -> None:
    """Content, order and leases are right with every act that vLLM allows. Then all work ends, and the log
    agrees."""
    happened: Counter[str] = Counter()
    for seed in range(WALKS):
        happened += live(seed, SHAPES[name])
    for what in ("loads", "stores", "preemptions", "aborts", "whole resets", "host resets"):
        assert happened[what], what


WALKS, ACTS = 6, 300


def live(seed: int, shape: Shape) -> Counter[str]:
    """Run one engine until its end."""
    random, engine = Random(f"spec {seed}"), SpecEngine(shape, seed)
    try:
        for _ in range(ACTS):
            if random.random() < 0.005:
                engine.reset(running=True, connector=True)
            real_scheduler.act(engine, random)
            engine.check()
        engine.drain()
        engine.close()
    except BaseException as error:
        engine.discard()
        error.args = (f"live({seed}, {shape}): {error}", *error.args[1:])
        raise
    return engine.counts
