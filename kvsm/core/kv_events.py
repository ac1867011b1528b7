"""What kvsm tells routers and schedulers: how the set of readable keys changes.

One queue, in the order of the changes, taken in one of two forms:

- vLLM's `OffloadingEvent(keys, medium, removed)`: no block size, because a GPU event has it already and
  one event may hold blocks of several sizes;
- the KV events of the wire (vLLM's `kv_events`, array of tagged maps in msgpack): `BlockStored` and
  `BlockRemoved`. A reset removes its keys one by one: `AllBlocksCleared` names no medium, and would make a
  router forget what the device has.

A `BlockStored` describes its blocks: their tokens, the parent and the adapter. These are known when a store
is planned, from the request whose blocks it copies. They are needed when the store ends, and the request may
be gone by then: so they are kept by transfer. Between two takes a key may be removed and stored again any
number of times; each event has what it needs. Where the tokens are unknown the event has the legacy form, as
vLLM's offloading connectors send it: the hashes alone, block_size 0 and no token_ids. This is so for a lazy
store, which copies a device block whose request may be over, and for a prompt of embeddings.

A key is a block hash and four bytes of KV cache group index, big endian. A chunk of several blocks has one
key, with the hash of its last block. An event that describes it names all its blocks; its removal names those
that stand in no other chunk.

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
    """`keys` came to `medium` or left it: vLLM's `OffloadingEvent` (`vllm.v1.kv_offload.base`)."""

    keys: list[bytes]
    medium: str
    removed: bool


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Base of the wire's events. The tag of each is its class name."""


class BlockStored(KVCacheEvent, frozen=True, omit_defaults=True, tag=True):
    """Blocks that came to `medium`, and can be loaded from it.

    parent_block_hash: the hash of the block before the first one.
    token_ids: the tokens of all blocks, `block_size` for each.
    extra_keys: for each block, what else decides its content.
    kv_cache_spec_kind: how far the group's layers look back, in vLLM's words.
    kv_cache_spec_sliding_window: how many tokens that is.
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
    """What was said of each key when its store was planned; empty if nothing was said of any."""


class RemovedKeys(NamedTuple):
    """These keys are no longer readable."""

    keys: Sequence[bytes]
    names: Sequence[bytes]
    """The blocks that went with them, each named like a key."""


@declared
class PublisherState(msgspec.Struct):
    """What a publisher has not told yet, and what it needs to tell more. Empty at first."""

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
    """Live store -> what its keys hold, in their order."""
    blocks_of: Annotated[dict[bytes, list[bytes]], filled(lambda one, _: sorted(one.blocks_of.items()))]
    """Readable key that stands for several blocks -> its blocks, each named like a key."""
    chunks_with: Annotated[Counter[bytes], Dropped("`blocks_of`, counted")]
    """Such a block -> under how many of these keys it stands. Two prompts that part within a chunk have two
    chunks, and the blocks before the parting are in both."""


class Publisher:
    """Collects the changes of a ledger until they are taken, each once. A `CacheListener`.

    medium: where the readable keys are, in vLLM's words.
    """

    def __init__(self, *, medium: str = MEDIUM_CPU) -> None:
        self.medium = medium
        self.state = PublisherState([], {}, {}, Counter())

    def describe(self, transfer: int, payloads: Sequence[BlockStored | None]) -> None:
        """Say what the keys of this store hold: an event for each, in their order; None if nobody knows."""
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
        """The blocks that are no longer readable without this key."""
        chunks_with = self.state.chunks_with
        for name in self.state.blocks_of.pop(key, (key,)):
            chunks_with[name] -= 1
            if chunks_with[name] < 1:
                del chunks_with[name]
                yield name

    def cleared(self) -> None:
        """No store that was planned so far will become readable. Its keys were announced as removed."""
        self.state.descriptions.clear()

    def ended(self, transfer: int) -> None:
        """This transfer is over: it stored, failed, was cancelled or was lost."""
        self.state.descriptions.pop(transfer, None)

    def take_events(self) -> list[KeysChanged]:
        """All changes since the last take, as vLLM's offloading events."""
        changes, self.state.changes = self.state.changes, []
        return [
            KeysChanged(list(change.keys), self.medium, isinstance(change, RemovedKeys))
            for change in changes
            if change.keys
        ]

    def take_kv_events(self) -> list[KVCacheEvent]:
        """All changes since the last take, as events of the wire."""
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
    """The events of one store: the descriptions, and the other keys in the legacy form."""
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
    """(group, block hashes) of each run of keys of one group."""
    for suffix, members in groupby(keys, key=lambda key: key[-GROUP_INDEX_BYTES:]):
        yield int.from_bytes(suffix, "big"), [key[:-GROUP_INDEX_BYTES] for key in members]
