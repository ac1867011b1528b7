"""A reader that follows a log sees events before they are durable. A sync that fails then loses them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from log_life import Life

from kvsm.core.log import EventsTakenBack, LogFollower, LogReader
from kvsm.errors import LogWriteFailed


def fail_next_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, calls = os.fdatasync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", failing)


@pytest.mark.parametrize("ends", ["with the failure", "with a close", "with another segment"])
@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_follower_tells_lost_events_from_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, ends: str
) -> None:
    """It said that the log was damaged, as its own place lay within a later record. The log is whole."""
    life = Life(tmp_path / "log", durability="interval", sync_interval_ms=10**9, on_failure=choice)
    life.append(2)
    follower = LogFollower(tmp_path / "log")
    assert [one.seq for news in follower.poll() for one in news.events] == [1, 2]
    fail_next_sync(monkeypatch)
    with suppress(LogWriteFailed):
        if ends == "with a close":
            life.writer.close()
        else:
            life.append(1, flush=False)
            life.writer._sync()
            if ends == "with another segment":
                life.append(1)
    with pytest.raises(EventsTakenBack, match="event 2 was read, and its writer has lost it since"):
        list(follower.poll())
    reader = LogReader(tmp_path / "log")
    assert [one.seq for segment in reader.segments() for batch in segment.batches() for one in batch] == []
    with suppress(LogWriteFailed):
        life.writer.close()


def test_a_follower_goes_on_where_only_later_events_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has read is durable, and stays."""
    life = Life(tmp_path / "log", durability="interval", sync_interval_ms=10**9, on_failure="continue")
    life.append(2)
    life.writer._sync()
    follower = LogFollower(tmp_path / "log")
    list(follower.poll())
    fail_next_sync(monkeypatch)
    life.append(2)
    life.writer._sync()
    life.append(1)
    news = list(follower.poll())
    assert [one.segment.gap for one in news] == [(3, 5)]
    life.writer.close()
