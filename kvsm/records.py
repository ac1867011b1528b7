"""What the ledger keeps of a transfer and of a request while they live. Only the fold writes them."""

from __future__ import annotations

import msgspec

from kvsm.events import Direction
from kvsm.ids import NO_IDS, IdArray
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class Transfer(msgspec.Struct, gc=False, eq=False):
    """A live transfer. What it binds (direction, slots, device blocks, keys) never changes."""

    id: int
    direction: Direction
    request: str
    slots: IdArray
    device_blocks: IdArray
    keys: tuple[bytes, ...]
    """Of a store, by slot; a load's are those of its slots."""
    word: int
    epoch: int
    reported: int = 0
    """Bit w is set when worker w has reported."""
    flush: bool = False

    @property
    def state(self) -> TransferState:
        return TransferState(self.word & STATE_MASK)


class Request(msgspec.Struct, gc=False, eq=False):
    """What the ledger knows of a request until its last transfer has ended."""

    name: str
    word: int = 0
    pins: IdArray = NO_IDS
    """Slots that its match pinned, in prefix order; those invalidated since are void."""
    pinned_at: int = 0
    """Number of the event that pinned them: a slot allocated later is another block."""
    awaits: int = 0
    """Transfer that it is DEFERRED for."""
    patience: int = -1
    """Tick after which it waits no more; -1 until it first waits."""

    @property
    def state(self) -> RequestState:
        return RequestState(self.word & STATE_MASK)
