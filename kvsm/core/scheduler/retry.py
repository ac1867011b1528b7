"""Decide when a store that had to wait is tried again."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY
from kvsm.core.offloader import PreparedStore


class RetryStamp(NamedTuple):
    """Figures that change whenever a waiting store may have become possible.

    The store is tried again when one of them has changed, or when the next offer names other blocks than the
    last one (`OffersState.crowded`).
    """

    ended_at: int
    """Number of the last event that ended a transfer."""
    available_slots: int
    """Number of slots that are free or can be evicted. A released pin raises it, and ends no transfer."""

    @classmethod
    def of(cls, ledger: Ledger) -> RetryStamp:
        return cls(ledger.ended_at, len(ledger.free) + ledger.evictable())

    @classmethod
    def after(cls, ledger: Ledger, prepared: PreparedStore) -> RetryStamp:
        """Return the stamp after an offer. If blocks wait for what the policy then refused, no copy ends that
        they wait for: then the next step tries again."""
        return cls(-1, -1) if prepared.retry else cls.of(ledger)

    def seen(self, ledger: Ledger) -> int:
        """Return what a comparison with later stamps depends on: nothing if a transfer has ended since; then
        later stamps differ from this one in any case."""
        return self.available_slots if self.ended_at == ledger.ended_at else NOBODY
