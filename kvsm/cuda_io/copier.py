"""How the bytes of a copy move on a GPU: the paths of `paths.py` as calls, and how the table is measured.

What a path needs beyond its call: the kernel reads its pairs table from page-locked memory while it runs.
Such a table is written by the host when the copy is handed over, and belongs to that copy until it is over:
it is what `copy` returns. A table that goes to the next copy any earlier is read half old, half new (B37).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines.geometry import Fragments, Rectangles, fragments, rectangles
from kvsm.copy_engines.layout import MemoryLayout, MemoryRows
from kvsm.cuda_io import driver
from kvsm.cuda_io.driver import BATCH_VERSION, BatchCopy, CudaContext, CudaError, PitchedCopy, RunsCopy
from kvsm.cuda_io.kernel import (
    KERNEL_NAME,
    KERNEL_TYPES,
    KernelParameters,
    compile_copy_kernel,
    grid,
    kernel_pairs,
    kernel_parts,
    vector_bytes,
)
from kvsm.cuda_io.paths import MEASURED_BYTES, RECTANGLE_ROWS, CopyPath, PathTable
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.ids import IdArray

log = logging.getLogger("kvsm.cuda_io")

MEASURED_ROUNDS = 3
"""Times that each copy is measured; the fastest one counts, for the others were disturbed."""


class PairsTable:
    """Page-locked memory with the table of one copy. It may be used again when nobody holds this any more."""

    __slots__ = ("_free", "address")

    def __init__(self, address: int, free: list[int]) -> None:
        self.address, self._free = address, free

    def __del__(self) -> None:
        self._free.append(self.address)


class PairsTables:
    """Page-locked memory for tables, kept by size in powers of two: to page-lock takes longer than to copy,
    and may stop the device. Nearly all tables fit into the least size, of 8192 pairs."""

    _LEAST_BYTES = 64 << 10

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}

    def holding(self, values: NDArray[Any]) -> PairsTable:
        """A table with these values."""
        size = max(self._LEAST_BYTES, 1 << (values.nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        try:
            address = free.pop()
        except IndexError:
            address = driver.allocate_host(size)
        table = PairsTable(address, free)
        ctypes.memmove(table.address, values.ctypes.data, values.nbytes)
        return table

    def close(self) -> None:
        for free in self._free.values():
            while free:
                driver.free_host(free.pop())


class CopyCalls:
    """The calls by which this GPU and its driver copy. The context is the current one of the thread."""

    def __init__(self, context: CudaContext) -> None:
        self.multiprocessors = context.multiprocessors
        self.runs, self.pitched = RunsCopy(), PitchedCopy()
        self.batch: BatchCopy | None = None
        if context.driver_version >= BATCH_VERSION:
            self.batch = BatchCopy()
        self.tables = PairsTables()
        self.kernel: int | None = None
        self._module: int | None = None
        try:
            self._module = driver.load_module(compile_copy_kernel(context.compute_capability))
            self.kernel = driver.find_kernel(self._module, KERNEL_NAME)
        except (ConfigError, CudaError) as error:
            log.warning("no copy kernel, so small fragments will be slow: %s", error)

    def close(self) -> None:
        self.tables.close()
        if self._module is not None:
            driver.unload_module(self._module)


class Copier:
    """Copies blocks of one layout by a path that is named. The context is the current one of the thread."""

    def __init__(self, calls: CopyCalls, layout: MemoryLayout) -> None:
        self._calls, self._layout = calls, layout
        self._vector_bytes = vector_bytes(layout)
        self._num_parts, self._parts = 0, 0
        self._host = _mapped(layout.host)
        if calls.kernel is not None and self._host is not None:
            parts = kernel_parts(layout)
            self._num_parts, self._parts = len(parts), driver.allocate_device(parts.nbytes)
            driver.upload(self._parts, parts)

    @property
    def page_locked(self) -> bool:
        """Whether the host pool is, and so can be copied without the processor, and by the kernel."""
        return self._host is not None

    @property
    def available(self) -> tuple[CopyPath, ...]:
        """The paths that can be taken here."""
        unavailable = {CopyPath.BATCH: self._calls.batch is None, CopyPath.KERNEL: not self._parts}
        return tuple(path for path in CopyPath if not unavailable.get(path))

    def copy(
        self, path: CopyPath, stream: int, direction: Direction, device_blocks: IdArray, host_blocks: IdArray
    ) -> Any:
        """Queue the copy of at least one pair; what the device may still read of it after the call."""
        if path is CopyPath.KERNEL:
            return self._by_kernel(stream, direction, device_blocks, host_blocks)
        planned = rectangles(self._layout, direction, device_blocks, host_blocks)
        if path is CopyPath.PITCHED:
            return self._by_rectangles(stream, planned)
        pieces = fragments(planned)
        if path is CopyPath.RUNS:
            self._calls.runs(pieces, stream)
        else:
            assert self._calls.batch is not None
            self._calls.batch(pieces, direction, stream)
        return pieces

    def close(self) -> None:
        if self._parts:
            driver.free_device(self._parts)

    def _by_rectangles(self, stream: int, planned: Rectangles) -> Any:
        # Those of one row may be wider than a pitch may be, and are copied as what they are.
        flat = planned.heights == 1
        if flat.any():
            self._calls.runs(
                Fragments(planned.sources[flat], planned.targets[flat], planned.widths[flat]), stream
            )
            planned = Rectangles(*(column[~flat] for column in planned))
        return self._calls.pitched(planned, stream)

    def _by_kernel(
        self, stream: int, direction: Direction, device_blocks: IdArray, host_blocks: IdArray
    ) -> PairsTable:
        calls, layout = self._calls, self._layout
        assert calls.kernel is not None
        assert self._host is not None
        pairs = kernel_pairs(device_blocks, host_blocks)
        table = calls.tables.holding(pairs)
        blocks, threads = grid(direction, len(pairs), layout, calls.multiprocessors)
        to_host = int(direction is Direction.STORE)
        parameters = KernelParameters(
            table.address, len(pairs), self._parts, self._num_parts,
            self._host, layout.host.stride, to_host, self._vector_bytes,
        )  # fmt: skip
        driver.launch(calls.kernel, blocks, threads, stream, parameters, KERNEL_TYPES)
        return table


def _mapped(rows: MemoryRows) -> int | None:
    """Where a kernel finds these rows of host memory; None if not all of them are page-locked and mapped."""
    if not rows.num_rows:
        return None
    first, last = driver.device_address(rows.address), driver.device_address(rows.end - 1)
    if first is None or last is None or last - first != rows.end - 1 - rows.address:
        return None
    return first


# The table of paths.


def cached_path_table(context: CudaContext, calls: CopyCalls) -> PathTable:
    """The table of this GPU and driver: from the file that an earlier process has left, or measured now. The
    context is the current one of the thread."""
    device = f"{context.name}, driver {context.driver_version}"
    file = _cache_file(device)
    try:
        return PathTable.load(file, device)
    except FileNotFoundError:
        log.info("measuring the copy paths of %s, for a few seconds; once, unless %s is lost", device, file)
    except (ConfigError, OSError) as error:
        log.warning("measuring the copy paths of %s again: %s", device, error)
    try:
        table = _measured(calls, device)
    except CudaError as error:
        log.warning("the copy paths of %s are guessed, for they could not be measured: %s", device, error)
        return PathTable.default()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        table.save(file)
    except OSError as error:
        log.warning(
            "the next process will measure the copy paths again (%s); set XDG_CACHE_HOME to a directory that "
            "can be written",
            error,
        )
    return table


def _cache_file(device: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kvsm", f"copy-paths-{re.sub('[^A-Za-z0-9]+', '-', device)}.json")


def _measured(calls: CopyCalls, device: str) -> PathTable:
    """Measure on memory of our own: the pools may be in use."""
    with ExitStack() as stack:
        # Every second block of both pools is copied, so that no two of them are neighbours.
        device_memory = driver.allocate_device(2 * MEASURED_BYTES)
        stack.callback(driver.free_device, device_memory)
        host_memory = driver.allocate_host(2 * MEASURED_BYTES)
        stack.callback(driver.free_host, host_memory)
        stopwatch = _Stopwatch()
        stack.callback(stopwatch.close)

        def seconds(path: CopyPath, direction: Direction, fragment_bytes: int, count: int) -> float:
            parts = min(count, RECTANGLE_ROWS)
            layout = _scratch_layout(device_memory, host_memory, fragment_bytes, parts, -(-count // parts))
            blocks = np.arange(0, layout.num_host_blocks, 2)
            with closing(Copier(calls, layout)) as copier:
                return min(
                    stopwatch.seconds(lambda stream: copier.copy(path, stream, direction, blocks, blocks))
                    for _ in range(MEASURED_ROUNDS)
                )

        return PathTable.measured(seconds, _measurable(calls), device)


def _measurable(calls: CopyCalls) -> tuple[CopyPath, ...]:
    """The paths of this GPU. One by one is not faster than a batch of the same, and takes long to measure."""
    unavailable = {
        CopyPath.BATCH: calls.batch is None,
        CopyPath.RUNS: calls.batch is not None,
        CopyPath.KERNEL: calls.kernel is None,
    }
    return tuple(path for path in CopyPath if not unavailable.get(path))


def _scratch_layout(device: int, host: int, fragment_bytes: int, parts: int, blocks: int) -> MemoryLayout:
    """Twice as many blocks, of as many parts: evenly spaced on the device, one after another on the host."""
    rows = 2 * blocks
    tensors = tuple(
        MemoryRows(device + part * rows * fragment_bytes, fragment_bytes, rows, fragment_bytes)
        for part in range(parts)
    )
    block_bytes = parts * fragment_bytes
    offsets = tuple(range(0, block_bytes, fragment_bytes))
    return MemoryLayout(tensors, MemoryRows(host, block_bytes, rows, block_bytes), offsets)


class _Stopwatch:
    """Times what is queued on a stream, and the handing over of it, for the device waits meanwhile."""

    def __init__(self) -> None:
        self._stream = driver.create_stream()
        self._begin, self._end = driver.create_event(timed=True), driver.create_event(timed=True)

    def seconds(self, queue: Callable[[int], Any]) -> float:
        driver.record_event(self._begin, self._stream)
        keep = queue(self._stream)
        driver.record_event(self._end, self._stream)
        driver.synchronize_event(self._end)
        del keep  # only now is the copy over
        return driver.seconds_between(self._begin, self._end)

    def close(self) -> None:
        driver.destroy_event(self._begin)
        driver.destroy_event(self._end)
        driver.destroy_stream(self._stream)
