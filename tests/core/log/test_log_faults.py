"""System calls that fail, once or more often, in any order: no loss is silent, and nothing leaks (rule 6)."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_faults import BROKEN, FULL, INTERRUPTED, LATE, QUOTA, SHORT, FaultyLife, Plan
from log_life import CONFIG
from log_openings import slow_openings

from kvsm.core.log import LogDirectory, LogEnd, LogReader, LogWriter, WholeState, find_end
from kvsm.errors import LogWriteFailed

KINDS = (FULL, BROKEN, QUOTA, INTERRUPTED, SHORT, LATE)

OPTIONS = [
    {"durability": durability, "on_failure": on_failure, "segment_bytes": 120, "sync_interval_ms": interval}
    for durability, interval in (("none", 0), ("every", 0), ("interval", 100_000))
    for on_failure in ("stop", "continue")
]
"""Ways to write. A segment is full after two frames."""

NAMES = [f"{options['durability']}-{options['on_failure']}" for options in OPTIONS]


THREADED = [
    {**options, "durability": "interval", "sync_interval_ms": 0, "sync_thread": True}
    for options in OPTIONS[:2]
]


def no_fault(_: int) -> None:
    """All goes well."""


def once(call: int, fault: int) -> Plan:
    """One call fails."""
    return lambda number: fault if number == call else None


def from_then_on(call: int, fault: int) -> Plan:
    """All calls fail from one of them on: a disk that is full, or gone."""
    return lambda number: fault if number >= call else None


def some(calls: dict[int, int]) -> Plan:
    """These calls fail."""
    return calls.get


def run(path: Path, plans: Iterator[Plan], options: dict[str, Any]) -> tuple[int, int]:
    """Live with each plan. Returns how many there were, and how many logs are damaged, as the writer said."""
    lives = damaged = 0
    for plan in plans:
        damaged += FaultyLife(path / "log", plan, options).check()
        shutil.rmtree(path / "log", ignore_errors=True)
        lives += 1
    return lives, damaged


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, *THREADED], ids=[*NAMES, "thread-stop", "thread-continue"])
def test_no_single_fault_loses_events_in_silence(tmp_path: Path, options: dict[str, Any], slow: bool) -> None:
    """Each system call of a life fails once. No log is damaged, and the writer or the log tells each loss.

    slow: segments take several flushes to open.
    """
    with slow_openings(slow or options in THREADED):
        calls = len(FaultyLife(tmp_path / "whole", no_fault, options).calls)
        assert calls > 15
        kinds = itertools.cycle(KINDS)
        plans = (once(call, next(kinds)) for call in range(1, calls + 1))
        assert run(tmp_path, plans, options) == (calls, 0)


@pytest.mark.parametrize("options", OPTIONS[1::2], ids=NAMES[1::2])
def test_a_fault_while_a_fault_is_handled_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    """`continue` takes several calls to mark a loss, or to give up a new segment. The next call fails too."""
    calls = len(FaultyLife(tmp_path / "whole", no_fault, options).calls)
    plans = (some({call: KINDS[call % 6], call + 1: KINDS[call % 5]}) for call in range(1, calls + 1))
    lives, damaged = run(tmp_path, plans, options)
    assert lives == calls
    # A mark that stays written in part is damage, and the writer has raised its error.
    assert damaged <= 1


@pytest.mark.parametrize("kind", [FULL, BROKEN, QUOTA, INTERRUPTED])
def test_an_end_that_is_written_in_part_and_cannot_be_cut_is_cut_by_the_next_life(
    tmp_path: Path, kind: int
) -> None:
    """No event is lost: the writer tells what is missing, and the log can be continued."""
    options = OPTIONS[1]
    calls = FaultyLife(tmp_path / "whole", no_fault, options).calls
    assert calls[-3:] == ["pwrite", "pwrite", "close"]  # The record, and the mark of a closed log.
    record = len(calls) - 2
    life = FaultyLife(tmp_path / "log", some({record: LATE, record + 1: kind}), options)
    assert life.uncut == [record + 1]
    assert not life.check()
    end = find_end(LogDirectory(tmp_path / "log"))
    assert (end.seq, end.torn is None) == (life.seq, False)
    LogWriter(end, config=CONFIG, snapshot=lambda: WholeState(b"state")).close()
    reader = LogReader(tmp_path / "log")
    assert [one.seq for one in reader.events()] == list(range(1, life.seq + 1))
    assert (reader.torn, reader.end) == (None, LogEnd.CLOSED)


@pytest.mark.slow
@pytest.mark.parametrize("options", [*OPTIONS, *THREADED], ids=[*NAMES, "thread-stop", "thread-continue"])
def test_no_faults_lose_events_in_silence(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each fault at each call; all calls from one on; all pairs; any three. In all options 6,000 lives."""
    calls = len(FaultyLife(tmp_path / "whole", no_fault, options).calls) + 10
    chosen = random.Random(calls)

    def plans() -> Iterator[Plan]:
        for call, kind in itertools.product(range(1, calls), KINDS):
            yield once(call, kind)
            yield from_then_on(call, kind)
        for first, second in itertools.combinations(range(1, calls), 2):
            yield some({first: chosen.choice(KINDS), second: chosen.choice(KINDS)})
        for _ in range(200):
            yield some({call: chosen.choice(KINDS) for call in chosen.sample(range(1, calls), 3)})

    with slow_openings(options in THREADED):
        lives, damaged = run(tmp_path, plans(), options)
    assert lives > 850
    # A mark that stays written in part is damage, and the writer has raised its error.
    assert damaged <= 5


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_file_that_cannot_be_closed_is_a_failed_write(tmp_path: Path, on_failure: Any) -> None:
    """A network file system may tell only then that bytes are lost, if nothing was synced before."""
    options = {"durability": "none", "on_failure": on_failure}
    calls = FaultyLife(tmp_path / "whole", no_fault, OPTIONS[0]).calls
    closing = calls.index("close") + 1
    life = FaultyLife(tmp_path / "log", once(closing, QUOTA), OPTIONS[0] | options)
    assert isinstance(life.raised, LogWriteFailed)
    assert "could not be closed" in str(life.raised)
    assert isinstance(life.raised.__cause__, OSError)
    assert life.raised.__cause__.errno == errno.EDQUOT


def test_a_file_that_was_synced_may_fail_to_close(tmp_path: Path) -> None:
    """All is on the disk, whatever the last call says."""
    options = OPTIONS[2]
    calls = FaultyLife(tmp_path / "whole", no_fault, options).calls
    closings = {number: BROKEN for number, name in enumerate(calls, 1) if name == "close"}
    assert len(closings) == 3  # Both segments, and the first one again when it names the second one.
    life = FaultyLife(tmp_path / "log", some(closings), options)
    assert life.raised is None
    assert not life.check()
