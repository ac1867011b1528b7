"""The disk world: the real files, copies, recovery and era of a disk tier, on a machine that fails.

The actions: stores, loads, resets, a failing disk, a kill, a power loss, a byte that changes on disk, and a
start that may have another dtype, layout or weights. A kill or power loss takes effect a few system calls
before now, independently on each rank. Plain books say what a later process may find:

- a start finds no block of before a reset, of another identity or of other weights: no stale data (S14);
- it finds only blocks that were stored on every rank: publish after commit (S2);
- it finds all blocks that were reported as stored, as far as the flush policy promises it, and a store with a
  failed call is not reported as good: failure is not success (S6);
- a load serves the bytes of its key, or fails if they changed on the disk: correct bytes (S15);
- a slot whose load failed is not loaded again: progress (S9);
- no other call fails: every call is legal (S8).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsm.check.worlds.simulated_disk import SECTOR, DiskFile, SimulatedDisk
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings, world_directory
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, PropertyBroken, TransferFailed
from kvsm.events import Direction, OffloadingEvent
from kvsm.identity import PoolIdentity
from kvsm.ids import pack
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

PAYLOAD = 2 * SECTOR
"""Bytes of a block: two sectors, so that a block can be torn."""
MOST_RANKS, MOST_SLOTS, MOST_KEYS = 4, 8, 16
MOST_MOMENTS = 8
"""The number of recent system calls at which the process may have ended."""

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


class DiskWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a disk world. Raises `ConfigError`.

    ranks: number of ranks, each with its own file.
    slots, keys: number of slots of each file, and of different keys.
    flush: when stores are flushed; not `INTERVAL`, which depends on a clock.
    """

    ranks: int = 2
    slots: int = 2
    keys: int = 3
    flush: FlushPolicy = FlushPolicy.EVERY

    def __post_init__(self) -> None:
        for name, most in {"ranks": MOST_RANKS, "slots": MOST_SLOTS, "keys": MOST_KEYS}.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}")
        if self.flush is FlushPolicy.INTERVAL:
            raise ConfigError("flush is 'interval', which depends on a clock; choose 'none' or 'every'")


def draw_disk_options(random: Random) -> DiskWorldOptions:
    """Draw a small configuration."""
    return DiskWorldOptions(
        ranks=random.choice((1, 2)), flush=random.choice((FlushPolicy.EVERY, FlushPolicy.NONE))
    )


class Meaning(NamedTuple):
    """All that a key's bytes depend on besides the key and the rank: indices into `FACTS` and `WEIGHTS`."""

    identity: int
    weights: int


def content(key: int, meaning: Meaning, rank: int) -> np.ndarray[Any, Any]:
    """Return the bytes that a key has on this rank."""
    return np.random.default_rng((key, *meaning, rank)).integers(0, 256, PAYLOAD, dtype=np.uint8)


def _name(key: int) -> bytes:
    return b"key %d" % key


class DiskMoment(NamedTuple):
    """The state of a rank's disk after one system call.

    file: a copy of the file.
    begun: number of stores that had begun on this rank.
    told: slot -> key and transfer, of stores that were reported as good.
    """

    file: DiskFile
    begun: int
    told: dict[int, tuple[int, int]]


