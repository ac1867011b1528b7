"""`KvsmOffloadingWorker`: kvsm's copy engine of one rank behind vLLM's `OffloadingWorker`.

vLLM names device blocks one by one, group after group, and slots of `blocks_per_chunk` blocks each. A group's
blocks follow each other in its request, from block index i on: its first slot is entered at place
i % blocks_per_chunk, and its last one may be left early.

    blocks_per_chunk 4, a group of 5 blocks, block index 6     slots   | 9: . . 0 1 | 3: 2 3 4 . |

vLLM has no word for a copy that failed: it would take a failed load for loaded, and a failed store for
stored. So a copy that fails stops the engine, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.plan import TransferJob
from kvsm.vllm.kv_cache_config import byte_rows
from kvsm.vllm.rank_copies import RankCopies, make_copies

log = init_logger("vllm.kvsm")


class KvsmOffloadingWorker(OffloadingWorker):
    """Rank `rank`. caches: vLLM's `CanonicalKVCacheTensor`s. Raises `ConfigError`."""

    def __init__(self, rank: int, caches: Sequence[Any], num_slots: int, blocks_per_chunk: int) -> None:
        self._rank, self._chunk = rank, blocks_per_chunk
        self._rows = [block_rows(cache) for cache in caches]
        self._num_slots = num_slots
        self._copies = self._make_copies()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, Direction.STORE, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._submit(job_id, Direction.LOAD, dst_spec, src_spec)
        return True

    def _submit(self, job_id: int, direction: Direction, device: Any, host: Any) -> None:
        num_slots = getattr(host, "num_slots", 0)  # vLLM's own managers do not say.
        if num_slots > self._num_slots:
            # Pipeline stages may have different numbers of layers, so the scheduler's stage may have counted
            # more slots. This is the first job, so nothing is lost.
            self._copies.close()
            self._num_slots = num_slots
            self._copies = self._make_copies()
        hosts = host_blocks(device, host.block_ids.tolist(), self._chunk)
        blocks = device.block_ids.tolist()
        self._copies.engine.submit(TransferJob(job_id, direction, pack(blocks), pack(hosts)))

    def get_finished(self) -> list[TransferResult]:
        """Raises `TransferFailed` for a copy that failed."""
        results = self._copies.engine.poll()
        for result in results:
            if not result.good:
                text = (
                    f"a {result.direction.name.lower()} failed on rank {self._rank}: {result.error}. vLLM's "
                    "OffloadingConnector cannot be told, and would serve wrong tokens; KvsmConnector can, "
                    "and has such a request computed again"
                )
                log.error("kvsm: %s", text)
                raise TransferFailed(text)
        return [TransferResult(one.transfer, True, one.bytes, one.seconds) for one in results]

    def wait(self, job_ids: set[int]) -> None:
        self._copies.engine.wait(sorted(job_ids))

    def shutdown(self) -> None:
        self._copies.close()

    def _make_copies(self) -> RankCopies:
        copies = make_copies(self._rows, self._num_slots * self._chunk, verify=False)
        log.info("kvsm: rank %d has %d host slots of %d blocks", self._rank, self._num_slots, self._chunk)
        return copies


def host_blocks(device: Any, slots: Sequence[int], blocks_per_chunk: int) -> list[int]:
    """The place in the host pool for each device block of vLLM's `GPULoadStoreSpec`, in its order.

    Raises `TransferFailed` if these are not the slots of these blocks.
    """
    entered = [index % blocks_per_chunk for index in device.block_indices]
    counts = [
        -(-(first + size) // blocks_per_chunk) if size else 0
        for first, size in zip(entered, device.group_sizes)
    ]
    if sum(counts) != len(slots):
        raise TransferFailed(
            f"vLLM names {len(slots)} slots for groups of {list(device.group_sizes)} blocks from block "
            f"indices {list(device.block_indices)} on, which are {sum(counts)} slots of {blocks_per_chunk} "
            "blocks"
        )
    places: list[int] = []
    left = list(slots)
    for first, size, count in zip(entered, device.group_sizes, counts):
        of_group, left = left[:count], left[count:]
        places += [
            of_group[place // blocks_per_chunk] * blocks_per_chunk + place % blocks_per_chunk
            for place in range(first, first + size)
        ]
    return places


def block_rows(cache: Any) -> Any:
    """A `CanonicalKVCacheTensor` as `byte_rows`. Raises `ConfigError` if a block is not contiguous."""
    tensor, page_bytes = cache.tensor, cache.page_size_bytes
    if not tensor[0].is_contiguous() or not 0 < page_bytes <= tensor.stride(0) * tensor.element_size():
        raise ConfigError(
            f"a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has blocks that "
            f"are not {page_bytes} contiguous bytes; kvsm copies whole pages"
        )
    return byte_rows(tensor, page_bytes)
