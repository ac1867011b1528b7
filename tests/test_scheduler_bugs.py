"""Real bugs of public KV offload systems, put back one by one: each is found, and by what.

A bug is put back where the code decides: one small patch each. A scenario is a short script that passes on
the code as it is. With the bug it fails: on the property that it breaks, or because a machine or the fold
refuses what the bug wants, which is better. `BUGS` is the table. Two are not in it, for they are bugs of a
copy engine: a load that overwrites what the running forward still reads (B03), and a table of ids that is
written anew before a copy has read it (B37). `test_stream_engine.py` has those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from core_life import begin_store, keys, load, new_core, store
from scheduler_life import HASH_TOKENS, ModelEngine, ModelPool, ModelRequest
from scheduler_traffic import Hand, come_to_rest, finish_one, keys_of

from kvsm import events as ev
from kvsm import kv_events
from kvsm import ledger as ledger_module
from kvsm.cuda_io import SimulatedCopyEngine
from kvsm.cuda_io.streams import StreamCopyEngine
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError
from kvsm.events import Direction, OffloadConfig, RejectReason
from kvsm.ids import listed, pack, to_list, unpack
from kvsm.invariants import check_ledger
from kvsm.kv_events import BlockStored, Publisher
from kvsm.ledger import Ledger
from kvsm.offloader import Ended, LookupResult, Offloader
from kvsm.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.policies.slot_queue import SlotQueue
from kvsm.scheduler import LastStep, OffloadScheduler
from kvsm.scheduler.free_queue import FreeQueueWalk
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.block import BlockState, BlockTrigger
from kvsm.states.transfer import TransferState
from kvsm.worker import Worker

MISS, HIT, HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
Patch = pytest.MonkeyPatch


def sound(ledger: Ledger) -> None:
    for violation in check_ledger(ledger):
        raise AssertionError(f"{violation.property_id}: {violation.message}")


def sound_host(engine: ModelEngine) -> None:
    """What can be read on the host holds its own cells."""
    ledger = engine.core.ledger
    sound(ledger)
    cells = {
        key: request.cells_of(place, HASH_TOKENS)
        for request in engine.requests.values()
        for place, key in enumerate(keys_of(request))
    }
    for key, slot in ledger.index.items():
        if ledger.readable(slot):
            assert engine.host[slot] == [cells[key]] * engine.workers, "S3/S15: a key has other bytes"


def blocks_stored(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def match(hand: Hand, request: ModelRequest) -> int | None:
    return hand.scheduler.get_num_new_matched_tokens(request, 0)[0]


def under_store(prompt: Sequence[int], **options: Any) -> ModelEngine:
    """An engine whose only request is over, and whose store of it is in flight."""
    engine = ModelEngine(last_step=LastStep.KEEP_STEPPING, **options)
    engine.arrive(ModelRequest("first", prompt))
    engine.step()
    engine.step()
    assert engine.copies
    return engine


# What is stored.


def hit_on_the_device_while_it_is_stored() -> None:
    hand = Hand()
    first, second = ModelRequest("first", range(4)), ModelRequest("second", range(9), 5)
    hand.admit(first, [7])
    hand.compute(first)
    hand.scheduler.request_finished(first, [[7]])
    assert blocks_stored(hand.step()) == [7]
    hand.admit(second, [7, 8, 9], local=4)
    hand.compute(second)
    assert blocks_stored(hand.step(second)) == [8]


def forget_what_is_in_flight(patch: Patch) -> None:
    """The dedupe of an offer does not look at the copies of earlier steps."""
    patch.setattr(Offloader, "_why_not", lambda *_: None)


def step_runs_while_the_next_is_decided() -> None:
    hand, request = Hand(), ModelRequest("r", range(6), 8)
    hand.admit(request, [0, 1, 2])
    for token in range(3):
        request.append(100 + token)
    request.num_computed_tokens, request.num_output_placeholders = 9, 2
    assert blocks_stored(hand.step(request)) == [0], "S12: a running step has yet to write block 1"


def count_running_steps_as_computed(patch: Patch) -> None:
    """What the engine has decided to compute counts as computed."""

    def confirmed(self: TrackedRequest) -> int:
        request = self.request
        return min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))

    patch.setattr(TrackedRequest, "confirmed_tokens", confirmed)


def generation_ends_on_a_block_boundary() -> None:
    hand, request = Hand(), ModelRequest("r", range(6), 2)
    hand.admit(request, [0, 1])
    for token in range(2):
        request.append(100 + token)
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0, 1]])
    assert blocks_stored(hand.step()) == [0], "S15: the last token was sampled, and never computed"


def count_the_last_token_as_computed(patch: Patch) -> None:
    """The last sampled token has KV, too."""

    def confirmed(self: TrackedRequest) -> int:
        return self.request.num_computed_tokens - self.request.num_output_placeholders

    patch.setattr(TrackedRequest, "confirmed_tokens", confirmed)


def offer_evicts_for_itself() -> None:
    core, _ = new_core(host_blocks=4)
    oldest, others, new = keys(1), keys(3, "others"), keys(3, "new")
    store(core, "a", oldest)
    store(core, "b", others, 1)
    assert len(core.prepare_store("c", oldest + new, [8, 9, 10, 11]).keys) == 3
    assert core.lookup(oldest[0]) is HIT, "S7: the offer evicted what it found resident"


def do_not_protect_residents(patch: Patch) -> None:
    """What an offer finds resident is neither touched nor kept from its own evictions."""
    real = Offloader._partition

    def partition(self: Offloader, *offer: Any) -> tuple[list[int], list[int], list[int]]:
        new, deferred, _ = real(self, *offer)
        return new, deferred, []

    patch.setattr(Offloader, "_partition", partition)


def one_block_at_two_positions() -> None:
    core, _ = new_core()
    prepared = core.prepare_store("r", keys(2), [7, 7])
    assert (prepared.stored, prepared.deferred) == ([0], (1,))
    sound(core.ledger)


def one_key_twice() -> None:
    core, _ = new_core()
    prepared = core.prepare_store("r", keys(1) * 2, [0, 1])
    assert (prepared.stored, prepared.deferred) == ([0], (1,))
    sound(core.ledger)


def take_every_offer_for_new(patch: Patch) -> None:
    """Nobody looks whether an offer names something twice."""
    patch.setattr(Offloader, "_all_new", lambda *_: True)


def key_of_a_block_changes_under_its_store() -> None:
    pool = ModelPool(8)
    hand, request = Hand(pool=pool), ModelRequest("r", range(4))
    (key,), other = keys_of(request), b"other" + bytes(4)
    hand.admit(request, [0])
    hand.compute(request)
    hand.scheduler.request_finished(request, [[0]])
    (job,) = hand.step().stores
    pool.caches[0] = other
    hand.report(job.transfer)
    found = hand.core.lookup(key), hand.core.lookup(other)
    assert found == (HIT, MISS), "S15: bytes are published under a key that they were not stored for"


def read_keys_at_the_end(patch: Patch) -> None:
    """A store's keys are those that the pool has for its device blocks when it ends."""
    real = OffloadScheduler.update_connector_output

    def reread(self: OffloadScheduler, reports: list[WorkerReport]) -> Any:
        ledger, pool = self.offloader.ledger, cast(ModelPool, self._pool)
        for report in reports:
            transfer = ledger.transfers[report.transfer]
            for slot, block in zip(listed(transfer.slots), listed(transfer.device_blocks)):
                del ledger.index[ledger.key_of[slot]]
                key = ledger.key_of[slot] = pool.caches[block]
                ledger.index[key] = slot
        return real(self, reports)

    patch.setattr(OffloadScheduler, "update_connector_output", reread)


