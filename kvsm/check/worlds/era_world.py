"""The world of eras: two-tier engines, one after another, on kept host pools and real files.

Each process has the real cores, `DiskTier`, host log, slot files, disk copies, recovery and `OpenEra`. It
stores and requests prompts, copies to the disk and back (each rank separately), and resets its caches,
perhaps for other weights. It exits normally, or is killed: at rest, with copies in flight, in a reset, or
while it opens its files. The next process may have other weights, or a new host pool.

The bytes of a block depend on its key, its rank and its *epoch*. Each reset begins an epoch, and so do other
weights. Checked:

- each block that is readable on the host, or that a start finds on the disk, holds the bytes of a valid
  epoch: no stale data (S14), correct bytes (S15);
- after a reset, completed or failed, no earlier block can be found: no stale data (S14);
- a reset whose era could not be written does not return as done: failure is not success (S6);
- the next process finds each block that was stored on the disk; at rest, each block that the host has stored
  is on the disk, unless a copy failed or there was no room: no doubled or lost store (S13);
- the two ledgers agree with each other, and both pass `check_ledger`: conservation (S1) and more.

`disk_world.py` covers power losses and a damaged disk, `kvsm.check.worlds.two_tiers` orders of copies.
"""

from __future__ import annotations

import errno
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

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.check.worlds.restart_world import leave_log
from kvsm.check.worlds.simulated_disk import SimulatedDisk
from kvsm.check.worlds.tier_requests import TierRequests
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import suppressed_warnings, world_directory
from kvsm.core.ledger import readable_keys
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import ConfigError, PropertyBroken
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

PROMPTS = ((b"a",), (b"b",), (b"a", b"c"))
"""The prompts that are stored and requested, as keys in prefix order."""
WEIGHTS = ("v1", "v2")
PAYLOAD, DEVICE_BLOCKS, PLACES = 512, 2, 2
MOST = 4
"""The upper limit of each size."""
_IDENTITY = PoolIdentity.of({"model": "small"})
_LIKELY = ("store", "store", "ask", "plan", "plan", "disk", "disk", "disk", "disk")
_SELDOM = ("reset", "reset", "end")

WELL, ERA_FAILS, KILLED_IN_RESET = range(3)
"""How a reset ends: done; the disk is full when the era is written; a kill before the era is written."""


class EraOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world. writes: the value of a `WritePolicy`: when blocks are written to the disk."""

    ranks: int = 2
    host_slots: int = 2
    disk_slots: int = 2
    writes: str = WritePolicy.THROUGH.value

    def __post_init__(self) -> None:
        """Raises `ConfigError`: options of a saved failure are not trusted."""
        for name in ("ranks", "host_slots", "disk_slots"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST}")
        policies = [one.value for one in WritePolicy]
        if self.writes not in policies:
            raise ConfigError(f"writes is {self.writes!r}; choose one of {', '.join(policies)}")


def draw_era_options(random: Random) -> EraOptions:
    """Draw a small configuration."""
    return EraOptions(
        ranks=random.choice((1, 2, 2)),
        host_slots=random.randint(1, 2),
        disk_slots=random.randint(1, 3),
        writes=random.choice((WritePolicy.THROUGH, WritePolicy.THROUGH, WritePolicy.BACK)).value,
    )


class KeptBlocks(NamedTuple):
    """The blocks that a tier keeps for the next process.

    weights: the weights that computed them. epochs: the epochs that their bytes may have.
    """

    weights: str
    epochs: frozenset[int]


@lru_cache(None)
def content(key: bytes, epoch: int, rank: int) -> bytes:
    """Return the bytes of a block."""
    return (b"%s %d %d " % (key, epoch, rank)).ljust(PAYLOAD, b"~")


class EraRank:
    """One rank.

    host: its host pool, which outlives the process. path: its file of disk slots.
    file, engine: None while no process runs; the engine is made for the first copy.
    """

    def __init__(self, number: int, path: Path, geometry: DiskGeometry, host_slots: int) -> None:
        self.number, self.path, self.geometry = number, path, geometry
        self.host = np.zeros((host_slots, PAYLOAD), np.uint8)
        self.file: SlotFile | None = None
        self.engine: DiskCopyEngine | None = None

    def open(self) -> SlotFile:
        self.file = SlotFile(self.path, self.geometry, _IDENTITY)
        return self.file

    def copy(self, job: TransferJob) -> bool:
        """Copy between the host pool and the disk. Returns whether the copy succeeded."""
        if self.engine is None:
            assert self.file is not None
            self.engine = DiskCopyEngine(self.host, self.file, FlushPolicy.NONE, threads=1)
        self.engine.submit(job)
        self.engine.wait([job.transfer])
        (result,) = self.engine.poll()
        return result.good

    def close(self) -> None:
        """Close the engine and the file, as at the end of a process: nothing more is written."""
        for opened in (self.engine, self.file):
            if opened is not None:
                opened.close()
        self.engine = self.file = None

    def payload(self, slot: int) -> bytes:
        """Return the bytes that a disk slot holds."""
        begin = self.geometry.payload_at(slot)
        return self.path.read_bytes()[begin : begin + PAYLOAD]


class DiskCopy(msgspec.Struct):
    """A submitted copy between host and disk. waits: the ranks that have not carried it out yet."""

    job: TransferJob
    waits: list[int]


class EraWorld:
    """A `World`; worlds with the same options and the same actions are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: each process has its own log."""
    check_every = 20

    def __init__(self, options: EraOptions) -> None:
        self.options = options
        place = world_directory()
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
        self._simulated = SimulatedDisk()
        """The disk under the files of all ranks. In this world it loses nothing."""
        self.lives = False
        self._pool, self._marks = 1, memory_marks(options.ranks)
        self.weights, self.epoch, self._last_epoch = WEIGHTS[0], 0, 0
        self.on_host = self.on_disk = KeptBlocks(WEIGHTS[0], frozenset({0}))
        """The blocks that each tier keeps, by this world's own books."""
        self._promised: set[bytes] = set()
        """Keys that the next process must find on the disk, if it has the weights of `on_disk`."""
        self._now = 0
        with self._simulated.attached():
            self._do_start(0, 0, 0)

    def __del__(self) -> None:
        if getattr(self, "lives", False):
            leave_log(self.host)

    # What may happen.

    def _numbers(self, name: str) -> tuple[int, ...]:
        """Return the exclusive upper bound of each number of an action."""
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
        """Draw an action by weight. Most starts keep the weights and the pool, and succeed."""
        if not self.lives:
            numbers = (random.randrange(bound) * (random.random() < 0.3) for bound in self._numbers("start"))
            return ("start", *numbers)
        name = random.choice(_LIKELY if random.random() < 0.96 else _SELDOM)
        if name == "disk" and not self._copies:
            name = "plan"
        if name == "plan" and not self.tier.has_work():
            name = random.choice(("store", "store", "ask"))
        if random.random() < 0.05 and any(len(copy.waits) < self.options.ranks for copy in self._copies):
            name = "end"  # when one rank has a block and another one has not
        if name == "ask":
            return name, random.choice(self._only_on_disk() or range(len(PROMPTS)))
        if name == "reset":
            return name, random.randrange(len(WEIGHTS)), random.choice((WELL, WELL, *range(3)))
        if name != "disk":
            return (name, *map(random.randrange, self._numbers(name)))
        place = random.randrange(len(self._copies))
        return name, place, random.choice(self._copies[place].waits), int(random.random() < 0.1)

    def _only_on_disk(self) -> list[int]:
        """Return the prompts with a key that is on the disk but not on the host."""
        lacks = {key for key in self.disk.ledger.index if key not in self.host.ledger.index}
        return [number for number, keys in enumerate(PROMPTS) if not lacks.isdisjoint(keys)]

    def actions(self) -> list[Action]:
        """Return the simplest action of each kind that may happen now."""
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
        with suppressed_warnings(), self._simulated.attached():
            done = bool(move(*map(int, numbers)))
        if done and self.lives:
            # A key that left the disk was evicted, or its load failed.
            self._owed -= before - self.disk.ledger.index.keys()
            self._watch()
        return done

    # The engine. Copies between device and host end at once; other worlds delay them.

    def _do_store(self, prompt: int) -> bool:
        """Compute the blocks of a prompt that the host lacks, and store them on the host."""
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
                self._owed.difference_update(waiting)  # The oldest waiting keys may be dropped.
            self._owed.update(stored)
            self.tier.stored(stored)
        return self.host.ledger.seq != before

    def _do_ask(self, prompt: int) -> bool:
        """Serve a request, which leaves if it would have to wait.

        Blocks that only the disk has are fetched.
        """
        before = self.host.ledger.seq
        job = self.requests.ask(prompt, PROMPTS[prompt], range(DEVICE_BLOCKS))
        if job is not None:
            self.host.submit([job.transfer])
            self._report(job)
        return self.host.ledger.seq != before

    def _report(self, job: TransferJob) -> tuple[bytes, ...]:
        """Report a successful copy between device and host. Returns the keys that it stored."""
        keys: tuple[bytes, ...] = ()
        for rank in self.ranks:
            ended = self.host.report(job.transfer, rank.number, True).ended
            keys = ended.keys if ended is not None and job.direction is Direction.STORE else ()
        return keys

    def _do_plan(self) -> bool:
        """End a step: submit copies to the disk and back."""
        self._now += 1
        ledger, waiting = self.disk.ledger, [*self.tier._waiting]
        if len(ledger.free) + ledger.evictable() < len(waiting):
            self._owed.difference_update(waiting)  # There is no room for some of these keys.
        jobs = self._era.named(self.tier.plan())
        self._copies += [DiskCopy(job, list(range(self.options.ranks))) for job in jobs]
        self.host.end_step()
        return True

    def _do_disk(self, place: int, rank: int, fails: int) -> bool:
        """Carry out a copy between host and disk on one rank, or let it fail there without a write."""
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
        """Reset the caches, perhaps for other weights.

        `how`: the reset completes, fails, or is cut by a kill.
        """
        weights = WEIGHTS[(WEIGHTS.index(self.weights) + other) % len(WEIGHTS)]
        new_weights = weights if other else None
        self.weights, self.epoch = weights, self._new_epoch()
        self._epochs = frozenset({self.epoch})
        self.on_host = KeptBlocks(weights, self._epochs)
        self._owed.clear()
        self.host.reset(new_weights)
        if how == KILLED_IN_RESET:
            self._promised = set(readable_keys(self.disk.ledger))
            self._die(killed=True)
            return True
        full = how == ERA_FAILS
        try:
            with _full_disk() if full else nullcontext():
                self.tier.reset(new_weights)
        except OSError:
            if not full:
                raise
        else:
            if full:
                message = "a reset returned as done, but its era could not be written"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        self._check_forgotten()
        return True

    def _check_forgotten(self) -> None:
        """Check that no key can be found on either tier right after a reset."""
        for keys in PROMPTS:
            for key in keys:
                if key in self.host.ledger.index or self.tier.has(key):
                    raise PropertyBroken(
                        Property.NO_STALE_DATA, f"{key!r} is found although a reset came after it"
                    )

    def _begin_era(self, weights: str | None) -> None:
        """Begin an era; `DiskTier` calls this, and the era is durable on return."""
        self._era.begin(weights, self.disk.ledger.seq)
        self.on_disk = KeptBlocks(self.weights, frozenset({self.epoch}))

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    # A process ends, and the next one begins.

    def _do_end(self, how: int) -> bool:
        """Kill the process (0), or let it exit normally (1)."""
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
        """Start the next process, which may be killed while it opens its files.

        other: by how many versions its weights differ from the last process; 0: the same.
        remade: whether the host pool is new.
        killed_after: the number of opening steps before the kill; 0: no kill.
        """
        weights = WEIGHTS[(WEIGHTS.index(self.weights) + other) % len(WEIGHTS)]
        if remade:
            self._pool += 1
            self._marks = memory_marks(self.options.ranks)
            for rank in self.ranks:
                rank.host[:] = 0
        self.weights = weights
        found = None
        for number, recovered in enumerate(self._opened(weights), 1):
            found = recovered
            if number == killed_after:
                for rank in self.ranks:
                    rank.close()
                return True
        assert found is not None
        self._check_found(found)
        self._begin(found, remade=bool(remade))
        return True

    def _opened(self, weights: str) -> Iterator[Recovered | None]:
        """Open the files of all ranks step by step, as an engine whose ranks are processes.

        Yields after each step: None, or the recovered slots once they are decided.
        """
        for rank in self.ranks:
            rank.open()
            yield None
        files = [rank.file for rank in self.ranks if rank.file is not None]
        scans = [scan(file) for file in files]
        life = max(found.life for found in scans)
        era = era_at_start(self._files.era, weights, life)
        self._era = OpenEra(self._files.era, era, life)
        if self.on_disk.weights != weights:
            self.on_disk, self._promised = KeptBlocks(weights, frozenset({self._new_epoch()})), set()
        yield None
        found = decide(scans, era.id)
        for file in files:
            take(file, found)
            yield found

    def _check_found(self, found: Recovered) -> None:
        """Check that a start finds all promised keys on the disk, and only bytes of valid epochs."""
        for key, slot in found.slots.items():
            for rank in self.ranks:
                self._check_bytes(rank.payload(slot), key, rank, f"disk slot {slot}", self.on_disk.epochs)
        lost = sorted(self._promised - found.slots.keys())
        if lost:
            message = f"{lost[0]!r} was stored on the disk of every rank, but the next process lacks it"
            raise PropertyBroken(Property.STORED_ONCE, message)

    def _begin(self, found: Recovered, *, remade: bool) -> None:
        """Start the host core, the disk core and the tier on what the last process left."""
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
        self.on_host = self.on_disk = KeptBlocks(self.weights, self._epochs)
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
        stale = any(held == content(key, epoch, rank.number) for epoch in range(self._last_epoch + 1))
        broken = Property.NO_STALE_DATA if stale else Property.CORRECT_BYTES
        text = held.rstrip(b"~").decode("ascii", "replace")
        message = f"{where} of rank {rank.number} serves {key!r}, but holds {text!r}"
        raise PropertyBroken(broken, f"{message}; valid epochs: {sorted(counts)}")

    def _check_owed(self) -> None:
        """Check that, with write-through and at rest, the disk has all blocks that the host has stored."""
        at_rest = not self._copies and not self.tier.has_work() and not self.tier._waiting
        if not at_rest or self.options.writes != WritePolicy.THROUGH.value:
            return
        index, readable = self.host.ledger.index, self.host.ledger.readable
        for key in sorted(self._owed):
            if key in index and readable(index[key]) and not self.tier.has(key):
                message = f"the host has stored {key!r}, no copy of it failed, but the disk never gets it"
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
        """Return the next action towards rest: a running process without copies in flight."""
        if not self.lives:
            return "start", 0, 0, 0
        if self._copies:
            return "disk", 0, self._copies[0].waits[0], 0
        return ("plan",) if self.tier.has_work() else None

    def describe(self) -> dict[str, str]:
        """Return the weights, whether a process runs, and the keys of both tiers."""
        seen = {"weights": self.weights, "life": str(self.lives)}
        if self.lives:
            seen |= {f"host slot {slot}": key.decode() for key, slot in self.host.ledger.index.items()}
            seen |= {f"disk slot {slot}": key.decode() for key, slot in self.disk.ledger.index.items()}
        return seen

    def fingerprint(self) -> bytes:
        copies = [(copy.job.direction, copy.job.keys, copy.waits) for copy in self._copies]
        waiting = [*self.tier._waiting]
        return repr((self.describe(), self.epoch, self.on_host, self.on_disk, copies, waiting)).encode()


@contextmanager
def _full_disk() -> Iterator[None]:
    """Make every `fsync` fail, as on a full disk."""

    def fails(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(os, "fsync", fails):
        yield


def _end(ranks: list[EraRank], place: TemporaryDirectory[str]) -> None:
    for rank in ranks:
        rank.close()
    place.cleanup()
