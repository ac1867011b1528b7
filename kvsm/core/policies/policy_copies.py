"""`EvictionPolicy.snapshot` of one moment, made in pieces while events go on being folded.

A policy says what its snapshot is made of: queues of slots, counts of uses, queues of keys, numbers. Each of
them is frozen by itself, and written later. Costs are counted in the time that a slot takes: some 30 ns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvsm.core.native._body import FrozenPart

PIECE = 1 << 16
"""Bytes of a piece that is cut here. The native body cuts the same."""
_OF_A_CUT = 512
"""What such a piece costs."""
_KEYS_AT_ONCE, _OF_A_KEY = 256, 8
"""Keys that are written at once, and what each of them costs: its memory is far away."""
_ENCODER = msgspec.msgpack.Encoder()


class PolicyPart(Protocol):
    """A part of a snapshot: of one moment, and written later.

    A policy that changes keeps what a part has not written yet. So a part is written to its end, or dropped.
    """

    @abstractmethod
    def go_on(self, left: int) -> int:
        """Write what costs `left`. Returns what is left of it if the part is whole, else 0.

        Raises `RuntimeError` if the part was dropped, unless it does not need the policy any more.
        """

    @abstractmethod
    def pieces(self) -> Sequence[bytes]:
        """What was written, as msgpack. The part must be whole."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody needs it any more. A part that is whole stays whole. Idempotent."""


class Written(PolicyPart):
    """A part that is written already."""

    def __init__(self, value: object) -> None:
        self._pieces = [_ENCODER.encode(value)]

    def go_on(self, left: int) -> int:
        """It is whole."""
        return left

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyPart.pieces`."""
        return self._pieces

    def drop(self) -> None:
        """Nothing to do."""


class QueueCopy(PolicyPart):
    """The slots of a queue in order, four bytes each (`SlotQueue.snapshot`).

    frozen: what the native queue made; or the bytes, if all was copied at once.
    """

    def __init__(self, frozen: FrozenPart | bytes) -> None:
        self._frozen = frozen
        self.order: list[bytes] | None = None
        """Once it is whole."""
        if isinstance(frozen, bytes):
            self.order = [frozen[start : start + PIECE] for start in range(0, len(frozen), PIECE)]

    def go_on(self, left: int) -> int:
        """As `PolicyPart.go_on`."""
        if self.order is None and not isinstance(self._frozen, bytes):
            left = self._frozen.go_on(left)
            if left:
                self.order = self._frozen.take()[0][1]
        return left

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyPart.pieces`."""
        assert self.order is not None
        return [bytes_head(sum(map(len, self.order))), *self.order]

    def drop(self) -> None:
        """As `PolicyPart.drop`."""
        if not isinstance(self._frozen, bytes):
            self._frozen.drop()


class _FollowingPart(PolicyPart):
    """A part that follows from the order of queues. A subclass says how."""

    def __init__(self, queues: Sequence[QueueCopy]) -> None:
        self._queues = queues
        self._pieces: list[bytes] = []
        self._steps = self._write()
        self.is_open = True
        """Whether it still needs what it has not written."""
        self._dropped = False

    @abstractmethod
    def _write(self) -> Generator[int, None, None]:
        """Write pieces, and yield what each of them cost. It begins when the queues are whole."""

    def go_on(self, left: int) -> int:
        """As `PolicyPart.go_on`. It goes on with its queues first."""
        if self._dropped:
            raise RuntimeError("this copy of the state was dropped")
        for queue in self._queues:
            left = queue.go_on(left)
            if not left:
                return 0
        while left > 0 and self.is_open:
            cost = next(self._steps, None)
            self.is_open = cost is not None
            left -= cost or 0
        return max(left, 0)

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyPart.pieces`."""
        return self._pieces

    def drop(self) -> None:
        """As `PolicyPart.drop`."""
        self._dropped, self.is_open = self._dropped or self.is_open, False
        for queue in self._queues:
            queue.drop()

    def _orders(self) -> Iterator[NDArray[np.int64]]:
        """The slots of all queues, in pieces."""
        for queue in self._queues:
            for piece in queue.order or ():
                yield np.frombuffer(piece, "<u4").astype(np.int64)