def aborted_before_it_was_scheduled() -> None:
    hand, request = Hand(), ModelRequest("r", range(9))
    hand.scheduler.add_request(request)
    try:
        hand.scheduler.request_finished(request, [[]], aborted=True)
    except ValueError as error:
        raise AssertionError(f"S8: {error}") from error
    assert not hand.core.ledger.requests


def count_full_blocks_by_their_keys(patch: Patch) -> None:
    """Every full block that has a key has a device block."""
    patch.setattr(TrackedRequest, "full_chunks", lambda self, *_: tuple(map(len, self.keys)))


def stored_blocks_go_to_the_tail() -> None:
    pool, core = ModelPool(12), Offloader(OffloadConfig(host_blocks=32, device_blocks=12))
    walk = FreeQueueWalk(core, pool, 2)
    for block, key in enumerate(keys(12)):
        pool.cache(block, key)
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        job = walk.store()
        blocks = to_list(job.device_blocks) if job else []
        assert blocks == expected, "S9: the scan passed over blocks that near eviction"
        assert job is not None
        pool.touch(blocks)
        core.submit([job.transfer])
        core.report(job.transfer, 0, True)
        pool.free_blocks(blocks[::-1])


def resume_at_a_cursor(patch: Patch) -> None:
    """The walk goes on behind the block that it stored last, wherever that stands now."""
    real, last = FreeQueueWalk._walk, [-1]

    def walk(self: FreeQueueWalk) -> Any:
        pool, queue = self._pool, list(self._pool.free_queue())
        start = queue.index(last[0]) + 1 if last[0] in queue else 0
        self._pool = SimpleNamespace(key_of=pool.key_of, free_queue=lambda: iter(queue[start:]))
        found = real(self)
        self._pool, last[0] = pool, found[1][-1] if found[1] else last[0]
        return found

    patch.setattr(FreeQueueWalk, "_walk", walk)


