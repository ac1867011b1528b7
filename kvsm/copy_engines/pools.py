"""The two memories of one rank as numpy sees them, and the copy between them.

The copy has three forms, because threads that copy share the interpreter and its lock with the thread that
decides; `vectored.py` says what that costs.

====================  ==================================  ===========================================
runs, on average      form                                why
====================  ==================================  ===========================================
256 KiB and longer,   one slice assignment for each run,  each byte moves once: full bandwidth. As soon
or up to four runs    while that is quick; then the rest  as another thread keeps the lock, what is
                      as below                            left takes it once, not once a run
12 KiB and longer     all in one `process_vm_readv`       each byte moves once, and the lock is taken
                                                          once; but the kernel looks up each page
shorter               one indexed assignment for each     each byte moves twice, but a block costs less
                      tensor                              than the 1 us of a statement or of the kernel
====================  ==================================  ===========================================

Where that call is refused, and for rows that are short in runs that are long, slices come first from 12 KiB
on, and indices after them.

Measured on 2 cores, random blocks, pieces of 16 MiB, medians in GB/s; and as shares of 16 MiB slices
of contiguous memory, which in the same run had 10.3 by one thread and 15.8 by two. Small pages are of 4 KiB.

=========  ==========  ===========  ======================  ============================
blocks of  one thread  two threads  one, with small pages   two beside a busy Python one
=========  ==========  ===========  ======================  ============================
4 KiB      3.8  0.37   6.3  0.40    2.9  0.30               0.6
16 KiB     5.7  0.57   9.0  0.56    4.3  0.44               0.8
64 KiB     9.7  0.95   12.5 0.82    5.4  0.60               3.1
1 MiB      13.0 1.24   14.3 0.88    11.6 1.21               1.9
=========  ==========  ===========  ======================  ============================

Slices of 64 KiB are as fast with large pages, twice as fast by one thread with small ones (10.0), and beside
a busy thread a hundred times slower (0.03).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines.geometry import fragments, run_rectangles
from kvsm.copy_engines.layout import make_layout, tensors_of
from kvsm.copy_engines.pairs import BlockRuns, merge_runs
from kvsm.copy_engines.vectored import copy_vectored, reaches
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray

LONG_BYTES = 12 << 10
"""Mean length from which on a statement for each run, or a fragment for each row, pays."""

FEW_RUNS = 4
"""So many statements wait for the lock no longer than the one call and what plans it take."""

SLICED_BYTES = 256 << 10
"""Mean length from which on copying threads do not hold each other up by taking the lock for each run."""

PATIENCE_SECONDS = 0.004
"""How far copying by slices may fall behind its pace: less than the 5 ms of one wait for the lock."""

PACE_BYTES_PER_SECOND = 2e9
"""Of one thread. Memory is faster; copying 12 KiB and then waiting for the lock is not."""


class NumpyPools:
    """Device pool and host pool of one rank; `layout` says how a block lies in them.

    device: the tensors of the device pool, or its only one: numpy arrays, or torch CPU tensors, which are
    viewed without copying. host: likewise. Raises `ConfigError`.
    """

    def __init__(self, device: Any | Sequence[Any], host: Any) -> None:
        tensors = tensors_of(device)
        self.layout, places = make_layout(tensors, host)
        self.device = [_as_bytes(f"device tensor {place}", tensors[place]) for place in places]
        whole = _as_bytes("host pool", host)
        self.host = [
            whole[:, offset : offset + rows.row_bytes]
            for offset, rows in zip(self.layout.offsets, self.layout.tensors)
        ]
        are_long = self.layout.is_dense or self.layout.block_bytes >= LONG_BYTES * len(self.device)
        self._vectored = are_long and reaches((*self.layout.tensors, self.layout.host))

    def copy(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        """Copy checked pairs now.

        Raises `TransferFailed`, with nothing copied, if the targets are read-only; and what numpy and the
        system raise, after which the targets may hold part of the bytes.
        """
        if not len(host_blocks):
            return
        to_host = direction is Direction.STORE
        targets = self.host if to_host else self.device
        if not all(one.flags.writeable for one in targets):
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
        """Copy run by run as long as that keeps its pace. Returns what is left."""
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
    """What numpy takes for each run. A number is quicker than a slice of one."""
    if (counts == 1).all():
        return heads.tolist()  # type: ignore[no-any-return]
    return map(slice, heads.tolist(), (heads + counts).tolist())


def _as_bytes(name: str, pool: Any) -> NDArray[np.uint8]:
    """View a pool as numpy bytes. What is no array is a torch tensor, maybe of a type that numpy lacks."""
    try:
        if not isinstance(pool, np.ndarray):
            import torch  # only whoever brings a tensor needs it

            pool = pool.view(torch.uint8).numpy()
        array: NDArray[np.uint8] = pool.view(np.uint8)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be viewed as bytes by numpy: {error}") from error
    return array
