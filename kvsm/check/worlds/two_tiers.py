"""The world of two tiers: the cores of host and disk with the real `DiskTier` between them, and crashes.

The world plays the engine, which stores and asks for prompts; the copies, which end in any order, well or
badly; the disk, which loses unflushed writes; and the next process, which recovers the disk with the real
`decide`. The disk's core adopts the recovered blocks.

Checked, besides the ledgers' own properties:

- both ledgers agree about each copy between them, and no place (a staging block for the disk) is leaked:
  conservation (S1);
- each readable block of a tier holds the bytes of its key on every rank: correct bytes (S15);
- no slot that a copy touches is given to another block: no reuse in flight (S3);
- each recovered block was stored on every rank: publish after commit (S2);
- blocks that were fetched for a waiting request are held until the request loads them: a match holds what it
  counts (S7);
- after a failed copy its target tier lacks the key: failure is not success (S6);
- after a reset, or with other weights or another meaning of the bytes, no older block is readable, not even
  from the disk: no stale data (S14);
- stored, so served (S19): each request is served all that host and disk have, or waits for it
  (`kvsm.check.worlds.tier_answers`);
- each sealed and flushed block is recovered after a crash, and the ledger contains the recovered blocks: full
  offload (S16) and conservation (S1);
- at rest nothing is in flight, no request waits, and the host's idle blocks are on the disk (`TierRest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from random import Random
from weakref import proxy

import msgspec

from kvsm.check.worlds.run_figures import COPIED_OUT, IMPORTED, LOADED, ON_DISK, STORED
from kvsm.check.worlds.small_engine import no_clock
from kvsm.check.worlds.tier_rank import EMPTY, CopyInFlight, DiskSlot, RankMemory
from kvsm.check.worlds.tier_requests import TierRequests
from kvsm.check.worlds.tier_rest import TierRest
from kvsm.check.worlds.tier_states import COMPARED, canonical_tiers, describe_tiers
from kvsm.check.worlds.world import Action
from kvsm.core.ledger.canonical import FIXED, PART, declare
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import count, listed
from kvsm.properties import Property
from kvsm.tiers import DiskTier, WritePolicy, disagreements, disk_config, host_config
from kvsm.tiers.disk.era import DiskEra
from kvsm.tiers.disk.formats import SlotGeneration
from kvsm.tiers.disk.recovery import decide

PROMPTS = ((b"a", b"b"), (b"c", b"d"), (b"a", b"e"), (b"f",))
"""The prompts, each as keys in prefix order."""

_LIKELY = ("store", "store", "ask", "ask", "plan", "plan", "host", "host", "disk", "disk", "disk")


class TwoTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and budgets of a world of two tiers. Raises `ConfigError`.

    host_slots, disk_slots: sizes of the tiers.
    device_blocks: size of the engine's device pool.
    places: how many blocks may be in flight to the disk.
    writes: when blocks are copied to the disk, a `WritePolicy`.
    waiting: how many requests may wait at once, for a copy or for device blocks; others leave.
    defer_ticks: how long a request waits for a copy.
    ranks: 1 or 2.
    prompts: the number of different prompts.
    length: the most keys of a prompt.
    failures: how many copies may fail.
    losses: how many copies may be given up; they may still be carried out later.
    resets, crashes: how often each may happen.
    damages: how many payloads on disk may be damaged.
    most: the limit for all these disturbances together; 0 for none.
    """

    host_slots: int = 3
    disk_slots: int = 5
    device_blocks: int = 4
    places: int = 2
    writes: str = WritePolicy.THROUGH.value
    waiting: int = 0
    defer_ticks: int = 3
    ranks: int = 1
    prompts: int = len(PROMPTS)
    length: int = 2
    failures: int = 1
    losses: int = 0
    resets: int = 1
    crashes: int = 1
    damages: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        sizes = {"host_slots": 16, "disk_slots": 16, "device_blocks": 16, "places": 8, "ranks": 2}
        for name, most in (sizes | {"prompts": len(PROMPTS), "length": 2}).items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}")
        policies = [one.value for one in WritePolicy]
        if self.writes not in policies:
            raise ConfigError(f"writes is {self.writes!r}; choose one of {', '.join(policies)}")


