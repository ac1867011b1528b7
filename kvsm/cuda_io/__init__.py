"""Copy engines: transitions of blocks carried out as real, asynchronous copies."""

from __future__ import annotations

from kvsm.cuda_io.engine import CopyEngine, CopyResult
from kvsm.cuda_io.host import HostCopyEngine
from kvsm.cuda_io.simulated import SimulatedCopyEngine

__all__ = ["CopyEngine", "CopyResult", "HostCopyEngine", "SimulatedCopyEngine"]
