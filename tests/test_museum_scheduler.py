"""The museum: known bugs of other systems, put back into the deciding code, and found.

Each exhibit names the bug, the property that it breaks, a scenario that the real code passes, and what to put
back. Two tests an exhibit: the scenario passes; with the bug, it fails. Where a scenario is the test of a row,
that test is it. An exhibit that is stopped by the ledger's own tables fails with their refusal.

Not here, because what decides them is not this floor:

===  ================================================================================================
B03  a load writes what a running step still reads: a plan's copies start behind the step before; that is the
     copy engines' to keep (`tests/test_cuda_io.py`), and the model engine's, which checks what is read
B37  a table of offsets is overwritten before the copy has read it: inside one copy engine; a job is immutable
===  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import test_scheduler_ending as ending
import test_scheduler_matching as matching
import test_scheduler_ranks as ranks
import test_scheduler_storing as storing
from core_life import keys, new_core
from core_life import store as store_now
from scheduler_life import ModelEngine, ModelPool, ModelRequest
from scheduler_traffic import FULL, Hand, finish_one, keys_of, of_kind

from kvsm import events as ev
from kvsm.errors import IllegalTransition, InvalidEvent
from kvsm.events import Direction, SkipReason
from kvsm.ids import to_list
from kvsm.invariants import check_ledger
from kvsm.kv_events import BlockRemoved, BlockStored, KVCacheEvent, Publisher
from kvsm.ledger import Ledger
from kvsm.offloader import LookupResult, Offloader
from kvsm.policies.slot_queue import SlotQueue
from kvsm.scheduler import LoadEnded, OffloadScheduler
from kvsm.scheduler.free_queue import FreeQueueWalk
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

Patch = pytest.MonkeyPatch

# Scenarios that are no row's test.


def host_bytes_are_right(engine: ModelEngine) -> None:
    """S15: what can be read on the host is what its key says."""
    ledger = engine.core.ledger
    for key, slot in ledger.index.items():
        if ledger.readable(slot):
            assert engine.host[slot][0][-1:] == [key[:-4]], "S15: a readable key has other bytes"


def new_tenant_is_not_saved_under_the_old_key() -> None:
    """A store is queued, its request preempted, its blocks given away and rewritten; then the copy runs."""
    engine = ModelEngine(device_blocks=4, references=False, prefix_cache=False)
    first = engine.arrive(ModelRequest("first", range(9), 9))
    engine.step()
    engine.step()
    assert engine.copies
    engine.preempt(first)
    engine.waiting.remove(first)
    engine.arrive(ModelRequest("second", range(50, 63), 2))
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    host_bytes_are_right(engine)


def load_does_not_land_in_another_requests_block() -> None:
    """A load runs, its request is aborted, its blocks are wanted by the next."""
    engine = ModelEngine(device_blocks=6, prefix_cache=False)
    finish_one(engine, "stored", [*range(16)])
    loading = engine.arrive(ModelRequest("loading", range(17)))
    engine.step()
    assert loading.loading
    engine.finish(loading, aborted=True)
    engine.arrive(ModelRequest("next", range(50, 70), 3))
    engine.step()
    engine.carry_out_all()
    for _ in range(4):
        engine.step()


def offer_does_not_evict_what_it_found() -> None:
    """Of five keys one is resident, and there are three other slots."""
    hand = Hand(core={"host_blocks": 4})
    hand.store(ModelRequest("one", range(4)), [0])
    hand.store(ModelRequest("other", range(50, 62)), [1, 2, 3])
    request = ModelRequest("r", range(20), skip_reading=True)
    hand.admit(request, [10, 11, 12, 13, 14])
    hand.compute(request)
    hand.step(request)
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT


def key_offered_twice_is_stored_once() -> None:
    """One call offers the same key on two device blocks."""
    core, _ = new_core()
    core.prepare_store("r", [*keys(1), *keys(1)], [0, 1])
    assert check_ledger(core.ledger) == []
    assert len(core.ledger.free) == 7


def late_report_does_not_complete_the_next_store() -> None:
    """A store of a key fails; the next is under way when the first is reported again, as good."""
    hand = Hand()
    request = ModelRequest("r", range(4), 9)
    hand.admit(request, [0, 1])
    hand.compute(request)
    (first,) = hand.step(request).stores
    hand.report(first.transfer, good=False)
    assert hand.step(request).stores
    hand.report(first.transfer)
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT_PENDING


def slot_of_an_abandoned_copy_is_not_given_away() -> None:
    """A store writes, the cache is reset, another store is made; then the first copy lands."""
    engine = ModelEngine(host_blocks=1, prefix_cache=False)
    engine.arrive(ModelRequest("first", range(5), 30))
    engine.step()
    engine.step()
    (old,) = engine.copies
    engine.reset()
    engine.arrive(ModelRequest("second", range(50, 55), 30))
    engine.step()
    engine.step()
    for transfer in list(engine.copies):
        if transfer != old:
            engine.carry_out(transfer)
    engine.hand_on()
    engine.carry_out(old)
    engine.hand_on()
    host_bytes_are_right(engine)


def reset_keeps_the_references_of_copies() -> None:
    """A copy reads a block of a request that is preempted after the reset; others want its blocks."""
    engine = ModelEngine(device_blocks=4, prefix_cache=False)
    first = engine.arrive(ModelRequest("first", range(9), 9))
    engine.step()
    engine.step()
    engine.reset()
    engine.preempt(first)
    engine.step(admit=False)
    engine.take(len(engine.pool.queue))


def published_key_is_the_planned_one() -> None:
    """Since the copy began the block is cached under another hash."""
    pool = ModelPool(64)
    hand = Hand(pool=pool)
    request = ModelRequest("r", range(4), 9)
    hand.admit(request, [5, 6])
    hand.compute(request)
    (job,) = hand.step(request).stores
    pool.cache(5, b"another hash" + bytes(4))
    hand.report(job.transfer)
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT
    assert hand.core.lookup(b"another hash" + bytes(4)) is LookupResult.MISS


def request_without_blocks_is_aborted() -> None:
    """It has keys, and was never scheduled."""
    hand = Hand()
    request = ModelRequest("r", range(12))
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    hand.scheduler.request_finished(request, [[]], aborted=True)
    assert not hand.step().stores


def silent_store_is_not_readable() -> None:
    """No worker reports it, however long."""
    hand = Hand(core={"transfer_ticks": 3})
    request = ModelRequest("r", range(4), 9)
    hand.admit(request, [0, 1])
    hand.compute(request)
    for _ in range(4):
        hand.step(request)
    assert not hand.core.ledger.readable(0)
    assert of_kind(hand, ev.TransferLost)


def blocks_under_copy_are_not_evicted() -> None:
    """The host is full of what a load reads, and a store wants room."""
    hand = matching.hand_with(range(8), core={"host_blocks": 2})
    hand.admit(ModelRequest("loads", range(9)), [20, 21, 22])
    hand.step()
    other = ModelRequest("other", range(50, 58), 9)
    hand.admit(other, [10, 11, 12])
    hand.compute(other)
    assert not hand.step(other).stores
    assert [event.reason for event in of_kind(hand, ev.StoreSkipped)] == [SkipReason.POOL_FULL]


def stores_in_flight_have_slots_of_their_own() -> None:
    hand = Hand()
    slots: list[int] = []
    for number in range(2):
        request = ModelRequest(f"r{number}", range(50 * number, 50 * number + 8), 9)
        hand.admit(request, [2 * number, 2 * number + 1])
        hand.compute(request)
        (job,) = hand.step(request).stores
        slots += to_list(job.host_blocks)
    assert len(set(slots)) == 4


def released_match_takes_no_pin_of_another() -> None:
    """Two requests hold the same blocks; one gives its match back, and is finished."""
    hand = matching.hand_with(range(8), core={"host_blocks": 2})
    first, second = ModelRequest("first", range(9)), ModelRequest("second", range(9))
    matching.match(hand, first)
    matching.match(hand, second)
    hand.scheduler.update_state_after_alloc(first, [[20, 21, 22]], 0)
    hand.scheduler.request_finished(first, [[20, 21, 22]], aborted=True)
    assert check_ledger(hand.core.ledger) == []
    hand.store(ModelRequest("other", range(50, 58)), [10, 11])
    assert hand.core.lookup(keys_of(second)[0]) is LookupResult.HIT


def refused_load_gives_everything_back() -> None:
    """Between the match and the allocation another request took the last place of a live transfer."""
    hand = matching.hand_with(range(8), core={"max_live_transfers": 1})
    request, other = ModelRequest("r", range(9)), ModelRequest("other", range(50, 54))
    assert matching.match(hand, request) == 8
    hand.admit(other, [5])
    hand.compute(other)
    hand.step(other)
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 8)
    assert hand.scheduler.update_connector_output([]).loads == (LoadEnded("r", False, 0),)
    assert matching.pins(hand, "r") == 0
    assert len(hand.core.ledger.policy) == 2


def later_store_of_a_batch_keeps_its_payload() -> None:
    """A key is stored, evicted, and stored again before the events are taken."""
    engine = ModelEngine(host_blocks=1, prefix_cache=False, publisher=Publisher(self_describing=True))
    for name, first in (("a", 0), ("b", 50), ("c", 0)):
        finish_one(engine, name, [*range(first, first + 5)])
    events = engine.scheduler.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [[0, 1, 2, 3], [50, 51, 52, 53], [0, 1, 2, 3]]


# What is put back.


def never(*_: Any, **__: Any) -> None:
    return None


def dedupe_lasts_one_step(patch: Patch) -> None:
    """Leases are not looked at when a block is offered."""
    patch.setattr(Offloader, "_all_new", lambda _, keys, blocks: len(set(keys)) == len(keys))


def books_decide_what_is_computed(patch: Patch) -> None:
    """Placeholders count as computed."""
    patch.setattr(TrackedRequest, "confirmed_tokens", lambda self: self.request.num_computed_tokens)


def last_sample_counts(patch: Patch) -> None:
    """All that is no placeholder counts, the last sampled token too."""
    patch.setattr(
        TrackedRequest,
        "confirmed_tokens",
        lambda self: self.request.num_computed_tokens - self.request.num_output_placeholders,
    )


def reuse_waits_for_nobody(patch: Patch) -> None:
    """No flush is asked for when blocks are given away."""
    patch.setattr(OffloadScheduler, "_touching", lambda *_: [])


def copies_hold_nothing(patch: Patch) -> None:
    """A copy takes no reference to its blocks, and gives none back."""
    patch.setattr(OffloadScheduler, "_hold", never)
    patch.setattr(ModelPool, "free_blocks", _tolerant_free)


_free_blocks = ModelPool.free_blocks


def _tolerant_free(pool: ModelPool, blocks: Sequence[int]) -> None:
    _free_blocks(pool, [block for block in blocks if pool.references[block]])


def match_pins_nothing(patch: Patch) -> None:
    """A hit is counted, and nothing is held."""
    patch.setattr(
        OffloadScheduler, "_pin", lambda _, tracked, __, end, ___: (end - tracked.local, end > tracked.local)
    )


def offer_protects_nothing(patch: Patch) -> None:
    """What the offer found resident may be evicted for the rest of it."""
    make_room = Offloader._make_room
    patch.setattr(Offloader, "_make_room", lambda self, new, keys, _: make_room(self, new, keys, ()))


def pending_is_a_miss(patch: Patch) -> None:
    """Nobody ever waits."""
    patch.setattr(Offloader, "defer", lambda *_: False)


def loads_are_not_seen(patch: Patch) -> None:
    """A load in flight of the same key is not looked for."""
    patch.setattr(Offloader, "load_of", never)


def offers_are_taken_as_they_come(patch: Patch) -> None:
    """Doubled keys and blocks of one offer are not looked for."""
    patch.setattr(Offloader, "_all_new", lambda *_: True)


def keys_are_entered_twice(patch: Patch) -> None:
    """Nor are they by the ledger."""
    offers_are_taken_as_they_come(patch)

    def enter(self: Ledger, _: int, keys: tuple[bytes, ...], slots: Any) -> None:
        for slot, key in zip(to_list(slots), keys):
            self.index[key], self.key_of[slot] = slot, key

    patch.setattr(Ledger, "_enter", enter)


def reports_act_by_key(patch: Patch) -> None:
    """A report of a transfer that is over completes the live store of the same keys."""
    report = Offloader.report

    def by_key(self: Offloader, transfer: int, worker: int, good: bool) -> Any:
        named = [event.keys for event in self.log if event.seq == transfer]  # type: ignore[attr-defined, union-attr]
        for one in self.ledger.transfers.values():
            if transfer not in self.ledger.transfers and one.keys in named:
                return report(self, one.id, worker, good)
        return report(self, transfer, worker, good)

    patch.setattr(Offloader, "report", by_key)


def reset_ends_copies(patch: Patch) -> None:
    """A reset takes every copy under way as failed: its slots are free."""
    reset = Offloader.reset

    def impatient(self: Offloader) -> bool:
        for transfer in list(self.ledger.transfers):
            for worker in range(self.config.workers):
                self.report(transfer, worker, False)
        return reset(self)

    patch.setattr(Offloader, "reset", impatient)


def reset_releases_references(patch: Patch) -> None:
    """A reset gives back what the copies under way hold."""
    reset = OffloadScheduler.reset_cache

    def releasing(self: OffloadScheduler) -> bool:
        assert self._pool is not None
        for transfer in self.offloader.ledger.transfers.values():
            self._pool.free_blocks(to_list(transfer.device_blocks))
        return reset(self)

    patch.setattr(OffloadScheduler, "reset_cache", releasing)


def drained_copies_wake_nobody(patch: Patch) -> None:
    """The end of a copy of before the reset is dropped as far as waiting requests are concerned."""
    wake = Ledger._wake
    patch.setattr(
        Ledger,
        "_wake",
        lambda self, seq, requests: wake(self, seq, [one for one in requests if not self.epoch]),
    )


def key_is_read_at_completion(patch: Patch) -> None:
    """The store is published under what its device block caches now."""
    update = OffloadScheduler.update_connector_output

    def rehashing(self: OffloadScheduler, reports: Any) -> Any:
        ledger = self.offloader.ledger
        for report in reports:
            one = ledger.transfers.get(report.transfer)
            for block, slot in zip(to_list(one.device_blocks), to_list(one.slots)) if one else ():
                assert self._pool is not None
                now = self._pool.key_of(block)
                if now is not None:
                    del ledger.index[ledger.key_of[slot]]
                    ledger.index[now], ledger.key_of[slot] = slot, now
        return update(self, reports)

    patch.setattr(OffloadScheduler, "update_connector_output", rehashing)


def second_load_is_allowed(patch: Patch) -> None:
    """Whether a load of the request runs is not asked."""
    patch.setattr(Offloader, "waits_for", never)
    patch.setattr(Offloader, "may_match", lambda *_: True)


def keys_stand_for_blocks(patch: Patch) -> None:
    """As many chunks are stored as there are keys."""
    patch.setattr(
        TrackedRequest, "full_chunks", lambda self, *_: (self.update_keys(), tuple(map(len, self.keys)))[1]
    )


def finish_comes_first(patch: Patch) -> None:
    """The request's record is deleted before its last store is planned."""
    finished = OffloadScheduler.request_finished

    def hasty(self: OffloadScheduler, request: Any, *arguments: Any, **more: Any) -> Any:
        self.offloader.finish(request.request_id)
        return finished(self, request, *arguments, **more)

    patch.setattr(OffloadScheduler, "request_finished", hasty)


