"""The contents of vLLM's cached blocks, without and with kvsm, to compare them bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import MambaSpec, group_kernel_blocks


class Distances(NamedTuple):
    """Distances between states, for each tensor (largest absolute difference of two numbers).

    rounding: the largest distance between two states of one prefix that were computed in different steps.
    nearest: the smallest distance between the states of two prefixes.
    """

    rounding: dict[str, float]
    nearest: dict[str, float]


class Contents:
    """The contents of the cached blocks of an engine without pipeline stages, read after each step.

    groups: vLLM's KV cache groups.
    of: key -> the part of each layer of its group.
    computes_again: whether the engine may compute a prefix again, in other steps. Then the first content is
        kept.
    """

    def __init__(self, llm: Any, computes_again: bool = False) -> None:
        self._computes_again = computes_again
        core = llm.llm_engine.engine_core.engine_core
        self._config = core.scheduler.kv_cache_config
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self.groups = self._config.kv_cache_groups
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        self._layers = [self._parts(layers, group.layer_names) for group in self.groups]
        self.of: dict[bytes, list[Any]] = {}

    def _parts(self, layers: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
        """Yield (name, tensor) of each part of the layers with these names. A state has several parts."""
        found = []
        for name in names:
            cache = layers[name].kv_cache
            for number, part in enumerate(cache if isinstance(cache, (list, tuple)) else [cache]):
                found.append((f"{name}, part {number}", group_kernel_blocks(part, self._config.num_blocks)))
        return found

    def look(self) -> None:
        """Read new blocks. Raises `AssertionError` if a content has changed, unless it may be recomputed."""
        for block in self._pool.blocks:
            key = block.block_hash
            if key is None or block.is_null:
                continue
            content = [part[block.block_id].contiguous().clone() for _, part in self._layers[group_of(key)]]
            if not equal_bits(self.of.setdefault(key, content), content) and not self._computes_again:
                raise AssertionError(f"block {block.block_id} has another content of {key.hex()} than before")

    def distances(self, other: Contents) -> Distances:
        """Return the distances of mamba states. other: the contents of the same keys from other steps."""
        rounding: dict[str, float] = {}
        nearest: dict[str, float] = {}
        for index, group in enumerate(self.groups):
            if not isinstance(group.kv_cache_spec, MambaSpec):
                continue
            keys = [key for key in self.of if group_of(key) == index and key in other.of]
            for place, (name, _) in enumerate(self._layers[index]):
                mine, theirs = ([one.of[key][place] for key in keys] for one in (self, other))
                rounding[name] = max(map(_apart, mine, theirs))
                nearest[name] = min(_apart(*pair) for pair in combinations(mine, 2))
        return Distances(rounding, nearest)


def group_of(key: bytes) -> int:
    """Return the KV cache group of a key, which is its end."""
    return int.from_bytes(key[-4:], "big")


def equal_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether these tensors have the same bits, also where they are NaN."""
    return all(
        torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in zip(one, other)
    )


def _apart(one: Any, other: Any) -> float:
    return float((one.float() - other.float()).abs().max())
