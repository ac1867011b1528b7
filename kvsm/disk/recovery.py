"""What the files of all ranks hold when they are opened: which slot serves which key.

Headers are read, and payloads are not. A payload is proved by its checksum before its first byte is used, at
each load; so reading all of them here would only find earlier what a load finds in time, and costs minutes.

Exactly one row holds for a slot of a rank's file. `ROWS` is this table:

=============  ==========================================================================  ======
row            what is found                                                               kept
=============  ==========================================================================  ======
unreadable     the disk gives an error for the header                                      no
empty          zeros: never used                                                           no
damaged        the checksum of the header is wrong                                         no
other meaning  a whole header of another identity                                          no
misplaced      of another file or slot, or of another length                               no
too late       a generation of a life that this file has not had when it was opened        no
dropped        it says so: a store had begun and was cut off                               no
not on all     sealed here, and on another rank not, or with another key or generation     no
older era      sealed everywhere, and a reset came after it (`era.py`)                     no
older          sealed everywhere, and the same key is too, with a newer generation         no
kept           sealed everywhere, and the newest of its key                                yes
=============  ==========================================================================  ======

A key is served by its newest slot alone. If that slot's payload then proves wrong, the key is lost, even if
an older slot holds it: a core stores a key again only after it has dropped the first slot.

What is not kept is written nowhere: its header is overwritten when the slot is used again. The next recovery
then decides the same, unless another rank's file has changed meanwhile. Then it may keep less; a slot that
this life has stored has a newer generation than all that were left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvsm.disk.aligned import aligned_memory
from kvsm.disk.formats import (
    HEADER_BYTES,
    HEADER_COLUMNS,
    HeaderState,
    SlotGeneration,
    read_header,
)
from kvsm.disk.slot_file import SlotFile
from kvsm.errors import ConfigError

SEQUENTIAL_BYTES = 16 << 10
"""Slots up to this size are read whole, in long calls: that is faster than a call for each header."""

CALL_BYTES = 8 << 20
SCAN_THREADS = 8
BATCH_SLOTS = 512

BEFORE_ALL = SlotGeneration(0, 0)
"""Before each generation that a slot may have."""

CONDITIONS = ("readable", "used", "whole", "same identity", "in place", "of its past", "sealed")
"""What is asked of a slot of one rank, in this order."""

ACROSS = ("everywhere", "of this era", "newest")
"""What is asked of a slot with the other ranks and the other slots in view."""


class RecoveryRow(NamedTuple):
    """A row of the table. when: what must hold, and what must not. kept: whether the slot serves its key."""

    name: str
    when: Mapping[str, bool]
    kept: bool = False


def _rows() -> tuple[RecoveryRow, ...]:
    asked = (*CONDITIONS, *ACROSS)
    names = (
        "unreadable",
        "empty",
        "damaged",
        "other meaning",
        "misplaced",
        "too late",
        "dropped",
        "not on all",
        "older era",
        "older",
    )
    rows = [
        RecoveryRow(name, {**dict.fromkeys(asked[:place], True), asked[place]: False})
        for place, name in enumerate(names)
    ]
    return (*rows, RecoveryRow("kept", dict.fromkeys(asked, True), True))


ROWS = _rows()
KEPT = ROWS[-1].name


@dataclass(slots=True, eq=False)
class RankScan:
    """What the headers of one rank's file say. found: for each slot and each of `CONDITIONS`.

    keys: of slots for which all conditions hold; empty for others.
    """

    found: NDArray[np.bool_]
    lives: NDArray[np.int64]
    numbers: NDArray[np.int64]
    keys: list[bytes] = field(repr=False)
    life: int = 0
    """Of the file, since it is open."""


class RecoveredSlot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a key was found."""

    slot: int
    generation: SlotGeneration


class Recovered(msgspec.Struct, frozen=True):
    """What the files of all ranks hold.

    slots: key -> where it is, on every rank.
    life: with which every rank goes on: the latest of their lives.
    told: for each rank, how many of its slots are in which row.
    """

    slots: dict[bytes, RecoveredSlot]
    life: int
    told: tuple[dict[str, int], ...]


def recover(files: Sequence[SlotFile], after: SlotGeneration = BEFORE_ALL) -> Recovered:
    """Find what these files hold, one of each rank in their order, and let the files know it.

    after: slots of this generation and of older ones do not count (`DiskEra.after`).

    Raises `ConfigError` if they do not belong together or were used already, and `OSError` if a life cannot
    be written.
    """
    shapes = [(one.geometry.num_slots, one.geometry.rank, one.geometry.ranks, one.digest) for one in files]
    wanted = [(shapes[0][0], rank, len(files), shapes[0][3]) for rank in range(len(files))]
    if shapes != wanted:
        raise ConfigError("the files of a disk tier must be of all ranks, in order, with equal slots")
    recovered = decide([scan(one) for one in files], after)
    for file in files:
        take(file, recovered)
    return recovered


