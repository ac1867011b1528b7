"""`benchmarks/vllm_gpu_ops.py`: the operations that replace vLLM's compiled ones compute the same.

With vLLM, its own compiled operations for CPUs are the reference too. What needs a GPU is not tested here:
the view of host memory, the size of shared memory, and the driver's batch copy.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from places import ROOT

from kvsm.events import Direction

torch = pytest.importorskip("torch", reason="torch is not installed")

each_type = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Import the module, which is outside the package. Under its own name it registers nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module("vllm_gpu_ops")


def compiled(name: str) -> Callable[..., Any] | None:
    """Return vLLM's own operation for CPUs; None if this environment has none."""
    try:
        import_module("vllm._custom_ops")
    except ImportError:
        return None
    return getattr(torch.ops._C, name, None)


def drawn(dtype: str, *shape: int) -> Any:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    return numbers.to(getattr(torch, dtype))


def close(one: Any, other: Any) -> bool:
    """Whether they differ by less than a few roundings of their type."""
    within = 8 * torch.finfo(one.dtype).eps
    return bool(torch.allclose(one.float(), other.float(), rtol=within, atol=within))


def norm_in_float64(x: Any, weight: Any, epsilon: float) -> Any:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@each_type
def test_rms_norm(ops: Any, dtype: str) -> None:
    x, weight, out = drawn(dtype, 5, 64), drawn(dtype, 64), torch.empty(5, 64, dtype=getattr(torch, dtype))
    ops.rms_norm(out, x, weight, 1e-6)
    assert close(out, norm_in_float64(x, weight, 1e-6))
    if (own := compiled("rms_norm")) is not None:
        its = torch.empty_like(out)
        own(its, x, weight, 1e-6)
        assert close(out, its)


def test_rms_norm_without_weight(ops: Any) -> None:
    x, out = drawn("float32", 3, 2, 32), torch.empty(3, 2, 32)
    ops.rms_norm(out, x, None, 1e-6)
    assert close(out, norm_in_float64(x, torch.ones(32), 1e-6))


@each_type
def test_fused_add_rms_norm(ops: Any, dtype: str) -> None:
    """It changes both of its arguments."""
    x, residual, weight = drawn(dtype, 5, 64), drawn(dtype, 5, 64) * 3, drawn(dtype, 64)
    mine, sums = x.clone(), residual.clone()
    ops.fused_add_rms_norm(mine, sums, weight, 1e-6)
    assert torch.equal(sums, residual + x)
    assert close(mine, norm_in_float64(residual + x, weight, 1e-6))
    if (own := compiled("fused_add_rms_norm")) is not None:
        its, its_sums = x.clone(), residual.clone()
        own(its, its_sums, weight, 1e-6)
        assert close(mine, its)
        assert close(sums, its_sums)


@each_type
def test_silu_and_mul(ops: Any, dtype: str) -> None:
    x, out = drawn(dtype, 7, 64), torch.empty(7, 32, dtype=getattr(torch, dtype))
    ops.silu_and_mul(out, x)
    gate, up = x[:, :32].double(), x[:, 32:].double()
    assert close(out, gate / (1 + (-gate).exp()) * up)
    if (own := compiled("silu_and_mul")) is not None:
        its = torch.empty_like(out)
        own(its, x)
        assert close(out, its)


@pytest.mark.parametrize(("loads", "direction"), [(True, Direction.LOAD), (False, Direction.STORE)])
def test_swap_blocks_batch_hands_each_copy_to_the_driver(ops: Any, loads: bool, direction: Direction) -> None:
    """The direction follows from where the first target is. A driver that copies stands for CUDA's."""
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    calls = []

    def copy(fragments: Any, way: Direction, stream: int) -> None:
        calls.append((way, stream))
        for begin, end, size in zip(*(column.tolist() for column in fragments)):
            ctypes.memmove(end, begin, size)

    batched = ops.BatchedCopies(copy, lambda address: loads and address == target.ctypes.data + 40, lambda: 7)
    begins = torch.tensor([0, 16, 48]) + source.ctypes.data
    ends = torch.tensor([40, 0, 8]) + target.ctypes.data
    batched(begins, ends, torch.tensor([16, 8, 4]), any_order=True)
    expected = np.zeros(64, np.uint8)
    expected[40:56], expected[0:8], expected[8:12] = source[0:16], source[16:24], source[48:52]
    assert calls == [(direction, 7)]
    assert np.array_equal(target, expected)
    batched(*(torch.tensor([], dtype=torch.int64),) * 3)
    assert len(calls) == 1


def test_host_memory_describes_the_bytes_of_a_tensor(ops: Any) -> None:
    """numpy reads the same description as torch does on a GPU, under another name."""
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    described = ops.HostMemory(tensor)
    described.__array_interface__ = described.__cuda_array_interface__
    read = np.asarray(described)
    assert read.view(np.int32).tolist() == [0, 1, 2, 3, 4, 5]
    tensor[0, 1] = 9
    assert read.view(np.int32)[1] == 9


def test_memory_that_is_not_page_locked_has_no_view(ops: Any) -> None:
    with pytest.raises(ValueError, match="only contiguous page-locked memory"):
        ops.get_cuda_view_from_cpu_tensor(torch.zeros(3))


def test_in_the_place_of_vllms_it_registers_each_operation_once() -> None:
    """In a process of its own, because operations are global. A second import adds nothing."""
    script = """
import importlib.util, sys, types
import torch
for turn in range(2):
    spec = importlib.util.spec_from_file_location("vllm._C_stable_libtorch", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.REGISTERED == ([] if turn else [*module.OPERATIONS]), module.REGISTERED
x, out = torch.randn(2, 8), torch.empty(2, 4)
torch.ops._C.silu_and_mul(out, x)
assert torch.equal(out, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
torch.ops._C_cache_ops.swap_blocks_batch(*(torch.tensor([], dtype=torch.int64),) * 3, True)
"""
    source = ROOT / "benchmarks" / "vllm_gpu_ops.py"
    subprocess.run([sys.executable, "-c", script, str(source)], check=True)
