"""What `kvsm fuzz` and `kvsm vllm-fuzz` share: limits of walks and reductions, and the output of a
failure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import click

from kvsm.check.walks.short_schedules import ScheduleCounts, search
from kvsm.check.walks.walk import MakeWorld, RunMaker, WalkFailure, WalkResult, walk
from kvsm.check.worlds.world import Action, World
from kvsm.cli.jobs_options import told_workers
from kvsm.system.executors.executor import Executor
from kvsm.system.stopping import IsOver, TimeBudget

REDUCE_SECONDS = 60.0
_REFRESH_SECONDS = 0.2
_MOST_SHOWN = 100
"""A failure with more lines than this is shown with its middle left out."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def reduce_option(command: Decorated) -> Decorated:
    """`--reduce-seconds`."""
    return click.option(
        "--reduce-seconds",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Reduce failures and the corpus for at most this time, on top of the walk's (60). 0: never.",
    )(command)


def reduce_budget(seconds: float | None) -> TimeBudget:
    """Return the budget that `--reduce-seconds` gives."""
    return TimeBudget(REDUCE_SECONDS if seconds is None else seconds)


def shown_steps(told: str, directory: str | Path | None) -> list[str]:
    """Return the lines of a failure for the screen. The middle of a long one is left out: the directory has
    all of it."""
    lines = told.split("\n")
    if len(lines) <= _MOST_SHOWN:
        return lines
    half = _MOST_SHOWN // 2
    gap = f"  ... {len(lines) - 2 * half:,} lines, which are in {directory}/steps.txt ..."
    return [*lines[:half], gap, *lines[-half:]]


def shown_walk(
    make_world: MakeWorld | RunMaker,
    seed: int,
    executor: Executor | None,
    *,
    text: Callable[[WalkResult], str],
    **limits: Any,
) -> WalkResult:
    """Run `walk`, with a line of progress on standard error if that is a terminal.

    executor: None: work in this process. text: formats the line. limits: passed to `walk`.
    """
    if not sys.stderr.isatty():
        return walk(make_world, seed, executor=executor, **limits)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    live = Live(console=Console(stderr=True), refresh_per_second=5, transient=True)

    def show(result: WalkResult) -> None:
        # Not before the first result: `start` starts a thread, and a process forked beside a thread may hang.
        live.start()
        live.update(Text(f"{text(result)}{told_workers(executor)}"))

    try:
        return walk(make_world, seed, executor=executor, progress=show, **limits)
    finally:
        live.stop()


def shown_search(
    make_world: Callable[[], World],
    alphabet: Mapping[Action, str],
    most: int,
    executor: Executor | None,
    is_over: IsOver,
) -> Iterator[tuple[ScheduleCounts, WalkFailure | None]]:
    """Run `search`, with a line of progress as in `shown_walk`. alphabet: actions, each with its actor."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # Refreshed by hand: processes are forked for each length, and must not be forked beside a thread.
    live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
    shown = 0.0
    with live if sys.stderr.isatty() else nullcontext():
        for counts, failure in search(
            make_world, list(alphabet), alphabet.__getitem__, most, executor, is_over
        ):
            if live.is_started and counts.seconds - shown >= _REFRESH_SECONDS:
                shown = counts.seconds
                line = (
                    f"{counts.schedules:,} schedules of at most {counts.length} actions, "
                    f"{counts.skipped:,} like shorter ones, {counts.seconds:.0f} s{told_workers(executor)}"
                )
                live.update(Text(line), refresh=True)
            yield counts, failure
