"""Ranks that share a host pool: KV cache that is the same on several ranks is kept on the host once.

Tensor-parallel ranks hold the same KV cache if the model has latent attention (MLA), or fewer KV heads than
ranks. Such ranks are replicas, and share one host pool in a file (`HostPool`). With two replicas, the same
host memory holds twice the blocks.

====================================  =======================================  ==============================
what                                  who decides                              how all ranks agree
====================================  =======================================  ==============================
how many ranks are replicas           `kv_replicas`, in each process           from vLLM's configuration alone
the file's name                       `sharing_of`, in each worker             from the engine's id, which is
                                                                               new at each start
who writes a row of the pool          `ReplicaCopyEngine`, on each rank        all get the same job
when a store has ended                the core: all ranks have reported        one ledger for all ranks
====================================  =======================================  ==============================

If ranks are not certain to hold the same bytes, or are not on one machine, each rank keeps its own pool. In
the canonical layout all ranks share one pool, whether they hold the same bytes or not. What keeps ranks from
sharing (`why_not_shared`) is then an error.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from kvsm.errors import ConfigError
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.rank_copies import HostSharing

log = init_logger("vllm.kvsm")

SHARED_MEMORY = Path("/dev/shm")
"""The directory for a host pool that ranks share, unless it is kept for a warm restart."""

_HEADS = re.compile(r"(kv|key_value)_heads")
"""Fields of a model's configuration with the number of KV heads of a layer."""


def kv_replicas(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of consecutive ranks that are replicas and share a host pool; 1: there are none."""
    replicas = _equal_ranks(vllm_config, kv_cache_config)
    return _shared(replicas, why_not_shared(options, vllm_config.parallel_config))


def sharing_of(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> HostSharing | None:
    """Return how this rank shares its host pool; None: it does not. Raises `ConfigError`."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    replicas = kv_replicas(options, vllm_config, kv_cache_config)
    if not shares_pool(options, vllm_config, kv_cache_config):
        return None
    check_canonical(options.canonical_layout, why_not_shared(options, parallel))
    path = pool_path(transfer.engine_id, transfer.kv_connector_extra_config)
    return HostSharing(path, parallel.world_size, parallel.rank, replicas)


def shares_pool(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether ranks of this engine share a host pool."""
    replicas = kv_replicas(options, vllm_config, kv_cache_config)
    return _is_shared(replicas, options.canonical_layout, vllm_config.parallel_config.world_size)


def _is_shared(replicas: int, is_canonical: bool, ranks: int) -> bool:
    return replicas > 1 or (is_canonical and ranks > 1)


def check_canonical(is_canonical: bool, problem: str) -> None:
    """Raise `ConfigError` if the layout is canonical and ranks cannot share a host pool.

    problem: why they cannot; empty if they can.
    """
    if is_canonical and problem:
        raise ConfigError(f"canonical_layout: all ranks share one host pool, but {problem}; omit the option")


def _shared(replicas: int, problem: str) -> int:
    if replicas > 1 and problem:
        log.warning(
            "kvsm: %d ranks hold the same KV cache, and each keeps its own copy in host memory: %s",
            replicas,
            problem,
        )
        return 1
    return replicas


def why_not_shared(options: ConnectorOptions, parallel: Any) -> str:
    """Return why ranks cannot share a host pool; empty if they can."""
    if options.hand_over_directory is not None:
        return "with hand_over_directory each rank hands over a pool of its own"
    if options.disk_dir is not None:
        return "with disk_dir each rank has a pool of its own"
    return _why_apart(parallel)


def _why_apart(parallel: Any) -> str:
    """Return why ranks cannot share memory; empty if they can."""
    if parallel.nnodes_within_dp > 1:
        return "they are on several machines"
    if parallel.distributed_executor_backend != "mp":
        return f"the executor {parallel.distributed_executor_backend} may start them on several machines"
    return ""


def pool_path(engine_id: str, extra_config: Any) -> Path:
    """Return the file of the pool that the ranks of an engine share.

    Its name is a digest of the engine's id and options. The id is new at each start, unless the user gives
    one, and differs between data-parallel engines. Two connectors of a MultiConnector have the same id, but
    other options. A run that uses the same file at the same time is refused (`SharedPoolFile`).
    """
    owner = json.dumps([engine_id, dict(extra_config)], sort_keys=True, default=str)
    return SHARED_MEMORY / f"kvsm-{sha256(owner.encode()).hexdigest()[:32]}"


def _equal_ranks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of consecutive ranks that hold the same KV cache in every layer."""
    parallel = vllm_config.parallel_config
    ranks = int(parallel.tensor_parallel_size)
    if ranks == 1 or parallel.world_size != ranks or parallel.decode_context_parallel_size > 1:
        return 1
    # For latent attention, vLLM says it.
    known = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    return known if known > 1 else _equal_heads(vllm_config.model_config, kv_cache_config, ranks)


def _equal_heads(model: Any, kv_cache_config: Any, ranks: int) -> int:
    """Return the same number for attention with KV heads: with fewer heads than ranks, ranks share a head.

    Layers of different kinds may have different numbers of heads. If the model's configuration says so, the
    ranks are not certain to hold the same bytes in all layers, and the result is 1.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    heads = int(model.get_total_num_kv_heads())
    if heads >= ranks or ranks % heads:
        return 1
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    ]
    attention = all(
        isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) and not isinstance(spec, MLAAttentionSpec)
        for spec in specs
    )
    if not attention or any(spec.num_kv_heads != 1 for spec in specs):
        return 1
    declared = {name: value for name, value in vars(model.hf_text_config).items() if _HEADS.search(name)}
    uniform = all(value is None or value == heads for value in declared.values())
    return ranks // heads if uniform and not hasattr(model.hf_text_config, "block_configs") else 1
