"""`KvsmConnector` in a real vLLM engine: tokens are the same as without offload, and hits happen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from workloads import PAIRWISE, ROOMY, ROWS, Row, make_rounds, pairs_missed, reusable_tokens

from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA
from kvsm.vllm.trial import TrialOutcome

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
each_roomy_row = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.host_bytes == ROOMY], ids=lambda row: row.name
)


def preemptions(outcome: TrialOutcome) -> float:
    return outcome.metric("vllm:num_preemptions")


def test_the_rows_meet_pairwise() -> None:
    """Every two values of two settings meet in one engine, so no two of them conflict."""
    assert pairs_missed(PAIRWISE) == {("store", "blocks_per_chunk", "lazy", 2)}


@each_row
def test_tokens_are_those_without_offload(engines: Any, row: Row) -> None:
    reference = engines.reference(LLAMA, row.ranks)
    assert engines.served(LLAMA, row).outcome.tokens == reference.tokens


def test_requests_were_preempted(engines: Any) -> None:
    """The tokens are right with preemptions. A store gives its blocks back soon, which avoids some of them.

    How many preemptions one engine has depends on when its copies end.
    """
    assert sum(preemptions(engines.served(LLAMA, row).outcome) for row in ROWS) > 2 * len(ROWS)


def test_the_device_alone_finds_little(engines: Any) -> None:
    """The reference preempts, and finds few prefixes again."""
    reference = engines.reference(LLAMA)
    assert preemptions(reference) > 0
    assert sum(reference.cached_tokens) < reusable_tokens(make_rounds(), BLOCK_TOKENS) / 4


@each_roomy_row
def test_with_offload_nearly_all_is_found(engines: Any, row: Row) -> None:
    """What an earlier round computed is loaded from the host.

    A lazy store loses blocks that are freed after one step and taken in the next. In such a small pool these
    are a considerable part.
    """
    least = 0.95 if row.store == "eager" else 0.7
    served = engines.served(LLAMA, row).outcome
    reusable = reusable_tokens(make_rounds(), BLOCK_TOKENS * row.blocks_per_chunk)
    device_alone = sum(engines.reference(LLAMA, row.ranks).cached_tokens)
    assert sum(served.cached_tokens) > least * reusable
    assert served.metric("vllm:prompt_tokens_cached_by_source", "source=host") > least * (
        reusable - device_alone
    )


@each_row
def test_blocks_go_out_and_come_back(engines: Any, row: Row) -> None:
    """A small host pool evicts, but still serves loads."""
    served = engines.served(LLAMA, row).outcome
    stored, loaded = served.metric("vllm:kvsm_blocks_stored"), served.metric("vllm:kvsm_blocks_loaded")
    assert stored > 100
    assert loaded > 100
    assert (served.metric("vllm:kvsm_blocks_evicted") > 0) == (row.host_bytes != ROOMY)