class TwoTierWorld:
    """A `World` of two tiers."""

    check_every = 20
    """Actions between two calls of `check`: few, because the checks after each action cover little of the
    ledgers."""

    def __init__(self, options: TwoTierOptions) -> None:
        self.options = options
        self._left = {name: int(getattr(options, name)) for name in _BUDGETS}
        self._left["most"] = options.most or sum(self._left.values())
        self._epoch = self._meaning = self._ticks = 0
        self.era = DiskEra("v1", id=b"the first era id")
        disk = [EMPTY] * options.disk_slots
        self.ranks = [self._rank(disk) for _ in range(options.ranks)]
        self.life = 1
        self._start({})

    def _rank(self, disk: Sequence[DiskSlot]) -> RankMemory:
        return RankMemory(self.options.device_blocks, self.options.host_slots, disk, self._meaning)

    def _start(self, kept: dict[bytes, int]) -> None:
        """Start a process. kept: key -> disk slot, the recovered blocks."""
        options = self.options
        config = host_config(
            OffloadConfig(
                host_blocks=options.host_slots,
                device_blocks=options.device_blocks,
                workers=options.ranks,
                defer_ticks=options.defer_ticks,
            ),
            options.places,
        )
        self.log = MemoryLog()
        weights = self.era.weights
        self.host = Offloader(config, self.log, weights=weights, clock_ns=no_clock)
        self.disk = Offloader(disk_config(config, options.disk_slots), weights=weights, clock_ns=no_clock)
        self.disk.adopt_blocks(list(kept), list(kept.values()), "an earlier process")
        writes = WritePolicy(options.writes)
        self.tier = DiskTier(self.host, self.disk, self._begin_era, options.places, writes=writes)
        self.requests = TierRequests(self.host, self.tier, options.waiting)
        self.rest = TierRest(self.host, self.disk, self.tier)
        self.bind()
        self._host_copies: list[CopyInFlight] = []
        self._disk_copies: list[CopyInFlight] = []
        self._late: list[tuple[str, list[int]]] = []
        """("host" or "disk", slots) that a lost copy may still write."""
        self._retired_places = 0
        self._loads: dict[int, list[bytes]] = {}

    def parts(self) -> Sequence[object]:
        """All objects of the world, in a fixed order."""
        host, disk, tier = self.host, self.disk, self.tier
        below = [disk, disk.ledger, tier, tier._health, tier._fetches]
        return [self, self.requests, self.rest, host, host.ledger, self.log, *below]

    def bind(self) -> None:
        """Point the tier's callbacks to this world. Call it after the world was loaded."""
        world = proxy(self)  # no reference cycle: a dropped world is freed at once
        self.tier._void = lambda weights: world._begin_era(weights)
        self.tier._health._clock = lambda: float(world._ticks)
        self.tier.listen()

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The events of the host's core since the last crash."""
        return self.log

    # What may happen.

    def actions(self) -> list[Action]:
        return list(self._actions())

    def _actions(self) -> Iterator[Action]:
        for number in range(self.options.prompts):
            yield "store", number
            yield "ask", number
        yield ("plan",)
        yield from (("leave", number) for number in self.requests.hits)
        if self.host.ledger.deferred or not self.tier._health.read().takes_stores:
            yield ("tick",)  # in other states a tick has no effect
        if self.may("crashes") and any(rank.unflushed() for rank in self.ranks):
            yield ("flush",)
        for name, copies in (("host", self._host_copies), ("disk", self._disk_copies)):
            for number, copy in enumerate(copies):
                for rank in copy.waits:
                    yield name, number, rank, 1
                    if self.may("failures"):
                        yield name, number, rank, 0
        if self.may("losses"):
            yield from (("lose", number) for number in range(len(self._disk_copies)))
        if self._late:
            yield ("late",)
        if self.may("resets"):
            yield "reset", 0
            yield "reset", 1
        if self.may("crashes"):
            yield "crash", 0, 0
            for chosen in range(3 ** sum(rank.unflushed() for rank in self.ranks)):
                yield "crash", 1, chosen
            yield "crash", 2, 0
        if self.may("damages"):
            yield from (("damage", slot) for slot in range(self.options.disk_slots))

    def draw(self, random: Random) -> Action:
        options = self.options
        kind = random.choice(_LIKELY) if random.random() < 0.85 else random.choice(tuple(_DO))
        if random.random() < 0.1 and any(len(one.waits) < options.ranks for one in self._disk_copies):
            kind = "crash"  # while only one of two ranks has ended a copy
        if kind in ("store", "ask", "leave"):
            return kind, random.randrange(options.prompts)
        if kind in ("host", "disk"):
            copies = self._host_copies if kind == "host" else self._disk_copies
            if not copies:
                return ("plan",)
            number = random.randrange(len(copies))
            return kind, number, random.choice(copies[number].waits), int(random.random() < 0.9)
        if kind == "reset":
            return kind, random.randrange(2)
        if kind == "crash":
            return kind, random.randrange(3), random.randrange(3 ** (len(self.ranks) * options.disk_slots))
        if kind == "lose":
            return kind, random.randrange(max(1, len(self._disk_copies)))
        return (kind, random.randrange(options.disk_slots)) if kind == "damage" else (kind,)

    def do(self, action: Action) -> bool:
        name, *numbers = action
        move = _DO.get(str(name))
        log, first = self.log, len(self.log)
        self.requests.notes.begin_action()
        done = move is not None and move(self, *map(int, numbers))
        if done:
            self._watch()
            self.requests.notes.check_action(self.log[first:] if self.log is log else ())
        return done

    def _spend(self, name: str) -> bool:
        if not self.may(name):
            return False
        self._left[name] -= 1
        self._left["most"] -= 1
        return True

    def may(self, name: str) -> bool:
        """Whether something is left of a budget, as "crashes"."""
        return bool(self._left[name] and self._left["most"])

    # The engine.

    def _store(self, number: int) -> bool:
        """The engine computes the blocks of a prompt that the host lacks, and offers them."""
        if number >= self.options.prompts:
            return False
        keys = [key for key in PROMPTS[number][: self.options.length] if key not in self.host.ledger.index]
        blocks = self._free_blocks(len(keys))
        if not keys or len(blocks) < len(keys) or self.host.ledger.draining():
            return False
        before = self.host.ledger.seq
        for rank in self.ranks:
            for key, block in zip(keys, blocks):
                rank.device[block] = self._epoch, key
        self.host.rewrite(blocks)
        job = self.host.store((), keys, blocks).job
        if job is not None:
            self._leave(job)
        return self.host.ledger.seq != before

    def _ask(self, number: int) -> bool:
        """A request for a prompt arrives or asks again. Blocks that only the disk has are fetched, and blocks
        on the host are loaded."""
        if number >= self.options.prompts:
            return False
        before = self.host.ledger.seq
        keys = PROMPTS[number][: self.options.length]
        job = self.requests.ask(number, keys, self._free_blocks(self.options.length))
        if job is not None:
            loaded = self._loads[job.transfer] = list(keys[: len(listed(job.pairs()[0]))])
            self.rest.loaded(loaded)
            self._leave(job)
        return self.host.ledger.seq != before

    def _free_blocks(self, wanted: int) -> list[int]:
        leases = self.host.ledger.leases.words
        return [block for block in range(self.options.device_blocks) if not leases[block]][:wanted]

    def _leave(self, job: TransferJob) -> None:
        if job.direction is Direction.STORE:
            self._check_unused(set(listed(job.pairs()[1])), "a store from the device")
        self.host.submit([job.transfer])
        self._host_copies.append(CopyInFlight(job, list(range(self.options.ranks))))

    def _plan(self) -> bool:
        tier = self.tier
        before = self.disk.ledger.seq, tier.has_work(), tier._since_look, [*tier._waiting]
        jobs = [msgspec.structs.replace(job, era=self.era.id) for job in self.tier.plan()]
        for job in jobs:
            for rank in self.ranks:
                rank.begin(job)
            self._disk_copies.append(CopyInFlight(job, list(range(self.options.ranks))))
        after = self.disk.ledger.seq, tier.has_work(), tier._since_look, [*tier._waiting]
        return bool(jobs) or before != after

    def _check_unused(self, slots: set[int], what: str) -> None:
        used = {slot for one in self._disk_copies for slot in listed(one.job.pairs()[0])}
        used |= {slot for one in self._host_copies for slot in listed(one.job.pairs()[1])}
        if slots & used:
            message = f"{what} writes host slots {sorted(slots & used)}, which a copy in flight touches"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def _tick(self) -> bool:
        self._ticks += 1
        self.host.tick()
        return True

    def _reset(self, new_weights: int) -> bool:
        if not self._spend("resets"):
            return False
        weights = f"v{self._epoch + 2}" if new_weights else None
        self.host.reset(weights)
        self.tier.reset(weights)
        self.rest.reset()
        self._epoch += 1
        return True

    def _begin_era(self, weights: str | None) -> None:
        """Begin an era, as a callback of `DiskTier`. The era is durable when this returns."""
        after = SlotGeneration(self.life, self.disk.ledger.seq)
        name = b"%08d%08d" % after  # not random, so that worlds with the same actions are equal
        self.era = DiskEra(self.era.weights if weights is None else weights, after, name)

    # Copies.

    def _end_host_copy(self, number: int, rank: int, good: int) -> bool:
        copy = self._ending(self._host_copies, number, rank, good)
        if copy is None:
            return False
        job = copy.job
        self.ranks[rank].copy(job, bool(good))
        ended = self.host.report(job.transfer, rank, bool(good)).ended
        if ended is None:
            return True
        keys = self._loads.pop(job.transfer, [])
        if ended.good:
            self._note_copy(STORED if job.direction is Direction.STORE else LOADED, job)
        if ended.good and job.direction is Direction.STORE:
            self.tier.stored(ended.keys)
            self.rest.stored(ended.keys)
        elif ended.good:
            for block, key in zip(listed(ended.device_blocks), keys):
                self._check_bytes("device block", block, key)
        return True

    def _end_disk_copy(self, number: int, rank: int, good: int) -> bool:
        copy = self._ending(self._disk_copies, number, rank, good)
        if copy is None:
            return False
        job = copy.job
        was_stale = self.disk.ledger.transfers[job.transfer].epoch != self.disk.ledger.epoch
        is_good = self.ranks[rank].end(job, self.life, bool(good))
        served = self.requests.served_by(self.tier.copies[job.transfer].host)
        self.tier.report(WorkerReport(job.transfer, rank, is_good, "" if is_good else "it broke"))
        if not copy.waits:
            self.requests.check_held(served)
        copy.failed = copy.failed or not is_good
        if not copy.waits and not was_stale:
            if job.direction is Direction.STORE:
                self._note_copy(COPIED_OUT, job)
                if not copy.failed:
                    self._note_copy(ON_DISK, job)
            elif not copy.failed:
                self._note_copy(IMPORTED, job)
                self._note_copy(STORED, job)
        if copy.failed and not copy.waits and not was_stale:
            self._check_failed(job)
        return True

    def _note_copy(self, way: str, job: TransferJob) -> None:
        self.requests.notes.copy(self.host.ledger.seq, way, count(job.device_blocks))

    def _check_failed(self, job: TransferJob) -> None:
        """Check that after a failed copy no tier serves its keys. A failed load voids the disk's blocks."""
        is_load = job.direction is Direction.LOAD
        if not is_load:
            self.rest.not_stored(job.keys)
        for key in job.keys:
            if self.tier.has(key) or (is_load and key in self.host.ledger.index):
                message = f"copy {job.transfer} of the disk has failed, and {key!r} can still be found"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)

    def _ending(self, copies: list[CopyInFlight], number: int, rank: int, good: int) -> CopyInFlight | None:
        """The copy that ends now on this rank, with a failure booked; None if it cannot end so."""
        if number >= len(copies) or rank not in copies[number].waits:
            return None
        copy = copies[number]
        if not good:
            if not self._spend("failures"):
                return None
            copy.failed = True
        copy.waits.remove(rank)
        if not copy.waits:
            del copies[number]
        return copy

    def _lose(self, number: int) -> bool:
        """The engine gives up a copy, which may still be carried out."""
        if number >= len(self._disk_copies) or not self._spend("losses"):
            return False
        job = self._disk_copies.pop(number).job
        blocks, slots = map(listed, job.pairs())
        to_disk = job.direction is Direction.STORE
        if to_disk:
            self._retired_places += len(blocks)
            self.rest.not_stored(job.keys)
        self._late.append(("disk" if to_disk else "host", list(slots if to_disk else blocks)))
        self.tier.lose(job.transfer)
        return True

    def _carry_out_late(self) -> bool:
        """A lost copy writes now. Its bytes are modelled as unknown."""
        if not self._late:
            return False
        where, places = self._late.pop(0)
        for rank in self.ranks:
            for place in places:
                if where == "host":
                    rank.host[place] = None
                else:
                    rank.disk[place] = rank.disk[place]._replace(value=None)
        return True

    # The disk.

    def _flush(self) -> bool:
        for rank in self.ranks:
            rank.flush()
        return True

    def _damage(self, slot: int) -> bool:
        """The payload of a sealed slot changes on the disk of the first rank."""
        disk = self.ranks[0].disk
        if (
            slot >= len(disk)
            or not disk[slot].is_sealed
            or disk[slot].value is None
            or not self._spend("damages")
        ):
            return False
        disk[slot] = disk[slot]._replace(value=None)
        return True

    def _crash(self, kind: int, chosen: int) -> bool:
        """End the process: it is killed (0), power is lost (1), or its successor has another identity (2)."""
        if kind > 2 or not self._spend("crashes"):
            return False
        promised = self._promised(power_loss=kind == 1)
        if kind == 2:
            self._meaning, self._epoch, promised = self._meaning + 1, self._epoch + 1, set()
        left = []
        for rank in self.ranks:
            left.append(rank.after_power_loss(chosen) if kind == 1 else rank.disk)
            chosen //= 3 ** rank.unflushed()
        self.ranks = [self._rank(disk) for disk in left]
        self.life += 1
        found = decide([rank.scan(self.life) for rank in self.ranks], self.era.id)
        for rank in self.ranks:
            rank.expected = {slot: rank.disk[slot].generation for slot in found.slots.values()}
        for key, slot in found.slots.items():
            self._check_stored(key, slot)
        lost = sorted(promised - found.slots.keys())
        if lost:
            message = f"{lost[0]!r} was sealed and flushed on every rank, and recovery has not found it"
            raise PropertyBroken(Property.FULL_OFFLOAD, message)
        self._start(found.slots)
        if self.disk.ledger.index != found.slots:
            message = (
                f"the scan finds {len(found.slots)} blocks, and the ledger has {len(self.disk.ledger.index)}"
            )
            raise PropertyBroken(Property.CONSERVATION, message)
        return True

    def _promised(self, *, power_loss: bool) -> set[bytes]:
        """The readable keys of the disk that must survive this crash."""
        ledger = self.disk.ledger
        return {
            key
            for key, slot in ledger.index.items()
            if ledger.readable(slot)
            and all(not power_loss or rank.flushed[slot] == rank.disk[slot] for rank in self.ranks)
        }

    def _check_stored(self, key: bytes, slot: int) -> None:
        """Check a block of the disk: it is sealed on every rank, and holds bytes of this epoch or damaged
        ones, which a load detects."""
        for number, rank in enumerate(self.ranks):
            if not rank.disk[slot].is_sealed or rank.disk[slot].key != key:
                message = f"the disk serves {key!r}, and slot {slot} of rank {number} was not sealed with it"
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)
            value = rank.disk[slot].value
            if value is not None and value != (self._epoch, key):
                message = f"disk slot {slot} of rank {number} serves {key!r} and holds {value}"
                raise PropertyBroken(Property.NO_STALE_DATA, message)

    # What must hold.

    def _watch(self) -> None:
        differing = disagreements(self.tier)
        if differing:
            raise PropertyBroken(Property.CONSERVATION, differing[0])
        used = sum(len(copy.places) for copy in self.tier.copies.values())
        places = len(self.tier._places) + used + self._retired_places
        if places != self.options.places:
            message = f"{places} staging places for the disk exist, of {self.options.places}"
            raise PropertyBroken(Property.CONSERVATION, message)
        for key, slot in self.host.ledger.index.items():
            if self.host.ledger.readable(slot):
                self._check_bytes("host slot", slot, key)
        for key, slot in self.disk.ledger.index.items():
            if self.disk.ledger.readable(slot):
                self._check_stored(key, slot)

    def _check_bytes(self, where: str, place: int, key: bytes) -> None:
        for number, rank in enumerate(self.ranks):
            held = (rank.host if where == "host slot" else rank.device)[place]
            if held != (self._epoch, key):
                message = f"{where} {place} of rank {number} holds {held}, and must hold {key!r}"
                raise PropertyBroken(Property.CORRECT_BYTES, message)

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""
        for core in (self.host, self.disk):
            for violation in check_ledger(core.ledger):
                raise PropertyBroken(violation.property, str(violation))
        self._watch()
        if self.wind_down() is None:
            self.rest.check()
            self.requests.notes.check(self.host.config, self.log)
            self.requests.notes.check_disk(self.tier.counts, self.log)

    def wind_down(self) -> Action | None:
        """The next action on the way to rest."""
        for name, copies in (("host", self._host_copies), ("disk", self._disk_copies)):
            if copies:
                return name, 0, copies[0].waits[0], 1
        if self.tier.has_work():
            return ("plan",)
        asks = self.requests.next_to_ask()
        return None if asks is None else ("ask", asks)

    def describe(self) -> dict[str, str]:
        """Describe both tiers for people."""
        return describe_tiers(self.tier, self.era, self.ranks)

    def fingerprint(self, *, renamed: bool = True) -> bytes:
        """16 bytes: equal for worlds with the same future behaviour. renamed: see `canonical_tiers`."""
        encoded = msgspec.msgpack.encode(canonical_tiers(self, renamed=renamed))
        return blake2b(encoded, digest_size=16).digest()


