"""Decide when a store that had to wait is tried again."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY
from kvsm.core.offloader import PreparedStore


class RetryStamp(NamedTuple):
    """The figures on which it depends whether a waiting store can be planned.

    The store is tried again when they have changed, or when the next offer names other blocks than the last
    one (`OffersState.crowded`).
    """

    ended_at: int
    """Number of the last event that ended a transfer."""
    available_slots: int
    """Number of slots that are free or can be evicted. Released pins raise it without ending a transfer."""

    @classmethod
    def of(cls, ledger: Ledger) -> RetryStamp:
        return cls(ledger.ended_at, len(ledger.free) + ledger.evictable())

    @classmethod
    def after(cls, ledger: Ledger, prepared: PreparedStore) -> RetryStamp:
        """Return the stamp after an offer. If the policy has refused some blocks, others may wait for a block
        that is not stored after all: then the next step tries again."""
        return cls(-1, -1) if prepared.refused and prepared.deferred else cls.of(ledger)

    def seen(self, ledger: Ledger) -> int:
        """Return the part that a comparison with later stamps depends on: none if a transfer has ended since,
        because then all later stamps differ from this one."""
        return self.available_slots if self.ended_at == ledger.ended_at else NOBODY