class CountsCopy(_FollowingPart):
    """A byte for each slot of some queues, in their order.

    counts: the bytes of all slots at the moment of the copy.
    """

    def __init__(self, counts: bytes, queues: Sequence[QueueCopy]) -> None:
        self._counts = np.frombuffer(counts, dtype=np.uint8)
        super().__init__(queues)

    def _write(self) -> Generator[int, None, None]:
        self._pieces.append(
            bytes_head(sum(len(piece) for one in self._queues for piece in one.order or ()) // 4)
        )
        for slots in self._orders():
            self._pieces.append(self._counts[slots].tobytes())
            yield _OF_A_CUT


class KeptKeys:
    """Keys by number, in pages: a dict that grows large makes a call wait."""

    _BITS = 10

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, bytes]] = {}

    def keep(self, numbers: Sequence[int], key_of: Sequence[bytes]) -> None:
        """Keep the keys of these numbers, unless they are kept."""
        for number in numbers:
            page = self._pages.setdefault(number >> self._BITS, {})
            if number not in page:
                page[number] = key_of[number]

    def key_of(self, number: int, key_of: Sequence[bytes]) -> bytes:
        """The key that is kept, or the one that the number has."""
        page = self._pages.get(number >> self._BITS)
        return key_of[number] if page is None else page.get(number, key_of[number])


class KeysCopy(_FollowingPart):
    """The keys of a `KeyQueue` in order.

    key_of: the key of each number, live.
    kept: what the key of a number was, if it has got another one since then.
    """

    def __init__(self, order: QueueCopy, key_of: Sequence[bytes], kept: KeptKeys) -> None:
        self._key_of, self._kept = key_of, kept
        super().__init__((order,))

    def _write(self) -> Generator[int, None, None]:
        (order,) = self._queues
        self._pieces.append(array_head(sum(map(len, order.order or ())) // 4))
        for numbers in self._orders():
            for start in range(0, len(numbers), _KEYS_AT_ONCE):
                some = numbers[start : start + _KEYS_AT_ONCE].tolist()
                keys = [self._kept.key_of(one, self._key_of) for one in some]
                self._pieces.append(b"".join(map(_ENCODER.encode, keys)))
                yield _OF_A_KEY * len(keys)


class PolicyCopy:
    """What `EvictionPolicy.freeze` returns: a snapshot of the policy, made in pieces.

    parts: what the snapshot consists of, in order.
    """

    def __init__(self, parts: Sequence[PolicyPart]) -> None:
        self._parts = parts

    def go_on(self, left: int) -> int:
        """Write what costs `left`. Returns what is left of it if the copy is whole, else 0."""
        for part in self._parts:
            left = part.go_on(left)
            if not left:
                return 0
        return left

    def pieces(self) -> Sequence[bytes]:
        """The snapshot in pieces. The copy must be whole."""
        written = [piece for part in self._parts for piece in part.pieces()]
        return [array_head(len(self._parts)), *written]

    def drop(self) -> None:
        """Nobody needs the copy any more. Idempotent."""
        for part in self._parts:
            part.drop()


class PlainCopy(PolicyCopy):
    """A snapshot that is one piece of bytes, or one queue."""

    def __init__(self, whole: bytes | QueueCopy) -> None:
        self._queue = whole if isinstance(whole, QueueCopy) else QueueCopy(whole)
        super().__init__((self._queue,))

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyCopy.pieces`, without anything around it."""
        return self._queue.order or ()


def bytes_head(size: int) -> bytes:
    """What msgpack writes before bytes of this size."""
    if size < 1 << 8:
        return bytes((0xC4, size))
    return b"\xc5" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xc6" + size.to_bytes(4, "big")


def array_head(count: int) -> bytes:
    """What msgpack writes before an array of this length."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
