"""Reports of a fuzzing walk for CI systems: a JUnit file, and GitHub's annotations and job summary."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from xml.etree import ElementTree

import click

from kvsm.check.walks.failures import SavedFailure
from kvsm.cli.output import announce, say
from kvsm.errors import ConfigError
from kvsm.system.annotations import error_line
from kvsm.system.private_files import write_whole
from kvsm.testing.recording import story

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def ci_options(command: Decorated) -> Decorated:
    """`--junit FILE` and `--github`."""
    junit = click.option(
        "--junit",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write the result as JUnit XML, too.",
    )
    github = click.option(
        "--github", is_flag=True, help="Print GitHub's annotations, and add to its job summary."
    )
    return junit(github(command))


class WalkFailureReport(NamedTuple):
    """A failure for a CI system.

    told: its steps, for people.
    directory: where it is saved.
    replay: the command that repeats it.
    log: its story as `kvsm show` prints it; empty if the failure has no log.
    place: "FILE:LINE" to annotate.
    """

    failure: SavedFailure
    told: str
    directory: Path
    replay: str
    log: Sequence[str]
    place: str


class WalkReport(NamedTuple):
    """A walk for a CI system.

    command: "kvsm fuzz" or "kvsm vllm-fuzz".
    target: the code under test.
    name: the walk's name, made of its options, such as the seed and the shard.
    totals: numbers of runs and operations, in a line.
    made_by: the command that repeats the walk.
    """

    command: str
    target: str
    name: str
    seconds: float
    totals: str
    made_by: str
    failures: Sequence[WalkFailureReport]


def failure_report(
    failure: SavedFailure, told: str, directory: Path, replay: str, place: tuple[str, int] | None = None
) -> WalkFailureReport:
    """Return the report of a saved failure.

    It is annotated at the first of these that is known: the line of the user's code that the failure names,
    `place` (file and line of the target), the saved test.
    """
    log = directory / "log"
    lines = story(log, failure.message) if log.is_dir() else []
    tests = sorted(directory.glob("test_*.py"))
    file, line = place or (str(tests[0] if tests else directory), 1)
    return WalkFailureReport(failure, told, directory, replay, lines, failure.place or f"{file}:{line}")


def tell_ci(report: WalkReport, junit: Path | None, *, github: bool, quiet: bool) -> None:
    """Write the JUnit file if `junit` is given; if `github`, print annotations and add to the job summary.

    quiet: print annotations to standard error, which GitHub reads, too: standard output holds JSON.
    """
    if junit is not None:
        write_junit(junit, report)
    if github:
        for line in error_lines(report):
            announce(line) if quiet else say(line)
        write_summary(report)


# JUnit.


def write_junit(path: Path, report: WalkReport) -> None:
    """Write a failed test case for each failure, or a single passed one. Raises `ConfigError`.

    The schema is the one that Jenkins, GitLab and pytest share.
    """
    counts = {
        "tests": str(max(1, len(report.failures))),
        "failures": str(len(report.failures)),
        "errors": "0",
        "skipped": "0",
        "time": f"{report.seconds:.3f}",
    }
    suites = ElementTree.Element("testsuites", {"name": report.command, **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": report.command, **counts})
    seconds = report.seconds / max(1, len(report.failures))
    for one in report.failures:
        _add_case(suite, report, one, seconds)
    if not report.failures:
        _add_case(suite, report, None, seconds)
    ElementTree.indent(suites)
    content = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    try:
        write_whole(path, content + b"\n")
        path.chmod(0o644)  # another user of the CI system reads it
    except OSError as error:
        raise ConfigError(f"{path}: the JUnit file cannot be written: {error.strerror}") from error


def _add_case(
    suite: ElementTree.Element, report: WalkReport, found: WalkFailureReport | None, seconds: float
) -> None:
    name = report.name if found is None else f"{report.name}, run {found.failure.run}"
    case = ElementTree.SubElement(
        suite, "testcase", {"classname": _xml(report.target), "name": name, "time": f"{seconds:.3f}"}
    )
    lines = [report.totals, f"made by {report.made_by}"]
    if found is not None:
        finding = found.failure.finding()
        about = {"message": _xml(_line(str(finding))), "type": found.failure.property.name}
        ElementTree.SubElement(case, "failure", about).text = _xml(found.told)
        lines += [f"saved in {found.directory}; to repeat it: {found.replay}", *found.log]
    ElementTree.SubElement(case, "system-out").text = _xml("\n".join(lines))


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _xml(text: str) -> str:
    """Escape the characters that XML 1.0 cannot represent."""
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)


# GitHub.


def error_lines(report: WalkReport) -> list[str]:
    """Return GitHub's workflow commands: one `::error` for each failure."""
    return [
        error_line(
            one.place,
            f"{one.failure.target}: {one.failure.property} is broken",
            f"{one.failure.message}\nto repeat it: {one.replay}",
        )
        for one in report.failures
    ]


def write_summary(report: WalkReport) -> None:
    """Add the walk to the job summary if this is a GitHub job. Raises `ConfigError`."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    verdict = f"{len(report.failures)} failed" if report.failures else "no property was broken"
    lines = [f"### {report.command}: {report.target}", "", f"{report.name}: {verdict}. {report.totals}."]
    for one in report.failures:
        fence = "`" * max([3, *[len(run) + 1 for run in re.findall("`+", one.told)]])
        lines += ["", fence, one.told, fence]
    lines += ["", f"Made by `{report.made_by}`", "", ""]
    try:
        with open(name, "a", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError as error:
        raise ConfigError(f"{name}: the summary of the job cannot be written: {error.strerror}") from error


def _line(text: str) -> str:
    return " ".join(text.split())
