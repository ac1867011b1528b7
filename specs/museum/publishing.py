"""The serving world with a router at its end: it takes the KV events, and learns what the host has.

What is checked is S10 of what leaves: the events, folded in their order, give the keys that can be read, no
more and no fewer; and each stored event says the tokens of its block, by which a router finds it.
"""

from __future__ import annotations

from hashlib import blake2b

from kvsm.errors import PropertyBroken
from kvsm.kv_events import BlockRemoved, BlockStored, Publisher
from kvsm.worlds.request import HASH_TOKENS, SmallRequest
from kvsm.worlds.serving import ServingOptions, ServingWorld
from kvsm.worlds.world import Action

TAKE: Action = ("take",)


class TextRequest(SmallRequest):
    """A request of text alone: its tokens say all that its blocks hold."""

    prompt_embeds = cache_salt = None
    mm_features = ()


class PublishingWorld(ServingWorld):
    """Satisfies `World`. The router takes when it likes, and at the latest when all is at rest."""

    def __init__(self, options: ServingOptions) -> None:
        super().__init__(options)
        core = self.engine.core
        self.publisher = core.publisher = core.ledger.listener = Publisher(self_describing=True)
        self.known: set[bytes] = set()
        """Hashes that the router knows to be on the host."""

    def actions(self) -> list[Action]:
        return [*super().actions(), *([TAKE] if self._has_news() else [])]

    def wind_down(self) -> Action | None:
        return super().wind_down() or (TAKE if self._has_news() else None)

    def is_at_rest(self) -> bool:
        return not self._has_news() and super().is_at_rest()

    def fingerprint(self) -> bytes:
        untold = repr((self.publisher._changes, sorted(self.publisher._payloads), sorted(self.known)))
        return blake2b(super().fingerprint() + untold.encode(), digest_size=16).digest()

    def _has_news(self) -> bool:
        return bool(self.publisher._changes)

    def _do_arrive(self) -> bool:
        if self.arrived == len(self.options.requests):
            return False
        spec = self.options.requests[self.arrived]
        self.engine.arrive(TextRequest(f"r{self.arrived}", spec.prompt, spec.outputs))
        self.arrived += 1
        return True

    def _do_take(self) -> bool:
        if not self._has_news():
            return False
        for event in self.engine.scheduler.take_events():
            if isinstance(event, BlockStored):
                self.known.update(event.block_hashes)
                self._check_tokens(event)
            elif isinstance(event, BlockRemoved):
                self.known.difference_update(event.block_hashes)
        ledger = self.engine.core.ledger
        readable = {key[:-4] for key, slot in ledger.index.items() if ledger.readable(slot)}
        if self.known != readable:
            message = f"the events say that {len(self.known)} blocks can be read, and {len(readable)} can"
            raise PropertyBroken("S10", message)
        return True

    def _check_tokens(self, event: BlockStored) -> None:
        tokens = {
            hashed: request.all_token_ids[place * HASH_TOKENS : (place + 1) * HASH_TOKENS]
            for request in self.engine.requests.values()
            for place, hashed in enumerate(request.block_hashes)
        }
        for hashed in event.block_hashes:
            if event.token_ids != tokens[hashed]:
                message = (
                    f"a stored event says tokens {event.token_ids}, and its block holds {tokens[hashed]}"
                )
                raise PropertyBroken("S10", message)
