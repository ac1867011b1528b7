"""A walk that says on a terminal how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsm.checker.walk import MakeWorld, RunMaker, WalkResult, walk


def shown_walk(
    make_world: MakeWorld | RunMaker, seed: int, *, text: Callable[[WalkResult], str], **limits: Any
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
