"""What the copies of a run come to, all ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvsm.copies.worker import Worker
from kvsm.events import Direction


class CopyTotals(msgspec.Struct, frozen=True):
    """Copies in one direction, all workers. gigabytes_per_second: per copying thread; 0 if simulated."""

    transfers: int
    failed: int
    bytes: int
    gigabytes_per_second: float


def copy_totals(workers: Sequence[Worker], direction: Direction) -> CopyTotals:
    """What these workers have reported so far."""
    statistics = [worker.statistics() for worker in workers]
    parts = [one.store if direction is Direction.STORE else one.load for one in statistics]
    copied, seconds = sum(one.bytes for one in parts), sum(one.seconds for one in parts)
    return CopyTotals(
        sum(one.transfers for one in parts),
        sum(one.failed for one in parts),
        copied,
        copied / seconds / 1e9 if seconds else 0.0,
    )
