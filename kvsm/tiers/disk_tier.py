"""`DiskTier`: copies blocks from the host pool to the disk and back, as one transfer in each of two ledgers.

The disk has its own offload core, with the same state machines. Its device blocks are the host's slots, and
its host blocks are the slots of the disk. Each copy between the two is one transfer in each ledger. Both
transfers are planned before the copy leaves, and both end with the same reports. So each ledger protects its
own blocks by its own state machines:

==============  ===========================================  ================================================
copy            in the host's ledger                         in the disk's ledger
==============  ===========================================  ================================================
to the disk     a load into places that stand for the disk:  a store from the host's slots
                the slots are not reused meanwhile
from the disk   a store with another source: requests wait   a load into the host's slots
                for its keys as for any store in flight
==============  ===========================================  ================================================

Each of these loads belongs to a request that is made for it. The request's name has the id of the store in
the other ledger: `disk-store-57` in the host's ledger is the load side of store 57 in the disk's ledger, and
`fetch-41-for-r7` in the disk's ledger is the load side of store 41 in the host's ledger.

How a report counts in each ledger:

==============  =======  ===========================================  =======================================
copy            report   for the host's ledger                        for the disk's ledger
==============  =======  ===========================================  =======================================
to the disk     good     good                                         good: the key is on the disk
to the disk     bad      good: its slots were only read               bad: the key is not on the disk
from the disk   good     good: the key is on the host                 good
from the disk   bad      bad: the key is not on the host              bad: the disk's block is void
==============  =======  ===========================================  =======================================

`WritePolicy` decides when a block is written to the disk: as soon as it is stored on the host, or before the
host evicts it. With either policy, a block that the disk lacks is written when a request uses it. The host's
eviction never waits for a copy: a block that is evicted before its copy is lost, and counted.

The host may serve a block many times without a read from the disk. So uses on the host are reported to the
disk's ledger, as one `BlocksTouched` for each load, and the disk's policy counts them (`used`). The disk
evicts blocks last that are also on the host (`sparing`).

The path of a block: `stored`, or `plan` with write-back, queues it; `plan` begins its copy; `report` ends the
copy. When a prompt arrives again whose blocks the host has evicted, `fetch` begins the copy back, in the
request's turn (`Fetches`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.offloader.admission import may_refuse
from kvsm.core.offloader.matching import may_defer
from kvsm.core.offloader.storing import recall
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.core.policies import ADMITTING, EvictionPolicy
from kvsm.errors import ConfigError, LimitReached
from kvsm.events import Direction, OffloadConfig
from kvsm.ids import listed, unpack
from kvsm.tiers.disk.health import HealthWatch
from kvsm.tiers.fetches import Fetches
from kvsm.tiers.sparing import spared

HOST, DISK = "host", "disk"
"""Names of the tiers, for people. The host's log names the disk as the other side of these copies, in
`StorePlanned.source` and `LoadPlanned.target`."""

PLACES = 256
"""Most blocks in flight to the disk at a time."""

BATCH = 64
"""Most blocks of one copy. A copy ends as a whole, so its first block waits for its last."""

AHEAD_SHARE = 4
"""Write-back keeps a quarter of the host pool on the disk, too: the blocks that the host evicts next."""

LOOKS = 8
"""How often write-back scans all next victims while the host stores as many new blocks."""

PIECE = 16_384
"""Most next victims that one step scans, and most blocks that one event touches at the start."""


class WritePolicy(Enum):
    """When a block that was stored on the host is stored on the disk."""

    THROUGH = "through"
    """At once. Every block is written, and the disk has nearly all blocks of the host."""
    BACK = "back"
    """Before the host evicts the block, or when it is used again. A block that is reset before is never
    written."""


class TierCopy(NamedTuple):
    """A copy between host and disk in flight, with its transfer in each ledger.

    host, disk: the transfer in the host's ledger and in the disk's ledger.
    direction: the direction in the disk's ledger: `STORE` is to the disk.
    places: chunks of device blocks that stand for the disk in the host's ledger.
    holder: a request of the host's ledger that pins blocks until the copy ends; empty: none.
    """

    host: int
    disk: int
    direction: Direction
    places: tuple[range, ...] = ()
    holder: str = ""


class TierCounts(msgspec.Struct):
    """Counts of blocks since the start.

    to_disk: blocks stored on the disk.
    from_disk: blocks copied back to the host.
    not_stored: blocks that were not stored on the disk. With write-through: their copy failed, or a reset or
        an eviction came before it; they are queued again if they are used while they are on the host. With
        write-back: the host evicted them first, or they were queued at a reset.
    """

    to_disk: int = 0
    from_disk: int = 0
    not_stored: int = 0


def host_config(config: OffloadConfig, places: int = PLACES) -> OffloadConfig:
    """Return the configuration of a host core, changed for a disk below it.

    It has `places` more chunks of device blocks, which stand for the disk. `transfer_ticks` is 0, because
    only `DiskTier.lose` may give up copies: in both ledgers.
    """
    more = places * config.blocks_per_chunk
    return msgspec.structs.replace(config, device_blocks=config.device_blocks + more, transfer_ticks=0)


def disk_config(host: OffloadConfig, num_slots: int, policy: str = "lru") -> OffloadConfig:
    """Return the configuration of the disk's core below this host core. Raises `ConfigError`.

    num_slots: number of blocks on the disk.
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


