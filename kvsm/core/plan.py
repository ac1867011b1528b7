"""What travels between the offload core and the workers: small, typed, picklable."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvsm.events import Direction
from kvsm.ids import Id, IdArray, Ids, unpack


class TransferJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker copies: device_blocks[i] and host_blocks[i] are a pair. Fixed when planned.

    A host block is the place of one device block in the host pool: place p of slot s is host block
    s * blocks_per_chunk + p. If a slot has one device block, host blocks are slots.

    keys: what the host blocks hold or will hold, keys[i] for host_blocks[i]. Empty unless the copy engine
        needs keys: for a host pool that outlives its process, or a disk.
    generations: which block of its key each host block of the host pool holds: generations[i] is the number
        of the event that planned the store of keys[i] there. Empty unless the host pool outlives its
        process. A job between the host pool and a disk names the blocks of the host pool.
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
    """What every rank copies from another engine: source_blocks[i] of that host pool to host_blocks[i]."""

    transfer: Id
    engine: str
    source_blocks: Ids
    host_blocks: Ids


class TransferPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every worker does in one engine step, before it computes.

    A worker waits for the transfers in `flush` that are in flight. Then it starts `loads` and `stores`, and
    waits for the ones that are in `flush`. Loads may overwrite what the step before read, and stores read
    what it wrote. So on a device that computes asynchronously, both start behind that step (order of copies,
    S12).
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
    """From the submission to this worker to the first byte of its copy (us). None: the worker does not know.
    A duration, because the clock of a worker may be of another process."""
    copied_us: int | None = None
    """From the first byte of its copy to the last (us). None: the worker does not know."""

    def arguments(self) -> tuple[int, int, bool, str, int | None, int | None]:
        """What `Offloader.report` takes."""
        return self.transfer, self.worker, self.good, self.error, self.queued_us, self.copied_us


def failed_reports(jobs: Iterable[TransferJob | ImportJob], worker: int, error: str) -> list[WorkerReport]:
    """Return the reports of a worker that can start none of these jobs."""
    return [WorkerReport(job.transfer, worker, False, error) for job in jobs]
