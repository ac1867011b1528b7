"""`kvsm fuzz --target package.module:name` in CI: own worlds and machines, JUnit, GitHub, shards, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from places import ROOT, SUPPORT
from planted_bugs import free_slots_under_copies

from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.fuzz import fuzz as fuzz_command

BROKEN = ROOT / "examples" / "broken"
TESTING_PAGE = (ROOT / "docs" / "testing.md").read_text()


def fuzz(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["fuzz", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own code is in the current directory, which is no place where Python looks for modules."""
    for path in (SUPPORT / "own_world.py", BROKEN / "test_block_pool.py"):
        shutil.copy(path, tmp_path / f"my_{path.name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_own_world", "my_test_block_pool"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def counted(target: str, *arguments: object) -> Result:
    return fuzz("--target", target, "--seed", 3, "--runs", 4, "--jobs", 1, *arguments)


# A world of one's own.


@pytest.mark.parametrize("name", ["Shelf", "shelf_of"])
def test_a_good_world_passes(name: str) -> None:
    """A class, or a function."""
    result = counted(f"my_own_world:{name}")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"target my_own_world:{name}, seed 3, from run 0\n")


def test_a_broken_world_is_found_reduced_saved_and_repeated(tmp_path: Path) -> None:
    found = counted("my_own_world:BrokenShelf", "--log", "found")
    assert found.exit_code == ExitCode.BROKEN
    assert "a legal call raised AssertionError: a book is lost" in found.stdout
    saved = json.loads((tmp_path / "found" / "actions.json").read_bytes())
    assert [kind for (kind,) in saved["actions"]] == ["lend", "return"] * 3
    assert "to repeat it: kvsm fuzz --replay found --target my_own_world:BrokenShelf\n" in found.stdout
    again = fuzz("--replay", "found", "--target", "my_own_world:BrokenShelf")
    assert again.exit_code == ExitCode.BROKEN
    assert again.stdout in found.stdout


def test_a_file_does_not_choose_which_code_runs() -> None:
    """The code of a saved failure is run if the user names it."""
    counted("my_own_world:BrokenShelf", "--log", "found")
    for arguments in ((), ("--target", "my_own_world:Shelf")):
        result = fuzz("--replay", "found", *arguments)
        assert result.exit_code == ExitCode.UNUSABLE
        assert "allow that: --target my_own_world:BrokenShelf" in result.stderr


def test_a_resumed_walk_does_not_choose_which_code_runs() -> None:
    """Somebody else may have written the file of a walk, too."""
    counted("my_own_world:Shelf", "--resume", "walk.json")
    result = fuzz("--resume", "walk.json", "--runs", 1, "--jobs", 1)
    assert result.exit_code == ExitCode.UNUSABLE
    assert "allow that: --target my_own_world:Shelf" in result.stderr
    allowed = fuzz("--resume", "walk.json", "--runs", 1, "--jobs", 1, "--target", "my_own_world:Shelf")
    assert allowed.exit_code == 0


def test_events_of_a_world_guide_its_walk(tmp_path: Path) -> None:
    result = json.loads(counted("my_own_world:Shelf", "--corpus", "corpus", "--json").stdout)
    assert result["corpus"] == {"schedules": 1, "features": 1, "new": 1}
    [kept] = (tmp_path / "corpus").iterdir()
    assert {kind for (kind,) in json.loads(kept.read_bytes())["actions"]} == {"lend"}
    again = json.loads(counted("my_own_world:Shelf", "--corpus", "corpus", "--json").stdout)
    assert again["corpus"] == {"schedules": 1, "features": 1, "new": 0}


@pytest.mark.parametrize(
    ("target", "reasons"),
    [
        ("nowhere:World", ["no module nowhere", "looked for in", "install its package"]),
        ("my_own_world:Shelve", ["my_own_world.py has no Shelve", "it has Shelf, BrokenShelf"]),
        ("my_own_world:nothing", ["makes int, which is no World", "lacks events, actions"]),
        ("my_own_world:raising", ["cannot make a world", "LookupError: no shelf"]),
        ("my_own_world:Shelf.events", ["has no Shelf.events"]),
        ("os:sep", ["is str '/', not a function that makes a World"]),
        ("my_test_block_pool:TestPool", ["is a TestCase", "name the machine"]),
        (":World", ["give package.module:name"]),
        ("worlds", ["is not one of core,", "package.module:name"]),
    ],
)
def test_a_target_that_cannot_be_walked_is_refused(target: str, reasons: Sequence[str]) -> None:
    """What is wrong, where, and what to do."""
    result = counted(target)
    assert result.exit_code == ExitCode.UNUSABLE
    assert "Traceback" not in result.stderr
    for reason in reasons:
        assert reason in result.stderr


# A machine of one's own.


