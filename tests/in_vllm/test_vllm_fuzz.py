"""`kvsm vllm-fuzz`: connectors with bugs are caught blind, good ones are not blamed, and what is found is
repeated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import unsteady
from broken_connectors import BROKEN
from click.testing import CliRunner, Result
from vllm import __version__

from kvsm.check.vllm_fuzz.shape import EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.failures import load
from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.repeated import REPEATED_PLACE, RepeatedRuns
from kvsm.check.walks.targets import WalkCase
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import Action
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.properties import Property

RUNS = 60


def walked(connector: str, runs: int, seed: int = 1, **extra: object) -> WalkResult:
    """Walk engines with full attention: SimpleCPUOffloadConnector refuses others (docs/findings.md)."""

    def make(random: object) -> VllmWorld:
        shape = msgspec.structs.replace(draw_shape(random), full=True)  # type: ignore[arg-type]
        return VllmWorld(msgspec.structs.replace(shape, connector=connector, extra=extra))

    return walk(make, seed, runs=runs)  # type: ignore[arg-type]


def fuzz(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["vllm-fuzz", *arguments])


@pytest.mark.parametrize("connector", BROKEN, ids=lambda one: one.__name__)
def test_a_connector_with_a_bug_is_caught(connector: type) -> None:
    """The walk knows nothing of the bugs. Each takes a few seconds."""
    assert walked(f"broken_connectors:{connector.__name__}", RUNS).failure is not None


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("KvsmConnector", {}),
        ("KvsmConnector", {"store": "lazy", "lazy_target_blocks": 6}),
        ("SimpleCPUOffloadConnector", {}),
    ],
)
def test_a_good_connector_is_not_blamed(connector: str, extra: dict[str, object]) -> None:
    failure = walked(connector, 24, **extra).failure
    assert failure is None, str(failure)


def test_a_seed_gives_the_same_run_every_time() -> None:
    """Determinism (S11)."""
    first, second = [walked("OffloadingConnector", RUNS, seed=3) for _ in range(2)]
    assert first.failure is not None
    assert first.failure == second.failure


def repeated_run() -> WalkResult:
    """Walk the run that is repeated in another process."""

    def draw(random: Random) -> WalkCase:
        return WalkCase("vllm", msgspec.structs.replace(draw_shape(random), connector="KvsmConnector"))

    return walk(RepeatedRuns(draw, seed=4), 4, first_run=REPEATED_PLACE, runs=1)


def test_the_log_of_a_run_is_the_same_in_another_process() -> None:
    """Determinism (S11), with another hash seed."""
    assert repeated_run().failure is None


def test_a_log_that_differs_from_process_to_process_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Determinism (S11): in both processes, the offers of a step are in the order of a set. Two processes may
    have the same order by chance, so several are asked."""
    (tmp_path / "sitecustomize.py").write_text(unsteady.SITE)
    path = [str(tmp_path), str(Path(unsteady.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv(unsteady.VARIABLE, "the order of a set of strings")
    unsteady.UNSTEADY["the order of a set of strings"](monkeypatch.setattr)
    failure = next(filter(None, (repeated_run().failure for _ in range(6))), None)
    assert failure is not None
    assert failure.finding.property is Property.DETERMINISM


def test_many_requests_may_take_many_steps_to_rest() -> None:
    """A walk of KvsmConnector was blamed for the 400 steps that 78 requests take, two at a time."""
    shape = EngineShape(
        is_async=True, shards=2, windows=True, device_blocks=26, step_tokens=8, most_running=2
    )
    requests: tuple[Action, ...] = tuple(("arrive", 0, 38, 1, 9, 0) for _ in range(90))
    assert outcome_of(msgspec.structs.replace(shape, host_blocks=6), requests) == "None"


def outcome_of(shape: EngineShape, actions: tuple[Action, ...]) -> str:
    return str(rerun(lambda: VllmWorld(shape), actions, to_rest=True).finding)


TWO_RESETS: tuple[Action, ...] = (("arrive", 0, 0, 4, 1, 0), ("settle",), ("reset", 0, 1), ("reset", 0, 1))
RESET_IN_MID_REQUEST: tuple[Action, ...] = (
    ("arrive", 0, 1, 3, 7, 0),
    ("settle",),
    ("settle",),
    ("settle",),
    ("reset", 1, 0),
    ("settle",),
)


@pytest.mark.parametrize(
    ("actions", "line", "versions"),
    [
        (TWO_RESETS, "assert not self._current_batch_jobs_to_flush", ("0.32", "0.33")),
        (RESET_IN_MID_REQUEST, "assert self._jobs[any_jid].is_store", ("0.32",)),
    ],
)
def test_what_is_told_of_vllms_own_connector_is_true(
    actions: tuple[Action, ...], line: str, versions: tuple[str, ...]
) -> None:
    """docs/findings.md tells these two, and which versions have them."""
    shape = EngineShape(connector="OffloadingConnector", is_async=len(actions) == 4, host_blocks=160)
    assert (line in outcome_of(shape, actions)) == __version__.startswith(versions)
    assert outcome_of(msgspec.structs.replace(shape, connector="KvsmConnector"), actions) == "None"


def test_vllms_lazy_connector_copies_for_ever_when_nothing_is_asked() -> None:
    """docs/findings.md tells it. Two groups, and a host pool smaller than what a lazy store keeps free."""
    shape = EngineShape(
        connector="SimpleCPUOffloadConnector",
        extra={"lazy_offload": True},
        windows=True,
        device_blocks=26,
        host_blocks=6,
        step_tokens=8,
        most_running=2,
    )
    request: tuple[Action, ...] = (("arrive", 0, 34, 1, 1, 0),)
    assert "the connector wants more steps" in outcome_of(shape, request)
    assert outcome_of(msgspec.structs.replace(shape, host_blocks=40), request) == "None"


def test_vllms_simple_connector_needs_full_attention() -> None:
    """docs/findings.md tells it. All layers have a sliding window."""
    shape = EngineShape(connector="SimpleCPUOffloadConnector", full=False, windows=True)
    assert "assert 0 <= self.fa_gidx" in outcome_of(shape, (("schedule",),))
    request: tuple[Action, ...] = (("arrive", 0, 34, 1, 1, 0),)
    for other in ("KvsmConnector", "OffloadingConnector"):
        assert outcome_of(msgspec.structs.replace(shape, connector=other), request) == "None"


def test_each_defect_is_told_saved_and_repeated(tmp_path: Path) -> None:
    result = fuzz(
        "--connector",
        "OffloadingConnector",
        "--seed",
        "1",
        "--runs",
        "40",
        "--log",
        f"{tmp_path}/f",
        "--json",
    )
    assert result.exit_code == ExitCode.BROKEN, result.output
    findings = json.loads(result.output)["findings"]
    assert findings
    for finding in findings:
        saved = load(Path(finding["directory"]), {"connector": ["OffloadingConnector"]})
        again = rerun(saved.case().make, saved.actions, to_rest=True).finding
        assert again is not None
        assert again.property == saved.property
        assert (Path(finding["directory"]) / "steps.txt").read_text().count("\n") > 3


def test_the_saved_test_fails_until_the_defect_is_mended(tmp_path: Path) -> None:
    fuzz(
        "--connector",
        "broken_connectors:NeedsToBeScheduled",
        "--seed",
        "1",
        "--runs",
        "40",
        "--first",
        "--log",
        f"{tmp_path}/f",
    )
    (test,) = (tmp_path / "f" / "1").glob("test_*.py")
    space: dict[str, object] = {}
    exec(compile(test.read_text(), str(test), "exec"), space)
    (check,) = [one for name, one in space.items() if name.startswith("test_")]
    with pytest.raises(AssertionError, match="KeyError"):
        check()  # type: ignore[operator]


def searched(connector: str, most: int) -> dict[str, object]:
    result = fuzz("--connector", connector, "--systematic", str(most), "--jobs", "1", "--first", "--json")
    assert result.exit_code in (ExitCode.GOOD, ExitCode.BROKEN), result.output
    return dict(json.loads(result.output))


def test_every_short_schedule_of_a_good_connector_is_good() -> None:
    answer = searched("KvsmConnector", 2)
    assert (answer["findings"], answer["complete"]) == ([], 2)


def test_the_shortest_way_to_a_defect_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request arrives. At the end of the run the connector is asked for its prompt by a request that is
    aborted: nothing shorter can leak."""
    monkeypatch.chdir(tmp_path)
    answer = searched("broken_connectors:LeaksOnAbort", 3)
    (finding,) = answer["findings"]  # type: ignore[misc]
    assert [action[0] for action in finding["failure"]["actions"]] == ["arrive"]
    assert finding["failure"]["systematic"] == 3
    (test,) = (tmp_path / "kvsm-vllm-fuzz-systematic-3" / "1").glob("test_*.py")
    assert "--systematic 3` in run" in test.read_text()


def test_the_shortest_way_to_a_defect_under_faults_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults that a connector must survive are actions of the schedules, too."""
    monkeypatch.chdir(tmp_path)
    (finding,) = searched("broken_under_faults:NeverGivesUp", 2)["findings"]  # type: ignore[misc]
    assert [action[0] for action in finding["failure"]["actions"]] == ["arrive", "lose"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--connector", "NoSuchConnector"), "NoSuchConnector"),
        (("--connector", "no.such.module:Connector"), "no.such.module"),
        (("--connector", "KvsmConnector", "--config", "[1]"), "give an object"),
        (("--connector", "KvsmConnector", "--config", "{"), "not JSON"),
    ],
)
def test_unusable_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    result = fuzz(*arguments)
    assert result.exit_code == ExitCode.UNUSABLE
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
