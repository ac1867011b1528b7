"""The world of eras: engines of two tiers, one after another, on kept host pools and real files.

Each process has the real cores, `DiskTier`, log of the host, files of slots, copies, recovery and `OpenEra`.
It stores prompts and asks for them, copies to the disk and back on each rank by itself, and resets its
caches, perhaps for other weights. It ends well, or it is killed: at rest, with copies under way, in a reset,
or while it opens its files. The next one may have other weights, or a host pool that was made again.

The bytes of a block are those of its key, its rank and its *epoch*. An epoch begins with each reset, and with
other weights. Watched:

- what can be read on the host, and what a start finds on the disk, holds bytes of an epoch that counts: no
  stale data (S14), correct bytes (S15);
- after a reset, done or failed, nothing from before can be found: no stale data (S14);
- a reset whose era could not be written is not answered as done: failure is not success (S6);
- what was stored on the disk is found by the next process; and what the host stored is on the disk at rest,
  unless a copy failed or there was no room: no doubled or lost store (S13);
- both ledgers agree with each other, and with all that `check_ledger` asks: conservation (S1) and more.

A power loss and a damaged disk are in `disk_world.py`; orders of copies in `kvsm.check.worlds.two_tiers`.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from disk_rig import IN_MEMORY

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.check.worlds.tier_requests import TierRequests
from kvsm.check.worlds.world import Action
from kvsm.core.ledger import readable_keys
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import listed
from kvsm.properties import Property
from kvsm.tiers import DiskTier, WritePolicy, adopt_found, disagreements, disk_config, host_config
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskGeometry,
    FlushPolicy,
    OpenEra,
    Recovered,
    SlotFile,
    TierDirectory,
    decide,
    era_at_start,
    scan,
    take,
)
from kvsm.tiers.warm_restart import start
from museum.started_world import leave_log

PROMPTS = ((b"a",), (b"b",), (b"a", b"c"))
"""What is stored and asked for, as keys in prefix order."""
WEIGHTS = ("v1", "v2")
PAYLOAD, DEVICE_BLOCKS, PLACES = 512, 2, 2
_IDENTITY = PoolIdentity.of({"model": "small"})
_LIKELY = ("store", "store", "ask", "plan", "plan", "disk", "disk", "disk", "disk")
_SELDOM = ("reset", "reset", "end")

WELL, ERA_FAILS, KILLED_IN_RESET = range(3)
"""How a reset ends: done; the disk is full when the era is written; the process is killed before that."""


class EraOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How large a world is. writes: when blocks go to the disk, a `WritePolicy`."""

    ranks: int = 2
    host_slots: int = 2
    disk_slots: int = 2
    writes: str = WritePolicy.THROUGH.value


class Kept(NamedTuple):
    """What a tier keeps for the next process. weights: which have computed it. epochs: of its bytes."""

    weights: str
    epochs: frozenset[int]


@lru_cache(None)
def content(key: bytes, epoch: int, rank: int) -> bytes:
    """The bytes of a block."""
    return (b"%s %d %d " % (key, epoch, rank)).ljust(PAYLOAD, b"~")


class EraRank:
    """One rank. host: its pool, which outlives the process. path: of its slots. file, engine: while it
    lives; the engine is made for its first copy."""

    def __init__(self, number: int, path: Path, geometry: DiskGeometry, host_slots: int) -> None:
        self.number, self.path, self.geometry = number, path, geometry
        self.host = np.zeros((host_slots, PAYLOAD), np.uint8)
        self.file: SlotFile | None = None
        self.engine: DiskCopyEngine | None = None

    def open(self) -> SlotFile:
        self.file = SlotFile(self.path, self.geometry, _IDENTITY)
        return self.file

    def copy(self, job: TransferJob) -> bool:
        """Copy between the host pool and the disk. Returns whether it was good."""
        if self.engine is None:
            assert self.file is not None
            self.engine = DiskCopyEngine(self.host, self.file, FlushPolicy.NONE, threads=1)
        self.engine.submit(job)
        self.engine.wait([job.transfer])
        (result,) = self.engine.poll()
        return result.good

    def close(self) -> None:
        """As a process that ends: nothing more is written."""
        for one in (self.engine, self.file):
            if one is not None:
                one.close()
        self.engine = self.file = None

    def payload(self, slot: int) -> bytes:
        """What a slot on disk holds."""
        begin = self.geometry.payload_at(slot)
        return self.path.read_bytes()[begin : begin + PAYLOAD]


