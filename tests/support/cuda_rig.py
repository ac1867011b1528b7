"""The CUDA copy engine under test: on a GPU if there is one, else on the fake driver.

With the fake driver, device memory is the numpy arrays themselves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import fake_cuda
import numpy as np
import pytest
from fake_cuda import FakeDriver

from kvsm.cuda_io.cuda_engine import CudaCopyEngine
from kvsm.cuda_io.paths import CopyPath, PathTable

if TYPE_CHECKING:
    from copy_rigs import Rig


@functools.cache
def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available() and torch.version.cuda)


def cuda_rig(device: list[np.ndarray], host: np.ndarray, path: CopyPath | None = None) -> Rig:
    """Return a rig of a CUDA engine.

    Skips the test without a GPU and without a compiler for the fake driver.
    """
    from copy_rigs import Rig  # which imports this file

    table = None if path else PathTable.default()
    if has_gpu():
        tensors, (pool,) = _as_tensors(device, "cuda"), _as_tensors([host], "cpu")
        engine = CudaCopyEngine(tensors, pool, path=path, path_table=table)
        return Rig(engine, lambda: [one.cpu().numpy() for one in tensors], pool.numpy)
    fake = usable_fake()
    fake.page_lock(host)
    engine = CudaCopyEngine(device, host, compute=lambda: 0, path=path, path_table=table)
    return Rig(engine, lambda: device, lambda: host)


def usable_fake() -> FakeDriver:
    """Return the fake driver after a reset. Skips the test if it cannot be built."""
    if has_gpu():
        pytest.skip("there is a GPU, and so the real driver")
    if reason := _missing_for_fake():
        pytest.skip(reason)
    fake = fake_cuda.load_fake()
    fake.reset()
    return fake


@functools.cache
def _missing_for_fake() -> str:
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed"
    return fake_cuda.why_not()


def _as_tensors(arrays: list[np.ndarray], place: str) -> list[Any]:
    """Return the arrays as tensors on the GPU or in page-locked memory.

    Arrays that share memory still share it in the same way, because layouts depend on that.
    """
    import torch

    wholes: dict[int, Any] = {}
    tensors = []
    for array in arrays:
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if id(whole) not in wholes:
            moved = torch.empty(whole.nbytes, dtype=torch.uint8, device=place, pin_memory=place == "cpu")
            wholes[id(whole)] = moved.copy_(torch.from_numpy(whole.reshape(-1)))
        offset = array.ctypes.data - whole.ctypes.data
        tensors.append(wholes[id(whole)].as_strided(array.shape, array.strides, offset))
    return tensors