def last_step_flushes_nothing(patch: Patch) -> None:
    """No step asks its workers to wait."""
    patch.setattr(Offloader, "flush", lambda *_: ())


def matched_requests_wait_for_room(patch: Patch) -> None:
    """Whoever holds a match waits, holding it, until others give back theirs."""
    ask = OffloadScheduler.get_num_new_matched_tokens

    def holding(self: OffloadScheduler, request: Any, computed: int) -> tuple[int | None, bool]:
        answer = ask(self, request, computed)
        others = self.offloader.ledger.requests.values()
        if answer[0] and any(one.name != request.request_id and len(one.pins) for one in others):
            return None, False
        return answer

    patch.setattr(OffloadScheduler, "get_num_new_matched_tokens", holding)


def two_matches_come_to_an_end() -> None:
    """Two requests that the engine cannot place at once hold a match each, and ask at every step."""
    engine = ModelEngine(device_blocks=4, host_blocks=6, prefix_cache=False)
    finish_one(engine, "a", [*range(12)])
    finish_one(engine, "b", [*range(100, 112)])
    for name, first in (("c", 0), ("d", 100)):
        request = ModelRequest(name, [*range(first, first + 12), 7])
        engine.arrive(request)
        engine.scheduler.get_num_new_matched_tokens(request, 0)
    engine.run(40)


