"""The life of one thing, told from the fold: a line an event, with causes, and its state before and after.

    for line in tell("log", BlockLife(42)):
        print(line.event, line.text, line.before, line.after)

The log is folded from its beginning, and each event that concerns the thing is told. Causes come from the
state, not from the wording of events: a slot is told who evicted it because the eviction names the transfer
that it makes room for, and a request is told why it missed because the keys that it missed were followed
all the way (`fates.py`), in a pass of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import msgspec

from kvsm import events as ev
from kvsm.errors import LogError
from kvsm.events import OffloadingEvent, Owners
from kvsm.ids import to_list
from kvsm.ledger import Ledger, TransferRecord
from kvsm.log import LogReader
from kvsm.replay.concern import Concern, concern, names_of
from kvsm.replay.fates import Fates, describe_transfer, kind_of, made_room_for, makers_of
from kvsm.replay.fold import Moment, walk
from kvsm.replay.render import render, render_ids, render_key, render_keys, render_owners
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState

MOST_TOLD = 4
"""States of at most this many blocks stand in one line."""


class StoryLine(msgspec.Struct, frozen=True):
    """One event in the life of a thing. before, after: its state; the same if only a cause is told."""

    event: int
    step: int
    wall_ns: int
    kind: str
    text: str
    before: str
    after: str


class Life(Protocol):
    """A thing whose life can be told."""

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        """Its slots among those that the event concerns; None if the event does not concern it."""

    def state(self, ledger: Ledger) -> str: ...


class BlockLife(NamedTuple):
    """A host slot, through all blocks that it held."""

    slot: int

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        if self.slot in found.slots:
            return (self.slot,)
        if isinstance(moment.event, ev.BlocksEvicted) and self.slot in to_list(moment.event.moved):
            return (self.slot,)
        return None

    def state(self, ledger: Ledger) -> str:
        return BLOCK_WORDS.describe(ledger.blocks.words[self.slot])

    def __str__(self) -> str:
        return f"slot {self.slot}"


class KeyLife:
    """All blocks whose key starts with these hex digits. The state told is that of the keys of one event."""

    def __init__(self, digits: str) -> None:
        self.digits = digits.lower().removesuffix("..")
        self._met: dict[bytes, None] = {}
        """Keys of ours that the event in hand concerns."""

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        ledger, event = moment.ledger, moment.event
        named: Sequence[bytes] = getattr(event, "keys", ())
        missed = getattr(event, "missed", None)
        self._met = dict.fromkeys(key for key in (*named, missed) if key is not None and self._is_ours(key))
        if isinstance(event, ev.StorePlanned):
            return [slot for slot, key in zip(to_list(event.slots), named) if key in self._met] or None
        slots = [slot for slot in found.slots if self._is_held(ledger, slot)]
        self._met.update(dict.fromkeys(ledger.key_of[slot] for slot in slots))
        return slots if self._met else None

    def state(self, ledger: Ledger) -> str:
        held = [ledger.index[key] for key in self._met if key in ledger.index]
        words = [
            f"slot {slot} {BLOCK_WORDS.describe(ledger.blocks.words[slot])}" for slot in held[:MOST_TOLD]
        ]
        return "; ".join(words) + ("; ..." if len(held) > MOST_TOLD else "") if held else "not on the host"

    def _is_held(self, ledger: Ledger, slot: int) -> bool:
        key = ledger.key_of[slot]
        return self._is_ours(key) and ledger.index.get(key) == slot

    def _is_ours(self, key: bytes) -> bool:
        return key.hex().startswith(self.digits)

    def __str__(self) -> str:
        return f"key {self.digits}"


class RequestLife(NamedTuple):
    """A request, through all its lives if its name was used again. name: whole, or without what vLLM's server
    puts behind the name that a client gave or got: a hyphen, and eight characters of its own."""

    name: str

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:
        named = (*found.requests, *names_of(makers_of(moment) or ()))
        return () if any(map(self._is, named)) else None

    def state(self, ledger: Ledger) -> str:
        states = [request.state.name for name, request in ledger.requests.items() if self._is(name)]
        return ", ".join(states) or "not there"

    def _is(self, name: str) -> bool:
        return name == self.name or name.startswith(f"{self.name}-")

    def __str__(self) -> str:
        return f"request {self.name}"


class TransferLife(NamedTuple):
    """One copy of several blocks."""

    id: int

    def met_by(self, moment: Moment, found: Concern) -> Sequence[int] | None:  # noqa: ARG002
        return () if self.id in found.transfers else None

    def state(self, ledger: Ledger) -> str:
        transfer = ledger.transfers.get(self.id)
        return "not planned" if transfer is None else transfer.state.name

    def __str__(self) -> str:
        return f"transfer {self.id}"


def tell(log: str | os.PathLike[str] | LogReader, target: Life) -> Iterator[StoryLine]:
    """The lines of a thing's life, oldest first; none if the log knows nothing of it.

    Pass a `LogReader` to ask it afterwards for gaps and a torn tail. Raises `LogError` if there is no log,
    or no such slot.
    """
    reader = log if isinstance(log, LogReader) else LogReader(log)
    _check_slot(reader, target)
    narrator = _Narrator(target, Fates(_missed_by(reader, target)))
    for moment in walk(reader):
        line = narrator.follow(moment)
        if line is not None:
            yield line


def _check_slot(reader: LogReader, target: Life) -> None:
    host_blocks = reader.head.config.host_blocks
    if isinstance(target, BlockLife) and target.slot >= host_blocks:
        raise LogError(f"{reader.directory}: there is no slot {target.slot}; the pool has {host_blocks}")


def _missed_by(reader: LogReader, target: Life) -> Callable[[bytes], bool]:
    """Which keys must be followed, so that a miss of the target can be explained."""
    if isinstance(target, KeyLife):
        return lambda key: key.hex().startswith(target.digits)
    if not isinstance(target, RequestLife):
        return lambda _: False
    missed = {
        event.missed
        for segment in reader.segments()
        for event in segment.events()
        if isinstance(event, ev.HitMatched) and event.request == target.name and event.missed is not None
    }
    return missed.__contains__


class _Narrator:
    """Folds one moment after another, and puts those that meet the target into words."""

    def __init__(self, target: Life, fates: Fates) -> None:
        self._target, self._fates = target, fates
        self._tellers: dict[type[OffloadingEvent], Callable[[Moment, Any, Sequence[int]], str]] = {
            ev.HitMatched: self._matched,
            ev.RequestPreempted: self._left,
            ev.RequestFinished: self._left,
            ev.RequestDeferred: self._deferred,
            ev.BlocksEvicted: self._evicted,
            ev.StorePlanned: self._store_planned,
            ev.LoadPlanned: self._load_planned,
            ev.TransfersSubmitted: self._submitted,
            ev.WorkerReported: self._reported,
            ev.TransferCancelled: self._given_up,
            ev.TransferLost: self._given_up,
            ev.BlocksOffered: self._offered,
            ev.StoreSkipped: self._skipped,
            ev.CacheReset: self._reset,
        }

    def follow(self, moment: Moment) -> StoryLine | None:
        """Fold the moment's event; its line, if it concerns the target."""
        ledger, event, _ = moment
        found = concern(ledger, event)
        slots = self._target.met_by(moment, found)
        text = before = ""
        if slots is not None:
            before = self._target.state(ledger)
            text = self._tell(moment, slots)
        self._fates.before(moment, found)
        ended = ledger.apply(event)
        self._fates.after(moment, ended)
        if slots is None:
            return None
        text += self._outcome(event, ended)
        after = self._state_after(ledger, ended, before)
        return StoryLine(event.seq, event.step, event.wall_ns, event.kind, text, before, after)

    def _tell(self, moment: Moment, slots: Sequence[int]) -> str:
        teller = self._tellers.get(type(moment.event))
        if teller is not None:
            return teller(moment, moment.event, slots)
        return _PLAIN.get(type(moment.event), render)(moment.event)

    def _state_after(self, ledger: Ledger, ended: TransferRecord | None, before: str) -> str:
        """A transfer that ended and a request that was released are in the ledger no more."""
        target = self._target
        if isinstance(target, TransferLife) and ended is not None and ended.id == target.id:
            return ended.state.name
        if isinstance(target, TransferLife) and target.id not in ledger.transfers and before == "PLANNED":
            return TransferState.CANCELLED.name
        if isinstance(target, RequestLife) and target.name not in ledger.requests and before != "not there":
            return RequestState.RELEASED.name
        return target.state(ledger)

    def _outcome(self, event: OffloadingEvent, ended: TransferRecord | None) -> str:
        """What the last worker's report came to."""
        if ended is None or not isinstance(event, ev.WorkerReported):
            return ""
        store = kind_of(ended) == "store"
        if ended.state is TransferState.COMPLETED:
            return "; the last one: " + ("stored, and can be matched" if store else "loaded")
        if ended.state is TransferState.FAILED:
            return "; the last one: " + (
                "failed, and nothing is stored" if store else "failed, and what it read is void"
            )
        return "; the last one: what the reset left is drained"

    # One teller a kind. `slots`: the target's own among those that the event concerns.

    def _matched(self, moment: Moment, event: ev.HitMatched, slots: Sequence[int]) -> str:
        matched = to_list(event.slots)
        if slots:
            place = matched.index(slots[0]) + 1
            return f"request {event.request} matches it (block {place} of {len(matched)})"
        hits = f"matches {render_ids('slot', matched)}" if matched else "matches nothing"
        if event.missed is None:
            return f"request {event.request} {hits}"
        why = self._fates.why(moment.ledger, event.missed)
        return f"request {event.request} {hits}; it misses key {render_key(event.missed)}: {why}"

    def _left(self, moment: Moment, event: Any, slots: Sequence[int]) -> str:
        preempted = isinstance(event, ev.RequestPreempted)
        does = "is preempted" if preempted else "is aborted" if event.aborted else "finishes"
        told = f"request {event.request} {does}" + (", and gives its match back" if slots else "")
        request = moment.ledger.requests.get(event.request)
        if preempted and request is not None and request.offered:
            told += "; its blocks are offered anew"
        return told

    def _offered(self, moment: Moment, event: ev.BlocksOffered, slots: Sequence[int]) -> str:  # noqa: ARG002
        """How far the target's blocks have been dealt with: what is new, by group, and what waits."""
        assert isinstance(self._target, RequestLife)
        name = self._target.name
        request = moment.ledger.requests.get(name)
        before = () if request is None else request.settled
        told: list[str] = []
        for settled, offered in [(one[1], one[2]) for one in event.offers if one[0] == name]:
            starts = before or (0,) * len(settled)
            for group, (start, end, last) in enumerate(zip(starts, settled, offered)):
                of_group = f" of group {group}" if len(settled) > 1 else ""
                told += [f"{_range(start, end)}{of_group} settled"] if end > start else []
                told += [f"{_range(end, last)}{of_group} offered, and not settled yet"] if last > end else []
        return f"request {name}: {'; '.join(told) or 'no block is offered'}"

    def _skipped(self, moment: Moment, event: ev.StoreSkipped, slots: Sequence[int]) -> str:  # noqa: ARG002
        owners: Owners = event.owners
        keys: Sequence[bytes] = event.keys
        if isinstance(self._target, RequestLife):
            keys = _share(owners, keys, self._target.name)
            owners = ((self._target.name, len(keys)),)
        return f"offered by {render_owners(owners)}, not stored: {render_keys(keys)} ({event.reason})"

    def _reset(self, moment: Moment, event: ev.CacheReset, slots: Sequence[int]) -> str:  # noqa: ARG002
        told = f"reset: epoch {event.epoch} begins"
        target = self._target
        request = moment.ledger.requests.get(target.name) if isinstance(target, RequestLife) else None
        anew = request is not None and request.offered
        return told + (f"; the blocks of {target} are offered anew" if anew else "")

    def _deferred(self, moment: Moment, event: ev.RequestDeferred, slots: Sequence[int]) -> str:  # noqa: ARG002
        waits_for = describe_transfer(moment.ledger, event.transfer)
        return f"request {event.request} waits for {waits_for}, until tick {event.until} at most"

    def _evicted(self, moment: Moment, event: ev.BlocksEvicted, slots: Sequence[int]) -> str:
        cause = made_room_for(moment)
        victims = to_list(event.slots)
        if slots and slots[0] not in victims:
            return f"passed over by the eviction that makes room for {cause}"
        named = slots or victims
        keys = [moment.ledger.key_of[slot] for slot in named]
        what = render_keys(keys) if slots else f"{render_ids('slot', named)}, {render_keys(keys)},"
        return f"{what} evicted to make room for {cause}"

    def _store_planned(self, moment: Moment, event: ev.StorePlanned, slots: Sequence[int]) -> str:
        planned, blocks, whose = (
            to_list(event.slots),
            to_list(event.device_blocks),
            render_owners(event.owners),
        )
        if not slots:
            if isinstance(self._target, RequestLife) and len(event.owners) > 1:
                own = _share(event.owners, event.keys, self._target.name)
                whose += f" ({self._target}: {render_keys(own)})"
            return (
                f"store {event.seq} of {whose} is planned: {render_keys(event.keys)}, "
                f"{render_ids('device block', blocks)} to {render_ids('slot', planned)}"
            )
        place = planned.index(slots[0])
        chunk = moment.ledger.config.blocks_per_chunk
        source = render_ids("device block", blocks[place * chunk : (place + 1) * chunk])
        key = render_key(event.keys[place])
        return f"allocated for key {key}, from {source}, by store {event.seq} of {whose}"

    def _load_planned(self, moment: Moment, event: ev.LoadPlanned, slots: Sequence[int]) -> str:
        loaded, blocks = to_list(event.slots), to_list(event.device_blocks)
        if event.voided:
            return f"request {event.request} cannot load: a block of its match was voided"
        parts = to_list(event.parts)
        if not slots:
            named = f"{render_ids('part', parts)} of {render_ids('slot', loaded)}"
            what = named if parts else render_ids("slot", loaded)
            return (
                f"load {event.seq} of request {event.request} is planned: {what} "
                f"to {render_ids('device block', blocks)}"
            )
        if slots[0] not in loaded:
            return f"request {event.request} loads less than it matched, and gives this block back"
        what, targets = _targets(loaded.index(slots[0]), parts, blocks, moment.ledger.config.blocks_per_chunk)
        targets_told = render_ids("device block", targets)
        return f"load {event.seq} of request {event.request} will read {what} into {targets_told}"

    def _submitted(self, moment: Moment, event: ev.TransfersSubmitted, slots: Sequence[int]) -> str:
        ledger, ids = moment.ledger, event.transfers
        if isinstance(self._target, TransferLife):
            ids = (self._target.id,)
        elif isinstance(self._target, RequestLife):
            name = self._target.name
            ids = tuple(id for id in ids if name in names_of(ledger.transfers[id].owners))
        else:
            ids = tuple(id for id in ids if not set(to_list(ledger.transfers[id].slots)).isdisjoint(slots))
        return f"submitted: {', '.join(describe_transfer(ledger, id) for id in ids)}"

    def _reported(self, moment: Moment, event: ev.WorkerReported, slots: Sequence[int]) -> str:  # noqa: ARG002
        how = "good" if event.good else "failed"
        return f"worker {event.worker} reports {describe_transfer(moment.ledger, event.transfer)}: {how}"

    def _given_up(self, moment: Moment, event: Any, slots: Sequence[int]) -> str:  # noqa: ARG002
        ledger, name = moment.ledger, describe_transfer(moment.ledger, event.transfer)
        transfer = ledger.transfers.get(event.transfer)
        if transfer is None or isinstance(event, ev.TransferCancelled):
            return f"{name} is cancelled"
        memory = "slots" if kind_of(transfer) == "store" else "slots and device blocks"
        return (
            f"{name} is given up: a worker has not reported since tick {transfer.since}; "
            f"its {memory} are never used again"
        )


