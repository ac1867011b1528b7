"""A file beside the segments of a log that records which signal asked the writing process to end.

An engine may be killed a moment after it was asked to end: vLLM does so unless `--shutdown-timeout` is set.
Its log is then not closed, as after an out-of-memory kill. This mark distinguishes the two.

Python's C signal handler writes the number of each handled signal to a file descriptor at once
(`signal.set_wakeup_fd`). `StopMark` sets it to a file whose bytes are already allocated. So the mark runs no
Python code, needs no memory and no disk space, works beside the engine's own handlers, and costs nothing
until a signal comes. A kill leaves the byte either written or not.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from kvsm.system.private_files import give_to_group

NAME = "signals"
"""Name of the file in the directory of a log. Each life of the log begins without it."""

_STOPS = (signal.SIGTERM, signal.SIGINT)
_ROOM = 16
"""How many signals are recorded. Readers use the first one that asks for the end."""

_STOPPED = "the process was stopped by "


class StopMark:
    """Records the signals of this process in the directory of its log, until `close`. Its children do not.

    A process has one such file. `share` links it into the directory of another log of this process.

    It does nothing outside the main thread, if the process already has a wakeup descriptor (as with
    `asyncio`), or if the file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._paths, self._descriptor, self._pid = [directory / NAME], -1, os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError):
            descriptor = os.open(self._paths[0], flags, 0o600)
            if _record_signals(descriptor):
                self._descriptor = descriptor
                os.register_at_fork(after_in_child=self.close)
            else:
                os.close(descriptor)
                self._paths[0].unlink()

    def share(self, directory: Path) -> None:
        """Record signals in this directory too. Does nothing if it is on another file system."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.link(self._paths[0], directory / NAME, follow_symlinks=False)
                self._paths.append(directory / NAME)

    def close(self) -> None:
        """Stop recording signals, and delete the mark. Idempotent. Does nothing outside the main thread."""
        if self._descriptor < 0:
            return
        try:
            now = signal.set_wakeup_fd(-1)
        except ValueError:
            return
        if now != self._descriptor:
            signal.set_wakeup_fd(now)
        os.close(self._descriptor)
        self._descriptor = -1
        for path in self._paths if os.getpid() == self._pid else ():
            with suppress(OSError):
                path.unlink()


def _record_signals(descriptor: int) -> bool:
    """Let the interpreter write signal numbers to this new file. Returns whether that worked."""
    try:
        give_to_group(descriptor)
        os.pwrite(descriptor, bytes(_ROOM), 0)
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return False
    if before >= 0:
        signal.set_wakeup_fd(before)
    return before < 0


def stopped_by(directory: Path) -> str:
    """Return the name of the signal that asked this log's last process to end; empty if none is recorded."""
    with suppress(OSError):
        descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            numbers = os.pread(descriptor, _ROOM, 0)
        finally:
            os.close(descriptor)
        return next((signal.Signals(number).name for number in numbers if number in _STOPS), "")
    return ""


def told_stop(name: str) -> str:
    """Return the text of `Restarted.ended` for a process that got this signal and did not close its log."""
    return f"{_STOPPED}{name}, and killed before it closed the log"


def stop_notice(name: str) -> str:
    """Return the message of a live reader about a process that got this signal. It may still run."""
    return f"the engine got {name}, and may have been killed"


def is_stop(ended: str) -> bool:
    """Whether this text of `Restarted.ended` was made by `told_stop`."""
    return ended.startswith(_STOPPED)
