"""Copies that an engine may give up: the clock for their deadlines, and the memory that they cost.

The clock stands still, unless a copy was lost or the action `slow` happens. All of kvsm's deadlines read it.
A copy may be given up if it is never reported, or not in time. Then its host slots may be retired, and the
device blocks that a load writes. All other blocks must be available at the end of a run. Steps may overwrite
the device blocks that a given-up store still reads, because no request will read the stored bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.vllm.deadlines import TransferDeadlines

STEPS_UNTIL_TIMEOUT = 16
"""The number of `settle` actions after which a lost copy is overdue. A copy that is not lost is reported
earlier, even if `late` holds its report back."""

SETTLING_A_LOSS = STEPS_UNTIL_TIMEOUT + 8
"""How many more `settle` actions an engine may need for each lost copy."""

_NULL_BLOCK = 0


class JobsOfRank(Protocol):
    """The jobs of one rank."""

    def at_risk(self) -> Iterator[tuple[int, TransferJob]]:
        """(number of the copy engine, job) for each job that may be given up."""

    def in_flight(self) -> Iterator[TransferJob]:
        """The jobs whose end was not reported to the scheduler yet."""

    def time_passed(self) -> None:
        """Record which jobs in flight may be overdue now."""


class LostCopies:
    """The copies that one engine may have given up, and its clock.

    timeout_s: how long the engine waits for the reports on a copy (s); 0 for no limit.
    lost: the number of copies that are never reported.
    began: the earliest time from which the scheduler may be waiting for a job that is submitted now. This is
        the time at which the previous step was scheduled: a worker of vLLM's OffloadingConnector begins
        stores one step late.
    while_waiting: called while a rank waits for a lost copy, to let other ranks proceed.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._spare_blocks = shape.spare_blocks
        self._chunk = int(shape.extra.get("blocks_per_chunk", 1))
        self._ranks: list[JobsOfRank] = []
        self._now = self.timeout_s = 0.0
        self.lost = 0
        self._scheduled: deque[float] = deque()
        """The times at which the steps were scheduled that the ranks have not executed yet."""
        self._latest = self.began = 0.0
        self.while_waiting: Callable[[], None] = lambda: None

    def watch(self, rank: JobsOfRank) -> None:
        """Add a rank of the engine."""
        self._ranks.append(rank)

    def clock(self) -> float:
        """The present time (s)."""
        return self._now

    def give_clock_to(self, connector: Any) -> None:
        """Let the deadlines of a connector's scheduler side, and of its children, read this clock."""
        for deadlines in _deadlines_of(connector):
            deadlines.clock = self.clock
            self.timeout_s = max(self.timeout_s, deadlines.timeout_s)

    def scheduled(self) -> None:
        """Record that a step is scheduled."""
        self._scheduled.append(self._now)

    def executing(self) -> None:
        """Record that the ranks execute the oldest scheduled step."""
        self.began, self._latest = self._latest, self._scheduled.popleft()

    def is_overdue(self, began: float) -> bool:
        """Whether a copy that began at this time may be given up by now."""
        return 0 < self.timeout_s <= self._now - began

    def settle(self) -> None:
        """Let some time pass in a step, if a copy was lost."""
        if self.lost:
            self._pass_time(self.timeout_s / STEPS_UNTIL_TIMEOUT)

    def wait(self) -> None:
        """Let time pass while a rank waits for a copy. Other ranks proceed."""
        self.while_waiting()
        self._pass_time(self.timeout_s / STEPS_UNTIL_TIMEOUT)

    def time_out(self) -> bool:
        """Let `transfer_timeout_s` pass.

        Returns False if no connector has such a limit, if no job is in flight, if too many blocks would be
        lost, or if the ranks have not executed a scheduled step, whose copies are not known yet.
        """
        in_flight = [job for rank in self._ranks for job in rank.in_flight()]
        if not self.timeout_s or self._scheduled or not in_flight or not self._may_lose(in_flight):
            return False
        self._pass_time(self.timeout_s)
        return True

    def lose(self, job: TransferJob) -> bool:
        """Lose this copy, unless the other device blocks were too few for the largest request then. Returns
        whether it is lost."""
        is_lost = self._may_lose([job])
        self.lost += is_lost
        return is_lost

    def device_blocks(self) -> set[int]:
        """The device blocks that given-up loads may still write."""
        return _written(job for rank in self._ranks for _, job in rank.at_risk())

    def num_host_blocks(self) -> int:
        """The number of host blocks that may be retired."""
        slots = {
            (engine, host // self._chunk)
            for rank in self._ranks
            for engine, job in rank.at_risk()
            for host in listed(job.pairs()[1])
        }
        return len(slots) * self._chunk

    def _may_lose(self, jobs: Collection[TransferJob]) -> bool:
        return len(self.device_blocks() | _written(jobs)) <= self._spare_blocks or not _written(jobs)

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds
        for rank in self._ranks:
            rank.time_passed()


def _written(jobs: Collection[TransferJob] | Iterator[TransferJob]) -> set[int]:
    loads = [job for job in jobs if job.direction is Direction.LOAD]
    return {block for job in loads for block in listed(job.pairs()[0]) if block != _NULL_BLOCK}


def _deadlines_of(connector: Any) -> Iterator[TransferDeadlines]:
    """The deadlines of kvsm's connectors."""
    for one in getattr(connector, "_connectors", None) or [connector]:
        deadlines = getattr(getattr(one, "_side", None), "deadlines", None)
        if isinstance(deadlines, TransferDeadlines):
            yield deadlines
