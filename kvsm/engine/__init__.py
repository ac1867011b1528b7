"""A small serving engine: to run, fuzz and check the offload core with.

    result = run_workload(RunOptions(requests=100))
    assert result.good

A file a noun: `request`, `block_pool`, `kv_cache` (block tables by group), `scheduler` (who runs), `copies`
(transfers under way), `ranks` (memory, compute and copy engine of each), `content` (what the bytes must be),
`offload_checks` (what must have been offloaded), `disturbances` (what goes wrong, and when), `serving` (the
loop), `options` and `run` (a whole run and its proof).
"""

from kvsm.engine.block_pool import BlockPool
from kvsm.engine.options import RunOptions
from kvsm.engine.request import Request, RequestStatus
from kvsm.engine.run import Progress, Run, RunResult, load_workload, run_workload
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
