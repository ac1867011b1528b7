"""A platform of vLLM for `vllm_gpu.py --dry-run --interpret`: a CPU that runs the Triton kernels of a GPU.

vLLM finds it through an entry point that `vllm_gpu.py` declares. No compiled operation of vLLM is imported:
their place has the replacements of `vllm_gpu_ops`, as on the GPU machine. What differs from a GPU: the
worker is that of a CPU, memory is not page-locked, and Triton interprets its kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import library
from vllm.platforms.cpu import CpuPlatform

HOPPER = (9, 0)
"""The compute capability for which vLLM chooses its kernels' parameters."""


def chosen_platform() -> str:
    """Return the name of the platform's class, for vLLM's search of platforms."""
    return "vllm_gpu_dry.DryPlatform"


class DryPlatform(CpuPlatform):
    """vLLM's CPU platform without its compiled operations, and with the attention of a GPU."""

    @classmethod
    def import_kernels(cls) -> None:
        """Import what replaces the CUDA platform's operations, and add what the CPU worker calls."""
        import_module("vllm._C_stable_libtorch")
        if not hasattr(torch.ops._C, "init_cpu_memory_env"):
            library.define("_C::init_cpu_memory_env", "(int[] nodes) -> ()")
            library.impl("_C::init_cpu_memory_env", "default", lambda nodes: None)  # noqa: ARG005
        torch.cuda.get_device_capability = lambda device=None: HOPPER  # noqa: ARG005

    @classmethod
    def get_attn_backend_cls(cls, *arguments: Any, **named: Any) -> str:
        """Return the backend of Triton, whatever was asked for: a CPU has only one of its own."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        del arguments, named
        return str(AttentionBackendEnum.TRITON_ATTN.get_path())

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Keep the Triton kernels: the CPU platform replaces them by compiled operations."""
