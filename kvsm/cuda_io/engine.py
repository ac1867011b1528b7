"""What a copy engine is: the least that a worker needs in order to carry out jobs.

A copy engine moves bytes between the device pool and the host pool of one rank. Its promises, the same
for every implementation and held by one conformance suite:

1. `submit` refuses or accepts. Whatever it raises, nothing of the job runs: `TransferFailed` for an id
   out of range, a target used twice, a transfer id that is live, an engine that is closed or broken.
2. A transfer that was accepted ends exactly once, good or bad. A failure is an outcome in `poll`, never
   a silence, and the engine goes on serving. Where it cannot, because what carries the copies out is
   gone, every live transfer ends as bad, and each new one is refused with what broke it.
3. Memory is read and written between `submit` and the result in `poll`, at any moment and in any order,
   also between blocks of one transfer. Whoever plans keeps live transfers off each other's bytes.
4. What a bad transfer wrote is unknown: its targets may hold all, some or none of the bytes.

A transfer is live from `submit` until `poll` has returned its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from kvsm.events import Direction
from kvsm.plan import TransferJob


class CopyResult(msgspec.Struct, frozen=True, gc=False):
    """The end of one transfer on one rank.

    good: every byte of every pair was copied. error: what went wrong, for people; empty if good. bytes:
    copied by a good transfer; a bad one counts none. seconds: time spent in the copy itself, summed over
    the pieces that ran side by side; 0 where the engine has no clock.
    """

    transfer: int
    direction: Direction
    good: bool
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0


class CopyEngine(Protocol):
    """Carries out jobs on the pools of one rank. The module's text holds the promises."""

    @property
    def num_host_blocks(self) -> int:
        """Size of the host pool, in places of one device block."""

    def submit(self, job: TransferJob) -> None:
        """Start a transfer and return without waiting for the copy. A job without blocks ends as good.

        Raises `TransferFailed`; nothing has run then, and the transfer has no result.
        """

    def poll(self) -> list[CopyResult]:
        """The transfers that ended since the last call, each once, in the order in which they ended."""

    def wait(self, transfers: Iterable[int]) -> None:
        """Block until these have ended; their results still come from `poll`. Others are passed over:
        a transfer that is not live has nothing left to wait for."""

    def close(self) -> None:
        """Refuse new transfers, and return when every live one has ended; `poll` still gives the results.
        Closing twice is as closing once."""
