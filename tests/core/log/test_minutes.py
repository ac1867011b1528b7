"""The counts that a writer saves for each segment equal those of the segment's events, or are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from incidents import HEALTHY, Rig, chats
from log_life import Life

from kvsm.core.log import LogReader
from kvsm.core.log.frames import SegmentHead
from kvsm.core.log.minutes import (
    MINUTE_NS,
    MOST_PARTS,
    CopyCounts,
    Minute,
    MinuteCounter,
    SegmentMinutes,
    bucket_of,
    bucket_start_ns,
    counts_before,
    counts_of,
    encode_counts,
)
from kvsm.events import OffloadConfig, OffloadingEvent, RequestArrived, RequestFinished

SEGMENT_BYTES = 1 << 16


def left(directory: Path) -> list[tuple[SegmentMinutes | None, SegmentMinutes]]:
    """For each segment but the last: the counts in the head behind it, and the counts of its events."""
    found, before = [], None
    for segment in LogReader(directory).segments():
        if before is not None:
            found.append((counts_before(segment.head, before.first), before))
        before = counts_of(segment)
    return found


def test_each_head_has_the_counts_of_the_segment_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log", 1, chats(300, 1), device_blocks=800, writer={"segment_bytes": SEGMENT_BYTES})
    found = left(rig.serve().close())
    assert len(found) >= 3
    assert all(counts == counted for counts, counted in found)


def test_a_process_that_continues_a_log_counts_the_last_segment(tmp_path: Path) -> None:
    found = left(HEALTHY["healthy_next_process"](tmp_path / "log"))
    assert found
    assert all(counts == counted for counts, counted in found)


def test_an_interrupted_count_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the segment whose count was interrupted has no counts."""
    life = Life(tmp_path / "log", segment_bytes=SEGMENT_BYTES)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(MinuteCounter, "_turn", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            life.append(1)
    while len(list((tmp_path / "log").glob("*.kvsm"))) < 4:
        life.append(400)
    life.writer.close()
    found = left(tmp_path / "log")
    assert [counts is None for counts, _ in found] == [True, False, False]
    assert all(counts == counted for counts, counted in found[1:])


def test_events_that_were_never_counted_leave_no_counts() -> None:
    """An interrupt between the write of a frame and its count leaves a gap."""
    made = events([MINUTE_NS] * 6)
    counter = MinuteCounter(1)
    counter.count(made[:2])
    assert counter.is_whole
    counter.count(made[4:])
    assert not counter.is_whole


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def events(times_ns: Sequence[int]) -> list[OffloadingEvent]:
    """Requests that arrive and end in turn, at these times."""
    kinds = (RequestArrived, RequestFinished)
    return [kinds[n % 2](n + 1, n, time, f"r{n // 2}") for n, time in enumerate(times_ns)]


times = st.lists(st.integers(0, 300 * MINUTE_NS), min_size=1, max_size=60)


@given(times_ns=times, cuts=st.lists(st.integers(1, 59), max_size=4))
def test_counts_do_not_depend_on_the_frames(times_ns: list[int], cuts: list[int]) -> None:
    whole, pieces = MinuteCounter(1), MinuteCounter(1)
    made = events(times_ns)
    whole.count(made)
    ends = sorted({*cuts, 0, len(made)} & set(range(len(made) + 1)))
    for begin, end in pairwise(ends):
        pieces.count(made[begin:end])
    assert pieces.minutes == whole.minutes


@given(times_ns=times)
def test_no_event_is_lost_when_the_parts_become_longer(times_ns: list[int]) -> None:
    """A segment may last for days. There are still few parts, and each event counts in the part that contains
    its time."""
    counter = MinuteCounter(1)
    counter.count(events(sorted(times_ns)))
    found = counter.minutes
    assert len(found.parts) <= MOST_PARTS
    width = found.minutes * MINUTE_NS
    assert {part: minute.events for part, minute in found.parts.items()} == {
        part: sum(time // width == part for time in times_ns) for part in {time // width for time in times_ns}
    }


def test_parts_double_when_there_are_too_many() -> None:
    counter = MinuteCounter(1)
    counter.count(events([n * MINUTE_NS for n in range(3 * MOST_PARTS)]))
    assert counter.minutes.minutes == 4
    assert [minute.events for minute in counter.minutes.parts.values()] == [4] * (3 * MOST_PARTS // 4)


def test_a_clock_that_is_set_back_is_counted() -> None:
    counter = MinuteCounter(1)
    counter.count(events([90 * MINUTE_NS, 30 * MINUTE_NS, 31 * MINUTE_NS]))
    assert max(minute.set_back_ns for minute in counter.minutes.parts.values()) == 60 * MINUTE_NS


@given(duration=st.integers(0, 1 << 60))
def test_a_bucket_has_the_durations_between_its_start_and_the_next(duration: int) -> None:
    bucket = bucket_of(duration)
    assert bucket_start_ns(bucket) <= duration < bucket_start_ns(bucket + 1)
    assert bucket_start_ns(bucket + 1) <= max(5, 1.25 * bucket_start_ns(bucket))


def test_a_head_with_the_counts_of_other_events_has_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log", 1, chats(200, 1), device_blocks=800, writer={"segment_bytes": SEGMENT_BYTES})
    first, second = list(LogReader(rig.serve().close()).segments())[:2]
    assert counts_before(second.head, first.head.seq + 1) is not None
    assert counts_before(second.head, first.head.seq + 2) is None
    assert counts_before(msgspec.structs.replace(second.head, before=b"\xff"), 1) is None


def test_parts_stay_few_when_they_are_far_from_each_other() -> None:
    """A quiet engine, or a clock that jumps by years."""
    counter = MinuteCounter(1)
    counter.count(events([10 * n * MINUTE_NS for n in range(4 * MOST_PARTS)]))
    assert len(counter.minutes.parts) <= MOST_PARTS
    assert sum(minute.events for minute in counter.minutes.parts.values()) == 4 * MOST_PARTS


@given(times_ns=st.lists(st.integers(0, (1 << 63) - 1), min_size=MOST_PARTS, max_size=2 * MOST_PARTS))
def test_parts_stay_few_whatever_the_clock_says(times_ns: list[int]) -> None:
    counter = MinuteCounter(1)
    counter.count(events(times_ns))
    assert len(counter.minutes.parts) <= MOST_PARTS


def copied(counts: SegmentMinutes, copies: CopyCounts) -> None:
    next(iter(counts.parts.values())).copies[0, 0] = copies


IMPOSSIBLE: dict[str, Callable[[SegmentMinutes], None]] = {
    "parts of no length": lambda counts: setattr(counts, "minutes", 0),
    "parts of a negative length": lambda counts: setattr(counts, "minutes", -2),
    "parts of three minutes": lambda counts: setattr(counts, "minutes", 3),
    "no parts": lambda counts: setattr(counts, "parts", {}),
    "a part that is never": lambda counts: setattr(counts, "parts", {1 << 60: Minute(events=7)}),
    "too many parts": lambda counts: counts.parts.update(dict.fromkeys(range(MOST_PARTS), Minute())),
    "more events": lambda counts: setattr(next(iter(counts.parts.values())), "events", 8),
    "negative counts": lambda counts: setattr(next(iter(counts.parts.values())), "asked", -1),
    "counts beyond 64 bits in sum": lambda counts: setattr(
        next(iter(counts.parts.values())), "stored", 1 << 63
    ),
    "a negative duration": lambda counts: copied(counts, CopyCounts(1, 0, {-5: 1})),
    "a duration of ages": lambda counts: copied(counts, CopyCounts(1, 0, {1 << 40: 1})),
    "a negative number of copies": lambda counts: copied(counts, CopyCounts(-1, 0)),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_counts_that_no_writer_can_have_left_are_no_counts(change: Callable[[SegmentMinutes], None]) -> None:
    """Then a reader counts the segment itself: a fabricated head neither stops nor misleads it."""
    counter = MinuteCounter(1)
    counter.count(events([MINUTE_NS * n for n in range(7)]))
    counts = counter.minutes
    head = SegmentHead(
        1, "", OffloadConfig(device_blocks=4, host_blocks=4), 7, 0, before=encode_counts(counts)
    )
    assert counts_before(head, 1) == counts
    change(counts)
    assert counts_before(msgspec.structs.replace(head, before=encode_counts(counts)), 1) is None
