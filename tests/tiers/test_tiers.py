"""`DiskTier`: what each report tells each ledger, what waits, and what a reset leaves."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.core.kv_events import MEDIUM_STORAGE, Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LookupResult, Offloader, PendingHit
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.core.policies import ADMITTING
from kvsm.core.scheduler import KVCacheGroup, LastStep, OffloadScheduler, SchedulerConfig, StepOutput
from kvsm.errors import ConfigError, IllegalTransition, InvalidEvent
from kvsm.events import Direction, OffloadConfig, StorePlanned
from kvsm.states.block import STORED
from kvsm.states.words import STATE_MASK
from kvsm.tiers import DiskTier, WritePolicy, disagreements, disk_config, disk_tier, host_config
from kvsm.tiers.disk import DiskEra, SlotGeneration, read_era
from kvsm.tiers.disk.health import FAILURES

HOST, DISK, DEVICE, PLACES = 4, 6, 8, 4
KEYS = [f"key {n}".encode() for n in range(12)]


class Tiers:
    """Two cores and a tier between them, whose copies end as the test says."""

    def __init__(
        self,
        host_blocks: int = HOST,
        chunk: int = 1,
        workers: int = 1,
        writes: WritePolicy = WritePolicy.THROUGH,
        places: int = PLACES,
        disk: int = DISK,
        policy: str = "lru",
    ) -> None:
        config = OffloadConfig(
            host_blocks=host_blocks,
            device_blocks=DEVICE,
            blocks_per_chunk=chunk,
            workers=workers,
            defer_ticks=8,
            policy=policy,
        )
        config = host_config(config, places)
        self.log = MemoryLog()
        self.host = Offloader(config, self.log)
        self.disk = Offloader(disk_config(config, disk, policy))
        self.voids: list[str | None] = []
        self.tier = DiskTier(self.host, self.disk, self.voids.append, places, writes=writes)

    def store(self, keys: Sequence[bytes]) -> None:
        """The engine stores these on the host."""
        blocks = list(range(len(keys) * self.host.config.blocks_per_chunk))
        self.host.rewrite(blocks)
        job = self.host.store((), keys, blocks).job
        assert job is not None
        self.host.submit([job.transfer])
        for worker in range(self.host.config.workers):
            ended = self.host.report(job.transfer, worker, True).ended
        assert ended is not None
        self.tier.stored(ended.keys)

    def end(self, job: TransferJob, good: bool = True) -> bool:
        ends = [
            self.tier.report(WorkerReport(job.transfer, worker, good, "" if good else "no"))
            for worker in range(self.host.config.workers)
        ]
        return ends[-1]

    def write_through(self, keys: Sequence[bytes]) -> None:
        self.store(keys)
        for job in self.tier.plan():
            self.end(job)

    def use(self, name: str, keys: Sequence[bytes]) -> None:
        """A request loads these from the host."""
        assert self.host.match(name, keys).hits == len(keys)
        job = self.host.prepare_load(name, list(range(len(keys))))
        assert job is not None
        self.host.submit([job.transfer])
        for worker in range(self.host.config.workers):
            self.host.report(job.transfer, worker, True)
        self.host.finish(name)

    def check(self) -> None:
        assert disagreements(self.tier) == []
        assert check_ledger(self.host.ledger) == []
        assert check_ledger(self.disk.ledger) == []


def test_what_is_stored_on_the_host_is_stored_on_the_disk() -> None:
    tiers = Tiers()
    tiers.store(KEYS[:3])
    (job,) = tiers.tier.plan()
    assert (job.direction, job.keys) == (Direction.STORE, tuple(KEYS[:3]))
    tiers.check()
    assert not tiers.tier.has(KEYS[0])
    tiers.end(job)
    assert all(map(tiers.tier.has, KEYS[:3]))
    assert tiers.tier.plan() == ()
    assert not tiers.tier.has_work()
    tiers.check()


def test_a_host_slot_is_not_reused_while_it_is_copied_to_the_disk() -> None:
    """No reuse in flight (S3): the host is full, and its blocks are all on their way down."""
    tiers = Tiers()
    tiers.store(KEYS[:HOST])
    (job,) = tiers.tier.plan()
    assert tiers.host.store((), KEYS[4:5], [0]).job is None
    tiers.end(job)
    assert tiers.host.store((), KEYS[4:5], [0]).job is not None


def test_a_block_that_the_host_has_lost_comes_back_from_the_disk() -> None:
    """A request waits for it as for any block in flight."""
    tiers = Tiers()
    tiers.write_through(KEYS[:2])
    tiers.write_through(KEYS[2:6])
    assert tiers.host.lookup(KEYS[0]) is LookupResult.MISS
    transfer = tiers.tier.fetch(PendingHit("r", KEYS[:2]))
    assert tiers.host.match("r", KEYS[:2]).waits_for == transfer
    (job,) = tiers.tier.plan()
    assert (job.direction, job.keys) == (Direction.LOAD, tuple(KEYS[:2]))
    tiers.check()
    assert tiers.end(job)
    assert tiers.host.match("r", KEYS[:2]).hits == 2
    tiers.check()


def test_what_a_prompt_has_on_the_host_is_not_evicted_for_its_rest() -> None:
    tiers = Tiers()
    tiers.write_through(KEYS[:3])
    tiers.write_through(KEYS[3:6])
    # The host has keys 0 and 3 to 5; key 0 would be evicted next.
    assert tiers.host.lookup(KEYS[0]) is LookupResult.HIT
    assert tiers.tier.fetch(PendingHit("r", KEYS[:3])) is not None
    assert tiers.host.lookup(KEYS[0]) is LookupResult.HIT


@pytest.mark.parametrize("good", [True, False])
def test_a_copy_to_the_disk_only_reads_the_host(good: bool) -> None:
    """Whether it fails or not: the host's blocks stay. If it fails, the key is not on the disk (S6)."""
    tiers = Tiers(workers=2)
    tiers.store(KEYS[:2])
    (job,) = tiers.tier.plan()
    tiers.end(job, good)
    assert [tiers.tier.has(key) for key in KEYS[:2]] == [good] * 2
    assert [tiers.host.lookup(key) for key in KEYS[:2]] == [LookupResult.HIT] * 2
    tiers.check()


