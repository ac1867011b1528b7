"""The progress of a long command: a line on a terminal, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Count(Protocol):
    """Shows the number reached so far. share: how much of the work is done, from 0 to 1; for a bar."""

    def __call__(self, number: int, share: float = 0) -> None: ...


@contextmanager
def counting(before: str, after: str = "", bar: bool = False) -> Iterator[Count | None]:
    """Yield a function that shows the number reached so far; None without a terminal: no need to count.

    before, after: the text around the number, as in `verified 1,200 events`.
    bar: whether to show a bar. Then give the function the share of the work, too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    text = TextColumn(f"{before} {{task.fields[number]:,.0f}} {after}".rstrip())
    bars = (BarColumn(), TaskProgressColumn()) if bar else ()
    progress = Progress(text, *bars, TimeElapsedColumn(), console=console, transient=True)
    task = progress.add_task(before, total=1, number=0)

    def show(number: int, share: float = 0) -> None:
        # Not earlier: it starts a thread, and a process forked beside a thread may hang.
        progress.start()
        progress.update(task, completed=share, number=number)

    try:
        yield show
    finally:
        progress.stop()
