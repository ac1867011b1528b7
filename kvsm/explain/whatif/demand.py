"""What the requests of a log wanted: which blocks were looked up, and which were offered for a store.

    demand = read_demand(LogReader("log"), Trust())
    demand.operations       # lookups, offers and ends of requests, in the order of the log
    demand.chains[life]     # the blocks of one request, in prefix order, as numbers of keys

A log names few keys of a prompt where it is looked up: the slots that hit, and the first key that was missed.
The others are known when the request offers them: stored, skipped, or touched because the host has them. So
the chain of a request is put together from its whole life. Three facts place each key:

- the cursors (`BlocksOffered`) say which places of the request an offer covers;
- a store and a skip name their keys by request, in prefix order;
- a key covers its whole prefix, so the key before it is always the same. Once known, it is known for all
  requests. This tells which of the touched blocks belong to which request of a step.

A place whose key was never offered stays `UNKNOWN`: its request was aborted before, or may not store. So does
a place where several touched blocks may be, unless a later key of the prompt tells which one it is: a key in
the wrong place would be wrong for each prompt that shares it. Nothing behind an unknown key can be served.
`Demand.unknown_blocks` counts such places in lookups.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, NoReturn

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger, TransferRecord, follow
from kvsm.core.log import LogReader
from kvsm.core.log.fold import LogCondition, condition_of, walk
from kvsm.core.log.trust import Trust
from kvsm.errors import LogError
from kvsm.events import Offer, OffloadConfig, OffloadingEvent, Owners
from kvsm.explain.story.window import Window
from kvsm.ids import to_list
from kvsm.states.transfer import TransferState

_WHOLE_LOG = Window()

UNKNOWN = -1
"""In a chain: a block whose key the log does not name."""

_NO_PARENT = -2
_ROOT = -3
"""Stands before the first block of a prompt."""


class Lookup(NamedTuple):
    """A request is admitted, with its last lookup.

    life: number of the request's life, the place of its chain.
    first, end: the chunks of its chain that the host may serve, behind those that the device has.
    asked, on_device, on_host, resumed: as the log has them (`RequestAdmitted`).
    """

    seq: int
    step: int
    life: int
    first: int
    end: int
    asked: int
    on_device: int
    on_host: int
    resumed: bool = False


class Offers(NamedTuple):
    """Requests have computed more blocks. offers: (life, how many chunks of it are computed now)."""

    seq: int
    step: int
    offers: tuple[tuple[int, int], ...]


class Preempted(NamedTuple):
    """The request lost its device blocks."""

    seq: int
    step: int
    life: int


class Finished(NamedTuple):
    """The request is over. chunks: how many of its chunks it still had on the device, to offer them."""

    seq: int
    step: int
    life: int
    chunks: int


class Emptied(NamedTuple):
    """The cache was reset."""

    seq: int
    step: int


class CutOff(NamedTuple):
    """Another process went on: requests and copies ended, and what was stored is left."""

    seq: int
    step: int


Operation = Lookup | Offers | Preempted | Finished | Emptied | CutOff


class Demand(msgspec.Struct, frozen=True):
    """All that was wanted of the host in a log.

    config, condition: of the log.
    requests: for each life of a request, the request's name.
    keys: every key that the log names, by its number.
    chains: for each life of a request, the numbers of its keys.
    initial: keys that the host had where the log begins, the oldest first.
    first, last: events that were read.
    began_ns, ended_ns: their wall times.
    store_steps, load_steps: engine steps from the plan of a copy to its end, the median.
    copies: transfers that ended, after they were submitted. failed_copies: those that failed or were lost.
    unknown_blocks: looked-up blocks whose key the log does not name.
    """

    config: OffloadConfig
    condition: LogCondition
    requests: list[str]
    keys: list[bytes]
    chains: list[array[int]]
    operations: list[Operation]
    initial: list[int]
    first: int
    last: int
    began_ns: int
    ended_ns: int
    store_steps: int
    load_steps: int
    copies: int
    failed_copies: int
    unknown_blocks: int


def read_demand(
    reader: LogReader,
    trust: Trust,
    progress: Callable[[int], None] | None = None,
    window: Window = _WHOLE_LOG,
) -> Demand:
    """Reads the demand of a log. progress: called with the number of events read, from time to time.
    window: reads only these events. Blocks that a request had offered before are not known then.

    Raises `LogError` for a log that does not tell it, and what `kvsm.core.log.fold.walk` raises.
    """
    found = DemandReader(str(reader.directory))
    with trust.guarded(reader.directory):
        for moment in walk(reader, trust, window.first):
            if moment.event.seq not in window:
                if window.last is not None and moment.event.seq > window.last:
                    break
                moment.ledger.apply(moment.event)
                continue
            found.take(moment.ledger, moment.event, moment.following)
            if progress is not None and not moment.event.seq % 4096:
                progress(moment.event.seq)
    return found.result(condition_of(reader))


def without_stores(demand: Demand, lives: Collection[int]) -> Demand:
    """Return the demand if the stores of these lives were refused: they still look up, but offer nothing."""
    operations: list[Operation] = []
    for operation in demand.operations:
        if isinstance(operation, Offers):
            offers = tuple([offer for offer in operation.offers if offer[0] not in lives])
            if not offers:
                continue
            operation = operation._replace(offers=offers)
        elif isinstance(operation, Finished) and operation.life in lives:
            operation = operation._replace(chunks=0)
        operations.append(operation)
    return msgspec.structs.replace(demand, operations=operations)


class _Life:
    """A request while the log is read.

    offered: its cursor, in chunks.
    loaded: chunks that its load brings, if it brings the first one; else 0.
    """

    __slots__ = ("chain", "loaded", "number", "offered")

    def __init__(self, number: int) -> None:
        self.number, self.offered, self.loaded = number, 0, 0
        self.chain: array[int] = array("i")

    def put(self, place: int, key: int) -> None:
        """Note the key at a place. What is known already stays."""
        if place >= len(self.chain):
            self.chain.extend([UNKNOWN] * (place + 1 - len(self.chain)))
        if self.chain[place] == UNKNOWN:
            self.chain[place] = key

    def at(self, place: int) -> int:
        """The key at a place; `UNKNOWN` if it is not known."""
        return self.chain[place] if 0 <= place < len(self.chain) else UNKNOWN


class _Batch:
    """What the events of one offer name, until the cursors say whose it was."""

    def __init__(self) -> None:
        self.touched: list[int] = []
        self.in_flight: _Behind | None = None
        """All keys that are being stored; made when the first one is looked for."""
        self.stored: dict[str, list[int]] = {}
        self.skipped: dict[str, list[int]] = {}
        """Stored and skipped keys, by request, in prefix order."""

    def own(self, request: str) -> Sequence[int]:
        """The keys of a request that were stored or skipped, in prefix order.

        Keys that were skipped for lack of room, or because they were offered too seldom, follow the stored
        ones.
        """
        return [*self.stored.get(request, ()), *self.skipped.get(request, ())]


def _note(owned: dict[str, list[int]], owners: Owners, keys: Sequence[int]) -> None:
    start = 0
    for request, count in owners:
        owned.setdefault(request, []).extend(keys[start : start + count])
        start += count


class _Behind:
    """Keys of a batch by the previous key of the prompt. Keys with an unknown previous key are left out."""

    def __init__(self, keys: Iterable[int], parent: Sequence[int]) -> None:
        self._behind: dict[int, list[int]] = {}
        for key in dict.fromkeys(keys):
            if parent[key] != _NO_PARENT:
                self._behind.setdefault(parent[key], []).append(key)

    def all(self, before: int) -> Sequence[int]:
        """All keys behind `before`, in the order of the batch."""
        return self._behind.get(before, ())


class _Touched(_Behind):
    """The touched keys of a batch.

    They have the order of the requests in the batch, and of their prompts. A key that several requests share
    is there once, where the first of them offers it.
    """

    def __init__(self, keys: Sequence[int], parent: Sequence[int]) -> None:
        super().__init__(keys, parent)
        self._left = set(keys)
        self._is_certain = True
        """Whether each key that an earlier request of the batch has is known to be used."""

    def use(self, key: int) -> None:
        """Note that a request has this key."""
        self._left.discard(key)

    def next(self, before: int, wanted: int) -> int | None:
        """The key of the next request behind `before`; `UNKNOWN` if there is none, None if several may be it.

        wanted: the most touched keys of this request and of those behind it in the batch.
        """
        found = self.all(before)
        if len(found) < 2:
            return found[0] if found else UNKNOWN
        left = [key for key in found if key in self._left]
        # If none was used before, or no key is shared from here on, the next one is the first one left.
        if not (self._is_certain and left and (len(left) == len(found) or wanted <= len(self._left))):
            self._is_certain = False
            return None
        return left[0]


class DemandReader:
    """Folds the events of a log into a `Demand`. log: its name, for errors.

    Raises `LogError` for an event which shows that the demand cannot be read from the log.
    """

    def __init__(self, log: str) -> None:
        self.log = log
        self.lives: dict[str, _Life] = {}
        self.chains: list[array[int]] = []
        self.requests: list[str] = []
        self.operations: list[Operation] = []
        self.number_of: dict[bytes, int] = {}
        self.parent: array[int] = array("i")
        """The key before each key in every prompt."""
        self.batch = _Batch()
        self.steps: tuple[list[int], list[int]] = ([], [])
        """Steps that good stores, and good loads, took."""
        self.copies = self.failed_copies = 0
        self.planned_in: dict[int, int | None] = {}
        """The step in which each copy of this process was planned; None: before the log begins."""
        self.cursors_seen = False
        self.initial: list[int] = []
        self.events: tuple[OffloadingEvent, OffloadingEvent] | None = None
        self.config: OffloadConfig | None = None

    def take(self, ledger: Ledger, event: OffloadingEvent, following: OffloadingEvent | None) -> None:
        """Read one event, and apply it."""
        if self.events is None:
            self.config = ledger.config
            readable = filter(ledger.readable, ledger.index.values())
            oldest_first = sorted(readable, key=ledger.generation.__getitem__)
            self.initial = self.numbers(ledger.key_of[slot] for slot in oldest_first)
            self.planned_in = dict.fromkeys(ledger.transfers)
            self.events = event, event
        self.events = self.events[0], event
        take_facts = FACTS.get(type(event))
        if take_facts is not None:
            take_facts(self, ledger, event, following)
        changes = follow(ledger, event)
        if changes.planned is not None:
            self.planned_in[event.seq] = event.step
        for ended in changes.ended:
            self._note_end(ended, event)

    def result(self, condition: LogCondition) -> Demand:
        """All of it. Raises `LogError` if the log has no event, or does not tell the demand."""
        if self.events is None or self.config is None:
            raise LogError(f"{self.log}: there is no whole event")
        lookups = [one for one in self.operations if isinstance(one, Lookup)]
        if not lookups:
            raise LogError(
                f"{self.log}: no lookup in it tells how many blocks it asked for; an older kvsm wrote it, or "
                "an engine without kvsm's scheduler"
            )
        if not self.cursors_seen:
            raise LogError(
                f"{self.log}: no event in it tells how far requests have offered their blocks "
                "(BlocksOffered), so the blocks of a prompt are not known; whatif needs a log of "
                "kvsm's scheduler"
            )
        for known in self.chains:
            self._complete(known)
        first, last = self.events
        stores, loads = (max(1, round(median(steps))) if steps else 1 for steps in self.steps)
        return Demand(
            config=self.config,
            condition=condition,
            requests=self.requests,
            keys=list(self.number_of),
            chains=self.chains,
            operations=self.operations,
            initial=self.initial,
            first=first.seq,
            last=last.seq,
            began_ns=first.wall_ns,
            ended_ns=last.wall_ns,
            store_steps=stores,
            load_steps=loads,
            copies=self.copies,
            failed_copies=self.failed_copies,
            unknown_blocks=sum(self._unknown(one) for one in lookups),
        )

    def _unknown(self, one: Lookup) -> int:
        """How many keys of a lookup the log does not name."""
        known = self.chains[one.life][one.first : one.end]
        return one.end - one.first - len(known) + known.count(UNKNOWN)

    def refuse(self, why: str) -> NoReturn:
        """The log does not tell what is needed."""
        raise LogError(f"{self.log}: {why}")

    # What the handlers share.

    def numbers(self, keys: Iterable[bytes]) -> list[int]:
        """The numbers of keys; a new key gets the next one."""
        number_of, parent = self.number_of, self.parent
        found = []
        for key in keys:
            number = number_of.setdefault(key, len(parent))
            if number == len(parent):
                parent.append(_NO_PARENT)
            found.append(number)
        return found

    def life(self, request: str) -> _Life:
        """The life of this request; a new one if it is not known."""
        life = self.lives.get(request)
        if life is None:
            life = self.lives[request] = _Life(len(self.chains))
            self.chains.append(life.chain)
            self.requests.append(request)
        return life

    def _complete(self, known: array[int]) -> None:
        """Fill in the unknown keys of a chain before known ones, as far as the log determines them."""
        for place in range(len(known) - 1, 0, -1):
            if known[place - 1] == UNKNOWN != known[place]:
                known[place - 1] = max(self.parent[known[place]], UNKNOWN)

    def adopt(self, before: int, key: int) -> None:
        """Note which key stands before `key`."""
        if before != UNKNOWN and self.parent[key] == _NO_PARENT:
            self.parent[key] = before

    def _note_end(self, ended: TransferRecord, event: OffloadingEvent) -> None:
        if ended.id not in self.planned_in:
            return  # Its process has ended; whether the copy succeeded is unknown.
        planned = self.planned_in.pop(ended.id)
        if ended.state is TransferState.CANCELLED:
            return
        self.copies += 1
        if ended.state in (TransferState.FAILED, TransferState.LOST):
            self.failed_copies += 1
        elif ended.state is TransferState.COMPLETED and planned is not None:
            self.steps[ended.direction].append(event.step - planned)

    def place(
        self,
        ledger: Ledger,
        own: Sequence[int],
        touched: _Touched,
        life: _Life,
        places: range,
        wanted: int,
    ) -> None:
        """Find the keys of the chunks that a request has just offered.

        A place stays `UNKNOWN` if several keys may be there. Keys that are found later determine the keys
        before them.

        own: keys that were stored or skipped for it, in prefix order.
        touched: the touched keys of the batch, those of other requests among them.
        wanted: as in `_Touched.next`.
        """
        known, waiting, left = _Behind(own, self.parent), deque(own), set(own)
        for place in places:
            before = life.at(place - 1) if place else _ROOT
            key: int | None = life.at(place)
            if key == UNKNOWN and before != UNKNOWN and known.all(before):
                key = known.all(before)[0]
            elif key == UNKNOWN and places.stop - place == len(left):
                key = waiting[0]  # Only its own keys fill the places that are left.
            elif key == UNKNOWN and before != UNKNOWN:
                key = self._next(ledger, waiting, touched, before, wanted)
            if key is None or key == UNKNOWN:
                continue
            life.put(place, key)
            self.adopt(before, key)
            touched.use(key)
            left.discard(key)
            while waiting and waiting[0] not in left:
                waiting.popleft()

    def _next(
        self,
        ledger: Ledger,
        waiting: Sequence[int],
        touched: _Touched,
        before: int,
        wanted: int,
    ) -> int | None:
        """Return the key after `before` in a request; UNKNOWN or None if the log does not determine it."""
        key = touched.next(before, wanted)
        if key != UNKNOWN:
            return key
        # The key may be in flight from the same device block: such an offer leaves no event.
        in_flight = self._in_flight(ledger).all(before)
        if in_flight:
            return in_flight[0] if len(in_flight) == 1 else None
        return waiting[0] if waiting and self.parent[waiting[0]] == _NO_PARENT else UNKNOWN

    def _in_flight(self, ledger: Ledger) -> _Behind:
        if self.batch.in_flight is None:
            stored = chain.from_iterable(one.keys for one in ledger.transfers.values())
            self.batch.in_flight = _Behind(self.numbers(stored), self.parent)
        return self.batch.in_flight


# The kinds of events.


def _arrived(reader: DemandReader, _ledger: Ledger, event: ev.RequestArrived, _following: Any) -> None:
    reader.life(event.request)


def _admitted(reader: DemandReader, ledger: Ledger, event: ev.RequestAdmitted, _following: Any) -> None:
    if event.asked is None or event.on_device is None or event.on_host is None:
        return
    life, chunk = reader.life(event.request), ledger.config.blocks_per_chunk
    first, end = event.on_device // chunk, event.asked // chunk
    # A match that the engine does not load is released after this event.
    pins = to_list(ledger.requests[event.request].pins) if event.on_host else []
    hits = reader.numbers([ledger.key_of[slot] for slot in pins])
    before = life.at(first - 1) if first else _ROOT
    for place, key in enumerate(hits, first):
        life.put(place, key)
        reader.adopt(before, key)
        before = key
    stop = first + len(hits)
    if event.missed is not None:
        (missed,) = reader.numbers((event.missed,))
        if before == UNKNOWN or reader.parent[missed] in (before, _NO_PARENT):
            life.put(stop, missed)
            reader.adopt(before, missed)
    elif stop < end:
        # Nothing was missed: the last block is left to compute (S18), or the host was not asked.
        end = stop
    life.loaded = 0 if event.on_device else event.on_host // chunk
    reader.operations.append(
        Lookup(
            event.seq,
            event.step,
            life.number,
            first,
            end,
            event.asked,
            event.on_device,
            event.on_host,
            event.resumed,
        )
    )


def _slow_hit(reader: DemandReader, _ledger: Ledger, event: ev.SlowHitFound, _following: Any) -> None:
    if event.declined:
        reader.refuse("it declines a slow hit, and whatif is not validated for load_only_if_faster")


def _planned_store(reader: DemandReader, _ledger: Ledger, event: ev.StorePlanned, _following: Any) -> None:
    if not event.owners:
        reader.refuse(
            "it is of a lazy store, which does not name the blocks of a prompt; "
            "whatif is not validated for it"
        )
    if event.source:
        reader.refuse(f"it copies blocks from {event.source}; whatif is not validated for hand-overs")
    _note(reader.batch.stored, event.owners, reader.numbers(event.keys))


def _planned_load(reader: DemandReader, _ledger: Ledger, event: ev.LoadPlanned, _following: Any) -> None:
    if event.target:
        reader.refuse(f"it copies blocks to {event.target}; whatif is not validated for several tiers")


def _skipped(reader: DemandReader, _ledger: Ledger, event: ev.StoreSkipped, _following: Any) -> None:
    _note(reader.batch.skipped, event.owners, reader.numbers(event.keys))


def _touched(reader: DemandReader, ledger: Ledger, event: ev.BlocksTouched, _following: Any) -> None:
    reader.batch.touched += reader.numbers([ledger.key_of[slot] for slot in to_list(event.slots)])


def _offered(
    reader: DemandReader, ledger: Ledger, event: ev.BlocksOffered, following: OffloadingEvent | None
) -> None:
    reader.cursors_seen = True
    offers, touched = [], _Touched(reader.batch.touched, reader.parent)
    wanted = sum(_others(reader, ledger, offer) for offer in event.offers)
    for offer in event.offers:
        request, _, offered = offer
        if len(offered) > 1:
            reader.refuse(
                "it is of a model with several KV cache groups; whatif is not validated for that, because a "
                "log does not hold the windows and block sizes of the groups"
            )
        life, before = reader.life(request), ledger.requests[request].settled
        start, reached = before[0] if before else 0, offered[0]
        own = reader.batch.own(request)
        reader.place(ledger, own, touched, life, range(start, reached), wanted)
        wanted -= _others(reader, ledger, offer)
        life.offered = reached
        if before or reached != life.loaded:  # Otherwise its load moved the cursor: nothing is offered.
            offers.append((life.number, reached))
    reader.batch = _Batch()
    names = [request for request, _, _ in event.offers]
    if isinstance(following, ev.RequestFinished) and names == [following.request]:
        return  # The last offer of a request: its end says the same.
    if offers:
        reader.operations.append(Offers(event.seq, event.step, tuple(offers)))


def _others(reader: DemandReader, ledger: Ledger, offer: Offer) -> int:
    """Return how many chunks of an offer were neither stored nor skipped."""
    request, _, offered = offer
    before = ledger.requests[request].settled
    return offered[0] - (before[0] if before else 0) - len(reader.batch.own(request))


def _preempted(reader: DemandReader, _ledger: Ledger, event: ev.RequestPreempted, _following: Any) -> None:
    life = reader.life(event.request)
    life.offered = 0
    reader.operations.append(Preempted(event.seq, event.step, life.number))


def _finished(reader: DemandReader, _ledger: Ledger, event: ev.RequestFinished, _following: Any) -> None:
    life = reader.life(event.request)
    reader.batch = _Batch()
    reader.operations.append(Finished(event.seq, event.step, life.number, life.offered))
    del reader.lives[event.request]


def _reset(reader: DemandReader, _ledger: Ledger, event: ev.CacheReset, _following: Any) -> None:
    for life in reader.lives.values():
        life.offered = 0
    reader.operations.append(Emptied(event.seq, event.step))


def _restarted(reader: DemandReader, _ledger: Ledger, event: ev.Restarted, _following: Any) -> None:
    """The demand goes on. A client that asks again begins another request."""
    reader.batch = _Batch()
    reader.lives.clear()
    reader.planned_in.clear()
    reader.operations.append(CutOff(event.seq, event.step))


FACTS: dict[type[OffloadingEvent], Callable[[DemandReader, Ledger, Any, Any], None]] = {
    ev.RequestArrived: _arrived,
    ev.RequestAdmitted: _admitted,
    ev.SlowHitFound: _slow_hit,
    ev.RequestPreempted: _preempted,
    ev.RequestFinished: _finished,
    ev.StorePlanned: _planned_store,
    ev.StoreSkipped: _skipped,
    ev.LoadPlanned: _planned_load,
    ev.BlocksTouched: _touched,
    ev.BlocksOffered: _offered,
    ev.CacheReset: _reset,
    ev.Restarted: _restarted,
}
"""What only this kind of event says about what was wanted, before it is applied."""
