"""SGLang's tree with a seeded fault in each class, which walks must find. They test the machine's checks."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV

from sglang_tree.machines import WriteThrough


class LosesDoubles(WriteThrough):
    """Blocks that two requests have both computed are not freed: breaks conservation (S1)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        apply = tree.cache._apply_cache_action
        tree.cache._apply_cache_action = lambda action: isinstance(action, FreeDeviceKV) or apply(action)
        return tree


class LoadsInAnotherOrder(WriteThrough):
    """A load of several pages reverses their order: breaks correct bytes (S15)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        pool = tree.host.get_pool(PoolName.KV)
        load = pool.load_to_device_per_layer

        def reversed_load(device_pool: Any, host: Any, device: Any, *rest: Any, **options: Any) -> None:
            load(device_pool, host, device.flip(0), *rest, **options)

        pool.load_to_device_per_layer = reversed_load
        return tree


class UnlocksBeforeTheBackup(WriteThrough):
    """A block is not locked while a copy to the host reads it: its node may vanish before the end (S8)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        track = tree.cache._track_write_through_node

        def unlocked(node_id: Any, lock_params: Any, publish_node_ids: Any) -> None:
            tree.cache.dec_lock_ref(node_id, lock_params)
            track(node_id, None, publish_node_ids)

        tree.cache._track_write_through_node = unlocked
        return tree