def test_a_request_does_not_wait_for_a_copy_to_the_disk() -> None:
    """Stored, so served (S19): the copy only reads the slots."""
    tiers = Tiers()
    tiers.store(KEYS[:2])
    (job,) = tiers.tier.plan()
    assert tiers.host.in_flight([tiers.host.ledger.index[key] for key in KEYS[:2]]) is None
    tiers.use("r", KEYS[:2])
    tiers.end(job)
    tiers.check()


def test_a_copy_from_the_disk_that_fails_leaves_the_key_on_no_tier() -> None:
    """Failure is not success (S6): the disk gives the block up, and the request computes it."""
    tiers = Tiers()
    tiers.write_through(KEYS[:2])
    tiers.write_through(KEYS[2:6])
    tiers.tier.fetch(PendingHit("r", KEYS[:2]))
    (job,) = tiers.tier.plan()
    assert not tiers.end(job, good=False)
    assert [tiers.tier.has(key) for key in KEYS[:2]] == [False] * 2
    assert tiers.host.match("r", KEYS[:2]).hits == 0
    tiers.check()


def test_after_a_reset_neither_tier_serves_anything_and_later_stores_reach_the_disk() -> None:
    """No stale data (S14). The same content in the same slots is new content, and is stored again."""
    tiers = Tiers()
    tiers.write_through(KEYS[:2])
    tiers.write_through(KEYS[2:6])
    tiers.tier.fetch(PendingHit("r", KEYS[:2]))
    tiers.end(tiers.tier.plan()[0])
    tiers.host.reset("v2")
    tiers.tier.reset("v2")
    assert tiers.voids == ["v2"]
    assert not any(map(tiers.tier.has, KEYS))
    assert tiers.disk.ledger.weights == "v2"
    tiers.write_through(KEYS[:2])
    assert all(map(tiers.tier.has, KEYS[:2]))
    tiers.check()


