"""The serving engine behind `kvsm run`: it serves workloads with real copies, planned by the offload core.

    result = run_workload(RunOptions(requests=100))
    assert result.good

kvsm has two small engines. This one serves thousands of requests fast, in virtual time, with real copies of
real bytes. The other one (`kvsm.check.worlds`) is a value that an explorer can save, rename and compare.

=====================  =====================================================================
`serving_engine`       the loop: time, arrivals, copies, compute
`serving_scheduler`    chooses the requests of a step, and their device blocks
`serving_request`      a request: its tokens, its keys, its block tables
`serving_block_pool`   the device blocks: their references, and the keys that they cache
`block_tables`         fills and empties the block tables of requests, by KV cache group
`in_flight`            transfers in flight, and the step in which each is reported
`ranks`                the memory, compute and copy engine of each worker
`run_disk`             the disk tier below the host pools
`copy_totals`          totals of copies over all workers
`content`              the bytes that a block must hold
`offload_checks`       properties that need the engine's requests and steps
`disturbances`         aborts, preemptions and resets, drawn from a seed
`run_options`          the options of a run
`stopwatch`            the time that the decisions take
`traces`               workloads: read from a trace, or generated
`workload_run`         a whole run, and its verification by the log
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
