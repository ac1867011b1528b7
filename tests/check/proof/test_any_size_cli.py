"""`kvsm check --any-size`: verdicts, exit codes, what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lamps import Lamps, lamps, without_invariants

from kvsm.check.proof import any_size_proof as proof
from kvsm.check.proof.any_size_proof import ProofProgress, conditions_of
from kvsm.check.proof.conditions import Condition
from kvsm.check.proof.solvers import SOLVERS, Answer
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.plain import Move
from kvsm.check.protocol.scope import EXAMPLE_SCOPES
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Claim,
    Declaration,
    ForAll,
    Param,
    all_of,
    implies,
)
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.models import MODELS
from kvsm.cli import main
from kvsm.cli.any_size import progress_line
from kvsm.events import OffloadingEvent
from kvsm.properties import Property

pytest.importorskip("z3")


def careless(declared: Declaration) -> Declaration:
    """A lamp is lit whatever the others are."""
    return replace(declared, actions=(replace(declared.actions[0], guard=TRUE), *declared.actions[1:]))


@pytest.fixture(autouse=True)
def _lamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "lamps", Lamps())


def check(monkeypatch: pytest.MonkeyPatch, made: Sequence[Declaration], *options: str) -> Result:
    monkeypatch.setattr(Lamps, "made", made)
    given = ["check", "lamps", "--any-size", "--jobs", "1", "--solver", "z3", *options]
    return CliRunner().invoke(main, given)


def test_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = check(monkeypatch, [lamps(1)])
    assert answer.exit_code == 0
    assert "lamps, for any number of lamps" in answer.output
    assert "verdict     PROVED" in answer.output
    assert "conservation (S1), progress (S9)" in answer.output


def test_missing_invariant_is_undetermined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the example cannot be reached. What excludes it is proposed."""
    answer = check(monkeypatch, [without_invariants(lamps(size)) for size in (1, 2)])
    assert answer.exit_code == 3
    assert "open: flash may not keep 'conservation (S1)', with lamps (z3: fails)" in answer.output
    armed = re.search(r"the step flash (\d) breaks it", answer.output)
    assert armed is not None
    assert f"on of lamp {1 - int(armed[1])}: yes" in answer.output
    assert "an invariant is missing that excludes it" in answer.output
    assert f"    armed of lamp {armed[1]} is yes\n" in answer.output


def test_mistake_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explorer tells the way to the broken state, as it tells every counterexample."""
    answer = check(monkeypatch, [careless(lamps(size)) for size in (1, 2)])
    assert answer.exit_code == 1
    assert "verdict     REFUTED" in answer.output
    assert "lamps: conservation (S1) is broken, in 2 steps" in answer.output
    assert "1. light 0" in answer.output


def test_answer_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = check(monkeypatch, [careless(lamps(size)) for size in (1, 2)], "--json")
    told = json.loads(answer.output)
    assert told["schema"] == "kvsm.any-size/1"
    assert told["verdict"] == "REFUTED"
    (opened,) = told["open"]
    assert (opened["step"], opened["claim"], opened["answers"]) == (
        "light",
        "conservation (S1)",
        {"z3": "fails"},
    )
    assert opened["example"]["reachable"] is True
    assert opened["example"]["path"] == ["light 0", "light 1"]


def stuck(declared: Declaration) -> Declaration:
    """No lamp is ever lit."""
    return replace(declared, actions=(replace(declared.actions[0], guard=FALSE), *declared.actions[1:]))


def test_a_step_whose_guard_is_false_is_not_proved_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its conditions holds, because there is no such step."""
    made = [stuck(lamps(size)) for size in (1, 2)]
    answer = check(monkeypatch, made)
    assert answer.exit_code == 3
    assert "UNDETERMINED" in answer.output
    assert "light is never taken: its guard holds in no state" in answer.output
    assert json.loads(check(monkeypatch, made, "--json").output)["never_taken"] == ["light"]


