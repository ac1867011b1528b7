"""A user tests a connector with three planted bugs in CI, after docs/testing.md and docs/scheduler.md alone.

Each bug must fail its test, be named in the failure, and be marked on GitHub at the method that has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from places import ROOT

pytestmark = pytest.mark.slow

CONNECTOR = '''
import msgspec
from hypothesis import settings
from kvsm.core.scheduler import OffloadScheduler
from kvsm.testing import OffloadMachine


class OurConnector(OffloadScheduler):
    """Hands reports on in the order of their transfers."""

    def update_connector_output(self, reports):
        return super().update_connector_output(sorted(reports, key=lambda report: report.transfer))


class KeepsKeysOverAReset(OurConnector):
    def reset_cache(self):  # planted: "the weights are the same"
        return True


class FreesBlocksUnderACopy(OurConnector):
    def request_finished(self, request, block_ids, aborted=False):  # planted: "they are only read"
        super().request_finished(request, block_ids, aborted=aborted)
        return False, None


class LoadsTheNeighbour(OurConnector):
    def build_connector_meta(self, output):  # planted: the slot beside the right one
        plan = super().build_connector_meta(output)
        loads = [
            msgspec.structs.replace(job, host_blocks=tuple((int(block) + 1) % 4 for block in job.host_blocks))
            for job in plan.loads
        ]
        return msgspec.structs.replace(plan, loads=tuple(loads))


class Good(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return OurConnector(offloader, config)


class Reset(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return KeepsKeysOverAReset(offloader, config)


class Free(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return FreesBlocksUnderACopy(offloader, config)


class Load(OffloadMachine):
    def make_scheduler(self, offloader, config):
        return LoadsTheNeighbour(offloader, config)


TestGood = Good.TestCase
TestGood.settings = settings(TestGood.settings, max_examples=10)
TestReset = Reset.TestCase
TestFree = Free.TestCase
TestLoad = Load.TestCase
'''

CONFTEST = """
from hypothesis import Phase, settings
import kvsm.testing.profiles

# Without shrinking, for a quick answer.
settings.register_profile("ours", settings.get_profile("kvsm-ci"), phases=[Phase.generate])
"""


class Ran(NamedTuple):
    """The run of CI's commands. annotations: test or target -> (marked line, message)."""

    directory: Path
    code: int
    output: str
    annotations: dict[str, tuple[int, str]]


def run(directory: Path, *command: str) -> Ran:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GITHUB_ACTIONS": "true"}
    environment.pop("GITHUB_STEP_SUMMARY", None)
    made = subprocess.run(
        [sys.executable, "-m", *command], cwd=directory, env=environment, capture_output=True, text=True
    )
    marks = re.findall(r"^::error file=test_ours\.py,line=(\d+),title=(.*?)::(.*)$", made.stdout, re.M)
    found = {title.replace("%3A", ":"): (int(line), message) for line, title, message in marks}
    return Ran(directory, made.returncode, made.stdout + made.stderr, found)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """`pytest` in the user's directory. The plugin needs no option."""
    directory = tmp_path_factory.mktemp("theirs")
    (directory / "test_ours.py").write_text(CONNECTOR)
    (directory / "conftest.py").write_text(CONFTEST)
    return run(
        directory, "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=ours", "--hypothesis-seed=4"
    )


def line_with(text: str) -> int:
    [line] = [number for number, line in enumerate(CONNECTOR.splitlines(), 1) if text in line]
    return line


def test_only_the_planted_bugs_fail(ran: Ran) -> None:
    assert ran.code == 1
    assert "3 failed, 1 passed" in ran.output
    assert len(ran.annotations) == 3


@pytest.mark.parametrize(
    ("test", "broken", "method", "says"),
    [
        ("Reset", "no stale data (S14)", "def reset_cache", ["keys match after a reset"]),
        (
            "Free",
            "one release per hold (S4)",
            "def request_finished",
            [
                "may be freed only now, when no copy touches them",
                "of your connector",
                "answered (False, None)",
            ],
        ),
        (
            "Load",
            "correct bytes (S15)",
            "def build_connector_meta",
            [" reads token ", " was last written by load ", "calls that touched device block ", "; r"],
        ),
    ],
)
def test_each_bug_is_named_and_marked_where_it_is(
    ran: Ran, test: str, broken: str, method: str, says: list[str]
) -> None:
    line, message = ran.annotations[f"{broken} in test_ours.py::Test{test}::runTest"]
    assert line == line_with(method)
    for words in says:
        assert words in message
        assert words in ran.output
    assert (ran.directory / ".kvsm" / f"test_ours.py-Test{test}-runTest").is_dir()


def test_a_night_of_fuzzing_marks_the_same_line(ran: Ran) -> None:
    """Runs the page's `kvsm fuzz --github` with no time to reduce, so the failure is saved unshrunk."""
    options = "--seed 4 --runs 9 --jobs 1 --reduce-seconds 0 --log found --github"
    fuzzed = run(ran.directory, "kvsm", "fuzz", "--target", "test_ours:Reset", *options.split())
    assert fuzzed.code == 1
    [(line, message)] = fuzzed.annotations.values()
    assert line == line_with("def reset_cache")
    assert (
        "keys match after a reset%0Ato repeat it: kvsm fuzz --replay found --target test_ours:Reset"
        in message
    )


def test_the_pages_have_all_names_that_the_user_needs() -> None:
    """A user need not read the source to find an import or the signature of a call."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("testing.md", "scheduler.md"))
    for line in re.findall(r"^(?:from|import) kvsm.*$", CONNECTOR + CONFTEST, re.M):
        assert line in pages, line
    for method in ("reset_cache", "request_finished", "build_connector_meta", "update_connector_output"):
        assert f"{method}(" in pages
    assert "request_finished(request, block_ids_by_group, aborted=False)" in pages
