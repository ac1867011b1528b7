"""What the disk of one rank may hold after a kill or a power loss: its writes and flushes, as they came.

Of what was written since the last flush, a disk keeps any sectors of 512 bytes. Of one sector it keeps any of
the versions that were written. A killed process loses nothing that was written.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

SECTOR = 512
MOST_VERSIONS = 4
"""How many versions of a sector are remembered, beside the one that was flushed."""
MOST_MOMENTS = 8
"""How far back in time the process may have ended, in calls."""

Versions = dict[int, tuple[bytes, ...]]
"""Offset of a sector -> what it may hold: as it was at the last flush, and what was written since."""


class Moment(NamedTuple):
    """The disk behind a call of the system.

    written: all that was written. flushed: what a power loss leaves at least.
    begun: how many stores had begun on this rank. told: slot -> key and transfer, of
    stores that were told to be good.
    """

    written: bytes
    flushed: bytes
    versions: Versions
    begun: int
    told: dict[int, tuple[int, int]]

    def after_kill(self) -> bytes:
        """The file if the process is killed now."""
        return self.written

    def after_power_loss(self, random: Random) -> bytes:
        """A file that a power loss may leave now."""
        data, whole = bytearray(self.flushed), random.random() < 0.5
        share = random.random()
        for at, versions in sorted(self.versions.items()):
            kept = random.choice(versions) if not whole else versions[-1 if random.random() < share else 0]
            data[at : at + SECTOR] = kept
        return bytes(data)


class DiskHistory:
    """The calls on one file. inode: which file. begun, told: as in `Moment`, set by the world."""

    def __init__(self, inode: int, content: bytes) -> None:
        self.inode = inode
        self.begun = 0
        self.told: dict[int, tuple[int, int]] = {}
        self.moments: deque[Moment] = deque(maxlen=MOST_MOMENTS)
        self.replace(content)

    def replace(self, content: bytes) -> None:
        """The file has this content now, and all of it is on disk. What was before cannot come back."""
        self._written, self._flushed = bytearray(content), bytearray(content)
        self._versions: Versions = {}
        self.forget()

    def forget(self) -> None:
        """The process has come this far: no earlier moment is the last one."""
        self.moments.clear()
        self.note()

    def grow(self, size: int) -> None:
        """The file has at least this size: what is new reads as zeros, also after a power loss."""
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
