"""Files that only their user can access: how kvsm creates them, and which files it refuses to open.

A host pool holds the prompts of people. So a user who can put a file, a link or a pipe under the pool's name
must neither read the bytes nor choose what kvsm reads. Every file is created with `O_EXCL` and mode 0600, and
symbolic links are not followed. An existing file is checked *after* it is open, because the name may get
another file between a check and the open:

=============================  ==================================================
what is found under the name   why it is refused
=============================  ==================================================
a symbolic link                the user who made it chooses what is opened
a pipe, a device, a directory  it holds no bytes of kvsm, and may block
another user's file            that user can read it
a file open to other users     they can read it, or may have it open already
a file with a second name      by its other name it may be an important file
=============================  ==================================================

`open_private` does not check the directory. Another user who can write in it can remove the name, or put a
file there that is refused. Then kvsm does not start, but that user reads and changes none of its bytes.
`private_directory` does check: it is for files by which processes of one user find each other.

Processes that run one after another under different user ids, such as pods with random ids, can share these
files through a group: `share_with_group` lets the members of a group read and write the files of this
process. A file of another user is then also private if it has that group, and no other user can access it. So
each member of the group is trusted as much as this user.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvsm.errors import ConfigError, UnusableFiles

_MODE, _DIRECTORY_MODE = 0o600, 0o700

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_EXISTING = os.O_NONBLOCK | os.O_NOCTTY  # do not block on a pipe, nor get a controlling terminal

HOW_TO_SHARE = "run as that user, or share the files by a group (file_group, docs/security.md)"

_TRIES = 100
"""How often to retry if a file is removed between two calls by another process."""


_shared_group: int | None = None
"""The group (gid) whose members share the files of this process; None: only this user. It belongs to the
process, as its `umask` does."""


def share_with_group(group: int | None) -> None:
    """Share all files that this process creates or opens from now on with a group. Raises `ConfigError` if
    this process is not in the group.

    group: its gid; None: only this user can access the files.
    """
    global _shared_group
    if group is not None and group not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"file_group is {group}, and this process is not in that group; name one of "
            f"{sorted({os.getegid(), *os.getgroups()})}, or add it (in a pod: fsGroup or supplementalGroups)"
        )
    _shared_group = group


def give_to_group(file: int | Path) -> None:
    """Share a file or directory that this process has just created, if `share_with_group` has set a group.
    Raises `OSError`.

    file: its descriptor; for a socket, its path in a private directory.
    """
    if _shared_group is not None:
        is_directory = stat.S_ISDIR(os.stat(file).st_mode)
        os.chown(file, -1, _shared_group)
        os.chmod(file, 0o770 if is_directory else 0o660)


def give_own_to_group(descriptor: int) -> None:
    """Share an open file that existed before, if this user owns it. Raises `OSError`."""
    if os.fstat(descriptor).st_uid == os.geteuid():
        give_to_group(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory with mode 0700, shared with the group if there is one. Raises `OSError`."""
    path.mkdir(mode=_DIRECTORY_MODE)
    if _shared_group is not None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            give_to_group(descriptor)
        finally:
            os.close(descriptor)


def _is_own(found: os.stat_result) -> bool:
    """Whether the file belongs to this user, or to the group of `share_with_group`."""
    return found.st_uid == os.geteuid() or found.st_gid == _shared_group


def _of_others(found: os.stat_result, rights: int) -> int:
    """Return the mode bits among `rights` that grant access to users outside the sharing group."""
    return found.st_mode & (rights & 0o007 if found.st_gid == _shared_group else rights)


def open_private(path: Path, purpose: str) -> tuple[int, bool]:
    """Open a private file for reading and writing, or create it.

    path: the file.
    purpose: what it is used for, such as "a host pool"; for errors.

    Returns the descriptor, and whether this call created the file. Raises `UnusableFiles`.
    """
    try:
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                return _make_private(path), True
            with suppress(FileNotFoundError):  # it was removed between the two calls
                return _open_existing(path, purpose), False
    except OSError as error:
        raise _cannot_open(path, purpose, error) from error
    raise UnusableFiles(f"{path}: comes and goes while it is opened for {purpose}; give another path")


def open_private_to_read(path: Path, purpose: str) -> int:
    """Open an existing private file read-only. Returns the descriptor. Raises `UnusableFiles`."""
    try:
        return _open_existing(path, purpose, os.O_RDONLY)
    except OSError as error:
        raise _cannot_open(path, purpose, error) from error


