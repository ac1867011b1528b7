"""Going on where a process has left off that is gone: its log says what its host pool holds.

A plan leaves for the workers only after its events are in the log. So whatever a process did before it was
killed, its log knows which slots a copy may have written: all others hold what they held. `start` takes the
log for this process, folds it, emits `Restarted`, and serves what was stored.

The first row that fits says how an engine starts:

===========================================  ======  =====================================================
what is found                                start   because
===========================================  ======  =====================================================
another process writes the log               none    `LogError` names it: two engines never share a pool
no log, or one without events                cold    nobody has stored anything
the caller says that a pool is cold          cold    its bytes are gone, or it is another pool
a log that no writer can go on with          cold    it may lack what was done: events were lost, or damaged
a log that keeps no pools, or others         cold    it speaks of other bytes
another identity, or other weights           cold    a key would name other bytes
other machine tables, slots or ranks         cold    the log, or a slot, would mean something else
pools of blocks without pools of checksums   cold    nobody can tell what a slot holds
a log that does not reach a pool's mark: it  cold    the log is older than the pool, or another copy of it
ends before, is another life, or another                has gone on: it says what slots held before
run
anything else                                warm    what was stored is there
===========================================  ======  =====================================================

A cold start begins a new log. The old one is moved aside, beside it. Such past logs have a limit together.

A pool that is older than its log is no reason for a cold start. Its slots say what they hold: a load of a
block that is not there is refused (`kvsm/copy_engines/checksums.py`), and its request computes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.copy_engines.pool_mark import (
    OPEN_MARKS,
    LogPlace,
    PoolMark,
    why_unbound,
    without_checksums,
)
from kvsm.errors import ConfigError, KvsmError, LogError
from kvsm.events import OffloadConfig
from kvsm.frozen import freeze
from kvsm.identity import KeptPools
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger, readable_keys, why_not_alike
from kvsm.log import EndedLog, LogBinding, LogDirectory, LogEnd, LogWriter, find_end
from kvsm.log.frames import RUN_BYTES
from kvsm.log.past_logs import PAST_LOGS_BYTES, delete_past_logs
from kvsm.offloader import Offloader
from kvsm.replay.fold import Rebuilt, rebuild

KILLED = "the process was killed"
"""How a process ended that did not close its log. It may have been a power failure of the machine, too."""

MOST_SLOTS = 1 << 32
"""More than any pool of a host and its device have together."""

FIRST = "no process has stored anything here yet"


class Start(NamedTuple):
    """How an engine starts.

    offloader: its core. `offloader.writer` is its log, which `offloader.close` closes.
    kept: blocks that were stored by earlier processes, and can be read.
    why_cold: why nothing is kept, a line for each reason; empty if the start is warm.
    moved: where the log of the last process was moved. It may have been deleted there at once.
    """

    offloader: Offloader
    kept: int
    why_cold: tuple[str, ...] = ()
    moved: Path | None = None


def start(
    directory: str | os.PathLike[str],
    config: OffloadConfig,
    pools: KeptPools,
    *,
    weights: str = "",
    marks: Sequence[PoolMark] | None = None,
    why_cold: Sequence[str] = (),
    publisher: Publisher | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
    flush_within_ms: int = 0,
    log: Mapping[str, Any] | None = None,
    past_logs_max_bytes: int = PAST_LOGS_BYTES,
) -> Start:
    """Start a core on kept pools: warm if that is safe, else cold.

    directory: of the log; made if absent. Its lock keeps a second process out.
    pools: the pools that this process, or its workers, have opened: of blocks, and as many of checksums.
        They must be this engine's alone.
    marks: of these pools, in any order; None: this process has the pools open, as `HostPool`s.
    weights: version of the model's weights. why_cold: what speaks against a warm start, a line each.
    publisher, clock_ns, flush_within_ms: as `Offloader` takes them. log: as `LogWriter`, without its clock.
    past_logs_max_bytes: the most that the past logs beside this one may have together (`delete_past_logs`).

    Raises `LogError` if another process has the log, or if no log can be written.
    """
    options = dict(log or {})
    if marks is None:
        marks = [OPEN_MARKS[pool] for pool in pools.ids if pool in OPEN_MARKS]
    claimed = LogDirectory(directory)
    try:
        end, left, reasons = _what_is_left(claimed, config, pools, weights)
        follows: list[LogPlace | None] = []
        if end is not None and left is not None and not reasons:
            follows, reasons = _places(marks, pools, end)
        if left is not None and not (why_cold or reasons):
            options["binding"] = _begin_life(marks, follows, end)
            core = _go_on(end, left, config, publisher, clock_ns, flush_within_ms, options)
            return Start(core, len(readable_keys(core.ledger)))
        moved = None
        if end is None or end.seq:
            claimed, moved = _move_aside(claimed, past_logs_max_bytes)
            end = find_end(claimed)
        end = end._replace(run=options.get("run") or os.urandom(RUN_BYTES))
        options["binding"] = _begin_life(marks, [None] * len(marks), end)
        core = Offloader.open(
            config,
            end,
            publisher=publisher,
            clock_ns=clock_ns,
            flush_within_ms=flush_within_ms,
            kept=pools,
            weights=weights,
            **options,
        )
        return Start(core, 0, (*why_cold, *reasons), moved)
    except BaseException:
        claimed.close()
        raise


def _places(
    marks: Sequence[PoolMark], pools: KeptPools, end: EndedLog
) -> tuple[list[LogPlace | None], list[str]]:
    """(the place of each mark that this log reaches; what speaks against a warm start, a line each)"""
    if len(marks) != len(pools.ids):
        return [], [
            f"{len(pools.ids)} pools are kept, and {len(marks)} have their marks here: nobody can tell "
            "whether the log is as new as the others; open all pools before the start, or give `marks`"
        ]
    problem = without_checksums(marks)
    if problem:
        return [], [problem]
    place = LogPlace(end.run or b"", end.life - 1, end.life_id, end.seq)
    found = [why_unbound(mark, place) for mark in marks]
    return [fits for fits, _ in found], list(dict.fromkeys(reason for _, reason in found if reason))


def _begin_life(
    marks: Sequence[PoolMark], follows: Sequence[LogPlace | None], end: EndedLog | None
) -> LogBinding:
    """Write where the next life begins into the marks, before its log is there. follows: as `begin` takes
    it, of each mark."""
    assert end is not None
    place = LogPlace(end.run or b"", end.life, os.urandom(RUN_BYTES), end.seq)
    for mark, before in zip(marks, follows, strict=True):
        mark.begin(place, before)
    return LogBinding(place.life_id, tuple(marks))


def _what_is_left(
    claimed: LogDirectory, config: OffloadConfig, pools: KeptPools, weights: str
) -> tuple[EndedLog | None, Rebuilt | None, list[str]]:
    """(the end of the log, None if it cannot be continued; its state, None without events; why it is cold)"""
    end = None
    try:
        end = find_end(claimed)
        if not end.seq:
            return end, None, [FIRST]
        # It is this user's own log: another number of device blocks, or an own policy, is no attack.
        left = rebuild(claimed.path, since=end.seq, allow_policies=(config.policy,), max_slots=MOST_SLOTS)
    except KvsmError as error:
        return end, None, [str(error)]
    return end, left, _differences(left, config, pools, weights)


def _differences(left: Rebuilt, config: OffloadConfig, pools: KeptPools, weights: str) -> list[str]:
    """What a log says against a warm start, a line each."""
    ledger = left.ledger
    if ledger.kept is None:
        return ["the log speaks of pools that ended with their process"]
    lines = ledger.kept.identity.differences(pools.identity)
    if not lines and ledger.kept.ids != pools.ids:
        lines.append("the log speaks of other pools than those that are there")
    if ledger.weights != weights:
        lines.append(f"weights: {ledger.weights or 'not named'}, and now {weights or 'not named'}")
    if left.condition.other_machines:
        lines.append("the log was written by a kvsm with other machine tables")
    return lines + why_not_alike(ledger.config, config)


def _go_on(
    end: EndedLog | None,
    left: Rebuilt,
    config: OffloadConfig,
    publisher: Publisher | None,
    clock_ns: Callable[[], int],
    flush_within_ms: int,
    options: Mapping[str, Any],
) -> Offloader:
    """Begin the next life of a log."""
    assert end is not None
    ledger: Ledger = left.ledger
    cores: list[Offloader] = []
    writer = LogWriter(
        end,
        config=ledger.config,
        snapshot=lambda: cores[0].state_for_log() if cores else freeze(ledger),
        clock=clock_ns,
        **options,
    )
    writer.use_config(config)
    core = Offloader.restarted(
        ledger,
        config,
        writer,
        life=end.life,
        ended=_how_it_ended(left),
        publisher=publisher,
        clock_ns=clock_ns,
        flush_within_ms=flush_within_ms,
    )
    core.writer = writer
    cores.append(core)
    return core


def _how_it_ended(left: Rebuilt) -> str:
    """How the last process ended, for people; empty if it closed its log."""
    condition = left.condition
    if condition.end is LogEnd.STOPPED:
        return condition.error or "it stopped with an error"
    return "" if condition.end is LogEnd.CLOSED else KILLED


def _move_aside(claimed: LogDirectory, past_logs_max_bytes: int) -> tuple[LogDirectory, Path]:
    """Give the log of the last process another name, and delete the oldest of such logs. Returns a new
    directory, locked, and that name."""
    path = claimed.path
    moved = path.with_name(f"{path.name}-until-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    for number in count(2):
        if not moved.exists():
            break
        moved = moved.with_name(f"{moved.name.partition('.')[0]}.{number}")
    try:
        path.rename(moved)
    except OSError as error:
        raise LogError(
            f"{path}: the log of the last process cannot be moved aside: {error.strerror}"
        ) from error
    # Its lock is held until the new directory is locked: nobody comes in between.
    made = LogDirectory(path)
    claimed.close()
    with suppress(ConfigError):  # Nothing depends on it.
        delete_past_logs(path.parent, past_logs_max_bytes)
    return made, moved
