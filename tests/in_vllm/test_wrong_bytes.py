"""A wrong block in host memory of a real vLLM engine: tokens show it, and `verify_copies` detects it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from workloads import ROOMY, TIMEOUT_S, Row, make_rounds, make_trial

from kvsm.vllm.tiny_model import LLAMA
from kvsm.vllm.trial import TrialOutcome, connector_config, run_trial

ASKED, OTHERS = make_rounds()[0], make_rounds(seed=4)[0]
"""The prompts that are asked twice, and those that take all device blocks in between."""


@pytest.fixture(scope="module")
def right(engines: Any) -> list[list[int]]:
    return engines.reference(LLAMA).tokens[: len(ASKED)]


def with_a_wrong_block(verify_copies: bool) -> TrialOutcome:
    """The prompts are asked, evicted and asked again."""
    transfer = connector_config(cpu_bytes_to_use=ROOMY, verify_copies=verify_copies)
    transfer |= {"kv_connector": "CorruptingConnector", "kv_connector_module_path": "corrupting"}
    trial = make_trial(dict(LLAMA), Row(), kv_transfer=transfer, rounds=[ASKED, OTHERS, ASKED])
    return run_trial(trial, TIMEOUT_S)


def failed_loads(outcome: TrialOutcome) -> float:
    return sum(
        value
        for series, value in outcome.metrics.items()
        if series.startswith("vllm:kvsm_transfers_ended{direction=load") and "outcome=failed" in series
    )


def test_a_wrong_block_changes_tokens(right: list[list[int]]) -> None:
    """So equal tokens mean correct bytes: the model does not hide a wrong block. Only requests with this
    block change."""
    outcome = with_a_wrong_block(verify_copies=False)
    answers = outcome.tokens[-len(ASKED) :]
    wrong = [number for number, tokens in enumerate(answers) if tokens != right[number]]
    assert failed_loads(outcome) == 0
    assert wrong
    assert len({tuple(ASKED[number][:32]) for number in wrong}) == 1


def test_verified_copies_keep_tokens_right(right: list[list[int]]) -> None:
    """The load of the wrong block fails, and the request is recomputed."""
    outcome = with_a_wrong_block(True)
    assert failed_loads(outcome) >= 1
    assert outcome.tokens[: len(ASKED)] == right
    assert outcome.tokens[-len(ASKED) :] == right