# What is matched and loaded.


def hit_is_wanted_by_another() -> None:
    core, _ = new_core(host_blocks=2)
    store(core, "a", keys(2))
    assert core.match("r", keys(2)).hits == 2
    core.prepare_store("b", keys(2, "q"), [4, 5])
    assert core.prepare_load("r", [8, 9]) is not None
    sound(core.ledger)


def pin_nothing(patch: Patch) -> None:
    """A match touches what it counts, and does not hold it."""
    patch.setattr(ledger_module, "_BLOCK_PIN", BlockTrigger.TOUCH)


def slot_is_wanted_under_its_load() -> None:
    core, _ = new_core(host_blocks=2)
    store(core, "a", keys(2))
    load(core, "r", keys(2), 8)
    assert core.prepare_store("b", keys(2, "q"), [4, 5]).job is None
    sound(core.ledger)


def leave_used_slots_in_the_eviction_order(patch: Patch) -> None:
    """The policy does not hear that blocks are in use."""
    patch.setattr(ledger_module, "PINNED_ONCE", -1)


def prefix_is_being_stored() -> None:
    hand = Hand()
    first, second = ModelRequest("first", range(8)), ModelRequest("second", range(9))
    hand.admit(first, [0, 1])
    hand.compute(first)
    (job,) = hand.step(first).stores
    assert match(hand, second) is None, "S13: what is being stored is computed and stored again"
    hand.report(job.transfer)
    assert match(hand, second) == 8


def count_stores_in_flight_as_misses(patch: Patch) -> None:
    """A match waits for no transfer."""
    patch.setattr(Offloader, "in_flight", lambda *_: None)


def prefix_is_being_loaded() -> None:
    hand = Hand()
    hand.store(ModelRequest("stored", range(8)), [0, 1])
    hand.admit(ModelRequest("first", range(9)), [10, 11, 12])
    hand.step()
    assert match(hand, ModelRequest("second", range(9))) is None, "S13: it is loaded twice at once"


def wait_for_stores_only(patch: Patch) -> None:
    """A match does not see that another request loads what it has hit."""

    def storing(self: Offloader, slots: Sequence[int]) -> int | None:
        busy = [slot for slot in slots if not self.ledger.readable(slot)]
        return self.ledger.generation[busy[0]] if busy else None

    patch.setattr(Offloader, "in_flight", storing)


def load_begins_beside_an_own_store() -> None:
    hand = Hand(core={"defer_ticks": 0})
    hand.store(ModelRequest("stored", range(8)), [0, 1])
    request = ModelRequest("r", range(13), 5)
    hand.admit(request, [10, 11, 12, 13])
    hand.end(hand.step())
    hand.compute(request)
    assert blocks_stored(hand.step(request)) == [12]
    found = hand.admit(request, [20, 21, 22, 23])
    assert found == 8, "S8: a preempted request whose store is in flight may not load"
    assert len(hand.step().loads) == 1
    sound(hand.core.ledger)


def allow_a_request_one_transfer(patch: Patch) -> None:
    """A request has one entry for what is in flight, be it its load or a store."""
    real = Ledger._store_planned

    def planned(self: Ledger, event: ev.StorePlanned) -> None:
        real(self, event)
        for name, _ in event.owners:
            self.requests[name].load = event.seq

    patch.setattr(Ledger, "_store_planned", planned)


