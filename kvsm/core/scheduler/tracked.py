"""A request on the scheduler side: the engine's data about it, and what follows from that.

Decisions about it (pins, cursors, its load) are in the ledger. The state here is lost with the engine, and no
later process needs it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from sys import maxsize
from typing import Annotated, overload

from kvsm.core.ledger.canonical import KEPT, Dropped, Seen, declared, filled
from kvsm.core.ledger.key_index import KeyIndex
from kvsm.core.offloader.arguments import a
from kvsm.core.scheduler.groups import MAMBA, KeyLayout, SchedulerConfig
from kvsm.core.scheduler.protocols import EngineRequest
from kvsm.core.scheduler.request_params import AgentHint, HandOverParams, read_request_params
from kvsm.errors import WrongArgument
from kvsm.ids import IdArray

NO_TOKENS = (0, 0)
_BYTES: set[type] = {bytes}

_PARAMETER = "a parameter of the request, which never changes"


@declared
class TrackedRequest:
    """The scheduler side's state of a request. Its cursors, pins and load are in the ledger."""

    __slots__ = (
        "_layout",
        "admitted",
        "agent_hint",
        "answered",
        "asked_keys",
        "declined",
        "loaded",
        "local",
        "max_load_tokens",
        "max_store_tokens",
        "missed",
        "name",
        "next_offer",
        "prompt_only",
        "refused",
        "remote_decode",
        "remote_prefill",
        "request",
        "retried",
        "tables",
        "trusted",
        "watched_from",
    )

    request: Annotated[EngineRequest, Dropped("the engine compares its requests itself")]
    name: Annotated[str, Dropped("it is the place of the request among all requests")]
    tables: Annotated[list[list[int]], Seen(lambda one, names: names.tables(one.tables))]
    """Its device blocks, by group."""
    asked_keys: Annotated[list[list[bytes]], Dropped("they follow from its tokens")]
    """Cached keys of its matches, by group, from the first chunk on: a waiting request is matched in each
    step. They are dropped when it gets blocks."""
    local: Annotated[int, KEPT]
    """Tokens that were cached on the device at its last match."""
    answered: Annotated[bool, Dropped("figures of a run; nothing is decided by it")]
    """Whether it has an answer to its lookup, and reads the cache: that is what it is admitted with."""
    missed: Annotated[bytes | None, Dropped("figures of a run; nothing is decided by it")]
    """The first missing key of its last lookup; None: no key was missing."""
    declined: Annotated[bool | None, KEPT]
    """Whether its slow hit was declined; None: the last lookup found no slow hit."""
    admitted: Annotated[bool, Dropped("figures of a run; nothing is decided by it")]
    """Whether it has been admitted before."""
    watched_from: Annotated[
        int,
        # It is set when the request gets blocks, and read while it has some.
        Seen(lambda one, names: any(one.tables) and names.ledger.forgotten_at > one.watched_from),
    ]
    """The event after which a key that the host loses may be one that it does not offer again: it has got its
    blocks then, and if no load brought some of them, it has made its first offer. Only whether a key was
    forgotten since then is asked."""
    trusted: Annotated[int | None, KEPT]
    """The most tokens that count as computed, whatever the engine counts, during a load and after a failed
    load. None: no limit."""
    loaded: Annotated[tuple[int, int], KEPT]
    """The tokens that a load has brought since the last offer: (first, end)."""
    next_offer: Annotated[int, KEPT]
    """How many tokens must be confirmed before it has something to offer."""
    retried: Annotated[set[bytes], filled(lambda one, _: sorted(one.retried))]
    """Keys whose stores have failed since it got its blocks. It offers each of them again once."""
    refused: Annotated[set[bytes], filled(lambda one, _: sorted(one.refused))]
    """Keys that the policy has refused since it got its blocks. It does not offer them again."""
    remote_decode: Annotated[bool, Dropped(_PARAMETER)]
    remote_prefill: Annotated[HandOverParams | None, Dropped(_PARAMETER)]
    """Where another engine keeps the blocks of its prompt."""
    agent_hint: Annotated[AgentHint | None, Dropped(_PARAMETER)]
    """What its client advises about its session."""
    max_load_tokens: Annotated[int, Dropped(_PARAMETER)]
    max_store_tokens: Annotated[int, Dropped(_PARAMETER)]
    prompt_only: Annotated[bool, Dropped(_PARAMETER)]
    """Whether none of its generated tokens is stored."""
    _layout: Annotated[KeyLayout, Dropped("configuration")]

    def __init__(self, request: EngineRequest, config: SchedulerConfig, layout: KeyLayout) -> None:
        self.request, self.name, self._layout = request, request.request_id, layout
        self.tables = [[] for _ in config.groups]
        self.asked_keys = [[] for _ in config.groups]
        self.local = self.watched_from = self.next_offer = 0
        self.trusted = self.missed = self.declined = None
        self.answered = self.admitted = False
        self.loaded = NO_TOKENS
        self.retried, self.refused = set(), set()
        self._take_parameters(config)

    def _take_parameters(self, config: SchedulerConfig) -> None:
        given = read_request_params(self.name, self.request.kv_transfer_params)
        self.remote_decode, self.max_load_tokens = given.remote_decode, given.max_load_tokens
        self.remote_prefill, self.agent_hint = given.remote_prefill, given.agent_hint
        self.max_store_tokens = given.max_offload_tokens if given.offload else 0
        self.prompt_only = config.prompt_only and not self.remote_decode
        if self.remote_decode:
            # The decode engine needs all tokens (full offload, S16).
            self.max_store_tokens = maxsize

    def make_keys(self, group: int, first: int, last: int) -> list[bytes]:
        """Return the keys of these chunks of a group, as far as the engine has hashes of them."""
        stride, suffix = self._layout.hashes_per_chunk[group], self._layout.suffixes[group]
        hashes = self.request.block_hashes[(first + 1) * stride - 1 : last * stride : stride]
        if not _BYTES.issuperset(map(type, hashes)):
            for n, one in enumerate(hashes, first + 1):
                self._check_hash(n * stride - 1, one)
        return [one + suffix for one in hashes]

    def _asked_keys(self, group: int, first: int, last: int) -> list[bytes]:
        """Return the same keys as `make_keys`, cached in `asked_keys`."""
        hashes, keys, layout = self.request.block_hashes, self.asked_keys[group], self._layout
        stride, suffix = layout.hashes_per_chunk[group], layout.suffixes[group]
        # A hash covers all tokens before its end: if the last one is unchanged, all before it are.
        while keys and (
            len(keys) * stride > len(hashes) or keys[-1] != hashes[len(keys) * stride - 1] + suffix
        ):
            keys.pop()
        if len(keys) < last:
            keys += self.make_keys(group, len(keys), last)
        return keys[first:last]

    def find_prefix(self, index: KeyIndex, group: int, first: int, last: int) -> IdArray | None:
        """Return the slots of these chunks, up to the first whose key is not in the index. None: look up each
        key instead."""
        stride, suffix = self._layout.hashes_per_chunk[group], self._layout.suffixes[group]
        return index.find_prefix(self.request.block_hashes, stride, suffix, first, last)

    def chunk_keys(self) -> list[ChunkKeys]:
        """Return the keys of its full chunks, by group, built lazily for a match."""
        return [ChunkKeys(self, group) for group in range(len(self.tables))]

    def all_keys(self) -> list[list[bytes]]:
        """Return the keys of its full chunks, by group."""
        return [self.make_keys(group, 0, self.hashed_chunks(group)) for group in range(len(self.tables))]

    def note_answer(self, missed: bytes | None) -> None:
        """Record that the lookup was answered. missed: the first key that was not found; None: all were."""
        self.answered, self.missed = not self.request.skip_reading_prefix_cache, missed

    def forget_asked_keys(self) -> None:
        """Drop the cached keys: no match is expected to need them soon."""
        for keys in self.asked_keys:
            keys.clear()

    def hashed_chunks(self, group: int) -> int:
        """The number of chunks for which the engine has a hash."""
        return len(self.request.block_hashes) // self._layout.hashes_per_chunk[group]

    def _check_hash(self, place: int, value: object) -> None:
        """An engine's hashes may be of a type below bytes; the sum of such a hash and a suffix is bytes."""
        if not isinstance(value, bytes):
            problem = f"is {a(value)}; a block hash is bytes"
            raise WrongArgument("EngineRequest.block_hashes", f"[{place}] of request {self.name}", problem)

    def key_at(self, group: int, tokens: int, tokens_per_hash: int) -> bytes | None:
        """Key of the prefix of this length, or None if the engine has no hash of it."""
        hashes, number = self.request.block_hashes, tokens // tokens_per_hash
        if tokens % tokens_per_hash or not 0 < number <= len(hashes):
            return None
        return hashes[number - 1] + self._layout.suffixes[group]

    def forget_blocks(self) -> None:
        """Note that it lost its blocks."""
        for table in self.tables:
            table.clear()
        self.trusted = None
        self.offer_again()

    def offer_again(self) -> None:
        """Let it offer all its chunks again: its cursors have restarted."""
        self.next_offer, self.loaded = 0, NO_TOKENS
        self.retried.clear()
        self.refused.clear()

    def settle_loaded(self, chunk_tokens: int) -> int:
        """How many chunks its load has brought, if that is all that it has; else 0. They need no offer."""
        begin, end = self.loaded
        if begin or not end:
            return 0
        chunks = end // chunk_tokens
        self.next_offer, self.loaded = (chunks + 1) * chunk_tokens, NO_TOKENS
        return chunks

    def offered_all(self, offered: Sequence[int], chunk_tokens: int) -> bool:
        """Whether it has nothing to offer before `next_offer`, whatever blocks and tokens it gets till then.

        That is known of a request with one group. offered: its cursors.
        """
        return len(offered) == 1 and (offered[0] + 1) * chunk_tokens == self.next_offer

    def settled_before(
        self, settled: Sequence[int], offered: Sequence[int], failed: Set[bytes]
    ) -> tuple[int, ...]:
        """Where its cursors go back to, because the stores of these keys have failed. A key counts once.

        settled, offered: where its cursors are, by group. A chunk between them is offered again in any case,
            which counts too.
        """
        first, failed = list(settled), failed - self.retried
        for group, end in enumerate(offered):
            keys = self.make_keys(group, 0, end)
            if not failed.isdisjoint(keys):
                again = [chunk for chunk, key in enumerate(keys) if key in failed]
                first[group] = min([first[group], *again])
                self.retried.update([keys[chunk] for chunk in again])
        return tuple(first)

    def lacks_a_key(self, index: KeyIndex, settled: Sequence[int], config: SchedulerConfig) -> bool:
        """Whether a chunk is not found that it does not offer before its end: one that is settled, or that
        its load has brought."""
        loaded = self.loaded[1] // config.tokens_per_hash
        ends = [loaded // hashes for hashes in self._layout.hashes_per_chunk]
        if settled:
            ends = list(map(max, settled, ends))
        return any(self._lacks(index, group, end) for group, end in enumerate(ends))

    def _lacks(self, index: KeyIndex, group: int, end: int) -> bool:
        """Whether one of the first `end` chunks of a group is not found."""
        found = self.find_prefix(index, group, 0, end)
        return None in index.find(self.make_keys(group, 0, end)) if found is None else len(found) < end

    def confirmed_tokens(self) -> int:
        """Return the number of tokens whose KV is certainly computed.

        Not counted: drafts, steps under way, the token sampled last, and a load that may still fail.
        """
        request = self.request
        computed = request.num_computed_tokens - request.num_output_placeholders
        if self.trusted is not None:
            if computed > self.trusted:
                return self.trusted
            # The engine knows of the failure by now, and computes these tokens itself.
            self.trusted = None
        return min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))

    def store_limit(self) -> int:
        """The most tokens that may be stored. The prompt of a session grows with each of its parts."""
        if self.prompt_only:
            return min(self.max_store_tokens, self.request.num_prompt_tokens)
        return self.max_store_tokens

    def full_chunks(self, config: SchedulerConfig, blocks_per_chunk: int, finished: bool) -> tuple[int, ...]:
        """Return how many chunks of each group may be stored now. Moves `next_offer` to the next full chunk.

        A mamba group has 0: the engine hands over its states.
        """
        request, confirmed, limit = self.request, self.confirmed_tokens(), self.store_limit()
        storable = min(confirmed, limit)
        decodes = not finished and confirmed > request.num_prompt_tokens
        hashes, strides = len(request.block_hashes), self._layout.hashes_per_chunk
        counts, self.next_offer = [], maxsize
        for group, stride, table in zip(config.groups, strides, self.tables):
            if group.kind is MAMBA:
                counts.append(0)
                continue
            tokens = group.block_tokens * blocks_per_chunk
            chunks = storable // tokens
            if group.drafter and decodes and storable == confirmed:
                chunks -= 1
            counts.append(max(0, min(chunks, hashes // stride, len(table) // blocks_per_chunk)))
            if confirmed < limit:
                self.next_offer = min(self.next_offer, (confirmed // tokens + 1) * tokens)
        if self.trusted is not None:
            # Ask in every step: the engine's count falls back in one of them, and rises again after it.
            self.next_offer = 0
        return tuple(counts)


class ChunkKeys(Sequence[bytes]):
    """The keys of a request's full chunks in one group. Each key is built when it is read."""

    __slots__ = ("_group", "_tracked")

    def __init__(self, tracked: TrackedRequest, group: int) -> None:
        self._tracked, self._group = tracked, group

    def __len__(self) -> int:
        return self._tracked.hashed_chunks(self._group)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            first, last, step = place.indices(len(self))
            return self._tracked._asked_keys(self._group, first, last)[::step]
        return self._tracked.make_keys(self._group, place, place + 1)[0]
