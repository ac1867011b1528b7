"""The disk of the whole world: the real `DiskTier` and the disk's core, and the disks of all ranks.

Each rank carries out its part of a copy when the world says so, well or badly, and reports it. A copy that
was given up may still be carried out. A block on disk is modelled as in the world of two tiers
(`kvsm.check.worlds.tier_rank`); its content is the cells of its device blocks, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from kvsm.check.worlds.small_workers import COPY_ERROR, TORN, SmallCopy, SmallWorkers, copy_times
from kvsm.check.worlds.tier_rank import EMPTY, DiskSlot, RankSlots, Value
from kvsm.check.worlds.tier_rest import TierRest
from kvsm.check.worlds.whole_process import LeftOnDisk, SurvivingState
from kvsm.check.worlds.world_files import suppressed_warnings
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.properties import Property
from kvsm.tiers import DiskTier, WritePolicy, adopt_found, disk_config
from kvsm.tiers.disk.era import OpenEra, era_at_start, read_era
from kvsm.tiers.disk.recovery import Recovered, decide


class WholeDiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the options of the disk.

    slots: `OffloadConfig.host_blocks` of the disk's core.
    places: how many blocks may be in flight to the disk.
    writes: when blocks are copied to the disk.
    policy: the disk's eviction policy.
    """

    slots: int = 8
    places: int = 4
    writes: WritePolicy = WritePolicy.THROUGH
    policy: str = "lru"


class HostSlots:
    """The host slots of one rank as values: (epoch, the cells of each device block of the slot)."""

    def __init__(self, workers: SmallWorkers, rank: int, chunk: int, epoch: Callable[[], int]) -> None:
        self._workers, self._rank, self._chunk, self._epoch = workers, rank, chunk, epoch

    def __getitem__(self, slot: int) -> Value:
        places = self._workers.host[slot * self._chunk : (slot + 1) * self._chunk]
        return self._epoch(), [list(cells[self._rank]) for cells in places]

    def __setitem__(self, slot: int, value: Value) -> None:
        blocks = [[TORN]] * self._chunk if value is None else value[1]
        for place, cells in enumerate(blocks, slot * self._chunk):
            self._workers.host[place][self._rank] = list(cells)


