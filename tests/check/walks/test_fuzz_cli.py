"""`kvsm fuzz` as its user meets it: what it prints, writes and refuses, and how it continues."""

from __future__ import annotations

import json
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planted_bugs import free_slots_under_copies, plant

from kvsm.check.walks import failures
from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.targets import TARGETS
from kvsm.check.walks.walk import WalkFailure, WalkResult, walk
from kvsm.check.worlds.world import Finding
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.core.offloader.emitter import EventEmitter
from kvsm.properties import Property

COUNTED = ("--runs", 2, "--jobs", 1)


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def fuzz(*arguments: object) -> Result:
    return kvsm("fuzz", *arguments)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Path]:
    """What `kvsm fuzz` printed about a planted bug, and its directory. The bug is still there."""
    free_slots_under_copies(monkeypatch)
    directory = tmp_path / "failure"
    return fuzz("--seed", 1, *COUNTED, "--log", directory), directory


# Nothing found.


def test_a_good_walk_tells_its_seed_and_what_it_did() -> None:
    result = fuzz("--seed", 5, *COUNTED)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "target core, seed 5, from run 0"
    assert " operations in 2 runs, " in lines[1]
    assert " copies in flight at most, " in lines[1]
    assert lines[2] == "no property was broken"


def test_json_holds_the_same() -> None:
    """Standard output is one JSON object."""
    told = json.loads(fuzz("--seed", 5, *COUNTED, "--json").stdout)
    operations = told["progress"]["operations"]
    assert told["failure"] is None
    assert (told["progress"]["seed"], told["progress"]["runs"]) == (5, 2)
    assert f"{operations:,} operations in 2 runs, " in fuzz("--seed", 5, *COUNTED).stdout


def test_each_walk_has_a_new_seed() -> None:
    """It is one of 4 billion."""
    first, second = (json.loads(fuzz(*COUNTED, "--json").stdout)["progress"]["seed"] for _ in range(2))
    assert first != second


def test_seconds_end_it() -> None:
    assert json.loads(fuzz("--seconds", 0, "--jobs", 1, "--json").stdout)["progress"]["runs"] == 1


def test_help_teaches() -> None:
    """It explains the targets, examples and exit codes."""
    text = fuzz("--help").stdout
    for word in (*TARGETS, "all", "Examples:", "Exit codes:", "--resume", "Ctrl-C"):
        assert word in text


# To go on.


def test_a_resumed_walk_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """The file knows the seed and the target; the totals are those of one walk."""
    kept, whole = tmp_path / "kept.json", tmp_path / "whole.json"
    fuzz("--seed", 7, "--runs", 1, "--jobs", 1, "--resume", kept)
    resumed = fuzz("--runs", 2, "--jobs", 1, "--resume", kept)
    fuzz("--seed", 7, "--runs", 3, "--jobs", 1, "--resume", whole)
    assert resumed.stdout.startswith("target core, seed 7, from run 1\n")
    first, second = json.loads(kept.read_bytes()), json.loads(whole.read_bytes())
    assert first["next_run"] == 3
    for one in (first, second):
        del one["seconds"]
    assert first == second


def test_ctrl_c_saves_the_walk_and_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without --resume."""

    def press(_: WalkResult) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(*arguments: Any, **options: Any) -> WalkResult:
        return walk(*arguments, **{**options, "progress": press})

    monkeypatch.setattr("kvsm.cli.walking.walk", interrupted)
    monkeypatch.chdir(tmp_path)
    result = fuzz("--seed", 3, "--jobs", 1)
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "interrupted; to continue: kvsm fuzz --resume kvsm-fuzz.json" in result.stdout
    assert json.loads((tmp_path / "kvsm-fuzz.json").read_bytes())["next_run"] == 1


# A failure.


def test_a_failure_is_a_story(found: tuple[Result, Path]) -> None:
    """Numbered steps with changes, the property, the cause, and the directory. Exit code 1."""
    result, directory = found
    assert result.exit_code == 1
    told = result.stdout
    assert "core: conservation (S1) is broken: 3 steps, reduced from " in told
    assert "\n  1. import_blocks 0 0 0 0 0\n     slot 0: nothing -> ALLOCATED(copies=0, pins=0)" in told
    assert "\n  3. reset\n" in told
    assert (
        "broken: conservation (S1): slot 0 QUARANTINED(copies=1, pins=0): in the free queue although in use\n"
        in told
    )
    assert "because: step 3 (reset) was the last to change slot 0: " in told
    assert f"to repeat it: kvsm fuzz --replay {directory}\n" in told
    assert (directory / "steps.txt").read_text() in told


def test_saving_a_failure_follows_no_link(found: tuple[Result, Path], tmp_path: Path) -> None:
    """Another user may put one into a shared directory after it was claimed."""
    letters = tmp_path / "letters"
    letters.write_text("somebody's letters")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "steps.txt").symlink_to(letters)
    failures.save(failures.load(found[1]), tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "steps.txt").is_symlink()
    assert letters.read_text() == "somebody's letters"


def test_a_failure_has_a_log_that_can_be_read(found: tuple[Result, Path]) -> None:
    """`kvsm verify` finds the same broken property, and `kvsm show` tells the life of the slot."""
    _, directory = found
    shown = kvsm("show", directory / "log", "--block", 0)
    assert shown.exit_code == 0
    assert "reset" in shown.stdout
    verified = kvsm("verify", directory / "log", "--json")
    assert verified.exit_code == 1
    assert json.loads(verified.stdout)["violations"][0]["property_id"] == "S1"


def test_a_failure_whose_events_make_no_log_is_saved_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this bug two events have each number. The failure must not be lost because of that."""
    plant(monkeypatch, EventEmitter.emit, "self.log.append(event)", "self.log.append(event); " * 2)
    result = fuzz("--target", "log-ahead", "--seed", 1, *COUNTED, "--log", tmp_path / "failure")
    assert result.exit_code == ExitCode.BROKEN
    written = {path.name for path in (tmp_path / "failure").iterdir()}
    assert {failures.FILE, "steps.txt"} < written
    assert "log" not in written


