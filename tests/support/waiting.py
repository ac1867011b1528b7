"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(what: Callable[[], bool], seconds: float = 300) -> None:
    """The time is limited only so that a test that fails ends: a busy machine may take long."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
