"""Connectors with a bug each that shows only when something goes wrong in a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from kvsm.check.vllm_fuzz.runtime import acting
from kvsm.core.plan import WorkerReport
from kvsm.events import Direction
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.deadlines import silent_ranks
from kvsm.vllm.step_messages import StepReports


class HidesFailedCopies(KvsmConnector):
    """Its workers report each copy as good."""

    def build_connector_worker_meta(self) -> Any:
        told = super().build_connector_worker_meta()
        if not isinstance(told, StepReports):
            return told
        return replace(told, reports=tuple(msgspec.structs.replace(one, good=True) for one in told.reports))


class ExpectsEachReportOnce(KvsmConnector):
    """It forgets a copy when the rank has reported it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: set[tuple[int, int]] = set()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        for job in (*metadata.plan.loads, *metadata.plan.stores):
            self._awaited |= {(job.transfer, rank) for rank in range(4)}
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        for report in told.reports if isinstance(told, StepReports) else ():
            self._awaited.remove((report.transfer, report.worker))
        super().update_connector_output(connector_output)


class CleansUpGoodLoadsOnly(SimpleCPUOffloadConnector):
    """Its loads may fail, and then it keeps what it holds for them."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def update_connector_output(self, connector_output: Any) -> None:
        good = (connector_output.finished_recving or set()) - connector_output.failed_recving
        super().update_connector_output(replace(connector_output, finished_recving=good))


class ExpectsReportsSoon(SimpleCPUOffloadConnector):
    """It copies at once, and fails if a report takes more than three steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._steps, self._since = 0, dict[str, int]()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        super().start_load_kv(forward_context, **options)
        while acting().device.step():
            pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        self._steps += 1
        for name in metadata.load_event_to_reqs.get(metadata.load_event, ()):
            self._since[name] = self._steps
        late = [name for name, begun in self._since.items() if begun + 4 < self._steps]
        if late:
            raise RuntimeError("a load takes too long")
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            self._since.pop(name, None)
        super().update_connector_output(connector_output)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._since.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)


class NeverGivesUp(KvsmConnector):
    """It waits for each report without a time limit."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._side._give_up_overdue = lambda: None


class TakesSilenceForFailure(KvsmConnector):
    """When the time of a store is up, it treats the store as failed, and reuses its slots."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        side, core = self._side, self._side._core.offloader
        overdue = side.deadlines.overdue

        def overdue_loads() -> list[int]:
            found = overdue()
            for transfer in found:
                record = core.ledger.transfers[transfer]
                if record.direction is Direction.STORE:
                    ranks = silent_ranks(record, core.config.workers)
                    side._take([WorkerReport(transfer, rank, False, "it is slow") for rank in ranks])
            return [transfer for transfer in found if transfer in core.ledger.transfers]

        side.deadlines.overdue = overdue_loads


class FreesWhatALostLoadMayWrite(KvsmConnector):
    """It lets vLLM use the device blocks of a load that was given up."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._side._pool.retire = self._side._pool.free_blocks


class GivesUpAllAtOnce(KvsmConnector):
    """When one copy is overdue, it gives up all that is in flight, however young."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        deadlines = self._side.deadlines
        overdue = deadlines.overdue

        def all_if_any() -> list[int]:
            found = overdue()
            others = [one for queue in deadlines._queues.values() for one in queue.submitted_at]
            for transfer in others if found else ():
                deadlines.ended(transfer)
            return [*found, *others] if found else []

        deadlines.overdue = all_if_any


BROKEN_UNDER_FAULTS = {
    HidesFailedCopies: ("fail",),
    CleansUpGoodLoadsOnly: ("fail",),
    ExpectsEachReportOnce: ("double",),
    ExpectsReportsSoon: ("late",),
    NeverGivesUp: ("lose",),
    FreesWhatALostLoadMayWrite: ("lose", "slow"),
}
"""Each with the faults that show its bug."""
