"""The shapes of the engines of `real_scheduler`, and the configuration from which vLLM's schedulers are
built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hanging_copies import TIMEOUT_S
from vllm.config import KVTransferConfig

from kvsm.check.vllm_fuzz.configs import changed, hasher, make_config, make_kv_cache_config
from kvsm.check.vllm_fuzz.configs import make_scheduler as make_vllm_scheduler
from kvsm.check.vllm_fuzz.shape import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MOST_BLOCKS,
    MOST_TOKENS,
    VOCABULARY,
    WINDOW,
    WORD_BYTES,
)
from kvsm.tiers.disk import DiskGeometry

__all__ = [
    "BLOCK_TOKENS",
    "CHOICES",
    "MOST_BLOCKS",
    "MOST_TOKENS",
    "VOCABULARY",
    "WINDOW",
    "WORD_BYTES",
    "Shape",
    "changed",
    "hasher",
    "make_configs",
    "make_scheduler",
    "valid",
]


class Shape(NamedTuple):
    """The shape of an engine.

    runner: the version of vLLM's model runner that it serves, 1 or 2.
    stages: pipeline stages.
    shards: tensor-parallel ranks of each stage.
    drafts: speculative tokens of each step.
    failing: share of the copies that fail on each rank.
    hanging: share of the copies that hang on each rank (`hanging_copies`).
    disk_blocks: slots of each rank's file; 0: there is no disk tier.
    role: `kv_producer`, `kv_consumer` or `kv_both`.
    extra: options of the connector.
    """

    is_async: bool = False
    runner: int = 1
    stages: int = 1
    shards: int = 1
    groups: int = 1
    drafts: int = 0
    device_blocks: int = 32
    host_blocks: int = 16
    step_tokens: int = 16
    most_running: int = 4
    failing: float = 0.0
    hanging: float = 0.0
    on_failed_load: str = "recompute"
    disk_blocks: int = 0
    role: str = "kv_both"
    extra: Mapping[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.stages * self.shards

    @property
    def flushes(self) -> bool:
        """Whether the last step waits for all copies."""
        return bool(self.extra.get("last_step") == "flush")

    @property
    def most_steps(self) -> int:
        """The most steps that may be in flight at once."""
        return self.stages + self.is_async


CHOICES: Mapping[str, Sequence[Any]] = {
    "is_async": (False, True, True),
    "runner": (1, 2),
    "stages": (1, 1, 2),
    "shards": (1, 1, 2),
    "groups": (1, 2),
    "drafts": (0, 0, 2),
    "device_blocks": (26, 34, 48),
    "host_blocks": (6, 40, 160, 160),
    "step_tokens": (8, 16, 64),
    "most_running": (2, 4),
    "failing": (0.0, 0.0, 0.2),
    "hanging": (0.0, 0.0, 0.0, 0.1),
    "on_failed_load": ("recompute", "recompute", "fail"),
    "disk_blocks": (0,),  # Copies of a disk are real, and the clock of a drawn engine is not.
    "extra": (
        {},
        {"policy": "arc"},
        {"policy": "auto"},
        {"policy": "s3fifo", "store_threshold": 2},
        {"prompt_only": True, "last_step": "flush"},
        {"last_step": "flush"},
        {"blocks_per_chunk": 2},
        {"store": "lazy", "lazy_target_blocks": 6},
        {"store": "lazy", "lazy_target_blocks": 16, "policy": "slru"},
    ),
}
"""The values from which a `Shape` is drawn."""


def valid(shape: Shape) -> Shape:
    """Return this shape, or the nearest one that vLLM accepts."""
    if shape.stages > 1:
        shape = shape._replace(drafts=0, runner=2 if shape.is_async else shape.runner)
    return shape


def make_scheduler(shape: Shape, config: Any, kv_cache: Any) -> Any:
    return make_vllm_scheduler(config, kv_cache, shape.most_steps, shape.runner)


def make_configs(shape: Shape, directory: str) -> tuple[Any, Any]:
    """Return (configuration of vLLM, configuration of its KV cache)."""
    extra = {
        "cpu_bytes_to_use": shape.host_blocks * BLOCK_BYTES * shape.ranks,
        "event_log": f"{directory}/events",
        "log_durability": "none",
        "transfer_timeout_s": TIMEOUT_S,
        **shape.extra,
    }
    if shape.disk_blocks:
        size = DiskGeometry(BLOCK_BYTES, shape.disk_blocks).file_bytes * shape.ranks
        extra.update(disk_dir=f"{directory}/disk", disk_bytes=size)
    transfer = KVTransferConfig(
        kv_connector="KvsmConnector",
        kv_connector_module_path="kvsm.vllm",
        kv_role=shape.role,
        kv_load_failure_policy=shape.on_failed_load,
        kv_connector_extra_config=extra,
    )
    config = make_config(
        transfer,
        stages=shape.stages,
        shards=shape.shards,
        is_async=shape.is_async,
        drafts=shape.drafts,
        device_blocks=shape.device_blocks,
        step_tokens=shape.step_tokens,
        most_running=shape.most_running,
    )
    return config, make_kv_cache_config(shape.device_blocks, (0, WINDOW)[: shape.groups])
