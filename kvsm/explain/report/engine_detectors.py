"""The detectors of the engine: how it ended, how its requests ended, and whether its clock was set."""

from __future__ import annotations

from kvsm.core.log import LogEnd
from kvsm.explain.report.command_lines import command
from kvsm.explain.report.detectors import Limit, Noticed, number, percent
from kvsm.explain.report.figures import AbortFigures, LogFigures
from kvsm.explain.story.times import after_start, duration, utc
from kvsm.explain.tables.row_kinds import Gone

OVERDUE_LEAST_NS, OVERDUE_TIMES = 60_000_000_000, 2
"""A request is overdue after a minute or twice the time of the longest ended request, whichever is longer."""


STILL_WRITTEN_NS = 60_000_000_000
"""A log that is not closed, and whose last event is younger than a minute, may still be written."""


def engine_stopped(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect that the engine closed the log with an error."""
    if figures.end.engine != LogEnd.STOPPED.value:
        return None
    text = f"The engine ended with an error: {figures.end.error}"
    return Noticed(1.0, text, _left_behind(figures), (command(figures, "verify"),))


GIVE_TIME = "Give it time to end: `vllm serve --shutdown-timeout 30`"
"""The advice if an engine was killed before it had ended after a stop signal."""


def engine_killed(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect a log that was not closed, and to which no process writes."""
    end = figures.end
    if end.engine != LogEnd.OPEN.value or end.silent_ns is None or end.silent_ns < STILL_WRITTEN_NS:
        return None
    busy = figures.requests.open or any(rank.waiting + rank.missing for rank in figures.copies.ranks)
    if end.stopped_by:
        text = (
            f"The engine was stopped by {end.stopped_by}, and killed before it closed the log. Its last "
            f"event came {duration(end.silent_ns)} ago. {GIVE_TIME}"
        )
        return Noticed(1.0, text, _left_behind(figures), (command(figures, "verify"),))
    text = (
        f"The engine was killed, or {'hangs' if busy else 'is idle'}: it did not close the log, and its last "
        f"event came at {utc(figures.ended_ns)}, {duration(end.silent_ns)} ago"
    )
    return Noticed(1.0, text, _left_behind(figures), (command(figures, "verify"),))


def processes_killed(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect processes that ended without closing the log, before another process resumed it."""
    restarts = figures.restarts
    if restarts.killed < limit.least:
        return None
    times = "once" if restarts.killed == 1 else f"{restarts.killed:,} times"
    text = (
        f"The process ended {times} without closing the log, and another one went on: "
        f"{number(figures.requests.cut_off, 'request')} and {number(restarts.transfers, 'transfer')} cut off"
    )
    evidence = tuple(f"{count:,} before a restart: {how}" for how, count in restarts.ended)
    evidence += (
        f"what was stored was kept: {number(restarts.kept, 'block')}; {restarts.lost:,} were being stored",
        "out of memory and a stop that takes too long are the usual causes; the system's log tells",
    )
    query = "SELECT event, wall_ns, last_end, kept, storing, requests_cut_off FROM restarts ORDER BY event"
    impact = restarts.killed / (restarts.restarts + 1)
    return Noticed(impact, text, evidence, (command(figures, "query", query),))


def _left_behind(figures: LogFigures) -> tuple[str, ...]:
    """Evidence: the requests and transfers that were open when the engine ended."""
    copies = max((rank.waiting + rank.missing for rank in figures.copies.ranks), default=0)
    states = ", ".join(f"{count:,} {state}" for state, count in figures.requests.states.items())
    parts = [f"{number(figures.requests.open, 'request')} ({states})"] if states else []
    parts += [f"{number(copies, 'transfer')} in flight"] if copies else []
    return (f"open at the end: {', '.join(parts) or 'nothing'}",)


def requests_unfinished(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect overdue requests: without an end, and much older than any request that ended. If a rank is
    silent, requests that wait for it, or for device blocks that it holds, are symptoms of that."""
    requests = figures.requests
    silent = any(rank.missing for rank in figures.copies.ranks)
    if requests.overdue < limit.least or (silent and not requests.overdue_running):
        return None
    names = ", ".join(requests.oldest)
    closed = figures.end.engine == LogEnd.CLOSED.value
    text = (
        f"{number(requests.open, 'request')} of {requests.requests:,} never ended"
        f"{', although the engine closed the log' if closed else ''}: {requests.overdue:,} are overdue"
    )
    evidence = (
        f"the oldest: {names}; a request is overdue after {duration(requests.overdue_ns)}",
        f"the longest request that ended took {duration(requests.longest_ns)}",
        "such requests were never finished or aborted: their blocks on the device or the host stay held",
    )
    oldest = requests.oldest[0]
    shown = command(figures, "why", *(["--", oldest] if oldest.startswith("-") else [oldest]))
    return Noticed(requests.overdue / requests.requests, text, evidence, (shown, command(figures, "verify")))


def preemptions(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that many requests are preempted."""
    requests = figures.requests
    if requests.preempted < limit.least or requests.preempted < limit.share * requests.requests:
        return None
    text = (
        f"The device pool is too small for what runs on it: {number(requests.preemptions, 'preemption')} of "
        f"{requests.preempted:,} requests ({percent(requests.preempted, requests.requests)})"
    )
    evidence = (
        f"{figures.config.device_blocks:,} device blocks; a preempted request loads or computes all its "
        "blocks again: admit fewer requests, or give the device more blocks",
    )
    query = "SELECT request, preemptions FROM requests ORDER BY preemptions DESC LIMIT 10"
    return Noticed(
        requests.preempted / requests.requests, text, evidence, (command(figures, "query", query),)
    )


def clock_jumped(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that the clock of the engine was set, or that the process stood still."""
    clock = figures.clock
    jump = clock.largest
    if clock.jumps < limit.least or jump is None:
        return None
    by = duration(abs(jump.by_ns))
    if jump.by_ns < 0:
        text = (
            f"The clock jumped back by {by} at event {jump.event:,}: from {utc(jump.from_ns)} to "
            f"{utc(jump.to_ns)}"
        )
    else:
        text = (
            f"The clock jumped forward by {by} at event {jump.event:,}, while requests were running: from "
            f"{utc(jump.from_ns)} to {utc(jump.to_ns)}; it was set, or the process stood still"
        )
    evidence = (
        f"{number(clock.jumps, 'jump')} in all; this one is the largest",
        "this report corrects all times after a jump, so they differ from the logged times, which "
        "`kvsm show` prints",
    )
    near = f"event BETWEEN {jump.event - 3} AND {jump.event + 3}"
    query = f"SELECT event, step, wall_ns, kind FROM main.events WHERE {near} ORDER BY event"
    span = max(1, figures.ended_ns - figures.began_ns)
    return Noticed(min(1.0, abs(jump.by_ns) / span), text, evidence, (command(figures, "query", query),))


ABORT_TIME, ABORT_SHARE = 0.1, 0.5
"""Requests are aborted together if half of all aborts happen within the share `ABORT_TIME` of the time, and
at least the share `ABORT_SHARE` of the requests that end in that time are aborted."""


def requests_aborted(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that many requests are aborted: a large share of all, or many at the same time."""
    requests, together = figures.requests, _aborted_together(figures)
    many = requests.aborted >= limit.least and requests.aborted >= limit.share * requests.finished
    at_once = together is not None and together.aborted >= limit.least
    if not many and not at_once:
        return None
    text = (
        f"{percent(requests.aborted, requests.finished)} of the requests were aborted by their clients "
        f"({requests.aborted:,} of {requests.finished:,})"
    )
    evidence = []
    aborts = figures.aborts
    if together is not None and at_once:
        began, ended = (
            after_start(ns, figures.log_began_ns) for ns in (together.began_ns, together.ended_ns)
        )
        text = (
            f"Clients aborted {number(together.aborted, 'request')} at the same time, between {began} and "
            f"{ended}: {percent(together.aborted, together.ended)} of all requests that ended then"
        )
        evidence.append(f"over the whole time {requests.aborted:,} of {requests.finished:,} were aborted")
    if aborts is not None and aborts.age.count:
        middle, longest = aborts.age.p50_ns or 0, aborts.age.max_ns or 0
        same = "; all had the same age, as by a time limit of a gateway" if longest < 1.2 * middle else ""
        evidence.append(
            f"half of them had lived for {duration(middle)}, all for at most {duration(longest)}{same}"
        )
    query = (
        "SELECT request, arrived, finished, finished_ns - arrived_ns AS ns, deferred_ns, loading_ns "
        "FROM requests WHERE aborted ORDER BY finished LIMIT 10"
    )
    impact = (together.aborted if together is not None and at_once else requests.aborted) / requests.requests
    return Noticed(min(1.0, impact), text, tuple(evidence), (command(figures, "query", query),))


def _aborted_together(figures: LogFigures) -> AbortFigures | None:
    """The time in which many requests were aborted together; None: there is none, or no request arrived
    afterwards."""
    aborts = figures.aborts
    if aborts is None or not aborts.later or aborts.aborted < ABORT_SHARE * aborts.ended:
        return None
    short = aborts.ended_ns - aborts.began_ns <= ABORT_TIME * (figures.ended_ns - figures.began_ns)
    return aborts if short else None


def device_leak(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that requests are preempted for lack of device blocks although no request holds the missing
    blocks."""
    device, requests, blocks = figures.device, figures.requests, figures.config.device_blocks
    if device is None or device.steps < limit.least or device.held > (1 - limit.share) * blocks:
        return None
    lost = blocks - device.held
    text = (
        "The engine leaks device blocks: it preempts requests for lack of blocks, while all requests hold "
        f"at most {device.held:,} of {blocks:,}"
    )
    evidence = (
        f"{lost:,} blocks belong to no request that runs or loads, and to no store in flight",
        f"{number(requests.preemptions, 'preemption')} of {requests.preempted:,} requests; "
        f"{number(requests.open, 'request')} without an end",
        "blocks that requests released do not return to the engine's free queue: a bug in the engine",
    )
    query = (
        "SELECT arrived_step / 1000 AS thousand_steps, count(*) AS requests, sum(preemptions) AS preemptions "
        "FROM requests GROUP BY 1 ORDER BY 1"
    )
    return Noticed(lost / blocks, text, evidence, (command(figures, "query", query),))


def cold_start(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that the first process of the log did not take over the blocks of its predecessor, although the
    weights are the same."""
    reasons = [reason for reason in figures.cold if not reason.startswith("weights: ")]
    if len(reasons) < limit.least:
        return None
    text = f"The engine started cold, and the blocks of the last process were lost: {reasons[0]}"
    stops, lookups = figures.stops_at(Gone.NEVER_STORED.value), figures.hits.lookups
    evidence = (
        *reasons[1:4],
        f"{percent(stops, lookups)} of the lookups stopped at a block that this process had not stored yet",
        "the log of the last process was renamed, and lies beside this one",
    )
    query = "SELECT why, count(*) AS lookups FROM lookups WHERE admitted IS NOT NULL GROUP BY why"
    return Noticed(max(0.01, stops / max(1, lookups)), text, evidence, (command(figures, "query", query),))
