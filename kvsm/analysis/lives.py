"""The lives of blocks, and why a key is gone: what `Extractor` knows of slots and keys.

A store makes many blocks. What they share is kept once, in an `Origin`. Only hits are counted by slot. So a
block costs nothing until its life ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.analysis.rows import BlockRow, Gone
from kvsm.events import BlocksEvicted, HitMatched, StorePlanned, StoreSkipped
from kvsm.ids import IdArray, Ids, listed, to_list, unpack
from kvsm.ledger import Ledger
from kvsm.states.block import are_indexed


class Origin(msgspec.Struct):
    """What the blocks of one store share.

    blocks: how many of them live.
    """

    requests: str
    planned_ns: int | None
    stored: int | None = None
    stored_ns: int | None = None
    blocks: int = 0


class Fate(msgspec.Struct):
    """How the last life of a key ended. (transfer, slot) names it; `by` is the transfer behind its end.

    requests: of that transfer, as a JSON list.
    wanted: whether a lookup has stopped at the key since.
    """

    transfer: int
    slot: int
    why: str
    event: int
    by: int | None
    requests: str | None
    wanted: bool = False


class Cause(NamedTuple):
    """Why a key is not readable: `why`, `cause`, `cause_transfer` and `cause_requests` of a lookup."""

    why: str | None
    event: int | None = None
    transfer: int | None = None
    requests: str | None = None


class Wanted(NamedTuple):
    """A lookup stopped at the key of a block that is gone."""

    event: int
    wall_ns: int
    request: str
    transfer: int
    slot: int


class End(NamedTuple):
    """What ended lives: the event (and its time), why, and the transfer behind it with its requests.

    wall_ns: None if the log lacks the event.
    """

    event: int
    wall_ns: int | None
    why: Gone
    by: int | None = None
    requests: str | None = None


Life = tuple[int, int, bytes]
"""(slot, the store that made its block, its key)."""


class Past(Protocol):
    """What is known of keys from an earlier part of the log, that is not in memory."""

    def fate(self, key: bytes) -> Fate | None:
        """How the key's last life ended."""

    def skipped(self, key: bytes) -> int | None:
        """The last event that skipped an offer of this key, if it was never stored."""


class NoPast:
    """Everything is in memory."""

    def fate(self, _key: bytes) -> Fate | None:
        """Nothing."""
        return None

    def skipped(self, _key: bytes) -> int | None:
        """Nothing."""
        return None


