"""The ranks of the serving engine: the memory of each, where it computes, and what copies for it.

Compute on a rank is queued, like a model's kernels, and done in that order. When it is done depends on the
rank. A host rank computes before `launch` returns. A simulated rank lags behind its host as its seed says,
and notices a copy that overtakes compute (S12). A GPU computes when it gets to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsm.copies import (
    CopyEngine,
    FailingCopyEngine,
    FileCopyEngine,
    HostCopyEngine,
    HostPool,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
    VerifyingStatistics,
)
from kvsm.copies.checksums import BlockChecksums
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.errors import ConfigError

if TYPE_CHECKING:
    from kvsm.serving.run_options import RunOptions

WORD_BYTES = 8

Launch = Callable[[str, Sequence[int], Sequence[int], Callable[[], None]], None]


class HostBlocks(Protocol):
    """A host pool. `blocks`: its bytes, `[blocks, block_bytes]`."""

    blocks: NDArray[np.uint8]

    def close(self) -> None:
        """Give the pool back. No copy may be under way."""


class Rank(NamedTuple):
    """One rank.

    device: the device pool, `[blocks, block_bytes]`.
    words: the same in words of eight bytes if a block has whole ones, else in bytes.
    host: the host pool.
    engine: copies between the two.
    launch: queues compute: its name, device blocks it reads, device blocks it writes, what it does.
    synchronize: returns when everything that was launched is done.
    upload, download: bring arrays to where compute takes them, and back.
    verified: what `verify_copies` has counted; zeros if it was not asked for.
    checksums: what the host blocks must hold, if `verify_copies` was asked for.
    """

    device: Any
    words: Any
    host: HostBlocks
    engine: CopyEngine
    launch: Launch
    synchronize: Callable[[], None]
    upload: Callable[[NDArray[Any]], Any]
    download: Callable[[Any], NDArray[Any]]
    verified: Callable[[], VerifyingStatistics]
    checksums: BlockChecksums | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a device block."""
        return int(self.device.shape[1])


def make_rank(options: RunOptions, number: int) -> Rank:
    """Raises `ConfigError` for what this machine does not have."""
    rank = COPIES[options.copies].make(options, number)
    if options.verify_copies:
        verifying = _verifying(rank)
        rank = rank._replace(engine=verifying, verified=verifying.statistics, checksums=verifying.checksums)
    failing = FailingCopyEngine(rank.engine, options.seed + number, options.failure_rate)
    return rank._replace(engine=failing)


def _verifying(rank: Rank) -> VerifyingCopyEngine:
    host, device = rank.host.blocks, rank.device if isinstance(rank.device, np.ndarray) else None
    if isinstance(rank.engine, SimulatedCopyEngine):
        # Threads would make equal runs differ, so it checks without them. Its reads are watched for races
        # too.
        reads = partial(rank.engine.simulated.host_accesses, "check")
        return VerifyingCopyEngine(rank.engine, host, device, threads=0, reads=reads)
    return VerifyingCopyEngine(rank.engine, host, device)


def _host_rank(options: RunOptions, _number: int) -> Rank:
    device, host = _host_memory(options)
    return _numpy_rank(device, host, HostCopyEngine(device, host.blocks))


def _file_rank(options: RunOptions, number: int) -> Rank:
    device = np.zeros((options.device_blocks, options.block_bytes), dtype=np.uint8)
    with NamedTemporaryFile(prefix=f"kvsm-rank-{number}-") as file:
        engine = FileCopyEngine(device, file.name, options.host_places)
    # The file has no name any more. It goes with the engine, however the run ends.
    return _numpy_rank(device, engine, engine)


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


def _numpy_rank(device: NDArray[np.uint8], host: HostBlocks, engine: CopyEngine) -> Rank:
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
        raise ConfigError("copies is 'cuda', and PyTorch finds no GPU here; choose another way to copy")
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


class CopiesChoice(NamedTuple):
    """A way to copy, as `kvsm run --copies` offers it.

    make: makes rank `number` of a run. Raises `ConfigError` for what this machine does not have.
    told: who copies, for the help.
    has_virtual_time: whether the run has a virtual clock, and the order of copies and compute is watched.
    device_in_memory, host_in_memory: whether that pool takes memory of this machine.
    """

    make: Callable[[RunOptions, int], Rank]
    told: str
    has_virtual_time: bool = False
    device_in_memory: bool = True
    host_in_memory: bool = True


COPIES = {
    "host": CopiesChoice(_host_rank, "threads, in memory"),
    "file": CopiesChoice(_file_rank, "threads, to a temporary file", host_in_memory=False),
    "simulated": CopiesChoice(_simulated_rank, "a simulated device", has_virtual_time=True),
    "cuda": CopiesChoice(_cuda_rank, "a GPU", device_in_memory=False),
}
"""All ways to copy, by name. What lists, checks or explains them reads this."""
