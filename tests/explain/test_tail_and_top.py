"""`kvsm tail` and `kvsm top`: their output while an engine writes the log, and after it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from log_life import Life as LogLife
from log_life import directory, run_child, write, write_open
from replay_life import CONFIGS, OPERATIONS, Life, Operations, key, story_life, written

from examples import examples
from kvsm import events as ev
from kvsm.cli import main, tail, top
from kvsm.cli.output import Screen
from kvsm.cli.toned import in_red
from kvsm.core.log import LogFollower
from kvsm.events import OffloadingEvent
from kvsm.explain.live_view import LiveView, RankCounts
from kvsm.explain.metrics import gauges
from kvsm.explain.story import Trust
from kvsm.explain.story.concern import concern
from kvsm.explain.story.event_filter import EventFilter


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def numbers(result: Result) -> list[int]:
    """The event numbers in the lines of `kvsm tail`."""
    assert result.exit_code == 0, result.stderr
    return [int(line.split(" event ", 1)[1].split()[0]) for line in result.stdout.splitlines()]


# ------------------------------------------------------------------------------------------------ tail


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(0, 30),
    st.sampled_from([1, 300, 1 << 20]),
)
def test_tail_begins_with_the_last_events_of_any_log(
    frames: list[int], lines: int, segment_bytes: int
) -> None:
    """However many segments they are in."""
    with directory() as path:
        events = write(path, frames, segment_bytes=segment_bytes)
        wanted = [event.seq for event in events][len(events) - min(lines, len(events)) :]
        assert numbers(kvsm("tail", path, "--no-follow", "-n", lines)) == wanted


def test_tail_says_where_it_has_not_looked_for_events(tmp_path: Path) -> None:
    """A person who waits for new events must not wait until a large log is searched for old ones."""
    write(tmp_path / "log", [1] * 20, segment_bytes=1)
    result = kvsm("tail", tmp_path / "log", "-n", 20)
    shown = numbers(result)
    assert shown == list(range(shown[0], 21))
    assert f"events before {shown[0]} were not looked at; --no-follow looks at all" in result.stderr


def test_a_line_of_tail_has_when_where_and_what(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    (line,) = kvsm("tail", tmp_path / "log", "--kind", "BlocksEvicted").stdout.splitlines()
    assert line == ("+0.000s event 14 step 2: BlocksEvicted slots 1, 0 (2) transfer 15")
    answer = json.loads(kvsm("tail", tmp_path / "log", "--request", "r4", "-n", 1, "--json").stdout)
    assert answer == {
        "schema": "kvsm.tail/1",
        "event": 19,
        "step": 2,
        "wall_ns": 19,
        "after_start_ns": 18,
        "kind": "RequestFinished",
        "text": "RequestFinished request r4 aborted",
        "requests": ["r4"],
        "transfers": [],
        "worker": None,
        "failed": False,
    }


@settings(max_examples=examples(20), deadline=None)
@given(OPERATIONS, CONFIGS, st.sampled_from(["r0", "r1", "r4"]))
def test_a_filter_by_request_shows_what_concerns_the_request(
    operations: Operations, config: dict[str, Any], request: str
) -> None:
    """Never an event that does not concern it, and each event about a transfer that was planned for it."""
    life, wanted, folded = Life(**config).drive(operations), EventFilter(request=request), Life(**config)
    ledger, own = folded.core.ledger, set[int]()
    for event in life.events[1:]:
        found = concern(ledger, event)
        fits = wanted.fits(event)
        assert not fits or request in found.requests or not own.isdisjoint(found.transfers)
        if isinstance(event, ev.StorePlanned | ev.LoadPlanned) and request in found.requests:
            own.add(event.seq)
            assert fits
        elif isinstance(event, ev.WorkerReported | ev.TransferLost) and event.transfer in own:
            assert fits
        ledger.apply(event)


CONDITIONS: list[tuple[dict[str, Any], Callable[[OffloadingEvent], bool]]] = [
    ({"kinds": (ev.StorePlanned, ev.Ticked)}, lambda event: type(event) in (ev.StorePlanned, ev.Ticked)),
    ({"worker": 1}, lambda event: getattr(event, "worker", None) == 1),
    (
        {"transfer": 5},
        lambda event: (
            getattr(event, "transfer", None) == 5 or (event.seq == 5 and event.kind.endswith("Planned"))
        ),
    ),
    (
        {"failed": True},
        lambda event: (
            event.kind in ("ReportRejected", "TransferLost")
            or getattr(event, "good", True) is False
            or getattr(event, "voided", False)
        ),
    ),
]


@pytest.mark.parametrize(("conditions", "expected"), CONDITIONS)
def test_a_condition_of_tail_means_what_it_says(
    conditions: dict[str, Any], expected: Callable[[OffloadingEvent], bool]
) -> None:
    events = (
        Life()
        .drive([(name, n, 3 * n) for n in range(40) for name in ("store", "match", "submit", "report")])
        .events
    )
    events.append(ev.WorkerReported(len(events) + 1, 0, 0, 5, 1, False, "lost"))
    events.append(ev.LoadPlanned(len(events) + 1, 0, 0, "r", (), (), True))
    wanted = EventFilter(**conditions)
    fitting = [event for event in events if wanted.fits(event)]
    plain = [event for event in events if expected(event) and "transfers" not in event.__struct_fields__]
    assert [event for event in fitting if "transfers" not in event.__struct_fields__] == plain
    assert plain


def test_several_conditions_must_all_hold(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    both = kvsm("tail", tmp_path / "log", "--kind", "workerreported", "--transfer", 9)
    assert numbers(both) == [11]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kind", "StoreSkiped"], "There is no kind of event 'StoreSkiped'. Did you mean StoreSkipped"),
        (["--request", "r44", "--no-follow"], "r4"),
        (["-n", "-1"], "-1 is not in the range"),
    ],
)
def test_tail_says_in_one_line_what_is_wrong_with_a_question(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    story_life(tmp_path / "log")
    result = kvsm("tail", tmp_path / "log", *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert says in result.stderr


@pytest.mark.parametrize("command", ["tail", "top"])
def test_without_a_log_there_is_one_line(tmp_path: Path, command: str) -> None:
    result = kvsm(command, tmp_path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_damaged_log_ends_tail_and_top_with_the_place(tmp_path: Path) -> None:
    write(tmp_path / "log", [5, 5])
    (name,) = (tmp_path / "log").glob("*.kvsm")
    data = bytearray(name.read_bytes())
    data[-60] ^= 1
    name.write_bytes(data)
    for command in ("tail", "top"):
        result = kvsm(command, tmp_path / "log")
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "damaged" in result.stderr


def test_what_a_log_holds_is_shown_harmless(tmp_path: Path) -> None:
    """A request's name and a worker's error come from outside. A terminal must not obey them."""
    evil = "r\x1b[2J\n"
    life = Life(tmp_path / "log")
    job = life.core.prepare_store(evil, [key(1)], [0]).job
    assert job is not None
    life.core.submit([job.transfer])
    life.core.report(job.transfer, 0, False, evil)
    life.core.arrive("waits")
    life.close()
    for result in (kvsm("tail", tmp_path / "log"), kvsm("top", tmp_path / "log")):
        assert "\x1b" not in result.stdout
        assert r"r\x1b[2J\n" in result.stdout


WRITES_SLOWLY = """
import time
life = Life(path, segment_bytes=2000)
print(flush=True)
for _ in range(60):
    life.append(5)
    time.sleep(0.004)
