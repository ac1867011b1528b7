"""A host pool whose bytes do not depend on the number of ranks: vLLM's canonical layout.

Without it each rank keeps its part of a block together, and a part depends on how many ranks there are. In
the canonical layout a block has one row of bytes for all ranks, as an engine with one rank would have it:
layer after layer, each with all KV heads. Each rank reads and writes its own bytes of the row:

    two ranks, two layers     | layer 0, rank 0 | layer 0, rank 1 | layer 1, rank 0 | layer 1, rank 1 |
    one rank                  | layer 0                           | layer 1                           |

So another process can read the pool without knowing how many ranks wrote it. For each layer, vLLM's
`CanonicalPageMapping` gives the place of a rank's bytes, and whether that place exists for any number of
ranks. A model with a layer for which it does not is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvsm.errors import ConfigError
from kvsm.vllm.kv_cache_config import layer_rows


class CanonicalRows(NamedTuple):
    """The place of this rank's bytes in a row of the host pool.

    tensors: parts of the device pool, each with a row for each block.
    offsets: where each part begins in a row of the host pool (bytes).
    row_bytes: length of a row of the host pool.
    """

    tensors: list[Any]
    offsets: tuple[int, ...]
    row_bytes: int


class Layer(NamedTuple):
    """A layer of the model. rows: its bytes, a row for each block. mapping: its `CanonicalPageMapping`, or
    None."""

    name: str
    rows: Any
    mapping: Any


def layers_of_connector(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[Layer]:
    """Return the layers whose KV cache vLLM gave to the connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
        derive_canonical_mappings,
    )

    mappings = derive_canonical_mappings(vllm_config, kv_cache_config, dict(kv_caches))
    rows = layer_rows(kv_cache_config, kv_caches)
    return [Layer(name, of_layer, mappings.get(name)) for name, of_layer in rows.items()]


def canonical_rows(layers: Iterable[Layer], replicas: int) -> CanonicalRows:
    """Return the place of this rank's bytes in a row of the host pool.

    replicas: the number of ranks that hold the same bytes. Raises `ConfigError` for an unsuitable layer.
    """
    known: dict[tuple[int, int], Any] = {}
    tensors, offsets, end = [], [], 0
    for layer in layers:
        mapping, place = layer.mapping, (layer.rows.data_ptr(), layer.rows.stride(0))
        _check(layer, replicas)
        if place in known:
            # Layers of different groups may share their bytes: a block belongs to one group at a time.
            if known[place] != mapping:
                raise _refused(layer, "shares its bytes with a layer of another shape")
            continue
        known[place] = mapping
        for run in mapping.runs:
            for fragment in range(run.num_fragments):
                first = run.local_offset + fragment * run.local_stride
                tensors.append(layer.rows[:, first : first + run.fragment_size])
                offsets.append(end + run.canonical_offset + fragment * run.canonical_stride)
        end += mapping.canonical_page_size_bytes
    return CanonicalRows(tensors, tuple(offsets), end)


def _check(layer: Layer, replicas: int) -> None:
    if layer.mapping is None or not layer.mapping.parallelism_agnostic:
        raise _refused(layer, "has no form that is the same for any number of ranks")
    if layer.mapping.num_writers != replicas:
        raise _refused(
            layer, f"is the same on {layer.mapping.num_writers} ranks, and not on {replicas} in all layers"
        )


def _refused(layer: Layer, reason: str) -> ConfigError:
    return ConfigError(f"canonical_layout: layer {layer.name} {reason}; omit the option")
