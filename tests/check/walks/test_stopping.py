"""Walks and reductions end between two steps and in time, and all results are saved.

A fake clock advances with each look, and the code under test sends the signals, so no test depends on real
time.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result
from places import ROOT, SUPPORT
from planted_bugs import free_slots_under_copies

from kvsm.check.walks import failures
from kvsm.check.walks.failures import SavedFailure, read
from kvsm.check.walks.short_schedules import search
from kvsm.check.walks.targets import WalkCase, draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.signals import EndRequest, ends_between_steps
from kvsm.cli.vllm_fuzz import Choices, Hunt
from kvsm.system import stopping
from kvsm.system.executors.forked import ForkedProcesses
from kvsm.system.stopping import IsOver, TimeBudget

SHELF, POOL = "my_own_world:BrokenShelf", "my_test_block_pool:Pool"

SIGNALS = '''
import os
import signal
from my_own_world import BrokenShelf, Shelf


class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        len("the handler runs here")


class EndedInFinalizer(Shelf):
    """Its hundredth action gets a signal where an exception would be printed and lost."""
    done = 0

    def do(self, action):
        type(self).done += 1
        if type(self).done == 100:
            Dying()
        return super().do(action)


class EndedWhileReduced(BrokenShelf):
    """A signal comes in the third world of the reduction: the last world was made by the walk or the save."""
    worlds = 0

    def __init__(self, random):
        type(self).worlds += 1
        super().__init__(random)
        if type(self).worlds == self.signalled:
            os.kill(os.getpid(), signal.SIGTERM)
'''

MACHINE = """
import os
import signal
from hypothesis.stateful import RuleBasedStateMachine, rule


class Ended(RuleBasedStateMachine):
    steps = 0

    @rule()
    def step(self):
        type(self).steps += 1
        if type(self).steps == 50:
            os.kill(os.getpid(), signal.SIGINT)
"""


def fuzz(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["fuzz", *map(str, arguments)], catch_exceptions=False)


def counted(target: str, *arguments: object) -> Result:
    return fuzz("--target", target, "--seed", 3, "--runs", 4, "--jobs", 1, "--log", "found", *arguments)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(SUPPORT / "own_world.py", tmp_path / "my_own_world.py")
    shutil.copy(ROOT / "examples" / "broken" / "test_block_pool.py", tmp_path / "my_test_block_pool.py")
    (tmp_path / "my_signals.py").write_text(SIGNALS)
    (tmp_path / "my_machine.py").write_text(MACHINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("my_own_world", "my_test_block_pool", "my_signals", "my_machine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The clock of reductions: each look at it takes a second. Returns how often it was looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(stopping, "monotonic", lambda: float(next(seconds)))
    return lambda: next(seconds)


def after(looks: int) -> Callable[[], bool]:
    """Whether it was called more than `looks` times."""
    asked = itertools.count(1)
    return lambda: next(asked) > looks


# A reduction has a time of its own.


@pytest.mark.parametrize("target", [SHELF, POOL])
@pytest.mark.parametrize("seconds", [0, 12])
def test_a_reduction_ends_in_its_own_time(target: str, seconds: int, looks: Callable[[], float]) -> None:
    """It checks the clock at each step. The result so far still fails, and is marked as not minimal."""
    result = counted(target, "--reduce-seconds", seconds)
    assert looks() <= seconds + 5
    assert result.exit_code == ExitCode.BROKEN
    assert (
        f"a failure, saved in found; reducing it for at most {seconds} s (--reduce-seconds)\n"
        in result.stdout
    )
    saved = read(Path("found"))
    assert not saved.minimal
    told = "cut short" if seconds else "not shrunk" if target == POOL else "not reduced"
    assert told in result.stdout.split("is broken")[1].splitlines()[0]
    assert fuzz("--replay", "found", "--target", target).exit_code == ExitCode.BROKEN


@pytest.mark.usefixtures("looks")
def test_the_longer_the_time_the_fewer_the_actions() -> None:
    """So a reduction that is cut short keeps its progress."""
    many = []
    for seconds in (0, 400, 100_000):
        shutil.rmtree("found", ignore_errors=True)
        counted(SHELF, "--reduce-seconds", seconds)
        many.append(len(read(Path("found")).actions))
    assert many[0] > many[1] > many[2] == 6
    assert read(Path("found")).minimal


@pytest.mark.usefixtures("looks")
def test_a_corpus_is_reduced_in_the_same_time() -> None:
    """Later walks reduce the remaining entries."""
    result = fuzz("--seed", 3, "--runs", 2, "--jobs", 1, "--corpus", "corpus", "--reduce-seconds", 0)
    assert result.exit_code == 0
    kept = [json.loads(path.read_bytes()) for path in Path("corpus").iterdir()]
    assert kept
    assert not any(entry.get("reduced") for entry in kept)


def test_help_tells_of_both_times() -> None:
    text = " ".join(fuzz("--help").stdout.split())
    assert "Stop the runs after this time (10)." in text
    assert "Reduce failures and the corpus for at most this time, on top of the walk's (60)." in text


# A failure is saved before it is reduced.


@pytest.mark.parametrize("target", [SHELF, POOL])
def test_a_failure_is_saved_before_it_is_reduced(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed during the reduction, the failure is already saved."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsm.check.walks.failures.reduce", killed)
    monkeypatch.setattr("kvsm.testing.machine_target._Examples.shrink", killed)
    assert counted(target).exit_code == ExitCode.INTERRUPTED
    assert read(Path("found")).reruns == 0
    assert fuzz("--replay", "found", "--target", target).exit_code == ExitCode.BROKEN
    assert "is broken: " in Path("found/steps.txt").read_text()
    assert len([*Path("found").glob("test_*.py")]) == 1


def test_a_saved_failure_is_replaced_by_the_reduced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory then holds only the reduced failure: its log, steps and test replace those of the
    unreduced one."""
    free_slots_under_copies(monkeypatch)
    counted("core")
    core_events = failures.load(Path("found")).case().make().events
    assert len([*Path("found").iterdir()]) == 4
    assert "3 steps, reduced from " in Path("found/steps.txt").read_text()
    shown = CliRunner().invoke(main, ["show", "found/log"], catch_exceptions=False)
    assert len(shown.stdout.splitlines()) <= len(core_events) + 12


