"""What the ledger keeps of transfers, requests, device blocks and offers. Only the fold writes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from kvsm.events import Direction, Owners
from kvsm.ids import NO_IDS, IdArray, listed
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class TransferRecord(msgspec.Struct, gc=False, eq=False):
    """A live transfer. What it binds (direction, slots, device blocks, keys) never changes."""

    id: int
    direction: Direction
    owners: Owners
    """Of a load, its request; of a store, whose blocks it saves, for people."""
    slots: IdArray
    device_blocks: IdArray
    keys: tuple[bytes, ...]
    """Of a store, by slot; a load's are those of its slots."""
    word: int
    epoch: int
    since: int = 0
    """Tick at which it was submitted."""
    reported: int = 0
    """Bit w is set when worker w has reported."""
    flush: bool = False

    @property
    def state(self) -> TransferState:
        return TransferState(self.word & STATE_MASK)


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """What the ledger knows of a request until it is over and its load has ended."""

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
    load: int = 0
    """Its load in flight, if it has one."""
    settled: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    """Its cursors, in blocks of each KV cache group (`BlocksOffered`); empty before its first offer."""

    @property
    def state(self) -> RequestState:
        return RequestState(self.word & STATE_MASK)


class Provenance:
    """Which device blocks hold what a load brought, so that no load of an older epoch is stored again (S14).

    An engine may not say when it computes a block anew. So a note names the key that was brought, and counts
    only while the block is offered under it; and it ends when the block is stored or loaded again, or its
    load failed. Of several device blocks in a slot a key tells the content of the last one only: the others
    may begin another key's chunk as they are, so theirs count under every key.
    """

    __slots__ = ("brought", "stale")

    def __init__(self) -> None:
        self.brought: dict[int, bytes] = {}
        """Device block -> the key that a load of this epoch brought into it."""
        self.stale: dict[int, bytes] = {}
        """The same, of older epochs."""

    def bring(self, device_blocks: IdArray, keys: Sequence[bytes]) -> None:
        self.rewritten(device_blocks)
        self.brought.update(zip(listed(device_blocks), keys))

    def rewritten(self, device_blocks: IdArray) -> None:
        if self.stale:
            for block in listed(device_blocks):
                self.stale.pop(block, None)

    def forget(self, device_blocks: IdArray) -> None:
        """Nothing that a load brought is in these: it failed, or was written over."""
        for block in listed(device_blocks):
            self.brought.pop(block, None)
            self.stale.pop(block, None)

    def age(self) -> None:
        """What was brought so far is of an older epoch now."""
        self.stale.update(self.brought)
        self.brought = {}


class OfferHistory:
    """How often keys were offered that are not stored yet, for the `limit` keys offered last."""

    __slots__ = ("limit", "times")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.times: OrderedDict[bytes, int] = OrderedDict()
        """The longest unoffered first."""

    def count(self, keys: Iterable[bytes]) -> None:
        times = self.times
        for key in keys:
            times[key] = times.pop(key, 0) + 1
        while len(times) > self.limit:
            times.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        if self.times:
            for key in keys:
                self.times.pop(key, None)