@pytest.mark.parametrize("place", ["always", "invariants"])
def test_a_claim_whose_condition_is_false_is_not_proved_in_silence(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whatever such a condition implies is proved vacuously."""

    def idle(declared: Declaration) -> Declaration:
        lamp = declared.index_sets[0]
        one, on = Param("one", lamp), declared.variable("on")
        asked = ForAll(one, all_of(implies(TRUE, TRUE), implies(on[one].equals(TRUE) & FALSE, FALSE)))
        claim = Claim(Property.CORRECT_BYTES if place == "always" else "idle", "Never asked.", asked)
        return replace(declared, **{place: (*getattr(declared, place), claim)})

    made = [idle(lamps(size)) for size in (1, 2)]
    answer = check(monkeypatch, made)
    assert answer.exit_code == 3
    assert "UNDETERMINED" in answer.output
    name = str(Property.CORRECT_BYTES) if place == "always" else "idle"
    assert f"condition 2 of {name!r} holds in no state" in answer.output
    assert json.loads(check(monkeypatch, made, "--json").output)["never_met"] == [f"condition 2 of {name!r}"]


def tired(_solver: str, _condition: Condition) -> tuple[Answer, float]:
    """A solver that finds nothing."""
    return Answer.OPEN, 0.0


def test_refutation_keeps_a_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake in the protocol ends in a log that `kvsm show` reads."""

    class Broken(DeclaredModel):
        name = "lamps"

        def versions(self) -> dict[str, tuple[Declaration, ...]]:
            broken = [offload_protocol(scope, Variant.RESET_FREES) for scope in EXAMPLE_SCOPES[:2]]
            return {"broken": tuple(broken)}

        def events_of(self, declared: Declaration, path: Sequence[Move]) -> Sequence[OffloadingEvent]:
            return MODELS["protocol"].events_of(declared, path)

    def broken_alone(declared: Declaration) -> list[Condition]:
        found = conditions_of(declared, None, "reset")
        return [next(one for one in found if one.claim == str(Property.NO_REUSE_IN_FLIGHT))]

    monkeypatch.setitem(MODELS, "lamps", Broken())
    monkeypatch.setattr(proof, "conditions_of", broken_alone)
    monkeypatch.setattr(proof, "_ask", tired)
    given = ["check", "lamps", "--any-size", "--jobs", "1", "--solver", "z3", "--log", str(tmp_path)]
    answer = CliRunner().invoke(main, given)
    assert answer.exit_code == 1, answer.output
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "lamps"), "--block", "0"])
    assert "reset: epoch 1 begins" in shown.output


def test_timeout_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that a solver leaves open makes the verdict undetermined, with an example or without."""

    monkeypatch.setattr(proof, "_ask", tired)
    answer = check(monkeypatch, [lamps(1)])
    assert answer.exit_code == 3
    assert "no example with few members was found" in answer.output


def test_interrupt_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_solver: str, _condition: Condition) -> tuple[Answer, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "_ask", interrupted)
    answer = check(monkeypatch, [lamps(1)])
    assert answer.exit_code == 130
    assert "stopped at an interrupt" in answer.output


def test_interrupt_before_the_first_question_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write the conditions of a large model down takes seconds."""

    def interrupted(_declared: Declaration) -> Iterator[Condition]:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "conditions_of", interrupted)
    answer = check(monkeypatch, [lamps(1)])
    assert answer.exit_code == 130
    assert "stopped at an interrupt" in answer.output


def test_no_thread_that_takes_the_interrupt_ends_the_start_of_a_process() -> None:
    """Other threads do not block the signal. Python interrupts the first thread for them, too."""
    entered = threading.Event()

    def take_it() -> None:
        entered.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    other = threading.Thread(target=take_it)
    other.start()
    started = []

    def start() -> None:
        with proof._interrupts_held():
            entered.set()
            other.join()
            started.append("a process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started == ["a process"]


SOLVERS_AND_TRACKER = 2 + 1


def processes_begun_by(process: int) -> int:
    parents = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents.append(int(stat.read_text().rpartition(")")[2].split()[1]))
    return parents.count(process)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_in_silence() -> None:
    """The signal goes to the solvers' processes, too, as from a terminal, while they still import."""
    command = [sys.executable, "-c", "from kvsm.cli import main; main()", "check", "protocol", "--any-size"]
    command += ["--jobs", "2", "--solver", "z3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        while processes_begun_by(running.pid) < SOLVERS_AND_TRACKER:
            assert running.poll() is None
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)
        told, complaint = running.communicate(timeout=60)
    assert running.returncode == 130, complaint
    assert "stopped at an interrupt" in told
    assert complaint == ""


def test_several_jobs_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        json.loads(check(monkeypatch, [lamps(1)], "--json", "--jobs", jobs).output) for jobs in ("1", "2")
    ]
    for one in told:
        del one["seconds"], one["cpu_seconds"]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["copies", "--any-size"], "--any-size proves protocol, requests, lamps, not 'copies'"),
        (["protocol", "--any-size", "--scope", "full"], "--scope is for an exploration"),
        (["protocol", "--any-size", "-b", "slots=3"], "--bound is for an exploration"),
        (["protocol", "--any-size", "--states", "9"], "--states is for an exploration"),
        (["protocol", "--any-size", "--no-symmetry"], "--no-symmetry is for an exploration"),
    ],
)
def test_unusable_input(given: list[str], complaint: str) -> None:
    answer = CliRunner().invoke(main, ["check", *given])
    assert answer.exit_code == 2
    assert complaint in answer.output


def test_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    solvers = import_module("kvsm.check.proof.solvers")
    monkeypatch.setitem(SOLVERS, "z3", replace(SOLVERS["z3"], package="no_such_package"))
    assert solvers.SOLVERS["z3"].package == "no_such_package"
    answer = CliRunner().invoke(main, ["check", "lamps", "--any-size", "--solver", "z3"])
    assert answer.exit_code == 2
    assert "z3 is not installed: pip install 'kvsm[proof]', or choose another --solver" in answer.output


def test_progress_is_one_line() -> None:
    line = progress_line("lamps", ProofProgress(1234, 5678, 2, 12.3))
    assert line == "lamps   1,234 of 5,678 answers   2 open   12 s"
