"""What the deciding core promises, call by call. Every order of calls: tests/stateful/test_core.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from core_life import begin_store, fold, keys, kinds, load, new_core, store
from hypothesis import example, given
from hypothesis import strategies as st

from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import TransferRecord
from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LogFlush, LookupResult, Match, Offloader, ReportResult
from kvsm.core.offloader.emitter import checked_device_blocks
from kvsm.errors import InvalidEvent, LogWriteFailed, Poisoned
from kvsm.events import (
    OffloadConfig,
    OffloadingEvent,
    RejectReason,
    ReportRejected,
    RequestFinished,
    StepEnded,
)
from kvsm.ids import SMALL, to_list
from kvsm.states import BlockState, LeaseState, RequestState, TransferState, machines_digest

_CALLS_OF_A_STEP = ("plan", "leave", "report", "reset", "restart", "adopt", "finish", "end")


class TestLookup:
    def test_unknown_key_misses(self) -> None:
        core, _ = new_core()
        assert core.lookup(keys(1)[0]) is LookupResult.MISS

    def test_key_hits_only_after_every_worker_has_stored_it(self) -> None:
        """Publish after commit (S2).

        A store is published by its last worker's report, not before (B38, B34).
        """
        core, _ = new_core(workers=3)
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        seen = [core.lookup(keys(1)[0])]
        core.submit([job.transfer])
        for worker in (2, 0, 1):
            seen.append(core.lookup(keys(1)[0]))
            core.complete_store(job.transfer, worker)
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
        """A match holds what it counts (S7): a counted hit was evicted before its load (B06)."""
        core, _ = new_core(host_blocks=3)
        store(core, "r", keys(3))
        core.match("q", keys(2))
        prepared = core.prepare_store("r", keys(2, "other"), [4, 5])
        assert prepared.evicted == (keys(3)[2],)
        assert prepared.deferred == (1,)

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
        """One release per hold (S4): a request has one set of pins (B31)."""
        core, _ = new_core()
        store(core, "r", keys(3))
        core.match("q", keys(3))
        core.match("q", keys(1))
        pinned = [core.ledger.blocks.codec.decode(word)[1][1] for word in core.ledger.blocks.words]
        assert pinned[:3] == [1, 0, 0]

    def test_second_question_for_as_many_other_blocks_replaces_the_first(self) -> None:
        """A match holds what it counts (S7).

        The request holds the blocks that were counted, not only as many.
        """
        core, _ = new_core()
        store(core, "r", keys(2))
        store(core, "r", keys(2, "other"), 4)
        core.match("q", keys(2))
        assert core.match("q", keys(2, "other")) == Match(2)
        assert core.ledger.requests["q"].pins == (2, 3)

    def test_release_gives_every_pin_back(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(3))
        core.match("q", keys(3))
        core.release("q")
        assert len(core.ledger.policy) == 3

    def test_waits_for_a_store_in_flight(self) -> None:
        """A key in flight is not a miss (B08)."""
        core, _ = new_core()
        job = core.prepare_store("r", keys(2), [0, 1]).job
        assert job is not None
        assert core.match("q", keys(2)) == Match(0, job.transfer)
        assert core.ledger.requests["q"].state is RequestState.DEFERRED

    def test_end_of_the_store_wakes_its_waiting_requests(self) -> None:
        core, _ = new_core()
        job = core.prepare_store("r", keys(2), [0, 1]).job
        assert job is not None
        core.match("q", keys(2))
        core.submit([job.transfer])
        core.complete_store(job.transfer)
        assert core.match("q", keys(2)) == Match(2)

    def test_failed_store_wakes_its_waiting_requests(self) -> None:
        """Progress (S9): no wait is left that nobody ends (B15)."""
        core, _ = new_core()
        job = core.prepare_store("r", keys(2), [0, 1]).job
        assert job is not None
        core.match("q", keys(2))
        core.submit([job.transfer])
        core.fail_store(job.transfer)
        assert core.match("q", keys(2)) == Match(0)

    def test_wait_is_bounded_in_ticks(self) -> None:
        """Progress (S9): every wait has a bound (rule 8). After it the request waits for nothing more."""
        core, _ = new_core(defer_ticks=3)
        core.prepare_store("r", keys(2), [0, 1])
        waiting = []
        for _ in range(5):
            waiting.append(core.match("q", keys(2)).waits_for is not None)
            core.tick()
        assert waiting == [True, True, True, False, False]

    def test_wait_for_one_transfer_after_another_has_one_bound(self) -> None:
        """Progress (S9): a request that waits for the next store after a failure keeps its bound."""
        core, _ = new_core(defer_ticks=3)
        waiting = []
        for attempt in range(5):
            transfer = begin_store(core, "r", keys(1), attempt)
            waiting.append(core.match("q", keys(1)).waits_for == transfer)
            core.tick()
            core.fail_store(transfer)
        assert waiting == [True, True, True, False, False]

    def test_end_of_another_transfer_wakes_nobody(self) -> None:
        core, _ = new_core()
        awaited = core.prepare_store("r", keys(2), [0, 1]).job
        assert awaited is not None
        core.match("q", keys(2))
        store(core, "r", keys(1, "other"), 4)
        assert list(core.ledger.deferred) == ["q"]

    def test_request_that_begins_to_wait_gives_its_match_back(self) -> None:
        """One release per hold (S4): a waiting request holds nothing, and the log says who gave back."""
        core, log = new_core()
        store(core, "r", keys(1))
        core.match("q", keys(1))
        transfer = begin_store(core, "r", keys(2)[1:], 4)
        assert core.match("q", keys(2)) == Match(0, transfer)
        assert [(event.kind, event.request) for event in log[-2:]] == [
            ("HitReleased", "q"),
            ("RequestDeferred", "q"),
        ]
        assert len(core.ledger.policy) == 1

    def test_match_is_possible_unless_a_load_is_in_flight(self) -> None:
        """One release per hold (S4): two loads of one request could not be told apart."""
        core, _ = new_core()
        store(core, "r", keys(1))
        possible = [core.may_match("never seen"), core.may_match("r")]
        core.match("q", keys(1))
        possible.append(core.may_match("q"))
        transfer = load(core, "q", keys(1), 4)
        possible.append(core.may_match("q"))
        core.preempt("q")
        possible.append(core.may_match("q"))
        core.finish("q")
        possible.append(core.may_match("q"))
        core.complete_load(transfer)
        possible.append(core.may_match("q"))
        assert possible == [True, True, True, False, False, False, True]

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

    def test_load_is_recorded_with_its_blocks_and_as_one_that_holds(self) -> None:
        """Events are state (S10)."""
        core, log = new_core()
        store(core, "r", keys(2))
        core.match("q", keys(2))
        core.prepare_load("q", [6, 7])
        event = log[-1]
        assert (event.kind, event.slots, event.device_blocks) == ("LoadPlanned", (0, 1), (6, 7))
        assert event.voided is False

    def test_partial_acceptance_releases_the_rest(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(4))
        core.match("q", keys(4))
        job = core.prepare_load("q", [5, 6])
        assert job is not None
        assert to_list(job.host_blocks) == [0, 1]
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
        """The end of a load counts as a use: what was loaded is evicted last."""
        core, _ = new_core(host_blocks=2)
        store(core, "r", keys(1, "old"))
        store(core, "r", keys(1, "young"), 1)
        core.complete_load(load(core, "q", keys(1, "old"), 4))
        assert core.prepare_store("r", keys(1, "new"), [5]).evicted == tuple(keys(1, "young"))

    def test_blocks_of_a_load_are_not_evicted(self) -> None:
        """No reuse in flight (S3): the blocks under a load stay (B35)."""
        core, _ = new_core(host_blocks=2)
        store(core, "r", keys(2))
        load(core, "q", keys(2), 4)
        assert core.prepare_store("r", keys(1, "new"), [8]).job is None

    def test_failed_load_voids_its_keys_before_the_request_hears(self) -> None:
        """Failure is not success (S6): otherwise every next match finds them and fails again (B27, B28)."""
        core, _ = new_core()
        store(core, "r", keys(2))
        ended = core.fail_load(load(core, "q", keys(2), 4)).ended
        assert ended is not None
        assert not ended.good
        assert core.match("q", keys(2)) == Match(0)

    def test_one_failed_worker_fails_the_load(self) -> None:
        core, _ = new_core(workers=2)
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        assert core.fail_load(transfer, 1) == ReportResult()
        ended = core.complete_load(transfer, 0).ended
        assert ended is not None
        assert not ended.good

    def test_other_readers_of_a_failed_load_go_on(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(1))
        first, second = load(core, "q", keys(1), 4), load(core, "s", keys(1), 5)
        core.fail_load(first)
        assert core.ledger.blocks.state(0) is BlockState.QUARANTINED
        ended = core.complete_load(second).ended
        assert ended is not None
        assert ended.good
        assert core.ledger.blocks.state(0) is BlockState.EVICTED

    @pytest.mark.parametrize("count", [2, 3 * SMALL])
    def test_voided_promise_is_reported_as_a_failed_load(self, count: int) -> None:
        """A match holds what it counts (S7).

        The engine always hears of a broken promise. The live pins are given back.
        """
        core, log = new_core(host_blocks=count, device_blocks=2 * count)
        store(core, "r", keys(1))
        store(core, "r", keys(count)[1:], 1)
        core.match("q", keys(count))
        core.fail_load(load(core, "s", keys(1), count))
        assert core.prepare_load("q", range(count, 2 * count)) is None
        assert log[-1].voided
        assert len(core.ledger.policy) == count - 1
        assert core.ledger.requests["q"].state is RequestState.RUNNING

    @pytest.mark.parametrize("count", [1, 3 * SMALL])
    def test_pin_does_not_pass_to_the_next_life_of_a_slot(self, count: int) -> None:
        """A match holds what it counts (S7).

        A pin names (slot, generation). A slot that was stored again is another block.
        """
        core, _ = new_core(host_blocks=count, device_blocks=count)
        store(core, "r", keys(count))
        core.match("q", keys(count))
        core.reset()
        store(core, "r", keys(count, "other"))
        assert core.prepare_load("q", range(count)) is None
        core.finish("q")
        assert len(core.ledger.policy) == count

    def test_slots_of_a_failed_load_are_free_and_nothing_else(self) -> None:
        """Conservation (S1): each slot is in one list. A voided block leaves the eviction order."""
        core, _ = new_core()
        store(core, "r", keys(2))
        core.fail_load(load(core, "q", keys(2), 4))
        assert (len(core.ledger.free), len(core.ledger.policy)) == (8, 0)


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
            (4, 0, RejectReason.STALE),
            (5, 0, RejectReason.UNKNOWN),
        ],
    )
    def test_report_that_means_nothing_is_recorded_and_changes_nothing(
        self, transfer: int, worker: int, reason: str
    ) -> None:
        """Stale reports change nothing (S5): it is recorded only."""
        core, log = new_core(workers=2)
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        assert job.transfer == 2
        core.submit([2])
        core.complete_store(2, 1)
        before = (
            list(core.ledger.blocks.words),
            core.ledger.transfers[2].word,
            core.ledger.transfers[2].reported,
        )
        seq = core.ledger.seq + 1
        assert core.report(transfer, worker, True) == ReportResult(rejected=reason)
        assert log[-1] == ReportRejected(seq, 0, 0, transfer, worker, True, reason)
        after = (
            list(core.ledger.blocks.words),
            core.ledger.transfers[2].word,
            core.ledger.transfers[2].reported,
        )
        assert after == before

    def test_report_of_an_unsubmitted_plan_is_rejected(self) -> None:
        core, log = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.complete_store(job.transfer)
        assert log[-1].reason == RejectReason.NOT_SUBMITTED

    @pytest.mark.parametrize("good", [False, True])
    def test_report_of_the_other_direction_is_rejected(self, good: bool) -> None:
        core, log = new_core()
        storing = begin_store(core, "r", keys(1))
        (core.complete_load if good else core.fail_load)(storing)
        assert log[-1].reason == RejectReason.DIRECTION
        core.complete_store(storing)
        loading = load(core, "q", keys(1), 4)
        (core.complete_store if good else core.fail_store)(loading)
        assert log[-1].reason == RejectReason.DIRECTION

    def test_late_report_does_not_complete_the_next_store_of_the_key(self) -> None:
        """Stale reports change nothing (S5): a report names a transfer, not a key (B12, B39)."""
        core, _ = new_core()
        first = core.prepare_store("r", keys(1), [0]).job
        assert first is not None
        core.submit([first.transfer])
        core.reset()
        second = core.prepare_store("r", keys(1), [1]).job
        assert second is not None
        core.submit([second.transfer])
        core.complete_store(first.transfer)
        assert core.lookup(keys(1)[0]) is LookupResult.HIT_PENDING
        core.complete_store(second.transfer)
        assert core.lookup(keys(1)[0]) is LookupResult.HIT


class TestReset:
    def test_nothing_matches_afterwards(self) -> None:
        """No stale data (S14): of what was stored before the reset."""
        core, _ = new_core()
        store(core, "r", keys(3))
        assert core.reset()
        assert core.match("q", keys(3)) == Match(0)

    def test_slot_of_a_store_in_flight_is_quarantined_until_it_ends(self) -> None:
        """No reuse in flight (S3): a free slot is not reused under a copy (B13)."""
        core, _ = new_core(host_blocks=1)
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.submit([job.transfer])
        assert not core.reset()
        assert core.prepare_store("r", keys(1), [1]).job is None
        assert core.ledger.draining()
        core.complete_store(job.transfer)
        assert not core.ledger.draining()
        assert core.prepare_store("r", keys(1), [1]).job is not None

    def test_drains_until_the_last_older_copy_has_ended(self) -> None:
        """No stale data (S14), in whatever order copies end. Only the oldest is asked: each step asks, and
        thousands may be in flight."""
        core, _ = new_core(host_blocks=8)
        first, second = begin_store(core, "r", keys(1)), begin_store(core, "r", [b"second"], 1)
        core.reset()
        begin_store(core, "r", keys(1), 2)
        core.complete_store(second)
        assert core.ledger.draining()
        core.complete_store(first)
        begin_store(core, "r", [b"third"], 3)
        looked = list[int]()

        class Watched(dict[int, TransferRecord]):
            def values(self) -> Any:
                return (looked.append(one.id) or one for one in super().values())  # type: ignore[func-returns-value]

        core.ledger.transfers = Watched(core.ledger.transfers)
        assert not core.ledger.draining()
        assert len(looked) == 1

    def test_load_under_way_fails(self) -> None:
        """No stale data (S14): what a load of an older epoch brought is not used."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.reset()
        ended = core.complete_load(transfer).ended
        assert ended is not None
        assert not ended.good

    def test_plan_that_did_not_leave_is_cancelled(self) -> None:
        core, _ = new_core()
        core.prepare_store("r", keys(1), [0])
        assert core.reset()
        assert len(core.ledger.free) == 8

    def test_reset_twice_is_one_event(self) -> None:
        core, log = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.submit([job.transfer])
        events = len(log)
        assert not core.reset()
        assert not core.reset()
        core.complete_store(job.transfer)
        assert core.reset()
        assert kinds(log[events:]) == ["CacheReset", "WorkerReported"]

    @pytest.mark.parametrize("ended", [True, False], ids=["stored", "in flight"])
    def test_what_came_since_the_last_reset_makes_the_next_one_an_event(self, ended: bool) -> None:
        core, _ = new_core()
        for epoch in (1, 2):
            (store if ended else begin_store)(core, "r", keys(1), epoch)
            core.reset()
            assert core.ledger.epoch == epoch

    def test_reset_of_an_empty_pool_still_ages_what_was_loaded(self) -> None:
        """No stale data (S14).

        Nothing is resident, but a device block holds what a load of the older epoch brought.
        """
        core, _ = new_core()
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        core.fail_load(load(core, "s", keys(1), 5))
        assert not core.ledger.index
        core.reset()
        assert core.ledger.epoch == 1
        assert core.prepare_store("q", keys(1), [4]).job is None

    def test_reset_abandons_a_load_that_left_no_other_trace(self) -> None:
        """No stale data (S14).

        Another load of the same key failed, so the index is empty; and the engine computes into the blocks.
        """
        core, _ = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.fail_load(load(core, "s", keys(1), 6))
        core.rewrite([4, 5])
        assert not core.ledger.index
        assert not core.ledger.provenance.brought
        assert not core.reset()
        assert core.ledger.transfers[transfer].state is TransferState.ABANDONED


