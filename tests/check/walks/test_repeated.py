"""Determinism (S11): a share of the walked runs is made again in another process, and its log compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import unsteady

from kvsm.check.walks.failures import regression_test
from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.repeated import REPEATED_PLACE, differing_log
from kvsm.check.walks.targets import TARGETS, WalkCase, draw_case
from kvsm.check.walks.walk import random_of, walk
from kvsm.check.worlds.serving_world import RequestSpec, ServingOptions
from kvsm.properties import Property

SEED = 4
"""With this seed, requests are preempted together in the run that is made again."""


QUICK = ("whole",)
"""It has the scheduler, the core and a disk. Each target takes another process a second."""


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, one in TARGETS.items()
        if one.has_log
    ],
)
def test_the_log_of_a_run_is_the_same_in_another_process(target: str) -> None:
    result = walk(WorldTarget(target).runs(SEED), SEED, first_run=REPEATED_PLACE, runs=1)
    assert result.runs == 1
    assert result.failure is None


def test_a_world_without_a_log_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.check.walks.repeated.subprocess.run", None)
    assert differing_log(draw_case("copies", random_of(SEED, 0)), ()) is None


ONE, *OTHERS = unsteady.UNSTEADY


@pytest.fixture(name="both", params=[ONE, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def _both(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug here and in the processes that this one starts."""
    (tmp_path / "sitecustomize.py").write_text(unsteady.SITE)
    path = [str(tmp_path), str(Path(unsteady.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv(unsteady.VARIABLE, request.param)
    unsteady.UNSTEADY[request.param](monkeypatch.setattr)


@pytest.mark.usefixtures("both")
def test_a_log_that_differs_from_process_to_process_is_found() -> None:
    """It is reported with its run, is not reduced, and fails again when it is repeated."""
    target = WorldTarget("serving")
    result = walk(target.runs(SEED), SEED, first_run=REPEATED_PLACE, runs=1)
    assert result.failure is not None
    assert result.failure.run == REPEATED_PLACE
    assert result.failure.finding.property is Property.DETERMINISM
    saved = target.unreduced(SEED, result.failure, ())
    assert target.reduced(saved) == saved
    again = target.again(saved)
    assert again is not None
    assert again.property is Property.DETERMINISM
    made: dict[str, object] = {}
    exec(regression_test(saved), made)
    [test] = [one for name, one in made.items() if name.startswith("test_")]
    with pytest.raises(AssertionError, match="S11"):
        test()  # type: ignore[operator]


def test_an_event_that_only_one_process_has_is_named() -> None:
    case = WalkCase("serving", ServingOptions(requests=(RequestSpec((1, 2, 3), 1),)))
    finding = differing_log(case, (("arrive",),), ())
    assert finding is not None
    assert "event 1 is missing here" in finding.message


def test_the_other_process_is_silent_if_the_walk_ends_first() -> None:
    """Nobody reads its answer then."""
    case = draw_case("core", random_of(SEED, 0))
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "kvsm.check.walks.repeated"],
        input=msgspec.msgpack.encode(
            {"target": case.target, "options": msgspec.to_builtins(case.options), "actions": ()}
        ),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
