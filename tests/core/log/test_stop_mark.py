"""A process that is asked to end and then killed leaves a mark beside its log: a stop is no kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.cli import main
from kvsm.core.log import LogReader, StopMark, is_stop, stopped_by, told_stop
from kvsm.core.log.stop_mark import NAME
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig, Restarted
from kvsm.explain.report.log_report import make_report
from kvsm.explain.story import rebuild, verify_log
from kvsm.explain.tables.opened import open as open_log
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.warm_restart import KILLED, Start, start

CONFIG = OffloadConfig(host_blocks=4, device_blocks=8)
POOLS = KeptPools(PoolIdentity.of({"model": "m"}), (b"pool", b"checksums"))
MARKS = memory_marks()


def begin(directory: Path) -> Start:
    return start(directory, CONFIG, POOLS, marks=MARKS)


def store(core: Offloader) -> None:
    job = core.prepare_store("r", [b"key %d" % core.ledger.life], [0]).job
    assert job is not None
    core.submit([job.transfer])
    core.complete_store(job.transfer)
    core.end_step()


def killed(act: Callable[[], None]) -> None:
    """Let a process do this in its main thread, and be killed."""
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGTERM, lambda *_: None)
            act()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def life(
    directory: Path, *signals: int, marks: bool = True, between: Callable[[], None] = lambda: None
) -> None:
    """A process that stores, gets these signals and is killed at once."""

    def act() -> None:
        core = begin(directory).offloader
        mark = StopMark(directory) if marks else None
        store(core)
        between()
        for number in signals:
            os.kill(os.getpid(), number)
        del mark

    killed(act)


@pytest.mark.parametrize(
    ("signals", "name"),
    [
        ((), ""),
        ((signal.SIGTERM,), "SIGTERM"),
        ((signal.SIGTERM, signal.SIGTERM), "SIGTERM"),
        ((signal.SIGCHLD,), ""),
        ((signal.SIGTERM,) * 40, "SIGTERM"),
    ],
)
def test_a_stop_is_told_from_a_kill(tmp_path: Path, signals: tuple[int, ...], name: str) -> None:
    """By the report of the log as it was left, and by the next process."""
    log = tmp_path / "log"
    life(log, *signals)
    assert stopped_by(log) == name
    told = " ".join(rebuild(log).condition.notes())
    assert ("stopped by SIGTERM" in told) == bool(name)
    assert verify_log(log).condition.stopped_by == name
    assert begin(log).kept == 1
    ended = next(event.ended for event in LogReader(log).events() if isinstance(event, Restarted))
    assert ended == (told_stop(name) if name else KILLED)
    assert is_stop(ended) == bool(name)


def test_a_mark_is_of_one_life(tmp_path: Path) -> None:
    """A process that is killed after one that was stopped was killed."""
    log = tmp_path / "log"
    life(log, signal.SIGTERM)
    life(log)
    life(log, signal.SIGTERM)
    life(log, marks=False)
    begin(log).offloader.close()
    ends = [event.ended for event in LogReader(log).events() if isinstance(event, Restarted)]
    assert ends == [told_stop("SIGTERM"), KILLED, told_stop("SIGTERM"), KILLED]


def test_the_report_tells_them_apart(tmp_path: Path) -> None:
    """Also if the index of the log was made before the signal came."""
    log = tmp_path / "log"
    life(log, signal.SIGTERM)
    life(log)
    life(log, signal.SIGTERM, between=lambda: open_log(log).close())
    with open_log(log) as opened:
        told = make_report(opened, now_ns=opened.ended_ns + 3600 * 10**9)
    assert (told.restarts.restarts, told.restarts.killed, told.restarts.stopped) == (2, 1, 1)
    assert told.end.stopped_by == "SIGTERM"
    (trouble,) = [one for one in told.troubles if one.name == "engine killed"]
    assert "stopped by SIGTERM" in trouble.text
    assert "--shutdown-timeout" in trouble.text


COMMANDS = (
    ("verify", "--strict"),
    ("replay",),
    ("show", "--request", "r"),
    ("why", "r"),
    ("report",),
    ("query", "SELECT 1"),
    ("top", "--once"),
    ("tail", "--no-follow"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", ["log", "other"])
def test_each_command_reads_the_mark(tmp_path: Path, name: str, command: tuple[str, ...]) -> None:
    """A process with two logs gets SIGTERM and is killed. No command calls this a kill, or a live engine."""

    def act() -> None:
        for directory in ("log", "other"):
            core = Offloader.open(CONFIG, tmp_path / directory)
            core.arrive("r")
            core.end_step()
        mark = StopMark(tmp_path / "log")
        mark.share(tmp_path / "other")
        os.kill(os.getpid(), signal.SIGTERM)

    killed(act)
    before = time.time() - 60
    for path in (tmp_path / name).iterdir():
        os.utime(path, (before, before))
    result = CliRunner().invoke(main, [command[0], str(tmp_path / name), *command[1:]])
    assert "SIGTERM" in result.output, result.output
    assert "still runs" not in result.output
    assert "was killed" not in result.output


def test_a_shared_mark_is_removed_with_its_log(tmp_path: Path) -> None:
    for name in ("log", "other"):
        (tmp_path / name).mkdir()
    mark = StopMark(tmp_path / "log")
    mark.share(tmp_path / "other")
    mark.share(tmp_path / "absent")
    assert (tmp_path / "log" / NAME).samefile(tmp_path / "other" / NAME)
    mark.close()
    mark.share(tmp_path / "other")
    assert [list((tmp_path / name).iterdir()) for name in ("log", "other")] == [[], []]


def test_a_closed_log_has_no_mark(tmp_path: Path) -> None:
    log = tmp_path / "log"
    core = begin(log).offloader
    mark = StopMark(log)
    assert (log / NAME).exists()
    mark.close()
    mark.close()
    core.close()
    assert not (log / NAME).exists()
    assert signal.set_wakeup_fd(-1) == -1
    assert rebuild(log).condition.stopped_by == ""


def test_a_forked_child_notes_nothing(tmp_path: Path) -> None:
    """Its signals are not those of the engine."""

    def between() -> None:
        killed(lambda: os.kill(os.getpid(), signal.SIGTERM))

    life(tmp_path / "log", between=between)
    assert stopped_by(tmp_path / "log") == ""
    life(tmp_path / "log", signal.SIGTERM, between=between)
    assert stopped_by(tmp_path / "log") == "SIGTERM"


def test_who_hears_of_signals_already_goes_on_hearing(tmp_path: Path) -> None:
    """`asyncio` uses the same descriptor."""
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake)
    try:
        mark = StopMark(tmp_path)
        mark.close()
        assert not (tmp_path / NAME).exists()
        assert signal.set_wakeup_fd(before) == wake
    finally:
        signal.set_wakeup_fd(before)
        os.close(heard)
        os.close(wake)


def test_outside_the_main_thread_nothing_is_noted(tmp_path: Path) -> None:
    made: list[StopMark] = []
    thread = threading.Thread(target=lambda: made.append(StopMark(tmp_path)))
    thread.start()
    thread.join()
    made[0].close()
    assert not (tmp_path / NAME).exists()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_mark_needs_no_room_and_no_code(tmp_path: Path) -> None:
    """The bytes are there before the signal. A directory that is gone, or read-only, stops nothing."""
    StopMark(tmp_path / "absent").close()
    mark = StopMark(tmp_path)
    size = (tmp_path / NAME).stat().st_size
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / NAME).stat().st_size == size
    assert stopped_by(tmp_path) == "SIGTERM"
    mark.close()
    assert stopped_by(tmp_path) == ""
