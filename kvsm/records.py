"""What the ledger keeps of a transfer and of a request while they live. Only the fold writes them."""

from __future__ import annotations

from kvsm.events import Direction
from kvsm.ids import NO_IDS, IdArray
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class Transfer:
    """A live transfer. What it binds (direction, slots, device blocks, keys) never changes."""

    __slots__ = (
        "device_blocks",
        "direction",
        "epoch",
        "flush",
        "id",
        "keys",
        "reported",
        "request",
        "slots",
        "word",
    )

    def __init__(
        self,
        id: int,
        direction: Direction,
        request: str,
        slots: IdArray,
        device_blocks: IdArray,
        keys: tuple[bytes, ...],
        word: int,
        epoch: int,
    ) -> None:
        self.id, self.direction, self.request = id, direction, request
        self.slots, self.device_blocks, self.keys = slots, device_blocks, keys
        self.word, self.epoch = word, epoch
        self.reported = 0
        """Bit w is set when worker w has reported."""
        self.flush = False

    @property
    def state(self) -> TransferState:
        return TransferState(self.word & STATE_MASK)


class Request:
    """What the ledger knows of a request until its last transfer has ended."""

    __slots__ = ("awaits", "name", "patience", "pinned_at", "pins", "word")

    def __init__(self, name: str) -> None:
        self.name, self.word = name, 0
        self.pins: IdArray = NO_IDS
        """Slots that its match pinned, in prefix order; those invalidated since are void."""
        self.pinned_at = 0
        """Number of the event that pinned them: a slot allocated later is another block."""
        self.awaits = 0
        """Transfer that it is DEFERRED for."""
        self.patience = -1
        """Tick after which it waits no more; -1 until it first waits."""

    @property
    def state(self) -> RequestState:
        return RequestState(self.word & STATE_MASK)
