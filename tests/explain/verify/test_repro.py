"""`kvsm repro`: the file that it writes is a test, runs by itself, and fails like `kvsm verify`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from log_life import disk
from places import ROOT
from replay_life import OFTEN, Life, after_reset, head, key, random_life, scene, story_life, written
from test_verify import WRONG

from kvsm import events as ev
from kvsm.cli import main
from kvsm.events import OffloadingEvent
from kvsm.explain.story import verify_log
from kvsm.explain.verify.reproduction import write_reproduction

EVIL = '"""\nimport os; os.abort()\n\x1b[31m'
"""A request's id that would be code in a file, and a command to a terminal."""


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def run_pytest(test: Path) -> tuple[int, str]:
    """Run the written file in a process of its own, as its reader would."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name],
        cwd=test.parent,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def long_life(log: Path, seed: int = 11) -> Life:
    """A log of several segments whose last event cannot be: a slot in flight is evicted."""
    life = random_life(seed, 1500, log, writer={"segment_bytes": 8_000})
    plan = life.core.prepare_store(EVIL, [key(902)], [22]).job
    assert plan is not None
    life.core.submit([plan.transfer])
    slot = life.core.ledger.index[key(902)]
    wrong = ev.BlocksEvicted(*head(life), (slot,), (), 10**6)
    life.append(wrong)
    life.append(ev.StepEnded(wrong.seq + 1, wrong.step, 0))
    life.close()
    assert len(list(log.glob("*.kvsm"))) > 3
    return life


def test_the_written_test_runs_and_fails_as_verify_tells(tmp_path: Path) -> None:
    """The whole promise, in a process of its own: exit code 1, the same event, properties and history.

    A request may be called anything. The file holds no text of the log, and what the test prints is harmless.
    """
    long_life(tmp_path / "log")
    found = verify_log(tmp_path / "log")
    assert found.breakage is not None
    result = kvsm("repro", tmp_path / "log", "--at", found.breakage.event, "-o", tmp_path / "test_cut.py")
    assert result.exit_code == 0, result.stderr
    cut = tmp_path / "test_cut_log"
    assert f"{cut}: events {found.breakage.event - 50:,} to {found.breakage.event:,} of " in result.stdout
    code, output = run_pytest(tmp_path / "test_cut.py")
    assert code == 1
    assert "FAILED test_cut.py::test_no_event_breaks_a_property" in output
    assert "abort" not in (tmp_path / "test_cut.py").read_text()
    assert "\x1b[31m" not in output
    assert "import os; os.abort()" in output
    for line in found.breakage.told()[:3]:
        assert line.strip() in output
    assert kvsm("show", cut, "--transfer", found.breakage.event - 2).stdout


def test_the_part_is_short_and_a_log_like_any_other(tmp_path: Path) -> None:
    """It lacks nothing, is closed, and gives the same breakage."""
    long_life(tmp_path / "log")
    whole = verify_log(tmp_path / "log")
    made = write_reproduction(tmp_path / "log", None, tmp_path / "test_cut.py")
    part = verify_log(made.log)
    assert part.breakage is not None
    assert whole.breakage is not None
    assert (part.breakage.event, part.violations) == (whole.breakage.event, whole.violations)
    assert (part.events, part.condition.complete, part.condition.notes()) == (51, True, [])
    assert made.first == whole.breakage.event - 50


@pytest.mark.parametrize("wrong", range(0, len(WRONG), 4))
@pytest.mark.parametrize("before", [3, 80])
def test_each_way_to_break_a_property_is_cut_so_that_it_breaks_the_same(
    tmp_path: Path, wrong: int, before: int
) -> None:
    """Also where the part must reach back, because a snapshot does not say why a block is void."""
    life = scene(host_blocks=5)
    for _ in range(before):
        life.core.end_step()
    log = written(tmp_path / "log", life, [*life.events, *WRONG[wrong][1](life)])
    whole = verify_log(log).breakage
    part = verify_log(write_reproduction(log, None, tmp_path / "test_cut.py").log).breakage
    assert whole is not None
    assert part is not None
    assert (part.event, part.text, part.violations) == (whole.event, whole.text, whole.violations)


def test_the_part_reaches_back_if_a_shorter_one_fails_otherwise(tmp_path: Path) -> None:
    """After a reset a snapshot does not say that a void block held stale data; the whole log does."""
    life = scene()
    reset, match = after_reset(life)
    idle: list[OffloadingEvent] = [ev.StepEnded(0, 0, 0)] * 80
    log = written(tmp_path / "log", life, [*life.events, reset, *idle, match])
    made = write_reproduction(log, None, tmp_path / "test_cut.py")
    assert made.first == 1
    assert {one.property.id for one in made.breakage.violations} == {"S14"}


def test_a_log_with_a_gap_is_cut_behind_it(tmp_path: Path) -> None:
    """The state behind a gap is in the next segment's head alone."""
    rng, log = random.Random(8), tmp_path / "log"
    life = Life(log, writer={"on_failure": "continue", "segment_bytes": 3000})
    for room in (1 << 20, 0, 1 << 20):
        with disk(room):
            life.drive((rng.choice(OFTEN), rng.randrange(30), rng.randrange(30)) for _ in range(300))
    life.append(ev.RequestFinished(*head(life), "nobody"))
    life.close()
    ((_, lost),) = verify_log(log).condition.gaps
    made = write_reproduction(log, None, tmp_path / "test_cut.py")
    assert lost < made.first
    part = verify_log(made.log)
    assert part.breakage is not None
    assert part.breakage.event == made.last == life.core.ledger.seq + 1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Neither the file nor the log beside it; and a refusal leaves nothing behind."""
    log = written(tmp_path / "log", life := scene(), [*life.events, *after_reset(life)])
    test, beside = tmp_path / "test_cut.py", tmp_path / "test_cut_log"
    test.write_text("mine")
    assert "is there already" in kvsm("repro", log, "-o", test).stderr
    assert (test.read_text(), beside.exists()) == ("mine", False)
    test.unlink()
    beside.mkdir()
    result = kvsm("repro", log, "-o", test)
    assert (result.exit_code, test.exists(), list(beside.iterdir())) == (2, False, [])
    beside.rmdir()
    assert kvsm("repro", log, "-o", test).exit_code == 0
    again = kvsm("repro", log, "-o", test)
    assert (again.exit_code, again.stdout) == (2, "")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "test_cut.py", "test_cut_log"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{good}",), "no property is broken up to its last event, 20, so there is no failure to reproduce"),
        (("{bad}", "--at", 3), "no property is broken up to event 3; the first broken one is at event"),
        (("{bad}", "-o", "{tmp}/cut.py"), "pytest does not find this name"),
        (("{bad}", "-o", "{tmp}/none/test_cut.py"), "there is no directory"),
        (("{tmp}/none",), "no such directory"),
    ],
)
def test_what_cannot_be_reproduced_is_one_clear_line(
    tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    story_life(tmp_path / "good")
    written(tmp_path / "bad", life := scene(), [*life.events, *after_reset(life)])
    places = {"tmp": tmp_path, "good": tmp_path / "good", "bad": tmp_path / "bad"}
    result = kvsm("repro", *(str(one).format(**places) for one in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad", "good"]


def test_json_names_what_was_written(tmp_path: Path) -> None:
    log = written(tmp_path / "log", life := scene(), [*life.events, *after_reset(life)])
    told = json.loads(kvsm("repro", log, "-o", tmp_path / "test_cut.py", "--json").stdout)
    assert told["schema"] == "kvsm.repro/1"
    assert (told["test"], told["property_ids"]) == (str(tmp_path / "test_cut.py"), ["S14"])
