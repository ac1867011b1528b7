"""The requests of the world of two tiers: they arrive, wait for blocks, hold them, load them, or leave.

Each call of `ask` proceeds in the order of `OffloadScheduler`: does the request wait for a transfer, which
blocks can be fetched from the disk, which blocks does the host serve.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.check.worlds.run_figures import RunNotes
from kvsm.check.worlds.tier_answers import BeforeAnswer
from kvsm.check.worlds.tier_states import COMPARED, TOLD
from kvsm.core.ledger.canonical import FIXED, PART, Remade, declare
from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.request import MATCHED
from kvsm.states.words import STATE_MASK
from kvsm.tiers import DiskTier


class TierRequests:
    """The requests of one process, at most one for each prompt.

    host, tier: the host's core and the disk tier.
    most: how many requests may wait at once; others leave.
    """

    def __init__(self, host: Offloader, tier: DiskTier, most: int) -> None:
        self.host, self.tier, self._most = host, tier, most
        self.hits: dict[int, PendingHit] = {}
        """Prompt of an unfinished request -> its last hit."""
        self._number = 0
        self.notes = RunNotes()
        """The world's own record of the run, to compare with the figures of the host's log."""

    def ask(self, prompt: int, keys: Sequence[bytes], blocks: Sequence[int]) -> TransferJob | None:
        """Let the request for this prompt arrive or ask again. Returns its load, or None; a load finishes it.

        keys: the keys of the prompt.
        blocks: the free device blocks. Without enough of them the request asks again later.
        """
        host, index = self.host, self.host.ledger.index
        if prompt in self.hits:
            name = self.hits[prompt].request
            if host.waits_for(name) is not None:
                return None
        else:
            name = f"r{self._number}"
            self._number += 1
        found = 0
        while found < len(keys) and (keys[found] in index or self.tier.has(keys[found])):
            found += 1
        missed = keys[found] if found < len(keys) else None
        hit = self.hits[prompt] = PendingHit(name, keys[:found], missed, len(keys), None, found)
        before = BeforeAnswer.of(host, self.tier, name, keys[:found])
        awaited = self.tier.fetch(hit)
        job, waits = None, awaited is not None and host.defer(name, awaited)
        if waits:
            before.check(host, None)
        else:
            match = host.match(name, keys)
            before.check(host, match.hits if match.waits_for is None else None)
            waits = match.waits_for is not None or match.hits > len(blocks)
            if not waits:
                missed = keys[match.hits] if match.hits < len(keys) else None
                host.admit(name, len(keys), 0, match.hits, missed)
                self.notes.admit(host.ledger.seq, name, len(keys), 0, match.hits, False)
            if match.hits and not waits:
                job = host.prepare_load(name, blocks[: match.hits])
        if not waits or len(self.hits) > self._most:
            self.leave(prompt)
        return job

    def leave(self, prompt: int) -> bool:
        """Finish the request for this prompt. Returns whether there was one."""
        hit = self.hits.pop(prompt, None)
        if hit is not None:
            self.host.finish(hit.request)
        return hit is not None

    def next_to_ask(self) -> int | None:
        """The prompt of a request that does not wait for a transfer; None if there is none."""
        waits = self.host.ledger.deferred
        return next((prompt for prompt, hit in self.hits.items() if hit.request not in waits), None)

    def served_by(self, transfer: int) -> list[PendingHit]:
        """The hits whose requests wait for this copy from the disk, which brings some of their blocks."""
        ledger = self.host.ledger
        brought = set(ledger.transfers[transfer].keys)
        return [
            hit
            for hit in self.hits.values()
            if hit.request in ledger.deferred
            and ledger.deferred[hit.request].awaits == transfer
            and brought.intersection(hit.keys)
        ]

    def check_held(self, hits: Sequence[PendingHit]) -> None:
        """Check that requests whose blocks are all on the host now pin them, so that they can load them."""
        ledger = self.host.ledger
        for hit in hits:
            slots = [ledger.index.get(key, -1) for key in hit.keys]
            request = ledger.requests[hit.request]
            is_held = request.word & STATE_MASK == MATCHED and to_list(request.pins) == slots
            if not is_held and all(slot >= 0 and ledger.readable(slot) for slot in slots):
                message = f"{hit.request} waited for slots {slots}, which have come, and does not hold them"
                raise PropertyBroken(Property.MATCH_HOLDS, message)


declare(
    TierRequests,
    host=PART,
    tier=PART,
    hits=COMPARED,
    _most=FIXED,
    _number=TOLD,
    notes=Remade(lambda _: RunNotes(), "a world is loaded without events"),
)
