"""`kvsm vllm-fuzz` with several connectors in a MultiConnector, and with other specs."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvsm.check.vllm_fuzz.connectors import classes_of, faults_of, transfer_config
from kvsm.check.vllm_fuzz.shape import EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import Action, World
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property

KVSM, SIMPLE, OFFLOADING = (
    {"kv_connector": name} for name in ("KvsmConnector", "SimpleCPUOffloadConnector", "OffloadingConnector")
)
BROKEN = {"kv_connector": "broken_connectors:LeaksOnAbort"}


def multi(*children: dict[str, Any]) -> EngineShape:
    return EngineShape(connector="MultiConnector", extra={"connectors": list(children)})


def tiered(**options: Any) -> EngineShape:
    tier = {"type": "MemoryTier", "module_path": "kvsm.check.vllm_fuzz.memory_tier", **options}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    return EngineShape(connector="OffloadingConnector", extra=extra)


def walked(given: EngineShape, runs: int, *without: str) -> WalkResult:
    faults = faults_of(given.connector, given.extra)

    def make(random: Random) -> World:
        shape = msgspec.structs.replace(draw_shape(random, faults), full=True, without=without)
        return VllmWorld(msgspec.structs.replace(shape, connector=given.connector, extra=given.extra))

    return walk(make, 1, runs=runs)


@pytest.mark.parametrize("children", [(KVSM, SIMPLE), (SIMPLE, KVSM)], ids=["first", "second"])
def test_kvsm_serves_beside_another_connector(children: tuple[dict[str, Any], ...]) -> None:
    failure = walked(multi(*children), 8).failure
    assert failure is None, str(failure)


def test_a_bug_of_a_child_is_caught() -> None:
    assert walked(multi(KVSM, BROKEN), 40).failure is not None


def test_each_child_has_its_module_and_host_memory() -> None:
    given = msgspec.structs.replace(multi(KVSM, BROKEN, OFFLOADING), host_blocks=10)
    transfer = transfer_config(given)
    children = transfer.kv_connector_extra_config["connectors"]
    sizes = [one["kv_connector_extra_config"]["cpu_bytes_to_use"] for one in children]
    assert sizes == [10 * 32, 10 * 32, 10 * 4096]
    assert [one.__name__ for one in classes_of(transfer)] == [
        "KvsmConnector",
        "LeaksOnAbort",
        "OffloadingConnector",
    ]
    assert MultiConnector not in classes_of(transfer)


def test_a_child_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="connector NoSuchChild"):
        transfer_config(multi(KVSM, {"kv_connector": "NoSuchChild"}))


@pytest.mark.parametrize("fails_every", [0, 3])
def test_vllms_tiers_serve_what_they_keep(fails_every: int) -> None:
    failure = walked(tiered(fails_every=fails_every), 8, "reset").failure
    assert failure is None, str(failure)


def test_a_chunk_comes_back_from_the_second_tier() -> None:
    """Else a walk of tiers would say nothing about them."""
    world = VllmWorld(msgspec.structs.replace(tiered(), host_blocks=8))
    for family in (0, 2, 0):
        world.do(("arrive", family, 28, 1, 1, 0))
        for _ in range(20):
            world.do(("settle",))
        world.do(("reset", 0, 0))
    manager = world.scheduler.connector.connector_scheduler.manager
    assert manager.secondary_tiers[0].loaded > 0


@pytest.mark.parametrize("tier", ["MemoryTier", "fs", None])
def test_vllms_tiers_keep_what_old_weights_computed(tier: str | None, tmp_path: Path) -> None:
    """docs/findings.md tells it. A reset of all caches does not reach the second tier."""
    disk = {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 1, "n_write_threads": 1}
    shape = tiered(**(disk if tier == "fs" else {}))
    world = VllmWorld(shape if tier else EngineShape(connector="OffloadingConnector"))

    def serve() -> None:
        world.do(("arrive", 0, 28, 1, 4, 0))
        while world.wind_down() == ("settle",):
            world.do(("settle",))
            time.sleep(0.002 if tier == "fs" else 0)  # Its threads take some time.

    serve()
    world.do(("reset", 0, 1))
    with pytest.raises(PropertyBroken, match="token 0 of request r1") if tier else nullcontext():
        serve()


STEPS = (("settle",),) * 4
LOAD_BESIDE_A_STORE: tuple[Action, ...] = (
    # The other connector keeps all three prompts, OffloadingConnector only the last one.
    *(("arrive", 0, 32, 1, 1, 0), *STEPS, ("arrive", 2, 40, 5, 1, 0), *STEPS),
    *(("arrive", 4, 40, 5, 1, 0), *STEPS, ("reset", 0, 0)),
    # The second prompt is loaded and stored again. It finishes, and its blocks are free.
    *(("arrive", 2, 40, 5, 1, 0), ("arrive", 4, 40, 5, 3, 0), ("schedule",), ("deliver",), ("copies",)),
    *(("schedule",), ("deliver",), ("schedule",), ("deliver",)),
    # The first prompt is loaded into them.
    *(("arrive", 0, 32, 1, 1, 0), ("schedule",), ("execute",), ("copies",)),
)


def beside(other: dict[str, Any], is_first: bool) -> EngineShape:
    """OffloadingConnector with little host memory, and another one with much."""
    other = {**other, "kv_connector_extra_config": {"cpu_bytes_to_use": 160 * 32}}
    small = {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 12 * 4096}}
    shape = multi(*([other, small] if is_first else [small, other]))
    return msgspec.structs.replace(shape, device_blocks=26, step_tokens=96)


@pytest.mark.parametrize("other", [SIMPLE, KVSM], ids=["simple", "kvsm"])
@pytest.mark.parametrize("is_first", [True, False])
def test_vllms_offloading_connector_does_not_see_what_another_one_loads(
    other: dict[str, Any], is_first: bool
) -> None:
    """docs/findings.md tells it: a load overwrites blocks that a store is reading (S12). vLLM 0.33 flushes
    the store; KvsmConnector began its load before that, when it was the first child."""
    shape = beside(other, is_first)
    finding = rerun(lambda: VllmWorld(shape), LOAD_BESIDE_A_STORE).finding
    assert (finding is not None) == __version__.startswith("0.32")
    if finding is not None:
        assert finding.property is Property.COPY_ORDER


def test_these_two_keep_out_of_each_others_way() -> None:
    shape = msgspec.structs.replace(beside(KVSM, True), extra={"connectors": [KVSM, SIMPLE]})
    assert rerun(lambda: VllmWorld(shape), LOAD_BESIDE_A_STORE).finding is None


def test_a_connector_without_support_for_groups_is_walked() -> None:
    """vLLM gives it one KV cache group, and windows count as full attention."""
    failure = walked(EngineShape(connector="broken_connectors:KnowsOneGroup"), 6).failure
    assert failure is None, str(failure)
