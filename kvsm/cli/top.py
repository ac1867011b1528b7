"""`kvsm top`: show what a running engine does, from the log that it writes, on a screen that is redrawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, Screen, complain, say_json
from kvsm.cli.toned import in_red, in_yellow
from kvsm.core.log import LogEnd, LogFollower, stop_notice, stopped_by
from kvsm.core.log.fold import condition_of
from kvsm.core.log.frames import first_event, segment_paths
from kvsm.core.log.trust import Trust
from kvsm.errors import IllegalTransition, InvalidEvent, LogError
from kvsm.explain.live_view import LiveState, LiveView, RankCounts
from kvsm.explain.story.restarts import told_process
from kvsm.explain.story.times import duration, utc

BAR = 24
"""Characters of a bar."""

QUIET_NS = 10_000_000_000
"""After this time without a write, the screen says what the reason may be."""

SLOW = 2
"""The worst rank is yellow if its copies take, on average, this many times as long as the other ranks'."""


@click.command(cls=Command)
@log_argument()
@click.option("--once", is_flag=True, help="Print one screen, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one screen to the next.",
)
@trust_options
@json_option
def top(log: Path, once: bool, interval: float, as_json: bool, **trust: Any) -> None:
    """Show what a running engine does, from the LOG that it writes.

    The screen shows the hit shares, the pool, evictions, waits, the oldest copy in flight and the worst rank.
    Counts cover the last 60 s of LOG, or the time since its newest segment began. The command ends when the
    engine closes LOG, or with Ctrl-C. With --json it prints a JSON object instead of each screen.
    """
    follower, trusted, screen = (
        LogFollower(log, first_event(segment_paths(log)[-1])),
        Trust(**trust),
        Screen(),
    )
    view = LiveView(trusted)
    while True:
        try:
            with trusted.guarded(log):
                for news in follower.poll():
                    view.take(news)
        except (IllegalTransition, InvalidEvent) as error:
            complain(f"{log}: {error}; `kvsm verify` shows what led there")
            raise SystemExit(ExitCode.BROKEN) from None
        if view.began:
            open_end = follower.end is LogEnd.OPEN
            state = view.state(
                follower.end.value,
                0 if follower.closed else _quiet_ns(log),
                stopped_by(log) if open_end else "",
            )
            if as_json:
                say_json(state)
            else:
                screen.draw(*screen_lines(log, state))
        elif once:
            raise LogError(f"{log}: cut in its first record; there is nothing to read in this log yet")
        if follower.closed:
            break
        if once:
            return
        time.sleep(interval)
    leave(condition_of(follower))


def _quiet_ns(log: Path) -> int:
    """Return the time since the last write to the log (ns). Not negative, though clocks may differ."""
    newest = max((path.stat().st_mtime_ns for path in segment_paths(log)[-1:]), default=0)
    return max(0, time.time_ns() - newest)


