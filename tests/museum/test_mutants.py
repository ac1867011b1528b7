"""The mutants of `specs/mutants`: each is a change of the current code, and is found or missed as pinned."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import date
from inspect import unwrap
from typing import Any

import pytest
from click.testing import CliRunner, Result
from museum import EXHIBITS
from museum.checkers import ADAPTER_CHECKERS, CHECKERS
from museum.exhibit import PROJECT
from museum.search import search
from mutants import AREAS, MUTANTS, Mutant
from mutants.found import FOUND, MACHINE, MISSED
from mutants.table import README, readme

from examples import drawn_today, of_today
from kvsm.cli import main
from kvsm.cli.museum import search_all
from kvsm.system.executors.forked import ForkedProcesses

QUICK = ("M15", "M40")
"""Found by the first explorations, in less than a second each."""

WITH_VLLM = {one.name for one in ADAPTER_CHECKERS}
FOUND_IN_SAMPLE = 1
"""A found mutant takes up to half a minute on two cores. A missed one takes two minutes, so each is searched
for on one day in twenty-four."""


def museum(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["museum", *arguments])


def test_mutants_are_numbered_each_with_its_story_and_what_shows_it() -> None:
    numbered = [one.id for area in AREAS for one in area]
    assert len(numbered) == len(set(numbered)), "each number is given once"
    assert all(re.fullmatch(r"M\d{2,3}", id) for id in numbered)
    for one in MUTANTS.values():
        assert one.story.endswith("."), one.id
        assert one.shows_when.endswith("."), one.id
        assert not one.title.endswith("."), f"{one.id}: a title is no sentence"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda one: one.id)
def test_a_mutant_is_a_small_change_of_the_code_as_it_is(mutant: Mutant) -> None:
    """Also in modules that import vLLM, which need not be installed."""
    lines = mutant.diff().splitlines()
    changed = [line for line in lines if re.match(r"[-+](?![-+])", line)]
    assert 1 <= len(changed) <= 16
    assert lines[0].startswith("--- a/kvsm/")


def test_no_two_bugs_are_one_change() -> None:
    diffs: dict[str, str] = {}
    for bug in (*EXHIBITS.values(), *MUTANTS.values()):
        assert diffs.setdefault(bug.diff(), bug.id) == bug.id


def code_of(mutant: Mutant) -> list[Any]:
    found = []
    for edit in mutant.edits:
        module, _, path = edit.target.partition(":")
        owner: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            owner = getattr(owner, name)
        found.append(unwrap(owner).__code__)
    return found


def test_a_mutant_is_gone_afterwards_even_after_an_error() -> None:
    for mutant in MUTANTS.values():
        if mutant.needs_vllm:
            continue
        before = code_of(mutant)
        with suppress(KeyError), mutant.put_back():
            assert code_of(mutant) != before, mutant.id
            raise KeyError(mutant.id)
        assert code_of(mutant) == before, mutant.id


# What the checkers find.


def test_each_mutant_is_found_or_missed() -> None:
    assert sorted([*FOUND, *MISSED]) == sorted(MUTANTS)
    assert {one.checker for one in FOUND.values()} <= {one.name for one in (*ADAPTER_CHECKERS, *CHECKERS)}


def test_only_checkers_with_vllm_look_for_mutants_of_the_adapters() -> None:
    """`tests/in_vllm/test_adapter_mutants.py` searches for a sample of them, because that needs vLLM."""
    by_them = {id for id, one in FOUND.items() if one.checker in WITH_VLLM}
    assert by_them
    assert by_them == {id for id in FOUND if MUTANTS[id].needs_vllm}


def test_the_page_says_what_is_pinned() -> None:
    """`PYTHONPATH=specs python -m write_docs` writes the page."""
    assert README.read_text(encoding="utf-8") == readme()
    for page in ("docs/verification.md", "CHANGELOG.md"):
        text = (PROJECT / page).read_text(encoding="utf-8")
        assert f"{len(FOUND)} of {len(MUTANTS)} " in text, page


@pytest.mark.parametrize("id", QUICK)
def test_a_mutant_is_found_as_pinned(id: str) -> None:
    result = search(id)
    assert result.finding is not None
    assert (result.checker, result.finding.property, len(result.trace)) == FOUND[id]


@pytest.mark.slow
def test_a_sample_that_changes_by_day_is_found_or_missed_as_pinned() -> None:
    """`kvsm museum --mutants` searches for all mutants.

    A mutant that was missed and is found now is good news: pin it. Mutants that the Hypothesis machine finds
    are left out, because its examples depend on the imported modules.
    """
    found = [id for id, one in FOUND.items() if one.checker not in {MACHINE, *WITH_VLLM}]
    missed = [id for id in MISSED if not MUTANTS[id].needs_vllm]
    ids = [*drawn_today(found, FOUND_IN_SAMPLE), *of_today(missed, 24)]
    for result in search_all(ids, ForkedProcesses(2)):
        seen = None
        if result.finding is not None and result.checker != MACHINE:
            seen = result.checker, result.finding.property, len(result.trace)
        assert seen == FOUND.get(result.id), f"{result.id} on {date.today()}"


# The command.


def test_the_command_lists_and_shows_mutants() -> None:
    assert [line.split()[0] for line in museum("--list", "--mutants").stdout.splitlines()] == [*MUTANTS]
    text = museum("--show", "M01").stdout
    assert "a sliding window reaches back one token too few" in text
    assert "It shows when: A window of 6 tokens" in text
    assert "-        reach = self.window - 1" in text


def test_a_mutant_that_no_checker_sees_has_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike an exhibit, a mutant has no scenario that could find it."""
    monkeypatch.setattr("museum.search.CHECKERS", ())
    result = museum("M15", "--jobs", "1")
    assert result.exit_code == 1
    assert re.search(r"^M15 .*\n     ESCAPED,", result.output)


def test_a_mutant_of_the_adapters_escapes_where_vllm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints the reason."""
    monkeypatch.setattr("museum.search.VLLM_IS_THERE", False)
    monkeypatch.setattr("museum.search.CHECKERS", ())
    assert search("M123").is_wrong
    assert "no checker has looked at the adapters" in museum("M123", "--jobs", "1").output
