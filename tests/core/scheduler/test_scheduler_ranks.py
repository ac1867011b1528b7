"""Several ranks copy their shards of one transfer (tensor and pipeline parallel).

Row 12 of the scheduler's behaviours; each test is named after it.
"""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_traffic import ACTS, FULL, SLIDING, Hand, drive, keys_of, of_kind

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.copies.worker import smallest_host_pool
from kvsm.core.offloader import LookupResult
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler import KVCacheGroup, LoadEnded
from kvsm.errors import ConfigError
from kvsm.events import Direction, RejectReason
from kvsm.properties import Property

RANKS = 3


def in_flight(direction: Direction) -> tuple[Hand, SmallRequest, int]:
    """A transfer in this direction that was given to every rank."""
    hand = Hand(core={"workers": RANKS})
    stored = SmallRequest("stored", range(8))
    hand.admit(stored, [0, 1])
    hand.compute(stored)
    plan = hand.step(stored)
    if direction is Direction.STORE:
        return hand, stored, plan.stores[0].transfer
    hand.end(plan)
    request = SmallRequest("r", range(9))
    hand.admit(request, [10, 11, 12])
    return hand, request, hand.step().loads[0].transfer


def is_done(hand: Hand, transfer: int) -> bool:
    return transfer not in hand.core.ledger.transfers


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("order", list(permutations(range(RANKS))))
def test_tensor_parallel_transfer_is_done_with_its_last_rank(
    direction: Direction, order: tuple[int, ...]
) -> None:
    """Publish after commit (S2): in any order, and over several steps."""
    hand, request, transfer = in_flight(direction)
    for rank in order[:-1]:
        assert hand.report(transfer, rank).loads == ()
        hand.step()
        assert not is_done(hand, transfer)
        if direction is Direction.STORE:
            assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT_PENDING
    results = hand.report(transfer, order[-1])
    assert is_done(hand, transfer)
    if direction is Direction.LOAD:
        assert results.loads == (LoadEnded("r", True, 8),)
    else:
        assert hand.core.lookup(keys_of(request)[0]) is LookupResult.HIT


@pytest.mark.parametrize("direction", list(Direction))
def test_tensor_parallel_report_that_comes_twice_counts_once(direction: Direction) -> None:
    """Stale reports change nothing (S5): one rank reports three times before the others report."""
    hand, _, transfer = in_flight(direction)
    hand.scheduler.update_connector_output([WorkerReport(transfer, 1, True)] * 3)
    assert not is_done(hand, transfer)
    assert [event.reason for event in of_kind(hand, ev.ReportRejected)] == [RejectReason.DUPLICATE] * 2
    hand.report(transfer, 0)
    assert not is_done(hand, transfer)
    hand.report(transfer, 2)
    assert is_done(hand, transfer)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("failed", range(RANKS))
@pytest.mark.parametrize("last", [False, True])
def test_tensor_parallel_failure_of_one_rank_is_everybodys(
    direction: Direction, failed: int, last: bool
) -> None:
    """Failure is not success (S6): it fails when all have reported, whichever rank failed. A later good
    report mends nothing."""
    hand, request, transfer = in_flight(direction)
    others = [rank for rank in range(RANKS) if rank != failed]
    order = [*others, failed] if last else [failed, *others]
    for rank in order:
        assert not is_done(hand, transfer)
        results = hand.report(transfer, rank, good=rank != failed)
        hand.report(transfer, failed, good=True) if not last else None
    assert is_done(hand, transfer)
    assert hand.core.lookup(keys_of(request)[0]) is LookupResult.MISS
    assert results.loads == ((LoadEnded("r", False, 0),) if direction is Direction.LOAD else ())


def test_tensor_parallel_rank_that_does_not_exist_ends_nothing() -> None:
    hand, _, transfer = in_flight(Direction.STORE)
    for rank in (-1, RANKS, 99):
        hand.report(transfer, rank)
    assert hand.core.ledger.transfers[transfer].reported == 0
    assert [event.reason for event in of_kind(hand, ev.ReportRejected)] == [RejectReason.WORKER] * 3


def test_tensor_parallel_reports_of_many_transfers_come_in_one_batch() -> None:
    """Fast ranks report two transfers before a slow one reports the first."""
    hand = Hand(core={"workers": 2})
    transfers = []
    for number in range(2):
        request = SmallRequest(f"r{number}", range(50 * number, 50 * number + 8))
        hand.admit(request, [2 * number, 2 * number + 1])
        hand.compute(request)
        transfers.append(hand.step(request).stores[0].transfer)
    first, second = transfers
    hand.scheduler.update_connector_output([WorkerReport(second, 1, True), WorkerReport(first, 1, True)])
    hand.scheduler.update_connector_output([WorkerReport(second, 0, True)])
    assert not is_done(hand, first)
    assert is_done(hand, second)
    hand.report(first, 0)
    assert is_done(hand, first)


def test_tensor_parallel_ranks_that_are_none_agree_on_nothing() -> None:
    with pytest.raises(ConfigError, match="no workers"):
        smallest_host_pool([])


@given(ACTS, st.sampled_from([2, 4]), st.booleans(), st.sampled_from([(FULL,), (FULL, SLIDING)]))
@settings(max_examples=examples(60))
def test_tensor_parallel_under_any_traffic(
    acts: list[int], workers: int, references: bool, groups: tuple[KVCacheGroup, ...]
) -> None:
    """Publish after commit (S2), stale reports change nothing (S5), correct bytes (S15): every rank has its
    own bytes; reports come split, in any order, and twice."""
    engine = SmallEngine(groups, device_blocks=36, host_blocks=14, workers=workers, references=references)
    handed: list[WorkerReport] = []
    update = engine.scheduler.update_connector_output

    def doubled(reports: list[WorkerReport]) -> object:
        results = update([*reports, *handed[-3:], *reports[::-1]])
        handed.extend(reports)
        return results

    engine.scheduler.update_connector_output = doubled  # type: ignore[method-assign, assignment]

    def check(engine: SmallEngine) -> None:
        ledger = engine.core.ledger
        for key, slot in ledger.index.items():
            if ledger.readable(slot):
                for rank in range(workers):
                    assert engine.host[slot][rank][-1] == key[:-4], Property.PUBLISH_AFTER_COMMIT

    drive(engine, acts, check=check)
