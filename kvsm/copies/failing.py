"""A copy engine that fails on purpose: some transfers copy a part of their blocks, and end as bad.

A seed and the id of a transfer alone decide whether it fails and after how many blocks. So the same transfers
fail with every wrapped engine and in every order of ends.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from kvsm.copies.copy_engine import CopyEngine, CopyResult, WrappedCopyEngine
from kvsm.copies.pairs import checked_pairs, part_of
from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed


class FailingCopyEngine(WrappedCopyEngine):
    """A `CopyEngine` that wraps another one and makes some transfers fail.

    engine: the wrapped engine. It gets an invalid job unchanged, and refuses it whole.
    seed: engines with different seeds fail different transfers.
    rate: share of transfers that fail, 0 to 1.
    """

    def __init__(self, engine: CopyEngine, seed: int, rate: float) -> None:
        super().__init__(engine)
        self._seed, self._rate = seed, rate

    def submit(self, job: TransferJob, after: Any = None) -> None:
        random = self._draws(job.transfer)
        if random.random() < self._rate:
            job = self._part(job, random)
        self._engine.submit(job, after)

    def poll(self) -> list[CopyResult]:
        return [self._outcome(result) for result in self._engine.poll()]

    def _draws(self, transfer: int) -> Random:
        """Return the generator of a transfer. The first draw decides whether the transfer fails, the second
        after how many blocks."""
        return Random(f"fails {self._seed} {transfer}")

    def _part(self, job: TransferJob, random: Random) -> TransferJob:
        """Cut the job after a random number of blocks."""
        try:
            devices, hosts = checked_pairs(job, self.num_device_blocks, self.num_host_blocks)
        except TransferFailed:
            return job
        return part_of(job, devices, hosts, slice(random.randint(0, len(hosts))))

    def _outcome(self, result: CopyResult) -> CopyResult:
        if not result.good or self._draws(result.transfer).random() >= self._rate:
            return result
        return msgspec.structs.replace(
            result, good=False, error="made to fail after a part of its blocks", bytes=0
        )
