"""`ReportedManager`: a `KvsmManager` that hears from each rank how a copy ended.

Under vLLM's own OffloadingConnector a manager hears of a job when all ranks have done it, and of no failure.
`KvsmOffloadingConnector` hands over the reports of the ranks. So the core has a worker for each rank, and its
verdict counts: it knows which rank failed and which one is silent, and a load can be given up. What vLLM's
connector says of jobs afterwards is no news.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.logger import init_logger

from kvsm.core.offloader import Ended, LogFlush
from kvsm.core.plan import WorkerReport
from kvsm.events import Direction
from kvsm.vllm.deadlines import silent_ranks
from kvsm.vllm.spec_manager import KvsmManager

log = init_logger("vllm.kvsm")


class ReportedManager(KvsmManager):
    """The manager of one engine. Its core has a worker for each rank.

    flushes_last_step: whether the last step waits for all copies (`CommonOptions.last_step`).
    """

    def __init__(self, *arguments: Any, flushes_last_step: bool = False) -> None:
        """The other arguments go to `KvsmManager`."""
        super().__init__(*arguments)
        self.flushes_last_step = flushes_last_step
        self._over: list[Ended] = []

    def take_reports(self, reports: Sequence[WorkerReport]) -> None:
        """Take the reports of ranks. They may be late, doubled or of an older reset."""
        core = self._core
        for report in reports:
            ended = core.report(*report.arguments()).ended
            if ended is not None:
                self.deadlines.ended(ended.transfer)
                self._let_go(ended)
                self._over.append(ended)
        if reports:
            core.flush_log(LogFlush.REPORTS_TAKEN)

    def take_ended(self) -> list[Ended]:
        """The transfers that have ended or were given up since the last call."""
        over, self._over = self._over, []
        return over

    def _lose(self, transfer: int) -> None:
        """Give this transfer up: some rank has not reported it in time."""
        lost, core = self._core.ledger.transfers[transfer], self._core
        ended = core.lose(transfer)
        assert ended is not None, "what is in flight can be lost"
        self._let_go(ended)
        self._over.append(ended)
        is_load = ended.direction is Direction.LOAD
        log.warning(
            "kvsm: transfer %d (a %s) is given up: ranks %s have not reported it for %g s. %d host slots%s "
            "are retired: they are not used again until the engine restarts%s",
            transfer,
            ended.direction.name.lower(),
            silent_ranks(lost, core.config.workers),
            self.deadlines.timeout_s,
            len(lost.slots),
            " and the device blocks of the load" if is_load else "",
            f". The load of request {ended.request} has failed" if is_load else "",
        )

    def _submit(self, request: str, direction: Direction, keys: Iterable[bytes], transfer: int) -> None:  # noqa: ARG002 (a report names its transfer)
        self._core.submit([transfer])
        self.deadlines.began(transfer, direction)

    def _complete(self, request: str, direction: Direction, keys: Iterable[bytes], *, good: bool) -> None:
        """The reports have said it."""

    def _drain(self) -> None:
        """A reset is over when the ranks have reported what was in flight."""
