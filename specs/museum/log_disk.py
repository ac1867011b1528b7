"""A disk for the files of a log: writes and syncs may fail, and a power loss takes what was not synced.

The files are real, and a reader of the same machine sees all that was written. Beside them stands what is on
the disk. A sync that fails leaves of each page any version since the last good one. From then on the system
takes the page for clean: the next sync is good, and proves nothing of it. That is how Linux behaves.
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
"""Bytes that reach the disk together. Smaller than a page of memory, so that short files have many."""

_pwrite, _fdatasync, _ftruncate = os.pwrite, os.fdatasync, os.ftruncate


class _OnDisk:
    """What the disk has of one file.

    durable: by page, what a power loss leaves of a page that is clean.
    dirty: by page, what it may leave of the others: as it was, and each version that was written since.
    sizes: what it may leave as the size.
    """

    def __init__(self) -> None:
        self.durable: dict[int, bytes] = {}
        self.dirty: dict[int, list[bytes]] = {}
        self.sizes = [0]

    def write(self, content: bytes, start: int, stop: int) -> None:
        """The bytes from start to stop have changed. content: the whole file, after that."""
        for page in range(start // PAGE, -(-stop // PAGE)):
            versions = self.dirty.setdefault(page, [self.durable.get(page, b"")])
            versions.append(content[page * PAGE : (page + 1) * PAGE])
        self.sizes.append(len(content))

    def sync(self, content: bytes) -> None:
        """All dirty pages reach the disk."""
        for page in self.dirty:
            self.durable[page] = content[page * PAGE : (page + 1) * PAGE]
        self.dirty, self.sizes = {}, [len(content)]

    def drop(self, random: Random) -> None:
        """The same, and it fails."""
        for page, versions in self.dirty.items():
            self.durable[page] = random.choice(versions)
        self.dirty, self.sizes = {}, [random.choice(self.sizes)]

    def after_power_loss(self, random: Random) -> bytes:
        """The file."""
        share = random.choice((0.0, 0.5, 1.0))
        size = self.sizes[-1] if random.random() < share else random.choice(self.sizes)
        pages = dict(self.durable)
        for page, versions in sorted(self.dirty.items()):
            pages[page] = versions[-1] if random.random() < share else random.choice(versions)
        count = -(-size // PAGE)
        return b"".join(pages.get(page, b"").ljust(PAGE, b"\0") for page in range(count))[:size]


class LogDisk:
    """The disk of a log directory. A fault is armed, and the next call of its kind fails.

    failed: how many calls have failed.
    """

    def __init__(self) -> None:
        self._files: dict[int, _OnDisk] = {}
        self._faults: dict[str, Random] = {}
        self.failed = 0

    def arm(self, call: str, which: int) -> None:
        """Let the next call fail: "write", which may write a part, or "sync", which drops pages."""
        self._faults[call] = Random(which)

    def forget_faults(self) -> None:
        """Nothing is armed any more."""
        self._faults.clear()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The calls of the system go to this disk."""
        calls: dict[str, Any] = {"pwrite": self._write, "fdatasync": self._sync, "ftruncate": self._cut}
        with patch.multiple(os, **calls):
            yield

    def lose_power(self, directory: Path, random: Random) -> None:
        """Leave of the log what a power loss may leave. Its names stay. Nobody may have the files open."""
        self._faults.clear()
        for path in sorted(directory.iterdir()):
            file = self._files.get(path.stat().st_ino)
            if file is None:
                continue
            content = file.after_power_loss(random)
            path.write_bytes(content)
            file.write(content, 0, len(content))
            file.sync(content)

    # In place of the calls of the system.

    def _write(self, descriptor: int, data: bytes, offset: int) -> int:
        number = os.fstat(descriptor).st_ino
        if offset == 0:  # a new file, perhaps with the number of one that was deleted
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
    # The writer has opened it for writing alone.
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()
