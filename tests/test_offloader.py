"""What the deciding core promises, call by call. The orders of calls are tests/stateful/test_core.py's."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from core_life import Recorder, fold, keys, load, new_core, store
from hypothesis import given
from hypothesis import strategies as st

from kvsm.errors import InvalidEvent, LimitReached, LogWriteFailed, Poisoned
from kvsm.events import OffloadConfig, OffloadingEvent, RejectReason, ReportRejected, SkipReason, StoreSkipped
from kvsm.ids import SMALL, to_list
from kvsm.offloader import LookupResult, Match, Offloader, PreparedStore
from kvsm.snapshot import digest
from kvsm.states import BlockState, LeaseState, RequestState, TransferState


class TestLookup:
    def test_unknown_key_misses(self) -> None:
        core, _ = new_core()
        assert core.lookup(keys(1)[0]) is LookupResult.MISS

    def test_key_hits_only_after_every_worker_has_stored_it(self) -> None:
        """S2: a store is published by its last worker's report, not before (B38, B34)."""
        core, _ = new_core(workers=3)
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        seen = [core.lookup(keys(1)[0])]
        core.submit([plan.transfer])
        for worker in (2, 0, 1):
            seen.append(core.lookup(keys(1)[0]))
            core.complete_store(plan.transfer, worker)
        assert seen == [LookupResult.HIT_PENDING] * 4
        assert core.lookup(keys(1)[0]) is LookupResult.HIT

    def test_asking_is_no_event(self) -> None:
        core, log = new_core()
        store(core, "r", keys(2))
        events = len(log)
        core.lookup(keys(1)[0])
        assert len(log) == events


class TestMatch:
    def test_longest_readable_prefix_is_matched(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(3))
        assert core.match("q", keys(5)) == Match(3)

    def test_first_missed_key_is_recorded(self) -> None:
        core, log = new_core()
        store(core, "r", keys(3))
        core.match("q", keys(5))
        assert log[-1].missed == keys(5)[3]

    def test_hole_ends_the_prefix(self) -> None:
        core, _ = new_core()
        store(core, "r", [keys(3)[0], keys(3)[2]])
        assert core.match("q", keys(3)).hits == 1

    def test_what_a_match_counts_is_not_evicted(self) -> None:
        """S7: B06, a hit that was counted and gone before its load."""
        core, _ = new_core(host_blocks=3)
        store(core, "r", keys(3))
        core.match("q", keys(2))
        assert core.prepare_store("r", keys(2, "other"), [4, 5]).plan is None
        assert core.prepare_store("r", keys(1, "other"), [4]).evicted == [keys(3)[2]]

    def test_same_question_is_no_event(self) -> None:
        core, log = new_core()
        store(core, "r", keys(3))
        first = core.match("q", keys(3))
        events = len(log)
        assert core.match("q", keys(3)) == first
        assert len(log) == events

    def test_miss_asked_again_is_no_event(self) -> None:
        core, log = new_core()
        core.match("q", keys(3))
        events = len(log)
        core.match("q", keys(3))
        assert len(log) == events

    def test_second_question_replaces_the_first(self) -> None:
        """S4: one set of pins a request (B31)."""
        core, _ = new_core()
        store(core, "r", keys(3))
        core.match("q", keys(3))
        core.match("q", keys(1))
        pinned = [core.ledger.blocks.codec.decode(word)[1][1] for word in core.ledger.blocks.words]
        assert pinned[:3] == [1, 0, 0]

    def test_release_gives_every_pin_back(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(3))
        core.match("q", keys(3))
        core.release("q")
        assert len(core.ledger.policy) == 3

    def test_waits_for_a_store_in_flight(self) -> None:
        """B08: a key in flight is not a miss."""
        core, _ = new_core()
        plan = core.prepare_store("r", keys(2), [0, 1]).plan
        assert plan is not None
        assert core.match("q", keys(2)) == Match(0, plan.transfer)
        assert core.ledger.requests["q"].state is RequestState.DEFERRED

    def test_end_of_the_store_wakes_who_waits(self) -> None:
        core, _ = new_core()
        plan = core.prepare_store("r", keys(2), [0, 1]).plan
        assert plan is not None
        core.match("q", keys(2))
        core.submit([plan.transfer])
        core.complete_store(plan.transfer)
        assert core.match("q", keys(2)) == Match(2)

    def test_failed_store_wakes_who_waits(self) -> None:
        """S9: B15, a wait that nobody ends."""
        core, _ = new_core()
        plan = core.prepare_store("r", keys(2), [0, 1]).plan
        assert plan is not None
        core.match("q", keys(2))
        core.submit([plan.transfer])
        core.fail_store(plan.transfer)
        assert core.match("q", keys(2)) == Match(0)

    def test_wait_is_bounded_in_ticks(self) -> None:
        """S9: rule 8, every wait has a bound; once it is used up the request waits for nothing more."""
        core, _ = new_core(defer_ticks=3)
        core.prepare_store("r", keys(2), [0, 1])
        waiting = []
        for _ in range(5):
            waiting.append(core.match("q", keys(2)).waits_for is not None)
            core.tick()
        assert waiting == [True, True, True, False, False]

    def test_end_of_another_transfer_wakes_nobody(self) -> None:
        core, _ = new_core()
        awaited = core.prepare_store("r", keys(2), [0, 1]).plan
        assert awaited is not None
        core.match("q", keys(2))
        store(core, "r", keys(1, "other"), 4)
        assert list(core.ledger.deferred) == ["q"]

    def test_zero_defer_ticks_never_wait(self) -> None:
        core, _ = new_core(defer_ticks=0)
        core.prepare_store("r", keys(2), [0, 1])
        assert core.match("q", keys(2)) == Match(0)

    def test_loading_request_has_no_match(self) -> None:
        core, log = new_core()
        store(core, "r", keys(2))
        load(core, "q", keys(2), 4)
        events = len(log)
        assert core.match("q", keys(2)) == Match(0)
        assert len(log) == events


