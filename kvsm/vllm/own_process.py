"""Find the worker's side that runs in the same process as its scheduler's side.

vLLM's `LLM` may run its engine in the caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`). Such an engine
runs no step after the last answer, so the last copies would neither start nor be reported. With `last_step`
set to `flush`, the scheduler's side runs this step itself, with the worker's side that it finds here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm import envs

if TYPE_CHECKING:
    from kvsm.vllm.worker_side import WorkerSide

WORKERS: WeakSet[WorkerSide] = WeakSet()
"""The workers' sides of all engines in this process."""


def only_worker(vllm_config: Any) -> WorkerSide | None:
    """Return the worker's side of the engine's only rank.

    None if the engine has its own process, several ranks, or two connectors of kvsm.
    """
    if envs.VLLM_ENABLE_V1_MULTIPROCESSING or vllm_config.parallel_config.world_size > 1:
        return None
    engine = vllm_config.kv_transfer_config.engine_id
    sides = [side for side in WORKERS if side.engine_id == engine]
    return sides[0] if len(sides) == 1 else None