class DiskRank:
    """One rank: its file, and its copy engine and host pool while its process runs."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.on_disk = DiskFile()
        """The file as the disk has it."""
        self.told: dict[int, tuple[int, int]] = {}
        """Slot -> key and transfer, of stores that were reported as good."""
        self.moments: deque[DiskMoment] = deque(maxlen=MOST_MOMENTS)
        """The last moments, at which the process may have ended."""
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
        job = TransferJob(transfer, direction, pack([0]), pack([slot]), (_name(key),), era=self.era)
        self.engine.submit(job)
        self.engine.wait([transfer])
        (result,) = self.engine.poll()
        return result.good

    def has_begun(self, slot: int, key: int, generation: SlotGeneration, until: int) -> bool:
        """Whether this store is among the first `until` stores of this rank, and after the last reset."""
        return (slot, key, generation) in self.stores[self.since : until]

    def note(self) -> None:
        """Note the present moment."""
        self.moments.append(DiskMoment(self.on_disk.copy(), len(self.stores), dict(self.told)))

    def forget(self) -> None:
        """Drop the earlier moments: the process cannot have ended before now."""
        self.moments.clear()
        self.note()


class DiskWorld:
    """A `World`; worlds with the same options and the same actions are equal."""

    def __init__(self, options: DiskWorldOptions) -> None:
        self.options = options
        place = world_directory()
        self._era = Path(place.name) / "era"
        self.ranks = [DiskRank(number, Path(place.name) / f"rank{number}") for number in range(options.ranks)]
        self._disk = SimulatedDisk(partial(_note, self.ranks))
        weakref.finalize(self, _end, self.ranks, place)
        self.lives = False
        self.meaning = Meaning(0, 0)
        self.held: dict[int, int] = {}
        """Slot -> key, of all blocks that a load must return."""
        self._ended: list[DiskMoment] = []
        """Per rank, the moment at which the last process ended."""
        self._keeps_flushed_only = False
        self._transfers = 0
        self._disk_failed = False
        self._reached: set[str] = set()
        with self._recorded():
            self._do_start(0, 0)

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """Empty: this world logs no events."""
        return ()

    # What may happen.

    def _numbers(self, name: str) -> tuple[int, ...]:
        """Return the exclusive upper bound of each number of an action."""
        slots, keys, ranks = self.options.slots, self.options.keys, self.options.ranks
        return {
            "store": (slots, keys),
            "load": (slots,),
            "fail": (slots, keys, ranks, 3),
            "reset": (len(WEIGHTS),),
            "rot": (slots, ranks),
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
        bounds = self._numbers(str(name))
        if len(numbers) != len(bounds) or not all(0 <= int(n) < most for n, most in zip(numbers, bounds)):
            return False
        with self._recorded():
            return bool(getattr(self, f"_do_{name}")(*numbers))

    def _do_store(self, slot: int, key: int) -> bool:
        """Store a key on all ranks. The key leaves its other slot, because a core keeps one slot per key."""
        self._disk_failed = False
        if not all(self._store(rank, slot, key) for rank in self._begin_store(slot, key)):
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
            failed = self._disk.failed
            if rank.number == failing:
                self._disk.arm("any", call, call)
            good.append(self._store(rank, slot, key))
            self._disk.forget_faults()
            if good[-1] and self._disk.failed > failed:
                message = f"rank {failing}: a store whose write failed was reported as good"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        if all(good):
            self._note_good_store(slot, key)
        return True

    def _begin_store(self, slot: int, key: int) -> list[DiskRank]:
        self._transfers += 1
        for rank in self.ranks:
            for held in [held for held, of_key in self.held.items() if held == slot or of_key == key]:
                rank.told.pop(held, None)
        self.held = {held: of_key for held, of_key in self.held.items() if held != slot and of_key != key}
        return self.ranks

    def _store(self, rank: DiskRank, slot: int, key: int) -> bool:
        rank.host[0] = content(key, self.meaning, rank.number)
        rank.stores.append((slot, key, SlotGeneration(rank.file.life, self._transfers)))
        rank.rotten.discard(slot)
        return rank.copy(self._transfers, Direction.STORE, slot, key)

    def _note_good_store(self, slot: int, key: int) -> None:
        self.held[slot] = key
        for rank in self.ranks:
            rank.told[slot] = key, self._transfers
            rank.note()

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

    def _check_given_up(self, rank: DiskRank, slot: int) -> None:
        """Check that a slot whose load failed is invalid now. Otherwise it would be loaded again forever."""
        try:
            rank.file.table.proof(slot)
        except TransferFailed:
            return
        message = (
            f"rank {rank.number}: slot {slot} failed to load, but is still valid and may be loaded again"
        )
        raise PropertyBroken(Property.PROGRESS, message)

    def _served(self, rank: DiskRank, slot: int, key: int) -> bool:
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
            rank.since, rank.told = len(rank.stores), {}
            rank.forget()

    def _do_rot(self, slot: int, number: int) -> bool:
        """A byte of a stored block changes on one rank's disk."""
        rank = self.ranks[number]
        if slot not in self.held or slot in rank.rotten:
            return False
        data = bytearray(rank.path.read_bytes())
        data[rank.file.geometry.payload_at(slot)] ^= 1
        self._disk.put(rank.path, bytes(data))
        rank.rotten.add(slot)
        for other in self.ranks:
            other.told.pop(slot, None)
            other.forget()
        return True

    # How a process ends, and the next one begins.

    def _do_stop(self) -> bool:
        return self._end_process([rank.moments[-1] for rank in self.ranks], None)

    def _do_crash(self, power: int, *back: int) -> bool:
        """Kill the process (power is 0), or cut the power, at `back` system calls before now on each rank."""
        moments = [
            rank.moments[-1 - min(calls, len(rank.moments) - 1)] for rank, calls in zip(self.ranks, back)
        ]
        return self._end_process(moments, Random(power) if power else None)

    def _end_process(self, moments: list[DiskMoment], power: Random | None) -> bool:
        self._ended, self._keeps_flushed_only = moments, power is not None
        for rank, moment in zip(self.ranks, moments):
            rank.engine.close()
            left = moment.file.after_kill() if power is None else moment.file.after_power_loss(power)
            self._disk.put(rank.path, left)
            rank.forget()
        self.held, self.lives = {}, False
        return True

    def _do_start(self, identity: int, weights: int) -> bool:
        """Start the next process. It must find all promised blocks, and may find other stored ones.

        identity, weights: by how many versions they differ from the last process; 0: the same.
        """
        before = self.meaning
        meaning = Meaning(
            (before.identity + identity) % len(FACTS), (before.weights + weights) % len(WEIGHTS)
        )
        self.lives, self._transfers, self._disk_failed = True, 0, False
        options = self.options
        for rank in self.ranks:
            geometry = DiskGeometry(PAYLOAD, options.slots, rank.number, options.ranks)
            rank.open(geometry, PoolIdentity.of(FACTS[meaning.identity]), options.flush)
            self._find_file(rank)
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
            rank.told = {slot: (key, 0) for slot, key in self.held.items()}
            rank.forget()
        return True

    def _find_file(self, rank: DiskRank) -> None:
        """Note the file of a rank that has opened it. A new file has no damaged slots."""
        file = self._disk.file(rank.path)
        assert file is not None
        if file is not rank.on_disk:
            rank.on_disk = file
            rank.rotten.clear()

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
        promised = self._promised()
        self._reached.add(
            f"a start finds {len(found.slots)} blocks, {len(promised)} of them promised, "
            f"after {'a power loss' if self._keeps_flushed_only else 'a kill'}"
        )
        lost = sorted(promised - set(self.held.values()))
        if lost:
            message = f"keys {lost} were reported as stored, but the next process lacks them"
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)

    def _promised(self) -> set[int]:
        """The keys that the next process must find."""
        if not self._ended or (self._keeps_flushed_only and self.options.flush is FlushPolicy.NONE):
            return set()
        first, *others = (moment.told for moment in self._ended)
        return {told[0] for slot, told in first.items() if all(other.get(slot) == told for other in others)}

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record all calls that write or flush a rank's file. The tier's warnings are dropped."""
        with suppressed_warnings(), self._disk.attached():
            yield

    # What must hold.

    def check(self) -> None:
        """Check that every held block loads as it was stored."""
        if self.lives:
            with self._recorded():
                for slot in list(self.held):
                    self._do_load(slot)

    def wind_down(self) -> Action | None:
        """Return a start if no process runs; otherwise the world is at rest."""
        return None if self.lives else ("start", 0, 0)

    def reached(self) -> list[str]:
        """What the starts of this world have found, for the corpus."""
        return sorted(self._reached)

    def describe(self) -> dict[str, str]:
        return {f"disk slot {slot}": f"key {key}" for slot, key in self.held.items()}

    def fingerprint(self) -> bytes:
        return repr((self.lives, self.meaning, sorted(self.held.items()))).encode()


def _note(ranks: Sequence[DiskRank], file: DiskFile) -> None:
    """Note a call on the file of one of these ranks."""
    for rank in ranks:
        if rank.on_disk is file:
            rank.note()


def _end(ranks: list[DiskRank], place: TemporaryDirectory[str]) -> None:
    for rank in ranks:
        rank.engine.close()
    place.cleanup()
