"""One segment that is being written: its file, what is known of its bytes, and where the writer stands.

Each method may be interrupted at any line, by Ctrl-C for example. A second call then does the whole again:
all writes go to places that the caller names, so doing them twice changes nothing.
"""

from __future__ import annotations

import errno
import os
import time
from _thread import start_new_thread
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvsm.core.log.frames import MARK, MARK_OFFSET, PREAMBLE_BYTES, encode_mark, segment_path
from kvsm.events import OffloadingEvent
from kvsm.system.private_files import give_own_to_group, give_to_group, sync_directory

_AGAIN_BYTES = 1 << 20
"""How much is written again at a time."""


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    try:
        give_to_group(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class Synced(NamedTuple):
    """What a sync has made durable: the first `offset` bytes, up to event `seq`, at `at_ns` (monotonic)."""

    offset: int
    seq: int
    at_ns: int


class Loss(NamedTuple):
    """Why a segment takes no more events: those from `first` on are lost, from byte `offset` on.

    written, dropped: the writer's counts of the events before `first`.
    """

    first: int
    offset: int
    cause: OSError
    written: int
    dropped: int


class SegmentFile:
    """The file of the segment whose first event is `first`. The constructor makes no file yet: `create` does.

    It is made under another name, which also keeps a second writer out. `publish` gives it its own name: so
    readers never see a segment without a head.

    replaces: it takes the place of a segment without events, if there is one. That one is gone then, so
        `discard` leaves what has taken its place.

    size: bytes of the file; more if a write has failed or was interrupted.
    full_at: size at which the next segment is opened (bytes).
    oldest: the first event of the oldest segment that is kept beside this one.
    synced: what the last good sync made durable.
    sync_failure: the error of a failed sync, after which nobody knows what is durable.
    loss: why nothing more is written here, or None.
    marked: the loss can be seen in the file.
    deleted: somebody has deleted the file.
    name_is_durable: a power loss does not take the file's name. So nobody needs the segments before it.
    """

    def __init__(self, directory: Path, first: int, replaces: bool = False) -> None:
        self.path, self.first, self._replaces = segment_path(directory, first), first, replaces
        self.size = self.full_at = 0
        self.oldest = first
        self.synced = Synced(0, first - 1, 0)
        self.sync_failure: OSError | None = None
        self.loss: Loss | None = None
        self.marked = self.deleted = self.name_is_durable = False
        self._new = self.path.with_suffix(".new")
        self._named = False
        self._file: FileIO | None = None
        self._descriptor = -1

    def create(self) -> None:
        """Make the file, which only its owner can read. Raises `FileExistsError` if another writer has."""
        # A file object closes its descriptor even if an interrupt keeps it from being stored here.
        self._file = FileIO(self._new, "x+", opener=_open_private)
        self._descriptor = self._file.fileno()

    def reopen(self) -> None:
        """Open the file that another writer has left."""
        self._file = FileIO(self.path, "r+", opener=_open_existing)
        self._descriptor = self._file.fileno()
        give_own_to_group(self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def remove_leftover(self) -> None:
        """Delete what an interrupted attempt to make the same segment has left."""
        self._new.unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the file the name by which readers find it."""
        if not self._replaces and os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        self._named = True  # Before it is true: `discard` must find the file under either name.
        os.rename(self._new, self.path)

    def discard(self) -> None:
        """Delete the file, whatever its name is by now."""
        with suppress(OSError):
            self.close()
        if self._file is not None:
            self._new.unlink(missing_ok=True)
        if self._named and not self._replaces:
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`, where the file ends then."""
        if self.size > offset:
            self.cut(offset)
        self.size = offset + len(data)
        done = os.pwrite(self._descriptor, data, offset)
        if done < len(data):
            self._write_rest(data, offset, done)

    def read(self, size: int, offset: int) -> bytes:
        """The bytes that were written there. Any thread may call it, until the file is closed."""
        data = os.pread(self._descriptor, size, offset)
        if len(data) < size:
            raise OSError(
                errno.EIO, f"bytes that were written at {offset + len(data)} are gone", str(self.path)
            )
        return data

    def write_again(self) -> None:
        """Write all behind the preamble once more, as it is, so that the next sync proves it.

        A sync may have failed in a process that is gone. Then the system shows bytes that are not on the
        disk, and would not write them.
        """
        for offset in range(PREAMBLE_BYTES, self.size, _AGAIN_BYTES):
            self._write_rest(self.read(min(_AGAIN_BYTES, self.size - offset), offset), offset, 0)

    def mark(self, number: int) -> None:
        """Mark the segment: events from `number` on were lost, or the log is closed."""
        try:
            self._write_rest(encode_mark(number), MARK_OFFSET, 0)
        except OSError:
            with suppress(OSError):  # A part of a mark would be damage.
                self._write_rest(bytes(MARK.size), MARK_OFFSET, 0)
            raise

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def sync(self) -> None:
        """Wait until the bytes are on the disk, and the name too if there is one."""
        try:
            os.fdatasync(self._descriptor)
            self.sync_name()
        except OSError as error:
            # First of all, because a second sync may succeed and prove nothing.
            self.sync_failure = error
            raise

    def sync_to(self, seq: int) -> None:
        """The same, and note it. seq: the last event that was written."""
        synced = Synced(self.size, seq, time.monotonic_ns())
        self.sync()
        self.synced = synced

    def sync_name(self) -> None:
        """Wait until the name is on the disk, if there is one."""
        if self._named and not self.name_is_durable:
            sync_directory(self.path.parent)
            self.name_is_durable = True

    def is_deleted(self) -> bool:
        """Whether the file has lost its name: what is written to it is lost."""
        return os.fstat(self._descriptor).st_nlink == 0

    def delete(self) -> None:
        """Delete a file that is closed. Its space is given back in a thread: that takes 12 ms for 64 MiB."""
        with suppress(OSError):  # It may be gone.
            self._file = FileIO(self.path, "r", opener=_open_existing)
        self.path.unlink(missing_ok=True)
        try:
            start_new_thread(self.close, ())  # `Thread.start` would wait until it runs.
        except RuntimeError:  # The process may have no more threads.
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent: the descriptor is free even if this raises."""
        self._descriptor = -1
        if self._file is not None:
            self._file.close()

    def _write_rest(self, data: bytes, offset: int, done: int) -> None:
        while done < len(data):
            wrote = os.pwrite(self._descriptor, data[done:], offset + done)
            if wrote <= 0:
                raise OSError(errno.EIO, "the system wrote nothing, and named no error", str(self.path))
            done += wrote


class WritePlace(msgspec.Struct, frozen=True):
    """The end of the log: what is written, and what comes next.

    segment: the file.
    offset: bytes of the file that hold whole frames; the next frame goes here.
    first: the first event that is not written.
    events: the events from `first` on.
    written, dropped: counts of the events before `first`.
    """

    segment: SegmentFile
    offset: int
    first: int
    events: list[OffloadingEvent]
    written: int
    dropped: int
