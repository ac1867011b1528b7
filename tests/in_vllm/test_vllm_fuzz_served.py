"""`kvsm vllm-fuzz` finds connectors that serve less than they have (stored, so served, S19)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from mutants import MUTANTS
from short_servers import SHORT_SERVERS

from kvsm.check.vllm_fuzz.known_blocks import KnownBlocks
from kvsm.check.vllm_fuzz.shape import (
    BLOCK_TOKENS,
    OPTIONS,
    ROOMY,
    STATES,
    WINDOW,
    WINDOWS,
    EngineShape,
    draw_shape,
)
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.walk import WalkResult, random_of, walk
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.world import Action
from kvsm.cli.vllm_fuzz import Choices
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

TWO_HOSTS = {
    "connectors": [
        {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 512},
        },
        {"kv_connector": "SimpleCPUOffloadConnector"},
    ]
}
"""Two children; the first one has a small host."""


def walked(connector: str, runs: int, seed: int = 1, **changes: Any) -> WalkResult:
    """Walk engines without KV events, whose check (S10) would find some of these, too. A reset of
    OffloadingConnector has defects of its own (docs/findings.md)."""
    fixed = {"full": True, "window": WINDOW, "kv_events": False, "without": ("reset",)}
    changes = {"connector": connector, **fixed, **changes}
    return walk(
        lambda random: VllmWorld(msgspec.structs.replace(draw_shape(random), **changes)), seed, runs=runs
    )


@pytest.mark.parametrize("connector", SHORT_SERVERS, ids=lambda one: one.__name__)
def test_a_connector_that_serves_less_than_it_has_is_caught(connector: type) -> None:
    """The walk knows nothing of the bugs."""
    failure = walked(f"short_servers:{connector.__name__}", 60).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED


def test_a_child_that_is_never_asked_is_caught() -> None:
    failure = walked("short_servers:AsksTheFirstChild", 60, extra=TWO_HOSTS).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED


@pytest.mark.parametrize("connector", ["KvsmConnector", "SimpleCPUOffloadConnector", "OffloadingConnector"])
def test_right_connectors_are_asked_in_each_way(connector: str) -> None:
    """Else the check would hold without a case."""
    taken_counts()
    assert walked(connector, 12).failure is None
    cases = {case for (tried, case) in taken_counts() if tried is Property.STORED_SO_SERVED}
    assert "prompts of a run that were asked for at rest" in cases
    assert "served prompts that the host has room for" in cases
    assert ("answers compared with those to a request without a history" in cases) is (
        connector != "KvsmConnector"
    )


@pytest.mark.skipif(not version("vllm").startswith("0.33."), reason="only vLLM 0.33 was looked at")
@pytest.mark.parametrize("window", WINDOWS)
def test_vllms_offloading_connector_stores_a_window_of_whole_blocks_in_vain(window: int) -> None:
    """For a window of five tokens it stores the one block before the end of the prompt, which a request with
    this prompt reads. To serve it, it wants two."""
    world = VllmWorld(EngineShape(connector="OffloadingConnector", windows=True, window=window))
    world.do(("arrive", 0, 16, 1, 1, 0))
    while (action := world.wind_down()) != ("ask",):
        assert action is not None
        world.do(action)
    if window % BLOCK_TOKENS == 1:
        with pytest.raises(PropertyBroken, match=r"\(S19\): .* up to block 0 behind 0 blocks"):
            world.do(action)
    else:
        assert world.do(action)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("tokens", [12, 16, 24, 36])
def test_kvsm_stores_a_chunk_of_which_a_block_has_left_its_window(chunk: int, tokens: int) -> None:
    """The whole prompt is computed in one step. Before its blocks are stored, vLLM frees the first of those
    that a request with this prompt reads."""
    shape = EngineShape(extra={"blocks_per_chunk": chunk}, windows=True, step_tokens=64)
    world = VllmWorld(shape)
    world.do(("arrive", 0, tokens, 1, 1, 0))
    while (action := world.wind_down()) is not None:
        assert world.do(action)


def test_a_block_that_the_device_reused_before_it_was_stored_is_not_expected() -> None:
    """The prompt of r4 is computed in one step. The next step frees its first blocks, which are out of the
    window, and takes all free blocks of the device for other requests."""
    world = VllmWorld(
        EngineShape(
            full=False, windows=True, device_blocks=26, host_blocks=ROOMY, step_tokens=64, priorities=True
        )
    )
    schedule, deliver = ("schedule",), ("deliver",)
    steps: list[Action] = [
        *(("arrive", 0, 21, 5, 3, 0, 0, 0), ("arrive", 0, 0, 5, 4, 0, 0, 0), ("arrive", 0, 0, 1, 4, 0, 0, 0)),
        *(schedule, deliver, schedule, ("abort", 0), deliver, schedule, deliver),
        *(("arrive", 0, 1, 2, 4, 0, 0, 0), schedule, deliver),
        *(("arrive", 0, 16, 1, 2, 1, 0, 0), ("arrive", 1, 15, 3, 1, 1, 0, 0), schedule),
        *(("arrive", 0, 1, 4, 1, 0, 0, 0), deliver, ("arrive", 4, 19, 1, 1, 0, 0, 0), schedule, deliver),
    ]
    for step in steps:
        assert world.do(step)
    while (action := world.wind_down()) is not None:
        assert world.do(action)


def test_a_prompt_is_asked_for_with_each_number_of_computed_blocks() -> None:
    world = VllmWorld(EngineShape(connector="SimpleCPUOffloadConnector"))
    world.do(("arrive", 0, 9, 3, 5, 0))
    while (action := world.wind_down()) != ("ask",):
        assert action is not None
        world.do(action)
    asked = []
    connector = world.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def noted(request: Any, computed: int) -> Any:
        asked.append(computed)
        return ask(request, computed)

    connector.get_num_new_matched_tokens = noted
    assert world.do(("ask",))
    assert sorted(set(asked)) == [0, 4, 8, 12]


def test_what_answers_say_of_the_blocks_of_a_group() -> None:
    """With full attention a hit reads all blocks; with a sliding window of six tokens, two; of mamba states,
    one."""
    for windows, expected in ((0,), 0), ((0, WINDOW), 0), ((WINDOW,), 5), ((STATES,), 5):
        known = KnownBlocks(windows)
        known.answered(3, 5)
        assert known.longest(0, 6) == expected
        assert known.longest(3, 6) == 5
        assert known.longest(3, 4) == (4 if STATES not in windows else 3)


def test_a_longer_hit_follows_from_two_answers() -> None:
    known = KnownBlocks((0, WINDOW))
    known.answered(0, 3)
    known.answered(3, 6)
    assert known.longest(0, 8) == 6


def test_a_chunk_is_the_least_that_must_be_served() -> None:
    known = KnownBlocks((0,), chunk=2)
    known.answered(0, 4)
    assert [known.longest(computed, 4) for computed in range(4)] == [4, 4, 4, 3]
    assert known.longest(0, 3) == 2


@pytest.mark.parametrize(
    ("mutant", "changes"),
    [
        ("M128", {"extra": {"blocks_per_chunk": 2}}),
        ("M131", {"waits": False, "host_blocks": ROOMY}),
    ],
)
def test_a_hit_that_is_short_with_some_options_of_kvsm_is_seen(mutant: str, changes: dict[str, Any]) -> None:
    """`kvsm vllm-fuzz` draws these engines."""
    with MUTANTS[mutant].put_back():
        failure = walked("KvsmConnector", 60, **changes).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED


def test_kvsms_options_are_drawn_unless_they_are_given() -> None:
    def drawn(connector: str, extra: dict[str, Any]) -> list[Any]:
        choices = Choices(connector, extra, (), ())
        return [choices.case(random_of(1, run)).options for run in range(60)]

    ours = drawn("KvsmConnector", {})
    assert all(any(shape.extra == options for shape in ours) for options in OPTIONS)
    assert {shape.waits for shape in ours} == {True, False}
    given = [("KvsmConnector", {"store_threshold": 2}), ("SimpleCPUOffloadConnector", {})]
    for connector, extra in given:
        assert all((shape.extra, shape.waits) == (extra, True) for shape in drawn(connector, extra))
