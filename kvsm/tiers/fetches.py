"""When a copy from the disk may begin, and who holds what it brings.

Many requests may want blocks of the disk at once, and a small host pool has no room for all of them. Blocks
that came and were evicted before their load would have come for nothing. So:

- A request's blocks come together or not at all. If some of them are in flight already, it waits for these
  first. What the host has of them is held while the others come.
- When they have come, and the request still waits for them, it is matched at once: all of them are pinned
  before anything else is planned. They are held as by any match, until the request loads them, gives them
  back, or ends.
- Blocks that come, and blocks that have come and wait for their load, take at most half of the host pool. A
  request whose blocks do not fit in has to wait for its turn, as for any block in flight: until a copy ends,
  or until it has waited long enough (`OffloadConfig.defer_ticks`). If nobody holds anything, a request may
  begin in any case. A prompt longer than half of the pool would else never come.

All of it is decided from the ledger of the host alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.core.offloader import Offloader, PendingHit
from kvsm.errors import LimitReached
from kvsm.ids import listed
from kvsm.states.request import MATCHED
from kvsm.states.words import STATE_MASK

SHARE = 2
"""One in this number of the host's blocks may wait for its load."""

DEFER_TICKS = 2048
"""How many steps a request waits at most for its turn and its copy, if the user of an engine does not choose.
A step of an idle engine takes a millisecond."""


class Fetches:
    """The hits whose blocks come from the disk, or have come and wait for their load.

    host: the core of the host.
    """

    def __init__(self, host: Offloader) -> None:
        self._host = host
        self._most = max(1, host.config.host_blocks // SHARE)
        self._hits: dict[int, dict[str, PendingHit]] = {}
        """For each copy in flight from the disk, its transfer in the host's ledger: who has asked for it."""
        self._matched: dict[str, None] = {}
        """The requests that were matched here. They hold blocks as long as they are MATCHED."""

    def in_flight(self, hit: PendingHit) -> int | None:
        """A transfer that brings a block of this hit to the host. If it is a copy from the disk, and the
        request waits for it, the request is matched at its end."""
        ledger = self._host.ledger
        for slot in map(ledger.index.get, hit.keys):
            if slot is not None and not ledger.readable(slot):
                transfer = ledger.generation[slot]
                if transfer in self._hits:
                    self._hits[transfer][hit.request] = hit
                return transfer
        return None

    def may_begin(self, resident: Sequence[int], lacking: int) -> bool:
        """Whether a hit of these slots of the host and this number of blocks of the disk may be brought."""
        ledger, held = self._host.ledger, self._held()
        if held and len(held.union(resident)) + lacking > self._most:
            return False
        idle = sum([slot in ledger.policy and slot not in ledger.copied_out for slot in resident])
        # A pool that is too small for all of them brings what it can, as soon as nothing else uses it.
        return lacking <= len(ledger.free) + ledger.evictable() - idle or not ledger.transfers

    def _held(self) -> set[int]:
        """The host slots that wait for a load."""
        ledger = self._host.ledger
        held = {slot for one in self._hits for slot in listed(ledger.transfers[one].slots)}
        for name in list(self._matched):
            request = ledger.requests.get(name)
            if request is not None and request.word & STATE_MASK == MATCHED:
                held.update(listed(request.pins))
            else:
                del self._matched[name]
        return held

    def turn(self) -> int | None:
        """The transfer after which a request that may not begin asks again. None: none is in flight."""
        return next(iter(self._hits or self._host.ledger.transfers), None)

    def begin(self, transfer: int, hit: PendingHit) -> None:
        """This transfer of the host's ledger brings what it lacks of the hit."""
        self._hits[transfer] = {hit.request: hit}

    def waiting(self, transfer: int) -> list[PendingHit]:
        """The hits whose requests wait for this copy now."""
        deferred, hits = self._host.ledger.deferred, self._hits.get(transfer, {})
        return [hit for name, hit in hits.items() if name in deferred and deferred[name].awaits == transfer]

    def match(self, hits: Sequence[PendingHit]) -> None:
        """Match the requests with these hits, if all of them has come."""
        ledger = self._host.ledger
        for hit in hits:
            slots = [ledger.index.get(key, -1) for key in hit.keys]
            if all(slot >= 0 and ledger.readable(slot) for slot in slots):
                try:
                    self._host.pin(hit.request, slots, hit.missed, hit.asked, hit.on_device, hit.on_host)
                except LimitReached:
                    continue  # It asks again, and is told so.
                self._matched[hit.request] = None

    def end(self, transfer: int) -> None:
        """This copy is over, in whichever way."""
        self._hits.pop(transfer, None)