def test_a_reset_leaves_copies_in_flight_to_end_and_takes_back_planned_ones() -> None:
    """What they touch stays quarantined until they are reported (S3)."""
    tiers = Tiers()
    tiers.store(KEYS[:2])
    (flying,) = tiers.tier.plan()
    tiers.write_through(KEYS[2:4])
    tiers.tier.fetch(PendingHit("r", KEYS[2:4]))
    assert not tiers.host.reset()
    tiers.tier.reset()
    assert list(tiers.tier.copies) == [flying.transfer]
    tiers.check()
    tiers.end(flying)
    assert not tiers.host.ledger.draining()
    assert len(tiers.host.ledger.free) == HOST
    assert not tiers.tier.has(KEYS[0])
    tiers.check()


def test_a_reset_whose_era_cannot_be_written_is_told_and_nothing_of_before_is_served_here() -> None:
    """No stale data (S14). The caller hears of it, because a later process may find what lies on disk."""
    tiers = Tiers()
    tiers.write_through(KEYS[:2])

    def full(_: str | None) -> None:
        raise OSError(28, "No space left on device")

    tiers.tier = DiskTier(tiers.host, tiers.disk, full, PLACES)
    tiers.host.reset()
    with pytest.raises(OSError, match="No space"):
        tiers.tier.reset()
    assert not tiers.tier.has(KEYS[0])
    assert tiers.host.lookup(KEYS[0]) is LookupResult.MISS


def test_nothing_is_stored_on_the_disk_until_a_failed_reset_is_durable() -> None:
    """No stale data (S14). A later process with the old weights would take it for theirs."""
    tiers = Tiers()
    full, told = True, []

    def void(weights: str | None) -> None:
        told.append(weights)
        if full:
            raise OSError(28, "No space left on device")

    tiers.tier = DiskTier(tiers.host, tiers.disk, void, PLACES)
    for weights in ("v2", None):
        tiers.host.reset(weights)
        with pytest.raises(OSError, match="No space"):
            tiers.tier.reset(weights)
    tiers.store(KEYS[:2])
    assert tiers.tier.plan() == ()
    assert tiers.tier._health.read().error.startswith("a reset could not be made durable: [Errno 28]")
    full = False
    (job,) = tiers.tier.plan()
    assert job.keys == tuple(KEYS[:2])
    assert told == ["v2", "v2", "v2", "v2"], "a reset that is still owed names its weights"
    tiers.tier.plan()
    assert len(told) == 4, "it is durable"


def test_a_copy_that_is_never_reported_retires_what_it_may_touch_on_both_tiers() -> None:
    """No reuse in flight (S3)."""
    tiers = Tiers()
    tiers.write_through(KEYS[:2])
    tiers.write_through(KEYS[2:6])
    tiers.tier.fetch(PendingHit("r", KEYS[:2]))
    (job,) = tiers.tier.plan()
    tiers.tier.lose(job.transfer)
    assert not tiers.host.ledger.transfers
    assert not tiers.disk.ledger.transfers
    assert not tiers.tier.report(WorkerReport(job.transfer, 0, True)), "a late report changes nothing"
    assert tiers.host.match("r", KEYS[:2]).hits == 0
    tiers.check()


def test_a_disk_that_fails_gets_no_more_stores_and_the_blocks_wait() -> None:
    """It steps back, and the engine goes on. When it takes stores again, it gets what the host still has."""
    tiers = Tiers(host_blocks=8)
    for n in range(FAILURES):
        tiers.store(KEYS[n : n + 1])
        (job,) = tiers.tier.plan()
        tiers.end(job, good=False)
    tiers.store(KEYS[5:7])
    assert tiers.tier.plan() == ()
    assert not tiers.tier.has_work(), "an idle engine need not keep stepping"
    tiers.tier._health.succeeded()
    (job,) = tiers.tier.plan()
    assert job.keys == tuple(KEYS[5:7])


class CountedWalks(OrderedDict[bytes, None]):
    """Counts how often somebody begins to walk through it."""

    walks = 0

    def __iter__(self) -> Iterator[bytes]:
        self.walks += 1
        return super().__iter__()


