"""The scheduler's side of an offload connector: what is matched, loaded and stored in each engine step.

    scheduler = OffloadScheduler(Offloader(config, log), SchedulerConfig(groups=(KVCacheGroup(16),)))
    scheduler.bind_gpu_block_pool(pool)

and then vLLM's connector calls, by their names. No engine is imported here: what is needed of one are the
protocols in `protocols`. A file for what a reader looks for: `groups` (block sizes, keys, configuration),
`tracked` (a request, as far as it is known here), `matching` (the longest hit that all groups serve),
`collecting` (what a step offers for a store), `free_queue` (the lazy store), `scheduler` (the calls).
"""

from kvsm.scheduler.groups import GroupKind, KVCacheGroup, LastStep, SchedulerConfig, StoreMode
from kvsm.scheduler.protocols import DevicePool, EngineRequest, StepOutput
from kvsm.scheduler.scheduler import OffloadScheduler, StepResults
from kvsm.scheduler.state import LoadEnded

__all__ = [
    "DevicePool",
    "EngineRequest",
    "GroupKind",
    "KVCacheGroup",
    "LastStep",
    "LoadEnded",
    "OffloadScheduler",
    "SchedulerConfig",
    "StepOutput",
    "StepResults",
    "StoreMode",
]
