"""File locks, which the kernel releases when their owner dies, and the process that holds a lock."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

_LOCKS = Path("/proc/locks")
"""Where the system lists held locks."""


def lock_holder(descriptor: int) -> str:
    """Describe the process that holds the `flock` of an open file; "another process" if it is unknown."""
    found = os.fstat(descriptor)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for line in _LOCKS.read_text().splitlines():
            _, kind, _, _, process, locked, *_ = line.replace("-> ", "").split()
            if (kind, locked) == ("FLOCK", file) and "->" not in line:
                with suppress(OSError):
                    return f"process {process} ({Path('/proc', process, 'comm').read_text().strip()})"
                return f"process {process}"
    return "another process"


class DirectoryLock:
    """The `flock` of a directory itself, held until `close` or until this process dies.

    Each lock has its own open file, so that even the same process cannot lock a directory twice. A forked
    child closes its copy at once: a child that outlives this process does not keep the lock.

    Raises `BlockingIOError`, whose text names the process that holds the lock, and `OSError` if the directory
    cannot be opened, or if its file system has no such locks.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _HELD.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock_holder(self._descriptor)
            self.close()
            raise BlockingIOError(errno.EWOULDBLOCK, f"{holder} holds it") from None
        except BaseException:
            self.close()
            raise

    def holds(self, path: Path) -> bool:
        """Whether this path still names the locked directory."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        return False

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            # Unlock before closing: an interrupt may prevent the close, and a copy of the descriptor in
            # another process would keep the lock.
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


_HELD: WeakSet[DirectoryLock] = WeakSet()


def _close_in_child() -> None:
    for lock in list(_HELD):
        lock._forget()  # do not unlock: the open file, and so the lock, is shared with the parent


os.register_at_fork(after_in_child=_close_in_child)