def test_nobody_walks_through_a_backlog() -> None:
    """A dict finds its first key behind the places of all that were deleted. To look for it once a key took
    16 ms a step, with a backlog of a quarter of a million keys, and once a copy 1 ms with 200,000."""
    tiers = Tiers(host_blocks=8)
    tiers.store(KEYS[:6])
    waiting = CountedWalks(tiers.tier._waiting)
    tiers.tier._waiting = waiting
    (job,) = tiers.tier.plan()
    assert len(job.keys) == PLACES
    assert waiting.walks == 0


def test_each_block_that_does_not_reach_the_disk_is_counted() -> None:
    """Nothing is dropped in silence: a copy fails, too many blocks wait, a reset overtakes them, and the host
    loses them before their copy."""
    tiers = Tiers()
    tiers.store(KEYS[:1])
    (job,) = tiers.tier.plan()
    tiers.end(job, good=False)
    assert tiers.tier.counts.not_stored == 1
    tiers.store(KEYS[1:4])
    tiers.store(KEYS[4:8])
    assert tiers.tier.counts.not_stored == 1 + 3, "only as many wait as the host holds"
    tiers.host.reset()
    tiers.tier.reset()
    assert tiers.tier.counts.not_stored == 4 + 4
    tiers.store(KEYS[:2])
    tiers.host.reset()
    tiers.tier.plan()
    assert tiers.tier.counts.not_stored == 8 + 2, "the host has lost them"


def test_kv_events_of_the_disk_fold_to_what_it_serves() -> None:
    """Events are state (S10): under a medium of their own, with evictions and a reset."""
    tiers = Tiers()
    tiers.disk = Offloader(disk_config(tiers.host.config, DISK), publisher=Publisher(medium=MEDIUM_STORAGE))
    tiers.tier = DiskTier(tiers.host, tiers.disk, tiers.voids.append, PLACES)
    told: set[bytes] = set()
    for first in (0, 4, 8):
        tiers.write_through(KEYS[first : first + 4])
        for event in tiers.disk.take_events():
            assert event.medium == "STORAGE"
            told = told - set(event.keys) if event.removed else told | set(event.keys)
        assert told == set(tiers.disk.ledger.index)
    assert len(told) == DISK
    tiers.host.reset()
    tiers.tier.reset()
    (cleared,) = tiers.disk.take_events()
    assert (cleared.removed, set(cleared.keys)) == (True, told)


def test_a_slot_of_several_device_blocks_is_one_block_of_the_disk() -> None:
    tiers = Tiers(chunk=2)
    tiers.store(KEYS[:2])
    (job,) = tiers.tier.plan()
    blocks, slots = job.pairs()
    assert len(blocks) == len(slots) == 2
    tiers.check()
    tiers.end(job)
    assert all(map(tiers.tier.has, KEYS[:2]))


def test_cores_that_do_not_fit_are_refused() -> None:
    host = Offloader(OffloadConfig(host_blocks=4, device_blocks=8))
    disk = Offloader(OffloadConfig(host_blocks=4, device_blocks=5))
    with pytest.raises(ConfigError, match="disk_config"):
        DiskTier(host, disk, [].append)
    config = OffloadConfig(host_blocks=4, device_blocks=8, transfer_ticks=9)
    with pytest.raises(ConfigError, match="does it in both"):
        DiskTier(Offloader(config), Offloader(disk_config(config, 5)), [].append)


def test_a_last_step_waits_for_the_copies_to_the_disk_too() -> None:
    """Flush at last step (S17)."""
    tiers = Tiers()
    config = SchedulerConfig(groups=(KVCacheGroup(4),), hash_tokens=4, last_step=LastStep.FLUSH)
    scheduler = OffloadScheduler(tiers.host, config, tiers.tier)
    tiers.store(KEYS[:2])
    (job,) = tiers.tier.plan()
    assert scheduler.build_connector_meta(StepOutput()).flush == (tiers.tier.copies[job.transfer].host,)


# Uses on the host.


@pytest.mark.parametrize("policy", ADMITTING)
@pytest.mark.parametrize("writes", WritePolicy)
def test_a_prompt_that_is_asked_again_and_again_is_on_the_disk(policy: str, writes: WritePolicy) -> None:
    """The host serves it, and a hundred others that are asked once go to the disk meanwhile."""
    tiers = Tiers(host_blocks=8, writes=writes, places=8, disk=32, policy=policy)
    hot = [b"hot 0", b"hot 1"]
    tiers.write_through(hot)
    for number in range(100):
        tiers.write_through([b"cold %d" % number])
        tiers.use(f"r{number}", hot)
        for job in tiers.tier.plan():
            tiers.end(job)
    assert all(map(tiers.tier.has, hot))
    assert len(tiers.disk.ledger.index) > 8
    tiers.check()


