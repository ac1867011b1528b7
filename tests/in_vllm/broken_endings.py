"""Connectors with bugs that only the checks at the end of a run find. Bytes, order and device blocks are
right."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from kvsm.properties import Property


class TellsNoEvictions(SimpleCPUOffloadConnector):
    """It publishes what it stores, and never what it evicts."""

    def take_events(self) -> Any:
        return [one for one in super().take_events() if not isinstance(one, BlockRemoved)]


class TellsEachBlockOnce(SimpleCPUOffloadConnector):
    """It publishes no block a second time, although the block was evicted in between."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._told: set[Any] = set()

    def take_events(self) -> Any:
        for event in super().take_events():
            if not isinstance(event, BlockStored):
                yield event
            elif not self._told.issuperset(event.block_hashes):
                self._told.update(event.block_hashes)
                yield event


class KeepsThePinsOfAborted(SimpleCPUOffloadConnector):
    """A request that is aborted while it waits keeps its host blocks pinned for ever."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.status.name == "FINISHED_ABORTED" and not any(block_ids):
            self.scheduler_manager._pending_cpu_hits.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class OneRankTellsLoadsTwice(SimpleCPUOffloadConnector):
    """Rank 0 reports each load a second time, after vLLM has processed its end."""

    _again: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, loaded = super().get_finished(finished_req_ids)
        if self._vllm_config.parallel_config.rank or self._vllm_config.parallel_config.world_size < 2:
            return sent, loaded
        told, self._again = {*(loaded or ()), *self._again}, frozenset(loaded or ())
        return sent, told or None


class KeepsAThread(SimpleCPUOffloadConnector):
    """Leaves a thread running after the shutdown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._thread = threading.Thread(target=threading.Event().wait, name="a thread of the connector")
        self._thread.daemon = True
        self._thread.start()


class NeedsAWorkerToShutDown(SimpleCPUOffloadConnector):
    """Its shutdown fails on the scheduler's side, which has no worker."""

    def shutdown(self) -> None:
        assert self.worker_handler is not None


BROKEN_AT_THE_END = (
    (Property.EVENTS_ARE_STATE, TellsNoEvictions),
    (Property.EVENTS_ARE_STATE, TellsEachBlockOnce),
    (Property.ONE_RELEASE_PER_HOLD, KeepsThePinsOfAborted),
    (Property.ONE_RELEASE_PER_HOLD, OneRankTellsLoadsTwice),
    (Property.PROGRESS, KeepsAThread),
    (Property.LEGAL_CALLS, NeedsAWorkerToShutDown),
)
"""The property that each breaks, and the connector."""
