"""`max_bytes`: at each instant all files of a log together have at most so many bytes, and can be read."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from log_life import CONFIG, Life, directory, event, names, read, write, write_open

from examples import examples
from kvsm.core.log import LogDirectory, LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.frames import RUN_BYTES
from kvsm.core.log.retention import Retention
from kvsm.core.log.segment_file import SegmentFile
from kvsm.core.log.segment_maker import SegmentMaker
from kvsm.errors import LogWriteFailed


@contextmanager
def watched(path: Path, max_bytes: int) -> Iterator[list[int]]:
    """After each write and each renaming, no more than `max_bytes` are on disk. Yields the totals."""
    totals: list[int] = []

    def watching(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched_call(*args: Any) -> Any:
            answer = call(*args)
            totals.append(sum(file.stat().st_size for file in path.iterdir()))
            assert totals[-1] <= max_bytes
            return answer

        return watched_call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pwrite", "rename"):
            patch.setattr(os, name, watching(getattr(os, name)))
        yield totals


def check_limit(frames: list[tuple[int, int]], segment_bytes: int, max_bytes: int, compress: bool) -> None:
    """frames: of each flush, the number of events, and the bytes of a snapshot that is taken then."""
    snapshot_bytes = 0
    with directory() as path, watched(path, max_bytes):
        writer = LogWriter(
            path,
            config=CONFIG,
            snapshot=lambda: WholeState(os.urandom(snapshot_bytes)),
            durability="none",
            segment_bytes=segment_bytes,
            max_bytes=max_bytes,
            compress=compress,
        )
        seq = flushed = 0
        told = ""
        try:
            for count, size in frames:
                snapshot_bytes = size
                for _ in range(count):
                    seq += 1
                    writer.append(event(seq))
                writer.flush()
                flushed = seq
            writer.close()
        except LogWriteFailed as error:
            told = str(error)
        assert told == "" or "max_bytes is" in told
        reader = LogReader(path)
        seen = list(reader.events())
        assert seen == [event(reader.head.seq + number) for number in range(1, len(seen) + 1)]
        assert reader.head.seq + len(seen) in (flushed, seq)
        assert reader.torn is None


LOGS = (
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 600)), max_size=30),
    st.integers(1, 900),
    st.integers(3000, 6000),
    st.booleans(),
)


@settings(max_examples=examples(20), deadline=None)
@example([(1, 0)] * 9 + [(2, 0), (5, 155)], 1, 4591, False)  # The next head leaves no room for the tail.
@given(*LOGS)
def test_all_files_together_keep_the_limit_at_each_instant(
    frames: list[tuple[int, int]], segment_bytes: int, max_bytes: int, compress: bool
) -> None:
    """Snapshots count, and the segment that is being made counts. Snapshots of any size come and go.

    What is left reads whole up to the end, or the writer says that the limit is too small.
    """
    check_limit(frames, segment_bytes, max_bytes, compress)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(*LOGS)
def test_all_files_together_keep_the_limit_at_length(
    frames: list[tuple[int, int]], segment_bytes: int, max_bytes: int, compress: bool
) -> None:
    check_limit(frames, segment_bytes, max_bytes, compress)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.integers(0, 600),
    st.integers(1, 1 << 62),
    st.booleans(),
    st.booleans(),
    st.builds(Random, st.integers()),
)
def test_a_head_takes_no_more_bytes_than_were_planned(
    size: int, first: int, bound: bool, compress: bool, random: Random
) -> None:
    """Whatever its snapshot is, and whether its life is bound to pools. A snapshot that does not shrink keeps
    the rest of the head from shrinking."""
    retention = Retention(None, segment_bytes=1000)
    run, life_id = random.randbytes(RUN_BYTES), random.randbytes(RUN_BYTES if bound else 0)
    maker = SegmentMaker(CONFIG, time.time_ns, run, 1, life_id, compress, retention, False)
    with directory() as path:
        path.mkdir()
        segment, head = SegmentFile(path, first), maker.new_head(first)
        maker.create(segment)
        snapshot = [random.randbytes(size)]
        maker.write_head(segment, head, snapshot, maker.plan(segment, head, snapshot))
        segment.close()
    assert segment.size <= retention.opening_bytes


def test_a_limit_keeps_at_least_two_segments(tmp_path: Path) -> None:
    """The state is not all that is left: there is always a complete segment, with what led to it."""
    counts = []
    life = Life(tmp_path / "log", segment_bytes=2000, max_bytes=6000)
    for _ in range(100):
        life.append(15)
        counts.append(len(names(tmp_path / "log")))
    life.writer.close()
    after_the_first = counts[counts.index(2) :]
    assert min(after_the_first) >= 2
    reader = LogReader(tmp_path / "log")
    list(reader.events())
    assert (reader.missing, reader.head.seq > 0) == (None, True)


def test_a_log_that_keeps_its_limit_uses_most_of_it(tmp_path: Path) -> None:
    with watched(tmp_path / "log", 40_000) as totals:
        write(tmp_path / "log", [20] * 100, segment_bytes=4000, max_bytes=40_000)
    assert max(totals) > 30_000


def test_who_flushes_does_not_wait_for_the_space_of_a_deleted_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is open while its name is taken away. The thread that closes it waits."""
    unlink, close = Path.unlink, SegmentFile.close
    deleted: list[str] = []
    closed_by: Queue[int] = Queue()

    def open_files() -> list[str]:
        """Others are opened and closed meanwhile."""
        return [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]

    def watched_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".kvsm":
            assert str(path) in open_files()
            deleted.append(str(path))
        unlink(path, missing_ok)

    def watched_close(segment: SegmentFile) -> None:
        if str(segment.path) in deleted:
            closed_by.put(threading.get_ident())
        close(segment)

    monkeypatch.setattr(Path, "unlink", watched_unlink)
    monkeypatch.setattr(SegmentFile, "close", watched_close)
    write(tmp_path / "log", [20] * 100, segment_bytes=4000, max_bytes=20_000)
    assert len(deleted) > 2
    assert threading.get_ident() not in [closed_by.get(timeout=60) for _ in deleted]


