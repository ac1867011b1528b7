"""Properties of a world of two tiers at rest, when no copy is in flight and no action is left.

- No ledger has a transfer in flight, and no request waits: progress (S9).
- Each idle block of the host is on the disk, if the disk has at least as many usable slots as the host and
  accepts stores: no doubled or lost store (S13). Excepted is a block whose last copy to the disk failed or
  was given up, until it is used again. With write-back only blocks are required that were used since they
  were stored, or that the host evicts next. Which blocks a smaller disk holds depends on its policy.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsm.check.worlds.tier_states import COMPARED
from kvsm.core.ledger.canonical import PART, declare
from kvsm.core.offloader import Offloader
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states.block import RETIRED
from kvsm.states.words import STATE_MASK
from kvsm.tiers import DiskTier, WritePolicy


class TierRest:
    """Checks these properties for one process, and records the keys that they depend on.

    host, disk: the cores of both tiers.
    tier: the `DiskTier` between them.
    """

    def __init__(self, host: Offloader, disk: Offloader, tier: DiskTier) -> None:
        self.host, self.disk, self.tier = host, disk, tier
        self.used: set[bytes] = set()
        """Keys that were loaded since they were stored on the host."""
        self.failed: set[bytes] = set()
        """Keys whose last copy to the disk failed or was given up, and that were not used since then."""

    def stored(self, keys: Iterable[bytes]) -> None:
        """The host has stored these keys from the device."""
        self.used.difference_update(keys)
        self.failed.difference_update(keys)

    def loaded(self, keys: Iterable[bytes]) -> None:
        """A request loads these keys."""
        self.used.update(keys)
        self.failed.difference_update(keys)

    def not_stored(self, keys: Iterable[bytes]) -> None:
        """A copy to the disk has failed or was given up."""
        self.failed.update(keys)

    def state(self) -> tuple[list[bytes], ...]:
        """The state to compare. Keys that the host lacks are left out: storing them again resets them."""
        index, is_back = self.host.ledger.index, self.tier._writes is WritePolicy.BACK
        used = self.used.intersection(index) if is_back else ()
        return sorted(used), sorted(self.failed.intersection(index))

    def reset(self) -> None:
        """Forget all keys, because the caches were reset."""
        self.used.clear()
        self.failed.clear()

    def check(self) -> None:
        """Check what holds at rest. Raises `PropertyBroken`."""
        tier, ledger = self.tier, self.host.ledger
        if ledger.transfers or self.disk.ledger.transfers:
            raise PropertyBroken(Property.PROGRESS, "a transfer is in flight that no copy will ever end")
        for left in ledger.requests:
            raise PropertyBroken(Property.PROGRESS, f"request {left} is left, and no action will end it")
        lacking = [key for key in self._due() if key not in self.failed and not tier.has(key)]
        if not lacking or not tier._places or not tier._health.read().takes_stores:
            return
        words = self.disk.ledger.blocks.words
        usable = sum(word & STATE_MASK != RETIRED for word in words)
        if usable >= ledger.config.host_blocks:
            message = f"at rest the host has {lacking[0]!r}, and the disk lacks it"
            raise PropertyBroken(Property.STORED_ONCE, message)

    def _due(self) -> list[bytes]:
        ledger, tier = self.host.ledger, self.tier
        idle = [key for key, slot in ledger.index.items() if slot in ledger.policy]
        if tier._writes is WritePolicy.THROUGH:
            return idle
        leaving = self.host.next_victims(tier._ahead - len(ledger.free))
        return [key for key in idle if key in self.used or key in leaving]


declare(TierRest, host=PART, disk=PART, tier=PART, used=COMPARED, failed=COMPARED)
