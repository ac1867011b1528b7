"""A log in memory, for tests and explorers."""

from __future__ import annotations

from kvsm.events import OffloadingEvent


class MemoryLog(list[OffloadingEvent]):
    """The events of an `Offloader` as a list, used in place of a `LogWriter`."""

    def flush(self) -> None:
        """Do nothing."""