def _make_private(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, _MODE)
    try:
        give_to_group(descriptor)
    except BaseException:
        remove_own(path, descriptor)
        os.close(descriptor)
        raise
    return descriptor


def _cannot_open(path: Path, purpose: str, error: OSError) -> UnusableFiles:
    advice = "; give another path"
    if isinstance(error, PermissionError):
        advice = f"; make its directory writable for user {os.geteuid()}, or give another path"
        with suppress(OSError):
            owner = path.lstat().st_uid
            if owner != os.geteuid():
                advice = f"; it belongs to user {owner}, and this process runs as user {os.geteuid()}: give "
                advice += f"another path, {HOW_TO_SHARE}"
    return UnusableFiles(f"{path}: cannot be opened for {purpose}: {error.strerror}{advice}")


def private_directory(path: Path) -> None:
    """Create this directory with mode 0700, or accept an existing directory that only this user can write in.

    Its parents must exist; they are not checked. Raises `UnusableFiles`.
    """
    try:
        with suppress(FileExistsError):
            make_directory(path)
        found = path.lstat()
    except OSError as error:
        raise UnusableFiles(
            f"{path}: cannot be used as a directory: {error.strerror}; give another directory, or make its "
            f"parent one that user {os.geteuid()} can write in"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise UnusableFiles(f"{path}: is no directory (links are not followed); give another path")
    if not _is_own(found):
        raise UnusableFiles(
            f"{path}: belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; give "
            f"another directory, {HOW_TO_SHARE}"
        )
    if _of_others(found, 0o022):
        raise UnusableFiles(
            f"{path}: can be written by other users (its mode is {stat.S_IMODE(found.st_mode):04o}); give "
            "another directory, or take these rights away"
        )


def _open_existing(path: Path, purpose: str, access: int = os.O_RDWR) -> int:
    if path.is_symlink():
        raise UnusableFiles(f"{path}: is a symbolic link, and kvsm follows none; give the path of the file")
    descriptor = os.open(path, access | _FLAGS | _EXISTING)
    found = os.fstat(descriptor)
    reason = why_not_private(found)
    if reason is not None:
        os.close(descriptor)
        raise UnusableFiles(
            f"{path}: {reason}, so it cannot be {purpose}; give another path, {_what_to_do(found)}"
        )
    if access == os.O_RDWR:
        give_own_to_group(descriptor)
    return descriptor


def _what_to_do(found: os.stat_result) -> str:
    if not _is_own(found):
        return f"remove the file, {HOW_TO_SHARE}"
    if found.st_mode & 0o077 and not found.st_mode & 0o007:
        return f"remove the file, or share it with its group {found.st_gid} (file_group, docs/security.md)"
    return "or remove the file"


def why_not_private(found: os.stat_result) -> str | None:
    """Return why this is no private file of this user; None if it is one."""
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if not _is_own(found):
        return f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    if _of_others(found, 0o077):
        return f"can be touched by other users (its mode is {stat.S_IMODE(found.st_mode):04o})"
    if found.st_nlink > 1:
        return f"has {found.st_nlink} names (hard links)"
    return None


def read_trusted(path: Path, most_bytes: int) -> bytes:
    """Read a file that only this user or root can write. Links are followed.

    most_bytes: a file of this size or larger is refused.

    Raises `UnusableFiles` for any other file, and `OSError`.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | _EXISTING), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UnusableFiles(f"{path}: is no regular file")
        if not (_is_own(found) or found.st_uid == 0) or _of_others(found, 0o022):
            raise UnusableFiles(f"{path}: can be written by other users")
        if found.st_size >= most_bytes:
            raise UnusableFiles(f"{path}: has {found.st_size:,} bytes; it must have less than {most_bytes:,}")
        return file.read(most_bytes)


def names(path: Path, descriptor: int) -> bool:
    """Whether this path still names the open file `descriptor`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def remove_own(path: Path, descriptor: int) -> None:
    """Remove the open file `descriptor`, if `path` still names it and not another file."""
    with suppress(FileNotFoundError):
        if names(path, descriptor):
            path.unlink()


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a private file atomically: on an error, the old file stays unchanged. Raises `OSError`.

    durable: sync the file and its name, so that they survive a power loss after this call.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            give_to_group(descriptor)
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
    """Make the names in a directory durable: a synced file without a durable name is lost. Raises
    `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
