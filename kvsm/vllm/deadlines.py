"""Which transfers in flight have waited too long for the reports of their ranks.

A report may never come: a copy hangs, or a message is lost. Only wall time tells this from a slow copy. So
the scheduler's side notes here when transfers leave and when they end, and asks once in each step which are
overdue. The core loses these (`Offloader.lose`), which is an event: a replay needs no clock.

- **Since when.** A transfer's time begins when it is submitted. It begins again whenever an earlier transfer
  of its direction ends, because copies of one direction queue. So no transfer is overdue while its queue
  moves, however long the queue is.
- **Until when.** Reports travel with the output of a step, and a step may take long itself: the model is
  compiled, the host swaps. So an overdue transfer is given up only after the output of one more step, which
  was scheduled when the time was up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from kvsm.core.ledger import TransferRecord
from kvsm.core.plan import TransferJob
from kvsm.events import Direction


class TransferDeadlines:
    """The transfers of one engine that are in flight, and when the time of each is up.

    timeout_s: how long a transfer waits (s); 0: without a bound.
    most_steps: how many steps of the engine may be in flight at once.
    clock: monotonic time (s); public, so that a test can choose it.
    """

    def __init__(
        self, timeout_s: float, most_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s, self.clock = timeout_s, clock
        self._most_steps = most_steps
        self._queues = {direction: _Queue() for direction in Direction}

    def submitted(self, jobs: Iterable[TransferJob]) -> None:
        """These jobs leave for the workers now."""
        for job in jobs:
            self.began(job.transfer, job.direction)

    def began(self, transfer: int, direction: Direction) -> None:
        """This transfer leaves for the workers now. Its id is larger than every earlier id."""
        if self.timeout_s:
            self._queues[direction].submitted_at[transfer] = self.clock()

    def ended(self, transfer: int) -> None:
        """All ranks have reported this transfer. Others are ignored."""
        for queue in self._queues.values():
            if transfer in queue.submitted_at:
                queue.end(transfer, self.clock())

    def overdue(self) -> list[int]:
        """Give up the transfers whose time is up, the oldest first.

        Call it once in each step, before the step's own transfers leave.
        """
        queues = [queue for queue in self._queues.values() if queue.submitted_at]
        if not queues:
            return []
        before = self.clock() - self.timeout_s
        return [lost for queue in queues for lost in queue.give_up(before, self._most_steps)]


class _Queue:
    """The transfers of one direction in flight, the oldest first.

    ends: (transfer, when it ended) of ended ones, ascending in both. An end hides the earlier ends of later
        transfers, because whatever waits behind those waits behind it too.
    overdue_steps: in how many consecutive steps the oldest one was found overdue.
    """

    def __init__(self) -> None:
        self.submitted_at: dict[int, float] = {}
        self.ends: deque[tuple[int, float]] = deque()
        self.overdue_steps = 0

    def end(self, transfer: int, now: float) -> None:
        """Take the transfer out of the queue: the time of the ones behind it begins again."""
        del self.submitted_at[transfer]
        if not self.submitted_at:
            self.ends.clear()
            self.overdue_steps = 0
            return
        while self.ends and self.ends[-1][0] > transfer:
            self.ends.pop()
        self.ends.append((transfer, now))

    def give_up(self, before: float, most_steps: int) -> list[int]:
        """Take out every transfer whose time began at `before` or earlier.

        Nothing at first: steps in flight may still bring its report.
        """
        given_up: list[int] = []
        while self.submitted_at and self._oldest_began() <= before:
            if not given_up:
                self.overdue_steps += 1
                if self.overdue_steps <= most_steps:
                    return []
            oldest = next(iter(self.submitted_at))
            del self.submitted_at[oldest]
            given_up.append(oldest)
        self.overdue_steps = 0
        return given_up

    def _oldest_began(self) -> float:
        oldest, submitted_at = next(iter(self.submitted_at.items()))
        while len(self.ends) > 1 and self.ends[1][0] < oldest:
            self.ends.popleft()
        if self.ends and self.ends[0][0] < oldest:
            return max(submitted_at, self.ends[0][1])
        return submitted_at


def silent_ranks(transfer: TransferRecord, ranks: int) -> list[int]:
    """The ranks that have not reported this transfer."""
    return [rank for rank in range(ranks) if not transfer.reported >> rank & 1]
