"""Copies blocks on a GPU by each path of `paths.py`, and measures the table of paths.

The kernel reads its pairs from a table in page-locked memory while it runs. The host writes the table when it
queues the copy, and `copy` returns the table, because it belongs to that copy until the copy is over. If the
next copy reused the table earlier, the first kernel would read pairs of both copies (B37).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.geometry import CopyPlan, CopyPlanner, Fragments, Rectangles
from kvsm.copies.layout import MemoryLayout, MemoryRows
from kvsm.cuda_io import driver
from kvsm.cuda_io.driver import (
    BATCH_VERSION,
    BatchCopy,
    CudaContext,
    CudaError,
    KernelLaunch,
    PitchedCopy,
    RunsCopy,
)
from kvsm.cuda_io.kernel import (
    KERNEL_NAME,
    KERNEL_TYPES,
    KernelParameters,
    compile_copy_kernel,
    grid,
    guessed_thread_blocks,
    kernel_pairs,
    kernel_parts,
    most_thread_blocks,
    vector_bytes,
)
from kvsm.cuda_io.paths import (
    FEW_BYTES,
    MEASURED_BYTES,
    RECTANGLE_ROWS,
    CopyPath,
    PathTable,
    TableDevice,
    ThreadBlocks,
    fewest_thread_blocks,
)
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.ids import IdArray

log = logging.getLogger("kvsm.cuda_io")

MEASURED_ROUNDS = 3
"""How often each copy is measured. The fastest time counts, because disturbances only add time."""


class PairsTable:
    """Page-locked memory with the pairs of one copy. When this object is freed, the memory is reused."""

    __slots__ = ("_free", "address")

    def __init__(self, address: int, free: list[int]) -> None:
        self.address, self._free = address, free

    def __del__(self) -> None:
        self._free.append(self.address)


class PairsTables:
    """Page-locked memory for tables, reused by size in powers of two: page-locking takes longer than copying,
    and may stall the device. Nearly all tables have the smallest size, for 8192 pairs."""

    _LEAST_BYTES = 64 << 10

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}

    def holding(self, values: NDArray[Any]) -> PairsTable:
        """Return a table with these values."""
        size = max(self._LEAST_BYTES, 1 << (values.nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        try:
            address = free.pop()
        except IndexError:
            with driver.relaxed_capture():
                address = driver.allocate_host(size)
        table = PairsTable(address, free)
        ctypes.memmove(table.address, values.ctypes.data, values.nbytes)
        return table

    def close(self) -> None:
        for free in self._free.values():
            while free:
                driver.call("cuMemFreeHost", free.pop())


class CopyCalls:
    """The copy functions of this GPU and driver; `batch` and `kernel` are None if they are unavailable. The
    GPU's context must be the thread's current context."""

    def __init__(self, context: CudaContext) -> None:
        self.multiprocessors = context.multiprocessors
        self.runs, self.pitched = RunsCopy(), PitchedCopy()
        self.batch: BatchCopy | None = None
        if context.driver_version >= BATCH_VERSION:
            self.batch = BatchCopy()
        self.tables = PairsTables()
        self.kernel: KernelLaunch | None = None
        self._module: int | None = None
        try:
            image = compile_copy_kernel(context.compute_capability)
            self._module = int(driver.call("cuModuleLoadData", image))
            function = int(driver.call("cuModuleGetFunction", self._module, KERNEL_NAME.encode()))
            self.kernel = KernelLaunch(function, KERNEL_TYPES)
        except (ConfigError, CudaError) as error:
            log.warning("no copy kernel, so small fragments will be slow: %s", error)

    def close(self) -> None:
        self.tables.close()
        if self._module is not None:
            driver.call("cuModuleUnload", self._module)


class PreparedCopy(NamedTuple):
    """A copy whose descriptors are made."""

    path: CopyPath
    queue: Callable[[int], None]
    """Queues the copy on a stream."""
    keep: Any
    """Owns the memory that the device may read until the copy is over."""


class Copier:
    """Copies blocks of one layout by a given path. The GPU's context must be the thread's current context.

    thread_blocks: the most thread blocks of the kernel, by direction; None: `guessed_thread_blocks`.
    """

    def __init__(
        self, calls: CopyCalls, layout: MemoryLayout, thread_blocks: dict[Direction, int] | None = None
    ) -> None:
        self.thread_blocks = thread_blocks or guessed_thread_blocks(calls.multiprocessors)
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
        """Whether the host pool is page-locked, so that copies take no CPU time and the kernel can access
        it."""
        return self._host is not None

    @property
    def available(self) -> tuple[CopyPath, ...]:
        """The paths that this GPU, driver and host pool allow."""
        unavailable = {CopyPath.BATCH: self._calls.batch is None, CopyPath.KERNEL: not self._parts}
        return tuple(path for path in CopyPath if not unavailable.get(path))

    def prepare(
        self,
        path: CopyPath,
        direction: Direction,
        plan: CopyPlan,
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> PreparedCopy:
        """Make the descriptors of a copy of at least one pair. plan: the plan of these pairs."""
        if path is CopyPath.KERNEL:
            return self._by_kernel(direction, device_blocks, host_blocks)
        if path is CopyPath.PITCHED:
            return self._by_rectangles(plan.rectangles())
        pieces = plan.fragments()
        if path is CopyPath.RUNS:
            return PreparedCopy(path, partial(self._calls.runs, _rows(pieces)), None)
        assert self._calls.batch is not None
        return PreparedCopy(path, partial(self._calls.batch, pieces, direction), pieces)

    def close(self) -> None:
        if self._parts:
            driver.call("cuMemFree", self._parts)

    def _by_rectangles(self, planned: Rectangles) -> PreparedCopy:
        # A rectangle of one row may be wider than the largest pitch, so it is copied as plain bytes.
        flat = planned.heights == 1
        rows = _rows(Fragments(planned.sources[flat], planned.targets[flat], planned.widths[flat]))
        table = self._calls.pitched.table(Rectangles(*(column[~flat] for column in planned)))

        def queue(stream: int) -> None:
            self._calls.runs(rows, stream)
            self._calls.pitched(table, stream)

        return PreparedCopy(CopyPath.PITCHED, queue, table)

    def _by_kernel(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> PreparedCopy:
        calls, host = self._calls, self._layout.host
        assert calls.kernel is not None
        assert self._host is not None
        pairs = kernel_pairs(device_blocks, host_blocks)
        table = calls.tables.holding(pairs)
        parameters = KernelParameters(
            table.address, len(pairs), self._parts, self._num_parts,
            self._host, host.stride, int(direction is Direction.STORE), self._vector_bytes,
        )  # fmt: skip
        size = grid(len(pairs) * self._num_parts, self.thread_blocks[direction])
        return PreparedCopy(CopyPath.KERNEL, partial(calls.kernel, size, parameters), table)


def _rows(fragments: Fragments) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in fragments)))


def _mapped(rows: MemoryRows) -> int | None:
    """Return the device address of these rows of host memory. None unless all of them are page-locked and
    mapped."""
    if not rows.num_rows:
        return None
    first, last = driver.device_address(rows.address), driver.device_address(rows.end - 1)
    if first is None or last is None or last - first != rows.end - 1 - rows.address:
        return None
    return first


# The path table.


def cached_path_table(context: CudaContext, calls: CopyCalls) -> PathTable:
    """Return the path table of this GPU and driver, from the cache file or measured now. The GPU's context
    must be the thread's current context."""
    device = TableDevice(context.name, context.driver_version)
    file = table_file(device)
    try:
        return PathTable.load(file, device)
    except FileNotFoundError:
        log.info("measuring the copy paths of %s for a few seconds, once unless %s is lost", device, file)
    except (ConfigError, OSError) as error:
        log.warning("measuring the copy paths of %s again: %s", device, error)
    try:
        return measured_path_table(calls, device)
    except CudaError as error:
        log.warning("the copy paths of %s are guessed, because they could not be measured: %s", device, error)
        return PathTable.default()


