"""Contracts of the transfer machine: one step of an asynchronous copy, for any number of workers."""

from __future__ import annotations

from contracts.steps import Step, taken
from kvsm.states import TRANSFER, TransferState, TransferTrigger

_S, _T = TransferState, TransferTrigger
WORKERS_LIMIT = (1 << 10) - 1


def sound(state: int, pending: int, failed: int) -> bool:
    """Whether the state may have these counts: a plan has no reports, a live copy waits for at least one
    report, an ended transfer waits for none."""
    if pending < 0 or failed < 0 or pending + failed > WORKERS_LIMIT:
        return False
    if state == _S.PLANNED or state == _S.CANCELLED:
        return pending >= 1 and failed == 0
    if state == _S.COMPLETED:
        return pending == 0 and failed == 0
    if state == _S.FAILED:
        return pending == 0 and failed >= 1
    if state == _S.DRAINED:
        return pending == 0
    return pending >= 1


def live(state: int) -> bool:
    return state == _S.PLANNED or under_way(state)


def under_way(state: int) -> bool:
    return state == _S.SUBMITTED or state == _S.ABANDONED


def step(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    return taken(TRANSFER, state, (pending, failed), trigger)


def report(good: bool) -> TransferTrigger:
    return _T.REPORT_GOOD if good else _T.REPORT_BAD


def a_step_keeps_it_sound(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    """One release per hold (S4): the counts of workers never leave their range, and fit the state.

    pre: sound(state, pending, failed)
    post: _ is None or sound(*_)
    """
    return step(state, pending, failed, trigger)


def it_ends_at_the_last_report(
    state: TransferState, pending: int, failed: int, workers: int, reported: int, good: bool
) -> tuple[Step, int]:
    """Publish after commit (S2), stale reports change nothing (S5): of n workers, reports 1 to n - 1
    leave the copy under way, and the n-th ends it.

    `reported` counts the reports before this one. At the plan, n are pending and 0 have reported. This step
    keeps the sum n: so the contract holds by induction, for any n. That a worker counts only once is checked
    by the ledger, and enumerated by the tests. Returns (step, number of workers that have yet to report).

    pre: sound(state, pending, failed) and under_way(state)
    pre: pending + reported == workers and 0 <= reported < workers
    post: _[0] is not None and _[0][1] == _[1] and under_way(_[0][0]) == (_[1] > 0)
    """
    return step(state, pending, failed, report(good)), workers - reported - 1


def one_failure_fails_it(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    """Publish after commit (S2), failure is not success (S6): a transfer is COMPLETED only if all reports
    are good, and bad reports are remembered.

    pre: sound(state, pending, failed)
    post: _ is None or (remembers(state, failed, trigger, _) and is_earned(pending, failed, trigger, _))
    """
    return step(state, pending, failed, trigger)


def remembers(state: int, failed: int, trigger: int, after: tuple[int, ...]) -> bool:
    return after[2] == failed + (state == _S.SUBMITTED and trigger == _T.REPORT_BAD)


def is_earned(pending: int, failed: int, trigger: int, after: tuple[int, ...]) -> bool:
    return after[0] != _S.COMPLETED or (trigger == _T.REPORT_GOOD and failed == 0 and pending == 1)


def what_ended_stays_ended(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    """Stale reports change nothing (S5): no trigger moves a transfer that has ended, so an id is never
    used again.

    pre: sound(state, pending, failed)
    pre: not live(state)
    post: _ is None
    """
    return step(state, pending, failed, trigger)


def a_copy_under_way_does_not_just_stop(
    state: TransferState, pending: int, failed: int, trigger: TransferTrigger
) -> Step:
    """No reuse in flight (S3): a transfer that a worker may be copying stays under way until its last
    report, or until it is lost.

    pre: sound(state, pending, failed) and under_way(state)
    post: _ is None or under_way(_[0]) or _[0] == _S.LOST or (pending == 1 and trigger != _T.CANCEL)
    """
    return step(state, pending, failed, trigger)