def test_a_broken_machine_is_found_shrunk_saved_and_repeated(tmp_path: Path) -> None:
    target = "my_test_block_pool:Pool"
    found = counted(target, "--log", "found")
    assert found.exit_code == ExitCode.BROKEN
    [(broken, steps)] = re.findall(rf"{target}: (.+) is broken: (\d+) steps, shrunk from ", found.stdout)
    assert f"\n  {steps}. " in found.stdout
    again = fuzz("--replay", "found", "--target", target)
    assert (again.exit_code, again.stdout in found.stdout) == (ExitCode.BROKEN, True)
    [test] = (tmp_path / "found").glob("test_*.py")
    made: dict[str, Any] = {}
    exec(compile(test.read_text(), str(test), "exec"), made)
    [written] = [one for name, one in made.items() if name.startswith("test_")]
    with pytest.raises(Exception, match=re.escape(broken)):
        written()


@pytest.mark.slow
def test_a_walk_through_a_machine_keeps_what_it_reached(tmp_path: Path) -> None:
    """The choices of examples, whose features are edges and the `event`s of Hypothesis."""
    (tmp_path / "my_machine.py").write_text(
        "from hypothesis import event\nfrom kvsm.testing import OffloadMachine\n\n\n"
        "class Told(OffloadMachine):\n"
        "    def wind_down(self):\n"
        "        event('ended')\n"
        "        super().wind_down()\n"
    )
    made = [
        counted("my_machine:Told", "--runs", 1, "--corpus", name, "--jobs", jobs, "--json")
        for name, jobs in (("a", 1), ("b", 2))
    ]
    first, second = (json.loads(one.stdout) for one in made)
    assert first["corpus"] == second["corpus"]
    assert {path.name for path in Path("a").iterdir()} == {path.name for path in Path("b").iterdir()}
    assert first["corpus"]["features"] > 100
    entries = [json.loads(path.read_bytes()) for path in Path("a").iterdir()]
    assert all(set(one) - {"reduced"} == {"target", "seed", "run", "choices"} for one in entries)


# Shards, resumed.


def test_a_resumed_walk_keeps_its_shard() -> None:
    counted("core", "--shard", "2/3", "--resume", "walk.json")
    kept = json.loads(Path("walk.json").read_bytes())
    assert (kept["shard"], kept["next_run"], kept["runs"]) == ("2/3", 4, 1)
    assert "--shard 2/3, not --shard 1/3" in fuzz("--shard", "1/3", "--resume", "walk.json").stderr


@pytest.mark.parametrize("shard", ["9/8", "0/8", "three"])
def test_a_shard_that_there_is_not_is_refused(shard: str) -> None:
    result = fuzz("--shard", shard)
    assert result.exit_code == ExitCode.UNUSABLE
    assert "Invalid value for '--shard'" in result.stderr


def test_a_broken_file_of_a_corpus_is_named_and_skipped() -> None:
    Path("corpus").mkdir()
    Path("corpus/it.json").write_text("{")
    result = counted("my_own_world:Shelf", "--corpus", "corpus")
    assert result.exit_code == 0
    assert "kvsm: corpus/it.json: no schedule of a corpus, and skipped" in result.stderr


# What a CI system reads.


def test_junit_of_a_good_walk_has_one_test_that_passed() -> None:
    counted("core", "--shard", "1/2", "--junit", "fuzz.xml")
    [suite] = ElementTree.parse("fuzz.xml").getroot()
    assert {name: suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")} == {
        "name": "kvsm fuzz",
        "tests": "1",
        "failures": "0",
        "errors": "0",
        "skipped": "0",
    }
    [case] = suite
    assert (case.tag, case.get("classname"), case.get("name")) == ("testcase", "core", "seed 3, shard 1/2")
    assert [one.tag for one in case] == ["system-out"]
    assert "made by kvsm fuzz --target core --seed 3 --shard 1/2 --runs 4" in str(case[0].text)


