"""kvsm: an event-sourced state machine for KV-cache offload, with formal checking.

The public surface. `Offloader` decides; `LogWriter` records its decisions and `LogReader` reads them;
`open` returns a log as tables; `Worker` executes plans with a copy engine of `kvsm.copies` or
`kvsm.cuda_io`; `kvsm.explain.story` rebuilds, verifies and explains; `kvsm.testing` tests code that is built
on kvsm.

The names below are imported on first use: wherever kvsm is installed, pytest imports this package for its
plugin, and must not wait for numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsm.copies import CopyEngine, FileCopyEngine, HostCopyEngine, HostPool
    from kvsm.copies.worker import Worker
    from kvsm.core.log import LogReader, LogWriter
    from kvsm.core.offloader import Ended, LookupResult, Match, Offloader, PreparedStore, ReportResult
    from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
    from kvsm.errors import (
        ConfigError,
        IllegalTransition,
        InvalidEvent,
        KvsmError,
        LimitReached,
        LogDamaged,
        LogError,
        LogWriteFailed,
        Poisoned,
        TransferFailed,
        WrongArgument,
        WrongThread,
    )
    from kvsm.events import Direction, OffloadConfig, OffloadingEvent, RejectReason
    from kvsm.explain.tables.opened import OpenedLog, open

__all__ = [
    "Offloader",
    "OffloadConfig",
    "Match",
    "PreparedStore",
    "ReportResult",
    "RejectReason",
    "Ended",
    "LookupResult",
    "TransferJob",
    "TransferPlan",
    "WorkerReport",
    "Worker",
    "CopyEngine",
    "HostCopyEngine",
    "FileCopyEngine",
    "HostPool",
    "Direction",
    "OffloadingEvent",
    "LogWriter",
    "LogReader",
    "open",
    "OpenedLog",
    "KvsmError",
    "ConfigError",
    "IllegalTransition",
    "InvalidEvent",
    "LimitReached",
    "LogDamaged",
    "LogError",
    "LogWriteFailed",
    "Poisoned",
    "TransferFailed",
    "WrongArgument",
    "WrongThread",
]

_HOMES = (
    "kvsm.core.offloader",
    "kvsm.events",
    "kvsm.core.plan",
    "kvsm.core.log",
    "kvsm.errors",
    "kvsm.copies.worker",
    "kvsm.copies",
    "kvsm.explain.tables.opened",
)
"""The modules that define these names."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if hasattr(home, name):
                globals()[name] = getattr(home, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
