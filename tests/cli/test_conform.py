"""`kvsm conform`: what held, what is broken, and what the walk could not have found."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conformed
import msgspec
import pytest
from click.testing import CliRunner, Result

from kvsm.cli import main
from kvsm.cli.conform_targets import BUILT_IN
from kvsm.cli.conform_worker import (
    HangWatch,
    Heartbeat,
    Message,
    RunBegan,
    RunEnded,
    StepsMade,
    TargetWorker,
    WorkOrder,
    shape_of,
)
from kvsm.cli.exit_codes import ExitCode
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.system.stopping import watching_steps

HERE = Path(conformed.__file__).parent


class WorkerHere:
    """Stands for the process of a worker, whose start takes a second."""

    is_silent = False

    def __init__(self, order: WorkOrder) -> None:
        self.order = order

    def messages(self, *_: object) -> Iterator[Message]:
        sent: list[Message] = []
        TargetWorker(self.order, sent.append).work()
        yield from sent


@pytest.fixture(autouse=True)
def _in_the_directory_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk in this process."""
    monkeypatch.setattr(
        import_module("kvsm.cli.conform"), "_worker", lambda order: nullcontext(WorkerHere(order))
    )


def conform(*arguments: str, seconds: float = 0.3, reduce_seconds: float = 10) -> Result:
    limits = ("--seed", "1", "--seconds", str(seconds), "--reduce-seconds", str(reduce_seconds))
    return CliRunner().invoke(main, ["conform", *arguments, *limits])


def told(*arguments: str, seconds: float = 0.3) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(conform(*arguments, "--json", seconds=seconds).stdout)
    return answer


def verdicts(answer: dict[str, Any]) -> dict[str, str]:
    return {one["property_id"]: one["verdict"] for one in answer["properties"]}


@pytest.mark.usefixtures("_here")
def test_a_property_held_only_if_a_case_arose() -> None:
    """Both shelves break nothing; only on the first one something is checked."""
    first, second = told("conformed:Shelf"), told("conformed:LendsOnly")
    assert verdicts(first)["S1"] == "held"
    (held,) = [one for one in first["properties"] if one["verdict"] == "held"]
    assert held["cases"][0]["case"] == "books that were returned"
    assert held["cases"][0]["times"] > 10
    assert verdicts(second)["S1"] == "not exercised"
    assert first["runs"] > 1
    assert first["operations"] > 100
    page = conform("conformed:LendsOnly").stdout
    assert "## Held\n\nNone.\n" in page
    assert "No case arose that could have broken conservation (S1), " in page
    assert page.count("conservation (S1)") == 1


@pytest.mark.usefixtures("_here")
def test_a_case_that_arose_zero_times_is_no_case() -> None:
    assert verdicts(told("conformed:CountsNothing"))["S1"] == "not exercised"


@pytest.mark.usefixtures("_here")
def test_the_walk_goes_on_after_a_failure_and_tells_each_defect_once() -> None:
    answer = told("conformed:TwoFaults", seconds=1)
    defects = {one["property_id"]: one for one in answer["defects"]}
    assert len(answer["defects"]) == len(defects) == 2
    assert {*defects} == {"S1", "S4"}
    assert all(one["times"] > 1 for one in answer["defects"])
    assert all("2 steps, reduced from" in one["reduced"] for one in answer["defects"])
    assert verdicts(answer)["S1"] == verdicts(answer)["S4"] == "broken"


@pytest.mark.usefixtures("_here")
def test_the_exit_code_and_the_page_say_what_is_broken(tmp_path: Path) -> None:
    page, log = tmp_path / "page.md", tmp_path / "log"
    result = conform("conformed:TwoFaults", "-o", str(page), "--log", str(log))
    assert result.exit_code == ExitCode.BROKEN
    assert page.read_text() == result.stdout
    assert "### 1. " in result.stdout
    assert "  2. return" in result.stdout
    assert list(log.glob("1/test_*.py"))


