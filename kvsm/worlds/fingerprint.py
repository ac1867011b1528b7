"""What of a serving world matters for the future, ids renamed: two worlds with one fingerprint are one.

The explorer must not see two names for one state, and must not take two states for one. So each renaming and
each thing that is left out has its reason:

- *transfers* are named by their place among those that are live. Their ids are compared for equality alone,
  and the ledger keeps them in the order in which they were planned. A report of one that is over is refused
  whichever it was.
- *host slots*: a free one by its place in the free queue, one in use by the transfer or the match that holds
  it, an idle one by its place in the eviction order. No decision looks at a slot's number; a reset frees
  slots in the order of their numbers, but slots without content are alike. Only under LRU, whose whole state
  is that order: under other policies slots keep their numbers.
- *device blocks*: a free one by its place in the pool's queue, the others by the tables and copies that name
  them. No decision looks at a block's number, either.
- *event numbers* are compared with each other alone. What is kept is what the comparisons come to: whether a
  pin still holds, whether a key was forgotten since a request got its blocks or since the free queue was
  walked, whether there is the same room as at the last try. Later events have larger numbers than all that
  there are, so nothing else of the order matters.
- *ticks*: how many are left.
- *left out*: the bytes of a free slot, of one that a store is planned for, and of a retired one: nobody reads
  them before they are written, or ever. Those of a device block that nobody holds, caches or copies: whoever
  is given it finds nothing of that (`SmallWorkers.start`). The key of a slot that the index does not name.
  Whatever is left of a request that is over.
- steps, the epoch, who owns a store, who asked for a flush: they are data for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from kvsm.events import Direction
from kvsm.ids import listed, to_list
from kvsm.ledger import Ledger, RequestRecord, TransferRecord
from kvsm.policies.lru import LRUPolicy
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK
from kvsm.worlds.small_request import SmallRequest

if TYPE_CHECKING:
    from kvsm.worlds.router import Router
    from kvsm.worlds.serving import ServingWorld

_encode = msgspec.msgpack.Encoder().encode

_UNUSED = (BlockState.FREE, BlockState.EVICTED)
_UNREAD = (BlockState.ALLOCATED, BlockState.RETIRED)
_LAST_KEYED = BlockState.LOADING
_DEFERRED = RequestState.DEFERRED
_LOAD = Direction.LOAD
_NOBODY = -1

Names = dict[int, int]


def fingerprint(world: ServingWorld, *, renamed: bool = True) -> bytes:
    """16 bytes."""
    return blake2b(_encode(canonical(world, renamed=renamed)), digest_size=16).digest()


def canonical(world: ServingWorld, *, renamed: bool = True) -> Sequence[Any]:
    """What the fingerprint is made of. renamed: False leaves slots and device blocks their numbers."""
    engine, ledger = world.engine, world.engine.core.ledger
    requests = list(engine.requests.values())
    numbers = {one.request_id: number for number, one in enumerate(requests)}
    transfers = {id: number for number, id in enumerate(ledger.transfers)}
    for id in engine.copies:
        transfers.setdefault(id, len(transfers))
    if renamed:
        slots, blocks = _name_slots(ledger, requests), _name_blocks(world, requests)
    else:
        slots = {slot: slot for slot in range(world.options.slots)}
        blocks = {block: block for block in range(world.options.device_blocks)}
    names = _Names(numbers, transfers, slots, blocks)
    return (
        world.arrived,
        world.owes_step,
        world.left["repeats"] > 0 and world.over is not None,
        tuple(world.left.values()),
        _slots(world, names),
        _blocks(world, names),
        [_transfer(one, ledger, names) for one in ledger.transfers.values()],
        [_request(one, world, names) for one in requests],
        _engine(world, names),
        _scheduler(world, names),
        list(ledger.offers.times.items()),
        world.router and _router(world.router, names),
    )


class _Names:
    """What each thing is called."""

    __slots__ = ("blocks", "requests", "slots", "transfers")

    def __init__(self, requests: dict[str, int], transfers: Names, slots: Names, blocks: Names) -> None:
        self.requests, self.transfers, self.slots, self.blocks = requests, transfers, slots, blocks

    def tables(self, tables: Iterable[Sequence[int]]) -> list[list[int]]:
        # A table may hold what stands for no block.
        get = self.blocks.get
        return [[get(block, _NOBODY) for block in table] for table in tables]


def _name_slots(ledger: Ledger, requests: Sequence[SmallRequest]) -> Names:
    size = len(ledger.key_of)
    if type(ledger.policy) is not LRUPolicy:
        return {slot: slot for slot in range(size)}
    order = dict.fromkeys(ledger.free)
    for transfer in ledger.transfers.values():
        order.update(dict.fromkeys(listed(transfer.slots)))
    for request in requests:
        entry = ledger.requests.get(request.request_id)
        if entry is not None and len(entry.pins):
            order.update(dict.fromkeys(listed(entry.pins)))
    order.update(dict.fromkeys(ledger.policy._queue))
    order.update(dict.fromkeys(range(size)))
    return {slot: number for number, slot in enumerate(order)}


def _name_blocks(world: ServingWorld, requests: Sequence[SmallRequest]) -> Names:
    engine = world.engine
    order = dict.fromkeys(engine.pool.queue)
    for request in requests:
        for table in request.tables:
            order.update(dict.fromkeys(table))
    for transfer in engine.core.ledger.transfers.values():
        order.update(dict.fromkeys(listed(transfer.device_blocks)))
    for one in engine.computing:
        for table in one.tables:
            order.update(dict.fromkeys(table))
    for held in engine.sending.values():
        order.update(dict.fromkeys(held))
    for copy in engine.copies.values():
        order.update(dict.fromkeys(to_list(copy.job.device_blocks)))
    order.pop(_NOBODY, None)
    order.update(dict.fromkeys(range(world.options.device_blocks)))
    return {block: number for number, block in enumerate(order)}


def _slots(world: ServingWorld, names: _Names) -> list[Any]:
    ledger, host, chunk = world.engine.core.ledger, world.engine.host, world.options.blocks_per_chunk
    words = ledger.blocks.words
    seen: list[Any] = []
    for slot in names.slots:
        state = words[slot] & STATE_MASK
        if state in _UNUSED:
            seen.append(0)
        else:
            key = ledger.key_of[slot] if state <= _LAST_KEYED else None
            held = None if state in _UNREAD else host[slot * chunk : (slot + 1) * chunk]
            seen.append((words[slot], key, held))
    renamed = names.slots
    order = [renamed[slot] for slot in ledger.free]
    if type(ledger.policy) is LRUPolicy:
        return [order, [renamed[slot] for slot in ledger.policy._queue], seen]
    return [order, ledger.policy.snapshot(), seen]


def _blocks(world: ServingWorld, names: _Names) -> list[Any]:
    engine = world.engine
    pool, ledger = engine.pool, engine.core.ledger
    leases, brought, stale = ledger.leases.words, ledger.provenance.brought, ledger.provenance.stale
    epoch, references, caches = ledger.epoch, pool.references, pool.caches
    seen: list[Any] = []
    for block in names.blocks:
        key, held = caches.get(block), references[block]
        is_read = held or key is not None or leases[block]
        seen.append(
            (
                held,
                leases[block],
                key,
                key is not None and pool.cached.get(key) == block,
                brought.get(block),
                stale.get(block),
                engine.brought.get(block, epoch) < epoch,
                engine.device[block] if is_read else None,
            )
        )
    return [[names.blocks[block] for block in pool.queue], seen]


def _transfer(one: TransferRecord, ledger: Ledger, names: _Names) -> Any:
    slots, blocks = names.slots, names.blocks
    ticks = ledger.config.transfer_ticks
    load = one.direction is _LOAD
    return (
        names.requests[one.owners[0][0]] if load else _NOBODY,
        [slots[slot] for slot in listed(one.slots)],
        [blocks[block] for block in listed(one.device_blocks)],
        one.word,
        one.reported,
        min(ticks, ledger.tick - one.since) if ticks else 0,
    )


def _request(request: SmallRequest, world: ServingWorld, names: _Names) -> Any:
    name = request.request_id
    entry = world.engine.core.ledger.requests.get(name)
    return (
        request.finished
        or (
            request.num_tokens,
            request.num_computed_tokens,
            request.num_output_placeholders,
            names.tables(request.tables),
            request.loading,
        ),
        None if entry is None else _entry(entry, world.engine.core.ledger, names),
        _tracked(name, world, names),
    )


def _entry(entry: RequestRecord, ledger: Ledger, names: _Names) -> Any:
    pins: list[int] = []
    if len(entry.pins):
        live = set(listed(ledger.live_pins(entry)))
        pins = [names.slots[slot] if slot in live else _NOBODY for slot in listed(entry.pins)]
    return (
        entry.word,
        pins,
        names.transfers.get(entry.awaits, _NOBODY) if entry.word & STATE_MASK == _DEFERRED else _NOBODY,
        max(0, entry.patience - ledger.tick) if entry.patience >= 0 else _NOBODY,
        entry.load > 0,
        entry.settled,
        entry.offered,
    )


def _tracked(name: str, world: ServingWorld, names: _Names) -> Any:
    scheduler, ledger = world.engine.scheduler, world.engine.core.ledger
    tracked: TrackedRequest | None = scheduler._tracked.get(name)
    if tracked is None:
        return None
    return (
        names.tables(tracked.tables),
        [len(keys) for keys in tracked.keys],
        tracked.local,
        # Of a request that has blocks: it is noted anew when it gets some.
        any(tracked.tables) and ledger.forgotten_at > tracked.admitted_at,
        tracked.trusted,
        tracked.next_offer,
        name in scheduler._held,
        name in scheduler._taken_back,
    )


def _engine(world: ServingWorld, names: _Names) -> Any:
    engine, transfers = world.engine, names.transfers
    live = engine.core.ledger.transfers
    requests = names.requests
    return (
        [requests[one.request_id] for one in engine.waiting],
        [requests[name] for name in engine.running],
        sorted(requests[name] for name in engine.preempted),
        [
            (transfers[id], sorted(copy.left), None if id in live else _job(world, id, names))
            for id, copy in engine.copies.items()
        ],
        # Those of copies that are over are all refused.
        sorted(
            (transfers[one.transfer], one.worker, one.good) if one.transfer in live else (_NOBODY, 0, False)
            for one in engine.reports
        ),
        [
            (
                requests[one.request.request_id],
                one.first,
                one.last,
                one.request.num_tokens,
                one.request.tables is one.owned,
                names.tables(one.tables),
            )
            for one in engine.computing
        ],
        [(requests[name], names.tables([held])) for name, held in engine.sending.items()],
    )


def _job(world: ServingWorld, id: int, names: _Names) -> Any:
    """What a copy touches that was given up: the ledger does not know it any more."""
    job = world.engine.copies[id].job
    device_blocks, host_blocks = job.pairs()
    chunk = world.options.blocks_per_chunk
    return (
        job.direction is _LOAD,
        [names.blocks[block] for block in listed(device_blocks)],
        [(names.slots[place // chunk], place % chunk) for place in listed(host_blocks)],
    )


def _scheduler(world: ServingWorld, names: _Names) -> Any:
    scheduler, ledger = world.engine.scheduler, world.engine.core.ledger
    requests = names.requests
    tried = _room_then(scheduler._tried_at, ledger) if scheduler._held else _NOBODY
    return (
        [names.transfers.get(job.transfer, _NOBODY) for job in scheduler._planned],
        [(requests[name], promise) for name, promise in scheduler._promises.items()],
        [
            (requests[one.request], one.good, one.num_computed_tokens, one.lost)
            for one in scheduler._ended_loads
        ],
        sorted({names.blocks.get(block, _NOBODY) for block in scheduler._given}),
        tried,
        scheduler._walk is not None and _walk(world),
    )


def _router(router: Router, names: _Names) -> Any:
    publisher = router.publisher
    return (
        sorted(router.known),
        [(type(change).__name__, *change) for change in publisher._changes],
        # Of a transfer that is live: its description goes with it.
        [(names.transfers[id], told) for id, told in publisher._payloads.items()],
    )


def _room_then(then: tuple[int, int], ledger: Ledger) -> int:
    """The slots that could be taken when something was tried; nothing, if a transfer has ended since, for
    then there is another room for ever."""
    return then[1] if then[0] == ledger.ended_at else _NOBODY


def _walk(world: ServingWorld) -> Any:
    walk = world.engine.scheduler._walk
    assert walk is not None
    ledger = world.engine.core.ledger
    forgotten = ledger.forgotten_at > walk._walked_at
    return (
        0 if forgotten or walk._ahead < walk._target else walk._ahead,
        walk._refused is not None and _room_then(walk._refused, ledger),
        walk._paid,
    )
