"""What the files of all ranks hold when they are opened: which slot serves which key.

Headers are read, and payloads are not. The headers lie together, so a few threads read them in long calls.
Each load checks the checksum of a payload before it uses the first byte. Reading all payloads here would
only find damage earlier, and would take minutes.

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
not on all     sealed here; not on another rank, or with another key, era or generation    no
other era      sealed everywhere, in another era than the one that counts (`era.py`)       no
older          sealed everywhere, and the same key is too, with a newer generation         no
kept           sealed everywhere, and the newest of its key                                yes
=============  ==========================================================================  ======

A key is served by its newest slot alone. If that slot's payload then proves wrong, the key is lost, even if
an older slot holds it: a core stores a key again only after it has dropped the first slot.

Recovery writes nothing to a slot that it drops: its header stays until the slot is used again. So the next
recovery decides the same, unless another rank's file has changed meanwhile; then it may keep less. Slots that
this life stores have newer generations than all dropped ones.
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
"""How many headers a call reads: 8 MiB."""

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
        "other era",
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

    eras: of each slot, the id of the era that its header names.
    keys: of slots for which all conditions hold; empty for others.
    """

    found: NDArray[np.bool_]
    lives: NDArray[np.int64]
    numbers: NDArray[np.int64]
    eras: NDArray[np.void]
    keys: list[bytes] = field(repr=False)
    life: int = 0
    """Of the file, since it is open."""


class Recovered(msgspec.Struct, frozen=True):
    """What the files of all ranks hold.

    slots: key -> its slot, on every rank. Those that were stored first come first.
    generations: for each of them in this order, life and number as int64, packed; see `generation`.
    life: with which every rank goes on: the latest of their lives.
    told: for each rank, how many of its slots are in which row.
    """

    slots: dict[bytes, int]
    generations: bytes
    life: int
    told: tuple[dict[str, int], ...]

    def generation(self, place: int) -> SlotGeneration:
        """Of the slot at this place in `slots`."""
        return SlotGeneration(*np.frombuffer(self.generations, np.int64, 2, 16 * place).tolist())


def recover(files: Sequence[SlotFile], era: bytes = NO_ERA) -> Recovered:
    """Find what these files hold, one of each rank in their order, and let the files know it.

    era: the id of the era that counts (`DiskEra.id`); slots of others do not.

    Raises `ConfigError` if they do not belong together or were used already, and `OSError` if a life cannot
    be written.
    """
    shapes = [(one.geometry.num_slots, one.geometry.rank, one.geometry.ranks, one.digest) for one in files]
    wanted = [(shapes[0][0], rank, len(files), shapes[0][3]) for rank in range(len(files))]
    if shapes != wanted:
        raise ConfigError("the files of a disk tier must be of all ranks, in order, with equal slots")
    recovered = decide([scan(one) for one in files], era)
    for file in files:
        take(file, recovered)
    return recovered


def take(file: SlotFile, recovered: Recovered) -> None:
    """Let a rank's file, which was scanned, go on with what was found on all ranks, before its first store.
    Raises `ConfigError` if it is not, and `OSError`."""
    file.raise_life(recovered.life)
    file.table.found(list(recovered.slots.values()))


def scan(file: SlotFile) -> RankScan:
    """Read all headers of one rank's file, before its first store. What cannot be read is in its row. Raises
    `ConfigError` if the file was used already."""
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
    """Decide which slot serves each key, from the scans of all ranks. era: as for `recover`."""
    first = scans[0]
    everywhere = np.logical_and.reduce([one.found.all(axis=1) for one in scans])
    for one in scans[1:]:
        everywhere &= one.eras == first.eras
        everywhere &= (one.lives == first.lives) & (one.numbers == first.numbers)
        everywhere &= np.fromiter(map(bytes.__eq__, one.keys, first.keys), np.bool_, len(first.keys))
    counts = first.eras == np.void(era)
    places = np.flatnonzero(everywhere & counts)
    order = places[np.lexsort((places, first.numbers[places], first.lives[places]))].tolist()
    newest = dict(zip(map(first.keys.__getitem__, order), order))  # Of equal keys the last one stays.
    slots = np.array(list(newest.values()), np.int64)
    generations = np.stack([first.lives[slots], first.numbers[slots]], axis=1)
    is_newest = np.zeros(len(everywhere), np.bool_)
    is_newest[slots] = True
    told = tuple(_told(one, (everywhere, counts, is_newest)) for one in scans)
    return Recovered(newest, generations.tobytes(), max(one.life for one in scans), told)


def _told(one: RankScan, across: Sequence[NDArray[np.bool_]]) -> dict[str, int]:
    columns = dict(zip((*CONDITIONS, *ACROSS), (*one.found.T, *across)))
    told: Counter[str] = Counter()
    for row in ROWS:
        holds = [columns[name] == wanted for name, wanted in row.when.items()]
        told[row.name] = int(np.count_nonzero(np.logical_and.reduce(holds)))
    return dict(told)


def _scan_some(file: SlotFile, made: RankScan, buffers: SimpleQueue[NDArray[np.uint8]], first: int) -> None:
    """Read the headers from slot `first` on."""
    last = min(first + SCAN_HEADERS, file.geometry.num_slots)
    buffer = buffers.get()
    pages = buffer[: (last - first) * HEADER_STEP]
    try:
        made.found[first:last, 0] = _read(file, pages, first)
        _note(file, made, pages, first)
    finally:
        buffers.put(buffer)


def _read(file: SlotFile, pages: NDArray[np.uint8], first: int) -> NDArray[np.bool_]:
    """Read headers. Returns which of them can be read; a long call that fails is made again for each."""
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
    """Note what these headers say."""
    columns = pages.view(HEADER_COLUMNS)
    here = slice(first, first + len(columns))
    file.table.scanned(first, columns)
    lives, numbers, found = made.lives[here], made.numbers[here], made.found[here]
    lives[:], numbers[:], made.eras[here] = columns["life"], columns["number"], columns["era"]
    whole = whole_headers(pages)
    # A whole header is not empty, and most are whole.
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
