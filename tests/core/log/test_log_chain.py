"""One log of several lives: whatever ends a process, the next one goes on behind its last whole event."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_chain import AFTER, BEFORE, HALF, NEVER, Chain, PlannedLife
from log_faults import FULL, LATE, faults, open_files
from log_interrupts import interrupted
from log_life import CONFIG, RUN, Life, directory, event, names, no_locks, read, run_child, write, write_open
from log_openings import slow_openings
from msgspec.structs import replace

from examples import examples, some
from kvsm.core.log import LogDirectory, LogEnd, LogFollower, LogLife, LogReader, find_end, segment_file
from kvsm.core.log.frames import MARK, MARK_OFFSET, FrameEncoder, segment_path
from kvsm.errors import LogDamaged, LogError, LogWriteFailed

PLANS = st.lists(
    st.builds(
        PlannedLife,
        frames=st.lists(st.integers(1, 4), max_size=6),
        kill_at=st.integers(1, 60) | st.just(NEVER),
        how=st.sampled_from([BEFORE, HALF, AFTER]),
        error=st.sampled_from([None, "-", "the device is lost"]),
    ),
    min_size=1,
    max_size=8,
)
OPTIONS = st.fixed_dictionaries(
    {
        "durability": st.sampled_from(["none", "interval", "every"]),
        "sync_thread": st.booleans(),
        "segment_bytes": st.sampled_from([1, 150, 400, 1 << 20]),
        "compress": st.booleans(),
        "on_failure": st.sampled_from(["stop", "continue"]),
    }
)


def check_lives(
    plans: list[PlannedLife], options: list[dict[str, Any]], slow: bool = False, **limits: Any
) -> None:
    """slow: segments take several flushes to open."""
    with directory() as path, slow_openings(slow):
        path.mkdir()
        chain = Chain(path, **limits)
        for plan, chosen in zip(plans, itertools.cycle(options), strict=False):
            chain.live(plan, **({**chosen, "segment_bytes": 150} if limits else chosen))
            chain.check()
        chain.live(PlannedLife([2, 1]))
        reader = chain.check()
        assert reader is not None
        assert (reader.end, reader.torn) == (LogEnd.CLOSED, None)


@settings(max_examples=examples(80), deadline=None)
@given(PLANS, st.lists(OPTIONS, min_size=1, max_size=3), st.booleans())
def test_a_log_of_several_lives_reads_as_one(
    plans: list[PlannedLife], options: list[dict[str, Any]], slow: bool
) -> None:
    """All flushed events of all lives are read in order, by a reader and by a follower that was there."""
    check_lives(plans, options, slow)


@settings(max_examples=examples(30), deadline=None)
@given(PLANS, st.lists(OPTIONS, min_size=1, max_size=3), st.booleans(), st.integers(2000, 6000))
def test_a_chain_keeps_its_limit(
    plans: list[PlannedLife], options: list[dict[str, Any]], slow: bool, max_bytes: int
) -> None:
    """Segments of earlier lives count, and are deleted in their turn: at no instant is there more."""
    check_lives(plans, options, slow, max_bytes=max_bytes)


@pytest.mark.slow
@settings(max_examples=350, deadline=None)
@given(PLANS, st.lists(OPTIONS, min_size=1, max_size=3), st.booleans(), st.none() | st.integers(2000, 6000))
def test_chains_at_length(
    plans: list[PlannedLife], options: list[dict[str, Any]], slow: bool, max_bytes: int | None
) -> None:
    check_lives(plans, options, slow, **({} if max_bytes is None else {"max_bytes": max_bytes}))


def check_two_kills(first: int, second: int, how: tuple[int, int]) -> int:
    """A life that is killed, and a continuation that is killed. Returns the calls of the second one."""
    with directory() as path:
        path.mkdir()
        chain = Chain(path)
        chain.live(PlannedLife([2, 1]))
        chain.live(PlannedLife([2, 1, 3], first, how[0]))
        calls = len(chain.live(PlannedLife([], second, how[1], "-")).calls)
        chain.check()
        chain.live(PlannedLife([1]))
        chain.check()
        return calls


def two_kills() -> list[tuple[int, int, tuple[int, int]]]:
    """Each system call of a life, and each one of the continuation behind it."""
    places: list[tuple[int, int, tuple[int, int]]] = []
    for first in range(1, NEVER):
        with directory() as path:
            path.mkdir()
            chain = Chain(path)
            chain.live(PlannedLife([2, 1]))
            if len(chain.live(PlannedLife([2, 1, 3], first)).calls) < first:
                return places
        calls = check_two_kills(first, NEVER, (BEFORE, BEFORE))
        places += [
            (first, second, (how, also))
            for second in range(1, calls + 1)
            for how in range(3)
            for also in range(3)
        ]
    return places


def test_two_kills_in_a_row_lose_nothing() -> None:
    """A continuation that is killed leaves what the next one can continue: a part of all pairs."""
    places = two_kills()
    assert len(places) > 2000
    for place in some(places[::37]):
        check_two_kills(*place)


@pytest.mark.slow
def test_any_two_kills_in_a_row_lose_nothing() -> None:
    for place in two_kills():
        check_two_kills(*place)


# ------------------------------------------------------------------------------- what is found at the end


def go_on(path: Path, count: int = 2, **options: Any) -> int:
    """Continue a log by some events, and close it. Returns behind which event."""
    end = find_end(LogDirectory(path))
    life = Life(end, **options)
    life.append(count)
    life.writer.close()
    return end.seq


def lives(path: Path) -> list[LogLife]:
    reader = LogReader(path)
    list(reader.events())
    return reader.lives


def test_the_lives_are_told(tmp_path: Path) -> None:
    """Who printed a log knows where each life began, and how it ended."""
    write(tmp_path / "log", [2, 1])
    life = Life(find_end(LogDirectory(tmp_path / "log")))
    life.append(2)
    life.writer.close(LogError("the device is lost"))
    life = Life(find_end(LogDirectory(tmp_path / "log")))
    life.append(1)
    life.kill()
    go_on(tmp_path / "log")
    assert lives(tmp_path / "log") == [
        LogLife(1, 1, 3, LogEnd.CLOSED),
        LogLife(2, 4, 5, LogEnd.STOPPED, "the device is lost"),
        LogLife(3, 6, 6, LogEnd.OPEN),
        LogLife(4, 7, 8, LogEnd.CLOSED),
    ]
    assert read(tmp_path / "log") == ([event(seq) for seq in range(1, 9)], None, None)


def test_a_damaged_end_of_an_earlier_life_is_told(tmp_path: Path) -> None:
    """Also if that life was killed before it marked its log as closed: the next one has cut what was torn."""
    write(tmp_path / "log", [2])
    first = segment_path(tmp_path / "log", 1)
    data = bytearray(first.read_bytes())
    data[MARK_OFFSET : MARK_OFFSET + MARK.size] = bytes(MARK.size)
    first.write_bytes(data)
    go_on(tmp_path / "log")
    assert read(tmp_path / "log")[1] is None
    data[-3] ^= 1
    first.write_bytes(data)
    assert isinstance(read(tmp_path / "log")[1], LogDamaged)


def test_a_life_whose_last_segment_is_replaced_keeps_its_end(tmp_path: Path) -> None:
    """It was closed in a segment without events. The next life takes that place, and repeats the end."""
    life = Life(tmp_path / "log", segment_bytes=1)
    life.append(1)
    life.writer.close(LogError("the device is lost"))
    Life(find_end(LogDirectory(tmp_path / "log"))).kill()
    go_on(tmp_path / "log")
    assert [one.error for one in lives(tmp_path / "log")] == ["the device is lost", None]


def test_nothing_is_continued_as_a_new_log(tmp_path: Path) -> None:
    """An absent directory, and one with an unpublished segment: the caller needs no case of its own."""
    assert go_on(tmp_path / "absent") == 0
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / f"{1:020}.new").write_bytes(b"half a head")
    assert go_on(tmp_path / "log") == 0
    assert os.listdir(tmp_path / "log") == [f"{1:020}.kvsm"]
    assert [one.life for one in lives(tmp_path / "log")] == [1]


@pytest.mark.parametrize("head", [0, 10, 100, None])
def test_a_first_segment_without_events_is_replaced(tmp_path: Path, head: int | None) -> None:
    """A process that was killed as it started leaves a head, whole or torn. A new log takes its place."""
    Life(tmp_path / "log").kill()
    if head is not None:
        os.truncate(segment_path(tmp_path / "log", 1), head)
    assert go_on(tmp_path / "log") == 0
    assert read(tmp_path / "log")[0] == [event(1), event(2)]


@pytest.mark.parametrize("durability", ["none", "every"])
def test_a_torn_end_is_cut(tmp_path: Path, durability: Any) -> None:
    """What a reader cuts, a writer cuts before it goes on: at each length of the last frame."""
    write_open(tmp_path / "whole", [1, 2])
    data = segment_path(tmp_path / "whole", 1).read_bytes()
    for length in range(len(data) - 60, len(data), 7):
        path = tmp_path / str(length)
        path.mkdir()
        segment_path(path, 1).write_bytes(data[:length] + bytes(length % 3 * 5000))
        assert go_on(path, durability=durability) == 1
        assert read(path) == ([event(1), event(2), event(3)], None, None)


def broken_log(path: Path, follows: bool) -> None:
    """A log that lost event 2. follows: with a segment behind the gap, which has no event."""
    life = Life(path, on_failure="continue")
    life.append(1)
    left, really = [1], os.pwrite

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_once(descriptor: int, data: bytes, offset: int) -> int:
        return full() if left and left.pop() else really(descriptor, data, offset)  # type: ignore[func-returns-value, return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full_once)
        if not follows:
            patch.setattr(segment_file, "FileIO", full)
        life.append(1)
    life.kill()


def test_a_log_with_lost_events_at_its_end_is_not_continued(tmp_path: Path) -> None:
    """Somebody may have acted on them. The text says so, and the log stays as it is."""
    broken_log(tmp_path / "log", follows=False)
    before = segment_path(tmp_path / "log", 1).read_bytes()
    with pytest.raises(
        LogError, match="cannot be continued: its last events, from 2 on, were lost when a write"
    ):
        find_end(LogDirectory(tmp_path / "log"))
    assert segment_path(tmp_path / "log", 1).read_bytes() == before


def test_a_log_goes_on_behind_a_gap(tmp_path: Path) -> None:
    """The segment behind the gap has no event, but the state. The new one takes its place with the same."""
    broken_log(tmp_path / "log", follows=True)
    assert names(tmp_path / "log") == [1, 3]
    assert go_on(tmp_path / "log") == 2
    reader = LogReader(tmp_path / "log")
    _, second = reader.segments()
    assert (second.gap, second.head.snapshot, reader.gaps) == ((2, 2), b"2", [(2, 2)])
    assert [one.end for one in reader.lives][:1] == [LogEnd.BROKEN]


def test_a_life_that_fails_to_begin_takes_no_state_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment has replaced the one with the state behind a gap. Then the directory cannot be synced."""
    broken_log(tmp_path / "log", follows=True)
    claimed = LogDirectory(tmp_path / "log")

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(LogWriteFailed, match="no log can be started"):
            Life(find_end(claimed), durability="every")
    claimed.close()
    assert go_on(tmp_path / "log") == 2