def screen_lines(log: Path, state: LiveState) -> Iterator[str]:
    """Format the screen, line by line."""
    slots, span = state.slots, duration(state.window_ns)
    yield f"{log}: {_end(state)}"
    yield f"{utc(slots.wall_ns)} event {slots.event:,} step {slots.step:,}"
    if state.restart is not None:
        restart = state.restart
        process = told_process(restart.life, restart.ended)
        yield f"{process} since {duration(restart.age_ns)}; it found {restart.kept:,} blocks"
    yield ""
    yield f"in the last {span}, since event {state.since_event:,} at the earliest"
    yield _row("speed", f"{_rate(state.events, state)} events/s, {_rate(state.steps, state)} steps/s")
    yield _row("hits", _hits(state))
    yield _row("evictions", f"{state.evicted:,} blocks evicted, {state.skipped:,} offered and not stored")
    yield _worst_rank(state)
    yield ""
    yield "now"
    yield _row(
        "pool", f"{_bar(state.capacity - slots.free, state.capacity)} of {state.capacity:,} slots used"
    )
    yield _row(
        "",
        f"{slots.free:,} free, {slots.idle:,} idle, {slots.pinned:,} pinned or loading, "
        f"{slots.storing:,} being stored, {slots.quarantined:,} quarantined, {slots.retired:,} retired",
    )
    yield _row("requests", f"{slots.known_requests:,} known")
    yield _row("waits", _waits(state))
    yield _row("copies", _copies(state))


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _end(state: LiveState) -> str:
    if state.end in (LogEnd.CLOSED, LogEnd.STOPPED):
        return "the engine has closed it" if state.end == LogEnd.CLOSED else in_red("closed after an error")
    quiet = f"written {duration(state.quiet_ns)} ago"
    if state.end == LogEnd.MISSING:
        return in_red("its last segments are missing")
    if state.end == LogEnd.BROKEN:
        return f"broken, a write failed; {quiet}"
    if state.stopped_by:
        return f"open, {quiet}; {stop_notice(state.stopped_by)}"
    late = "; the engine has nothing to decide, hangs or was killed"
    return f"open, {quiet}{late if state.quiet_ns >= QUIET_NS else ''}"


def _rate(number: int, state: LiveState) -> str:
    return f"{number * 1e9 / state.window_ns:,.1f}" if state.window_ns else "-"


def _hits(state: LiveState) -> str:
    if not state.asked:
        return "no request was admitted after a lookup"
    missed = max(0, state.asked - state.on_device - state.on_host)
    shares = [f"{100 * part / state.asked:.1f} %" for part in (state.on_device, state.on_host, missed)]
    return (
        f"device {shares[0]}, host {shares[1]}, missed {shares[2]} of {state.asked:,} blocks "
        f"in {state.admitted:,} requests"
    )


def _worst_rank(state: LiveState) -> str:
    worst = next((one for one in state.ranks if one.worker == state.worst), None)
    if worst is None:
        return _row("worst rank", "no copy was reported")
    others = RankCounts(-1)
    for one in state.ranks:
        if one is not worst:
            others.add(one)
    text = f"rank {worst.worker}: {worst.failed:,} of {worst.reports:,} copies failed"
    text += f" ({worst.error})" if worst.error else ""
    if worst.timed:
        text += f"; mean {duration(worst.mean_ns)}, longest {duration(worst.max_ns)}"
    if others.timed:
        text += (
            f"; of the other ranks {others.failed:,} of {others.reports:,}, mean {duration(others.mean_ns)}"
        )
    if worst.failed:
        return in_red(_row("worst rank", text))
    slow = others.timed and worst.mean_ns > SLOW * others.mean_ns
    return in_yellow(_row("worst rank", text)) if slow else _row("worst rank", text)


def _waits(state: LiveState) -> str:
    wait = state.longest_wait
    if wait is None:
        return "no request waits for a copy of another"
    return (
        f"{state.slots.deferred_requests:,} requests wait for copies; the longest wait is {wait.request}'s, "
        f"for transfer {wait.transfer}: {_age(wait.age_ns, wait.at_least)}"
    )


def _copies(state: LiveState) -> str:
    slots, oldest = state.slots, state.oldest_copy
    text = f"{slots.stores_in_flight:,} stores and {slots.loads_in_flight:,} loads planned or in flight"
    if oldest is None:
        return text
    age = _age(oldest.age_ns, oldest.at_least)
    silent = ", ".join(map(str, oldest.silent))
    ranks = f"rank{'' if len(oldest.silent) == 1 else 's'} {silent}"
    return f"{text}; the oldest is {oldest.direction} {oldest.transfer}, for {age}, not reported by {ranks}"


def _age(age_ns: int, at_least: bool) -> str:
    return f"{duration(age_ns)} or longer" if at_least else duration(age_ns)


def _bar(used: int, capacity: int) -> str:
    filled = round(BAR * used / capacity)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {100 * used / capacity:.0f} %"
