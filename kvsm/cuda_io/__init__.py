"""The copy engine for NVIDIA GPUs, and page-locking of host memory, through the CUDA driver."""

from __future__ import annotations

from kvsm.cuda_io.cuda_engine import CudaCopyEngine
from kvsm.cuda_io.driver import CUDA_PAGE_LOCKING

__all__ = ["CudaCopyEngine", "CUDA_PAGE_LOCKING"]
