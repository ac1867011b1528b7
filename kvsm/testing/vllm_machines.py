"""Machines for vLLM's own managers and secondary tiers: built-in targets of `kvsm conform`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvsm.check.vllm_fuzz.memory_tier import MemoryTier
from kvsm.testing.machine_base import rule
from kvsm.testing.manager_machine import ManagerMachine
from kvsm.testing.secondary_tier_machine import SecondaryTierMachine


class CpuManagerLru(ManagerMachine):
    """vLLM's `CPUOffloadingManager` with the LRU policy."""

    def make_manager(self, blocks: int) -> Any:
        return CPUOffloadingManager(blocks, "lru", enable_events=True)


class CpuManagerArc(ManagerMachine):
    """vLLM's `CPUOffloadingManager` with the ARC policy."""

    def make_manager(self, blocks: int) -> Any:
        return CPUOffloadingManager(blocks, "arc", enable_events=True)


class _PrimaryMemory:
    """Stands for the memory map that the workers share with the tiers."""

    def __init__(self, blocks: int) -> None:
        self._bytes: Any = np.zeros((blocks, 16), np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._bytes)

    def cleanup(self) -> None:
        pass


class TieringManager(ManagerMachine):
    """vLLM's `TieringOffloadingManager` over its example tier, whose copies end at once."""

    tiers_below = True

    def make_manager(self, blocks: int) -> Any:
        primary = CPUPrimaryTierOffloadingManager(blocks, _PrimaryMemory(blocks), "lru", enable_events=True)
        below = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")
        return TieringOffloadingManager(primary, [below])


class TieringManagerWithRoom(TieringManager):
    """The same without evictions before the end, and with resets only at rest, so that B71 and B72 hide
    nothing."""

    pools = st.just(16)
    crowd = fill = reset = None

    @rule()
    def reset_at_rest(self) -> None:
        """Reset the cache while no copy and no promotion is in flight."""
        with self._locked():
            self._let_all_end()
            self._reset()


class FileSystemTier(SecondaryTierMachine):
    """vLLM's `fs` tier, in a directory for temporary files."""

    restarts = publishes_events = True

    def make_tier(self, view: memoryview) -> Any:
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=("layer",))],
            parallel=SimpleNamespace(
                tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
            ),
            model=SimpleNamespace(name="model", dtype="float32"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
        )
        events = SimpleNamespace(enable_kv_cache_events=True)
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)
        threads = {"n_read_threads": 2, "n_write_threads": 2}
        return FileSystemTierManager(spec, view, "fs", str(self.directory), enable_kv_events=True, **threads)

    def path_of(self, key: bytes) -> Path | None:
        return Path(self.tier.file_mapper.get_file_name(key))


class FileSystemTierWithLastingMisses(FileSystemTier):
    """The same tier, but it may repeat a miss to later requests."""

    misses_last = True


class FileSystemTierWithIntactFiles(FileSystemTierWithLastingMisses):
    """The same tier, but the machine neither removes nor truncates its files."""

    damage = None


class KvsmMemoryTier(SecondaryTierMachine):
    """kvsm's `MemoryTier`, which `kvsm vllm-fuzz` puts below OffloadingConnector."""

    def make_tier(self, view: memoryview) -> Any:
        return MemoryTier(None, view, "MemoryTier")
