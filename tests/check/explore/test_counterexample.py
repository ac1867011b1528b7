"""Counterexamples: their story, word for word, and the log that the real core writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from toy_models import ABORTED, COMMITTED, Graph, TwoPhaseCommit, always, eventually

from kvsm.check.explore.counterexample import Counterexample, render, retell, save_log
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Verdict
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.world import Action
from kvsm.cli import main
from kvsm.core.log import LogReader, MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent, WorkerReported
from kvsm.properties import Property


def told(model: Graph | TwoPhaseCommit) -> Counterexample:
    found = explore(model)
    assert found.refutation is not None
    return retell(model, found.refutation)


def test_a_story_tells_only_what_each_step_changed() -> None:
    model = TwoPhaseCommit(2, hasty=True)
    model.requirements = (always(lambda state: state[0] != (ABORTED, COMMITTED), "consistent"),)
    assert (
        render(told(model))
        == """\
commit: consistent is broken, in 5 steps
within 2 resource managers
  1. leave 0
     manager 0: working -> aborted
  2. prepare 1
     manager 1: working -> prepared
  3. hear 1
  4. commit
     the decision: nothing -> commit
  5. obey 1
     manager 1: prepared -> committed
broken: consistent: does not hold: it holds
because: step 5 (obey 1) led there"""
    )


def test_because_names_the_last_step_that_changed_a_thing_in_the_finding() -> None:
    def check(state: int) -> bool:
        if state == 3:
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, "block 10 is wrong, block 1 is not")
        return True

    class Blocks(Graph):
        def describe(self, state: int) -> dict[str, str]:
            return {"block 10": "old" if state == 0 else "new", "block 11": str(state), "lock 10": str(state)}

    found = told(Blocks({0: {"a": 1}, 1: {"b": 2}, 2: {"c": 3}}, [always(check)]))
    assert found.because == "step 1 (a) was the last to change block 10: old -> new"


def test_a_step_that_raises_is_told_with_its_changes() -> None:
    class Falling(Graph):
        """A live state that `next` changes."""

        def next(self, state: list[int], action: str) -> list[int]:
            state.append(1)
            if action == "fall":
                raise PropertyBroken(Property.CONSERVATION, "it fell")
            return state

        def actions(self, state: list[int]) -> list[str]:
            return ["fall"] if len(state) == 2 else ["go"]

        def fingerprint(self, state: list[int]) -> int:
            return len(state)

        def save(self, state: list[int]) -> tuple[int, ...]:
            return tuple(state)

        def load(self, saved: tuple[int, ...]) -> list[int]:
            return list(saved)

        def describe(self, state: list[int]) -> dict[str, str]:
            return {"length": str(len(state))}

        def initial(self) -> list[list[int]]:
            return [[0]]

    found = told(Falling({}))
    assert [str(step.changes[0]) for step in found.steps] == ["length: 1 -> 2", "length: 2 -> 3"]


def test_a_cycle_is_told_with_its_first_step() -> None:
    """Progress (S9)."""
    found = told(
        Graph({0: {"go": 1}, 1: {"down": 2}, 2: {"down": 1}}, [eventually(lambda state: state == 0)])
    )
    assert found.circle == 2
    assert render(found).splitlines()[-3] == "and again from step 2 on, endlessly"


def test_a_broken_initial_state_has_no_steps() -> None:
    assert render(told(Graph({0: {}}, [always(lambda _state: False)]))).splitlines() == [
        "toy: conservation (S1) is broken, in 0 steps",
        "within all of it",
        "broken: conservation (S1): does not hold: it holds",
        "because: the initial state is wrong",
    ]


# The real core.


class OneStore:
    """A `World`: an offloader stores a block and gets its report twice; it must refuse the second one.

    pulls: further actions; after "break" the world says that something is wrong.
    """

    def __init__(self, *pulls: str) -> None:
        self.events = MemoryLog()
        config = OffloadConfig(host_blocks=1, device_blocks=1)
        self.core = Offloader(config, self.events, clock_ns=lambda: 7)
        self.left = ["store", "submit", "report", "report", *pulls]

    def actions(self) -> list[Action]:
        return [(name,) for name in self.left[:1]]

    def draw(self, _random: Random) -> Action:
        return (self.left[0],)

    def do(self, action: Action) -> bool:
        assert self.left.pop(0) == action[0]
        match action[0]:
            case "store":
                self.transfer = self.core.prepare_store("r", [b"key"], [0]).job.transfer
            case "submit":
                self.core.submit([self.transfer])
            case "report":
                self.core.report(self.transfer, 0, good=True)
            case "break":
                raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, "slot 0 is readable too early")
        return True

    def check(self) -> None: ...

    def wind_down(self) -> Action | None:
        return (self.left[0],) if self.left else None

    def describe(self) -> dict[str, str]:
        return describe_ledger(self.core.ledger)

    def fingerprint(self) -> bytes:
        return bytes(len(self.left))


def model_of(*pulls: str) -> RerunModel[OneStore]:
    return RerunModel("core", "1 block", lambda: OneStore(*pulls))


def test_the_real_core_is_described_by_its_ledger() -> None:
    model = model_of("break")
    found = explore(model)
    assert (found.verdict, found.states) == (Verdict.REFUTED, 5)
    assert found.refutation is not None
    lines = render(retell(model, found.refutation)).splitlines()
    assert lines[2:] == [
        "  1. store",
        "     slot 0: nothing -> ALLOCATED(copies=0, pins=0)",
        "     key of slot 0: nothing -> 6b6579",
        "     device block 0: nothing -> READING(readers=1)",
        "     store 2 copies: nothing -> device block 0 and slot 0",
        "     transfer 2: nothing -> PLANNED(pending=1, failed=0)",
        "  2. submit",
        "     slot 0: ALLOCATED(copies=0, pins=0) -> STORING(copies=1, pins=0)",
        "     transfer 2: PLANNED(pending=1, failed=0) -> SUBMITTED(pending=1, failed=0)",
        "  3. report",
        "     slot 0: STORING(copies=1, pins=0) -> STORED(copies=0, pins=0)",
        "     device block 0: READING(readers=1) -> gone",
        "     store 2 copies: device block 0 and slot 0 -> gone",
        "     transfer 2: SUBMITTED(pending=1, failed=0) -> gone",
        "  4. report",
        "  5. break",
        "broken: publish after commit (S2): slot 0 is readable too early",
        "because: step 3 (report) was the last to change slot 0: STORING(copies=1, pins=0) -> "
        "STORED(copies=0, pins=0)",
    ]


def test_the_log_of_a_counterexample_is_read_by_every_command(tmp_path: Path) -> None:
    """Events are state (S10), determinism (S11)."""
    model, path = model_of("break"), (("store",), ("submit",), ("report",), ("report",), ("break",))
    for name in ("log", "again"):
        save_log(model.events(path), tmp_path / name)
    assert [one.read_bytes() for one in (tmp_path / "log").iterdir()] == [
        one.read_bytes() for one in (tmp_path / "again").iterdir()
    ]
    for command in (["verify"], ["replay"], ["show", "--block", "0"]):
        result = CliRunner().invoke(main, [command[0], str(tmp_path / "log"), *command[1:]])
        assert result.exit_code == 0, result.output
    assert "stored" in result.output


def test_a_log_that_ends_in_a_broken_state_is_still_read(tmp_path: Path) -> None:
    """An event that the fold refuses is written nevertheless, and the log shows it."""
    events: Sequence[OffloadingEvent] = model_of().events((("store",), ("submit",)))
    log, wrong = tmp_path / "log", WorkerReported(len(events) + 1, 0, 7, 99, 0, True)
    save_log([*events, wrong], log)
    assert [event for batch in LogReader(log).batches() for event in batch][-1] == wrong
    verified = CliRunner().invoke(main, ["verify", str(log)])
    assert verified.exit_code == 1
    assert f"first broken by event {wrong.seq}" in verified.output
    assert "STORING" in CliRunner().invoke(main, ["show", str(log), "--block", "0"]).output


def test_a_model_without_a_core_has_no_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no log: these are not the events of a core from its start"):
        save_log([], tmp_path / "log")
    assert not (tmp_path / "log").exists()
