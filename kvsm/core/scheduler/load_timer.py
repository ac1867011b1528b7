"""Measures loads and computation for `OffloadConfig.load_only_if_faster`, and notes their times in the core.

A load lasts from its submission to the end of the copy on its slowest rank. Its time is modelled as a
constant start, and a time for each of its blocks and each block in flight ahead of it. Both come from a
robust regression line (Theil-Sen) through the latest loads. The time of a token is the median time per token
of the latest steps that computed enough prompt tokens (`STEP_TOKENS`).

Times are noted only after a large enough change (`CHANGE`), so that a log has few of them. All state here is
lost with the engine; decisions only read what was noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from kvsm.core.ledger.expected_times import MOST_TIME
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.ids import count

SAMPLES = 8
"""The times are computed from this many latest loads, and as many latest steps."""
FEWEST = 4
"""The first times are noted after this many loads, and as many steps."""
STEP_TOKENS = 64
"""A step is measured if it computes at least this many prompt tokens. The time of a smaller step is mostly
overhead that does not depend on its tokens."""
MOST_STEPS = 64
"""The most steps that an engine schedules before the first of them ends."""
CHANGE = 4
"""The times are noted again if one has changed by more than 1 / `CHANGE` of the larger value."""


class LoadTimer:
    """Measures for one core. The caller passes each submitted load, each report and each step."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._flights: dict[int, tuple[int, int]] = {}
        """Load in flight -> (its blocks and those in flight ahead of it, longest time of a rank so far)."""
        self._loads: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        """(blocks, time) of the latest good loads (us)."""
        self._token_ns: deque[int] = deque(maxlen=SAMPLES)
        """Time per token of the latest measured steps (ns)."""
        self._steps: deque[tuple[int, int]] = deque(maxlen=MOST_STEPS)
        """(when it was scheduled, its tokens; 0 if it is not measured) of each step that has not ended."""
        self._ended_ns = 0
        """When the last step ended."""

    def submitted(self, loads: Iterable[TransferJob]) -> None:
        """Note loads that leave for the workers, in their order."""
        transfers = self._offloader.ledger.transfers
        self._flights = {id: flight for id, flight in self._flights.items() if id in transfers}
        ahead = sum(len(transfers[id].device_blocks) for id in self._flights)
        for job in loads:
            ahead += count(job.device_blocks)
            self._flights[job.transfer] = ahead, 0

    def reported(self, reports: Iterable[WorkerReport]) -> None:
        """Note reports that the core has taken. A load without times of all its ranks is not measured."""
        transfers, ended = self._offloader.ledger.transfers, list[int]()
        for report in reports:
            flight = self._flights.get(report.transfer)
            if flight is None:
                continue
            if not report.good or report.queued_us is None or report.copied_us is None:
                del self._flights[report.transfer]
                continue
            blocks, slowest = flight[0], max(flight[1], report.queued_us + report.copied_us)
            self._flights[report.transfer] = blocks, slowest
            if report.transfer not in transfers:
                ended.append(report.transfer)
        # The core has taken all reports, so the first one of an ended load need not be the slowest rank's.
        measured = [self._flights.pop(id) for id in dict.fromkeys(ended) if id in self._flights]
        self._loads.extend(measured)
        if measured:
            self._note()

    def step_scheduled(self, now_ns: int, tokens: int, prompt_tokens: int) -> None:
        """Note that a step is scheduled.

        now_ns: the time, of any clock that is never set back.
        tokens, prompt_tokens: tokens that the step computes, and how many of them belong to prompts.
        """
        self._steps.append((now_ns, tokens if prompt_tokens >= STEP_TOKENS else 0))

    def step_ended(self, now_ns: int) -> None:
        """Note that the oldest scheduled step has ended. It ran since it was scheduled, or since the previous
        step ended if that is later: idle time does not count."""
        if not self._steps:
            return
        scheduled_ns, tokens = self._steps.popleft()
        began_ns, self._ended_ns = max(scheduled_ns, self._ended_ns), now_ns
        if tokens and now_ns > began_ns:
            self._token_ns.append((now_ns - began_ns) // tokens)
            self._note()

    def _note(self) -> None:
        """Note the times in the core, if they are known and have changed."""
        if min(len(self._loads), len(self._token_ns)) < FEWEST:
            return
        start_us, block_ns = line(self._loads)
        token_ns = int(median(self._token_ns))
        times = min(start_us, MOST_TIME), min(block_ns, MOST_TIME), min(token_ns, MOST_TIME)
        before = self._offloader.ledger.times
        if before is None or any(_has_changed(*pair) for pair in zip(before, times)):
            self._offloader.note_times(*times)


def _has_changed(before: int, now: int) -> bool:
    return CHANGE * abs(now - before) > max(now, before)


def line(loads: Sequence[tuple[int, int]] | deque[tuple[int, int]]) -> tuple[int, int]:
    """Return the start (us) and the time for each block (ns) of a robust line through (blocks, us) pairs.

    The slope is the median slope between two loads of different sizes. If all loads have one size, the start
    cannot be separated: it is 0, and the whole time counts for the blocks.
    """
    pairs = [(one, other) for place, one in enumerate(loads) for other in list(loads)[:place]]
    slopes = [1000 * (one[1] - other[1]) / (one[0] - other[0]) for one, other in pairs if one[0] != other[0]]
    if not slopes:
        return 0, int(median([1000 * us // blocks for blocks, us in loads]))
    block_ns = max(0, int(median(slopes)))
    return max(0, int(median([us - block_ns * blocks // 1000 for blocks, us in loads]))), block_ns
