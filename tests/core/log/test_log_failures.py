"""Writes that fail: full disk, kernel limit, failed sync, killed process. No loss is silent (rule 6)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_life import Life, directory, disk, event, read, run_child, write_open

from examples import examples
from kvsm.core.log import LogGap, LogReader, Torn
from kvsm.core.log.frames import PREAMBLE_BYTES, encode_preamble, segment_path
from kvsm.core.log.writer import FRAME_EVENTS
from kvsm.errors import LogWriteFailed
from kvsm.events import RequestArrived


def test_a_full_disk_stops_and_says_so_on_every_call(tmp_path: Path) -> None:
    """Rule 6, `stop`: every call raises an error that names path, events and cause. The log stays whole."""
    with disk(400) as limited:
        life = Life(tmp_path / "log")
        written = life.append(2)
        limited.free = 10
        with pytest.raises(
            LogWriteFailed, match=r"0001\.kvsm: events 3 to 6 could not be written: .*No space"
        ):
            life.append(4)
        limited.free = 1 << 20
        for call in (lambda: life.writer.append(event(7)), life.writer.flush, life.writer.close):
            with pytest.raises(LogWriteFailed, match="events 3 to 6"):
                call()
    life.writer.close()
    assert read(tmp_path / "log") == (written, None, None)


def test_a_log_that_cannot_start_says_so(tmp_path: Path) -> None:
    with disk(40), pytest.raises(LogWriteFailed, match=r"no log can be started: .*No space"):
        Life(tmp_path / "log")
    assert list((tmp_path / "log").iterdir()) == []


def test_a_full_disk_marks_the_log_and_goes_on(tmp_path: Path) -> None:
    """Rule 6, `continue`: every reader is told of the loss, and can continue from the snapshot behind it."""
    with disk(1 << 20) as limited:
        life = Life(tmp_path / "log", on_failure="continue")
        before = life.append(2)
        limited.free = 10
        life.append(3)
        assert (life.writer.broken_from, life.writer.dropped) == (3, 3)
        assert "0001.kvsm: events 3 to 5 could not be written: [Errno 28]" in str(life.writer.failure)
        ends_broken = LogReader(tmp_path / "log")
        assert (list(ends_broken.events()), ends_broken.broken_from, ends_broken.gaps) == (before, 3, [])
        limited.free = 1 << 20
        life.append(FRAME_EVENTS)
        after = life.append(2)
        life.writer.close()
    last_lost = 5 + FRAME_EVENTS
    assert (life.writer.events, life.writer.dropped, life.writer.failure) == (4, last_lost - 2, None)
    reader = LogReader(tmp_path / "log")
    first, second = [(segment, list(segment.events())) for segment in reader.segments()]
    assert (first[0].gap, first[1]) == (None, before)
    assert (second[0].gap, second[1]) == ((3, last_lost), after)
    assert second[0].head.snapshot == str(last_lost).encode()
    assert (reader.broken_from, reader.gaps) == (3, [(3, last_lost)])
    with pytest.raises(LogGap, match=f"events 3 to {last_lost} are not in the log") as caught:
        list(reader.events())
    assert (caught.value.first, caught.value.last) == (3, last_lost)


def check_full_disk(steps: list[tuple[int, int]], segment_bytes: int) -> None:
    """Run steps of (free bytes, events) with `continue`: each event is read, or is in a reported gap."""
    with directory() as path, disk(1 << 20) as limited:
        life = Life(path, on_failure="continue", segment_bytes=segment_bytes)
        for free, count in steps:
            limited.free = free
            life.append(count)
        life.writer.close()
        reader, seen, missing = LogReader(path), [], []
        for segment in reader.segments():
            if segment.gap is not None:
                missing += range(segment.gap[0], segment.gap[1] + 1)
                assert segment.head.snapshot == str(segment.gap[1]).encode()
            seen += [one for batch in segment.batches() for one in batch]
        assert reader.torn is None
        assert seen == [event(one.seq) for one in seen]
        lost_at_end = list(range(max([0, *missing, *(one.seq for one in seen)]) + 1, life.seq + 1))
        assert sorted([*missing, *lost_at_end, *(one.seq for one in seen)]) == list(range(1, life.seq + 1))
        assert reader.broken_from == life.writer.broken_from == min([*missing, *lost_at_end], default=None)
        assert (life.writer.events, life.writer.dropped) == (len(seen), len(missing) + len(lost_at_end))
        assert all(name.suffix == ".kvsm" for name in path.iterdir())


STEPS = st.lists(
    st.tuples(st.sampled_from([0, 20, 60, 200, 1 << 20]), st.sampled_from([1, 2, 5, FRAME_EVENTS])),
    max_size=12,
)


@settings(max_examples=examples(100), deadline=None)
@given(STEPS, st.sampled_from([1, 300, 1 << 20]))
def test_a_disk_that_fills_and_empties_loses_nothing_in_silence(
    steps: list[tuple[int, int]], segment_bytes: int
) -> None:
    """Rule 6: each event is read, or is in a gap, or comes after `broken_from`."""
    check_full_disk(steps, segment_bytes)


@pytest.mark.slow
@settings(max_examples=700, deadline=None)
@given(STEPS, st.sampled_from([1, 300, 1 << 20]))
def test_a_disk_that_fills_and_empties_loses_nothing_at_length(
    steps: list[tuple[int, int]], segment_bytes: int
) -> None:
    check_full_disk(steps, segment_bytes)


LIMITED = """
import resource, signal
from kvsm.errors import LogWriteFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
life = Life(path, on_failure={choice!r})
try:
    for _ in range(100):
        life.append(5)
    life.writer.close()