def walk_has_a_cursor(patch: Patch) -> None:
    """The walk resumes behind the block that it saw last, wherever that stands now."""
    walk, seen = FreeQueueWalk._walk, [-1]

    def resumed(self: FreeQueueWalk) -> Any:
        pool = self._pool
        assert isinstance(pool, ModelPool)
        queue = pool.queue
        rest = queue[queue.index(seen[0]) + 1 :] if seen[0] in queue else queue
        pool.queue = rest
        answer = walk(self)
        pool.queue = queue
        seen[0] = ([*rest[: 2 * self._target], seen[0]])[0] if not rest else rest[: 2 * self._target][-1]
        return answer

    patch.setattr(FreeQueueWalk, "_walk", resumed)


def reset_forgets_requests(patch: Patch) -> None:
    """A reset drops what is known of running requests."""
    reset = OffloadScheduler.reset_cache
    patch.setattr(
        OffloadScheduler, "reset_cache", lambda self: (reset(self), self._tracked.clear())[0]
    )


def silence_is_patience(patch: Patch) -> None:
    """No transfer is ever given up."""
    patch.setattr(Offloader, "lose_overdue", lambda _: [])


def removal_takes_the_payload(patch: Patch) -> None:
    """Payloads are looked up by key when the events are taken, and removals delete them."""
    take = Publisher.take_kv_events

    def by_key(self: Publisher) -> list[KVCacheEvent]:
        gone: set[bytes] = set()
        events: list[KVCacheEvent] = []
        for event in take(self):
            if isinstance(event, BlockRemoved):
                gone.update(event.block_hashes)
            elif isinstance(event, BlockStored) and not gone.isdisjoint(event.block_hashes):
                event = BlockStored(event.block_hashes, None, [], 0, None, event.medium, None)
            events.append(event)
        return events

    patch.setattr(Publisher, "take_kv_events", by_key)


