"""A walk that says on a terminal how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsm.checker.walk import MakeWorld, RunMaker, WalkResult, walk
from kvsm.cli.executors import told_workers
from kvsm.executors.executor import Executor


def shown_walk(
    make_world: MakeWorld | RunMaker,
    seed: int,
    executor: Executor | None,
    *,
    text: Callable[[WalkResult], str],
    **limits: Any,
) -> WalkResult:
    """`walk`, with a line on standard error while it lasts if that is a terminal.

    executor: None for this process. text: the line. limits: as `walk` takes them.
    """
    if not sys.stderr.isatty():
        return walk(make_world, seed, executor=executor, **limits)
    live = Live(console=Console(stderr=True), refresh_per_second=5, transient=True)

    def show(result: WalkResult) -> None:
        # Not earlier: it starts a thread, and a process forked beside a thread may hang.
        live.start()
        live.update(Text(f"{text(result)}{told_workers(executor)}"))

    try:
        return walk(make_world, seed, executor=executor, progress=show, **limits)
    finally:
        live.stop()
