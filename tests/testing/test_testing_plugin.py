"""The pytest plugin: a failed test leaves its event log, and its report has life stories; other tests leave
nothing and cost nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvsm.core.log import LogReader
from kvsm.explain.story import verify_log

TESTS = """
import pytest
from hypothesis import settings
from kvsm import OffloadConfig, Offloader
from kvsm.core.policies.lru import LRUPolicy
from kvsm.testing import OffloadMachine, Recorder

KEYS = [b"first" + bytes(4), b"second" + bytes(4)]

def core():
    config = OffloadConfig(host_blocks=2, device_blocks=2)
    return Offloader(config, Recorder(), clock_ns=lambda: 0)

def test_passes():
    core().prepare_store("good", KEYS, [0, 1])

def test_fails():
    one = core()
    job = one.prepare_store("r1", KEYS, [0, 1]).job
    one.submit([job.transfer])
    assert one.match("r2", KEYS).hits == 2, f"transfer {job.transfer} has not been awaited"

def test_fails_and_names_nothing():
    core().prepare_store("r3", KEYS, [0, 1])
    raise ValueError("no thing of ours is named here")

@pytest.mark.parametrize("path", ["a/b/c"])
def test_is_called_after_a_path(path):
    core().prepare_store("r4", KEYS, [0, 1])
    raise ValueError(path)

def test_fails_without_a_core():
    assert 1 == 2

class ChoosesTooFew(LRUPolicy):
    def choose(self, count, protected):
        choice = super().choose(count, protected)
        return choice and choice._replace(victims=choice.victims[1:])

class Machine(OffloadMachine):
    policy = ChoosesTooFew

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    TestMachine.settings, max_examples=300, stateful_step_count=6, derandomize=True, database=None
)
"""


RUNS: Mapping[str, Sequence[str]] = {
    "plain": (),
    "told where": ("--kvsm-log-dir=kept/here", "-k", "test_fails"),
    "beside": ("--kvsm-log-dir=.", "-k", "test_fails"),
    "unwritable": ("--kvsm-log-dir=/dev/null/logs", "-k", "test_fails"),
}
"""Runs of pytest in a directory of this name, with these arguments."""

PROGRAM = """
import json, os, sys
from contextlib import redirect_stderr, redirect_stdout
import pytest
for directory, arguments in json.loads(sys.argv[1]).items():
    os.chdir(directory)
    with open("output.txt", "w") as output, redirect_stdout(output), redirect_stderr(output):
        pytest.main([
            "-p", "kvsm.testing.pytest_plugin", "-p", "no:cacheprovider", "--import-mode=importlib",
            *arguments,
        ])
    sys.modules.pop("test_mine", None)
"""
"""One process for all runs: it imports only once. A run reads `test_mine.py` of its own directory."""


class Ran(NamedTuple):
    """A run of pytest: its directory, and its output."""

    directory: Path
    output: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Only with this plugin: neither Hypothesis' own nor xdist is needed. The tests need not pass."""
    theirs = tmp_path_factory.mktemp("theirs")
    for name in RUNS:
        (theirs / name).mkdir()
        (theirs / name / "test_mine.py").write_text(TESTS)
    (theirs / "beside" / ".gitignore").write_text("mine")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GITHUB_ACTIONS": ""}
    arguments = json.dumps({str(theirs / name): words for name, words in RUNS.items()})
    subprocess.run([sys.executable, "-c", PROGRAM, arguments], env=environment, check=True)
    return {name: Ran(theirs / name, (theirs / name / "output.txt").read_text()) for name in RUNS}


@pytest.fixture
def ran(runs: dict[str, Ran]) -> Ran:
    return runs["plain"]


def test_only_failures_with_a_core_leave_a_log(ran: Ran) -> None:
    directory, output = ran
    assert "5 failed, 1 passed" in output
    assert sorted(path.name for path in (directory / ".kvsm").iterdir()) == [
        ".gitignore",
        "test_mine.py-TestMachine-runTest",
        "test_mine.py-test_fails",
        "test_mine.py-test_fails_and_names_nothing",
        "test_mine.py-test_is_called_after_a_path-a-b-c",
    ]


def test_log_is_that_of_the_failed_test(ran: Ran) -> None:
    events = list(LogReader(ran.directory / ".kvsm" / "test_mine.py-test_fails").events())
    assert [event.kind for event in events] == [
        "LogOpened",
        "StorePlanned",
        "TransfersSubmitted",
        "RequestDeferred",
    ]
    assert verify_log(ran.directory / ".kvsm" / "test_mine.py-test_fails").good


def test_log_of_a_machine_is_that_of_the_smallest_example(ran: Ran) -> None:
    events = list(LogReader(ran.directory / ".kvsm" / "test_mine.py-TestMachine-runTest").events())
    assert len(events) <= 16
    assert events[-1].kind in {"WorkerReported", "StepEnded"}


def test_report_tells_the_life_of_what_the_failure_names(ran: Ran) -> None:
    directory, output = ran
    log = directory / ".kvsm" / "test_mine.py-test_fails"
    told = output.split(f"$ kvsm show {log} --transfer 2\n")[1].splitlines()
    assert re.sub("^.*? event", "event", told[0]) == (
        "event 2 step 0: store 2 of request r1 is planned: keys 666972737400000000 to 7365636f6e64..0000 "
        "(2), device blocks 0..1 (2) to slots 0..1 (2)  [not planned -> PLANNED]"
    )
    assert " event 3 step 0: " in told[1]


def test_report_tells_of_the_last_event_where_the_failure_names_nothing(ran: Ran) -> None:
    log = ran.directory / ".kvsm" / "test_mine.py-test_fails_and_names_nothing"
    assert f"$ kvsm show {log} --request r3\n" in ran.output


def test_logs_go_where_they_are_told_to(runs: dict[str, Ran]) -> None:
    directory, output = runs["told where"]
    assert "3 failed" in output
    assert (directory / "kept" / "here" / "test_mine.py-test_fails").is_dir()
    assert not (directory / ".kvsm").exists()


def test_what_git_ignores_in_a_directory_that_is_there_stays(runs: dict[str, Ran]) -> None:
    """An existing directory may be the root of a repository, and gets no .gitignore."""
    directory, _ = runs["beside"]
    assert (directory / "test_mine.py-test_fails").is_dir()
    assert (directory / ".gitignore").read_text() == "mine"


def test_where_nothing_can_be_written_the_tests_go_on(runs: dict[str, Ran]) -> None:
    _, output = runs["unwritable"]
    assert "3 failed" in output
    assert "the events of this test could not be kept: [Errno 20] Not a directory" in output
    assert "INTERNALERROR" not in output


def test_nothing_is_marked_outside_of_github(runs: dict[str, Ran]) -> None:
    assert not [ran for ran in runs.values() if "::error" in ran.output]


def test_plugin_imports_nothing_heavy() -> None:
    """pytest loads the plugin in every project of an environment with kvsm."""
    script = (
        "import sys, kvsm.testing.pytest_plugin\n"
        "assert not {'numpy', 'msgspec', 'hypothesis', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_hypothesis_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import kvsm.testing.pytest_plugin\n"
        "try:\n    from kvsm.testing import OffloadMachine\n"
        "except ImportError as error:\n    assert \"pip install 'kvsm[testing]'\" in str(error), error\n"
        "else:\n    raise SystemExit('imported')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
