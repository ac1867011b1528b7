"""SGLang's tree with one fault each, which a walk must find: the machine looks where it should."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV

from sglang_tree.machines import WriteThrough


class LosesDoubles(WriteThrough):
    """What two requests have computed twice is not freed: broken conservation (S1)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        apply = tree.cache._apply_cache_action
        tree.cache._apply_cache_action = lambda action: isinstance(action, FreeDeviceKV) or apply(action)
        return tree


class LoadsInAnotherOrder(WriteThrough):
    """A load of several pages turns their order round: wrong bytes (S15)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        pool = tree.host.get_pool(PoolName.KV)
        load = pool.load_to_device_per_layer

        def turned(device_pool: Any, host: Any, device: Any, *rest: Any, **options: Any) -> None:
            load(device_pool, host, device.flip(0), *rest, **options)

        pool.load_to_device_per_layer = turned
        return tree


class UnlocksBeforeTheBackup(WriteThrough):
    """A block that a copy to the host reads is not locked: the node may be gone when the copy ends (S8)."""

    def make_tree(self, device_slots: int, host_slots: int) -> Any:
        tree = super().make_tree(device_slots, host_slots)
        track = tree.cache._track_write_through_node

        def unlocked(node_id: Any, lock_params: Any, publish_node_ids: Any) -> None:
            tree.cache.dec_lock_ref(node_id, lock_params)
            track(node_id, None, publish_node_ids)

        tree.cache._track_write_through_node = unlocked
        return tree
