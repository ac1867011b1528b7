"""What a step offers for a store: one batch over all requests that have something new, one transfer.

A request's cursors are the ledger's, for each group: every chunk before `settled` is dealt with, those up
to `offered` have been looked at. What cannot be stored yet, because its key or its device block is in
flight or because there is no room, holds `settled` where it is, and is offered again from there: so no hole
is left (S13).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvsm.events import Offer, Owners, SkipReason
from kvsm.ledger import Ledger, RequestRecord
from kvsm.offloader import Offloader, PreparedStore
from kvsm.plan import TransferJob
from kvsm.scheduler.groups import GroupKind, SchedulerConfig
from kvsm.scheduler.protocols import DevicePool
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.request import RequestState


class OfferedChunks(NamedTuple):
    """Places of a batch that belong to one group of one request: which of its chunks they are. Of a mamba
    group: how many tokens are before each of the states that were handed over, which no cursor counts."""

    tracked: TrackedRequest
    group: int
    chunks: Sequence[int]
    start: int


class OfferBatch:
    """Chunks of several requests, to be offered together."""

    def __init__(self, offloader: Offloader, config: SchedulerConfig, pool: DevicePool | None) -> None:
        self._offloader, self._config, self._pool = offloader, config, pool
        self._chunk = offloader.config.blocks_per_chunk
        self.keys: list[bytes] = []
        self.blocks: list[int] = []
        self.segments: list[OfferedChunks] = []
        self._starts: list[int] = []
        self._again: set[int] = set()
        self._progress: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Request -> its cursors (settled, offered), if nothing is held back."""

    def collect(self, tracked: TrackedRequest, *, finished: bool = False, everything: bool = False) -> None:
        """Add what this request has computed and not dealt with. everything: from its first chunk on."""
        self._offloader.arrive(tracked.name)
        entry = self._offloader.ledger.requests[tracked.name]
        if entry.state is RequestState.FINISHED:
            # An earlier request of this name waits for its load; it has the ledger's cursors until then.
            return
        tracked.update_keys()
        full = tracked.full_chunks(self._config, self._chunk, finished)
        settled, offered = _cursors(entry, full)
        if settled == offered == full and not everything:
            return
        for group, last in enumerate(full):
            first = 0 if everything else settled[group]
            # Why a block is not stored is told once, and again when it is offered for the last time (S16).
            waiting = range(0) if finished else range(settled[group], offered[group])
            if first < last:
                self._add(tracked, group, range(first, last), waiting, offered[group])
        # The engine's count may fall back (a failed load); the cursors do not.
        self._progress[tracked.name] = tuple(map(max, full, settled)), tuple(map(max, full, offered))

    def _add(self, tracked: TrackedRequest, group: int, chunks: range, waiting: range, offered: int) -> None:
        """waiting: those that were held back, and whose reason has been told. offered: so many were offered
        before."""
        keys, table, size = tracked.keys[group], tracked.tables[group], self._chunk
        start = len(self.keys)
        kept: Sequence[int] = chunks
        if self._config.groups[group].kind is GroupKind.FULL and not self._counts_offers(tracked):
            self.keys += keys[chunks.start : chunks.stop]
            self.blocks += table[chunks.start * size : chunks.stop * size]
        else:
            found = {n: self._blocks_of(tracked, group, n) for n in chunks}
            kept = self._often_enough(tracked, group, [n for n in chunks if found[n]], offered)
            self.keys += [keys[n] for n in kept]
            self.blocks += [block for n in kept for block in found[n]]
        self._open(tracked, group, kept, start)
        first, last = bisect_left(kept, waiting.start), bisect_left(kept, waiting.stop)
        self._again.update(range(start + first, start + last))

    def _counts_offers(self, tracked: TrackedRequest) -> bool:
        return self._offloader.config.store_threshold > 1 and not tracked.remote_decode

    def _often_enough(
        self, tracked: TrackedRequest, group: int, chunks: Sequence[int], offered: int
    ) -> Sequence[int]:
        """Those of the chunks whose keys have been offered `store_threshold` times; one request's offer
        counts once."""
        if not chunks or not self._counts_offers(tracked):
            return chunks
        keys = tracked.keys[group]
        self._offloader.count_offers([keys[n] for n in chunks if n >= offered])
        enough = [n for n in chunks if self._offloader.offered_enough(keys[n])]
        seldom = [keys[n] for n in chunks if n >= offered and not self._offloader.offered_enough(keys[n])]
        if seldom:
            self._offloader.skip(((tracked.name, len(seldom)),), seldom, SkipReason.BELOW_THRESHOLD)
        return enough

    def _open(self, tracked: TrackedRequest, group: int, chunks: Sequence[int], start: int) -> None:
        self._starts.append(start)
        self.segments.append(OfferedChunks(tracked, group, chunks, start))

    def _blocks_of(self, tracked: TrackedRequest, group: int, chunk: int) -> Sequence[int]:
        """The device blocks of a chunk; nothing, if it has left its sliding window and was given up.

        The engine frees blocks that have left the window, and does not say so. What the pool caches says
        where the content is now, if it is anywhere; without a pool, what has left the window is passed over.
        """
        size, spec = self._chunk, self._config.groups[group]
        blocks = tracked.tables[group][chunk * size : (chunk + 1) * size]
        if spec.kind is GroupKind.FULL:
            return blocks
        if self._pool is not None and size == 1:
            key = tracked.keys[group][chunk]
            if blocks[0] != self._config.null_block and self._pool.key_of(blocks[0]) == key:
                return blocks
            cached = self._pool.cached_block(key)
            return () if cached is None else (cached,)
        needed = spec.first_needed_token(tracked.request.num_computed_tokens)
        if chunk * size * spec.block_tokens < needed - needed % spec.block_tokens:
            return ()
        return () if self._config.null_block in blocks else blocks

    def hand_over(self, tracked: TrackedRequest, group: int, block: int, tokens: int) -> None:
        """Add a state that the engine has completed at this boundary. One whose prefix has no hash is no
        cache entry."""
        key = tracked.key_at(group, tokens, self._config.tokens_per_hash)
        if key is not None and block != self._config.null_block and tokens <= tracked.max_store_tokens:
            self._open(tracked, group, (tokens,), len(self.keys))
            self.keys.append(key)
            self.blocks.append(block)

    def store(self) -> tuple[TransferJob | None, PreparedStore | None]:
        """Offer the batch, and record how far that brings each request."""
        prepared = None
        if self.keys:
            prepared = self._offloader.store(self._owners(), self.keys, self.blocks, self._again)
        self._offloader.advance(self._advanced(prepared.deferred if prepared else ()))
        return (prepared.job if prepared else None), prepared

    def skip(self, reason: str) -> None:
        """Record that nothing of the batch is stored, and why."""
        if self.keys:
            self._offloader.skip(self._owners(), self.keys, reason)

    def stored(self, prepared: PreparedStore) -> list[tuple[TrackedRequest, int, int]]:
        """(request, group, tokens of the prefix that it stands for) of each key of the job, in its order."""
        names = []
        for place in prepared.stored:
            segment = self.segments[bisect_right(self._starts, place) - 1]
            end = segment.chunks[place - segment.start]
            if self._counted(segment.group):
                end = (end + 1) * self._chunk * self._config.groups[segment.group].block_tokens
            names.append((segment.tracked, segment.group, end))
        return names

    def _counted(self, group: int) -> bool:
        """Whether a cursor counts the chunks of this group."""
        return self._config.groups[group].kind is not GroupKind.MAMBA

    def _owners(self) -> Owners:
        """The requests of the batch, those with several segments in a row once."""
        runs: list[tuple[str, int]] = []
        for segment in self.segments:
            name, count = segment.tracked.name, len(segment.chunks)
            if runs and runs[-1][0] == name:
                runs[-1] = name, runs[-1][1] + count
            elif count:
                runs.append((name, count))
        return tuple(runs)

    def _advanced(self, deferred: Sequence[int]) -> list[Offer]:
        """The cursors of every request of the batch that have moved."""
        held: dict[tuple[str, int], int] = {}
        for place in reversed(deferred):
            segment = self.segments[bisect_right(self._starts, place) - 1]
            if self._counted(segment.group):
                held[segment.tracked.name, segment.group] = segment.chunks[place - segment.start]
        moved = []
        requests = self._offloader.ledger.requests
        for name, (reached, offered) in self._progress.items():
            entry = requests[name]
            settled = tuple([held.get((name, group), last) for group, last in enumerate(reached)])
            if entry.settled:
                settled = tuple(map(max, settled, entry.settled))
            if (settled, offered) != (entry.settled, entry.offered):
                moved.append((name, settled, offered))
        return moved


def room(ledger: Ledger) -> tuple[int, int]:
    """What had to wait is tried again when this has changed: a transfer has ended, or more or fewer slots may
    be taken. Pins that are given back make room too, and end no transfer."""
    return ledger.ended_at, len(ledger.free) + len(ledger.policy)


def _cursors(entry: RequestRecord, full: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(settled, offered) of a request; nothing yet, before its first offer."""
    nothing = (0,) * len(full)
    return entry.settled or nothing, entry.offered or nothing
