"""When a store that had to wait is worth another try."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY


class RetryStamp(NamedTuple):
    """What decides whether a store that had to wait can go on.

    It is tried again when this has changed, or when the next offer names less than the last one
    (`OffersState.crowded`).
    """

    ended_at: int
    """Number of the last event that ended a transfer."""
    available_slots: int
    """Slots that are free or can be evicted. Pins that are given back make room, and end no transfer."""

    @classmethod
    def of(cls, ledger: Ledger) -> RetryStamp:
        return cls(ledger.ended_at, len(ledger.free) + ledger.evictable())

    def seen(self, ledger: Ledger) -> int:
        """What a comparison with later stamps can tell: nothing if a transfer has ended since, for then
        all later stamps differ from this one."""
        return self.available_slots if self.ended_at == ledger.ended_at else NOBODY
