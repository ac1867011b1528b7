"""The disk world: the real files, copies, recovery and era of a disk tier, on a machine that fails.

The actions: stores, loads, resets, a failing disk, a kill, a power loss, a byte that changes on disk, and a
start that may have another dtype, layout or weights. A kill or power loss takes effect a few system calls
before now, independently on each rank. Plain books say what a later process may find.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from disk_rig import IN_MEMORY, job

from kvsm.check.worlds.world import Action
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction, OffloadingEvent
from kvsm.identity import PoolIdentity
from kvsm.properties import Property
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskEra,
    DiskGeometry,
    FlushPolicy,
    Recovered,
    SlotFile,
    SlotGeneration,
    era_at_start,
    recover,
)
from museum.disk_history import SECTOR, DiskHistory, Moment

SLOTS, KEYS = 2, 3
PAYLOAD = 2 * SECTOR
"""Bytes of a block: two sectors, so that a block can be torn."""

FACTS = tuple(
    {"model": "m", "dtype": dtype, "layout": layout}
    for dtype, layout in (("bfloat16", "NHD"), ("float16", "NHD"), ("bfloat16", "HND"))
)
"""The facts that make up the pool identities which a process may have."""
WEIGHTS = ("v1", "v2")

_KINDS = {
    "store": 8,
    "load": 3,
    "fail": 1,
    "reset": 1,
    "rot": 1,
    "crash": 1,
    "stop": 1,
    "start": 1,
}
"""Action -> its weight in the draw."""


class Meaning(NamedTuple):
    """All that a key's bytes depend on besides the key and the rank: indices into `FACTS` and `WEIGHTS`."""

    identity: int
    weights: int


def content(key: int, meaning: Meaning, rank: int) -> np.ndarray[Any, Any]:
    """Return the bytes that a key has on this rank."""
    return np.random.default_rng((key, *meaning, rank)).integers(0, 256, PAYLOAD, dtype=np.uint8)


