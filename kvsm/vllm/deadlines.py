"""Find the transfers in flight that have waited too long for the reports of their ranks.

A report may never come: a copy hangs, or a message is lost. Only wall time distinguishes this from a slow
copy. So the scheduler's side notes here when transfers leave and when they end, and asks once in each step
which are overdue. The core gives these up (`Offloader.lose`) with an event, so a replay needs no clock.

- **Since when.** A transfer's time starts when it is submitted. It starts again whenever an earlier transfer
  of its direction ends, because copies of one direction queue. So no transfer is overdue while its queue
  moves, however long the queue is.
- **Until when.** Reports travel with the output of a step, and a step may itself take long: the model is
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
from kvsm.system.steady_clock import SteadyClock


class TransferDeadlines:
    """The transfers of one engine in flight, and the deadline of each.

    timeout_s: how long a transfer may stay unreported (s); 0: no limit.
    most_steps: the most steps of the engine that may be in flight at once.
    clock: returns monotonic time (s); a clock that goes back makes no deadline later. Public, so that a test
        can replace it.
    """

    def __init__(
        self, timeout_s: float, most_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self.clock: Callable[[], float] = SteadyClock(clock)
        self._most_steps = most_steps
        self._queues = {direction: _Queue() for direction in Direction}

    def submitted(self, jobs: Iterable[TransferJob]) -> None:
        """Start the time of these jobs, which leave for the workers now."""
        for job in jobs:
            self.began(job.transfer, job.direction)

    def began(self, transfer: int, direction: Direction) -> None:
        """Start the time of a transfer that leaves for the workers now. Its id must be the largest so far."""
        if self.timeout_s:
            self._queues[direction].submitted_at[transfer] = self.clock()

    def ended(self, transfer: int) -> None:
        """Stop the time of a transfer that all ranks have reported. Unknown transfers are ignored."""
        for queue in self._queues.values():
            if transfer in queue.submitted_at:
                queue.end(transfer, self.clock())

    def overdue(self) -> list[int]:
        """Remove and return the transfers whose time is up, the oldest of each direction first.

        Call it once in each step, before the step's own transfers leave.
        """
        queues = [queue for queue in self._queues.values() if queue.submitted_at]
        if not queues:
            return []
        before = self.clock() - self.timeout_s
        return [lost for queue in queues for lost in queue.give_up(before, self._most_steps)]


class _Queue:
    """The transfers of one direction in flight, the oldest first.

    ends: (transfer, end time) of ended transfers, ascending in both. When a transfer ends, the entries of
        later transfers are dropped: all transfers queued behind those are queued behind this one, too.
    overdue_steps: the number of consecutive steps in which the oldest transfer was found overdue.
    """

    def __init__(self) -> None:
        self.submitted_at: dict[int, float] = {}
        self.ends: deque[tuple[int, float]] = deque()
        self.overdue_steps = 0

    def end(self, transfer: int, now: float) -> None:
        """Take an ended transfer out of the queue: the time of the transfers behind it starts again."""
        del self.submitted_at[transfer]
        if not self.submitted_at:
            self.ends.clear()
            self.overdue_steps = 0
            return
        while self.ends and self.ends[-1][0] > transfer:
            self.ends.pop()
        self.ends.append((transfer, now))

    def give_up(self, before: float, most_steps: int) -> list[int]:
        """Remove and return every transfer whose time began at `before` or earlier.

        The first `most_steps` calls that find such a transfer return none: steps in flight may still bring
        its report.
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
    """Return the ranks that have not reported this transfer."""
    return [rank for rank in range(ranks) if not transfer.reported >> rank & 1]