def test_a_long_failure_is_not_printed_whole() -> None:
    """An unreduced one may have two thousand steps."""
    told = counted(SHELF, "--reduce-seconds", 0).stdout
    assert len(told.splitlines()) < 120
    assert "which are in found/steps.txt ..." in told
    assert len(Path("found/steps.txt").read_text().splitlines()) > 200


# A signal is looked at between two steps.


def test_a_signal_in_a_finalizer_ends_the_walk() -> None:
    """An exception raised by the handler would only be printed there, and the walk would continue."""
    result = counted("my_signals:EndedInFinalizer")
    assert result.exit_code == ExitCode.TERMINATED
    assert json.loads(Path("kvsm-fuzz.json").read_bytes())["next_run"] == 0
    assert sys.modules["my_signals"].EndedInFinalizer.done == 100


def test_a_signal_ends_a_walk_through_a_machine_between_two_of_its_steps() -> None:
    result = counted("my_machine:Ended")
    assert result.exit_code == ExitCode.INTERRUPTED
    assert sys.modules["my_machine"].Ended.steps == 50
    assert (
        "interrupted; to continue: kvsm fuzz --resume kvsm-fuzz.json --target my_machine:Ended"
        in result.stdout
    )


def test_a_signal_in_a_reduction_keeps_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of a failure, and the saved failure can be replayed."""
    import my_signals  # type: ignore[import-not-found]

    target = "my_signals:EndedWhileReduced"
    monkeypatch.setattr(my_signals.EndedWhileReduced, "signalled", 0, raising=False)
    counted(target, "--reduce-seconds", 0)
    before = my_signals.EndedWhileReduced.worlds
    shutil.rmtree("found")
    my_signals.EndedWhileReduced.worlds, my_signals.EndedWhileReduced.signalled = 0, before + 3
    result = counted(target)
    assert result.exit_code == ExitCode.BROKEN
    assert "interrupted; to continue" in result.stdout
    saved = read(Path("found"))
    assert not saved.minimal
    assert len(saved.actions) > 6
    assert fuzz("--replay", "found", "--target", target).exit_code == ExitCode.BROKEN


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_repeated_sigterm_changes_nothing_and_a_ctrl_c_ends_at_once(first: signal.Signals) -> None:
    """A CI system sends both while results are saved. A person presses Ctrl-C again if a step hangs."""
    with ends_between_steps() as ending:
        os.kill(os.getpid(), first)
        assert ending.is_made()
        code = ending.code
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.code is code
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_results_of_processes_end_while_none_has_come() -> None:
    """A process may hang, so `is_over` is also asked while waiting for a result."""
    executor = ForkedProcesses(1)
    with executor.results(lambda _: time.sleep(10_000), itertools.count(), is_over=after(2)) as results:
        assert list(results) == []


# A walk that is over.


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_walk_that_is_over_has_whole_runs_only(jobs: int) -> None:
    """A run that is cut short does not count: the next walk begins with it."""

    def make(random: Random) -> CoreWorld:
        return CoreWorld(draw_options(random))

    cut = walk(make, 7, is_over=after(3000 if jobs == 1 else 6), jobs=jobs)
    assert cut.interrupted
    assert cut.next_run == cut.runs
    if cut.runs:
        assert walk(make, 7, runs=cut.runs).operations == cut.operations


def test_a_search_that_is_over_claims_no_length_that_it_has_not_finished() -> None:
    def make() -> Any:
        return WalkCase("core", draw_options(Random(0))).make()

    alphabet = [("tick",), ("reset",)]
    counts = [one for one, _ in search(make, alphabet, str, 9, is_over=after(5))]
    assert (counts[-1].length, counts[-1].complete) == (2, 1)


class _Core(Choices):
    """Draws worlds of the core instead of worlds of vLLM."""

    def case(self, random: Random) -> WalkCase:
        return draw_case("core", random)

    def fitted(self) -> Choices:
        return self


def test_defects_of_a_connector_share_the_time_and_are_saved_first(
    monkeypatch: pytest.MonkeyPatch, looks: Callable[[], float]
) -> None:
    """`kvsm vllm-fuzz` saves each defect at once, and reduces all of them within one time limit."""
    free_slots_under_copies(monkeypatch)
    monkeypatch.setattr("kvsm.cli.vllm_fuzz._version", lambda: "0")
    kept: list[bool] = []

    def reduced(saved: SavedFailure, is_over: IsOver) -> SavedFailure:
        kept.append(read(Path("found/1")) == saved)
        return failures.reduced(saved, is_over)

    monkeypatch.setattr(
        "kvsm.cli.vllm_fuzz.reduced",
        reduced,
    )
    budget = TimeBudget(20)
    hunt = Hunt(_Core("c", {}, (), ()), 1, None, EndRequest(), budget, Path("found"), True)
    answer = hunt.run(seconds=None, runs=60, first=True)
    assert kept == [True]
    assert looks() <= 30
    assert budget.left <= 0
    [found] = answer.findings
    assert not found.failure.minimal
    assert read(Path("found/1")) == found.failure