def hit_has_to_wait_for_more() -> None:
    hand = Hand()
    hand.store(ModelRequest("stored", range(4)), [0])
    request, other = ModelRequest("r", range(9)), ModelRequest("other", range(8), skip_reading=True)
    assert match(hand, request) == 4
    hand.admit(other, [5, 6])
    hand.compute(other)
    assert blocks_stored(hand.step(other)) == [6]
    assert match(hand, request) is None
    sound(hand.core.ledger)


def wait_and_hold(patch: Patch) -> None:
    """Who waits for the rest of a load keeps the part that it has."""

    def defer(self: Offloader, request: str, transfer: int) -> bool:
        self._emit(ev.RequestDeferred, request, transfer, self.ledger.tick + 5)
        return True

    patch.setattr(Offloader, "defer", defer)


def hit_is_not_used() -> None:
    hand, request = Hand(), ModelRequest("r", range(9))
    hand.store(ModelRequest("stored", range(8)), [0, 1])
    assert match(hand, request) == 8
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 0)
    assert len(hand.core.ledger.policy) == 2, "S4: a hit that nobody will use is pinned"


def leave_unpinning_to_the_load(patch: Patch) -> None:
    """A match that leads to no load is not released."""
    patch.setattr(Offloader, "release", lambda *_: None)


def match_is_released() -> None:
    core, _ = new_core()
    store(core, "a", keys(2))
    assert core.match("r", keys(2)).hits == 2
    core.release("r")
    sound(core.ledger)


def unpin_twice(patch: Patch) -> None:
    """Two owners give back one pin."""
    real = Ledger._unpin

    def unpin(self: Ledger, request: Any, slots: Any, seq: int) -> None:
        real(self, request, slots, seq)
        real(self, request, slots, seq)

    patch.setattr(Ledger, "_unpin", unpin)


def load_cannot_be_planned() -> None:
    hand = Hand(core={"max_live_transfers": 1})
    hand.store(ModelRequest("stored", range(8)), [0, 1])
    request, other = ModelRequest("r", range(9)), ModelRequest("other", range(50, 58))
    hand.admit(other, [4, 5])
    hand.compute(other)
    assert match(hand, request) == 8
    (job,) = hand.step(other).stores
    hand.scheduler.update_state_after_alloc(request, [[20, 21, 22]], 8)
    (ended,) = hand.report(job.transfer).loads
    assert not ended.good, "S6: what was never loaded counts as loaded"
    assert len(hand.core.ledger.policy) == 4


def report_the_part_that_was_taken(patch: Patch) -> None:
    """A load that cannot be made counts as made, and its pins stay."""
    leave_unpinning_to_the_load(patch)
    count_failed_loads_as_loaded(patch)


def load_fails() -> None:
    engine = ModelEngine(prefix_cache=False)
    finish_one(engine, "first", [*range(9)])
    engine.arrive(ModelRequest("second", range(9)))
    engine.step()
    (transfer,) = engine.copies
    engine.carry_out(transfer, good=False)
    come_to_rest(engine)


def count_failed_loads_as_loaded(patch: Patch) -> None:
    """The engine is told that every load is good."""
    real = OffloadScheduler._load_ended

    def ended(self: OffloadScheduler, name: str, **_: bool) -> None:
        real(self, name, good=True)

    patch.setattr(OffloadScheduler, "_load_ended", ended)


def store_fails() -> None:
    engine = under_store(range(9), prefix_cache=False)
    (transfer,) = engine.copies
    engine.carry_out(transfer, good=False)
    finish_one(engine, "second", [*range(9)])


def mark_errors_complete(patch: Patch) -> None:
    """A worker's error ends its transfer as if it were good."""
    real = Offloader.report
    patch.setattr(Offloader, "report", lambda self, transfer, worker, _: real(self, transfer, worker, True))


# Who holds memory.


def blocks_are_given_away_under_their_store() -> None:
    engine = ModelEngine(device_blocks=4, references=False, prefix_cache=False)
    first = engine.arrive(ModelRequest("first", range(8), 8))
    engine.step()
    engine.step()
    assert engine.copies
    engine.preempt(first)
    engine.arrive(ModelRequest("second", range(100, 116)))
    engine.step()
    engine.carry_out_all()
    engine.hand_on()
    sound_host(engine)