class TestLoad:
    def test_pins_become_readers(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(2))
        load(core, "q", keys(2), 4)
        assert [core.ledger.blocks.state(slot) for slot in (0, 1)] == [BlockState.LOADING] * 2
        assert core.ledger.leases.state(4) is LeaseState.WRITING

    def test_partial_acceptance_releases_the_rest(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(4))
        core.match("q", keys(4))
        plan = core.prepare_load("q", [5, 6])
        assert plan is not None
        assert to_list(plan.slots) == [0, 1]
        assert [core.ledger.blocks.state(slot) for slot in (2, 3)] == [BlockState.STORED] * 2
        assert len(core.ledger.policy) == 2

    def test_nothing_accepted_releases_all(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(4))
        core.match("q", keys(4))
        assert core.prepare_load("q", []) is None
        assert len(core.ledger.policy) == 4

    def test_more_than_matched_is_refused(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(1))
        core.match("q", keys(1))
        with pytest.raises(InvalidEvent, match="matched 1 blocks, not 2"):
            core.prepare_load("q", [5, 6])

    def test_without_a_match_nothing_is_loaded(self) -> None:
        core, _ = new_core()
        assert core.prepare_load("q", [5]) is None

    def test_end_of_a_load_is_a_use(self) -> None:
        """The touch of a load is implied by its end: what was loaded is evicted last."""
        core, _ = new_core(host_blocks=2)
        store(core, "r", keys(1, "old"))
        store(core, "r", keys(1, "young"), 1)
        core.complete_load(load(core, "q", keys(1, "old"), 4))
        assert core.prepare_store("r", keys(1, "new"), [5]).evicted == keys(1, "young")

    def test_blocks_of_a_load_are_not_evicted(self) -> None:
        """S3: B35."""
        core, _ = new_core(host_blocks=2)
        store(core, "r", keys(2))
        load(core, "q", keys(2), 4)
        assert core.prepare_store("r", keys(1, "new"), [8]).plan is None

    def test_failed_load_voids_its_keys_before_the_request_hears(self) -> None:
        """S6: B27, B28; else the next match finds them and fails again for ever."""
        core, _ = new_core()
        store(core, "r", keys(2))
        ended = core.fail_load(load(core, "q", keys(2), 4))
        assert ended is not None
        assert not ended.good
        assert core.match("q", keys(2)) == Match(0)

    def test_one_failed_worker_fails_the_load(self) -> None:
        core, _ = new_core(workers=2)
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        assert core.fail_load(transfer, 1) is None
        ended = core.complete_load(transfer, 0)
        assert ended is not None
        assert not ended.good

    def test_other_readers_of_a_failed_load_go_on(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(1))
        first, second = load(core, "q", keys(1), 4), load(core, "s", keys(1), 5)
        core.fail_load(first)
        assert core.ledger.blocks.state(0) is BlockState.QUARANTINED
        ended = core.complete_load(second)
        assert ended is not None
        assert ended.good
        assert core.ledger.blocks.state(0) is BlockState.EVICTED

    def test_voided_promise_is_reported_as_a_failed_load(self) -> None:
        """S7: an engine that was promised tokens always hears; the pins still alive are given back."""
        core, log = new_core()
        store(core, "r", keys(1))
        store(core, "r", keys(2)[1:], 1)
        core.match("q", keys(2))
        core.fail_load(load(core, "s", keys(1), 4))
        assert core.prepare_load("q", [6, 7]) is None
        assert log[-1].voided
        assert len(core.ledger.policy) == 1
        assert core.ledger.requests["q"].state is RequestState.RUNNING

    @pytest.mark.parametrize("count", [1, 3 * SMALL])
    def test_pin_does_not_pass_to_the_next_life_of_a_slot(self, count: int) -> None:
        """Identity is (slot, generation): a slot stored again after a reset is not what was matched."""
        core, _ = new_core(host_blocks=count, device_blocks=count)
        store(core, "r", keys(count))
        core.match("q", keys(count))
        core.reset()
        store(core, "r", keys(count, "other"))
        assert core.prepare_load("q", range(count)) is None
        core.finish("q")
        assert len(core.ledger.policy) == count

    def test_slots_of_a_failed_load_are_free_and_nothing_else(self) -> None:
        """S1: each slot in one list: what was voided leaves the eviction order."""
        core, _ = new_core()
        store(core, "r", keys(2))
        core.fail_load(load(core, "q", keys(2), 4))
        assert (len(core.ledger.free), len(core.ledger.policy)) == (8, 0)


