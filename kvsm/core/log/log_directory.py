"""The directory of a log: made for its owner alone, durable by name, and locked by the one who writes."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from kvsm.core.log.stop_mark import NAME
from kvsm.errors import LogError
from kvsm.system.file_locks import DirectoryLock
from kvsm.system.private_files import make_directory, sync_directory

_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""How a file system says that it cannot lock a directory."""


WHAT_TO_DO = "make room there or make it writable, or name another directory"
"""If the system refuses what a log needs."""


class LogDirectory:
    """A directory that belongs to one writer, from here to `close`: every other one is refused.

    directory: made if absent, for its owner alone.
    durable: sync the directories that hold its name.

    The kernel drops the lock when the process dies, however it dies. Some network file systems have no locks
    for directories. There a new log can be written, and none can be continued: `why_unlocked` says so.
    `spent` tells that a writer has begun here, or that it was closed: no other writer may begin then.

    Raises `LogError` if the directory cannot be used. If another writer has it, the text names its process.
    """

    def __init__(self, directory: str | os.PathLike[str], durable: bool = True) -> None:
        self.path, self.spent = Path(directory), False
        self.why_unlocked: str | None = None
        self._locks: list[DirectoryLock] = []
        try:
            made = make_private(self.path)
            self._lock()
            if durable:
                _sync_names(self.path, made)
            mode = self.path.stat().st_mode
        except BlockingIOError as error:
            raise LogError(
                f"{self.path}: a log is written here: {error.strerror}; end that process, or name another "
                f"directory"
            ) from error
        except (FileExistsError, NotADirectoryError) as error:
            raise LogError(
                f"{self.path}: a log is a directory, and a file stands here: {error}; {WHAT_TO_DO}"
            ) from error
        except OSError as error:
            self.close()
            raise LogError(f"{self.path}: no log can be started: {error}; {WHAT_TO_DO}") from error
        if mode & stat.S_IWOTH:
            self.close()
            raise LogError(
                f"{self.path}: every user may write here (mode {stat.S_IMODE(mode):o}), and could replace a "
                f"log. Name a directory that does not exist yet, or forbid it with chmod o-w"
            )

    def require_empty(self, leftovers: bool = False) -> None:
        """Raises `LogError` if anything is in the directory: a new log shares it with nothing.

        leftovers: what a dead writer has left may be there.
        """
        try:
            expected = self.leftovers() if leftovers else []
            found = next((one for one in sorted(self.path.iterdir()) if one not in expected), None)
        except OSError as error:
            raise LogError(f"{self.path}: no log can be started: {error}; {WHAT_TO_DO}") from error
        if found is not None:
            is_log = found.suffix == ".kvsm"
            what = "holds a log already" if is_log else f"is not empty (it holds {found.name})"
            raise LogError(f"{self.path}: {what}; each run writes to a new directory of its own")

    def leftovers(self) -> list[Path]:
        """What a writer that died leaves beside its segments, and the next one deletes: segments that it was
        making, and its mark of signals. Raises `OSError`."""
        pattern = f"[0-9]{{20}}[.]new|{NAME}"
        return [path for path in sorted(self.path.iterdir()) if re.fullmatch(pattern, path.name)]

    def hold(self) -> None:
        """Make and lock the directory again if somebody has deleted or moved it. Raises `OSError`."""
        make_private(self.path)
        if not self._locks or not self._locks[-1].holds(self.path):
            self._lock()

    def close(self) -> None:
        """Let another writer have it. Idempotent."""
        self.spent = True
        for lock in self._locks:
            lock.close()

    def _lock(self) -> None:
        try:
            # An older lock stays: the directory that was moved away still has our newest segment.
            self._locks.append(DirectoryLock(self.path))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.why_unlocked = f"its file system has no locks for directories ({error})"


def make_private(directory: Path) -> list[Path]:
    """Make the directory and the parents that it lacks, for their owner alone. Returns what was made."""
    path = directory.absolute()
    missing = list(takewhile(lambda one: not one.exists(), (path, *path.parents)))
    for one in reversed(missing):
        with suppress(FileExistsError):
            make_directory(one)
    return missing


def _sync_names(directory: Path, made: list[Path]) -> None:
    for one in made:
        sync_directory(one.parent)
    if not made:
        # Somebody may have made it a moment ago. But its parent may be closed to us, and then that is theirs.
        with suppress(OSError):
            sync_directory(directory.absolute().parent)
