"""Make the report of a log: its figures, whether its properties hold, and its troubles.

with kvsm.open("log") as log:
    report = make_report(log)
    for trouble in report.troubles:
        print(trouble.text)
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from contextlib import suppress

import msgspec

from kvsm.core.log import LogEnd
from kvsm.core.log.frames import segment_paths
from kvsm.core.log.trust import Trust
from kvsm.errors import LogDamaged
from kvsm.explain.report import cache_detectors, cache_measures, copy_measures, engine_measures
from kvsm.explain.report.copy_detectors import LATE_LEAST_NS, LATE_TIMES
from kvsm.explain.report.detectors import APART_NS
from kvsm.explain.report.engine_detectors import OVERDUE_LEAST_NS, OVERDUE_TIMES
from kvsm.explain.report.figures import CheckFigures, EndFigures, LogFigures, TiersFigures
from kvsm.explain.report.first_look import FirstLook
from kvsm.explain.report.measures import Tables
from kvsm.explain.report.regret import Regret
from kvsm.explain.report.remedies import tried_remedies
from kvsm.explain.report.tier_measures import OpenedTier, same_time, tiers_figures
from kvsm.explain.report.troubles import Trouble, of_both, troubles
from kvsm.explain.story import verify_log
from kvsm.explain.story.unfinished import (
    Beginning,
    Unfinished,
    UnfinishedCopy,
    UnfinishedPlan,
    UnfinishedRequest,
    UnfinishedWait,
)
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.tiers.disk_tier import DISK, HOST

VERIFY_BYTES = 8 << 20
"""Logs up to this size (bytes) are verified by default: about 3 s for the largest of them."""


class Report(LogFigures, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.report/1"):
    """What `kvsm report --json` prints: the figures of a log, and its troubles.

    troubles: the most urgent first; empty: nothing stands out.
    tiers: figures of a host pool and the disk below it; null: there is no disk.
    first_look: counts of the whole of a large log, of which all other figures cover a part; null: the log is
        small, indexed, or a part was chosen.
    regret: what other policies would have found; null: nobody asked (`--regret`).
    """

    troubles: tuple[Trouble, ...]
    tiers: TiersFigures | None = None
    first_look: FirstLook | None = None
    regret: Regret | None = None


def make_report(
    log: OpenedLog,
    window: Window = EVERYTHING,
    *,
    verify: bool | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
    now_ns: int | None = None,
    other: OpenedTier | None = None,
) -> Report:
    """Make the report of a log.

    window: the events that the report covers. It says how the log ends only if the end is in the window.
    verify: whether to check every property at every event; None: only if the log is at most `VERIFY_BYTES`
        large.
    allow_policies, max_slots: for `verify_log`.
    now_ns: current Unix time (ns), for the age of the last event of an unclosed log; None: from the clock.
    other: the other tier, to include its figures and troubles in the same time; None: there is no other tier.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns

    def judged(log: OpenedLog, window: Window) -> LogFigures:
        check = check_figures(log, verify, allow_policies, max_slots)
        figures = _figures(log, window, check, Trust(allow_policies, max_slots))
        end = end_figures(log, now_ns, reached=figures.last == log.last)
        return msgspec.structs.replace(figures, log=str(log.directory), end=end, check=check)

    figures = judged(log, window)
    named = {name: getattr(figures, name) for name in figures.__struct_fields__}
    if other is None:
        return Report(**named, troubles=troubles(figures))
    found = troubles(figures, HOST if other.tier == DISK else DISK)
    asked, beside, why_not = Tables(log, window), None, other.why_not
    if other.log is not None:
        its_window = same_time(other.log, asked)
        if its_window is None:
            why_not = f"{other.log.directory}: no event at this time"
        else:
            beside = Tables(other.log, its_window)
            found = of_both(found, troubles(judged(other.log, its_window), other.tier))
    host, disk = (asked, beside) if other.tier == DISK else (beside, asked)
    return Report(**named, troubles=found, tiers=tiers_figures(host, disk, why_not))


_MEMO = "figures 6"
"""Key of the stored figures of a whole log in its index. Count up when a figure changes its meaning."""


def _figures(log: OpenedLog, window: Window, check: CheckFigures, trust: Trust) -> LogFigures:
    """Compute all figures except how the log ends. The figures of a whole log are cached in its index."""
    if window == EVERYTHING and (kept := log.memo(_MEMO)) is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(kept, type=LogFigures)
    tables = Tables(log, window)
    groups = cache_measures.group_figures(tables)
    computing = copy_measures.compute_figures(tables)
    figures = LogFigures(
        log="",
        first=tables.first,
        last=tables.last,
        began_ns=tables.began_ns,
        ended_ns=tables.ended_ns,
        log_began_ns=log.log_began_ns,
        whole=tables.whole and log.part == EVERYTHING,
        config=log.config,
        stored=cache_measures.stored_blocks(tables),
        requests=engine_measures.request_figures(tables, OVERDUE_LEAST_NS, OVERDUE_TIMES),
        aborts=engine_measures.abort_figures(tables),
        device=engine_measures.device_figures(tables, len(groups)),
        clock=engine_measures.clock_figures(tables),
        hits=cache_measures.hit_figures(tables),
        stops=cache_measures.stop_figures(tables),
        recomputed=cache_measures.recomputed_figures(tables, APART_NS),
        evictions=cache_measures.eviction_figures(tables),
        groups=groups,
        remedies=None,
        copies=copy_measures.copy_figures(tables, LATE_LEAST_NS, LATE_TIMES),
        computing=computing,
        fetches=copy_measures.fetch_figures(tables, computing),
        waits=copy_measures.wait_figures(tables),
        pool=cache_measures.pool_figures(tables),
        skips=cache_measures.skip_figures(tables),
        resets=cache_measures.reset_figures(tables),
        restarts=engine_measures.restart_figures(tables),
        cold=engine_measures.cold_reasons(tables),
        rejected=copy_measures.rejected_figures(tables),
        hand_overs=engine_measures.hand_over_figures(tables),
        elsewhere=copy_measures.elsewhere_figures(tables),
        end=end_figures(log, log.ended_ns, reached=False),
        check=check,
    )
    if cache_detectors.wants_trial(figures):
        remedies = tried_remedies(tables, trust, other_policies=cache_detectors.has_burst(figures))
        figures = msgspec.structs.replace(figures, remedies=remedies)
    if window == EVERYTHING:
        log.remember(_MEMO, msgspec.msgpack.encode(figures))
    return figures


