"""A router at the end of the serving world: it takes the KV events, and learns what the host has.

It checks that events are state (S10): folded in their order they give exactly the keys that can be read, and
each stored event says the tokens of its block. It does not know chunks of several blocks, whose events name
more than keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from kvsm.canonical import KEPT, PART, Seen, declared
from kvsm.errors import PropertyBroken
from kvsm.kv_events import BlockRemoved, BlockStored, KVCacheEvent, Publisher
from kvsm.ledger import Ledger
from kvsm.properties import Property
from kvsm.scheduler.groups import group_suffix
from kvsm.worlds.small_request import HASH_TOKENS, SmallRequest


@declared
class Router:
    """Takes the KV events of an offload core, which publishes to `publisher`.

    wants_tokens: whether each stored event must say its tokens. Nobody knows the tokens of a lazy store.
    """

    wants_tokens: Annotated[bool, KEPT]
    publisher: Annotated[Publisher, PART]
    known: Annotated[set[bytes], Seen(lambda router, _: sorted(router.known))]
    """Keys of the blocks that it believes to be on the host."""

    def __init__(self, *, wants_tokens: bool) -> None:
        self.wants_tokens = wants_tokens
        self.publisher = Publisher(self_describing=True)
        self.known = set()

    def has_news(self) -> bool:
        """Whether there are events to take."""
        return bool(self.publisher.state.changes)

    def take(self, events: Iterable[KVCacheEvent], ledger: Ledger, requests: Iterable[SmallRequest]) -> None:
        """Take all events that there are. requests: all that ever arrived."""
        prefixes = {
            hashed: request.all_token_ids[: place * HASH_TOKENS]
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
                _check_tokens(event, prefixes[event.block_hashes[-1]])
        readable = {key for key, slot in ledger.index.items() if ledger.readable(slot)}
        if self.known != readable:
            message = f"the events say that {len(self.known)} blocks can be read, and {len(readable)} can"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)


def _check_tokens(event: BlockStored, prefix: list[int]) -> None:
    held = prefix[-event.block_size :]
    if not event.block_size or event.token_ids != held:
        message = f"a stored event says tokens {event.token_ids}, and its block holds {held}"
        raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