declare(
    TwoTierWorld,
    options=FIXED,
    log=PART,
    host=PART,
    disk=PART,
    tier=PART,
    _left=COMPARED,
    _epoch=COMPARED,
    _meaning=COMPARED,
    requests=PART,
    rest=PART,
    _ticks=COMPARED,
    era=COMPARED,
    ranks=COMPARED,
    life=COMPARED,
    _host_copies=COMPARED,
    _disk_copies=COMPARED,
    _late=COMPARED,
    _retired_places=COMPARED,
    _loads=COMPARED,
)

_BUDGETS = ("failures", "losses", "resets", "crashes", "damages")

_DO: dict[str, Callable[..., bool]] = {
    "store": TwoTierWorld._store,
    "ask": TwoTierWorld._ask,
    "leave": lambda world, number: world.requests.leave(number),
    "plan": TwoTierWorld._plan,
    "tick": TwoTierWorld._tick,
    "flush": TwoTierWorld._flush,
    "host": TwoTierWorld._end_host_copy,
    "disk": TwoTierWorld._end_disk_copy,
    "lose": TwoTierWorld._lose,
    "late": TwoTierWorld._carry_out_late,
    "reset": TwoTierWorld._reset,
    "crash": TwoTierWorld._crash,
    "damage": TwoTierWorld._damage,
}
