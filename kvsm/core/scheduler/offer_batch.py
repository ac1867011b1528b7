"""The chunks that a step offers for a store: one batch over all requests, and one transfer.

The ledger keeps two cursors for each group of a request. Every chunk before `settled` is dealt with; every
chunk before `offered` has been offered once. A chunk that cannot be stored yet holds `settled` where it is:
its key or its device block is in flight, or there is no room. It is offered again from there, so no hole is
left (no doubled or lost store, S13).

If a store fails, `settled` moves back to its first chunk, so that the next step offers it again. Each chunk
moves the cursor back once while its request has the same device blocks. After a second failure it is offered
again when the request ends, and not before: otherwise a rank that always fails would get the same copies in
every step. Before the end of the request these are not offered, or not again:

- a chunk that the request's own load has brought: the host had it just now;
- a chunk whose store was lost: its worker is most likely dead, and each lost store retires its slots;
- a mamba state: the engine hands it over once.

A chunk that the policy has refused is not offered again by this request while it has the same device blocks,
even if `settled` is before it: to offer it twice would look like a second use of its key.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from kvsm.core.ledger import RequestRecord
from kvsm.core.offloader import Offloader, PreparedStore
from kvsm.core.scheduler.groups import FULL, MAMBA, SchedulerConfig
from kvsm.core.scheduler.protocols import DevicePool
from kvsm.core.scheduler.tracked import NO_TOKENS, TrackedRequest
from kvsm.events import Offer, Owners, SkipReason
from kvsm.states.request import FINISHED
from kvsm.states.words import STATE_MASK

_NOTHING = PreparedStore(None)  # is stored


class OfferedChunks(msgspec.Struct, frozen=True, gc=False):
    """A run of places in a batch that belong to one group of one request."""

    tracked: TrackedRequest
    group: int
    chunks: Sequence[int]
    """The chunk at each place. In a mamba group, the tokens before each state: no cursor counts these."""
    start: int
    """The first place."""


class ReachedCursors(msgspec.Struct, frozen=True, gc=False):
    """The cursors that a request reaches with this batch, by group.

    known: the ledger's record of the request, with its cursors before the batch.
    settled, offered: its cursors after the batch if no chunk has to wait.
    """

    known: RequestRecord
    settled: tuple[int, ...]
    offered: tuple[int, ...]


class OfferBatch:
    """Chunks of several requests, to be offered together.

    keys: each chunk's key. blocks: the device blocks of all chunks.
    """

    def __init__(self, offloader: Offloader, config: SchedulerConfig, pool: DevicePool | None) -> None:
        self._offloader, self._config, self._pool = offloader, config, pool
        self._blocks_per_chunk = offloader.config.blocks_per_chunk
        self._has_threshold = offloader.config.store_threshold > 1
        self.keys: list[bytes] = []
        self.blocks: list[int] = []
        self._runs: list[OfferedChunks] = []
        self._starts: list[int] = []
        self._parents: dict[int, bytes] = {}
        """Place of the first key of a run -> the key of the preceding chunk."""
        self._offered_before: set[int] = set()
        """Places of chunks offered in an earlier step: the reason why they wait is not recorded again."""
        self._reached: dict[str, ReachedCursors] = {}
        self._begun: list[TrackedRequest] = []
        """Requests that had settled and loaded nothing before this batch."""

    def collect(self, tracked: TrackedRequest, *, finished: bool = False, everything: bool = False) -> None:
        """Add the confirmed chunks of this request that are not settled.

        finished: the request has finished: this is its last offer.
        everything: offer its settled chunks too.
        """
        name, offloader = tracked.name, self._offloader
        entry = offloader.ledger.requests.get(name)
        if entry is None:
            offloader.arrive(name)
            entry = offloader.ledger.requests[name]
        if entry.word & STATE_MASK == FINISHED:
            # The load of an earlier request of this name has not ended; the cursors are still that request's.
            if finished:
                self._collect_all(tracked)
            return
        full = tracked.full_chunks(self._config, self._blocks_per_chunk, finished)
        nothing = (0,) * len(full)
        settled, offered = entry.settled or nothing, entry.offered or nothing
        if settled == offered == full and not everything:
            return
        if not entry.offered and tracked.loaded == NO_TOKENS:
            self._begun.append(tracked)
        for group, last in enumerate(full):
            first = 0 if everything else settled[group]
            # The reason why a chunk waits is recorded once, and again at its last offer (full offload, S16).
            recorded = 0 if finished else offered[group]
            if tracked.loaded == NO_TOKENS or everything:
                self._add(tracked, group, range(first, last), recorded, offered[group])
                continue
            for chunks in self._not_loaded(tracked, group, first, last):
                self._add(tracked, group, chunks, recorded, offered[group])
        tracked.loaded = NO_TOKENS
        # The engine's count falls back after a failed load; the cursors do not.
        reached = _later(full, settled)
        self._reached[name] = ReachedCursors(
            entry, reached, reached if settled == offered else _later(full, offered)
        )

    def _collect_all(self, tracked: TrackedRequest) -> None:
        """Add all confirmed chunks of a request without cursors: an earlier request with its name still has
        them. It needs none, because this is its last offer."""
        for group, last in enumerate(tracked.full_chunks(self._config, self._blocks_per_chunk, True)):
            self._add(tracked, group, range(last), 0, 0)

    def _not_loaded(self, tracked: TrackedRequest, group: int, first: int, last: int) -> list[range]:
        """Return these chunks without those that the request's load has just brought from the host."""
        spec, (begin, end) = self._config.groups[group], tracked.loaded
        if spec.kind is not FULL:
            return [range(first, last)]
        tokens = spec.block_tokens * self._blocks_per_chunk
        before = min(max(first, -(-begin // tokens)), last)
        behind = min(max(before, end // tokens), last)
        return [range(first, before), range(behind, last)]

    def _add(self, tracked: TrackedRequest, group: int, chunks: range, recorded: int, offered: int) -> None:
        """Add these chunks of a request.

        recorded: the reason for waiting is recorded already for the chunks before this one.
        offered: how many chunks were offered before.
        """
        if not chunks:
            return
        first, size, start = chunks.start, self._blocks_per_chunk, len(self.keys)
        kept: Sequence[int] = chunks
        is_full = self._config.groups[group].kind is FULL
        if is_full and not self._counts_offers(tracked) and not tracked.refused:
            keys = tracked.make_keys(group, max(0, first - 1), chunks.stop)
            self._parents[start] = keys.pop(0) if first else b""
            self.keys += keys
            self.blocks += tracked.tables[group][first * size : chunks.stop * size]
        else:
            keys = tracked.make_keys(group, first, chunks.stop)
            allowed = [n for n in chunks if keys[n - first] not in tracked.refused]
            found = {n: self._blocks_of(tracked, group, n, keys[n - first]) for n in allowed}
            kept = self._often_enough(tracked, [n for n in allowed if found[n]], first, keys, offered)
            self.keys += [keys[n - first] for n in kept]
            self.blocks += [block for n in kept for block in found[n]]
            if kept:
                self._parents[start] = self._key_before(tracked, group, kept[0])
        self._open(tracked, group, kept, start)
        for place, n in enumerate(kept[1:] if tracked.refused else (), start + 1):
            # Behind a refused chunk, a chunk does not follow the one before it in the offer.
            if keys[n - first - 1] in tracked.refused:
                self._parents[place] = self._key_before(tracked, group, n)
        if first < recorded:
            self._offered_before.update(range(start, start + bisect_left(kept, recorded)))

    def _key_before(self, tracked: TrackedRequest, group: int, chunk: int) -> bytes:
        """Return the key of the preceding chunk. Empty for the first chunk, and for groups without full
        attention, whose chunks are usable without the preceding ones."""
        if not chunk or self._config.groups[group].kind is not FULL:
            return b""
        return tracked.make_keys(group, chunk - 1, chunk)[0]

    def _counts_offers(self, tracked: TrackedRequest) -> bool:
        return self._has_threshold and not tracked.remote_decode

    def _often_enough(
        self, tracked: TrackedRequest, chunks: Sequence[int], first: int, keys: Sequence[bytes], offered: int
    ) -> Sequence[int]:
        """Return the chunks whose keys were offered `store_threshold` times. A request counts once per key.

        keys: of the chunks from `first` on.
        """
        if not chunks or not self._counts_offers(tracked):
            return chunks
        key_of = {n: keys[n - first] for n in chunks}
        self._offloader.count_offers([key for n, key in key_of.items() if n >= offered])
        is_enough = self._offloader.offered_enough
        enough = [n for n, key in key_of.items() if is_enough(key)]
        seldom = [key for n, key in key_of.items() if n >= offered and not is_enough(key)]
        if seldom:
            self._offloader.skip(((tracked.name, len(seldom)),), seldom, SkipReason.BELOW_THRESHOLD)
        return enough

    def _open(self, tracked: TrackedRequest, group: int, chunks: Sequence[int], start: int) -> None:
        self._starts.append(start)
        self._runs.append(OfferedChunks(tracked, group, chunks, start))

    def _blocks_of(self, tracked: TrackedRequest, group: int, chunk: int, key: bytes) -> Sequence[int]:
        """Return the device blocks of the chunk with this key; none if it left its window and may be freed.

        The engine does not report when it frees such blocks. The pool has the blocks that cache the chunk
        now, if any. Without a pool, chunks that left the window are skipped.

        A pool without a prefix cache (`key_of` is None for every block) cannot confirm any content. With it,
        no chunk of a window is stored: the engine may have given the block to another request.
        """
        size, spec = self._blocks_per_chunk, self._config.groups[group]
        blocks = tracked.tables[group][chunk * size : (chunk + 1) * size]
        if spec.kind is FULL:
            return blocks
        if self._pool is not None and size == 1:
            if blocks[0] != self._config.null_block and self._pool.key_of(blocks[0]) == key:
                return blocks
            cached = self._pool.cached_block(key)
            return () if cached is None else (cached,)
        needed = spec.first_needed_token(tracked.request.num_computed_tokens)
        is_held = chunk * size * spec.block_tokens >= needed - needed % spec.block_tokens
        if is_held and self._config.null_block not in blocks:
            return blocks
        return self._cached(tracked, group, chunk, blocks)

    def _cached(
        self, tracked: TrackedRequest, group: int, chunk: int, blocks: Sequence[int]
    ) -> Sequence[int]:
        """Return the device blocks that the pool has cached for a chunk; none if it lacks one.

        blocks: those of the request's table, which the pool may have cached or not.
        """
        tokens = self._config.groups[group].block_tokens
        found = list[int]()
        for place, block in enumerate(blocks, chunk * self._blocks_per_chunk + 1):
            key = tracked.key_at(group, place * tokens, self._config.tokens_per_hash)
            if self._pool is None or key is None:
                return ()
            is_cached = block != self._config.null_block and self._pool.key_of(block) == key
            cached = block if is_cached else self._pool.cached_block(key)
            if cached is None:
                return ()
            found.append(cached)
        return found

    def hand_over(self, tracked: TrackedRequest, group: int, block: int, tokens: int) -> None:
        """Add the mamba state that the engine completed after this number of tokens.

        A state whose prefix has no hash could not be found again, so it is skipped.
        """
        key = tracked.key_at(group, tokens, self._config.tokens_per_hash)
        if key is not None and block != self._config.null_block and tokens <= tracked.store_limit():
            self._open(tracked, group, (tokens,), len(self.keys))
            self._parents[len(self.keys)] = b""
            self.keys.append(key)
            self.blocks.append(block)

    def store(self) -> PreparedStore:
        """Offer the batch. `advance` comes next."""
        if not self.keys:
            return _NOTHING
        awaited = [run for run in self._runs if run.tracked.remote_decode]
        required = {place for run in awaited for place in range(run.start, run.start + len(run.chunks))}
        return self._offloader.store(
            self._owners(),
            self.keys,
            self.blocks,
            self._offered_before,
            parents=self._parents,
            required=required,
        )

    def advance(self, prepared: PreparedStore) -> None:
        """Move the cursors of the requests. prepared: the result of `store`."""
        for place in prepared.refused:
            self._chunk_at(place)[0].tracked.refused.add(self.keys[place])
        moved = self._advanced(prepared.deferred)
        if moved:
            self._offloader.advance(moved)
        for tracked in self._begun:
            # Evictions for this batch cannot have removed their blocks.
            tracked.watched_from = self._offloader.ledger.seq

    def skip(self, reason: SkipReason) -> None:
        """Record the reason why no chunk of the batch is stored."""
        if self.keys:
            self._offloader.skip(self._owners(), self.keys, reason)

    def stored(self, prepared: PreparedStore) -> list[tuple[TrackedRequest, int, int]]:
        """Return for each key of the job, in order, its request, its group and the length of its prefix."""
        stored = []
        for place in prepared.stored:
            run, end = self._chunk_at(place)
            if self._is_counted(run.group):
                end = (end + 1) * self._blocks_per_chunk * self._config.groups[run.group].block_tokens
            stored.append((run.tracked, run.group, end))
        return stored

    def _chunk_at(self, place: int) -> tuple[OfferedChunks, int]:
        run = self._runs[bisect_right(self._starts, place) - 1]
        return run, run.chunks[place - run.start]

    def _is_counted(self, group: int) -> bool:
        """Whether a cursor counts the chunks of this group."""
        return self._config.groups[group].kind is not MAMBA

    def _owners(self) -> Owners:
        """Return the requests of the batch with their chunk counts. Runs of one request are added up."""
        owners: list[tuple[str, int]] = []
        for run in self._runs:
            name, count = run.tracked.name, len(run.chunks)
            if owners and owners[-1][0] == name:
                owners[-1] = name, owners[-1][1] + count
            elif count:
                owners.append((name, count))
        return tuple(owners)

    def _advanced(self, deferred: Sequence[int]) -> list[Offer]:
        """Return the cursors that have moved. deferred: places of chunks that wait, ascending."""
        waits_from: dict[tuple[str, int], int] = {}
        for place in reversed(deferred):
            run, chunk = self._chunk_at(place)
            if self._is_counted(run.group):
                waits_from[run.tracked.name, run.group] = chunk
        moved = []
        for name, reached in self._reached.items():
            known, settled, offered = reached.known, reached.settled, reached.offered
            if waits_from:
                waiting = [waits_from.get((name, group), last) for group, last in enumerate(settled)]
                settled = _later(tuple(waiting), known.settled) if known.settled else tuple(waiting)
            if settled != known.settled or offered != known.offered:
                moved.append((name, settled, offered))
        return moved


def _later(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Return the later of two cursors, in each group."""
    return max(left, right) if len(left) == 1 else tuple(map(max, left, right))
