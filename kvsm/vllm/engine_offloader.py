"""The offload core of one engine, with its metrics and its event log.

Each start of an engine has its own log: a directory whose name tells the time and the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm.logger import init_logger

from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.kv_events import Publisher
from kvsm.log import LogWriter, OnFailure
from kvsm.metrics import Metrics
from kvsm.offloader import Offloader
from kvsm.vllm.extra_config import CommonOptions, LogOptions
from kvsm.vllm.log_watch import LogWatch

log = init_logger("vllm.kvsm")

SEGMENT_BYTES, LEAST_SEGMENTS = 64 << 20, 8
"""A log with a limit has at least this many segments, however low the limit is: the oldest of them is deleted
to make room."""

FLUSH_WITHIN_MS = 250
"""How long the end of a step may wait to be written to the log, while requests run (ms). What is copied is
written before its copy starts."""


class EngineOffloader(NamedTuple):
    """An offloader, the metrics that count its events, and the log that they are written to, if any."""

    offloader: Offloader
    metrics: Metrics
    event_log: LogWatch | None

    def close(self) -> None:
        """Close the event log. All that was decided is on disk then, if the log is not broken."""
        if self.event_log is not None:
            self.event_log.close()


def open_engine_offloader(
    config: OffloadConfig, options: CommonOptions, engine: int, publisher: Publisher | None
) -> EngineOffloader:
    """engine: the data-parallel index. Raises `LogError` if a log is wanted but cannot be created."""
    event_log = None
    if options.event_log is not None:
        event_log = open_event_log(
            options.event_log,
            engine,
            options,
            config,
            lambda: offloader.state_for_log(),
            on_failure=options.log_on_failure,
        )
    flush_within_ms = 0 if options.log_durability == "every" else FLUSH_WITHIN_MS
    offloader = Offloader(config, event_log, publisher=publisher, flush_within_ms=flush_within_ms)
    metrics = Metrics.attached_to(offloader)
    if event_log is None:
        return EngineOffloader(offloader, metrics, None)
    offloader.log = watch = LogWatch(metrics, event_log, offloader.ledger)
    return EngineOffloader(offloader, metrics, watch)


def open_event_log(
    parent: str,
    engine: int,
    options: LogOptions,
    config: OffloadConfig,
    snapshot: Callable[[], bytes],
    on_failure: OnFailure = "continue",
) -> LogWriter:
    """A log in a new directory below `parent`. Raises `LogError`."""
    most = options.log_max_bytes
    writer = LogWriter(
        _new_directory(Path(parent), engine),
        config=config,
        snapshot=snapshot,
        segment_bytes=SEGMENT_BYTES if most is None else max(1, min(SEGMENT_BYTES, most // LEAST_SEGMENTS)),
        durability=options.log_durability,
        sync_thread=True,  # The engine's thread would wait 10 ms for a busy disk, ten times a second.
        max_bytes=most,
        on_failure=on_failure,
    )
    log.info("kvsm: the event log of engine %d is %s", engine, writer.directory)
    return writer


def _new_directory(parent: Path, engine: int) -> Path:
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-engine{engine}-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (parent / name).mkdir(mode=0o700)
            return parent / name
        # One process may start two engines in the same second.
        other = parent / f"{name}-{time.monotonic_ns()}"
        other.mkdir(mode=0o700)
        return other
    except OSError as error:
        raise LogError(f"event_log: no directory can be made in {parent}: {error.strerror}") from error
