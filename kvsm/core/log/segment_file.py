"""One segment that is being written: its file, how much of it is durable, and the writer's place in it.

Each method may be interrupted at any line, by Ctrl-C for example. A second call then repeats all of it: the
caller gives the offset of each write, so a repeated write changes nothing.
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

from kvsm.core.log.frames import MARK, MARK_OFFSET, PREAMBLE_BYTES, encode_mark, segment_path, succeeded_by
from kvsm.events import OffloadingEvent
from kvsm.system.private_files import give_own_to_group, give_to_group, sync_directory

_AGAIN_BYTES = 1 << 20
"""How many bytes `write_again` writes at a time."""


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
    """What a sync at `at_ns` (monotonic) has made durable: the first `offset` bytes, up to event `seq`."""

    offset: int
    seq: int
    at_ns: int


class Loss(NamedTuple):
    """Why a segment takes no more events: events from `first` on, at byte `offset`, are lost.

    written, dropped: the writer's counts of the events before `first`.
    """

    first: int
    offset: int
    cause: OSError
    written: int
    dropped: int


class UnsyncedMark(OSError):
    """A mark was written, and it is unknown whether it is on the disk."""


class SegmentFile:
    """The file of the segment whose first event is `first`. The constructor makes no file yet: `create` does.

    It is made under a temporary name, which also keeps a second writer out. `publish` renames it, so readers
    never see a segment without a head.

    replaces: whether it may replace a segment without events. After `publish` that segment is gone, so
        `discard` does not delete the new one.

    size: bytes of the file; an upper bound if a write has failed or was interrupted.
    full_at: size at which the next segment is opened (bytes).
    oldest: the first event of the oldest segment that is kept beside this one.
    synced: what the last good sync made durable.
    sync_failure: the error of a failed sync, after which it is unknown which bytes are durable; or None.
    loss: why nothing more is written here, or None.
    marked: whether the mark of the file says that events were lost.
    announced: whether the mark of the previous segment, if there is one, names this one.
    deleted: whether someone else has deleted the file.
    name_is_durable: whether the name survives a power loss. Then older segments may be deleted.
    """

    def __init__(self, directory: Path, first: int, replaces: bool = False) -> None:
        self.path, self.first, self._replaces = segment_path(directory, first), first, replaces
        self.size = self.full_at = 0
        self.oldest = first
        self.synced = Synced(0, first - 1, 0)
        self.sync_failure: OSError | None = None
        self.loss: Loss | None = None
        self.marked = self.announced = self.deleted = self.name_is_durable = False
        self._new = self.path.with_suffix(".new")
        self._named = False
        self._file: FileIO | None = None
        self._descriptor = -1

    def create(self) -> None:
        """Make the file, which only its owner can read. Raises `FileExistsError` if there is one."""
        # A file object closes its descriptor even if an interrupt keeps it from being stored here.
        self._file = FileIO(self._new, "x+", opener=_open_private)
        self._descriptor = self._file.fileno()

    def reopen(self) -> None:
        """Open the existing file of a writer that has ended."""
        self._file = FileIO(self.path, "r+", opener=_open_existing)
        self._descriptor = self._file.fileno()
        give_own_to_group(self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def remove_leftover(self) -> None:
        """Delete the file of an interrupted attempt to make this segment."""
        self._new.unlink(missing_ok=True)

    def publish(self) -> None:
        """Rename the file to the name by which readers find it."""
        if not self._replaces and os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        self._named = True  # Set before the rename, so that `discard` finds the file under either name.
        os.rename(self._new, self.path)

    def discard(self) -> None:
        """Close and delete the file, under its temporary or final name."""
        with suppress(OSError):
            self.close()
        if self._file is not None:
            self._new.unlink(missing_ok=True)
        if self._named and not self._replaces:
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`. The file is cut there first, if it is longer."""
        if self.size > offset:
            self.cut(offset)
        self.size = offset + len(data)
        done = os.pwrite(self._descriptor, data, offset)
        if done < len(data):
            self._write_rest(data, offset, done)

    def read(self, size: int, offset: int) -> bytes:
        """Read `size` bytes that were written at `offset`. Any thread may call this until `close`."""
        data = os.pread(self._descriptor, size, offset)
        if len(data) < size:
            raise OSError(
                errno.EIO, f"bytes that were written at {offset + len(data)} are gone", str(self.path)
            )
        return data

    def write_again(self) -> None:
        """Write all bytes behind the preamble again, so that the next sync really covers them.

        A sync may have failed in an earlier process. Then the page cache may hold bytes that are not on the
        disk and count as clean, so that a sync alone would not write them.
        """
        for offset in range(PREAMBLE_BYTES, self.size, _AGAIN_BYTES):
            self._write_rest(self.read(min(_AGAIN_BYTES, self.size - offset), offset), offset, 0)

    def mark(self, number: int) -> None:
        """Write the mark. number: as `encode_mark` takes it."""
        try:
            self._write_rest(encode_mark(number), MARK_OFFSET, 0)
        except OSError:
            with suppress(OSError):  # Readers take a partial mark for damage.
                self._write_rest(bytes(MARK.size), MARK_OFFSET, 0)
            raise

    def name_successor(self, first: int, syncs: bool) -> None:
        """Write a mark that names the next segment, unless this one has the mark of a loss. The file may be
        closed.

        first: the first event of the next segment, whose name is durable.
        syncs: whether to wait for the disk: a power loss may leave a part of a mark that was not synced.

        If the mark cannot be written, the file stays as it is: then readers cannot notice that the next
        segment is missing. Raises `OSError` if the mark is left partly written, and `UnsyncedMark` if a power
        loss may leave it so.
        """
        again = SegmentFile(self.path.parent, self.first)
        try:
            again.reopen()
            before = again.read(MARK.size, MARK_OFFSET)
        except OSError:
            number = None
        else:
            number = succeeded_by(first, before)
        try:
            if number is not None:
                try:
                    again._write_rest(encode_mark(number), MARK_OFFSET, 0)
                except OSError:
                    again._write_rest(before, MARK_OFFSET, 0)
                if syncs:
                    again._sync_mark()
        finally:
            with suppress(OSError):
                again.close()

    def _sync_mark(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise UnsyncedMark(*error.args) from error

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def sync(self) -> None:
        """Wait until the bytes are on the disk, and the name, if it was published."""
        try:
            os.fdatasync(self._descriptor)
            self.sync_name()
        except OSError as error:
            # Noted at once, because a second sync may succeed and prove nothing.
            self.sync_failure = error
            raise

    def sync_to(self, seq: int) -> None:
        """Sync, and note it in `synced`. seq: the last event that was written."""
        synced = Synced(self.size, seq, time.monotonic_ns())
        self.sync()
        self.synced = synced

    def is_durable_to(self, offset: int) -> bool:
        """Whether the file would survive a power loss, under its name and with all bytes up to `offset`."""
        return self.synced.offset == offset and self.name_is_durable

    def sync_name(self) -> None:
        """Wait until the name is on the disk, if it was published."""
        if self._named and not self.name_is_durable:
            sync_directory(self.path.parent)
            self.name_is_durable = True

    def is_deleted(self) -> bool:
        """Whether the file was deleted, so that what is written to it is lost."""
        return os.fstat(self._descriptor).st_nlink == 0

    def delete(self) -> None:
        """Delete a closed file. A thread frees its space, because that takes 12 ms for 64 MiB."""
        with suppress(OSError):  # The file may be gone.
            self._file = FileIO(self.path, "r", opener=_open_existing)
        self.path.unlink(missing_ok=True)
        try:
            start_new_thread(self.close, ())  # `Thread.start` would wait until it runs.
        except RuntimeError:  # The process may have no more threads.
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent. The descriptor is freed even if this raises."""
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
    """The writer's position at the end of the log.

    segment: the segment that is written.
    offset: bytes of the file that hold whole frames; the next frame goes here.
    first: number of the first event that is not written.
    events: the events from `first` on, which are not written yet.
    written, dropped: counts of the events before `first`.
    """

    segment: SegmentFile
    offset: int
    first: int
    events: list[OffloadingEvent]
    written: int
    dropped: int
