"""A host memory that corrupts data: one block changes after it was stored.

vLLM's processes import this module by `kv_connector_module_path`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsm.ids import listed, unpack
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.offloading_connector import KvsmOffloadingConnector

SIGN = 0x80


class CorruptingConnector(KvsmConnector):
    """In the first block of the first good store, all numbers change their sign."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._stored_in: dict[int, int] = {}
        """Store -> the first of its host blocks."""
        self._corrupted = False

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        for store in connector_metadata.plan.stores:
            self._stored_in[store.transfer] = listed(unpack(store.host_blocks))[0]
        super().bind_connector_metadata(connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        _corrupt(self, meta, lambda: self._side._copies.pool)
        return meta


class CorruptingOffloadingConnector(KvsmOffloadingConnector):
    """The same, with vLLM's decisions."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._stored_in: dict[int, int] = {}
        self._corrupted = False

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for store in kv_connector_metadata.store_jobs.values():
            self._stored_in[store.dst_spec.transfer] = int(store.dst_spec.block_ids[0])
        super().handle_preemptions(kv_connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        meta = super().build_connector_worker_meta()
        _corrupt(self, meta, lambda: self.connector_worker.worker._copies.pool)
        return meta


def _corrupt(connector: Any, meta: Any, pool: Callable[[], Any]) -> None:
    """Do it, if this is the first report of a good store."""
    for report in meta.reports if meta is not None else ():
        if report.good and not connector._corrupted and report.transfer in connector._stored_in:
            block = pool().blocks[connector._stored_in[report.transfer]]
            # Little endian: a float32 has its sign in its last byte.
            block[3::4] ^= SIGN
            connector._corrupted = True
