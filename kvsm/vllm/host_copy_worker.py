"""`HostCopyWorker`: copies for vLLM's OffloadingConnector on a CPU, where vLLM itself has no worker.

vLLM lists device blocks one by one, group after group, and slots of `blocks_per_chunk` blocks each. The
blocks of a group are consecutive in their request, from block index i on. So the group uses its first slot
from position i % blocks_per_chunk on, and may use its last slot in part.

    blocks_per_chunk 4, a group of 5 blocks, block index 6     slots   | 9: . . 0 1 | 3: 2 3 4 . |

vLLM's connector asserts that each copy is good, so a failed copy stops the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.vllm.kv_cache_config import byte_rows
from kvsm.vllm.rank_copies import make_copies


class HostCopyWorker(OffloadingWorker):
    """Copies for the OffloadingConnector on one rank."""

    def __init__(self, kv_caches: Any, num_chunks: int, blocks_per_chunk: int) -> None:
        self._chunk = blocks_per_chunk
        rows = [block_rows(cache) for cache in kv_caches.tensors]
        self._copies = make_copies(rows, num_chunks * blocks_per_chunk, verify=False)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin a store, from device blocks into host chunks."""
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: bool) -> bool:
        """Begin a load, from host chunks into device blocks. Newer versions of vLLM also pass `expedited`."""
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def _submit(self, job_id: int, direction: Direction, device: Any, host: Any) -> bool:
        hosts = host_blocks(device, host.block_ids.tolist(), self._chunk)
        job = TransferJob(job_id, direction, pack(device.block_ids.tolist()), pack(hosts))
        self._copies.engine.submit(job)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        return [
            TransferResult(result.transfer, result.good, result.bytes, result.seconds)
            for result in self._copies.engine.poll()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs have ended."""
        self._copies.engine.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        self._copies.close()


def host_blocks(device: Any, slots: Sequence[int], blocks_per_chunk: int) -> list[int]:
    """Return the host block for each device block, in order.

    device: vLLM's `GPULoadStoreSpec`.
    Raises `TransferFailed` if the number of slots does not fit these blocks.
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
            "blocks each"
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
    """Return a `CanonicalKVCacheTensor` as `byte_rows`. Raises `ConfigError` if blocks are not contiguous."""
    tensor, page_bytes = cache.tensor, cache.page_size_bytes
    if not tensor[0].is_contiguous() or not 0 < page_bytes <= tensor.stride(0) * tensor.element_size():
        raise ConfigError(
            f"a KV cache tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has blocks that "
            f"are not {page_bytes} contiguous bytes; kvsm copies whole pages"
        )
    return byte_rows(tensor, page_bytes)
