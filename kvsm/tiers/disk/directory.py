"""The directory in which an engine keeps its disk tier, and the names of the files in it."""

from __future__ import annotations

from pathlib import Path

from kvsm.system.private_files import private_directory


class TierDirectory:
    """The files of one engine's disk tier.

        directory/engine0-rank0     slots of rank 0, written by its worker
        directory/engine0.era       what counts of the slots, by the scheduler
        directory/engine0.log       which log tells what was stored, by the scheduler

    directory: its parents must exist.
    engine: the beginning of each name. Engines of other names may share the directory.
    """

    def __init__(self, directory: Path, engine: str) -> None:
        self._directory, self._engine = directory, engine

    def make(self) -> None:
        """Make the directory, or take one that only this user can write in. Raises `UnusableFiles`."""
        private_directory(self._directory)

    def slots(self, rank: int) -> Path:
        """The file of slots of a rank."""
        return self._file(f"-rank{rank}")

    @property
    def era(self) -> Path:
        """The file of the era."""
        return self._file(".era")

    @property
    def log_note(self) -> Path:
        """The file that names the log of the process that has stored last."""
        return self._file(".log")

    @property
    def name(self) -> str:
        """What people are told of."""
        return f"the disk tier in {self._directory}"

    def _file(self, end: str) -> Path:
        return self._directory / f"{self._engine}{end}"
