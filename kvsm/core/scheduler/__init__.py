"""The scheduler side of an offload connector: it decides what each engine step matches, loads and stores.

    core = Offloader.open(config, "kv-log")
    scheduler = OffloadScheduler(core, SchedulerConfig(groups=(KVCacheGroup(16),)))
    scheduler.bind_gpu_block_pool(pool)

Then call it by the names of vLLM's connector calls. No engine is imported here: `protocols` states what an
engine must provide. The other files:

- `groups`: block sizes, keys, configuration;
- `request_params`: a client's parameters of a request;
- `tracked`: a request, with the scheduler side's own state of it;
- `hits`: the longest hit that all groups serve, and `load_targets`: the device blocks that it fills;
- `offers`: which chunks are offered for a store, and when again (`retry`); `offer_batch`: one such offer;
- `load_timer`: measures loads and computation, to find hits that are not worth a load;
- `session_leases`: keeps the blocks of agents' sessions on the host, as their hints ask;
- `free_queue`: the lazy store;
- `device_blocks`: references to device blocks while copies touch them;
- `computed_tokens`: a check that an engine counts no token as computed too early;
- `payloads`: the contents of KV events about stored blocks;
- `scheduler_state`: the state that is kept between two calls;
- `scheduler`: the calls.
"""

from kvsm.core.scheduler.computed_tokens import CheckedScheduler
from kvsm.core.scheduler.groups import (
    GroupKind,
    KVCacheGroup,
    LastStep,
    SchedulerConfig,
    StoreMode,
    block_key,
)
from kvsm.core.scheduler.load_timer import LoadTimer
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
    "LoadTimer",
    "OffloadScheduler",
    "SchedulerConfig",
    "StepOutput",
    "StepResults",
    "StoreMode",
    "block_key",
]
