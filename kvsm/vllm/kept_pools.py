"""The host pools of an engine that restarts warm: their files, and what the scheduler's side reads from them.

Each rank keeps its pool in a file of `pool_dir`, and the checksums of its blocks in a second file. Ranks that
share a pool share both files. vLLM makes the workers before the scheduler, so the pools are open when the
scheduler's side starts, and it reads their ids from the files. It also maps the mark of each file
(`kvsm/copies/host_pools/pool_mark.py`), because it writes the log.

    pool_dir/engine0-rank0            blocks of rank 0
    pool_dir/engine0-rank0-checksums  their checksums
    pool_dir/engine0/                 the event log of all lives, if `event_log` names no other directory
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsm.copies import KeptPool, open_mark, read_kept_pool
from kvsm.errors import ConfigError
from kvsm.identity import KeptPools
from kvsm.system.private_files import private_directory
from kvsm.vllm.engine_offloader import WarmPools
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.host_sharing import shares_pool
from kvsm.vllm.pool_identity import engine_identity, rank_identity, weights_version
from kvsm.vllm.rank_copies import CHECKSUMS, KeptPlace


def kept_place(
    options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any, layout: dict[str, object]
) -> KeptPlace | None:
    """Return the file of this rank's kept pool; None if it keeps none. Creates the directory.

    layout: the memory layout of this rank's tensors. Ranks that share a pool have the same layout.
    Raises `ConfigError`.
    """
    if options.pool_dir is None:
        return None
    private_directory(Path(options.pool_dir))
    parallel = vllm_config.parallel_config
    path = _path(options, vllm_config, kv_cache_config, parallel.rank)
    identity = rank_identity(options, vllm_config, kv_cache_config, layout)
    return KeptPlace(path, KeptPool(identity))


def warm_pools(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> WarmPools | None:
    """Read the pools that the workers have opened; None if this engine does not restart warm."""
    if options.pool_dir is None:
        return None
    paths = {
        _path(options, vllm_config, kv_cache_config, rank): rank
        for rank in range(vllm_config.parallel_config.world_size)
    }
    paths |= {path.with_name(path.name + CHECKSUMS): rank for path, rank in paths.items()}
    ids, marks, why_cold = [], [], []
    for path, rank in paths.items():
        try:
            facts = read_kept_pool(path)
            marks.append(open_mark(path))
        except ConfigError as error:
            why_cold.append(f"rank {rank}: {error}")
            continue
        ids.append(facts.pool_id or b"")
        why_cold += [f"rank {rank}: {reason}" for reason in facts.cold_reason]
    pools = KeptPools(engine_identity(vllm_config, kv_cache_config, options), tuple(ids))
    weights = weights_version(vllm_config, options.weights_version)
    return WarmPools(options.pool_dir, pools, weights, marks, tuple(why_cold))


def _path(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any, rank: int) -> Path:
    owner = "shared" if shares_pool(options, vllm_config, kv_cache_config) else f"rank{rank}"
    assert options.pool_dir is not None
    return Path(options.pool_dir) / f"engine{vllm_config.parallel_config.data_parallel_index}-{owner}"
