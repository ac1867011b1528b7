"""Copy engines: they carry out transfers as real, asynchronous copies.

`CopyEngine` is the protocol. `HostCopyEngine` copies with threads between pools in host memory, and
`FileCopyEngine` between host memory and a file. `SimulatedCopyEngine` takes the steps of a device in any
order that hardware may take them. Three engines wrap another one: `VerifyingCopyEngine` checks the bytes,
`FailingCopyEngine` fails on purpose, and `ReplicaCopyEngine` is for ranks that share a host pool. The engine
for NVIDIA GPUs is in `kvsm.cuda_io`.
"""

from __future__ import annotations

from kvsm.copy_engines.borrowed_pool import BorrowedPool
from kvsm.copy_engines.checksums import VerifyingStatistics
from kvsm.copy_engines.failing import FailingCopyEngine
from kvsm.copy_engines.file import FileCopyEngine
from kvsm.copy_engines.host import HostCopyEngine
from kvsm.copy_engines.host_pool import HostPool
from kvsm.copy_engines.interface import CopyEngine, CopyResult
from kvsm.copy_engines.kept_file import KeptPoolFacts, open_mark, read_kept_pool
from kvsm.copy_engines.kept_record import KeptPool
from kvsm.copy_engines.pool_mark import PoolMark
from kvsm.copy_engines.replicas import ReplicaCopyEngine
from kvsm.copy_engines.simulated import SimulatedCopyEngine
from kvsm.copy_engines.verifying import VerifyingCopyEngine

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