def test_a_process_without_threads_deletes_segments_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvsm.core.log.segment_file.start_new_thread", no_thread)
    with watched(tmp_path / "log", 20_000):
        write(tmp_path / "log", [20] * 100, segment_bytes=4000, max_bytes=20_000)
    assert read(tmp_path / "log")[1] is None


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_snapshot_that_the_limit_cannot_hold_is_told(tmp_path: Path, choice: Any) -> None:
    """It is a failed write: with `stop` an error says how large the limit must be, and so does `failure`."""
    writer = LogWriter(
        tmp_path / "log",
        config=CONFIG,
        snapshot=lambda: WholeState(bytes(5000)),
        durability="none",
        segment_bytes=200,
        max_bytes=4000,
        on_failure=choice,
    )
    told = r"no segment can follow event \d+.*max_bytes is 4000; it must be 2\d{4} or more"
    with watched(tmp_path / "log", 4000):
        if choice == "stop":
            with pytest.raises(LogWriteFailed, match=told):
                append_all(writer, 2000)
        else:
            append_all(writer, 20)
            assert re.search(told, str(writer.failure))
            assert writer.dropped == 0
            append_all(writer, 2000)
            assert writer.dropped > 0


def test_a_new_life_syncs_the_names_of_the_last_one_before_it_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may have left a newest segment without a durable name. If older segments are deleted
    before that name is synced, a power loss could take both."""
    path = tmp_path / "log"
    write_open(path, [9] * 100, durability="every", segment_bytes=1000)
    end, calls = find_end(LogDirectory(path)), list[str]()
    fsync, unlink = os.fsync, Path.unlink

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append("sync" if os.path.samestat(os.fstat(descriptor), path.stat()) else "other sync")

    def note_unlink(file: Path, missing_ok: bool = False) -> None:
        unlink(file, missing_ok)
        calls.append("delete")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    life = Life(end, durability="every", segment_bytes=1000, max_bytes=6000)
    life.writer.close()
    assert calls[:2] == ["sync", "delete"]


def append_all(writer: LogWriter, count: int) -> None:
    first = writer.events + writer.dropped + 1
    for seq in range(first, first + count):
        writer.append(event(seq))
        writer.flush()


def test_an_old_segment_that_cannot_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds even then: the log says that it fails, rather than growing beyond."""

    def unlink(path: Path, **_: bool) -> None:
        if path.exists():
            raise PermissionError(1, "Operation not permitted")

    life = Life(tmp_path / "log", segment_bytes=1000, max_bytes=4000)
    monkeypatch.setattr(Path, "unlink", unlink)
    with watched(tmp_path / "log", 4000), pytest.raises(LogWriteFailed, match="not permitted"):
        append_all(life.writer, 5000)


DELETING: dict[str, Any] = {"segment_bytes": 1500, "max_bytes": 12_000, "on_failure": "continue"}


def test_the_next_flush_deletes_a_segment_that_could_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has nothing else to do than to write."""
    life, unlink, failed = Life(tmp_path / "log", **DELETING), Path.unlink, list[Path]()

    def failing_once(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".kvsm" and not failed:
            failed.append(path)
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing_once)
    while not failed:
        life.append(1)
    life.append(1)
    assert not failed[0].exists()
    life.writer.close()
