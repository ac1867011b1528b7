"""The directory of a log: accessible to its owner only, with a durable name, and locked by the writer."""

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
"""Error numbers by which a file system says that it cannot lock a directory."""


INDEX_NAME, LOCK_NAME = "index.sqlite", "index.lock"
"""Files that commands keep beside a large log: its index, and the lock of those that write it."""

WHAT_TO_DO = "make room there or make it writable, or name another directory"
"""Advice for error messages when a system call for the log fails."""


class LogDirectory:
    """A directory locked for one writer until `close`. Other writers are refused.

    directory: made if absent, accessible to its owner only.
    durable: whether to sync the parent directories, which hold its name.

    The kernel releases the lock whenever the process dies. Some network file systems cannot lock directories.
    There a new log can be written, but no log can be continued; `why_unlocked` gives the reason.
    `spent`: whether a writer has begun here, or `close` was called; then no other writer may begin.

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
        """Raise `LogError` if anything is in the directory: a new log needs one of its own.

        leftovers: whether files that a dead writer left (`leftovers`) are allowed.
        """
        try:
            expected = self.leftovers() if leftovers else []
            found = next((path for path in sorted(self.path.iterdir()) if path not in expected), None)
        except OSError as error:
            raise LogError(f"{self.path}: no log can be started: {error}; {WHAT_TO_DO}") from error
        if found is not None:
            is_log = found.suffix == ".kvsm"
            what = "holds a log already" if is_log else f"is not empty (it holds {found.name})"
            raise LogError(f"{self.path}: {what}; each run writes to a new directory of its own")

    def leftovers(self) -> list[Path]:
        """Return the files that a dead writer left beside its segments: unpublished segments, and its mark of
        signals. The next writer deletes them. Raises `OSError`."""
        pattern = f"[0-9]{{20}}[.]new|{NAME}"
        return [path for path in sorted(self.path.iterdir()) if re.fullmatch(pattern, path.name)]

    def index_files(self) -> list[Path]:
        """Return the files of the index that commands keep beside the log. Raises `OSError`."""
        return [path for path in sorted(self.path.iterdir()) if path.name.startswith((INDEX_NAME, LOCK_NAME))]

    def hold(self) -> None:
        """Make and lock the directory again if it was deleted or moved. Raises `OSError`."""
        make_private(self.path)
        if not self._locks or not self._locks[-1].holds(self.path):
            self._lock()

    def close(self) -> None:
        """Release the lock, so that another writer can take it. Idempotent."""
        self.spent = True
        for lock in self._locks:
            lock.close()

    def _lock(self) -> None:
        try:
            # Keep an older lock: the directory that was moved away still has our newest segment.
            self._locks.append(DirectoryLock(self.path))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.why_unlocked = f"its file system has no locks for directories ({error})"


def make_private(directory: Path) -> list[Path]:
    """Make the directory and its missing parents, accessible to their owner only. Returns those made."""
    path = directory.absolute()
    missing = list(takewhile(lambda parent: not parent.exists(), (path, *path.parents)))
    for parent in reversed(missing):
        with suppress(FileExistsError):
            make_directory(parent)
    return missing


def _sync_names(directory: Path, made: list[Path]) -> None:
    for path in made:
        sync_directory(path.parent)
    if not made:
        # Another process may have just made it. We may lack access to the parent; then that process syncs it.
        with suppress(OSError):
            sync_directory(directory.absolute().parent)
