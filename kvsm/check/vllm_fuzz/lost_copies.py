"""Copies that an engine may give up, the time that passes until then, and the memory that it loses by them.

Time stands still in an engine, unless a copy was lost or the action `slow` comes. Then all of kvsm's
deadlines read one clock. A copy may be given up if its report never comes, or if it was not reported in
time. What it touches may be retired: host slots, and the device blocks that a load writes. All else
must be there at the end of a run. Steps may overwrite the device blocks that a store reads after it was given
up, because nobody reads what it stores.
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
"""How many actions `settle` it takes until a lost copy is overdue. A copy that is not lost is reported in
fewer, even if `late` holds the report back."""

SETTLING_A_LOSS = STEPS_UNTIL_TIMEOUT + 8
"""How many more times an engine may settle for each lost copy."""

_NULL_BLOCK = 0


class JobsOfRank(Protocol):
    """The jobs of one rank."""

    def at_risk(self) -> Iterator[tuple[int, TransferJob]]:
        """Those that may be given up, each with the number of its copy engine."""

    def on_the_way(self) -> Iterator[TransferJob]:
        """Those whose end the scheduler has not been told."""

    def time_passed(self) -> None:
        """What is on the way may be overdue from now on."""


class LostCopies:
    """The copies that one engine may have given up.

    timeout_s: how long a copy waits for its reports (s); 0: without a bound.
    lost: how many copies are never reported.
    began: since when the scheduler may wait for what is submitted now. That is when the step before was
        scheduled: a worker of vLLM's OffloadingConnector begins stores one step later.
    while_waiting: what happens elsewhere while a rank waits for a lost copy.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._spare_blocks = shape.spare_blocks
        self._chunk = int(shape.extra.get("blocks_per_chunk", 1))
        self._ranks: list[JobsOfRank] = []
        self._now = self.timeout_s = 0.0
        self.lost = 0
        self._scheduled: deque[float] = deque()
        """When each step was scheduled that no rank has taken yet."""
        self._latest = self.began = 0.0
        self.while_waiting: Callable[[], None] = lambda: None

    def watch(self, rank: JobsOfRank) -> None:
        """A rank of this engine."""
        self._ranks.append(rank)

    def clock(self) -> float:
        """The time (s)."""
        return self._now

    def give_clock_to(self, connector: Any) -> None:
        """Let the scheduler's side of a connector, or of its children, read this clock."""
        for deadlines in _deadlines_of(connector):
            deadlines.clock = self.clock
            self.timeout_s = max(self.timeout_s, deadlines.timeout_s)

    def scheduled(self) -> None:
        """A step is scheduled."""
        self._scheduled.append(self._now)

    def executing(self) -> None:
        """The ranks take the oldest step."""
        self.began, self._latest = self._latest, self._scheduled.popleft()

    def is_overdue(self, began: float) -> bool:
        """Whether a copy that began at this time may be given up."""
        return 0 < self.timeout_s <= self._now - began

    def settle(self) -> None:
        """A step is taken. If a copy was lost, some time passes in it."""
        if self.lost:
            self._pass_time(self.timeout_s / STEPS_UNTIL_TIMEOUT)

    def wait(self) -> None:
        """A rank waits for a copy, and nothing else happens on it."""
        self.while_waiting()
        self._pass_time(self.timeout_s / STEPS_UNTIL_TIMEOUT)

    def time_out(self) -> bool:
        """Let `transfer_timeout_s` pass.

        False if nobody has such a bound, if too much would be lost, or if there are steps that no rank has
        taken: what they copy is not known yet.
        """
        on_the_way = [job for rank in self._ranks for job in rank.on_the_way()]
        if not self.timeout_s or self._scheduled or not on_the_way or not self._may_lose(on_the_way):
            return False
        self._pass_time(self.timeout_s)
        return True

    def lose(self, job: TransferJob) -> bool:
        """Whether this copy is lost. Not if the rest of the device were too small for the largest request."""
        is_lost = self._may_lose([job])
        self.lost += is_lost
        return is_lost

    def device_blocks(self) -> set[int]:
        """Device blocks that a load may still write although it was given up."""
        return _written(job for rank in self._ranks for _, job in rank.at_risk())

    def num_host_blocks(self) -> int:
        """How many host blocks may be retired."""
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
    """Those of kvsm's connectors."""
    for one in getattr(connector, "_connectors", None) or [connector]:
        deadlines = getattr(getattr(one, "_side", None), "deadlines", None)
        if isinstance(deadlines, TransferDeadlines):
            yield deadlines
