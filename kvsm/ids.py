"""Block ids in batches: how an event carries them, and how the ledger works on them.

A decision about N blocks is one event with N ids. The form depends on N alone, so equal batches have equal
bytes in the log:

=============  ========================  ==============================
N              in an event (`Ids`)       in the ledger (`IdArray`)
=============  ========================  ==============================
up to `SMALL`  tuple of int              the same tuple
above          packed bytes              numpy int64 array
=============  ========================  ==============================

Packed ids are one byte for their form, followed by little-endian numbers. A number has 2, 3 or 4 bytes: the
fewest that hold the largest id.

=============  ==========================================================================================
form           numbers
=============  ==========================================================================================
width          the ids
width + RUNS   the first and the last id of each run; within a run, ids ascend or descend by one
=============  ==========================================================================================

The shorter form is used, and the one without runs if both are equal. Slots are freed and evicted in the order
in which they were allocated, so most large batches are a few runs. A batch of more than `MOST_IN_RUNS` ids is
not packed as runs: this limits the number of ids that a few bytes of a damaged log can stand for.

A plain loop over a tuple beats numpy up to about sixteen ids. Above that numpy is ten times faster. Index
arrays are int64 because numpy gathers several times slower through int32 ones. The native body packs and
unpacks ten times faster than numpy (`kvsm/core/native/ids.c`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

SMALL = 16
"""The longest batch that is a tuple."""

RUNS = 8
"""Added to the form byte if the numbers are runs."""

MOST_IN_RUNS = 1 << 16
"""The longest batch that is packed as runs."""

Id = Annotated[int, msgspec.Meta(ge=0)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=SMALL)] | bytes
IdArray = tuple[int, ...] | NDArray[np.int64]

NO_IDS: tuple[int, ...] = ()

Numbers = Sequence[int] | NDArray[np.int64]


def _none(_: object) -> None:
    """Return None, in place of a native function, while the Python body runs."""


_packed_natively: Callable[[Numbers], bytes | None] = _none
_unpacked_natively: Callable[[bytes], bytes | None] = _none


def use_native(pack: Callable[[Numbers], bytes | None], unpack: Callable[[bytes], bytes | None]) -> None:
    """Pack and unpack with the native body. If that returns None, the Python function runs, and may raise.

    unpack: returns int64 numbers as bytes.
    """
    global _packed_natively, _unpacked_natively
    _packed_natively, _unpacked_natively = pack, unpack


def cut(ids: IdArray, begin: int, end: int) -> IdArray:
    """Return ids[begin:end]: as a tuple if the part has at most `SMALL` ids."""
    part = ids[begin:end]
    return tuple(part.tolist()) if isinstance(part, np.ndarray) and len(part) <= SMALL else part


def pack(ids: Numbers) -> Ids:
    """Return ids in the form that an event carries. Raises `OverflowError` for an id outside 0 to 2**32 -
    1."""
    if len(ids) <= SMALL:
        return tuple(ids.tolist()) if isinstance(ids, np.ndarray) else tuple(ids)
    packed = _packed_natively(ids)
    return pack_in_python(ids) if packed is None else packed


def pack_in_python(ids: Numbers) -> bytes:
    """Return the bytes of `pack`, for more than `SMALL` ids."""
    array = np.asarray(ids, dtype=np.int64)
    # As an unsigned number, a negative id is huge.
    largest = int(array.view(np.uint64).max())
    if largest >= 1 << 32:
        raise OverflowError(f"ids must be from 0 to 2**32 - 1; found {largest}")
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    if len(array) <= MOST_IN_RUNS:
        begins, ends = _runs(array)
        if 2 * len(begins) < len(array):
            pairs = np.column_stack((array[begins], array[ends])).reshape(-1)
            return bytes([width + RUNS]) + _bytes_of(pairs, width)
    return bytes([width]) + _bytes_of(array, width)


def _runs(array: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and last place of each run of a batch. A run only ascends, or only descends."""
    steps = np.diff(array)
    near = np.abs(steps) == 1
    cuts = ~near
    cuts[1:] |= near[:-1] & (steps[:-1] != steps[1:])
    places = np.flatnonzero(cuts)
    return np.concatenate(([0], places + 1)), np.concatenate((places, [len(array) - 1]))


def _bytes_of(numbers: NDArray[np.int64], width: int) -> bytes:
    if width == 3:
        return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return numbers.astype(f"<u{width}").tobytes()


class MalformedIds(ValueError):
    """Bytes that `pack` does not produce."""


