"""A second tier for vLLM's TieringOffloadingSpec, in memory, without threads and clocks.

Name it in `secondary_tiers` as {"type": "MemoryTier", "module_path": "kvsm.check.vllm_fuzz.memory_tier"}.
Copies end in order, each `steps` steps after it began. With `fails_every` 3, each third copy fails after half
of its blocks, and the tier drops the chunks that it could not read, as vLLM's own tiers do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob


class MemoryTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps the bytes of chunks by key.

    steps: the number of polls until a copy ends.
    fails_every: each copy whose number is a multiple of this fails; 0 for none.
    loaded: the number of chunks that it has loaded to the host.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, *args: Any, steps: int = 2, fails_every: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._steps, self._fails_every = steps, fails_every
        self._bytes = self._primary_kv_view.cast("B")
        self._size = self.block_size_bytes
        self._kept: dict[bytes, bytes] = {}
        self._asked: set[tuple[str, bytes]] = set()
        """(request, key) that was looked up before. The first lookup is always answered with RETRY."""
        self._jobs: list[tuple[int, TransferJob]] = []
        """(polls left, job), oldest first."""
        self._ended = self.loaded = 0

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether the tier has the key; RETRY at the first lookup by a request."""
        question = (req_context.req_id, key)
        if question not in self._asked:
            self._asked.add(question)
            return LookupResult.RETRY
        return LookupResult.HIT if key in self._kept else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks."""
        self._jobs.append((self._steps, job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks to the host."""
        self._jobs.append((self._steps, job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Count a step. Returns the results of the copies that end with it."""
        self._jobs = [(left - 1, job) for left, job in self._jobs]
        ended = []
        while self._jobs and self._jobs[0][0] <= 0:
            ended.append(self._copied(self._jobs.pop(0)[1]))
        return ended

    def _copied(self, job: TransferJob) -> JobResult:
        self._ended += 1
        chunks = [(bytes(key), int(chunk) * self._size) for key, chunk in zip(job.keys, job.chunk_ids)]
        fails = self._fails_every and self._ended % self._fails_every == 0
        good = chunks[: len(chunks) // 2] if fails else chunks
        for place, (key, first) in enumerate(good):
            there = slice(first, first + self._size)
            if not job.is_promotion:
                self._kept.setdefault(key, bytes(self._bytes[there]))
            elif key in self._kept:
                self._bytes[there] = self._kept[key]
                self.loaded += 1
            else:
                good = good[:place]
                break
        for key, _ in chunks[len(good) :] if job.is_promotion else ():
            self._kept.pop(key, None)
        is_good = len(good) == len(chunks)
        loaded = tuple(list(job.keys)[: len(good)]) if job.is_promotion and not is_good else None
        return JobResult(job_id=job.job_id, success=is_good, successful_keys=loaded, transfer_time=0.0)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        """Return an empty context: chunks are kept independently of requests."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the lookups of the request."""
        self._asked = {(name, key) for name, key in self._asked if name != req_context.req_id}

    def drain_jobs(self) -> None:
        """Let all copies end with the next poll."""
        self._jobs = [(0, job) for _, job in self._jobs]
