"""`kvsm report` shows a host pool and the disk below it, from the logs of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from disk_rig import directory as memory_directory

from kvsm import events as ev
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.explain.report.troubles import Trouble, of_both
from kvsm.ids import to_list
from kvsm.serving import RunOptions, RunResult, run_workload


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)], catch_exceptions=False)


def told(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(report(*arguments, "--json").stdout))


@pytest.fixture(scope="module", name="runs")
def _runs() -> Iterator[dict[str, tuple[Path, RunResult]]]:
    """A run whose copies fail and whose cache is reset; one that finds what another one has stored; and one
    with a small disk."""
    sizes: dict[str, Any] = {
        "requests": 40,
        "block_bytes": 64,
        "device_blocks": 64,
        "host_blocks": 64,
        "disk_blocks": 400,
        "copies": "simulated",
    }
    with memory_directory() as place:
        runs = {}
        for name, files, more in (
            ("failing", "one", {"failure_rate": 0.15, "reset_every": 500}),
            ("first", "two", {}),
            ("second", "two", {"preempt_rate": 0.02}),
            ("small", "three", {"disk_blocks": 70}),
        ):
            options = {**sizes, **more, "disk_dir": str(place / files), "log": str(place / name)}
            runs[name] = place / name, run_workload(RunOptions(**options))
        yield runs


@pytest.mark.parametrize("name", ["failing", "first", "second", "small"])
def test_the_figures_are_those_of_the_run(name: str, runs: dict[str, tuple[Path, RunResult]]) -> None:
    log, result = runs[name]
    disk, found = result.disk, told(log)["tiers"]
    assert disk is not None
    assert found["found"] == disk.blocks_found
    assert found["to_disk"] == disk.blocks_stored
    assert found["from_disk"] == disk.blocks_loaded
    assert found["not_stored"] <= disk.blocks_not_stored
    assert found["disk"] == {
        "log": str(log / "disk"),
        "slots": disk.slots,
        "blocks": disk.blocks,
        "evicted": disk.blocks_evicted,
    }
    assert found["why_not"] is None
    hits = found["hits"]
    assert hits["asked"] == sum(hits[one] for one in ("device", "host", "disk", "computed"))


def test_what_the_runs_are_for_is_in_their_figures(runs: dict[str, tuple[Path, RunResult]]) -> None:
    """Without these figures the comparison above would prove nothing."""
    assert told(runs["failing"][0])["tiers"]["not_stored"] > 0
    assert told(runs["second"][0])["tiers"]["found"] > 0
    assert told(runs["small"][0])["tiers"]["disk"]["evicted"] > 0


def from_disk(log: Path) -> int:
    """Blocks of each request's first admission that had been copied from the disk for it."""
    stores: dict[int, tuple[int, str]] = {}
    since: dict[str, int] = {}
    pins: dict[str, list[tuple[int, str]]] = {}
    counted: dict[tuple[str, int], int] = {}
    for event in LogReader(log).events():
        if isinstance(event, ev.RequestArrived):
            since[event.request] = event.seq
        elif isinstance(event, ev.StorePlanned):
            owner = event.owners[0][0] if event.source == "disk" else ""
            stores.update(dict.fromkeys(to_list(event.slots), (event.seq, owner)))
        elif isinstance(event, ev.HitMatched):
            pins[event.request] = [stores[slot] for slot in to_list(event.slots)]
        elif isinstance(event, ev.RequestAdmitted) and event.on_host and not event.resumed:
            name = event.request
            counted[name, since[name]] = sum(owner == name and at > since[name] for at, owner in pins[name])
    return sum(counted.values())


@pytest.mark.parametrize("name", ["failing", "first", "second", "small"])
def test_hits_from_the_disk_are_what_came_for_the_request(
    name: str, runs: dict[str, tuple[Path, RunResult]]
) -> None:
    """Counted from the events, slot by slot."""
    log, _ = runs[name]
    assert told(log)["tiers"]["hits"]["disk"] == from_disk(log)


def test_both_logs_give_the_same_figures_of_the_tiers(runs: dict[str, tuple[Path, RunResult]]) -> None:
    log, _ = runs["second"]
    assert told(log)["tiers"] == told(log / "disk")["tiers"]


