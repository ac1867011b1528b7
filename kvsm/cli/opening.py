"""How a command opens the tables of a log: it tells how far it is, and why the index is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from kvsm.analysis.opened import OpenedLog
from kvsm.analysis.opened import open as open_log
from kvsm.cli.output import complain


@contextmanager
def opened_log(log: Path, **trust: Any) -> Iterator[OpenedLog]:
    """The log, opened. On a terminal the first reading of a large one shows how far it is."""
    with _opened(log, trust) as opened:
        if opened.note is not None:
            complain(opened.note)
        yield opened


def _opened(log: Path, trust: dict[str, Any]) -> OpenedLog:
    console = Console(stderr=True)
    if not console.is_terminal:
        return open_log(log, **trust)
    columns = (TextColumn("read up to event {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("read", total=None)
        return open_log(log, progress=lambda event: progress.update(task, completed=event), **trust)
