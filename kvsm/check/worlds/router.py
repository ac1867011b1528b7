"""A router in the serving world: it consumes the KV events, and tracks which blocks the host has.

It checks that events are state (S10): folded in order they give exactly the readable keys, and each stored
event contains the tokens of its blocks. An event of a chunk names all of its blocks. A block that is part of
two chunks counts as present until both are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.kv_events import GROUP_INDEX_BYTES, BlockRemoved, BlockStored, KVCacheEvent, Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import KEPT, PART, Seen, declared
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


@declared
class Router:
    """Consumes the KV events that an offload core publishes to `publisher`.

    wants_tokens: whether each stored event must contain tokens. Events of lazy stores do not: the scheduler
        only has the keys of these blocks.
    blocks_per_chunk: the number of blocks that an event with tokens names for each key.
    """

    wants_tokens: Annotated[bool, KEPT]
    blocks_per_chunk: Annotated[int, KEPT]
    publisher: Annotated[Publisher, PART]
    known: Annotated[set[bytes], Seen(lambda router, _: sorted(router.known))]
    """The blocks that are on the host according to the events, each named like a key."""

    def __init__(self, blocks_per_chunk: int = 1, *, wants_tokens: bool) -> None:
        self.wants_tokens, self.blocks_per_chunk = wants_tokens, blocks_per_chunk
        self.publisher = Publisher()
        self.known = set()

    def has_news(self) -> bool:
        """Whether there are events that were not taken."""
        return bool(self.publisher.state.changes)

    def take(self, events: Iterable[KVCacheEvent], ledger: Ledger, requests: Iterable[SmallRequest]) -> None:
        """Consume `events`, which must be all that there are. requests: all that have ever arrived."""
        prefixes = {
            hashed: (request, place)
            for request in requests
            for place, hashed in enumerate(request.block_hashes, 1)
        }
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            keys = [hashed + group_suffix(event.group_idx or 0) for hashed in event.block_hashes]
            if isinstance(event, BlockRemoved):
                self.known.difference_update(keys)
                continue
            self.known.update(keys)
            if self.wants_tokens:
                request, place = prefixes[event.block_hashes[-1]]
                if request.prompt_embeds is None:
                    _check_tokens(event, request.all_token_ids[: place * HASH_TOKENS])
        readable = {key for key, slot in ledger.index.items() if ledger.readable(slot)}
        if self.wants_tokens and self.blocks_per_chunk > 1:
            readable = {
                name for key in readable for name in self._blocks_of(key, *prefixes[key[:-GROUP_INDEX_BYTES]])
            }
        if self.known != readable:
            message = f"the events say that {len(self.known)} blocks can be read, and {len(readable)} can"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def _blocks_of(self, key: bytes, request: SmallRequest, place: int) -> list[bytes]:
        """The names of a chunk's blocks. Without known tokens, as with embeddings, only the last has one."""
        if request.prompt_embeds is not None:
            return [key]
        hashes = request.block_hashes[place - self.blocks_per_chunk : place]
        return [hashed + key[-GROUP_INDEX_BYTES:] for hashed in hashes]


def _check_tokens(event: BlockStored, prefix: list[int]) -> None:
    held = prefix[-event.block_size * len(event.block_hashes) :]
    if not event.block_size or event.token_ids != held:
        message = f"a stored event says tokens {event.token_ids}, and its blocks hold {held}"
        raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
