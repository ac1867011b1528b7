"""KV events for routers and schedulers: changes of the set of readable keys.

The changes form one queue, in their order. It is taken in one of two forms:

- vLLM's `OffloadingEvent(keys, medium, removed)`: no block size, because a GPU event has it already and
  one event may hold blocks of several sizes;
- the KV events of the wire (vLLM's `kv_events`, array of tagged maps in msgpack): `BlockStored` and
  `BlockRemoved`. A reset removes its keys one by one: `AllBlocksCleared` names no medium, and would make a
  router forget what the device has.

A `BlockStored` describes its blocks: their tokens, the parent and the adapter. The request whose blocks are
copied has these facts when the store is planned. They are needed when the store ends, when the request may be
gone: so they are kept by transfer. A key may be removed and stored again any number of times before a take;
each event has its own description. Where the tokens are unknown the event has the legacy form of vLLM's
offloading connectors: the hashes alone, block_size 0 and no token_ids. They are unknown for a lazy store,
which copies a device block whose request may be over, and for a prompt of embeddings.

A key is a block hash and four bytes of KV cache group index, big endian. A chunk of several blocks has one
key, with the hash of its last block. The event of its store names all its blocks; the event of its removal
names those of its blocks that are in no other chunk.

Both forms, folded from nothing, give exactly the keys that can be matched (events are state, S10).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import msgspec

from kvsm.core.ledger.canonical import Dropped, declared, filled

MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"
GROUP_INDEX_BYTES = 4


class KeysChanged(msgspec.Struct, frozen=True):
    """`keys` were stored in `medium` or removed: vLLM's `OffloadingEvent` (`vllm.v1.kv_offload.base`)."""

    keys: list[bytes]
    medium: str
    removed: bool


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of the wire's events. The tag of each is its class name."""


class BlockStored(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    """Blocks that were stored in `medium`, and can be loaded from it.

    parent_block_hash: the hash of the block before the first one.
    token_ids: the tokens of all blocks, `block_size` for each.
    extra_keys: for each block, what decides its content besides its tokens.
    kv_cache_spec_kind: the kind of attention of the group's layers, in vLLM's words.
    kv_cache_spec_sliding_window: the window of that attention (tokens). None: it has none.
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
    """Blocks that can no longer be loaded from `medium`."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class StoredKeys(NamedTuple):
    """These keys became readable."""

    keys: Sequence[bytes]
    described: Sequence[BlockStored | None]
    """The description of each key, made when its store was planned; empty if no key has one."""


class RemovedKeys(NamedTuple):
    """These keys are no longer readable."""

    keys: Sequence[bytes]
    names: Sequence[bytes]
    """The blocks that are no longer readable, each named like a key."""


@declared
class PublisherState(msgspec.Struct):
    """The changes that were not taken yet, and the descriptions for later changes. Empty at first."""

    changes: Annotated[
        list[StoredKeys | RemovedKeys],
        filled(lambda one, _: [(type(change).__name__, *change) for change in one.changes]),
    ]
    """Changes since the last take."""
    descriptions: Annotated[
        dict[int, Sequence[BlockStored | None]],
        # The store is live: its description goes with it.
        filled(lambda one, names: [(names.transfers[id], it) for id, it in one.descriptions.items()]),
    ]
    """Live store -> the descriptions of its keys, in their order."""
    blocks_of: Annotated[dict[bytes, list[bytes]], filled(lambda one, _: sorted(one.blocks_of.items()))]
    """Readable key of a chunk of several blocks -> these blocks, each named like a key."""
    chunks_with: Annotated[Counter[bytes], Dropped("`blocks_of`, counted")]
    """Block in `blocks_of` -> the number of keys that have it. Two prompts that diverge within a chunk have
    two chunks, and the blocks before the divergence are in both."""


class Publisher:
    """Collects the changes of a ledger until they are taken, each once. A `CacheListener`.

    medium: where the readable keys are, in vLLM's words.
    """

    def __init__(self, *, medium: str = MEDIUM_CPU) -> None:
        self.medium = medium
        self.state = PublisherState([], {}, {}, Counter())

    def describe(self, transfer: int, payloads: Sequence[BlockStored | None]) -> None:
        """Describe the keys of a store: an event for each, in their order; None if its tokens are unknown."""
        self.state.descriptions[transfer] = payloads

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None:
        """These keys became readable."""
        state = self.state
        described = state.descriptions.get(transfer, ())
        for key, event in zip(keys, described):
            if event is not None and len(event.block_hashes) > 1:
                suffix = key[-GROUP_INDEX_BYTES:]
                state.blocks_of[key] = [block_hash + suffix for block_hash in event.block_hashes]
                state.chunks_with.update(state.blocks_of[key])
        state.changes.append(StoredKeys(keys, described))

    def removed(self, keys: Sequence[bytes]) -> None:
        """These keys are no longer readable."""
        names = keys
        if self.state.blocks_of:
            names = [name for key in keys for name in self._gone_with(key)]
        self.state.changes.append(RemovedKeys(keys, names))

    def _gone_with(self, key: bytes) -> Iterator[bytes]:
        """Remove this key, and yield the blocks that are in no other readable chunk."""
        chunks_with = self.state.chunks_with
        for name in self.state.blocks_of.pop(key, (key,)):
            chunks_with[name] -= 1
            if chunks_with[name] < 1:
                del chunks_with[name]
                yield name

    def cleared(self) -> None:
        """Handle a reset: no store planned so far will become readable. `removed` got the readable keys
        before."""
        self.state.descriptions.clear()

    def ended(self, transfer: int) -> None:
        """Forget the descriptions of a transfer that has ended, in any way."""
        self.state.descriptions.pop(transfer, None)

    def take_events(self) -> list[KeysChanged]:
        """Take all changes since the last take, as vLLM's offloading events."""
        changes, self.state.changes = self.state.changes, []
        return [
            KeysChanged(list(change.keys), self.medium, isinstance(change, RemovedKeys))
            for change in changes
            if change.keys
        ]

    def take_kv_events(self) -> list[KVCacheEvent]:
        """Take all changes since the last take, as KV events of the wire."""
        changes, self.state.changes = self.state.changes, []
        taken: list[KVCacheEvent] = []
        for change in changes:
            if isinstance(change, RemovedKeys):
                taken += [
                    BlockRemoved(hashes, self.medium, group) for group, hashes in _by_group(change.names)
                ]
            else:
                taken += _stored_events(change, self.medium)
        return taken


def _stored_events(change: StoredKeys, medium: str) -> Iterator[KVCacheEvent]:
    """Yield the events of one store: its descriptions, and keys without one in the legacy form."""
    described = change.described or (None,) * len(change.keys)
    unknown: list[bytes] = []
    for key, event in zip(change.keys, described):
        if event is None:
            unknown.append(key)
            continue
        yield from _legacy(unknown, medium)
        unknown.clear()
        yield event
    yield from _legacy(unknown, medium)


def _legacy(keys: Sequence[bytes], medium: str) -> Iterator[BlockStored]:
    for group, hashes in _by_group(keys):
        yield BlockStored(hashes, None, [], 0, None, medium, None, None, group)


def _by_group(keys: Sequence[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (group, block hashes) for each run of keys of one group."""
    for suffix, members in groupby(keys, key=lambda key: key[-GROUP_INDEX_BYTES:]):
        yield int.from_bytes(suffix, "big"), [key[:-GROUP_INDEX_BYTES] for key in members]
