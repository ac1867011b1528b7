"""`OutgoingHandOvers`: pins the blocks of finished requests on a prefill engine, for the decode engines.

When a request with `do_remote_decode` has finished, its blocks are on the host, or in flight to it. They are
pinned for a separate request, so that they are not evicted; the existing kinds of events record the whole
hand-over:

    hand-over-4f1d..-of-cmpl-42    matched, and pinned     when the blocks are on the host
                                   finished                when a decode engine has taken them, or had them
                                   aborted                 given up, expired, revoked by a reset, or shutdown

The lease table decides which engine may read. `look` turns its decisions into events, in the engine's thread:
after reports are applied, and before a plan leaves. So when a plan leaves that writes a slot, every lease
of that slot has ended, and cannot be confirmed any more.

Two limits protect an engine from clients that never use their hand-overs:

- All hand-overs together pin at most a share of the host pool. To make room for a new one, the oldest that
  no engine is reading are given up. A prompt that needs more than the share is handed over in part.
- `look` visits only hand-overs that may have changed: each waits for one store, and is visited when that
  store has ended. `look` visits all of them only when a block was found bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import Logger
from secrets import token_hex
from typing import Any

import msgspec
import numpy as np

from kvsm.core.offloader import Offloader
from kvsm.core.scheduler.groups import SchedulerConfig
from kvsm.core.scheduler.hits import HitSearch, Span, hit_limit
from kvsm.core.scheduler.request_params import HandOverParams
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import KvsmError, LimitReached
from kvsm.ids import listed
from kvsm.system.printable import printable
from kvsm.tiers.hand_over.incoming import Digest
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.tiers.hand_over.peer_messages import Offered, OfferedGroup


class _Outgoing(msgspec.Struct):
    """A hand-over that has not ended.

    name: the request that pins its blocks.
    request: the finished request.
    keys: the keys of the prompt's chunks, by group; empty when it is ready.
    limit: the most tokens that a hit of the prompt may cover.
    slots: the pinned slots.
    awaits: the store in flight that it waits for; 0: none.
    is_ready: whether all blocks are pinned and a reader may claim it.
    """

    name: str
    request: str
    keys: Sequence[Sequence[bytes]]
    limit: int
    slots: Sequence[int] = ()
    awaits: int = 0
    is_ready: bool = False


class OutgoingHandOvers:
    """The hand-overs of one prefill engine.

    engine: the id of this engine.
    leases: the lease table, from which `HandOverService` answers the readers.
    digest: computes the digest of a prompt, as the decode engines do.
    logger: gets a line for each hand-over without blocks, expired or crowded out.
    share: the largest share of the host pool that all hand-overs pin together, more than 0 and at most 1.
    new_name: returns an unguessable name.
    """

    def __init__(
        self,
        core: Offloader,
        config: SchedulerConfig,
        engine: str,
        leases: LeaseTable,
        digest: Digest,
        logger: Logger,
        share: float = 0.5,
        new_name: Callable[[], str] = token_hex,
    ) -> None:
        self._core, self._config, self._engine = core, config, engine
        self.leases, self._digest, self._logger, self._new_name = leases, digest, logger, new_name
        self.most_slots = max(1, int(share * core.config.host_blocks))
        """Most host slots that all hand-overs pin together."""
        self._out: dict[str, _Outgoing] = {}
        """Lease -> its hand-over, for those that have not ended; oldest first."""
        self._awaiting: dict[int, dict[str, None]] = {}
        """Store in flight -> the leases that wait for it."""
        self._holders = np.zeros(core.config.host_blocks, np.int64)
        """For each host slot, the number of hand-overs that pin it."""
        self._held = 0
        """Number of slots that hand-overs pin."""
        self._ended_at = self._voided_at = 0
        """The last event that ended a transfer, and the last that voided a block, at the last `look`."""

    def offer(self, tracked: TrackedRequest, request: Any) -> dict[str, Any] | None:
        """Open a hand-over for the prompt of a finished request. Returns the parameters that its client sends
        to the decode engine; None if no block of the prompt can be handed over."""
        prompt_tokens = request.num_prompt_tokens
        limit = hit_limit(prompt_tokens, 0, prompt_tokens)
        limit -= limit % self._config.alignment
        if not limit or getattr(request, "prompt_embeds", None) is not None:
            return None
        lease = self._new_name()
        name = f"hand-over-{lease[:8]}-of-{tracked.name}"
        out = _Outgoing(name, tracked.name, self._prompt_keys(tracked, prompt_tokens), limit)
        self._out[lease] = out
        self._core.arrive(out.name)
        self.leases.offer(lease, self._digest(request, limit), limit)
        self._prepare(lease, out)
        self._release_ended()
        if lease not in self._out:
            return None
        return HandOverParams(self._engine, tracked.name, lease, limit).as_answer()

    def _prompt_keys(self, tracked: TrackedRequest, prompt_tokens: int) -> list[list[bytes]]:
        """Return, by group, the keys of the chunks that contain only prompt tokens. The decode engine cannot
        know the keys of later chunks, which contain generated tokens."""
        tokens = [group.block_tokens * self._core.config.blocks_per_chunk for group in self._config.groups]
        return [keys[: prompt_tokens // size] for keys, size in zip(tracked.all_keys(), tokens)]

    def look(self) -> None:
        """Pin blocks whose stores have ended, revoke hand-overs with bad blocks, and release ended leases."""
        if not self._out:
            return
        ledger = self._core.ledger
        if self._ended_at != ledger.ended_at:
            self._ended_at = ledger.ended_at
            for transfer in [one for one in self._awaiting if one not in ledger.transfers]:
                for lease in list(self._awaiting.get(transfer, ())):
                    if lease in self._out:
                        self._await(lease, self._out[lease], 0)
                        self._prepare(lease, self._out[lease])
        if self._voided_at != ledger.voided_at:
            self._voided_at = ledger.voided_at
            for lease, out in self._out.items():
                if out.is_ready:
                    self._hold_or_revoke(lease, out)
        self._release_ended()

    def _prepare(self, lease: str, out: _Outgoing) -> None:
        """Pin the blocks that are on the host. Mark the hand-over as ready, or wait for a store in flight."""
        ledger = self._core.ledger
        index, readable = ledger.index, ledger.readable
        search = HitSearch(self._config, self._core.config.blocks_per_chunk, out.keys, 0)
        end = search.longest_hit_within(self.most_slots, out.limit, index.__contains__)
        spans = search.needed(end)
        slots = [[index[key] for key in keys[a:b]] for keys, (a, b) in zip(out.keys, spans)] if end else []
        wanted = [slot for group in slots for slot in group]
        here = [slot for slot in wanted if readable(slot)]
        if not end:
            self._logger.info(
                "kvsm: request %s hands nothing over: none of it is on the host", printable(out.request)
            )
            self.leases.revoke(lease)
        elif not self._pin(lease, out, here):
            return
        elif len(here) == len(wanted):
            out.is_ready, out.keys = True, ()
            self.leases.ready(lease, _offered(end, spans, slots))
        else:
            missing = next(slot for slot in wanted if not readable(slot))
            self._await(lease, out, ledger.generation[missing])

    def _await(self, lease: str, out: _Outgoing, store: int) -> None:
        """Make the hand-over wait for this store instead of the current one. store: 0 for none."""
        if out.awaits:
            del self._awaiting[out.awaits][lease]
            if not self._awaiting[out.awaits]:
                del self._awaiting[out.awaits]
        if store:
            self._awaiting.setdefault(store, {})[lease] = None
        out.awaits = store

    def _pin(self, lease: str, out: _Outgoing, slots: Sequence[int]) -> bool:
        """Pin these slots for the hand-over. If that fails, end its lease."""
        if not slots:
            return True
        self._unpin(out)
        if not self._make_room(lease, slots):
            self.leases.crowd_out(lease)
            return False
        if lease not in self._out:  # expired meanwhile
            return False
        try:
            self._core.pin(out.name, slots, None, 0, 0, 0)
        except LimitReached:
            self.leases.revoke(lease)
            return False
        out.slots = slots
        self._held += self._new_among(slots)
        self._holders[slots] += 1
        return True

    def _make_room(self, lease: str, slots: Sequence[int]) -> bool:
        """Give up the oldest hand-overs that no engine reads, until these slots fit into the share."""
        if self._held + self._new_among(slots) <= self.most_slots:
            return True
        for other in [one for one in self._out if one != lease]:
            if self.leases.crowd_out(other):
                self._release_ended()
                if self._held + self._new_among(slots) <= self.most_slots:
                    return True
        return False

    def _new_among(self, slots: Sequence[int]) -> int:
        """The number of these slots that are not pinned by any hand-over."""
        return int(np.count_nonzero(self._holders[slots] == 0))

    def _unpin(self, out: _Outgoing) -> None:
        """Remove the slots of the hand-over from the share. Does not release the pins of its request."""
        if out.slots:
            self._holders[out.slots] -= 1
            self._held -= self._new_among(out.slots)
            out.slots = ()

    def _hold_or_revoke(self, lease: str, out: _Outgoing) -> None:
        """Revoke the lease if a pinned block was voided."""
        entry = self._core.ledger.requests.get(out.name)
        if entry is None or len(self._core.ledger.live_pins(entry)) != len(listed(entry.pins)):
            self.leases.revoke(lease)

    def _release_ended(self) -> None:
        """Release the pins of leases that have expired or ended otherwise."""
        self.leases.expire()
        for lease, end in self.leases.take_ended():
            out = self._out.pop(lease)
            self._unpin(out)
            self._await(lease, out, 0)
            given_up = end not in (LeaseEnd.TAKEN, LeaseEnd.NOT_NEEDED)
            self._core.finish(out.name, aborted=given_up, hand_over=end.value)
            if end is LeaseEnd.EXPIRED:
                self._logger.warning(
                    "kvsm: no engine has taken the blocks of request %s within %g s; they are given up "
                    "(hand_over_timeout_s)",
                    printable(out.request),
                    self.leases.timeout_s,
                )
            elif end is LeaseEnd.CROWDED_OUT:
                self._logger.warning(
                    "kvsm: the blocks of request %s are given up before an engine has taken them: all "
                    "hand-overs hold at most %d host slots (hand_over_share)",
                    printable(out.request),
                    self.most_slots,
                )

    def has_ended(self) -> bool:
        """Whether a hand-over has ended whose blocks are still pinned, until the next `look`."""
        return bool(self._out) and self.leases.has_ended()

    def reset(self) -> None:
        """Revoke all hand-overs at a reset of the cache: readers get held=False."""
        for lease in self._out:
            self.leases.revoke(lease)
        self._release_ended()

    def close(self) -> None:
        """Revoke all hand-overs and release their pins. Close the `HandOverService` before."""
        with suppress(KvsmError):  # a core that has stopped takes no events
            self.reset()


def _offered(end: int, spans: Sequence[Span], slots: Sequence[Sequence[int]]) -> Offered:
    groups = [OfferedGroup(span.first, tuple(map(int, group))) for span, group in zip(spans, slots)]
    return Offered(end, tuple(groups))
