"""The progress of a long command: a line on a terminal, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn


@contextmanager
def counting(before: str, after: str = "") -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows the number reached so far; None without a terminal: no need to count.

    before, after: the text around the number, as in `verified 1,200 events`.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn(f"{before} {{task.completed:,.0f}} {after}".rstrip()), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(before, total=None)

    def show(number: int) -> None:
        # Not earlier: it starts a thread, and a process forked beside a thread may hang.
        progress.start()
        progress.update(task, completed=number)

    try:
        yield show
    finally:
        progress.stop()