def unpack(ids: Ids) -> IdArray:
    """Inverse of `pack`. Raises `MalformedIds` for bytes that `pack` does not produce."""
    if isinstance(ids, tuple):
        return ids
    array = _unpack_bytes(ids)
    if len(array) <= SMALL:
        raise MalformedIds(f"{len(array)} ids are packed; up to {SMALL} stay a tuple")
    return array


def _unpack_bytes(packed: bytes) -> NDArray[np.int64]:
    numbers = _unpacked_natively(packed)
    return unpack_in_python(packed) if numbers is None else array_of(numbers)


def unpack_in_python(packed: bytes) -> NDArray[np.int64]:
    """Unpack bytes, also of `SMALL` ids or fewer. Raises `MalformedIds`."""
    form = packed[0] if packed else 0
    width = form - RUNS if form > RUNS else form
    if width not in (2, 3, 4):
        raise MalformedIds(
            f"packed ids start with their width, 2, 3 or 4 bytes, or {RUNS} more for runs; found {form}"
        )
    size = 2 * width if form > RUNS else width
    if (len(packed) - 1) % size:
        what = "runs" if form > RUNS else "packed ids"
        raise MalformedIds(f"{len(packed) - 1} bytes are no {what} of {size} bytes each")
    numbers = _unpacked_numbers(packed, width)
    return numbers if form == width else _unpacked_runs(numbers[::2], numbers[1::2])


def _unpacked_numbers(packed: bytes, width: int) -> NDArray[np.int64]:
    if width != 3:
        return np.frombuffer(packed, f"<u{width}", offset=1).astype(np.int64)
    body: NDArray[Any] = np.frombuffer(packed, np.uint8, offset=1).reshape(-1, 3)
    wide = np.zeros((len(body), 4), dtype=np.uint8)
    wide[:, :3] = body
    return wide.view("<u4").reshape(-1).astype(np.int64)


def _unpacked_runs(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    sizes = np.abs(ends - begins) + 1
    total = int(sizes.sum())
    if total > MOST_IN_RUNS:
        raise MalformedIds(f"{total} ids are packed as runs; more than {MOST_IN_RUNS} are not")
    steps = np.where(ends < begins, -1, 1)
    before = np.cumsum(sizes) - sizes  # the number of ids before each run
    return np.repeat(begins - steps * before, sizes) + np.repeat(steps, sizes) * np.arange(total)


def array_of(numbers: bytes) -> NDArray[np.int64]:
    """Return an array over the bytes of int64 numbers, without a copy."""
    return np.frombuffer(numbers, dtype=np.int64)


def count(ids: Ids) -> int:
    """Count the ids of a batch without unpacking it. For malformed bytes the result means nothing."""
    if isinstance(ids, tuple):
        return len(ids)
    form = ids[0] if ids else 0
    if form <= RUNS:
        return (len(ids) - 1) // (form or 1) if ids else 0
    width, total = form - RUNS, 0
    for place in range(1, len(ids), 2 * width):
        first, last = ids[place : place + width], ids[place + width : place + 2 * width]
        total += abs(int.from_bytes(last, "little") - int.from_bytes(first, "little")) + 1
    return total


def to_list(ids: Ids | IdArray) -> list[int]:
    """Return a batch in any form as a list, for output and tests."""
    if isinstance(ids, bytes):
        ids = _unpack_bytes(ids)
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def listed(ids: IdArray) -> Sequence[int]:
    """Return a batch in the ledger's form as plain ints. A tuple is not copied."""
    return ids if type(ids) is tuple else ids.tolist()  # type: ignore[union-attr]


def equal(first: IdArray, second: IdArray) -> bool:
    """Whether two batches in the ledger's form have the same ids in the same order."""
    if type(first) is tuple and type(second) is tuple:
        return first == second
    return bool(np.array_equal(first, second))


KEY_DIGITS, LAST_KEY_DIGITS = 12, 4
"""Number of hex digits shown of a key: the first ones, and the last ones, which name the KV cache group."""


def render_key(key: bytes) -> str:
    """Render a key as `3fa90c11d2e4..0001`: `kvsm show --key` finds it in a log by this form.

    A key is a hash and the index of a KV cache group. The groups of a hybrid model share the hash.
    """
    digits = key.hex()
    if len(digits) <= KEY_DIGITS + 2 + LAST_KEY_DIGITS:
        return digits
    return f"{digits[:KEY_DIGITS]}..{digits[-LAST_KEY_DIGITS:]}"