class TestRequests:
    def test_finish_is_no_abort_unless_that_is_said(self) -> None:
        core, log = new_core()
        core.arrive("r")
        core.finish("r")
        assert isinstance(log[-1], RequestFinished)
        assert not log[-1].aborted

    def test_finish_twice_is_one_event(self) -> None:
        """Every call is legal (S8): finish is idempotent (B30)."""
        core, log = new_core()
        core.match("r", keys(1))
        assert core.finish("r")
        events = len(log)
        assert core.finish("r", aborted=True)
        assert len(log) == events

    @pytest.mark.parametrize("aborted", [False, True])
    def test_finish_is_recorded_once_and_says_whether_it_was_an_abort(self, aborted: bool) -> None:
        """Every call is legal (S8): also for a request that stays until its load ends."""
        core, log = new_core()
        store(core, "r", keys(1))
        load(core, "q", keys(1), 4)
        core.finish("q", aborted=aborted)
        core.finish("q", aborted=not aborted)
        finished = [event for event in log if isinstance(event, RequestFinished)]
        assert [(event.request, event.aborted) for event in finished] == [("q", aborted)]

    def test_finish_of_an_unknown_request_is_legal(self) -> None:
        """Every call is legal (S8): a request may be aborted before it is scheduled (B19)."""
        core, log = new_core()
        assert core.finish("r", aborted=True)
        assert kinds(log) == ["LogOpened"]

    def test_finished_request_lives_until_its_load_ends(self) -> None:
        """One release per hold (S4), every call is legal (S8): the end of the load finds it (B20, B29)."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        assert not core.finish("q")
        assert core.ledger.requests["q"].state is RequestState.FINISHED
        core.complete_load(transfer)
        assert "q" not in core.ledger.requests

    @pytest.mark.parametrize("good", [True, False])
    def test_finished_request_is_released_at_once_and_its_stores_go_on(self, good: bool) -> None:
        """One release per hold (S4), full offload (S16).

        Leases hold what is stored. A store needs no request.
        """
        core, _ = new_core()
        core.arrive("r")
        transfer = begin_store(core, "r", keys(1), 3)
        assert core.finish("r")
        assert "r" not in core.ledger.requests
        assert core.ledger.leases.state(3) is LeaseState.READING
        core.report(transfer, 0, good)
        assert core.ledger.leases.state(3) is LeaseState.NONE
        assert core.lookup(keys(1)[0]) is (LookupResult.HIT if good else LookupResult.MISS)

    def test_new_life_under_a_name_has_nothing_of_the_old_ones_stores(self) -> None:
        core, _ = new_core()
        core.arrive("r")
        transfer = begin_store(core, "r", keys(1))
        core.finish("r")
        core.arrive("r")
        core.fail_store(transfer)
        assert core.ledger.requests["r"].state is RequestState.NEW

    def test_abort_in_mid_load_keeps_the_lease(self) -> None:
        """No reuse in flight (S3): the copy would write into another request's block (B05)."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.finish("q", aborted=True)
        assert core.ledger.leases.state(4) is LeaseState.WRITING
        core.complete_load(transfer)
        assert core.ledger.leases.state(4) is LeaseState.NONE

    def test_finish_gives_its_pins_back(self) -> None:
        """One release per hold (S4): a lookup pinned, and the retrieve never came (B31)."""
        core, _ = new_core()
        store(core, "r", keys(2))
        core.match("q", keys(2))
        core.finish("q")
        assert len(core.ledger.policy) == 2

    def test_preempted_request_waits_for_its_load_and_matches_when_that_has_ended(self) -> None:
        """Every call is legal (S8).

        A request is admitted again while its load runs (B18). Two loads of one request could not be told
        apart.
        """
        core, _ = new_core()
        store(core, "r", keys(2))
        transfer = load(core, "q", keys(2), 4)
        core.preempt("q")
        assert core.match("q", keys(2)) == Match(0, transfer)
        assert core.prepare_load("q", [6, 7]) is None
        core.complete_load(transfer)
        assert core.match("q", keys(2)) == Match(2)

    def test_preempted_request_that_may_not_wait_computes(self) -> None:
        """Progress (S9), one release per hold (S4).

        When its bound is used up, nothing is served. A second load never begins.
        """
        core, log = new_core(defer_ticks=2)
        store(core, "r", keys(2))
        transfer = load(core, "q", keys(2), 4)
        core.preempt("q")
        core.match("q", keys(2))
        core.tick()
        core.tick()
        events = len(log)
        assert core.match("q", keys(2)) == Match(0)
        assert core.prepare_load("q", [6, 7]) is None
        assert len(log) == events
        assert core.ledger.requests["q"].load == transfer

    def test_preempted_and_finished_request_is_released_by_its_load(self) -> None:
        """Progress (S9), every call is legal (S8): nothing of it is left."""
        core, _ = new_core()
        store(core, "r", keys(2))
        transfer = load(core, "q", keys(2), 4)
        core.preempt("q")
        core.match("q", keys(2))
        assert not core.finish("q", aborted=True)
        assert core.match("q", keys(2)) == Match(0)
        core.fail_load(transfer)
        assert not core.ledger.requests
        assert not core.ledger.deferred

    def test_finished_request_moves_no_cursors_and_is_not_preempted(self) -> None:
        """Every call is legal (S8).

        A request that only waits for its load has nothing to offer, and no blocks to take.
        """
        core, log = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.finish("q")
        events = len(log)
        with pytest.raises(InvalidEvent, match="request q is over"):
            core.advance([("q", (1,), (1,))])
        core.preempt("q")
        assert len(log) == events
        core.complete_load(transfer)
        assert not core.ledger.requests

    def test_preemption_restarts_the_cursors(self) -> None:
        """The request gets another block table. Cursors into the old one say nothing."""
        core, log = new_core()
        core.arrive("r")
        core.advance([("r", (3,), (4,))])
        core.preempt("r")
        core.preempt("r")
        request = core.ledger.requests["r"]
        assert (request.settled, request.offered) == ((), ())
        assert kinds(log).count("RequestPreempted") == 1

    def test_lost_store_retires_its_slots_and_leaves_its_device_blocks_usable(self) -> None:
        """Progress (S9), no reuse in flight (S3).

        What the lost copy may still write is never used again. What it reads may be.
        """
        core, _ = new_core(host_blocks=2)
        transfer = begin_store(core, "r", keys(1), 3)
        ended = core.lose(transfer)
        assert ended is not None
        assert (ended.good, ended.lost, ended.request) == (False, True, "")
        assert core.ledger.blocks.state(0) is BlockState.RETIRED
        assert core.ledger.leases.state(3) is LeaseState.NONE
        prepared = core.prepare_store("q", keys(2), [3, 4])
        assert prepared.keys == tuple(keys(1))
        assert prepared.deferred == (1,)

    def test_lost_load_retires_what_it_may_still_write_and_frees_the_request(self) -> None:
        """Progress (S9), no reuse in flight (S3): the engine goes on without this memory."""
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.finish("q")
        ended = core.lose(transfer)
        assert ended is not None
        assert (ended.good, ended.lost, ended.request) == (False, True, "q")
        assert to_list(ended.device_blocks) == [4]
        assert "q" not in core.ledger.requests
        assert core.ledger.leases.state(4) is LeaseState.RETIRED
        assert core.ledger.blocks.state(0) is BlockState.RETIRED
        assert core.prepare_store("r", keys(1), [4]).deferred == (0,)

    def test_a_failed_load_of_a_lost_slot_leaves_it_retired(self) -> None:
        """No reuse in flight (S3): of two loads of one block one is lost, and the other one fails."""
        core, _ = new_core(host_blocks=1)
        store(core, "r", keys(1))
        lost, failed = load(core, "q", keys(1), 4), load(core, "s", keys(1), 5)
        core.lose(lost)
        core.fail_load(failed)
        assert core.ledger.blocks.state(0) is BlockState.RETIRED
        assert core.prepare_store("r", keys(1), [6]).deferred == (0,)

    def test_loss_voids_the_pins_of_others(self) -> None:
        core, _ = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.match("s", keys(1))
        core.lose(transfer)
        assert core.prepare_load("s", [6]) is None
        assert core.finish("s")


