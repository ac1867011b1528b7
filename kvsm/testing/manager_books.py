"""Books for testing a manager of vLLM: the keys stored, being stored and being loaded, by its answers.

They are dicts and sets, and share no code with any manager. Each answer is compared with the books before it
is recorded in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import Block, BlockHistory

_ABSENT = {
    Property.CORRECT_BYTES: "lookups of evicted keys",
    Property.FAILURE_IS_NOT_SUCCESS: "lookups of keys whose store failed",
    Property.NO_STALE_DATA: "lookups of keys from before a reset",
}
"""Property that a hit of an absent key breaks -> the case that is counted."""


class Told(NamedTuple):
    """A KV event of a manager.

    removed: whether the keys were removed; False: they were stored.
    metadata_only: whether vLLM need only forget its metadata of these keys.
    """

    keys: Sequence[bytes]
    removed: bool
    metadata_only: bool


class ManagerBooks:
    """The books of one manager with `blocks` blocks.

    tiers_below: whether the manager has lower tiers, from which keys may return after an eviction or a reset.
    history: of the blocks, for failures.
    """

    def __init__(self, blocks: int, tiers_below: bool, history: BlockHistory) -> None:
        self.blocks, self._tiers_below, self._history = blocks, tiers_below, history
        self.stored: dict[bytes, int | None] = {}
        """Key -> its block; None: unknown."""
        self.storing: dict[bytes, int | None] = {}
        self.loading: Counter[bytes] = Counter()
        self.announced: set[bytes] = set()
        """The keys that are stored according to the KV events so far."""
        self._lapsed: set[bytes] = set()
        """The keys announced before a reset. Some managers publish events for keys that a reset removed."""
        self.ever_stored: set[bytes] = set()
        self._fates: dict[bytes, tuple[Property, str]] = {}
        """Key that is no longer stored -> (property that a hit of it breaks, why it is not stored)."""

    # Lookups.

    def hit(self, key: bytes) -> None:
        """Check a lookup that answered that this key can be loaded."""
        count_case(Property.PUBLISH_AFTER_COMMIT, "hits")
        count_case(Property.STORED_SO_SERVED, "lookups of stored keys", key in self.stored)
        if key in self.stored or self._may_come_back(key):
            return
        if key in self.storing:
            _fail(Property.PUBLISH_AFTER_COMMIT, f"{key!r} is a hit while it is still being stored")
        never = Property.PUBLISH_AFTER_COMMIT, "it was never stored"
        broken, why = self._fates.get(key, never)
        _fail(broken, f"{key!r} is a hit, but {why}")

    def waits(self, key: bytes) -> None:
        """Check a lookup that answered that this key can be loaded later."""
        if key not in self.stored and key not in self.storing and not self._may_come_back(key):
            why = self._fates.get(key, (None, "it was never stored"))[1]
            message = f"a request is told to wait for {key!r}, but {why}, and it is not being stored"
            _fail(Property.PROGRESS, message)

    def missed(self, key: bytes) -> None:
        """Check a lookup that answered that this key is missing."""
        if key not in self.stored and (fate := self._fates.get(key)) is not None:
            count_case(fate[0], _ABSENT[fate[0]])
        if key in self.storing:
            _fail(
                Property.STORED_ONCE, f"{key!r} is a miss while it is being stored: it would be stored twice"
            )
        if key in self.stored:
            _fail(
                Property.STORED_SO_SERVED, f"{key!r} is a miss, but it is stored, and nothing said it is gone"
            )

    def _may_come_back(self, key: bytes) -> bool:
        return self._tiers_below and key in self.ever_stored

    # Copies.

    def load_begins(self, keys: Sequence[bytes], blocks: Sequence[int] | None) -> None:
        """Check and record a load of these keys. blocks: the blocks that it reads; None: unknown."""
        if blocks is not None:
            self._check_blocks("load", keys, blocks)
            count_case(Property.CORRECT_BYTES, "blocks that loads read", len(keys))
            for key, block in zip(keys, blocks):
                right = self.stored.get(key)
                self._history.read(Block("block", block), f"the load of {key!r}")
                if right is not None and block != right:
                    stories = [self._history.told(Block("block", one)).text for one in (block, right)]
                    message = f"{key!r} was stored to block {right}; its load reads {block}"
                    _fail(Property.CORRECT_BYTES, message + "".join(stories))
                self.stored[key] = block
        self.loading.update(keys)

    def load_ends(self, keys: Iterable[bytes]) -> None:
        """Record that a load of these keys has ended."""
        self.loading -= Counter(keys)

    def store_begins(
        self,
        offered: Sequence[bytes],
        stored: Sequence[bytes],
        evicted: Sequence[bytes],
        blocks: Sequence[int] | None,
    ) -> None:
        """Check and record the answer to an offer of blocks.

        offered: the keys that a request offers.
        stored: those of them that will be stored.
        evicted: keys that are evicted for them.
        blocks: the blocks to which they are stored; None: unknown.
        """
        if len(set(stored)) != len(stored) or not set(stored) <= set(offered):
            _fail(Property.STORED_ONCE, f"of {offered} it stores {stored}: not each once, and of these")
        count_case(Property.STORED_ONCE, "stores that were planned", len(stored))
        if self.loading or self.storing:
            count_case(Property.NO_REUSE_IN_FLIGHT, "evictions during a copy", len(evicted))
        for key in evicted:
            self._check_evicted(key, offered)
            self._gone(key, Property.CORRECT_BYTES, "it was evicted")
        for key in stored:
            if key in self.stored or key in self.storing:
                state = "stored" if key in self.stored else "being stored"
                _fail(Property.STORED_ONCE, f"{key!r} is stored again, but it is already {state}")
        if blocks is not None:
            self._check_blocks("store", stored, blocks)
            self._check_free(stored, blocks)
            for key, block in zip(stored, blocks):
                call = self._history.latest_call()
                self._history.wrote(Block("block", block), f"the store of {key!r}", None, call)
        self.storing.update(zip(stored, blocks if blocks is not None else [None] * len(stored)))
        held = [*self.stored, *self.storing]
        count_case(Property.CONSERVATION, "stores compared with the size of the pool")
        if len(held) > self.blocks:
            message = f"{self.blocks} blocks hold {len(held)} keys, {held}: some have no block of their own"
            _fail(Property.CONSERVATION, message)

    def _check_evicted(self, key: bytes, offered: Sequence[bytes]) -> None:
        if self.loading[key]:
            _fail(Property.NO_REUSE_IN_FLIGHT, f"{key!r} is evicted, but a load is reading it")
        if key in self.storing:
            _fail(Property.NO_REUSE_IN_FLIGHT, f"{key!r} is evicted, but it is being stored")
        if key in offered and key in self.stored:
            message = f"{key!r} is evicted for the offer that names it: the request counts it as stored"
            _fail(Property.STORED_ONCE, message)
        if key not in self.stored:
            _fail(Property.EVENTS_ARE_STATE, f"{key!r} is said to be evicted, but it is not stored")

    def _check_blocks(self, what: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        if len(keys) != len(blocks):
            _fail(Property.CORRECT_BYTES, f"the {what} of {keys} names {len(blocks)} blocks: {blocks}")
        outside = [block for block in blocks if not 0 <= block < self.blocks]
        if outside or len(set(blocks)) != len(blocks):
            message = f"the {what} of {keys} names blocks {blocks}, but there are {self.blocks}, each once"
            _fail(Property.CONSERVATION, message)

    def _check_free(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        holders = {block: key for key, block in (*self.stored.items(), *self.storing.items())}
        for key, block in zip(keys, blocks):
            holder = holders.get(block)
            if holder is None:
                continue
            what = f"block {block} is given to {key!r}, but {holder!r} is in it"
            if self.loading[holder] or holder in self.storing:
                verb = "loaded" if self.loading[holder] else "stored"
                _fail(Property.NO_REUSE_IN_FLIGHT, f"{what}, and is being {verb}")
            _fail(Property.CONSERVATION, f"{what}, and was not evicted")

    def store_ends(self, keys: Iterable[bytes], good: bool) -> None:
        """Record that the store of these keys has ended. good: whether it succeeded."""
        for key in keys:
            block = self.storing.pop(key)
            if good:
                self.stored[key] = block
                self.ever_stored.add(key)
            else:
                self._fates[key] = Property.FAILURE_IS_NOT_SUCCESS, "its store failed"

    # KV events, and resets.

    def take(self, events: Iterable[Told]) -> None:
        """Check and record KV events that the manager has published."""
        for event in events:
            for key in event.keys:
                if event.metadata_only:
                    self._forgets(key)
                elif event.removed:
                    self._removes(key)
                else:
                    self._adds(key)

    def _forgets(self, key: bytes) -> None:
        if key in self.stored or key in self.storing:
            state = "stored" if key in self.stored else "being stored"
            _fail(Property.EVENTS_ARE_STATE, f"vLLM is told to forget {key!r}, which is {state}")

    def _removes(self, key: bytes) -> None:
        if key not in self.announced and key not in self._lapsed:
            _fail(Property.EVENTS_ARE_STATE, f"an event removes {key!r}, which no event has stored")
        (self.announced if key in self.announced else self._lapsed).discard(key)
        if self._tiers_below and key in self.stored:
            if self.loading[key]:
                _fail(Property.NO_REUSE_IN_FLIGHT, f"{key!r} is evicted, but a load is reading it")
            self._gone(key, Property.CORRECT_BYTES, "it was evicted")

    def _adds(self, key: bytes) -> None:
        if key in self.announced:
            _fail(Property.EVENTS_ARE_STATE, f"two events store {key!r}, and none between them removes it")
        self.announced.add(key)
        self._lapsed.discard(key)
        if self._may_come_back(key):
            self.stored.setdefault(key, None)

    def compare_events(self) -> None:
        """Check that the events announce exactly the stored keys. Call it after all events were taken."""
        count_case(Property.EVENTS_ARE_STATE, "comparisons of events with stored keys", bool(self.stored))
        if missing := [key for key in self.stored if key not in self.announced]:
            _fail(Property.EVENTS_ARE_STATE, f"{missing} are stored, and no event says so")
        if wrong := sorted(self.announced - self.stored.keys()):
            _fail(Property.EVENTS_ARE_STATE, f"the events say that {wrong} are stored, but they are not")

    def nothing_is_announced(self) -> None:
        """Check that the events announce no key. Call it after a reset, when its events were taken."""
        if self.announced:
            wrong = sorted(self.announced)
            _fail(Property.EVENTS_ARE_STATE, f"right after a reset, events say that {wrong} are stored")

    def reset(self) -> None:
        """Record a reset of the cache."""
        for key in [*self.stored, *self.storing]:
            self._fates[key] = Property.NO_STALE_DATA, "it is from before a reset"
        self.stored.clear()
        self.storing.clear()
        self.loading.clear()
        # vLLM announces a reset as one event for the whole cache, and not through the manager.
        self._lapsed |= self.announced
        self.announced.clear()

    def _gone(self, key: bytes, broken: Property, why: str) -> None:
        self.stored.pop(key, None)
        self._fates[key] = broken, why


def _fail(broken: Property, message: str) -> Any:
    __tracebackhide__ = True
    raise PropertyBroken(broken, message)
