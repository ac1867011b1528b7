"""`kvsm check`: exit codes, what it prints, and what it refuses before it begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from click.testing import CliRunner, Result
from test_counterexample import model_of
from toy_checks import Commit

from kvsm.check.explore.checked_model import Bounds, CheckedModel, ExplorationLimits
from kvsm.check.explore.explorer import ExplorationProgress
from kvsm.check.explore.model import INTERRUPT, Exploration, Verdict
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.scopes.models import MODELS
from kvsm.cli import main
from kvsm.cli.check import progress_line


class Core(CheckedModel):
    """An offloader stores a block: it takes edges of the tables and has a log. Its scope "broken" fails."""

    name, says = "core", "one store"
    machines = ("block", "transfer", "lease")
    scopes: Mapping[str, Any] = {"small": ("idle", "idle"), "broken": ("break",)}

    def bounds(self, _scope: Any) -> Bounds:
        return {}

    def model(self, scope: tuple[str, ...]) -> RerunModel[Any]:
        return model_of(*scope)

    def explore(self, scope: Any, limits: ExplorationLimits) -> Exploration:
        assert self.takes_depth or limits.max_depth is None
        return super().explore(scope, limits)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    """Afterwards the models stand in their own order again, in which a page is written of them."""
    with patch.dict(MODELS, {one.name: one for one in (Commit(), Core())}, clear=True):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", "--jobs", "1", *arguments])


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (["commit"], 0, "PROVED"),
        (["commit", "-b", "hasty=1"], 1, "REFUTED"),
        (["commit", "--scope", "full", "--states", "50"], 3, "UNDETERMINED (stopped at 50 states)"),
        (["commit", "--depth", "2"], 3, "UNDETERMINED (stopped at the depth of 2 actions)"),
        (["commit", "--seconds", "0"], 3, "UNDETERMINED (stopped at 0 seconds)"),
        ([], 0, "PROVED"),
        (["-b", "hasty=1"], 1, "REFUTED"),
        (["--depth", "4"], 3, "UNDETERMINED (stopped at the depth of 4 actions)"),
        (["--depth", "5", "--bound", "hasty=1"], 1, "UNDETERMINED (stopped at the depth of 5 actions)"),
    ],
    ids=str,
)
def test_the_exit_code_is_the_worst_verdict(arguments: list[str], code: int, verdict: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert f"verdict    {verdict}\n" in result.output


def test_a_limit_of_depth_applies_to_models_that_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are explored without it, with a notice."""
    monkeypatch.setattr(Core, "takes_depth", False)
    result = run("--depth", "4")
    assert result.stdout.count("verdict    UNDETERMINED (stopped at the depth of 4 actions)") == 1
    assert result.stdout.count("verdict    PROVED") == 1
    assert result.stderr == "kvsm: core does not support --depth and is explored without it\n"


def test_a_proof_names_its_bounds_and_what_was_seen() -> None:
    lines = run("commit").stdout.splitlines()
    assert lines[0] == "commit: 2 resource managers"
    assert lines[1] == "  verdict    PROVED"
    assert lines[2].startswith("  seen       56 states, 153 transitions, depth 7; ")
    assert lines[3] == "  reached    all commit, all abort"


def test_a_refutation_is_told_step_by_step() -> None:
    lines = run("commit", "-b", "hasty=1").stdout.splitlines()
    assert "commit: consistent is broken, in 5 steps" in lines
    assert lines[-1] == "because: step 5 (leave 1) led there"
    assert not [line for line in lines if "all states were seen" in line]


def test_what_cannot_be_reached_is_named_and_has_no_steps(tmp_path: Path) -> None:
    """Without a manager, none commits."""
    result = run("commit", "-b", "managers=0", "--log", str(tmp_path / "logs"))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[3:] == [
        "  unreached  all commit, all abort",
        "             all states were seen, so they are unreachable: this refutes the model",
    ]


def test_edges_that_were_never_taken_are_named() -> None:
    lines = run("core").stdout.splitlines()
    assert "  edges      7 of 71 in the tables of block, transfer, lease" in lines
    assert "    never taken: lease BEGIN_WRITE: NONE -> WRITING" in lines
    (never,) = [line for line in lines if line.startswith("    never taken: block END_COPY_GOOD: ")]
    assert "LOADING -> STORED" in never
    assert "STORING -> STORED" not in never


def test_json_has_one_line_per_model() -> None:
    commit, core = map(json.loads, run("--json").stdout.splitlines())
    assert (commit["verdict"], commit["states"], commit["transitions"]) == ("PROVED", 56, 153)
    assert (commit["reached"], commit["edges"], commit["counterexample"]) == (
        ["all commit", "all abort"],
        [],
        None,
    )
    assert core["model"] == "core"
    assert len(core["edges"]) == 7
    assert len(core["never_taken"]) == 64
    refuted = json.loads(run("commit", "-b", "hasty=1", "--json").stdout)
    assert refuted["verdict"] == "REFUTED"
    assert refuted["finding"]["property_id"] == "consistent"
    assert [step["action"] for step in refuted["counterexample"]["steps"]][-1] == "leave 1"


def test_the_log_of_a_refutation_is_kept(tmp_path: Path) -> None:
    result = run("core", "--scope", "broken", "--log", str(tmp_path / "logs"))
    assert result.exit_code == 1
    assert f"its 5 events are in {tmp_path / 'logs' / 'core'}; try kvsm show" in result.stderr
    assert list((tmp_path / "logs" / "core").glob("*.kvsm"))


def test_a_model_without_a_core_says_that_it_has_no_log(tmp_path: Path) -> None:
    result = run("commit", "-b", "hasty=1", "--log", str(tmp_path))
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "commit runs no offload core, so it has no event log" in result.stderr


def test_models_are_listed() -> None:
    result = run("--list")
    assert (result.exit_code, result.stdout) == (
        0,
        "commit: two-phase commit\n  small: managers=2 hasty=0\n  full: managers=4\n"
        "core: one store\n  small: the same bounds\n  broken: the same bounds\n",
    )


def test_models_are_listed_as_json_too() -> None:
    """One line per model, with all bounds of each scope."""
    commit, core = map(json.loads, run("--list", "--json").stdout.splitlines())
    assert commit == {
        "schema": "kvsm.check-list/1",
        "model": "commit",
        "says": "two-phase commit",
        "machines": [],
        "scopes": {"small": {"managers": 2, "hasty": 0}, "full": {"managers": 4, "hasty": 0}},
    }
    assert (core["model"], core["machines"]) == ("core", ["block", "transfer", "lease"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "there is no model 'nothing'; there are commit, core"),
        (["--nonsense"], "No such option"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
        (["core", "--scope", "full"], "core has no scope 'full'; it has small, broken"),
        (["--scope", "huge"], "no model has a scope 'huge'; see kvsm check --list"),
        (["-b", "managers"], "--bound 'managers' is not NAME=N"),
        (["-b", "managers=-1"], "--bound 'managers=-1' is not NAME=N"),
        (["-b", "managers=1000001"], "is too large; the limit is 1,000,000"),
        (["--jobs", "257"], "257 is not in the range"),
        (["--log", "/dev/null"], "/dev/null cannot hold logs"),
        (["-b", "slots=2"], "there is no bound 'slots' here; there are hasty, managers"),
        (["core", "-b", "managers=2"], "there is no bound 'managers' here"),
    ],
    ids=str,
)
def test_unusable_input_exits_with_2(arguments: list[str], told: str) -> None:
    """As every command of kvsm does; 1 means refuted."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_ctrl_c_ends_with_130_unless_something_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict, and no limit of the user's: the same code as in every command."""
    explored = MODELS["commit"].explore

    def interrupted(scope: Any, limits: ExplorationLimits) -> Exploration:
        found = explored(scope, limits)
        return msgspec.structs.replace(found, verdict=Verdict.UNDETERMINED, limit=INTERRUPT)

    monkeypatch.setattr(MODELS["commit"], "explore", interrupted)
    assert run("commit").exit_code == 130
    assert run("core", "commit", "--scope", "small").exit_code == 130


def test_a_log_directory_in_use_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "something").touch()
    result = run("--log", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path / 'core'} is not empty" in result.stderr


def test_a_terminal_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = ExplorationProgress(12_000, 40_000, 9, 345, 4.0)
    assert progress_line("commit", progress) == (
        "commit   12,000 states   3,000 states/s   depth 9   queue 345   4 s"
    )
    shown: list[str] = []
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("kvsm.check.explore.explorer.PROGRESS_SECONDS", 0)
    monkeypatch.setattr(
        import_module("kvsm.cli.check"),
        "progress_line",
        lambda name, progress, _counts: shown.append(name) or str(progress.states),
    )
    assert run("commit").exit_code == 0
    assert shown == ["commit"] * 56
