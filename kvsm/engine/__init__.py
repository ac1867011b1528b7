"""A small serving engine: to run, fuzz and check the offload core with.

    result = run_workload(RunOptions(requests=100))
    assert result.good

A file a noun: `request`, `block_pool`, `scheduler` (who runs, and what is offloaded), `copies` (transfers
under way), `content` (what the bytes must be), `serving` (the loop), `run` (a whole run and its proof).
"""

from kvsm.engine.block_pool import BlockPool
from kvsm.engine.request import Request, RequestStatus
from kvsm.engine.run import Progress, Run, RunOptions, RunResult, load_workload, run_workload
from kvsm.engine.scheduler import Scheduler
from kvsm.engine.serving import ServingEngine, VirtualClock

__all__ = [
    "BlockPool",
    "Progress",
    "Request",
    "RequestStatus",
    "Run",
    "RunOptions",
    "RunResult",
    "Scheduler",
    "ServingEngine",
    "VirtualClock",
    "load_workload",
    "run_workload",
]
