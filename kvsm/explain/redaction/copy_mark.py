"""A file in each redacted copy of a log, by which readers know that they must not write there."""

from __future__ import annotations

from pathlib import Path

from kvsm.system.private_files import write_whole

NAME = "REDACTED"
"""Name of the file in the directory of the copy."""

_TEXT = (
    "This is a redacted copy of a log of kvsm. Commands that read it write nothing here.\n"
    "Delete this file to let them keep an index (index.sqlite) of a large log.\n"
)


def mark_copy(directory: Path) -> None:
    """Mark a directory as a redacted copy. Raises `OSError`."""
    write_whole(directory / NAME, _TEXT.encode())


def is_marked(directory: Path) -> bool:
    """Whether the directory is marked as a redacted copy."""
    return (directory / NAME).is_file()
