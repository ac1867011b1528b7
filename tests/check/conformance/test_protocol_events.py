"""A way through the protocol told as events: the real ledger takes it, and follows the protocol."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conformance import first_mismatch

from kvsm.check.conformance.offload_books import KEEPERS
from kvsm.check.conformance.offload_events import TOLD, events_of_path
from kvsm.check.conformance.shadow import TRACKED
from kvsm.check.explore.counterexample import save_log
from kvsm.check.protocol.offload_protocol import Variant, offload_protocol
from kvsm.check.protocol.plain import Move, ProtocolModel
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.cli import main
from kvsm.core.ledger import Ledger
from kvsm.events import LogOpened
from kvsm.states import BLOCK, BlockState, BlockTrigger

SCOPE = ProtocolScope(matches=2, crashes=True)


@cache
def protocol() -> ProtocolModel:
    return ProtocolModel(offload_protocol(SCOPE))


RARE = ("reset", "lose", "cancel", "report_bad", "end_bad", "attend", "release", "evict")
"""These end what is interesting. So do the writes of strays."""
SOMETIMES = ("submit", "write_log", "free", "plan_load")
"""These come at once wherever they can, and a plan would not get a second block."""


def random_path(seed: int, length: int = 120) -> list[Move]:
    """A path without a crash, on which most copies come to their end.

    A core plans in one step. So no plan gets one more block after a bad load, which may void those it has.
    """
    model, chosen = protocol(), random.Random(seed)
    (state,) = model.initial()
    instances: dict[str, list[Move]] = {}
    for one in model.layout.instances:
        instances.setdefault(one.action.name, []).append(one.move)
    del instances["crash"]
    rare = {name for name in instances if name in RARE or name.startswith("stray")}
    weights = {name: 1 if name in rare else 6 if name in SOMETIMES else 60 for name in instances}
    path: list[Move] = []
    growing: set[object] = set()
    while len(path) < length:
        (name,) = chosen.choices(list(weights), list(weights.values()))
        moves = chosen.sample(instances[name], len(instances[name]))
        if name == "load_more":
            moves = [move for move in moves if move[1] in growing]
        step = next(((move, after) for move in moves if (after := model.next(state, move))), None)
        if step is not None:
            path.append(step[0])
            state = step[1]
            if name == "plan_load":
                growing.add(step[0][1])
            elif name in ("end_bad", "lose"):
                growing.clear()
    return path


def test_each_action_is_told_or_known_to_be_unheard() -> None:
    names = {action.name for action in protocol().declared.acting}
    assert set(TOLD) == names - {"crash"}


def parsed(word: str) -> tuple[int, tuple[int, ...]]:
    """`LOADING(copies=1, pins=0)`: the state and its counters."""
    name, counts = word.rstrip(")").split("(")
    return int(BlockState[name]), tuple([int(one.split("=")[1]) for one in counts.split(", ")])


@pytest.mark.parametrize("seed", [4, 5])
def test_a_crash_of_a_whole_log_leaves_what_can_be_read_and_nothing_else(seed: int) -> None:
    """`OffloadBooks.restart` is `write_log` and then `crash`, for all that a ledger knows."""
    model, met = protocol(), set()
    (state,) = model.initial()
    for move in random_path(seed):
        after = model.next(state, move)
        assert after is not None
        state = after
        before, expected = model.describe(state), {}
        for cell, word in before.items():
            if cell.startswith("block of ") and word.startswith(("STORED", "LOADING")):
                key = cell.replace("block", "slot key", 1)
                expected |= {cell: "STORED(copies=0, pins=0)", key: before[key]}
            if cell.startswith("block of "):
                state_then, counts = BLOCK.step(*parsed(word), BlockTrigger.RESTART)
                assert (state_then == BlockState.STORED, counts) == (cell in expected, (0, 0))
            met.add((cell.split(" of ")[0], word.split("(")[0]))
        written = model.next(state, ("write_log",)) or state
        left = model.next(written, ("crash",))
        assert left is not None
        known = {
            cell: value
            for cell, value in model.describe(left).items()
            if KEEPERS[cell.split(" of ")[0].replace(" ", "_")] in TRACKED
        }
        assert known == expected
    assert {("block", "STORED"), ("block", "LOADING"), ("block", "STORING")} <= met


@pytest.mark.parametrize("examples", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_the_ledger_can_do_what_the_protocol_may(examples: int) -> None:
    """Random ways through the protocol are ways of the real ledger."""

    @given(seed=st.integers(0, 1_000_000))
    @settings(max_examples=examples)
    def check(seed: int) -> None:
        follow_with_the_ledger(seed)

    check()


def test_a_plan_is_told_before_what_happens_to_its_blocks() -> None:
    """Two loads of one slot are planned. The first one fails and voids the slot before the second leaves."""
    stored = [("compute", 0, 0), ("plan_store", 0, 0, 0, 0), ("submit", 0), ("run", 0, 0)]
    stored += [("start", 0, 0, 0, 0), ("read_device", 0, 0, 0, 0), ("write_slot", 0, 0, 0, 0)]
    stored += [("end_good", 0, 0), ("free", 0), ("match", 0, 0), ("match", 0, 1)]
    loads = [("plan_load", 0, 0, 0, 0, 0), ("plan_load", 1, 1, 1, 0, 1), ("submit", 0)]
    events = events_of_path(protocol(), [*stored, *loads, ("end_bad", 0, 0), ("submit", 1)])
    told = [type(event).__name__ for event in events[-5:]]
    assert told == [
        "LoadPlanned",
        "LoadPlanned",
        "TransfersSubmitted",
        "WorkerReported",
        "TransfersSubmitted",
    ]
    assert first_mismatch(events[0].config, events) is None


def follow_with_the_ledger(seed: int) -> None:
    """The real ledger folds the events of a random way through the protocol, and ends in the same state."""
    path = random_path(seed)
    events = events_of_path(protocol(), path)
    opened = events[0]
    assert isinstance(opened, LogOpened)
    assert first_mismatch(opened.config, events) is None
    ledger = Ledger(opened.config)
    for event in events:
        ledger.apply(event)
    (state,) = protocol().initial()
    for move in path:
        after = protocol().next(state, move)
        assert after is not None
        state = after
    layout, block = protocol().layout, protocol().declared.variable("block")
    for slot in range(SCOPE.slots):
        label = block.domain.label(state[layout.place(block, (slot,))])
        own = BlockState(ledger.blocks.words[slot] & 7).name
        # The protocol forgets that a free slot was used.
        assert label.partition("(")[0] in (own, "FREE" if own == "EVICTED" else own)


def test_refutation_has_a_log(tmp_path: Path) -> None:
    """`kvsm show` tells the life of a slot on the way to a broken property."""
    broken = ProtocolModel(offload_protocol(ProtocolScope(), Variant.RESET_FREES))
    path: list[Move] = [("compute", 0, 0), ("plan_store", 0, 0, 0, 0), ("submit", 0), ("reset",)]
    save_log(events_of_path(broken, path), tmp_path / "log")
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "log"), "--block", "0"])
    assert shown.exit_code == 0, shown.output
    assert "allocated for key" in shown.output
    assert "reset: epoch 1 begins  [STORING(copies=1, pins=0)" in shown.output


def test_path_that_is_not_possible_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes \('submit', 0\), which is not possible there"):
        events_of_path(
            protocol(), [("compute", 0, 0), ("plan_store", 0, 0, 0, 0), ("cancel", 0), ("submit", 0)]
        )
