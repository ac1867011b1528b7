"""The log: what is written is read, or the reader says what is missing, and where (rule 6).

These events are arbitrary. Only the ledger knows whether events can follow each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from log_life import (
    CONFIG,
    RUN,
    Life,
    directory,
    disk,
    event,
    frame_ends,
    names,
    no_locks,
    raw_frame,
    read,
    run_child,
    write,
    write_open,
)

from examples import examples
from kvsm.core.log import (
    LogDirectory,
    LogEnd,
    LogFollower,
    LogReader,
    LogWriter,
    SegmentHead,
    Torn,
    WholeState,
)
from kvsm.core.log.frames import encode_preamble, segment_path
from kvsm.core.log.writer import FRAME_EVENTS
from kvsm.errors import ConfigError, LogDamaged, LogError
from kvsm.events import (
    KINDS,
    SCHEMA_VERSION,
    Direction,
    HintOutcome,
    HintReason,
    HitMatched,
    KeysRecalled,
    LogOpened,
    Offer,
    OffloadConfig,
    OffloadingEvent,
    Owners,
    Parents,
    RejectReason,
    SkipReason,
    StepEnded,
)
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import Id, Ids, pack

# ----------------------------------------------------------------------------------------- round trips


def max_tag() -> int:
    """The newest kind's tag."""
    return max(kind.__struct_config__.tag for kind in KINDS)  # type: ignore[type-var]


NUMBERS = st.integers(0, 2**63 - 1)
BATCHES = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(pack)
CURSORS = st.lists(NUMBERS, max_size=3).map(tuple)
FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    Id: NUMBERS,
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(max_size=20),
    bool: st.booleans(),
    SkipReason: st.sampled_from(SkipReason),
    RejectReason: st.sampled_from(RejectReason),
    HintOutcome: st.sampled_from(HintOutcome),
    HintReason: st.sampled_from(HintReason),
    Ids: BATCHES,
    tuple[str, ...]: st.lists(st.text(max_size=20), max_size=4).map(tuple),
    tuple[bytes, ...]: st.lists(st.binary(max_size=40), max_size=20).map(tuple),
    tuple[Id, ...]: st.lists(NUMBERS, max_size=20).map(tuple),
    Owners: st.lists(st.tuples(st.text(max_size=20), NUMBERS), max_size=5).map(tuple),
    Parents: st.lists(st.tuples(NUMBERS, st.none() | NUMBERS), max_size=5).map(tuple),
    tuple[Offer, ...]: st.lists(
        st.tuples(st.text(max_size=20), CURSORS, CURSORS),
        max_size=5,
    ).map(tuple),
    Id | None: st.none() | NUMBERS,
    bytes | None: st.none() | st.binary(max_size=40),
    str | None: st.none() | st.text(max_size=20),
    KeptPools | None: st.none()
    | st.builds(
        KeptPools,
        st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3).map(PoolIdentity.of),
        st.lists(st.binary(max_size=16), max_size=3).map(tuple),
    ),
    OffloadConfig: st.builds(
        OffloadConfig, host_blocks=st.integers(1, 2**31), device_blocks=st.integers(1, 2**31)
    ),
}


def records() -> st.SearchStrategy[tuple[type[OffloadingEvent], list[Any]]]:
    """An event of any kind, with any fields but `seq`."""

    def of_kind(kind: type[OffloadingEvent]) -> st.SearchStrategy[tuple[type[OffloadingEvent], list[Any]]]:
        fields = [FIELDS[field.type] for field in msgspec.structs.fields(kind)[1:]]
        return st.tuples(*fields).map(lambda values: (kind, list(values)))

    return st.sampled_from(KINDS).flatmap(of_kind)


FRAMES = st.lists(st.lists(records(), min_size=1, max_size=6), max_size=6)


def check_round_trip(frames: list[list[Any]], segment_bytes: int, compress: bool) -> None:
    with directory() as path:
        written = []
        options = {"segment_bytes": segment_bytes, "compress": compress, "durability": "none"}
        with LogWriter(path, config=CONFIG, snapshot=lambda: WholeState(b"state"), **options) as writer:  # type: ignore[arg-type]
            for frame in frames:
                for kind, values in frame:
                    written.append(kind(len(written) + 1, *values))
                    writer.append(written[-1])
                writer.flush()
        reader = LogReader(path)
        assert list(reader.events()) == written
        assert (reader.torn, reader.broken_from, reader.gaps) == (None, None, [])
        assert writer.events == len(written)
        assert writer.bytes_written == sum(file.stat().st_size for file in path.iterdir())