def failed_load_counts_as_loaded(patch: Patch) -> None:
    """The engine is told that every load went well."""
    end = OffloadScheduler._load_ended
    patch.setattr(
        OffloadScheduler, "_load_ended", lambda self, name, *, good, lost=False: end(self, name, good=True)
    )


def errors_are_completions(patch: Patch) -> None:
    """A bad report is taken as a good one."""
    report = Offloader.report
    patch.setattr(
        Offloader, "report", lambda self, transfer, worker, good: report(self, transfer, worker, True)
    )


def finished_requests_are_dropped(patch: Patch) -> None:
    """With the request goes the note that its blocks wait for a copy."""
    finished = OffloadScheduler.request_finished

    def dropping(self: OffloadScheduler, request: Any, *arguments: Any, **more: Any) -> Any:
        answer = finished(self, request, *arguments, **more)
        self._sending.pop(request.request_id, None)
        return answer

    patch.setattr(OffloadScheduler, "request_finished", dropping)


def finish_is_not_remembered(patch: Patch) -> None:
    """A request that was finished can be finished again."""
    finished = OffloadScheduler.request_finished

    def forgetful(self: OffloadScheduler, request: Any, *arguments: Any, **more: Any) -> Any:
        known = self._tracked.get(request.request_id)
        answer = finished(self, request, *arguments, **more)
        if known is not None:
            self._tracked[request.request_id] = known
        return answer

    patch.setattr(OffloadScheduler, "request_finished", forgetful)


