"""The ranks of the small engine: the memory of each, where it computes, and what copies for it.

What computes on a rank is queued, as a model's kernels are, and is done in that order; when, depends on the
rank. A host rank computes before `launch` returns. A simulated one is behind its host by as much as its seed
says, and sees whether a copy overtakes it (S12). A GPU does it when it gets to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines import (
    CopyEngine,
    FailingCopyEngine,
    HostCopyEngine,
    HostPool,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
    VerifyingStatistics,
)
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.errors import ConfigError
from kvsm.serving.run_options import RunOptions

WORD_BYTES = 8

Launch = Callable[[str, Sequence[int], Sequence[int], Callable[[], None]], None]


class Rank(NamedTuple):
    """One rank. device: its pool, `[blocks, block_bytes]`; words: the same in words of eight bytes if a block
    has whole ones, else in bytes. launch: queue compute: name, device blocks read, device blocks written, and
    what it does. synchronize: return when all that was launched is done. upload, download: arrays to where
    compute takes them, and back. verified: what `verify_copies` has counted, if it was asked for."""

    device: Any
    words: Any
    host: HostPool
    engine: CopyEngine
    launch: Launch
    synchronize: Callable[[], None]
    upload: Callable[[NDArray[Any]], Any]
    download: Callable[[Any], NDArray[Any]]
    verified: Callable[[], VerifyingStatistics]

    @property
    def block_bytes(self) -> int:
        return int(self.device.shape[1])


def make_rank(options: RunOptions, number: int) -> Rank:
    """Raises `ConfigError` for what this machine does not have."""
    make = {"host": _host_rank, "simulated": _simulated_rank, "cuda": _cuda_rank}[options.copies]
    rank = make(options, number)
    if options.verify_copies:
        verifying = _verifying(rank)
        rank = rank._replace(engine=verifying, verified=verifying.statistics)
    failing = FailingCopyEngine(rank.engine, options.seed + number, options.failure_rate)
    return rank._replace(engine=failing)


def _verifying(rank: Rank) -> VerifyingCopyEngine:
    host, device = rank.host.blocks, rank.device if isinstance(rank.device, np.ndarray) else None
    if isinstance(rank.engine, SimulatedCopyEngine):
        # Equal runs are to be equal, so its checks have no thread of their own; and they are watched too.
        reads = partial(rank.engine.simulated.host_reads, "check")
        return VerifyingCopyEngine(rank.engine, host, device, threads=0, reads=reads)
    return VerifyingCopyEngine(rank.engine, host, device)


def _host_rank(options: RunOptions, _number: int) -> Rank:
    device, host = _host_memory(options)
    return _numpy_rank(device, host, HostCopyEngine(device, host.blocks))


def _simulated_rank(options: RunOptions, number: int) -> Rank:
    device, host = _host_memory(options)
    engine = SimulatedCopyEngine(device, host.blocks, options.seed + number)
    simulated = engine.simulated
    return _numpy_rank(device, host, engine)._replace(
        launch=simulated.launch, synchronize=simulated.synchronize
    )


def _host_memory(options: RunOptions) -> tuple[NDArray[np.uint8], HostPool]:
    device = np.zeros((options.device_blocks, options.block_bytes), dtype=np.uint8)
    return device, HostPool(options.host_places, options.block_bytes)


def _numpy_rank(device: NDArray[np.uint8], host: HostPool, engine: CopyEngine) -> Rank:
    return Rank(
        device,
        device.view("<u8") if device.shape[1] % WORD_BYTES == 0 else device,
        host,
        engine,
        launch=lambda _name, _reads, _writes, action: action(),
        synchronize=lambda: None,
        upload=lambda array: array,
        download=lambda array: array,
        verified=VerifyingStatistics,
    )


def _cuda_rank(options: RunOptions, _number: int) -> Rank:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"copies is 'cuda', which needs torch and cuda-bindings: {error}") from error
    if not torch.cuda.is_available():
        raise ConfigError("copies is 'cuda', and PyTorch finds no GPU here; use 'host' or 'simulated'")
    device = torch.zeros((options.device_blocks, options.block_bytes), dtype=torch.uint8, device="cuda")
    host = HostPool(options.host_places, options.block_bytes, page_locking=CUDA_PAGE_LOCKING)

    def upload(array: NDArray[Any]) -> Any:
        # Page-locked and not waited for, so that the host runs ahead of the device, as it does in serving.
        signed = array.view(np.int64) if array.dtype == np.uint64 else array
        return torch.from_numpy(signed).pin_memory().to(device.device, non_blocking=True)

    return Rank(
        device,
        device.view(torch.int64) if options.block_bytes % WORD_BYTES == 0 else device,
        host,
        CudaCopyEngine(device, host.blocks),
        launch=lambda _name, _reads, _writes, action: action(),
        synchronize=torch.cuda.synchronize,
        upload=upload,
        download=lambda tensor: tensor.cpu().numpy(),
        verified=VerifyingStatistics,
    )
