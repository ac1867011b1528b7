"""Entries of the second book (`book.py`): what it keeps of slots, device blocks, transfers and matches."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.properties import Property
from kvsm.states.block import (
    ALLOCATED,
    EVICTED,
    FREE,
    LOADING,
    QUARANTINED,
    RETIRED,
    STORED,
    STORING,
    BlockState,
)
from kvsm.states.lease import LeaseState

SlotEntry = tuple[BlockState, int, int]
"""A slot's state, the number of copies that touch it, and the number of pins on it."""

UNUSED: tuple[SlotEntry, SlotEntry] = (FREE, 0, 0), (EVICTED, 0, 0)
IDLE: SlotEntry = STORED, 0, 0
"""Stored, and nobody holds it: what an eviction may take."""

GONE: SlotEntry = UNUSED[1]
PLANNED: SlotEntry = ALLOCATED, 0, 0
FILLING: SlotEntry = STORING, 1, 0
LOST: SlotEntry = RETIRED, 0, 0
PINNED: SlotEntry = STORED, 0, 1
READ: SlotEntry = LOADING, 1, 0

READABLE = (STORED, LOADING)
INDEXED = (ALLOCATED, STORING, STORED, LOADING)
TOUCHED = (ALLOCATED, STORING, LOADING, QUARANTINED, RETIRED)
"""States in which a copy may touch the slot, now or later."""

LeaseEntry = tuple[LeaseState, int]
"""A device block's state, and the number of stores that read it."""

UNLEASED: LeaseEntry = LeaseState.NONE, 0
WRITTEN: LeaseEntry = LeaseState.WRITING, 0
READ_ONCE: LeaseEntry = LeaseState.READING, 1
WITHDRAWN: LeaseEntry = LeaseState.RETIRED, 0

USUAL_SLOTS: tuple[SlotEntry, ...] = *UNUSED, IDLE, PLANNED, FILLING, PINNED, READ
USUAL_LEASES: tuple[LeaseEntry, ...] = UNLEASED, READ_ONCE, WRITTEN
"""The entries that most slots and device blocks have."""


class BookedTransfer:
    """A transfer that was planned and has not ended.

    request: the request that it loads for; empty for a store.
    epoch: the epoch in which it was planned.
    since: tick of its submission.
    reported: bit w is set when worker w has reported.
    """

    __slots__ = (
        "abandoned",
        "device_blocks",
        "epoch",
        "failed",
        "flush",
        "reported",
        "request",
        "since",
        "slots",
        "store",
        "submitted",
    )

    def __init__(
        self, store: bool, slots: Sequence[int], device_blocks: Sequence[int], epoch: int, request: str = ""
    ) -> None:
        self.store, self.slots, self.device_blocks, self.request = store, slots, device_blocks, request
        self.epoch = epoch
        self.submitted = self.failed = self.abandoned = self.flush = False
        self.since = self.reported = 0


WHY = {
    Property.PUBLISH_AFTER_COMMIT: "no store has published it",
    Property.FAILURE_IS_NOT_SUCCESS: "a copy of it failed or was lost",
    Property.NO_STALE_DATA: "it holds data from before the reset",
}
"""Why no match may have a block, by the property that it would break."""

Told = tuple[bool, Sequence[bytes]]
"""(removed, keys): these keys can be matched no more, or from now on."""

BookedMatch = tuple[int, Sequence[int]]
"""The number of the event that pinned a request's match, and the slots."""

Cursors = tuple[tuple[int, ...], tuple[int, ...]]
"""(settled, offered), in blocks of each KV cache group."""

NO_CURSORS: Cursors = ((), ())