def unused_hits_stay(patch: Patch) -> None:
    """A match that is not loaded is not given back."""
    patch.setattr(Offloader, "release", never)


def pins_are_given_back_twice(patch: Patch) -> None:
    """A request that gave its match back still names it, and gives it back again when it is over; below
    zero is zero."""
    unpin = Ledger._unpin

    def clamped(self: Ledger, request: Any, slots: Any, seq: int) -> None:
        pins = request.pins
        held = [slot for slot in to_list(slots) if self.blocks.words[slot] >> 16]
        unpin(self, request, tuple(held), seq)
        request.pins = pins

    patch.setattr(Ledger, "_unpin", clamped)


def half_a_promise_counts(patch: Patch) -> None:
    """A load that cannot be planned is reported as loaded."""
    patch.setattr(OffloadScheduler, "_plan_load", never)
    failed_load_counts_as_loaded(patch)


def leases_expire(patch: Patch) -> None:
    """A store whose time is up counts as done."""

    def expire(self: Offloader) -> list[Any]:
        for one in list(self.ledger.transfers.values()):
            if self.ledger.tick - one.since >= self.config.transfer_ticks:
                for worker in range(self.config.workers):
                    self.report(one.id, worker, True)
        return []

    patch.setattr(Offloader, "lose_overdue", expire)


