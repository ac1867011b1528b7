"""Transfers in flight: plans go to the workers, and the reports of a transfer are delivered in a fixed step.

Threads end copies at any time, but the same workload must make the same decisions every time. So the reports
of a transfer are delivered in a step that follows from its size alone: earlier reports are kept until then,
and later ones are waited for. A transfer that a plan flushes is due in the step after the plan.
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
"""How late a worker's report may be, in real time (s), before the run ends with an error."""

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-6, 1e-3


class Latency(NamedTuple):
    """The time that a copy takes: `steps`, and one more step for each `blocks_per_step` blocks."""

    steps: int
    blocks_per_step: int


HOST_LATENCY = {Direction.LOAD: Latency(1, 64), Direction.STORE: Latency(2, 32)}
"""Latencies between device and host. Loads are faster than stores, because requests wait for loads."""


def latency_steps(job: TransferJob, latency: Mapping[Direction, Latency] = HOST_LATENCY) -> int:
    """Return the number of steps that a copy takes."""
    steps, blocks_per_step = latency[job.direction]
    return steps + count(job.host_blocks) // blocks_per_step


class TransfersInFlight:
    """The transfers that the workers have, and whose reports are not delivered yet.

    latency: the time that copies take, by direction.

    Attribute `blocks`: the number of device blocks copied without error on every worker so far, by direction.
    """

    def __init__(
        self, workers: Sequence[Worker], latency: Mapping[Direction, Latency] = HOST_LATENCY
    ) -> None:
        self.blocks = dict.fromkeys(Direction, 0)
        self._workers, self._latency = workers, latency
        self._due: dict[int, dict[int, None]] = {}
        """Step -> transfers whose reports are delivered in it."""
        self._jobs: dict[int, TransferJob] = {}
        self._reports: dict[int, list[WorkerReport]] = {}
        """Transfer -> reports that have arrived."""

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, plan: TransferPlan, step: int) -> None:
        """Give the plan of this step to every worker. Transfers that it flushes are due in the next step."""
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
            in_flight = {transfer: None for transfer in flushed if transfer in self._jobs}
            self._due.setdefault(step + 1, {}).update(in_flight)

    def collect(self, step: int) -> list[WorkerReport]:
        """Wait for all reports that are due in this step, and return them, sorted by transfer and worker.

        Raises `PropertyBroken` (progress, S9) if a report does not come for `OVERDUE_SECONDS`.
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
        # `Worker.wait` has no time limit, so this polls. The pauses let copying threads take the interpreter.
        deadline, pauses = time.monotonic() + OVERDUE_SECONDS, 0
        while True:
            for worker in self._workers:
                for report in worker.poll():
                    # A report has real times. They are dropped: otherwise equal runs had different logs.
                    untimed = msgspec.structs.replace(report, queued_us=None, copied_us=None)
                    self._reports[report.transfer].append(untimed)
            missing = [transfer for transfer in due if len(self._reports[transfer]) < len(self._workers)]
            if not missing:
                return
            if time.monotonic() > deadline:
                named = ", ".join(map(str, missing[:8]))
                raise PropertyBroken(
                    Property.PROGRESS, f"no report for {OVERDUE_SECONDS:g} s of transfers {named}"
                )
            time.sleep(min(pauses * _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
            pauses += 1
