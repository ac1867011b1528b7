"""Copies under way: plans go out to the workers, reports come in at a step that was fixed beforehand.

Threads end copies when they like. So that the same workload makes the same decisions every time, a
transfer's reports are handed on at a step that follows from its size alone; if a worker is not done by
then, the engine waits for it, as it would for a copy that is slower than modelled. A report that came
early is kept until its step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import count
from kvsm.plan import TransferPlan, WorkerReport
from kvsm.worker import Worker

OVERDUE_SECONDS = 60.0
"""How long, in real time, a worker may be late before the run ends with an error."""

_LATENCY_STEPS = {Direction.LOAD: 1, Direction.STORE: 2}
_BLOCKS_PER_STEP = {Direction.LOAD: 64, Direction.STORE: 32}
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5e-6, 1e-3


def latency_steps(plan: TransferPlan) -> int:
    """Modelled length of a copy, at least one step: stores give way to loads, which a request waits for."""
    return _LATENCY_STEPS[plan.direction] + count(plan.slots) // _BLOCKS_PER_STEP[plan.direction]


class Copies:
    """The transfers that the workers have and the offload core has not been told about yet."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._due: dict[int, list[int]] = {}
        """Step -> transfers whose reports are handed on in it."""
        self._reports: dict[int, list[WorkerReport]] = {}
        """Transfer -> reports that have arrived."""

    def __len__(self) -> int:
        return len(self._reports)

    def submit(self, plans: Sequence[TransferPlan], step: int) -> None:
        """Hand the plans of this step to every worker."""
        for plan in plans:
            self._due.setdefault(step + latency_steps(plan), []).append(plan.transfer)
            self._reports[plan.transfer] = []
        for worker in self._workers:
            worker.submit(plans)

    def hasten(self, step: int) -> None:
        """Everything under way is now due at `step`: the engine is about to stop stepping (S17)."""
        waiting = [transfer for transfers in self._due.values() for transfer in transfers]
        self._due = {step: waiting} if waiting else {}

    def collect(self, step: int) -> list[WorkerReport]:
        """All reports that are due in this step, by transfer and worker, after waiting for the last one.

        Raises `PropertyBroken` (S9) if a worker stays silent for `OVERDUE_SECONDS`.
        """
        due = sorted(self._due.pop(step, ()))
        if not due:
            return []
        self._await(due)
        reports = [report for transfer in due for report in self._reports.pop(transfer)]
        return sorted(reports, key=lambda report: (report.transfer, report.worker))

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
                raise PropertyBroken("S9", f"no report for {OVERDUE_SECONDS:g} s of transfers {named}")
            time.sleep(min(pauses * _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))
            pauses += 1
