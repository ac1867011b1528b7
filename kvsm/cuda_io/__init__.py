"""Copy engines: transitions of blocks carried out as real, asynchronous copies.

Three carry out copies, behind one protocol: threads between pools in host memory, streams of a GPU, and a
simulated device that takes every order which hardware may take. Two go over any of them: one that checks the
bytes, and one that fails.
"""

from __future__ import annotations

from kvsm.cuda_io.cuda import CudaCopyEngine
from kvsm.cuda_io.engine import CopyEngine, CopyResult
from kvsm.cuda_io.failing import FailingCopyEngine
from kvsm.cuda_io.host import HostCopyEngine
from kvsm.cuda_io.host_memory import HostPool
from kvsm.cuda_io.simulated import SimulatedCopyEngine
from kvsm.cuda_io.verifying import VerifyingCopyEngine, VerifyingStatistics

__all__ = [
    "CopyEngine",
    "CopyResult",
    "HostCopyEngine",
    "CudaCopyEngine",
    "SimulatedCopyEngine",
    "VerifyingCopyEngine",
    "VerifyingStatistics",
    "FailingCopyEngine",
    "HostPool",
]
