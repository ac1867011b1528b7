"""Checks the block pairs of a job before the copy, cuts jobs, and merges consecutive pairs into runs."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray, pack


class BlockRuns(NamedTuple):
    """Runs of consecutive pairs. Run i is counts[i] pairs: device blocks from device_blocks[i] on, and host
    blocks from host_blocks[i] on."""

    device_blocks: NDArray[np.int64]
    host_blocks: NDArray[np.int64]
    counts: NDArray[np.int64]


def merge_runs(device_blocks: NDArray[np.int64], host_blocks: NDArray[np.int64]) -> BlockRuns:
    """Sort pairs by host block, and merge those that are consecutive on both sides.

    Sorting finds runs that a job lists backwards, as caches do that free a request's last blocks first. If
    the host blocks are distinct, no two of the runs can be merged further.
    """
    order = np.argsort(host_blocks, kind="stable")
    device_blocks, host_blocks = device_blocks[order], host_blocks[order]
    is_head = np.ones(len(host_blocks), dtype=np.bool_)
    is_head[1:] = (device_blocks[1:] - device_blocks[:-1] != 1) | (host_blocks[1:] - host_blocks[:-1] != 1)
    heads = np.flatnonzero(is_head)
    counts = np.diff(heads, append=len(host_blocks))
    return BlockRuns(device_blocks[heads], host_blocks[heads], counts)


def checked_pairs(job: TransferJob, num_device_blocks: int, num_host_blocks: int) -> tuple[IdArray, IdArray]:
    """Return the device blocks and the host blocks of a job. Raises `TransferFailed` if an id is outside its
    pool or a target is used twice."""
    what = f"{job.direction.name.lower()} {job.transfer}"
    try:
        device_blocks, host_blocks = job.pairs()
    except ValueError as error:
        raise TransferFailed(f"{what}: {error}") from error
    if len(device_blocks) != len(host_blocks):
        raise TransferFailed(f"{what}: {len(device_blocks)} device blocks for {len(host_blocks)} host blocks")
    to_host = job.direction is Direction.STORE
    _check_ids(f"{what}: device block", device_blocks, num_device_blocks, distinct=not to_host)
    _check_ids(f"{what}: host block", host_blocks, num_host_blocks, distinct=to_host)
    return device_blocks, host_blocks


def part_of(job: TransferJob, device_blocks: IdArray, host_blocks: IdArray, places: slice) -> TransferJob:
    """Return the job of the pairs at these places.

    device_blocks, host_blocks: all pairs of the job, as `checked_pairs` returns them.
    """
    return msgspec.structs.replace(
        job,
        device_blocks=pack(device_blocks[places]),
        host_blocks=pack(host_blocks[places]),
        keys=job.keys[places],
        generations=job.generations[places],
    )


def _check_ids(what: str, ids: IdArray, limit: int, distinct: bool) -> None:
    """Refuse ids outside the pool (numpy would count a negative id from the end), and duplicates if
    `distinct`."""
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
        ordered = np.sort(ids)
        doubled = ordered[1:][ordered[1:] == ordered[:-1]][0]
        raise TransferFailed(f"{what} {doubled} is the target of two copies")
