"""Follow the lives of blocks, and explain why a key is gone: the part of `Extractor` for slots and keys.

Each life has a number. The blocks of a store get consecutive numbers, and one number is skipped between two
stores. The data that the blocks of a store share is in one `Origin`. So a living block takes a few entries in
arrays, and consecutive lives that end alike make one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.ledger import Ledger
from kvsm.events import BlocksEvicted, HitMatched, RequestAdmitted, StorePlanned, StoreSkipped
from kvsm.explain.tables.key_history import KeyHistory
from kvsm.explain.tables.row_kinds import BlockRunRow, Gone
from kvsm.explain.tables.sqlite_tables import RUN_BLOCKS, TableWriter
from kvsm.ids import IdArray, Ids, unpack
from kvsm.states.block import are_indexed, are_readable

_Ints = NDArray[np.int64]


class Origin(msgspec.Struct):
    """The data that the blocks of one store share.

    requests: a JSON list of the requests that stored them.
    planned_ns: when the store was planned; None: the log lacks its plan.
    stored, stored_ns: the event that completed the store, and its time; None: not yet, or not in the log.
    blocks: how many of the blocks are alive.
    """

    requests: str
    planned_ns: int | None
    stored: int | None = None
    stored_ns: int | None = None
    blocks: int = 0


class LifeRun(msgspec.Struct, array_like=True):
    """Lives of one store with consecutive numbers and the same hits.

    life: the first number. blocks: how many lives.
    store: the number of the first life of their store.
    transfer: the store.
    hits, last_hit, last_hit_ns: as in `BlockRow`; 0: no hit.
    """

    life: int
    blocks: int
    store: int
    transfer: int
    hits: int
    last_hit: int
    last_hit_ns: int


class LifeEnd(NamedTuple):
    """Why lives ended.

    event, wall_ns: the event that ended them, and its time; wall_ns None: the log lacks the event.
    why: the reason.
    by: the transfer that caused it; None: no transfer did.
    requests: the requests of this transfer, a JSON list; None: no transfer, or unknown.
    """

    event: int
    wall_ns: int | None
    why: Gone
    by: int | None = None
    requests: str | None = None


class MissCause(NamedTuple):
    """Why a key is not readable: the columns of `LookupRow` from `why` to `skipped`."""

    why: str | None
    event: int | None = None
    transfer: int | None = None
    requests: str | None = None
    skipped: int | None = None


class MakingRoom(msgspec.Struct):
    """An eviction whose store is not planned yet. transfer: the store's number. lives: the evicted ones."""

    transfer: int
    event: int
    wall_ns: int
    lives: list[LifeRun]


class SavedLives(msgspec.Struct):
    """The state of `BlockLives` as plain data, for the index."""

    origins: dict[int, Origin]
    arrays: tuple[bytes, ...]
    next_life: int
    known_from: int
    making_room: MakingRoom | None
    recent_keys: dict[bytes, int]
    recent_skips: dict[bytes, int]


_ARRAYS = ("_life", "_store", "_hits", "_last_hit", "_last_hit_ns")


def _form(key: bytes) -> tuple[int, bytes]:
    """The length of a key and its KV cache group: keys in one row of `_stores` have both in common."""
    group = key[-GROUP_INDEX_BYTES:]
    # Some engines' keys do not end with a group, but with arbitrary bytes. No model has 256 groups.
    return len(key), group if group[:-1] == _SMALL_GROUP else b""


_SMALL_GROUP = bytes(GROUP_INDEX_BYTES - 1)


