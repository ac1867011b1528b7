"""A connector whose host memory corrupts data: one block changes after it was stored.

vLLM's processes import this module by `kv_connector_module_path`.
"""

from __future__ import annotations

from typing import Any

from kvsm.ids import listed, unpack
from kvsm.vllm.connector import KvsmConnector

SIGN = 0x80


class CorruptingConnector(KvsmConnector):
    """Changes the sign of all numbers in the first block of the first good store."""

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
        for report in meta.reports if meta is not None else ():
            if report.good and not self._corrupted and report.transfer in self._stored_in:
                block = self._side._copies.pool.blocks[self._stored_in[report.transfer]]
                # Little endian: a float32 has its sign in its last byte.
                block[3::4] ^= SIGN
                self._corrupted = True
        return meta
