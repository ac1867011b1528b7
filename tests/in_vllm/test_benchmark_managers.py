"""The benchmark of the policies calls vLLM's manager as it calls kvsm."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from places import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

Requests = list[list[bytes]]
WORKLOADS: dict[str, Callable[[Any], Requests]] = {
    "a loop": lambda synthetic: synthetic.loop(200, 300),
    "scans": lambda synthetic: synthetic.scans_beside_prefixes(200, 10),
    "a moving working set": lambda synthetic: synthetic.moving_set(300, 20, 100),
    "conversations and a flood": lambda synthetic: synthetic.flood_beside_conversations(150),
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("host_blocks", [110, 320])
def test_vllms_lru_hits_and_stores_what_kvsms_does(
    name: str, host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies end before the next request, and each prompt fits in the pool. So both keep the same blocks."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    policies, synthetic = import_module("policies"), import_module("synthetic")
    requests = [keys for keys in WORKLOADS[name](synthetic) if len(keys) <= host_blocks]
    of_vllm = policies.serve_all("vLLM lru", requests, host_blocks)
    of_kvsm = policies.serve_all("lru", requests, host_blocks)
    assert (of_vllm.hits, of_vllm.stores) == (of_kvsm.hits, of_kvsm.stores)
    assert of_kvsm.stores > 200
