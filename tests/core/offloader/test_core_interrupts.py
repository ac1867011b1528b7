"""An interrupt at any line of the core's calls: the core works on or refuses, and its log is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from core_life import keys
from log_interrupts import interrupted

import kvsm
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import LogReader
from kvsm.core.offloader import EventSink, Offloader
from kvsm.errors import KvsmError, LogError, Poisoned
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.explain.story import rebuild, verify_log

PACKAGE = str(Path(kvsm.__file__).parent)
CONFIG = OffloadConfig(host_blocks=3, device_blocks=40, transfer_ticks=2, max_live_transfers=4)


class Spy:
    """Notes what the core hands to its log."""

    def __init__(self, log: EventSink) -> None:
        self._log = log
        self.given: list[OffloadingEvent] = []

    def append(self, event: OffloadingEvent) -> None:
        self.given.append(event)
        self._log.append(event)

    def flush(self) -> None:
        self._log.flush()


def calls_of(core: Offloader) -> list[Callable[[], object]]:
    """A life that stores, loads, evicts, fails and resets. No call needs what another one returned, so an
    engine goes on with the next one after an interrupt."""
    a, b = keys(3), keys(2, "b")
    live = core.ledger.transfers
    last = lambda: max(live, default=1)  # noqa: E731
    return [
        lambda: core.prepare_store("r", a, [0, 1, 2]),
        lambda: core.match("q", a),
        lambda: core.submit([last()]),
        lambda: core.report(last(), 0, True),
        lambda: core.end_step(),
        lambda: core.match("q", a),
        lambda: core.prepare_load("q", [10, 11, 12]),
        lambda: core.submit([last()]),
        lambda: core.report(last(), 0, False),
        lambda: core.prepare_store("p", b, [20, 21]),
        lambda: core.cancel(last()),
        lambda: core.prepare_store("r", a, [0, 1, 2]),
        lambda: core.submit([last()]),
        lambda: core.complete_store(last()),
        lambda: core.match("q", a[:1]),
        lambda: core.match("q", a[:2]),
        lambda: core.release("q"),
        lambda: core.prepare_store("p", b, [20, 21]),
        lambda: core.submit([last()]),
        lambda: core.tick(),
        lambda: core.tick(),
        lambda: core.lose_overdue(),
        lambda: core.preempt("q"),
        lambda: core.finish("r"),
        lambda: core.reset(),
        lambda: core.end_step(),
    ]


def live(directory: Path, at: set[int]) -> tuple[Offloader, Spy, int]:
    """Live with interrupts at these lines. Returns the core, closed, and how many lines it ran."""
    core = Offloader.open(CONFIG, directory, durability="none", segment_bytes=500, clock_ns=lambda: 0)
    assert core.writer is not None
    core.log = spy = Spy(core.writer)
    with interrupted(at, opcodes=False, package=PACKAGE) as interrupts:
        for call in calls_of(core):
            # After a second interrupt nobody may have noted that the core stopped.
            with suppress(KeyboardInterrupt, KvsmError if len(at) < 2 else Exception):
                call()
    with suppress(LogError):
        core.close()
    return core, spy, interrupts.moments


def check(directory: Path, at: set[int]) -> bool:
    """Whether the core stopped. Its log is a beginning of what it decided; all of it, if it did not stop."""
    core, spy, _ = live(directory, at)
    written = list(LogReader(directory).events())[1:]
    assert written == spy.given[: len(written)], at
    found = rebuild(directory).ledger
    if min(at) % 4 == 0:  # It costs as much as all the rest.
        assert verify_log(directory).violations == (), at
    stopped = core._poisoned != "it was closed"
    if not stopped:
        assert digest(found) == digest(core.ledger), at
    with pytest.raises(Poisoned):
        core.arrive("z")
    return stopped


def lines_of_a_life(path: Path) -> int:
    core, spy, lines = live(path / "whole", set())
    assert {event.kind for event in spy.given} >= {
        "BlocksEvicted",
        "TransferLost",
        "CacheReset",
        "LoadPlanned",
    }
    assert digest(rebuild(path / "whole").ledger) == digest(core.ledger)
    return lines


def test_interrupt_at_some_lines(tmp_path: Path) -> None:
    """Every line is a slow test."""
    lines = lines_of_a_life(tmp_path)
    stopped = [check(tmp_path / str(at), {at}) for at in range(3, lines, 83)]
    assert 0 < sum(stopped) < len(stopped)


@pytest.mark.slow
def test_interrupt_at_every_line(tmp_path: Path) -> None:
    for at in range(1, lines_of_a_life(tmp_path) + 1):
        check(tmp_path / str(at), {at})


@pytest.mark.slow
def test_second_interrupt_while_the_first_one_is_handled(tmp_path: Path) -> None:
    """At every third line, and again one to nine lines later."""
    for at in range(1, lines_of_a_life(tmp_path) + 1, 3):
        check(tmp_path / str(at), {at, at + 1 + at // 3 % 9})
