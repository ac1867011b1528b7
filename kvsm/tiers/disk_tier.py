"""`DiskTier`: what goes from the host pool to the disk, what comes back, and the two transfers of each copy.

The disk has an offload core of its own, with the same machines. Its device blocks are the host's slots, and
its host blocks are the slots of the disk. Each copy between the two is one transfer in each ledger. Both are
planned before the copy leaves, and both end with the same reports. So each ledger protects its own end by its
own tables:

==============  ===========================================  ================================================
copy            in the host's ledger                         in the disk's ledger
==============  ===========================================  ================================================
to the disk     a load into places that stand for the disk:  a store from the host's slots
                nothing reuses the slots meanwhile
from the disk   a store from another source: a request       a load into the host's slots
                waits for its key as for any in flight
==============  ===========================================  ================================================

Each of the two loads is for a request of its own. Its name has the number of the transfer at the
other end: `disk-store-57` in the host's ledger copies what store 57 of the disk's ledger stores, and
`fetch-41-for-r7` in the disk's ledger brings what store 41 of the host's ledger stores.

What a report says of each end:

==============  =======  ===========================================  =======================================
copy            report   for the host's ledger                        for the disk's ledger
==============  =======  ===========================================  =======================================
to the disk     good     good                                         good: the key is on the disk
to the disk     bad      good: its slots were only read               bad: the key is not on the disk
from the disk   good     good: the key is on the host                 good
from the disk   bad      bad: the key is not on the host              bad: the disk's block is void
==============  =======  ===========================================  =======================================

`WritePolicy` says when a block goes to the disk: as soon as the host has it, or before the host evicts it.
With both, a block that the disk lacks is written when a request uses it. The host's eviction never waits
for a copy. A block that has to leave before its copy is lost, and counted.

The host serves a block again and again without a read from the disk. So uses on the host are reported to
the disk's ledger, as one `BlocksTouched` for each load, and its policy counts them (`used`). A block that
the host has too gives way last (`sparing`).

A block's way: `stored` queues it, or `plan` with write-back. `plan` begins its copy, and `report` ends it.
When a prompt comes again and the host has lost it, `fetch` begins the copy back, in the request's turn
(`Fetches`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.offloader.matching import may_defer
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import ConfigError, LimitReached
from kvsm.events import Direction, OffloadConfig
from kvsm.ids import listed, unpack
from kvsm.tiers.disk.health import HealthWatch
from kvsm.tiers.fetches import Fetches
from kvsm.tiers.sparing import spared

HOST, DISK = "host", "disk"
"""The tiers, for people. The host's log names the disk as the other end of these copies:
`StorePlanned.source`, `LoadPlanned.target`."""

PLACES = 256
"""How many blocks may be on their way to the disk at once."""

BATCH = 64
"""The most blocks of one copy. A copy ends as a whole, so a long one keeps its first block waiting."""

AHEAD_SHARE = 4
"""Write-back keeps a fourth of the host pool on the disk: the blocks that are evicted next."""

LOOKS = 8
"""How often write-back looks at all of them until the host has stored as many other blocks."""

PIECE = 16_384
"""How many of them one step looks at, and how many blocks one event touches at the start."""


class WritePolicy(Enum):
    """When a block that was stored on the host is stored on the disk."""

    THROUGH = "through"
    """At once. Each block is written, and the disk has nearly all that the host has."""
    BACK = "back"
    """Before the host evicts it, or when it is used again. Blocks that a reset overtakes first are never
    written."""


class TierCopy(NamedTuple):
    """A copy between host and disk in flight: its transfer in each ledger.

    direction: as the disk's ledger has it: `STORE` is to the disk.
    places: chunks of device blocks that stand for the disk in the host's ledger.
    holder: a request of the host's ledger that holds blocks until the copy is over.
    """

    host: int
    disk: int
    direction: Direction
    places: tuple[range, ...] = ()
    holder: str = ""


class TierCounts(msgspec.Struct):
    """How many blocks went which way since the start.

    not_stored: blocks that did not reach the disk. With write-through their copy failed, or was overtaken by
        a reset or by their eviction. It is made again if the block is used while the host has it. With
        write-back the host had to evict them before, or a reset overtook them while they waited.
    """

    to_disk: int = 0
    from_disk: int = 0
    not_stored: int = 0


def host_config(config: OffloadConfig, places: int = PLACES) -> OffloadConfig:
    """The same host core with a disk below it.

    It has `places` more chunks of device blocks, which stand for the disk. `transfer_ticks` is 0: copies are
    given up by `DiskTier.lose`, in both ledgers.
    """
    more = places * config.blocks_per_chunk
    return msgspec.structs.replace(config, device_blocks=config.device_blocks + more, transfer_ticks=0)


def disk_config(host: OffloadConfig, num_slots: int, policy: str = "lru") -> OffloadConfig:
    """The configuration of the disk's core below this host core.

    num_slots: how many blocks the disk holds. Raises `ConfigError`.
    """
    return OffloadConfig(
        host_blocks=num_slots,
        device_blocks=host.host_blocks,
        block_bytes=host.block_bytes * host.blocks_per_chunk,
        workers=host.workers,
        max_live_transfers=host.max_live_transfers,
        policy=policy,
        defer_ticks=0,
        transfer_ticks=0,
        block_tokens=host.block_tokens * host.blocks_per_chunk,
    )


class DiskTier:
    """Couples the core of a host pool with the core of the disk below it. One scheduler drives all three.

    host: made with `host_config`. Its last `places` chunks of device blocks stand for the disk.
    disk: made with `disk_config`. What recovery found is adopted before (`Offloader.adopt_blocks`).
    writes: when blocks go to the disk.
    void: makes durable that nothing stored before counts any more. It is given the new version of the
        weights; None: the same. Called in a reset, before that is answered.
    name: of the disk, for what is told.
    clock: monotonic time (s), by which a disk that fails is left alone for a while.

    Raises `ConfigError` if the two cores do not fit.
    """

    def __init__(
        self,
        host: Offloader,
        disk: Offloader,
        void: Callable[[str | None], None],
        places: int = PLACES,
        name: str = "the disk tier",
        writes: WritePolicy = WritePolicy.THROUGH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        above, below = host.config, disk.config
        if below.device_blocks != above.host_blocks or below.workers != above.workers:
            raise ConfigError(
                f"the disk's core has {below.device_blocks} device blocks and {below.workers} workers; below "
                f"{above.host_blocks} host slots of {above.workers} workers it needs as many (disk_config)"
            )
        if above.transfer_ticks:
            raise ConfigError(
                f"transfer_ticks is {above.transfer_ticks}; with a disk tier it must be 0 (host_config). The "
                "host's core would give up a copy alone; DiskTier.lose does it in both"
            )
        chunk = above.blocks_per_chunk
        self.host, self.disk = host, disk
        self.copies: dict[int, TierCopy] = {}
        """The copies in flight, by their transfer in the disk's ledger."""
        self.counts = TierCounts()
        self._void, self._writes = void, writes
        self._ahead = max(1, above.host_blocks // AHEAD_SHARE)
        """How many blocks that leave next are kept on the disk."""
        self._look_after = max(1, self._ahead // LOOKS)
        self._since_look = 0
        """How many blocks the host has stored since it was last begun to look at all of these."""
        self._seen_ahead = self._ahead
        """How many of them that look has seen."""
        self._looked_at = (0, 0)
        """The last events of host and disk when some of them were."""
        first = above.device_blocks - places * chunk
        self._places = [range(first + n * chunk, first + (n + 1) * chunk) for n in range(places)]
        self._health = HealthWatch(name, clock)
        self._fetches = Fetches(host)
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        """Keys to store on the disk, the oldest first. A dict would find its first key behind the places of
        all that were deleted."""
        self._planned: list[TransferJob] = []
        self._is_durable = True
        """Whether `void` has returned since the last reset."""
        self._reset_weights: str | None = None
        """What it is given then."""
        self._report_what_was_left()
        self.listen()

    def listen(self) -> None:
        """Get the host's uses and evictions from here on."""
        self.host.using, self.host.evicting = self.used, self.evicted

    # What comes back.

    def has(self, key: bytes) -> bool:
        """Whether the disk serves this key."""
        slot = self.disk.ledger.index.get(key)
        return slot is not None and self.disk.ledger.readable(slot)

    def fetch(self, hit: PendingHit) -> int | None:
        """Bring what the host lacks of this hit, if that may begin now (`Fetches`).

        hit: the host or the disk has each of its keys, which are in prefix order. Nothing is brought for a
            request that has waited long enough.

        Returns the transfer of the host's ledger after which to ask again; None: nothing comes. When all of
        the hit has come, and the request waits for it, it is matched.
        """
        index, fetches = self.host.ledger.index, self._fetches
        draining = self.host.ledger.draining() or self.disk.ledger.draining()
        if draining or not may_defer(self.host, hit.request):
            return None
        in_flight = fetches.in_flight(hit)
        if in_flight is not None:
            return in_flight
        resident = [index[key] for key in hit.keys if key in index]
        lacking = len(hit.keys) - len(resident)
        if not lacking:
            return None
        if _has_room(self.host) and _has_room(self.disk) and fetches.may_begin(resident, lacking):
            return self._bring(hit, resident)
        return fetches.turn()

    def _bring(self, hit: PendingHit, resident: Sequence[int]) -> int | None:
        """Plan the copy of what the host lacks. Returns its transfer in the host's ledger, if there is room.

        resident: what the host has. It is held until the copy ends.
        """
        host, disk = self.host, self.disk
        holder = f"hold-{host.ledger.seq}-for-{hit.request}"
        if resident and not self._hold(holder, resident):
            return None
        owners, parents = ((hit.request, len(hit.keys)),), dict(hit.parents)
        job = host.import_blocks(owners, hit.keys, DISK, parents).job
        if job is not None:
            record = host.ledger.transfers[job.transfer]
            found = [disk.ledger.index[key] for key in record.keys]
            asker = f"fetch-{job.transfer}-for-{hit.request}"
            below = self._load(disk, asker, found, listed(record.slots))
            if below is not None:
                self._fetches.begin(job.transfer, hit)
                copy = TierCopy(job.transfer, below.transfer, Direction.LOAD, holder=holder)
                self._begin(copy, below, record.keys)
                return job.transfer
            host.cancel(job.transfer)
        host.finish(holder)
        return None

    def _hold(self, name: str, slots: Sequence[int]) -> bool:
        """Let a request of this name hold slots of the host. Whether it can."""
        self.host.arrive(name, DISK)
        try:
            self.host.pin(name, slots, None)
        except LimitReached:
            self.host.finish(name)
            return False
        return True

    # What is stored below.

    def stored(self, keys: Collection[bytes]) -> None:
        """These keys were stored on the host, from the device."""
        self._since_look += len(keys)
        if self._writes is WritePolicy.THROUGH:
            self._queue(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """A request uses these keys of the host, in prefix order. Those that the disk lacks are queued."""
        self.disk.touch(keys)
        below = self.disk.ledger.index
        self._queue([key for key in keys if key not in below])

    def _report_what_was_left(self) -> None:
        """Report in which order the host would evict what an earlier process has left there. With
        write-through the disk stores what it lacks of it."""
        left, below = self.host.next_victims(self.host.config.host_blocks), self.disk.ledger.index
        for first in range(0, len(left), PIECE):
            self.disk.touch(left[first : first + PIECE][::-1])
        if self._writes is WritePolicy.THROUGH:
            self._queue([key for key in left if key not in below])

    def evicted(self, keys: Sequence[bytes]) -> None:
        """The host evicts these keys, so none of them waits any longer. Write-back should have stored them
        before."""
        below, waiting = self.disk.ledger.index, self._waiting
        left = [key for key in keys if key in waiting]
        for key in left:
            del waiting[key]
        if self._writes is WritePolicy.BACK:
            left = [key for key in keys if key not in below]
        self.counts.not_stored += len(left)

    def _queue_next_victims(self) -> None:
        """Queue what the host evicts next and the disk lacks.

        To look at all of it takes long in a large pool: so a step looks at a piece, and the next piece is for
        the next step. Each step looks at the first blocks, too, because uses move the order.
        """
        if not self._has_to_look():
            return
        if self._since_look >= self._look_after:
            self._since_look = self._seen_ahead = 0
        self._looked_at = self._now()
        below, free = self.disk.ledger.index, len(self.host.ledger.free)
        first = min(self._ahead, PLACES)
        seen, self._seen_ahead = self._seen_ahead, min(self._ahead, self._seen_ahead + PIECE)
        keys = [*self.host.next_victims(first - free)]
        if seen < self._seen_ahead:
            keys += self.host.next_victims(self._seen_ahead - free, max(0, max(seen, first) - free))
        self._queue([key for key in keys if key not in below])

    def _has_to_look(self) -> bool:
        """Whether write-back has to look at the next victims of the host again: the list was not seen to its
        end, enough blocks were stored, or host or disk have new events since the last look."""
        return (
            self._seen_ahead < self._ahead
            or self._since_look >= self._look_after
            or self._now() != self._looked_at
        )

    def _now(self) -> tuple[int, int]:
        """The last events of host and disk."""
        return self.host.ledger.seq, self.disk.ledger.seq

    def _queue(self, keys: Iterable[bytes]) -> None:
        self._waiting.update(dict.fromkeys(keys))

    def plan(self) -> tuple[TransferJob, ...]:
        """What leaves for the disk's workers now. All of it is submitted in both ledgers.

        A job names host slots as device blocks, disk slots as host blocks, and the keys.
        """
        if self._writes is WritePolicy.BACK:
            self._queue_next_victims()
        while self._waiting and self._store_some():
            pass
        planned, self._planned = tuple(self._planned), []
        if planned:
            self.host.submit([self.copies[job.transfer].host for job in planned])
            self.disk.submit([job.transfer for job in planned])
        return planned

    def has_work(self) -> bool:
        """Whether a copy is planned or in flight, or one may begin for a block that waits."""
        waits = self._waiting or (self._writes is WritePolicy.BACK and self._has_to_look())
        may_begin = waits and self._places and self._room_below() and self._health.read().takes_stores
        return bool(self.copies or may_begin)

    def _room_below(self) -> int:
        """The number of slots on disk that a store could use: free ones and evictable ones."""
        return len(self.disk.ledger.free) + self.disk.ledger.evictable()

    def _store_some(self) -> bool:
        """Plan one copy to the disk. Returns whether another one may follow at once."""
        host, disk = self.host, self.disk
        blocked = not self._places or not _has_room(host) or not _has_room(disk)
        if blocked or host.ledger.draining() or self._health.refusal() or not self._is_durable_now():
            return False
        keys = self._take_waiting(min(BATCH, len(self._places), self._room_below()))
        if not keys:
            return False
        slots = [host.ledger.index[key] for key in keys]
        # The disk's core has not seen that the host has stored other content into these slots.
        disk.rewrite(slots)
        prepared = disk.store((), keys, slots, spared=spared(host, disk, len(keys)))
        job = prepared.job
        self._note_not_stored(len(keys) - len(prepared.keys))
        if job is None:
            return False
        record = disk.ledger.transfers[job.transfer]
        slots = list(listed(record.device_blocks))
        asker = f"disk-store-{job.transfer}"
        places = tuple(self._places[: len(slots)])
        above = self._load(host, asker, slots, [block for place in places for block in place], DISK)
        if above is None:
            disk.cancel(job.transfer)
            self._note_not_stored(len(slots))
            return False
        del self._places[: len(slots)]
        self._begin(TierCopy(above.transfer, job.transfer, Direction.STORE, places), job, record.keys)
        return True

    def _take_waiting(self, most: int) -> list[bytes]:
        """The oldest keys that wait, as far as the host can be read there and the disk lacks them. The others
        wait no more."""
        index, readable, below = self.host.ledger.index, self.host.ledger.readable, self.disk.ledger.index
        keys: list[bytes] = []
        while self._waiting and len(keys) < most:
            key, _ = self._waiting.popitem(last=False)
            if key in below:
                continue
            if key in index and readable(index[key]):
                keys.append(key)
            else:
                self._note_not_stored(1)
        return keys

    def _load(
        self, core: Offloader, name: str, slots: Sequence[int], targets: Sequence[int], target: str = ""
    ) -> TransferJob | None:
        """Plan a load of these slots for a request of its own, which is over with it. None if it cannot be.

        targets: device blocks. target: what they stand for, if not for memory (`LoadPlanned`).
        """
        # No request has asked for a copy to another tier.
        asked = None if target else len(slots)
        core.arrive(name, target)
        try:
            core.pin(name, slots, None, asked, None if target else 0, asked)
            return core.prepare_load(name, targets, (), target)
        except LimitReached:
            return None
        finally:
            core.finish(name)

    def _begin(self, copy: TierCopy, job: TransferJob, keys: Sequence[bytes]) -> None:
        self.copies[copy.disk] = copy
        above = self.host.ledger
        if above.kept is not None:
            generations = tuple([above.generation[slot] for slot in listed(unpack(job.device_blocks))])
            job = msgspec.structs.replace(job, generations=generations)
        self._planned.append(msgspec.structs.replace(job, keys=tuple(keys)))

    # How copies end.

    def report(self, report: WorkerReport) -> bool:
        """Take a report of the disk's workers. It names the transfer of the disk's ledger.

        Returns whether a copy from the disk has ended well: its keys are on the host now.
        """
        copy = self.copies.get(report.transfer)
        result = self.disk.report(*report.arguments())
        if copy is None or result.rejected is not None:
            return False
        to_disk = copy.direction is Direction.STORE
        waiting = self._fetches.waiting(copy.host)
        good, times = report.good or to_disk, (report.queued_us, report.copied_us)
        self.host.report(copy.host, report.worker, good, report.error, *times)
        if to_disk and not report.good:
            self._health.failed(report.error)
        ended = result.ended
        if ended is None:
            return False
        if ended.good and not to_disk:
            self.counts.from_disk += len(ended.device_blocks)
            self._fetches.match(waiting)
        self._end(copy)
        if to_disk:
            self._note_store(good=ended.good, blocks=len(ended.keys))
        return ended.good and not to_disk

    def lose(self, transfer: int) -> None:
        """Give up a copy that some worker will never report. Both ledgers retire what it may still touch.

        transfer: of the disk's ledger.
        """
        copy = self.copies[transfer]
        blocks = len(self.host.ledger.transfers[copy.host].slots)
        self.host.lose(copy.host)
        self.disk.lose(copy.disk)
        # Its places are retired in the host's ledger, and are not used again.
        self._end(copy._replace(places=()))
        if copy.direction is Direction.STORE:
            self._health.failed("a copy was not reported in time")
            self._note_store(good=False, blocks=blocks)

    def reset(self, weights: str | None = None) -> None:
        """Make everything on the disk unmatchable, at once and for every later process. Legal at any time;
        call it just after the host's own reset. Copies in flight go on, as in any reset.

        weights: as `Offloader.reset` takes it. Raises what `void` raises: then nothing of before can be
        matched in this process, and a later one may find it. `void` is called again before the next store.
        Otherwise a later process could take what is stored from here on for blocks of the old weights.
        """
        planned, self._planned = self._planned, []
        for job in planned:
            copy = self.copies[job.transfer]
            self.host.cancel(copy.host)
            self.disk.cancel(copy.disk)
            self._end(copy)
        self.counts.not_stored += len(self._waiting)
        self._waiting.clear()
        if weights is not None or self._is_durable:
            self._reset_weights = weights
        self._is_durable = False
        self.disk.reset(weights)
        self._make_durable()

    def _make_durable(self) -> None:
        """Make the last reset durable. Raises what `void` raises."""
        self._void(self._reset_weights)
        self._is_durable = True

    def _is_durable_now(self) -> bool:
        """Whether the last reset is durable. If it is not, this tries once more."""
        if not self._is_durable:
            try:
                self._make_durable()
            except OSError as error:
                self._health.failed(f"a reset could not be made durable: {error}")
        return self._is_durable

    def _end(self, copy: TierCopy) -> None:
        del self.copies[copy.disk]
        self._fetches.end(copy.host)
        self.host.finish(copy.holder)
        self._places += copy.places

    def _note_store(self, *, good: bool, blocks: int) -> None:
        if good:
            self.counts.to_disk += blocks
            self._health.succeeded()
        else:
            self._note_not_stored(blocks)

    def _note_not_stored(self, blocks: int) -> None:
        """The copies of these blocks came to nothing. With write-back the next look finds them again."""
        if self._writes is WritePolicy.THROUGH:
            self.counts.not_stored += blocks


def _has_room(core: Offloader) -> bool:
    """Whether one more transfer may live."""
    return len(core.ledger.transfers) < core.config.max_live_transfers
