"""The files of an engine's disk tier in vLLM: their directory and their number of slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsm.errors import ConfigError
from kvsm.identity import PoolIdentity
from kvsm.tiers.disk import DiskGeometry, SlotFile, TierFiles
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.host_sharing import shares_pool
from kvsm.vllm.kv_cache_config import block_bytes_of


class DiskPlace(TierFiles):
    """The files of one engine's disk tier. Making this object opens none of them.

    Raises `ConfigError` if this engine cannot have a disk tier.
    """

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        assert options.disk_dir is not None
        assert options.disk_bytes is not None
        if shares_pool(options, vllm_config, kv_cache_config):
            raise ConfigError(
                "disk_dir: ranks that share a host pool have no disk tier yet; "
                "omit canonical_layout or disk_dir"
            )
        parallel = vllm_config.parallel_config
        engine = f"engine{parallel.data_parallel_index}"
        super().__init__(Path(options.disk_dir), engine, parallel.world_size)
        slot_bytes = block_bytes_of(kv_cache_config) * options.blocks_per_chunk
        one = DiskGeometry(slot_bytes, 1)
        room = options.disk_bytes // self.ranks - one.header_at(0)
        self.num_slots = room // one.slot_bytes
        self._payload_bytes = slot_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"disk_bytes is {options.disk_bytes:,} for all ranks: on each of {self.ranks} this has no "
                f"room for one block of {slot_bytes:,} bytes; give at least {one.file_bytes * self.ranks:,}"
            )

    def open_rank(self, rank: int, identity: PoolIdentity) -> SlotFile:
        """Open the slots of a rank (`TierFiles.open_slots`)."""
        geometry = DiskGeometry(self._payload_bytes, self.num_slots, rank, self.ranks)
        return self.open_slots(rank, geometry, identity)


def disk_place(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> DiskPlace | None:
    """Return the files of this engine's disk tier; None if it has none. Raises `ConfigError`."""
    return None if options.disk_dir is None else DiskPlace(options, vllm_config, kv_cache_config)
