"""What the two sides of the connector send each other in each step. vLLM pickles it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsm.core.plan import ImportJob, TransferJob, TransferPlan, WorkerReport


@dataclass
class StepPlan(KVConnectorMetadata):
    """From the scheduler to every worker.

    host_blocks: the size of the host pool that the scheduler plans with (blocks).
    plan: what is copied.
    failed_loads: requests whose load has failed. The workers report them to vLLM's scheduler, which hears of
        failures from workers alone.
    ended_loads: requests whose load has ended well outside a step, so that no worker's output could say it.
        The workers report them too.
    imports: blocks that are copied from another engine's host pool.
    disk: copies between the host pool and the disk tier.
    disk_flush: which of these copies, of this step and of earlier ones, the step waits for.
    computes: whether the step computes anything.
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
    """From the workers. Each report names its rank, so the reports of all ranks form one list.

    reports: of copies to and from the device.
    disk: of copies to and from the disk tier, which has transfers of its own.
    """

    reports: tuple[WorkerReport, ...]
    disk: tuple[WorkerReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """The reports of two ranks together."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports, self.disk + other.disk)
