"""The directory of an engine's disk tier, and the names of its files."""

from __future__ import annotations

from pathlib import Path

from kvsm.system.private_files import private_directory


class TierDirectory:
    """The files of one engine's disk tier.

        directory/engine0-rank0     slots of rank 0, written by its worker
        directory/engine0.era       which slots are valid, written by the scheduler
        directory/engine0.log       which log recorded the stores, written by the scheduler

    directory: the path; its parents must exist.
    engine: prefix of all file names. Engines with other prefixes may share the directory.
    """

    def __init__(self, directory: Path, engine: str) -> None:
        self._directory, self._engine = directory, engine

    def make(self) -> None:
        """Create the directory, or accept one that only this user can write in. Raises `UnusableFiles`."""
        private_directory(self._directory)

    def slots(self, rank: int) -> Path:
        """Return the path of a rank's file of slots."""
        return self._file(f"-rank{rank}")

    @property
    def era(self) -> Path:
        """The path of the era file."""
        return self._file(".era")

    @property
    def log_note(self) -> Path:
        """The path of the file that names the log of the last process that stored."""
        return self._file(".log")

    @property
    def name(self) -> str:
        """The name of the disk tier, for messages."""
        return f"the disk tier in {self._directory}"

    def _file(self, end: str) -> Path:
        return self._directory / f"{self._engine}{end}"