def test_the_written_test_fails_until_the_bug_is_fixed(
    found: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = found
    test: Callable[[], None] = runpy.run_path(str(directory / "test_core_1_0.py"))[
        "test_core_keeps_conservation"
    ]
    with pytest.raises(AssertionError, match=r"conservation \(S1\): slot 0 QUARANTINED"):
        test()
    monkeypatch.undo()
    test()


@pytest.mark.parametrize("target", TARGETS)
def test_the_written_test_is_python_for_every_target(target: str) -> None:
    """The name of a target may hold a hyphen, and the name of a test may not."""
    found = WalkFailure(0, (), Finding(Property.CONSERVATION, "it is lost"))
    failure = WorldTarget(target).unreduced(1, found, ())
    compile(failures.regression_test(failure), target, "exec")


def test_the_written_test_names_the_command_that_repeats_its_run() -> None:
    """Run 3 of `all` is a run of another world than run 3 of that world's target."""
    found = WalkFailure(3, (), Finding(Property.CONSERVATION, "it is lost"))
    for target in ("all", "core"):
        failure = WorldTarget(target).unreduced(1, found, ())
        assert f"Found by `kvsm fuzz --target {target} --seed 1` in run 3" in failures.regression_test(
            failure
        )


def test_a_failure_is_repeated(found: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story and exit code 1 while the bug is there; exit code 0 after it is fixed."""
    first, directory = found
    again = fuzz("--replay", directory)
    assert again.exit_code == 1
    assert again.stdout in first.stdout
    assert json.loads(fuzz("--replay", directory, "--json").stdout)["finding"]["property_id"] == "S1"
    monkeypatch.undo()
    gone = fuzz("--replay", directory)
    assert gone.exit_code == 0
    assert gone.stdout == "3 actions, and no property is broken: it no longer fails\n"


def test_the_same_seed_writes_the_same_bytes(found: tuple[Result, Path], tmp_path: Path) -> None:
    """Determinism (S11) of the log, the actions, the steps and the test."""
    _, directory = found
    other = tmp_path / "other"
    fuzz("--seed", 1, *COUNTED, "--log", other)
    files = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    assert [path.suffix for path in files] == [".json", ".kvsm", ".txt", ".py"]
    for path in files:
        assert (directory / path).read_bytes() == (other / path).read_bytes()


def test_a_failure_of_another_target_has_the_same_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the requests that arrived in the serving world are kept."""
    free_slots_under_copies(monkeypatch)
    result = fuzz(
        "--target", "serving", "--seed", 5, "--runs", 4, "--jobs", 1, "--log", tmp_path / "it", "--json"
    )
    assert result.exit_code == 1
    saved = json.loads((tmp_path / "it" / "actions.json").read_bytes())
    assert saved["target"] == "serving"
    assert len(saved["options"]["requests"]) == [kind for kind, *_ in saved["actions"]].count("arrive")
    assert len(saved["actions"]) < 12
    assert fuzz("--replay", tmp_path / "it").exit_code == 1


# What it refuses.


def refused(*arguments: object) -> str:
    """The message of a refusal: one line, with exit code 2."""
    result = fuzz(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_directory_in_use_is_refused_before_the_walk(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    assert "not empty" in refused("--log", tmp_path)


def test_another_seed_or_target_than_the_kept_one_is_refused(tmp_path: Path) -> None:
    """Otherwise the totals would mix two walks."""
    kept = tmp_path / "kept.json"
    fuzz("--seed", 7, "--runs", 1, "--jobs", 1, "--resume", kept)
    assert "--seed 7, not --seed 8" in refused("--seed", 8, "--resume", kept)
    assert "--target core, not --target copies" in refused("--target", "copies", "--resume", kept)


def test_a_file_without_a_walk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}")
    assert "no walk to continue" in refused("--resume", tmp_path / "kept.json")
    assert "there is no directory" in refused("--resume", tmp_path / "absent" / "kept.json")


def test_a_directory_without_a_failure_is_refused(tmp_path: Path) -> None:
    assert "name a directory that `kvsm fuzz` has written" in refused("--replay", tmp_path)
    (tmp_path / "actions.json").write_text("[1]")
    assert "actions.json" in refused("--replay", tmp_path)


def test_replay_cannot_be_combined_with_a_walk(tmp_path: Path) -> None:
    assert "--replay repeats what was saved" in refused("--replay", tmp_path, "--seed", 1)


def test_an_unknown_target_is_refused() -> None:
    assert "'nothing' is not one of" in refused("--target", "nothing")
