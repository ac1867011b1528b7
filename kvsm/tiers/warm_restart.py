"""Starts an engine on the host pools of an earlier process, whose log says what the pools hold.

A plan leaves for the workers only after its events are in the log. So however a process ended, its log names
every slot that a copy may have written; all other slots are unchanged. `start` opens the log for this
process, folds it, emits `Restarted`, and serves the stored blocks.

The first matching row decides how an engine starts:

===========================================  ======  =====================================================
what is found                                start   because
===========================================  ======  =====================================================
another process writes the log               none    `LogError` names it: two engines never share a pool
no log, or a log without events              cold    the content of the pools is unknown
the caller says that a pool is cold          cold    its bytes are gone, or it is another pool
a log that no writer can continue            cold    events were lost or damaged
a log for no kept pools, or for other pools  cold    it describes other bytes
another identity, or other weights           cold    a key would name other bytes
other machine tables, slots or ranks         cold    the log, or a slot, would mean something else
pools of blocks without pools of checksums   cold    the content of a slot cannot be proved
a log that does not reach a pool's mark: it  cold    the log is older than the pool, or an older copy of it
ends before it, or belongs to another life           was continued: it describes earlier contents of slots
or run
none of these                                warm    the stored blocks are in the pools
===========================================  ======  =====================================================

A cold start begins a new log, which says why, and moves the old log aside. One size limit holds for all these
past logs together.

The system may refuse to write the log: the disk is full or read-only, or the directory belongs to another
user. With `on_failure="stop"` the engine then refuses to start. With `continue` it starts without a log, warm
if that is safe, and begins a log as soon as that is possible (`LateLog`). Until then the marks of the pools
name no log, so a process that restarts meanwhile starts cold.

A pool that is older than its log does not make the start cold. Each slot has a checksum that is sealed for
its block. If a slot does not hold the block that the log names, the load fails (`kvsm/copies/checksums.py`),
and the request computes the tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.copies.host_pools.pool_mark import (
    OPEN_MARKS,
    LogPlace,
    PoolMark,
    why_unbound,
    without_checksums,
)
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger, readable_keys, why_not_alike
from kvsm.core.ledger.frozen import freeze
from kvsm.core.log import (
    EndedLog,
    LateLog,
    LogBinding,
    LogDirectory,
    LogEnd,
    LogWriter,
    find_end,
    is_refused_by_system,
    told_stop,
)
from kvsm.core.log.fold import Rebuilt, rebuild
from kvsm.core.log.frames import RUN_BYTES
from kvsm.core.log.past_logs import PAST_LOGS_BYTES, delete_past_logs
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError, KvsmError, LogError
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools

KILLED = "the process was killed"
"""The assumed end of a process that did not close its log. It may also have been a power failure."""

MOST_SLOTS = 1 << 32
"""More slots than any host pool and its device have together."""

FIRST = "there is no event log of an earlier process"


class Start(NamedTuple):
    """The result of `start`.

    offloader: the core. `offloader.writer` is its log, which `offloader.close` closes.
    kept: number of readable blocks that earlier processes have stored.
    why_cold: why no block is kept, a line for each reason; empty if the start is warm.
    moved: where the log of the last process was moved; None: it was not moved. It may already be deleted by
        the limit for past logs.
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

    directory: the directory of the log; created if absent. Its lock keeps a second process out.
    pools: the pools that this process, or its workers, have opened: of blocks, and as many of checksums.
        No other engine may use them.
    marks: the marks of these pools, in any order; None: this process has opened the pools, as `HostPool`s.
    weights: version of the model's weights.
    why_cold: reasons of the caller against a warm start, a line each.
    publisher, clock_ns, flush_within_ms: as in `Offloader`.
    log: options of `LogWriter`, without its clock.
    past_logs_max_bytes: limit for the past logs next to this log, together (`delete_past_logs`).

    Raises `LogError` if another process has the log, or if no log can be written and `on_failure` is `stop`.
    Then the old log is at its place, or the error says where it is.
    """
    options = dict(log or {})
    if marks is None:
        marks = [OPEN_MARKS[pool] for pool in pools.ids if pool in OPEN_MARKS]
    more = {"publisher": publisher, "clock_ns": clock_ns, "flush_within_ms": flush_within_ms}
    engine = _Engine(
        Path(directory), config, pools, weights, tuple(marks), options, past_logs_max_bytes, more
    )
    try:
        return _start(engine, why_cold)
    except LogError as error:
        if options.get("on_failure") != "continue" or not is_refused_by_system(error):
            raise
        return _start_without_log(engine, why_cold, error)


class _Engine(NamedTuple):
    """The arguments of `start`.

    log: options of `LogWriter`.
    more: further arguments of `Offloader`.
    """

    directory: Path
    config: OffloadConfig
    pools: KeptPools
    weights: str
    marks: tuple[PoolMark, ...]
    log: Mapping[str, Any]
    past_logs_max_bytes: int
    more: dict[str, Any]


class _Remains(NamedTuple):
    """What the last process has left in the log directory.

    end: the end of its log; None if the log cannot be continued.
    left: the folded log; None if there are no events, or if it cannot be read.
    follows: for each mark, its place that the log reaches, or None.
    why_cold: reasons against a warm start, a line each.
    """

    end: EndedLog | None
    left: Rebuilt | None
    follows: Sequence[LogPlace | None]
    why_cold: Sequence[str]


def _start(engine: _Engine, why_cold: Sequence[str]) -> Start:
    claimed = LogDirectory(engine.directory)
    moved = None
    try:
        end, left, follows, reasons = _find(claimed, engine)
        if left is not None and not (why_cold or reasons):
            core = _go_on(end, left, engine, _begin_life(engine.marks, follows, end))
            return Start(core, len(readable_keys(core.ledger)))
        if end is None or end.seq:
            claimed, moved = _move_aside(claimed)
            end = EndedLog(claimed)
        end, binding = _begin_log(engine, end)
        core = Offloader.open(
            engine.config,
            end,
            kept=engine.pools,
            weights=engine.weights,
            cold=(*why_cold, *reasons) if moved is not None else (),
            binding=binding,
            **engine.more,
            **engine.log,
        )
    except BaseException as error:
        claimed.close()
        if moved is not None:
            _move_back(moved, engine.directory, error)
        raise
    if moved is not None:
        with suppress(ConfigError):  # the start is complete without the deletion
            delete_past_logs(engine.directory.parent, engine.past_logs_max_bytes)
    return Start(core, 0, (*why_cold, *reasons), moved)


def _start_without_log(engine: _Engine, why_cold: Sequence[str], failure: LogError) -> Start:
    """Start a core whose log cannot begin yet, warm if that is safe. Void the marks, so that no log fits the
    pools until the log begins."""
    found = _Remains(None, None, (), [str(failure)])
    try:
        claimed = LogDirectory(engine.directory, durable=False)
    except LogError as error:
        if not is_refused_by_system(error):
            raise
    else:
        found = _find(claimed, engine)
        claimed.close()
    for mark in engine.marks:
        mark.void()
    cores: list[Offloader] = []
    log = LateLog(engine.directory, str(failure), lambda first: _begin_late(engine, cores[0], first))
    if found.left is not None and not (why_cold or found.why_cold):
        ended, ledger = _how_it_ended(found.left), found.left.ledger
        core = Offloader.restarted(ledger, engine.config, log, ended=ended, **engine.more)
        start = Start(core, len(readable_keys(core.ledger)))
    else:
        core = Offloader(engine.config, log, kept=engine.pools, weights=engine.weights, **engine.more)
        start = Start(core, 0, (*why_cold, *found.why_cold))
    core.writer = log
    cores.append(core)
    return start


def _begin_late(engine: _Engine, core: Offloader, first: int) -> LogWriter:
    """Begin the log of a running core, from event `first` on. Raises `LogError`."""
    claimed = LogDirectory(engine.directory)
    try:
        end = _find(claimed, engine).end
        if end is None or end.seq or end.replaces:
            claimed, _ = _move_aside(claimed)
        end, binding = _begin_log(engine, EndedLog(claimed, life=core.ledger.life))
        return LogWriter(
            end,
            config=core.config,
            snapshot=core.state_for_log,
            clock=engine.more["clock_ns"],
            first=first,
            binding=binding,
            checked=True,
            **engine.log,
        )
    except BaseException:
        for mark in engine.marks:
            mark.void()
        claimed.close()
        raise


def _begin_log(engine: _Engine, end: EndedLog) -> tuple[EndedLog, LogBinding]:
    """Bind the pools to a new log. Returns the begin of the log, with its run, and the binding."""
    end = end._replace(run=engine.log.get("run") or os.urandom(RUN_BYTES))
    return end, _begin_life(engine.marks, [None] * len(engine.marks), end)


def _places(
    marks: Sequence[PoolMark], pools: KeptPools, end: EndedLog
) -> tuple[list[LogPlace | None], list[str]]:
    """Compare the marks of the pools with the end of a log. Returns, for each mark, its place that the log
    reaches or None; and the reasons against a warm start, a line each."""
    if len(marks) != len(pools.ids):
        return [], [
            f"{len(pools.ids)} pools are kept, and {len(marks)} have their marks here: it is unknown "
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
    """Write the begin of the next life into all marks, before the life is in the log. follows: for each mark,
    the argument of `PoolMark.begin`."""
    assert end is not None
    place = LogPlace(end.run or b"", end.life, os.urandom(RUN_BYTES), end.seq)
    for mark, before in zip(marks, follows, strict=True):
        mark.begin(place, before)
    return LogBinding(place.life_id, tuple(marks))


def _find(claimed: LogDirectory, engine: _Engine) -> _Remains:
    """Read what the last process has left in this directory, without changing anything."""
    end = None
    try:
        end = find_end(claimed)
        if not end.seq:
            return _Remains(end, None, (), [FIRST])
        # Trust it as this user's own log: it may name a custom policy, and any number of device blocks.
        policies = (engine.config.policy,)
        left = rebuild(claimed.path, since=end.seq, allow_policies=policies, max_slots=MOST_SLOTS)
    except KvsmError as error:
        return _Remains(end, None, (), [str(error)])
    except OSError as error:
        return _Remains(
            end, None, (), [f"{claimed.path}: the log of the last process cannot be read: {error}"]
        )
    reasons = _differences(left, engine.config, engine.pools, engine.weights)
    if reasons:
        return _Remains(end, left, (), reasons)
    return _Remains(end, left, *_places(engine.marks, engine.pools, end))


def _differences(left: Rebuilt, config: OffloadConfig, pools: KeptPools, weights: str) -> list[str]:
    """Compare the log with this engine. Returns the reasons against a warm start, a line each."""
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


def _go_on(end: EndedLog | None, left: Rebuilt, engine: _Engine, binding: LogBinding) -> Offloader:
    """Continue a log with its next life, and return the restarted core."""
    assert end is not None
    ledger: Ledger = left.ledger
    cores: list[Offloader] = []
    writer = LogWriter(
        end,
        config=ledger.config,
        snapshot=lambda: cores[0].state_for_log() if cores else freeze(ledger),
        clock=engine.more["clock_ns"],
        binding=binding,
        checked=True,
        **engine.log,
    )
    try:
        writer.use_config(engine.config)
        core = Offloader.restarted(
            ledger, engine.config, writer, life=end.life, ended=_how_it_ended(left), **engine.more
        )
    except BaseException as error:
        with suppress(LogError):
            writer.close(error)
        raise
    core.writer = writer
    cores.append(core)
    return core


def _how_it_ended(left: Rebuilt) -> str:
    """Describe how the last process ended, for people; empty if it closed its log."""
    condition = left.condition
    if condition.end is LogEnd.STOPPED:
        return condition.error or "it stopped with an error"
    if condition.end is LogEnd.CLOSED:
        return ""
    return told_stop(condition.stopped_by) if condition.stopped_by else KILLED


def _move_aside(claimed: LogDirectory) -> tuple[LogDirectory, Path]:
    """Rename the log directory of the last process. Returns a new, locked directory under the old name, and
    the new path of the old log."""
    path = claimed.path
    moved = path.with_name(f"{path.name}-until-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    for number in count(2):
        if not os.path.lexists(moved):
            break
        moved = moved.with_name(f"{moved.name.partition('.')[0]}.{number}")
    try:
        path.rename(moved)
    except OSError as error:
        raise LogError(
            f"{path}: the log of the last process cannot be moved aside: {error}; make its parent writable, "
            "name another directory, or remove it"
        ) from error
    # Hold the old lock until the new directory is locked, so that no other process can start in between.
    try:
        made = LogDirectory(path)
    except BaseException as error:
        _move_back(moved, path, error)
        raise
    claimed.close()
    return made, moved


def _move_back(moved: Path, path: Path, cause: BaseException) -> None:
    """Undo `_move_aside`, because no new log could begin. Raises `LogError` if that fails."""
    try:
        with suppress(FileNotFoundError):
            path.rmdir()
        moved.rename(path)
    except OSError as error:
        raise LogError(f"{cause}. The log of the last process is now {moved}") from error
