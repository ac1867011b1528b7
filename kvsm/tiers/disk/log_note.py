"""A small file beside the slots that names the log of the process that stored in them.

A process writes it before its first store. So the next process can compare the slots with that log
(`kvsm.tiers.compare_with_last_log`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvsm.tiers.disk.sealed_file import read_sealed, write_sealed

_MAGIC = b"kvsm-log"


class LogNote(msgspec.Struct, frozen=True):
    """The log of a process, for the next process.

    life: the life of the slot files while this log was written.
    log: the directory of the log; empty if there was no log.
    run: the run id in the log.
    flush: when stores were flushed: the value of a `FlushPolicy`.
    """

    life: int
    log: str
    run: bytes
    flush: str

    def write(self, path: Path) -> None:
        """Write the note to this file, durably. Raises `OSError`."""
        write_sealed(path, _MAGIC, self)


def read_log_note(path: Path) -> LogNote | str:
    """Read a note. Returns it, or the reason why it cannot be read."""
    return read_sealed(path, _MAGIC, LogNote)
