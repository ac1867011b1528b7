"""`kvsm vllm-fuzz` with mamba layers: good connectors are not blamed, and wrong states are seen."""

from __future__ import annotations

from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from broken_connectors import BROKEN_WITH_STATES

from kvsm.check.vllm_fuzz.connectors import serves_mamba
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import World
from kvsm.events import LoadPlanned
from kvsm.ids import listed

SETTLE = ("settle",)


def walked(connector: str, runs: int) -> WalkResult:
    """Walk engines with mamba layers. Resets of OffloadingConnector are known to fail (docs/findings.md)."""

    def make(random: Random) -> World:
        shape = msgspec.structs.replace(draw_shape(random), full=True, windows=False, mamba=True, drafts=0)
        without = ("reset",) if connector == "OffloadingConnector" else ()
        return VllmWorld(msgspec.structs.replace(shape, connector=connector, without=without))

    return walk(make, 1, runs=runs)


@pytest.mark.parametrize("connector", BROKEN_WITH_STATES, ids=lambda one: one.__name__)
def test_a_wrong_state_is_seen(connector: type) -> None:
    """Correct bytes (S15), order of copies (S12)."""
    assert walked(f"broken_connectors:{connector.__name__}", 40).failure is not None


@pytest.mark.parametrize(
    "connector",
    ["KvsmConnector", "SimpleCPUOffloadConnector", "OffloadingConnector"],
)
def test_a_good_connector_is_not_blamed(connector: str) -> None:
    failure = walked(connector, 10).failure
    assert failure is None, str(failure)


def test_a_state_comes_back_from_the_host() -> None:
    """Else a walk would say nothing about states. A hit needs one state, and each block of attention."""
    world = VllmWorld(EngineShape(mamba=True))
    for action in (
        *(("arrive", 0, 6 * BLOCK_TOKENS, 1, 1, 0), *[SETTLE] * 9, ("reset", 0, 0)),
        *(("arrive", 0, 6 * BLOCK_TOKENS, 1, 1, 0), *[SETTLE] * 9),
    ):
        world.do(action)
    (load,) = [event for event in world.events if isinstance(event, LoadPlanned)]
    assert len(listed(load.slots)) == 6 + 1


def test_mamba_layers_change_no_other_choice() -> None:
    """A seed gives the same actions with and without them."""
    pairs = [(Random(seed), Random(seed)) for seed in range(60)]
    shapes = [(draw_shape(with_mamba, mamba=True), draw_shape(without)) for with_mamba, without in pairs]
    assert 3 < sum(one.mamba for one, _ in shapes) < 25
    assert all(one.mamba or one == other for one, other in shapes)
    assert all(one.random() == other.random() for one, other in pairs)


def test_only_connectors_for_several_groups_get_them() -> None:
    for connector in ("KvsmConnector", "SimpleCPUOffloadConnector"):
        assert serves_mamba(connector, {})
    assert not serves_mamba("ExampleConnector", {"shared_storage_path": "nowhere"})


def test_a_state_is_stored_though_a_reset_has_preempted_its_request() -> None:
    """In the step after the reset the request runs again, but vLLM also lists it as preempted."""
    world = VllmWorld(EngineShape(mamba=True))
    prompt = ("arrive", 0, 6 * BLOCK_TOKENS, 1, 1, 0)
    for action in (
        *(prompt, ("schedule",), ("deliver",), ("reset", 1, 0), *[SETTLE] * 9, ("reset", 0, 0)),
        *(prompt, *[SETTLE] * 9),
    ):
        world.do(action)
    (load,) = [event for event in world.events if isinstance(event, LoadPlanned)]
    assert len(listed(load.slots)) == 6 + 1
