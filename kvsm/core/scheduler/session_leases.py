"""`SessionLeases`: keeps the blocks of agents' sessions on the host, as their hints ask, within a share.

A client that waits for a tool knows that it will come back; the eviction policy does not. So its request may
bring an `agent_hint` (`kvsm.core.scheduler.request_params.AgentHint`), which takes effect when the request
ends. It is advice: each hint is answered ACCEPTED, CLIPPED or REFUSED, in the log (`HintAnswered`) and to the
client.

A session lease is a request of its own, whose pins keep the blocks from being evicted. It is no lease of a
device block (`kvsm.states.lease`) or of a hand-over (`kvsm.tiers.hand_over.leases`).

Its life:

    lease-4f1d2a3b-of-cmpl-42    arrives, is matched    the hint is accepted or clipped
                                 is matched again       blocks that were being stored are on the host
                                 finishes               expired, released, replaced, crowded out or revoked

So the fold, a snapshot and a restart need no code for session leases: none outlives its process, and a replay
repeats their events. Only this class reads the clock, and what it decides by it becomes events.

These bounds hold at every event, so requests without hints always have the rest of the pool:

- All leases together pin at most a share of the host pool. The oldest ones end to make room for a new one, so
  clients with many sessions can end each other's leases.
- The lease of one session has at most half of that share. If its prompt is longer, the end is clipped,
  because the beginning can be hit without it. A session has one lease; a new one replaces it.
- There are at most `MOST_LEASES` leases: the share alone does not limit them, because many sessions may lease
  the same blocks. Their pins together are at most `most_pins`: one call may have to release all of them.

A hint has no priority, because every client could always ask for the highest one. A session that gives up its
lease removes no block, because other requests may share its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsm.core.offloader import Offloader
from kvsm.core.scheduler.groups import SchedulerConfig
from kvsm.core.scheduler.hits import HitSearch, hit_limit
from kvsm.core.scheduler.request_params import AgentHint
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import KvsmError, LimitReached
from kvsm.events import HintOutcome, HintReason
from kvsm.system.steady_clock import SteadyClock

MOST_LEASES = 1024
"""The most leases at once. A block can be pinned 32,767 times, and requests need pins, too."""
MOST_PINS = 1 << 17
"""The most pins of all leases of a small share: to release them takes about 30 ms."""
ENDS_IN_A_LOOK = 8
"""The most leases that expire in one `look`, because the engine waits for it: releasing 400 pins takes about
0.1 ms. The other leases expire in the next calls."""


class SessionLease(msgspec.Struct, eq=False):
    """A lease that has not ended.

    name: the request that pins its blocks.
    request: the request that brought the hint.
    until: when it expires (s, on the clock).
    asked: how many blocks the hint asked for.
    keys: the keys of its blocks that are on the host or on their way, in the order of the search.
    slots: their slots.
    waits: whether some of its blocks are still being stored.
    """

    name: str
    session: str
    request: str
    until: float
    ttl_ms: int
    asked: int
    keys: Sequence[bytes]
    slots: Sequence[int] = ()
    waits: bool = False


class _Wanted(NamedTuple):
    """asked: how many blocks a hint asks for. keys: the keys of those that can be leased. why: why the others
    cannot."""

    asked: int
    keys: Sequence[bytes]
    why: HintReason


class SessionLeases:
    """The leases of one engine.

    share: the largest share of the host pool that all leases pin together, from 0 to 1. 0: no leases.
    clock: monotonic time (s); a clock that goes back makes no lease last longer. Public, so that a test can
        replace it.
    new_name: returns text that no client can guess, so that no request has the name of a lease.
    """

    def __init__(
        self,
        core: Offloader,
        config: SchedulerConfig,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        new_name: Callable[[], str] = token_hex,
    ) -> None:
        self._core, self._config, self._new_name = core, config, new_name
        self.clock: Callable[[], float] = SteadyClock(clock)
        slots = core.config.host_blocks
        self.most_slots = min(int(share * slots), slots - 1)
        """Most host slots that all leases pin together. One slot at least is left for stores."""
        self.most_of_one = -(-self.most_slots // 2)
        """Most host slots that one lease pins."""
        self.most_pins = max(MOST_PINS, 2 * self.most_slots)
        """The most pins of all leases: a slot has one for each lease that has it."""
        self.leases: dict[str, SessionLease] = {}
        """Session -> its lease, for those that have not ended; oldest first."""
        self._ends: list[tuple[float, str, str]] = []
        """A heap of (time, name, session) with the ends of all leases, and of some that have ended before."""
        self._holders = np.zeros(slots, np.int64)
        """For each host slot, the number of leases that have it."""
        self.held = 0
        """Number of slots that leases have."""
        self.pins = 0
        """Sum of the numbers of slots of all leases."""
        self._ended_at = self._voided_at = 0
        """The last event that ended a transfer, and the last that voided a block, at the last look."""

    def take(self, tracked: TrackedRequest, request: Any) -> dict[str, Any] | None:
        """Take the hint of a request that has ended. Returns the answer for the client; None if there is no
        hint, or if it asks for nothing."""
        hint = tracked.agent_hint
        if hint is None or not (hint.wrong or hint.releases or hint.ttl_s or hint.moves):
            return None
        self.look()
        if hint.wrong:
            return self._refuse(tracked.name, hint, HintReason.NOT_UNDERSTOOD)
        if hint.releases:
            return self._release(tracked.name, hint)
        if not hint.ttl_s:
            return self._refuse(tracked.name, hint, HintReason.NOT_SUPPORTED)
        if not self.most_slots:
            return self._refuse(tracked.name, hint, HintReason.NO_SHARE)
        wanted = self._wanted(tracked, request)
        if not wanted.keys:
            return self._refuse(tracked.name, hint, wanted.why, wanted.asked)
        return self._lease(tracked.name, hint, wanted)

    def look(self) -> None:
        """Pin blocks whose stores have ended, and end leases whose time is up or whose blocks are gone."""
        if not self.leases:
            return
        ledger = self._core.ledger
        if self._ended_at != ledger.ended_at or self._voided_at != ledger.voided_at:
            voided = self._voided_at != ledger.voided_at
            self._ended_at, self._voided_at = ledger.ended_at, ledger.voided_at
            for lease in [lease for lease in self.leases.values() if voided or lease.waits]:
                if not self._hold(lease):
                    self._end(lease, HintOutcome.REVOKED)
        now, left = self.clock(), ENDS_IN_A_LOOK
        while left and self._ends and self._ends[0][0] <= now:
            _, name, session = heappop(self._ends)
            expired = self.leases.get(session)
            if expired is not None and expired.name == name:
                self._end(expired, HintOutcome.EXPIRED)
                left -= 1

    def reset(self) -> None:
        """End all leases: the cache is reset."""
        for lease in list(self.leases.values()):
            self._end(lease, HintOutcome.REVOKED)

    def close(self) -> None:
        """End all leases: the engine stops."""
        with suppress(KvsmError):  # a core that has stopped takes no events
            self.reset()

    def _wanted(self, tracked: TrackedRequest, request: Any) -> _Wanted:
        """Return which blocks of a request may be leased."""
        size, has = self._core.config.blocks_per_chunk, self._core.ledger.index.__contains__
        search = HitSearch(self._config, size, tracked.all_keys(), 0)
        limit = hit_limit(request.num_tokens, 0, request.num_tokens)
        whole, here = search.longest_hit(limit, lambda _: True), search.longest_hit(limit, has)
        end = search.longest_hit_within(self.most_of_one, limit, has)
        why = HintReason.NONE
        if end < here:
            why = HintReason.SHARE
        elif end < whole or not end:
            why = HintReason.NOT_ON_HOST if end else HintReason.NOTHING_ON_HOST
        return _Wanted(search.chunks(whole), search.needed_keys(end), why)

    def _lease(self, request: str, hint: AgentHint, wanted: _Wanted) -> dict[str, Any]:
        """Begin a lease, and end the one that the session had."""
        old = self.leases.get(hint.session)
        if old is not None:
            self._end(old, HintOutcome.REPLACED)
        ttl_ms = max(1, round(hint.ttl_s * 1000))
        name = f"lease-{self._new_name()[:8]}-of-{request}"
        until = self.clock() + ttl_ms / 1000
        lease = SessionLease(name, hint.session, request, until, ttl_ms, wanted.asked, wanted.keys)
        self._make_room([self._core.ledger.index[key] for key in wanted.keys])
        self._core.arrive(name)
        if not self._hold(lease):
            self._core.finish(name, aborted=True)
            return self._refuse(request, hint, HintReason.TOO_MANY_HOLDS, wanted.asked)
        self.leases[hint.session] = lease
        if len(self._ends) > 2 * MOST_LEASES:
            self._ends = [(one.until, one.name, one.session) for one in self.leases.values()]
            heapify(self._ends)
        else:
            heappush(self._ends, (until, name, hint.session))
        outcome = HintOutcome.CLIPPED if wanted.why else HintOutcome.ACCEPTED
        self._record(lease, outcome, wanted.why)
        return _told(hint, outcome, str(wanted.why), lease.asked, len(lease.slots))

    def _make_room(self, slots: Sequence[int]) -> None:
        """End the oldest leases until one more lease, with these slots, is within the bounds."""
        while (
            len(self.leases) >= MOST_LEASES
            or self.pins + len(slots) > self.most_pins
            or self.held + self._new_among(slots) > self.most_slots
        ):
            self._end(next(iter(self.leases.values())), HintOutcome.CROWDED_OUT)

    def _hold(self, lease: SessionLease) -> bool:
        """Pin the blocks of a lease that are on the host. Returns whether it has any block, pinned or on its
        way. A key that the host has lost leaves the lease for good, so a lease never grows.
        """
        ledger = self._core.ledger
        index, readable = ledger.index, ledger.readable
        lease.keys = [key for key in lease.keys if key in index]
        slots = [index[key] for key in lease.keys]
        here = [slot for slot in slots if readable(slot)]
        self._count(lease, slots)
        lease.waits = len(here) < len(slots)
        try:
            if here:
                self._core.pin(lease.name, here, None, 0, 0, 0)
            else:
                self._core.release(lease.name)
        except LimitReached:
            self._count(lease, ())
            return False
        return bool(slots)

    def _count(self, lease: SessionLease, slots: Sequence[int]) -> None:
        """Count these slots for the lease, in place of those that it had."""
        self.pins += len(slots) - len(lease.slots)
        if lease.slots:
            self._holders[lease.slots] -= 1
            self.held -= self._new_among(lease.slots)
        if slots:
            self.held += self._new_among(slots)
            self._holders[slots] += 1
        lease.slots = slots

    def _new_among(self, slots: Sequence[int]) -> int:
        """The number of these slots that no lease has."""
        return int(np.count_nonzero(self._holders[slots] == 0)) if slots else 0

    def _release(self, request: str, hint: AgentHint) -> dict[str, Any]:
        """End the lease of a session that gives it up."""
        lease = self.leases.get(hint.session)
        if lease is None:
            return self._refuse(request, hint, HintReason.NO_LEASE)
        self._end(lease, HintOutcome.RELEASED)
        self._core.answer_hint(request, hint.session, "", HintOutcome.ACCEPTED)
        return _told(hint, HintOutcome.ACCEPTED)

    def _end(self, lease: SessionLease, outcome: HintOutcome) -> None:
        """End a lease and release its pins."""
        del self.leases[lease.session]
        self._record(lease, outcome)
        self._count(lease, ())
        self._core.finish(lease.name, aborted=outcome is HintOutcome.REVOKED)

    def _refuse(self, request: str, hint: AgentHint, why: HintReason, asked: int = 0) -> dict[str, Any]:
        self._core.answer_hint(request, hint.session, "", HintOutcome.REFUSED, asked=asked, why=why)
        return _told(hint, HintOutcome.REFUSED, hint.wrong or str(why), asked)

    def _record(self, lease: SessionLease, outcome: HintOutcome, why: HintReason = HintReason.NONE) -> None:
        """Record that a lease begins or ends with this outcome."""
        self._core.answer_hint(
            lease.request,
            lease.session,
            lease.name,
            outcome,
            asked=lease.asked,
            leased=len(lease.slots),
            ttl_ms=lease.ttl_ms,
            why=why,
        )


def _told(
    hint: AgentHint, outcome: HintOutcome, why: str = "", asked: int = 0, leased: int = 0
) -> dict[str, Any]:
    """Return an answer for the client. It has no key that would ask for something if a client sent it back
    as a hint."""
    told: dict[str, Any] = {"session_id": hint.session, "outcome": str(outcome), "why": why}
    if hint.ttl_s:
        told.update(ttl=hint.ttl_s, asked_blocks=asked, leased_blocks=leased)
    return {"agent_hint": told}
