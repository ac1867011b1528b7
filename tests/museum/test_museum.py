"""The museum: every bug that is put back is found, and is removed afterwards.

`museum.found` pins the checkers' findings. `test_scheduler_bugs.py` tests the exhibits' own scenarios.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from inspect import unwrap
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from museum import EXHIBITS
from museum.checkers import CHECKERS, Checker, Sighting
from museum.exhibit import Edit, Exhibit
from museum.found import FOUND
from museum.search import CLEAN, SCENARIO, search

import kvsm.cli.museum as command
from examples import of_today
from kvsm.check.worlds.world import Finding
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.museum import search_all
from kvsm.core.ledger import Ledger
from kvsm.properties import Property
from kvsm.states import machines_digest
from kvsm.states.block import BLOCK_WORDS, BlockState, BlockTrigger
from kvsm.system.executors.forked import ForkedProcesses

QUICK = ("B04", "B13", "B17", "B18", "B19", "B27", "B33", "B38")
"""Found by the first explorations, in less than a second each."""


def museum(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["museum", *arguments])


# The exhibits.


def test_exhibits_are_numbered_each_with_its_story() -> None:
    assert [*EXHIBITS] == [f"B{number:02}" for number in range(1, len(EXHIBITS) + 1)]
    for one in EXHIBITS.values():
        assert one.source, one.id
        assert 2 <= len(re.findall(r"\.(?: |$)", one.story)) <= 4, (
            f"{one.id} is told in two to four sentences"
        )
        assert not re.search(r"[.A-Z]$|^[A-Z]", one.title), f"{one.id}: a title is no sentence"


@pytest.mark.parametrize("exhibit", EXHIBITS.values(), ids=lambda one: one.id)
def test_a_mutant_is_small_and_shown_as_a_diff(exhibit: Exhibit) -> None:
    lines = exhibit.diff().splitlines()
    changed = [line for line in lines if re.match(r"[-+](?![-+])", line)]
    assert 1 <= len(changed) <= 16
    assert lines[0].startswith("--- a/kvsm/")


def functions() -> dict[str, Any]:
    """Return the current code of all functions that exhibits edit."""
    found = {}
    for exhibit in EXHIBITS.values():
        for edit in (*exhibit.edits, *exhibit.without_stop):
            module, _, path = edit.target.partition(":")
            owner: Any = __import__(module, fromlist=["_"])
            for name in path.split("."):
                owner = getattr(owner, name)
            found[edit.target] = unwrap(owner).__code__
    return found


def test_an_exhibit_is_undone_even_after_an_error() -> None:
    before, digest = functions(), machines_digest()
    for exhibit in EXHIBITS.values():
        with suppress(KeyError), exhibit.put_back(without_stop=True):
            assert functions() != before or machines_digest() != digest
            raise KeyError(exhibit.id)
        assert functions() == before, exhibit.id
        assert machines_digest() == digest, exhibit.id


def test_an_edited_table_is_restored() -> None:
    """Memoised steps of one table must not be used with the other table."""
    storing = BLOCK_WORDS.encode(BlockState.STORING, (1, 0))

    def after_a_reset() -> str:
        return BLOCK_WORDS.describe(BLOCK_WORDS.step(storing, BlockTrigger.INVALIDATE, 0, 0))

    assert after_a_reset().startswith("QUARANTINED")
    with EXHIBITS["B13"].put_back():
        assert after_a_reset().startswith("EVICTED")
    assert after_a_reset().startswith("QUARANTINED")


def test_an_edit_that_fits_nowhere_says_so_and_changes_nothing() -> None:
    before = Ledger.apply.__code__
    exhibit = Exhibit(
        id="B99",
        source="",
        title="",
        story="",
        breaks=Property.CONSERVATION,
        edits=(
            Edit("kvsm.core.ledger.ledger:Ledger.apply", "self.seq = event.seq", "pass"),
            Edit("kvsm.core.ledger.transfers:close", "no such line"),
        ),
    )
    with pytest.raises(ValueError, match=r"transfers:close says 0 times, not once: no such line"):
        exhibit.put_back()
    assert Ledger.apply.__code__ is before


# What the checkers find.


@pytest.mark.parametrize("id", QUICK)
def test_a_bug_is_found_by_checkers_that_know_nothing_of_it(id: str) -> None:
    result = search(id)
    assert result.finding is not None
    assert (result.checker, result.finding.property, len(result.trace)) == FOUND[id]


def test_the_machine_that_users_subclass_finds_a_bug_and_tells_its_steps() -> None:
    machine = next(one for one in CHECKERS if one.name == "machine: scheduler")
    with EXHIBITS["B21"].put_back():
        sighting = machine.look()
    assert sighting is not None
    assert sighting.finding.property == Property.LAST_STEP
    steps = [line for (line,) in sighting.trace]
    assert steps[0].startswith("(requests_0,) = state.open(configuration=")
    assert all("state." in line and "teardown" not in line for line in steps)


@pytest.mark.slow
@pytest.mark.parametrize("id", ["B16", "B17", "B20", "B29", "B35", "B36", "B38"])
def test_the_machine_finds_bugs_that_show_quickly(id: str) -> None:
    """Whether it finds other bugs depends on the version of Hypothesis."""
    machine = next(one for one in CHECKERS if one.name == "machine: scheduler")
    with EXHIBITS[id].put_back():
        sighting = machine.look()
        assert sighting is not None
        # The steps are the same each time. One bug shows that: others take half a minute to shrink.
        assert id != "B16" or machine.look() == sighting


@pytest.mark.slow
def test_every_bug_of_today_is_found() -> None:
    """The traces of explorations are shortest; those of walks are reduced. That nothing is found in the right
    code, `test_museum_worlds.py` tests."""
    found, today = {}, of_today([*EXHIBITS], 24)
    for result in search_all(today, ForkedProcesses(2)):
        assert result.is_as_expected, result
        if result.finding is not None:
            found[result.id] = result.checker, result.finding.property, len(result.trace)
    assert found == {id: FOUND[id] for id in today if id in FOUND}


def test_most_bugs_are_found_by_checkers_that_know_nothing_of_them() -> None:
    assert sum(checker != SCENARIO for checker, _, _ in FOUND.values()) >= 35


# The command.


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the museum to its first checker."""
    monkeypatch.setattr("museum.search.CHECKERS", CHECKERS[:1])


