"""The serving engine behind `kvsm run`: it carries real bytes through the offload core.

    result = run_workload(RunOptions(requests=100))
    assert result.good

kvsm has two small engines. This one serves thousands of requests fast, in virtual time, with real copies of
real bytes. The other one (`kvsm.check.worlds`) is a value that an explorer can save, rename and compare.

=====================  =====================================================================
`serving_engine`       the loop: time, arrivals, copies, compute
`serving_scheduler`    which requests run, and on which device blocks
`serving_request`      a request: its tokens, its keys, its block tables
`serving_block_pool`   the device blocks: who holds them, and what they cache
`block_tables`         fills and empties the block tables of requests, by KV cache group
`in_flight`            transfers that the workers have, and when their reports are handed on
`ranks`                the memory, compute and copy engine of each worker
`run_disk`             the disk tier below the host pools
`copy_totals`          what copies come to, all workers together
`content`              which bytes a block must hold
`offload_checks`       what must have been offloaded
`disturbances`         aborts, preemptions and resets, drawn from a seed
`run_options`          the options of a run
`stopwatch`            how long the decisions take
`workload_run`         a whole run, and the proof of it by its log
=====================  =====================================================================
"""

from kvsm.serving.run_options import RunOptions
from kvsm.serving.serving_block_pool import ServingBlockPool
from kvsm.serving.serving_engine import ServingEngine, VirtualClock
from kvsm.serving.serving_request import ServingRequest, ServingStatus
from kvsm.serving.serving_scheduler import ServingScheduler
from kvsm.serving.workload_run import RunProgress, RunResult, WorkloadRun, load_workload, run_workload

__all__ = [
    "ServingBlockPool",
    "RunProgress",
    "ServingRequest",
    "ServingStatus",
    "WorkloadRun",
    "RunOptions",
    "RunResult",
    "ServingScheduler",
    "ServingEngine",
    "VirtualClock",
    "load_workload",
    "run_workload",
]