class DiskCopy(msgspec.Struct):
    """A copy between host and disk that has left. waits: ranks that have not carried it out."""

    job: TransferJob
    waits: list[int]


class EraWorld:
    """A `World`. Two that were made with the same options, and saw the same actions, are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: each process has a log of its own."""
    check_every = 20

    def __init__(self, options: EraOptions) -> None:
        self.options = options
        place = TemporaryDirectory(prefix="kvsm-museum-", dir=IN_MEMORY)
        self._log = Path(place.name) / "log"
        self._files = TierDirectory(Path(place.name) / "disk", "engine")
        self._files.make()
        self.ranks = [
            EraRank(
                number,
                self._files.slots(number),
                DiskGeometry(PAYLOAD, options.disk_slots, number, options.ranks),
                options.host_slots,
            )
            for number in range(options.ranks)
        ]
        weakref.finalize(self, _end, self.ranks, place)
        self.lives = False
        self._pool, self._marks = 1, memory_marks(options.ranks)
        self.weights, self.epoch, self._last_epoch = WEIGHTS[0], 0, 0
        self.on_host = self.on_disk = Kept(WEIGHTS[0], frozenset({0}))
        """What each tier keeps, as this world knows it."""
        self._promised: set[bytes] = set()
        """Keys that the next process must find on the disk, if it has the weights of `on_disk`."""
        self._now = 0
        self._do_start(0, 0, 0)

    # What may happen.

    def _numbers(self, name: str) -> tuple[int, ...]:
        """The size of the range of each number of an action."""
        ranks = self.options.ranks
        return {
            "store": (len(PROMPTS),),
            "ask": (len(PROMPTS),),
            "plan": (),
            "disk": (max(1, len(self._copies)) if self.lives else 1, ranks, 2),
            "reset": (len(WEIGHTS), 3),
            "end": (2,),
            "start": (len(WEIGHTS), 2, 2 * ranks + 2),
        }[name]

    def draw(self, random: Random) -> Action:
        """An action by weight. Most starts go on with the same weights and pool, and succeed."""
        if not self.lives:
            numbers = (random.randrange(one) * (random.random() < 0.3) for one in self._numbers("start"))
            return ("start", *numbers)
        name = random.choice(_LIKELY if random.random() < 0.96 else _SELDOM)
        if name == "disk" and not self._copies:
            name = "plan"
        if name == "plan" and not self.tier.has_work():
            name = random.choice(("store", "store", "ask"))
        if random.random() < 0.05 and any(len(one.waits) < self.options.ranks for one in self._copies):
            name = "end"  # when one rank has a block and another one has not
        if name == "ask":
            return name, random.choice(self._below() or range(len(PROMPTS)))
        if name == "reset":
            return name, random.randrange(len(WEIGHTS)), random.choice((WELL, WELL, *range(3)))
        if name != "disk":
            return (name, *map(random.randrange, self._numbers(name)))
        place = random.randrange(len(self._copies))
        return name, place, random.choice(self._copies[place].waits), int(random.random() < 0.1)

    def _below(self) -> list[int]:
        """The prompts of which the disk has something that the host lacks."""
        lacks = {key for key in self.disk.ledger.index if key not in self.host.ledger.index}
        return [number for number, keys in enumerate(PROMPTS) if not lacks.isdisjoint(keys)]

    def actions(self) -> list[Action]:
        """The simplest of each kind that may happen now."""
        names = ("store", "ask", "plan", "disk", "reset", "end") if self.lives else ("start",)
        return [(name, *(0 for _ in self._numbers(name))) for name in names]

    def do(self, action: Action) -> bool:
        name, *numbers = action
        move = getattr(self, f"_do_{name}", None)
        if move is None or (name == "start") == self.lives:
            return False
        ranges = self._numbers(str(name))
        if len(numbers) != len(ranges) or not all(0 <= int(n) < most for n, most in zip(numbers, ranges)):
            return False
        before = set(self.disk.ledger.index) if self.lives else set()
        with patch.object(logging.getLogger("kvsm.tiers.disk"), "disabled", True):
            done = bool(move(*map(int, numbers)))
        if done and self.lives:
            # Evicted, or its load failed.
            self._owed -= before - self.disk.ledger.index.keys()
            self._watch()
        return done

    # The engine. Its copies between device and host end at once: other worlds let them take their time.

    def _do_store(self, prompt: int) -> bool:
        """It computes what the host lacks of a prompt, and the host stores it."""
        index, before = self.host.ledger.index, self.host.ledger.seq
        keys = [key for key in PROMPTS[prompt] if key not in index]
        if not keys or self.host.ledger.draining():
            return False
        blocks = list(range(len(keys)))
        self.host.rewrite(blocks)
        job = self.host.store((), keys, blocks).job
        if job is not None:
            self.host.submit([job.transfer])
            device, slots = map(listed, job.pairs())
            for rank in self.ranks:
                for block, slot in zip(device, slots):
                    rank.host[slot] = np.frombuffer(content(keys[block], self.epoch, rank.number), np.uint8)
            stored, waiting = self._report(job), self.tier._waiting
            if len(waiting) + len(stored) > self.options.host_slots:
                self._owed.difference_update(waiting)  # The oldest of them wait no more.
            self._owed.update(stored)
            self.tier.stored(stored)
        return self.host.ledger.seq != before

    def _do_ask(self, prompt: int) -> bool:
        """A request comes, and leaves if it would have to wait. What only the disk has is fetched for it."""
        before = self.host.ledger.seq
        job = self.requests.ask(prompt, PROMPTS[prompt], range(DEVICE_BLOCKS))
        if job is not None:
            self.host.submit([job.transfer])
            self._report(job)
        return self.host.ledger.seq != before

    def _report(self, job: TransferJob) -> tuple[bytes, ...]:
        """A copy between device and host ends well. Returns the keys that it has stored."""
        keys: tuple[bytes, ...] = ()
        for rank in self.ranks:
            ended = self.host.report(job.transfer, rank.number, True).ended
            keys = ended.keys if ended is not None and job.direction is Direction.STORE else ()
        return keys

    def _do_plan(self) -> bool:
        """A step ends: copies to the disk and back leave."""
        self._now += 1
        ledger, waiting = self.disk.ledger, [*self.tier._waiting]
        if len(ledger.free) + ledger.evictable() < len(waiting):
            self._owed.difference_update(waiting)  # Some of them find no room.
        jobs = self._era.named(self.tier.plan())
        self._copies += [DiskCopy(job, list(range(self.options.ranks))) for job in jobs]
        self.host.end_step()
        return True

    def _do_disk(self, place: int, rank: int, fails: int) -> bool:
        """A rank carries out a copy between host and disk, or it fails there and nothing is written."""
        if place >= len(self._copies) or rank not in self._copies[place].waits:
            return False
        copy = self._copies[place]
        job = copy.job
        good = not fails and self.ranks[rank].copy(job)
        if not good:
            self._owed.difference_update(job.keys)
            if not fails:
                raise PropertyBroken(Property.LEGAL_CALLS, f"copy {job.transfer} failed on a disk that works")
            if job.direction is Direction.LOAD:
                self.ranks[rank].host[listed(job.pairs()[0])] = 0
        copy.waits.remove(rank)
        if not copy.waits:
            del self._copies[place]
        self.tier.report(WorkerReport(job.transfer, rank, good, "" if good else "it broke"))
        return True

    def _do_reset(self, other: int, how: int) -> bool:
        """The caches are reset, perhaps for other weights. It is done, it fails, or the process is killed."""
        weights = WEIGHTS[(WEIGHTS.index(self.weights) + other) % len(WEIGHTS)]
        told = weights if other else None
        self.weights, self.epoch = weights, self._new_epoch()
        self._epochs = frozenset({self.epoch})
        self.on_host = Kept(weights, self._epochs)
        self._owed.clear()
        self.host.reset(told)
        if how == KILLED_IN_RESET:
            self._promised = set(readable_keys(self.disk.ledger))
            self._die(killed=True)
            return True
        full = how == ERA_FAILS
        try:
            with _full_disk() if full else nullcontext():
                self.tier.reset(told)
        except OSError:
            if not full:
                raise
        else:
            if full:
                message = "a reset was answered, and its era could not be written"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        self._check_forgotten()
        return True

    def _check_forgotten(self) -> None:
        """Right after a reset nothing can be found, on either tier."""
        for keys in PROMPTS:
            for key in keys:
                if key in self.host.ledger.index or self.tier.has(key):
                    raise PropertyBroken(
                        Property.NO_STALE_DATA, f"{key!r} is found although a reset came after it"
                    )

    def _begin_era(self, weights: str | None) -> None:
        """What `DiskTier` calls: it is durable when this returns."""
        self._era.begin(weights, self.disk.ledger.seq)
        self.on_disk = Kept(self.weights, frozenset({self.epoch}))

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    # A process ends, and the next one begins.

    def _do_end(self, how: int) -> bool:
        """The process is killed (0), or ends well (1)."""
        self._promised = set(readable_keys(self.disk.ledger))
        self._die(killed=not how)
        return True

    def _die(self, *, killed: bool) -> None:
        if killed:
            leave_log(self.host)
        else:
            self.host.close()
        for rank in self.ranks:
            rank.close()
        self.lives = False

    def _do_start(self, other: int, remade: int, killed_after: int) -> bool:
        """Another process begins. It may be killed while it opens its files.

        other: whether it has other weights than the last one.
        remade: whether the host pool was made again.
        killed_after: how many steps are done when it is killed; 0: it is not.
        """
        weights = WEIGHTS[(WEIGHTS.index(self.weights) + other) % len(WEIGHTS)]
        if remade:
            self._pool += 1
            self._marks = memory_marks(self.options.ranks)
            for rank in self.ranks:
                rank.host[:] = 0
        self.weights = weights
        found = None
        for number, known in enumerate(self._opened(weights), 1):
            found = known
            if number == killed_after:
                for rank in self.ranks:
                    rank.close()
                return True
        assert found is not None
        self._check_found(found)
        self._begin(found, remade=bool(remade))
        return True

    def _opened(self, weights: str) -> Iterator[Recovered | None]:
        """Open the files of all ranks, as an engine does whose ranks are processes, one step at a time.
        Yields what is found, once that is decided."""
        for rank in self.ranks:
            rank.open()
            yield None
        files = [rank.file for rank in self.ranks if rank.file is not None]
        scans = [scan(file) for file in files]
        life = max(one.life for one in scans)
        era = era_at_start(self._files.era, weights, life)
        self._era = OpenEra(self._files.era, era, life)
        if self.on_disk.weights != weights:
            self.on_disk, self._promised = Kept(weights, frozenset({self._new_epoch()})), set()
        yield None
        found = decide(scans, era.id)
        for file in files:
            take(file, found)
            yield found

    def _check_found(self, found: Recovered) -> None:
        """What a start finds on the disk is what was promised, and nothing that does not count."""
        for key, slot in found.slots.items():
            for rank in self.ranks:
                self._check_bytes(rank.payload(slot), key, rank, f"disk slot {slot}", self.on_disk.epochs)
        lost = sorted(self._promised - found.slots.keys())
        if lost:
            message = f"{lost[0]!r} was stored on the disk of every rank, and the next process lacks it"
            raise PropertyBroken(Property.STORED_ONCE, message)

    def _begin(self, found: Recovered, *, remade: bool) -> None:
        """The process serves what is left."""
        options = self.options
        config = host_config(
            OffloadConfig(
                host_blocks=options.host_slots,
                device_blocks=DEVICE_BLOCKS,
                workers=options.ranks,
                defer_ticks=2,
            ),
            PLACES,
        )
        ids = (
            b"%s %03d of %03d " % (name, self._pool, rank.number)
            for rank in self.ranks
            for name in (b"pool", b"sums")
        )
        pools = KeptPools(_IDENTITY, tuple(ids))
        log = {"durability": "none"}
        self.host = start(
            self._log, config, pools, weights=self.weights, marks=self._marks, log=log
        ).offloader
        self.disk = Offloader(disk_config(config, options.disk_slots), weights=self.weights)
        adopt_found(self.disk, found)
        writes = WritePolicy(options.writes)
        self.tier = DiskTier(
            self.host, self.disk, self._begin_era, PLACES, writes=writes, clock=lambda: float(self._now)
        )
        self.requests = TierRequests(self.host, self.tier, 0)
        self._copies: list[DiskCopy] = []
        self._owed: set[bytes] = set()
        """Keys that the host has stored, and that the disk must have at rest."""
        self.lives = True
        keeps = self.on_host.weights == self.weights and not remade
        self._epochs = self.on_host.epochs if keeps else frozenset()
        self._check_host()
        self._epochs |= self.on_disk.epochs
        self.epoch = max(self._epochs)
        self.on_host = self.on_disk = Kept(self.weights, self._epochs)
        self.check()

    # What must hold.

    def _watch(self) -> None:
        differing = disagreements(self.tier)
        if differing:
            raise PropertyBroken(Property.CONSERVATION, differing[0])
        self._check_host()
        self._check_owed()

    def _check_host(self) -> None:
        for key, slot in self.host.ledger.index.items():
            if self.host.ledger.readable(slot):
                for rank in self.ranks:
                    self._check_bytes(rank.host[slot].tobytes(), key, rank, f"host slot {slot}", self._epochs)

    def _check_bytes(
        self, held: bytes, key: bytes, rank: EraRank, where: str, counts: frozenset[int]
    ) -> None:
        if any(held == content(key, epoch, rank.number) for epoch in counts):
            return
        stale = any(held == content(key, one, rank.number) for one in range(self._last_epoch + 1))
        broken = Property.NO_STALE_DATA if stale else Property.CORRECT_BYTES
        told = held.rstrip(b"~").decode("ascii", "replace")
        message = f"{where} of rank {rank.number} serves {key!r}, and holds {told!r}"
        raise PropertyBroken(broken, f"{message}; epochs that count: {sorted(counts)}")

    def _check_owed(self) -> None:
        """At rest the disk has what the host has stored, if it is written through."""
        at_rest = not self._copies and not self.tier.has_work() and not self.tier._waiting
        if not at_rest or self.options.writes != WritePolicy.THROUGH.value:
            return
        index, readable = self.host.ledger.index, self.host.ledger.readable
        for key in sorted(self._owed):
            if key in index and readable(index[key]) and not self.tier.has(key):
                message = f"the host has stored {key!r}, no copy of it failed, and the disk does not get it"
                raise PropertyBroken(Property.STORED_ONCE, message)

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""
        if not self.lives:
            return
        for core in (self.host, self.disk):
            for violation in check_ledger(core.ledger):
                raise PropertyBroken(violation.property, violation.message)
        self._watch()

    def wind_down(self) -> Action | None:
        """The next action on the way to rest: a process lives, and its copies have ended."""
        if not self.lives:
            return "start", 0, 0, 0
        if self._copies:
            return "disk", 0, self._copies[0].waits[0], 0
        return ("plan",) if self.tier.has_work() else None

    def describe(self) -> dict[str, str]:
        """What can be seen of it."""
        seen = {"weights": self.weights, "life": str(self.lives)}
        if self.lives:
            seen |= {f"host slot {slot}": key.decode() for key, slot in self.host.ledger.index.items()}
            seen |= {f"disk slot {slot}": key.decode() for key, slot in self.disk.ledger.index.items()}
        return seen

    def fingerprint(self) -> bytes:
        return repr((self.describe(), self.epoch, self.on_host, self.on_disk)).encode()


@contextmanager
def _full_disk() -> Iterator[None]:
    """No file can be written durably."""

    def fails(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(os, "fsync", fails):
        yield


def _end(ranks: list[EraRank], place: TemporaryDirectory[str]) -> None:
    for rank in ranks:
        rank.close()
    place.cleanup()


def eras(random: Random) -> EraWorld:
    """A world with a drawn configuration."""
    return EraWorld(
        EraOptions(
            ranks=random.choice((1, 2, 2)),
            host_slots=random.randint(1, 2),
            disk_slots=random.randint(1, 3),
            writes=random.choice((WritePolicy.THROUGH, WritePolicy.THROUGH, WritePolicy.BACK)).value,
        )
    )
