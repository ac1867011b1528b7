"""Host memory and copy engine of one rank: on a GPU streams, on a CPU platform threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvsm.copy_engines import CopyEngine, HostCopyEngine, HostPool, VerifyingCopyEngine
from kvsm.copy_engines.layout import block_bytes_of
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.errors import ConfigError


class RankCopies(NamedTuple):
    """engine: what copies. pool: the host memory, to be closed after it."""

    engine: CopyEngine
    pool: HostPool

    def close(self) -> None:
        """Let every copy end, and give the memory back."""
        self.engine.close()
        self.pool.close()


def make_copies(tensors: Sequence[Any], host_blocks: int, verify: bool) -> RankCopies:
    """Between the rows of these torch tensors and a new pool of `host_blocks` rows. Raises `ConfigError`."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"the KV cache is on {kind}; kvsm copies from NVIDIA GPUs and from host memory")
    is_host = kind == "cpu"
    locking = None if is_host else CUDA_PAGE_LOCKING
    pool = HostPool(host_blocks, block_bytes_of(tensors), page_locking=locking)
    try:
        device = list(tensors)
        engine: CopyEngine = (HostCopyEngine if is_host else CudaCopyEngine)(device, pool.blocks)
        if verify:
            engine = VerifyingCopyEngine(engine, pool.blocks, device if is_host else None)
    except BaseException:
        pool.close()
        raise
    return RankCopies(engine, pool)
