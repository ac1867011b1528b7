"""Which way a copy takes through the hardware: a table over direction, fragment bytes and count.

Which way is fastest depends on the device, its driver and its bus. So the table is measured, once for each
device, and kept in a file; until then `PathTable.default()` follows from what such hardware costs.

The table has a cell for each power of two of both, as far as `MEASURED_BYTES` go. A cell ranks all the paths,
so that one that is missing here, or does not fit a copy, gives way to the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from os import PathLike

import msgspec

from kvsm.errors import ConfigError
from kvsm.events import Direction


class CopyPath(Enum):
    """A way to copy many fragments. Of two that take as long, the earlier one is better."""

    BATCH = "batch"
    """One `cuMemcpyBatchAsync` of all fragments."""
    RUNS = "runs"
    """A `cuMemcpyAsync` for each fragment: drivers before CUDA 12.8 have no batch call."""
    PITCHED = "pitched"
    """A `cuMemcpy2DAsync` for each rectangle."""
    KERNEL = "kernel"
    """A kernel that reads or writes page-locked host memory itself."""


VERSION = 1

FRAGMENT_BYTES = tuple(1 << power for power in range(10, 22))
"""Sizes that are measured. What is smaller goes as the smallest."""

MEASURED_BYTES = 64 << 20
"""Most bytes of one measured copy. From there on time grows with the bytes, whatever the path."""

RECTANGLE_ROWS = 16
"""`PITCHED` is measured with rectangles of so many rows, and taken where they have as many or more."""

KERNEL_HANDICAP = 1.1
"""A kernel takes multiprocessors from compute, which a copy engine does not: it must be so much faster."""

Ranking = tuple[CopyPath, ...]
Cells = tuple[tuple[Ranking, ...], ...]
"""cells[i][j] is for 2**j fragments of FRAGMENT_BYTES[i]."""


class PathTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paths by direction, fragment bytes and count, best first, of the device that `device` names."""

    version: int
    device: str
    stores: Cells
    loads: Cells

    @staticmethod
    def default() -> PathTable:
        """The table of a device that was not measured: all paths, ranked by `expected_seconds`."""
        return PathTable.measured(expected_seconds, tuple(CopyPath), "not measured")

    @staticmethod
    def measured(
        seconds: Callable[[CopyPath, Direction, int, int], float], available: Sequence[CopyPath], device: str
    ) -> PathTable:
        """Measure every cell.

        seconds(path, direction, fragment_bytes, count): how long `count` scattered fragments of so many bytes
        take, `MEASURED_BYTES` in all at most; for `PITCHED` they are the rows of rectangles of
        `RECTANGLE_ROWS`, and of a lower last one. device: its name, and whatever else must be the same for
        the table to hold. Raises `ConfigError` if no path but `PITCHED` is available.
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

        return PathTable(VERSION, device, cells(Direction.STORE), cells(Direction.LOAD))

    def only(self, available: Sequence[CopyPath]) -> PathTable:
        """The table without the paths that are not available here. Raises `ConfigError` if none is left, or
        `PITCHED` alone: not every copy has rectangles."""
        stores, loads = (
            tuple(tuple(_ranked(ranking, available) for ranking in row) for row in cells)
            for cells in (self.stores, self.loads)
        )
        return PathTable(self.version, self.device, stores, loads)

    def choose(self, direction: Direction, fragment_bytes: int, count: int, rectangles: int) -> CopyPath:
        """The best path for `count` fragments, which are the rows of so many rectangles.

        fragment_bytes: their mean size. The cell is the nearest measured one below. `PITCHED` is passed over
        where the rectangles are not far fewer than the fragments: less than `RECTANGLE_ROWS` rows in each.
        """
        cells = self.stores if direction is Direction.STORE else self.loads
        row = cells[_place(fragment_bytes // FRAGMENT_BYTES[0], cells)]
        is_high = count >= rectangles * RECTANGLE_ROWS
        ranking = row[_place(count, row)]
        return next(path for path in ranking if is_high or path is not CopyPath.PITCHED)

    @staticmethod
    def load(file: str | PathLike[str], device: str) -> PathTable:
        """Read a table that `save` wrote for this device. Raises `ConfigError` for others, and `OSError`."""
        with open(file, "rb") as stream:
            written = stream.read()
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
        """Write the table, whole or not at all. Raises `OSError`."""
        written = f"{os.fspath(file)}.{os.getpid()}"
        try:
            with open(written, "wb") as stream:
                stream.write(msgspec.json.encode(self))
            os.replace(written, file)
        except OSError:
            with suppress(OSError):
                os.unlink(written)
            raise

    def _check(self, device: str) -> None:
        """Raises `ConfigError` if `choose` could not use this table, or should not for this device."""
        if self.version != VERSION:
            raise ConfigError(f"it has version {self.version}, this release reads {VERSION}")
        if self.device != device:
            raise ConfigError(f"it is of {self.device!r}, the device is {device!r}")
        for cells in (self.stores, self.loads):
            if [len(row) for row in cells] != [_powers(size) for size in FRAGMENT_BYTES]:
                raise ConfigError("cells are missing, or too many")
            for row in cells:
                for ranking in row:
                    _ranked(ranking, tuple(CopyPath))


def expected_seconds(path: CopyPath, _direction: Direction, fragment_bytes: int, count: int) -> float:
    """How long a copy takes on a device that was not measured: the bus at 55 GB/s, or what hands it over.

    A descriptor takes the driver 0.5 us in a batch and 1.5 us by itself; the copy engine takes 0.1 us for a
    row of a rectangle. A kernel has no such costs, but starts late (10 us) and moves 45 GB/s at best. So a
    kernel is for fragments that the bus carries faster than they can be described, below some 32 KiB, if
    they are many.
    """
    on_the_bus = count * fragment_bytes / 55e9
    if path is CopyPath.BATCH:
        return 5e-6 + max(on_the_bus, count * 0.5e-6)
    if path is CopyPath.RUNS:
        return 5e-6 + max(on_the_bus, count * 1.5e-6)
    if path is CopyPath.PITCHED:
        return 5e-6 + max(on_the_bus, count * 0.1e-6, -(-count // RECTANGLE_ROWS) * 1.5e-6)
    return 10e-6 + count * fragment_bytes / 45e9


def _powers(fragment_bytes: int) -> int:
    """How many powers of two of such fragments are measured, from 1 on."""
    return (MEASURED_BYTES // fragment_bytes).bit_length()


def _place(amount: int, cells: Sequence[object]) -> int:
    """Where the largest power of two up to `amount` stands among `cells`, or what is nearest to it."""
    return max(0, min(amount.bit_length(), len(cells)) - 1)


def _ranked(ranking: Ranking, available: Sequence[CopyPath]) -> Ranking:
    """The available ones, in this order. Raises `ConfigError` if these are not paths that any copy can go."""
    paths = tuple(path for path in ranking if path in available)
    if not set(paths) - {CopyPath.PITCHED} or len(set(paths)) < len(paths):
        named = ", ".join(path.value for path in paths) or "none"
        raise ConfigError(f"copies need distinct paths, one of them not pitched; there are: {named}")
    return paths