def busy_blocks_stand_in_the_eviction_order(patch: Patch) -> None:
    """What a load reads may be chosen as a victim."""
    from kvsm.policies.lru import LRUPolicy

    patch.setattr(LRUPolicy, "busy", never)
    patch.setattr(LRUPolicy, "idle", never)


def slots_are_given_twice(patch: Patch) -> None:
    """A slot that was given out stays in the free queue."""
    patch.setattr(SlotQueue, "remove", never)


def readable_when_planned(patch: Patch) -> None:
    """A block can be read as soon as it has a slot."""
    first, last = BlockState.ALLOCATED, BlockState.LOADING
    patch.setattr(
        Ledger, "readable", lambda self, slot: first <= self.blocks.words[slot] & STATE_MASK <= last
    )


class Exhibit(NamedTuple):
    """A bug, what it breaks, what is put back, and who finds it."""

    id: str
    property_id: str
    put_back: Callable[[Patch], None]
    scenario: Callable[[], None]
    stopped_by: tuple[type[Exception], ...] = (AssertionError, IllegalTransition, InvalidEvent)


EXHIBITS = [
    Exhibit(
        "B01",
        "S13",
        dedupe_lasts_one_step,
        lambda: storing.test_in_flight_dedupe_is_by_device_block_and_for_the_life_of_the_transfer("completed"),
    ),
    Exhibit(
        "B02",
        "S12",
        books_decide_what_is_computed,
        storing.test_eager_store_leaves_what_an_asynchronous_step_will_fill_in,
    ),
    Exhibit("B04", "S3", reuse_waits_for_nobody, new_tenant_is_not_saved_under_the_old_key),
    Exhibit("B05", "S3", copies_hold_nothing, load_does_not_land_in_another_requests_block),
    Exhibit("B06", "S7", match_pins_nothing, matching.test_match_holds_its_hits_until_they_are_used),
    Exhibit("B07", "S7", offer_protects_nothing, offer_does_not_evict_what_it_found),
    Exhibit(
        "B08",
        "S13",
        pending_is_a_miss,
        matching.test_match_waits_for_the_store_that_it_needs_and_for_no_other,
    ),
    Exhibit(
        "B09",
        "S13",
        loads_are_not_seen,
        matching.test_match_waits_for_a_load_of_the_same_key_for_another_request,
    ),
    Exhibit(
        "B10",
        "S4",
        offers_are_taken_as_they_come,
        matching.test_hybrid_groups_count_a_shared_device_block_once,
    ),
    Exhibit("B11", "S1", keys_are_entered_twice, key_offered_twice_is_stored_once),
    Exhibit(
        "B12", "S5", reports_act_by_key, ending.test_reset_quarantines_the_memory_of_copies_under_way
    ),
    Exhibit("B13", "S3", reset_ends_copies, slot_of_an_abandoned_copy_is_not_given_away),
    Exhibit("B14", "S3", reset_releases_references, reset_keeps_the_references_of_copies),
    Exhibit("B15", "S9", drained_copies_wake_nobody, ending.test_reset_leaves_nobody_waiting),
    Exhibit("B16", "S15", key_is_read_at_completion, published_key_is_the_planned_one),
    Exhibit(
        "B17",
        "S15",
        last_sample_counts,
        lambda: storing.test_eager_store_leaves_the_last_sampled_token(2, 1),
    ),
    Exhibit(
        "B18", "S8", second_load_is_allowed, matching.test_load_of_a_preempted_request_is_not_begun_twice
    ),
    Exhibit(
        "B19",
        "S8",
        keys_stand_for_blocks,
        request_without_blocks_is_aborted,
        (ValueError,),
    ),
    Exhibit("B20", "S8", finish_comes_first, ending.test_finish_abort_stores_what_is_confirmed_under_lease),
    Exhibit(
        "B21", "S17", last_step_flushes_nothing, ending.test_last_step_flushes_everything_in_that_step
    ),
    Exhibit("B22", "S9", matched_requests_wait_for_room, two_matches_come_to_an_end),
    Exhibit(
        "B23", "S9", walk_has_a_cursor, storing.test_lazy_store_goes_on_where_its_blocks_went_to_the_tail
    ),
    Exhibit(
        "B24",
        "S9",
        reset_forgets_requests,
        ending.test_reset_lets_running_requests_be_stored_again_but_not_what_an_older_load_brought,
    ),
    Exhibit(
        "B25",
        "S9",
        silence_is_patience,
        lambda: ending.test_worker_death_in_silence_is_found_at_its_bound_and_a_load_is_told(True),
    ),
    Exhibit("B26", "S10", removal_takes_the_payload, later_store_of_a_batch_keeps_its_payload),
    Exhibit(
        "B27",
        "S6",
        failed_load_counts_as_loaded,
        lambda: matching.test_load_that_failed_tells_the_first_bad_token_once_its_keys_are_gone((FULL,), 4),
    ),
    Exhibit(
        "B28",
        "S6",
        errors_are_completions,
        lambda: ranks.test_tensor_parallel_failure_of_one_rank_is_everybodys(Direction.STORE, 0, True),
    ),
    Exhibit(
        "B29",
        "S4",
        finished_requests_are_dropped,
        ending.test_finish_abort_may_come_before_the_reports_of_the_same_step,
    ),
    Exhibit(
        "B30",
        "S8",
        finish_is_not_remembered,
        lambda: ending.test_finish_abort_is_legal_in_every_state_and_twice_as_once("storing", True, False),
    ),
    Exhibit(
        "B31",
        "S4",
        unused_hits_stay,
        lambda: matching.test_match_holds_its_hits_until_they_are_released("nothing accepted"),
    ),
    Exhibit("B32", "S4", pins_are_given_back_twice, released_match_takes_no_pin_of_another),
    Exhibit(
        "B33",
        "S6",
        half_a_promise_counts,
        matching.test_load_of_a_promise_that_was_voided_is_reported_as_failed,
    ),
    Exhibit("B34", "S2", leases_expire, silent_store_is_not_readable),
    Exhibit("B35", "S3", busy_blocks_stand_in_the_eviction_order, blocks_under_copy_are_not_evicted),
    Exhibit("B36", "S3", slots_are_given_twice, stores_in_flight_have_slots_of_their_own),
    Exhibit(
        "B38",
        "S2",
        readable_when_planned,
        matching.test_match_waits_for_the_store_that_it_needs_and_for_no_other,
    ),
    Exhibit("B39", "S5", reports_act_by_key, late_report_does_not_complete_the_next_store),
    Exhibit("B40", "S1", unused_hits_stay, refused_load_gives_everything_back),
]


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: f"{exhibit.id}-{exhibit.property_id}")
def test_scenario_passes(exhibit: Exhibit) -> None:
    exhibit.scenario()


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: f"{exhibit.id}-{exhibit.property_id}")
def test_bug_is_found_when_it_is_put_back(exhibit: Exhibit, monkeypatch: Patch) -> None:
    exhibit.put_back(monkeypatch)
    with pytest.raises(exhibit.stopped_by):
        exhibit.scenario()


def test_museum_is_complete() -> None:
    """Every bug has an exhibit, or is one of those that this floor cannot show."""
    elsewhere = {line[:3] for line in (__doc__ or "").splitlines() if line.startswith("B")}
    shown = {exhibit.id for exhibit in EXHIBITS}
    assert len(shown) == len(EXHIBITS)
    assert shown.isdisjoint(elsewhere)
    assert shown | elsewhere == {f"B{number:02}" for number in range(1, 41)}
