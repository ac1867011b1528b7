"""How commands show copies to the disk and back in the host's log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from two_tier_life import DISK_CONFIG, HOST_CONFIG, live

import kvsm
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.explain.metrics import Metrics

KEYS = [f"key {n}".encode() for n in range(6)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks go to the disk. The host loses two of them, and they come back."""
    directory = tmp_path_factory.mktemp("tiers") / "log"
    with Offloader.open(HOST_CONFIG, directory) as host:
        live(host, Offloader(DISK_CONFIG), KEYS)
    return directory


def told(*command: str) -> str:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_metrics_count_blocks_of_the_disk_apart(log: Path) -> None:
    values = Metrics.of(LogReader(log)).values()
    assert (values["blocks_copied_out"], values["blocks_loaded"]) == (4, 0)
    assert values["transfers_planned"] == {"store": 3, "load": 0, "copy out": 1}
    assert values["blocks_imported"] == 2
    assert values["blocks_stored"] == 4 + 2 + 2


def test_a_copy_to_the_disk_is_no_hand_over_and_no_part_of_a_prompt(log: Path) -> None:
    """A request that asks for no block and holds blocks is a hand-over to another engine."""
    values = Metrics.of(LogReader(log)).values()
    assert not any(values["hand_overs"].values())
    assert sum(values["blocks_asked"].values()) == 0
    assert values["matches"] == {"hit": 0, "miss": 0}
    assert sum(values["requests"].values()) == 0
    figures = json.loads(CliRunner().invoke(main, ["report", str(log), "--json"]).stdout)
    assert figures["hand_overs"] == {"taken": 0, "not_needed": 0, "given_up": 0, "held": 0}
    assert (figures["requests"]["requests"], figures["hits"]["lookups"]) == (0, 0)
    assert figures["evictions"]["unread"] == figures["evictions"]["evicted"] > 0


def test_a_report_tells_what_went_to_the_disk_and_what_came_back(log: Path) -> None:
    report = told("report", str(log))
    assert "copied from disk: 2 blocks (stores: 1 completed" in report
    assert "copied to disk: 4 blocks (loads: 1 completed" in report
    assert "other engines" not in report


def test_a_story_names_the_disk(log: Path) -> None:
    with kvsm.open(log) as opened:
        [(requests,)] = opened.sql("SELECT requests FROM transfers WHERE target = 'disk'").fetchall()
    [copy] = json.loads(requests)
    story = told("show", str(log), "--request", copy)
    assert "is planned: slots 0..3 (4) to disk" in story
    assert "another engine" not in story
    assert "for disk" in told("show", str(log), "--block", "0")


def test_why_names_the_disk(log: Path) -> None:
    with kvsm.open(log) as opened:
        [(transfer,)] = opened.sql("SELECT transfer FROM transfers WHERE target = 'disk'").fetchall()
    assert "(to disk)" in told("why", str(log), "--transfer", str(transfer))


def test_whatif_refuses_a_log_of_several_tiers(log: Path) -> None:
    """It would count copies to the disk as loads of requests."""
    result = CliRunner().invoke(main, ["whatif", str(log)])
    assert result.exit_code == 2
    assert "whatif is not validated for several tiers" in " ".join(result.output.split())
