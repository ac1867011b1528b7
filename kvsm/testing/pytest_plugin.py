"""The pytest plugin of kvsm: when a test with an offload core fails, its event log is kept.

`.kvsm/<test>/` beside the test (or under `--kvsm-log-dir`) gets the log of the core that was made last. With
Hypothesis that is the smallest failing example. The report gets the lives of the things concerned, as `kvsm
show` tells them. Nothing is written for a test that passes, or that has no core.

pytest loads this file in every project of an environment with kvsm. So it imports nothing but pytest.
Whatever else it needs, a test with a core has imported.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LONGEST_NAME = 200
"""Of a directory (characters). File systems allow a few more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kvsm-log-dir`."""
    parser.getgroup("kvsm").addoption(
        "--kvsm-log-dir",
        metavar="DIR",
        help="where the event logs of failed tests go (default: .kvsm beside each test)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test begins: forget the cores of the one before."""
    recording = _recording()
    if recording is not None:
        recording.forget()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep the log of a failed test, and add what it tells to the report."""
    outcome: Any = yield
    report = outcome.get_result()
    recording = _recording()
    if recording is None or not report.failed or call.excinfo is None or not recording.remembered():
        return
    try:
        lines = recording.keep(_directory(item), _told(call.excinfo.value))
    except OSError as error:  # A failed test must not end all tests because nothing can be written.
        lines = [f"the events of this test could not be kept: {error}"]
    report.sections.append(("kvsm event log", "\n".join(lines)))


def _recording() -> Any:
    """`kvsm.testing.recording`, if this test run uses it."""
    return sys.modules.get("kvsm.testing.recording")


def _directory(item: pytest.Item) -> Path:
    """An empty directory for this test's log. An earlier log is deleted. Raises `OSError`."""
    chosen = item.config.getoption("--kvsm-log-dir")
    home = Path(chosen) if chosen else item.path.parent / ".kvsm"
    if not home.exists():
        home.mkdir(parents=True, exist_ok=True)
        # Nobody commits a log by mistake. pytest's cache does the same.
        (home / ".gitignore").write_text("*\n")
    path, _, test = item.nodeid.partition("::")
    name = re.sub(r"[^\w.-]+", "-", f"{Path(path).name}::{test}").strip("-")[:LONGEST_NAME]
    directory = home / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def _told(error: BaseException) -> str:
    """What an error says, and the errors in it if it is a group (Hypothesis found two bugs)."""
    return "\n".join([str(error), *map(_told, getattr(error, "exceptions", ()))])