def test_a_use_without_a_load_counts_on_the_disk() -> None:
    """The device had the blocks, too."""
    tiers = Tiers(host_blocks=HOST, disk=4)
    tiers.write_through(KEYS[:4])
    tiers.host.touch(KEYS[2:4])
    assert tiers.disk.next_victims(4) == (KEYS[1], KEYS[0], KEYS[3], KEYS[2])


def test_a_block_whose_copy_failed_is_stored_when_it_is_used() -> None:
    tiers = Tiers()
    tiers.store(KEYS[:1])
    (job,) = tiers.tier.plan()
    tiers.end(job, good=False)
    assert tiers.tier.plan() == ()
    tiers.use("r", KEYS[:1])
    (job,) = tiers.tier.plan()
    tiers.end(job)
    assert tiers.tier.has(KEYS[0])


def test_a_copy_to_the_disk_is_no_use() -> None:
    tiers = Tiers()
    tiers.write_through(KEYS[:1])
    before = tiers.disk.ledger.seq
    assert tiers.tier.plan() == ()
    assert tiers.disk.ledger.seq == before


def test_a_smaller_disk_keeps_what_was_used_last() -> None:
    tiers = Tiers(host_blocks=4, disk=2)
    tiers.write_through(KEYS[:2])
    tiers.use("r", KEYS[:1])
    tiers.write_through(KEYS[2:3])
    assert [*map(tiers.tier.has, KEYS[:3])] == [True, False, True]


def test_a_policy_that_refuses_stores_is_refused() -> None:
    """A block that the host refuses would never reach the disk, and no message would say so."""
    with pytest.raises(ConfigError, match=r"policy 'auto' refuses stores.*choose one of lru"):
        Tiers(policy="auto")


def test_a_host_that_may_decline_hits_is_refused() -> None:
    """Nothing measures copies from the disk, so one slow estimate would keep its blocks there for good."""
    tiers = Tiers()
    host = Offloader(msgspec.structs.replace(tiers.host.config, load_only_if_faster=True))
    with pytest.raises(ConfigError, match="load_only_if_faster measures no copies from a disk"):
        DiskTier(host, tiers.disk, tiers.voids.append, PLACES)


@pytest.mark.parametrize("policy", ADMITTING)
def test_a_disk_as_large_as_the_host_keeps_what_the_host_has(policy: str) -> None:
    """Even when a key that its policy remembers changes the order of eviction."""
    for seed in range(20):
        tiers, chance = Tiers(policy=policy, disk=HOST), random.Random(seed)
        for number in range(60):
            key = chance.choice(KEYS[: HOST + 3])
            if key in tiers.host.ledger.index:
                tiers.use(f"r{number}", [key])
            else:
                tiers.store([key])
            for job in tiers.tier.plan():
                tiers.end(job)
            assert all(map(tiers.tier.has, tiers.host.ledger.index))


def test_a_block_waits_while_copies_hold_all_slots_of_the_disk() -> None:
    """It is stored as soon as one of them ends."""
    tiers = Tiers(host_blocks=2, disk=1)
    tiers.store(KEYS[:1])
    (first,) = tiers.tier.plan()
    tiers.store(KEYS[1:2])
    assert tiers.tier.plan() == ()
    tiers.end(first)
    (second,) = tiers.tier.plan()
    tiers.end(second)
    assert tiers.tier.has(KEYS[1])
    assert tiers.tier.counts.not_stored == 0


