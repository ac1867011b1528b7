"""The ranks of the serving engine: their memory, their compute and their copy engines.

Compute on a rank is queued, like a model's kernels, and runs in that order. A host rank computes before
`launch` returns. A simulated rank lags behind its host by delays that are drawn from its seed, and detects a
copy that overtakes compute (S12). A GPU computes asynchronously.
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
        """Free the pool. No copy may be in flight."""


class Rank(NamedTuple):
    """One rank.

    device: the device pool, `[blocks, block_bytes]`.
    words: the same memory in words of eight bytes if a block consists of whole words, else in bytes.
    host: the host pool.
    engine: copies between device and host.
    launch: queues compute: its name, the device blocks it reads, those it writes, the function that runs.
    synchronize: returns when all launched compute has run.
    upload, download: copy an array to the device, and back to the host.
    verified: the counts of `verify_copies`; zeros without that option.
    checksums: the checksums of the host blocks with `verify_copies`; None without it.
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
    """Make a rank. Raises `ConfigError` if this machine lacks what it needs."""
    rank = COPIES[options.copies].make(options, number)
    if options.verify_copies:
        verifying = _verifying(rank)
        rank = rank._replace(engine=verifying, verified=verifying.statistics, checksums=verifying.checksums)
    failing = FailingCopyEngine(rank.engine, options.seed + number, options.failure_rate)
    return rank._replace(engine=failing)


def _verifying(rank: Rank) -> VerifyingCopyEngine:
    host, device = rank.host.blocks, rank.device if isinstance(rank.device, np.ndarray) else None
    if isinstance(rank.engine, SimulatedCopyEngine):
        # Threads would make equal runs differ, so it checks without threads. Its reads are checked for races,
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
    # The file is unlinked by now, so it disappears with the engine, however the run ends.
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
        # Page-locked and asynchronous, so that the host runs ahead of the device, as it does in serving.
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
    """A value of `kvsm run --copies`.

    make: makes rank `number` of a run. Raises `ConfigError` if this machine lacks what it needs.
    told: what makes the copies, for the help.
    has_virtual_time: whether events have virtual times, and the order of copies and compute is checked.
    device_in_memory, host_in_memory: whether that pool takes main memory of this machine.
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
"""The values of `kvsm run --copies`, by name."""
