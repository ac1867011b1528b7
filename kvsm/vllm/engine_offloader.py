"""The offload core of one engine, with its metrics and its event log.

Each start of an engine has its own log: a directory whose name contains the time and the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger

from kvsm.copies import PoolMark
from kvsm.core.kv_events import Publisher
from kvsm.core.log import (
    WHAT_TO_DO,
    LateLog,
    LogWriter,
    OnFailure,
    StateCopy,
    is_refused_by_system,
)
from kvsm.core.log.log_directory import make_private
from kvsm.core.log.past_logs import PAST_LOGS_BYTES, delete_past_logs
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.identity import KeptPools
from kvsm.system.private_files import make_directory
from kvsm.tiers.warm_restart import start
from kvsm.vllm.extra_config import ConnectorOptions, LogOptions
from kvsm.vllm.log_watch import LogWatch

log = init_logger("vllm.kvsm")

SEGMENT_BYTES, LEAST_SEGMENTS = 64 << 20, 8
"""The size of a segment, and the least number of segments of a log with a limit. Segments are smaller if the
limit is low, because room is made by deleting the oldest segment."""

FLUSH_WITHIN_MS = 250
"""How long events may wait to be written to the log while requests run (ms). The plan of a copy never waits:
it is written before the copy starts."""


POOL_LOG_BYTES = 1 << 30
"""The limit for the log of an engine that restarts warm, if the user sets none: the log may be in memory."""


class WarmPools(NamedTuple):
    """The pools of an engine that restarts warm, as its scheduler finds them at start-up.

    directory: the directory of the pools.
    weights: the version of the weights with which the engine starts.
    marks: the marks of the pools that could be opened. This process sets them, because it writes the log.
    why_cold: the reasons against a warm start, a line each.
    """

    directory: str
    pools: KeptPools
    weights: str
    marks: Sequence[PoolMark] = ()
    why_cold: Sequence[str] = ()


class EngineOffloader(NamedTuple):
    """An offloader, the metrics that count its events, and the log of these events, if any."""

    offloader: Offloader
    metrics: Metrics
    event_log: LogWatch | None

    def close(self) -> None:
        """Close the event log. Unless the log is broken, all events are on disk then."""
        if self.event_log is not None:
            self.event_log.close()

    def mark_stops(self) -> None:
        """Record, beside the log, the signals that ask this process to end, for readers of the log and for
        the next start. A process can do this for one log; its other logs share the record."""
        if self.event_log is not None:
            self.event_log.mark_stops(self.event_log)

    def share_mark_with(self, other: EngineOffloader) -> None:
        """Record the same signals beside another log of this process."""
        if self.event_log is not None and other.event_log is not None:
            other.event_log.mark_stops(self.event_log)


def open_engine_offloader(
    config: OffloadConfig,
    options: ConnectorOptions,
    engine: int | str,
    publisher: Publisher | None,
    warm: WarmPools | None = None,
) -> EngineOffloader:
    """Make the offloader of an engine, warm or empty, with its metrics and its log.

    engine: the data-parallel index, followed by the tier if it is not the host's.
    warm: the pools of an engine that restarts warm; None: it does not.

    Raises `LogError` if a log is wanted that cannot be created, and `log_on_failure` is `stop`; or if another
    engine writes it.
    """
    if warm is not None:
        return _start_on_pools(config, options, engine, publisher, warm)

    def begin(first: int) -> LogWriter:
        assert options.event_log is not None
        return open_event_log(
            options.event_log,
            engine,
            options,
            config,
            lambda: offloader.state_for_log(),
            on_failure=options.log_on_failure,
            first=first,
        )

    event_log: LogWriter | LateLog | None = None
    if options.event_log is not None:
        try:
            event_log = begin(1)
        except LogError as error:
            if options.log_on_failure == "stop" or not is_refused_by_system(error):
                raise
            event_log = LateLog(Path(options.event_log), str(error), begin)
    offloader = Offloader(config, event_log, publisher=publisher, flush_within_ms=_flush_within_ms(options))
    return _watched(offloader, event_log)


def _start_on_pools(
    config: OffloadConfig,
    options: ConnectorOptions,
    engine: int | str,
    publisher: Publisher | None,
    warm: WarmPools,
) -> EngineOffloader:
    """Start warm if that is safe; log how many blocks were kept, or why none was."""
    started = start(
        Path(options.event_log or warm.directory) / f"engine{engine}",
        config,
        warm.pools,
        weights=warm.weights,
        marks=warm.marks,
        why_cold=warm.why_cold,
        publisher=publisher,
        flush_within_ms=_flush_within_ms(options),
        log=_writer_options(options, options.log_max_bytes or POOL_LOG_BYTES, options.log_on_failure),
        past_logs_max_bytes=_past_logs_max_bytes(options),
    )
    writer = started.offloader.writer
    assert writer is not None
    log.info("kvsm: the event log of engine %s is %s", engine, writer.directory)
    for reason in started.why_cold:
        log.warning("kvsm: cold start: %s", reason)
    if started.moved is not None:
        log.warning("kvsm: the event log of the last process is now %s", started.moved)
    if not started.why_cold:
        log.info("kvsm: warm start: %d blocks are kept from the last process", started.kept)
    return _watched(started.offloader, writer)


def _past_logs_max_bytes(options: LogOptions) -> int:
    """Return the limit for past logs beside a kept pool, which may be in memory."""
    return PAST_LOGS_BYTES if options.past_logs_max_bytes is None else options.past_logs_max_bytes


def _flush_within_ms(options: LogOptions) -> int:
    return 0 if options.log_durability == "every" else FLUSH_WITHIN_MS


def _watched(offloader: Offloader, writer: LogWriter | LateLog | None) -> EngineOffloader:
    metrics = Metrics.attached_to(offloader)
    if writer is None:
        return EngineOffloader(offloader, metrics, None)
    offloader.log = watch = LogWatch(metrics, writer, offloader.ledger)
    return EngineOffloader(offloader, metrics, watch)


def open_event_log(
    parent: str,
    engine: int | str,
    options: LogOptions,
    config: OffloadConfig,
    snapshot: Callable[[], StateCopy],
    on_failure: OnFailure = "continue",
    first: int = 1,
) -> LogWriter:
    """Open a log in a new directory below `parent`, from event `first` on. Raises `LogError`."""
    more = _writer_options(options, options.log_max_bytes, on_failure)
    directory = _new_directory(Path(parent), engine)
    try:
        writer = LogWriter(directory, config=config, snapshot=snapshot, first=first, checked=True, **more)
    except BaseException:
        with suppress(OSError):
            directory.rmdir()
        raise
    log.info("kvsm: the event log of engine %s is %s", engine, writer.directory)
    if options.past_logs_max_bytes is not None:
        for path in delete_past_logs(parent, options.past_logs_max_bytes):
            log.info("kvsm: deleted the event log %s (past_logs_max_bytes)", path)
    return writer


def _writer_options(options: LogOptions, most: int | None, on_failure: OnFailure) -> dict[str, Any]:
    return {
        "segment_bytes": SEGMENT_BYTES
        if most is None
        else max(1, min(SEGMENT_BYTES, most // LEAST_SEGMENTS)),
        "durability": options.log_durability,
        "sync_thread": True,  # Else the engine's thread would wait 10 ms for a busy disk, ten times a second.
        "max_bytes": most,
        "on_failure": on_failure,
    }


def _new_directory(parent: Path, engine: int | str) -> Path:
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-engine{engine}-{os.getpid()}"
    try:
        make_private(parent)
        with suppress(FileExistsError):
            make_directory(parent / name)
            return parent / name
        # One process may start two engines in the same second.
        other = parent / f"{name}-{time.monotonic_ns()}"
        make_directory(other)
        return other
    except OSError as error:
        raise LogError(f"event_log: no directory can be made in {parent}: {error}; {WHAT_TO_DO}") from error