@settings(max_examples=examples(40), deadline=None)
@given(FRAMES, st.sampled_from([1, 200, 1 << 20]), st.booleans())
def test_what_is_written_is_read(frames: list[list[Any]], segment_bytes: int, compress: bool) -> None:
    """Events are state (S10).

    Events of every kind come back equal and in order, over any frames and segments.
    """
    check_round_trip(frames, segment_bytes, compress)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(FRAMES, st.sampled_from([1, 200, 1 << 20]), st.booleans())
def test_what_is_written_is_read_at_length(
    frames: list[list[Any]], segment_bytes: int, compress: bool
) -> None:
    check_round_trip(frames, segment_bytes, compress)


class _Text(str):
    """A name of a type below str."""


class _Later(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=max_tag() + 1):
    """A kind that no reader knows. Tests of all kinds must not meet it, so it has no base."""

    seq: int
    step: int
    wall_ns: int


ODD: st.SearchStrategy[Any] = st.one_of(
    NUMBERS,
    st.integers(-(2**70), 2**70),
    st.sampled_from([None, True, 0.0, 1.5, "r", "\ud800", _Text("r"), b"key", bytearray(b"key"), object()]),
    st.sampled_from(
        [Direction.LOAD, SkipReason.POOL_FULL, RejectReason.STALE, "pool full", "no such reason"]
    ),
    st.sampled_from(
        [np.int64(3), np.arange(3), np.arange(20), np.bool_(True), [1, 2], range(3), {1: 2}, {1}]
    ),
    st.lists(st.integers(-2, 2**64), max_size=20).map(tuple),
    st.lists(st.binary(max_size=3) | st.integers(0, 3), max_size=4).map(tuple),
    st.lists(st.tuples(st.sampled_from(["r", "\ud800", b"r", 3]), NUMBERS), max_size=3).map(tuple),
)
"""Values that an embedder may pass for a field of an event: right for some fields, wrong for most."""


def odd_events() -> st.SearchStrategy[Any]:
    """What an embedder may append as event 1: events of any kind, some with odd fields; and no events."""

    def of_kind(kind: type[OffloadingEvent]) -> st.SearchStrategy[OffloadingEvent]:
        right = [FIELDS[field.type] for field in msgspec.structs.fields(kind)[1:]]
        fields = st.tuples(*(st.one_of(one, one, one, ODD) for one in right))
        return fields.map(lambda values: kind(1, *values))

    others = st.sampled_from([None, 1, [21, 1, 0, 0], (), _Later(1, 0, 0), StepEnded(True, 0, 0)])
    return st.sampled_from(KINDS).flatmap(of_kind) | others


@settings(max_examples=examples(300), deadline=None)
@given(odd_events())
@example(HitMatched(1, 0, 0, "r", tuple(range(17))))
def test_what_a_writer_accepts_is_read(odd: Any) -> None:
    """Events are state (S10): either a reader reads an equal event back, or `append` refuses it, and the log
    continues without it."""
    with directory() as path:
        with LogWriter(path, config=CONFIG, snapshot=WholeState, durability="none") as writer:
            written: list[Any] = []
            with suppress(LogError):
                writer.append(odd)
                written.append(odd)
            written.append(StepEnded(len(written) + 1, 0, 0))
            writer.append(written[-1])
        assert list(LogReader(path).events()) == written


def test_an_event_that_no_reader_reads_is_named(tmp_path: Path) -> None:
    """The message says what to do; the reader's own message would say too little."""
    with LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState) as writer:
        with pytest.raises(LogError, match=r"event 1, HitMatched, was not appended.* kvsm\.ids\.pack"):
            writer.append(HitMatched(1, 0, 0, "r", tuple(range(17))))
        with pytest.raises(LogError, match="None was not appended"):
            writer.append(None)  # type: ignore[arg-type]
        writer.append(HitMatched(1, 0, 0, "r", pack(range(17))))
    assert len(list(LogReader(tmp_path / "log").events())) == 1


def test_what_an_embedder_changes_later_is_not_written(tmp_path: Path) -> None:
    """The embedder keeps a mutable buffer of the event, and changes it before the flush."""
    key = bytearray(b"key")
    with LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState) as writer:
        writer.append(KeysRecalled(1, 0, 0, (key,)))  # type: ignore[arg-type]
        key[:] = b"other"
    assert list(LogReader(tmp_path / "log").events()) == [KeysRecalled(1, 0, 0, (b"key",))]


