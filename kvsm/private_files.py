"""Files that only their user can touch: how kvsm makes them, and what it refuses to open.

A host pool holds what people wrote to a model. So a user who can put a file, a link or a pipe under the
pool's name must neither read the bytes nor choose what kvsm reads. Every file is made with `O_EXCL` and mode
0600, and nothing follows a symbolic link. A file that exists is looked at *after* it is open, because a name
may change its meaning between a look and an open:

=============================  ==================================================
what is found under the name   why it is refused
=============================  ==================================================
a symbolic link                its maker chooses what is opened
a pipe, a device, a directory  it holds no bytes of ours, and may block
another user's file            that user can read it
a file that others can touch   they can read it, or could when they opened it
a file with a second name      the other name may be somebody's important file
=============================  ==================================================

`open_private` does not judge the directory. Another user who can write in it can take the name away, or put
something there that is refused. Then kvsm does not start. That user reads and changes none of its bytes.
`private_directory` does judge: it is for files by which processes of one user find each other.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvsm.errors import ConfigError

_MODE, _DIRECTORY_MODE = 0o600, 0o700

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_EXISTING = os.O_NONBLOCK | os.O_NOCTTY  # a pipe does not block, and a terminal stays nobody's

_TRIES = 100
"""How often a file may go between two calls. Each time somebody else has just removed it."""


def open_private(path: Path, purpose: str) -> tuple[int, bool]:
    """Open a private file for reading and writing, and make it if it is missing.

    path: its name.
    purpose: what it is for, as in "a host pool"; for errors.
    Returns the descriptor, and whether this call made the file. Raises `ConfigError`.
    """
    try:
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, _MODE), True
            with suppress(FileNotFoundError):  # it went between the two calls
                return _open_existing(path, purpose), False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened for {purpose}: {error.strerror}") from error
    raise ConfigError(f"{path}: comes and goes while it is opened for {purpose}; give another path")


def open_private_to_read(path: Path, purpose: str) -> int:
    """Open a private file that exists, for reading alone. Returns the descriptor. Raises `ConfigError`."""
    try:
        return _open_existing(path, purpose, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened for {purpose}: {error.strerror}") from error


def private_directory(path: Path) -> None:
    """Make this directory, mode 0700, or take the one that is there if only this user can write in it.

    Its parents must exist; they are not judged. Raises `ConfigError`.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=_DIRECTORY_MODE)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be used as a directory: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path}: is no directory (links are not followed); give another path")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; give "
            "another directory"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"{path}: can be written by other users (its mode is {stat.S_IMODE(found.st_mode):04o}); give "
            "another directory, or take these rights away"
        )


def _open_existing(path: Path, purpose: str, access: int = os.O_RDWR) -> int:
    if path.is_symlink():
        raise ConfigError(f"{path}: is a symbolic link, and kvsm follows none; give the path of the file")
    descriptor = os.open(path, access | _FLAGS | _EXISTING)
    reason = why_not_private(os.fstat(descriptor))
    if reason is not None:
        os.close(descriptor)
        raise ConfigError(
            f"{path}: {reason}, so it cannot be {purpose}; give another path, or remove the file"
        )
    return descriptor


def why_not_private(found: os.stat_result) -> str | None:
    """Why this is no private file of this user; None if it is one."""
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"can be touched by other users (its mode is {stat.S_IMODE(found.st_mode):04o})"
    if found.st_nlink > 1:
        return f"has {found.st_nlink} names (hard links)"
    return None


def read_trusted(path: Path, most_bytes: int) -> bytes:
    """Read a file that only this user or root can write. Links are followed.

    most_bytes: the size from which on it is refused (bytes).
    Raises `ConfigError` for any other file, and `OSError`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | _EXISTING), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: is no regular file")
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise ConfigError(f"{path}: can be written by other users")
        if found.st_size >= most_bytes:
            raise ConfigError(f"{path}: has {found.st_size:,} bytes; it must have less than {most_bytes:,}")
        return file.read(most_bytes)


def names(path: Path, descriptor: int) -> bool:
    """Whether this path is still a name of that open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def remove_own(path: Path, descriptor: int) -> None:
    """Remove the file if the path still names it: by now it may name a file of somebody else."""
    with suppress(FileNotFoundError):
        if names(path, descriptor):
            path.unlink()


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Put a private file with this content under the name, or leave what is there. Raises `OSError`.

    durable: whether it survives a power loss once this has returned.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(beside, path)
        if durable:
            sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in it durable: without its name a synced file is lost. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