def wait_for_no_copy(patch: Patch) -> None:
    """The engine gives blocks away without waiting for the copies that read them."""
    patch.setattr(OffloadScheduler, "_touching", lambda *_: [])


def request_is_aborted_under_its_load() -> None:
    engine = ModelEngine(device_blocks=4, prefix_cache=False)
    finish_one(engine, "first", [*range(9)])
    second = engine.arrive(ModelRequest("second", range(9)))
    engine.step()
    engine.finish(second, aborted=True)
    engine.arrive(ModelRequest("other", range(100, 116)))
    engine.step()
    come_to_rest(engine)


def hold_no_targets(patch: Patch) -> None:
    """A load holds no reference to the blocks that it writes; the request that it is for does."""
    hold, end = OffloadScheduler._hold, OffloadScheduler._end

    def held(self: OffloadScheduler, job: TransferJob) -> None:
        if job.direction is Direction.STORE:
            hold(self, job)

    def ended(self: OffloadScheduler, one: Ended) -> None:
        pool = self._pool
        if one.direction is Direction.LOAD:
            self._pool = None
        end(self, one)
        self._pool = pool

    patch.setattr(OffloadScheduler, "_hold", held)
    patch.setattr(OffloadScheduler, "_end", ended)


def requests_end_before_their_stores() -> None:
    engine = ModelEngine(chunk_tokens=4, last_step=LastStep.KEEP_STEPPING)
    engine.arrive(ModelRequest("r", range(13)))
    for _ in range(5):
        engine.step()
    assert not engine.running
    assert len(engine.copies) == 3
    come_to_rest(engine)


def drop_the_ends_of_orphans(patch: Patch) -> None:
    """The end of a store finds nobody if its request is over."""
    real = OffloadScheduler._end

    def end(self: OffloadScheduler, one: Ended) -> None:
        if self._tracked or one.direction is Direction.LOAD:
            real(self, one)

    patch.setattr(OffloadScheduler, "_end", end)


def look_the_owner_up(patch: Patch) -> None:
    """A store that ends needs the record of the request that it was planned for."""
    real = Ledger._close

    def close(self: Ledger, transfer: Any, seq: int) -> None:
        for name, _ in transfer.owners:
            self._request(seq, name)
        real(self, transfer, seq)

    patch.setattr(Ledger, "_close", close)


def request_ends_twice() -> None:
    core, _ = new_core()
    core.arrive("r")
    assert core.finish("r", aborted=True)
    assert core.finish("r")


def finish_whatever_its_state(patch: Patch) -> None:
    """Every finish of a request is one."""
    patch.setattr(
        Offloader,
        "finish",
        lambda self, request, aborted=False: self._emit(ev.RequestFinished, request, aborted) is None,
    )


def second_store_of_as_many() -> None:
    core, _ = new_core()
    begin_store(core, "a", keys(1))
    begin_store(core, "b", keys(1, "q"), 1)
    sound(core.ledger)


def hand_out_slots_under_copies(patch: Patch) -> None:
    """The free queue gives a slot to a store while another's copy goes to it."""
    patch.setattr(SlotQueue, "first", lambda _, count: tuple(range(count)))


def plan_is_refused_half_way() -> None:
    core, _ = new_core()
    store(core, "a", keys(1))
    load(core, "r", keys(1), 8)
    ledger = core.ledger
    slots, blocks = pack(ledger.free.first(1)), pack((8,))
    plan = ev.StorePlanned(ledger.seq + 1, 0, 0, (("b", 1),), tuple(keys(1, "q")), slots, blocks)
    with pytest.raises(IllegalTransition, match="BEGIN_READ is illegal in WRITING"):
        ledger.apply(plan)
    sound(ledger)


def keep_what_a_refused_plan_took(patch: Patch) -> None:
    """A plan takes its slots before all of it has been checked."""
    real = Ledger._store_planned

    def planned(self: Ledger, event: ev.StorePlanned) -> None:
        try:
            real(self, event)
        except KvsmError:
            self.free.remove(unpack(event.slots))
            raise

    patch.setattr(Ledger, "_store_planned", planned)


# Reset.


def slot_under_copy_when_reset() -> None:
    core, _ = new_core(host_blocks=1)
    begin_store(core, "a", keys(1))
    assert not core.reset()
    sound(core.ledger)
    assert core.prepare_store("b", keys(1, "q"), [1]).job is None