def test_a_log_is_not_continued_behind_a_gap_without_a_state(tmp_path: Path) -> None:
    broken_log(tmp_path / "log", follows=True)
    os.truncate(segment_path(tmp_path / "log", 3), 50)
    with pytest.raises(LogError, match="events 2 to 2 were lost, and the head behind them is torn"):
        find_end(LogDirectory(tmp_path / "log"))


def test_damage_is_not_continued(tmp_path: Path) -> None:
    """A reader could not cross it."""
    write(tmp_path / "log", [2, 2])
    data = bytearray(segment_path(tmp_path / "log", 1).read_bytes())
    data[-50] ^= 1
    segment_path(tmp_path / "log", 1).write_bytes(data)
    with pytest.raises(LogDamaged):
        find_end(LogDirectory(tmp_path / "log"))


def test_a_segment_of_an_earlier_life_does_not_follow(tmp_path: Path) -> None:
    """Segments of two chains that were mixed up are refused, although their events would fit."""
    write_open(tmp_path / "log", [2])
    go_on(tmp_path / "log")
    write(tmp_path / "other", [4, 1], segment_bytes=1)
    segment_path(tmp_path / "other", 5).rename(segment_path(tmp_path / "log", 5))
    with pytest.raises(LogDamaged, match="this is life 2 of the log, and life 1 follows"):
        list(LogReader(tmp_path / "log").events())


