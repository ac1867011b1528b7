"""Other processes of this machine: which one it was, and whether it has ended.

A process id alone is no name, because the system uses it again. With the time of its start it is one.
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
"""Of the fields of `/proc/PID/stat` that follow the name."""


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """Which process it is.

    pid: its id.
    started: when it started, in clock ticks since the boot.
    namespace: the number of the pid namespace in which `pid` counts.
    """

    pid: int
    started: int
    namespace: int

    @classmethod
    def own(cls) -> ProcessName:
        """This process. Raises `OSError` if the system does not tell."""
        return cls(os.getpid(), _started(os.getpid()), _own_namespace())

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether no thread of the process is left, so that its files and its memory are closed.

        timeout_s: how long to wait for that (s).
        A process of another pid namespace cannot be seen from here; it counts as ended. Raises `OSError`.
        """
        if self.namespace != _own_namespace():
            return True
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            # The descriptor holds the process that has the id now. So the look at its start comes after.
            if _started(self.pid) != self.started:
                return True
            # Readable once every thread has gone through its end, and not when the first thread alone has.
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
    """Whether all of these have ended, after at most `timeout_s` seconds. Raises `OSError`."""
    deadline = monotonic() + timeout_s
    return all(process.ended(max(0.0, deadline - monotonic())) for process in processes)


def boot_id() -> str:
    """A name of this run of the system; another one after each reboot. Raises `OSError`."""
    return (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int:
    # The name is in brackets, and may hold brackets and blanks itself.
    fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[_START_FIELD])


def _own_namespace() -> int:
    return os.stat(_PROCESSES / "self/ns/pid").st_ino
