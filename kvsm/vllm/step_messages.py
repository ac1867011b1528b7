"""The messages between the two sides of the connector in each step. vLLM pickles them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsm.core.plan import ImportJob, TransferJob, TransferPlan, WorkerReport


@dataclass
class StepPlan(KVConnectorMetadata):
    """The scheduler's message to every worker.

    host_blocks: the size of the host pool that the scheduler plans with (blocks).
    plan: the copies between device and host.
    failed_loads: requests whose load has failed. The workers report them to vLLM's scheduler, which takes
        failures from workers alone.
    ended_loads: requests whose load ended well outside a step, so no worker's output has reported it. The
        workers report them, too.
    imports: copies from another engine's host pool.
    disk: copies between the host pool and the disk tier.
    disk_flush: the disk copies, of this step and of earlier steps, for which the step waits.
    computes: whether the step computes any token.
    """

    host_blocks: int = 0
    plan: TransferPlan = field(default_factory=TransferPlan)
    failed_loads: frozenset[str] = frozenset()
    ended_loads: frozenset[str] = frozenset()
    imports: tuple[ImportJob, ...] = ()
    disk: tuple[TransferJob, ...] = ()
    disk_flush: tuple[int, ...] = ()
    computes: bool = True


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler. Each report names its rank, so all ranks share one list.

    reports: reports of copies to and from the device.
    disk: reports of copies to and from the disk tier, which has its own transfer ids.
    """

    reports: tuple[WorkerReport, ...]
    disk: tuple[WorkerReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Return the reports of both messages."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports, self.disk + other.disk)