def test_a_segment_of_the_same_life_does_not_follow_a_closed_one(tmp_path: Path) -> None:
    """Only a later life may: else somebody has put two logs together."""
    write(tmp_path / "log", [1])
    write(tmp_path / "other", [1, 1], segment_bytes=1)
    segment_path(tmp_path / "other", 2).rename(segment_path(tmp_path / "log", 2))
    with pytest.raises(LogDamaged, match="the log was closed here, and another segment of this life follows"):
        list(LogReader(tmp_path / "log").events())


def test_a_frame_of_an_earlier_life_is_refused(tmp_path: Path) -> None:
    """A disk may show an old block in a new file. Its events have the numbers of new ones."""
    write_open(tmp_path / "log", [2])
    end = find_end(LogDirectory(tmp_path / "log"))
    Life(end).kill()
    with segment_path(tmp_path / "log", 3).open("ab") as file:
        file.write(FrameEncoder(RUN, False, 1).events([event(3)], 0))
    with pytest.raises(LogDamaged, match="a frame of another run or life stands here"):
        list(LogReader(tmp_path / "log").events())


# ------------------------------------------------------------------------------------ the new life's writer


def test_a_new_life_counts_what_it_writes_itself(tmp_path: Path) -> None:
    """Its metrics begin anew, as those of each process do."""
    write_open(tmp_path / "log", [3, 2], segment_bytes=1)
    life = Life(find_end(LogDirectory(tmp_path / "log")))
    assert life.writer.bytes_written == segment_path(tmp_path / "log", 6).stat().st_size
    life.append(2)
    assert (life.writer.events, life.writer.dropped) == (2, 0)
    assert [one.first for one in life.writer._retention.segments] == names(tmp_path / "log")
    life.writer.close()
    assert life.writer.bytes_written == segment_path(tmp_path / "log", 6).stat().st_size


