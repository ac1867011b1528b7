"""The device pool and the host pool of one rank as numpy arrays, and the copy between them.

There are three ways to copy, because the copying threads and the scheduling thread share the interpreter's
lock (GIL); `vectored.py` explains the cost.

====================  ==================================  ===========================================
mean run length       way                                 why
====================  ==================================  ===========================================
256 KiB and longer,   one slice assignment for each run   each byte moves once: full bandwidth. If another
or up to four runs    until it falls behind its pace;     thread holds the GIL, the rest takes the GIL
                      the rest as below                   once, not once for each run
12 KiB and longer     all in one `process_vm_readv`       each byte moves once, and the GIL is taken once;
                                                          but the kernel looks up each page
shorter               one indexed assignment for each     each byte moves twice, but a block costs less
                      tensor                              than the 1 us of a statement or of the kernel
====================  ==================================  ===========================================

Where `process_vm_readv` is refused or the rows of a tensor are short, runs of 12 KiB and longer are copied by
slices until those fall behind their pace, and the rest by indices.

Measured on 2 cores with random blocks in pieces of 16 MiB; medians in GB/s. The second figure is the ratio to
slice assignments of 16 MiB of contiguous memory, which reached 10.3 GB/s with one thread and 15.8 with two.
Small pages have 4 KiB.

=========  ==========  ===========  ======================  ============================
block      one thread  two threads  one, with small pages   two, and a busy Python one
=========  ==========  ===========  ======================  ============================
4 KiB      3.8  0.37   6.3  0.40    2.9  0.30               0.6
16 KiB     5.7  0.57   9.0  0.56    4.3  0.44               0.8
64 KiB     9.7  0.95   12.5 0.82    5.4  0.60               3.1
1 MiB      13.0 1.24   14.3 0.88    11.6 1.21               1.9
=========  ==========  ===========  ======================  ============================

Slice assignments of 64 KiB are as fast with large pages, twice as fast with small pages and one thread
(10.0 GB/s), and a hundred times slower next to a busy Python thread (0.03 GB/s).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvsm.copies.geometry import fragments, run_rectangles
from kvsm.copies.layout import MemoryRows, host_array, make_layout, tensors_of
from kvsm.copies.pairs import BlockRuns, merge_runs
from kvsm.copies.vectored import copy_vectored, reaches
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray

LONG_BYTES = 12 << 10
"""Least mean length for which a statement for each run, or a fragment for each row, is worth its cost."""

FEW_RUNS = 4
"""Up to this many slice assignments wait for the GIL no longer than it takes to plan and make one call of
`process_vm_readv`."""

SLICED_BYTES = 256 << 10
"""Least mean length for which copying threads can take the GIL for each run without delaying each other."""

PATIENCE_SECONDS = 0.004
"""How far slice assignments may fall behind their pace. One wait for a busy GIL takes 5 ms."""

PACE_BYTES_PER_SECOND = 2e9
"""The expected pace of one thread: slower than memory, and faster than 12 KiB for each wait for the GIL."""


class NumpyPools:
    """Device pool and host pool of one rank. `layout`: the addresses of the blocks.

    device, host, offsets: as in `HostCopyEngine`.

    Raises `ConfigError`.
    """

    def __init__(self, device: Any | Sequence[Any], host: Any, offsets: Sequence[int] | None = None) -> None:
        tensors, host = tensors_of(device), host_array(host)
        if offsets is not None and len(offsets) != len(tensors):
            raise ConfigError(
                f"there are {len(offsets)} offsets for {len(tensors)} device tensors; give one each"
            )
        self.layout, places = make_layout(tensors, host, offsets)
        self.device = [
            _as_bytes(f"device tensor {place}", tensors[place], rows)
            for place, rows in zip(places, self.layout.tensors)
        ]
        whole = _as_bytes("host pool", host, self.layout.host)
        self.host = [
            whole[:, offset : offset + rows.row_bytes]
            for offset, rows in zip(self.layout.offsets, self.layout.tensors)
        ]
        are_long = self.layout.is_dense or self.layout.block_bytes >= LONG_BYTES * len(self.device)
        self._vectored = are_long and reaches((*self.layout.tensors, self.layout.host))

    def copy(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        """Copy checked pairs, and return when they are copied.

        Raises `TransferFailed`, with nothing copied, if the targets are read-only. After an error of numpy
        or of the system the targets may hold part of the bytes.
        """
        if not len(host_blocks):
            return
        to_host = direction is Direction.STORE
        targets = self.host if to_host else self.device
        if not all(target.flags.writeable for target in targets):
            raise TransferFailed(
                f"the {'host' if to_host else 'device'} pool is read-only; give a writable one"
            )
        pairs = np.asarray(device_blocks, np.int64), np.asarray(host_blocks, np.int64)
        runs = merge_runs(*pairs)
        statements = len(runs.counts) * len(targets)
        run_bytes = len(host_blocks) * self.layout.block_bytes // statements
        if (
            statements <= FEW_RUNS
            or run_bytes >= SLICED_BYTES
            or (run_bytes >= LONG_BYTES and not self._vectored)
        ):
            runs = self._copy_while_quick(to_host, runs)
        if not len(runs.counts):
            return
        if run_bytes >= LONG_BYTES and self._vectored:
            copy_vectored(fragments(run_rectangles(self.layout, direction, runs)))
        else:
            self._copy_indexed(to_host, *pairs)

    def _copy_while_quick(self, to_host: bool, runs: BlockRuns) -> BlockRuns:
        """Copy run by run until that falls behind its pace. Returns the runs that are left."""
        sources, targets = (self.device, self.host) if to_host else (self.host, self.device)
        tensors = list(zip(targets, sources))
        heads = (runs.host_blocks, runs.device_blocks) if to_host else (runs.device_blocks, runs.host_blocks)
        into, out_of = (_places(head, runs.counts) for head in heads)
        seconds = (runs.counts * (self.layout.block_bytes / PACE_BYTES_PER_SECOND)).tolist()
        due = perf_counter() + PATIENCE_SECONDS
        for done, (there, here, pace) in enumerate(zip(into, out_of, seconds)):
            for target, source in tensors:
                if perf_counter() > due:
                    return BlockRuns(*(column[done:] for column in runs))
                target[there] = source[here]
            due += pace
        return BlockRuns(*(column[:0] for column in runs))

    def _copy_indexed(
        self, to_host: bool, device_blocks: NDArray[np.int64], host_blocks: NDArray[np.int64]
    ) -> None:
        for device, host in zip(self.device, self.host):
            if to_host:
                host[host_blocks] = device[device_blocks]
            else:
                device[device_blocks] = host[host_blocks]


def _places(heads: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterable[int | slice]:
    """Return the numpy index of each run: a slice, or the faster plain number if all runs have one block."""
    if (counts == 1).all():
        return heads.tolist()  # type: ignore[no-any-return]
    return map(slice, heads.tolist(), (heads + counts).tolist())


def _as_bytes(name: str, pool: Any, rows: MemoryRows) -> NDArray[np.uint8]:
    """View rows of an array or a torch tensor as numpy bytes. A tensor may have a dtype that numpy lacks."""
    if not rows.num_rows:
        return np.empty((0, rows.row_bytes), np.uint8)
    try:
        if isinstance(pool, np.ndarray):
            first: NDArray[np.uint8] = as_strided(pool, (1,), (pool.itemsize,)).view(np.uint8)
        else:
            import torch  # needed only for a tensor

            first = pool.as_strided((1,), (1,)).view(torch.uint8).numpy()
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be viewed as bytes by numpy: {error}") from error
    start = rows.address - first.ctypes.data
    from_first = as_strided(first, (start + rows.row_bytes,), (1,))
    return as_strided(from_first[start:], (rows.num_rows, rows.row_bytes), (rows.stride, 1))
