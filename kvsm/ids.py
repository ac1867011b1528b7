"""Block ids in batches: how an event carries them, and how the ledger works on them.

A decision about N blocks is one event with N ids. The form depends on N alone, so equal batches have equal
bytes in the log:

=============  ========================  ==============================
N              in an event (`Ids`)       in the ledger (`IdArray`)
=============  ========================  ==============================
up to `SMALL`  tuple of int              the same tuple
above          packed bytes              numpy int64 array
=============  ========================  ==============================

A plain loop over a tuple beats numpy up to about sixteen ids. Above that numpy is ten times faster. Index
arrays are int64 because numpy gathers several times slower through int32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

SMALL = 16
"""The longest batch that is a tuple."""

Id = Annotated[int, msgspec.Meta(ge=0)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=SMALL)] | bytes
IdArray = tuple[int, ...] | NDArray[np.int64]

NO_IDS: tuple[int, ...] = ()


_TWO_BYTES = 1 << 16


def pack(ids: Sequence[int] | NDArray[np.int64], below: int = 1 << 32) -> Ids:
    """The form that an event carries.

    below: what is known to be more than each id. If two bytes hold all such ids, none is looked at for the
        width.

    Packed bytes are one byte, the width of an id, and then the ids, little endian. The width is the least of
    2, 3 and 4 bytes that holds the largest id. Raises `OverflowError` for an id that is negative, or 2**32
    or more.
    """
    if len(ids) <= SMALL:
        return tuple(ids.tolist()) if isinstance(ids, np.ndarray) else tuple(ids)
    array = np.asarray(ids, dtype=np.int64)
    # As an unsigned number, a negative id is huge.
    largest = below - 1 if below <= _TWO_BYTES else int(array.view(np.uint64).max())
    if largest < _TWO_BYTES:
        return b"\x02" + array.astype("<u2").tobytes()
    if largest >= 1 << 32:
        raise OverflowError(f"ids must be from 0 to 2**32 - 1; found {largest}")
    wide = array.astype("<u4")
    if largest < 1 << 24:
        return b"\x03" + wide.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return b"\x04" + wide.tobytes()


class MalformedIds(ValueError):
    """A batch of ids that `pack` does not make."""


def unpack(ids: Ids) -> IdArray:
    """Inverse of `pack`. Raises `MalformedIds` for what `pack` does not make."""
    if isinstance(ids, tuple):
        return ids
    array = _unpack_bytes(ids)
    if len(array) <= SMALL:
        raise MalformedIds(f"{len(array)} ids are packed; up to {SMALL} stay a tuple")
    return array


def _unpack_bytes(packed: bytes) -> NDArray[np.int64]:
    width = packed[0] if packed else 0
    if width not in (2, 3, 4):
        raise MalformedIds(f"packed ids start with their width, 2, 3 or 4 bytes; found {width}")
    if (len(packed) - 1) % width:
        raise MalformedIds(f"{len(packed) - 1} bytes are no packed ids of {width} bytes each")
    if width == 2:
        return np.frombuffer(packed, "<u2", offset=1).astype(np.int64)
    if width == 4:
        return np.frombuffer(packed, "<u4", offset=1).astype(np.int64)
    body: NDArray[Any] = np.frombuffer(packed, np.uint8, offset=1).reshape(-1, 3)
    wide = np.zeros((len(body), 4), dtype=np.uint8)
    wide[:, :3] = body
    return wide.view("<u4").reshape(-1).astype(np.int64)


def array_of(numbers: bytes) -> NDArray[np.int64]:
    """The ids in the memory of int64 numbers, as the ledger works on them."""
    return np.frombuffer(numbers, dtype=np.int64)


def count(ids: Ids) -> int:
    """How many ids a batch has, without unpacking it. Malformed bytes have any number of them."""
    if isinstance(ids, tuple):
        return len(ids)
    return (len(ids) - 1) // (ids[0] or 1) if ids else 0


def to_list(ids: Ids | IdArray) -> list[int]:
    """Any form as a plain list, for people and for tests."""
    if isinstance(ids, bytes):
        ids = _unpack_bytes(ids)
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def listed(ids: IdArray) -> Sequence[int]:
    """A batch of the ledger as plain ints. A tuple is not copied."""
    return ids if type(ids) is tuple else ids.tolist()  # type: ignore[union-attr]


def equal(first: IdArray, second: IdArray) -> bool:
    """Whether two batches of the ledger have the same ids in the same order."""
    if type(first) is tuple and type(second) is tuple:
        return first == second
    return bool(np.array_equal(first, second))
