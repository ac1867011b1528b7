"""A ledger's state after one event, copied in pieces while later events are folded.

With the native body `freeze` itself copies only small parts: the records of requests and transfers, the
history of offers, one bit per slot of each queue, and the counts of policies that count uses. Slots, device
blocks and queues are copied later, piece by piece. If an event is about to change a part that is not copied
yet, the native body saves the old value first (`kvsm/core/native/keeping.c`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from kvsm.core.ledger import Ledger, NativeLedger, RequestRecord, TransferRecord
from kvsm.core.ledger.snapshot import SavedLedger, saved_record, snapshot
from kvsm.core.ledger.state_copy import StateCopy, WholeState
from kvsm.core.policies.policy_copies import PolicyCopy, array_head, bytes_head

if TYPE_CHECKING:
    from kvsm.core.native._body import FrozenParts

_MOST = 8192
"""The cost of one `go_on` in units: the time to copy a slot, about 30 ns."""
_OF_BYTES = 2
"""Bytes of records that are encoded in one unit."""
_RECORD = 256
"""The fixed cost of a record, as bytes."""
_JOINED, _OF_A_PIECE = 256, 4
"""Pieces that are appended at once, and the units that each of them costs."""
_ENCODER = msgspec.msgpack.Encoder()


def freeze(ledger: Ledger) -> StateCopy:
    """Begin a copy of the current state. Its joined pieces equal what `snapshot` returns now.

    A ledger has one copy at a time: another `freeze` drops an earlier copy that is not complete. A copy
    without a reference is dropped too. To continue a dropped copy raises `RuntimeError`. A copy keeps alive
    what it needs of the ledger, so it may outlive the ledger.

    With the Python body, all is copied here: the whole pool, and each key once. The same holds if the ledger
    has values that the native body cannot copy.
    """
    parts = ledger.freeze() if isinstance(ledger, NativeLedger) else None
    return WholeState(snapshot(ledger)) if parts is None else FrozenState(ledger, parts)


class FrozenState:
    """The copy that `freeze` makes of a ledger with the native body. See `StateCopy`.

    `go_on` raises `RuntimeError` for a copy that was dropped. It raises `MemoryError` if there was no memory
    to save an old value; then the copy is dropped, and the ledger is intact.
    """

    def __init__(self, ledger: Ledger, parts: FrozenParts) -> None:
        self._parts = parts
        self._order: PolicyCopy | None = None
        self._pieces: list[bytes] | None = []
        self._whole = False
        self._steps: Iterator[bool] = iter(())
        small = {name: getattr(ledger, name) for name in SavedLedger.__struct_fields__ if name not in _LARGE}
        self._order = ledger.policy.freeze()
        # Shallow copies: the values that a record refers to never change.
        transfers = list(map(copy, ledger.transfers.values()))
        requests = list(map(copy, ledger.requests.values()))
        self._steps = _steps(parts, small, self._order, transfers, requests, self._pieces)

    def __del__(self) -> None:
        self.drop()

    def go_on(self) -> bool:
        """As `StateCopy.go_on`."""
        if self._pieces is None:
            raise RuntimeError("this copy of the state was dropped")
        try:
            self._whole = self._whole or next(self._steps)
        except BaseException:
            self.drop()
            raise
        return self._whole

    def pieces(self) -> Sequence[bytes]:
        """As `StateCopy.pieces`. Raises `RuntimeError` for a copy that is not complete, or was dropped."""
        if self._pieces is None or not self._whole:
            raise RuntimeError("this copy of the state is not whole, or was dropped")
        return self._pieces

    def drop(self) -> None:
        """As `StateCopy.drop`."""
        self._pieces, self._whole, self._steps = None, False, iter(())
        for part in (*self._parts, self._order):
            if part is not None:
                part.drop()


_AS_BYTES = ("blocks", "leases", "generations", "free")
_AS_ARRAYS = ("keys", "brought", "stale", "offers")
_LARGE = frozenset((*_AS_BYTES, *_AS_ARRAYS, "policy", "transfers", "requests"))
"""Fields of a snapshot that are written in pieces."""


def _steps(
    parts: FrozenParts,
    small: Mapping[str, Any],
    order: PolicyCopy,
    transfers: list[TransferRecord],
    requests: list[RequestRecord],
    pieces: list[bytes],
) -> Iterator[bool]:
    """Copy for `_MOST` units at each `next`. Yields whether `pieces` is complete.

    small: the fields that are not large.
    order: the eviction order.
    """
    left = _MOST
    for part in (*parts, order):
        while not (left := part.go_on(left)):
            yield False
            left = _MOST
    written = {name: [_ENCODER.encode(value)] for name, value in small.items()}
    transfers.sort(key=attrgetter("id"))
    requests.sort(key=attrgetter("name"))
    written["transfers"], written["requests"] = [array_head(len(transfers))], [array_head(len(requests))]
    left = yield from _encode(transfers, written["transfers"], left)
    left = yield from _encode(requests, written["requests"], left)
    slots, blocks, offers, free = [part.take() for part in parts]
    for name, (_, some) in zip(_AS_BYTES, (slots[0], blocks[0], slots[1], free[0])):
        written[name] = some
    written["policy"] = list(order.pieces())
    for name, (count, some) in zip(_AS_ARRAYS, (slots[2], blocks[1], blocks[2], offers[0])):
        written[name] = some
        some.insert(0, array_head(count))
    pieces.append(array_head(len(SavedLedger.__struct_fields__)))
    for name in SavedLedger.__struct_fields__:
        if name in _AS_BYTES or name == "policy":
            pieces.append(bytes_head(sum(map(len, written[name]))))
        left = yield from _join(written[name], pieces, left)
    yield True


_Costly = Generator[bool, None, int]
"""Starts with a number of units, yields when they are used up, and returns the units that are left."""


def _encode(records: Iterable[TransferRecord | RequestRecord], written: list[bytes], left: int) -> _Costly:
    """Encode records."""
    for record in records:
        if left <= 0:
            yield False
            left = _MOST
        written.append(_ENCODER.encode(saved_record(record)))
        left -= (_RECORD + len(written[-1])) // _OF_BYTES
    return left


def _join(some: list[bytes], pieces: list[bytes], left: int) -> _Costly:
    """Append these pieces to `pieces`."""
    for start in range(0, len(some), _JOINED):
        if left <= 0:
            yield False
            left = _MOST
        joined = some[start : start + _JOINED]
        pieces += joined
        left -= _OF_A_PIECE * len(joined)
    return left
