"""A walk that says on a terminal how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsm.checker.schedules import ScheduleCounts, search
from kvsm.checker.walk import MakeWorld, WalkFailure, WalkResult, walk
from kvsm.worlds.world import Action, World


def shown_walk(
    make_world: MakeWorld, seed: int, *, text: Callable[[WalkResult], str], **limits: Any
) -> WalkResult:
    """`walk`, with a line on standard error while it lasts if that is a terminal.

    text: the line. limits: as `walk` takes them.
    """
    if not sys.stderr.isatty():
        return walk(make_world, seed, **limits)
    live = Live(console=Console(stderr=True), refresh_per_second=5, transient=True)

    def show(result: WalkResult) -> None:
        # Not earlier: it starts a thread, and a process forked beside a thread may hang.
        live.start()
        live.update(Text(text(result)))

    try:
        return walk(make_world, seed, progress=show, **limits)
    finally:
        live.stop()


def shown_search(
    make_world: Callable[[], World], alphabet: Mapping[Action, str], most: int, *, jobs: int
) -> Iterator[tuple[ScheduleCounts, WalkFailure | None]]:
    """`search`, with such a line. alphabet: the actions, and who takes each."""
    live = Live(console=Console(stderr=True), refresh_per_second=5, transient=True)
    try:
        for counts, failure in search(make_world, list(alphabet), alphabet.__getitem__, most, jobs=jobs):
            if sys.stderr.isatty():
                live.start()
                live.update(
                    Text(
                        f"{counts.schedules:,} schedules of at most {counts.length} actions, "
                        f"{counts.skipped:,} like shorter ones, {counts.seconds:.0f} s"
                    )
                )
            yield counts, failure
    finally:
        live.stop()
