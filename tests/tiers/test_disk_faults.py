"""Disks that fail: a fault ends its transfers as bad, the engine goes on, and the tier steps back in time."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from disk_rig import GEOMETRY, Tier, directory

from kvsm.states.disk_slot import SEALED
from kvsm.tiers.disk import FlushPolicy
from kvsm.tiers.disk.health import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, HealthWatch, TierHealth


@pytest.fixture
def tier() -> Iterator[Tier]:
    with directory() as made, closing(Tier(made / "tier", FlushPolicy.EVERY)) as opened:
        opened.store([0, 1], [0, 1])
        yield opened


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_an_error_of_the_disk_makes_the_store_bad_and_the_next_one_is_tried(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Failure is not success (S6): nothing is read from the slot until another store is good."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        result = tier.store([2], [5])
    assert not result.good
    assert os.strerror(number) in result.error
    assert "it is DROPPED" in tier.load([2], [5]).error
    assert tier.store([2], [6]).good
    assert tier.holds(2, 6)
    assert tier.engine.health == TierHealth()


def test_an_error_of_a_read_makes_the_load_bad_and_the_block_stays(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        assert "Input/output error" in tier.load([0], [0]).error
    assert tier.holds(0, 0)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_call_that_moves_less_makes_the_transfer_bad(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    really = getattr(os, call)

    def partly(descriptor: int, buffers: list[Any], offset: int) -> int:
        return int(really(descriptor, [buffers[0].data.cast("B")[: buffers[0].nbytes // 2]], offset))

    monkeypatch.setattr(os, call, partly)
    result = tier.store([2], [5]) if call == "pwritev" else tier.load([0], [0])
    assert not result.good
    assert "only 2,048 of 4,096 bytes" in result.error


def test_a_removed_file_takes_no_stores_and_still_serves(tier: Tier) -> None:
    tier.path.unlink()
    assert "the file was removed" in tier.store([2], [5]).error
    assert tier.holds(0, 0)


def test_a_cut_file_takes_no_stores_and_serves_no_wrong_byte(tier: Tier) -> None:
    os.truncate(tier.path, GEOMETRY.payload_at(1))
    assert "and had 98,304" in tier.store([2], [5]).error
    assert tier.holds(0, 0)
    assert not tier.holds(1, 1)


def test_bytes_that_change_on_disk_are_never_served(tier: Tier) -> None:
    """Correct bytes (S15): the load is bad, and the slot serves nothing more."""
    with tier.path.open("r+b") as file:
        file.seek(GEOMETRY.payload_at(0))
        file.write(b"other bytes")
    assert not tier.holds(0, 0)
    assert "it is DROPPED" in tier.load([0], [0]).error


def test_a_failed_flush_makes_every_store_bad_that_had_begun() -> None:
    """Linux tells a lost write once: a store that was written while the flush failed is not saved by the
    next flush, which succeeds."""
    began, may_fail, calls = threading.Event(), threading.Event(), []
    fdatasync = os.fdatasync

    def flush(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1:
            fdatasync(descriptor)
            return
        began.set()
        may_fail.wait(30)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        directory() as made,
        closing(Tier(made / "tier", FlushPolicy.EVERY)) as tier,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(os, "fdatasync", flush)
        first = tier.begin_store([0], [0])
        assert began.wait(30)
        second = tier.begin_store([1], [1])
        while tier.file.table.states[1] != SEALED:
            sleep(0.001)
        may_fail.set()
        tier.engine.wait([first, second])
        errors = {one.transfer: one.error for one in tier.engine.poll()}
        assert "Input/output error" in errors[first]
        assert "a flush failed while it was written" in errors[second]
        assert not tier.holds(1, 1)
        assert tier.store([1], [1]).good


def test_a_flush_that_fails_after_the_results_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `INTERVAL` the store was good before; its bytes are still proved at each load."""
    caplog.set_level(logging.WARNING, "kvsm.tiers.disk")
    with directory() as made:
        tier = Tier(made / "tier", FlushPolicy.INTERVAL)
        assert tier.store([0], [0]).good
        monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
        tier.close()
    assert "may not survive a power loss" in caplog.text


def test_stores_that_wait_share_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group commit: while one flush runs, all that ends waits for the next one."""
    calls, goes_on = [], threading.Event()

    def slow(descriptor: int) -> None:
        calls.append(descriptor)
        goes_on.wait(30)

    with directory() as made, closing(Tier(made / "tier", FlushPolicy.EVERY)) as tier:
        monkeypatch.setattr(os, "fdatasync", slow)
        stores = [tier.begin_store([0], [0])]
        while not calls:
            sleep(0.001)
        stores += [tier.begin_store([slot], [0]) for slot in range(1, 6)]
        while not (tier.file.table.states[:6] == SEALED).all():
            sleep(0.001)
        assert tier.engine.poll() == []
        goes_on.set()
        tier.engine.wait(stores)
        assert len(tier.engine.poll()) == 6
    assert len(calls) == 2


def test_a_tier_whose_disk_fails_steps_back_and_probes(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once when it steps back and once when it is well again; loads are tried all the time."""
    caplog.set_level(logging.WARNING, "kvsm.tiers.disk")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(errno.EIO))
        for _ in range(FAILURES):
            assert "Input/output error" in tier.store([2], [5]).error
        assert not tier.engine.health.takes_stores
        assert "takes no stores for 1 s more, after 3 failures" in tier.store([2], [5]).error
    assert tier.holds(0, 0)
    monkeypatch.setattr(tier.engine._health, "_probe_at", 0)
    assert tier.store([2], [5]).good
    assert tier.engine.health == TierHealth()
    assert [one.split(": ")[1][:12] for one in caplog.messages] == ["takes no sto", "takes stores"]


def test_the_pause_doubles_and_only_one_store_probes() -> None:
    now = [0.0]
    watch = HealthWatch("tier", lambda: now[0])
    for _ in range(FAILURES):
        assert watch.refusal() == ""
        watch.failed("broken")
    pauses = []
    for _ in range(10):
        pauses.append(watch.read().probes_in_s)
        assert watch.refusal()
        now[0] += pauses[-1]
        assert watch.refusal() == ""
        assert watch.refusal(), "the others wait for the probe"
        watch.failed("still broken")
        watch.failed("broken too, and no probe")
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    watch.succeeded()
    assert watch.refusal() == ""


def test_a_store_during_an_interval_is_flushed_when_the_engine_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, calls = Tier(tmp_path / "tier", FlushPolicy.INTERVAL), []
    monkeypatch.setattr(os, "fdatasync", calls.append)
    assert tier.store([0], [0]).good
    tier.close()
    assert len(calls) == 1
