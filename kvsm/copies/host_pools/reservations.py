"""Memory that host pools of this machine have been promised and have not touched yet.

The system counts a page when it is touched. A host pool is mapped at once and touched over hours, so each
rank of a host would find the same memory available. Each pool is therefore noted in a small file, and a new
one is checked against the available memory, less what is promised to others. `reserved` holds a lock from
the check to the note, so two ranks that start together are checked one after the other.

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
"""The notes are here, in a directory of this user."""

_PROCESSES = Path("/proc")

WAIT_S = 30.0
"""How long to wait for the lock (s). After that a pool is checked without the others."""

LEAST_BYTES = 16 << 20
"""Smaller pools are not noted: no machine is short of so little."""

_MOST_BYTES = 1 << 12


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """A pool of a process: its mapping."""

    process: ProcessName
    address: int
    size: int

    def untouched_bytes(self) -> int:
        """How much of the mapping has no page yet; 0 if the system does not tell."""
        try:
            lines = (_PROCESSES / str(self.process.pid) / "smaps").read_text().splitlines()
        except OSError:
            return 0
        mapped = touched = 0
        is_ours = False
        for line in lines:
            head, *rest = line.split(maxsplit=1)
            if not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                is_ours = self.address <= first and last <= self.address + self.size
            elif is_ours and head == "Size:":
                mapped += int(rest[0].split()[0]) * 1024
            elif is_ours and head == "Rss:":
                touched += int(rest[0].split()[0]) * 1024
        return max(0, mapped - touched)


class Reservations(NamedTuple):
    """Memory promised to other pools, valid while the lock of `reserved` is held.

    directory: the directory of the notes. None: it cannot be used, and `note` does nothing.
    """

    directory: Path | None
    promised: tuple[Promised, ...]

    def note(self, mapping: mmap.mmap) -> None:
        """Note the memory of a pool of this process, until it is freed."""
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
    if os.getpid() == pid:  # A forked child has a copy of the mapping, and must not remove the note.
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def reserved(size: int) -> Iterator[Reservations]:
    """What other pools have been promised, for a pool of `size` bytes. Until the end of the `with` no other
    pool is made."""
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
    """What living processes have been promised. Removes the notes of those that have ended."""
    for path in sorted(directory.iterdir()):
        with suppress(ConfigError, OSError, msgspec.DecodeError):
            note = msgspec.msgpack.decode(read_trusted(path, _MOST_BYTES), type=_Note)
            if note.process.ended():
                # Processes of another pid namespace cannot be checked from here: they remove their own notes.
                if note.process.namespace == ProcessName.own().namespace:
                    path.unlink(missing_ok=True)
                continue
            untouched = note.untouched_bytes()
            if untouched:
                yield Promised(note.process.pid, untouched)
