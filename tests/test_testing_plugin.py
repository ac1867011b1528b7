"""The pytest plugin: a failure leaves its event log and tells the lives of the things concerned; nothing else
leaves or costs anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvsm.log import LogReader
from kvsm.replay import verify_log

TESTS = """
import pytest
from hypothesis import settings
from kvsm import OffloadConfig, Offloader
from kvsm.policies.lru import LRUPolicy
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

class EvictsBusyBlocks(LRUPolicy):
    def busy(self, slots):
        pass

class Machine(OffloadMachine):
    policy = EvictsBusyBlocks

TestMachine = Machine.TestCase
TestMachine.settings = settings(
    TestMachine.settings, max_examples=300, stateful_step_count=10, derandomize=True, database=None
)
"""


def run_pytest(directory: Path, *arguments: str) -> str:
    """Only with this plugin: neither Hypothesis' own nor xdist is needed. The tests need not pass."""
    (directory / "test_mine.py").write_text(TESTS)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "kvsm.testing.plugin",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("theirs")
    return directory, run_pytest(directory)


def test_only_failures_with_a_core_leave_a_log(ran: tuple[Path, str]) -> None:
    directory, output = ran
    assert "5 failed, 1 passed" in output
    assert sorted(path.name for path in (directory / ".kvsm").iterdir()) == [
        ".gitignore",
        "test_mine.py-TestMachine-runTest",
        "test_mine.py-test_fails",
        "test_mine.py-test_fails_and_names_nothing",
        "test_mine.py-test_is_called_after_a_path-a-b-c",
    ]


def test_log_is_that_of_the_failed_test(ran: tuple[Path, str]) -> None:
    events = list(LogReader(ran[0] / ".kvsm" / "test_mine.py-test_fails").events())
    assert [event.kind for event in events] == [
        "LogOpened",
        "StorePlanned",
        "TransfersSubmitted",
        "RequestDeferred",
    ]
    assert verify_log(ran[0] / ".kvsm" / "test_mine.py-test_fails").good


def test_log_of_a_machine_is_that_of_the_smallest_example(ran: tuple[Path, str]) -> None:
    events = list(LogReader(ran[0] / ".kvsm" / "test_mine.py-TestMachine-runTest").events())
    assert len(events) <= 20
    assert events[-1].kind in {"HitMatched", "LoadPlanned", "TransfersSubmitted", "StepEnded"}


def test_report_tells_the_life_of_what_the_failure_names(ran: tuple[Path, str]) -> None:
    directory, output = ran
    log = directory / ".kvsm" / "test_mine.py-test_fails"
    told = output.split(f"$ kvsm show {log} --transfer 2\n")[1].splitlines()
    assert re.sub("^.*? event", "event", told[0]) == (
        "event 2 step 0: store 2 of request r1 is planned: keys 666972737400000000 to 7365636f6e64..0000 "
        "(2), device blocks 0..1 (2) to slots 0..1 (2)  [not planned -> PLANNED]"
    )
    assert " event 3 step 0: " in told[1]


def test_report_tells_of_the_last_event_where_the_failure_names_nothing(ran: tuple[Path, str]) -> None:
    log = ran[0] / ".kvsm" / "test_mine.py-test_fails_and_names_nothing"
    assert f"$ kvsm show {log} --request r3\n" in ran[1]


def test_logs_go_where_they_are_told_to(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--kvsm-log-dir=kept/here", "-k", "test_fails")
    assert "3 failed" in output
    assert (tmp_path / "kept" / "here" / "test_mine.py-test_fails").is_dir()
    assert not (tmp_path / ".kvsm").exists()


def test_what_git_ignores_in_a_directory_that_is_there_stays(tmp_path: Path) -> None:
    """An existing directory may be the root of a repository, and gets no .gitignore."""
    (tmp_path / ".gitignore").write_text("mine")
    run_pytest(tmp_path, "--kvsm-log-dir=.", "-k", "test_fails")
    assert (tmp_path / "test_mine.py-test_fails").is_dir()
    assert (tmp_path / ".gitignore").read_text() == "mine"


def test_where_nothing_can_be_written_the_tests_go_on(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--kvsm-log-dir=/dev/null/logs", "-k", "test_fails")
    assert "3 failed" in output
    assert "the events of this test could not be kept: [Errno 20] Not a directory" in output
    assert "INTERNALERROR" not in output


def test_plugin_imports_nothing_heavy() -> None:
    """pytest loads the plugin in every project of an environment with kvsm."""
    script = (
        "import sys, kvsm.testing.plugin\n"
        "assert not {'numpy', 'msgspec', 'hypothesis', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_hypothesis_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import kvsm.testing.plugin\n"
        "try:\n    from kvsm.testing import OffloadMachine\n"
        "except ImportError as error:\n    assert \"pip install 'kvsm[testing]'\" in str(error), error\n"
        "else:\n    raise SystemExit('imported')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