class RecordingTier(DiskTier):
    """A `DiskTier` whose calls are recorded in `rest`, for the checks at rest. Set `rest` after creation."""

    rest: TierRest

    def stored(self, keys: Collection[bytes]) -> None:
        super().stored(keys)
        self.rest.stored(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        super().used(keys)
        self.rest.loaded(keys)


class WholeDisk:
    """The disk below the host of one process.

    host: the core of the host.
    workers: the ranks' host memory.
    surviving: what outlived the last process.
    """

    def __init__(
        self, options: WholeDiskOptions, host: Offloader, workers: SmallWorkers, surviving: SurvivingState
    ) -> None:
        config = disk_config(host.config, options.slots, options.policy)
        self.options, self.host, self.workers = options, host, workers
        self.surviving, self.life, self.now_s = surviving, surviving.left.life + 1, 0.0
        self.core = Offloader(config, weights=surviving.weights_name, clock_ns=lambda: 0)
        chunk = host.config.blocks_per_chunk
        self.ranks = [
            RankSlots(HostSlots(workers, rank, chunk, self._epoch), disk, 0)
            for rank, disk in enumerate(surviving.left.disks or [[EMPTY] * options.slots] * workers.workers)
        ]
        with suppressed_warnings():
            self.era = era_at_start(surviving.era_file, surviving.weights_name, self.life)
        self._open_era = OpenEra(surviving.era_file, self.era, self.life)
        self.found = self._recover()
        self.tier = RecordingTier(
            host,
            self.core,
            self._begin_era,
            options.places,
            writes=options.writes,
            clock=lambda: self.now_s,
        )
        self.rest = self.tier.rest = TierRest(host, self.core, self.tier)
        self.copies: dict[int, SmallCopy] = {}
        self._before: dict[int, list[dict[int, DiskSlot]]] = {}
        """Store in flight -> for each rank, what its slots held before."""
        self.reports: list[WorkerReport] = []
        self.failed: set[int] = set()
        """Copies of which a rank has reported a failure."""
        self.retired_places = 0

    def _recover(self) -> Recovered:
        """Recover and adopt the blocks that earlier processes have stored."""
        found = decide([rank.scan(self.life) for rank in self.ranks], self.era.id)
        for rank in self.ranks:
            rank.expected = {slot: rank.disk[slot].generation for slot in found.slots.values()}
        adopt_found(self.core, found)
        return found

    def after_kill(self, begun: int) -> LeftOnDisk:
        """What a kill now leaves on disk.

        begun: a bit for each rank that has yet to carry out a store: whether it has begun to write.
        """
        disks = [list(rank.disk) for rank in self.ranks]
        for transfer, copy in self.copies.items():
            for rank in sorted(copy.left) if copy.job.direction is Direction.STORE else ():
                begun, has_begun = divmod(begun, 2)
                if not has_begun:
                    for slot, before in self._before[transfer][rank].items():
                        disks[rank][slot] = before
        return LeftOnDisk(self.life, tuple(disks))

    def after_power_loss(self, chosen: int) -> LeftOnDisk:
        """What a power loss leaves on disk now. chosen: chooses among the possible contents."""
        disks = []
        for rank in self.ranks:
            disks.append(rank.after_power_loss(chosen))
            chosen //= 3 ** rank.unflushed()
        return LeftOnDisk(self.life, tuple(disks))

    def promised(self, *, power_loss: bool) -> set[bytes]:
        """The readable keys that must survive a kill now, or a power loss."""
        ledger = self.core.ledger
        return {
            key
            for key, slot in ledger.index.items()
            if ledger.readable(slot)
            and not (power_loss and any(rank.flushed[slot] != rank.disk[slot] for rank in self.ranks))
        }

    def is_damaged(self, key: bytes) -> bool:
        """Whether a load of this readable block would fail."""
        slot = self.core.ledger.index[key]
        return any(rank.disk[slot].value is None for rank in self.ranks)

    def _epoch(self) -> int:
        return self.surviving.epoch

    def _begin_era(self, weights: str | None) -> None:
        """Begin an era, as a callback of `DiskTier`. It is durable when this returns."""
        self._open_era.begin(weights, self.core.ledger.seq)
        found = read_era(self.surviving.era_file)
        if isinstance(found, str) or found.id == self.era.id:
            message = f"a reset has begun an era, but a process after a kill would find {found}"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        self.era = found

    # Copies.

    def plan(self) -> Sequence[TransferJob]:
        """Let the tier plan, and start the copies of a step. Returns their jobs."""
        jobs = self._open_era.named(self.tier.plan())
        self.core.end_step()
        for job in jobs:
            self._check_unused(job)
            if job.direction is Direction.STORE:
                slots = listed(job.pairs()[1])
                self._before[job.transfer] = [
                    {slot: rank.disk[slot] for slot in slots} for rank in self.ranks
                ]
            for rank in self.ranks:
                rank.begin(job)
                if job.direction is Direction.LOAD:
                    for slot in listed(job.pairs()[0]):
                        rank.host[slot] = None
            self.copies[job.transfer] = SmallCopy(job, set(range(len(self.ranks))))
        return jobs

    def flush(self, transfers: Iterable[int]) -> None:
        """Carry out the copies among these transfers of the host's ledger."""
        flushed = set(transfers)
        for copy in list(self.tier.copies.values()):
            if copy.host in flushed and copy.disk in self.copies:
                for rank in sorted(self.copies[copy.disk].left):
                    self.carry_out(copy.disk, rank)

    def carry_out(self, transfer: int, rank: int, *, good: bool = True) -> None:
        """Let this rank carry out its part of a copy, and report it."""
        copy = self.copies[transfer]
        copy.left.discard(rank)
        good = self.ranks[rank].end(copy.job, self.life, good)
        if not copy.left:
            del self.copies[transfer]
            self._before.pop(transfer, None)
        error, times = "" if good else COPY_ERROR, copy_times(transfer, rank)
        self.reports.append(WorkerReport(transfer, rank, good, error, *times))

    def touched(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """The copies that some rank has yet to carry out: (transfer, host slots, disk slots)."""
        for transfer, copy in self.copies.items():
            blocks, slots = map(listed, copy.job.pairs())
            yield transfer, [*blocks], [*slots]

    def _check_unused(self, job: TransferJob) -> None:
        """Check that the target of a copy is touched by no other copy."""
        blocks, slots = map(listed, job.pairs())
        is_load = job.direction is Direction.LOAD
        used = {slot for _, above, below in self.touched() for slot in (above if is_load else below)}
        if is_load:
            chunk = self.host.config.blocks_per_chunk
            for copy in self.workers.copies.values():
                used.update(place // chunk for place in listed(copy.job.pairs()[1]))
        both = sorted(used.intersection(blocks if is_load else slots))
        if both:
            where = "host" if is_load else "disk"
            message = f"copy {job.transfer} of the disk writes {where} slots {both} under another copy"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)

    def lose(self, transfer: int) -> None:
        """Give up a copy. Its ranks may still carry it out."""
        job = self.copies[transfer].job
        if job.direction is Direction.STORE:
            self.retired_places += len(listed(job.pairs()[0]))
            self.rest.not_stored(job.keys)
        self.tier.lose(transfer)

    def damageable(self) -> list[int]:
        """The sealed slots of the first rank whose payload is whole."""
        disk = self.ranks[0].disk
        return [place for place, slot in enumerate(disk) if slot.is_sealed and slot.value is not None]

    def damage(self, slot: int) -> None:
        """Change the payload of such a slot."""
        disk = self.ranks[0].disk
        disk[slot] = disk[slot]._replace(value=None)

    # What must hold.

    def check_places(self) -> None:
        """Check that no place for a copy to the disk is leaked (conservation, S1)."""
        used = sum(len(copy.places) for copy in self.tier.copies.values())
        places = len(self.tier._places) + used + self.retired_places
        if places != self.options.places:
            message = f"{places} staging places for the disk exist, of {self.options.places}"
            raise PropertyBroken(Property.CONSERVATION, message)

    def check_slot(self, key: bytes, slot: int, expected: list[list[bytes]] | None) -> None:
        """Check a readable block of the disk: sealed on each rank with this key, with these cells. Damaged
        bytes are excepted, because a load detects them. expected: None if no request has this key."""
        for number, rank in enumerate(self.ranks):
            held: DiskSlot = rank.disk[slot]
            if not held.is_sealed or held.key != key:
                message = (
                    f"the disk serves {key.hex()}, but slot {slot} of rank {number} is not sealed with it"
                )
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)
            if held.era != self.era.id or (held.value is not None and held.value[0] != self._epoch()):
                message = f"disk slot {slot} of rank {number} serves {key.hex()} from before a reset"
                raise PropertyBroken(Property.NO_STALE_DATA, message)
            if held.value is not None and held.value[1] != expected:
                message = f"disk slot {slot} of rank {number} serves {key.hex()}, but holds other bytes"
                raise PropertyBroken(Property.CORRECT_BYTES, message)
