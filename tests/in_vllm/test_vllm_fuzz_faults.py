"""`kvsm vllm-fuzz` when something goes wrong in a worker: what must survive it does, and bugs are caught."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from broken_connectors import LeaksOnAbort
from broken_under_faults import BROKEN_UNDER_FAULTS, CleansUpGoodLoadsOnly
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvsm.check.vllm_fuzz.connectors import faults_of
from kvsm.check.vllm_fuzz.faults import survived_by
from kvsm.check.vllm_fuzz.shape import FAULTS, EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import Action, Finding, World
from kvsm.events import TransferLost
from kvsm.properties import Property
from kvsm.vllm.connector import KvsmConnector

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


@pytest.mark.parametrize(
    "connector",
    [one for one, faults in BROKEN_UNDER_FAULTS.items() if "lose" not in faults],  # Time stands still then.
    ids=lambda one: one.__name__,
)
@pytest.mark.slow
def test_without_its_fault_nobody_sees_the_bug(connector: type) -> None:
    failure = walked(f"broken_under_faults:{connector.__name__}", RUNS).failure
    assert failure is None, str(failure)


def test_kvsms_connector_survives_all_faults() -> None:
    """Failure is not success (S10); a report counts once (S7); a lost copy keeps its memory (S4)."""
    failure = walked("KvsmConnector", 24, *FAULTS).failure
    assert failure is None, str(failure)


SETTLE: Action = ("settle",)
STORE_HANGS: tuple[Action, ...] = (
    *(("lose", 0, 1), ("arrive", 0, 8, 1, 1, 0), *[SETTLE] * 3),
    # It is given up. Its slots are wanted, and it happens after all.
    *(("slow",), *[SETTLE] * 4, ("arrive", 2, 23, 2, 1, 0), *[SETTLE] * 4, ("slow",), *[SETTLE] * 2),
    *(("reset", 0, 0), ("arrive", 2, 23, 2, 1, 0), *[SETTLE] * 4),
)
"""The host has 6 blocks."""


def after_a_store_that_hangs(connector: str, **changes: object) -> Finding | None:
    shape = EngineShape(connector=connector, host_blocks=6, fills=True)
    changed = msgspec.structs.replace(shape, **changes)
    return rerun(lambda: VllmWorld(changed), STORE_HANGS, to_rest=True).finding


@pytest.mark.parametrize("is_async", [False, True])
def test_the_slots_of_a_store_that_was_given_up_are_not_used_again(is_async: bool) -> None:
    """Correct bytes (S15), and no other slot is missing (S4)."""
    assert after_a_store_that_hangs("KvsmConnector", is_async=is_async) is None


def test_who_uses_the_slots_of_a_hanging_store_serves_wrong_bytes() -> None:
    finding = after_a_store_that_hangs("broken_under_faults:TakesSilenceForFailure")
    assert finding is not None
    assert finding.property is Property.CORRECT_BYTES


MORE_IN_FLIGHT: tuple[Action, ...] = (
    *(("lose", 0, 1), ("arrive", 0, 8, 1, 1, 0), *[SETTLE] * 14),
    # While these are computed and stored, the time of the lost store is up.
    *(action for family in range(2, 18, 2) for action in (("arrive", family, 39, 1, 1, 0), SETTLE)),
)


@pytest.mark.parametrize(
    ("connector", "is_seen"), [("KvsmConnector", False), ("broken_under_faults:GivesUpAllAtOnce", True)]
)
def test_what_is_given_up_before_its_time_is_missed_at_the_end(connector: str, is_seen: bool) -> None:
    """One release per hold (S4): more of the host is gone than the lost copy may cost."""
    shape = EngineShape(connector=connector, fills=True)
    finding = rerun(lambda: VllmWorld(shape), MORE_IN_FLIGHT, to_rest=True).finding
    assert ("host blocks are lost" in str(finding)) == is_seen, str(finding)


def test_copies_are_given_up_in_a_walk() -> None:
    """Else that KvsmConnector survives them would say nothing."""
    worlds: list[VllmWorld] = []

    def make(random: Random) -> World:
        worlds.append(VllmWorld(msgspec.structs.replace(draw_shape(random, FAULTS), faults=FAULTS)))
        return worlds[-1]

    walk(make, 1, runs=10)
    lost = [event.transfer for world in worlds for event in world.events if isinstance(event, TransferLost)]
    assert len(lost) > 5


def test_without_lost_copies_time_stands_still() -> None:
    """A copy may then take as long as the seed likes."""
    world = VllmWorld(EngineShape())
    for action in (("arrive", 0, 9, 3, 5, 0), *[SETTLE] * 9):
        world.do(action)
    assert world.scheduler.connector._side.deadlines.clock() == 0.0


SERVED = tuple(action for family in (0, 2, 4) for action in (("arrive", family, 39, 1, 1, 0), *[SETTLE] * 8))
LOADS_FAIL: tuple[Action, ...] = (
    *(*SERVED, ("reset", 0, 0)),
    *(("fail", 0, 0), ("arrive", 0, 39, 1, 2, 0, 2), ("schedule",), ("execute",)),
    *(("fail", 0, 0), ("arrive", 2, 39, 1, 2, 0, 2), ("schedule",), ("execute",), ("deliver",)),
    ("arrive", 4, 39, 1, 2, 0, 0),
)


@pytest.mark.parametrize(
    ("connector", "is_stuck"),
    [("SimpleCPUOffloadConnector", True), ("KvsmConnector", False)],
)
def test_vllm_keeps_room_for_loads_that_have_failed(connector: str, is_stuck: bool) -> None:
    """docs/findings.md tells it: a request with a better priority could load, and finds no room. Nobody
    computes any more (S9). kvsm lets the requests whose loads have failed go first."""
    shape = EngineShape(connector=connector, is_async=True, priorities=True, device_blocks=26, step_tokens=64)
    finding = rerun(lambda: VllmWorld(shape), LOADS_FAIL, to_rest=True).finding
    assert (finding is not None) == is_stuck, str(finding)


@pytest.mark.parametrize(
    ("connectors", "faults"),
    [
        ([KvsmConnector], FAULTS),
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


def test_who_waits_without_a_bound_need_not_survive_lost_copies() -> None:
    assert faults_of("KvsmConnector", {"transfer_timeout_s": 0}) == ("fail", "late", "double")
    children = [{"kv_connector": "KvsmConnector"}, {"kv_connector": "OffloadingConnector"}]
    assert faults_of("MultiConnector", {"connectors": children}) == ("fail", "late", "lose", "slow")


def test_all_ranks_copy_in_one_action() -> None:
    """The other ranks once stood still as long as the first one had something to do."""
    world = VllmWorld(EngineShape(shards=2))
    for action in (("arrive", 0, 9, 3, 5, 0), *[("schedule",), ("execute",)] * 2):
        world.do(action)
    assert all(rank.runtime.device.backlog for rank in world.ranks)
    world.do(("copies",))
    assert not any(rank.runtime.device.backlog for rank in world.ranks)
