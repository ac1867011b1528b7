"""What an event concerns: slots, device blocks, transfers, requests and keys.

An event concerns what its fields name, and what it reaches besides (`kvsm.events.REACHES`): a worker's report
names a transfer, and changes the slots that the transfer writes. Those are found in the ledger as it is right
before the event. So a new kind of event needs no code here unless it has a field of a new name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvsm.core.ledger import Ledger, indexed_slots
from kvsm.events import KINDS, REACHES, OffloadingEvent, Owners, Reach
from kvsm.ids import to_list
from kvsm.states.block import BLOCK_WORDS, EVICTED_WORD, BlockState


class Concern(NamedTuple):
    """The things of each sort that an event concerns, each once."""

    slots: Sequence[int] = ()
    device_blocks: Sequence[int] = ()
    transfers: Sequence[int] = ()
    requests: Sequence[str] = ()
    keys: Sequence[bytes] = ()

    def meets(self, other: Concern) -> bool:
        """Whether the two have anything in common."""
        return any(not set(ours).isdisjoint(theirs) for ours, theirs in zip(self, other))


def concern(ledger: Ledger, event: OffloadingEvent) -> Concern:
    """What `event` concerns, in a ledger to which it has not been applied yet."""
    named = named_by_fields(event)
    reached = [FINDERS[reach](ledger, event, named) for reach in REACHES[type(event)]]
    return _union([named, *reached]) if reached else named


def names_of(owners: Owners) -> list[str]:
    """The requests among the owners of a store, each once."""
    return [*dict.fromkeys(name for name, _ in owners)]


def _union(parts: Sequence[Concern]) -> Concern:
    return Concern(*(tuple(dict.fromkeys(chain.from_iterable(sort))) for sort in zip(*parts)))


# What the fields name.

NAMED_BY_FIELDS: dict[str, tuple[str, Callable[[Any], Iterable[Any]]] | None] = {
    "request": ("requests", lambda name: (name,)),
    "lease": ("requests", lambda name: (name,) if name else ()),
    "owners": ("requests", names_of),
    "offers": ("requests", lambda offers: [name for name, _, _ in offers]),
    "slots": ("slots", to_list),
    "moved": ("slots", to_list),
    "device_blocks": ("device_blocks", to_list),
    "transfer": ("transfers", lambda id: (id,)),
    "transfers": ("transfers", tuple),
    "keys": ("keys", tuple),
    "missed": ("keys", lambda key: () if key is None else (key,)),
    # These say how, how many, when or why.
    **dict.fromkeys(("config", "machines", "schema", "aborted", "voided", "good", "reason")),
    **dict.fromkeys(
        ("parts", "until", "worker", "epoch", "tick", "error", "source", "target", "queued_us", "copied_us")
    ),
    **dict.fromkeys(
        (
            "asked",
            "on_device",
            "on_host",
            "kept",
            "weights",
            "cold",
            "life",
            "ended",
            "resumed",
            "hand_over",
            "parents",
            "session",
            "outcome",
            "leased",
            "ttl_ms",
            "why",
            "start_us",
            "block_ns",
            "token_ns",
            "blocks",
            "blocks_ahead",
            "tokens",
            "load_us",
            "compute_us",
            "declined",
        )
    ),
}
"""Which sort of thing a field names, whatever the kind of event, and how to read it. None: nothing."""

_FIELDS = {
    kind: [(field, *how) for field in kind.__struct_fields__[3:] if (how := NAMED_BY_FIELDS[field])]
    for kind in KINDS
}


def named_by_fields(event: OffloadingEvent) -> Concern:
    """What the fields of an event name. What it reaches besides is not there."""
    found: dict[str, Iterable[Any]] = {}
    for field, sort, read in _FIELDS[type(event)]:
        things = read(getattr(event, field))
        found[sort] = (*found[sort], *things) if sort in found else things
    return Concern(**found)  # type: ignore[arg-type]


# What it reaches besides.


def _plan(_ledger: Ledger, event: Any, _named: Concern) -> Concern:
    return Concern() if getattr(event, "voided", False) else Concern(transfers=(event.seq,))


def _pins(ledger: Ledger, _event: Any, named: Concern) -> Concern:
    requests = [ledger.requests[name] for name in named.requests if name in ledger.requests]
    return Concern(slots=[slot for one in requests for slot in to_list(ledger.live_pins(one))])


def _transfers(ledger: Ledger, _event: Any, named: Concern) -> Concern:
    return _touched_by(ledger, named.transfers)


def _touched_by(ledger: Ledger, ids: Sequence[int]) -> Concern:
    transfers = [ledger.transfers[id] for id in ids if id in ledger.transfers]
    waiting = [one.name for one in ledger.deferred.values() if one.awaits in ids]
    return Concern(
        slots=[slot for one in transfers for slot in to_list(one.slots)],
        device_blocks=[block for one in transfers for block in to_list(one.device_blocks)],
        transfers=ids,
        requests=[name for one in transfers for name, _ in one.owners] + waiting,
    )


def _waits(ledger: Ledger, event: Any, _named: Concern) -> Concern:
    return Concern(requests=[one.name for one in ledger.deferred.values() if one.patience <= event.tick])


def _cache(ledger: Ledger, _event: Any, _named: Concern) -> Concern:
    touched = _touched_by(ledger, tuple(ledger.transfers))
    offering = [one.name for one in ledger.requests.values() if one.offered]
    return touched._replace(
        slots=indexed_slots(ledger).tolist(),
        device_blocks=[*touched.device_blocks, *ledger.provenance.brought],
        requests=[*touched.requests, *offering],
    )


def _process(ledger: Ledger, event: Any, _named: Concern) -> Concern:
    words = ledger.blocks.view
    blocks = max(ledger.config.device_blocks, event.config.device_blocks)
    return Concern(
        slots=np.flatnonzero((words != _FREE_WORD) & (words != EVICTED_WORD)).tolist(),
        device_blocks=range(blocks),
        transfers=tuple(ledger.transfers),
        requests=tuple(ledger.requests),
    )


_FREE_WORD = BLOCK_WORDS.encode(BlockState.FREE)

FINDERS: dict[Reach, Callable[[Ledger, Any, Concern], Concern]] = {
    Reach.PLAN: _plan,
    Reach.PINS: _pins,
    Reach.TRANSFERS: _transfers,
    Reach.WAITS: _waits,
    Reach.CACHE: _cache,
    Reach.PROCESS: _process,
}
"""How to find what an event reaches."""
