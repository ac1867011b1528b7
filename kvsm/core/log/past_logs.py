"""The event logs in one directory, and a limit on the bytes of past logs, which no engine continues.

Each start of an engine with `event_log` writes a new log, and each cold start on a persistent pool renames
the old log. Both are past logs, recognized by the time in their names. A log with another name may be needed
by the next start of an engine, so it is never deleted here. Nor is a log that a process is writing.
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
"""The default limit on the bytes of all past logs beside a persistent pool."""

_PAST = re.compile(r"[0-9]{8}T[0-9]{6}Z-engine.+|.+-until-[0-9]{8}T[0-9]{6}Z([.][0-9]+)?")


class ListedLog(NamedTuple):
    """A log in a directory.

    bytes: size of its segments.
    written_ns: Unix time of the last write to it (ns).
    is_past: whether it is a past log, by its name.
    is_written: whether a process writes it now. A log of another user counts as written.
    """

    path: Path
    bytes: int
    written_ns: int
    is_past: bool
    is_written: bool


def logs_in(directory: str | os.PathLike[str]) -> list[ListedLog]:
    """Return the logs in a directory, ordered by their last write.

    Raises `ConfigError` if it cannot be listed.
    """
    try:
        paths = [path for path in Path(directory).iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be listed: {error.strerror}") from error
    found = [listed for path in paths if (listed := _listed(path)) is not None]
    return sorted(found, key=lambda log: (log.written_ns, log.path))


def delete_past_logs(directory: str | os.PathLike[str], max_bytes: int) -> list[Path]:
    """Delete past logs, oldest first, until the remaining ones have at most `max_bytes` together.

    Returns the deleted logs. Logs that cannot be deleted are skipped. Raises `ConfigError` if the
    directory cannot be listed.
    """
    past = [log for log in logs_in(directory) if log.is_past and not log.is_written]
    total, deleted = sum(log.bytes for log in past), []
    for log in past:
        if total <= max_bytes:
            break
        if _delete(log.path):
            total -= log.bytes
            deleted.append(log.path)
    return deleted


def _listed(path: Path) -> ListedLog | None:
    """Describe the log in this directory; None if there is none."""
    try:
        stats = [segment.lstat() for segment in segment_paths(path)]
        user = path.lstat().st_uid
    except (LogError, OSError):
        return None
    if not stats:
        return None
    written_ns = max(stat.st_mtime_ns for stat in stats)
    is_past = _PAST.fullmatch(path.name) is not None
    is_written = user != os.geteuid() or _is_written(path)
    return ListedLog(path, sum(stat.st_size for stat in stats), written_ns, is_past, is_written)


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
        # The index names clients, as the log does.
        for file in [*claimed.index_files(), *segment_paths(path), *claimed.leftovers()]:
            file.unlink(missing_ok=True)
    except (LogError, OSError):
        return False
    finally:
        claimed.close()
    with suppress(OSError):  # The directory may contain another file.
        path.rmdir()
    return True
