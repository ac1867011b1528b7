"""Copies of `EvictionPolicy.snapshot` after one event, made in pieces while later events are folded.

The snapshot of a policy has parts: queues of slots, counts of uses, queues of keys, columns, single numbers.
Each part is frozen by itself, and written later. The unit of cost is the time to copy a slot: about 30 ns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvsm.core.native._body import FrozenPart

PIECE = 1 << 16
"""Bytes of a piece. The native body makes pieces of the same size."""
_OF_A_CUT = 512
"""Cost of a piece (units)."""
_KEYS_AT_ONCE, _OF_A_KEY = 256, 8
"""Keys that are written at once, and the cost of each (units): its memory is not in the CPU cache."""
_ENCODER = msgspec.msgpack.Encoder()


class PolicyPart(Protocol):
    """A part of a snapshot after one event, which is written later.

    When the policy changes, it saves old values that a part has not written yet. So each part must be written
    to its end, or dropped.
    """

    @abstractmethod
    def go_on(self, left: int) -> int:
        """Write for `left` units. Returns the units that are left if the part is complete, else 0.

        Raises `RuntimeError` if the part was dropped before it had all values of the policy.
        """

    @abstractmethod
    def pieces(self) -> Sequence[bytes]:
        """Return the part as msgpack, in pieces. The part must be complete."""

    @abstractmethod
    def drop(self) -> None:
        """Release a part that is no longer needed. A complete part stays complete. Idempotent."""


class Written(PolicyPart):
    """A part that is complete from the start."""

    def __init__(self, value: object) -> None:
        self._pieces = [_ENCODER.encode(value)]

    def go_on(self, left: int) -> int:
        """As `PolicyPart.go_on`: it is complete."""
        return left

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyPart.pieces`."""
        return self._pieces

    def drop(self) -> None:
        """Do nothing."""


class QueueCopy(PolicyPart):
    """The slots of a queue in order, four bytes each (`SlotQueue.snapshot`).

    frozen: the frozen part of the native queue; or the bytes, if all was copied at once.
    """

    def __init__(self, frozen: FrozenPart | bytes) -> None:
        self._frozen = frozen
        self.order: list[bytes] | None = None
        """The slots, in pieces; None until the part is complete."""
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
    """A part that depends on the order of queues. Subclasses define `_write`."""

    def __init__(self, queues: Sequence[QueueCopy]) -> None:
        self._queues = queues
        self._pieces: list[bytes] = []
        self._steps = self._write()
        self.is_open = True
        """Whether it is not complete, so that old values must be saved for it."""
        self._dropped = False

    @abstractmethod
    def _write(self) -> Generator[int, None, None]:
        """Write pieces, and yield the cost of each (units). It starts when the queues are complete."""

    def go_on(self, left: int) -> int:
        """As `PolicyPart.go_on`. It completes its queues first."""
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
        """Yield the slots of all queues, in pieces."""
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
    """Number -> saved key, in pages: one large dict would delay a call when it grows."""

    _BITS = 10

    def __init__(self) -> None:
        self._pages: dict[int, dict[int, bytes]] = {}

    def keep(self, numbers: Sequence[int], key_of: Sequence[bytes]) -> None:
        """Save the keys of these numbers, unless they are saved already."""
        for number in numbers:
            page = self._pages.setdefault(number >> self._BITS, {})
            if number not in page:
                page[number] = key_of[number]

    def key_of(self, number: int, key_of: Sequence[bytes]) -> bytes:
        """Return the saved key, or the current key of the number if none was saved."""
        page = self._pages.get(number >> self._BITS)
        return key_of[number] if page is None else page.get(number, key_of[number])


