"""Treat SIGTERM like Ctrl-C, so that a command that a CI system or a container ends can save its results."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvsm.cli.exit_codes import ExitCode, Terminated


class EndRequest:
    """Whether a signal asked the command to end. code: the exit code of that signal; GOOD before any came."""

    code: ExitCode = ExitCode.GOOD


@contextmanager
def ends_with_sigterm() -> Iterator[EndRequest]:
    """Make SIGTERM raise `Terminated` in this block, once. Ctrl-C is left to Python."""
    ending, here = EndRequest(), os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:  # a forked process has inherited this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif ending.code is ExitCode.GOOD:  # a second signal must not interrupt saving after the first
            ending.code = ExitCode.TERMINATED
            raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before)
