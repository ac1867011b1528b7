"""`kvsm vllm-fuzz` when something goes wrong in a worker: what must survive it does, and bugs are caught."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from broken_connectors import LeaksOnAbort
from broken_under_faults import BROKEN_UNDER_FAULTS, CleansUpGoodLoadsOnly
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvsm.checker.walk import WalkResult, walk
from kvsm.vllm.connector import KvsmConnector
from kvsm.vllm.offloading_connector import KvsmOffloadingConnector
from kvsm.vllm_fuzz.faults import survived_by
from kvsm.vllm_fuzz.shape import draw_shape
from kvsm.vllm_fuzz.world import VllmWorld
from kvsm.worlds.world import World

RUNS = 60


def walked(connector: str, runs: int, *faults: str) -> WalkResult:
    """Walk engines with full attention: SimpleCPUOffloadConnector refuses others (docs/findings.md)."""

    def make(random: Random) -> World:
        return VllmWorld(msgspec.structs.replace(draw_shape(random, faults), connector=connector, full=True))

    return walk(make, 1, runs=runs)


@pytest.mark.parametrize("connector", BROKEN_UNDER_FAULTS, ids=lambda one: one.__name__)
def test_a_bug_that_shows_only_under_faults_is_caught(connector: type) -> None:
    fault = BROKEN_UNDER_FAULTS[connector]
    assert fault in survived_by([connector])
    assert walked(f"broken_under_faults:{connector.__name__}", RUNS, fault).failure is not None


@pytest.mark.parametrize("connector", BROKEN_UNDER_FAULTS, ids=lambda one: one.__name__)
@pytest.mark.slow
def test_without_its_fault_nobody_sees_the_bug(connector: type) -> None:
    failure = walked(f"broken_under_faults:{connector.__name__}", RUNS).failure
    assert failure is None, str(failure)


@pytest.mark.parametrize("connector", ["KvsmConnector", "KvsmOffloadingConnector"])
def test_kvsms_connectors_survive_all_faults(connector: str) -> None:
    """Failure is not success (S10); a report counts once (S7)."""
    failure = walked(connector, 24, "fail", "late", "double").failure
    assert failure is None, str(failure)


@pytest.mark.parametrize(
    ("connectors", "faults"),
    [
        ([KvsmConnector], ("fail", "late", "double")),
        ([KvsmOffloadingConnector], ("fail", "late", "double")),
        ([OffloadingConnector], ("late",)),
        ([LeaksOnAbort], ("late",)),
        ([CleansUpGoodLoadsOnly], ("fail", "late")),
        ([KvsmConnector, OffloadingConnector], ("fail", "late")),
    ],
)
def test_a_connector_must_survive_what_it_or_vllm_promises(
    connectors: list[type], faults: tuple[str, ...]
) -> None:
    assert survived_by(connectors) == faults
