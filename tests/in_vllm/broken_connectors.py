"""Connectors with a bug each: vLLM's SimpleCPUOffloadConnector, changed as a hurried developer might. Those
whose bug is about mamba states are kvsm's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from kvsm.ids import listed, pack
from kvsm.vllm.connector import KvsmConnector


class LeaksOnAbort(SimpleCPUOffloadConnector):
    """It keeps the blocks of an aborted request for a store that it never makes."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        held, parameters = super().request_finished_all_groups(request, block_ids)
        return held or request.status.name == "FINISHED_ABORTED", parameters


class TellsLoadsTwice(SimpleCPUOffloadConnector):
    """It reports each load in two steps."""

    _again: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, loaded = super().get_finished(finished_req_ids)
        told, self._again = {*(loaded or ()), *self._again}, frozenset(loaded or ())
        return sent, told or None


class StoresBeforeCompute(SimpleCPUOffloadConnector):
    """It queues the stores of a step before the step computes."""

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        super().start_load_kv(forward_context, **options)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker_handler is not None:
            self.worker_handler.wait_for_save()

    def wait_for_save(self) -> None:
        pass


class BelievesLoadsTooSoon(SimpleCPUOffloadConnector):
    """It reports loads when they are queued."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        super().get_finished(finished_req_ids)
        metadata = self._connector_metadata
        return None, {one for names in metadata.load_event_to_reqs.values() for one in names} or None


class CountsABlockTooMany(SimpleCPUOffloadConnector):
    """It promises one block more than it has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        left = request.num_tokens - 1 - num_computed_tokens
        return (min(found + 4, left // 4 * 4), later) if found else (found, later)


class NeverTellsLoads(SimpleCPUOffloadConnector):
    """It does not report loads."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return super().get_finished(finished_req_ids)[0], None


class ForgetsResets(SimpleCPUOffloadConnector):
    """It says that its cache is reset, and keeps it."""

    def reset_cache(self) -> bool | None:
        return True


class MixesUpBlocks(SimpleCPUOffloadConnector):
    """It loads into the blocks of a step in another order."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        connector_metadata.load_gpu_blocks = connector_metadata.load_gpu_blocks[::-1]
        super().bind_connector_metadata(connector_metadata)


class LoadsBesideCompute(SimpleCPUOffloadConnector):
    """It lets the scheduler compute with blocks that are still being loaded."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0] or 0, False


class SendsWhatNobodyAsked(SimpleCPUOffloadConnector):
    """It reports each finished request as sent."""

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return set(finished_req_ids) or None, super().get_finished(finished_req_ids)[1]


class NeedsToBeScheduled(SimpleCPUOffloadConnector):
    """It knows a request only after its first step (B19)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: set[str] = set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._known.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._known.remove(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class KnowsOneGroup(KVConnectorBase_V1):
    """No bug: a connector that stores nothing, and does not support several KV cache groups."""

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **options: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class StoresStatesTooSoon(KvsmConnector):
    """It stores a mamba state in the step that computes it, before it has computed."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        side = self._side
        hold = side._hold_states

        def hold_nothing(output: Any) -> dict[str, Any]:
            side._states.update(hold(output))
            return {}

        side._hold_states = hold_nothing


class LoadsNoState(KvsmConnector):
    """It reports a load whose last block, which is a mamba state, was not copied."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        plan = connector_metadata.plan
        loads = tuple(
            msgspec.structs.replace(
                job,
                device_blocks=pack(listed(job.pairs()[0])[:-1]),
                host_blocks=pack(listed(job.pairs()[1])[:-1]),
            )
            for job in plan.loads
        )
        plan = msgspec.structs.replace(plan, loads=loads)
        super().bind_connector_metadata(replace(connector_metadata, plan=plan))


BROKEN_WITH_STATES = (StoresStatesTooSoon, LoadsNoState)
"""Connectors with a bug that only models with mamba layers show, or that shows there too."""

BROKEN = (
    LeaksOnAbort,
    TellsLoadsTwice,
    StoresBeforeCompute,
    BelievesLoadsTooSoon,
    CountsABlockTooMany,
    NeverTellsLoads,
    ForgetsResets,
    MixesUpBlocks,
    LoadsBesideCompute,
    SendsWhatNobodyAsked,
    NeedsToBeScheduled,
)