@pytest.mark.parametrize("writes", WritePolicy)
def test_after_a_restart_the_disk_hears_what_the_host_was_left(writes: WritePolicy) -> None:
    """With write-through it stores what it lacks. What both have is used there as on the host."""
    tiers = Tiers(writes=writes)
    tiers.host.adopt_blocks(KEYS[:3], [0, 1, 2], "an earlier process")
    tiers.disk.adopt_blocks([*KEYS[1:3], b"another"], [0, 1, 2], "an earlier process")
    tier = tiers.tier = DiskTier(tiers.host, tiers.disk, tiers.voids.append, PLACES, writes=writes)
    assert tiers.disk.next_victims(3) == (b"another", KEYS[2], KEYS[1])
    for job in tier.plan():
        tiers.end(job)
    assert tier.has(KEYS[0]) is (writes is WritePolicy.THROUGH)
    tiers.check()


# Write-back.


def written_back(places: int = 1, **sizes: Any) -> Tiers:
    return Tiers(writes=WritePolicy.BACK, places=places, **sizes)


def on_disk(tiers: Tiers) -> list[bytes]:
    return [key for key in KEYS if tiers.tier.has(key)]


def test_write_back_stores_what_the_host_evicts_next_and_nothing_else() -> None:
    """Nothing as long as there is room, and then the oldest."""
    tiers = written_back()
    tiers.write_through(KEYS[: HOST - 1])
    assert on_disk(tiers) == []
    assert not tiers.tier.has_work()
    tiers.store(KEYS[HOST - 1 : HOST])
    assert tiers.tier.has_work(), "an idle engine takes one more step"
    for job in tiers.tier.plan():
        tiers.end(job)
    victims = tiers.host.next_victims(1)
    assert on_disk(tiers) == [*victims]
    assert tiers.tier.has_work(), "the copy may have changed what leaves next"
    assert tiers.tier.plan() == ()
    assert not tiers.tier.has_work()
    tiers.check()