def test_failures_of_the_disk_have_their_times_and_errors(runs: dict[str, tuple[Path, RunResult]]) -> None:
    log, _ = runs["failing"]
    events = [
        one for one in LogReader(log / "disk").events() if isinstance(one, ev.WorkerReported) and not one.good
    ]
    failures = told(log)["tiers"]["failures"]
    assert failures["stores"] + failures["loads"] == len(events) > 0
    assert failures["first_ns"] == min(one.wall_ns for one in events)
    assert failures["last_ns"] == max(one.wall_ns for one in events)
    assert failures["errors"][0] == ["made to fail after a part of its blocks", len(events)]
    text = " ".join(report(log).stdout.split())
    assert f"{failures['stores']:,} stores and {failures['loads']:,} loads of " in text


def test_what_stands_out_in_either_log_names_its_tier(runs: dict[str, tuple[Path, RunResult]]) -> None:
    """A rank that fails copies of the disk is in the disk's log alone, with a command that reads this log."""
    log, _ = runs["failing"]
    for asked in (log, log / "disk"):
        found = told(asked)["troubles"]
        assert {one["tier"] for one in found} == {"host", "disk"}
        (fails,) = [one for one in found if one["tier"] == "disk"]
        assert fails["name"] == "rank fails"
        assert str(log / "disk") in fails["commands"][0]
        assert ". Disk: Rank " in report(asked).stdout or ". Disk: Every rank fails" in report(asked).stdout


def test_a_healthy_disk_is_no_alarm(runs: dict[str, tuple[Path, RunResult]]) -> None:
    """Its log has lookups and loads too, and none of them is a request of an engine."""
    for name in ("first", "second", "small"):
        assert [one for one in told(runs[name][0])["troubles"] if one["tier"] == "disk"] == []


def test_the_end_of_the_engine_is_told_once() -> None:
    def killed(tier: str) -> Trouble:
        return Trouble(name="engine killed", urgency="DOWN", impact=1.0, text="", tier=tier)

    slow = Trouble(name="rank slow", urgency="FAULTY", impact=0.5, text="", tier="disk")
    assert of_both([killed("host")], [killed("disk"), slow]) == (killed("host"), slow)
    assert of_both([], [killed("disk")]) == (killed("disk"),)


def test_a_part_of_the_time_is_the_same_part_of_both_logs(runs: dict[str, tuple[Path, RunResult]]) -> None:
    log, _ = runs["second"]
    whole = told(log)["tiers"]
    parts = [told(log, "--until", "+20s")["tiers"], told(log, "--since", "+20001ms")["tiers"]]
    assert {one["found"] for one in parts} == {whole["found"]}
    assert sum(one["from_disk"] for one in parts) == whole["from_disk"]
    assert 0 < parts[0]["from_disk"] < whole["from_disk"]


def test_a_missing_log_is_told_and_its_figures_are_left_out(
    runs: dict[str, tuple[Path, RunResult]], tmp_path: Path
) -> None:
    log, result = runs["second"]
    assert result.disk is not None
    shutil.copytree(log, tmp_path / "log")
    shutil.rmtree(tmp_path / "log" / "disk")
    found = told(tmp_path / "log")["tiers"]
    assert found["why_not"] == f"no log of the disk lies beside {tmp_path / 'log'}"
    assert [found[one] for one in ("disk", "found", "to_disk", "not_stored", "failures")] == [None] * 5
    assert found["from_disk"] == result.disk.blocks_loaded
    assert f"disk    {found['why_not']}" in report(tmp_path / "log").stdout
    shutil.copytree(log / "disk", tmp_path / "alone" / "disk")
    found = told(tmp_path / "alone" / "disk")["tiers"]
    assert (found["host"], found["hits"], found["unused"]) == (None, None, None)
    assert found["from_disk"] == result.disk.blocks_loaded


def test_a_log_of_one_tier_has_no_such_part(tmp_path: Path) -> None:
    run_workload(RunOptions(requests=5, block_bytes=64, copies="simulated", log=str(tmp_path / "log")))
    assert told(tmp_path / "log")["tiers"] is None
    assert "\ntiers " not in report(tmp_path / "log").stdout
