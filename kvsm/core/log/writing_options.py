"""How a log is written: the choices, and which of them cannot work."""

from __future__ import annotations

from typing import Literal

from kvsm.core.log.frames import RUN_BYTES
from kvsm.errors import ConfigError

Durability = Literal["none", "interval", "every"]
OnFailure = Literal["stop", "continue"]

ERROR_TEXT = 2000
"""Most characters of the text of the error with which a log is closed."""


def check_options(
    durability: str,
    sync_interval_ms: int,
    segment_bytes: int,
    max_bytes: int | None,
    on_failure: str,
    run: bytes | None,
    first: int,
) -> None:
    """Raises `ConfigError` for an option of `LogWriter` that cannot work."""
    if run is not None and len(run) != RUN_BYTES:
        raise ConfigError(f"run has {len(run)} bytes; it must have {RUN_BYTES}")
    if first < 1:
        raise ConfigError(f"first is {first}; events count from 1")
    if durability not in ("none", "interval", "every"):
        raise ConfigError(f"durability is {durability!r}; it must be none, interval or every")
    if on_failure not in ("stop", "continue"):
        raise ConfigError(f"on_failure is {on_failure!r}; it must be stop or continue")
    if sync_interval_ms < 0:
        raise ConfigError(f"sync_interval_ms is {sync_interval_ms}; it must be 0 or more")
    if segment_bytes < 1:
        raise ConfigError(f"segment_bytes is {segment_bytes}; it must be 1 or more")
    if max_bytes is not None and max_bytes < 2 * segment_bytes:
        raise ConfigError(f"max_bytes is {max_bytes}; it must hold two segments of {segment_bytes} bytes")
