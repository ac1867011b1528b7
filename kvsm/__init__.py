"""kvsm: an event-sourced state machine for KV-cache offload, with formal checking.

The public surface. `Offloader` decides; `LogWriter` keeps what it decided and `LogReader` reads it back;
`kvsm.cuda_io` and `kvsm.worker` carry plans out; `kvsm.replay` rebuilds, verifies and explains.
"""

from __future__ import annotations

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
)
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.log import LogReader, LogWriter
from kvsm.offloader import Ended, LookupResult, Match, Offloader, PreparedStore
from kvsm.plan import TransferJob, TransferPlan, WorkerReport

__all__ = [
    "Offloader",
    "OffloadConfig",
    "Match",
    "PreparedStore",
    "Ended",
    "LookupResult",
    "TransferJob",
    "TransferPlan",
    "WorkerReport",
    "Direction",
    "OffloadingEvent",
    "LogWriter",
    "LogReader",
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
]
