"""Identifies a process of this machine, and finds out whether it has ended.

A process id alone does not identify a process, because the system reuses it. Its start time makes it unique.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path
from time import monotonic

import msgspec

_PROCESSES = Path("/proc")

_START_FIELD = 19
"""Index of the start time among the fields of `/proc/PID/stat` that follow the name."""


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """A process, identified uniquely until the next reboot.

    pid: its process id.
    started: its start time, in clock ticks since the boot.
    namespace: the inode of the pid namespace in which `pid` is valid.
    """

    pid: int
    started: int
    namespace: int

    @classmethod
    def own(cls) -> ProcessName:
        """Return the name of this process. Raises `OSError` if `/proc` cannot be read."""
        return cls(os.getpid(), _started(os.getpid()), _own_namespace())

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether no thread of the process is left, so that its files and its memory are closed.

        timeout_s: how long to wait for the end (s).

        A process of another pid namespace cannot be seen from here, and counts as ended. Raises `OSError`.
        """
        if self.namespace != _own_namespace():
            return True
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # Check the start time only now: the descriptor keeps this process's id from being reused.
            if _started(self.pid) != self.started:
                return True
            # Readable once every thread has ended, not already when only the main thread has.
            poll = select.poll()
            poll.register(process, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        except FileNotFoundError:
            return True
        finally:
            os.close(process)

    def __str__(self) -> str:
        with suppress(OSError):
            return f"process {self.pid} ({(_PROCESSES / str(self.pid) / 'comm').read_text().strip()})"
        return f"process {self.pid}"


def wait_for_end(processes: list[ProcessName], timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds. Returns whether all processes have ended. Raises `OSError`."""
    deadline = monotonic() + timeout_s
    return all(process.ended(max(0.0, deadline - monotonic())) for process in processes)


def boot_id() -> str:
    """Return the id of the current boot, which changes with each reboot. Raises `OSError`."""
    return (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int:
    # The process name is in parentheses, and may itself contain parentheses and spaces.
    fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[_START_FIELD])


def _own_namespace() -> int:
    return os.stat(_PROCESSES / "self/ns/pid").st_ino
