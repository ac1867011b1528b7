"""A simulated disk for the files of a log: writes and syncs may fail, a power loss takes unsynced pages.

The files are real, and a reader on the same machine sees all writes. Beside them `LogDisk` records what has
reached the disk. After a failed sync, each dirty page holds any version since its last good sync, and the
system marks the page clean: the next sync succeeds without writing it. That is how Linux behaves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

PAGE = 512
"""Bytes that reach the disk together; smaller than a memory page, so that short files have many pages."""

_pwrite, _fdatasync, _ftruncate = os.pwrite, os.fdatasync, os.ftruncate


class _OnDisk:
    """The content of one file that has reached the disk.

    durable: page -> the content that a power loss leaves of a clean page.
    dirty: page -> the contents that it may leave of a dirty page: the durable one, then each later version.
    sizes: the file sizes that it may leave.
    """

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self.dirty: dict[int, list[bytes]] = {}
        self.sizes = [0]

    def write(self, content: bytes, start: int, stop: int) -> None:
        """Record a change of the bytes from start to stop. content: the whole file after the change."""
        for page in range(start // PAGE, -(-stop // PAGE)):
            versions = self.dirty.setdefault(page, [self.durable.get(page, b"")])
            versions.append(content[page * PAGE : (page + 1) * PAGE])
        self.sizes.append(len(content))

    def sync(self, content: bytes) -> None:
        """Record a successful sync: all dirty pages reach the disk."""
        for page in self.dirty:
            self.durable[page] = content[page * PAGE : (page + 1) * PAGE]
        self.dirty, self.sizes = {}, [len(content)]

    def drop(self, random: Random) -> None:
        """Record a failed sync: each dirty page keeps a drawn version, and is clean from now on."""
        for page, versions in self.dirty.items():
            self.durable[page] = random.choice(versions)
        self.dirty, self.sizes = {}, [random.choice(self.sizes)]

    def after_power_loss(self, random: Random) -> bytes:
        """Draw a content of the file that a power loss may leave now."""
        share = random.choice((0.0, 0.5, 1.0))
        size = self.sizes[-1] if random.random() < share else random.choice(self.sizes)
        pages = dict(self.durable)
        for page, versions in sorted(self.dirty.items()):
            pages[page] = versions[-1] if random.random() < share else random.choice(versions)
        count = -(-size // PAGE)
        return b"".join(pages.get(page, b"").ljust(PAGE, b"\0") for page in range(count))[:size]


class LogDisk:
    """The disk of a log directory. `arm` makes the next system call of a kind fail.

    failed: the number of calls that have failed.
    """

    def __init__(self) -> None:
        self._files: dict[int, _OnDisk] = {}
        self._faults: dict[str, Random] = {}
        self.failed = 0

    def arm(self, call: str, which: int) -> None:
        """Make the next `call` fail: "write", which may write a part, or "sync", which drops pages."""
        self._faults[call] = Random(which)

    def forget_faults(self) -> None:
        """Disarm all faults."""
        self._faults.clear()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Redirect `pwrite`, `fdatasync` and `ftruncate` to this disk."""
        calls: dict[str, Any] = {"pwrite": self._write, "fdatasync": self._sync, "ftruncate": self._cut}
        with patch.multiple(os, **calls):
            yield

    def lose_power(self, directory: Path, random: Random) -> None:
        """Give each file a content that a power loss may leave. File names survive. No file may be open."""
        self._faults.clear()
        for path in sorted(directory.iterdir()):
            file = self._files.get(path.stat().st_ino)
            if file is None:
                continue
            content = file.after_power_loss(random)
            path.write_bytes(content)
            file.write(content, 0, len(content))
            file.sync(content)

    # The replacements of the system calls.

    def _write(self, descriptor: int, data: bytes, offset: int) -> int:
        number = os.fstat(descriptor).st_ino
        if offset == 0:  # a new file, perhaps with the inode number of a deleted one
            self._files[number] = _OnDisk()
        fault = self._faults.pop("write", None)
        if fault is not None:
            data = data[: fault.choice((0, len(data) // 2))]
        done = _pwrite(descriptor, data, offset)
        self._files[number].write(_content(descriptor), offset, offset + done)
        if fault is not None:
            self._fail(errno.ENOSPC)
        return done

    def _sync(self, descriptor: int) -> None:
        file = self._files[os.fstat(descriptor).st_ino]
        fault = self._faults.pop("sync", None)
        if fault is not None:
            file.drop(fault)
            self._fail(errno.EIO)
        file.sync(_content(descriptor))

    def _cut(self, descriptor: int, size: int) -> None:
        before = os.fstat(descriptor).st_size
        _ftruncate(descriptor, size)
        self._files[os.fstat(descriptor).st_ino].write(_content(descriptor), size, max(before, size))

    def _fail(self, number: int) -> None:
        self.failed += 1
        raise OSError(number, os.strerror(number))


def _content(descriptor: int) -> bytes:
    # The writer's descriptor is write-only.
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()
