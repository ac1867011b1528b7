"""The mark of a kept pool: which log it fits, wherever a process is killed, and when the log loses events."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_life import disk

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.copies import HostPool, KeptPool, open_mark
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_mark import LogPlace, PoolMark, why_unbound, without_checksums
from kvsm.core.log.writer import FRAME_EVENTS
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.warm_restart import start

RUN = b"r" * 16
FIRST, SECOND = LogPlace(RUN, 1, b"1" * 16, 0), LogPlace(RUN, 2, b"2" * 16, 70)
"""Where two lives of a log begin."""

CONFIG = OffloadConfig(host_blocks=4, device_blocks=8)
POOLS = KeptPools(PoolIdentity.of({"model": "m"}), (b"pool of rank 0..", b"sums of rank 0.."))


def after(place: LogPlace, seq: int) -> LogPlace:
    """A log of this life that ends with this event."""
    return place._replace(seq=seq)


def marked() -> PoolMark:
    """The mark of a pool whose first life has flushed 60 events."""
    mark = memory_marks()[0]
    assert mark.places() == []
    mark.begin(FIRST, None)
    mark.advance(60)
    return mark


@pytest.mark.parametrize(("end", "fits"), [(60, True), (61, True), (59, False), (0, False)])
def test_a_log_fits_if_it_reaches_the_mark(end: int, fits: bool) -> None:
    place, why = why_unbound(marked(), after(FIRST, end))
    assert (place is not None, why == "") == (fits, fits)
    if not fits:
        assert why.startswith(
            f"the log ends with event {end}, and the pool may hold bytes of events up to 60"
        )


@pytest.mark.parametrize("steps", range(3))
def test_one_of_its_places_fits_the_log_wherever_a_process_is_killed(steps: int) -> None:
    """Events are state (S10): what was stored is found again. The log may end with either life until the
    first flush of the new one, and only with that one afterwards."""
    mark = marked()
    found, _ = why_unbound(mark, after(FIRST, 70))
    if steps > 0:
        mark.begin(SECOND, found)
    if steps > 1:
        mark.advance(71)
    fits = {
        "the old life": why_unbound(mark, after(FIRST, 70))[0] is not None,
        "the new life": why_unbound(mark, after(SECOND, 71))[0] is not None,
    }
    assert fits == {"the old life": steps < 2, "the new life": steps > 0}


def test_a_start_that_is_killed_again_and_again_keeps_the_place_that_fits() -> None:
    mark = marked()
    for number in range(2, 9):
        found, why = why_unbound(mark, after(FIRST, 60))
        assert why == ""
        mark.begin(LogPlace(RUN, number, bytes([number]) * 16, 60), found)
    assert len(mark.places()) == 2


def test_a_pool_that_belongs_to_another_log_or_life_says_so() -> None:
    mark = marked()
    other_run, other_life = after(FIRST, 99)._replace(run=b"s" * 16), after(SECOND, 99)
    assert why_unbound(mark, other_run)[1].startswith("the pool belongs to another log")
    assert "with life 2, and the pool belongs to another one, life 1" in why_unbound(mark, other_life)[1]
    same_number = after(FIRST, 99)._replace(life_id=b"x" * 16)
    assert "with life 1, and the pool belongs to another one, life 1" in why_unbound(mark, same_number)[1]
    mark.void()
    assert "names no log" in why_unbound(mark, after(FIRST, 99))[1]
    mark.advance(80)
    assert why_unbound(mark, after(FIRST, 80))[1] == ""


def test_each_pool_of_blocks_needs_one_of_checksums() -> None:
    both = memory_marks(2)
    assert without_checksums(both) == ""
    assert "2 kept pools of blocks have 1 kept pools of checksums" in without_checksums(both[:3])


def left(directory: Path, marks: list[PoolMark], **options: object) -> None:
    """A process that stores a block and ends."""
    core = start(directory, CONFIG, POOLS, marks=marks, log=options).offloader
    job = core.store((), [b"key"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, True)
    core.end_step()
    core.close()


def test_a_start_without_marks_or_checksums_is_cold_and_says_what_to_do(tmp_path: Path) -> None:
    marks = memory_marks()
    left(tmp_path / "log", marks)
    started = start(tmp_path / "log", CONFIG, POOLS, marks=marks[:1])
    started.offloader.close()
    (reason,) = started.why_cold
    assert reason.startswith("2 pools are kept, and 1 have their marks here")
    assert "open all pools before the start" in reason
    blocks = [marks[0], memory_marks()[0]]
    left(tmp_path / "other", blocks)
    started = start(tmp_path / "other", CONFIG, POOLS, marks=blocks)
    started.offloader.close()
    assert started.why_cold[0].startswith("2 kept pools of blocks have 0 kept pools of checksums")


def test_a_flush_sets_the_mark_before_jobs_leave(tmp_path: Path) -> None:
    """No stale data (S14): when `submit` returns, the mark names its event, and the log has it."""
    marks = memory_marks()
    core = start(tmp_path / "log", CONFIG, POOLS, marks=marks).offloader
    job = core.store((), [b"key"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    for mark in marks:
        (place,) = mark.places()
        assert place.seq == core.ledger.seq > job.transfer
    core.close()


def test_a_log_that_loses_events_voids_the_mark_until_it_has_the_state_again(tmp_path: Path) -> None:
    """No stale data (S14): jobs leave that the log lacks, so no log fits the pool, not even an older copy."""
    marks = memory_marks()
    with disk(1 << 20) as limited:
        core = start(tmp_path / "log", CONFIG, POOLS, marks=marks, log={"on_failure": "continue"}).offloader
        limited.free = 10
        job = core.store((), [b"key"], [0]).job
        assert job is not None
        core.submit([job.transfer])
        assert [mark.places() for mark in marks] == [[], []]
        limited.free = 1 << 20
        for number in range(FRAME_EVENTS):
            core.arrive(f"r{number}")
        core.reset()
        assert [place.seq for mark in marks for place in mark.places()] == [core.ledger.seq] * 2
        core.close()


def test_a_pool_shares_its_mark_with_the_process_that_writes_the_log(tmp_path: Path) -> None:
    identity = PoolIdentity.of({"model": "m"})
    with HostPool(4, 4096, path=tmp_path / "pool", keep=KeptPool(identity)):
        mark = open_mark(tmp_path / "pool")
        mark.begin(FIRST, None)
        mark.advance(7)
    with HostPool(4, 4096, path=tmp_path / "pool", keep=KeptPool(identity)) as pool:
        assert pool.is_warm
        assert open_mark(tmp_path / "pool").places() == [after(FIRST, 7)]
    with HostPool(4, 4096, path=tmp_path / "not kept"):
        for name in ("not kept", "absent"):
            with pytest.raises(ConfigError, match="is not a host pool that is kept"):
                open_mark(tmp_path / name)
    assert not (tmp_path / "absent").exists()


def test_a_log_that_begins_clears_the_checksums_of_the_one_before(tmp_path: Path) -> None:
    """Correct bytes (S15): its events have the same numbers again. A log that goes on keeps them."""
    keep = KeptPool(PoolIdentity.of({"model": "m"}))
    with (
        HostPool(4, 4096, path=tmp_path / "pool", keep=keep) as pool,
        HostPool(4, CHECKSUM_BYTES, path=tmp_path / "sums", keep=keep) as sums,
    ):
        pool.blocks[:], sums.blocks[:] = 1, 2
        marks = [open_mark(tmp_path / name) for name in ("pool", "sums")]
        for mark in marks:
            mark.begin(SECOND, FIRST)
        assert (sums.blocks == 2).all()
        for mark in marks:
            mark.begin(FIRST, None)
        assert not sums.blocks.any()
        assert (pool.blocks == 1).all()
