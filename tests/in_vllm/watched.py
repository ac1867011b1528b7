"""What runs in an engine's process besides kvsm, and notes what only that process knows.

vLLM's processes import this module by `kv_connector_module_path`. The notes lie beside the event logs of a
run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.kv_events import EventBatch, EventPublisher, EventPublisherFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from workloads import END_DIGEST, KV_EVENTS

from kvsm.core.ledger.snapshot import digest
from kvsm.vllm.connector import KvsmConnector


class WatchedConnector(KvsmConnector):
    """Notes the digest of the state in which the engine ends."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._notes = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["event_log"])
        if role is KVConnectorRole.SCHEDULER:
            FilePublisher.path = self._notes / KV_EVENTS

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            ledger = self._side._core.offloader.ledger
            (self._notes / END_DIGEST).write_text(digest(ledger))
        super().shutdown()


class FilePublisher(EventPublisher):
    """Replaces vLLM's publisher over ZeroMQ: it writes the same bytes to a file, so a late reader loses
    none."""

    path: Path

    def __init__(self, data_parallel_rank: int, **_settings: Any) -> None:
        super().__init__(data_parallel_rank)
        self._encoder = msgspec.msgpack.Encoder()
        self._file = self.path.open("wb")

    def publish(self, events: EventBatch) -> None:
        message = self._encoder.encode(events)
        self._file.write(len(message).to_bytes(4, "big") + message)

    def shutdown(self) -> None:
        self._file.close()


EventPublisherFactory._registry["zmq"] = FilePublisher
