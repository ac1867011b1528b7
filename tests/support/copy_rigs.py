"""The copy engines of the conformance suite, with their pools, jobs and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from cuda_rig import cuda_rig, has_gpu
from disk_rig import DISK_IDENTITY
from hypothesis import strategies as st

from kvsm.check.worlds.world_files import IN_MEMORY
from kvsm.copies import (
    CopyEngine,
    CopyResult,
    FailingCopyEngine,
    FileCopyEngine,
    HostCopyEngine,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
    threaded,
)
from kvsm.copies.checksums import CHECKSUM_BYTES, BlockChecksums
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import MalformedIds, pack, to_list
from kvsm.tiers.disk import DiskCopyEngine, DiskGeometry, FlushPolicy, SlotFile, recover

Bytes = np.ndarray[Any, Any]


class Rig(NamedTuple):
    """An engine, and the current content of its pools: the arrays that it was made with, or copies."""

    engine: CopyEngine
    read_device: Callable[[], list[Bytes]]
    read_host: Callable[[], Bytes]


MakeRig = Callable[[list[Bytes], Bytes], Rig]
"""device: tensors of the device pool. host: the host pool. Both `[num_blocks, bytes]`, uint8."""


def rig_of(make_engine: Callable[[list[Bytes], Bytes], CopyEngine]) -> MakeRig:
    """Return a maker of rigs whose engine copies directly between the given arrays."""
    return lambda device, host: Rig(make_engine(device, host), lambda: device, lambda: host)


def _verifying(device: list[Bytes], host: Bytes) -> CopyEngine:
    return VerifyingCopyEngine(HostCopyEngine(device, host), host, device)


def named(job: TransferJob) -> TransferJob:
    """Return the job with keys and generations, as a kept pool needs it; each key names its host block."""
    with suppress(MalformedIds):
        blocks = to_list(job.host_blocks)
        keys, generations = (
            tuple(b"block %d" % block for block in blocks),
            tuple(1 + block for block in blocks),
        )
        return msgspec.structs.replace(job, keys=keys, generations=generations)
    return job


def checksums_of(host: Bytes) -> Bytes:
    """Return the checksum table of an earlier process that stored all blocks of this pool."""
    table = np.zeros((len(host), CHECKSUM_BYTES), np.uint8)
    every = named(TransferJob(1, Direction.STORE, (), tuple(range(len(host)))))
    BlockChecksums(host, table=table, kept=True).keep(range(len(host)), (every.keys, every.generations))
    return table


class NamedJobs:
    """A wrapper that adds keys to each job, for an engine with kept pools."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        """Submit the job with keys."""
        self._engine.submit(named(job), after)


def kept_engine(engine: CopyEngine, host: Bytes, threads: int = 1) -> NamedJobs:
    """Return a verifying engine over this one, with a host pool from an earlier process."""
    table = checksums_of(host)
    return NamedJobs(
        VerifyingCopyEngine(engine, host, threads=threads, table=table, kept=True, every_load=False)
    )


def _kept(device: list[Bytes], host: Bytes, threads: int = 1) -> CopyEngine:
    return kept_engine(HostCopyEngine(device, host, threads=1), host, threads)


def file_rig(device: list[Bytes], host: Bytes) -> Rig:
    """Return a rig whose host pool is a temporary file."""
    file = NamedTemporaryFile(prefix="kvsm-test-")  # noqa: SIM115 (open while the rig is)
    file.write(np.ascontiguousarray(host).tobytes())
    file.flush()
    engine = FileCopyEngine(device, file.name, len(host))
    # The file lives as long as the rig can be read.
    return Rig(engine, lambda: device, lambda: np.fromfile(file.name, np.uint8).reshape(host.shape))


class KeyedEngine:
    """A wrapper that adds keys, which a disk engine needs, to each store. Each key names its slot."""

    directory: Any = None

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: TransferJob, after: Any = None) -> None:
        """Submit the job with keys."""
        if job.direction is Direction.STORE:
            keys = tuple(f"slot {slot}".encode() for slot in to_list(job.host_blocks))
            job = msgspec.structs.replace(job, keys=keys)
        self._engine.submit(job, after)


def disk_engine(
    device: list[Bytes], host: Bytes, path: Path, threads: int, flush: FlushPolicy
) -> tuple[KeyedEngine, Bytes]:
    """Return a disk engine whose slots hold these rows, and a view of the payloads."""
    geometry = DiskGeometry(host.shape[1], len(host))
    with closing(DiskCopyEngine(host, SlotFile(path, geometry, DISK_IDENTITY), threads=1)) as before:
        every = list(range(len(host)))
        KeyedEngine(before).submit(store(1, every, every))
        assert finish(before, [1])[0].good
    file = SlotFile(path, geometry, DISK_IDENTITY)
    assert len(recover([file]).slots) == len(host)
    mapped = np.memmap(path, np.uint8, "r")
    slots = mapped[geometry.payload_at(0) :].reshape(len(host), geometry.payload_step)
    payloads = slots[:, : geometry.payload_bytes]
    return KeyedEngine(DiskCopyEngine(device, file, flush, threads=threads)), payloads


def disk_rig(threads: int, flush: FlushPolicy) -> MakeRig:
    """Return a maker of rigs whose "host pool" is the slot file of a disk tier, in memory if possible."""

    def make(device: list[Bytes], host: Bytes) -> Rig:
        directory = TemporaryDirectory(prefix="kvsm-test-", dir=IN_MEMORY)
        engine, payloads = disk_engine(device, host, Path(directory.name, "tier"), threads, flush)
        engine.directory = directory  # It lives as long as the engine: a removed file takes no stores.
        keyed: Any = engine
        return Rig(keyed, lambda: device, lambda: payloads)

    return make


# Engines whose methods may be called from any thread.
_FOR_THREADS = [
    pytest.param(rig_of(HostCopyEngine), id="host"),
    pytest.param(rig_of(lambda device, host: HostCopyEngine(device, host, threads=1)), id="host-1-thread"),
    pytest.param(
        rig_of(lambda device, host: FailingCopyEngine(HostCopyEngine(device, host), seed=7, rate=0)),
        id="failing-never",
    ),
    pytest.param(file_rig, id="file"),
    pytest.param(disk_rig(1, FlushPolicy.EVERY), id="disk-1-thread"),
    pytest.param(disk_rig(2, FlushPolicy.INTERVAL), id="disk"),
    pytest.param(rig_of(_verifying), id="verifying"),
    pytest.param(rig_of(_kept), id="verifying-kept"),
    pytest.param(rig_of(lambda device, host: _kept(device, host, 0)), id="verifying-kept-0-threads"),
    # On a fake driver; where a GPU is, on that, with `-m gpu`.
    pytest.param(cuda_rig, id="cuda", marks=[pytest.mark.gpu] if has_gpu() else []),
]

every_engine = pytest.mark.parametrize(
    "make_rig",
    [
        *_FOR_THREADS,
        pytest.param(rig_of(lambda device, host: SimulatedCopyEngine(device, host, seed=7)), id="simulated"),
    ],
)

every_engine_for_threads = pytest.mark.parametrize("make_rig", _FOR_THREADS)


class Shape(NamedTuple):
    """The shape of the pools in a property test."""

    row_bytes: list[int]
    """Row bytes of each tensor of the device pool."""
    device_gap: int
    """Unused bytes between two rows of a tensor."""
    host_gap: int
    shares_storage: bool
    """Whether the first tensor is registered twice, the second time by a group with shorter blocks."""

    @property
    def block_bytes(self) -> int:
        return sum(self.row_bytes)

    def pools(self, num_device_blocks: int, num_host_blocks: int) -> tuple[list[Bytes], Bytes]:
        """Return random bytes in this shape: (tensors, host)."""
        *tensors, host = (
            random_bytes(count, width + gap, seed)[:, :width]
            for seed, (count, width, gap) in enumerate(
                [
                    *((num_device_blocks, width, self.device_gap) for width in self.row_bytes),
                    (num_host_blocks, self.block_bytes, self.host_gap),
                ]
            )
        )
        if self.shares_storage and self.row_bytes[0] > 1:
            tensors.insert(0, tensors[0][:, : self.row_bytes[0] // 2])
        return tensors, host


shapes = st.builds(
    Shape,
    st.lists(st.sampled_from([1, 2, 3, 17, 600]), min_size=1, max_size=3),
    device_gap=st.sampled_from([0, 1, 5]),
    host_gap=st.sampled_from([0, 1, 5]),
    shares_storage=st.booleans(),
)


def random_bytes(count: int, width: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


def random_pools(num_blocks: int = 40, block_bytes: int = 3) -> tuple[list[Bytes], Bytes]:
    """Return the simplest pools: one tensor, no gaps."""
    return [random_bytes(num_blocks, block_bytes, 1)], random_bytes(num_blocks, block_bytes, 2)


def copy_plainly(job: TransferJob, device: list[Bytes], host: Bytes) -> None:
    """Copy block by block, as the reference. Tensors that share memory change together."""
    tensors = [one for one in device if not any(_is_part(one, other) for other in device)]
    offsets = accumulate((one.shape[1] for one in tensors), initial=0)
    for tensor, offset in zip(tensors, offsets):
        part = host[:, offset : offset + tensor.shape[1]]
        for device_block, host_block in zip(*job.pairs()):
            if job.direction is Direction.STORE:
                part[host_block] = tensor[device_block]
            else:
                tensor[device_block] = part[host_block]


def _is_part(one: Bytes, other: Bytes) -> bool:
    return one.shape[1] < other.shape[1] and np.may_share_memory(one, other)


def copied(device: list[Bytes], host: Bytes) -> tuple[list[Bytes], Bytes]:
    """Return copies of the pools; tensors that share a storage still do."""
    storages = {id(one.base): np.array(one.base) for one in device if one.base is not None}
    return [
        storages[id(one.base)][:, : one.shape[1]] if one.base is not None else one.copy() for one in device
    ], host.copy()


def store(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, pack(device_blocks), pack(host_blocks))


def load(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.LOAD, pack(device_blocks), pack(host_blocks))


def finish(engine: CopyEngine, transfers: list[int]) -> list[CopyResult]:
    engine.wait(transfers)
    return engine.poll()


@st.composite
def rounds_of_jobs(draw: st.DrawFn, num_blocks: int, most: int = 3) -> list[list[TransferJob]]:
    """Draw rounds of stores and loads. The transfers of a round have no block in common."""
    rounds, transfer = [], 0
    for _ in range(draw(st.integers(1, most))):
        device_blocks = draw(st.permutations(range(num_blocks)))
        host_blocks = draw(st.permutations(range(num_blocks)))
        if draw(st.booleans()):  # so that runs are long, which random permutations never give
            host_blocks = device_blocks
        cuts = sorted(draw(st.lists(st.integers(0, num_blocks), max_size=6)))
        jobs = []
        for first, last in pairwise(cuts):
            make = store if draw(st.booleans()) else load
            jobs.append(make(transfer, device_blocks[first:last], host_blocks[first:last]))
            transfer += 1
        rounds.append(jobs)
    return rounds


@contextmanager
def short_pieces(blocks: int, block_bytes: int) -> Iterator[None]:
    """Make threaded engines cut transfers into pieces of this many blocks until the end of a `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded, "PIECE_BYTES", blocks * block_bytes)
        yield