@pytest.mark.usefixtures("hurried")
def test_the_command_finds_a_bug_and_prints_the_steps() -> None:
    result = museum("B19", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "1. arrive" in result.output
    assert "2. abort 0" in result.output
    assert "1 of 1 found, 1 of them by checkers not written for the bug" in result.output


@pytest.mark.usefixtures("hurried")
def test_json_holds_the_same() -> None:
    result = museum("B13", "--json", "--jobs", "1")
    found, clean = map(json.loads, result.stdout.splitlines())
    assert (found["id"], found["checker"], found["steps"]) == ("B13", *FOUND["B13"][::2])
    assert found["finding"]["property_id"] == "S3"
    assert found["finding"]["property"] == "no reuse in flight"
    assert found["finding"]["property"] == "no reuse in flight"
    assert (clean["id"], clean["finding"]) == (CLEAN, None)


def test_an_escaped_bug_is_reported_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("museum.search.CHECKERS", ())
    monkeypatch.setattr("museum.search.scenario_of", lambda _id: lambda: None)
    result = museum("B19", "--jobs", "1")
    assert result.exit_code == 1
    assert re.search(r"^B19 .*\n     ESCAPED,", result.output)
    assert "0 of 1 found" in result.output


def test_a_cut_search_neither_found_nor_missed_the_bug() -> None:
    result = museum("B17", "--seconds", "0", "--jobs", "1")
    assert result.exit_code == ExitCode.UNDETERMINED
    assert result.stdout.count("not finished: time was up") == 2
    assert "ESCAPED" not in result.stdout


def test_a_finding_in_the_unchanged_code_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Checker("oracle", lambda: Sighting(Finding(Property.CONSERVATION, "something"), (("step",),)))
    monkeypatch.setattr("museum.search.CHECKERS", (seen,))
    result = museum("B19", "--jobs", "1")
    assert result.exit_code == 1
    assert "in the unchanged code, oracle found conservation (S1): something" in result.output


class Killed:
    """A checker that kills its process, unless that is the test process."""

    tests = os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self.tests:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_killed_process_is_reported_with_exit_code_2(jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the museum would wait endlessly for the result. No other process is left running."""
    monkeypatch.setattr("museum.search.CHECKERS", (Checker("fatal", Killed()),))
    result = museum("B17", "B19", "--jobs", jobs)
    assert result.exit_code == 2
    assert re.search(
        r"kvsm: the search for (B17|B19|none): 3 workers were lost at it, .* perhaps", result.stderr
    )
    assert active_children() == []


def test_a_failing_checker_is_reported_with_its_exhibit_and_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a failure is no finding: the checker is broken, not the code."""

    def fail() -> None:
        raise KeyError("of the checker")

    monkeypatch.setattr("museum.search.CHECKERS", (Checker("broken", fail),))
    result = museum("B19", "--jobs", "1")
    assert result.exit_code == ExitCode.BUG
    assert re.search(
        r"the search for B19 failed in a worker:\n(?s:.*)KeyError: 'of the checker'", result.stderr
    )


def test_results_come_in_the_order_of_the_ids_which_may_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("museum.search.CHECKERS", ())
    monkeypatch.setattr("museum.search.scenario_of", lambda _id: lambda: None)
    asked = ["B17", "B04", "B17", CLEAN]
    assert [one.id for one in search_all(asked, ForkedProcesses(3))] == asked


def oracle(name: str, knows: bool = True) -> Checker:
    return Checker(
        name, lambda: Sighting(Finding(Property.CONSERVATION, f"seen by {name}"), ()) if knows else None
    )


def test_all_checkers_are_asked_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checker that finds the bug is named, and also the scenario. The first finding is reported."""
    checkers = oracle("first"), oracle("blind", knows=False), oracle("second")
    monkeypatch.setattr("museum.search.CHECKERS", checkers)
    alone, together = search("B19"), search("B19", all_look=True)
    assert (alone.checker, alone.also) == ("first", ())
    assert (together.checker, together.also) == ("first", ("second", SCENARIO))
    assert together.finding == alone.finding == Finding(Property.CONSERVATION, "seen by first")
    lines = museum("B19", "--all", "--jobs", "1").stdout.splitlines()
    assert [line.strip() for line in lines[2:4]] == ["also second", f"also {SCENARIO}"]


def test_a_finding_before_the_time_is_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the result is marked as cut: not all checkers have run."""
    clock = SimpleNamespace(monotonic=count().__next__)
    monkeypatch.setattr("museum.search.time", clock)
    monkeypatch.setattr("museum.search.CHECKERS", (oracle("first"), oracle("second")))
    cut = search("B19", seconds=1, all_look=True)
    assert (cut.checker, cut.also, cut.cut, cut.is_as_expected) == ("first", (), True, False)
    monkeypatch.setattr("kvsm.cli.museum.search_all", lambda *_, **__: [cut])
    result = museum("B19", "--all")
    assert result.exit_code == ExitCode.UNDETERMINED
    assert [line.strip() for line in result.stdout.splitlines()][2] == "not finished: time was up"


def test_an_exhibit_is_shown_with_its_story_its_diff_and_what_stops_it() -> None:
    text = museum("--show", "B35").stdout
    assert "sglang PR 28468; breaks no reuse in flight (S3)" in text
    assert "-    if len(used):" in text
    assert "kvsm refuses this: 'EVICT is illegal in' is in its message." in text
    assert "+        Row(_READABLE, EVICT" in text


def test_the_list_names_every_exhibit() -> None:
    assert [line[:3] for line in museum("--list").stdout.splitlines()] == [*EXHIBITS]
    lines = museum("--list", "--json").stdout.splitlines()
    assert [json.loads(one)["id"] for one in lines] == [*EXHIBITS]


def test_an_unknown_exhibit_is_named() -> None:
    result = museum("B99")
    assert result.exit_code == 2
    assert "there is no exhibit B99" in result.stderr


def test_without_the_source_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    result = museum("B19")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvsm: the museum is not in the package")
    assert "clone the repository or unpack the source distribution" in result.stderr


def test_the_help_says_that_the_command_needs_the_source() -> None:
    assert "an installed wheel has none" in " ".join(museum("--help").stdout.split())
