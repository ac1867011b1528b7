"""A log whose last segments are missing says so: each segment names the next one once that has its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from log_life import CONFIG, Life, names, write, write_open
from replay_life import random_life

from kvsm.cli import main
from kvsm.core.log import LogDirectory, LogEnd, LogFollower, LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.frames import PREAMBLE_BYTES, first_event, segment_paths
from kvsm.core.log.segment_file import SegmentFile, UnsyncedMark
from kvsm.errors import LogDamaged, LogError


def shortened(log: Path, kept: int, to: Path) -> Path:
    """Copy the first segments of a log."""
    to.mkdir()
    for path in segment_paths(log)[:kept]:
        shutil.copy(path, to)
    return to


def end_of(log: Path) -> tuple[LogEnd, int | None, int]:
    """Return how a log ends, from which event on it lacks segments, and its last event."""
    reader = LogReader(log)
    last = max((event.seq for event in reader.events()), default=0)
    return reader.end, reader.missing_from, last


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("written", [write, write_open])
def test_any_number_of_missing_segments_at_the_end_is_noticed(
    tmp_path: Path, written: object, compress: bool
) -> None:
    """This holds whether or not the log was closed. Events are missing from the first event of the missing
    segments on."""
    assert callable(written)
    written(tmp_path / "log", [3, 2, 4, 1], segment_bytes=1, compress=compress)
    firsts = [first_event(path) for path in segment_paths(tmp_path / "log")]
    assert len(firsts) > 3
    for kept in range(1, len(firsts)):
        log = shortened(tmp_path / "log", kept, tmp_path / f"{kept}")
        assert end_of(log) == (LogEnd.MISSING, firsts[kept], firsts[kept] - 1)
    whole = LogEnd.CLOSED if written is write else LogEnd.OPEN
    assert end_of(tmp_path / "log") == (whole, None, 10)


def test_a_log_that_was_closed_and_continued_lacks_its_last_life(tmp_path: Path) -> None:
    """The older process closed the log, but the log as a whole does not end there."""
    write(tmp_path / "log", [3], durability="every")
    life = Life(find_end(LogDirectory(tmp_path / "log")), durability="every")
    life.append(2)
    life.writer.close()
    log = shortened(tmp_path / "log", 1, tmp_path / "cut")
    assert end_of(log) == (LogEnd.MISSING, 4, 3)
    reader = LogReader(log)
    assert [*reader.events()]
    assert [one.end for one in reader.lives] == [LogEnd.CLOSED]


def test_the_record_of_a_closed_life_must_be_there_though_another_life_follows(tmp_path: Path) -> None:
    """The mark says both: that the log was closed here, and that another segment follows."""
    write(tmp_path / "log", [3])
    size = segment_paths(tmp_path / "log")[0].stat().st_size
    life = Life(tmp_path / "open")
    life.append(3)
    without_record = segment_paths(tmp_path / "open")[0].stat().st_size
    life.kill()
    assert without_record < size
    life = Life(find_end(LogDirectory(tmp_path / "log")))
    life.append(2)
    life.writer.close()
    with segment_paths(tmp_path / "log")[0].open("r+b") as file:
        file.truncate(without_record)
    with pytest.raises(LogDamaged, match="its last record is missing"):
        end_of(tmp_path / "log")


def test_a_segment_that_names_another_one_must_be_whole(tmp_path: Path) -> None:
    write(tmp_path / "log", [3, 2, 4], segment_bytes=1)
    log = shortened(tmp_path / "log", 2, tmp_path / "cut")
    last = segment_paths(log)[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1)
    with pytest.raises(LogDamaged):
        end_of(log)


def test_no_writer_continues_a_log_without_its_end(tmp_path: Path) -> None:
    """Other processes may have acted on the missing events."""
    write(tmp_path / "log", [3, 2, 4], segment_bytes=1)
    segment_paths(tmp_path / "log")[-1].unlink()
    with pytest.raises(LogError, match="its last segments, from event 10 on, are missing"):
        find_end(LogDirectory(tmp_path / "log"))


def test_a_name_that_may_not_outlive_a_power_loss_is_not_told(tmp_path: Path) -> None:
    """Otherwise a power loss that removes such a segment, of which no event was durable, would look like a
    damaged log."""
    write(tmp_path / "log", [3])
    older, newest = SegmentFile(tmp_path / "log", 1), SegmentFile(tmp_path / "log", 4)
    life = Life(tmp_path / "other")
    retention = life.writer._retention
    retention.segments.clear()
    retention.add(older)
    retention.add(newest)
    before = older.path.read_bytes()
    retention.announce_newest(syncs=False)
    assert (older.path.read_bytes(), newest.announced) == (before, False)
    newest.name_is_durable = True
    retention.announce_newest(syncs=False)
    assert older.path.read_bytes()[:PREAMBLE_BYTES] != before[:PREAMBLE_BYTES]
    life.kill()


def test_a_follower_ends_where_the_segments_end(tmp_path: Path) -> None:
    """`kvsm tail` and `kvsm top` do not wait for events that never come."""
    write_open(tmp_path / "log", [3, 2, 4], segment_bytes=1)
    segment_paths(tmp_path / "log")[-1].unlink()
    follower = LogFollower(tmp_path / "log")
    seen = [event.seq for news in follower.poll() for event in news.events]
    assert seen == [*range(1, 10)]
    assert (follower.closed, follower.end, follower.missing_from) == (True, LogEnd.MISSING, 10)


def test_a_follower_of_a_live_log_misses_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "log", segment_bytes=1)
    follower = LogFollower(tmp_path / "log")
    seen: list[int] = []
    for _ in range(20):
        life.append(1)
        seen += [event.seq for news in follower.poll() for event in news.events]
        assert (follower.end, follower.missing_from) == (LogEnd.OPEN, None)
    assert (seen, len(names(tmp_path / "log")) > 10) == ([*range(1, 21)], True)
    life.kill()


@pytest.mark.parametrize(
    "command",
    [
        ["verify"],
        ["verify", "--jobs", "2"],
        ["report"],
        ["replay"],
        ["why", "--transfer", "6"],
        ["show", "--transfer", "6"],
        ["timeline", "-o", "timeline.html"],
        ["tail"],
        ["top", "--interval", "0.1"],
        ["query", "SELECT COUNT(*) FROM events"],
    ],
    ids=" ".join,
)
def test_every_command_says_that_the_end_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Each exits with 1 and names the first missing event."""
    monkeypatch.chdir(tmp_path)
    random_life(3, 400, tmp_path / "log", writer={"segment_bytes": 3000}).close()
    *_, last = segment_paths(tmp_path / "log")
    last.unlink()
    name, *more = command
    result = CliRunner().invoke(main, [name, str(tmp_path / "log"), *more])
    assert result.exit_code == 1, result.output
    assert f"events from {first_event(last)} on are not in the log: the last segments are missing" in (
        result.stderr
    )


def test_a_new_writer_marks_the_segment_of_the_old_one_at_its_first_flush(tmp_path: Path) -> None:
    write_open(tmp_path / "log", [3])
    end = find_end(LogDirectory(tmp_path / "log"))
    writer = LogWriter(end, config=CONFIG, snapshot=lambda: WholeState(b"state"), durability="none")
    writer.flush()
    writer.close()
    segment_paths(tmp_path / "log")[-1].unlink()
    assert end_of(tmp_path / "log") == (LogEnd.MISSING, 4, 3)


def test_the_next_flush_announces_a_segment_again_if_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has nothing else to do than to write."""
    options: dict[str, Any] = {"durability": "interval", "sync_interval_ms": 10**9, "segment_bytes": 100}
    life, called = Life(tmp_path / "log", on_failure="continue", **options), list[int]()

    def failing_once(_: SegmentFile, first: int, *_syncs: bool) -> None:
        called.append(first)
        if len(called) == 1:
            raise UnsyncedMark

    monkeypatch.setattr(SegmentFile, "name_successor", failing_once)
    while not called:
        life.append(1)
    life.append(1)
    assert called == [called[0]] * 2
    life.writer.close()
