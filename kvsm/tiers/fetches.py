"""Decides when a copy from the disk may begin, and pins its blocks for the request that asked for them.

Many requests may need blocks of the disk at the same time, and a small host pool has no room for all of them.
A block that is evicted before its load was copied in vain. So:

- The blocks of a request are copied together or not at all. If some of them are already in flight, the
  request waits for these first. During the copy, its blocks on the host are pinned.
- At the end of the copy, a request that still waits is matched at once: all its blocks are pinned before any
  other decision. They stay pinned as after any match, until the request loads them, gives them back, or ends.
- Blocks in flight from the disk, and blocks that wait for their load, take at most half of the host pool. A
  request whose blocks do not fit waits for its turn, as for any block in flight: until a copy ends, or at
  most for `OffloadConfig.defer_ticks`. If no blocks are held, any request may begin; otherwise a prompt
  longer than half of the pool could never be copied.

The decisions depend only on the ledger of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.core.offloader import LookupResult, Offloader, PendingHit
from kvsm.errors import LimitReached
from kvsm.ids import listed
from kvsm.states.request import MATCHED
from kvsm.states.words import STATE_MASK

SHARE = 2
"""At most 1 / SHARE of the host's blocks may be in flight from the disk or wait for their load."""

DEFER_TICKS = 2048
"""Default for the most steps that a request waits for its turn and its copy. A step of an idle engine takes a
millisecond."""


class Fetches:
    """The hits whose blocks are in flight from the disk, or wait for their load on the host.

    host: the core of the host.
    """

    def __init__(self, host: Offloader) -> None:
        self._host = host
        self._most = max(1, host.config.host_blocks // SHARE)
        self._hits: dict[int, dict[str, PendingHit]] = {}
        """Transfer of the host's ledger, for each copy in flight from the disk -> request -> its hit."""
        self._matched: dict[str, None] = {}
        """Requests that were matched by `match`. They hold blocks as long as they are MATCHED."""

    def in_flight(self, hit: PendingHit) -> int | None:
        """Return a transfer that is copying a block of this hit to the host; None if there is none. If it is
        a copy from the disk, note the hit, so that the request is matched at the end if it waits for it."""
        ledger = self._host.ledger
        for slot in map(ledger.index.get, hit.keys):
            if slot is not None and not ledger.readable(slot):
                transfer = ledger.generation[slot]
                if transfer in self._hits:
                    self._hits[transfer][hit.request] = hit
                return transfer
        return None

    def may_begin(self, request: str, resident: Sequence[int], lacking: int) -> bool:
        """Whether the copy of a hit may begin.

        request: the request of the hit. The blocks that it holds do not count: it gives them back when it
            waits for more.
        resident: the host slots of its blocks that are on the host.
        lacking: the number of its blocks that are only on the disk.
        """
        ledger, held = self._host.ledger, self._held(request)
        if held and len(held.union(resident)) + lacking > self._most:
            return False
        idle = sum([slot in ledger.policy and slot not in ledger.copied_out for slot in resident])
        # If the pool has no room for all of them, begin once nothing is in flight: copy what fits.
        return lacking <= len(ledger.free) + ledger.evictable() - idle or not ledger.transfers

    def _held(self, but_of: str) -> set[int]:
        """Return the host slots that are in flight from the disk, or that a request other than `but_of` holds
        for its load."""
        ledger = self._host.ledger
        held = {slot for transfer in self._hits for slot in listed(ledger.transfers[transfer].slots)}
        for name in list(self._matched):
            request = ledger.requests.get(name)
            if request is None or request.word & STATE_MASK != MATCHED:
                del self._matched[name]
            elif name != but_of:
                held.update(listed(request.pins))
        return held

    def turn(self) -> int | None:
        """Return the transfer for whose end a request should wait before it asks again; None if no transfer
        is in flight."""
        return next(iter(self._hits or self._host.ledger.transfers), None)

    def begin(self, transfer: int, hit: PendingHit) -> None:
        """Note that this transfer of the host's ledger copies the lacking blocks of the hit."""
        self._hits[transfer] = {hit.request: hit}

    def waiting(self, transfer: int) -> list[PendingHit]:
        """Return the hits whose requests currently wait for this copy."""
        deferred, hits = self._host.ledger.deferred, self._hits.get(transfer, {})
        return [hit for name, hit in hits.items() if name in deferred and deferred[name].awaits == transfer]

    def match(self, hits: Sequence[PendingHit]) -> None:
        """Match each request whose hit is now complete on the host.

        A key that was missing when the copy began may be readable by now. Then the result of that lookup is
        out of date, and is not recorded. The request asks again in the next step, and is served the key then.
        """
        ledger = self._host.ledger
        for hit in hits:
            slots = [ledger.index.get(key, -1) for key in hit.keys]
            if all(slot >= 0 and ledger.readable(slot) for slot in slots):
                came = hit.missed is not None and self._host.lookup(hit.missed) is LookupResult.HIT
                figures = () if came else (hit.asked, hit.on_device, hit.on_host)
                try:
                    self._host.pin(hit.request, slots, None if came else hit.missed, *figures)
                except LimitReached:
                    continue  # the request asks again, and gets this error then
                self._matched[hit.request] = None

    def end(self, transfer: int) -> None:
        """Forget a copy that has ended, good or bad."""
        self._hits.pop(transfer, None)