class Rank:
    """One rank: its file, and its copy engine and host pool while its process runs."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.history: DiskHistory | None = None
        self.era = b""
        """The id of the current era, which each store carries."""
        self.stores: list[tuple[int, int, SlotGeneration]] = []
        """All stores that have begun: slot, key, generation."""
        self.since = 0
        """Index of the first valid store: earlier ones precede a reset or have another meaning."""
        self.rotten: set[int] = set()
        """Slots with a byte that changed on disk."""

    def open(self, geometry: DiskGeometry, identity: PoolIdentity, flush: FlushPolicy) -> None:
        self.file = SlotFile(self.path, geometry, identity)
        self.host = np.zeros((1, PAYLOAD), np.uint8)
        self.engine = DiskCopyEngine(self.host, self.file, flush, threads=1)

    def copy(self, transfer: int, direction: Direction, slot: int, key: int) -> bool:
        """Copy between the host block and a slot. Returns whether the copy succeeded."""
        self.engine.submit(job(transfer, direction, [0], [slot], [key], self.era))
        self.engine.wait([transfer])
        (result,) = self.engine.poll()
        return result.good

    def has_begun(self, slot: int, key: int, generation: SlotGeneration, until: int) -> bool:
        """Whether this store is among the first `until` stores of this rank, and after the last reset."""
        return (slot, key, generation) in self.stores[self.since : until]


class _FailingCall:
    """Makes one of the next system calls fail: number `number` from now, counted from 0; negative: none."""

    def __init__(self, number: int = -1) -> None:
        self.left = number

    def next(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.EIO, "Input/output error")


class DiskWorld:
    """A `World`; worlds with the same options and the same actions are equal.

    ranks: number of ranks, each with its own file.
    flush: when stores are flushed; not `INTERVAL`, which depends on a clock.
    """

    def __init__(self, ranks: int = 2, flush: FlushPolicy = FlushPolicy.EVERY) -> None:
        self.flush = flush
        place = TemporaryDirectory(prefix="kvsm-museum-", dir=IN_MEMORY)
        self._era = Path(place.name) / "era"
        self.ranks = [Rank(number, Path(place.name) / f"rank{number}") for number in range(ranks)]
        weakref.finalize(self, _end, self.ranks, place)
        self.lives = False
        self.meaning = Meaning(0, 0)
        self.held: dict[int, int] = {}
        """Slot -> key, of all blocks that a load must return."""
        self._ended: list[Moment] = []
        """Per rank, the moment at which the last process ended."""
        self._keeps_flushed_only = False
        self._transfers = 0
        self._disk_failed = False
        self._do_start(0, 0)

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """Empty: this world logs no events."""
        return ()

    # What may happen.

    def _numbers(self, name: str) -> tuple[int, ...]:
        """Return the exclusive upper bound of each number of an action."""
        ranks = len(self.ranks)
        return {
            "store": (SLOTS, KEYS),
            "load": (SLOTS,),
            "fail": (SLOTS, KEYS, ranks, 3),
            "reset": (len(WEIGHTS),),
            "rot": (SLOTS, ranks),
            "crash": (3, *(6,) * ranks),
            "stop": (),
            "start": (len(FACTS), len(WEIGHTS)),
        }[name]

    def draw(self, random: Random) -> Action:
        """Draw an action by weight. Most starts keep the identity and the weights of the last process."""
        if not self.lives:
            is_other = random.random() < 0.3
            return ("start", *(random.randrange(bound) * is_other for bound in self._numbers("start")))
        kinds = [name for name in _KINDS if name != "start"]
        (name,) = random.choices(kinds, [_KINDS[kind] for kind in kinds])
        return (name, *map(random.randrange, self._numbers(name)))

    def actions(self) -> list[Action]:
        """Return the simplest action of each kind that may happen now."""
        names = [name for name in _KINDS if (name == "start") != self.lives]
        return [(name, *(0 for _ in self._numbers(name))) for name in names]

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if name not in _KINDS or (name == "start") == self.lives:
            return False
        return bool(getattr(self, f"_do_{name}")(*numbers))

    def _do_store(self, slot: int, key: int) -> bool:
        """Store a key on all ranks. The key leaves its other slot, because a core keeps one slot per key."""
        self._disk_failed = False
        if not all(self._store(rank, slot, key, _FailingCall()) for rank in self._begin_store(slot, key)):
            raise PropertyBroken(Property.LEGAL_CALLS, f"a store of slot {slot} failed on a disk that works")
        self._note_good_store(slot, key)
        return True

    def _do_fail(self, slot: int, key: int, failing: int, call: int) -> bool:
        """Store a key while one system call of rank `failing` fails.

        Never twice in a row: after too many failures in a row, the tier stops using the disk.
        """
        if self._disk_failed:
            return False
        self._disk_failed = True
        good = []
        for rank in self._begin_store(slot, key):
            fails = _FailingCall(call if rank.number == failing else -1)
            good.append(self._store(rank, slot, key, fails))
            if good[-1] and call >= 0 and rank.number == failing and fails.left < 0:
                message = f"rank {failing}: a store whose write failed was reported as good"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        if all(good):
            self._note_good_store(slot, key)
        return True

    def _begin_store(self, slot: int, key: int) -> list[Rank]:
        self._transfers += 1
        for rank in self.ranks:
            assert rank.history is not None
            for held in [held for held, of_key in self.held.items() if held == slot or of_key == key]:
                rank.history.told.pop(held, None)
        self.held = {held: of_key for held, of_key in self.held.items() if held != slot and of_key != key}
        return self.ranks

    def _store(self, rank: Rank, slot: int, key: int, fails: _FailingCall) -> bool:
        assert rank.history is not None
        rank.host[0] = content(key, self.meaning, rank.number)
        rank.stores.append((slot, key, SlotGeneration(rank.file.life, self._transfers)))
        rank.history.begun = len(rank.stores)
        rank.rotten.discard(slot)
        with self._recorded(fails):
            return rank.copy(self._transfers, Direction.STORE, slot, key)

    def _note_good_store(self, slot: int, key: int) -> None:
        self.held[slot] = key
        for rank in self.ranks:
            assert rank.history is not None
            rank.history.told[slot] = key, self._transfers
            rank.history.note()

    def _do_load(self, slot: int) -> bool:
        key = self.held.get(slot)
        if key is None:
            return False
        for rank in self.ranks:
            served = self._served(rank, slot, key)
            if served == (slot in rank.rotten):
                message = f"rank {rank.number}: slot {slot} was {'not ' * (not served)}served"
                raise PropertyBroken(Property.CORRECT_BYTES, message)
            if not served:
                del self.held[slot]
                self._check_given_up(rank, slot)
                break
        return True

    def _check_given_up(self, rank: Rank, slot: int) -> None:
        """Check that a slot whose load failed is invalid now. Otherwise it would be loaded again forever."""
        try:
            rank.file.table.proof(slot)
        except TransferFailed:
            return
        message = (
            f"rank {rank.number}: slot {slot} failed to load, but is still valid and may be loaded again"
        )
        raise PropertyBroken(Property.PROGRESS, message)

    def _served(self, rank: Rank, slot: int, key: int) -> bool:
        """Load a slot, and check the loaded bytes. Returns whether the load succeeded."""
        self._transfers += 1
        rank.host[0] = 0
        if not rank.copy(self._transfers, Direction.LOAD, slot, key):
            return False
        if not np.array_equal(rank.host[0], content(key, self.meaning, rank.number)):
            others = [Meaning(i, w) for i in range(len(FACTS)) for w in range(len(WEIGHTS))]
            stale = any(np.array_equal(rank.host[0], content(key, other, rank.number)) for other in others)
            broken = Property.NO_STALE_DATA if stale else Property.CORRECT_BYTES
            raise PropertyBroken(broken, f"rank {rank.number}: slot {slot} served other bytes than its key's")
        return True

    def _do_reset(self, weights: int) -> bool:
        """Reset the caches, perhaps for other weights. The new era is written before the reset returns."""
        self.meaning = self.meaning._replace(weights=weights)
        last = SlotGeneration(self.ranks[0].file.life, self._transfers)
        era = DiskEra(WEIGHTS[weights], last)
        era.write(self._era)
        self._give_up_all()
        for rank in self.ranks:
            rank.era = era.id
        return True

    def _give_up_all(self) -> None:
        self.held = {}
        for rank in self.ranks:
            assert rank.history is not None
            rank.since, rank.history.told = len(rank.stores), {}
            rank.history.forget()

    def _do_rot(self, slot: int, number: int) -> bool:
        """A byte of a stored block changes on one rank's disk."""
        rank = self.ranks[number]
        if slot not in self.held or slot in rank.rotten:
            return False
        data = bytearray(rank.path.read_bytes())
        data[rank.file.geometry.payload_at(slot)] ^= 1
        self._put(rank, bytes(data))
        rank.rotten.add(slot)
        for other in self.ranks:
            assert other.history is not None
            other.history.told.pop(slot, None)
            other.history.forget()
        return True

    # How a process ends, and the next one begins.

    def _do_stop(self) -> bool:
        return self._end_process([rank.history.moments[-1] for rank in self.ranks if rank.history], None)

    def _do_crash(self, power: int, *back: int) -> bool:
        """Kill the process (power is 0), or cut the power, at `back` system calls before now on each rank."""
        moments = []
        for rank, calls in zip(self.ranks, back):
            assert rank.history is not None
            moments.append(rank.history.moments[-1 - min(calls, len(rank.history.moments) - 1)])
        return self._end_process(moments, Random(power) if power else None)

    def _end_process(self, moments: list[Moment], power: Random | None) -> bool:
        self._ended, self._keeps_flushed_only = moments, power is not None
        for rank, moment in zip(self.ranks, moments):
            assert rank.history is not None
            rank.engine.close()
            left = moment.after_kill() if power is None else moment.after_power_loss(power)
            self._put(rank, left)
        self.held, self.lives = {}, False
        return True

    def _put(self, rank: Rank, data: bytes) -> None:
        """Give the file this content."""
        assert rank.history is not None
        with rank.path.open("r+b") as file:
            file.write(data)
        rank.history.replace(data)

    def _do_start(self, identity: int, weights: int) -> bool:
        """Start the next process. It must find all promised blocks, and may find other stored ones.

        identity, weights: by how many versions they differ from the last process; 0: the same.
        """
        before = self.meaning
        meaning = Meaning(
            (before.identity + identity) % len(FACTS), (before.weights + weights) % len(WEIGHTS)
        )
        self.lives, self._transfers, self._disk_failed = True, 0, False
        ranks = len(self.ranks)
        with self._recorded(_FailingCall()):
            for rank in self.ranks:
                geometry = DiskGeometry(PAYLOAD, SLOTS, rank.number, ranks)
                rank.open(geometry, PoolIdentity.of(FACTS[meaning.identity]), self.flush)
            life = max(rank.file.life for rank in self.ranks)
            era = era_at_start(self._era, WEIGHTS[meaning.weights], life).id
            found = recover([rank.file for rank in self.ranks], era)
        for rank in self.ranks:
            rank.era = era
        if meaning != self.meaning:
            self.meaning = meaning
            self._give_up_all()
            self._ended = [moment._replace(told={}) for moment in self._ended]
        self._check_found(found)
        for rank in self.ranks:
            assert rank.history is not None
            rank.history.told = {slot: (key, 0) for slot, key in self.held.items()}
            rank.history.forget()
        return True

    def _check_found(self, found: Recovered) -> None:
        """Check that each key found was stored on all ranks, and loads the right bytes."""
        for key, slot in found.slots.items():
            number = int(key.split()[1])
            untils = [moment.begun for moment in self._ended]
            begun = [
                rank.has_begun(slot, number, rank.file.table.proof(slot).generation, until)
                for rank, until in zip(self.ranks, untils)
            ]
            if not any(begun):
                message = f"key {number} is found in slot {slot}, but a reset or another meaning came since"
                raise PropertyBroken(Property.NO_STALE_DATA, message)
            if not all(begun):
                message = f"key {number} is found in slot {slot}, but was not stored there on all ranks"
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)
            if all(self._served(rank, slot, number) for rank in self.ranks):
                self.held[slot] = number
        lost = sorted(self._promised() - set(self.held.values()))
        if lost:
            message = f"keys {lost} were reported as stored, but the next process lacks them"
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)

    def _promised(self) -> set[int]:
        """The keys that the next process must find."""
        if not self._ended or (self._keeps_flushed_only and self.flush is FlushPolicy.NONE):
            return set()
        first, *others = (moment.told for moment in self._ended)
        return {told[0] for slot, told in first.items() if all(other.get(slot) == told for other in others)}

    @contextmanager
    def _recorded(self, fails: _FailingCall) -> Iterator[None]:
        """Record all system calls that write or flush a rank's file. The tier's log messages are silenced."""
        pwritev, fdatasync = os.pwritev, os.fdatasync

        def write(descriptor: int, buffers: list[Any], offset: int) -> int:
            fails.next()
            history = self._history(descriptor)
            done = pwritev(descriptor, buffers, offset)
            history.write(b"".join(bytes(buffer) for buffer in buffers)[:done], offset)
            return done

        def flush(descriptor: int) -> None:
            fails.next()
            history = self._history(descriptor)
            fdatasync(descriptor)
            history.flush()

        quiet = patch.object(logging.getLogger("kvsm.tiers.disk"), "disabled", True)
        with quiet, patch.object(os, "pwritev", write), patch.object(os, "fdatasync", flush):
            yield

    def _history(self, descriptor: int) -> DiskHistory:
        """Return the history of an open file; begin a new one if the rank has another file now."""
        path, status = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor)
        (rank,) = (candidate for candidate in self.ranks if candidate.path == path)
        if rank.history is None or rank.history.inode != status.st_ino:
            rank.history = DiskHistory(status.st_ino, path.read_bytes())
            rank.rotten.clear()
        rank.history.grow(status.st_size)  # Room may be allocated without a write.
        return rank.history

    # What must hold.

    def check(self) -> None:
        """Check that every held block loads as it was stored."""
        if self.lives:
            for slot in list(self.held):
                self._do_load(slot)

    def wind_down(self) -> Action | None:
        """Return a start if no process runs; otherwise the world is at rest."""
        return None if self.lives else ("start", 0, 0)

    def describe(self) -> dict[str, str]:
        return {f"disk slot {slot}": f"key {key}" for slot, key in self.held.items()}

    def fingerprint(self) -> bytes:
        return repr((self.lives, self.meaning, sorted(self.held.items()))).encode()


def drawn(random: Random) -> DiskWorld:
    """Return a world with a drawn configuration."""
    return DiskWorld(random.choice((1, 2)), random.choice((FlushPolicy.EVERY, FlushPolicy.NONE)))


def _end(ranks: list[Rank], place: TemporaryDirectory[str]) -> None:
    for rank in ranks:
        rank.engine.close()
    place.cleanup()
