"""Self-describing KV events call a group of layers as vLLM's own events do, whatever its layers are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import get_offloading_event_group_spec
from vllm.v1 import kv_cache_interface as kv

from kvsm.check.vllm_fuzz.configs import changed, make_kv_cache_config
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS
from kvsm.core.scheduler import SchedulerConfig
from kvsm.core.scheduler.payloads import describe
from kvsm.errors import ConfigError
from kvsm.vllm.kv_cache_config import groups_of

VALUES: dict[str, Any] = {
    "attention_chunk_size": 2 * BLOCK_TOKENS,
    "block_size": BLOCK_TOKENS,
    "blocks_per_request": 4,
    "dtype": torch.float32,
    "dtypes": (torch.float32,),
    "head_size": 1,
    "head_size_v": 1,
    "mamba_cache_mode": "align",
    "num_kv_heads": 1,
    "page_size": 64,
    "rswa_window": 2 * BLOCK_TOKENS,
    "shapes": ((16,),),
    "sliding_window": 2 * BLOCK_TOKENS,
}
"""Fields of layers -> a value."""

TAKEN = {
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
}


def every_kind(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield from every_kind(kind)
        if kind.__module__ == kv.__name__ and kind is not kv.UniformTypeKVCacheSpecs:
            yield kind


def made(kind: Any, **more: Any) -> Any:
    """Layers of this kind. Only windows of their own have `sliding_window`."""
    names = {field.name for field in dataclasses.fields(kind)}
    if issubclass(kind, kv.FullAttentionSpec):
        names -= {"sliding_window", "attention_chunk_size"}
    return kind(**{name: VALUES[name] for name in sorted(names & VALUES.keys())}, **more)


def groups_for(spec: Any) -> Any:
    """(kvsm's group of these layers, vLLM's)."""
    kv_cache = make_kv_cache_config(34, (0,))
    [group] = kv_cache.kv_cache_groups
    group = dataclasses.replace(group, kv_cache_spec=spec)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    [ours] = groups_of(SimpleNamespace(parallel_config=parallel), changed(kv_cache, kv_cache_groups=[group]))
    return ours, group


def named_in_events(group: Any) -> tuple[str | None, int | None]:
    """(kind, window) in the event of a block of this group."""
    request = SimpleNamespace(
        block_hashes=[b"hash"],
        all_token_ids=[7] * BLOCK_TOKENS,
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
    )
    tracked = cast(Any, SimpleNamespace(request=request))
    [event] = describe(SchedulerConfig(groups=(group,)), 1, [(tracked, 0, BLOCK_TOKENS)])
    assert event is not None
    return event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window


def specs() -> Iterator[tuple[str, Any]]:
    """Layers of every kind that vLLM has: alone, with tokens kept for drafts, and as layers of one type."""
    for kind in every_kind(kv.KVCacheSpec):
        if kind is kv.AttentionSpec:
            continue
        spec = made(kind)
        yield kind.__name__, spec
        if hasattr(spec, "extra_retained_tokens"):
            yield kind.__name__, made(kind, extra_retained_tokens=3)
        yield (
            kind.__name__,
            kv.UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"layer.0": spec}),
        )


def test_events_name_every_group_as_vllm_does() -> None:
    taken = set()
    for kind, spec in specs():
        try:
            ours, theirs = groups_for(spec)
        except ConfigError:
            continue
        taken.add(kind)
        assert named_in_events(ours) == tuple(get_offloading_event_group_spec(theirs)), spec
    assert taken == TAKEN


def test_tokens_that_are_kept_for_drafts_are_part_of_the_reach_and_not_of_the_window() -> None:
    group, _ = groups_for(made(kv.SlidingWindowSpec, extra_retained_tokens=3))
    assert named_in_events(group) == ("sliding_window", 2 * BLOCK_TOKENS)
    assert group.first_needed_token(40) == 40 - (2 * BLOCK_TOKENS + 3 - 1)
