"""Stores: which offered blocks are stored, which are skipped and why, and evictions that make room."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence, Set
from enum import Enum
from itertools import accumulate, chain
from typing import Any, cast

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.core.offloader.admission import NotStored, Room, ask, may_refuse
from kvsm.core.offloader.arguments import (
    checks_request,
    ids_of,
    integers,
    keys_of,
    offers_of,
    one_key,
    owners_of,
    parents_of,
    source_name,
)
from kvsm.core.offloader.emitter import (
    EventEmitter,
    LogFlush,
    checked_device_blocks,
    checked_ids,
    has_room_for_transfer,
    touch_slots,
)
from kvsm.core.offloader.transferring import host_blocks, planned_job
from kvsm.core.plan import TransferJob
from kvsm.core.policies import Choice
from kvsm.errors import WrongArgument
from kvsm.events import STORE, Offer, Owners, Parents, SkipReason
from kvsm.ids import NO_IDS, IdArray, Ids, listed, pack, unpack
from kvsm.states.block import STORED
from kvsm.states.words import STATE_MASK

_NONE: Mapping[int, bytes] = {}


class PreparedStore(msgspec.Struct, frozen=True, gc=False):
    """The result of an offer.

    job: the copy to submit; None if nothing is stored.
    keys: the keys that will be stored, in the job's order.
    deferred: places in the offer to offer again, ascending: in flight, or without room.
    resident: number of offered keys that the host has already.
    evicted: keys that were evicted to make room.
    stored: the places of `keys` in the offer.
    lacks_room: whether some keys were deferred because the host was full.
    refused: places that the policy did not admit. They need not be offered again by this request.
    retry: whether some deferred keys waited for blocks of this offer that were then refused, or for their
        room: there is no copy to wait for, so they may be offered again at once.
    """

    job: TransferJob | None
    keys: tuple[bytes, ...] = ()
    deferred: tuple[int, ...] = ()
    resident: int = 0
    evicted: Sequence[bytes] = ()
    stored: Sequence[int] = ()
    lacks_room: bool = False
    refused: Sequence[int] = ()
    retry: bool = False


class Admission(Enum):
    """The decision for an offered block that is not resident and is not skipped."""

    STORE = "store it"
    BEING_STORED = "it is being stored, from this very block"


@checks_request
def prepare_store(
    core: EventEmitter,
    request: str,
    keys: Sequence[bytes],
    device_blocks: Sequence[int],
    parent: bytes | None = None,
) -> PreparedStore:
    """Offer computed blocks: the i-th chunk of device_blocks holds the content of keys[i].

    New keys are stored, from the first on, while there is room. A resident key is touched. A key whose store
    from another block is in flight, or whose device block has another copy in flight, is deferred (S13). Keys
    that are not stored are recorded (`StoreSkipped`).

    parent: the key of the block before keys[0]; b"": keys[0] begins a prompt. None: the last block that the
        request has matched or offered here. The log does not have that key: after a resume, pass it. The
        policy evicts a block before its parent.
    """
    keys = keys_of("prepare_store", keys)
    if parent is None:
        parent = core.last_keys.get(request, b"")
        if parent in keys:  # The request repeats an offer, so its last key is no parent of it.
            parent = b""
    parents = {0: one_key("prepare_store", "parent", parent)}
    prepared = _store(core, "prepare_store", ((request, len(keys)),), keys, device_blocks, (), parents)
    if keys:
        core.last_keys[request] = keys[-1]
    return prepared


def store(
    core: EventEmitter,
    owners: Owners,
    keys: Sequence[bytes],
    device_blocks: Sequence[int],
    again: Collection[int] = (),
    spared: Collection[int] = (),
    parents: Mapping[int, bytes] = _NONE,
    required: Collection[int] = (),
) -> PreparedStore:
    """`prepare_store` for several requests at once, as one transfer.

    owners: (request, number of its keys) pairs, in the order of the keys; empty if no request owns the keys.
    again: places in the offer that were offered before. If they are deferred again, no `StoreSkipped` is
        emitted for them.
    spared: slots that are not evicted for this offer.
    parents: place in the offer -> the key of the preceding block, on the host or in the offer; b"": the block
        begins a prompt. Without an entry, a block follows the one before it in the offer, and the first block
        of a request begins a prompt.
    required: places that the policy may not refuse: another engine waits for these blocks.
    """
    keys = keys_of("store", keys)
    if type(again) not in (tuple, set, frozenset):
        again = integers("store", "again", cast(Sequence[int], again))
    spared = _spared(core, "store", spared)
    owners, parents = owners_of("store", owners, len(keys)), parents_of("store", parents)
    return _store(core, "store", owners, keys, device_blocks, again, parents, spared, required)


def _store(
    core: EventEmitter,
    call: str,
    owners: Owners,
    keys: tuple[bytes, ...],
    device_blocks: Sequence[int],
    again: Collection[int],
    parents: Mapping[int, bytes],
    spared: Collection[int] = (),
    required: Collection[int] = (),
) -> PreparedStore:
    sources, chunk = checked_device_blocks(core, call, device_blocks), core.config.blocks_per_chunk
    if len(sources) != len(keys) * chunk:
        problem = f"has {len(sources)} blocks; {len(keys)} keys have {len(keys) * chunk}"
        raise WrongArgument(call, "device_blocks", problem)
    if chunk > 1:
        _check_chunks(call, sources, chunk)
    found = core.ledger.index.find(keys)
    new: Sequence[int] = range(len(keys))
    deferred: Sequence[int] = ()
    resident: Mapping[int, int] = {}
    if found.count(None) < len(found) or not _all_new(core, keys, sources):
        new, deferred, resident = _partition(core, owners, keys, listed(sources), found, again)
        if resident:
            runs = _runs(core, owners, parents, keys, list(resident.values()), list(resident), new)
            touch_slots(core, list(resident), runs)
    if not len(new):
        return PreparedStore(None, (), tuple(deferred), len(resident))
    protected = [*resident, *spared]
    answer, retry = NotStored(), False
    if len(new) > len(core.ledger.free):
        answer = _ask(core, owners, keys, new, deferred, parents, protected, required)
        retry = _may_retry(core, keys, sources, deferred, answer)
    refused, unasked = answer
    if refused or unasked:
        new = sorted(set(new).difference(refused, unasked))
    stored = keys if len(new) == len(keys) else tuple([keys[place] for place in new])
    room, choice = _room_for(core, stored, protected)
    left = sorted([*new[room:], *unasked]) if unasked else new[room:]
    lacks_room = len(left) > 0 and has_room_for_transfer(core)
    if len(left):
        reason = SkipReason.POOL_FULL if lacks_room else SkipReason.TOO_MANY_TRANSFERS
        _skip_places(core, owners, keys, left, reason, again)
        deferred = sorted([*deferred, *left])
        new, stored = new[:room], stored[:room]
    # Skips were emitted before, because the plan must be the next event after the eviction.
    evicted = () if choice is None else _evict(core, choice)
    job = None
    if room:
        slots = pack(core.ledger.free.first(room))
        runs = _runs(core, owners, parents, keys, new, listed(unpack(slots)))
        planned = owners
        if len(new) < len(keys):
            planned, sources = _owners_of(owners, new), _sources_of(core, sources, new)
        job = _plan_store(core, planned, stored, slots, sources, runs)
    # Emit the refusals last: their fold changes the policy, and `admits` and `choose` must see one state.
    _skip_places(core, owners, keys, refused, SkipReason.NOT_ADMITTED, ())
    return PreparedStore(
        job, stored, tuple(deferred), len(resident), evicted, new, lacks_room, refused, retry
    )


def touch(core: EventEmitter, keys: Sequence[bytes], parents: Mapping[int, bytes] = _NONE) -> None:
    """Record a use of keys without a load: the device had the blocks too. Unknown keys are ignored.

    parents: as for `store`.
    """
    keys = keys_of("touch", keys)
    found = core.ledger.index.find(keys)
    parents = parents_of("touch", parents)
    resident = _first_places(found, [slot is not None and core.ledger.readable(slot) for slot in found])
    if resident:
        slots = list(resident)
        runs = _runs(core, (), parents, keys, list(resident.values()), slots) if parents else ()
        touch_slots(core, slots, runs)


def import_blocks(
    core: EventEmitter,
    owners: Owners,
    keys: Sequence[bytes],
    source: str,
    parents: Mapping[int, bytes] = _NONE,
    spared: Collection[int] = (),
) -> PreparedStore:
    """Plan a store of these keys whose bytes do not come from the device.

    owners, parents, spared: as for `store`.
    source: where the bytes come from, for people: "engine p-1".

    The job has only host blocks. Resident keys are touched; keys whose store is in flight are ignored. Keys
    without room are recorded (`StoreSkipped`) and not deferred: they are not offered again.
    """
    keys = keys_of("import_blocks", keys)
    owners, parents = owners_of("import_blocks", owners, len(keys)), parents_of("import_blocks", parents)
    source = source_name("import_blocks", source)
    spared = _spared(core, "import_blocks", spared)
    ledger = core.ledger
    found = ledger.index.find(keys)
    resident = _first_places(found, [slot is not None and ledger.readable(slot) for slot in found])
    new = list(
        {key: place for place, key in reversed(list(enumerate(keys))) if found[place] is None}.values()
    )
    new.sort()
    if resident:
        runs = _runs(core, owners, parents, keys, list(resident.values()), list(resident), new)
        touch_slots(core, list(resident), runs)
    if not new:
        return PreparedStore(None, (), (), len(resident))
    wanted = tuple([keys[place] for place in new])
    room, choice = _room_for(core, wanted, [*resident, *spared])
    if room < len(new):
        reason = SkipReason.POOL_FULL if has_room_for_transfer(core) else SkipReason.TOO_MANY_TRANSFERS
        _skip_places(core, owners, keys, new[room:], reason, ())
        new, wanted = new[:room], wanted[:room]
    if not room:
        return PreparedStore(None, (), (), len(resident))
    evicted = () if choice is None else _evict(core, choice)
    slots = pack(ledger.free.first(len(wanted)))
    runs = _runs(core, owners, parents, keys, new, listed(unpack(slots)))
    core.emit(ev.StorePlanned, _owners_of(owners, new), wanted, slots, NO_IDS, source, runs)
    hosts = host_blocks(core, ledger.transfers[ledger.seq].slots)
    job = planned_job(core, STORE, NO_IDS, hosts)
    return PreparedStore(job, wanted, (), len(resident), evicted, new)


def adopt_blocks(core: EventEmitter, keys: Sequence[bytes], slots: Sequence[int], source: str) -> None:
    """Register blocks that are in the host pool already: slots[i] holds keys[i].

    slots: free slots.
    source: who wrote the blocks, for people: "an earlier process".

    In the log it is a store that all workers have reported, so all states are as after any other store.
    Flushes the log. Raises `IllegalTransition` if a slot is not free, and `InvalidEvent` if the index has a
    key already.
    """
    keys = keys_of("adopt_blocks", keys)
    problem = "slot {} is not one of the {}"
    found = checked_ids(core, "adopt_blocks", "slots", slots, core.config.host_blocks, problem)
    if not keys:
        return
    core.emit(ev.StorePlanned, (), keys, pack(found), NO_IDS, source_name("adopt_blocks", source))
    transfer = core.ledger.seq
    core.emit(ev.TransfersSubmitted, (transfer,))
    for worker in range(core.config.workers):
        core.emit(ev.WorkerReported, transfer, worker, True)
    core.flush_log(LogFlush.RESTARTED)


def _spared(core: EventEmitter, call: str, spared: Collection[int]) -> Sequence[int]:
    """Check the slots that must not be evicted for an offer."""
    if not spared and type(spared) is tuple:
        return spared
    slots: Any = tuple(spared) if isinstance(spared, Set) else spared
    return listed(
        checked_ids(core, call, "spared", slots, core.config.host_blocks, "slot {} is not one of the {}")
    )


def _check_chunks(call: str, sources: IdArray, chunk: int) -> None:
    """Refuse a chunk that names a device block twice."""
    blocks = listed(sources)
    for first in range(0, len(blocks), chunk):
        if len(set(blocks[first : first + chunk])) != chunk:
            argument = f"device_blocks[{first}:{first + chunk}]"
            raise WrongArgument(call, argument, "names a block twice in one chunk")


def _plan_store(
    core: EventEmitter,
    owners: Owners,
    keys: tuple[bytes, ...],
    slots: Ids,
    sources: IdArray,
    parents: Parents,
) -> TransferJob:
    blocks = pack(sources)
    core.emit(ev.StorePlanned, owners, keys, slots, blocks, "", parents)
    hosts = slots
    if core.config.blocks_per_chunk > 1:
        hosts = host_blocks(core, core.ledger.transfers[core.ledger.seq].slots)
    return planned_job(core, STORE, blocks, hosts)


def _runs(
    core: EventEmitter,
    owners: Owners,
    parents: Mapping[int, bytes],
    keys: Sequence[bytes],
    places: Sequence[int],
    slots: Sequence[int],
    later: Sequence[int] = (),
) -> Parents:
    """Return the `Parents` of the blocks at these places of an offer.

    places: ascending.
    slots: the current or future slot of each of these blocks.
    later: places of the offer whose blocks are stored by a later event.
    """
    named = _begins(owners, parents)
    begins = sorted(place for place in named if 0 <= place < len(keys))
    stored, waiting = dict[bytes, int](), {keys[place]: place for place in later}
    runs, before = list[tuple[int, int | None]](), -1
    for n in begins if len(places) == len(keys) else range(len(places)):
        place, own = places[n], slots[n]
        in_one_run = bisect_right(begins, before) == bisect_right(begins, place)
        follows, before = in_one_run and before == place - 1, place
        if follows:
            continue
        key = named.get(place, keys[place - 1] if place else b"")
        if key in waiting:
            key = _parent_key(named, keys, waiting, place)
        parent = core.ledger.index.get(key) if key else own
        if parent is None:
            stored = stored or dict(zip([keys[place] for place in places], slots))
            parent = stored.get(key)
        if parent is None and in_one_run:
            continue
        if parent != (slots[n - 1] if n else own):
            runs.append((n, parent))
    return tuple(runs) if any(parent != slots[n] for n, parent in runs) else ()


def _begins(owners: Owners, parents: Mapping[int, bytes]) -> dict[int, bytes]:
    """Map each place of an offer where a prompt begins or goes on to the key before it; b"" if it begins."""
    ends = accumulate(count for _, count in owners)
    return {**{end - count: b"" for (_, count), end in zip(owners, ends)}, **parents}


def _parent_key(
    named: Mapping[int, bytes], keys: Sequence[bytes], waiting: Mapping[bytes, int], place: int
) -> bytes:
    """Return the key of the block before this place of an offer; b"" if the place begins a prompt.

    waiting: key -> place, for blocks that are stored by a later event. Such a block is skipped as a parent:
        its own parent is returned.
    """
    for _ in range(len(waiting) + 1):  # Bounded, because the keys may form a cycle.
        key = named.get(place, keys[place - 1] if place else b"")
        if key not in waiting:
            break
        place = waiting[key]
    return key


def skip(core: EventEmitter, owners: Owners, keys: Sequence[bytes], reason: SkipReason) -> None:
    """Record that these keys are not stored, and why."""
    if type(reason) is not SkipReason:
        raise WrongArgument("skip", "reason", f"is {reason!r}; it must be a SkipReason")
    keys = keys_of("skip", keys)
    core.emit(ev.StoreSkipped, owners_of("skip", owners, len(keys)), keys, reason)


def _skip_places(
    core: EventEmitter,
    owners: Owners,
    keys: Sequence[bytes],
    places: Sequence[int],
    reason: SkipReason,
    again: Collection[int],
) -> None:
    fresh = [place for place in places if place not in again]
    if fresh:
        named = tuple([keys[place] for place in fresh])
        core.emit(ev.StoreSkipped, _owners_of(owners, fresh), named, reason)


def advance(core: EventEmitter, offers: Sequence[Offer]) -> None:
    """Record the store cursors of requests: (request, settled, offered)."""
    checked = offers_of("advance", offers)
    if checked:
        core.emit(ev.BlocksOffered, checked)


def count_offers(core: EventEmitter, keys: Sequence[bytes]) -> None:
    """Record that a request offered these keys for the first time. Keys in the index are not counted."""
    keys = keys_of("count_offers", keys)
    fresh = tuple([key for key in keys if key not in core.ledger.index])
    if fresh:
        core.emit(ev.OffersCounted, fresh)


def offered_enough(core: EventEmitter, key: bytes) -> bool:
    """Whether this key was offered `store_threshold` times, or is in the index."""
    if type(key) is not bytes:
        key = one_key("offered_enough", "key", key)
    return core.ledger.offers.times.get(key, 0) >= core.config.store_threshold or key in core.ledger.index


def rewrite(core: EventEmitter, device_blocks: Sequence[int]) -> None:
    """Record that the engine will compute into these device blocks.

    An event is emitted only for blocks whose loaded content matters. It matters if a load of an older epoch
    brought it; and if a load of this epoch brought it and a chunk has several device blocks, because then a
    key does not identify the content of each of them.
    """
    stale, brought = core.ledger.provenance.stale, core.ledger.provenance.brought
    partly = core.config.blocks_per_chunk > 1 and bool(brought)
    if not stale and not partly:
        return
    blocks = listed(ids_of("rewrite", "device_blocks", device_blocks))
    rewritten = [block for block in blocks if block in stale or (partly and block in brought)]
    if rewritten:
        core.emit(ev.BlocksRewritten, pack(rewritten))


def _all_new(core: EventEmitter, keys: Sequence[bytes], device_blocks: IdArray) -> bool:
    """Whether all keys can be stored without further checks: distinct keys on distinct, unleased device
    blocks, and no block has bytes of an older epoch."""
    leases = core.ledger.leases
    if len(set(keys)) != len(keys) or not leases.distinct(device_blocks):
        return False
    if core.ledger.provenance.stale:
        return False
    words = leases.look(device_blocks)
    return not any(words) if type(words) is list else not np.any(words)


def _partition(
    core: EventEmitter,
    owners: Owners,
    keys: Sequence[bytes],
    blocks: Sequence[int],
    found: Sequence[int | None],
    again: Collection[int],
) -> tuple[list[int], list[int], dict[int, int]]:
    """Split an offer into (places to store, places to offer again, {slot of a resident key: its first
    place}), and emit its skips."""
    chunk, words = core.config.blocks_per_chunk, core.ledger.blocks.words
    # The index has ALLOCATED to LOADING blocks; those from STORED on can be read, and mostly all can.
    lacking = [place for place, slot in enumerate(found) if slot is None or words[slot] & STATE_MASK < STORED]
    left = set(lacking)
    resident = _first_places(found, [place not in left for place in range(len(found))])
    new: dict[bytes, int] = {}
    taken: set[int] = set()
    skipped: dict[SkipReason, list[int]] = {}
    for place in lacking:
        key, sources = keys[place], blocks[place * chunk : (place + 1) * chunk]
        answer = _admit(core, key, sources, found[place], new, taken)
        if answer is Admission.STORE:
            new[key] = place
            taken.update(sources)
        elif isinstance(answer, SkipReason):
            skipped.setdefault(answer, []).append(place)
    for reason, places in skipped.items():
        _skip_places(core, owners, keys, places, reason, again)
    skipped.pop(SkipReason.OLDER_EPOCH, None)
    return list(new.values()), sorted(chain.from_iterable(skipped.values())), resident


def _first_places(found: Sequence[int | None], wanted: Sequence[bool]) -> dict[int, int]:
    """Map each slot to its first place in an offer, among the places that are wanted."""
    places: dict[int, int] = {}
    for place, slot in enumerate(found):
        if slot is not None and wanted[place]:
            places.setdefault(slot, place)
    return places


def _admit(
    core: EventEmitter,
    key: bytes,
    sources: Sequence[int],
    slot: int | None,
    new: dict[bytes, int],
    taken: set[int],
) -> Admission | SkipReason:
    """Decide whether an offered block that is not resident is stored, or return why not.

    sources: its device blocks.
    slot: the slot into which this key is being stored; None if there is none.
    new, taken: keys and device blocks that this offer stores already.
    """
    words, stale = core.ledger.leases.words, core.ledger.provenance.stale
    leased = any(words[block] for block in sources)
    if stale and not leased:
        *begins, last = sources
        if stale.get(last) == key or not stale.keys().isdisjoint(begins):
            return SkipReason.OLDER_EPOCH
    if slot is not None:
        # If the store in flight reads other device blocks, even for part of the chunk, the key waits.
        own = leased and listed(core.ledger.transfers[core.ledger.generation[slot]].device_blocks)
        if own and all(block in own for block in sources):
            return Admission.BEING_STORED
        return SkipReason.KEY_IN_FLIGHT
    if key in new:
        return SkipReason.KEY_IN_FLIGHT
    if leased or not taken.isdisjoint(sources):
        return SkipReason.DEVICE_BLOCK_IN_FLIGHT
    return Admission.STORE


def next_victims(
    core: EventEmitter, most: int, after: int = 0, spared: Collection[int] = ()
) -> Sequence[bytes]:
    """Return the next `most` keys that would be evicted, in this order. Changes nothing.

    after: number of keys to leave out, from the first one on.
    spared: slots that are not evicted.
    """
    ledger = core.ledger
    barred = frozenset(spared).union(ledger.copied_out)
    count = min(most, _evictable(core, barred))
    choice = ledger.policy.choose(count, barred) if count > 0 else None
    if choice is None:
        return ()
    return ledger.keys_of(ids_of("policy.choose", "victims", choice.victims[after:]))


def _room_for(
    core: EventEmitter, keys: tuple[bytes, ...], protected: Sequence[int]
) -> tuple[int, Choice | None]:
    """Return (number of these keys that there is room for, the eviction that makes the room or None).

    protected: slots that are not evicted: those of resident keys of the offer, and those that it spares.
    """
    ledger = core.ledger
    if not has_room_for_transfer(core):
        return 0, None
    policy, free = ledger.policy, len(ledger.free)
    barred: frozenset[int] = frozenset()
    if len(keys) > free:
        barred = frozenset(protected).union(ledger.copied_out)
        keys = keys[: free + _evictable(core, barred)]
    recall(core, keys)
    lacking = len(keys) - free
    if lacking <= 0:
        return len(keys), None
    choice = policy.choose(lacking, barred)
    if choice is None:
        return free, None
    victims = ids_of("policy.choose", "victims", choice.victims)
    return len(keys), Choice(victims, ids_of("policy.choose", "moved", choice.moved))


def recall(core: EventEmitter, keys: Sequence[bytes]) -> None:
    """Let the policy adapt to those of these keys that it remembers, as a store of them does first.

    So `next_victims` are now the victims that this store will choose.
    """
    recalled = core.ledger.policy.recall(tuple(keys))
    if recalled:
        core.emit(ev.KeysRecalled, keys_of("policy.recall", recalled))


def _ask(
    core: EventEmitter,
    owners: Owners,
    keys: Sequence[bytes],
    new: Sequence[int],
    deferred: Sequence[int],
    parents: Mapping[int, bytes],
    protected: Sequence[int],
    required: Collection[int],
) -> NotStored:
    """Ask the policy which of the new places of an offer it admits. deferred: places that wait for a copy."""
    ledger = core.ledger
    if not may_refuse(ledger.policy) or not has_room_for_transfer(core):
        return NotStored()
    barred = ledger.copied_out.keys() | protected
    if not owners:  # A lazy store offers blocks without owners; they need not be consecutive.
        parents = {**dict.fromkeys(range(len(keys)), b""), **parents}
    room = Room(len(ledger.free), _evictable(core, barred), barred)
    waiting = {keys[place] for place in deferred}
    return ask(
        ledger.policy,
        keys,
        new,
        _begins(owners, parents),
        lambda key: key in waiting or key in ledger.index,
        room,
        required,
    )


def _may_retry(
    core: EventEmitter,
    keys: Sequence[bytes],
    sources: IdArray,
    deferred: Sequence[int],
    answer: NotStored,
) -> bool:
    """Whether a deferred place of an offer has the key or a device block of a refused one, or its room."""
    if not answer.refused or not (deferred or answer.unasked):
        return False
    gone = {keys[place] for place in answer.refused}
    if answer.unasked or any(keys[place] in gone for place in deferred):
        return True
    read = set(listed(_sources_of(core, sources, answer.refused)))
    return not read.isdisjoint(listed(_sources_of(core, sources, deferred)))


def _evictable(core: EventEmitter, barred: Collection[int]) -> int:
    """The number of blocks in the eviction order whose slots are not in `barred`."""
    policy = core.ledger.policy
    return len(policy) - sum([slot in policy for slot in barred])


def _evict(core: EventEmitter, choice: Choice) -> Sequence[bytes]:
    """Evict the policy's choice, and return its keys. The caller must plan the store as the next event."""
    evicted = core.ledger.keys_of(choice.victims)
    # The transfer is named by the number of the next event, its plan.
    core.emit(ev.BlocksEvicted, pack(choice.victims), pack(choice.moved), core.ledger.seq + 2)
    if core.evicting is not None:
        core.evicting(evicted)
    return evicted


def _sources_of(core: EventEmitter, sources: IdArray, places: Sequence[int]) -> IdArray:
    """Return the device blocks of these places of an offer."""
    numbers, chunk = listed(sources), core.config.blocks_per_chunk
    blocks = [numbers[n] for place in places for n in range(place * chunk, (place + 1) * chunk)]
    return unpack(pack(blocks))


def _owners_of(owners: Owners, places: Sequence[int]) -> Owners:
    """Return the owners of these places of an offer, which ascend."""
    if len(owners) < 2:
        return tuple([(name, len(places)) for name, _ in owners])
    ends = list(accumulate(count for _, count in owners))
    counts = [0] * len(owners)
    owner = 0
    for place in places:
        while place >= ends[owner]:
            owner += 1
        counts[owner] += 1
    return tuple([(name, count) for (name, _), count in zip(owners, counts) if count])
