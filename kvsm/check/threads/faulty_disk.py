"""The calls of the system with which a scenario makes files durable: any sync may fail, once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

from kvsm.check.threads.control import control


class FaultyDisk:
    """The system calls of a disk, and which bytes of each file are durable.

    failing: the number of the sync that fails; none if there are fewer.

    Linux reports a failed write to one sync only. The lost bytes stay lost even if later syncs
    succeed, until the file is truncated before them.
    """

    def __init__(self, failing: int) -> None:
        self.failing, self.syncs, self.failed = failing, 0, 0
        self.ticks = 0
        """The time of the disk: how many syncs have begun or ended, and whatever else was noted."""
        self.good: list[tuple[int, int]] = []
        self.bad: list[tuple[int, int]] = []
        """(begin, end) of each sync that succeeded (`good`) or failed (`bad`), in ticks."""
        self.durable: dict[int, int] = {}
        """inode -> how many of the first bytes are durable."""
        self._lost: set[int] = set()

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Return the replacements of calls of `os`."""
        return {"fdatasync": self.fdatasync, "ftruncate": self.ftruncate}

    def tick(self) -> int:
        """Advance the time by one, and return it."""
        self.ticks += 1
        return self.ticks

    def fdatasync(self, descriptor: int) -> None:
        """`os.fdatasync`. What is written while it runs may be durable or not."""
        control().reach("calls fdatasync", depth=3)
        status, number, began = os.fstat(descriptor), self.syncs, self.tick()
        self.syncs += 1
        control().reach("fdatasync returns", depth=3)
        if number == self.failing:
            self.failed += 1
            self._lost.add(status.st_ino)
            self.bad.append((began, self.tick()))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.good.append((began, self.tick()))
        if status.st_ino not in self._lost:
            self.durable[status.st_ino] = max(status.st_size, self.durable.get(status.st_ino, 0))

    def ftruncate(self, descriptor: int, size: int) -> None:
        """`os.ftruncate`."""
        control().reach("calls ftruncate", depth=3)
        os.ftruncate(descriptor, size)
        file = os.fstat(descriptor).st_ino
        if size <= self.durable.get(file, 0):
            self._lost.discard(file)
            self.durable[file] = size
