"""What leaves kvsm for routers and schedulers: how the set of readable keys changes.

Two forms of one queue, in the order in which it happened:

- vLLM's `OffloadingEvent(keys, medium, removed)`: no block size, because a GPU event has it already and
  one event may hold blocks of several sizes;
- the KV events of the wire (vLLM's `kv_events`, array of tagged maps in msgpack): `BlockStored` and
  `BlockRemoved`. A reset removes its keys one by one: `AllBlocksCleared` names no medium, and would make a
  router forget what the device has.

What a `BlockStored` says of its blocks is a matter of configuration. Legacy: nothing but their hashes;
block_size is 0 and token_ids is empty, as vLLM's offloading connectors send it. Self-describing: the tokens,
the parent, the adapter. That is known when a store is planned, from the request whose blocks it copies, and
is needed when the store ends, when that request may be gone: so it is kept by transfer, and by nothing else.
A key may be removed and stored again any number of times between two takes, and no event takes from another
what it needs. A store that nobody described (the lazy store of a device block, whose tokens nobody knows any
more) is told in the legacy form.

A key is a block hash followed by four bytes, the KV cache group index, big endian. A chunk of several blocks
has one key, with the hash of its last block. A self-describing event names all its blocks; its removal names
those that no other chunk has.

Folding either form, from nothing, gives exactly the keys that can be matched (S10).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

MEDIUM_CPU = "CPU"
GROUP_INDEX_BYTES = 4


class KeysChanged(msgspec.Struct, frozen=True):
    """`keys` came to `medium` or left it: vLLM's `OffloadingEvent` (`vllm.v1.kv_offload.base`)."""

    keys: list[bytes]
    medium: str
    removed: bool


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of the wire's events; its tag is the name of the class."""


class BlockStored(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    """Blocks that came to `medium`, and can be loaded from it.

    parent_block_hash: of the block before the first. token_ids: of all of the blocks together, `block_size`
    each. extra_keys: for each block, what else decides its content. kv_cache_spec_kind: how far the group's
    layers look back, by vLLM's names, and kv_cache_spec_sliding_window how many tokens that is.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    """Blocks that cannot be loaded from `medium` any more."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class _Stored(NamedTuple):
    """These keys became readable. told: what was said of each when their store was planned, if anything."""

    keys: Sequence[bytes]
    told: Sequence[BlockStored | None]


class _Removed(NamedTuple):
    """These keys are readable no more. names: of all blocks that went with them, as if each were a key."""

    keys: Sequence[bytes]
    names: Sequence[bytes]


class Publisher:
    """Collects changes from a ledger (it is a `CacheListener`) until they are taken, each once.

    self_describing: whether the events of the wire say what the blocks hold. It costs a copy of their tokens
    when a store is planned.
    """

    def __init__(self, *, self_describing: bool = False) -> None:
        self.self_describing = self_describing
        self._changes: list[_Stored | _Removed] = []
        self._payloads: dict[int, Sequence[BlockStored | None]] = {}
        """Live store -> what its keys hold, in their order."""
        self._blocks_of: dict[bytes, list[bytes]] = {}
        """Readable key that stands for several blocks -> the names of all of them, as if each were a key."""
        self._chunks_with: Counter[bytes] = Counter()
        """Name of such a block -> how many of these keys it stands under. Two prompts that part within a
        chunk have two chunks, and the blocks before are in both."""

    def describe(self, transfer: int, payloads: Sequence[BlockStored | None]) -> None:
        """What the keys of this store hold, one event for each, in their order; None: nobody knows."""
        self._payloads[transfer] = payloads

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None:
        told = self._payloads.get(transfer, ())
        for key, event in zip(keys, told):
            if event is not None and len(event.block_hashes) > 1:
                suffix = key[-GROUP_INDEX_BYTES:]
                self._blocks_of[key] = [block_hash + suffix for block_hash in event.block_hashes]
                self._chunks_with.update(self._blocks_of[key])
        self._changes.append(_Stored(keys, told))

    def removed(self, keys: Sequence[bytes]) -> None:
        names = keys
        if self._blocks_of:
            names = [name for key in keys for name in self._gone_with(key)]
        self._changes.append(_Removed(keys, names))

    def _gone_with(self, key: bytes) -> Iterator[bytes]:
        """The blocks that can be read no more without this key."""
        for name in self._blocks_of.pop(key, (key,)):
            self._chunks_with[name] -= 1
            if self._chunks_with[name] < 1:
                del self._chunks_with[name]
                yield name

    def cleared(self) -> None:
        """No store that was planned before will be told. The keys were announced as removed just before."""
        self._payloads.clear()

    def ended(self, transfer: int) -> None:
        """This transfer will store nothing (more): it stored, failed, was cancelled or was lost."""
        self._payloads.pop(transfer, None)

    def take_events(self) -> list[KeysChanged]:
        """All changes since the last take, as vLLM's offloading events."""
        changes, self._changes = self._changes, []
        return [
            KeysChanged(list(change.keys), MEDIUM_CPU, isinstance(change, _Removed))
            for change in changes
            if change.keys
        ]

    def take_kv_events(self) -> list[KVCacheEvent]:
        """All changes since the last take, as events of the wire."""
        changes, self._changes = self._changes, []
        taken: list[KVCacheEvent] = []
        for change in changes:
            if isinstance(change, _Removed):
                taken += [
                    BlockRemoved(hashes, MEDIUM_CPU, group) for group, hashes in _by_group(change.names)
                ]
            else:
                taken += _told(change)
        return taken


def _told(change: _Stored) -> Iterator[KVCacheEvent]:
    """The events of one store: those that were described, and runs of the others in the legacy form."""
    told = change.told or (None,) * len(change.keys)
    unknown: list[bytes] = []
    for key, event in zip(change.keys, told):
        if event is None:
            unknown.append(key)
            continue
        yield from _legacy(unknown)
        unknown.clear()
        yield event
    yield from _legacy(unknown)


def _legacy(keys: Sequence[bytes]) -> Iterator[BlockStored]:
    for group, hashes in _by_group(keys):
        yield BlockStored(hashes, None, [], 0, None, MEDIUM_CPU, None, None, group)


def _by_group(keys: Sequence[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """(group, block hashes) of each run of keys of one group."""
    for suffix, members in groupby(keys, key=lambda key: key[-GROUP_INDEX_BYTES:]):
        yield int.from_bytes(suffix, "big"), [key[:-GROUP_INDEX_BYTES] for key in members]
