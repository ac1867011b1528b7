"""Directed scenarios of the bugs that kvsm has found in vLLM (`own_findings.py`)."""

from __future__ import annotations

from collections.abc import Callable

from core_life import keys, new_core, store
from scheduler_traffic import SLIDING, Hand, finish_one

from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.kv_events import Publisher
from kvsm.core.scheduler import LastStep, StoreMode
from kvsm.properties import Property
from museum.scenarios import come_to_rest, expect, sound_host, under_store
from museum.tier_scenarios import ON_DISK, RETURNS, acted


def two_resets_without_a_step() -> None:
    engine = under_store(range(9))
    assert not engine.reset()
    assert not engine.reset()
    come_to_rest(engine)


def preempted_and_loading_in_one_step() -> None:
    hand, request = Hand(), SmallRequest("r", range(9), 5)
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    hand.admit(request, [10, 11, 12])
    hand.end(hand.step())
    hand.compute(request)
    assert hand.admit(request, [20, 21, 22]) == 8
    assert len(hand.step(preempted={"r"}).loads) == 1


def blocks_of_a_finished_request_are_given_away() -> None:
    engine = under_store(range(9), device_blocks=4, references=False, prefix_cache=False)
    engine.arrive(SmallRequest("other", range(100, 116)))
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    sound_host(engine)


def all_layers_have_a_window() -> None:
    engine = SmallEngine(groups=(SLIDING,))
    finish_one(engine, "first", [*range(9)])
    finish_one(engine, "second", [*range(9)])


def window_gives_blocks_back_before_a_reset() -> None:
    engine = SmallEngine(groups=(SLIDING,), device_blocks=8, chunk_tokens=4)
    engine.arrive(SmallRequest("r", range(16), 12))
    for _ in range(6):
        engine.step()
        engine.carry_out_all()
        engine.hand_on()
    engine.arrive(SmallRequest("other", range(100, 116)))
    for _ in range(4):
        engine.step()
        engine.carry_out_all()
        engine.hand_on()
    engine.reset()
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    sound_host(engine)


def reset_is_told() -> None:
    core, _ = new_core(publisher=Publisher())
    store(core, "a", keys(1))
    assert core.reset()
    published = [(change.keys, change.removed) for change in core.take_events()]
    expect(
        published == [(keys(1), False), (keys(1), True)],
        Property.EVENTS_ARE_STATE,
        "the host has lost a block, but no event announces it",
    )


def import_ends_in_a_reset() -> None:
    core, _ = new_core(publisher=Publisher())
    job = core.import_blocks((("r", 1),), keys(1), "disk").job
    assert job is not None
    core.submit([job.transfer])
    assert not core.reset()
    core.complete_store(job.transfer)
    published = core.take_events()
    expect(not published, Property.EVENTS_ARE_STATE, "a block is announced that was never on the host")


def host_is_smaller_than_what_is_kept_ahead() -> None:
    engine = SmallEngine(
        device_blocks=12,
        host_blocks=3,
        store=StoreMode.LAZY,
        last_step=LastStep.KEEP_STEPPING,
        lazy_target_blocks=2,
    )
    engine.arrive(SmallRequest("r", range(37)))
    come_to_rest(engine)


FINDING_SCENARIOS: dict[str, Callable[[], None]] = {
    "B63": two_resets_without_a_step,
    "B64": preempted_and_loading_in_one_step,
    "B65": blocks_of_a_finished_request_are_given_away,
    "B66": acted(*ON_DISK, ("reset", 1)),
    "B67": all_layers_have_a_window,
    "B68": window_gives_blocks_back_before_a_reset,
    "B69": reset_is_told,
    "B70": host_is_smaller_than_what_is_kept_ahead,
    "B71": acted(*RETURNS, ("plan",), ("disk", 0, 0, 1), waiting=1),
    "B72": import_ends_in_a_reset,
}
