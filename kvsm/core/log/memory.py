"""A log that is kept in memory: for tests and for worlds that are explored."""

from __future__ import annotations

from kvsm.events import OffloadingEvent


class MemoryLog(list[OffloadingEvent]):
    """The events of an `Offloader`, as a list. It stands where a `LogWriter` would."""

    def flush(self) -> None:
        """Nothing to write."""
