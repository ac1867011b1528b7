"""vLLM's own two offload connectors on a CPU, for `kvsm bench vllm --peers`.

vLLM's connectors copy with CUDA, and refuse to run without it. Here each gets another worker, through vLLM's
own interface: an `OffloadingWorker` for the OffloadingConnector, a copy backend for the
SimpleCPUOffloadConnector. Both copy with kvsm's host copy engine. So all contestants copy equally fast, and
differ only in their decisions and the cost of these. The scheduler's side is vLLM's, unchanged.

This module is for the benchmark only. Nothing else imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack
from kvsm.vllm.host_copy_worker import HostCopyWorker
from kvsm.vllm.kv_cache_config import block_bytes_of, block_tensors
from kvsm.vllm.rank_copies import RankCopies, make_copies

# The OffloadingConnector.


class HostCopySpec(CPUOffloadingSpec):
    """vLLM's `CPUOffloadingSpec` with its own manager, and a worker that copies in host memory."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker of one rank. kv_caches: vLLM's `CanonicalKVCaches`."""
        if self._worker is None:
            self._worker = HostCopyWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._worker


# The SimpleCPUOffloadConnector.


class HostCopySimpleConnector(SimpleCPUOffloadConnector):
    """vLLM's `SimpleCPUOffloadConnector` with a worker that copies in host memory."""

    worker_handler: Any

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.worker_handler is not None:
            capacity = self.worker_handler.cpu_capacity_bytes
            self.worker_handler = HostCopySimpleWorker(vllm_config, kv_cache_config, capacity)

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        super().shutdown()
        if self.worker_handler is not None:
            self.worker_handler.shutdown()


class HostCopySimpleWorker(SimpleCPUOffloadWorker):
    """vLLM's worker, with another copy backend and without CUDA streams."""

    _backend: Any

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the device pool, and make the host pool."""
        tensors = block_tensors(self.kv_cache_config, kv_caches)
        self.num_cpu_blocks = max(1, self.cpu_capacity_bytes // block_bytes_of(self.kv_cache_config))
        self._backend = HostCopyBackend(make_copies(tensors, self.num_cpu_blocks, verify=False))

    def wait_for_save(self) -> None:
        """Begin the step's stores. On a CPU, the step's compute has ended by now."""
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                is_store=True,
                event_idx=metadata.store_event,
                events_list=self._store_events,
            )

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None


class HostCopyBackend:
    """A copy backend in vLLM's sense: it begins copies, and returns an event for each."""

    def __init__(self, copies: RankCopies) -> None:
        self._copies = copies
        self._begun = 0
        self._ended: set[int] = set()

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
    ) -> None:
        """Begin a copy, and append (`event_idx`, its event) to `events_list`."""
        self._begun += 1
        direction = Direction.STORE if is_store else Direction.LOAD
        device, host = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        self._copies.engine.submit(TransferJob(self._begun, direction, pack(device), pack(host)))
        events_list.append((event_idx, CopyEvent(self, self._begun)))

    def has_ended(self, copy: int) -> bool:
        """Whether this copy has ended. Raises `TransferFailed` if any copy failed: vLLM's interface cannot
        report a failure."""
        for result in self._copies.engine.poll():
            if not result.good:
                raise TransferFailed(f"copy {result.transfer} failed: {result.error}")
            self._ended.add(result.transfer)
        if copy not in self._ended:
            return False
        self._ended.remove(copy)
        return True

    def wait(self, copy: int) -> None:
        """Return when this copy has ended."""
        self._copies.engine.wait([copy])

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        self._copies.close()


class CopyEvent:
    """The end of one copy, with the methods of `torch.Event`."""

    def __init__(self, backend: HostCopyBackend, copy: int) -> None:
        self._backend, self._copy = backend, copy

    def query(self) -> bool:
        """Whether the copy has ended. vLLM does not call this again once it is true."""
        return self._backend.has_ended(self._copy)

    def synchronize(self) -> None:
        """Return when the copy has ended."""
        self._backend.wait(self._copy)
