"""What leaves kvsm for routers and schedulers: how the set of readable keys changes.

Two forms of one queue, in the order in which it happened:

- vLLM's `OffloadingEvent(keys, medium, removed)`: no block size, because a GPU event has it already and
  one event may hold blocks of several sizes;
- the KV events of the wire (vLLM's `kv_events`, array of tagged maps in msgpack): `BlockStored`,
  `BlockRemoved`, `AllBlocksCleared`. What is offloaded carries no tokens here, so block_size is 0 and
  token_ids is empty, as vLLM's offloading connectors send it.

A key is a block hash followed by four bytes, the KV cache group index, big endian.

Folding either form gives exactly the keys that can be matched (S10).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

MEDIUM_CPU = "CPU"
GROUP_INDEX_BYTES = 4


class OffloadingEvent(msgspec.Struct, frozen=True):
    """vLLM's event of the same name (`vllm.v1.kv_offload.base`): `keys` came to `medium`, or left it."""

    keys: list[bytes]
    medium: str
    removed: bool


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of the wire's events; its tag is the name of the class."""


class BlockStored(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    pass


class Publisher:
    """Collects changes from a ledger (it is a `CacheListener`) until they are taken, each once."""

    def __init__(self) -> None:
        self._changes: list[tuple[bool, list[bytes]] | None] = []
        """(removed, keys) in order; None stands for a reset."""

    def stored(self, keys: Sequence[bytes]) -> None:
        self._changes.append((False, list(keys)))

    def removed(self, keys: Sequence[bytes]) -> None:
        self._changes.append((True, list(keys)))

    def cleared(self) -> None:
        self._changes.append(None)

    def take_events(self) -> list[OffloadingEvent]:
        """All changes since the last take, as vLLM's offloading events. A reset names no keys there:
        its keys were announced as removed just before."""
        changes, self._changes = self._changes, []
        return [
            OffloadingEvent(change[1], MEDIUM_CPU, change[0]) for change in changes if change and change[1]
        ]

    def take_kv_events(self) -> list[KVCacheEvent]:
        """All changes since the last take, as events of the wire."""
        changes, self._changes = self._changes, []
        taken: list[KVCacheEvent] = []
        for change in changes:
            if change is None:
                taken.append(AllBlocksCleared())
                continue
            removed, keys = change
            for group, members in groupby(
                keys, key=lambda key: int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
            ):
                hashes = [key[:-GROUP_INDEX_BYTES] for key in members]
                if removed:
                    taken.append(BlockRemoved(hashes, MEDIUM_CPU, group))
                else:
                    taken.append(BlockStored(hashes, None, [], 0, None, MEDIUM_CPU, None, None, group))
        return taken