def test_an_end_of_the_process_by_a_signal_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk continues in another process, which also ends."""
    monkeypatch.setattr(import_module("kvsm.cli.conform"), "_MOST_CRASHES", 2)
    result = conform("conformed:EndsTheProcess")
    assert result.exit_code == ExitCode.BROKEN
    assert "the process ended with signal SIGSEGV in run 0" in " ".join(result.stdout.split())
    assert "interrupted" in result.stdout


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("sleep 30 & kill -9 $$", "the process ended with signal SIGKILL"),
        ("sleep 30 & kill -40 $$", "the process ended with signal 40"),
        ("sleep 30 & exit 3", "the process ended with exit code 3"),
    ],
)
def test_processes_that_a_target_has_started_neither_hide_its_end_nor_outlive_it(
    script: str, how: str
) -> None:
    """They hold the pipe open: their end is seen there."""
    here, there = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(["sh", "-c", script], pass_fds=[there], start_new_session=True)
        os.close(there)
        worker = import_module("kvsm.cli.conform")._Worker(process, here, errors)
        assert not [*worker.messages(20, SimpleNamespace(is_made=lambda: False))]
        assert not worker.is_silent
        assert worker.how_it_ended() == how
    assert select.select([here], [], [], 10)[0]
    assert os.read(here, 1) == b""
    os.close(here)


class Time:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_silent_only_if_no_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may take any time: what counts is the time since the last step."""
    module, clock = import_module("kvsm.cli.conform"), Time()
    monkeypatch.setattr(module, "monotonic", clock)
    here, there = os.pipe()
    with tempfile.TemporaryFile() as errors, subprocess.Popen(["sleep", "60"], start_new_session=True) as one:
        worker = module._Worker(one, here, errors)
        messages = worker.messages(240, SimpleNamespace(is_made=lambda: False))
        os.write(there, msgspec.json.encode(RunBegan(0)) + b"\n")
        assert next(messages) == RunBegan(0)
        for _ in range(10):
            clock.now += 239
            os.write(there, msgspec.json.encode(StepsMade()) + b"\n")
            assert next(messages) == StepsMade()
        assert not worker.is_silent
        clock.now += 241
        assert next(messages, None) is None
        assert worker.is_silent
        assert worker.how_it_ended() == "the process made no step for 240 s"
        worker.end()
    os.close(here)
    os.close(there)


