"""Copy engines: they carry out transfers as real, asynchronous copies.

`CopyEngine` is the protocol. `HostCopyEngine` copies with threads between pools in host memory, and
`FileCopyEngine` between host memory and a file. `SimulatedCopyEngine` runs the steps of a simulated device in
any order that hardware allows. Three engines wrap another engine: `VerifyingCopyEngine` checks the bytes,
`FailingCopyEngine` fails on purpose, and `ReplicaCopyEngine` is for ranks that share a host pool. The engine
for NVIDIA GPUs is in `kvsm.cuda_io`.
"""

from __future__ import annotations

from kvsm.copies.checksums import VerifyingStatistics
from kvsm.copies.copy_engine import CopyEngine, CopyResult
from kvsm.copies.failing import FailingCopyEngine
from kvsm.copies.file import FileCopyEngine
from kvsm.copies.host import HostCopyEngine
from kvsm.copies.host_pools.borrowed_pool import BorrowedPool
from kvsm.copies.host_pools.host_pool import HostPool
from kvsm.copies.host_pools.kept_file import KeptPoolFacts, open_mark, read_kept_pool
from kvsm.copies.host_pools.kept_record import KeptPool
from kvsm.copies.host_pools.pool_mark import PoolMark
from kvsm.copies.replicas import ReplicaCopyEngine
from kvsm.copies.simulated import SimulatedCopyEngine
from kvsm.copies.verifying import VerifyingCopyEngine

__all__ = [
    "CopyEngine",
    "CopyResult",
    "HostCopyEngine",
    "FileCopyEngine",
    "SimulatedCopyEngine",
    "VerifyingCopyEngine",
    "VerifyingStatistics",
    "FailingCopyEngine",
    "ReplicaCopyEngine",
    "HostPool",
    "KeptPool",
    "KeptPoolFacts",
    "read_kept_pool",
    "PoolMark",
    "open_mark",
    "BorrowedPool",
]
