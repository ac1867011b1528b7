"""The canonical form of a serving world, and its hash: worlds with one fingerprint have one future.

The explorer must not see two names for one state, and must not take two states for one. What each field comes
to is declared beside the field (`kvsm.canonical`), with the reason. Here things get their names:

- Transfers are named by their place among the live ones.
- Host slots: a free one by its place in the free queue, one in use by the transfer or the match that holds
  it, an idle one by its place in the eviction order. No decision looks at a slot's number. A reset frees
  slots in the order of their numbers, but slots without content are alike. This holds under LRU alone, which
  is nothing but an order: under other policies slots keep their numbers.
- Device blocks: a free one by its place in the pool's queue, the others by the tables and copies that name
  them. No decision looks at a block's number either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, Protocol

import msgspec

from kvsm.canonical import NOBODY, Names, compared
from kvsm.ids import listed, to_list
from kvsm.ledger import Ledger
from kvsm.worlds.parts import lru_order
from kvsm.worlds.small_engine import SmallEngine

_encode = msgspec.msgpack.Encoder().encode


class WorldOfParts(Protocol):
    """A world with a small engine whose parts have declared their fields."""

    engine: SmallEngine

    def parts(self) -> Sequence[object]:
        """All objects that it is made of, in a fixed order."""


def fingerprint(world: WorldOfParts, *, renamed: bool = True) -> bytes:
    """The canonical form in 16 bytes."""
    return blake2b(_encode(canonical(world, renamed=renamed)), digest_size=16).digest()


def canonical(world: WorldOfParts, *, renamed: bool = True) -> Sequence[Any]:
    """What all parts come to. renamed: False leaves slots and device blocks their numbers."""
    names = _names_in(world.engine, renamed)
    return [compared(part, names) for part in world.parts()]


def _names_in(engine: SmallEngine, renamed: bool) -> Names:
    ledger = engine.core.ledger
    transfers = _places(chain(ledger.transfers, engine.copies))
    slots: Iterable[int] = range(len(ledger.key_of))
    blocks: Iterable[int] = range(len(engine.device))
    if renamed:
        blocks = chain(_blocks_in_use(engine), blocks)
        idle = lru_order(ledger)
        if idle is not None:
            slots = chain(_slots_in_use(ledger, engine.requests), idle, slots)
    return Names(ledger, _places(engine.requests), transfers, _places(slots), _places(blocks))


def _places(things: Iterable[Any]) -> dict[Any, int]:
    """The place of each thing, where it is first named."""
    return {thing: place for place, thing in enumerate(dict.fromkeys(things))}


def _slots_in_use(ledger: Ledger, requests: Iterable[str]) -> Iterable[int]:
    yield from ledger.free
    for transfer in ledger.transfers.values():
        yield from listed(transfer.slots)
    for name in requests:
        record = ledger.requests.get(name)
        if record is not None and len(record.pins):
            yield from listed(record.pins)


def _blocks_in_use(engine: SmallEngine) -> Iterable[int]:
    """Free blocks first. The null block names nothing."""
    named = dict.fromkeys(engine.pool.queue)
    for request in engine.requests.values():
        for table in request.tables:
            named.update(dict.fromkeys(table))
    for transfer in engine.core.ledger.transfers.values():
        named.update(dict.fromkeys(listed(transfer.device_blocks)))
    for computed in engine.computing:
        for table in computed.tables:
            named.update(dict.fromkeys(table))
    for kept in engine.sending.values():
        named.update(dict.fromkeys(kept))
    for copy in engine.copies.values():
        named.update(dict.fromkeys(to_list(copy.job.device_blocks)))
    named.pop(NOBODY, None)
    return named
