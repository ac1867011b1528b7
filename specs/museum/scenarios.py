"""A directed scenario for each exhibit: a short script that fails only with the bug.

The searching checkers do not use scenarios. A scenario is the shortest description of a bug, and finds bugs
that no search has a world for. `copy_scenarios.py` has the scenarios of the copy engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core_life import begin_store, keys, load, new_core, store
from scheduler_traffic import Hand, finish_one, keys_of

from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.kv_events import BlockStored, Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.offloader import LookupResult, Offloader
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import LastStep
from kvsm.core.scheduler.free_queue import FreeQueueWalk
from kvsm.errors import IllegalTransition, PropertyBroken
from kvsm.events import OffloadConfig
from kvsm.ids import pack, to_list
from kvsm.properties import Property

MISS, HIT, HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


def expect(holds: bool, property: Property, message: str) -> None:
    """Raise `PropertyBroken` unless `holds`."""
    if not holds:
        raise PropertyBroken(property, message)


def sound(ledger: Ledger) -> None:
    """Raise `PropertyBroken` for the first violation in a ledger."""
    for violation in check_ledger(ledger):
        raise PropertyBroken(violation.property, violation.message)


def sound_host(engine: SmallEngine) -> None:
    """Check the ledger, and that every readable slot holds the cells of its key."""
    ledger = engine.core.ledger
    sound(ledger)
    cells = {
        key: request.cells_of(place, HASH_TOKENS)
        for request in engine.requests.values()
        for place, key in enumerate(keys_of(request))
    }
    for key, slot in ledger.index.items():
        if ledger.readable(slot):
            right = engine.host[slot] == [cells[key]] * engine.workers
            expect(
                right,
                Property.NO_REUSE_IN_FLIGHT,
                f"slot {slot} is readable and does not hold the bytes of its key",
            )


def come_to_rest(engine: SmallEngine) -> None:
    """Run until all copies end and all requests finish; nothing may be left or held then: progress (S9)."""
    engine.run(400)
    ledger = engine.core.ledger
    sound(ledger)
    for violation in check_rest(ledger):
        raise PropertyBroken(violation.property, violation.message)
    leased = sum(word != 0 for word in ledger.leases.words)
    expect(
        sum(engine.pool.references) == leased, Property.ONE_RELEASE_PER_HOLD, "device blocks are held at rest"
    )
    expect(not engine.sending, Property.PROGRESS, "blocks of finished requests are kept at rest")


def blocks_stored(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def match(hand: Hand, request: SmallRequest) -> int | None:
    return hand.scheduler.get_num_new_matched_tokens(request, 0)[0]


def under_store(prompt: Sequence[int], **options: Any) -> SmallEngine:
    """Return an engine whose only request has ended while its store is in flight."""
    engine = SmallEngine(last_step=LastStep.KEEP_STEPPING, **options)
    engine.arrive(SmallRequest("first", prompt))
    engine.step()
    engine.step()
    assert engine.copies
    return engine


# What is stored.


def hit_on_the_device_while_it_is_stored() -> None:
    hand = Hand()
    first, second = SmallRequest("first", range(4)), SmallRequest("second", range(9), 5)
    hand.admit(first, [7])
    hand.compute(first)
    hand.scheduler.request_finished(first, [[7]])
    assert blocks_stored(hand.step()) == [7]
    hand.admit(second, [7, 8, 9], local=4)
    hand.compute(second)
    plan = hand.step(second)
    sound(hand.core.ledger)
    expect(
        blocks_stored(plan) == [8], Property.STORED_ONCE, "a block whose store is in flight is stored again"
    )


def step_runs_while_the_next_is_decided() -> None:
    hand, request = Hand(), SmallRequest("r", range(6), 8)
    hand.admit(request, [0, 1, 2])
    for token in range(3):
        request.append(100 + token)
    request.num_computed_tokens, request.num_output_placeholders = 9, 2
    stored = blocks_stored(hand.step(request))
    expect(
        stored == [0],
        Property.COPY_ORDER,
        f"blocks {stored} are stored, and a running step has yet to write block 1",
    )


def generation_ends_on_a_block_boundary() -> None:
    hand, request = Hand(), SmallRequest("r", range(6), 2)
    hand.admit(request, [0, 1])
    for token in range(2):
        request.append(100 + token)
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0, 1]])
    expect(
        blocks_stored(hand.step()) == [0],
        Property.CORRECT_BYTES,
        "the KV of the last sampled token was never computed",
    )


def offer_evicts_for_itself() -> None:
    core, _ = new_core(host_blocks=4)
    oldest, others, new = keys(1), keys(3, "others"), keys(3, "new")
    store(core, "a", oldest)
    store(core, "b", others, 1)
    assert len(core.prepare_store("c", oldest + new, [8, 9, 10, 11]).keys) == 3
    expect(
        core.lookup(oldest[0]) is HIT, Property.MATCH_HOLDS, "the offer evicted a resident block of its own"
    )


def one_block_at_two_positions() -> None:
    core, _ = new_core()
    prepared = core.prepare_store("r", keys(2), [7, 7])
    sound(core.ledger)
    expect(
        list(prepared.stored) == [0],
        Property.ONE_RELEASE_PER_HOLD,
        "one device block is stored and released twice",
    )


def one_key_twice() -> None:
    core, _ = new_core()
    prepared = core.prepare_store("r", keys(1) * 2, [0, 1])
    sound(core.ledger)
    expect(
        list(prepared.stored) == [0],
        Property.CONSERVATION,
        "one key has two slots, and only one of them can be found",
    )


def key_of_a_block_changes_under_its_store() -> None:
    pool = SmallPool(8)
    hand, request = Hand(pool=pool), SmallRequest("r", range(4))
    (key,), other = keys_of(request), b"other" + bytes(4)
    hand.admit(request, [0])
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0]])
    (job,) = hand.step().stores
    pool.caches[0] = other
    hand.report(job.transfer)
    found = hand.core.lookup(key), hand.core.lookup(other)
    expect(
        found == (HIT, MISS),
        Property.CORRECT_BYTES,
        "bytes are published under a key for which they were not stored",
    )


def aborted_before_it_was_scheduled() -> None:
    hand, request = Hand(), SmallRequest("r", range(9))
    hand.scheduler.add_request(request)
    hand.scheduler.request_finished(request, [[]], aborted=True)
    assert not hand.core.ledger.requests


def stored_blocks_go_to_the_tail() -> None:
    pool, core = SmallPool(12), Offloader(OffloadConfig(host_blocks=32, device_blocks=12))
    walk = FreeQueueWalk(core, pool, 2)
    for block, key in enumerate(keys(12)):
        pool.cache(block, key)
    for wanted in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        job = walk.store()
        blocks = to_list(job.device_blocks) if job else []
        expect(
            blocks == wanted,
            Property.PROGRESS,
            f"the walk stored {blocks} and passed over {wanted}, the next victims",
        )
        assert job is not None
        pool.touch(blocks)
        core.submit([job.transfer])
        core.report(job.transfer, 0, True)
        pool.free_blocks(blocks[::-1])


# What is matched and loaded.


def hit_is_wanted_by_another() -> None:
    core, _ = new_core(host_blocks=2)
    store(core, "a", keys(2))
    assert core.match("r", keys(2)).hits == 2
    core.prepare_store("b", keys(2, "q"), [4, 5])
    expect(
        core.prepare_load("r", [8, 9]) is not None,
        Property.MATCH_HOLDS,
        "a counted hit is gone before its load",
    )
    sound(core.ledger)


def slot_is_wanted_under_its_load() -> None:
    core, _ = new_core(host_blocks=2)
    store(core, "a", keys(2))
    load(core, "r", keys(2), 8)
    made = core.prepare_store("b", keys(2, "q"), [4, 5]).job
    expect(made is None, Property.NO_REUSE_IN_FLIGHT, "a store got slots while a load reads them")
    sound(core.ledger)


def prefix_is_being_stored() -> None:
    hand = Hand()
    first, second = SmallRequest("first", range(8)), SmallRequest("second", range(9))
    hand.admit(first, [0, 1])
    hand.compute(first)
    (job,) = hand.step(first).stores
    expect(
        match(hand, second) is None,
        Property.STORED_ONCE,
        "a prefix is computed and stored again during its store",
    )
    hand.report(job.transfer)
    assert match(hand, second) == 8


def prefix_is_being_loaded() -> None:
    hand = Hand()
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    hand.admit(SmallRequest("first", range(9)), [10, 11, 12])
    hand.step()
    found = match(hand, SmallRequest("second", range(9)))
    expect(found is None, Property.STORED_ONCE, "a block that one request loads is loaded again by another")


def load_begins_beside_an_own_store() -> None:
    hand = Hand(core={"defer_ticks": 0})
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    request = SmallRequest("r", range(13), 5)
    hand.admit(request, [10, 11, 12, 13])
    hand.end(hand.step())
    hand.compute(request)
    assert blocks_stored(hand.step(request)) == [12]
    found = hand.admit(request, [20, 21, 22, 23])
    expect(found == 8, Property.LEGAL_CALLS, "a preempted request may not load while its store is in flight")
    assert len(hand.step().loads) == 1
    sound(hand.core.ledger)


def hit_has_to_wait_for_more() -> None:
    hand = Hand()
    hand.store(SmallRequest("stored", range(4)), [0])
    request, other = SmallRequest("r", range(9)), SmallRequest("other", range(8), skip_reading=True)
    assert match(hand, request) == 4
    hand.admit(other, [5, 6])
    hand.compute(other)
    assert blocks_stored(hand.step(other)) == [6]
    assert match(hand, request) is None
    sound(hand.core.ledger)


def hit_is_not_used() -> None:
    hand, request = Hand(), SmallRequest("r", range(9))
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    assert match(hand, request) == 8
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 0)
    expect(
        len(hand.core.ledger.policy) == 2,
        Property.ONE_RELEASE_PER_HOLD,
        "a hit that no request will use is pinned",
    )


def match_is_released() -> None:
    core, _ = new_core()
    store(core, "a", keys(2))
    assert core.match("r", keys(2)).hits == 2
    core.release("r")
    sound(core.ledger)


def load_cannot_be_planned() -> None:
    hand = Hand(core={"max_live_transfers": 1})
    hand.store(SmallRequest("stored", range(8)), [0, 1])
    request, other = SmallRequest("r", range(9)), SmallRequest("other", range(50, 58))
    hand.admit(other, [4, 5])
    hand.compute(other)
    assert match(hand, request) == 8
    (job,) = hand.step(other).stores
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 8)
    (ended,) = hand.report(job.transfer).loads
    expect(not ended.good, Property.FAILURE_IS_NOT_SUCCESS, "blocks that were never loaded count as loaded")
    assert len(hand.core.ledger.policy) == 4


def load_fails() -> None:
    engine = SmallEngine(prefix_cache=False)
    finish_one(engine, "first", [*range(9)])
    engine.arrive(SmallRequest("second", range(9)))
    engine.step()
    (transfer,) = engine.copies
    engine.carry_out(transfer, good=False)
    come_to_rest(engine)


def store_fails() -> None:
    engine = under_store(range(9), prefix_cache=False)
    (transfer,) = engine.copies
    engine.carry_out(transfer, good=False)
    finish_one(engine, "second", [*range(9)])


# Who holds memory.


def blocks_are_given_away_under_their_store() -> None:
    engine = SmallEngine(device_blocks=4, references=False, prefix_cache=False)
    first = engine.arrive(SmallRequest("first", range(8), 8))
    engine.step()
    engine.step()
    assert engine.copies
    engine.preempt(first)
    engine.arrive(SmallRequest("second", range(100, 116)))
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    sound_host(engine)


def request_is_aborted_under_its_load() -> None:
    engine = SmallEngine(device_blocks=4, prefix_cache=False)
    finish_one(engine, "first", [*range(9)])
    second = engine.arrive(SmallRequest("second", range(9)))
    engine.step()
    engine.finish(second, aborted=True)
    engine.arrive(SmallRequest("other", range(100, 116)))
    engine.step()
    come_to_rest(engine)


def requests_end_before_their_stores() -> None:
    engine = SmallEngine(chunk_tokens=4, last_step=LastStep.KEEP_STEPPING)
    engine.arrive(SmallRequest("r", range(13)))
    for _ in range(5):
        engine.step()
    assert not engine.running
    assert len(engine.copies) == 3
    come_to_rest(engine)


def request_ends_twice() -> None:
    core, _ = new_core()
    core.arrive("r")
    assert core.finish("r", aborted=True)
    assert core.finish("r")


def second_store_of_as_many() -> None:
    core, _ = new_core()
    begin_store(core, "a", keys(1))
    begin_store(core, "b", keys(1, "q"), 1)
    sound(core.ledger)


def plan_is_refused_half_way() -> None:
    core, _ = new_core()
    store(core, "a", keys(1))
    load(core, "r", keys(1), 8)
    ledger = core.ledger
    slots, blocks = pack(ledger.free.first(1)), pack((8,))
    plan = ev.StorePlanned(ledger.seq + 1, 0, 0, (("b", 1),), tuple(keys(1, "q")), slots, blocks)
    try:
        ledger.apply(plan)
    except IllegalTransition:
        sound(ledger)
    else:
        raise AssertionError("the ledger accepted a store of a device block that a load writes")


# Reset.


def slot_under_copy_when_reset() -> None:
    core, _ = new_core(host_blocks=1)
    begin_store(core, "a", keys(1))
    assert not core.reset()
    made = core.prepare_store("b", keys(1, "q"), [1]).job
    expect(made is None, Property.NO_REUSE_IN_FLIGHT, "a store got a slot while another copy writes it")
    sound(core.ledger)


def reset_under_a_store() -> None:
    engine = under_store(range(9), device_blocks=4)
    assert not engine.reset()
    engine.arrive(SmallRequest("other", range(100, 116)))
    engine.step()
    engine.arrive(SmallRequest("again", range(9)))
    come_to_rest(engine)


def request_runs_on_after_a_reset() -> None:
    engine = SmallEngine()
    request = engine.arrive(SmallRequest("r", range(8), 12))
    for _ in range(3):
        engine.step()
    engine.carry_out_all()
    engine.hand_on()
    assert engine.reset()
    engine.run()
    found = {engine.core.lookup(key) for key in keys_of(request)[: (request.num_tokens - 1) // HASH_TOKENS]}
    expect(found == {HIT}, Property.PROGRESS, "a request outlived a reset and is not stored again")


# Ends of transfers.


def old_report_after_a_reset() -> None:
    core, _ = new_core()
    old = begin_store(core, "a", keys(1))
    core.reset()
    begin_store(core, "b", keys(1), 1)
    core.complete_store(old)
    found = core.lookup(keys(1)[0])
    expect(found is HIT_PENDING, Property.STALE_REPORTS, "the report of another copy made the key readable")


def old_report_after_a_loss() -> None:
    core, _ = new_core()
    old = begin_store(core, "a", keys(1))
    core.lose(old)
    begin_store(core, "b", keys(1), 1)
    core.complete_store(old)
    found = core.lookup(keys(1)[0])
    expect(found is HIT_PENDING, Property.STALE_REPORTS, "the report of another copy made the key readable")


def last_request_is_over() -> None:
    engine = SmallEngine()
    engine.arrive(SmallRequest("r", range(9)))
    for _ in range(20):
        if engine.unfinished() or engine.scheduler.has_pending_work():
            engine.step()
    left = list(engine.core.ledger.transfers)
    expect(not left, Property.LAST_STEP, f"the engine has stopped stepping, and transfers {left} are left")


def store_outlives_its_bound() -> None:
    core, _ = new_core(workers=2, transfer_ticks=2)
    transfer = begin_store(core, "a", keys(1))
    core.report(transfer, 0, True)
    for _ in range(2):
        core.tick()
    assert len(core.lose_overdue()) == 1
    expect(
        core.lookup(keys(1)[0]) is MISS,
        Property.PUBLISH_AFTER_COMMIT,
        "readable before every worker has reported",
    )


def store_is_submitted() -> None:
    core, _ = new_core()
    begin_store(core, "a", keys(2))
    sound(core.ledger)
    expect(
        core.lookup(keys(2)[0]) is HIT_PENDING,
        Property.PUBLISH_AFTER_COMMIT,
        "readable before any worker has reported",
    )


class _DescribedRequest(SmallRequest):
    """A request with token ids only, which a KV event can describe."""

    prompt_embeds = cache_salt = None
    mm_features = ()


def removed_and_stored_in_one_batch() -> None:
    engine = SmallEngine(host_blocks=2, prefix_cache=False, publisher=Publisher())
    for name, first in (("a", 0), ("b", 50), ("a again", 0)):
        engine.arrive(_DescribedRequest(name, range(first, first + 9)))
        engine.run()
    stored = [event.token_ids for event in engine.scheduler.take_events() if isinstance(event, BlockStored)]
    blocks = [[*range(first, first + 4)] for first in (0, 4, 50, 54, 0, 4)]
    expect(
        stored == blocks, Property.EVENTS_ARE_STATE, "a stored event has lost the description of its blocks"
    )


SCENARIOS: dict[str, Callable[[], None]] = {
    "B01": hit_on_the_device_while_it_is_stored,
    "B02": step_runs_while_the_next_is_decided,
    "B04": blocks_are_given_away_under_their_store,
    "B05": request_is_aborted_under_its_load,
    "B06": hit_is_wanted_by_another,
    "B07": offer_evicts_for_itself,
    "B08": prefix_is_being_stored,
    "B09": prefix_is_being_loaded,
    "B10": one_block_at_two_positions,
    "B11": one_key_twice,
    "B12": old_report_after_a_reset,
    "B13": slot_under_copy_when_reset,
    "B14": reset_under_a_store,
    "B15": reset_under_a_store,
    "B16": key_of_a_block_changes_under_its_store,
    "B17": generation_ends_on_a_block_boundary,
    "B18": load_begins_beside_an_own_store,
    "B19": aborted_before_it_was_scheduled,
    "B20": requests_end_before_their_stores,
    "B21": last_request_is_over,
    "B22": hit_has_to_wait_for_more,
    "B23": stored_blocks_go_to_the_tail,
    "B24": request_runs_on_after_a_reset,
    "B26": removed_and_stored_in_one_batch,
    "B27": load_fails,
    "B28": store_fails,
    "B29": requests_end_before_their_stores,
    "B30": request_ends_twice,
    "B31": hit_is_not_used,
    "B32": match_is_released,
    "B33": load_cannot_be_planned,
    "B34": store_outlives_its_bound,
    "B35": slot_is_wanted_under_its_load,
    "B36": second_store_of_as_many,
    "B38": store_is_submitted,
    "B39": old_report_after_a_loss,
    "B40": plan_is_refused_half_way,
}
