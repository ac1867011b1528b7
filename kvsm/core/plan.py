"""The messages between the offload core and the workers: small, typed, picklable."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvsm.events import Direction
from kvsm.ids import Id, IdArray, Ids, unpack


class TransferJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy for every worker: device_blocks[i] and host_blocks[i] are a pair. Fixed when planned.

    A host block is the place of one device block in the host pool: place p of slot s is host block
    s * blocks_per_chunk + p. If a slot has one device block, host blocks are slots.

    keys: keys[i] is the key of the content of host_blocks[i], or of its future content. Empty unless the copy
        engine needs keys: for a host pool that outlives its process, or a disk.
    generations: generations[i] is the number of the event that planned the store of keys[i] into
        host_blocks[i]. Empty unless the host pool outlives its process. In a job between the host pool and a
        disk they are generations of the host pool.
    era: the id of the disk's era in which the job was planned (`DiskEra.id`). Empty for other jobs.
    """

    transfer: Id
    direction: Direction
    device_blocks: Ids
    host_blocks: Ids
    keys: tuple[bytes, ...] = ()
    generations: tuple[Id, ...] = ()
    era: bytes = b""

    def pairs(self) -> tuple[IdArray, IdArray]:
        """(device blocks, host blocks), unpacked."""
        return unpack(self.device_blocks), unpack(self.host_blocks)


class ImportJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy from another engine, on every rank: source_blocks[i] of its host pool to host_blocks[i]."""

    transfer: Id
    engine: str
    source_blocks: Ids
    host_blocks: Ids


class TransferPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every worker does in one engine step, before it computes.

    A worker waits for the transfers in `flush` that are in flight. Then it starts `loads` and `stores`, and
    waits for those that are in `flush`. Loads may overwrite blocks that the previous step reads, and stores
    read blocks that it writes. So on a device that computes asynchronously, both start after that step (order
    of copies, S12).
    """

    loads: tuple[TransferJob, ...] = ()
    stores: tuple[TransferJob, ...] = ()
    flush: tuple[Id, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.flush)


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Worker `worker` is done with its shard of `transfer`. `good` is false if any byte may be wrong."""

    transfer: int
    worker: int
    good: bool
    error: str = ""
    """What went wrong, for people."""
    queued_us: int | None = None
    """Time from the submission to this worker to the first byte of its copy (us). None: not measured. A
    duration, because a worker may be another process with another clock."""
    copied_us: int | None = None
    """Time from the first byte of its copy to the last (us). None: not measured."""

    def arguments(self) -> tuple[int, int, bool, str, int | None, int | None]:
        """Return the arguments for `Offloader.report`."""
        return self.transfer, self.worker, self.good, self.error, self.queued_us, self.copied_us


def failed_reports(jobs: Iterable[TransferJob | ImportJob], worker: int, error: str) -> list[WorkerReport]:
    """Return the reports of a worker that can start none of these jobs."""
    return [WorkerReport(job.transfer, worker, False, error) for job in jobs]
