"""The copy engine for NVIDIA GPUs, and page-locking of host memory, through the CUDA driver."""

from __future__ import annotations

from kvsm.cuda_io.driver import CUDA_PAGE_LOCKING
from kvsm.cuda_io.engine import CudaCopyEngine

__all__ = ["CudaCopyEngine", "CUDA_PAGE_LOCKING"]
