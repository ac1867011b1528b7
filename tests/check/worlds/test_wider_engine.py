"""The wider engine: does what it documents, detects planted bugs, and finds none in the correct code."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from museum.other_engines import (
    chunks_and_drafts,
    lazy_and_eager,
    lost_loads,
    names_and_sessions,
    partial_hits,
    second_thoughts,
)

from kvsm.check.walks.walk import random_of, walk
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.check.worlds.wider_engine import REJECTED, WiderEngine
from kvsm.check.worlds.wider_serving import WiderServing
from kvsm.core.scheduler import KVCacheGroup, LastStep, StoreMode
from kvsm.core.scheduler.device_blocks import DeviceBlocks
from kvsm.core.scheduler.free_queue import FreeQueueWalk
from kvsm.core.scheduler.offer_batch import OfferBatch
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

DRAWN = (
    partial_hits,
    chunks_and_drafts,
    names_and_sessions,
    second_thoughts,
    lost_loads,
    lazy_and_eager,
)
DRAFTER = KVCacheGroup(HASH_TOKENS, drafter=True)


@pytest.mark.parametrize("drawn", DRAWN, ids=lambda one: one.__name__)
def test_nothing_is_found_in_the_right_code(drawn: Callable[[Random], WiderServing]) -> None:
    """The seeds differ from the museum's."""
    result = walk(drawn, 11, runs=3)
    assert result.failure is None, result.failure


def test_a_saved_world_goes_on_as_its_origin_does() -> None:
    """All state of the engine is declared for saving."""
    world, random = names_and_sessions(random_of(2, 1)), Random(5)
    saver = Saver(names_and_sessions(random_of(2, 1)))
    for _ in range(60):
        world.do(world.draw(random))
    copy = saver.load(saver.save(world))
    assert copy.fingerprint() == world.fingerprint()
    for action in world.actions():
        copy, other = (saver.load(saver.save(world)) for _ in range(2))
        assert copy.do(action) == other.do(action)
        assert copy.fingerprint() == other.fingerprint()


# What it does.


def held(engine: WiderEngine, request: SmallRequest, token: int) -> Any:
    """Return the cell that the only worker holds for a token in the first group."""
    block = request.tables[0][token // HASH_TOKENS]
    return engine.device[block][0][token % HASH_TOKENS]


def test_a_rejected_draft_rewrites_the_last_output_until_the_next_step() -> None:
    engine = WiderEngine((DRAFTER,), drafts=2)
    request = engine.arrive(SmallRequest("r", range(5), 9))
    for _ in range(4):
        engine.step()
    last = request.num_computed_tokens - 1
    assert [held(engine, request, token) == REJECTED for token in (last - 2, last - 1, last)] == [
        False,
        True,
        True,
    ]
    engine.step()
    assert held(engine, request, last - 1) == request.cells[last - 1]
    tables = [list(table) for table in request.tables]
    engine.finish(request, aborted=True)
    assert REJECTED not in {cell for block in tables[0] for cell in engine.device[block][0][:last]}


def test_the_prompt_is_never_rewritten() -> None:
    engine = WiderEngine((DRAFTER,), drafts=HASH_TOKENS)
    request = engine.arrive(SmallRequest("r", range(8), 9))
    for _ in range(2):
        engine.step()
    assert [held(engine, request, token) for token in range(8)] == request.cells[:8]


def test_a_session_pauses_with_its_blocks_until_its_next_part_comes() -> None:
    engine = WiderEngine()
    request = engine.arrive(SmallRequest("r", range(5), 2, parts=[(100, 101)]))
    while not engine.paused:
        engine.step()
    blocks = list(request.tables[0])
    engine.step()
    assert (request.tables[0], request.num_tokens, engine.unfinished()) == (blocks, 7, True)
    engine.next_part(request)
    # The last output was not computed, and the part has taken its place.
    assert request.all_token_ids[6:] == [100, 101]
    engine.run()
    assert request.finished


def test_blocks_of_two_requests_of_one_name_go_together() -> None:
    """No reuse in flight (S3), in an engine without references."""
    engine = WiderEngine(references=False, last_step=LastStep.KEEP_STEPPING)
    for prompt in (range(4), range(50, 54)):
        engine.arrive(SmallRequest("r", prompt, 1))
        engine.step()
    assert len(engine.sending["r"]) == 2
    engine.step()
    engine.carry_out(max(engine.copies))
    engine.hand_on()
    assert "r" in engine.sending
    engine.run()
    assert not engine.sending


def test_a_step_gives_the_blocks_of_what_it_has_admitted_to_others() -> None:
    """Correct bytes (S15): the first request's load ends before the second request computes."""
    engine = WiderEngine(device_blocks=3, references=False, prefix_cache=False)
    engine.arrive(SmallRequest("stored", range(9), 1))
    engine.run()
    first = engine.arrive(SmallRequest("first", range(9), 1))
    second = engine.arrive(SmallRequest("second", range(50, 59), 1))
    engine.reconsiders = True
    plan = engine.step(hand_on=False)
    engine.reconsiders = False
    assert engine.waiting == [first]
    assert [job.transfer for job in plan.loads] == list(plan.flush)
    assert second.num_computed_tokens == 9
    engine.run()


# What it sees.


def broken(step: Callable[[], object]) -> tuple[Property, str]:
    with pytest.raises(PropertyBroken) as caught:
        step()
    return caught.value.property, caught.value.message


def test_a_chunk_that_is_not_offered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WiderEngine(checks_stores=True)
    engine.arrive(SmallRequest("r", range(5), 3))
    monkeypatch.setattr(OfferBatch, "collect", lambda *_, **__: None)
    engine.step()
    assert broken(engine.step) == (
        Property.STORED_ONCE,
        "the chunk up to token 4 of request r is not stored, and the host has room",
    )


def test_a_chunk_may_wait_for_what_fills_the_host() -> None:
    engine = WiderEngine(checks_stores=True, host_blocks=1)
    for name, first in (("r", 0), ("q", 50)):
        engine.arrive(SmallRequest(name, range(first, first + 5), 9))
    for _ in range(3):
        engine.step()
    engine.run()


def test_a_lazy_store_that_leaves_the_head_of_the_queue_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is full of blocks that the device reuses later."""
    engine = WiderEngine(
        checks_stores=True, store=StoreMode.LAZY, lazy_target_blocks=1, device_blocks=4, host_blocks=1
    )
    for first in (0, 50):
        engine.arrive(SmallRequest(f"r{first}", range(first, first + 4), 1))
        engine.run()
    monkeypatch.setattr(FreeQueueWalk, "store", lambda _self: None)
    for first in (100, 150, 200):
        engine.arrive(SmallRequest(f"r{first}", range(first, first + 4), 1))
    property, message = broken(engine.run)
    assert property is Property.STORED_ONCE
    assert "next to go" in message


def test_blocks_that_may_go_too_early_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WiderEngine(references=False, last_step=LastStep.KEEP_STEPPING)
    engine.arrive(SmallRequest("r", range(4), 1))
    engine.step()
    engine.step()
    monkeypatch.setattr(DeviceBlocks, "take_sent", lambda self: tuple(self.state.kept))
    property, message = broken(lambda: engine.hand_on(0))
    assert property is Property.NO_REUSE_IN_FLIGHT
    assert message.startswith("blocks of request r may be freed")
