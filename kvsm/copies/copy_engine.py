"""The interface through which a worker copies blocks.

A copy engine moves bytes between the device pool and the host pool of one rank. Every engine makes these
promises, and one conformance suite tests them:

1. `submit` never waits and never looks at the blocks of a job. It raises `TransferFailed` for a transfer id
   that is live, and if the engine is closed or broken; such a transfer has no result. Any other fault of a
   job (an id out of range, a target used twice) makes its result bad, and nothing of the job runs.
2. Every accepted transfer ends exactly once, good or bad. A failed transfer also has a result in `poll`, and
   the engine continues to accept jobs. If it cannot, because its copying thread or its device is gone, then
   every transfer that has not begun or cannot end by itself ends as bad, and every later job is refused with
   the reason.
3. A store reads what was written by compute queued before its mark. A load writes only after compute queued
   before its mark has read: the order of copies (S12). Between its start and its result a transfer may touch
   its memory at any moment, and its blocks in any order. The planner keeps other live transfers, and compute
   after the mark, off those bytes.
4. The targets of a bad transfer may hold all, some or none of the bytes. Nothing is written after the result.

A transfer is live from `submit` until `poll` has returned its result.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Protocol

import msgspec

from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import TransferFailed
from kvsm.events import Direction


class CopyResult(msgspec.Struct, frozen=True, gc=False):
    """The end of one transfer on one rank.

    good: whether every byte of every pair was copied.
    error: what went wrong, as text for people; empty if good.
    bytes: how many bytes a good transfer copied; 0 if bad.
    seconds: time spent copying (s), summed over pieces that ran in parallel; 0 if the engine has no clock.
    began: when the copy began (s, `time.perf_counter` of this process). None: unknown, or nothing was copied.
    lasted: time from the begin of the copy to its end, including a flush to disk (s). None: unknown.
    """

    transfer: int
    direction: Direction
    good: bool
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    began: float | None = None
    lasted: float | None = None

    def report(self, worker: int, submitted: float) -> WorkerReport:
        """Return the report of rank `worker`. submitted: when the engine got the job, on the clock of
        `began`."""
        queued_us = None if self.began is None else max(0, round((self.began - submitted) * 1e6))
        copied_us = None if self.lasted is None else max(0, round(self.lasted * 1e6))
        return WorkerReport(self.transfer, worker, self.good, self.error, queued_us, copied_us)


class CopyEngine(Protocol):
    """Carries out jobs on the pools of one rank. The module's docstring lists the promises."""

    @property
    def num_device_blocks(self) -> int:
        """Size of the device pool."""

    @property
    def num_host_blocks(self) -> int:
        """Size of the host pool, in device blocks."""

    def mark(self) -> Any:
        """Return a mark behind all compute queued so far, to pass to `submit` of this engine. None for a
        device whose compute is over when its call returns."""

    def submit(self, job: TransferJob, after: Any = None) -> None:
        """Start a transfer behind the mark `after`, or behind a new mark if it is None, and return without
        waiting. A job without blocks ends as good. Raises `TransferFailed`; then nothing has run."""

    def hold_compute(self, transfers: Iterable[int]) -> None:
        """Make compute that is queued from now on start after these transfers have ended, good or bad. Ids
        that are not live are ignored. Returns when the device has the order to wait, which may be before the
        transfers have ended."""

    def poll(self) -> list[CopyResult]:
        """Return the results of the transfers that ended since the last call, in the order in which they
        ended."""

    def wait(self, transfers: Iterable[int]) -> None:
        """Block until these transfers have ended; `poll` still returns their results. Ids that are not live
        are ignored."""

    def drain(self) -> None:
        """Block until every live transfer has ended; `poll` still returns the results."""

    def close(self) -> None:
        """Refuse new transfers, and return when every live transfer has ended; `poll` still returns the
        results. Idempotent."""


class WrappedCopyEngine:
    """Base of a `CopyEngine` that wraps another one: each method forwards. Subclasses override some.

    engine: the wrapped engine.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    @property
    def num_device_blocks(self) -> int:
        return self._engine.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._engine.num_host_blocks

    def mark(self) -> Any:
        return self._engine.mark()

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self._engine.submit(job, after)

    def hold_compute(self, transfers: Iterable[int]) -> None:
        self._engine.hold_compute(transfers)

    def poll(self) -> list[CopyResult]:
        return self._engine.poll()

    def wait(self, transfers: Iterable[int]) -> None:
        self._engine.wait(transfers)

    def drain(self) -> None:
        self._engine.drain()

    def close(self) -> None:
        self._engine.close()


def check_accepted(transfer: int, live: Container[int], broken: str, closed: bool = False) -> None:
    """Raise `TransferFailed` if an engine must refuse this transfer.

    live: the transfers that have no result yet.
    broken: why the engine is broken; empty if it is not.
    """
    if closed:
        raise TransferFailed(f"transfer {transfer}: the engine is closed")
    if broken:
        raise TransferFailed(f"transfer {transfer}: {broken}; make a new engine")
    if transfer in live:
        raise TransferFailed(f"transfer {transfer} is live; an id is never used again")
