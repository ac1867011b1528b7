"""Totals of the copies of a run, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvsm.copies.worker import Worker
from kvsm.events import Direction


class CopyTotals(msgspec.Struct, frozen=True):
    """Totals of copies in one direction, over all workers.

    gigabytes_per_second: rate of one copying thread; 0 if copies are simulated.
    """

    transfers: int
    failed: int
    bytes: int
    gigabytes_per_second: float


def copy_totals(workers: Sequence[Worker], direction: Direction) -> CopyTotals:
    """Return the totals of the copies that these workers have reported so far."""
    statistics = [worker.statistics() for worker in workers]
    parts = [of_rank.store if direction is Direction.STORE else of_rank.load for of_rank in statistics]
    copied, seconds = sum(part.bytes for part in parts), sum(part.seconds for part in parts)
    return CopyTotals(
        sum(part.transfers for part in parts),
        sum(part.failed for part in parts),
        copied,
        copied / seconds / 1e9 if seconds else 0.0,
    )