except LogWriteFailed as error:
    print(error)
print(life.writer.events, life.writer.dropped, life.writer.broken_from)
"""


def test_a_file_size_limit_of_the_kernel_stops_a_writer(tmp_path: Path) -> None:
    """A write that the kernel cuts off (EFBIG) leaves whole frames, and the error names the cause."""
    output, _ = run_child(LIMITED.format(choice="stop"), tmp_path / "log").communicate()
    message, counts = output.splitlines()
    events, error, torn = read(tmp_path / "log")
    assert (error, torn) == (None, None)
    assert "File too large" in message
    assert f"events {len(events) + 1} to {len(events) + 5} could not be written" in message
    assert counts == f"{len(events)} 0 None"
    assert events == [event(seq) for seq in range(1, len(events) + 1)]


def test_a_file_size_limit_of_the_kernel_leaves_gaps(tmp_path: Path) -> None:
    """With `continue` the writer goes on in new segments, and readers see each loss as a gap."""
    output, _ = run_child(LIMITED.format(choice="continue"), tmp_path / "log").communicate()
    reader = LogReader(tmp_path / "log")
    seen = [one for segment in reader.segments() for one in segment.events()]
    lost = [seq for first, last in reader.gaps for seq in range(first, last + 1)]
    assert len(reader.gaps) > 3
    assert sorted([*lost, *(one.seq for one in seen)]) == list(range(1, 501))
    assert output.split() == [str(len(seen)), str(len(lost)), str(reader.broken_from)]


def test_a_killed_writer_leaves_a_log_that_reads(tmp_path: Path) -> None:
    """Rule 6: kill -9 loses at most what was not flushed. The log reads up to its last whole frame."""
    body = """
life = Life(path, segment_bytes=20_000)
while True:
    life.append(50)
    print(life.writer.events, flush=True)
"""
    child = run_child(body, tmp_path / "log")
    assert child.stdout is not None
    flushed = 0
    while flushed < 5000:
        flushed = int(child.stdout.readline())
    child.kill()
    child.communicate()
    events, error, _ = read(tmp_path / "log")
    assert error is None
    assert len(events) >= flushed
    assert events == [event(seq) for seq in range(1, len(events) + 1)]


def test_a_segment_cut_while_it_opens_is_a_torn_tail(tmp_path: Path) -> None:
    """A crash between two segments: the old one is complete, and the new one has no head yet."""
    written = write_open(tmp_path / "log", [2], segment_bytes=1)
    segment_path(tmp_path / "log", 3).write_bytes(encode_preamble())
    events, error, torn = read(tmp_path / "log")
    assert (events, error) == (written, None)
    assert torn == Torn(str(segment_path(tmp_path / "log", 3)), PREAMBLE_BYTES, 3, 0)


def test_an_event_that_cannot_be_encoded_stops_the_writer(tmp_path: Path) -> None:
    """It would be missing from the log, so nothing may follow it. This can only happen with
    `checked=True`."""
    life = Life(tmp_path / "log", on_failure="continue", checked=True)
    written = life.append(1)
    life.writer.append(RequestArrived(2, 0, 0, object()))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(LogWriteFailed, match="events from 2 on cannot be encoded"):
            life.writer.flush()
    assert read(tmp_path / "log") == (written, None, None)


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_failed_sync_loses_all_since_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """After a failed sync nobody knows which pages are on the disk, so none counts as written."""
    life = Life(tmp_path / "log", durability="interval", sync_interval_ms=3_600_000, on_failure=choice)
    life.append(2)
    failures = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fdatasync(_: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    if choice == "stop":
        with pytest.raises(LogWriteFailed, match=r"events 1 to 2 could not be written: .*Input/output error"):
            life.writer.close()
    else:
        life.writer.close()
    reader = LogReader(tmp_path / "log")
    assert list(reader.events()) == []
    assert reader.broken_from == life.writer.broken_from == (1 if choice == "continue" else None)
    assert life.writer.events == 0


def test_a_loss_that_cannot_be_marked_stops_even_with_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 6: without the mark, readers would not be told of the loss."""
    life = Life(tmp_path / "log", on_failure="continue")

    def pwrite(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(
        LogWriteFailed, match=r"event 1 could not be written .*nor can the log be marked as broken"
    ):
        life.append(1)