def test_a_new_config_stands_in_the_heads_from_the_next_segment_on(tmp_path: Path) -> None:
    """The first head of a life has the config of its snapshot; an event changes it."""
    write_open(tmp_path / "log", [1])
    life = Life(find_end(LogDirectory(tmp_path / "log")), segment_bytes=1)
    other = replace(CONFIG, device_blocks=99)
    life.writer.use_config(other)
    life.append(1)
    life.append(1)
    life.writer.close()
    heads = [segment.head for segment in LogReader(tmp_path / "log").segments()]
    assert [head.config for head in heads] == [CONFIG, CONFIG, other, other]


def test_a_follower_goes_on_into_the_next_life(tmp_path: Path) -> None:
    """It was told that the log is closed. If it still asks, it hears of the next life."""
    write(tmp_path / "log", [2])
    follower = LogFollower(tmp_path / "log")
    assert sum(len(news.events) for news in follower.poll()) == 2
    assert follower.closed
    life = Life(find_end(LogDirectory(tmp_path / "log")))
    life.append(3)
    assert sum(len(news.events) for news in follower.poll()) == 3
    assert (follower.closed, follower.end, follower.error) == (False, LogEnd.OPEN, None)
    life.writer.close()
    list(follower.poll())
    assert (follower.closed, [one.end for one in follower.lives]) == (True, [LogEnd.CLOSED] * 2)


