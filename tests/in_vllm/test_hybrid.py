"""Models with sliding windows in a real vLLM engine: one with full attention beside them, and one without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from workloads import HYBRID, ROOMY, case_name, make_rounds, reusable_tokens

from kvsm.core.log import LogReader
from kvsm.events import LoadPlanned, StorePlanned
from kvsm.ids import listed, unpack
from kvsm.vllm.tiny_model import BLOCK_TOKENS

each_case = pytest.mark.parametrize("case", HYBRID, ids=case_name)
each_roomy_case = pytest.mark.parametrize(
    "case", [case for case in HYBRID if case[1].host_bytes == ROOMY], ids=case_name
)


@each_case
def test_tokens_are_those_without_offload(engines: Any, case: Any) -> None:
    model, _ = case
    assert engines.served(*case).outcome.tokens == engines.reference(model).tokens


def test_requests_were_preempted(engines: Any) -> None:
    """How many preemptions one engine has depends on when its copies end."""
    assert sum(engines.served(*case).outcome.metric("vllm:num_preemptions") for case in HYBRID) > len(HYBRID)


@each_roomy_case
def test_with_offload_nearly_all_is_found(engines: Any, case: Any) -> None:
    """A hit needs only the last blocks of a layer with a window, and most of these are there.

    A block that leaves the window during the prefill that computes it is freed before it is offered, and may
    be reused at once.
    """
    model, row = case
    served = engines.served(*case).outcome
    reusable = reusable_tokens(make_rounds(), BLOCK_TOKENS * row.blocks_per_chunk)
    device_alone = sum(engines.reference(model).cached_tokens)
    assert device_alone < reusable / 4
    assert sum(served.cached_tokens) > 0.7 * reusable
    assert served.metric("vllm:prompt_tokens_cached_by_source", "source=host") > 0.7 * (
        reusable - device_alone
    )


@each_case
def test_blocks_of_every_group_come_back(engines: Any, case: Any) -> None:
    """Otherwise a layer whose blocks are never loaded could look correct because its window has passed
    them."""
    model, _ = case
    key_of: dict[int, bytes] = {}
    loaded: Counter[int] = Counter()
    for event in LogReader(engines.served(*case).log).events():
        if isinstance(event, StorePlanned):
            key_of.update(zip(listed(unpack(event.slots)), event.keys))
        elif isinstance(event, LoadPlanned):
            loaded.update(key_of[slot][-1] for slot in listed(unpack(event.slots)))
    assert set(loaded) == set(range(len(set(model.get("layer_types", ["sliding_attention"])))))
    assert min(loaded.values()) > 50
