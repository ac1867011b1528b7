"""The directory of a log: made for its owner alone, empty at the start, and durable by name."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from kvsm.errors import LogError


def claim(directory: Path, durable: bool) -> None:
    """Make the directory, which must be empty: two lives of the core never share one.

    durable: sync the directories that hold its name.

    Raises `LogError` if it cannot be used.
    """
    try:
        made = make_private(directory)
        if durable:
            _sync_names(directory, made)
        mode = directory.stat().st_mode
        found = next(iter(sorted(directory.iterdir())), None)
    except (FileExistsError, NotADirectoryError) as error:
        raise LogError(f"{directory}: a log is a directory, and a file stands here: {error}") from error
    except OSError as error:
        raise LogError(f"{directory}: no log can be started: {error}") from error
    if found is not None:
        what = "holds a log already" if found.suffix == ".kvsm" else f"is not empty (it holds {found.name})"
        raise LogError(f"{directory}: {what}; each run writes to a new directory of its own")
    if mode & stat.S_IWOTH:
        raise LogError(
            f"{directory}: every user may write here (mode {stat.S_IMODE(mode):o}), and could replace a log. "
            f"Name a directory that does not exist yet, or forbid it with chmod o-w"
        )


def make_private(directory: Path) -> list[Path]:
    """Make the directory and the parents that it lacks, for their owner alone. Returns what was made."""
    path = directory.absolute()
    missing = list(takewhile(lambda one: not one.exists(), (path, *path.parents)))
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    return missing


def sync_directory(directory: Path) -> None:
    """Make the names in it durable: without its name a synced file is lost."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(directory: Path, made: list[Path]) -> None:
    for one in made:
        sync_directory(one.parent)
    if not made:
        # Somebody may have made it a moment ago. But its parent may be closed to us, and then that is theirs.
        with suppress(OSError):
            sync_directory(directory.absolute().parent)
