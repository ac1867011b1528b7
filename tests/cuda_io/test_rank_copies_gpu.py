"""What a rank in vLLM copies with on a GPU: its host pool is page-locked, and bytes come back, also in pools
that ranks share or that a process has left behind."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from copy_rigs import load, store
from cuda_rig import has_gpu

from kvsm.copies.host_pools.kept_file import KeptPool
from kvsm.identity import PoolIdentity
from kvsm.vllm.rank_copies import HostSharing, KeptPlace, RankCopies, make_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="there is no NVIDIA GPU, or no PyTorch for it"),
]

LAYERS, BLOCKS, ROW_BYTES = 6, 40, 16 << 10
IDENTITY = PoolIdentity.of({"model": "m"})


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory whose files can be page-locked."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def layers_of(seed: int) -> list[Any]:
    """The KV cache of a rank, filled from a seed."""
    import torch

    torch.manual_seed(seed)
    shape = BLOCKS, ROW_BYTES
    return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]


def round_trip(copies: RankCopies, layers: list[Any]) -> None:
    """Store all blocks in another order, overwrite them, and load them."""
    import torch

    expected = [layer.clone() for layer in layers]
    slots = list(reversed(range(BLOCKS)))
    copies.engine.submit(store(1, range(BLOCKS), slots))
    copies.engine.hold_compute([1])
    for layer in layers:
        layer.zero_()
    copies.engine.drain()
    copies.engine.submit(load(2, range(BLOCKS), slots))
    copies.engine.drain()
    assert [(result.transfer, result.good) for result in copies.engine.poll()] == [(1, True), (2, True)]
    assert all(torch.equal(layer, one) for layer, one in zip(layers, expected))


def in_processes(*work: Callable[[], None]) -> None:
    """Run each in a process of its own. A process that has a GPU cannot fork one that uses it."""
    processes = [multiprocessing.get_context("spawn").Process(target=one) for one in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(work)


@pytest.mark.parametrize("verify", [False, True])
def test_a_pool_of_one_rank(verify: bool) -> None:
    layers = layers_of(1)
    with closing(make_copies(layers, BLOCKS, verify)) as copies:
        assert copies.pool.page_locked
        round_trip(copies, layers)


def test_a_pool_on_a_disk_works_and_says_why_it_is_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = layers_of(1)
    with closing(make_copies(layers, BLOCKS, True, path=tmp_path / "pool")) as copies:
        assert copies.pool.page_locked or "Only files in memory can be page-locked" in caplog.text
        round_trip(copies, layers)


class Sharing:
    """One of two ranks of a pool. They may hold the same bytes (replicas)."""

    def __init__(self, path: Path, rank: int, replicas: int) -> None:
        self.sharing = HostSharing(path, 2, rank, replicas)

    def __call__(self) -> None:
        replicas = self.sharing.replicas
        layers = layers_of(1 if replicas > 1 else 1 + self.sharing.rank)
        with closing(make_copies(layers, BLOCKS, True, sharing=self.sharing)) as copies:
            assert copies.pool.page_locked
            if replicas == 1:
                round_trip(copies, layers)


def test_ranks_share_a_page_locked_pool(in_memory: Path) -> None:
    in_processes(*(Sharing(in_memory / "pool", rank, 1) for rank in range(2)))


def test_replicas_share_the_rows_of_a_page_locked_pool(in_memory: Path) -> None:
    in_processes(*(Sharing(in_memory / "pool", rank, 2) for rank in range(2)))


class Life:
    """A process that stores into a kept pool, or loads what an earlier one has stored."""

    def __init__(self, path: Path, first: bool) -> None:
        self.path, self.first = path, first

    def __call__(self) -> None:
        import torch

        layers, place = layers_of(3), KeptPlace(self.path, KeptPool(IDENTITY), checksums=True)
        with closing(make_copies(layers, BLOCKS, False, kept=place)) as copies:
            assert copies.pool.page_locked
            assert copies.pool.is_warm is not self.first
            if self.first:
                copies.engine.submit(store(1, range(BLOCKS), range(BLOCKS)))
                copies.engine.drain()
            else:
                expected = [layer.clone() for layer in layers]
                for layer in layers:
                    layer.zero_()
                copies.engine.submit(load(1, range(BLOCKS), range(BLOCKS)))
                copies.engine.drain()
                assert all(torch.equal(layer, one) for layer, one in zip(layers, expected))
            assert [result.good for result in copies.engine.poll()] == [True]


def test_a_kept_pool_is_warm_for_the_next_process(in_memory: Path) -> None:
    """Correct bytes (S15): the next life proves the blocks before it loads them."""
    in_processes(Life(in_memory / "pool", first=True))
    in_processes(Life(in_memory / "pool", first=False))
