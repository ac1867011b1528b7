"""The compiled operations that vLLM calls on a GPU with the settings of `vllm_gpu.py`, written with torch.

vLLM's Python can be installed without its compiled parts (`vllm_gpu_pack.py`), and then has this module in
the place from which its CUDA platform imports them, `vllm._C_stable_libtorch`. Imported under that name, it
registers the operations. Under another name it only defines functions, so that a test can compare them with
vLLM's own.

They are slower than the compiled ones. Every engine of a comparison has the same ones. `docs/vllm-gpu.md`
says what calls each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Write `x`, divided by the root of its mean square over the last dimension, times `weight`, to `out`.

    It computes in float32, as vLLM's does.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    narrow = wide.to(x.dtype)
    out.copy_(narrow if weight is None else narrow * weight)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Add `x` to `residual`, and write the sum's `rms_norm` to `x`."""
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write silu of the first half of the last dimension of `x`, times the second half, to `out`."""
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


class HostMemory:
    """The bytes of a page-locked tensor, which a GPU reads at the same address.

    `torch.as_tensor` takes an object with `__cuda_array_interface__`, and keeps it alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def get_cuda_view_from_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CUDA tensor with the bytes of a page-locked host tensor. It keeps the host tensor alive.

    Raises `ValueError` if the tensor is not page-locked and contiguous.
    """
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cuda")
    if not tensor.is_pinned() or not tensor.is_contiguous():
        raise ValueError("only contiguous page-locked memory has an address on the GPU")
    return torch.as_tensor(HostMemory(tensor), device="cuda").view(tensor.dtype).view(tensor.shape)


def get_max_shared_memory_per_block_device_attribute(device: int) -> int:
    """Return the most shared memory that a block of threads can ask for (bytes)."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


class BatchedCopies:
    """`swap_blocks_batch`: copies between addresses, in one call of the driver, on the current stream.

    copy: carries out `kvsm.copies.geometry.Fragments` in a direction on a stream; None: the driver's batch.
    on_device: whether an address is in device memory; None: the driver is asked.
    stream: returns the stream's handle; None: torch's current one.
    """

    def __init__(
        self,
        copy: Callable[..., Any] | None = None,
        on_device: Callable[[int], bool] | None = None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        self._copy = copy
        self._on_device = on_device or on_a_device
        self._stream = stream or (lambda: int(torch.cuda.current_stream().cuda_stream))

    def __call__(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool = False
    ) -> None:
        """Queue a copy of sizes[i] bytes from sources[i] to targets[i], for each i.

        any_order: whether the sources may be read before earlier work of the stream has ended. Whatever it
            says, this reads so on the host, and never on the device, as kvsm does.
        """
        del any_order
        if sizes.numel() == 0:
            return
        from kvsm.copies.geometry import Fragments
        from kvsm.events import Direction

        if self._copy is None:
            from kvsm.cuda_io.driver import BatchCopy

            self._copy = BatchCopy()
        columns = [column.contiguous().numpy().view("uint64") for column in (sources, targets, sizes)]
        direction = Direction.LOAD if self._on_device(int(columns[1][0])) else Direction.STORE
        self._copy(Fragments(*columns), direction, self._stream())


def on_a_device(address: int) -> bool:
    """Whether an address is in a GPU's memory. The driver does not know pageable host memory."""
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, kind = driver.cuPointerGetAttribute(attribute, address)
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    return error == driver.CUresult.CUDA_SUCCESS and int(kind) == int(device)


def has_no_kernel(capability: int) -> bool:
    """Say that a device of this compute capability has no quantized kernel. vLLM asks when it is imported."""
    del capability
    return False


OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "_C::rms_norm": (rms_norm, "(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()"),
    "_C::fused_add_rms_norm": (
        fused_add_rms_norm,
        "(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
    ),
    "_C::silu_and_mul": (silu_and_mul, "(Tensor(a!) out, Tensor x) -> ()"),
    "_C::get_cuda_view_from_cpu_tensor": (
        get_cuda_view_from_cpu_tensor,
        "(Tensor tensor) -> Tensor",
    ),
    "_C_cache_ops::swap_blocks_batch": (
        BatchedCopies(),
        "(Tensor sources, Tensor targets, Tensor sizes, bool any_order=False) -> ()",
    ),
    "_C_cuda_utils::get_max_shared_memory_per_block_device_attribute": (
        get_max_shared_memory_per_block_device_attribute,
        "(int device) -> int",
    ),
    "_C::cutlass_scaled_mm_supports_fp8": (has_no_kernel, "(int capability) -> bool"),
    "_C::cutlass_scaled_mm_supports_block_fp8": (has_no_kernel, "(int capability) -> bool"),
}
"""The operation -> its function and schema."""


def register() -> list[str]:
    """Register all operations that are not registered yet, for as long as the process lives. Returns them."""
    registered = []
    for name, (function, schema) in OPERATIONS.items():
        space, _, operation = name.partition("::")
        if hasattr(getattr(torch.ops, space), operation):
            continue
        library.define(name, schema)
        library.impl(name, "default", function)
        registered.append(name)
    return registered


if __name__ == "vllm._C_stable_libtorch":
    REGISTERED = register()