def test_junit_of_a_failure_has_its_steps_and_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property in words, and what `kvsm show` tells."""
    free_slots_under_copies(monkeypatch)
    result = counted("core", "--log", "found", "--junit", "fuzz.xml")
    assert result.exit_code == ExitCode.BROKEN
    root = ElementTree.parse("fuzz.xml").getroot()
    assert (root.get("failures"), root[0].get("failures")) == ("1", "1")
    failure, out = root[0][0]
    assert str(failure.get("message")).startswith("conservation (S1): slot ")
    assert failure.get("type") == "CONSERVATION"
    assert "core: conservation (S1) is broken: 3 steps" in str(failure.text)
    assert "$ kvsm show found/log --block " in str(out.text)
    assert re.search(r"event \d+ .*CacheReset|reset", str(out.text))
    assert os.stat("fuzz.xml").st_mode & 0o777 == 0o644


def test_junit_that_cannot_be_written_is_told() -> None:
    result = counted("core", "--junit", "absent/fuzz.xml")
    assert result.exit_code == ExitCode.UNUSABLE
    assert "absent/fuzz.xml: the JUnit file cannot be written" in result.stderr


def test_github_marks_the_users_code_and_gets_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = counted("my_own_world:BrokenShelf", "--log", "found", "--github")
    [line] = [one for one in result.stdout.splitlines() if one.startswith("::")]
    place = 1 + (tmp_path / "my_own_world.py").read_text().splitlines().index("class BrokenShelf(Shelf):")
    assert line.startswith(f"::error file=my_own_world.py,line={place},title=my_own_world%3ABrokenShelf%3A ")
    assert "a book is lost%0Ato repeat it: kvsm fuzz --replay found --target" in line
    told = summary.read_text()
    assert told.startswith("# Before\n### kvsm fuzz: my_own_world:BrokenShelf\n")
    assert "```\nmy_own_world:BrokenShelf: every call is legal (S8) is broken" in told


def test_json_stays_json_beside_github() -> None:
    result = counted("my_own_world:BrokenShelf", "--log", "found", "--github", "--json")
    assert json.loads(result.stdout)["failure"]["target"] == "my_own_world:BrokenShelf"
    assert "::error file=my_own_world.py" in result.stderr


# As a process.


def process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvsm", "fuzz", *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["my_own_world:BrokenShelf", "my_test_block_pool:Pool"])
def test_a_process_finds_code_in_its_current_directory(target: str) -> None:
    """With several processes, and from where the code is."""
    made = process("--target", target, "--seed", 3, "--seconds", 20, "--jobs", 2, "--json")
    out, err = made.communicate(timeout=300)
    assert made.returncode == ExitCode.BROKEN, err
    assert json.loads(out)["failure"]["target"] == target


@pytest.mark.slow
def test_sigterm_saves_the_walk_and_the_corpus() -> None:
    """CI ends a job so. No process of the walk is left, and none prints a traceback."""
    made = process("--seed", 3, "--jobs", 2, "--corpus", "corpus", "--seconds", 600)
    assert made.stdout is not None
    made.stdout.readline()  # it has begun
    time.sleep(8)
    made.send_signal(signal.SIGTERM)
    out, err = made.communicate(timeout=120)
    assert made.returncode == ExitCode.TERMINATED
    assert err == ""
    assert "interrupted; to continue: kvsm fuzz --resume kvsm-fuzz.json" in out
    kept = json.loads(Path("kvsm-fuzz.json").read_bytes())
    assert kept["seed"] == 3
    assert len([*Path("corpus").iterdir()]) == int(re.findall(r"corpus: (\d+) schedules", out)[0])
    assert fuzz("--resume", "kvsm-fuzz.json", "--runs", 1, "--jobs", 1).exit_code == 0


# The page.


def test_the_workflow_of_the_page_uses_options_that_there_are() -> None:
    """The shards are the matrix, the corpus is cached, and the JUnit file is uploaded."""
    [text] = [one for one in re.findall(r"```yaml\n(.*?)```", TESTING_PAGE, re.S) if "--shard" in one]
    assert len(text.splitlines()) <= 12
    [job] = yaml.safe_load(text)["jobs"].values()
    [command] = [step["run"] for step in job["steps"] if "kvsm fuzz" in step.get("run", "")]
    known = {name for option in fuzz_command.params for name in option.opts}
    assert set(re.findall(r"--[a-z-]+", command.split("kvsm fuzz")[1])) <= known
    shards = job["strategy"]["matrix"]["shard"]
    assert f"--shard ${{{{ matrix.shard }}}}/{len(shards)}" in command
    assert shards == [*range(1, len(shards) + 1)]
    corpus = re.findall(r"--corpus (\S+)", command)
    assert [step["with"]["path"] for step in job["steps"] if "cache" in step.get("uses", "")] == corpus
    junit = re.findall(r"--junit (\S+)", command)[0]
    assert any(junit in str(step.get("with")) for step in job["steps"] if "upload" in step.get("uses", ""))


def test_the_page_shows_the_world_that_is_tested_here() -> None:
    shown = next(
        one for one in re.findall(r"```python\n(.*?)```", TESTING_PAGE, re.S) if "class Shelf" in one
    )
    for name in ("actions", "draw", "do", "check", "wind_down", "describe", "fingerprint", "reached"):
        assert f"def {name}(self" in shown, name


def test_each_option_is_in_the_help() -> None:
    text = click.Context(fuzz_command).get_help()
    for word in ("--shard", "--corpus", "--junit", "--github", "package.module:name", "143"):
        assert word in text
