"""docs/incidents.md as an engineer on call follows it, for six logs and with no other knowledge."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from incidents import INCIDENTS
from places import ROOT

from kvsm.cli import main

PAGE = (ROOT / "docs" / "incidents.md").read_text(encoding="utf-8")
TABLE = PAGE.split("| the first line says | then |\n| --- | --- |\n")[1].split("\n\n")[0]
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)
"""(what the first line says, what to do then)."""

SMALL_WORDS = {"a", "an", "the", "is", "are", "was", "do", "and"}

NAMES = {
    "N": r"(?:store|load|transfer) (\d+)",
    "NAME": r"\b(r\d+)\b",
    "HEX": r"\b([0-9a-f]{12}\.\.[0-9a-f]{4})\b",
}
"""What an engineer puts for a placeholder of the page: the first such name that was printed."""


def run(command: str) -> str:
    """Return what the command prints. It may end with 1: a property is broken, or the log is damaged."""
    program, *arguments = shlex.split(command)
    assert program == "kvsm", command
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, arguments)
    assert result.exit_code in (0, 1), (command, result.output)
    return result.stdout


def words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z]+", text.lower()) if word not in SMALL_WORDS]


def says(headline: str, phrase: str) -> bool:
    """Whether the headline has the words of the phrase, in their order."""
    left = iter(words(headline))
    return all(word in left for word in words(phrase))


def rows_for(headline: str) -> list[tuple[str, str]]:
    """Return (phrase, what to do) of each row whose phrase matches the headline."""
    return [
        (phrase, then) for phrases, then in ROWS for phrase in phrases.split(", ") if says(headline, phrase)
    ]


def commands_of(then: str, log: Path, printed: str) -> Iterator[str]:
    """Yield the commands of a row, with names from the earlier output in place of placeholders."""
    for command in re.findall(r"`(kvsm [^`]+)`", then):
        filled: str | None = command.replace("DIR", str(log))
        for placeholder, pattern in NAMES.items():
            if filled is not None and re.search(rf"\b{placeholder}\b", filled):
                found = re.search(pattern, printed)
                filled = None if found is None else re.sub(rf"\b{placeholder}\b", found[1], filled)
        if filled is not None:
            yield filled


TRUTH = {
    "pool_too_small": ("the pool is too small", "points more with"),
    "rank_silent": ("a rank is silent", r"not reported \(worker 1"),
    "rank_fails": ("a rank fails", "CUDA error"),
    "requests_unfinished": ("requests never ended", "never ended|has not ended"),
    "slow_store": ("requests wait", "rank 1"),
    "property_broken": ("an event breaks a property", r"no stale data \(S14\)"),
}
"""Incident -> how the page names it, and what the engineer must have seen in the end."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUTH)
def test_the_page_leads_to_the_incident(name: str, tmp_path: Path) -> None:
    """Follow the page: run its first command, find the table row for the first trouble, and run that row's
    commands."""
    named, evidence = TRUTH[name]
    log = INCIDENTS[name](tmp_path / "log")
    [first_command] = PAGE.split("Start here:\n\n```\n")[1].split("\n```")[0].splitlines()
    report = run(first_command.replace("DIR", str(log)))
    trouble = re.search(r"^1\. (.+?)(?=^2\. |\Z)", report, re.DOTALL | re.MULTILINE)
    assert trouble is not None, report
    headline, *details = trouble[1].splitlines()
    [(phrase, then)] = rows_for(headline)
    assert phrase == named
    printed = "\n".join([run(line.strip()[2:]) for line in details if line.strip().startswith("$ ")])
    for command in commands_of(then, log, trouble[1] + printed):
        printed += run(command)
    assert re.search(evidence, printed), printed


def test_a_row_of_the_table_names_each_incident_once() -> None:
    """No phrase matches another phrase, so at most one row matches a headline."""
    phrases = [phrase for phrases, _ in ROWS for phrase in phrases.split(", ")]
    for phrase in phrases:
        assert [other for other, _ in rows_for(phrase)] == [phrase]
