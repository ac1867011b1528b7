"""SIGTERM as Ctrl-C: a command that a CI system or a container ends has a moment to save what it has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvsm.cli.exit_codes import ExitCode, Terminated


class EndRequest:
    """How the command is asked to end. code: of the signal that came; GOOD while none did."""

    code: ExitCode = ExitCode.GOOD


@contextmanager
def ends_with_sigterm() -> Iterator[EndRequest]:
    """SIGTERM raises `Terminated` in this block, once. Ctrl-C is left to Python."""
    ending, here = EndRequest(), os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:  # a forked process has inherited this
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif ending.code is ExitCode.GOOD:  # a second one must not end what the first one saves
            ending.code = ExitCode.TERMINATED
            raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before)
