"""The two memories of one rank, what may be copied between them, and the copy itself.

A pool is a 2-D uint8 array `[blocks, block_bytes]`. The copy has two forms, because a thread that copies
has to share the interpreter with the thread that decides. numpy drops the interpreter's lock (GIL) while
it moves bytes, and must get it back after each statement; beside a thread that computes in Python that
takes up to the switch interval, 5 ms, for each run of blocks.

====================  ==============================  =============================================
runs of a piece       statement                       why
====================  ==============================  =============================================
one or two, or long   one slice assignment a run      each byte moves once: full memory bandwidth
many and short        one indexed assignment in all   each byte moves twice, but the lock is needed
                                                      twice, not once a run
====================  ==============================  =============================================

Measured on 2 cores, blocks at random places, pieces of 4 MiB. Two copying threads alone: 4 KiB blocks 2.6
GB/s by slices, 7.3 indexed; 64 KiB 12.9 and 13.6; 1 MiB 18.0 and 15.8. One copying thread beside a busy
Python thread: 4 KiB blocks 0.01 GB/s by slices, 0.37 indexed; 64 KiB 0.03 and 0.38.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray
from kvsm.plan import TransferJob

LONG_RUN_BYTES = 1 << 20
"""Mean length of a run from which on a statement for each run pays."""


class Runs(NamedTuple):
    """Run i: counts[i] blocks from device_blocks[i] on, and as many host blocks from host_blocks[i] on."""

    device_blocks: NDArray[np.int64]
    host_blocks: NDArray[np.int64]
    counts: NDArray[np.int64]


def merge_runs(device_blocks: NDArray[np.int64], host_blocks: NDArray[np.int64]) -> Runs:
    """The pairs of a job in the order of their host blocks, consecutive ones on both sides merged into runs.

    Sorting finds runs that the job lists backwards, as caches do that free a request's tail first. With
    distinct host blocks no two of the runs could be merged further.
    """
    order = np.argsort(host_blocks, kind="stable")
    device_blocks, host_blocks = device_blocks[order], host_blocks[order]
    is_head = np.ones(len(host_blocks), dtype=np.bool_)
    is_head[1:] = (device_blocks[1:] - device_blocks[:-1] != 1) | (host_blocks[1:] - host_blocks[:-1] != 1)
    heads = np.flatnonzero(is_head)
    counts = np.diff(heads, append=len(host_blocks))
    return Runs(device_blocks[heads], host_blocks[heads], counts)


class Pools:
    """Device pool and host pool of one rank: `[blocks, block_bytes]` uint8, of equal block_bytes.

    Takes numpy arrays, and torch CPU tensors, which are viewed without copying. Raises `ConfigError`.
    """

    def __init__(self, device: Any, host: Any) -> None:
        self.device = _as_array("device", device)
        self.host = _as_array("host", host)
        self.block_bytes = int(self.device.shape[1])
        if not self.block_bytes:
            raise ConfigError("blocks of the device pool have 0 bytes; they need at least 1")
        if self.host.shape[1] != self.block_bytes:
            raise ConfigError(
                f"blocks of the device pool have {self.block_bytes} bytes, those of the host pool "
                f"{self.host.shape[1]}; they must be equal"
            )

    def check(self, job: TransferJob) -> tuple[IdArray, IdArray]:
        """(device blocks, host blocks) of a job that can be carried out. Raises `TransferFailed` if not."""
        what = f"{job.direction.name.lower()} {job.transfer}"
        try:
            device_blocks, host_blocks = job.pairs()
        except ValueError as error:
            raise TransferFailed(f"{what}: {error}") from error
        if len(device_blocks) != len(host_blocks):
            raise TransferFailed(
                f"{what}: {len(device_blocks)} device blocks for {len(host_blocks)} host blocks"
            )
        to_host = job.direction is Direction.STORE
        _check_ids(f"{what}: device block", device_blocks, len(self.device), distinct=not to_host)
        _check_ids(f"{what}: host block", host_blocks, len(self.host), distinct=to_host)
        return device_blocks, host_blocks

    def copy(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        """Copy checked pairs now. Raises what numpy raises; the targets may then hold part of the bytes."""
        source, target = self.device, self.host
        sources, targets = np.asarray(device_blocks, np.int64), np.asarray(host_blocks, np.int64)
        runs = merge_runs(sources, targets)
        heads, into = runs.device_blocks, runs.host_blocks
        if direction is Direction.LOAD:
            source, target, sources, targets, heads, into = target, source, targets, sources, into, heads
        if len(heads) <= 2 or len(sources) * self.block_bytes >= LONG_RUN_BYTES * len(heads):
            for here, there, count in zip(heads.tolist(), into.tolist(), runs.counts.tolist(), strict=True):
                target[there : there + count] = source[here : here + count]
        else:
            target[targets] = source[sources]


def _as_array(name: str, pool: Any) -> NDArray[np.uint8]:
    """View a pool as numpy. A torch tensor is told by its `numpy` method, so that torch is not needed."""
    if not isinstance(pool, np.ndarray):
        try:
            pool = pool.numpy()
        except (AttributeError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{name} pool is a {type(pool).__name__} that numpy cannot view: {error}"
            ) from error
    if pool.ndim != 2 or pool.dtype != np.uint8:
        raise ConfigError(
            f"{name} pool is {pool.ndim}-D {pool.dtype}; it must be 2-D uint8, [blocks, block_bytes]"
        )
    array: NDArray[np.uint8] = pool
    return array


def _check_ids(what: str, ids: IdArray, limit: int, distinct: bool) -> None:
    """Refuse an id that is outside the pool (numpy would count a negative one from the end), or doubled."""
    if not len(ids):
        return
    if isinstance(ids, tuple):
        least, most, different = min(ids), max(ids), len(set(ids))
    else:
        ordered = np.sort(ids)
        least, most = int(ordered[0]), int(ordered[-1])
        different = 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))
    if least < 0 or most >= limit:
        raise TransferFailed(f"{what} {least if least < 0 else most} is not in its pool of {limit}")
    if distinct and different < len(ids):
        doubled = next(one for place, one in enumerate(ids) if one in ids[:place])
        raise TransferFailed(f"{what} {doubled} is the target of two copies")
