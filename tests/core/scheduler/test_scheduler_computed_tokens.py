"""An engine that counts tokens as computed before their step was decided is told at once.

Order of copies (S12): without the check its blocks would be stored before they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scheduler_traffic import ACTS, FULL, SLIDING, Hand, drive, finish_one

from examples import examples
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.cli import main
from kvsm.core.ledger.snapshot import digest
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import CheckedScheduler, KVCacheGroup, OffloadScheduler, StepOutput
from kvsm.errors import PropertyBroken, WrongArgument


def count_too_early(engine: SmallEngine, *, says_tokens: bool = True) -> None:
    """The engine counts a step's tokens before it calls `build_connector_meta`."""
    build, advance = engine.scheduler.build_connector_meta, engine._advance

    def early(output: StepOutput) -> TransferPlan:
        assert output.num_scheduled_tokens is not None
        advance(output.num_scheduled_tokens)
        return build(output if says_tokens else structs.replace(output, num_scheduled_tokens=None))

    def nothing(_: Mapping[str, int]) -> None:
        """It has counted them."""

    engine.scheduler.build_connector_meta = early  # type: ignore[method-assign]
    engine._advance = nothing  # type: ignore[method-assign]


@pytest.mark.parametrize("says_tokens", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_engine_that_counts_too_early_is_told_in_the_first_step(
    says_tokens: bool, asynchronous: bool
) -> None:
    """The message names the request, its tokens, and what to do."""
    engine = SmallEngine(asynchronous=asynchronous)
    count_too_early(engine, says_tokens=says_tokens)
    engine.arrive(SmallRequest("r", range(9), 4))
    with pytest.raises(PropertyBroken) as caught:
        engine.step()
    assert str(caught.value) == (
        "order of copies (S12): request r counts 8 tokens as computed, and at most 0 can be: add a step's "
        "tokens to num_computed_tokens after build_connector_meta, not before"
    )


def test_without_the_check_the_mistake_stores_blocks_that_no_step_has_computed() -> None:
    """The step still runs when the copy reads its block, and what is stored holds nothing."""
    engine = SmallEngine(asynchronous=True)
    engine.scheduler = OffloadScheduler(engine.core, engine.config)
    count_too_early(engine)
    engine.arrive(SmallRequest("r", range(9), 4))
    (store,) = engine.step().stores
    engine.carry_out(store.transfer)
    assert engine.host[0][0] == []


@pytest.mark.parametrize("says_tokens", [True, False])
def test_mistake_after_a_load_is_told(says_tokens: bool) -> None:
    """The engine counts too early when it computes the rest of a prompt that was loaded."""
    engine = SmallEngine(prefix_cache=False)
    finish_one(engine, "before", [*range(9)])
    engine.arrive(SmallRequest("r", range(13), 4))
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    count_too_early(engine, says_tokens=says_tokens)
    with pytest.raises(PropertyBroken, match="request r counts 12 tokens as computed, and at most 8"):
        engine.step()


def test_refused_call_changes_nothing() -> None:
    """The engine may mend its count and call again."""
    hand, request = Hand(kind=CheckedScheduler), SmallRequest("r", range(9), 4)
    hand.admit(request, [0, 1, 2])
    before = digest(hand.core.ledger)
    request.num_computed_tokens = 9
    with pytest.raises(PropertyBroken, match="request r counts 9"):
        hand.step(request, num_scheduled_tokens={"r": 9})
    assert digest(hand.core.ledger) == before
    request.num_computed_tokens = 0
    hand.step(request, num_scheduled_tokens={"r": 9})
    request.num_computed_tokens = 9
    assert hand.step(request, num_scheduled_tokens={"r": 1}).stores


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["r"], r"output.num_scheduled_tokens is .*; it must be a mapping"),
        ({"r": "4"}, r"output.num_scheduled_tokens\['r'\]"),
        ({"r": -1}, r"output.num_scheduled_tokens\['r'\] is -1; it must be 0 or more"),
    ],
)
def test_tokens_of_a_wrong_type_are_refused_by_name(tokens: Any, said: str) -> None:
    hand, request = Hand(kind=CheckedScheduler), SmallRequest("r", range(9), 4)
    hand.admit(request, [0, 1, 2])
    with pytest.raises(WrongArgument, match=said):
        hand.step(request, num_scheduled_tokens=tokens)


def test_mistake_in_a_later_step_is_told() -> None:
    """Only the second part of the prompt is counted too early."""
    hand, request = Hand(kind=CheckedScheduler), SmallRequest("r", range(16), 4)
    hand.admit(request, [0, 1, 2, 3])
    hand.step(request, num_scheduled_tokens={"r": 4})
    request.num_computed_tokens = 12
    with pytest.raises(PropertyBroken, match="request r counts 12 tokens as computed, and at most 4"):
        hand.step(request, num_scheduled_tokens={"r": 8})


def test_request_whose_tokens_are_not_said_is_checked_in_its_first_step_only() -> None:
    """An engine may name a request in `scheduled` alone. What it computes is unknown from then on."""
    hand, request = Hand(kind=CheckedScheduler), SmallRequest("r", range(16), 4)
    hand.admit(request, [0, 1, 2, 3])
    hand.step(request, num_scheduled_tokens={})
    request.num_computed_tokens = 12
    hand.step(request, num_scheduled_tokens={"r": 4})


@given(
    ACTS,
    st.sampled_from([(FULL,), (FULL, SLIDING)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.sampled_from([3, 64]),
    st.sampled_from([0, 3]),
)
@settings(max_examples=examples(25))
def test_engine_that_counts_in_time_is_never_told(
    acts: list[int],
    groups: tuple[KVCacheGroup, ...],
    references: bool,
    asynchronous: bool,
    drafts: int,
    chunk_tokens: int,
    transfer_ticks: int,
) -> None:
    """Under any traffic: failed and lost loads, preemptions, drafts that are rejected, steps under way."""
    engine = SmallEngine(
        groups,
        device_blocks=44,
        host_blocks=16,
        references=references,
        asynchronous=asynchronous,
        drafts=drafts,
        chunk_tokens=chunk_tokens,
        core={"transfer_ticks": transfer_ticks},
    )
    assert type(engine.scheduler) is CheckedScheduler
    drive(engine, acts)


def test_a_run_checks_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvsm run` and `kvsm fuzz` drive their engines with the check."""
    real = CheckedScheduler.build_connector_meta

    def early(self: CheckedScheduler, output: StepOutput) -> TransferPlan:
        for name, tokens in (output.num_scheduled_tokens or {}).items():
            self.state.tracked[name].request.num_computed_tokens += tokens  # type: ignore[misc]
        return real(self, output)

    monkeypatch.setattr(CheckedScheduler, "build_connector_meta", early)
    result = CliRunner().invoke(main, ["run", "--requests", "2", "--log", str(tmp_path / "log")])
    assert result.exit_code != 0
    assert "after build_connector_meta, not before" in result.output + str(result.exception)
