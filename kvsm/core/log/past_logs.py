"""The event logs of one directory, and the limit on the bytes of those that no engine continues.

Each start of an engine with `event_log` writes a new log, and each cold start on a kept pool moves the old
log aside. Both are past logs: their names say when. A log of another name may be what the next start of an
engine needs, so it is never deleted here. Nor is a log that a process writes.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log.frames import segment_paths
from kvsm.core.log.log_directory import LogDirectory
from kvsm.errors import ConfigError, LogError

PAST_LOGS_BYTES = 1 << 30
"""The most that the past logs beside a kept pool may have together, if the user does not choose."""

_PAST = re.compile(r"[0-9]{8}T[0-9]{6}Z-engine.+|.+-until-[0-9]{8}T[0-9]{6}Z([.][0-9]+)?")


class ListedLog(NamedTuple):
    """A log of a directory.

    bytes: of its segments.
    written_ns: Unix time of the last write to it (ns).
    is_past: whether no engine continues it.
    is_written: whether a process writes it now. A log of another user counts as written.
    """

    path: Path
    bytes: int
    written_ns: int
    is_past: bool
    is_written: bool


def logs_in(directory: str | os.PathLike[str]) -> list[ListedLog]:
    """The logs of a directory, the one that was written last at the end. Raises `ConfigError` if it cannot be
    listed."""
    try:
        paths = [one for one in Path(directory).iterdir() if one.is_dir() and not one.is_symlink()]
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be listed: {error.strerror}") from error
    found = [listed for path in paths if (listed := _listed(path)) is not None]
    return sorted(found, key=lambda one: (one.written_ns, one.path))


def delete_past_logs(directory: str | os.PathLike[str], max_bytes: int) -> list[Path]:
    """Delete past logs, the oldest first, until those that are left have at most `max_bytes` together.

    Returns what was deleted. What cannot be deleted is left. Raises `ConfigError` if the directory cannot be
    listed.
    """
    past = [one for one in logs_in(directory) if one.is_past and not one.is_written]
    total, deleted = sum(one.bytes for one in past), []
    for one in past:
        if total <= max_bytes:
            break
        if _delete(one.path):
            total -= one.bytes
            deleted.append(one.path)
    return deleted


def _listed(path: Path) -> ListedLog | None:
    """What the directory lists; None if it holds no log."""
    try:
        stats = [one.lstat() for one in segment_paths(path)]
        user = path.lstat().st_uid
    except (LogError, OSError):
        return None
    if not stats:
        return None
    written_ns = max(one.st_mtime_ns for one in stats)
    is_past = _PAST.fullmatch(path.name) is not None
    is_written = user != os.geteuid() or _is_written(path)
    return ListedLog(path, sum(one.st_size for one in stats), written_ns, is_past, is_written)


def _is_written(path: Path) -> bool:
    try:
        LogDirectory(path, durable=False).close()
    except LogError:
        return True
    return False


def _delete(path: Path) -> bool:
    """Delete a log that no process writes. Returns whether its segments are gone."""
    try:
        claimed = LogDirectory(path, durable=False)
    except LogError:
        return False
    try:
        for segment in [*segment_paths(path), *claimed.leftovers()]:
            segment.unlink(missing_ok=True)
    except (LogError, OSError):
        return False
    finally:
        claimed.close()
    with suppress(OSError):  # The directory may contain another file.
        path.rmdir()
    return True
