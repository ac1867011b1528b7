"""`kvsm vllm-fuzz` with drafters that have KV cache: good connectors are not blamed, and wrong ones are."""

from __future__ import annotations

from importlib.metadata import version
from itertools import product
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from broken_connectors import LoadsNoState, MixesUpBlocks, StoresBeforeCompute
from mutants import MUTANTS
from short_servers import (
    ServesEachPromptOnce,
    ServesFourBlocks,
    ServesNothingAfterAPreemption,
    ServesOnlyWholePrompts,
)

from kvsm.check.vllm_fuzz.known_blocks import KnownBlocks
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, DRAFTERS, ROOMY, WINDOW, Drafter, EngineShape, draw_shape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.vllm_fuzz.word_model import KnownTokens, ModelRunner
from kvsm.check.walks.walk import WalkResult, walk
from kvsm.check.worlds.world import Action, World
from kvsm.errors import PropertyBroken
from kvsm.events import LoadPlanned
from kvsm.ids import listed
from kvsm.properties import Property

SETTLE = ("settle",)
MOST_RUNS = 60
GOOD = ["KvsmConnector", "SimpleCPUOffloadConnector", "OffloadingConnector"]
ALL_DRAFTERS = sorted({*DRAFTERS} - {""})


def walked(connector: str, drafter: Drafter, runs: int) -> WalkResult:
    """Walk engines with this drafter. OffloadingConnector has defects of its own, with resets and windows
    (docs/findings.md)."""

    def make(random: Random) -> World:
        shape = draw_shape(random)
        return VllmWorld(
            msgspec.structs.replace(
                shape,
                connector=connector,
                full=True,
                windows=shape.windows and connector != "OffloadingConnector",
                window=WINDOW,
                stages=1,
                drafts=random.choice((1, 2, 3)),
                drafter=drafter,
                device_blocks=max(48, shape.device_blocks),
                without=("reset",) if connector == "OffloadingConnector" else (),
            )
        )

    return walk(make, 1, runs=runs)


@pytest.mark.parametrize(
    ("connector", "drafter"),
    [one for one in product(GOOD, ALL_DRAFTERS) if one != ("OffloadingConnector", "window")],
)
def test_a_good_connector_is_not_blamed(connector: str, drafter: Drafter) -> None:
    failure = walked(connector, drafter, 3).failure
    assert failure is None, str(failure)


@pytest.mark.skipif(not version("vllm").startswith("0.33."), reason="only vLLM 0.33 was looked at")
@pytest.mark.parametrize("drafter", ["full", "window", "shared"])
@pytest.mark.parametrize("connector", GOOD)
def test_vllms_offloading_connector_stores_a_prompt_beside_a_drafter_in_vain(
    connector: str, drafter: Drafter
) -> None:
    """It stores the window blocks of a hit that ends with the last whole block of the prompt. But the
    drafter's group drops this block, so a request with the prompt needs those of a shorter hit."""
    world = VllmWorld(
        EngineShape(
            connector=connector,
            windows=True,
            drafts=2,
            drafter=drafter,
            device_blocks=ROOMY,
            host_blocks=ROOMY,
        )
    )
    world.do(("arrive", 0, 4 * BLOCK_TOKENS + 1, 1, 1, 0))
    while (action := world.wind_down()) != ("ask",):
        assert action is not None
        world.do(action)
    if connector == "OffloadingConnector":
        with pytest.raises(
            PropertyBroken, match=r"\(S19\): .* up to block 0 behind 0 blocks.* up to block 3"
        ):
            world.do(action)
    else:
        assert world.do(action)


@pytest.mark.parametrize("connector", [LoadsNoState, MixesUpBlocks, StoresBeforeCompute])
def test_a_wrong_block_of_a_drafter_is_seen(connector: type) -> None:
    """`LoadsNoState` leaves out the last block of a load, which is the drafter's."""
    assert walked(f"broken_connectors:{connector.__name__}", "full", MOST_RUNS).failure is not None


@pytest.mark.parametrize(
    "connector",
    [ServesNothingAfterAPreemption, ServesOnlyWholePrompts, ServesEachPromptOnce, ServesFourBlocks],
)
def test_a_connector_that_serves_less_than_it_has_is_caught(connector: type) -> None:
    """A hit that is one block short is not: vLLM's connectors may want the block behind it."""
    failure = walked(f"short_servers:{connector.__name__}", "full", MOST_RUNS).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED


@pytest.mark.parametrize("mutant", ["M132", "M134"])
def test_a_hit_that_is_short_because_of_a_drafter_is_seen(mutant: str) -> None:
    """After vllm#52735 and its family: no wrong byte, but fewer hits."""
    with MUTANTS[mutant].put_back():
        failure = walked("KvsmConnector", "full", MOST_RUNS).failure
    assert failure is not None


@pytest.mark.parametrize("connector", GOOD)
def test_vllm_drops_the_last_block_of_a_hit_and_kvsm_keeps_it(connector: str) -> None:
    """The last word of the drafter's block depends on the token behind it."""
    world = VllmWorld(EngineShape(connector=connector, drafts=2, drafter="full", device_blocks=48))
    prompt: Action = ("arrive", 0, 4 * BLOCK_TOKENS, 2, 1, 0)
    answers = []
    for action in (prompt, *[SETTLE] * 9, ("reset", 0, 0)):
        world.do(action)
    ask = world.scheduler.connector.get_num_new_matched_tokens

    def watched(request: object, computed: int) -> tuple[int | None, bool]:
        answers.append(ask(request, computed))
        return answers[-1]

    world.scheduler.connector.get_num_new_matched_tokens = watched
    for action in (prompt, *[SETTLE] * 9):
        world.do(action)
    assert answers[0][0] == (4 if connector == "KvsmConnector" else 3) * BLOCK_TOKENS


def test_a_drafters_blocks_come_back_from_the_host() -> None:
    """Otherwise a walk would say nothing about them."""
    world = VllmWorld(EngineShape(drafts=2, drafter="full", device_blocks=48))
    for action in (
        *(("arrive", 0, 4 * BLOCK_TOKENS, 2, 1, 0), *[SETTLE] * 9, ("reset", 0, 0)),
        *(("arrive", 0, 4 * BLOCK_TOKENS, 2, 1, 0), *[SETTLE] * 9),
    ):
        world.do(action)
    (load,) = [event for event in world.events if isinstance(event, LoadPlanned)]
    assert len(listed(load.slots)) == 2 * 4


def test_only_the_last_word_of_a_block_depends_on_the_token_behind_it() -> None:
    one, other = (KnownTokens([*range(BLOCK_TOKENS), behind]) for behind in (7, 8))
    runner = ModelRunner(2, Random(0), (0, 0), 1)
    for truth in (one, other):
        runner._note_last_words(truth, 0, BLOCK_TOKENS)
    versions = [list(map(tuple, runner.block_versions(1, 0, truth))) for truth in (one, other)]
    assert sorted(versions[0]) == sorted(versions[1])
    assert len(versions[0]) == 2
    assert len({words[:-1] for words in versions[0]}) == 1
    assert len(runner.block_versions(0, 0, one)) == 1


def test_a_connector_that_drops_must_serve_all_but_the_last_known_block() -> None:
    keeps, drops = KnownBlocks((0, 0)), KnownBlocks((0, 0), 1, (1,))
    for known in (keeps, drops):
        known.answered(0, 3)
    assert (keeps.longest(0, 5), drops.longest(0, 5)) == (3, 2)
    assert (keeps.longest(2, 5), drops.longest(2, 5)) == (3, 2)
