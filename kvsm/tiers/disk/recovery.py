"""Recovery of a disk tier: decides, from the headers in the files of all ranks, which slot serves which key.

Only headers are read, by a few threads in long calls, since headers are contiguous. Payloads are checked by
each load before it uses their first byte. Reading all payloads here would only find damage earlier, and would
take minutes.

For each slot of a rank's file exactly one row of this table holds (`ROWS`):

=============  ==========================================================================  ======
row            what is found                                                               kept
=============  ==========================================================================  ======
unreadable     the disk returns an error for the header                                    no
empty          zeros: never used                                                           no
damaged        the checksum of the header is wrong                                         no
other meaning  an undamaged header with another identity                                   no
misplaced      a header of another file or slot, or with another length                    no
too late       a generation of a later life than the file had before it was opened         no
dropped        a header that says DROPPED: a store was interrupted                         no
not on all     sealed here; not on another rank, or with another key, era or generation    no
other era      sealed on all ranks, in another era than the current one (`era.py`)         no
older          sealed on all ranks, and another slot has the key with a newer generation   no
kept           sealed on all ranks, and the newest slot of its key                         yes
=============  ==========================================================================  ======

Only the newest slot of a key serves it. If the payload of that slot proves wrong, the key is lost, even if an
older slot holds it, too: a core stores a key again only after it has dropped the older slot.

Recovery does not write to slots that it drops: a header stays until the slot is reused. So the next recovery
decides the same, unless another rank's file has changed meanwhile; then it may keep less. Stores of this life
have newer generations than all dropped slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.errors import ConfigError
from kvsm.tiers.disk.aligned import aligned_memory
from kvsm.tiers.disk.formats import (
    ERA_ID_BYTES,
    HEADER_BYTES,
    HEADER_COLUMNS,
    HEADER_STEP,
    NO_ERA,
    HeaderState,
    SlotGeneration,
    header_keys,
    whole_headers,
)
from kvsm.tiers.disk.slot_file import SlotFile

SCAN_THREADS = 4
SCAN_HEADERS = 2048
"""Headers that one call reads: 8 MiB."""

CONDITIONS = ("readable", "used", "whole", "same identity", "in place", "of its past", "sealed")
"""Conditions that a slot meets or not by the header of one rank alone, in the order of the table."""

ACROSS = ("everywhere", "of this era", "newest")
"""Further conditions, which depend on other ranks, the era and other slots."""


class RecoveryRow(NamedTuple):
    """A row of the table.

    when: condition -> whether it must hold, or must not.
    kept: whether the slot serves its key.
    """

    name: str
    when: Mapping[str, bool]
    kept: bool = False


def _rows() -> tuple[RecoveryRow, ...]:
    conditions = (*CONDITIONS, *ACROSS)
    names = (
        "unreadable",
        "empty",
        "damaged",
        "other meaning",
        "misplaced",
        "too late",
        "dropped",
        "not on all",
        "other era",
        "older",
    )
    rows = [
        RecoveryRow(name, {**dict.fromkeys(conditions[:place], True), conditions[place]: False})
        for place, name in enumerate(names)
    ]
    return (*rows, RecoveryRow("kept", dict.fromkeys(conditions, True), True))


ROWS = _rows()
KEPT = ROWS[-1].name


@dataclass(slots=True, eq=False)
class RankScan:
    """The headers of one rank's file. Each array has an entry for each slot.

    found: whether each of `CONDITIONS` holds, `[slots, conditions]`.
    lives, numbers: the generation.
    eras: the era id.
    keys: the key, if all conditions hold; else empty.
    """

    found: NDArray[np.bool_]
    lives: NDArray[np.int64]
    numbers: NDArray[np.int64]
    eras: NDArray[np.void]
    keys: list[bytes] = field(repr=False)
    life: int = 0
    """The life of the file since it was opened."""


class Recovered(msgspec.Struct, frozen=True):
    """The valid blocks in the files of all ranks.

    slots: key -> its slot, the same on every rank, in the order of their generations.
    generations: for each slot in this order, life and number as int64, packed; see `generation`.
    life: the life with which all ranks continue: the latest of their lives.
    told: for each rank: name of a row of the table -> number of slots.
    """

    slots: dict[bytes, int]
    generations: bytes
    life: int
    told: tuple[dict[str, int], ...]

    def generation(self, place: int) -> SlotGeneration:
        """Return the generation of the slot at this place in `slots`."""
        return SlotGeneration(*np.frombuffer(self.generations, np.int64, 2, 16 * place).tolist())


def recover(files: Sequence[SlotFile], era: bytes = NO_ERA) -> Recovered:
    """Find the valid blocks in these files, and enter them into the table of each file.

    files: the file of each rank, in order.
    era: the id of the current era (`DiskEra.id`); slots of other eras are invalid.

    Raises `ConfigError` if the files do not belong together or were already used, and `OSError` if a life
    cannot be written.
    """
    geometries = [(file.geometry, file.digest) for file in files]
    shapes = [(each.num_slots, each.rank, each.ranks, digest) for each, digest in geometries]
    wanted = [(shapes[0][0], rank, len(files), shapes[0][3]) for rank in range(len(files))]
    if shapes != wanted:
        raise ConfigError("the files of a disk tier must be of all ranks, in order, with equal slots")
    recovered = decide([scan(one) for one in files], era)
    for file in files:
        take(file, recovered)
    return recovered


def take(file: SlotFile, recovered: Recovered) -> None:
    """Raise the life of a scanned file, and enter the blocks found on all ranks into its table. Raises
    `ConfigError` if the file was already used, and `OSError`."""
    file.raise_life(recovered.life)
    file.table.found(list(recovered.slots.values()))


def scan(file: SlotFile) -> RankScan:
    """Read all headers of one rank's file, before its first store. Slots whose header cannot be read are
    noted as not readable. Raises `ConfigError` if the file was already used."""
    file.table.check_unused()
    count = file.geometry.num_slots
    made = RankScan(
        np.zeros((count, len(CONDITIONS)), np.bool_),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, f"V{ERA_ID_BYTES}"),
        [b""] * count,
        file.life,
    )
    buffers: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
    for _ in range(SCAN_THREADS):
        buffers.put(aligned_memory(min(count, SCAN_HEADERS) * HEADER_STEP))
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        for _ in pool.map(partial(_scan_some, file, made, buffers), range(0, count, SCAN_HEADERS)):
            pass
    return made


def decide(scans: Sequence[RankScan], era: bytes = NO_ERA) -> Recovered:
    """Decide which slot serves each key, from the scans of all ranks. era: as in `recover`."""
    first = scans[0]
    everywhere = np.logical_and.reduce([one.found.all(axis=1) for one in scans])
    for one in scans[1:]:
        everywhere &= one.eras == first.eras
        everywhere &= (one.lives == first.lives) & (one.numbers == first.numbers)
        everywhere &= np.fromiter(map(bytes.__eq__, one.keys, first.keys), np.bool_, len(first.keys))
    counts = first.eras == np.void(era)
    places = np.flatnonzero(everywhere & counts)
    order = places[np.lexsort((places, first.numbers[places], first.lives[places]))].tolist()
    newest = _last_places(first.keys, order)
    slots = np.array(list(newest.values()), np.int64)
    generations = np.stack([first.lives[slots], first.numbers[slots]], axis=1)
    is_newest = np.zeros(len(everywhere), np.bool_)
    is_newest[slots] = True
    told = tuple(_told(one, (everywhere, counts, is_newest)) for one in scans)
    return Recovered(newest, generations.tobytes(), max(one.life for one in scans), told)


def _last_places(keys: Sequence[bytes], order: Sequence[int]) -> dict[bytes, int]:
    """Return key -> its last place in this order, sorted by this order. (A dict alone would keep each key at
    its first position.)"""
    last = dict(zip(map(keys.__getitem__, order), order))
    if len(last) < len(order):
        kept = [place for place in order if last[keys[place]] == place]
        last = dict(zip(map(keys.__getitem__, kept), kept))
    return last


def _told(one: RankScan, across: Sequence[NDArray[np.bool_]]) -> dict[str, int]:
    columns = dict(zip((*CONDITIONS, *ACROSS), (*one.found.T, *across)))
    told: Counter[str] = Counter()
    for row in ROWS:
        holds = [columns[name] == wanted for name, wanted in row.when.items()]
        told[row.name] = int(np.count_nonzero(np.logical_and.reduce(holds)))
    return dict(told)


def _scan_some(file: SlotFile, made: RankScan, buffers: SimpleQueue[NDArray[np.uint8]], first: int) -> None:
    """Read and note up to `SCAN_HEADERS` headers, from slot `first` on."""
    last = min(first + SCAN_HEADERS, file.geometry.num_slots)
    buffer = buffers.get()
    pages = buffer[: (last - first) * HEADER_STEP]
    try:
        made.found[first:last, 0] = _read(file, pages, first)
        _note(file, made, pages, first)
    finally:
        buffers.put(buffer)


def _read(file: SlotFile, pages: NDArray[np.uint8], first: int) -> NDArray[np.bool_]:
    """Read headers into `pages`. Returns a mask of the readable ones: if the long call fails, each header is
    read alone."""
    rows = pages.reshape(-1, HEADER_STEP)
    readable = np.ones(len(rows), np.bool_)
    try:
        file.read(pages, file.geometry.header_at(first))
    except OSError:
        rows[:], readable[:] = 0, False
        for place, row in enumerate(rows):
            with suppress(OSError):
                file.read(row, file.geometry.header_at(first + place))
                readable[place] = True
    return readable


def _note(file: SlotFile, made: RankScan, pages: NDArray[np.uint8], first: int) -> None:
    """Enter these headers into the scan and into the file's table."""
    columns = pages.view(HEADER_COLUMNS)
    here = slice(first, first + len(columns))
    file.table.scanned(first, columns)
    lives, numbers, found = made.lives[here], made.numbers[here], made.found[here]
    lives[:], numbers[:], made.eras[here] = columns["life"], columns["number"], columns["era"]
    whole = whole_headers(pages)
    # An undamaged header is not empty, so only look for zeros in the others, which are few.
    found[:, 1] = whole
    others = np.flatnonzero(~whole)
    found[others, 1] = pages.reshape(-1, HEADER_STEP)[others, :HEADER_BYTES].any(axis=1)
    found[:, 2] = whole
    found[:, 3] = columns["identity"] == np.void(file.digest)
    found[:, 4] = (
        (columns["file"] == np.void(file.file_id))
        & (columns["slot"] == np.arange(here.start, here.stop))
        & (columns["length"] == file.geometry.payload_bytes)
    )
    found[:, 5] = (lives >= 0) & (lives <= file.found_life)
    found[:, 6] = columns["state"] == HeaderState.SEALED
    for places, keys in header_keys(columns, np.flatnonzero(found.all(axis=1))):
        for place, key in zip(places.tolist(), keys):
            made.keys[first + place] = key
