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
    """Hears, in order, how the set of readable keys changes. It must not touch the ledger."""

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None:
        """The store `transfer` made these keys readable."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """These keys were readable, and are not any more."""

    def cleared(self) -> None:
        """A reset: no key is readable."""


class LedgerState:
    """State under one configuration, empty at first. Only the handlers of events write to it."""

    def __init__(self, config: OffloadConfig, listener: CacheListener | None = None) -> None:
        self.config, self.listener = config, listener
        self.seq = self.step = self.tick = self.epoch = 0
        self.life = 1
        """Which of the processes that wrote the log was the last one, from 1."""
        self.kept: KeptPools | None = None
        """The pools that outlive this process; None if nothing does."""
        self.weights = ""
        """Version of the weights that computed what can be matched."""
        self.voided_at = 0
        """The last event that invalidated a block. Pins that were taken after it all hold."""
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
        """Key of the last life of each slot; current while the index names the slot."""
        self.index: KeyIndex = make_index(self.key_of, isinstance(self, native.FoldBody))
        self.free = SlotQueue(slots)
        self.free.refill(np.arange(slots))
        self.policy = make_policy(config.policy, slots)
        self.copied_out: dict[int, int] = {}
        """Slot -> how many copies to other tiers hold it. They do not move it in the eviction order."""
        self.transfers: dict[int, TransferRecord] = {}
        self.planned_word = TRANSFER_WORDS.encode(TransferState.PLANNED, (config.workers,))
        """Word of a transfer that has just been planned."""
        self.requests: dict[str, RequestRecord] = {}
        self.deferred: dict[str, RequestRecord] = {}
        """The requests that are DEFERRED."""
        self.provenance, self.offers = Provenance(), OfferHistory(config.counted_keys)

    def readable(self, slot: int) -> bool:
        """Whether the block in this slot can be loaded."""
        return FIRST_READABLE <= self.blocks.words[slot] & STATE_MASK <= LAST_READABLE

    def not_stored(self, slots: Sequence[int] | IdArray) -> Sequence[int]:
        """Those of these slots that are in another state than STORED.

        Raises `TypeError` or `IndexError` for what is no slot.
        """
        if len(slots) and min(slots) < 0:
            raise IndexError("a slot is negative")
        if isinstance(slots, np.ndarray):
            busy: list[int] = slots[self.blocks.view[slots] & STATE_MASK != STORED].tolist()
            return busy
        words = self.blocks.words
        return [slot for slot in slots if words[slot] & STATE_MASK != STORED]

    def keys_of(self, slots: IdArray) -> Sequence[bytes]:
        """The keys of these slots' latest lives."""
        return self.index.keys_of(slots)

    def live_pins(self, request: RequestRecord) -> IdArray:
        """The pins that still hold: the slot holds the same block as then, and it was not invalidated."""
        pins, since = request.pins, request.pinned_at
        if self.voided_at < since:
            return pins
        if type(pins) is tuple:
            return tuple([slot for slot in pins if self.generation[slot] <= since and self.readable(slot)])
        live = are_readable(self.blocks.view[pins]) & (self.generation_view[pins] <= since)
        return cast(NDArray[np.int64], pins)[live]

    def evictable(self) -> int:
        """How many blocks may be evicted: they stand in the eviction order, and nothing copies them."""
        return len(self.policy) - sum([slot in self.policy for slot in self.copied_out])

    def count_copies_out(self) -> dict[int, int]:
        """`copied_out`, counted from the requests and their loads."""
        counted: Counter[int] = Counter()
        for request in self.requests.values():
            if request.target:
                counted.update(listed(self.live_pins(request)))
                if request.load:
                    counted.update(filter(self.readable, listed(self.transfers[request.load].slots)))
        return dict(counted)

    def draining(self) -> bool:
        """Whether copies that a reset abandoned are still under way."""
        return any(one.word & STATE_MASK == ABANDONED for one in self.transfers.values())
