"""Who may write a log: one process, one thread at a time, and a directory of its own that stays."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from log_life import CONFIG, Life, event, names, read

from kvsm.core.log import LogReader, LogWriter, WholeState, writer
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError, LogError, LogWriteFailed, WrongArgument

# --------------------------------------------------------------------------------- processes and threads


def in_a_fork(work: Any) -> str:
    """What `work` returns in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


def test_a_forked_process_writes_nothing_to_the_log(tmp_path: Path) -> None:
    """Its writer refuses; closing it, forgetting it, and the end of the process leave the files alone."""
    life = Life(tmp_path / "log")
    written = life.append(2)
    life.append(1, flush=False)

    def misuse() -> str:
        with pytest.raises(LogError) as caught:
            life.append(1)
        life.writer.close(ValueError("not this run's end"))
        life.writer.close()
        del life.writer
        gc.collect()
        return str(caught.value)

    before = os.stat(tmp_path / "log" / f"{1:020}.kvsm")
    told = in_a_fork(misuse)
    assert "forked from the one that made this log; only that one may write it" in told
    after = os.stat(tmp_path / "log" / f"{1:020}.kvsm")
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    written += [event(3), *life.append(2)]
    life.writer.close()
    assert read(tmp_path / "log") == (written, None, None)
    assert os.listdir(tmp_path / "log") == [f"{1:020}.kvsm"]


def test_a_fork_of_a_fork_writes_nothing_either(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")

    def refused() -> bool:
        with pytest.raises(LogError, match="forked"):
            life.writer.flush()
        return True

    assert in_a_fork(lambda: in_a_fork(refused)) == "True"


def test_a_fork_can_write_a_log_of_its_own(tmp_path: Path) -> None:
    life = Life(tmp_path / "log")

    def write_another() -> bool:
        other = Life(tmp_path / "other")
        other.append(3)
        other.writer.close()
        return True

    assert in_a_fork(write_another) == "True"
    assert len(read(tmp_path / "other")[0]) == 3
    life.writer.close()


def test_a_call_while_another_thread_is_in_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was there first goes on. The other one is told, and changes nothing."""
    life = Life(tmp_path / "log", durability="every")
    inside, leave = threading.Event(), threading.Event()

    def fdatasync(_: int) -> None:
        inside.set()
        assert leave.wait(10)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    first = threading.Thread(target=life.append, args=(2,))
    first.start()
    assert inside.wait(10)
    for call in (life.writer.flush, life.writer.close):
        with pytest.raises(LogError, match="another call of this writer has not returned"):
            call()
    leave.set()
    first.join()
    written = [event(1), event(2), *life.append(1)]  # From this thread: only at the same time is refused.
    life.writer.close()
    assert read(tmp_path / "log") == (written, None, None)


@pytest.mark.slow
def test_threads_that_share_a_writer_damage_no_log(tmp_path: Path) -> None:
    """Whatever two threads do at once, the log has the events once and in order, up to the first refusal."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(300):
            life = Life(tmp_path / str(number))
            refused: list[LogError] = []

            def use(life: Life = life, refused: list[LogError] = refused) -> None:
                try:
                    for _ in range(50):
                        life.append(2)
                except LogError as error:
                    refused.append(error)

            threads = [threading.Thread(target=use) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            try:
                life.writer.close()
            except LogError as error:
                refused.append(error)
            events, damage, torn = read(tmp_path / str(number))
            assert (damage, torn) == (None, None)
            assert events == [event(seq) for seq in range(1, len(events) + 1)]
            assert refused or len(events) == life.seq
    finally:
        sys.setswitchinterval(before)


def test_a_signal_handler_that_calls_the_writer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find a write half done."""
    life = Life(tmp_path / "log", durability="every")
    told = []

    def fdatasync(_: int) -> None:
        with pytest.raises(LogError, match="and no signal handler") as caught:
            life.writer.close()
        told.append(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        written = life.append(2)
    life.writer.close()
    assert len(told) == 1
    assert read(tmp_path / "log") == (written, None, None)


# ------------------------------------------------------------------------------------- a deleted directory


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer looks at each flush whether its file is still there."""
    monkeypatch.setattr(writer, "LOOK_INTERVAL_NS", 0)


@pytest.mark.usefixtures("looks_often")
def test_a_deleted_directory_stops_a_writer(tmp_path: Path) -> None:
    """`stop`: the next flush says that the file is gone, and which events went with it."""
    life = Life(tmp_path / "log")
    life.append(3)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogWriteFailed, match=r"events 1 to 4 could not be written: .*somebody has deleted"):
        life.append(1)
    assert (life.writer.events, life.writer.failure is not None) == (0, True)


@pytest.mark.usefixtures("looks_often")
def test_a_writer_that_continues_makes_a_deleted_directory_again(tmp_path: Path) -> None:
    """`continue`: what is lost is counted, and the log goes on from a snapshot in a new directory."""
    life = Life(tmp_path / "a" / "log", on_failure="continue")
    life.append(3)
    shutil.rmtree(tmp_path / "a")
    life.append(2)
    assert (life.writer.dropped, life.writer.broken_from, life.writer.failure) == (5, 1, None)
    after = life.append(2)
    life.writer.close()
    reader = LogReader(tmp_path / "a" / "log")
    assert reader.head.snapshot == b"5"
    assert list(reader.events()) == after
    assert (reader.missing, reader.end.value) == (None, "closed")
    assert stat.S_IMODE((tmp_path / "a" / "log").stat().st_mode) == 0o700


def test_a_deleted_directory_is_noticed_at_the_end(tmp_path: Path) -> None:
    """A short run need not last for a second to be told."""
    life = Life(tmp_path / "log")
    life.append(3)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogWriteFailed, match="somebody has deleted this file of a running log"):
        life.writer.close()


