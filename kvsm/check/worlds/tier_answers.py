"""What a request of the world of two tiers must be answered: stored, so served (S19).

The longest prefix of a prompt is made of keys that the host or the disk has.

- While a key of it is not readable on the host, the request waits as long as it may: for the copy that brings
  the key, or, if the host has no room now, for any copy in flight. It need not wait if no copy is in flight
  and the host cannot take the lacking keys, or while a reset drains.
- A request that waits no longer is served the longest prefix that the host can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm.check.worlds.check_counts import count_case
from kvsm.core.ledger import Ledger
from kvsm.core.offloader import Offloader
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states.request import RequestState
from kvsm.tiers import DiskTier


class BeforeAnswer(NamedTuple):
    """The state in which a request asks.

    prefix: the keys of its longest prefix on host and disk.
    must_wait: whether it must wait for keys of this prefix.
    """

    name: str
    prefix: Sequence[bytes]
    must_wait: bool

    @classmethod
    def of(cls, host: Offloader, tier: DiskTier, name: str, prefix: Sequence[bytes]) -> BeforeAnswer:
        """Look at the state before the tier and the host are asked."""
        ledger, below = host.ledger, tier.disk.ledger
        lacking = [key for key in prefix if key not in ledger.index]
        is_free = not (ledger.draining() or below.draining())
        waits = (
            bool(lacking) and is_free and _may_wait(host, name) and _can_wait(ledger, prefix, len(lacking))
        )
        return cls(name, prefix, waits)

    def check(self, host: Offloader, hits: int | None) -> None:
        """Check the answer. hits: the number of keys that are served; None if the request waits.

        Raises `PropertyBroken`.
        """
        readable = _readable(host.ledger, self.prefix)
        if self.must_wait:
            count_case(Property.STORED_SO_SERVED, "requests that wait for the disk")
        if hits is None:
            if readable < len(self.prefix):
                return
            broken, what = Property.STORED_SO_SERVED, "waits, and the host can read them all"
        elif self.must_wait:
            broken, what = Property.STORED_SO_SERVED, f"is served {hits} without waiting for the disk"
        elif hits != readable:
            is_short = hits < readable
            broken = Property.STORED_SO_SERVED if is_short else Property.MATCH_HOLDS
            what = f"is served {hits}, and the host can read {readable}"
        else:
            return
        message = f"request {self.name} asks for {len(self.prefix)} keys on host and disk, and {what}"
        raise PropertyBroken(broken, message)


def _may_wait(host: Offloader, name: str) -> bool:
    entry, ledger = host.ledger.requests.get(name), host.ledger
    begins = entry is None or entry.patience < 0
    return host.config.defer_ticks > 0 and (begins or (entry is not None and entry.patience > ledger.tick))


def _can_wait(ledger: Ledger, prefix: Sequence[bytes], lacking: int) -> bool:
    """Whether a copy is in flight, or one can begin."""
    if ledger.transfers:
        return True
    if any(entry.state is RequestState.MATCHED for entry in ledger.requests.values()):
        # Blocks that were fetched for another request may have to be loaded first.
        return False
    resident = sum([ledger.index[key] in ledger.policy for key in prefix if key in ledger.index])
    return lacking <= len(ledger.free) + ledger.evictable() - resident


def _readable(ledger: Ledger, keys: Sequence[bytes]) -> int:
    """The number of keys, from the first on, that the host can read."""
    for place, key in enumerate(keys):
        if key not in ledger.index or not ledger.readable(ledger.index[key]):
            return place
    return len(keys)
