"""The scheduler's side of an offload connector: what is matched, loaded and stored in each engine step.

    core = Offloader.open(config, "kv-log")
    scheduler = OffloadScheduler(core, SchedulerConfig(groups=(KVCacheGroup(16),)))
    scheduler.bind_gpu_block_pool(pool)

and then vLLM's connector calls, by their names. No engine is imported here: `protocols` states what one must
have. The other files:

- `groups`: block sizes, keys, configuration;
- `request_params`: what a client may say of a request;
- `tracked`: a request as it is known here;
- `hits`: the longest hit that all groups serve, and `load_targets`: the device blocks that it fills;
- `offers`: which chunks are offered for a store, and when again (`retry`); `offer_batch`: one such offer;
- `free_queue`: the lazy store;
- `device_blocks`: who holds device blocks while copies touch them;
- `computed_tokens`: a check that an engine counts no token too early;
- `payloads`: what KV events say of a stored block;
- `scheduler_state`: what is remembered between two calls;
- `scheduler`: the calls.
"""

from kvsm.core.scheduler.computed_tokens import CheckedScheduler
from kvsm.core.scheduler.groups import GroupKind, KVCacheGroup, LastStep, SchedulerConfig, StoreMode
from kvsm.core.scheduler.protocols import DevicePool, EngineRequest, StepOutput
from kvsm.core.scheduler.scheduler import OffloadScheduler
from kvsm.core.scheduler.scheduler_state import LoadEnded, StepResults

__all__ = [
    "CheckedScheduler",
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