def take(file: SlotFile, recovered: Recovered) -> None:
    """Let a rank's file go on with what was found on all ranks, before its first store. Raises
    `ConfigError` if it is not, and `OSError`."""
    file.raise_life(recovered.life)
    found = list(recovered.slots.values())
    file.table.found([one.slot for one in found], [one.generation for one in found])


def scan(file: SlotFile) -> RankScan:
    """Read all headers of one rank's file. Never fails: what cannot be read is in its row."""
    count = file.geometry.num_slots
    made = RankScan(
        np.zeros((count, len(CONDITIONS)), np.bool_),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        [b""] * count,
        file.life,
    )
    size = file.geometry.slot_bytes
    step = max(1, CALL_BYTES // size) if size <= SEQUENTIAL_BYTES else BATCH_SLOTS
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        for _ in pool.map(partial(_scan_some, file, made, step), range(0, count, step)):
            pass
    return made


def decide(scans: Sequence[RankScan], after: SlotGeneration = BEFORE_ALL) -> Recovered:
    """Which slots serve which keys, from the scans of all ranks. after: as `recover` takes it."""
    first = scans[0]
    everywhere = np.logical_and.reduce([one.found.all(axis=1) for one in scans])
    for one in scans[1:]:
        everywhere &= (one.lives == first.lives) & (one.numbers == first.numbers)
        everywhere &= np.fromiter(map(bytes.__eq__, one.keys, first.keys), np.bool_, len(first.keys))
    counts = (first.lives > after.life) | ((first.lives == after.life) & (first.numbers > after.number))
    newest: dict[bytes, RecoveredSlot] = {}
    places = np.flatnonzero(everywhere & counts)
    order = np.lexsort((places, first.numbers[places], first.lives[places]))
    for slot in places[order].tolist():
        generation = SlotGeneration(int(first.lives[slot]), int(first.numbers[slot]))
        newest[first.keys[slot]] = RecoveredSlot(slot, generation)
    is_newest = np.zeros(len(everywhere), np.bool_)
    is_newest[[one.slot for one in newest.values()]] = True
    told = tuple(_told(one, (everywhere, counts, is_newest)) for one in scans)
    return Recovered(newest, max(one.life for one in scans), told)


def _told(one: RankScan, across: Sequence[NDArray[np.bool_]]) -> dict[str, int]:
    columns = dict(zip((*CONDITIONS, *ACROSS), (*one.found.T, *across)))
    told: Counter[str] = Counter()
    for row in ROWS:
        holds = [columns[name] == wanted for name, wanted in row.when.items()]
        told[row.name] = int(np.count_nonzero(np.logical_and.reduce(holds)))
    return dict(told)


def _scan_some(file: SlotFile, made: RankScan, step: int, first: int) -> None:
    """Read the headers from slot `first` on."""
    last = min(first + step, file.geometry.num_slots)
    headers = np.zeros((last - first, HEADER_BYTES), np.uint8)
    for slot, read in _headers(file, first, last):
        headers[slot - first] = read
        made.found[slot, 0] = True
    columns = headers.view(HEADER_COLUMNS)[:, 0]
    geometry = file.geometry
    checksums = np.fromiter(
        (xxhash.xxh3_64_intdigest(one[8:].tobytes()) for one in headers), np.uint64, last - first
    )
    here = slice(first, last)
    lives, numbers = made.lives[here], made.numbers[here]
    lives[:], numbers[:] = columns["life"].astype(np.int64), columns["number"].astype(np.int64)
    found = made.found[here]
    found[:, 1] = headers.any(axis=1)
    found[:, 2] = columns["checksum"] == checksums
    found[:, 3] = columns["identity"] == np.void(file.digest)
    found[:, 4] = (
        (columns["file"] == np.void(file.file_id))
        & (columns["slot"] == np.arange(first, last))
        & (columns["length"] == geometry.payload_bytes)
    )
    found[:, 5] = (lives >= 0) & (lives <= file.found_life)
    found[:, 6] = columns["state"] == HeaderState.SEALED
    for place in np.flatnonzero(found.all(axis=1)).tolist():
        header = read_header(headers[place].tobytes())
        if header is None:
            found[place, 2] = False
        else:
            made.keys[first + place] = header.key


def _headers(file: SlotFile, first: int, last: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The headers that can be read. A long call that fails is made again for each header."""
    size, offset = file.geometry.slot_bytes, file.geometry.offset
    if size <= SEQUENTIAL_BYTES:
        memory = aligned_memory((last - first) * size)[: (last - first) * size]
        try:
            file.read(memory, offset(first))
        except OSError:
            pass
        else:
            yield from enumerate(memory.reshape(-1, size)[:, :HEADER_BYTES], first)
            return
    memory = aligned_memory(HEADER_BYTES)
    for slot in range(first, last):
        try:
            file.read(memory, offset(slot))
        except OSError:
            continue
        yield slot, memory
