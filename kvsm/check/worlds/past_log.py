"""A whole log, read a second time: its transfers, waits, requests, blocks and answers.

Worlds run without a clock. `in_time` gives the events of a log drawn times, so that figures of time can be
compared too: no decision reads a time, so the log is one that the same run could have written.
"""

from __future__ import annotations

from functools import cached_property
from random import Random

from msgspec.structs import replace

from kvsm.check.worlds.past_blocks import PastAnswer, PastBlock, past_answers, past_blocks
from kvsm.check.worlds.past_requests import PastRequest, past_requests
from kvsm.check.worlds.past_transfers import Log, PastTransfer, PastWait, past_transfers, past_waits
from kvsm.events import OffloadConfig, OffloadingEvent, WorkerReported


class PastLog:
    """What a log that begins with its first event contains. Each list is computed at its first use."""

    def __init__(self, config: OffloadConfig, log: Log) -> None:
        self.config, self.log = config, log

    @cached_property
    def transfers(self) -> dict[int, PastTransfer]:
        """The transfers by number."""
        return past_transfers(self.log, self.config.workers)

    @cached_property
    def waits(self) -> list[PastWait]:
        """The waits of requests for transfers."""
        return past_waits(self.log, self.transfers)

    @cached_property
    def requests(self) -> list[PastRequest]:
        """All requests, with copies to other tiers."""
        return past_requests(self.log, self.transfers, self.waits)

    @cached_property
    def blocks(self) -> list[PastBlock]:
        """The blocks in the order of their stores."""
        return past_blocks(self.log, self.transfers, self.requests)

    @cached_property
    def answers(self) -> list[PastAnswer]:
        """The answers to lookups. Notes in `blocks` who wanted them."""
        return past_answers(self.log, self.requests, self.blocks)


_BEGAN_NS = 1_700_000_000_000_000_000
_TIMES_NS = (0, 0, 1, 90_000, 700_000, 3_000_000, 40_000_000, 900_000_000, 70_000_000_000, -2_000_000)
"""Times between two events. The clock may be set back."""
_TIMES_US = (None, 0, 1, 30, 2_000, 900_000)
"""Times that workers report."""


def in_time(log: Log) -> Log:
    """Return the log with other times, drawn from its length: equal logs get equal times."""
    choice, now_ns, timed = Random(len(log)).choice, _BEGAN_NS, list[OffloadingEvent]()
    for event in log:
        now_ns += choice(_TIMES_NS)
        changed = replace(event, wall_ns=now_ns)
        if isinstance(changed, WorkerReported):
            changed = replace(changed, queued_us=choice(_TIMES_US), copied_us=choice(_TIMES_US))
        timed.append(changed)
    return timed
