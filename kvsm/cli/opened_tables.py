"""Open the tables of a log for a command, with a line of progress, and a notice if the index is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvsm.cli.output import complain
from kvsm.cli.progress import counting
from kvsm.errors import LogError
from kvsm.explain.other_tier import other_tier
from kvsm.explain.report.tier_measures import OpenedTier
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.opened import open as open_log
from kvsm.explain.tables.table_index import ReadProgress


@contextmanager
def opened_log(log: Path, window: Window = EVERYTHING, **trust: Any) -> Iterator[OpenedLog]:
    """Open a log, or the tables of a part of it. Prints to standard error how large an index it will make. On
    a terminal it shows the progress of reading."""
    with _opened(log, window, trust) as opened:
        if opened.note is not None:
            complain(opened.note)
        yield opened


@contextmanager
def opened_tier(log: OpenedLog, **trust: Any) -> Iterator[OpenedTier | None]:
    """Yield the other tier of a log, host or disk, with its own log opened; None: there is no other tier.

    If its log is missing or cannot be opened, the tier says why. If only a part of a log is read, the log of
    the other tier is not read.
    """
    other = other_tier(log) if log.part == EVERYTHING else None
    if other is None:
        yield None
    elif other.log is None:
        yield OpenedTier(other.tier, None, f"no log of the {other.tier} lies beside {log.directory}")
    else:
        with ExitStack() as opened:
            try:
                found = OpenedTier(other.tier, opened.enter_context(opened_log(other.log, **trust)))
            except LogError as error:
                found = OpenedTier(other.tier, None, str(error))
            yield found


INDEX_BYTES_PER_LOG_BYTE = 2
"""About the largest ratio: it is 1.1 for a log of large batches, mostly keys, and 1.9 for one of small
events."""


def _opened(log: Path, window: Window, trust: dict[str, Any]) -> OpenedLog:
    with counting("read up to event", bar=True) as count:
        announced = False

        def show(progress: ReadProgress) -> None:
            nonlocal announced
            if progress.index is not None and not announced:
                announced = True
                size = progress.log_bytes / 1e6
                complain(
                    f"reading {size:,.1f} MB of log into {progress.index}, up to about "
                    f"{size * INDEX_BYTES_PER_LOG_BYTE:,.0f} MB: later commands need not read the log again"
                )
            if count is not None:
                count(progress.event, progress.read_bytes / max(1, progress.log_bytes))

        return open_log(log, progress=show, window=window, **trust)
