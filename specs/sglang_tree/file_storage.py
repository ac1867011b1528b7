"""Machines for SGLang's storage in files (`HiCacheFile`), based on `kvsm.testing.SecondaryTierMachine`.

It needs vLLM and SGLang, because the machine calls vLLM's interface. `FileTier` makes the calls of SGLang's
cache controller: `batch_exists`, `batch_set` and `batch_get`, where an error counts as a missing page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvsm.testing import SecondaryTierMachine


class FileTier(SecondaryTierManager):  # type: ignore[misc]
    """`HiCacheFile` behind vLLM's interface. Jobs end at once."""

    def __init__(self, view: memoryview, directory: Path, options: dict[str, Any]) -> None:
        super().__init__(None, view, "HiCacheFile")
        self.pages = torch.frombuffer(view, dtype=torch.uint8).view(-1, self.block_size_bytes)
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "model", extra_config=options)
        self.storage = HiCacheFile(config, str(directory))
        self._finished: list[JobResult] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:  # noqa: ARG002
        """Whether the storage has the page."""
        return LookupResult.HIT if self.storage.batch_exists([name_of(key)]) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Call `batch_set`, as the controller's `_generic_page_set` does."""
        good = self.storage.batch_set(list(map(name_of, job_metadata.keys)), self._pages_of(job_metadata))
        self._finished.append(JobResult(job_metadata.job_id, bool(good)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Call `batch_get` with new pages, as the controller's `_generic_page_get` does."""
        keys, pages = list(job_metadata.keys), self._pages_of(job_metadata)
        try:
            found = self.storage.batch_get(
                list(map(name_of, keys)), [torch.empty_like(page) for page in pages]
            )
        except Exception:  # the controller logs the error, and counts all pages as missing
            found = []
        count = next((place for place, page in enumerate(found) if page is None), len(found))
        for page, got in zip(pages, found[:count]):
            page.copy_(got)
        self._finished.append(JobResult(job_metadata.job_id, count == len(keys), keys[:count]))

    def _pages_of(self, job: TransferJob) -> list[Any]:
        return [self.pages[int(chunk)] for chunk in job.chunk_ids]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of all jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        """Return an empty context."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Do nothing: jobs end at once."""


def name_of(key: bytes) -> str:
    """Return the name of a page, which replaces its hash."""
    return key.hex()


class FileStorage(SecondaryTierMachine):
    """`HiCacheFile` without a limit."""

    restarts = True
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def make_tier(self, view: memoryview) -> Any:
        return FileTier(view, self.directory, self.options)

    def path_of(self, key: bytes) -> Path | None:
        storage = self.tier.storage
        return Path(storage.file_path, f"{storage._get_suffixed_key(name_of(key))}.bin")


class FileStorageWithIntactFiles(FileStorage):
    """The same storage, but the machine neither removes nor truncates its files."""

    damage = None


class FileStorageWithMetadataCache(FileStorageWithIntactFiles):
    """The same storage with its cache of positive answers."""

    options = {"enable_metadata_cache": True}  # noqa: RUF012 (never changed)