def _check_fit(host: Offloader, disk: Offloader) -> None:
    """Raise `ConfigError` if the two cores cannot be the tiers of one scheduler."""
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
    check_loads_all(above.load_only_if_faster)
    for config, core in ((above, host), (below, disk)):
        check_admits_all(config.policy, core.ledger.policy)


def check_admits_all(name: str, policy: EvictionPolicy) -> None:
    """Raise `ConfigError` if this policy may refuse stores. Call it before the files of a disk are opened."""
    if may_refuse(policy):
        raise ConfigError(
            f"policy {name!r} refuses stores, and a block that the host refuses would never "
            f"reach the disk; with a disk tier, choose one of {', '.join(ADMITTING)}"
        )


def check_loads_all(load_only_if_faster: bool) -> None:
    """Raise `ConfigError` if hits may be declined. Call it before the files of a disk are opened."""
    if load_only_if_faster:
        raise ConfigError(
            "load_only_if_faster measures no copies from a disk, so it cannot say whether a hit there pays; "
            "with a disk tier, omit it"
        )


class DiskTier:
    """Couples the core of a host pool with the core of the disk below it. One scheduler calls all three.

    host: a core with `host_config`. Its last `places` chunks of device blocks stand for the disk.
    disk: a core with `disk_config`, which has already adopted the recovered blocks (`adopt_found`).
    void: invalidates all blocks on disk durably. Called in each reset, before the reset is answered, with
        the new version of the weights; None: unchanged.
    places: most blocks in flight to the disk at a time.
    name: name of the disk, for messages.
    writes: when blocks are written to the disk.
    clock: monotonic time (s), for the pauses after failures of the disk.

    Raises `ConfigError` if the two configurations do not match, or if a policy may refuse stores.
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
        _check_fit(host, disk)
        above = host.config
        chunk = above.blocks_per_chunk
        self.host, self.disk = host, disk
        self.copies: dict[int, TierCopy] = {}
        """Transfer of the disk's ledger -> the copy, for planned copies and copies in flight."""
        self.counts = TierCounts()
        self._void, self._writes = void, writes
        self._ahead = max(1, above.host_blocks // AHEAD_SHARE)
        """Number of next victims of the host that write-back keeps on the disk."""
        self._look_after = max(1, self._ahead // LOOKS)
        """Number of blocks that the host stores between two scans of the next victims."""
        self._since_look = 0
        """Number of blocks that the host has stored since the last scan began."""
        self._seen_ahead = self._ahead
        """Number of next victims that the current scan has seen."""
        self._looked_at = (0, 0)
        """The last events of host and disk at the last piece of a scan."""
        self._written = set[bytes]()
        """With write-back, the keys that were stored on the disk since the last scan began. They are not
        written again before the next scan: otherwise next victims that evict each other from a small disk
        would be written forever."""
        first = above.device_blocks - places * chunk
        self._places = [range(first + n * chunk, first + (n + 1) * chunk) for n in range(places)]
        self._health = HealthWatch(name, clock)
        self._fetches = Fetches(host)
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        """Keys to store on the disk, oldest first. An OrderedDict, because a dict finds its first key slowly
        after many deletions at its front."""
        self._planned: list[TransferJob] = []
        """Jobs that the next `plan` returns."""
        self._is_durable = True
        """Whether `void` has succeeded since the last reset."""
        self._reset_weights: str | None = None
        """The argument of `void` for the last reset."""
        self._report_what_was_left()
        self.listen()

    def listen(self) -> None:
        """Have the host call `used` and `evicted` from now on."""
        self.host.using, self.host.evicting = self.used, self.evicted

    # Copies from the disk.

    def has(self, key: bytes) -> bool:
        """Whether the block of this key is readable on the disk."""
        slot = self.disk.ledger.index.get(key)
        return slot is not None and self.disk.ledger.readable(slot)

    def fetch(self, hit: PendingHit) -> int | None:
        """Plan the copy of the blocks of this hit that the host lacks, if it may begin now (`Fetches`).

        hit: its keys, in prefix order, are each on the host or on the disk.

        Returns the transfer of the host's ledger for which the request should wait; None: nothing is copied,
        for example because the request may not wait any longer. When all blocks of the hit are on the host
        and the request still waits, it is matched.
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
        if (
            _has_room(self.host)
            and _has_room(self.disk)
            and fetches.may_begin(hit.request, resident, lacking)
        ):
            return self._bring(hit, resident)
        return fetches.turn()

    def _bring(self, hit: PendingHit, resident: Sequence[int]) -> int | None:
        """Plan the copy of the blocks that the host lacks. Returns its transfer in the host's ledger; None if
        there is no room.

        resident: the host slots of its other blocks. They are pinned until the copy ends.
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
        """Pin slots of the host for a new request of this name. Returns whether that succeeded."""
        self.host.arrive(name, DISK)
        try:
            self.host.pin(name, slots, None)
        except LimitReached:
            self.host.finish(name)
            return False
        return True

    # Copies to the disk.

    def stored(self, keys: Collection[bytes]) -> None:
        """Note that these keys were stored on the host from the device. With write-through, queue them."""
        self._since_look += len(keys)
        self._written.difference_update(keys)
        if self._writes is WritePolicy.THROUGH:
            self._queue(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that a request uses these keys on the host, in prefix order: touch them on the disk, and queue
        keys that the disk lacks."""
        self.disk.touch(keys)
        below = self.disk.ledger.index
        self._queue([key for key in keys if key not in below])

    def _report_what_was_left(self) -> None:
        """Touch the blocks that an earlier process has left on the host, so that the disk's policy gets the
        host's eviction order. With write-through, queue those that the disk lacks."""
        left, below = self.host.next_victims(self.host.config.host_blocks), self.disk.ledger.index
        for first in range(0, len(left), PIECE):
            self.disk.touch(left[first : first + PIECE][::-1])
        if self._writes is WritePolicy.THROUGH:
            self._queue([key for key in left if key not in below])

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Note that the host evicts these keys: remove them from the queue, and count the keys that did not
        reach the disk."""
        below, waiting = self.disk.ledger.index, self._waiting
        left = [key for key in keys if key in waiting]
        for key in left:
            del waiting[key]
        if self._writes is WritePolicy.BACK:
            left = [key for key in keys if key not in below]
        self.counts.not_stored += len(left)

    def _queue_next_victims(self) -> None:
        """Queue the next victims of the host that the disk lacks.

        A scan of all next victims takes long in a large pool, so each step scans one piece of them. Each step
        also scans the first victims again, because uses change the eviction order.
        """
        if not self._has_to_look():
            return
        if self._since_look >= self._look_after:
            self._since_look = self._seen_ahead = 0
            self._written.clear()
        self._looked_at = self._now()
        below, free = self.disk.ledger.index, len(self.host.ledger.free)
        first = min(self._ahead, PLACES)
        seen, self._seen_ahead = self._seen_ahead, min(self._ahead, self._seen_ahead + PIECE)
        keys = [*self.host.next_victims(first - free)]
        if seen < self._seen_ahead:
            keys += self.host.next_victims(self._seen_ahead - free, max(0, max(seen, first) - free))
        self._queue([key for key in keys if key not in below and key not in self._written])

    def _has_to_look(self) -> bool:
        """Whether write-back must scan next victims: the current scan is incomplete, a new scan is due, or
        host or disk have new events since the last piece."""
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
        """Return the jobs that leave for the disk's workers now, submitted in both ledgers.

        The device blocks of a job are host slots, its host blocks are disk slots; it also has the keys.
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
        """Whether a copy is planned or in flight, or one may begin for a queued block."""
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
        # Tell the disk's core that its device blocks, the host slots, have new content.
        disk.rewrite(slots)
        recall(disk, keys)
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
        """Take up to `most` keys from the queue, oldest first. Keys that are on the disk already, or are not
        readable on the host, are dropped."""
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
        """Plan a load of these slots for a new request, which is finished at once. None if that is refused.

        targets: device blocks.
        target: the tier that they stand for; empty: they are the slots of the host (`LoadPlanned`).
        """
        # A copy to another tier serves no request, so it has no hit.
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

    # The end of copies.

    def report(self, report: WorkerReport) -> bool:
        """Apply a report of a disk's worker to both ledgers. It names the transfer of the disk's ledger.

        Returns whether a copy from the disk has ended good, so that its keys are now on the host.
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
            if ended.good and self._writes is WritePolicy.BACK:
                self._written.update(ended.keys)
        return ended.good and not to_disk

    def lose(self, transfer: int) -> None:
        """Give up a copy that some worker will never report. Both ledgers retire the slots that it may still
        access.

        transfer: the copy's transfer in the disk's ledger.
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
        """Invalidate all blocks on the disk, for this and every later process. Legal at any time; call it
        right after the host's own reset. Copies in flight continue, as in any reset.

        weights: as in `Offloader.reset`.

        Raises what `void` raises. Then this process matches no old block, but a later process may. `void` is
        called again before the next store; otherwise a later process could take new blocks for blocks of the
        old weights.
        """
        planned, self._planned = self._planned, []
        for job in planned:
            copy = self.copies[job.transfer]
            self.host.cancel(copy.host)
            self.disk.cancel(copy.disk)
            self._end(copy)
        self.counts.not_stored += len(self._waiting)
        self._waiting.clear()
        self._written.clear()
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
        """Try again to make the last reset durable if it is not. Returns whether it is."""
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
        """Count blocks whose copy to the disk failed or was not made. Not with write-back: the next scan of
        next victims queues them again."""
        if self._writes is WritePolicy.THROUGH:
            self.counts.not_stored += blocks


def _has_room(core: Offloader) -> bool:
    """Whether the core may have one more live transfer."""
    return len(core.ledger.transfers) < core.config.max_live_transfers