class BlockLives:
    """Follows the blocks of one ledger, and writes a row for each run of lives that ends.

    saved: the result of `save`, to resume from an index; None: start with empty tables.
    """

    def __init__(self, tables: TableWriter, saved: SavedLives | None = None) -> None:
        self._tables = tables
        self._origins: dict[int, Origin] = {}
        self._next_life = 1
        self._known_from = 0
        """All events after this one were seen. An earlier end of a life does not explain a missing key."""
        self._making_room: MakingRoom | None = None
        recent_keys: dict[bytes, int] = {}
        recent_skips: dict[bytes, int] = {}
        self._size(0)
        if saved is not None:
            self._origins, self._next_life = saved.origins, saved.next_life
            self._known_from, self._making_room = saved.known_from, saved.making_room
            recent_keys, recent_skips = saved.recent_keys, saved.recent_skips
            for name, content in zip(_ARRAYS, saved.arrays, strict=True):
                setattr(self, name, np.frombuffer(bytearray(content), np.int64))
        self._keys = KeyHistory(tables.connection, "lives", recent_keys)
        self._skips = KeyHistory(tables.connection, "skips", recent_skips)

    def _size(self, slots: int) -> None:
        self._life = np.zeros(slots, dtype=np.int64)
        """By slot: the number of the living block's life; 0: the slot has none."""
        self._store = np.zeros(slots, dtype=np.int64)
        """By slot: the number of the first life of its store."""
        self._hits = np.zeros(slots, dtype=np.int64)
        self._last_hit = np.zeros(slots, dtype=np.int64)
        self._last_hit_ns = np.zeros(slots, dtype=np.int64)

    def save(self) -> SavedLives:
        """Return the state as plain data."""
        return SavedLives(
            self._origins,
            tuple([getattr(self, name).tobytes() for name in _ARRAYS]),
            self._next_life,
            self._known_from,
            self._making_room,
            self._keys.recent,
            self._skips.recent,
        )

    def fits(self, ledger: Ledger) -> bool:
        """Whether exactly the slots that the ledger's index has are alive here."""
        sizes = {len(getattr(self, name)) for name in _ARRAYS}
        return sizes == {ledger.config.host_blocks} and bool(
            np.array_equal(self._life > 0, are_indexed(ledger.blocks.view))
        )

    def begin(self, ledger: Ledger, before: Ledger | None) -> None:
        """Start with the ledger at the beginning of the log or after a gap.

        before: the ledger before the gap; None: the log begins here.
        """
        now = are_indexed(ledger.blocks.view)
        if before is None:
            self._size(ledger.config.host_blocks)
        else:
            self.store_follows(None)
            same = now & (before.generation_view == ledger.generation_view)
            lost = np.flatnonzero((self._life > 0) & ~same)
            self._end(self._runs(before, lost), LifeEnd(ledger.seq, None, Gone.BEFORE_LOG))
            self._life[lost] = 0
        self._known_from = ledger.seq
        found = np.flatnonzero(now & (self._life == 0))
        by_store = found[np.argsort(ledger.generation_view[found], kind="stable")].tolist()
        for transfer, some in groupby(by_store, lambda slot: ledger.generation[slot]):
            slots = list(some)
            origin = self._origins.setdefault(transfer, Origin("[]", None))
            origin.blocks += len(slots)
            self._number([ledger.key_of[slot] for slot in slots], np.array(slots))
        for slot in np.flatnonzero(are_readable(ledger.blocks.view)).tolist():
            origin = self._origins[ledger.generation[slot]]
            if origin.stored is None:
                origin.stored = ledger.seq

    def _number(self, keys: Sequence[bytes], slots: _Ints) -> None:
        """Number the lives that begin. Keys of different form get separate rows in `_stores`."""
        start = 0
        for _, some in groupby(keys, _form):
            part = list(some)
            life, end = self._next_life, start + len(part)
            own = slots[start:end]
            self._next_life += len(part) + 1
            self._life[own] = np.arange(life, life + len(part))
            self._store[own] = life
            self._hits[own] = 0
            self._last_hit[own] = self._last_hit_ns[own] = 0
            self._tables.add_store(life, part, own.tolist())
            self._keys.note(part, range(life, life + len(part)))
            start = end

    # One method for each effect of an event. Call it after the ledger has applied the event.

    def planned(self, event: StorePlanned, requests: str) -> None:
        """Begin the lives of a planned store, and write the eviction that made room for it, if any."""
        self.store_follows(event.seq, requests)
        slots = _indices(event.slots)
        self._origins[event.seq] = Origin(requests, event.wall_ns, blocks=len(slots))
        self._number(event.keys, slots)

    def stored(self, transfer: int, event: int, wall_ns: int) -> None:
        """Note that a store completed."""
        origin = self._origins.get(transfer)
        if origin is not None:
            origin.stored, origin.stored_ns = event, wall_ns

    def matched(self, event: HitMatched) -> None:
        """Count a hit of the blocks that an answer to a lookup pins."""
        if event.slots:
            slots = _indices(event.slots)
            self._hits[slots] += 1
            self._last_hit[slots] = event.seq
            self._last_hit_ns[slots] = event.wall_ns

    def skipped(self, event: StoreSkipped) -> None:
        """Note that these keys were offered and not stored."""
        self._skips.note(event.keys, [event.seq] * len(event.keys))

    def evicted(self, ledger: Ledger, event: BlocksEvicted) -> None:
        """End the lives of evicted blocks. Their rows wait for the next event, which plans the store."""
        slots = _indices(event.slots)
        lives = self._runs(ledger, slots)
        self._life[slots] = 0
        self._making_room = MakingRoom(event.transfer, event.seq, event.wall_ns, lives)

    def store_follows(self, planned: int | None, requests: str | None = None) -> None:
        """Write the rows of an eviction that waits for its store; do nothing if there is none.

        planned: the store that the next event plans; None: it plans none.
        requests: the store's requests, a JSON list.
        """
        room = self._making_room
        if room is not None:
            self._making_room = None
            owners = requests if planned == room.transfer else None
            self._end(room.lives, LifeEnd(room.event, room.wall_ns, Gone.EVICTED, room.transfer, owners))

    def gone(self, ledger: Ledger, slots: IdArray, end: LifeEnd) -> None:
        """End the lives in these slots, because an event removed their keys. Slots may be without a life."""
        self._all_end(ledger, np.array(slots, dtype=np.int64), end)

    def all_gone(self, ledger: Ledger, end: LifeEnd) -> int:
        """End all lives, because an event removed all keys. Returns the number of lives."""
        return self._all_end(ledger, np.arange(len(self._life)), end)

    def cut_off(self, ledger: Ledger, restart: int, wall_ns: int) -> None:
        """End the lives of the blocks whose stores the event `restart` cut off.

        wall_ns: the time of the last event before the restart; no process ran in between.
        """
        gone = np.flatnonzero((self._life > 0) & ~are_indexed(ledger.blocks.view))
        stores = ledger.generation_view[gone]
        for store in np.unique(stores).tolist():
            end = LifeEnd(restart, wall_ns, Gone.RESTART, store, self._origins[store].requests)
            self._all_end(ledger, gone[stores == store], end)

    def _all_end(self, ledger: Ledger, slots: _Ints, end: LifeEnd) -> int:
        living = slots[self._life[slots] > 0]
        self._end(self._runs(ledger, living), end)
        self._life[living] = 0
        return len(living)

    # Rows.

    def _runs(self, ledger: Ledger, slots: _Ints) -> list[LifeRun]:
        """The lives in these slots, as runs. The ledger must still have the generations of their blocks."""
        if not len(slots):
            return []
        if len(slots) == 1:  # Most evictions: a tenth of the time that arrays of one number take.
            return [self._run(ledger, int(slots[0]))]
        slots = slots[np.argsort(self._life[slots])]
        life, store, hits, last = (
            column[slots] for column in (self._life, self._store, self._hits, self._last_hit)
        )
        new = np.ones(len(slots), dtype=np.bool_)
        new[1:] = (life[1:] - life[:-1] != 1) | (hits[1:] != hits[:-1]) | (last[1:] != last[:-1])
        new[1:] |= (life[1:] - store[1:]) % RUN_BLOCKS == 0
        starts = np.flatnonzero(new)
        columns = (
            life[starts],
            np.append(starts[1:], len(slots)) - starts,
            store[starts],
            ledger.generation_view[slots[starts]],
            hits[starts],
            last[starts],
            self._last_hit_ns[slots[starts]],
        )
        return [LifeRun(*run) for run in zip(*[column.tolist() for column in columns])]

    def _run(self, ledger: Ledger, slot: int) -> LifeRun:
        """The life in this slot, as a run of one."""
        columns = self._life, self._store, self._hits, self._last_hit, self._last_hit_ns
        life, store, hits, last, last_ns = [column.item(slot) for column in columns]
        return LifeRun(life, 1, store, ledger.generation[slot], hits, last, last_ns)

    def _end(self, runs: Sequence[LifeRun], end: LifeEnd) -> None:
        for run in runs:
            self._tables.add("block_runs", self._row(run, end))
            origin = self._origins[run.transfer]
            origin.blocks -= run.blocks
            if not origin.blocks:
                del self._origins[run.transfer]

    def _row(self, run: LifeRun, end: LifeEnd | None) -> BlockRunRow:
        origin = self._origins[run.transfer]
        event, wall_ns, why, by, requests = end or (None, None, None, None, None)
        evicted = why is Gone.EVICTED
        return BlockRunRow(
            run.life,
            run.blocks,
            run.store,
            run.transfer,
            origin.requests,
            origin.planned_ns,
            origin.stored,
            origin.stored_ns,
            run.hits,
            run.last_hit if run.hits else None,
            run.last_hit_ns if run.hits else None,
            event,
            wall_ns,
            None if why is None else why.value,
            by if evicted else None,
            requests if evicted else None,
            None if evicted else by,
            wanted=None,
            wanted_ns=None,
            wanted_by=None,
        )

    def living(self, ledger: Ledger) -> Iterator[BlockRunRow]:
        """Yield rows of the lives that have not ended, and of evicted ones whose store is not planned yet."""
        room = self._making_room
        if room is not None:
            end = LifeEnd(room.event, room.wall_ns, Gone.EVICTED, room.transfer)
            yield from (self._row(run, end) for run in room.lives)
        lasting = np.flatnonzero(self._life)
        yield from (self._row(run, None) for run in self._runs(ledger, lasting))

    # Why a key is gone.

    def missed(self, ledger: Ledger, event: HitMatched | RequestAdmitted) -> MissCause:
        """Why the lookup stops at its missed key. Marks the key's last life as wanted, once."""
        key = event.missed
        if key is None:
            return MissCause(None)
        slot = ledger.index.get(key)
        if slot is not None:
            store = ledger.generation[slot]
            in_flight = MissCause(Gone.IN_FLIGHT.value, store, store, self._origins[store].requests)
            return MissCause(None) if ledger.readable(slot) else in_flight
        # Hash collisions are ignored here; the skip may be one of another key.
        skipped: int | None = next(self._skips.candidates(key), 0)
        life = next((life for life in self._keys.candidates(key) if self._tables.key_of(life) == key), None)
        run = None if life is None else self._tables.run_of(life)
        known_from = self._known_from if run is None else max(self._known_from, run.gone or 0)
        if (skipped or 0) <= known_from:
            skipped = None
        if life is not None and run is not None and (run.gone or 0) > self._known_from:
            if run.wanted is None:
                self._tables.want(run, life, event.seq, event.wall_ns, event.request)
            if run.gone_for is not None:
                return MissCause(run.why, run.gone, run.gone_for, run.gone_for_requests, skipped)
            by = run.gone_by
            requests = None if by is None else self._tables.requests_of(by)
            return MissCause(run.why, run.gone, by, requests, skipped)
        if skipped is not None:
            return MissCause(Gone.SKIPPED.value, skipped, skipped=skipped)
        return MissCause((Gone.BEFORE_LOG if self._known_from else Gone.NEVER_STORED).value)


def _indices(slots: Ids) -> _Ints:
    """The slots that an event names, as an array for indexing."""
    return np.array(unpack(slots), dtype=np.int64)
