"""What goes between the scheduler's process and the workers', in each step. Small, and pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsm.plan import TransferPlan, WorkerReport


@dataclass
class StepPlan(KVConnectorMetadata):
    """To every worker. plan: what is copied. host_blocks: how many slots the scheduler plans with.
    failed_loads: requests whose load has failed, which the workers tell vLLM's scheduler: it hears of
    failures from them alone."""

    host_blocks: int = 0
    plan: TransferPlan = field(default_factory=TransferPlan)
    failed_loads: frozenset[str] = frozenset()


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """From the workers: each report names its rank, so that those of all ranks are one list."""

    reports: tuple[WorkerReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)
