"""Shared by worlds with real files: temporary directories, and suppressed warnings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the files are kept, because a flush to a real disk takes milliseconds. None: the system's default."""
_LOGGERS = ("kvsm", "kvsm.tiers.disk")


def world_directory() -> TemporaryDirectory[str]:
    """Create the directory of one world. It is removed with the returned object."""
    return TemporaryDirectory(prefix="kvsm-world-", dir=IN_MEMORY)


def without_directory(error: Exception, directory: Path) -> str:
    """Return the text of an error without the name of a world's directory, which no other run has."""
    return str(error).replace(f"{directory}/", "")


@contextmanager
def suppressed_warnings() -> Iterator[None]:
    """Drop the warnings of kvsm: a world makes disks fail, and closes processes with copies in flight."""
    with ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield
