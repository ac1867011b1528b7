"""The benchmark for a GPU runs dry: on the fake driver, with torch on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_rig import usable_fake
from places import ROOT

from kvsm.cuda_io import cuda_engine, driver
from kvsm.cuda_io.paths import PathTable

torch = pytest.importorskip("torch")


class DryStream:
    """A stream of the fake driver in the place of one of torch."""

    def __init__(self) -> None:
        with driver.CudaContext(0):
            self.cuda_stream = driver.create_stream()

    def synchronize(self) -> None:
        with driver.CudaContext(0):
            driver.call("cuStreamSynchronize", self.cuda_stream)


@contextmanager
def dry_stream(_stream: DryStream) -> Iterator[None]:
    yield


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmark, with small sizes and without a GPU."""
    usable_fake()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "copies_gpu", raising=False)
    import copies_gpu

    small = {
        "LAYERS": 3,
        "FRAGMENT_BYTES": (256, 512, 1024),
        "BLOCKS": (1, 4, 100),
        "LARGEST_BYTES": 1 << 20,
        "WANTED_BYTES": 1 << 12,
        "THREAD_BLOCKS": (1, 2),
        "DEVICE": "cpu",
        "PINNED": False,
    }
    for name, value in small.items():
        monkeypatch.setattr(copies_gpu, name, value)
    square = torch.ones((8, 8))
    kinds = ("matrix products, many tokens", "matrix products, few tokens")
    monkeypatch.setattr(copies_gpu, "computes", lambda _: {kind: lambda: square @ square for kind in kinds})
    cuda = SimpleNamespace(
        Stream=DryStream,
        stream=dry_stream,
        synchronize=lambda: None,
        current_stream=lambda *_: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        empty_cache=lambda: None,
        is_available=lambda: True,
        get_device_name=lambda: "a dry run",
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cuda_engine, "_ordinal", lambda _tensors: 0)
    monkeypatch.setattr(cuda_engine, "cached_path_table", lambda *_: PathTable.default())
    return copies_gpu


def test_the_benchmark_for_a_gpu_runs_dry(dry: Any) -> None:
    """A lent GPU is too short to find errors of the script."""
    with driver.CudaContext(0):  # torch makes it current
        name, lines = dry.gpu_tables(rounds=1)
    assert name == "a dry run"
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == [
        "## Transfers of 3 layers",
        "## The caller of `submit`",
        "## Compute beside it",
        "## Thread blocks of the kernel",
    ]
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    transfers = [row for row in rows if row[3] in ("store", "load", "both")]
    assert len(transfers) == 3 * 3 * 3  # fragment sizes, blocks, directions
    assert {path for row in transfers for path in row[4].split("/")} <= {"batch", "pitched", "kernel"}
    assert [row[0] for row in rows if "few tokens" in row[3]] == ["| 1", "| 2"]
