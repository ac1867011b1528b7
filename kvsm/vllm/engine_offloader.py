"""The offload core of one engine, with its metrics and its event log.

Every start of an engine has a log of its own: a directory named for when it began and which engine it is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from vllm.logger import init_logger

from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.kv_events import Publisher
from kvsm.log import LogWriter
from kvsm.metrics import Metrics
from kvsm.offloader import Offloader
from kvsm.snapshot import snapshot
from kvsm.vllm.extra_config import CommonOptions

log = init_logger("vllm.kvsm")


class EngineOffloader(NamedTuple):
    """offloader: decides. metrics: counts what it decides. event_log: where that is written, if anywhere."""

    offloader: Offloader
    metrics: Metrics
    event_log: LogWriter | None

    def close(self) -> None:
        """The engine is over; what was decided is on disk."""
        if self.event_log is not None:
            self.event_log.close()


def open_engine_offloader(
    config: OffloadConfig, options: CommonOptions, engine: int, publisher: Publisher | None
) -> EngineOffloader:
    """engine: the data-parallel index. Raises `LogError` if a log is asked for and cannot be begun."""
    writer = None
    if options.event_log is not None:
        writer = LogWriter(
            new_directory(Path(options.event_log), engine),
            config=config,
            snapshot=lambda: snapshot(offloader.ledger),
            durability=options.log_durability,
            max_bytes=options.log_max_bytes,
            on_failure=options.log_on_failure,
        )
        log.info("kvsm: the event log of engine %d is %s", engine, writer.directory)
    metrics = Metrics(config, writer)
    offloader = Offloader(config, metrics, publisher=publisher)
    return EngineOffloader(offloader, metrics, writer)


def new_directory(parent: Path, engine: int) -> Path:
    """Named so that a listing tells what came when."""
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # Of one process two engines may start in the same second.
    for directory in (
        parent / f"{began}-engine{engine}-{os.getpid()}",
        parent / f"{began}-engine{engine}-{os.getpid()}-{time.monotonic_ns()}",
    ):
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LogError(f"event_log: no directory can be made in {parent}: {error.strerror}") from error
        return directory
    raise LogError(f"event_log: {directory} exists")
