"""Waiting for another process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(what: Callable[[], bool], seconds: float = 300) -> None:
    """Wait until `what()` is true. The limit only ends failing tests; a busy machine may take long."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
