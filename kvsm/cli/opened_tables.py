"""How a command opens the tables of a log: it tells how far it is, and why the index is not kept."""

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
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.opened import open as open_log


@contextmanager
def opened_log(log: Path, **trust: Any) -> Iterator[OpenedLog]:
    """The log, opened. On a terminal the first reading of a large one shows how far it is."""
    with _opened(log, trust) as opened:
        if opened.note is not None:
            complain(opened.note)
        yield opened


@contextmanager
def opened_tier(log: OpenedLog, **trust: Any) -> Iterator[OpenedTier | None]:
    """The other tier of a log, with its own log opened if that can be. None: there is no other tier."""
    other = other_tier(log)
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


def _opened(log: Path, trust: dict[str, Any]) -> OpenedLog:
    with counting("read up to event") as progress:
        return open_log(log, progress=progress, **trust)
