"""What the slots of a disk tier say, beside what the last process has logged of them.

The disk's core begins with what its slots say, and never with a log. The log of the last process is a second
witness: it knows which key was stored in which slot. The two are compared at each start, and what differs is
told:

====================  =======================================  ===============================================
in the log            in the slot                              then
====================  =======================================  ===============================================
a key is stored       the same key                             they agree
a key is stored       nothing that counts                      missing: the block was lost
a key is stored       another key                              changed
a store is under way  its key, what was there before, nothing  they agree: the process was killed meanwhile
a key was given up    that key, or nothing                     they agree: an eviction writes nothing to disk
nothing of this life  a key                                    unknown: nobody has logged that it was stored
====================  =======================================  ===============================================

Only the newest segment of the log is folded, from the snapshot in its head on. So the time does not grow with
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
"""Differences that are told one by one."""

_FLUSHED = {
    FlushPolicy.NONE: "that process flushed no store, so a power loss may have taken them",
    FlushPolicy.INTERVAL: "that process flushed its stores each second, so a power loss may have taken the "
    "newest of them",
    FlushPolicy.EVERY: "that process flushed each store",
}


class SlotDifference(msgspec.Struct, frozen=True):
    """A slot for which the log names another key than the disk. Keys are in hex digits.

    logged: the key that the log says is stored there; None: it knows of none.
    found: the key that is found there; None: none.
    """

    slot: int
    logged: str | None
    found: str | None

    def __str__(self) -> str:
        logged = "none" if self.logged is None else render_key(bytes.fromhex(self.logged))
        found = "none" if self.found is None else render_key(bytes.fromhex(self.found))
        return f"slot {self.slot}: by the log it has key {logged}, and on disk key {found}"


class LastLog(msgspec.Struct, frozen=True, kw_only=True):
    """How the slots of a disk tier agree with the log of the last process.

    log: directory of that log; None: no log is known.
    why_not: why nothing was compared; None: it was, or there was nothing to compare.
    flushed: which stores of that process a power loss may have taken.
    slots: how many blocks the log says are stored.
    missing: how many of them have no key on disk that counts.
    changed: how many of them have another key on disk.
    unknown: how many keys are on disk that the log knows nothing of.
    first: the first differences.
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
        """How many slots differ."""
        return self.missing + self.changed + self.unknown

    def told(self) -> list[str]:
        """What a person must know, a line each. Nothing if all slots agree."""
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
    """What a log says of the slots at its end.

    ledger: its state. life: of the files, while it was written.
    """

    ledger: Ledger
    life: int

    def differences(self, found: Recovered, after: SlotGeneration) -> Iterator[SlotDifference]:
        """Where the slots say something else, in no order.

        found: what the next process finds. after: as in its era.
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
        """Slot -> key that is stored in it, as far as the era counts it."""
        return {slot: self.ledger.key_of[slot] for slot in np.flatnonzero(self.counting(after)).tolist()}

    def counting(self, after: SlotGeneration) -> NDArray[np.bool_]:
        """In which slots a key is stored, as far as the era counts it. The log may lack the reset itself: the
        era is on disk first."""
        ledger = self.ledger
        readable = are_readable(ledger.blocks.view)
        if after.life >= self.life:
            begin = after.number if after.life == self.life else np.iinfo(np.int64).max
            readable &= ledger.generation_view > begin
        return readable

    def _is_equal(self, found: Recovered, after: SlotGeneration) -> bool:
        """Whether nothing differs, as mostly. There may be millions of slots, so this makes no dict."""
        slots = list(found.slots.values())
        here = np.zeros(len(self.ledger.key_of), np.bool_)
        here[slots] = True
        return np.array_equal(here, self.counting(after)) and list(
            map(self.ledger.key_of.__getitem__, slots)
        ) == list(found.slots)

    def _may_hold(self, slot: int, key: bytes, found: SlotGeneration) -> bool:
        """Whether a slot in which no key is stored may have this key on disk, by its log."""
        last = int(self.ledger.generation_view[slot])
        life, number = found
        if life == self.life and number == last:
            return self._planned(slot) in (None, key)
        return number < last if life == self.life else life < self.life and last > 0

    def _planned(self, slot: int) -> bytes | None:
        """The key of a store that the log has begun and not ended."""
        ledger = self.ledger
        return ledger.key_of[slot] if are_indexed(ledger.blocks.view[slot : slot + 1])[0] else None


def _difference(slot: int, logged: bytes | None, found: bytes | None) -> SlotDifference:
    return SlotDifference(
        slot, None if logged is None else logged.hex(), None if found is None else found.hex()
    )


def compare_with_last_log(
    note: LogNote | str, found: Recovered, era: DiskEra, made: Sequence[int], num_slots: int, policy: str
) -> LastLog:
    """Compare what was found at this start with the log of the last process. Never raises for what that
    process has left.

    note: which log that is, or why nobody knows; as it was read before `note_log`.
    era: with which this process starts.
    made: ranks whose files are new.
    num_slots: of the tier. policy: the disk's eviction policy, whose code the log may name.
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
    differing = sorted(logged.differences(found, era.after), key=lambda one: one.slot)
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
    """Why a log says nothing of these slots; None if it does."""
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
    """The state at the end. Raises `KvsmError`."""
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
    # It is this user's own log: many slots, or an own policy, are no attack.
    return rebuild(log, since=event, allow_policies=(policy,), max_slots=MOST_SLOTS)


def note_log(place: TierDirectory, life: int, directory: str | None, flush: str) -> None:
    """Tell the next process where this one logs what it stores. Before its first store.

    life: of the files. directory: of the log of the disk's core, which is open; None: it is not kept.
    flush: when stores are flushed, a `FlushPolicy`.

    Raises `OSError` and `LogError`.
    """
    run = b"" if directory is None else LogReader(directory).head.run
    log = "" if directory is None else str(Path(directory).absolute())
    LogNote(life, log, run, flush).write(place.log_note)
