"""A walk that says on a terminal how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsm.check.walks.short_schedules import ScheduleCounts, search
from kvsm.check.walks.walk import MakeWorld, RunMaker, WalkFailure, WalkResult, walk
from kvsm.check.worlds.world import Action, World
from kvsm.cli.jobs_options import told_workers
from kvsm.system.executors.executor import Executor

_REFRESH_SECONDS = 0.2


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


def shown_search(
    make_world: Callable[[], World], alphabet: Mapping[Action, str], most: int, executor: Executor | None
) -> Iterator[tuple[ScheduleCounts, WalkFailure | None]]:
    """`search`, with such a line. alphabet: the actions, and who takes each."""
    # Refreshed by hand, because processes are forked for each length, and must not be beside a thread.
    live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
    shown = 0.0
    with live if sys.stderr.isatty() else nullcontext():
        for counts, failure in search(make_world, list(alphabet), alphabet.__getitem__, most, executor):
            if live.is_started and counts.seconds - shown >= _REFRESH_SECONDS:
                shown = counts.seconds
                told = (
                    f"{counts.schedules:,} schedules of at most {counts.length} actions, "
                    f"{counts.skipped:,} like shorter ones, {counts.seconds:.0f} s{told_workers(executor)}"
                )
                live.update(Text(told), refresh=True)
            yield counts, failure
