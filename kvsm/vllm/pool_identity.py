"""What the bytes of a kept host pool mean in vLLM, and which weights computed them.

Two starts of vLLM read each other's blocks only if all of this is equal. What differs is logged at the start,
and the pool is cold then. Each field of vLLM's configuration counts, unless `config_exceptions` names it. The
scheduler's process and the workers have the same configuration; a worker adds how its tensors lie in memory.
The weights have a version of their own, which the event log keeps: they may change while the engine runs.

Not seen: an adapter (LoRA) whose contents change under its name and path, weight files that change under
their name, size and time of change, and what vLLM reads from environment variables alone. Name these changes
with `weights_version`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvsm.identity import PoolIdentity
from kvsm.vllm.config_facts import config_facts, short
from kvsm.vllm.host_sharing import shares_pool

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of the files whose names, sizes and times of change make the version of a model's weights."""

_SAME_EVERYWHERE = ("sha256_cbor", "xxhash_cbor")
"""Hash algorithms whose input does not depend on the version of Python. The others pickle theirs."""


def engine_identity(vllm_config: Any, kv_cache_config: Any, options: Any) -> PoolIdentity:
    """What both processes know."""
    return PoolIdentity.of(engine_facts(vllm_config, kv_cache_config, options))


def engine_facts(vllm_config: Any, kv_cache_config: Any, options: Any) -> dict[str, object]:
    """The facts of the configuration, by name."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    facts: dict[str, object] = {
        **model_facts(vllm_config, kv_cache_config),
        "hash seed": _hash_seed(algorithm),
        "blocks per chunk": options.blocks_per_chunk,
        "canonical layout": options.canonical_layout,
    }
    if algorithm not in _SAME_EVERYWHERE:
        facts["Python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return facts


def model_facts(vllm_config: Any, kv_cache_config: Any, exceptions: Collection[str] = ()) -> dict[str, str]:
    """The facts that decide what a block of the KV cache means, by name.

    exceptions: fields of vLLM's configuration that do not count, besides `config_exceptions.EXCEPTIONS`.
    """
    import vllm

    facts = {"vLLM": vllm.__version__, **config_facts(vllm_config, exceptions)}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, layers = short(group.kv_cache_spec), _layers(group.layer_names)
        facts[f"KV cache group {number}"] = f"{spec} in {layers}"
    return facts


def layout_facts(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, object]:
    """What a worker adds: how the tensors of its layers lie in memory, and which backend reads them."""
    layers = vllm_config.compilation_config.static_forward_context
    alike: dict[str, list[str]] = {}
    for name, cache in kv_caches.items():
        layout = f"{_backend_of(layers.get(name))}, {_shape_of(cache, kv_cache_config.num_blocks)}"
        alike.setdefault(layout, []).append(name)
    return {f"layout of {_layers(names)}": layout for layout, names in alike.items()}


def rank_identity(
    options: Any, vllm_config: Any, kv_cache_config: Any, layout: Mapping[str, object]
) -> PoolIdentity:
    """What the bytes of a rank's blocks mean. layout: how its tensors lie in memory."""
    facts = engine_facts(vllm_config, kv_cache_config, options)
    if not shares_pool(options, vllm_config, kv_cache_config):
        facts["rank"] = vllm_config.parallel_config.rank
    return PoolIdentity.of({**facts, **layout})


def _layers(names: Sequence[str]) -> str:
    """Layers in few words, and yet each other set of them in other words."""
    digest = blake2b("\n".join(sorted(names)).encode(), digest_size=4).hexdigest()
    return f"{len(names)} layers ({digest})"


def weights_version(vllm_config: Any, named: str | None) -> str:
    """The version of the weights with which the engine starts. named: as the user names it, if at all."""
    if named is not None:
        return named
    model = vllm_config.model_config
    parts = [f"load format {vllm_config.load_config.load_format}", f"revision {model.revision}"]
    if vllm_config.load_config.load_format == "dummy":
        parts.append(f"seed {model.seed}")
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        parts.append(f"commit {commit}")
    path = Path(model.model)
    parts += sorted(_files_in(path)) if path.exists() else [model.model]
    return blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _files_in(path: Path) -> Iterator[str]:
    files = [path] if path.is_file() else path.iterdir()
    for file in files:
        if file.suffix in WEIGHT_FILES:
            found = file.stat()
            yield f"{file.name} {found.st_size} {found.st_mtime_ns}"


def _hash_seed(algorithm: str) -> str:
    """From what vLLM's block hashes start. Some algorithms begin with random bytes in each process."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(algorithm)
    seeds = {kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2)}
    if len(seeds) > 1:
        return f"random ({min(seeds)[:8]}); set PYTHONHASHSEED to any number to keep it"
    return str(seeds.pop())


def _backend_of(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return "no backend" if backend is None else str(backend.get_name())


def _shape_of(cache: Any, num_blocks: int) -> str:
    """The shape and dtype of a tensor, and the order of its axes in memory; of one layer or of its states.

    How many blocks there are is no part of a block's meaning: a profile may find room for another number.
    """
    if isinstance(cache, list | tuple):
        return "; ".join(_shape_of(one, num_blocks) for one in cache)
    sizes = ["blocks" if size == num_blocks else str(size) for size in cache.shape]
    order = sorted(range(cache.dim()), key=lambda axis: -cache.stride(axis))
    return f"{cache.dtype} [{', '.join(sizes)}] in the order {order}"
