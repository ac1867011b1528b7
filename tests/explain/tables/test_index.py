"""The index beside a log: read on, it equals tables made from nothing. A wrong one is not believed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_logs import read_plain, write_plain
from click.testing import CliRunner
from extracted_tables import rows_of
from replay_life import gapped, random_life

import kvsm
from examples import seeds_of_today
from kvsm.cli import main
from kvsm.core.log import LogDirectory
from kvsm.core.log.frames import MARK, MARK_OFFSET, PREAMBLE_BYTES, segment_paths
from kvsm.core.log.log_directory import INDEX_NAME, LOCK_NAME
from kvsm.events import RequestArrived
from kvsm.explain.tables import key_history
from kvsm.explain.tables import table_index as index
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.table_index import ReadProgress

ARRIVED = RequestArrived.__struct_config__.tag
"""The first field of such an event in a log."""


@pytest.fixture(autouse=True)
def _every_log_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a log would have to be large, and a key old, to meet what is tested here."""
    monkeypatch.setattr(index, "SMALL_LOG", 0)
    monkeypatch.setattr(key_history, "RECENT_KEYS", 5)


def grown(source: Path, target: Path, size: int) -> None:
    """Let the target hold the first bytes of a log, as its writer left them at some time."""
    target.mkdir(exist_ok=True, mode=0o700)
    for path in segment_paths(source):
        content = path.read_bytes()[: max(0, size)]
        size -= path.stat().st_size
        if (
            size < 0 and len(content) > PREAMBLE_BYTES
        ):  # The mark that the log was closed is written last, in the place kept for it.
            content = content[:MARK_OFFSET] + bytes(MARK.size) + content[PREAMBLE_BYTES:]
        if content:
            (target / path.name).write_bytes(content)