@pytest.mark.parametrize("target", ["conformed:LendsOnly", "conformed:OnlyLooks", "conformed:TwoFaults"])
def test_each_step_of_a_run_and_of_a_reduction_is_a_sign_of_life(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a world and of a machine, whether or not a case is counted."""
    monkeypatch.setattr("kvsm.cli.conform_worker.BEAT_S", 0.0)
    sent: list[Message] = []
    order = WorkOrder(target=target, config={}, seed=1, seconds=0, reduce_seconds=5)
    with watching_steps(Heartbeat(sent.append).step):
        TargetWorker(order, sent.append).work()
    ended = next(place for place, message in enumerate(sent) if isinstance(message, RunEnded))
    run, reduction = sent[:ended], sent[ended:]
    assert run.count(StepsMade()) >= sent[ended].operations > 0  # type: ignore[union-attr]
    assert (StepsMade() in reduction) is (target == "conformed:TwoFaults")


def test_a_step_without_a_case_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.cli.conform_worker.total_counted", lambda: cases)
    heartbeat, cases = Heartbeat(lambda _: None), 0
    watch = HangWatch(heartbeat)
    watch.look()
    watch.look()  # A target is imported.
    cases = 1
    watch.look()
    heartbeat.step()
    watch.look()
    with pytest.raises(PropertyBroken, match=r"progress \(S9\): a call has not returned after"):
        watch.look()


@pytest.mark.parametrize(("machine", "says"), [("Exits", r"os.\_exit(7)"), ("ExitsNicely", "SystemExit: 3")])
@pytest.mark.slow
def test_a_call_that_ends_the_process_is_reduced_like_any_failure(machine: str, says: str) -> None:
    result = conform(f"conformed:{machine}")
    assert result.exit_code == ExitCode.BROKEN
    assert says in result.stdout
    assert "4 steps, reduced from" in result.stdout
    assert "state.poll()" in result.stdout or "state.drain()" in result.stdout


@pytest.mark.slow
def test_a_call_that_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSM_CONFORM_STALL_S", "1")
    result = conform("conformed:Hangs", reduce_seconds=3)
    assert result.exit_code == ExitCode.BROKEN
    assert "progress (S9)" in result.stdout
    assert "a call has not returned after 1 to 2 s" in " ".join(result.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in BUILT_IN if BUILT_IN[name].machines[:1] and "kvsm:" in name]
)
def test_kvsm_conforms(name: str) -> None:
    if "vllm" in BUILT_IN[name].machines[0]:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    result = conform(name)
    assert result.exit_code == ExitCode.GOOD, result.output
    assert " 0 broken" in result.stdout


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing", "there is no target 'nothing'; see kvsm conform --list"),
        ("conformed:Nothing", "conformed.py has no Nothing"),
        ("no_such_module:Machine", "there is no module no_such_module"),
        ("conformed:HERE", "has no HERE"),
        ("conformed:NeedsArguments", "give the parameters of __init__ default values, or name a subclass"),
        ("conformed:HasNoRules", "cannot be made: HasNoRules() raised InvalidDefinition"),
    ],
)
def test_a_target_that_cannot_be_walked_is_refused(target: str, says: str) -> None:
    """Wrong use is no broken property of the target."""
    result = conform(target)
    assert result.exit_code == ExitCode.UNUSABLE
    assert says in result.stderr


def test_the_list_names_each_target_and_needs_none() -> None:
    result = CliRunner().invoke(main, ["conform", "--list"])
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == [*BUILT_IN]


def test_two_messages_have_one_shape_if_only_names_and_numbers_differ() -> None:
    first = shape_of("S1", "at rest 4 new keys are offered for 4 blocks, and [new3-0] can be stored", "")
    assert first == shape_of(
        "S1", "at rest 7 new keys are offered for 7 blocks, and [] can be stored\nand", ""
    )
    assert first != shape_of(
        "S4", "at rest 4 new keys are offered for 4 blocks, and [new3-0] can be stored", ""
    )
    assert shape_of("S8", "a raised KeyError: 3", "a.py:3") == shape_of(
        "S8", "b raised ValueError: 4", "a.py:3"
    )
    assert shape_of("S8", "a raised KeyError: 3", "a.py:3") != shape_of(
        "S8", "a raised KeyError: 3", "a.py:4"
    )


@pytest.mark.usefixtures("_here")
def test_each_property_is_told_once() -> None:
    answer = told("conformed:Shelf", seconds=0)
    assert [one["property_id"] for one in answer["properties"]] == [one.id for one in Property]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-o", "nowhere/page.md"), "No such file or directory; name a file that can be written"),
        (("--log", "full"), "full: not empty; name a new directory, or an empty one"),
        (("--log", "full/file/log"), "Not a directory; name a directory that can be written"),
        (("--seconds", "inf"), "inf is not a number of seconds"),
        (("--reduce-seconds", "nan"), "nan is not a number of seconds"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_walk(
    options: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, the result would be lost."""
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    result = CliRunner().invoke(main, ["conform", "conformed:Shelf", *options])
    assert result.exit_code == ExitCode.UNUSABLE
    assert says in " ".join(result.stderr.split())
    assert "walks" not in result.stderr


@pytest.mark.usefixtures("_here")
def test_a_later_worker_saves_beside_what_an_earlier_one_has_saved(tmp_path: Path) -> None:
    order = WorkOrder(
        target="conformed:TwoFaults", config={}, seed=1, seconds=1, reduce_seconds=5, directory=str(tmp_path)
    )
    for _ in range(2):
        sent: list[Message] = []
        TargetWorker(order, sent.append).work()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4"]
