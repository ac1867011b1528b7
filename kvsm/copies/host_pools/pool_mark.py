"""The mark of a kept pool: which log its bytes belong to, and up to which event.

A log that was restored from a copy, or that lost its end, is older than its pool: its events describe earlier
contents of the slots. To detect this, the pool has a mark: the run and the life of its log, and the last
event that was flushed. A log that ends before the mark is not used.

**The log is flushed, then the mark is set, then jobs leave for the workers.** So

- the log always reaches the mark, unless its files were changed from outside: the event in the mark was
  flushed before the mark was set;
- the mark covers all bytes of the pool: workers get a job only after the mark was set.

Only the process that writes the log knows which events are flushed, so it sets the mark. In vLLM this is the
scheduler, while the workers have the pool: so the scheduler maps the mark's page of every rank's files. The
mark costs one 8-byte store into mapped memory for each flush. The store is atomic: no other process sees half
of it, and a kill leaves either the old or the new value. A mark need not survive a reboot: after a reboot no
pool is warm.

A life has a random id besides its number. If an older copy of a log is continued, its new events repeat the
numbers of the lost events, and the number of the life; only the id differs.

The page has room for two log places, because a new life begins in two files: the pool's and the log's. The
new place is written next to the old place before the log's new segment exists, and the first flush of the new
life voids the old place. So whenever the process is killed, one of the valid places fits the log:

=======================================  ====================================================================
killed                                   valid places, and the log
=======================================  ====================================================================
before the new place is written          the old place; the log ends with the old life
before the log's new segment exists      both; the log ends with the old life
before the first flush                   both; the log ends with the new life, which has no event
later                                    the new place; the log ends with the new life
=======================================  ====================================================================

A new log numbers its events from 1, so its stores may have the numbers of older stores. All checksums of the
pool are cleared before the mark names a new log, so that no seal from another log fits.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES, PoolSizes

MARK_BYTES = PAGE_BYTES
"""Size of a mark in a file: one page, so that it can be mapped separately."""

_SEQ, _REST = Struct("<Q"), Struct("<Q16s16s")
_WORDS = (_SEQ.size + _REST.size) // _SEQ.size
"""Number of 8-byte words of a place. The first word is the event number."""

_VOID = (1 << 64) - 1
"""The event number of a void place."""

_NEVER = bytes(16)
"""The life id of a place that was never written."""


class LogPlace(NamedTuple):
    """A place in a log: behind event `seq` of this run and life.

    run, life_id: random ids of 16 bytes each.
    life: the number of the life, for messages.
    """

    run: bytes
    life: int
    life_id: bytes
    seq: int


class PoolMark:
    """The mark of one pool. Only the process that writes the log sets it.

    memory: `MARK_BYTES` bytes, zeros at first.
    sizes: the sizes of the pool.
    rows: the table, as uint8, if this is a pool of checksums; None for a pool of blocks.
    """

    def __init__(
        self, memory: mmap.mmap | bytearray, sizes: PoolSizes, rows: NDArray[np.uint8] | None = None
    ) -> None:
        self.sizes, self._rows = sizes, rows
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._own, self._other = 0, 1
        """Indices of the place of this life and of the place of the last life."""
        self._other_counts = True
        """Whether the place of the last life is still valid."""

    @property
    def is_of_checksums(self) -> bool:
        """Whether the pool holds checksums of another pool's blocks."""
        return self.sizes.block_bytes == CHECKSUM_BYTES

    def places(self) -> list[LogPlace]:
        """Return the valid places: none, one or two."""
        both = [self._read(0), self._read(1)]
        return [place for place in both if place.seq != _VOID and place.life_id != _NEVER]

    def begin(self, place: LogPlace, follows: LogPlace | None) -> None:
        """Write the place of a new life, before the life begins in the log.

        place: where the life begins in the log.
        follows: the current place that fits the continued log. It stays valid until the first `advance`.
            None: the life begins a new log, so all older places and checksums are voided.
        """
        self._other = 0 if follows is not None and self._read(0) == follows else 1
        self._own, self._other_counts = 1 - self._other, follows is not None
        self._words[self._own * _WORDS] = _VOID
        if follows is None:
            self._words[self._other * _WORDS] = _VOID
            if self._rows is not None:
                self._rows[:] = 0
        at = self._own * _WORDS * _SEQ.size + _SEQ.size
        _REST.pack_into(self._memory, at, place.life, place.run, place.life_id)
        self._words[self._own * _WORDS] = place.seq

    def advance(self, seq: int) -> None:
        """Set the mark to event `seq`, up to which the log is flushed, before jobs leave for the workers."""
        self._words[self._own * _WORDS] = seq
        if self._other_counts:
            self._words[self._other * _WORDS] = _VOID
            self._other_counts = False

    def void(self) -> None:
        """Void the mark, because jobs leave although the log has lost events: no log fits this pool until the
        next `advance`."""
        self._words[0] = self._words[_WORDS] = _VOID

    def _read(self, number: int) -> LogPlace:
        at = number * _WORDS * _SEQ.size
        (seq,) = _SEQ.unpack_from(self._memory, at)
        life, run, life_id = _REST.unpack_from(self._memory, at + _SEQ.size)
        return LogPlace(run, life, life_id, seq)


OPEN_MARKS: dict[bytes, PoolMark] = {}
"""Pool id -> mark of each kept pool that this process has open. `HostPool` adds and removes them."""


def why_unbound(mark: PoolMark, end: LogPlace) -> tuple[LogPlace | None, str]:
    """Decide whether a log reaches the mark of a pool.

    end: the end of the log.

    Returns the place of the mark that fits the log and an empty text, or None and the reason.
    """
    places = mark.places()
    for place in places:
        if place.life_id == end.life_id and place.run == end.run and place.seq <= end.seq:
            return place, ""
    if not places:
        return None, "the pool names no log: none was written since it was made, or its log has lost events"
    last = places[-1]
    if last.run != end.run:
        return None, "the pool belongs to another log than the one that is here"
    if last.life_id != end.life_id:
        return None, (
            f"the log that is here ends with life {end.life}, and the pool belongs to another one, life "
            f"{last.life}: the log, or the pool, is an older copy"
        )
    return None, (
        f"the log ends with event {end.seq:,}, and the pool may hold bytes of events up to {last.seq:,}: the "
        "log is an older copy, or its end is lost"
    )


def without_checksums(marks: Sequence[PoolMark]) -> str:
    """Return the reason why kept pools cannot be used if some have no checksums; empty if all have."""
    tables = sum(mark.is_of_checksums for mark in marks)
    if tables == len(marks) - tables:
        return ""
    return (
        f"{len(marks) - tables} kept pools of blocks have {tables} kept pools of checksums, whose rows have "
        f"{CHECKSUM_BYTES} bytes: without the checksum of each block it is unknown what a slot holds"
    )
