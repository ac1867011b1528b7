"""How a command opens the tables of a log: it tells how far it is, and why the index is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsm.analysis.opened import OpenedLog
from kvsm.analysis.opened import open as open_log
from kvsm.cli.counting import counting
from kvsm.cli.output import complain


@contextmanager
def opened_log(log: Path, **trust: Any) -> Iterator[OpenedLog]:
    """The log, opened. On a terminal the first reading of a large one shows how far it is."""
    with _opened(log, trust) as opened:
        if opened.note is not None:
            complain(opened.note)
        yield opened


def _opened(log: Path, trust: dict[str, Any]) -> OpenedLog:
    with counting("read up to event") as progress:
        return open_log(log, progress=progress, **trust)
