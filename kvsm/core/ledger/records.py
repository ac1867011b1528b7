"""The records of transfers, requests, device blocks and offers in a ledger. Only the fold writes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from kvsm.events import Direction, Owners, Parents
from kvsm.ids import NO_IDS, IdArray, listed
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class TransferRecord(msgspec.Struct, gc=False, eq=False):
    """A live transfer. Its direction, slots, device blocks and keys never change."""

    id: int
    direction: Direction
    owners: Owners
    """(request, number of its keys) pairs. A load has one request; those of a store are only for readers."""
    slots: IdArray
    device_blocks: IdArray
    keys: tuple[bytes, ...]
    """The key for each slot of a store. Empty for a load, whose slots have keys already."""
    word: int
    """State and counters: `TRANSFER_WORDS`."""
    epoch: int
    """Epoch in which it was planned."""
    since: int = 0
    """Tick at which it was submitted."""
    reported: int = 0
    """Bit w is set when worker w has reported."""
    flush: bool = False
    """Whether the engine waits for it."""
    parents: Parents = ()
    """For a store: the preceding blocks of its blocks (`StorePlanned`)."""

    @property
    def state(self) -> TransferState:
        """The state of its word."""
        return TransferState(self.word & STATE_MASK)


class RequestRecord(msgspec.Struct, gc=False, eq=False):
    """A request, until it is over and its load has ended."""

    name: str
    word: int = 0
    """State and counters: `REQUEST_WORDS`."""
    pins: IdArray = NO_IDS
    """Slots that its match pinned, in prefix order. Pins of blocks that were invalidated later are void."""
    pinned_at: int = 0
    """Number of the event that pinned them. A slot that was allocated later holds another block."""
    awaits: int = 0
    """The transfer that it is DEFERRED for."""
    patience: int = -1
    """The tick at which it stops waiting; -1 until it is deferred."""
    load: int = 0
    """Its load in flight; 0 if it has none."""
    settled: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    """Its cursors, in blocks of each KV cache group (`BlocksOffered`). Empty before its first offer."""
    target: str = ""
    """The other tier of its copies, if it is no request of the engine (`RequestArrived`)."""

    @property
    def state(self) -> RequestState:
        """The state of its word."""
        return RequestState(self.word & STATE_MASK)


class Provenance:
    """Which device blocks hold bytes from a load (no stale data, S14).

    Bytes that a load of an older epoch brought must not be stored again.

    An engine may compute into a block again without notice. So each entry has the key that was loaded, and
    counts only if the block is offered under this key. An entry ends when the block is stored or loaded
    again, or when the load fails. If a chunk has several device blocks, its key stands only for the content
    of the last one. The other blocks may also begin the chunk of another key, so their entries count under
    every key.
    """

    __slots__ = ("brought", "stale")

    def __init__(self) -> None:
        self.brought: dict[int, bytes] = {}
        """Device block -> the key that a load of this epoch brought into it."""
        self.stale: dict[int, bytes] = {}
        """Device block -> the key that a load of an older epoch brought into it."""

    def bring(self, device_blocks: IdArray, keys: Sequence[bytes]) -> None:
        """Record that a load of this epoch brings these keys into these device blocks."""
        self.rewritten(device_blocks)
        self.brought.update(zip(listed(device_blocks), keys))

    def rewritten(self, device_blocks: IdArray) -> None:
        """Forget the loads of older epochs into these device blocks."""
        if self.stale:
            for block in listed(device_blocks):
                self.stale.pop(block, None)

    def forget(self, device_blocks: IdArray) -> None:
        """Forget all loads into these device blocks: they failed, or the blocks were overwritten."""
        for block in listed(device_blocks):
            self.brought.pop(block, None)
            self.stale.pop(block, None)

    def age(self) -> None:
        """Begin a new epoch: all loads so far belong to an older one."""
        self.stale.update(self.brought)
        self.brought = {}


class OfferHistory:
    """The number of offers of keys that are not stored, for the `limit` keys that were offered last."""

    __slots__ = ("limit", "times")

    def __init__(self, limit: int, times: Iterable[tuple[bytes, int]] = ()) -> None:
        self.limit = limit
        self.times: OrderedDict[bytes, int] = OrderedDict(times)
        """Key -> number of offers. The key whose last offer is oldest comes first."""
        self._keep_limit()

    def count(self, keys: Iterable[bytes]) -> None:
        """Count one more offer of these keys."""
        times = self.times
        for key in keys:
            times[key] = times.pop(key, 0) + 1
        self._keep_limit()

    def _keep_limit(self) -> None:
        while len(self.times) > self.limit:
            self.times.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget the offers of keys that are stored now."""
        if self.times:
            for key in keys:
                self.times.pop(key, None)