class TestStore:
    def test_resident_keys_are_not_stored_again(self) -> None:
        """S13."""
        core, _ = new_core()
        store(core, "r", keys(2))
        prepared = core.prepare_store("r", keys(3), [4, 5, 6])
        assert prepared.keys == tuple(keys(3)[2:])
        assert prepared.resident == 2

    def test_key_offered_twice_in_one_call_is_stored_once(self) -> None:
        """S1: B11, a slot that nothing can reach."""
        core, _ = new_core()
        prepared = core.prepare_store("r", [*keys(1), *keys(1)], [0, 1])
        assert prepared.keys == tuple(keys(1))
        assert len(core.ledger.free) == 7

    def test_device_block_at_two_positions_is_leased_once(self) -> None:
        """S4: B10, one device block at two positions of a request."""
        core, _ = new_core()
        prepared = core.prepare_store("r", keys(2), [3, 3])
        assert prepared.keys == tuple(keys(1))
        assert prepared.deferred == tuple(keys(2)[1:])

    def test_device_block_with_a_store_in_flight_is_deferred(self) -> None:
        """S13: B01, told by its id, for the life of the transfer."""
        core, log = new_core()
        plan = core.prepare_store("r", keys(1), [3]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.end_step()
        assert core.prepare_store("q", keys(1, "rehashed"), [3]).deferred == tuple(keys(1, "rehashed"))
        assert log[-1].reason == SkipReason.DEVICE_BLOCK_IN_FLIGHT
        core.complete_store(plan.transfer)
        assert core.prepare_store("q", keys(1, "rehashed"), [3]).plan is not None

    def test_key_in_flight_from_another_block_is_deferred_and_stored_if_that_fails(self) -> None:
        """S13: deferred, not forgotten."""
        core, _ = new_core()
        plan = core.prepare_store("r", keys(1), [3]).plan
        assert plan is not None
        core.submit([plan.transfer])
        assert core.prepare_store("q", keys(1), [4]).deferred == tuple(keys(1))
        core.fail_store(plan.transfer)
        assert core.prepare_store("q", keys(1), [4]).keys == tuple(keys(1))

    def test_offered_keys_are_not_evicted_for_each_other(self) -> None:
        """S7: B07, [2, 3, 4, 5] with 2 resident and least recent."""
        core, _ = new_core(host_blocks=4)
        store(core, "r", [*keys(1), *keys(3, "other")])
        prepared = core.prepare_store("r", keys(3), [4, 5, 6])
        assert keys(1)[0] not in prepared.evicted
        assert prepared.keys == tuple(keys(3)[1:])

    def test_eviction_is_all_or_nothing(self) -> None:
        core, log = new_core(host_blocks=3)
        store(core, "r", keys(3))
        core.match("q", keys(2))
        prepared = core.prepare_store("r", keys(2, "new"), [4, 5])
        assert prepared == PreparedStore(None, (), 0, tuple(keys(2, "new")))
        assert isinstance(log[-1], StoreSkipped)
        assert log[-1].reason == SkipReason.POOL_FULL
        assert core.lookup(keys(3)[2]) is LookupResult.HIT

    def test_eviction_names_the_store_that_it_makes_room_for(self) -> None:
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(2))
        plan = core.prepare_store("r", keys(1, "new"), [4]).plan
        assert plan is not None
        assert log[-2].transfer == log[-1].seq == plan.transfer

    def test_failed_store_gives_its_slots_back(self) -> None:
        """S6, S1."""
        core, _ = new_core(workers=2)
        plan = core.prepare_store("r", keys(3), [0, 1, 2]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.complete_store(plan.transfer, 0)
        core.fail_store(plan.transfer, 1)
        assert core.lookup(keys(3)[0]) is LookupResult.MISS
        assert len(core.ledger.free) == 8

    def test_live_transfers_are_limited(self) -> None:
        core, log = new_core(max_live_transfers=1)
        core.prepare_store("r", keys(1), [0])
        assert core.prepare_store("r", keys(1, "b"), [1]).plan is None
        assert log[-1].reason == SkipReason.TOO_MANY_TRANSFERS

    def test_load_beyond_the_limit_is_a_named_refusal(self) -> None:
        core, _ = new_core(max_live_transfers=1)
        store(core, "r", keys(1))
        core.match("q", keys(1))
        core.prepare_store("r", keys(1, "b"), [1])
        with pytest.raises(LimitReached, match="max_live_transfers"):
            core.prepare_load("q", [2])

    @pytest.mark.parametrize("block", [-1, 16])
    def test_device_block_that_does_not_exist_is_refused(self, block: int) -> None:
        core, log = new_core()
        with pytest.raises(InvalidEvent, match=f"device block {block} is not one of the 16"):
            core.prepare_store("r", keys(1), [block])
        assert log.kinds() == ["LogOpened"]

    def test_cancelled_plan_leaves_nothing(self) -> None:
        core, _ = new_core()
        plan = core.prepare_store("r", keys(3), [0, 1, 2]).plan
        assert plan is not None
        assert core.cancel(plan.transfer) is not None
        assert core.cancel(plan.transfer) is None
        assert (len(core.ledger.free), core.ledger.index, core.ledger.transfers) == (8, {}, {})

    @given(count=st.integers(1, 3 * SMALL), resident=st.integers(0, 3 * SMALL))
    def test_batches_of_any_size_store_what_is_new(self, count: int, resident: int) -> None:
        """Tuples and arrays are one behaviour: the sizes around SMALL are where they could differ."""
        core, log = new_core(host_blocks=3 * SMALL, device_blocks=6 * SMALL)
        names = keys(count)
        if min(resident, count):
            store(core, "r", names[: min(resident, count)])
        if resident < count:
            assert store(core, "r", names, 3 * SMALL)
        core.complete_load(load(core, "q", names, 0))
        assert core.finish("q")
        assert core.finish("r")
        assert len(core.ledger.policy) == count
        assert digest(fold(log, core.config)) == digest(core.ledger)


class TestReports:
    @pytest.mark.parametrize(
        ("transfer", "worker", "reason"),
        [
            (99, 0, RejectReason.UNKNOWN),
            (0, 0, RejectReason.UNKNOWN),
            (-1, 0, RejectReason.UNKNOWN),
            (2, 2, RejectReason.WORKER),
            (2, -1, RejectReason.WORKER),
            (2, 1, RejectReason.DUPLICATE),
            (1, 0, RejectReason.STALE),
        ],
    )
    def test_report_that_means_nothing_is_recorded_and_changes_nothing(
        self, transfer: int, worker: int, reason: str
    ) -> None:
        """S5."""
        core, log = new_core(workers=2)
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        assert plan.transfer == 2
        core.submit([2])
        core.complete_store(2, 1)
        before = (
            list(core.ledger.blocks.words),
            core.ledger.transfers[2].word,
            core.ledger.transfers[2].reported,
        )
        assert core.report(transfer, worker, True) is None
        assert isinstance(log[-1], ReportRejected)
        assert log[-1].reason == reason
        after = (
            list(core.ledger.blocks.words),
            core.ledger.transfers[2].word,
            core.ledger.transfers[2].reported,
        )
        assert after == before

    def test_report_of_an_unsubmitted_plan_is_rejected(self) -> None:
        core, log = new_core()
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.complete_store(plan.transfer)
        assert log[-1].reason == RejectReason.NOT_SUBMITTED

    def test_report_of_the_other_direction_is_rejected(self) -> None:
        core, log = new_core()
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.complete_load(plan.transfer)
        assert log[-1].reason == RejectReason.DIRECTION

    def test_late_report_does_not_complete_the_next_store_of_the_key(self) -> None:
        """S5: B12, B39."""
        core, _ = new_core()
        first = core.prepare_store("r", keys(1), [0]).plan
        assert first is not None
        core.submit([first.transfer])
        core.reset()
        second = core.prepare_store("r", keys(1), [1]).plan
        assert second is not None
        core.submit([second.transfer])
        core.complete_store(first.transfer)
        assert core.lookup(keys(1)[0]) is LookupResult.HIT_PENDING
        core.complete_store(second.transfer)
        assert core.lookup(keys(1)[0]) is LookupResult.HIT


class TestReset:
    def test_nothing_matches_afterwards(self) -> None:
        """S14."""
        core, _ = new_core()
        store(core, "r", keys(3))
        assert core.reset()
        assert core.match("q", keys(3)) == Match(0)

    def test_slot_of_a_store_in_flight_is_quarantined_until_it_ends(self) -> None:
        """S3: B13, free is not reuse."""
        core, _ = new_core(host_blocks=1)
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        assert not core.reset()
        assert core.prepare_store("r", keys(1), [1]).plan is None
        assert core.ledger.draining()
        core.complete_store(plan.transfer)
        assert not core.ledger.draining()
        assert core.prepare_store("r", keys(1), [1]).plan is not None

    def test_load_under_way_fails(self) -> None:
        """S14: what a load of an older epoch brought is not used."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.reset()
        ended = core.complete_load(transfer)
        assert ended is not None
        assert not ended.good

    def test_plan_that_did_not_leave_is_cancelled(self) -> None:
        core, _ = new_core()
        core.prepare_store("r", keys(1), [0])
        assert core.reset()
        assert len(core.ledger.free) == 8

    def test_reset_twice_is_legal(self) -> None:
        core, _ = new_core()
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.reset()
        assert not core.reset()
        assert core.ledger.epoch == 2


class TestRequests:
    def test_finish_twice_is_as_once(self) -> None:
        """S8: B30."""
        core, log = new_core()
        core.match("r", keys(1))
        assert core.finish("r")
        events = len(log)
        assert core.finish("r", aborted=True)
        assert len(log) == events

    def test_finish_of_an_unknown_request_is_legal(self) -> None:
        """S8: B19, aborted before it was ever scheduled."""
        core, log = new_core()
        assert core.finish("r", aborted=True)
        assert log.kinds() == ["LogOpened"]

    def test_finished_request_lives_until_its_last_copy_ends(self) -> None:
        """S4, S8: B20, B29."""
        core, _ = new_core()
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        assert not core.finish("r")
        assert core.ledger.requests["r"].state is RequestState.FINISHED
        core.complete_store(plan.transfer)
        assert "r" not in core.ledger.requests
        assert core.lookup(keys(1)[0]) is LookupResult.HIT

    def test_abort_in_mid_load_keeps_the_lease(self) -> None:
        """S3: B05, the copy would land in another request's block."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.finish("q", aborted=True)
        assert core.ledger.leases.state(4) is LeaseState.WRITING
        core.complete_load(transfer)
        assert core.ledger.leases.state(4) is LeaseState.NONE

    def test_finish_gives_its_pins_back(self) -> None:
        """S4: B31, a lookup that pins and a retrieve that never comes."""
        core, _ = new_core()
        store(core, "r", keys(2))
        core.match("q", keys(2))
        core.finish("q")
        assert len(core.ledger.policy) == 2

    def test_preempted_request_may_match_again_while_its_copies_run(self) -> None:
        """S8: B18."""
        core, _ = new_core()
        store(core, "r", keys(2))
        transfer = load(core, "q", keys(1), 4)
        core.preempt("q")
        assert core.match("q", keys(2)).hits == 2
        core.complete_load(transfer)
        assert core.ledger.requests["q"].state is RequestState.MATCHED

    def test_lost_transfer_retires_its_memory_and_frees_the_request(self) -> None:
        """S9: the engine goes on; S3: the memory is never used again."""
        core, _ = new_core(host_blocks=2)
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.finish("r")
        ended = core.lose(plan.transfer)
        assert ended is not None
        assert not ended.good
        assert "r" not in core.ledger.requests
        assert core.ledger.blocks.state(0) is BlockState.RETIRED
        assert core.prepare_store("q", keys(2), [1, 2]).plan is None
        assert core.prepare_store("q", keys(1), [0]).deferred == tuple(keys(1))

    def test_loss_voids_the_pins_of_others(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.match("s", keys(1))
        core.lose(transfer)
        assert core.prepare_load("s", [6]) is None
        assert core.finish("s")


class TestStepsAndLog:
    def test_idle_step_is_no_event(self) -> None:
        core, log = new_core()
        core.end_step()
        events = len(log)
        for _ in range(3):
            core.end_step()
        assert len(log) == events
        assert core.step == 4

    def test_tick_is_no_event_when_nobody_waits(self) -> None:
        core, log = new_core()
        core.tick()
        assert log.kinds() == ["LogOpened"]

    def test_flush_names_all_submitted_transfers_and_asks_once(self) -> None:
        core, log = new_core()
        plan = core.prepare_store("r", keys(1), [0]).plan
        core.prepare_store("r", keys(1, "b"), [1])
        assert plan is not None
        core.submit([plan.transfer])
        assert core.flush() == core.flush() == (plan.transfer,)
        assert log.kinds().count("FlushRequested") == 1

    def test_log_is_flushed_before_plans_leave(self) -> None:
        """Rule 12: the log is ahead of the world."""
        order: list[str] = []

        class Sink(Recorder):
            def append(self, event: OffloadingEvent) -> None:
                order.append(event.kind)

            def flush(self) -> None:
                order.append("flush")

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), Sink())
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        assert order[-2:] == ["TransfersSubmitted", "flush"]

    def test_failed_write_poisons_the_core(self) -> None:
        """Rule 12: a write that fails is never passed over."""

        class FullDisk(Recorder):
            def flush(self) -> None:
                raise LogWriteFailed("disk full")

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), FullDisk())
        with pytest.raises(LogWriteFailed):
            core.end_step()
        with pytest.raises(Poisoned, match="disk full"):
            core.match("r", keys(1))

    def test_interrupt_between_fold_and_log_poisons_the_core(self) -> None:
        """S10: what the ledger has and the log lacks must not go on."""

        class Interrupted(Recorder):
            def append(self, event: OffloadingEvent) -> None:
                if event.kind == "RequestArrived":
                    raise KeyboardInterrupt

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), Interrupted())
        with pytest.raises(KeyboardInterrupt):
            core.arrive("r")
        with pytest.raises(Poisoned, match="KeyboardInterrupt"):
            core.match("r", keys(1))

    def test_step_is_flushed_once(self) -> None:
        """A frame a step: by `submit` if plans leave, else when the step ends."""
        flushes: list[int] = []

        class Sink(Recorder):
            def flush(self) -> None:
                flushes.append(core.step)

        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), Sink())
        plan = core.prepare_store("r", keys(1), [0]).plan
        assert plan is not None
        core.submit([plan.transfer])
        core.end_step()
        core.complete_store(plan.transfer)
        core.end_step()
        core.end_step()
        assert flushes == [0, 1]

    @pytest.mark.parametrize("copies_end", [True, False], ids=["copies end", "nothing to submit"])
    def test_nothing_is_left_unwritten_when_no_copy_brings_another_step(self, copies_end: bool) -> None:
        """An engine that goes idle leaves a whole log: rule 6."""
        unwritten: list[str] = []

        class Sink(Recorder):
            def append(self, event: OffloadingEvent) -> None:
                unwritten.append(event.kind)

            def flush(self) -> None:
                unwritten.clear()

        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), Sink())
        if copies_end:
            store(core, "r", keys(1))
        else:
            core.submit([])
        core.arrive("q")
        core.finish("q")
        core.end_step()
        assert unwritten == []

    def test_wall_time_is_data_only(self) -> None:
        """S11: the same calls under another clock give the same decisions."""

        def decisions(clock_ns: Callable[[], int]) -> list[OffloadingEvent]:
            log = Recorder()
            core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), log, clock_ns=clock_ns)
            store(core, "r", keys(3))
            core.complete_load(load(core, "q", keys(3), 4))
            assert digest(fold(log, core.config)) == digest(core.ledger)
            return [msgspec.structs.replace(event, wall_ns=0) for event in log]

        assert decisions(lambda: 5) == decisions(iter(range(10**6)).__next__)


def test_transfer_states_are_visible_while_it_lives() -> None:
    core, _ = new_core()
    plan = core.prepare_store("r", keys(1), [0]).plan
    assert plan is not None
    transfer = core.ledger.transfers[plan.transfer]
    seen = [transfer.state]
    core.submit([plan.transfer])
    seen.append(transfer.state)
    core.complete_store(plan.transfer)
    seen.append(transfer.state)
    assert seen == [TransferState.PLANNED, TransferState.SUBMITTED, TransferState.COMPLETED]


def test_offloading_events_say_what_came_and_went() -> None:
    """S10: folding what left kvsm gives the readable keys."""
    core, _ = new_core(host_blocks=2, publish=True)
    store(core, "r", keys(2))
    store(core, "r", keys(1, "new"), 4)
    assert [(event.keys, event.medium, event.removed) for event in core.take_events()] == [
        (keys(2), "CPU", False),
        ([keys(2)[1]], "CPU", True),
        (keys(1, "new"), "CPU", False),
    ]
    assert core.take_events() == []
