"""Map keys to the last number noted for each, for more keys than fit in memory.

A log of 1 GB stores some ten million keys, and a lookup may miss any of them. The latest keys are in a dict.
When it is full, their hashes are sorted and written as a chunk: 16 bytes per key, in `BUCKETS` parts by the
first bits of the hash. A search reads one part of each chunk. Two keys may have the same hash, so a caller of
`candidates` must check that a number belongs to its key.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = 64
RECENT_KEYS = 1 << 18
"""Most keys in memory: about 30 MB."""

_START, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHIFT, _TO_BUCKET = np.uint64(29), np.uint64(58)
_Hashes = NDArray[np.uint64]

SCHEMA = (
    "CREATE TABLE _key_chunks (history TEXT, bucket INTEGER, chunk INTEGER, hashes BLOB, numbers BLOB,"
    " PRIMARY KEY (history, bucket, chunk))"
)


class KeyHistory:
    """The numbers noted for keys.

    history: the name of this history; a database can have several.
    recent: the keys that were not in a chunk when an earlier history was saved; None: there are none.
    """

    def __init__(
        self, connection: sqlite3.Connection, history: str, recent: dict[bytes, int] | None = None
    ) -> None:
        self.recent = recent or {}
        """key -> number, for the keys that are not in a chunk yet."""
        self._connection, self._history = connection, history
        query = "SELECT COALESCE(MAX(chunk) + 1, 0) FROM _key_chunks WHERE history = ?"
        (self._chunks,) = connection.execute(query, (history,)).fetchone()

    def note(self, keys: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Note a number for each key. Numbers must increase from call to call."""
        self.recent.update(zip(keys, numbers))
        if len(self.recent) >= RECENT_KEYS:
            self._write_chunk()

    def candidates(self, key: bytes) -> Iterator[int]:
        """Yield the numbers noted for this key, or for keys with the same hash, the latest first."""
        if key in self.recent:
            yield self.recent[key]
        if not self._chunks:
            return
        wanted = hashes_of([key])
        parts = self._connection.execute(
            "SELECT hashes, numbers FROM _key_chunks WHERE history = ? AND bucket = ? ORDER BY chunk DESC",
            (self._history, int(wanted[0] >> _TO_BUCKET)),
        ).fetchall()
        for hashes, numbers in parts:
            known = np.frombuffer(hashes, np.uint64)
            first, last = (int(np.searchsorted(known, wanted[0], side)) for side in ("left", "right"))
            yield from np.frombuffer(numbers, np.int64)[first:last][::-1].tolist()

    def _write_chunk(self) -> None:
        hashes = hashes_of(list(self.recent))
        numbers = np.fromiter(self.recent.values(), np.int64, len(self.recent))
        order = np.argsort(hashes, kind="stable")
        hashes, numbers = hashes[order], numbers[order]
        ends = np.searchsorted(hashes >> _TO_BUCKET, np.arange(BUCKETS, dtype=np.uint64), "right").tolist()
        parts = zip(range(BUCKETS), [0, *ends], ends)
        self._connection.executemany(
            "INSERT INTO _key_chunks VALUES (?, ?, ?, ?, ?)",
            [
                (self._history, bucket, self._chunks, hashes[a:b].tobytes(), numbers[a:b].tobytes())
                for bucket, a, b in parts
                if a < b
            ],
        )
        self._chunks += 1
        self.recent.clear()


def hashes_of(keys: Sequence[bytes]) -> _Hashes:
    """A 64-bit hash of each key; unlike `hash`, the same in every process."""
    lengths = set(map(len, keys))
    if len(lengths) > 1:
        found = np.zeros(len(keys), np.uint64)
        for length in lengths:
            places = [place for place, key in enumerate(keys) if len(key) == length]
            found[places] = hashes_of([keys[place] for place in places])
        return found
    length = lengths.pop()
    words = np.zeros((len(keys), max(8, -(-length // 8) * 8)), np.uint8)
    if length:
        words[:, :length] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
    hashes = np.full(len(keys), _START ^ np.uint64(length), np.uint64)
    for column in words.view(np.uint64).T:
        hashes = (hashes ^ column) * _FACTOR
        hashes ^= hashes >> _SHIFT
    return hashes * _START ^ (hashes >> _SHIFT)
