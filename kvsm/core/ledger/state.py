"""The ledger's state, and what can be asked of it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvsm.core import native
from kvsm.core.ledger.key_index import KeyIndex, make_index
from kvsm.core.ledger.records import OfferHistory, Provenance, RequestRecord, TransferRecord
from kvsm.core.policies import make_policy
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools
from kvsm.ids import IdArray, listed
from kvsm.states.block import BLOCK_WORDS, FIRST_READABLE, LAST_READABLE, STORED, are_readable
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.transfer import ABANDONED, TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_MASK, StateWords


class CacheListener(Protocol):
    """Receives the changes of the set of readable keys, in order. It must not touch the ledger."""

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None:
        """The store `transfer` made these keys readable."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """These keys are no longer readable."""

    def cleared(self) -> None:
        """A reset has ended: no key is readable."""


class LedgerState:
    """State under one configuration, empty at first. Only the handlers of events write to it."""

    def __init__(self, config: OffloadConfig, listener: CacheListener | None = None) -> None:
        self.config, self.listener = config, listener
        self.seq = self.step = self.tick = self.epoch = 0
        self.life = 1
        """Number of the process that writes the log, from 1."""
        self.kept: KeptPools | None = None
        """The host pools that outlive this process; None if none does."""
        self.weights = ""
        """Version of the model weights under which the readable blocks were computed."""
        self.voided_at = 0
        """The last event that invalidated a block. All pins made after it are valid."""
        self.ended_at = 0
        """The last event that ended a transfer."""
        self.forgotten_at = 0
        """The last event that removed a key from the index."""
        slots = config.host_blocks
        self.blocks = StateWords(BLOCK_WORDS, slots)
        self.leases = StateWords(LEASE_WORDS, config.device_blocks)
        self.generation = array("q", (0,)) * slots
        self.generation_view: NDArray[np.int64] = np.frombuffer(self.generation, dtype=np.int64)
        self.key_of: list[bytes] = [b""] * slots
        """Slot -> the key that it had last; valid while the index has the slot."""
        self.index: KeyIndex = make_index(self.key_of, isinstance(self, native.FoldBody))
        self.free = SlotQueue(slots)
        self.free.refill(np.arange(slots))
        self.policy = make_policy(config.policy, slots)
        self.copied_out: dict[int, int] = {}
        """Slot -> number of copies to other tiers that hold it. They do not move it in the eviction order."""
        self.transfers: dict[int, TransferRecord] = {}
        self.planned_word = TRANSFER_WORDS.encode(TransferState.PLANNED, (config.workers,))
        """Word of a transfer that has just been planned."""
        self.requests: dict[str, RequestRecord] = {}
        self.deferred: dict[str, RequestRecord] = {}
        """The requests that are DEFERRED."""
        self.times: tuple[int, int, int] | None = None
        """The fields of the last `TimesMeasured`; None if this process has measured nothing yet."""
        self.declined_hits = 0
        """The number of slow hits that were declined since the last slow hit that was loaded."""
        self.provenance, self.offers = Provenance(), OfferHistory(config.counted_keys)

    def readable(self, slot: int) -> bool:
        """Whether the block in this slot can be loaded."""
        return FIRST_READABLE <= self.blocks.words[slot] & STATE_MASK <= LAST_READABLE

    def not_stored(self, slots: Sequence[int] | IdArray) -> Sequence[int]:
        """Return the slots that are not STORED.

        Raises `TypeError` or `IndexError` for an invalid slot.
        """
        if len(slots) and min(slots) < 0:
            raise IndexError("a slot is negative")
        if isinstance(slots, np.ndarray):
            busy: list[int] = slots[self.blocks.view[slots] & STATE_MASK != STORED].tolist()
            return busy
        words = self.blocks.words
        return [slot for slot in slots if words[slot] & STATE_MASK != STORED]

    def keys_of(self, slots: IdArray) -> Sequence[bytes]:
        """Return the key that each of these slots had last."""
        return self.index.keys_of(slots)

    def live_pins(self, request: RequestRecord) -> IdArray:
        """Return the pins that are still valid: the slot has the same block as then, and it was not
        voided."""
        pins, since = request.pins, request.pinned_at
        if self.voided_at < since:
            return pins
        if type(pins) is tuple:
            return tuple([slot for slot in pins if self.generation[slot] <= since and self.readable(slot)])
        live = are_readable(self.blocks.view[pins]) & (self.generation_view[pins] <= since)
        return cast(NDArray[np.int64], pins)[live]

    def evictable(self) -> int:
        """The number of blocks that may be evicted: in the eviction order, and not being copied to a tier."""
        return len(self.policy) - sum([slot in self.policy for slot in self.copied_out])

    def count_copies_out(self) -> dict[int, int]:
        """Count `copied_out` from the requests and their loads."""
        counted: Counter[int] = Counter()
        for request in self.requests.values():
            if request.target:
                counted.update(listed(self.live_pins(request)))
                if request.load:
                    counted.update(filter(self.readable, listed(self.transfers[request.load].slots)))
        return dict(counted)

    def draining(self) -> bool:
        """Whether copies that a reset abandoned are still in flight. A reset abandons all, so the oldest one
        tells."""
        oldest = next(iter(self.transfers.values()), None)
        return oldest is not None and oldest.word & STATE_MASK == ABANDONED
