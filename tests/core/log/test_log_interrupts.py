"""Ctrl-C at any moment leaves a log that reads whole, and a writer that goes on or refuses."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from log_interrupts import PACKAGE, StubbornLife, check_given_up, check_interrupted, read_all
from log_openings import slow_openings

from examples import TODAY, examples, some

FRAMES = [2, 1]
SMALL = {"segment_bytes": 1, "max_bytes": 1300, "sync_interval_ms": 0}
"""Each flush opens a segment, and the second one deletes the first."""


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that syncs at once: here only the order of calls matters."""
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda _: None)


@pytest.mark.parametrize(
    ("options", "each_time"),
    [
        pytest.param({"durability": "every", "on_failure": "continue"}, False, id="every"),
        pytest.param({"durability": "interval", "slow": True, "compress": True}, False, id="slow"),
        pytest.param({"durability": "interval", "sync_thread": True, "slow": True}, False, id="slow-thread"),
        pytest.param({"durability": "every"}, True, id="every-time", marks=pytest.mark.slow),
        pytest.param(
            {"durability": "interval", "compress": True}, True, id="interval", marks=pytest.mark.slow
        ),
        pytest.param({"durability": "none"}, True, id="none", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_every_line_damages_no_log(
    tmp_path: Path, options: dict[str, Any], each_time: bool
) -> None:
    """Ctrl-C in the constructor, `append`, `flush`, `close`, or what they call.

    Then the same call is made again, and all events are read, once and in order.

    each_time: whenever a line is reached, or only the last time.
    """
    options = SMALL | options
    with slow_openings(options.pop("slow", False)):
        lines = check_interrupted(tmp_path / "0", FRAMES, options, set(), opcodes=False).lines
        moments = [moment for found in lines.values() for moment in (found if each_time else found[-1:])]
        for moment in some(moments):
            check_interrupted(tmp_path / str(moment), FRAMES, options, {moment}, opcodes=False)
    assert len(moments) > 250


@pytest.mark.parametrize("sync_thread", [False, True])
def test_two_interrupts_damage_no_log(tmp_path: Path, sync_thread: bool) -> None:
    """The second Ctrl-C comes while the next call finishes what the first has interrupted."""
    chosen, options = random.Random(1), SMALL | {"durability": "interval", "sync_thread": sync_thread}
    moments = check_interrupted(tmp_path / "0", FRAMES, options, set(), opcodes=False).moments
    for number in range(1, examples(60)):
        first = chosen.randint(1, moments)
        at = {first, first + chosen.randint(1, 60)}
        check_interrupted(tmp_path / str(number), FRAMES, options, at, opcodes=False)


def test_an_interrupt_that_ends_the_run_leaves_a_whole_log(tmp_path: Path) -> None:
    """Ctrl-C, then a close, perhaps a second Ctrl-C in it, and nobody calls again."""
    chosen, options = random.Random(2), SMALL | {"durability": "every"}
    moments = check_interrupted(tmp_path / "0", FRAMES, options, set(), opcodes=False).moments
    for number in range(1, examples(150)):
        first = chosen.randint(1, moments)
        at = {first, first + chosen.randint(0, 80)}
        check_given_up(tmp_path / str(number), FRAMES, options, at, opcodes=False)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["none", "interval", "every"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
@pytest.mark.parametrize("compress", [False, True])
def test_an_interrupt_at_an_opcode_damages_no_log(
    tmp_path: Path, durability: str, on_failure: str, compress: bool
) -> None:
    """As above, between any two opcodes of a line: other moments each day, as many as two seconds allow."""
    options = SMALL | {"durability": durability, "on_failure": on_failure, "compress": compress}
    moments = check_interrupted(tmp_path / "0", FRAMES, options, set(), opcodes=True).moments
    chosen, started = random.Random(TODAY * moments), time.monotonic()
    for number in count(1):
        at = {chosen.randint(1, moments)}
        if number % 3 == 0:
            at |= {min(at) + chosen.randint(1, 300)}
        check = check_given_up if number % 4 == 0 else check_interrupted
        check(tmp_path / str(number), FRAMES, options, at, opcodes=True)
        if time.monotonic() - started > 2:
            break
    assert number > 10


def interrupt_in_a_while(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize(
    ("durability", "runs"),
    [
        pytest.param("every", 20, id="few"),
        pytest.param("every", 400, id="every", marks=pytest.mark.slow),
        pytest.param("interval", 400, id="interval", marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_time_damages_no_log(tmp_path: Path, durability: str, runs: int) -> None:
    """Real signals, as Ctrl-C sends them: all events are there, once and in order, and the log is closed."""
    chosen, is_over = random.Random(runs), False

    def interrupt(_: int, frame: FrameType | None) -> None:
        if is_over:  # A signal that came at the last moment must not ask for another one.
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                raise KeyboardInterrupt
            frame = frame.f_back
        interrupt_in_a_while(0.00005)  # It came between two calls of the writer.

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(runs):
            is_over = False
            life = StubbornLife(tmp_path / str(number), [1, 2] * 40, SMALL | {"durability": durability})
            life.open()
            interrupt_in_a_while(chosen.uniform(0.0001, 0.006))
            life.run()
            is_over = True
            interrupt_in_a_while(0)
            assert life.flushed == 120
            seen, reader = read_all(life.directory)
            assert reader is not None
            assert (reader.end.value, reader.head.seq + len(seen)) == ("closed", 120)
    finally:
        interrupt_in_a_while(0)
        signal.signal(signal.SIGALRM, before)
