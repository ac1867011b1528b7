"""`kvsm report --regret`: what other policies would have found with a log's own pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from served_logs import served

from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig
from kvsm.explain.report.regret import regret
from kvsm.explain.story import Trust


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with evictions and hits."""
    return served(tmp_path_factory.mktemp("regret") / "log")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_regret_is_what_whatif_predicts(log: Path) -> None:
    size = str(LogReader(log).head.config.host_blocks)
    asked = json.loads(printed("whatif", str(log), "--host-blocks", size, "--policy", "all", "--json"))
    told = json.loads(printed("report", str(log), "--regret", "--json"))["regret"]
    found = {one["policy"]: one["found_share"] for one in asked["outcomes"]}
    assert {one["policy"]: one["found_share"] for one in (told["own"], *told["others"])} == found
    assert found.keys() == POLICIES.keys()
    assert told["own"]["policy"] == LogReader(log).head.config.policy
    assert told["bound_share"] == asked["itself"]["bound_share"]
    assert told["error_points"] == max(one["error_points"] for one in asked["outcomes"])
    shares = [one["found_share"] for one in told["others"]]
    assert shares == sorted(shares, reverse=True)
    assert max(found.values()) <= told["bound_share"]


def test_a_report_names_the_best_other_policy_and_the_bound(log: Path) -> None:
    found = regret(LogReader(log), Trust())
    assert found.own is not None
    lines = printed("report", str(log), "--regret")
    assert f"policies    {found.own.policy} finds {found.own.found_share:.1%} on device or host" in lines
    assert (
        f"{found.others[0].policy} finds {found.others[0].found_share:.1%}, the most of the others" in lines
    )
    assert f"no policy can find more than {found.bound_share:.1%}" in lines


def test_nobody_is_told_a_regret_that_was_not_asked_for(log: Path) -> None:
    assert json.loads(printed("report", str(log), "--json"))["regret"] is None
    assert "policies" not in printed("report", str(log))


def test_a_part_of_a_log_has_its_own_regret(log: Path) -> None:
    whole, part = (
        json.loads(printed("report", str(log), "--regret", "--json", *window))["regret"]
        for window in ((), ("--since", "2000"))
    )
    assert part["own"]["policy"] == whole["own"]["policy"]
    assert part != whole


def test_a_log_without_lookups_has_no_prediction(tmp_path: Path) -> None:
    """The rest of the report is told all the same."""
    with Offloader.open(OffloadConfig(host_blocks=4, device_blocks=4), tmp_path / "log") as core:
        core.match("r", [])
        core.finish("r")
    lines = printed("report", str(tmp_path / "log"), "--regret")
    assert "policies    no prediction: " in lines
    assert "4 host slots" in lines
