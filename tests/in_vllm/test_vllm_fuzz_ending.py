"""`kvsm vllm-fuzz` at the end of a run: KV events, lost host blocks, the shutdown; and ends told twice."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from broken_endings import BROKEN_AT_THE_END

from kvsm.check.explore.counterexample import save_log
from kvsm.check.vllm_fuzz.rank import SimulatedRank
from kvsm.check.vllm_fuzz.shape import EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import Action
from kvsm.events import LogOpened, StorePlanned
from kvsm.explain.story import verify_log
from kvsm.properties import Property


def walked(connector: str, runs: int, seed: int = 1) -> WalkResult:
    """Walk engines with full attention: SimpleCPUOffloadConnector refuses others (docs/findings.md)."""

    def make(random: Random) -> VllmWorld:
        return VllmWorld(msgspec.structs.replace(draw_shape(random), connector=connector, full=True))

    return walk(make, seed, runs=runs)


@pytest.mark.parametrize(
    ("broken", "connector"), BROKEN_AT_THE_END, ids=lambda one: one.__name__ if isinstance(one, type) else ""
)
def test_a_bug_that_only_the_end_shows_is_caught(broken: Property, connector: type) -> None:
    """The walk knows nothing of the bugs."""
    failure = walked(f"broken_endings:{connector.__name__}", 60).failure
    assert failure is not None
    assert failure.finding.property is broken


def ended(connector: str, *before: Action, **changes: object) -> VllmWorld:
    """An engine that did this, came to rest and was shut down."""
    shape = EngineShape(connector=connector, kv_events=True, fills=True, host_blocks=6)
    world = VllmWorld(msgspec.structs.replace(shape, **changes))
    for action in before:
        assert world.do(action)
    while (action := world.wind_down()) is not None:
        assert world.do(action)
    world.check()
    return world


def test_the_way_to_rest_ends_with_all_four_checks() -> None:
    actions: tuple[Action, ...] = (("arrive", 0, 9, 3, 5, 0), ("settle",))
    world = VllmWorld(EngineShape(kv_events=True, fills=True, host_blocks=6))
    for action in actions:
        world.do(action)
    kinds = []
    while (action := world.wind_down()) is not None:
        world.do(action)
        kinds.append(action[0])
    assert kinds[-4:] == ["ask", "probe", "fill", "shutdown"]


def test_after_the_shutdown_nothing_happens() -> None:
    world = ended("KvsmConnector", ("arrive", 0, 9, 3, 5, 0))
    assert not world.do(("arrive", 0, 9, 3, 5, 0))
    assert not world.do(("shutdown",))


def test_an_end_is_asked_for_only_at_rest() -> None:
    world = VllmWorld(EngineShape(kv_events=True, fills=True, host_blocks=6))
    world.do(("arrive", 0, 9, 3, 5, 0))
    assert not any(world.do((kind,)) for kind in ("ask", "probe", "fill", "shutdown"))


@pytest.mark.parametrize("connector", ["KvsmConnector", "SimpleCPUOffloadConnector", "OffloadingConnector"])
@pytest.mark.parametrize("connector_too", [0, 1])
def test_a_reset_of_an_idle_engine_is_told_well_enough(connector: str, connector_too: int) -> None:
    """`AllBlocksCleared` names no medium. It may mean the device alone, or the host as well; neither reading
    makes an event wrong."""
    stored: tuple[Action, ...] = (("arrive", 0, 9, 3, 5, 0), *[("settle",)] * 9)
    ended(connector, *stored, ("reset", 0, connector_too), *stored)


def test_threads_and_workers_do_not_pile_up() -> None:
    """A long walk makes thousands of engines."""
    walked("KvsmConnector", 3)
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), _ranks()
    walked("KvsmConnector", 8, seed=2)
    walked("SimpleCPUOffloadConnector", 8, seed=2)
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), _ranks()) == before


def _ranks() -> int:
    return sum(isinstance(one, SimulatedRank) for one in gc.get_objects())


@pytest.mark.parametrize("connector", ["KvsmConnector", "OffloadingConnector"])
def test_a_failure_leaves_a_log_that_can_be_replayed(connector: str, tmp_path: Path) -> None:
    world = ended(connector, ("arrive", 0, 9, 3, 5, 0), *[("settle",)] * 9)
    save_log(world.events, tmp_path / "log")
    assert verify_log(tmp_path / "log").violations == ()
    assert sum(isinstance(event, StorePlanned) for event in world.events) > 1


def test_the_same_run_leaves_the_same_events() -> None:
    """Determinism (S11)."""
    first, second = [ended("OffloadingConnector", ("arrive", 0, 9, 3, 5, 0)).events for _ in range(2)]
    assert first == second


def test_the_host_pool_has_the_size_of_the_shape() -> None:
    """Else the host would never be full in a walk."""
    opened = ended("KvsmConnector", ("arrive", 0, 9, 3, 5, 0)).events[0]
    assert isinstance(opened, LogOpened)
    assert opened.config.host_blocks == 6