def test_the_dead_lifes_end_is_synced_before_the_new_segment_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may have synced nothing. After a power loss nothing may be missing before the new life."""
    write_open(tmp_path / "log", [1, 1, 1], segment_bytes=1)
    done: list[str] = []

    def noting(name: str) -> Any:
        really = getattr(os, name)

        def call(*args: Any) -> Any:
            place = args[0] if name == "rename" else os.readlink(f"/proc/self/fd/{args[0]}")
            done.append(f"{name} {Path(place).name}")
            return really(*args)

        return call

    for name in ("fdatasync", "fsync", "rename"):
        monkeypatch.setattr(os, name, noting(name))
    Life(find_end(LogDirectory(tmp_path / "log", durable=False)), durability="every").writer.close()
    olds = [f"fdatasync {seq:020}.kvsm" for seq in (1, 2, 3, 4)]
    new = [f"fdatasync {4:020}.new", f"rename {4:020}.new", "fsync log"]
    assert done[:8] == [*olds, "fsync log", *new]


def test_a_fault_while_a_life_begins_is_told_and_leaves_a_log_to_continue(tmp_path: Path) -> None:
    """Each system call of the continuation fails once. The same claim can be used again."""
    for number, fault in itertools.product(range(1, 20), (FULL, LATE)):
        path = tmp_path / f"{number}{fault}"
        write_open(path, [2, 1])
        os.truncate(segment_path(path, 1), segment_path(path, 1).stat().st_size - 3)
        claimed = LogDirectory(path)
        with faults(lambda call, at=number, what=fault: what if call == at else None) as made:  # type: ignore[misc]
            try:
                life = Life(find_end(claimed), durability="every")
            except LogWriteFailed:
                life = None
        if life is None:
            life = Life(find_end(claimed), durability="every")
        life.append(2)
        life.writer.close()
        assert read(path) == ([event(seq) for seq in range(1, life.seq + 1)], None, None)
        assert open_files(path) == []
        if len(made.calls) < number:
            break
    assert number > 8


def test_an_interrupt_while_a_life_begins_leaves_a_log_to_continue(tmp_path: Path) -> None:
    """Ctrl-C at any line: the claim can be used again, or another process can take the directory."""
    moments = None
    for moment in itertools.count(1, 13):
        path = tmp_path / str(moment)
        write_open(path, [1, 1], segment_bytes=1)
        claimed = None
        with interrupted({moment}, opcodes=False) as interrupts, suppress(KeyboardInterrupt):
            claimed = LogDirectory(path)
            Life(find_end(claimed)).kill()
        moments = interrupts.moments
        if moments < moment:
            break
        if claimed is not None:
            claimed.close()
        assert go_on(path) == 2
        assert read(path) == ([event(seq) for seq in range(1, 5)], None, None)
    assert moments is not None
    assert moments > 150


# ----------------------------------------------------------------------------------------------- the lock

HOLDS = """
life = Life(path)
life.append(3)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_live_writer_is_named_and_a_killed_one_is_continued(tmp_path: Path) -> None:
    """The kernel gives the lock back with the process: kill -9, and the next one has it at once."""
    with run_child(
        HOLDS.replace("sys.stdin.read()", "import time; time.sleep(60)"), tmp_path / "log"
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(LogError, match=rf"a log is written here: process {child.pid} \(.+\) holds it"):
            LogDirectory(tmp_path / "log")
        with pytest.raises(LogError, match=rf"process {child.pid}"):
            Life(tmp_path / "log")
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert go_on(tmp_path / "log") == 3
    assert [one.end for one in lives(tmp_path / "log")] == [LogEnd.OPEN, LogEnd.CLOSED]


def test_a_process_cannot_hold_a_log_twice(tmp_path: Path) -> None:
    """Two engines in one process are refused as well, until the first one closes."""
    life = Life(tmp_path / "log")
    life.append(1)
    with pytest.raises(LogError, match=rf"process {os.getpid()} "):
        LogDirectory(tmp_path / "log")
    life.writer.close()
    assert go_on(tmp_path / "log") == 1


def test_a_claim_serves_one_writer(tmp_path: Path) -> None:
    claimed = LogDirectory(tmp_path / "log")
    end = find_end(claimed)
    life = Life(end)
    for _ in range(2):
        with pytest.raises(LogError, match="a writer had this claim already; claim the directory again"):
            Life(end)
        life.writer.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It lives on after its parent's writer has closed, or has died, and the next process starts."""
    life = Life(tmp_path / "log")
    life.append(1)
    reading, writing = os.pipe()
    tell, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(told, b"!")
            os.close(writing)
            os.read(reading, 1)
        finally:
            os._exit(0)
    try:
        os.read(tell, 1)
        life.writer._place.segment.close()
        for lock in life.writer._claimed._locks:
            os.close(lock._descriptor)  # As the kernel does it: closed, and not unlocked.
            lock._descriptor = -1
        assert go_on(tmp_path / "log") == 1
    finally:
        for one in (reading, writing, tell, told):
            os.close(one)
        os.waitpid(child, 0)


def test_a_closing_child_does_not_unlock_its_parent(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")
    child = os.fork()
    if child == 0:
        try:
            life.writer.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(LogError, match="a log is written here"):
        LogDirectory(tmp_path / "log")
    life.writer.close()


def test_a_program_that_was_started_does_not_keep_the_lock(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")
    life.append(1)
    script = [sys.executable, "-c", "print(flush=True); input()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(script, close_fds=False, **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for lock in life.writer._claimed._locks:
            os.close(lock._descriptor)
            lock._descriptor = -1
        life.writer._place.segment.close()
        assert go_on(tmp_path / "log") == 1
        other.communicate(b"\n")


def test_a_file_system_without_locks_takes_new_logs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell there whether the log's writer still lives."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_open(tmp_path / "log", [2])
    with pytest.raises(LogError, match="cannot be continued: its file system has no locks for directories"):
        find_end(LogDirectory(tmp_path / "log"))
    assert go_on(tmp_path / "new") == 0


def test_a_directory_that_is_made_again_is_locked_again(tmp_path: Path) -> None:
    """A log whose directory was moved goes on under the old name: nobody else may write there."""
    life = Life(tmp_path / "log", on_failure="continue", segment_bytes=1)
    life.append(1)
    (tmp_path / "log").rename(tmp_path / "moved")
    life.append(2)
    life.append(1)
    for name in ("log", "moved"):
        with pytest.raises(LogError, match="a log is written here"):
            LogDirectory(tmp_path / name)
    life.writer.close()
    assert go_on(tmp_path / "log") == 4
