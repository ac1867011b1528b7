"""The exhibits and mutants that shipped commands find by themselves: `museum.alone` and `mutants.alone`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from museum import EXHIBITS, product_alone
from museum.alone import ALONE, ALONE_AGAIN, AloneBy
from museum.product_alone import (
    CHECK,
    NEAREST,
    RUNS,
    SCOPES,
    SEEDS,
    Tried,
    commands_of,
    fuzz,
    in_a_process,
    search_order,
    shown,
    tried,
)
from museum.search import CLEAN
from mutants import MUTANTS
from mutants.alone import FOUND_ALONE, UNFOUND, FoundAlone

from examples import of_today
from kvsm.check.scopes.models import MODELS
from kvsm.check.walks.targets import TARGETS
from kvsm.properties import Property

FUZZ = fuzz("core", SEEDS[0])
COMMANDS = commands_of(SEEDS[0])
BY_TEXT = {shown(command): command for seed in SEEDS for command in commands_of(seed)}
ROWS = [(id, one) for rows in (ALONE, ALONE_AGAIN) for id, one in rows.items()]


MUTANT_ROWS = [(id, one) for rows in FOUND_ALONE.values() for id, one in rows.items()]


def check(result: Tried, row: AloneBy | FoundAlone) -> None:
    """The effort need not be equal: it moves a little with each change of what a policy chooses."""
    assert (result.property, result.target) == (row.property.id, row.target)
    assert result.effort <= 2 * row.effort + 1000


def test_each_row_names_an_exhibit_and_one_of_the_commands() -> None:
    assert {id for id, _ in ROWS} <= {*EXHIBITS}
    assert {one.command for _, one in ROWS} <= {*BY_TEXT}
    assert all([*rows] == sorted(rows) for rows in (ALONE, ALONE_AGAIN))


def test_commands_run_nothing_of_the_museum() -> None:
    """A world of the museum would be an import path, as `museum.disk_world:drawn`."""
    walks = [command for command in COMMANDS if command[0] == "fuzz"]
    assert [command[2] for command in walks] == [*RUNS]
    assert {*COMMANDS} - {*walks, *SCOPES} == {CHECK}
    assert all(command[3] in MODELS[command[1]].scopes for command in SCOPES)
    assert not any("museum" in part for command in COMMANDS for part in command)


def test_each_target_is_walked() -> None:
    assert {*RUNS} == {*TARGETS}


def test_each_mutant_is_found_or_not_by_commands_with_its_seed() -> None:
    assert [*FOUND_ALONE] == [*UNFOUND] == [*SEEDS]
    for seed in SEEDS:
        commands = {shown(command) for command in commands_of(seed)}
        found, unfound = FOUND_ALONE[seed], UNFOUND[seed]
        assert {one.command for one in found.values()} <= commands
        assert not found.keys() & unfound.keys()
        assert not [id for id in (*found, *unfound) if MUTANTS[id].needs_vllm]
        assert all(0 < count <= len(commands) for count in unfound.values())


@pytest.mark.parametrize("id", [id for id, one in MUTANTS.items() if not one.needs_vllm])
def test_a_search_runs_each_command_and_begins_near_the_mutant(id: str) -> None:
    order = search_order(id, SEEDS[0])
    assert sorted(order) == sorted(COMMANDS)
    assert NEAREST[MUTANTS[id].area][0] in order[0]


def test_a_search_continues_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found bugs and ended commands are not searched for again; a command that was stopped early is."""
    ran = list[str]()

    def run(id: str, command: Sequence[str], limit: int) -> Tried:
        ran.append(shown(command))
        is_found = "--seed 2" in ran[-1]
        property = Property.CONSERVATION.id if is_found else ""
        return Tried(id=id, command=ran[-1], property=property, cut=not is_found, seconds=limit)

    monkeypatch.setattr(product_alone, "in_a_process", run)
    results = tmp_path / "alone.jsonl"
    product_alone.search_all(["M02"], results, 1)
    assert ran[:2] == [shown(search_order("M02", seed)[0]) for seed in SEEDS]
    assert sorted(ran[2:]) == sorted({*map(shown, COMMANDS)} - {ran[0]}), "seed 2 has found it"
    assert product_alone.mutant_rows(results, 1) == "", "no command has ended"
    assert product_alone.mutant_rows(results, 2).startswith('"M02": FoundAlone(')
    ran.clear()
    product_alone.search_all(["M02"], results, 1)
    assert ran == []
    product_alone.search_all(["M02"], results, product_alone.CPU_SECONDS)
    assert sorted(ran) == sorted(map(shown, COMMANDS))
    assert product_alone.mutant_rows(results, 1) == f'"M02": {len(COMMANDS)},\n'


def test_a_search_that_knows_nothing_is_one_walk_of_all_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(id: str, command: Sequence[str], limit: int) -> Tried:
        assert limit == 60
        return Tried(id=id, command=shown(command))

    monkeypatch.setattr(product_alone, "in_a_process", run)
    results = tmp_path / "all.jsonl"
    options = ["--results", str(results), "--limit", "60", "--all", "7"]
    monkeypatch.setattr("sys.argv", ["", *options, "M02", "M03"])
    product_alone.main()
    kept = [msgspec.json.decode(line, type=Tried) for line in results.read_bytes().splitlines()]
    assert [one.id for one in kept] == ["M02", "M03"]
    assert {one.command for one in kept} == {"kvsm fuzz --target all --seconds 86400 --seed 7"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_of_the_pinned_results_has_the_pinned_rows(tmp_path: Path, seed: int) -> None:
    results = tmp_path / "pinned.jsonl"
    results.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in product_alone.pinned()))
    lines = product_alone.mutant_rows(results, seed).splitlines()
    rows = eval(f"{{{''.join(lines)}}}", {"FoundAlone": FoundAlone, "Property": Property})
    assert rows == {**FOUND_ALONE[seed], **UNFOUND[seed]}


@pytest.mark.parametrize("id", ["B10", "B21"])
def test_a_bug_that_shows_quickly_is_found_as_pinned(id: str) -> None:
    check(tried(id, BY_TEXT[ALONE[id].command]), ALONE[id])


def test_a_command_that_uses_too_much_time_has_found_nothing() -> None:
    result = in_a_process(CLEAN, FUZZ, limit=1)
    assert (result.cut, result.property) == (True, "")


@pytest.mark.slow
@pytest.mark.parametrize(("id", "row"), of_today(ROWS, 30))
def test_a_bug_of_today_is_found_as_pinned(id: str, row: AloneBy) -> None:
    """The number of steps is not compared: a reduction ends after some seconds, however far it is."""
    check(tried(id, BY_TEXT[row.command]), row)


@pytest.mark.slow
@pytest.mark.parametrize(("id", "row"), of_today(MUTANT_ROWS, 20))
def test_a_mutant_of_today_is_found_as_pinned(id: str, row: FoundAlone) -> None:
    check(tried(id, BY_TEXT[row.command]), row)


@pytest.mark.slow
def test_the_unchanged_code_passes_the_walk() -> None:
    result = tried(CLEAN, FUZZ)
    assert (result.property, result.cut) == ("", False)
    assert result.effort > 100_000


def test_what_is_reported_is_a_property() -> None:
    assert {one.property for _, one in ROWS} <= {*Property}
