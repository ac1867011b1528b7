"""Transfers in flight: plans go to the workers, and reports are handed on at a step fixed beforehand.

Threads end copies at any time. The same workload must make the same decisions every time. So the reports of a
transfer are handed on at a step that follows from its size alone. A report that comes earlier is kept until
then; a worker that is later is waited for. A transfer that a plan flushes is due in the step after the plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvsm.copies.worker import Worker
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import count
from kvsm.properties import Property

OVERDUE_SECONDS = 60.0
"""How late a worker may be, in real time, before the run ends with an error."""

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-6, 1e-3


class Latency(NamedTuple):
    """How long a copy takes: `steps`, and one more step for each `blocks_per_step` blocks."""

    steps: int
    blocks_per_step: int


HOST_LATENCY = {Direction.LOAD: Latency(1, 64), Direction.STORE: Latency(2, 32)}
"""Of copies between device and host. Loads are faster than stores, because requests wait for them."""


def latency_steps(job: TransferJob, latency: Mapping[Direction, Latency] = HOST_LATENCY) -> int:
    """How many steps a copy takes."""
    steps, blocks_per_step = latency[job.direction]
    return steps + count(job.host_blocks) // blocks_per_step


class TransfersInFlight:
    """The transfers that the workers have, and whose reports the offload core has not got.

    latency: how long copies take, by direction.

    Attribute `blocks`: device blocks that were copied well on every worker so far, by direction.
    """

    def __init__(
        self, workers: Sequence[Worker], latency: Mapping[Direction, Latency] = HOST_LATENCY
    ) -> None:
        self.blocks = dict.fromkeys(Direction, 0)
        self._workers, self._latency = workers, latency
        self._due: dict[int, dict[int, None]] = {}
        """Step -> transfers whose reports are handed on in it."""
        self._jobs: dict[int, TransferJob] = {}
        self._reports: dict[int, list[WorkerReport]] = {}
        """Transfer -> reports that have arrived."""

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, plan: TransferPlan, step: int) -> None:
        """Hand the plan of this step to every worker. What it flushes is due in the next step."""
        if not plan:
            return
        for worker in self._workers:
            worker.start(plan)
        for job in (*plan.loads, *plan.stores):
            self._due.setdefault(step + latency_steps(job, self._latency), {})[job.transfer] = None
            self._jobs[job.transfer], self._reports[job.transfer] = job, []
        if plan.flush:
            flushed = dict.fromkeys(plan.flush)
            for due in self._due.values():
                for transfer in flushed:
                    due.pop(transfer, None)
            self._due.setdefault(step + 1, {}).update({one: None for one in flushed if one in self._jobs})

    def collect(self, step: int) -> list[WorkerReport]:
        """Wait for all reports that are due in this step. They are in the order of transfers and workers.

        Raises `PropertyBroken` (progress, S9) if a worker stays silent for `OVERDUE_SECONDS`.
        """
        due = sorted(self._due.pop(step, ()))
        if not due:
            return []
        self._await(due)
        reports = []
        for transfer in due:
            job, own = self._jobs.pop(transfer), self._reports.pop(transfer)
            if all(report.good for report in own):
                self.blocks[job.direction] += count(job.device_blocks)
            reports += sorted(own, key=lambda report: report.worker)
        return reports

    def _await(self, due: list[int]) -> None:
        # A wait inside a worker has no bound, so this polls. The pause gives the interpreter to copying
        # threads.
        deadline, pauses = time.monotonic() + OVERDUE_SECONDS, 0
        while True:
            for worker in self._workers:
                for report in worker.poll():
                    # Its clock is real and the engine's is not: with its times, no two logs would be equal.
                    untimed = msgspec.structs.replace(report, queued_us=None, copied_us=None)
                    self._reports[report.transfer].append(untimed)
            missing = [one for one in due if len(self._reports[one]) < len(self._workers)]
            if not missing:
                return
            if time.monotonic() > deadline:
                named = ", ".join(map(str, missing[:8]))
                raise PropertyBroken(
                    Property.PROGRESS, f"no report for {OVERDUE_SECONDS:g} s of transfers {named}"
                )
            time.sleep(min(pauses * _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
            pauses += 1