def test_same_events_and_flushes_give_the_same_bytes(tmp_path: Path) -> None:
    """Determinism (S11): only the events, the flushes and the injected clock decide the bytes."""
    for name in ("a", "b"):
        write(tmp_path / name, [3, 1, 5], segment_bytes=100)
    for first, second in zip(
        sorted((tmp_path / "a").iterdir()), sorted((tmp_path / "b").iterdir()), strict=True
    ):
        assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())


def test_append_flushes_by_itself(tmp_path: Path) -> None:
    """Without a flush, at most one frame of events is in memory."""
    life = Life(tmp_path / "log")
    life.append(FRAME_EVENTS + 5, flush=False)
    assert life.writer.events == FRAME_EVENTS


def test_frames_of_large_events_are_short(tmp_path: Path) -> None:
    """A frame is also bounded in bytes: a reader holds one of them in memory."""
    with LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState, durability="none") as writer:
        for seq in range(1, 3 * FRAME_EVENTS):
            writer.append(HitMatched(seq, 0, 0, "r", (), bytes(50_000)))
    first, *later = [len(batch) for batch in LogReader(tmp_path / "log").batches()]
    assert first == FRAME_EVENTS
    assert max(later) <= 21


def test_compression_shrinks_the_log(tmp_path: Path) -> None:
    for name, compress in (("plain", False), ("zstd", True)):
        write(tmp_path / name, [500], compress=compress)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("plain", "zstd")]
    assert sizes[1] < sizes[0] / 2
    assert read(tmp_path / "plain") == read(tmp_path / "zstd")


def test_an_older_record_reads(tmp_path: Path) -> None:
    """A field added at the end has a default, so a record from before it still reads."""
    Life(tmp_path).kill()
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(raw_frame([[5, 1, 2, 3, "r", [4]], [4, 2, 2, 3, "r"]], 2, 1))
    hit, finished = LogReader(tmp_path).events()
    assert hit == HitMatched(1, 2, 3, "r", (4,), None)
    assert finished.aborted is False  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ segments and retention


def test_a_head_says_what_a_segment_needs(tmp_path: Path) -> None:
    write(tmp_path / "log", [2, 1], segment_bytes=1)
    heads = [segment.head for segment in LogReader(tmp_path / "log").segments()]
    assert [head.seq for head in heads] == [0, 2, 3]
    assert heads[1] == SegmentHead(SCHEMA_VERSION, heads[0].machines, CONFIG, 2, 7, RUN, 1, snapshot=b"2")
    assert len(heads[0].machines) == 16


def test_reading_starts_at_the_segment_that_holds_an_event(tmp_path: Path) -> None:
    """`--at N` needs one snapshot and one segment, not the whole log."""
    write(tmp_path / "log", [2, 2, 2], segment_bytes=1)
    reader = LogReader(tmp_path / "log")
    starts = [next(reader.segments(holding=seq)).head.seq for seq in range(1, 8)]
    assert starts == [0, 0, 2, 2, 4, 4, 6]
    segment_path(tmp_path / "log", 1).unlink()
    with pytest.raises(LogError, match="event 2 is not kept; the oldest one is 3"):
        next(reader.segments(holding=2))


def test_a_large_snapshot_does_not_rotate_by_itself(tmp_path: Path) -> None:
    """Only events fill a segment: otherwise a large snapshot would open a segment at every flush."""
    options: dict[str, Any] = {"durability": "none", "segment_bytes": 500}
    with LogWriter(
        tmp_path / "log", config=CONFIG, snapshot=lambda: WholeState(bytes(5000)), **options
    ) as writer:
        for seq in range(1, 101):
            writer.append(StepEnded(seq, seq, 1))
            writer.flush()
    assert 5 < len(names(tmp_path / "log")) < 20


def test_a_reader_streams(tmp_path: Path) -> None:
    """One frame is decoded at a time: the first batch is there before the last byte is touched."""
    write(tmp_path / "log", [3, 3])
    name = segment_path(tmp_path / "log", 1)
    data = bytearray(name.read_bytes())
    data[frame_ends(name)[2] - 2] ^= 1
    name.write_bytes(data)
    batches = LogReader(tmp_path / "log").batches()
    assert [one.seq for one in next(batches)] == [1, 2, 3]
    with pytest.raises(LogDamaged):
        next(batches)


