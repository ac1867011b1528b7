"""Host memory and copy engine of one rank. On a GPU, streams copy; on a CPU platform, threads copy.

Host memory is in a file only if other engines read it (`hand_over_directory`), ranks share it, or the next
run reuses it (`pool_dir`). A file that ranks share is unlinked once all of them have opened it, so a crash
leaves no file behind. A pool that is kept for the next run stays under its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.copies import (
    CopyEngine,
    HostCopyEngine,
    HostPool,
    KeptPool,
    ReplicaCopyEngine,
    VerifyingCopyEngine,
)
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.layout import block_bytes_of, make_layout
from kvsm.cuda_io import CUDA_PAGE_LOCKING, CudaCopyEngine
from kvsm.errors import ConfigError
from kvsm.vllm.canonical_layout import CanonicalRows
from kvsm.vllm.copy_cores import copy_cores

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3
"""The pauses between two polls of copies that a step waits for: each is twice the one before."""

A_MOMENT_S = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6)
"""The pauses of a step that computes nothing, as long as copies are in flight."""


OTHERS_WAIT_S, KEPT_WAIT_S = 300.0, 60.0
"""How long a rank waits for another one that makes a shared pool, and for the end of a kept pool's last run
(s)."""

CHECKSUMS = "-checksums"
"""The suffix of a checksum file: it is appended to the name of its pool's file."""


class KeptPlace(NamedTuple):
    """The file of a rank's kept pool, beside which its checksums are, and what the pool's bytes mean."""

    path: Path
    keep: KeptPool


def pauses() -> Iterator[float]:
    """Yield the pauses between two polls of copies that a step waits for (s), without end."""
    pause_s = SHORTEST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class HostSharing(NamedTuple):
    """How the ranks of an engine share a host pool.

    path: the file that all of them map.
    ranks: the number of ranks that map it.
    rank: the number of this rank.
    replicas: the number of consecutive ranks that hold the same bytes.
    """

    path: Path
    ranks: int
    rank: int
    replicas: int

    def kept_at(self, place: KeptPlace | None) -> HostSharing:
        """Return a copy with the file of a kept pool; None: this sharing itself."""
        return self if place is None else self._replace(path=place.path)

    @property
    def number(self) -> int:
        """The number of this rank among its replicas, from 0."""
        return self.rank % self.replicas

    def pool(
        self,
        num_blocks: int,
        block_bytes: int,
        replicas: int,
        suffix: str = "",
        keep: KeptPool | None = None,
        **more: Any,
    ) -> HostPool:
        """Make or open a pool that these ranks share.

        replicas: the number of consecutive ranks that share rows.
        suffix: appended to the file's name.
        """
        return HostPool(
            num_blocks,
            block_bytes,
            path=self.path.with_name(self.path.name + suffix),
            ranks=self.ranks,
            rank=self.rank,
            replicas=replicas,
            nameless=keep is None,
            keep=keep,
            **more,
        )


class RankCopies(NamedTuple):
    """A copy engine and the host memory that it uses.

    checksums: the pool of shared or kept checksums, if any.
    kept: whether both pools outlive this process.
    """

    engine: CopyEngine
    pool: HostPool
    checksums: HostPool | None = None
    kept: bool = False

    def close(self) -> None:
        """Wait for every copy, and free the memory."""
        self.engine.close()
        self.pool.close()
        if self.checksums is not None:
            self.checksums.close()


