"""The locks of a pool's file. The kernel releases them when the last process with the open file has ended."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

from kvsm.errors import ConfigError
from kvsm.system.file_locks import lock_holder


def lock(descriptor: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Lock or unlock bytes of a file without waiting. Returns False if another open file has a lock on them.

    kind: `fcntl.F_WRLCK` or `fcntl.F_UNLCK`.
    length: number of bytes; 0: all bytes from `start` on.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_request(kind, start, length))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock_request(kind: int, start: int, length: int) -> bytes:
    # struct flock: kind, the origin of `start`, start, length, and a process id that must be 0.
    return struct.pack("@hhqqi0q", kind, os.SEEK_SET, start, length, 0)


def wait_for_lock(descriptor: int, path: Path, deadline: float) -> None:
    """Take the `flock` of a file. Raises `ConfigError` if another process holds it until the deadline."""
    begun = time.monotonic()
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        now = time.monotonic()
        if now >= deadline:
            raise ConfigError(
                f"{path}: {lock_holder(descriptor)} holds the lock of this host pool, and does not give it "
                f"back in {now - begun:.0f} s; end that process, give another path, or a larger "
                "lock_timeout_s"
            )
        time.sleep(0.01)


def is_free(descriptor: int, start: int = 0, length: int = 1) -> bool:
    """Whether no other open file has a lock on these bytes. length: number of bytes; 0: all bytes from
    `start` on."""
    # Query only: taking the lock for a moment could make another rank fail to take it.
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock_request(fcntl.F_WRLCK, start, length))
    return bool(struct.unpack_from("@h", answer)[0] == fcntl.F_UNLCK)
