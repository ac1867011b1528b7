"""Secondary tiers for `SecondaryTierMachine`: good ones, and some with one fault each."""

# ruff: noqa: ARG002 (what is broken does not look at its arguments)

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvsm.check.vllm_fuzz.memory_tier import MemoryTier
from kvsm.testing import SecondaryTierMachine


def TierOf(kind: type[MemoryTier]) -> type[SecondaryTierMachine]:  # noqa: N802 (it is a class)
    """The machine for a tier of this class."""

    class Machine(SecondaryTierMachine):
        capacity = getattr(kind, "capacity", None)

        def make_tier(self, view: memoryview) -> Any:
            return kind(None, view, "mine")

    return Machine


class Bounded(MemoryTier):
    """Keeps the last three chunks."""

    capacity = 3

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = super().get_finished_jobs()
        while len(self._kept) > self.capacity:
            del self._kept[next(iter(self._kept))]
        return results


# One fault each.


class LoadsTheNextChunk(MemoryTier):
    def _copied(self, job: TransferJob) -> JobResult:
        if job.is_promotion and len(self._kept) > 1:
            keys = list(self._kept)
            other = [keys[(keys.index(key) + 1) % len(keys)] if key in keys else key for key in job.keys]
            job = TransferJob(job.job_id, other, job.chunk_ids, True, job.req_context)
        return super()._copied(job)


class HitsEverything(MemoryTier):
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.HIT


class ForgetsAStore(MemoryTier):
    stores = 0

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self.stores += 1
        if self.stores == 3:
            self._kept.clear()


class EndsTwice(MemoryTier):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [result for result in super().get_finished_jobs() for _ in range(2)]


class LosesAJob(MemoryTier):
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [result for result in super().get_finished_jobs() if result.job_id != 3]


class ClaimsFailedLoads(MemoryTier):
    """Drops chunks, and says of each load that it succeeded."""

    def _copied(self, job: TransferJob) -> JobResult:
        if job.is_promotion:
            self._kept.pop(next(iter(job.keys)), None)
        result = super()._copied(job)
        result.success, result.successful_keys = True, None
        return result


class NeverAnswers(MemoryTier):
    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        return LookupResult.RETRY


class WritesElsewhere(MemoryTier):
    """Writes a whole load behind its last chunk, too."""

    def _copied(self, job: TransferJob) -> JobResult:
        result = super()._copied(job)
        behind = (int(max(job.chunk_ids)) + 1) * self._size
        if job.is_promotion and behind < len(self._bytes):
            self._bytes[behind : behind + 1] = b"\0"
        return result


class KeepsTooMuch(MemoryTier):
    capacity = 3


class KeepsAThread(MemoryTier):
    def shutdown(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(2.0,), daemon=True).start()


class Raises(MemoryTier):
    def touch(self, keys: Any, req_context: Any) -> None:
        if len(keys) == 3:
            raise KeyError(keys[0])
