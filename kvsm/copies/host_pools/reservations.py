"""Reservations of memory that host pools of this machine have mapped but not touched yet.

The system counts a page as used when it is first touched. A host pool is mapped at once and touched over
hours, so each rank of a host would find the same memory available. Therefore each pool has a note in a small
file, and a new pool must fit into the available memory minus the untouched memory of the others. `reserved`
holds a lock from the check to the note, so two ranks that start at the same time are checked one after the
other.

The touched part of a pool is read from the `smaps` of its process. A note is void once its process has ended.
Pools of other users, and of processes in other pid namespaces, are not counted.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvsm.copies.host_pools.available_memory import Promised
from kvsm.copies.host_pools.pool_locks import wait_for_lock
from kvsm.errors import ConfigError
from kvsm.system.private_files import private_directory, read_trusted, write_whole
from kvsm.system.processes import ProcessName

_LOGGER = logging.getLogger("kvsm.copies")

DIRECTORY = Path("/dev/shm")
"""Where the directory of this user's notes is."""

_PROCESSES = Path("/proc")

WAIT_S = 30.0
"""How long to wait for the lock (s). After that a pool is checked without counting the others."""

LEAST_BYTES = 16 << 20
"""Smaller pools get no note, because they hardly reduce the available memory."""

_MOST_NOTE_BYTES = 1 << 12


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """The note of one pool: the process that mapped it, and the mapping (bytes)."""

    process: ProcessName
    address: int
    size: int

    def untouched_bytes(self) -> int:
        """Return how much of the mapping was never touched (bytes); 0 if it is unknown."""
        try:
            lines = (_PROCESSES / str(self.process.pid) / "smaps").read_text().splitlines()
        except OSError:
            return 0
        mapped = touched = 0
        is_in_mapping = False
        for line in lines:
            head, *rest = line.split(maxsplit=1)
            if not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                is_in_mapping = self.address <= first and last <= self.address + self.size
            elif is_in_mapping and head == "Size:":
                mapped += int(rest[0].split()[0]) * 1024
            elif is_in_mapping and head == "Rss:":
                touched += int(rest[0].split()[0]) * 1024
        return max(0, mapped - touched)


class Reservations(NamedTuple):
    """Memory promised to other pools, valid while the lock of `reserved` is held.

    directory: the directory of the notes. None: `note` does nothing, because the directory cannot be used or
        the pool is small.
    """

    directory: Path | None
    promised: tuple[Promised, ...]

    def note(self, mapping: mmap.mmap) -> None:
        """Write the note of a pool of this process. It is removed when the mapping is freed."""
        if self.directory is None:
            return
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        note = _Note(ProcessName.own(), address, len(mapping))
        path = self.directory / f"{note.process.pid}-{address:x}"
        try:
            write_whole(path, msgspec.msgpack.encode(note))
        except OSError as error:
            _LOGGER.warning("%s: a host pool cannot be noted for other ranks: %s", path, error)
            return
        weakref.finalize(mapping, _forget, path, note.process.pid)


def _forget(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the mapping, and must not remove the note
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def reserved(size: int) -> Iterator[Reservations]:
    """Lock the notes, and yield the memory promised to other pools. Inside the `with` no other pool is
    checked or noted. A `size` (bytes) below `LEAST_BYTES` takes no lock."""
    if size < LEAST_BYTES:
        yield Reservations(None, ())
        return
    descriptor = -1
    directory = DIRECTORY / f"kvsm-memory-{os.geteuid()}"
    try:
        private_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        wait_for_lock(descriptor, directory, time.monotonic() + WAIT_S)
        found = Reservations(directory, tuple(_promised(directory)))
    except (ConfigError, OSError) as error:
        _LOGGER.warning("host pools of other ranks are not counted: %s", error)
        found = Reservations(None, ())
    try:
        yield found
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _promised(directory: Path) -> Iterator[Promised]:
    """Yield the untouched memory of each pool of a live process. Removes the notes of ended processes."""
    for path in sorted(directory.iterdir()):
        with suppress(ConfigError, OSError, msgspec.DecodeError):
            note = msgspec.msgpack.decode(read_trusted(path, _MOST_NOTE_BYTES), type=_Note)
            if note.process.ended():
                # A process of another pid namespace looks ended from here; it removes its own note.
                if note.process.namespace == ProcessName.own().namespace:
                    path.unlink(missing_ok=True)
                continue
            untouched = note.untouched_bytes()
            if untouched:
                yield Promised(note.process.pid, untouched)