# ------------------------------------------------------------------------------------------ durability


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were synced. They are synced really, too."""
    calls: list[int] = []
    really = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        calls.append(descriptor)
        really(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return calls


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"durability": "none"}, [0, 0, 0, 0]),
        ({"durability": "every"}, [1, 2, 4, 6]),
        ({"durability": "interval", "sync_interval_ms": 0}, [1, 2, 4, 6]),
        ({"durability": "interval", "sync_interval_ms": 3_600_000}, [1, 1, 1, 4]),
    ],
)
def test_durability_is_what_was_chosen(
    tmp_path: Path, syncs: list[int], options: dict[str, Any], expected: list[int]
) -> None:
    """Syncs after the start (the head), one flush, two more, and the close (events, tail, mark)."""
    life = Life(tmp_path / "log", **options)
    counts = [len(syncs)]
    for flushes in (1, 2):
        for _ in range(flushes):
            life.append(3)
        counts.append(len(syncs))
    life.writer.close()
    assert [*counts, len(syncs)] == expected


def test_a_clock_that_goes_back_delays_no_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush right after it has nothing to sync, and so says nothing about the time of the last sync."""
    now = [10_000_000_000]
    monkeypatch.setattr("kvsm.core.log.writer.time.monotonic_ns", lambda: now[0])
    life = Life(tmp_path / "log", durability="interval", sync_interval_ms=100)
    now[0] -= 1_000_000_000
    life.writer.flush()
    for _ in range(3):
        life.append(1)
        now[0] += 60_000_000
    assert life.writer._place.segment.synced.seq >= 1
    life.writer.close()


@pytest.mark.parametrize("sync_thread", [False, True])
def test_a_segment_is_synced_before_the_next_one_opens(
    tmp_path: Path, syncs: list[int], sync_thread: bool
) -> None:
    """Otherwise a power loss could leave a hole in the middle of the log."""
    options = {"durability": "interval", "sync_interval_ms": 3_600_000, "sync_thread": sync_thread}
    life = Life(tmp_path / "log", segment_bytes=1, **options)
    life.append(1)
    while names(tmp_path / "log") == [1]:
        life.writer.flush()
    # The first head, the events behind it, the second head, and the mark that names it.
    assert len(syncs) == 3 + (not sync_thread)


# ------------------------------------------------------------------------------------------- following


def follow(follower: LogFollower, poll_seconds: float, stop: Callable[[], bool]) -> Iterator[OffloadingEvent]:
    """All events, until `stop` is true. What was written by then is still read."""
    while True:
        stopping = stop()
        for news in follower.poll():
            yield from news.events
        if stopping:
            return
        time.sleep(poll_seconds)


def following(life: Life, rounds: list[int], path: Path) -> list[OffloadingEvent]:
    """Follow a log whose writer appends the next round whenever the follower asks whether to stop."""
    left = list(rounds)

    def stop() -> bool:
        if left:
            life.append(left.pop(0))
        return not left

    return list(follow(LogFollower(path), 0, stop))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([1, 100, 1 << 20]))
def test_a_follower_sees_all_events_across_segments(rounds: list[int], segment_bytes: int) -> None:
    with directory() as path:
        life = Life(path, segment_bytes=segment_bytes)
        assert following(life, rounds, path) == [event(seq) for seq in range(1, sum(rounds) + 1)]


def test_a_follower_waits_for_an_unfinished_frame(tmp_path: Path) -> None:
    """Half a frame is not damage while its writer lives: the follower reads it when it is complete."""
    write_open(tmp_path / "log", [1, 1])
    name = segment_path(tmp_path / "log", 1)
    data = name.read_bytes()
    lengths = iter(range(len(data) - 40, len(data) + 1))

    def stop() -> bool:
        length = next(lengths)
        name.write_bytes(data[:length])
        return length == len(data)

    assert [one.seq for one in follow(LogFollower(tmp_path / "log"), 0, stop)] == [1, 2]


def test_a_follower_that_stops_reports_the_unfinished_end(tmp_path: Path) -> None:
    write_open(tmp_path / "log", [1, 1])
    name = segment_path(tmp_path / "log", 1)
    os.truncate(name, name.stat().st_size - 1)
    follower = LogFollower(tmp_path / "log")
    assert [one.seq for one in follow(follower, 0, lambda: True)] == [1]
    assert follower.torn is not None
    assert follower.torn.seq == 2


