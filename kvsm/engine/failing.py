"""A copy engine that fails on purpose: some transfers copy a part of their blocks, and end as bad.

Which, and how much of them, follows from a seed and the transfer's id alone: so the same copies fail
whoever carries them out, and in whatever order they end.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec

from kvsm.cuda_io import CopyEngine, CopyResult
from kvsm.ids import listed, pack
from kvsm.plan import TransferJob


class FailingCopyEngine:
    """A `CopyEngine` over another one. rate: share of transfers that fail, 0 to 1. Engines of different
    seeds fail different transfers."""

    def __init__(self, engine: CopyEngine, seed: int, rate: float) -> None:
        self._engine, self._seed, self._rate = engine, seed, rate
        self._failing: dict[int, str] = {}
        """Live transfers that fail, and why."""

    @property
    def num_host_blocks(self) -> int:
        return self._engine.num_host_blocks

    def submit(self, job: TransferJob) -> None:
        random = Random(f"fails {self._seed} {job.transfer}")
        if random.random() >= self._rate:
            self._engine.submit(job)
            return
        devices, hosts = map(listed, job.pairs())
        copied = random.randint(0, len(hosts))
        part = msgspec.structs.replace(
            job, device_blocks=pack(devices[:copied]), host_blocks=pack(hosts[:copied])
        )
        self._engine.submit(part)
        self._failing[job.transfer] = f"made to fail after {copied} of {len(hosts)} blocks"

    def poll(self) -> list[CopyResult]:
        return [self._outcome(result) for result in self._engine.poll()]

    def _outcome(self, result: CopyResult) -> CopyResult:
        error = self._failing.pop(result.transfer, "")
        if not error:
            return result
        return msgspec.structs.replace(result, good=False, error=result.error or error, bytes=0)

    def wait(self, transfers: Iterable[int]) -> None:
        self._engine.wait(transfers)

    def close(self) -> None:
        self._engine.close()
