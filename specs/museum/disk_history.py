"""Record the writes and flushes of one rank's disk, to draw what it may hold after a kill or a power loss.

After a power loss, each sector of 512 bytes independently holds its flushed content or any version that was
written since the last flush. A killed process loses nothing that was written.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

SECTOR = 512
MOST_VERSIONS = 4
"""The number of versions that are kept per sector, besides the flushed one."""
MOST_MOMENTS = 8
"""The number of recent system calls at which the process may have ended."""

Versions = dict[int, tuple[bytes, ...]]
"""Offset of a sector -> its possible contents: the flushed one first, then the versions written since."""


class Moment(NamedTuple):
    """The state of a disk after one system call.

    written: the file with all writes. flushed: the file at its last flush.
    versions: the possible contents of each sector that was written since.
    begun: number of stores that had begun on this rank.
    told: slot -> key and transfer, of stores that were reported as good.
    """

    written: bytes
    flushed: bytes
    versions: Versions
    begun: int
    told: dict[int, tuple[int, int]]

    def after_kill(self) -> bytes:
        """Return the file's content if the process is killed now."""
        return self.written

    def after_power_loss(self, random: Random) -> bytes:
        """Draw a content of the file that a power loss may leave now."""
        data, whole = bytearray(self.flushed), random.random() < 0.5
        share = random.random()
        for at, versions in sorted(self.versions.items()):
            kept = random.choice(versions) if not whole else versions[-1 if random.random() < share else 0]
            data[at : at + SECTOR] = kept
        return bytes(data)


class DiskHistory:
    """The system calls on one file.

    inode: the file's inode number. begun, told: as in `Moment`; the world sets them.
    """

    def __init__(self, inode: int, content: bytes) -> None:
        self.inode = inode
        self.begun = 0
        self.told: dict[int, tuple[int, int]] = {}
        self.moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self.replace(content)

    def replace(self, content: bytes) -> None:
        """Set the file's content, all of it flushed. Earlier content cannot come back."""
        self._written, self._flushed = bytearray(content), bytearray(content)
        self._versions: Versions = {}
        self.forget()

    def forget(self) -> None:
        """Drop the earlier moments: the process cannot have ended before now."""
        self.moments.clear()
        self.note()

    def grow(self, size: int) -> None:
        """Grow the file to at least this size. The new bytes read as zeros, also after a power loss."""
        for content in (self._written, self._flushed):
            content.extend(bytes(max(0, size - len(content))))

    def write(self, data: bytes, offset: int) -> None:
        self.grow(offset + len(data))
        for place in range(0, len(data), SECTOR):
            at, sector = offset + place, data[place : place + SECTOR]
            if self._written[at : at + SECTOR] != sector:
                old = self._versions.get(at, (bytes(self._flushed[at : at + SECTOR]),))
                self._versions[at] = (old[0], *old[1:][-MOST_VERSIONS + 1 :], sector)
                self._written[at : at + SECTOR] = sector
        self.note()

    def flush(self) -> None:
        self._flushed, self._versions = bytearray(self._written), {}
        self.note()

    def note(self) -> None:
        self.moments.append(
            Moment(
                bytes(self._written), bytes(self._flushed), dict(self._versions), self.begun, dict(self.told)
            )
        )
