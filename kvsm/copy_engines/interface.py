"""What a copy engine is: the least that a worker needs in order to carry out jobs.

A copy engine moves bytes between the device pool and the host pool of one rank. Its promises, the same
for every implementation and held by one conformance suite:

1. `submit` never waits and never looks at the blocks of a job. It raises `TransferFailed` for a transfer
   id that is live, and for an engine that is closed or broken; the transfer has no result then. Whatever
   else is wrong with a job (an id out of range, a target used twice) makes its result bad, with nothing of
   it run.
2. A transfer that was accepted ends exactly once, good or bad. A failure is an outcome in `poll`, never
   a silence, and the engine goes on serving. Where it cannot, because what carries the copies out is
   gone, every transfer that was not begun, or cannot end by itself, ends as bad, and each new one is
   refused with what broke it.
3. A store reads what compute that was queued before its mark has written; a load writes after compute that
   was queued before its mark has read (S12). Between its start and its result in `poll` a transfer touches
   its memory at any moment and in any order, also between blocks of one transfer: whoever plans keeps live
   transfers, and compute after the mark, off each other's bytes.
4. What a bad transfer wrote is unknown: its targets may hold all, some or none of the bytes. None of it is
   written after the result.

A transfer is live from `submit` until `poll` has returned its result.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Protocol

import msgspec

from kvsm.errors import TransferFailed
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
    def num_device_blocks(self) -> int:
        """Size of the device pool."""

    @property
    def num_host_blocks(self) -> int:
        """Size of the host pool, in places of one device block."""

    def mark(self) -> Any:
        """This moment of compute: all that has been queued for it so far, and nothing that comes later.

        Opaque, for `submit` of this engine alone. None where compute is over when its call returns.
        """

    def submit(self, job: TransferJob, after: Any = None) -> None:
        """Start a transfer behind the mark `after`, or behind a mark of now, and return without waiting. A
        job without blocks ends as good. Raises `TransferFailed`; nothing has run then."""

    def hold_compute(self, transfers: Iterable[int]) -> None:
        """Let compute that is queued from now on start after these have ended, good or bad; others than live
        ones are passed over. Returns when the device knows, not when they have ended."""

    def poll(self) -> list[CopyResult]:
        """The transfers that ended since the last call, each once, in the order in which they ended."""

    def wait(self, transfers: Iterable[int]) -> None:
        """Block until these have ended; their results still come from `poll`. Others are passed over:
        a transfer that is not live has nothing left to wait for."""

    def drain(self) -> None:
        """Block until every live transfer has ended; `poll` still gives the results."""

    def close(self) -> None:
        """Refuse new transfers, and return when every live one has ended; `poll` still gives the results.
        Closing twice is as closing once."""


def check_accepted(transfer: int, live: Container[int], broken: str, closed: bool = False) -> None:
    """What `submit` refuses in every engine. broken: by what; empty if it is not. Raises `TransferFailed`."""
    if closed:
        raise TransferFailed(f"transfer {transfer}: the engine is closed")
    if broken:
        raise TransferFailed(f"transfer {transfer}: {broken}; make a new engine")
    if transfer in live:
        raise TransferFailed(f"transfer {transfer} is live; an id is never used again")
