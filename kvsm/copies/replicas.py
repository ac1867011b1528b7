"""A copy engine for ranks that hold the same KV bytes and share one host pool.

The KV cache of some models is the same on several ranks: with latent attention (MLA), or with fewer KV heads
than ranks. Such ranks are replicas. Their host pool has one row for a block, and each replica loads that row.
A store writes each row once: every replica gets the same job, and copies its own part of the blocks. The
parts are of equal size and consecutive, so that runs of blocks stay together.

Why this is safe:

- **A load reads what was stored.** A transfer ends when every rank has reported it (publish after commit,
  S2). So no load of a block is planned on any rank before the replica that writes it has ended the store.
- **A failure counts for all.** If one replica reports its part as failed, the store fails for all ranks.
- **A row is not overwritten while it is read.** Its slot is free again when every rank has reported the load
  (no reuse in flight, S3). The slot of a copy that was given up is never used again.
"""

from __future__ import annotations

from typing import Any

from kvsm.copies.copy_engine import CopyEngine, WrappedCopyEngine
from kvsm.copies.pairs import checked_pairs, part_of
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction


class ReplicaCopyEngine(WrappedCopyEngine):
    """A `CopyEngine` that wraps another one, for one of several ranks with a shared host pool.

    engine: the wrapped engine. Its host pool is the shared one. It gets an invalid job unchanged, so that all
        replicas refuse it.
    replicas: number of ranks that share the host pool.
    number: index of this replica, from 0.

    Raises `ConfigError`.
    """

    def __init__(self, engine: CopyEngine, replicas: int, number: int) -> None:
        if not 0 <= number < replicas:
            raise ConfigError(f"number is {number}; it must be from 0 to {replicas - 1}")
        super().__init__(engine)
        self._replicas, self._number = replicas, number

    def submit(self, job: TransferJob, after: Any = None) -> None:
        self._engine.submit(self._part(job) if job.direction is Direction.STORE else job, after)

    def _part(self, job: TransferJob) -> TransferJob:
        """Return the part of a store that this replica writes."""
        try:
            devices, hosts = checked_pairs(job, self.num_device_blocks, self.num_host_blocks)
        except TransferFailed:
            return job
        ours = slice(*(len(hosts) * number // self._replicas for number in (self._number, self._number + 1)))
        return part_of(job, devices, hosts, ours)
