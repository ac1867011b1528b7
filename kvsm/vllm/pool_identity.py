"""The identity of a kept host pool in vLLM: the facts that define what its bytes mean.

Two starts of vLLM read each other's blocks only if all facts are equal. Otherwise the pool is cold, and the
differences are logged at the start. Each field of vLLM's configuration counts, unless `config_exceptions`
names it. The scheduler's process and the workers have the same configuration; a worker adds the memory layout
of its tensors. The version of the weights is kept in the event log instead: weights may change while the
engine runs.

Not detected: an adapter (LoRA) whose contents change while its name and path stay the same, weight files that
change while their names, sizes and times of change stay the same, and settings that vLLM reads from
environment variables alone. Name such changes with `weights_version`.
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
"""Suffixes of weight files. Their names, sizes and times of change make the version of a model's weights."""

_SAME_EVERYWHERE = ("sha256_cbor", "xxhash_cbor")
"""Hash algorithms whose input does not depend on the version of Python. The others pickle their input."""


def engine_identity(vllm_config: Any, kv_cache_config: Any, options: Any) -> PoolIdentity:
    """Return the identity of the configuration, which the scheduler's process and the workers share."""
    return PoolIdentity.of(engine_facts(vllm_config, kv_cache_config, options))


def engine_facts(vllm_config: Any, kv_cache_config: Any, options: Any) -> dict[str, object]:
    """Return the facts of the configuration, by name."""
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
    """Return the facts that decide what a block of the KV cache means, by name.

    exceptions: more fields of vLLM's configuration that do not count, besides `config_exceptions.EXCEPTIONS`.
    """
    import vllm

    facts = {"vLLM": vllm.__version__, **config_facts(vllm_config, exceptions)}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, layers = short(group.kv_cache_spec), _layers(group.layer_names)
        facts[f"KV cache group {number}"] = f"{spec} in {layers}"
    return facts


def layout_facts(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that a worker adds: the memory layout of its layers' tensors, and their backends."""
    layers = vllm_config.compilation_config.static_forward_context
    alike: dict[str, list[str]] = {}
    for name, cache in kv_caches.items():
        layout = f"{_backend_of(layers.get(name))}, {_shape_of(cache, kv_cache_config.num_blocks)}"
        alike.setdefault(layout, []).append(name)
    return {f"layout of {_layers(names)}": layout for layout, names in alike.items()}


def rank_identity(
    options: Any, vllm_config: Any, kv_cache_config: Any, layout: Mapping[str, object]
) -> PoolIdentity:
    """Return the identity of a rank's pool. layout: the rank's `layout_facts`."""
    facts = engine_facts(vllm_config, kv_cache_config, options)
    if not shares_pool(options, vllm_config, kv_cache_config):
        facts["rank"] = vllm_config.parallel_config.rank
    return PoolIdentity.of({**facts, **layout})


def _layers(names: Sequence[str]) -> str:
    """Describe a set of layers by its size and a digest, so that different sets have different texts."""
    digest = blake2b("\n".join(sorted(names)).encode(), digest_size=4).hexdigest()
    return f"{len(names)} layers ({digest})"


def weights_version(vllm_config: Any, named: str | None) -> str:
    """Return the version of the weights with which the engine starts.

    named: the version that the user gives (`weights_version`); None: it follows from the model's files.
    """
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
    """Return the seed of vLLM's block hashes. Some algorithms use random bytes in each process."""
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
    """Describe the dtype, the shape and the order of axes in memory of a layer's tensor, or of its states.

    The number of blocks is left out: vLLM may find room for another number at the next start.
    """
    if isinstance(cache, list | tuple):
        return "; ".join(_shape_of(state, num_blocks) for state in cache)
    sizes = ["blocks" if size == num_blocks else str(size) for size in cache.shape]
    order = sorted(range(cache.dim()), key=lambda axis: -cache.stride(axis))
    return f"{cache.dtype} [{', '.join(sizes)}] in the order {order}"
