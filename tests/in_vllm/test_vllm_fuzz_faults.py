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
from kvsm.vllm_fuzz.shape import FAULTS, EngineShape, draw_shape
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
    faults = BROKEN_UNDER_FAULTS[connector]
    assert set(faults) <= set(survived_by([connector]))
    assert walked(f"broken_under_faults:{connector.__name__}", RUNS, *faults).failure is not None


@pytest.mark.parametrize("connector", BROKEN_UNDER_FAULTS, ids=lambda one: one.__name__)
@pytest.mark.slow
def test_without_its_fault_nobody_sees_the_bug(connector: type) -> None:
    failure = walked(f"broken_under_faults:{connector.__name__}", RUNS).failure
    assert failure is None, str(failure)


@pytest.mark.parametrize("connector", ["KvsmConnector", "KvsmOffloadingConnector"])
def test_kvsms_connectors_survive_all_faults(connector: str) -> None:
    """Failure is not success (S10); a report counts once (S7); a lost copy keeps its memory (S4)."""
    failure = walked(connector, 24, *FAULTS).failure
    assert failure is None, str(failure)


@pytest.mark.parametrize(
    ("connectors", "faults"),
    [
        ([KvsmConnector], FAULTS),
        ([KvsmOffloadingConnector], FAULTS),
        ([OffloadingConnector], ("late",)),
        ([LeaksOnAbort], ("late",)),
        ([CleansUpGoodLoadsOnly], ("fail", "late")),
        ([KvsmConnector, OffloadingConnector], ("fail", "late", "lose", "slow")),
    ],
)
def test_a_connector_must_survive_what_it_or_vllm_promises(
    connectors: list[type], faults: tuple[str, ...]
) -> None:
    assert survived_by(connectors) == faults
