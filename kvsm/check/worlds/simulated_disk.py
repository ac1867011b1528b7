"""A simulated disk under real files: it loses what a disk may lose, and its calls fail on request.

    disk = SimulatedDisk()
    with disk.attached():
        ...  # real code that writes and syncs files
    disk.lose_power(directory, random)

The files are real, so all readers on the machine see every write. Beside them, `SimulatedDisk` records what
has reached the disk:

- a sync makes all earlier writes of its file durable;
- after a power loss, each sector that was written since the last sync independently holds its durable content
  or one of the later versions. So does the size of the file;
- after a failed sync, each of these sectors keeps one of its versions, and the system counts it as clean: the
  next sync succeeds without writing it. That is how Linux behaves;
- allocated room survives. So do names of files, unless the disk may lose names, too (`simulated_names.py`).

It records the calls that `SimulatedDisk.attached` replaces. If the system lacks one of them, as macOS does,
the simulated disk supplies it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from kvsm.check.worlds.simulated_names import FileNumber, SimulatedNames, number_of

SECTOR = 512
"""Bytes that reach the disk together."""
MOST_VERSIONS = 4
"""The number of versions that are kept per sector, besides the durable one."""

_pwrite, _ftruncate = os.pwrite, os.ftruncate
_open, _rename, _unlink, _fsync = os.open, os.rename, os.unlink, os.fsync
_pwritev: Callable[[int, Sequence[Any], int], int] = getattr(os, "pwritev", None) or (
    lambda descriptor, parts, offset: _pwrite(descriptor, b"".join(parts), offset)
)
_posix_fallocate: Callable[[int, int, int], None] = getattr(os, "posix_fallocate", None) or (
    lambda descriptor, offset, size: _ftruncate(descriptor, max(os.fstat(descriptor).st_size, offset + size))
)

Choice = TypeVar("Choice")


class DiskFile:
    """One file: its content, and what a power loss may leave of it."""

    def __init__(self, content: bytes = b"") -> None:
        self.replace(content)

    def replace(self, content: bytes) -> None:
        """Set the content, all of it durable."""
        self._written, self._durable = bytearray(content), bytearray(content)
        self._versions: dict[int, tuple[bytes, ...]] = {}
        """Offset of a sector that was written since the last sync -> its durable content, then later ones."""
        self._sizes = [len(content)]
        """The sizes that a power loss may leave."""

    def copy(self) -> DiskFile:
        """Return a copy that later calls do not change."""
        copied = DiskFile()
        copied._written, copied._durable = bytearray(self._written), bytearray(self._durable)
        copied._versions, copied._sizes = dict(self._versions), list(self._sizes)
        return copied

    # The calls.

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        self._written.extend(bytes(max(0, end - len(self._written))))
        self._written[offset:end] = data
        self._note(offset, end)

    def cut(self, size: int) -> None:
        """Set the size, as `ftruncate` does."""
        before = len(self._written)
        self._written = self._written[:size].ljust(size, b"\0")
        self._note(min(size, before), max(size, before))

    def allocate(self, size: int) -> None:
        """Grow the file to at least this size. The new bytes read as zeros, also after a power loss."""
        self._written.extend(bytes(max(0, size - len(self._written))))
        self._sizes = [max(size, left) for left in self._sizes]

    def sync(self) -> None:
        """Make all writes durable, except those that a failed sync has dropped."""
        for at, versions in self._versions.items():
            self._keep(at, versions[-1])
        self._versions, self._sizes = {}, [len(self._written)]

    def drop(self, random: Random) -> None:
        """Let a sync fail: each sector written since the last sync keeps a drawn version, and is clean."""
        for at, versions in self._versions.items():
            self._keep(at, random.choice(versions))
        self._versions, self._sizes = {}, [random.choice(self._sizes)]

    def _note(self, start: int, stop: int) -> None:
        """Note a change of the bytes from start to stop."""
        for at in range(start // SECTOR * SECTOR, stop, SECTOR):
            versions = self._versions.get(at) or (_sector(self._durable, at),)
            sector = _sector(self._written, at)
            if sector != versions[-1]:
                self._versions[at] = (versions[0], *versions[1:][1 - MOST_VERSIONS :], sector)
        if len(self._written) != self._sizes[-1]:
            self._sizes.append(len(self._written))

    def _keep(self, at: int, sector: bytes) -> None:
        self._durable.extend(bytes(max(0, at + SECTOR - len(self._durable))))
        self._durable[at : at + SECTOR] = sector

    # What is left.

    def after_kill(self) -> bytes:
        """Return the content that a killed process leaves: all writes."""
        return bytes(self._written)

    def after_power_loss(self, random: Random) -> bytes:
        """Draw a content that a power loss may leave now."""
        mixed, share = random.random() < 0.5, random.random()

        def left(versions: Sequence[Choice]) -> Choice:
            if mixed:
                return random.choice(versions)
            return versions[-1 if random.random() < share else 0]

        size = left(self._sizes)
        data = bytearray(self._durable)
        for at, versions in sorted(self._versions.items()):
            data.extend(bytes(max(0, at + SECTOR - len(data))))
            data[at : at + SECTOR] = left(versions)
        return bytes(data[:size].ljust(size, b"\0"))


def _sector(data: bytearray, at: int) -> bytes:
    return bytes(data[at : at + SECTOR]).ljust(SECTOR, b"\0")


class _Fault(NamedTuple):
    """A call that is to fail. skips: how many such calls succeed first. random: draws how it fails."""

    skips: int
    random: Random


class SimulatedDisk:
    """The disk of the files that are written while it is attached.

    failed: the number of calls that have failed.
    noted: called with the file after each call on it.
    loses_names: whether a power loss may take the names of files, too. Then each file must be created with
        `O_EXCL`, by an `os.open` while the disk is attached.
    """

    def __init__(
        self, noted: Callable[[DiskFile], None] = lambda _: None, *, loses_names: bool = False
    ) -> None:
        self._files: dict[FileNumber, DiskFile] = {}
        self._names: SimulatedNames[DiskFile] | None = SimulatedNames() if loses_names else None
        self._faults: dict[str, _Fault] = {}
        self._noted = noted
        self.failed = 0

    @property
    def early_deletion(self) -> str:
        """A message if a log segment was deleted while a newer one had no durable name; else empty."""
        return "" if self._names is None else self._names.early_deletion

    def file(self, path: Path) -> DiskFile | None:
        """Return the file of this name; None if there is none, or it was never written here."""
        return self._files.get(number_of(path.stat())) if path.exists() else None

    def arm(self, call: str, which: int, skips: int = 0) -> None:
        """Make a later call fail: a "write", which may write a part, but no part of a sector; a "sync", which
        drops sectors; or "any".

        skips: how many of these calls succeed first.
        """
        self._faults[call] = _Fault(skips, Random(which))

    def forget_faults(self) -> None:
        """Disarm all faults."""
        self._faults.clear()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Redirect the calls that change or sync a file to this disk."""
        calls: dict[str, Any] = {
            "pwrite": self._write,
            "pwritev": self._write_parts,
            "fdatasync": self._sync,
            "ftruncate": self._cut,
            "posix_fallocate": self._allocate,
        }
        with patch.multiple(os, create=True, **calls), self._attached_names():
            yield

    @contextmanager
    def _attached_names(self) -> Iterator[None]:
        """Redirect the calls that change or sync names, if this disk loses them."""
        if self._names is None:
            yield
            return
        calls: dict[str, Any] = {
            "open": partial(self._open, self._names),
            "rename": partial(self._rename, self._names),
            "unlink": partial(self._unlink, self._names),
            "fsync": partial(self._sync_names, self._names),
        }
        with patch.multiple(os, **calls), patch.object(Path, "unlink", _unlink_path):
            yield

    def put(self, path: Path, content: bytes) -> None:
        """Give a file that was written here this content, all of it durable. It may be open."""
        file = self.file(path)
        assert file is not None
        with path.open("r+b") as opened:
            opened.write(content)
            opened.truncate()
        file.replace(content)

    def lose_power(self, directory: Path, random: Random) -> None:
        """Give each file in the directory a content, and perhaps a name, that a power loss may leave. No file
        may be open."""
        self.forget_faults()
        if self._names is not None:
            self._lose_names(self._names, directory, random)
        for path in sorted(directory.iterdir()):
            file = self.file(path)
            if file is not None:
                self.put(path, file.after_power_loss(random))

    def _lose_names(self, names: SimulatedNames[DiskFile], directory: Path, random: Random) -> None:
        for path in sorted(directory.iterdir()):
            if self.file(path) is not None:
                _unlink(path)
        for name, file in sorted(names.lose_power(directory, random).items()):
            path = directory / name
            path.touch()
            self._files[number_of(path.stat())] = file

    # The replacements of the system calls.

    def _open(self, names: SimulatedNames[DiskFile], path: Any, flags: int, *mode: int, **others: Any) -> int:
        descriptor = _open(path, flags, *mode, **others)
        if flags & os.O_EXCL:
            self._files[number_of(os.fstat(descriptor))] = file = DiskFile()
            names.create(Path(path), file)
        return descriptor

    def _rename(self, names: SimulatedNames[DiskFile], before: Any, path: Any) -> None:
        _rename(before, path)
        names.rename(Path(before), Path(path))

    def _unlink(self, names: SimulatedNames[DiskFile], path: Any, **others: Any) -> None:
        _unlink(path, **others)
        if not others:  # With a `dir_fd`, the directory of a world that has ended is removed.
            names.delete(Path(path))

    def _sync_names(self, names: SimulatedNames[DiskFile], descriptor: int) -> None:
        _fsync(descriptor)
        names.sync(os.fstat(descriptor))

    def _write(self, descriptor: int, data: bytes, offset: int) -> int:
        middle = max(0, (offset + len(data) // 2) // SECTOR * SECTOR - offset)
        parts = [data[:middle], data[middle:]]
        return self._moved(
            descriptor, parts, offset, lambda some: _pwrite(descriptor, b"".join(some), offset)
        )

    def _write_parts(self, descriptor: int, parts: Sequence[Any], offset: int) -> int:
        return self._moved(descriptor, parts, offset, lambda some: _pwritev(descriptor, some, offset))

    def _moved(
        self, descriptor: int, parts: Sequence[Any], offset: int, write: Callable[[Sequence[Any]], int]
    ) -> int:
        """Write these parts, or only the first of them if the call is to fail."""
        file, fault = self._opened(descriptor), self._fault("write")
        if fault is not None:
            parts = parts[: fault.randrange(len(parts))]
        done = write(parts) if parts else 0
        file.write(b"".join(map(bytes, parts))[:done], offset)
        self._end(file, errno.ENOSPC if fault is not None else 0)
        return done

    def _sync(self, descriptor: int) -> None:
        file, fault = self._opened(descriptor), self._fault("sync")
        if fault is None:
            file.sync()
        else:
            file.drop(fault)
        self._end(file, errno.EIO if fault is not None else 0)

    def _cut(self, descriptor: int, size: int) -> None:
        file = self._opened(descriptor)
        _ftruncate(descriptor, size)
        file.cut(size)
        self._end(file)

    def _allocate(self, descriptor: int, offset: int, size: int) -> None:
        file = self._opened(descriptor)
        _posix_fallocate(descriptor, offset, size)
        file.allocate(offset + size)
        self._end(file)

    def _opened(self, descriptor: int) -> DiskFile:
        """Return the open file. An empty one counts as new: it may have a deleted file's inode number."""
        status = os.fstat(descriptor)
        if not status.st_size and self._names is None:
            self._files[number_of(status)] = DiskFile()
        return self._files[number_of(status)]

    def _fault(self, call: str) -> Random | None:
        """Return the source of random numbers of the fault that this call meets; None if it succeeds."""
        for name in (call, "any"):
            fault = self._faults.pop(name, None)
            if fault is not None and not fault.skips:
                return fault.random
            if fault is not None:
                self._faults[name] = fault._replace(skips=fault.skips - 1)
        return None

    def _end(self, file: DiskFile, error: int = 0) -> None:
        self._noted(file)
        if error:
            self.failed += 1
            raise OSError(error, os.strerror(error))


def _unlink_path(path: Path, missing_ok: bool = False) -> None:
    """Replace `Path.unlink`, which in Python 3.10 keeps the `os.unlink` of its import."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        if not missing_ok:
            raise