def measured_path_table(calls: CopyCalls, device: TableDevice) -> PathTable:
    """Measure the path table of this GPU and driver, and cache it in its file. The GPU's context must be the
    thread's current context. Raises `CudaError`."""
    table, file = _measured(calls, device), table_file(device)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        table.save(file)
    except OSError as error:
        log.warning(
            "the next process will measure the copy paths again (%s); set XDG_CACHE_HOME to a directory that "
            "can be written",
            error,
        )
    return table


def table_file(device: TableDevice) -> Path:
    """Return the cache file of a device's path table."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a user id without an entry in passwd, as in a pod, and no HOME
            base = os.path.join(tempfile.gettempdir(), f"cache-{os.geteuid()}")
    return Path(base, "kvsm", f"copy-paths-{re.sub('[^A-Za-z0-9]+', '-', str(device))}.json")


def _measured(calls: CopyCalls, device: TableDevice) -> PathTable:
    """Measure the path table in memory of its own, because the pools may be in use. Descriptors are made
    before the clock starts, as for a transfer."""
    with ExitStack() as stack:
        # Copy every second block only, so that no two copied blocks are contiguous.
        device_memory = driver.allocate_device(2 * MEASURED_BYTES)
        stack.callback(driver.call, "cuMemFree", device_memory)
        host_memory = driver.allocate_host(2 * MEASURED_BYTES)
        stack.callback(driver.call, "cuMemFreeHost", host_memory)
        stopwatch = _Stopwatch()
        stack.callback(stopwatch.close)

        def seconds(
            path: CopyPath,
            direction: Direction,
            fragment_bytes: int,
            count: int,
            thread_blocks: ThreadBlocks | None = None,
        ) -> float:
            parts = min(count, RECTANGLE_ROWS)
            layout = _scratch_layout(device_memory, host_memory, fragment_bytes, parts, -(-count // parts))
            blocks = np.arange(0, layout.num_host_blocks, 2)
            plan = CopyPlanner(layout).plan(direction, blocks, blocks)
            chosen = thread_blocks or found
            with closing(Copier(calls, layout, chosen.by_direction() if chosen else None)) as copier:
                return min(
                    stopwatch.seconds(copier.prepare(path, direction, plan, blocks, blocks))
                    for _ in range(MEASURED_ROUNDS)
                )

        def kernel_seconds(direction: Direction, blocks: int) -> float:
            many = MEASURED_BYTES // FEW_BYTES
            return seconds(CopyPath.KERNEL, direction, FEW_BYTES, many, ThreadBlocks(blocks, blocks))

        found: ThreadBlocks | None = None
        if calls.kernel is not None:
            most = most_thread_blocks(calls.multiprocessors)
            found = ThreadBlocks(
                *(
                    fewest_thread_blocks(partial(kernel_seconds, way), most)
                    for way in (Direction.STORE, Direction.LOAD)
                )
            )
        return PathTable.measured(seconds, _measurable(calls), device, found)


def _measurable(calls: CopyCalls) -> tuple[CopyPath, ...]:
    """Return the paths to measure. `RUNS` is left out if there is `BATCH`: it is not faster, and it is slow
    to measure."""
    unavailable = {
        CopyPath.BATCH: calls.batch is None,
        CopyPath.RUNS: calls.batch is not None,
        CopyPath.KERNEL: calls.kernel is None,
    }
    return tuple(path for path in CopyPath if not unavailable.get(path))


def _scratch_layout(device: int, host: int, fragment_bytes: int, parts: int, blocks: int) -> MemoryLayout:
    """Return a layout of 2 * `blocks` blocks with `parts` parts: adjacent on the host, in separate tensors on
    the device."""
    rows = 2 * blocks
    tensors = tuple(
        MemoryRows(device + part * rows * fragment_bytes, fragment_bytes, rows, fragment_bytes)
        for part in range(parts)
    )
    block_bytes = parts * fragment_bytes
    offsets = tuple(range(0, block_bytes, fragment_bytes))
    return MemoryLayout(tensors, MemoryRows(host, block_bytes, rows, block_bytes), offsets)


class _Stopwatch:
    """Measures the time of a copy on a stream, including the time to queue it, during which the stream is
    idle."""

    def __init__(self) -> None:
        self._stream = driver.create_stream()
        self._begin, self._end = driver.create_event(timed=True), driver.create_event(timed=True)

    def seconds(self, copy: PreparedCopy) -> float:
        driver.record_event(self._begin, self._stream)
        copy.queue(self._stream)
        driver.record_event(self._end, self._stream)
        driver.call("cuEventSynchronize", self._end)
        return driver.seconds_between(self._begin, self._end)

    def close(self) -> None:
        driver.call("cuEventDestroy", self._begin)
        driver.call("cuEventDestroy", self._end)
        driver.call("cuStreamDestroy", self._stream)