class KeysCopy(_FollowingPart):
    """The keys of a `KeyQueue` in order.

    key_of: the key of each number, live.
    kept: the old keys of numbers that have got another key since then.
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


class ColumnCopy(PolicyPart):
    """The values of a `Column` when the copy began."""

    _BITS = 13
    """A page has 2 to this power values."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values
        self._pages: list[bytes] = []
        self._saved: dict[int, bytes] = {}
        """Page -> its bytes before it changed, for pages that changed before they were written."""
        self._count = -(-len(values) >> self._BITS)
        self._dropped = False

    @property
    def is_open(self) -> bool:
        """Whether old values must still be saved for the copy."""
        return len(self._pages) < self._count and not self._dropped

    def keep(self, places: NDArray[np.int64]) -> None:
        """Save the pages with these places before they change, unless they are saved or written already."""
        for page in set((places >> self._BITS).tolist()):
            if page >= len(self._pages) and page not in self._saved:
                self._saved[page] = self._page(page)

    def _page(self, page: int) -> bytes:
        return self._values[page << self._BITS : (page + 1) << self._BITS].tobytes()

    def go_on(self, left: int) -> int:
        """As `PolicyPart.go_on`."""
        if self._dropped:
            raise RuntimeError("this copy of the state was dropped")
        while left > 0 and len(self._pages) < self._count:
            page = len(self._pages)
            saved = self._saved.pop(page, None)
            self._pages.append(self._page(page) if saved is None else saved)
            left -= _OF_A_CUT
        return max(left, 0)

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyPart.pieces`."""
        return [bytes_head(sum(map(len, self._pages))), *self._pages]

    def drop(self) -> None:
        """As `PolicyPart.drop`."""
        self._dropped = self._dropped or self.is_open
        self._saved.clear()


class Column:
    """An array of numbers, one per slot or key, that is copied in pieces while it changes.

    dtype: the type of the numbers, such as "<i8".
    """

    def __init__(self, size: int, dtype: str) -> None:
        self.values: NDArray[Any] = np.zeros(size, dtype=dtype)
        """Change them only with `put` and `add`."""
        self._copy: ColumnCopy | None = None

    def put(self, places: NDArray[np.int64], values: Any) -> None:
        """Change the numbers at these places."""
        if self._copy is not None and self._copy.is_open:
            self._copy.keep(places)
        self.values[places] = values

    def add(self, places: NDArray[np.int64], change: int) -> None:
        """Add to the numbers at these places, as often as each place is named."""
        if self._copy is not None and self._copy.is_open:
            self._copy.keep(places)
        np.add.at(self.values, places, change)

    def snapshot(self) -> bytes:
        """Return all numbers as bytes."""
        return self.values.tobytes()

    def freeze(self) -> ColumnCopy:
        """Begin a copy of what `snapshot` returns now. An earlier copy is dropped."""
        if self._copy is not None:
            self._copy.drop()
        self._copy = ColumnCopy(self.values)
        return self._copy

    def restore(self, state: bytes) -> None:
        """Restore what `snapshot` saved. Raises `ValueError` if that column had another size."""
        saved = np.frombuffer(state, self.values.dtype)
        if len(saved) != len(self.values):
            raise ValueError(f"the snapshot has {len(saved)} numbers; this pool needs {len(self.values)}")
        self.values[:] = saved


class PolicyCopy:
    """The result of `EvictionPolicy.freeze`: a snapshot of the policy, made in pieces.

    parts: the parts of the snapshot, in order.
    """

    def __init__(self, parts: Sequence[PolicyPart]) -> None:
        self._parts = parts

    def go_on(self, left: int) -> int:
        """Write for `left` units. Returns the units that are left if the copy is complete, else 0."""
        for part in self._parts:
            left = part.go_on(left)
            if not left:
                return 0
        return left

    def pieces(self) -> Sequence[bytes]:
        """Return the snapshot in pieces. The copy must be complete."""
        written = [piece for part in self._parts for piece in part.pieces()]
        return [array_head(len(self._parts)), *written]

    def drop(self) -> None:
        """Release a copy that is no longer needed. Idempotent."""
        for part in self._parts:
            part.drop()


class PlainCopy(PolicyCopy):
    """A snapshot that is one piece of bytes, or one queue."""

    def __init__(self, whole: bytes | QueueCopy) -> None:
        self._queue = whole if isinstance(whole, QueueCopy) else QueueCopy(whole)
        super().__init__((self._queue,))

    def pieces(self) -> Sequence[bytes]:
        """As `PolicyCopy.pieces`, without msgpack headers."""
        return self._queue.order or ()


def bytes_head(size: int) -> bytes:
    """Return the msgpack header of bytes of this size."""
    if size < 1 << 8:
        return bytes((0xC4, size))
    return b"\xc5" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xc6" + size.to_bytes(4, "big")


def array_head(count: int) -> bytes:
    """Return the msgpack header of an array of this length."""
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