def free_slots_under_copies(patch: Patch) -> None:
    """A reset frees every slot at once."""

    def invalidate(self: Ledger, slots: Any, _: int) -> None:
        gone = np.asarray(slots, dtype=np.int64)
        self._withdraw(gone)
        self.blocks.view[gone] = BlockState.EVICTED
        self.free.append(gone)

    patch.setattr(Ledger, "_invalidate", invalidate)


def reset_under_a_store() -> None:
    engine = under_store(range(9), device_blocks=4)
    assert not engine.reset()
    engine.arrive(ModelRequest("other", range(100, 116)))
    engine.step()
    engine.arrive(ModelRequest("again", range(9)))
    come_to_rest(engine)


def release_what_copies_rely_on(patch: Patch) -> None:
    """A reset gives back the references of the copies in flight."""
    real = OffloadScheduler.reset_cache

    def reset(self: OffloadScheduler) -> bool:
        done, pool = real(self), cast(ModelPool, self._pool)
        for transfer in self.offloader.ledger.transfers.values():
            pool.free_blocks(listed(transfer.device_blocks))
        return done

    patch.setattr(OffloadScheduler, "reset_cache", reset)


def drop_reports_of_before(patch: Patch) -> None:
    """After a reset, the reports of older copies are stale, and end nothing."""
    real = Offloader._why_reject

    def why(self: Offloader, transfer: int, worker: int, direction: Direction | None) -> str:
        entry = self.ledger.transfers.get(transfer)
        abandoned = entry is not None and entry.state is TransferState.ABANDONED
        return RejectReason.STALE if abandoned else real(self, transfer, worker, direction)

    patch.setattr(Offloader, "_why_reject", why)


