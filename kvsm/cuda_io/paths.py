"""Chooses the path of a copy through the hardware: a table by direction, fragment bytes and fragment count.

Which path is fastest depends on the device, its driver and its bus. So the table is measured once for each
device and driver, and cached in a file (`kvsm copy-paths` shows it). The descriptors of a measured copy are
made before its clock starts, as for a transfer. `PathTable.default()` estimates the table from the costs of
an H200.

The table has a cell for each power of two of bytes and count, up to `MEASURED_BYTES` together. A cell ranks
all paths: if a path is unavailable or does not fit a copy, the next path in the ranking is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.system.private_files import read_trusted, write_whole


class CopyPath(Enum):
    """A way to copy many fragments. If two paths take equally long, the one listed first is preferred."""

    BATCH = "batch"
    """One `cuMemcpyBatchAsync` of all fragments."""
    RUNS = "runs"
    """A `cuMemcpyAsync` for each fragment, for drivers before CUDA 12.8."""
    PITCHED = "pitched"
    """A `cuMemcpy2DAsync` for each rectangle."""
    KERNEL = "kernel"
    """A kernel that reads or writes page-locked host memory itself."""


VERSION = 2

FRAGMENT_BYTES = tuple(1 << power for power in range(10, 22))
"""The measured fragment sizes. Smaller fragments use the cells of the smallest size."""

MEASURED_BYTES = 64 << 20
"""Most bytes of one measured copy. Beyond that, the time is proportional to the bytes on every path."""

RECTANGLE_ROWS = 16
"""Rows of the rectangles with which `PITCHED` is measured. It is only taken for rectangles with at least this
many rows."""

FEW_BYTES = 4 << 10
"""Size of the fragments with which the thread blocks of the kernel are measured."""

NEARLY_AS_FAST = 0.95
"""Share of the kernel's best rate that a smaller number of thread blocks must reach."""

KERNEL_HANDICAP = 1.1
"""Factor by which the kernel must be faster than other paths: it takes multiprocessors from compute."""

_MOST_BYTES = 1 << 20
"""Most bytes of a saved table. A table has some kilobytes."""

Ranking = tuple[CopyPath, ...]
Cells = tuple[tuple[Ranking, ...], ...]
"""cells[i][j] is for 2**j fragments of FRAGMENT_BYTES[i] bytes."""


class TableDevice(NamedTuple):
    """The device that a table is for. driver_version: the CUDA version of its driver, 12080 for 12.8."""

    name: str
    driver_version: int

    def __str__(self) -> str:
        return f"{self.name}, driver {self.driver_version}"


NOT_MEASURED = TableDevice("not measured", 0)


class ThreadBlocks(NamedTuple):
    """The most thread blocks of the copy kernel in each direction."""

    store: int
    load: int

    def by_direction(self) -> dict[Direction, int]:
        """Return direction -> most thread blocks."""
        return {Direction.STORE: self.store, Direction.LOAD: self.load}


class PathTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranking of paths by direction, fragment bytes and count, fastest path first.

    device: the device and driver on which this table was measured.
    thread_blocks: the most thread blocks of the copy kernel; None: not measured.
    """

    version: int
    device: TableDevice
    thread_blocks: ThreadBlocks | None
    stores: Cells
    loads: Cells

    @staticmethod
    def default() -> PathTable:
        """Return a table for a device that was not measured: all paths, ranked by `expected_seconds`."""
        return PathTable.measured(expected_seconds, tuple(CopyPath), NOT_MEASURED, None)

    @staticmethod
    def measured(
        seconds: Callable[[CopyPath, Direction, int, int], float],
        available: Sequence[CopyPath],
        device: TableDevice,
        thread_blocks: ThreadBlocks | None,
    ) -> PathTable:
        """Measure every cell.

        seconds: called as seconds(path, direction, fragment_bytes, count); returns the time (s) to copy
            `count` scattered fragments, at most `MEASURED_BYTES` together. For `PITCHED` the fragments are
            rows of rectangles of up to `RECTANGLE_ROWS` rows.
        available: the paths to measure.
        device, thread_blocks: the table's fields of these names.

        Raises `ConfigError` if no path other than `PITCHED` is available.
        """
        paths = _ranked(tuple(CopyPath), available)

        def cells(direction: Direction) -> Cells:
            return tuple(
                tuple(rank(direction, size, 1 << power) for power in range(_powers(size)))
                for size in FRAGMENT_BYTES
            )

        def rank(direction: Direction, fragment_bytes: int, count: int) -> Ranking:
            took = {path: seconds(path, direction, fragment_bytes, count) for path in paths}
            if CopyPath.KERNEL in took:
                took[CopyPath.KERNEL] *= KERNEL_HANDICAP
            return tuple(sorted(paths, key=lambda path: took[path]))

        return PathTable(VERSION, device, thread_blocks, cells(Direction.STORE), cells(Direction.LOAD))

    def only(self, available: Sequence[CopyPath]) -> PathTable:
        """Return the table without unavailable paths. Raises `ConfigError` if no path is left, or only
        `PITCHED`, which does not fit every copy."""
        stores, loads = (
            tuple(tuple(_ranked(ranking, available) for ranking in row) for row in cells)
            for cells in (self.stores, self.loads)
        )
        return PathTable(self.version, self.device, self.thread_blocks, stores, loads)

    def choose(self, direction: Direction, fragment_bytes: int, count: int, rectangles: int) -> CopyPath:
        """Return the best path for a copy.

        fragment_bytes: mean size of its fragments.
        count: number of its fragments.
        rectangles: number of rectangles whose rows are the fragments. `PITCHED` is skipped if these have
            fewer than `RECTANGLE_ROWS` rows on average.

        Size and count are rounded down to measured ones.
        """
        cells = self.stores if direction is Direction.STORE else self.loads
        row = cells[_place(fragment_bytes // FRAGMENT_BYTES[0], cells)]
        is_high = count >= rectangles * RECTANGLE_ROWS
        ranking = row[_place(count, row)]
        return next(path for path in ranking if is_high or path is not CopyPath.PITCHED)

    @staticmethod
    def load(file: str | PathLike[str], device: TableDevice) -> PathTable:
        """Read a table that `save` wrote for this device. Raises `ConfigError` for any other content, and
        `OSError` if the file cannot be read."""
        written = read_trusted(Path(file), _MOST_BYTES)
        try:
            table = msgspec.json.decode(written, type=PathTable)
            table._check(device)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(
                f"{os.fspath(file)} is no path table for this device: {error}; "
                "delete the file, and the device is measured again"
            ) from error
        return table

    def save(self, file: str | PathLike[str]) -> None:
        """Write the table atomically. Raises `OSError`."""
        write_whole(Path(file), msgspec.json.encode(self))

    def _check(self, device: TableDevice) -> None:
        """Raise `ConfigError` if the table is malformed, or belongs to another device."""
        if self.version != VERSION:
            raise ConfigError(f"it has version {self.version}, this release reads {VERSION}")
        if self.device != device:
            raise ConfigError(f"it is for {self.device}, the device is {device}")
        if self.thread_blocks is not None and min(self.thread_blocks) < 1:
            raise ConfigError(f"the copy kernel has {min(self.thread_blocks)} thread blocks, it needs one")
        for cells in (self.stores, self.loads):
            if [len(row) for row in cells] != [_powers(size) for size in FRAGMENT_BYTES]:
                raise ConfigError("cells are missing, or too many")
            for row in cells:
                for ranking in row:
                    _ranked(ranking, tuple(CopyPath))


def expected_seconds(path: CopyPath, _direction: Direction, fragment_bytes: int, count: int) -> float:
    """Estimate the time of a copy on a device that was not measured (s): queuing it, and the bus at 55 GB/s.

    These are the costs of an H200. The driver takes 1 us for a descriptor in a batch, 1.5 us for a single
    cuMemcpyAsync and 4.5 us for a rectangle. The copy engine takes 0.17 us for a row of a rectangle. A kernel
    has no such costs, but it starts late (40 us) and copies at most 45 GB/s. So it is best for many fragments
    below some 128 KiB, for which a descriptor takes longer than the transfer over the bus.
    """
    on_the_bus = count * fragment_bytes / 55e9
    if path is CopyPath.BATCH:
        return 5e-6 + count * 1e-6 + on_the_bus
    if path is CopyPath.RUNS:
        return 5e-6 + count * 1.5e-6 + on_the_bus
    if path is CopyPath.PITCHED:
        return 5e-6 + -(-count // RECTANGLE_ROWS) * 4.5e-6 + max(on_the_bus, count * 0.17e-6)
    return 40e-6 + count * fragment_bytes / 45e9


def fewest_thread_blocks(seconds: Callable[[int], float], most: int) -> int:
    """Return the least number of thread blocks, from 1 to `most`, that copies nearly as fast as the best one.

    seconds: called with a number of thread blocks; returns the time of a copy (s).
    """
    took = [seconds(blocks) for blocks in range(1, most + 1)]
    return next(blocks for blocks, each in enumerate(took, start=1) if each * NEARLY_AS_FAST <= min(took))


def _powers(fragment_bytes: int) -> int:
    """The number of counts (1, 2, 4, ...) for which fragments of this size are measured."""
    return (MEASURED_BYTES // fragment_bytes).bit_length()


def _place(amount: int, cells: Sequence[object]) -> int:
    """Return the index of the largest power of two that is at most `amount`, limited to the cells."""
    return max(0, min(amount.bit_length(), len(cells)) - 1)


def _ranked(ranking: Ranking, available: Sequence[CopyPath]) -> Ranking:
    """Return the available paths in this order. Raises `ConfigError` if there are duplicates, or no path
    other than `PITCHED`, which does not fit every copy."""
    paths = tuple(path for path in ranking if path in available)
    if not set(paths) - {CopyPath.PITCHED} or len(set(paths)) < len(paths):
        named = ", ".join(path.value for path in paths) or "none"
        raise ConfigError(f"copies need distinct paths, one of them not pitched; there are: {named}")
    return paths
