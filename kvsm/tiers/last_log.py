"""Compares the slots of a disk tier with the log of the last process at each start, and reports differences.

The disk's core starts with the keys in its slots, and never with a log. The log of the last process is an
independent record of which key was stored in which slot:

====================  =======================================  ===============================================
in the log            in the slot                              result
====================  =======================================  ===============================================
a key is stored       the same key                             they agree
a key is stored       no valid key                             missing: the block was lost
a key is stored       another key                              changed
a store is in flight  its key, the content before, or nothing  they agree: the process was killed meanwhile
a key was evicted     that key, or nothing                     they agree: an eviction writes nothing to disk
nothing of this life  a key                                    unknown: no log records its store
====================  =======================================  ===============================================

Only the newest segment of the log is folded, from the snapshot at its begin. So the time does not grow with
the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.log.fold import Rebuilt, rebuild
from kvsm.core.log.frames import first_event, segment_paths
from kvsm.errors import KvsmError, LogDamaged, LogError
from kvsm.ids import render_key
from kvsm.states.block import are_indexed, are_readable
from kvsm.tiers.disk import (
    DiskEra,
    FlushPolicy,
    LogNote,
    Recovered,
    SlotGeneration,
    TierDirectory,
)
from kvsm.tiers.warm_restart import MOST_SLOTS

MOST_TOLD = 8
"""Most differences that are reported one by one."""

_FLUSHED = {
    FlushPolicy.NONE: "that process flushed no store, so a power loss may have taken them",
    FlushPolicy.INTERVAL: "that process flushed its stores each second, so a power loss may have taken the "
    "newest of them",
    FlushPolicy.EVERY: "that process flushed each store",
}


class SlotDifference(msgspec.Struct, frozen=True):
    """A slot for which the log names another key than the disk. Keys are in hex digits.

    logged: the key that is stored there by the log; None: no key.
    found: the key on disk; None: no valid key.
    """

    slot: int
    logged: str | None
    found: str | None

    def __str__(self) -> str:
        logged = "none" if self.logged is None else render_key(bytes.fromhex(self.logged))
        found = "none" if self.found is None else render_key(bytes.fromhex(self.found))
        return f"slot {self.slot}: by the log it has key {logged}, and on disk key {found}"


class LastLog(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing the slots of a disk tier with the log of the last process.

    log: directory of that log; None: no log is known.
    why_not: why the slots were not compared; None: they were, or there was nothing to compare.
    flushed: which stores of that process a power loss may have lost, as text.
    slots: number of blocks that are stored by the log.
    missing: number of these blocks that have no valid key on disk.
    changed: number of these blocks that have another key on disk.
    unknown: number of keys on disk whose store the log does not record.
    first: the first differences, at most `MOST_TOLD`.
    """

    log: str | None = None
    why_not: str | None = None
    flushed: str = ""
    slots: int = 0
    missing: int = 0
    changed: int = 0
    unknown: int = 0
    first: tuple[SlotDifference, ...] = ()

    @property
    def differences(self) -> int:
        """Number of slots that differ."""
        return self.missing + self.changed + self.unknown

    def told(self) -> list[str]:
        """Return the lines to log: the counts, and the first differences. Empty if all slots agree."""
        if self.why_not is not None:
            return [f"the slots are not compared with the log of the last process: {self.why_not}"]
        if not self.differences:
            return []
        parts = (
            (self.missing, "missing on disk"),
            (self.changed, "with another key on disk"),
            (self.unknown, "unknown to the log"),
        )
        counts = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        lost = f"; {self.flushed}" if self.missing else ""
        lines = [f"slots differ from the log of the last process, {self.log}: {counts}{lost}"]
        lines += map(str, self.first)
        more = self.differences - len(self.first)
        return [*lines, f"... and {more:,} more slots"] if more else lines


class LoggedBlocks(NamedTuple):
    """The slots at the end of a log.

    ledger: the folded log.
    life: the life of the slot files while the log was written.
    """

    ledger: Ledger
    life: int

    def differences(self, found: Recovered, after: SlotGeneration) -> Iterator[SlotDifference]:
        """Yield the slots on which log and disk differ, in no order.

        found: the recovered blocks.
        after: the generation at which the era of the next process began.
        """
        if self._is_equal(found, after):
            return
        logged = self.stored(after)
        here = {slot: key for key, slot in found.slots.items()}
        for slot, key in logged.items():
            other = here.get(slot)
            if other != key:
                yield _difference(slot, key, other)
        for place, (key, slot) in enumerate(found.slots.items()):
            if slot not in logged and not self._may_hold(slot, key, found.generation(place)):
                yield _difference(slot, self._planned(slot), key)

    def stored(self, after: SlotGeneration) -> dict[int, bytes]:
        """Return slot -> key for the slots in which a key is stored in the current era, by the log."""
        return {slot: self.ledger.key_of[slot] for slot in np.flatnonzero(self.counting(after)).tolist()}

    def counting(self, after: SlotGeneration) -> NDArray[np.bool_]:
        """Return a mask of the slots in which a key is stored in the current era, by the log. Keys from
        before the era are left out here, as the log may lack the reset: the era is on disk first."""
        ledger = self.ledger
        readable = are_readable(ledger.blocks.view)
        if after.life >= self.life:
            begin = after.number if after.life == self.life else np.iinfo(np.int64).max
            readable &= ledger.generation_view > begin
        return readable

    def _is_equal(self, found: Recovered, after: SlotGeneration) -> bool:
        """Whether no slot differs. This is the usual case, so it makes no dict of maybe millions of slots."""
        slots = list(found.slots.values())
        here = np.zeros(len(self.ledger.key_of), np.bool_)
        here[slots] = True
        return np.array_equal(here, self.counting(after)) and list(
            map(self.ledger.key_of.__getitem__, slots)
        ) == list(found.slots)

    def _may_hold(self, slot: int, key: bytes, found: SlotGeneration) -> bool:
        """Whether a slot in which no key is stored by the log may have this key on disk: from a store in
        flight, or from an evicted or replaced block."""
        last = int(self.ledger.generation_view[slot])
        life, number = found
        if life == self.life and number == last:
            return self._planned(slot) in (None, key)
        return number < last if life == self.life else life < self.life and last > 0

    def _planned(self, slot: int) -> bytes | None:
        """Return the key of a store that is in flight at the end of the log; None if there is none."""
        ledger = self.ledger
        return ledger.key_of[slot] if are_indexed(ledger.blocks.view[slot : slot + 1])[0] else None


