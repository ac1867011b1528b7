"""Which log tells what a process has stored in a disk tier: a small file beside the slots.

The process that has the files open writes it before its first store. So the next one can compare what it
finds in the slots with what was logged (`kvsm.tiers.compare_with_last_log`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvsm.tiers.disk.sealed_file import read_sealed, write_sealed

_MAGIC = b"kvsm-log"


class LogNote(msgspec.Struct, frozen=True):
    """What the next process is told.

    life: of the files, while this log was written.
    log: its directory; empty if none was kept.
    run: the id in its heads.
    flush: when stores were flushed, a `FlushPolicy`.
    """

    life: int
    log: str
    run: bytes
    flush: str

    def write(self, path: Path) -> None:
        """Put it under this name, durably. Raises `OSError`."""
        write_sealed(path, _MAGIC, self)


def read_log_note(path: Path) -> LogNote | str:
    """The note that this file has, or why it has none."""
    return read_sealed(path, _MAGIC, LogNote)
