"""Host memory and copy engine of one rank. On a GPU streams copy, on a CPU platform threads.

Without `hand_over_directory` the host memory has no file: other processes cannot read it, and a crash leaves
nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.copy_engines import CopyEngine, HostCopyEngine, HostPool, VerifyingCopyEngine
from kvsm.copy_engines.layout import block_bytes_of
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.errors import ConfigError

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3
"""Between two looks at copies that a step waits for. The pause doubles each time."""


def pauses() -> Iterator[float]:
    """How long to pause between two looks at copies that a step waits for (s), without end."""
    pause_s = SHORTEST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class RankCopies(NamedTuple):
    """A copy engine and the host memory that it uses."""

    engine: CopyEngine
    pool: HostPool

    def close(self) -> None:
        """Wait for every copy, and free the memory."""
        self.engine.close()
        self.pool.close()


def make_copies(
    tensors: Sequence[Any], host_blocks: int, verify: bool, path: Path | None = None
) -> RankCopies:
    """An engine that copies between the rows of these tensors and a new host pool.

    host_blocks: rows of the host pool.
    verify: whether loads compare checksums.
    path: a file for the host pool, from which engines of this user may copy. None: no other process reads it.
    Raises `ConfigError`.
    """
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"the KV cache is on {kind}; kvsm copies from NVIDIA GPUs and from host memory")
    locking = None if kind == "cpu" else CUDA_PAGE_LOCKING
    pool = HostPool(host_blocks, block_bytes_of(tensors), path=path, page_locking=locking)
    try:
        return RankCopies(_make_engine(tensors, pool, verify), pool)
    except BaseException:
        pool.close()
        raise


def moved_copies(copies: RankCopies, tensors: Sequence[Any], verify: bool) -> RankCopies:
    """The same host pool with a KV cache that has moved into these tensors. No copy may be live.

    The checksums of blocks stored before are lost, so loads of them are not checked.
    """
    copies.engine.close()
    return RankCopies(_make_engine(tensors, copies.pool, verify), copies.pool)


def _make_engine(tensors: Sequence[Any], pool: HostPool, verify: bool) -> CopyEngine:
    device, is_host = list(tensors), tensors[0].device.type == "cpu"
    engine: CopyEngine = (HostCopyEngine if is_host else CudaCopyEngine)(device, pool.blocks)
    if verify:
        engine = VerifyingCopyEngine(engine, pool.blocks, device if is_host else None)
    return engine
