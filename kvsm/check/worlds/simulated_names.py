"""The names of files on a simulated disk: a power loss may take new names, and bring deleted files back.

Names reach the disk when their directory is synced. Of the new names and the deletions since then, a power
loss keeps the first few of each, independently of each other: POSIX does not promise that a new name is kept
if a later deletion is.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

_SEGMENT = ".kvsm"

File = TypeVar("File")
FileNumber = tuple[int, int]


def number_of(status: os.stat_result) -> FileNumber:
    """Return the number by which the system knows a file or directory."""
    return status.st_dev, status.st_ino


class _Directory(Generic[File]):
    """The names in one directory: those on the disk, and the changes since its last sync."""

    def __init__(self) -> None:
        self._durable: dict[str, File] = {}
        self._current: dict[str, File] = {}
        self._new: list[tuple[str, str, File]] = []
        """Each new name: the name that the file had before (empty for a new file), the new name, the file."""
        self._deleted: list[tuple[str, File]] = []

    def create(self, name: str, file: File) -> None:
        self._current[name] = file
        self._new.append(("", name, file))

    def rename(self, before: str, name: str) -> None:
        file = self._current.pop(before)
        self._current[name] = file
        self._new.append((before, name, file))

    def delete(self, name: str) -> None:
        self._deleted.append((name, self._current.pop(name)))

    def newer_segment(self, name: str) -> str:
        """Return the name of a newer segment that is not on the disk yet; empty if there is none."""
        segments = [given for _, given, _ in self._new if given in self._current and given > name]
        return next((segment for segment in segments if segment.endswith(_SEGMENT)), "")

    def sync(self) -> None:
        self._durable, self._new, self._deleted = dict(self._current), [], []

    def lose_power(self, random: Random) -> dict[str, File]:
        """Draw which names a power loss leaves now, and return their files. These names become durable."""
        left = dict(self._durable)
        for before, name, file in self._new[: random.randint(0, len(self._new))]:
            left.pop(before, None)
            left[name] = file
        for name, file in self._deleted[: random.randint(0, len(self._deleted))]:
            if left.get(name) is file:
                del left[name]
        self._current = left
        self.sync()
        return left


class SimulatedNames(Generic[File]):
    """The names in all directories of a simulated disk.

    early_deletion: a message if a log segment was deleted while a newer one had no durable name; else empty.
    """

    def __init__(self) -> None:
        self._directories: dict[FileNumber, _Directory[File]] = {}
        self.early_deletion = ""

    def create(self, path: Path, file: File) -> None:
        """Record that a file was created."""
        self._directories.setdefault(number_of(path.parent.stat()), _Directory()).create(path.name, file)

    def rename(self, before: Path, path: Path) -> None:
        """Record that a file was renamed within its directory."""
        directory = self._found(path.parent.stat())
        if directory is not None:
            directory.rename(before.name, path.name)

    def delete(self, path: Path) -> None:
        """Record that a file was deleted."""
        directory = self._found(path.parent.stat())
        if directory is None:
            return
        if path.suffix == _SEGMENT and (newer := directory.newer_segment(path.name)):
            self.early_deletion = f"{path.name} is deleted, but the name of {newer} is not on the disk"
        directory.delete(path.name)

    def sync(self, status: os.stat_result) -> None:
        """Record that the directory with this status was synced."""
        directory = self._found(status)
        if directory is not None:
            directory.sync()

    def lose_power(self, path: Path, random: Random) -> dict[str, File]:
        """Draw which names a power loss leaves in this directory, and return their files."""
        directory = self._found(path.stat())
        return {} if directory is None else directory.lose_power(random)

    def _found(self, status: os.stat_result) -> _Directory[File] | None:
        return self._directories.get(number_of(status))