def test_a_deleted_directory_is_looked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a system call, so not each flush pays for it."""
    looks = []
    really = os.fstat
    monkeypatch.setattr(os, "fstat", lambda one: (looks.append(one), really(one))[1])
    now = [0]
    monkeypatch.setattr(writer.time, "monotonic_ns", lambda: now[0])
    life = Life(tmp_path / "log")
    looks.clear()
    for _ in range(100):
        life.append(1)
        now[0] += 100_000_000
    assert len(looks) == 10


def test_a_log_that_was_moved_goes_on(tmp_path: Path) -> None:
    """Its file still has a name. With `continue` the next segment is made where the log began."""
    life = Life(tmp_path / "log", on_failure="continue", segment_bytes=100)
    life.append(1)
    (tmp_path / "log").rename(tmp_path / "moved")
    life.append(10)
    life.append(1)
    life.writer.close()
    assert life.writer.dropped == 0
    moved, there = read(tmp_path / "moved")[0], read(tmp_path / "log")[0]
    assert moved + there == [event(seq) for seq in range(1, 13)]


# ---------------------------------------------------------------------------------------- private files


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_log_is_private(tmp_path: Path) -> None:
    """It names requests and keys. Its files are 0600; the directory, and parents that it made, are 0700."""
    before = os.umask(0)
    try:
        life = Life(tmp_path / "new" / "deep" / "log", segment_bytes=1)
        life.append(1)
        life.append(1)
        life.writer.close()
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / name) for name in ("new", "new/deep", "new/deep/log")] == [0o700] * 3
    assert len(names(tmp_path / "new" / "deep" / "log")) == 3
    assert {mode_of(file) for file in (tmp_path / "new" / "deep" / "log").iterdir()} == {0o600}


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    """Another user could put a segment of their own in the place of ours."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log").chmod(0o1777)
    with pytest.raises(LogError, match=r"every user may write here \(mode 1777\).*chmod o-w"):
        Life(tmp_path / "log")
    (tmp_path / "log").chmod(0o775)
    Life(tmp_path / "log").writer.close()


@pytest.mark.parametrize("suffix", ["new", "kvsm"])
def test_a_link_in_the_place_of_a_segment_is_not_followed(tmp_path: Path, suffix: str) -> None:
    """Otherwise who may write to the directory could have any file of ours overwritten."""
    (tmp_path / "precious").write_text("mine")
    life = Life(tmp_path / "log", segment_bytes=1, on_failure="continue")
    (tmp_path / "log" / f"{2:020}.{suffix}").symlink_to(tmp_path / "precious")
    life.append(1)
    life.append(1)
    life.writer.close()
    assert (tmp_path / "precious").read_text() == "mine"
    assert life.writer.dropped == 0


def test_the_parents_of_a_new_log_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its name in its parent, a synced log is lost with the power."""
    synced = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    Life(tmp_path / "a" / "b" / "log", durability="interval").writer.close()
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "log"}
    synced.clear()
    (tmp_path / "made").mkdir()
    Life(tmp_path / "made", durability="every").writer.close()
    assert set(synced) == {tmp_path, tmp_path / "made"}


# ------------------------------------------------------------------------------------------------ clocks


@pytest.mark.parametrize(("now", "recorded"), [(-5, 0), (1 << 70, (1 << 63) - 1), (12, 12)])
def test_no_clock_makes_a_log_that_cannot_be_read(tmp_path: Path, now: int, recorded: int) -> None:
    """A clock before 1970 counts as 1970, in heads and in events."""
    log = LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState, clock=lambda: now)
    with log:
        Offloader(CONFIG, log, clock_ns=lambda: now)
    reader = LogReader(tmp_path / "log")
    (opened,) = reader.events()
    assert (reader.head.created_ns, opened.wall_ns) == (recorded, recorded)
    assert type(opened.wall_ns) is int


@pytest.mark.parametrize("now", [1.5, "noon", None])
def test_a_clock_that_gives_no_whole_number_is_refused(tmp_path: Path, now: Any) -> None:
    with pytest.raises(ConfigError, match=r"the clock says .*; it must give Unix time in whole nanoseconds"):
        LogWriter(tmp_path / "log", config=CONFIG, snapshot=WholeState, clock=lambda: now)
    assert not (tmp_path / "log").exists()
    with pytest.raises(WrongArgument, match="clock_ns gives"):
        Offloader(CONFIG, clock_ns=lambda: now)
