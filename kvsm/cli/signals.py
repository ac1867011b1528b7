"""Ctrl-C and SIGTERM as a flag, so that a command can save its results before it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvsm.cli.exit_codes import ExitCode

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class EndRequest:
    """Whether a signal asked the command to end. code: the exit code of that signal; GOOD before any came."""

    code: ExitCode = ExitCode.GOOD

    def is_made(self) -> bool:
        """Whether to end after the current step."""
        return self.code is not ExitCode.GOOD


@contextmanager
def ends_between_steps() -> Iterator[EndRequest]:
    """Let Ctrl-C and SIGTERM set a flag in this block. The command looks at it between two steps.

    A Ctrl-C after that raises `KeyboardInterrupt`, for a step that hangs.
    """
    ending, here = EndRequest(), os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != here:  # a forked process has inherited this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not ending.is_made():
            ending.code = _CODES[signal.Signals(number)]
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in _CODES}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