def test_a_follower_goes_on_behind_a_gap_and_says_where_it_is(tmp_path: Path) -> None:
    with disk(1 << 20) as limited:
        life = Life(tmp_path / "log", on_failure="continue")
        life.append(2)
        limited.free = 0
        life.append(1)
        limited.free = 1 << 20
        life.append(FRAME_EVENTS)
        life.append(3)
    follower = LogFollower(tmp_path / "log")
    news = list(follower.poll())
    ((first, last),) = follower.gaps
    assert {one.segment.gap for one in news} == {None, (first, last)}
    assert follower.overtaken == []
    events = [event.seq for one in news for event in one.events]
    assert events == [*range(1, first), *range(last + 1, life.seq + 1)]


def test_a_follower_tells_that_the_log_is_broken_and_that_it_was_closed(tmp_path: Path) -> None:
    """An engine whose log cannot be written goes on or stops; a follower that waits must say why."""
    with disk(1 << 20) as limited:
        life = Life(tmp_path / "log", on_failure="continue")
        follower = LogFollower(tmp_path / "log")
        life.append(2)
        assert len(list(follower.poll())) == 2
        assert (follower.end, follower.closed) == (LogEnd.OPEN, False)
        limited.free = 0
        life.append(1)
        assert not list(follower.poll())
        assert (follower.end, follower.broken_from, follower.closed) == (LogEnd.BROKEN, 3, False)
    with Life(tmp_path / "other").writer:
        follower = LogFollower(tmp_path / "other")
    assert [news.events for news in follower.poll()] == [[]]
    assert follower.closed


def test_a_follower_waits_for_a_head_that_is_not_finished(tmp_path: Path) -> None:
    """It may be started right after the engine."""
    write_open(tmp_path / "log", [2])
    name = segment_path(tmp_path / "log", 1)
    data = name.read_bytes()
    follower, seen = LogFollower(tmp_path / "log"), list[int]()
    for length in [*range(0, len(data), 9), len(data)]:
        assert not seen
        name.write_bytes(data[:length])
        seen += [one.seq for news in follower.poll() for one in news.events]
        assert not follower.closed
    assert seen == [1, 2]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 3))
@example([25, 6, 40], 0)
def test_a_follower_that_retention_overtakes_says_what_it_could_not_read(
    rounds: list[int], every: int
) -> None:
    """What is read, and what is said to be deleted, is everything, once and in order."""
    with directory() as path:
        # A frame of 400 events has 7.5 kB; the segment that follows it must have room too.
        life = Life(path, segment_bytes=1000, max_bytes=10_000)
        follower, seen = LogFollower(path), list[int]()
        for number, count in enumerate(rounds):
            life.append(10 * count)
            if every and number % every == 0:
                seen += [one.seq for news in follower.poll() for one in news.events]
        life.writer.close()
        seen += [one.seq for news in follower.poll() for one in news.events]
        lost = [seq for first, last in follower.overtaken for seq in range(first, last + 1)]
        assert follower.closed
        assert sorted(seen + lost) == list(range(1, life.seq + 1))
        assert seen == sorted(seen)


def test_a_log_that_was_deleted_or_replaced_is_followed_no_more(tmp_path: Path) -> None:
    """Another run may use the name again. Its events must not be taken for the events of this one."""
    write_open(tmp_path / "log", [1, 1], segment_bytes=1)
    follower = LogFollower(tmp_path / "log")
    list(follower.poll())
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogError, match="no such directory"):
        list(follower.poll())
    write_open(tmp_path / "log", [1])
    with pytest.raises(LogError, match="was deleted while it was read, and another began here"):
        list(follower.poll())


def test_a_follower_in_another_process_misses_nothing(tmp_path: Path) -> None:
    """A real writer at full speed, with rotation: everything that it wrote is yielded."""
    body = "life = Life(path, segment_bytes=5000)\nprint(flush=True)\n" + (
        "for _ in range(400):\n    life.append(10)\nlife.writer.close()"
    )
    child = run_child(body, tmp_path / "log")
    assert child.stdout is not None
    child.stdout.readline()
    followed = list(follow(LogFollower(tmp_path / "log"), 0.001, lambda: child.poll() is not None))
    child.communicate()
    assert followed == [event(seq) for seq in range(1, 4001)]
    assert len(names(tmp_path / "log")) > 10


