"""The pytest plugin of kvsm: saves the event log of an offload core when its test fails, and marks the
suspected line on GitHub.

The log of the core that was made last is written to `.kvsm/<test>/` beside the test, or under
`--kvsm-log-dir`. With Hypothesis that core is of the smallest failing example. The plugin adds to pytest's
report the life stories of the things that the failure names, as `kvsm show` prints them. Nothing is written
for a test that passes, or that has no core.

If a GitHub job runs pytest (GITHUB_ACTIONS=true), a failure that names a line of the user's code becomes an
`::error` at that line: the method that raised or wrote wrong bytes, or else the one that was called last.

pytest loads this file in every project of an environment with kvsm, so it imports only pytest. It uses
`kvsm.testing.recording` only if a test has imported it, as each test with a core does, and looks at errors
only if a test has imported `kvsm.errors`. Elsewhere it changes nothing but the line in which pytest lists
plugins, and the option `--kvsm-log-dir`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

LONGEST_NAME = 200
"""Longest name of a test's directory (characters). File systems allow a few more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kvsm-log-dir`."""
    parser.getgroup("kvsm").addoption(
        "--kvsm-log-dir",
        metavar="DIR",
        help="directory for the event logs of failed tests (default: .kvsm beside each test)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the cores of the previous test."""
    recording = _recording()
    if recording is not None:
        recording.forget()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Save the log of a failed test, and add its life stories to the report."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and call.excinfo is not None:
        lines = _errors(item.nodeid, call.excinfo.value)
        if lines:
            report.kvsm_errors = lines  # xdist sends it to the controller
    recording = _recording()
    if recording is None or not report.failed or call.excinfo is None or not recording.remembered():
        return
    try:
        lines = recording.keep(_directory(item), _told(call.excinfo.value))
    except OSError as error:  # A log that cannot be written must not stop the test run.
        lines = [f"the events of this test could not be kept: {error}"]
    report.sections.append(("kvsm event log", "\n".join(lines)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print GitHub's workflow commands."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for report in terminalreporter.getreports("failed"):
        for line in getattr(report, "kvsm_errors", ()):
            terminalreporter.write_line(line)


def _errors(test: str, error: BaseException) -> list[str]:
    """Return the workflow commands for an error that names a line of the user's code, or for the members of a
    group."""
    errors = sys.modules.get("kvsm.errors")
    if errors is None:
        return []
    members = [line for one in _members(error) for line in _errors(test, one)]
    if not isinstance(error, errors.PropertyBroken) or not error.place:
        return members
    from kvsm.system.annotations import error_line

    return [*members, error_line(error.place, f"{error.property} in {test}", str(error))]


def _members(error: Any) -> Sequence[BaseException]:
    """Return the members of an exception group. The class is compared by name, because Python 3.10 has no
    built-in group, and an attribute `exceptions` of another error may mean anything."""
    is_group = any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)
    return error.exceptions if is_group else ()


def _recording() -> Any:
    """`kvsm.testing.recording`, if this test run uses it."""
    return sys.modules.get("kvsm.testing.recording")


def _directory(item: pytest.Item) -> Path:
    """Return a path for this test's log, after deleting an earlier log there. Raises `OSError`."""
    chosen = item.config.getoption("--kvsm-log-dir")
    home = Path(chosen) if chosen else item.path.parent / ".kvsm"
    if not home.exists():
        home.mkdir(parents=True, exist_ok=True)
        # So that no log is committed by mistake; pytest's cache does the same.
        (home / ".gitignore").write_text("*\n")
    path, _, test = item.nodeid.partition("::")
    name = re.sub(r"[^\w.-]+", "-", f"{Path(path).name}::{test}").strip("-")[:LONGEST_NAME]
    directory = home / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def _told(error: BaseException) -> str:
    """The message of an error, with those of its members if it is a group (Hypothesis found several bugs)."""
    return "\n".join([str(error), *map(_told, _members(error))])