def tables_from_nothing(log: Path, scratch: Path) -> dict[str, list[dict[str, object]]]:
    """The tables of the log without its index."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for path in segment_paths(log):
        shutil.copy(path, scratch)
    with kvsm.open(scratch) as opened:
        return rows_of(opened.connection)


def made(log: Path, seed: int = 3) -> Path:
    """A closed log of several segments."""
    random_life(seed, 250, log, writer={"segment_bytes": 3000}).close()
    return log


def index_of(log: Path) -> Path:
    return log / INDEX_NAME


def files_of(log: Path) -> list[tuple[str, int, int]]:
    """All files beside a log, but for the lock of the index."""
    found = [(path.name, path.lstat().st_size, path.lstat().st_ino) for path in log.iterdir()]
    return sorted(one for one in found if one[0] != LOCK_NAME)


def was_read_on(log: Path, work: Callable[[], OpenedLog]) -> bool:
    """Whether the index that was there is still used after `work`."""
    before = index_of(log).stat().st_ino
    work().close()
    return index_of(log).stat().st_ino == before


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in seeds_of_today(6))]
)
def test_a_log_that_grows_gives_the_tables_of_the_whole_log(tmp_path: Path, seed: int) -> None:
    """The log is cut anywhere, also inside a frame: each time the tables equal those made from scratch."""
    rng = random.Random(seed)
    source = tmp_path / "source"
    random_life(seed, 400, source, writer={"segment_bytes": rng.choice((2000, 10_000, 1 << 20))}).close()
    size = sum(path.stat().st_size for path in segment_paths(source))
    cuts = sorted(rng.sample(range(size // 10, size), 4))
    for cut in [*cuts, size]:
        grown(source, tmp_path / "log", cut)
        with kvsm.open(tmp_path / "log") as log:
            assert log.stopped is None
            assert log.note is None
            assert rows_of(log.connection) == tables_from_nothing(log.directory, tmp_path / "scratch")
            condition = log.condition
        with kvsm.open(tmp_path / "log") as again:
            assert again.condition == condition
            assert again.last == log.last


def test_the_index_is_read_on_and_not_made_again(tmp_path: Path) -> None:
    """Else the test above would compare a thing with itself."""
    source = made(tmp_path / "source")
    size = sum(path.stat().st_size for path in segment_paths(source))
    grown(source, tmp_path / "log", size // 2)
    kvsm.open(tmp_path / "log").close()
    grown(source, tmp_path / "log", size)
    told: list[ReadProgress] = []
    assert was_read_on(tmp_path / "log", lambda: kvsm.open(tmp_path / "log", progress=told.append))
    assert told
    assert {one.index for one in told} == {None}
    told.clear()
    kvsm.open(tmp_path / "log", progress=told.append).close()
    assert not told, "nothing is new, and nothing was read"


@pytest.mark.parametrize("kept", [True, False])
def test_progress_says_what_is_made_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The first call gives the size of the log and the new index; the last call says that all was read."""
    monkeypatch.setattr(index, "_FLUSH_EVENTS", 50)
    log = made(tmp_path / "log")
    if not kept:
        log.chmod(0o777)
    told: list[ReadProgress] = []
    with kvsm.open(log, progress=told.append) as opened:
        last = opened.last
    size = sum(path.stat().st_size for path in segment_paths(log))
    assert told[0] == ReadProgress(0, 0, size, index_of(log) if kept else None)
    assert told[-1] == ReadProgress(last, size, size, index_of(log) if kept else None)
    reached = [one.read_bytes for one in told]
    assert reached == sorted(reached)
    assert len({*reached}) > 3


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_says_how_large_an_index_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """The first command says so on standard error; the second makes no index. A terminal shows a bar, too."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich.console.Console.is_terminal", terminal)
    log = made(tmp_path / "log")
    asked = ["query", str(log), "SELECT 1", "--json"]
    first, second = (CliRunner().invoke(main, asked) for _ in range(2))
    assert first.stdout == second.stdout
    assert f"MB of log into {index_of(log)}, up to about" in first.stderr
    assert ("100%" in first.stderr) is terminal
    assert second.stderr == ""


def test_gaps_of_a_log_are_remembered(tmp_path: Path) -> None:
    """A reader that resumes behind a gap does not see it again."""
    source = tmp_path / "source"
    gapped(source)
    size = sum(path.stat().st_size for path in segment_paths(source))
    for share in (0.5, 1):
        grown(source, tmp_path / "log", int(size * share))
        with kvsm.open(tmp_path / "log") as log:
            rows, condition = rows_of(log.connection), log.condition
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
        assert rows == tables_from_nothing(tmp_path / "log", tmp_path / "scratch")
        with kvsm.open(tmp_path / "scratch") as fresh:
            told = (fresh.condition.gaps, fresh.condition.broken_from, fresh.condition.end)
        assert (condition.gaps, condition.broken_from, condition.end) == told


def test_retention_may_delete_what_the_index_holds(tmp_path: Path) -> None:
    """Events that were indexed before retention deleted their segments are still in the tables."""
    log = made(tmp_path / "log")
    with kvsm.open(log) as opened:
        before = rows_of(opened.connection)
    segment_paths(log)[0].unlink()
    with kvsm.open(log) as opened:
        assert rows_of(opened.connection) == before
        assert opened.condition.missing is not None


def test_times_that_changed_alone_cost_no_new_index(tmp_path: Path) -> None:
    """A backup or a change of the mode sets `ctime`; then the bytes are compared."""
    log = made(tmp_path / "log")
    kvsm.open(log).close()
    for path in segment_paths(log):
        os.utime(path, ns=(1, 1))
    assert was_read_on(log, lambda: kvsm.open(log))


# What is not believed.


def planted_by_copy(log: Path) -> None:
    other = log.parent / "other"
    shutil.copytree(log, other)
    index_of(log).unlink()
    shutil.copy(index_of(other), index_of(log))
    index_of(log).chmod(0o600)


def of_another_run(log: Path) -> None:
    other = made(log.parent / "other", seed=9)
    for path in segment_paths(log):
        path.unlink()
    for path in segment_paths(other):
        shutil.copy(path, log)


def torn_in_the_middle(log: Path) -> None:
    content = index_of(log).read_bytes()
    with index_of(log).open("r+b") as file:
        file.seek(2 * 4096)  # A page that is not in the write-ahead log, too, as that of the forged table is.
        file.write(os.urandom(4096))
    assert index_of(log).read_bytes() != content


def cut_short(log: Path) -> None:
    os.truncate(index_of(log), 5000)


def of_an_older_version(log: Path) -> None:
    with sqlite3.connect(index_of(log)) as connection:
        connection.execute("PRAGMA user_version = 0")


def with_another_table(log: Path) -> None:
    """A view in it could run what its maker likes."""
    with sqlite3.connect(index_of(log)) as connection:
        connection.execute("DROP TABLE skips")
        connection.execute("CREATE VIEW skips AS SELECT 1 AS event")


def with_another_state(log: Path) -> None:
    with sqlite3.connect(index_of(log)) as connection:
        connection.execute("UPDATE _state SET saved = x'c0'")


def of_a_longer_log(log: Path) -> None:
    path = segment_paths(log)[-1]
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path, content: bytes) -> None:
    """Change the bytes of a file, but not its inode, size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    assert content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def with_damage_in_its_log(log: Path) -> None:
    middle = segment_paths(log)[1]
    content = bytearray(middle.read_bytes())
    content[len(content) // 2] ^= 1
    replaced(middle, bytes(content))


@pytest.mark.parametrize(
    "spoil",
    [
        with_damage_in_its_log,
        planted_by_copy,
        of_another_run,
        torn_in_the_middle,
        cut_short,
        of_an_older_version,
        with_another_table,
        with_another_state,
        of_a_longer_log,
    ],
)
def test_an_index_that_is_not_this_logs_is_made_from_nothing(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    log = made(tmp_path / "log")
    with kvsm.open(log) as opened:
        opened.sql("SELECT 1")
    with sqlite3.connect(index_of(log)) as connection:
        connection.execute("UPDATE requests SET request = 'forged'")
    spoil(log)
    with kvsm.open(log) as opened:
        assert opened.note is None
        rows = rows_of(opened.connection)
        assert rows == tables_from_nothing(log, tmp_path / "scratch")
        assert not any(row["request"] == "forged" for row in rows["requests"])


def test_an_index_is_not_believed_because_size_and_time_agree(tmp_path: Path) -> None:
    """The log gets another request in its middle, with valid checksums: no answer may come from the old
    index."""
    plain = read_plain(made(tmp_path / "source"))
    log = write_plain(tmp_path / "log", plain)
    log.chmod(0o700)
    with kvsm.open(log) as opened:
        requests = {row.request for row in opened.requests()}
    arrivals = [event for frame in plain[1].frames for event in frame if event[0] == ARRIVED]
    name = arrivals[0][4]
    for segment in plain:
        for event in [event for frame in segment.frames for event in frame]:
            event[4:] = ["x" * len(name) if field == name else field for field in event[4:]]
    changed = write_plain(tmp_path / "changed", plain)
    for path in segment_paths(changed):
        if path.read_bytes() != (log / path.name).read_bytes():
            replaced(log / path.name, path.read_bytes())
    with kvsm.open(log) as opened:
        found = {row.request for row in opened.requests()}
        assert rows_of(opened.connection) == tables_from_nothing(log, tmp_path / "scratch")
    assert found != requests


def as_a_link(log: Path) -> None:
    (log.parent / "precious").write_text("precious")
    index_of(log).symlink_to(log.parent / "precious")


def as_another_file(log: Path) -> None:
    index_of(log).write_text("precious")
    index_of(log).chmod(0o600)


def as_a_file_that_others_read(log: Path) -> None:
    index_of(log).touch(mode=0o644)
    index_of(log).chmod(0o644)


def as_a_pipe(log: Path) -> None:
    os.mkfifo(index_of(log), 0o600)


def in_a_directory_of_all(log: Path) -> None:
    log.chmod(0o777)


@pytest.mark.parametrize(
    "plant", [as_a_link, as_another_file, as_a_file_that_others_read, as_a_pipe, in_a_directory_of_all]
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """The tables are still right, and a note says why they were not stored."""
    log = made(tmp_path / "log")
    right = tables_from_nothing(log, tmp_path / "scratch")
    plant(log)
    before = files_of(log)
    with kvsm.open(log) as opened:
        assert opened.note is not None
        assert "the index is not kept" in opened.note
        assert rows_of(opened.connection) == right
    assert files_of(log) == before
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


def test_a_read_only_directory_gives_its_index_or_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archived log is as quick as it was; one without an index is read each time."""
    log = made(tmp_path / "log")
    kvsm.open(log).close()
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    told: list[int] = []
    with kvsm.open(log, progress=told.append) as opened:
        assert opened.note is None
        assert not told
        assert rows_of(opened.connection) == tables_from_nothing(log, tmp_path / "scratch")
    index_of(log).unlink()
    with kvsm.open(log) as opened:
        assert opened.note is not None
        assert "index" in opened.note
    assert not index_of(log).exists()


def test_an_index_is_private(tmp_path: Path) -> None:
    """It holds what the log holds: names of requests."""
    log = made(tmp_path / "log")
    with kvsm.open(log):
        modes = {stat.S_IMODE(path.stat().st_mode) for path in log.glob(f"{INDEX_NAME}*")}
    assert modes == {0o600}


# Several at once, and interrupts.


def test_the_index_of_a_log_that_is_being_written_is_kept_at_once(tmp_path: Path) -> None:
    """The writer locks the directory for its whole life. The index must not wait for this lock."""
    life = random_life(3, 250, tmp_path / "log", writer={"segment_bytes": 3000})
    life.flush()
    began = time.monotonic()
    with kvsm.open(tmp_path / "log") as opened:
        assert opened.note is None
    assert time.monotonic() - began < index.WAIT_SECONDS / 2
    assert index_of(tmp_path / "log").exists()
    life.close()


def test_an_engine_starts_while_somebody_works_on_the_index(tmp_path: Path) -> None:
    """A report that reads the log of the last process does not keep the next one out."""
    log = made(tmp_path / "log")
    with index._exclusive(log):
        LogDirectory(log).close()


def test_a_reader_sees_one_moment_while_another_reads_on(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    size = sum(path.stat().st_size for path in segment_paths(source))
    grown(source, tmp_path / "log", size // 2)
    with kvsm.open(tmp_path / "log") as first:
        before = rows_of(first.connection)
        grown(source, tmp_path / "log", size)
        with kvsm.open(tmp_path / "log") as second:
            assert second.note is None
            assert second.last > first.last
            assert rows_of(first.connection) == before


def test_who_waits_too_long_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = made(tmp_path / "log")
    monkeypatch.setattr(index, "WAIT_SECONDS", 0.0)
    with index._exclusive(log), kvsm.open(log) as opened:
        assert opened.note is not None
        assert "another process" in opened.note


def test_an_interrupted_indexing_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the first indexing costs one segment."""
    log = made(tmp_path / "log")
    told: list[int] = []

    def interrupt(progress: ReadProgress) -> None:
        told.append(progress.event)
        if len(told) % 6 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(index, "_FLUSH_EVENTS", 20)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            kvsm.open(log, progress=interrupt)
    assert told[6] > told[0], "a segment that was read is not read again"
    with kvsm.open(log) as opened:
        assert opened.note is None
        assert rows_of(opened.connection) == tables_from_nothing(log, tmp_path / "scratch")


def test_a_small_log_gets_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small log is read quickly, so it needs no index file beside it."""
    monkeypatch.undo()
    log = made(tmp_path / "log")
    kvsm.open(log).close()
    assert not index_of(log).exists()