def left_open(log: OpenedLog) -> Unfinished:
    """List what is open where the log ends, from its tables. The tables have no leases of device blocks."""
    requests = log.sql(
        "SELECT request, state, arrived, arrived_ns FROM requests WHERE state != 'RELEASED' ORDER BY arrived"
    )
    waits = log.sql(
        "SELECT request, transfer, began, began_ns FROM request_states "
        "WHERE ended IS NULL AND transfer IS NOT NULL ORDER BY began, request"
    )
    flights = list(log.transfers("outcome IS NULL AND pending > 0"))
    ranks: dict[int, list[int]] = {}
    for transfer, worker in log.sql("SELECT transfer, worker FROM copies WHERE reported IS NULL"):
        ranks.setdefault(transfer, []).append(worker)
    last_reset = max((reset.event for reset in log.resets()), default=0)
    [retired] = log.sql(
        "SELECT coalesce(max(retired), 0) FROM occupancy"
        " WHERE event > (SELECT coalesce(max(event), 0) FROM restarts)"
    ).fetchone()
    return Unfinished(
        event=log.last,
        tick=0,
        began_ns=log.began_ns,
        ended_ns=log.ended_ns,
        engine=log.condition.end,
        error=log.condition.error,
        stopped_by=log.condition.stopped_by,
        requests=tuple([UnfinishedRequest(name, state, _since(*at)) for name, state, *at in requests]),
        copies=tuple(
            [
                UnfinishedCopy(
                    row.transfer,
                    row.direction,
                    tuple(json.loads(row.requests)),
                    tuple(ranks.get(row.transfer, ())),
                    row.transfer < last_reset,
                    _since(row.submitted, row.submitted_ns),
                )
                for row in flights
                if row.submitted is not None
            ]
        ),
        waits=tuple([UnfinishedWait(name, transfer, None, _since(*at)) for name, transfer, *at in waits]),
        plans=tuple(
            [
                UnfinishedPlan(
                    row.transfer,
                    row.direction,
                    tuple(json.loads(row.requests)),
                    _since(row.transfer, row.wall_ns),
                )
                for row in flights
                if row.submitted is None
            ]
        ),
        read_blocks=None,
        written_blocks=None,
        retired_blocks=0,
        retired_slots=retired,
    )


def _since(event: int | None, wall_ns: int | None) -> Beginning | None:
    return None if event is None or wall_ns is None else Beginning(event, wall_ns)


def end_figures(log: OpenedLog, now_ns: int, *, reached: bool) -> EndFigures:
    """How the log ends. reached: whether the log's end is in the window."""
    condition = log.condition
    end = condition.end if reached else LogEnd.NOT_REACHED
    open_end = end is LogEnd.OPEN
    return EndFigures(
        engine=end.value,
        error=condition.error if reached else None,
        complete=condition.complete,
        notes=tuple(condition.notes()),
        silent_ns=max(0, now_ns - log.ended_ns + log.shift_ns(log.last)) if open_end else None,
        stopped_by=condition.stopped_by if open_end else "",
    )


_VERDICT = "verification 2"
"""Key of the stored result of `verify_log` in the log's index. Count up when `verify_log` checks more."""


def check_figures(
    log: OpenedLog, verify: bool | None, allow_policies: Collection[str], max_slots: int | None
) -> CheckFigures:
    """Whether the log breaks a property, according to `verify_log` or to the fold that made the tables.

    The fold refuses events that cannot follow: nearly every event that breaks a property.
    """
    stopped = log.stopped
    if verify is not False and (kept := log.memo(_VERDICT)) is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(kept, type=CheckFigures)
    if verify is None:
        verify = sum(path.stat().st_size for path in segment_paths(log.directory)) <= VERIFY_BYTES
    if verify:
        found = verify_log(log.directory, allow_policies=allow_policies, max_slots=max_slots)
        broken = tuple([f"{one.property}: {one.message}" for one in found.violations])
        event = None if found.breakage is None else found.breakage.event
        check = CheckFigures(verified=True, event=event, broken=broken, damage=found.damage)
        log.remember(_VERDICT, msgspec.msgpack.encode(check))
        return check
    if isinstance(stopped, LogDamaged):
        return CheckFigures(verified=False, event=None, broken=(), damage=str(stopped))
    if stopped is not None:
        return CheckFigures(verified=False, event=log.last + 1, broken=(str(stopped),), damage=None)
    return CheckFigures(verified=False, event=None, broken=(), damage=None)