def _difference(slot: int, logged: bytes | None, found: bytes | None) -> SlotDifference:
    return SlotDifference(
        slot, None if logged is None else logged.hex(), None if found is None else found.hex()
    )


def compare_with_last_log(
    note: LogNote | str, found: Recovered, era: DiskEra, made: Sequence[int], num_slots: int, policy: str
) -> LastLog:
    """Compare the recovered blocks with the log of the last process. Never raises for the content of files
    that the process has left.

    note: the note of the last process, read before `note_log`; or why it cannot be read.
    found: the recovered blocks.
    era: the era with which this process starts.
    made: ranks whose files are new.
    num_slots: number of slots of the tier.
    policy: the disk's eviction policy, whose code the log may name.
    """
    if isinstance(note, str):
        nothing = len(made) == len(found.told)
        return LastLog(why_not=None if nothing else note)
    log = note.log or None
    why_not = _why_not(note, found, era, made)
    if why_not is not None:
        return LastLog(log=log, why_not=why_not)
    logged = _read(note, num_slots, policy)
    if isinstance(logged, str):
        return LastLog(log=log, why_not=logged)
    differing = sorted(logged.differences(found, era.after), key=lambda difference: difference.slot)
    return LastLog(
        log=log,
        flushed=_FLUSHED[FlushPolicy(note.flush)],
        slots=int(np.count_nonzero(logged.counting(era.after))),
        missing=sum(one.found is None for one in differing),
        changed=sum(one.found is not None and one.logged is not None for one in differing),
        unknown=sum(one.logged is None for one in differing),
        first=tuple(differing[:MOST_TOLD]),
    )


def _why_not(note: LogNote, found: Recovered, era: DiskEra, made: Sequence[int]) -> str | None:
    """Return why the log cannot be compared with these slots; None if it can."""
    if made:
        return f"the files of ranks {list(made)} are new"
    if found.life <= note.life:
        return "it is about other files"
    if era.after.life >= found.life:
        return "nothing that it has stored counts (the log kvsm.tiers.disk says why)"
    return None if note.log else "it kept no log"


def _read(note: LogNote, num_slots: int, policy: str) -> LoggedBlocks | str:
    """Return the blocks at the end of a log, or why they are unknown."""
    try:
        if LogReader(note.log).head.run != note.run:
            return f"{note.log} is the log of another run"
        left = _end_of(note.log, policy)
    except (KvsmError, OSError) as error:
        return str(error)
    if left.condition.broken_from is not None:
        return f"{note.log} lacks its last events, because a write failed"
    if left.condition.other_machines:
        return f"{note.log} was written by a kvsm with other machine tables"
    slots = left.ledger.config.host_blocks
    if slots != num_slots:
        return f"{note.log} speaks of {slots:,} slots, and there are {num_slots:,}"
    return LoggedBlocks(left.ledger, note.life)


def _end_of(log: str, policy: str) -> Rebuilt:
    """Return the state at the end of a log. Raises `KvsmError`."""
    *before, newest = [first_event(path) for path in segment_paths(Path(log))]
    try:
        return _since(log, newest, policy)
    except LogDamaged:
        raise
    except LogError:
        if not before:
            raise
    # A power loss may leave a segment without a whole head.
    return _since(log, before[-1], policy)


def _since(log: str, event: int, policy: str) -> Rebuilt:
    # Trust it as this user's own log: it may have many slots, and name a custom policy.
    return rebuild(log, since=event, allow_policies=(policy,), max_slots=MOST_SLOTS)


def note_log(place: TierDirectory, life: int, directory: str | None, flush: str) -> None:
    """Write the note that names the log of this process for the next one. Call it before the first store.
    Raises `OSError` and `LogError`.

    life: the life of the slot files.
    directory: the directory of the log of the disk's core, which is open; None: there is no log.
    flush: when stores are flushed: the value of a `FlushPolicy`.
    """
    run = b"" if directory is None else LogReader(directory).head.run
    log = "" if directory is None else str(Path(directory).absolute())
    LogNote(life, log, run, flush).write(place.log_note)