def _range(start: int, end: int) -> str:
    """Blocks of a request from `start` to before `end`: `block 3`, `blocks 3..5`."""
    return f"block {start}" if end - start == 1 else f"blocks {start}..{end - 1}"


def _share(owners: Owners, keys: Sequence[bytes], name: str) -> list[bytes]:
    """Those of the keys that are this request's."""
    ends = [0, *accumulate(count for _, count in owners)]
    return [
        key
        for (owner, _), (start, end) in zip(owners, pairwise(ends))
        if owner == name
        for key in keys[start:end]
    ]


def _targets(
    place: int, parts: Sequence[int], blocks: Sequence[int], chunk: int
) -> tuple[str, Sequence[int]]:
    """What is loaded of the slot at this place of a load, and into which device blocks."""
    if not parts:
        return "it", blocks[place * chunk : (place + 1) * chunk]
    own = [(part % chunk, block) for part, block in zip(parts, blocks) if part // chunk == place]
    return f"{render_ids('part', [part for part, _ in own])} of it", [block for _, block in own]


_PLAIN: dict[type[OffloadingEvent], Callable[[Any], str]] = {
    ev.RequestArrived: lambda event: f"request {event.request} arrives",
    ev.HitReleased: lambda event: f"request {event.request} gives its match back",
    ev.KeysRecalled: lambda event: f"{render_keys(event.keys)}: the policy remembers evicting it",
    ev.ReportRejected: lambda event: (
        f"a report of worker {event.worker} on transfer {event.transfer} is rejected: {event.reason}"
    ),
    ev.BlocksTouched: lambda _: "used without a load: the device had it too",
    ev.FlushRequested: lambda event: f"the engine waits for {render_ids('transfer', event.transfers)}",
    ev.OffersCounted: lambda event: f"{render_keys(event.keys)}: offered once more",
    ev.Ticked: lambda event: f"tick {event.tick}: it has waited long enough",
}
"""Events that are told without a look at the ledger."""