def test_one_step_looks_at_a_piece_of_what_leaves_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a large pool makes no step wait. An idle engine steps on until all of it was seen."""
    monkeypatch.setattr(disk_tier, "PIECE", 3)
    monkeypatch.setattr(disk_tier, "PLACES", 1)
    tiers, many = written_back(host_blocks=32, disk=32), [b"%d" % number for number in range(32)]
    for start in range(0, 32, 4):
        tiers.store(many[start : start + 4])
    next_to_go, seen = tiers.host.next_victims(8), list[int]()
    while tiers.tier.has_work():
        jobs = tiers.tier.plan()
        seen.append(sum(tiers.tier.has(key) for key in next_to_go) + len(tiers.tier._waiting) + len(jobs))
        for job in jobs:
            tiers.end(job)
    assert [*map(tiers.tier.has, next_to_go)] == [True] * 8
    assert seen[:3] == [3, 6, 8]
    assert not any(map(tiers.tier.has, set(many) - {*next_to_go}))


@pytest.mark.parametrize("policy", ADMITTING)
def test_an_idle_engine_stops_writing_next_victims_to_a_small_disk(policy: str) -> None:
    """Progress (S9), although the next victims evict each other from the disk."""
    tiers = written_back(host_blocks=12, disk=2, policy=policy)
    for key in KEYS:
        tiers.store([key])
    for _ in range(20):
        for job in tiers.tier.plan():
            tiers.end(job)
    assert not tiers.tier.has_work()


def test_a_use_of_the_next_victim_lets_the_following_one_be_stored() -> None:
    """The next step looks again."""
    tiers = written_back()
    tiers.write_through(KEYS[:HOST])
    (used,) = tiers.host.next_victims(1)
    tiers.host.touch([used])
    (following,) = tiers.host.next_victims(1)
    for job in tiers.tier.plan():
        tiers.end(job)
    assert {*on_disk(tiers)} == {used, following}


def test_a_copy_that_fails_is_made_again_with_write_back() -> None:
    """Until the host has to evict the block. Only then it counts as not stored."""
    tiers = written_back()
    tiers.store(KEYS[:HOST])
    (job,) = tiers.tier.plan()
    tiers.end(job, good=False)
    (job,) = tiers.tier.plan()
    tiers.end(job)
    assert on_disk(tiers) == [*job.keys]
    assert tiers.tier.counts.not_stored == 0


def test_a_block_that_has_to_leave_before_its_copy_is_counted() -> None:
    tiers = written_back()
    tiers.store(KEYS[:HOST])
    tiers.store(KEYS[HOST : HOST + 2])
    assert tiers.tier.counts.not_stored == 2
    tiers.check()


def test_a_block_that_waits_when_it_leaves_is_counted_once() -> None:
    """The disk takes no stores meanwhile. A reset counts what still waits, and nothing else."""
    tiers = written_back()
    for _ in range(FAILURES):
        tiers.tier._health.failed("no")
    tiers.store(KEYS[:HOST])
    assert tiers.tier.plan() == ()
    left = [*tiers.tier._waiting]
    assert len(left) == 1
    tiers.store(KEYS[HOST : HOST + 1])
    assert tiers.host.lookup(left[0]) is LookupResult.MISS
    tiers.host.reset()
    tiers.tier.reset()
    assert tiers.tier.counts.not_stored == 1


def test_what_a_reset_overtakes_is_never_written() -> None:
    tiers = written_back()
    tiers.write_through(KEYS[: HOST - 1])
    tiers.host.reset()
    tiers.tier.reset()
    assert (tiers.tier.counts.to_disk, tiers.tier.counts.not_stored) == (0, 0)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["store", "use", "touch"]), st.integers(0, len(KEYS) - 1)), max_size=30
    )
)
def test_each_block_that_leaves_was_stored_if_copies_end_within_a_step(steps: list[tuple[str, int]]) -> None:
    """Full offload (S16) with write-back, whatever uses there are between two stores."""
    tiers, left = written_back(disk=len(KEYS)), list[bytes]()
    count = tiers.host.evicting
    assert count is not None
    tiers.host.evicting = lambda keys: (left.extend(keys), count(keys))[1]
    for number, (kind, place) in enumerate(steps):
        key = KEYS[place]
        if kind == "store" and key not in tiers.host.ledger.index:
            tiers.store([key])
        elif kind == "use":
            tiers.host.match(f"r{number}", [key])
            tiers.host.finish(f"r{number}")
        elif kind == "touch":
            tiers.host.touch([key])
        for job in tiers.tier.plan():
            tiers.end(job)
        tiers.check()
    assert [key for key in left if not tiers.tier.has(key)] == []
    assert tiers.tier.counts.not_stored == 0


# Adoption.


def test_blocks_that_lie_in_the_pool_already_are_adopted_as_stored() -> None:
    """To the log it is a store like any other: it replays to the same state."""
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=DISK, device_blocks=HOST, workers=2), log)
    core.adopt_blocks(KEYS[:2], [4, 1], "an earlier process")
    assert core.ledger.index == {KEYS[0]: 4, KEYS[1]: 1}
    assert all(core.ledger.blocks.words[slot] & STATE_MASK == STORED for slot in (4, 1))
    assert check_ledger(core.ledger) == []
    replayed = Ledger(core.config)
    for event in log:
        replayed.apply(event)
    assert replayed.index == core.ledger.index
    (planned,) = [event for event in log if isinstance(event, StorePlanned)]
    assert planned.source == "an earlier process"


def test_a_slot_or_a_key_that_is_taken_is_not_adopted() -> None:
    core = Offloader(OffloadConfig(host_blocks=DISK, device_blocks=HOST))
    core.adopt_blocks(KEYS[:2], [4, 1], "an earlier process")
    with pytest.raises(IllegalTransition):
        core.adopt_blocks(KEYS[2:3], [4], "an earlier process")
    with pytest.raises(InvalidEvent):
        core.adopt_blocks(KEYS[:1], [3], "an earlier process")


# The era.


def test_an_era_is_read_as_it_was_written(tmp_path: Path) -> None:
    era = DiskEra("v2", SlotGeneration(3, 17))
    era.write(tmp_path / "era")
    assert read_era(tmp_path / "era") == era
    assert (tmp_path / "era").stat().st_mode & 0o777 == 0o600


def test_no_bit_of_an_era_can_change_unseen(tmp_path: Path) -> None:
    """A wrong era would bring back what a reset has given up (S14)."""
    path = tmp_path / "era"
    DiskEra("v2", SlotGeneration(3, 17)).write(path)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        assert isinstance(read_era(path), str), bit
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert isinstance(read_era(path), str), length
    path.unlink()
    assert "no such file" in str(read_era(path))