def make_copies(
    tensors: Sequence[Any],
    host_blocks: int,
    verify: bool,
    path: Path | None = None,
    sharing: HostSharing | None = None,
    canonical: CanonicalRows | None = None,
    kept: KeptPlace | None = None,
) -> RankCopies:
    """Make an engine that copies between the rows of these tensors and a new host pool, or a kept one.

    host_blocks: rows of the host pool.
    verify: whether loads compare checksums.
    path: a file for the host pool, from which engines of this user may copy. None: no other process reads it.
    sharing: how ranks share the host pool; None: this rank has its own.
    canonical: the tensors in parts, and the place of each part on the host; None: one after another.
    kept: where the host pool outlives this process; None: it does not.
    Raises `ConfigError`.
    """
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"the KV cache is on {kind}; kvsm copies from NVIDIA GPUs and from host memory")
    row_bytes = block_bytes_of(tensors) if canonical is None else canonical.row_bytes
    locking = None if kind == "cpu" else CUDA_PAGE_LOCKING
    keep = None if kept is None else kept.keep
    wait_s = OTHERS_WAIT_S if kept is None else KEPT_WAIT_S
    if sharing is not None:
        sharing = sharing.kept_at(kept)
        together = sharing.replicas if canonical is None else sharing.ranks
        pool = sharing.pool(
            host_blocks, row_bytes, together, keep=keep, page_locking=locking, lock_timeout_s=wait_s
        )
    else:
        path = path if kept is None else kept.path
        pool = HostPool(
            host_blocks, row_bytes, path=path, keep=keep, page_locking=locking, lock_timeout_s=wait_s
        )
    checksums = None
    try:
        if kept is not None or (verify and sharing is not None):
            checksums = _checksum_pool(host_blocks, sharing, kept)
        engine = _make_engine(tensors, pool, checksums, verify, kept is not None, sharing, canonical)
    except BaseException:
        pool.close()
        if checksums is not None:
            checksums.close()
        raise
    return RankCopies(engine, pool, checksums, kept is not None)


def _checksum_pool(host_blocks: int, sharing: HostSharing | None, kept: KeptPlace | None) -> HostPool:
    keep = None if kept is None else kept.keep
    if sharing is not None:
        return sharing.pool(host_blocks, CHECKSUM_BYTES, sharing.replicas, CHECKSUMS, keep=keep)
    assert kept is not None
    return HostPool(
        host_blocks, CHECKSUM_BYTES, path=kept.path.with_name(kept.path.name + CHECKSUMS), keep=keep
    )


def moved_copies(
    copies: RankCopies,
    tensors: Sequence[Any],
    verify: bool,
    sharing: HostSharing | None = None,
    canonical: CanonicalRows | None = None,
) -> RankCopies:
    """Make a new copy engine for the same host pool, after the KV cache has moved into these tensors.

    No copy may be in flight. Checksums without a pool of their own are lost, so loads of blocks that were
    stored before are not checked.
    """
    copies.engine.close()
    engine = _make_engine(tensors, copies.pool, copies.checksums, verify, copies.kept, sharing, canonical)
    return copies._replace(engine=engine)


def _make_engine(
    tensors: Sequence[Any],
    pool: HostPool,
    checksums: HostPool | None,
    verify: bool,
    kept: bool,
    sharing: HostSharing | None,
    canonical: CanonicalRows | None,
) -> CopyEngine:
    device, offsets, parts = list(tensors), None, None
    if canonical is not None:
        device, offsets = canonical.tensors, canonical.offsets
        layout, _ = make_layout(device, pool.blocks, offsets)
        parts = [(offset, rows.row_bytes) for offset, rows in zip(layout.offsets, layout.tensors)]
    is_host = tensors[0].device.type == "cpu"
    engine: CopyEngine
    if is_host:
        engine = _beside_the_model(HostCopyEngine(device, pool.blocks, offsets=offsets))
    else:
        engine = CudaCopyEngine(device, pool.blocks, offsets=offsets)
    if verify or checksums is not None:
        readable = device if is_host and verify else None
        table = None if checksums is None else checksums.blocks
        engine = VerifyingCopyEngine(
            engine,
            pool.blocks,
            readable,
            table=table,
            parts=parts,
            kept=kept,
            every_load=verify,
        )
    if sharing is not None and sharing.replicas > 1:
        engine = ReplicaCopyEngine(engine, sharing.replicas, sharing.number)
    return engine


def _beside_the_model(engine: HostCopyEngine) -> HostCopyEngine:
    """Bind the engine's threads to cores that the model does not use, if there are any; return the engine."""
    cores = copy_cores()
    if cores:
        with suppress(OSError):  # A sandbox may refuse: then the threads stay on their cores.
            engine.run_on(cores)
    return engine