# ---------------------------------------------------------------------------------------------- misuse


def test_a_writer_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    """Each life has its own directory: nothing is appended to an old log, or mixed with other files."""
    write(tmp_path / "log", [1])
    with pytest.raises(LogError, match="holds a log already; each run writes to a new directory"):
        Life(tmp_path / "log")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(LogError, match=r"is not empty \(it holds notes\.txt\)"):
        Life(tmp_path / "other")


@pytest.mark.parametrize("place", ["file", "file/log"])
def test_a_writer_refuses_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="a log is a directory, and a file stands here"):
        Life(tmp_path / place)


def test_two_writers_that_start_at_once_do_not_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks both see the directory empty. The second one to make a segment is refused."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(LogDirectory, "require_empty", lambda _: None)
    life = Life(tmp_path / "log")
    with pytest.raises(LogError, match="another writer has just started a log here"):
        Life(tmp_path / "log")
    written = life.append(2)
    assert read(tmp_path / "log") == (written, None, None)
    assert len(list((tmp_path / "log").iterdir())) == 1


def test_events_are_appended_in_order(tmp_path: Path) -> None:
    """The writer refuses a gap. A refused event changes nothing."""
    life = Life(tmp_path / "log")
    written = life.append(1)
    for seq in (1, 3):
        with pytest.raises(LogError, match=f"event {seq} was appended where 2 is next"):
            life.writer.append(event(seq))
    written += life.append(1)
    assert read(tmp_path / "log") == (written, None, None)


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")
    life.writer.close()
    life.writer.close()
    for call in (lambda: life.writer.append(event(1)), life.writer.flush):
        with pytest.raises(LogError, match="this writer is closed"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "always"}, "durability is 'always'; it must be none, interval or every"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore'; it must be stop or continue"),
        ({"sync_interval_ms": -1}, "sync_interval_ms is -1"),
        ({"segment_bytes": 0}, "segment_bytes is 0"),
        ({"segment_bytes": 10, "max_bytes": 19}, "max_bytes is 19; it must hold two segments of 10 bytes"),
        (
            {"segment_bytes": 10, "max_bytes": 900},
            "max_bytes is 900; it must be .* or more, because a segment",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Life(tmp_path / "log", **options)
    assert not (tmp_path / "log").exists()


def test_a_reader_says_why_there_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    (tmp_path / "misnamed").mkdir()
    (tmp_path / "misnamed" / "12.kvsm").touch()
    for name, message in (
        ("absent", "no such directory"),
        ("file", "not a directory"),
        ("foreign", "no log here"),
        ("misnamed", "not the name of a segment"),
    ):
        with pytest.raises(LogError, match=f"{name}.*: {message}"):
            LogReader(tmp_path / name)


def test_a_segment_that_is_gone_or_no_file_is_an_error(tmp_path: Path) -> None:
    """Retention may delete a segment while a slow reader reads: the reader is told."""
    write(tmp_path / "log", [1, 1], segment_bytes=1)
    batches = LogReader(tmp_path / "log").batches()
    next(batches)
    segment_path(tmp_path / "log", 2).unlink()
    with pytest.raises(LogError, match=r"0002\.kvsm: gone while the log was read"):
        list(batches)
    segment_path(tmp_path / "log", 2).mkdir()
    with pytest.raises(LogError, match=r"0002\.kvsm: not a regular file"):
        list(LogReader(tmp_path / "log").batches())


def test_a_log_without_a_whole_record_has_no_head(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    segment_path(tmp_path / "log", 1).write_bytes(encode_preamble()[:20])
    reader = LogReader(tmp_path / "log")
    assert list(reader.events()) == []
    assert reader.torn == Torn(str(segment_path(tmp_path / "log", 1)), 0, 1, 20)
    with pytest.raises(LogError, match="cut in its first record; there is nothing to read"):
        _ = reader.head


def test_the_first_event_of_a_life_carries_its_configuration(tmp_path: Path) -> None:
    """The head and `LogOpened` agree: after retention, every segment has the configuration."""
    with LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState) as writer:
        writer.append(LogOpened(1, 0, 0, CONFIG, "0123456789abcdef"))
    reader = LogReader(tmp_path / "log")
    (opened,) = reader.events()
    assert isinstance(opened, LogOpened)
    assert opened.config == reader.head.config == CONFIG