class TestOverdue:
    def test_transfers_are_lost_at_their_bound_and_not_before(self) -> None:
        """Progress (S9): a worker that never reports is found after a bounded number of ticks (rule 8)."""
        core, _ = new_core(workers=2, transfer_ticks=3)
        store(core, "r", keys(1, "old"))
        first = begin_store(core, "r", keys(1))
        core.complete_store(first, 0)
        lost: list[list[int]] = []
        for tick in range(4):
            if tick == 1:
                second = load(core, "q", keys(1, "old"), 4)
            core.tick()
            lost.append([ended.transfer for ended in core.lose_overdue()])
        assert lost == [[], [], [first], [second]]
        assert not core.ledger.transfers
        assert core.report(first, 1, True).rejected is RejectReason.STALE

    def test_what_was_not_submitted_is_never_overdue(self) -> None:
        """Its time in flight begins when it leaves."""
        core, _ = new_core(transfer_ticks=2)
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        for _ in range(3):
            core.tick()
        assert core.lose_overdue() == []
        core.submit([job.transfer])
        core.tick()
        assert core.lose_overdue() == []
        core.tick()
        assert [ended.transfer for ended in core.lose_overdue()] == [job.transfer]

    def test_abandoned_transfers_are_overdue_too(self) -> None:
        """Progress (S9): a reset drains even if its copies never end."""
        core, _ = new_core(transfer_ticks=1)
        begin_store(core, "r", keys(1))
        assert not core.reset()
        core.tick()
        core.lose_overdue()
        assert core.reset()

    def test_without_a_bound_time_is_not_counted_and_nothing_is_lost(self) -> None:
        core, log = new_core(transfer_ticks=0)
        begin_store(core, "r", keys(1))
        events = len(log)
        for _ in range(5):
            core.tick()
        assert core.lose_overdue() == []
        assert len(log) == events


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
        assert kinds(log) == ["LogOpened"]

    def test_flush_names_all_submitted_transfers_and_asks_once(self) -> None:
        core, log = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        core.prepare_store("r", keys(1, "b"), [1])
        assert job is not None
        core.submit([job.transfer])
        assert core.flush() == core.flush() == (job.transfer,)
        assert kinds(log).count("FlushRequested") == 1

    def test_log_is_flushed_before_plans_leave(self) -> None:
        """Rule 12: the log has a plan before a worker acts on it."""
        order: list[str] = []

        class Sink(MemoryLog):
            def append(self, event: OffloadingEvent) -> None:
                order.append(event.kind)

            def flush(self) -> None:
                order.append("flush")

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), Sink())
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.submit([job.transfer])
        assert order[-2:] == ["TransfersSubmitted", "flush"]

    def test_failed_write_poisons_the_core(self) -> None:
        """Rule 12: no failed write is ignored."""

        class FullDisk(MemoryLog):
            def flush(self) -> None:
                raise LogWriteFailed("disk full")

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), FullDisk())
        with pytest.raises(LogWriteFailed):
            core.end_step()
        with pytest.raises(Poisoned, match="disk full"):
            core.match("r", keys(1))

    def test_interrupt_of_a_flush_is_named_though_it_has_no_text(self) -> None:
        """Rule 12: whoever calls next is told why there is nothing more to call."""

        class Interrupted(MemoryLog):
            def flush(self) -> None:
                raise KeyboardInterrupt

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), Interrupted())
        with pytest.raises(KeyboardInterrupt):
            core.end_step()
        with pytest.raises(Poisoned, match="KeyboardInterrupt"):
            core.match("r", keys(1))

    def test_interrupt_between_fold_and_log_poisons_the_core(self) -> None:
        """Events are state (S10): the ledger has an event that the log lacks, so the core stops."""

        class Interrupted(MemoryLog):
            def append(self, event: OffloadingEvent) -> None:
                if event.kind == "RequestArrived":
                    raise KeyboardInterrupt

        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), Interrupted())
        with pytest.raises(KeyboardInterrupt):
            core.arrive("r")
        with pytest.raises(Poisoned, match="KeyboardInterrupt"):
            core.match("r", keys(1))

    def test_step_is_flushed_once(self) -> None:
        """One frame a step: by `submit` if jobs leave, otherwise at the end of the step."""
        flushes: list[int] = []

        class Sink(MemoryLog):
            def flush(self) -> None:
                flushes.append(core.step)

        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), Sink())
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.submit([job.transfer])
        core.end_step()
        core.complete_store(job.transfer)
        core.end_step()
        core.end_step()
        assert flushes == [0, 1]

    @pytest.mark.parametrize("copies_end", [True, False], ids=["copies end", "nothing to submit"])
    def test_nothing_is_left_unwritten_when_no_copy_brings_another_step(self, copies_end: bool) -> None:
        """Rule 6: an engine that goes idle leaves a complete log."""
        unwritten: list[str] = []

        class Sink(MemoryLog):
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

    @given(st.lists(st.sampled_from(_CALLS_OF_A_STEP), max_size=10))
    @example(["plan", "leave", "restart", "plan"])
    @example(["adopt", "plan"])
    @example(["plan", "leave", "reset", "finish"])
    @example(["plan", "leave", "plan"])
    def test_a_step_ends_with_all_that_it_decided_written(self, calls: list[str]) -> None:
        """Rule 6, whatever was flushed before. `StepEnded` may wait while copies are in flight."""
        unwritten: list[type[OffloadingEvent]] = []

        class Sink(MemoryLog):
            def append(self, event: OffloadingEvent) -> None:
                unwritten.append(type(event))

            def flush(self) -> None:
                unwritten.clear()

        core = Offloader(OffloadConfig(host_blocks=8, device_blocks=16), Sink())
        core.end_step()
        for number, call in enumerate(calls):
            live, named = core.ledger.transfers, keys(1, f"r{number}")
            if call == "plan":
                core.prepare_store(f"r{number}", named, [number])
            elif call == "leave":
                core.submit([one.id for one in live.values() if one.state is TransferState.PLANNED])
            elif call == "report":
                for transfer in tuple(live):
                    core.report(transfer, 0, True)
            elif call == "reset":
                core.reset()
            elif call == "restart":
                core = Offloader.restarted(core.ledger, core.config, core.log)
            elif call == "adopt" and core.ledger.free:
                core.adopt_blocks(named, core.ledger.free.first(1), "an earlier process")
            elif call == "finish":
                core.finish(f"r{number - 1}")
            elif call == "end":
                core.end_step()
        core.end_step()
        assert unwritten == [] or (core.ledger.transfers and unwritten == [StepEnded])

    def test_a_reset_is_written_at_once(self) -> None:
        """Rule 6: an engine may be idle when its cache is reset, and may not step again for long."""
        unwritten: list[str] = []

        class Sink(MemoryLog):
            def append(self, event: OffloadingEvent) -> None:
                unwritten.append(event.kind)

            def flush(self) -> None:
                unwritten.clear()

        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), Sink())
        store(core, "r", keys(1))
        core.end_step()
        core.reset()
        assert unwritten == []

    @pytest.mark.parametrize(
        ("reason", "waits_in_flight", "waits_if_it_is_the_only_event"),
        [
            (LogFlush.JOBS_LEAVE, False, False),
            (LogFlush.STEP_ENDED, False, True),
            (LogFlush.REPORTS_TAKEN, True, True),
            (LogFlush.CACHE_RESET, False, False),
            (LogFlush.ENGINE_FAILS, False, False),
        ],
    )
    def test_what_waits_to_be_written_waits_for_a_step_that_copies_bring(
        self, reason: LogFlush, waits_in_flight: bool, waits_if_it_is_the_only_event: bool
    ) -> None:
        """Without copies in flight nothing waits."""
        written = MemoryLog()
        flushed: list[int] = []
        written.flush = lambda: flushed.append(core.step)  # type: ignore[method-assign]
        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), written)

        def writes() -> bool:
            flushed.clear()
            core.flush_log(reason)
            return bool(flushed)

        transfer = begin_store(core, "r", keys(1))
        core.emit(StepEnded)
        assert writes() == (not waits_if_it_is_the_only_event)
        core.arrive("q")
        core.emit(StepEnded)
        assert writes() == (not waits_in_flight)
        core.complete_store(transfer)
        assert writes()

    @pytest.mark.parametrize("reason", LogFlush)
    def test_the_end_of_a_step_may_wait_while_a_request_brings_another(
        self, reason: LogFlush, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not beyond its time, not when no request is left, and never what copies wait for."""
        now, flushed = 0, MemoryLog()
        monkeypatch.setattr("kvsm.core.offloader.emitter.time.monotonic_ns", lambda: now)
        writes: list[int] = []
        flushed.flush = lambda: writes.append(now)  # type: ignore[method-assign]
        core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), flushed, flush_within_ms=100)
        waits = reason in (LogFlush.STEP_ENDED, LogFlush.REPORTS_TAKEN)
        core.arrive("r")
        now = 1_000_000_000
        core.flush_log(reason)
        now += 99_999_999
        core.flush_log(reason)
        assert len(writes) == (1 if waits else 2)
        now += 1 if waits else 100_000_000
        core.flush_log(reason)
        core.finish("r")
        core.flush_log(reason)
        assert len(writes) == (3 if waits else 4)

    def test_events_carry_the_clock_and_the_step(self) -> None:
        log, clock = MemoryLog(), iter((5, 6, 7))
        core = Offloader(OffloadConfig(host_blocks=1, device_blocks=1), log, clock_ns=clock.__next__)
        core.end_step()
        core.arrive("r")
        assert [(event.step, event.wall_ns) for event in log] == [(0, 5), (0, 6), (1, 7)]

    def test_wall_time_is_data_only(self) -> None:
        """Determinism (S11): the same calls under another clock give the same decisions."""

        def decisions(clock_ns: Callable[[], int]) -> list[OffloadingEvent]:
            log = MemoryLog()
            core = Offloader(OffloadConfig(host_blocks=4, device_blocks=8), log, clock_ns=clock_ns)
            store(core, "r", keys(3))
            core.complete_load(load(core, "q", keys(3), 4))
            assert digest(fold(log, core.config)) == digest(core.ledger)
            return [msgspec.structs.replace(event, wall_ns=0) for event in log]

        assert decisions(lambda: 5) == decisions(iter(range(10**6)).__next__)


def test_transfer_states_are_visible_while_it_lives() -> None:
    core, _ = new_core()
    job = core.prepare_store("r", keys(1), [0]).job
    assert job is not None
    transfer = core.ledger.transfers[job.transfer]
    seen = [transfer.state]
    core.submit([job.transfer])
    seen.append(transfer.state)
    core.complete_store(job.transfer)
    seen.append(transfer.state)
    assert seen == [TransferState.PLANNED, TransferState.SUBMITTED, TransferState.COMPLETED]


@given(st.integers(0, 2 * SMALL), st.data())
def test_device_blocks_are_taken_in_the_form_of_the_ledger(count: int, data: st.DataObject) -> None:
    """Events are state (S10): the form depends on the number alone, and no list of an engine's is too odd."""
    core, _ = new_core(device_blocks=8)
    blocks = data.draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    given_as = data.draw(st.sampled_from([list, tuple, lambda one: np.array(one, dtype=np.int32)]))
    taken = checked_device_blocks(core, "store", given_as(blocks))
    assert list(taken) == blocks
    assert isinstance(taken, tuple) == (count <= SMALL)
    assert isinstance(taken, tuple) or taken.dtype == np.int64


@pytest.mark.parametrize("count", [1, SMALL + 1])
def test_device_block_that_does_not_exist_is_named(count: int) -> None:
    core, _ = new_core(device_blocks=count)
    with pytest.raises(InvalidEvent, match=f"device block {count} is not one of the {count}"):
        core.prepare_store("r", keys(count), range(1, count + 1))


@pytest.mark.parametrize("count", [0, 1, SMALL + 1])
def test_device_blocks_are_leased_while_a_copy_touches_one_of_them(count: int) -> None:
    """No reuse in flight (S3). Of no blocks none is leased."""
    core, _ = new_core(host_blocks=SMALL + 2, device_blocks=2 * SMALL + 2)
    transfer = begin_store(core, "r", keys(SMALL + 1))
    asked = range(SMALL + 1 - count, SMALL + 1)
    assert core.leased(asked) == (count > 0)
    assert not core.leased(range(SMALL + 1, SMALL + 1 + count))
    core.complete_store(transfer)
    assert not core.leased(asked)


def test_log_begins_with_the_configuration_and_the_tables_that_write_it() -> None:
    """Events are state (S10): another version must see that it would fold this log in another way."""
    core, log = new_core()
    assert (log[0].config, log[0].machines) == (core.config, machines_digest())


def test_load_tells_of_every_device_block_what_it_brought() -> None:
    """No stale data (S14): each device block of a chunk has its key: a reset may age any of them."""
    core, _ = new_core(blocks_per_chunk=2)
    store(core, "r", keys(2))
    load(core, "q", keys(2), 8)
    first, second = keys(2)
    assert core.ledger.provenance.brought == {8: first, 9: first, 10: second, 11: second}


def test_ledger_knows_when_it_last_forgot_a_key() -> None:
    """No doubled or lost store (S13): a request that was admitted later need not offer everything again."""
    core, log = new_core(host_blocks=1)
    store(core, "r", keys(1))
    store(core, "r", keys(1, "other"), 4)
    (evicted,) = [event.seq for event in log if event.kind == "BlocksEvicted"]
    assert core.ledger.forgotten_at == evicted


def test_without_a_publisher_nothing_is_to_be_taken() -> None:
    core, _ = new_core()
    store(core, "r", keys(1))
    assert core.take_events() == core.take_kv_events() == []


def test_offloading_events_say_what_came_and_went() -> None:
    """Events are state (S10): folding what left kvsm gives the readable keys."""
    core, _ = new_core(host_blocks=2, publisher=Publisher())
    store(core, "r", keys(2))
    store(core, "r", keys(1, "new"), 4)
    assert [(event.keys, event.medium, event.removed) for event in core.take_events()] == [
        (keys(2), "CPU", False),
        ([keys(2)[1]], "CPU", True),
        (keys(1, "new"), "CPU", False),
    ]
    assert core.take_events() == []
