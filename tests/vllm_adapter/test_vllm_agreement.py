"""Compared with real vLLM: the same requests have the same hits, and vLLM's types decode kvsm's KV events.

Runs where vLLM can be imported. The continuous integration has an environment for it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core_life import keys, new_core, store
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.kv_events import KVCacheEvent, Publisher
from kvsm.core.offloader import Offloader

pytest.importorskip("vllm.v1.kv_offload.base", reason="vLLM is not installed")

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

HOST_BLOCKS = 6


def kvsm_hit(core: Offloader, request: str, key: bytes) -> bool:
    if core.match(request, [key]).hits:
        job = core.prepare_load(request, [0])
        assert job is not None
        core.submit([job.transfer])
        core.complete_load(job.transfer)
        hit = True
    else:
        store(core, request, [key])
        hit = False
    core.finish(request)
    return hit


def vllm_hit(manager: Any, request: str, key: bytes) -> bool:
    context = ReqContext(request)
    if manager.lookup(key, context) is LookupResult.HIT:
        manager.prepare_load([key], context)
        manager.touch([key], context)
        manager.complete_load([key], context)
        return True
    output = manager.prepare_store([key], context)
    manager.complete_store(output.keys_to_store, context)
    return False


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80))
@settings(max_examples=examples(200), deadline=None)
def test_lru_hits_as_vllm_does(requests: list[int]) -> None:
    """Requests have one block, so order within a prefix cannot differ."""
    core, _ = new_core(host_blocks=HOST_BLOCKS)
    manager = CPUOffloadingManager(HOST_BLOCKS, cache_policy="lru")
    for number, block in enumerate(requests):
        key = make_offload_key(b"block-%03d" % block, 0)
        assert kvsm_hit(core, str(number), key) == vllm_hit(manager, str(number), key), number


def test_kv_events_decode_as_vllms() -> None:
    """Events are state (S10): a router can decode the KV events that kvsm publishes."""
    core, _ = new_core(host_blocks=2, publisher=Publisher())
    store(core, "r", keys(2, group=1))
    store(core, "r", keys(1, "new", group=1), 4)
    core.reset()
    sent = msgspec.msgpack.encode(core.take_kv_events())
    events = msgspec.msgpack.decode(sent, type=list[BlockStored | BlockRemoved])
    assert [type(event) for event in events[:3]] == [BlockStored, BlockRemoved, BlockStored]
    assert events[0].block_hashes == [key[:-4] for key in keys(2)]
    assert (events[0].medium, events[0].group_idx, events[0].block_size) == ("CPU", 1, 0)
    # A reset removes its own keys, and says nothing about the device.
    assert isinstance(events[-1], BlockRemoved)
    assert [type(event) for event in events].count(BlockStored) == 2


def test_every_kv_event_has_one_of_vllms() -> None:
    from kvsm.vllm.vllm_kv_events import VLLM_EVENTS

    assert set(VLLM_EVENTS) == set(KVCacheEvent.__subclasses__())


def test_offloading_event_has_vllms_fields() -> None:
    from vllm.v1.kv_offload.base import OffloadingEvent as Theirs

    from kvsm.core.kv_events import KeysChanged as Ours

    assert set(Ours.__struct_fields__) <= set(Theirs.__dataclass_fields__)