def request_runs_on_after_a_reset() -> None:
    engine = ModelEngine()
    request = engine.arrive(ModelRequest("r", range(8), 12))
    for _ in range(3):
        engine.step()
    engine.carry_out_all()
    engine.hand_on()
    assert engine.reset()
    engine.run()
    found = {engine.core.lookup(key) for key in keys_of(request)[: (request.num_tokens - 1) // HASH_TOKENS]}
    assert found == {HIT}, "S9: of a request that outlived a reset, nothing is stored again"


def forget_running_requests(patch: Patch) -> None:
    """A reset forgets the requests, too."""
    real = OffloadScheduler.reset_cache

    def reset(self: OffloadScheduler) -> bool:
        self._tracked.clear()
        return real(self)

    patch.setattr(OffloadScheduler, "reset_cache", reset)


# Ends of transfers.


def old_report_after_a_reset() -> None:
    core, _ = new_core()
    old = begin_store(core, "a", keys(1))
    core.reset()
    begin_store(core, "b", keys(1), 1)
    core.complete_store(old)
    assert core.lookup(keys(1)[0]) is HIT_PENDING, "S5: the report of another copy made it readable"


def old_report_after_a_loss() -> None:
    core, _ = new_core()
    old = begin_store(core, "a", keys(1))
    core.lose(old)
    begin_store(core, "b", keys(1), 1)
    core.complete_store(old)
    assert core.lookup(keys(1)[0]) is HIT_PENDING, "S5: the report of another copy made it readable"


def match_reports_by_key(patch: Patch) -> None:
    """A report ends the newest live store of the same keys."""
    named: dict[int, tuple[bytes, ...]] = {}
    submit, report = Offloader.submit, Offloader._report

    def noted(self: Offloader, transfers: Sequence[int]) -> None:
        named.update({one: self.ledger.transfers[one].keys for one in transfers})
        submit(self, transfers)

    def by_key(self: Offloader, transfer: int, *what: Any) -> Ended | None:
        same = [one.id for one in self.ledger.transfers.values() if one.keys == named[transfer]]
        return report(self, same[-1] if same else transfer, *what)

    patch.setattr(Offloader, "submit", noted)
    patch.setattr(Offloader, "_report", by_key)


def last_request_is_over() -> None:
    engine = ModelEngine()
    engine.arrive(ModelRequest("r", range(9)))
    for _ in range(20):
        if engine.waiting or engine.running or engine.scheduler.has_pending_work():
            engine.step()
    assert not engine.core.ledger.transfers, "S17: the engine steps no more, and a transfer is left"


def rest_without_requests(patch: Patch) -> None:
    """There is work as long as there are requests."""
    patch.setattr(OffloadScheduler, "has_pending_work", lambda self: bool(self._tracked))


def copy_raises() -> None:
    worker = Worker(0, SimulatedCopyEngine(np.ones((8, 4), np.uint8), np.zeros((8, 4), np.uint8), seed=1))
    worker.submit([TransferJob(1, Direction.STORE, (8,), (0,)), TransferJob(2, Direction.STORE, (1,), (1,))])
    worker.close()
    good = {report.transfer: report.good for report in worker.poll()}
    assert good == {1: False, 2: True}, "S9: a transfer that ended is not reported"


def swallow_what_copies_raise(patch: Patch) -> None:
    """What goes wrong in the copying thread ends the transfer in silence."""
    issue = StreamCopyEngine._issue

    def silently(self: StreamCopyEngine, transfer: Any) -> None:
        if 8 not in transfer.job.device_blocks:
            issue(self, transfer)

    patch.setattr(StreamCopyEngine, "_issue", silently)


def store_outlives_its_bound() -> None:
    core, _ = new_core(workers=2, transfer_ticks=2)
    transfer = begin_store(core, "a", keys(1))
    core.report(transfer, 0, True)
    for _ in range(2):
        core.tick()
    assert len(core.lose_overdue()) == 1
    assert core.lookup(keys(1)[0]) is MISS, "S2: readable, and a worker has not reported"


def let_time_end_stores(patch: Patch) -> None:
    """A store that is overdue counts as done."""

    def lose(self: Offloader, transfer: int) -> Ended | None:
        return [self._report(transfer, worker, True, None) for worker in range(self.config.workers)][-1]

    patch.setattr(Offloader, "lose", lose)


def store_is_submitted() -> None:
    core, _ = new_core()
    begin_store(core, "a", keys(2))
    sound(core.ledger)


def publish_before_the_copy(patch: Patch) -> None:
    """A store's keys can be read as soon as its job has left."""
    real = Ledger._submitted

    def submitted(self: Ledger, event: ev.TransfersSubmitted) -> None:
        real(self, event)
        for transfer in event.transfers:
            self._end_copies(self.transfers[transfer], good=True, seq=event.seq)

    patch.setattr(Ledger, "_submitted", submitted)


class DescribedRequest(ModelRequest):
    """A request of text alone."""

    prompt_embeds = cache_salt = None
    mm_features = ()


def removed_and_stored_in_one_batch() -> None:
    engine = ModelEngine(host_blocks=2, prefix_cache=False, publisher=Publisher(self_describing=True))
    for name, first in (("a", 0), ("b", 50), ("a again", 0)):
        engine.arrive(DescribedRequest(name, range(first, first + 9)))
        engine.run()
    told = [event.token_ids for event in engine.scheduler.take_events() if isinstance(event, BlockStored)]
    blocks = [[*range(first, first + 4)] for first in (0, 4, 50, 54, 0, 4)]
    assert told == blocks, "S10: a stored event has lost what it says of its blocks"


def keep_payloads_by_key(patch: Patch) -> None:
    """The payload of a stored event goes with any removal of its key in the same batch."""
    real = Publisher.take_kv_events

    def take(self: Publisher) -> list[kv_events.KVCacheEvent]:
        gone: set[bytes] = set()
        for number, change in enumerate(self._changes):
            if isinstance(change, kv_events._Removed):
                gone.update(change.keys)
            else:
                told = [None if key in gone else one for key, one in zip(change.keys, change.told)]
                self._changes[number] = change._replace(told=told)
        return real(self)

    patch.setattr(Publisher, "take_kv_events", take)


class Bug(NamedTuple):
    """breaks: the property that its scenario finds broken. refused: what a machine or the fold says instead,
    if it does not let the bug happen."""

    id: str
    breaks: str
    put_back: Callable[[Patch], None]
    scenario: Callable[[], None]
    refused: str = ""


DOUBLED_KEY = "a planned key has a block already, or stands twice"
RELEASED = "has not arrived, or was released"

BUGS = (
    Bug("B01", "S13", forget_what_is_in_flight, hit_on_the_device_while_it_is_stored, DOUBLED_KEY),
    Bug("B02", "S12", count_running_steps_as_computed, step_runs_while_the_next_is_decided),
    Bug("B04", "S3", wait_for_no_copy, blocks_are_given_away_under_their_store),
    Bug("B05", "S3", hold_no_targets, request_is_aborted_under_its_load),
    Bug("B06", "S7", pin_nothing, hit_is_wanted_by_another, "BEGIN_LOAD is illegal in ALLOCATED"),
    Bug("B07", "S7", do_not_protect_residents, offer_evicts_for_itself),
    Bug("B08", "S13", count_stores_in_flight_as_misses, prefix_is_being_stored),
    Bug("B09", "S13", wait_for_stores_only, prefix_is_being_loaded),
    Bug("B10", "S4", take_every_offer_for_new, one_block_at_two_positions, "lease 7: .*named twice"),
    Bug("B11", "S1", take_every_offer_for_new, one_key_twice, DOUBLED_KEY),
    Bug("B12", "S5", match_reports_by_key, old_report_after_a_reset),
    Bug("B13", "S3", free_slots_under_copies, slot_under_copy_when_reset),
    Bug("B14", "S3", release_what_copies_rely_on, reset_under_a_store),
    Bug("B15", "S9", drop_reports_of_before, reset_under_a_store),
    Bug("B16", "S15", read_keys_at_the_end, key_of_a_block_changes_under_its_store),
    Bug("B17", "S15", count_the_last_token_as_computed, generation_ends_on_a_block_boundary),
    Bug("B18", "S8", allow_a_request_one_transfer, load_begins_beside_an_own_store),
    Bug("B19", "S8", count_full_blocks_by_their_keys, aborted_before_it_was_scheduled),
    Bug("B20", "S8", look_the_owner_up, requests_end_before_their_stores, RELEASED),
    Bug("B21", "S17", rest_without_requests, last_request_is_over),
    Bug("B22", "S9", wait_and_hold, hit_has_to_wait_for_more, "DEFER is illegal in MATCHED"),
    Bug("B23", "S9", resume_at_a_cursor, stored_blocks_go_to_the_tail),
    Bug("B24", "S9", forget_running_requests, request_runs_on_after_a_reset),
    Bug("B25", "S9", swallow_what_copies_raise, copy_raises),
    Bug("B26", "S10", keep_payloads_by_key, removed_and_stored_in_one_batch),
    Bug("B27", "S12/S15", count_failed_loads_as_loaded, load_fails),
    Bug("B28", "S12/S15", mark_errors_complete, store_fails),
    Bug("B29", "S4", drop_the_ends_of_orphans, requests_end_before_their_stores),
    Bug("B30", "S8", finish_whatever_its_state, request_ends_twice, RELEASED),
    Bug("B31", "S4", leave_unpinning_to_the_load, hit_is_not_used),
    Bug("B32", "S4", unpin_twice, match_is_released, "UNPIN is illegal in STORED"),
    Bug("B33", "S6", report_the_part_that_was_taken, load_cannot_be_planned),
    Bug("B34", "S2", let_time_end_stores, store_outlives_its_bound),
    Bug(
        "B35", "S3", leave_used_slots_in_the_eviction_order, slot_is_wanted_under_its_load, "EVICT is illegal"
    ),
    Bug("B36", "S3", hand_out_slots_under_copies, second_store_of_as_many, "ALLOCATE is illegal in STORING"),
    Bug("B38", "S2", publish_before_the_copy, store_is_submitted),
    Bug("B39", "S5", match_reports_by_key, old_report_after_a_loss),
    Bug("B40", "S1", keep_what_a_refused_plan_took, plan_is_refused_half_way),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_scenario_passes_without_its_bug(bug: Bug) -> None:
    bug.scenario()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.id}-{bug.breaks}")
def test_bug_that_is_put_back_is_found(bug: Bug, monkeypatch: Patch) -> None:
    bug.put_back(monkeypatch)
    if bug.refused:
        with pytest.raises((IllegalTransition, InvalidEvent), match=bug.refused):
            bug.scenario()
    else:
        with pytest.raises(AssertionError, match=f"^{bug.breaks}\\b"):
            bug.scenario()


def test_every_bug_is_put_back_once_or_says_why_not() -> None:
    elsewhere = re.findall(r"\((B\d\d)\)", __doc__ or "")
    assert sorted([*elsewhere, *(bug.id for bug in BUGS)]) == [f"B{number:02}" for number in range(1, 41)]