class BlockLives:
    """Follows the blocks of one ledger. The finished rows are in `rows` until somebody takes them."""

    def __init__(self, past: Past) -> None:
        self.rows: list[BlockRow] = []
        self.wanted: list[Wanted] = []
        """To be noted in rows that were taken."""
        self._past = past
        self._origins: dict[int, Origin] = {}
        self._fates: dict[bytes, Fate] = {}
        self._skipped: dict[bytes, int] = {}
        self._complete = True
        """Whether every event up to now was seen. Else a key without a fate may have had one."""
        self._making_room: tuple[int, int, int, list[Life]] | None = None
        """(transfer, event, time, lives) of an eviction, until its store is planned in the next event."""
        self._size(0)

    def _size(self, slots: int) -> None:
        self._alive = np.zeros(slots, dtype=np.bool_)
        self._hits = np.zeros(slots, dtype=np.int64)
        self._last_hit = np.zeros(slots, dtype=np.int64)
        self._last_hit_ns = np.zeros(slots, dtype=np.int64)

    def begin(self, ledger: Ledger, before: Ledger | None) -> None:
        """The log begins, or goes on after a gap, with this ledger. before: the one up to the gap."""
        if before is None:
            self._size(ledger.config.host_blocks)
        else:
            self.store_follows(None)
        now = are_indexed(ledger.blocks.view)
        if ledger.seq:
            self._complete = False
            self._fates.clear()
            self._skipped.clear()
        if before is not None:
            same = now & (before.generation_view == ledger.generation_view)
            lost = np.flatnonzero(self._alive & ~same).tolist()
            self._end(_lives(before, lost), End(ledger.seq, None, Gone.BEFORE_LOG))
        for slot in np.flatnonzero(now & ~self._alive).tolist():
            origin = self._origins.setdefault(ledger.generation[slot], Origin("[]", None))
            origin.blocks += 1
            self._hits[slot] = 0
        self._alive = now
        self._stored_in_gap(ledger)

    def _stored_in_gap(self, ledger: Ledger) -> None:
        """A store that had not ended before the gap, and is readable behind it, was stored in it."""
        for slot in np.flatnonzero(self._alive).tolist():
            origin = self._origins[ledger.generation[slot]]
            if origin.stored is None and ledger.readable(slot):
                origin.stored = ledger.seq

    # What events do. Each is called when the ledger has applied the event.

    def planned(self, event: StorePlanned, requests: str) -> None:
        """New lives begin. The eviction that made room for them knows their requests now."""
        self.store_follows(event.seq, requests)
        slots = _indices(event.slots)
        self._alive[slots] = True
        self._hits[slots] = 0
        self._origins[event.seq] = Origin(requests, event.wall_ns, blocks=len(slots))
        for known in (self._fates, self._skipped):
            if known:
                for key in event.keys:
                    known.pop(key, None)

    def stored(self, transfer: int, event: int, wall_ns: int) -> None:
        """A store is complete."""
        origin = self._origins.get(transfer)
        if origin is not None:
            origin.stored, origin.stored_ns = event, wall_ns

    def matched(self, event: HitMatched) -> None:
        """A lookup is served by these blocks."""
        if event.slots:
            slots = _indices(event.slots)
            self._hits[slots] += 1
            self._last_hit[slots] = event.seq
            self._last_hit_ns[slots] = event.wall_ns

    def skipped(self, event: StoreSkipped) -> None:
        """These keys were offered in vain."""
        self._skipped.update(dict.fromkeys(event.keys, event.seq))

    def evicted(self, ledger: Ledger, event: BlocksEvicted) -> None:
        """These lives end as soon as it is known for whom: with the next event."""
        lives = _lives(ledger, to_list(event.slots))
        self._making_room = event.transfer, event.seq, event.wall_ns, lives

    def store_follows(self, planned: int | None, requests: str | None = None) -> None:
        """Finish an eviction that waits for its store. planned: the store that follows; None: none does."""
        if self._making_room is not None:
            transfer, event, wall_ns, lives = self._making_room
            self._making_room = None
            whose = requests if planned == transfer else None
            self._end(lives, End(event, wall_ns, Gone.EVICTED, transfer, whose))

    def gone(self, ledger: Ledger, slots: IdArray, end: End) -> None:
        """An event removed the keys of these slots, if they lived."""
        self._end(_lives(ledger, [slot for slot in listed(slots) if self._alive[slot]]), end)

    def all_gone(self, ledger: Ledger, end: End) -> int:
        """An event removed all keys. Returns how many there were."""
        slots = np.flatnonzero(self._alive).tolist()
        self._end(_lives(ledger, slots), end)
        return len(slots)

    def _end(self, lives: Sequence[Life], end: End) -> None:
        alive, known = self._alive, end.why is not Gone.BEFORE_LOG
        for life in lives:
            slot, transfer, key = life
            alive[slot] = False
            self.rows.append(self._row(life, end))
            origin = self._origins[transfer]
            origin.blocks -= 1
            if not origin.blocks:
                del self._origins[transfer]
            if known:
                self._fates[key] = Fate(transfer, slot, end.why.value, end.event, end.by, end.requests)

    def _row(self, life: Life, end: End | None) -> BlockRow:
        slot, transfer, key = life
        origin, hits = self._origins[transfer], int(self._hits[slot])
        event, wall_ns, why, by, requests = end or (None, None, None, None, None)
        evicted = why is Gone.EVICTED
        return BlockRow(
            transfer,
            slot,
            key.hex(),
            origin.requests,
            origin.planned_ns,
            origin.stored,
            origin.stored_ns,
            hits,
            int(self._last_hit[slot]) if hits else None,
            int(self._last_hit_ns[slot]) if hits else None,
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

    def living(self, ledger: Ledger) -> Iterator[BlockRow]:
        """A row for each life that lasts, or that ended with an eviction whose store is not known yet."""
        over: set[int] = set()
        if self._making_room is not None:
            transfer, event, wall_ns, lives = self._making_room
            end = End(event, wall_ns, Gone.EVICTED, transfer)
            yield from (self._row(life, end) for life in lives)
            over = {slot for slot, _, _ in lives}
        lasting = [slot for slot in np.flatnonzero(self._alive).tolist() if slot not in over]
        yield from (self._row(life, None) for life in _lives(ledger, lasting))

    # Why a key is gone.

    def missed(self, ledger: Ledger, event: HitMatched) -> Cause:
        """Why the lookup stops at its missed key; the key's last life is wanted."""
        key = event.missed
        if key is None:
            return Cause(None)
        slot = ledger.index.get(key)
        if slot is not None:
            store = ledger.generation[slot]
            in_flight = Cause(Gone.IN_FLIGHT.value, store, store, self._origins[store].requests)
            return Cause(None) if ledger.readable(slot) else in_flight
        fate = self._fates.get(key) or self._past.fate(key)
        if fate is not None:
            if not fate.wanted:
                fate.wanted = True
                self.wanted.append(Wanted(event.seq, event.wall_ns, event.request, fate.transfer, fate.slot))
            return Cause(fate.why, fate.event, fate.by, fate.requests)
        skipped = self._skipped.get(key) or self._past.skipped(key)
        if skipped is not None:
            return Cause(Gone.SKIPPED.value, skipped)
        return Cause((Gone.NEVER_STORED if self._complete else Gone.BEFORE_LOG).value)


def _lives(ledger: Ledger, slots: Iterable[int]) -> list[Life]:
    """The blocks of these slots, as the ledger names them."""
    generation, key_of = ledger.generation, ledger.key_of
    return [(slot, generation[slot], key_of[slot]) for slot in slots]


def _indices(slots: Ids) -> list[int] | NDArray[np.int64]:
    """The slots that an event names, as numpy takes them for an index."""
    numbers = unpack(slots)
    return list(numbers) if type(numbers) is tuple else np.asarray(numbers)
