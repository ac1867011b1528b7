"""The canonical form of a serving world, and its hash: worlds with equal fingerprints have equal futures.

States that differ only in ids must get one form, and states with different futures must get different ones.
How each field enters the form is declared beside the field, with the reason (`kvsm.core.ledger.canonical`).
This file renames ids:

- A transfer is named by its position among the live ones.
- A host slot is named by its position in the free queue, in the transfer or match that holds it, or in the
  eviction order. No decision reads a slot's number. A reset frees slots in the order of their numbers, but
  slots without content are interchangeable. This holds only under LRU, whose state is just an order: under
  other policies slots keep their numbers.
- A device block is named by its position in the pool's queue, or in the block tables and copies that name it.
  No decision reads a block's number either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, Protocol, TypeVar

import msgspec

from kvsm.check.worlds.parts import lru_order
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_workers import TORN
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY, Names, each_compared
from kvsm.ids import listed, to_list

Id = TypeVar("Id", int, str)

_encode = msgspec.msgpack.Encoder().encode


class WorldOfParts(Protocol):
    """A world with a small engine, made of parts that have declared their fields."""

    engine: SmallEngine

    def parts(self) -> Sequence[object]:
        """All objects of the world, in a fixed order."""


def fingerprint(world: WorldOfParts, *, renamed: bool = True) -> bytes:
    """The hash of the canonical form (16 bytes)."""
    return blake2b(_encode(canonical(world, renamed=renamed)), digest_size=16).digest()


def canonical(world: WorldOfParts, *, renamed: bool = True) -> Sequence[Any]:
    """The canonical form of all parts. renamed: False keeps the numbers of slots and device blocks."""
    names = _names_in(world.engine, renamed)
    return each_compared(world.parts(), names)


def _names_in(engine: SmallEngine, renamed: bool) -> Names:
    ledger = engine.core.ledger
    transfers = _places(ledger.transfers)
    for id in engine.copies:
        transfers.setdefault(id, len(transfers))
    num_slots, num_blocks = len(ledger.key_of), len(engine.device)
    slots: Iterable[int] = range(num_slots)
    blocks: Iterable[int] = range(num_blocks)
    workers: Sequence[int] = ()
    if renamed:
        blocks = _blocks_in_order(engine, num_blocks)
        idle = lru_order(ledger)
        if idle is not None:
            slots = slots_in_order(ledger, engine.requests, idle, num_slots)
        workers = _workers_in_order(engine, transfers, blocks)
    return Names(ledger, _places(engine.requests), transfers, _places(slots), _places(blocks), workers)


def _places(ids: Iterable[Id]) -> dict[Id, int]:
    """id -> its position."""
    return dict(zip(ids, count()))


def slots_in_order(
    ledger: Ledger, requests: Iterable[str], idle: Iterable[int], num_slots: int
) -> Iterable[int]:
    """All slots in the order of their canonical names: free, copied, pinned, idle, others.

    requests: the names of the requests that may pin slots.
    idle: the eviction order.
    """
    order = [*ledger.free]
    for transfer in ledger.transfers.values():
        order += listed(transfer.slots)
    for name in requests:
        record = ledger.requests.get(name)
        if record is not None:
            order += listed(record.pins)
    order += idle
    order += range(num_slots)
    return dict.fromkeys(order)


def _workers_in_order(
    engine: SmallEngine, transfers: Mapping[int, int], blocks: Iterable[int]
) -> Sequence[int]:
    """The workers, sorted by their part of each copy and report, and by the blocks that a failed copy has
    torn.

    Empty if this is the order of their numbers.
    """
    live, device, workers = engine.core.ledger.transfers, engine.device, range(engine.workers)
    if len(workers) == 1:
        return ()
    begun = [copy.left for copy in engine.copies.values() if len(copy.left) < len(workers)]
    reported = [transfer.reported for transfer in live.values() if transfer.reported]
    reports = [
        (report.worker, transfers[report.transfer], report.good)
        for report in engine.reports
        if report.transfer in live
    ]
    torn = [block for block in blocks for cells in device[block] if TORN in cells]
    if not (begun or reported or reports or torn):
        return ()
    done = [
        (
            [worker in left for left in begun],
            [bits >> worker & 1 for bits in reported],
            sorted([report for by, *report in reports if by == worker]),
            [TORN in device[block][worker] for block in torn],
        )
        for worker in workers
    ]
    order = sorted(workers, key=done.__getitem__)
    return order if order != [*workers] else ()


def _blocks_in_order(engine: SmallEngine, num_blocks: int) -> Iterable[int]:
    order = [*engine.pool.queue]
    for request in engine.requests.values():
        for table in request.tables:
            order += table
    for transfer in engine.core.ledger.transfers.values():
        order += listed(transfer.device_blocks)
    for computed in engine.computing:
        for table in computed.tables:
            order += table
    for kept in engine.sending.values():
        order += kept
    for copy in engine.copies.values():
        order += to_list(copy.job.device_blocks)
    order += range(num_blocks)
    places = dict.fromkeys(order)
    places.pop(NOBODY, None)
    return places