life.writer.close()
"""


def test_tail_follows_a_writer_in_another_process_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across segments, each event once, and it ends by itself when the engine closes the log."""
    monkeypatch.setattr(tail, "POLL_SECONDS", 0.01)
    child = run_child(WRITES_SLOWLY, tmp_path / "log")
    assert child.stdout is not None
    child.stdout.readline()
    result = kvsm("tail", tmp_path / "log", "-n", 1000)
    child.communicate()
    assert numbers(result) == list(range(1, 301))
    assert len(list((tmp_path / "log").glob("*.kvsm"))) > 3


def test_tail_says_once_that_nothing_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine may be idle or dead, which a log cannot show, so `tail` says that no event comes."""
    write_open(tmp_path / "log", [3])
    monkeypatch.setattr(tail, "QUIET_SECONDS", 0.0)
    printer = tail._EventPrinter(tmp_path / "log", {}, False)
    printer.last_events(1, None)
    for _ in range(3):
        printer.new_events()
    assert capsys.readouterr().err.count("nothing was written for") == 1


def test_tail_says_which_events_retention_took_before_it_could_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = LogLife(tmp_path / "log", segment_bytes=1000, max_bytes=8000)
    life.append(5)
    printer = tail._EventPrinter(tmp_path / "log", {}, False)
    printer.last_events(10, None)
    for _ in range(100):
        life.append(10)
    printer.new_events()
    shown = capsys.readouterr()
    assert "are missing: retention (max_bytes) deleted them before they were read" in shown.err
    assert f"event {life.seq} " in shown.out


def interrupted(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command on a log that no process writes, and end it by Ctrl-C once it has printed something."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvsm", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    return subprocess.CompletedProcess(child.args, child.returncode, first + out, err)


@pytest.mark.parametrize("command", ["tail", "top"])
def test_ctrl_c_ends_with_a_clean_line(tmp_path: Path, command: str) -> None:
    """The writer was killed, so that nothing but Ctrl-C ends them."""
    life = Life(tmp_path / "log")
    life.stored("r1", [key(1)], [0])
    life.kill()
    ended = interrupted(command, tmp_path / "log")
    assert (ended.returncode, ended.stderr) == (130, "kvsm: interrupted\n")
    assert ended.stdout.endswith("\n")


# ------------------------------------------------------------------------------------------------- top


def state_of(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(kvsm("top", path, "--once", "--json").stdout)
    return answer


@settings(max_examples=examples(40), deadline=None)
@given(OPERATIONS, CONFIGS, st.booleans())
def test_top_tells_what_the_ledger_and_the_events_say(
    operations: Operations, config: dict[str, Any], closed: bool
) -> None:
    """The numbers of one screen, for any life of the core."""
    with directory() as path:
        life = Life(path, **config).drive(operations)
        life.close() if closed else life.kill()
        follower, view = LogFollower(path), LiveView(Trust())
        for news in follower.poll():
            view.take(news)
        state, ledger = view.state(follower.end.value, 5), life.core.ledger
    slots, now, events = state.slots, gauges(ledger), life.events
    assert (slots.event, slots.step) == (ledger.seq, ledger.step)
    assert (
        slots.free + slots.idle + slots.pinned + slots.storing + slots.quarantined + slots.retired
        == state.capacity
    )
    assert (slots.free, slots.retired) == (now["free_blocks"], now["retired_blocks"])
    assert (slots.stores_in_flight, slots.loads_in_flight) == tuple(now["live_transfers"].values())
    assert state.events == len(events)
    reports = [event for event in events if isinstance(event, ev.WorkerReported)]
    assert sum(rank.reports for rank in state.ranks) == len(reports)
    assert sum(rank.failed for rank in state.ranks) == sum(not event.good for event in reports)
    skipped = [event for event in events if isinstance(event, ev.StoreSkipped)]
    assert state.skipped == sum(len(event.keys) for event in skipped)
    assert_ages(state, life, 5)


def assert_ages(state: Any, life: Life, quiet_ns: int) -> None:
    """The oldest copy and the longest wait, found in the events by another way."""
    ledger, now = life.core.ledger, life.events[-1].wall_ns + quiet_ns
    left = {
        id: event.wall_ns
        for event in life.events
        if isinstance(event, ev.TransfersSubmitted)
        for id in event.transfers
        if id in ledger.transfers
    }
    assert (state.oldest_copy is None) == (not left)
    if left:
        assert state.oldest_copy.age_ns == now - min(left.values())
        assert not state.oldest_copy.at_least
    waits = [
        max(
            event.wall_ns
            for event in life.events
            if isinstance(event, ev.RequestDeferred) and event.request == name
        )
        for name in ledger.deferred
    ]
    assert (state.longest_wait is None) == (not waits)
    if waits:
        assert state.longest_wait.age_ns == now - min(waits)


def test_top_begins_with_the_newest_segment_and_knows_what_it_does_not_know(tmp_path: Path) -> None:
    """A copy that was submitted before that has an age of at least so much."""
    life = Life(tmp_path / "log", writer={"segment_bytes": 400})
    job = life.core.prepare_store("slow", [key(1)], [0]).job
    assert job is not None
    life.core.submit([job.transfer])
    for number in range(60):
        life.core.arrive(f"r{number}")
        life.flush()
    life.kill()
    state = state_of(tmp_path / "log")
    assert state["since_event"] > 3
    assert state["oldest_copy"]["transfer"] == job.transfer
    assert state["oldest_copy"]["at_least"]
    assert state["oldest_copy"]["silent"] == [0, 1]
    assert state["end"] == "open"


def test_top_counts_the_last_minute_alone(tmp_path: Path) -> None:
    """An incident that is over is not shown for the rest of the day."""
    seconds = iter(range(1000))
    life = Life(tmp_path / "log", clock_ns=lambda: next(seconds) * 10**9)
    for number in range(300):
        life.core.arrive(f"r{number}")
    life.close()
    state = state_of(tmp_path / "log")
    assert state["window_ns"] == 60 * 10**9
    assert state["events"] == 61


def test_the_worst_rank_is_the_one_that_fails_and_else_the_slowest() -> None:
    screen = "\n".join(
        top.screen_lines(
            Path("log"), with_ranks(RankCounts(0, 9, timed=9, total_ns=9), RankCounts(3, 9, 2, "ECC"))
        )
    )
    assert "rank 3: 2 of 9 copies failed (ECC)" in screen
    slow = RankCounts(1, 2, timed=2, total_ns=8_000_000, max_ns=5_000_000)
    screen = "\n".join(
        top.screen_lines(Path("log"), with_ranks(RankCounts(0, 2, timed=2, total_ns=2000), slow))
    )
    assert (
        "rank 1: 0 of 2 copies failed; mean 4.00 ms, longest 5.00 ms; of the other ranks 0 of 2, mean 1.00 us"
        in screen
    )


def with_ranks(*ranks: RankCounts) -> Any:
    """The state of an empty log, with these reports."""
    view = LiveView(Trust())
    with directory() as path:
        Life(path).close()
        for news in LogFollower(path).poll():
            view.take(news)
    view._seconds[-1].ranks = {rank.worker: rank for rank in ranks}
    return view.state("open", 0)


def test_top_refuses_a_log_that_cannot_be_folded(tmp_path: Path) -> None:
    life = Life()
    life.stored("r1", [key(1)], [0])
    log = written(tmp_path / "log", life, [*life.events[:4], life.events[3]])
    result = kvsm("top", log, "--once")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "`kvsm verify` shows what led there" in result.stderr


def test_top_of_a_closed_log_is_one_screen(tmp_path: Path) -> None:
    """It ends by itself, without a terminal, and every number has its words."""
    story_life(tmp_path / "log")
    result = kvsm("top", tmp_path / "log")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "the engine has closed it" in result.stdout
    assert "100 % of 2 slots used" in result.stdout
    assert "no request waits" in result.stdout


class Terminal:
    """A terminal of 30 columns that keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_a_screen_on_a_terminal_is_drawn_over_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are cut to the terminal, so that one line is one row, and nothing of a log moves the cursor."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    screen.draw("a" * 50, "b\x1b[2J", in_red("c"), "never shown")
    assert terminal.text == "a" * 29 + "\x1b[K\nb\\x1b[2J\x1b[K\nc\x1b[K\n\x1b[J"
    terminal.text = ""
    screen.draw("d")
    assert terminal.text == "\x1b[3Fd\x1b[K\n\x1b[J"
