"""Transfers under way: plans go out to the workers, reports come in at a step that was fixed beforehand.

Threads end copies when they like. So that the same workload makes the same decisions every time, a
transfer's reports are handed on at a step that follows from its size alone; if a worker is not done by
then, the engine waits for it, as it would for a copy that is slower than modelled. A report that came
early is kept until its step. What a plan flushes is due in the step after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import count
from kvsm.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.properties import Property
from kvsm.worker import Worker

OVERDUE_SECONDS = 60.0
"""How long, in real time, a worker may be late before the run ends with an error."""

_LATENCY_STEPS = {Direction.LOAD: 1, Direction.STORE: 2}
_BLOCKS_PER_STEP = {Direction.LOAD: 64, Direction.STORE: 32}
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-6, 1e-3


def latency_steps(job: TransferJob) -> int:
    """Modelled length of a copy, at least one step: stores give way to loads, which a request waits for."""
    return _LATENCY_STEPS[job.direction] + count(job.host_blocks) // _BLOCKS_PER_STEP[job.direction]


class TransfersInFlight:
    """The transfers that the workers have and the offload core has not been told about yet.

    blocks: device blocks of the transfers that ended well on every worker, so far.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.blocks = dict.fromkeys(Direction, 0)
        self._workers = workers
        self._due: dict[int, dict[int, None]] = {}
        """Step -> transfers whose reports are handed on in it."""
        self._jobs: dict[int, TransferJob] = {}
        self._reports: dict[int, list[WorkerReport]] = {}
        """Transfer -> reports that have arrived."""

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, plan: TransferPlan, step: int) -> None:
        """Hand the plan of this step to every worker. What it flushes has ended then, and is due next."""
        if not plan:
            return
        for worker in self._workers:
            worker.start(plan)
        for job in (*plan.loads, *plan.stores):
            self._due.setdefault(step + latency_steps(job), {})[job.transfer] = None
            self._jobs[job.transfer], self._reports[job.transfer] = job, []
        if plan.flush:
            flushed = dict.fromkeys(plan.flush)
            for due in self._due.values():
                for transfer in flushed:
                    due.pop(transfer, None)
            self._due.setdefault(step + 1, {}).update({one: None for one in flushed if one in self._jobs})

    def collect(self, step: int) -> list[WorkerReport]:
        """All reports that are due in this step, by transfer and worker, after waiting for the last one.

        Raises `PropertyBroken` (S9) if a worker stays silent for `OVERDUE_SECONDS`.
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
        # Polling, because a wait inside a worker could not be given a bound; the pause lets the copying
        # threads have the interpreter.
        deadline, pauses = time.monotonic() + OVERDUE_SECONDS, 0
        while True:
            for worker in self._workers:
                for report in worker.poll():
                    self._reports[report.transfer].append(report)
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
