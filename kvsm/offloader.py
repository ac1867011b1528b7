"""The deciding core: it reads the ledger, decides, and emits events. It never writes state.

An engine talks to it in the field's words. Per request: `match` (which prefix the host serves, pinned),
`prepare_load` (into these device blocks), `prepare_store` (of these computed blocks), `preempt`,
`finish`. Per step: `submit` the plans, hand them to the workers, feed the workers' reports to `report`,
`end_step`. At any time: `lookup`, `touch`, `tick`, `flush`, `lose`, `reset`.

Every call is legal in every state of every request (S8): a call that has nothing to do answers so, and
emits no event. What a limit refuses raises `LimitReached`, what the engine got wrong (an id that does
not exist) raises `IllegalTransition` or `InvalidEvent`; nothing has changed then. A call for a request
that is over begins a new life under its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm import kv_events
from kvsm.errors import IllegalTransition, InvalidEvent, LimitReached, Poisoned
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, RejectReason, SkipReason
from kvsm.ids import NO_IDS, SMALL, IdArray, pack, to_list
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger
from kvsm.plan import TransferPlan
from kvsm.records import Request, Transfer
from kvsm.states import machines_digest
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

# Bound once: to look a member up in its class costs more than to compare with it.
_STORED = BlockState.STORED
_PLANNED, _COMPLETED = TransferState.PLANNED, TransferState.COMPLETED
_DEFERRED = RequestState.DEFERRED
_FINISHED = RequestState.FINISHED
_UNMATCHABLE = (RequestState.LOADING, RequestState.FINISHED)
_MATCHED = RequestState.MATCHED
_RUNNING = RequestState.RUNNING


class EventSink(Protocol):
    """Where events go once applied: a `LogWriter`, or a list in tests. `flush` before plans leave."""

    def append(self, event: OffloadingEvent) -> None: ...

    def flush(self) -> None: ...


class LookupResult(Enum):
    """Whether one key is on the host: vLLM's `LookupResult`."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit pending"
    """Its store is in flight."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """What the host serves of a prompt: `hits` blocks from its start, pinned for the request.

    waits_for: the transfer that is storing the next block; the request is DEFERRED: ask again later.
    """

    hits: int
    waits_for: int | None = None


class PreparedStore(msgspec.Struct, frozen=True, gc=False):
    """plan: what to copy, None if nothing. keys: what will be stored, in the plan's order.

    resident: how many offered keys are on the host already. deferred: keys to offer again, because
    something of them is in flight or the pool is full. evicted: keys that made room.
    """

    plan: TransferPlan | None
    keys: tuple[bytes, ...] = ()
    resident: int = 0
    deferred: tuple[bytes, ...] = ()
    evicted: Sequence[bytes] = ()


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A transfer that is over, and whether its bytes are right; its device blocks are free of leases."""

    transfer: int
    direction: Direction
    request: str
    good: bool
    device_blocks: IdArray


class Offloader:
    """One offload core over one host pool. Not thread safe: one scheduler drives it."""

    def __init__(
        self,
        config: OffloadConfig,
        log: EventSink | None = None,
        *,
        publish: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """config: fixed for life, written into the log. log: None keeps none. publish: collect what
        `take_events` and `take_kv_events` give; whoever asks for it must take it, or it grows. clock_ns:
        wall time, data only."""
        self.config = config
        self._publisher = Publisher() if publish else None
        self.ledger = Ledger(config, self._publisher)
        self.log = log
        self.step = 0
        self._clock_ns = clock_ns
        self._poisoned: str | None = None
        self._flushed_at = -1
        """The step in which the log was last flushed."""
        self._emit(ev.LogOpened, config, machines_digest())

    # Matching.

    def lookup(self, key: bytes) -> LookupResult:
        """Whether this key can be read now. Counts nothing and pins nothing: `match` does."""
        slot = self.ledger.index.get(key)
        if slot is None:
            return LookupResult.MISS
        return LookupResult.HIT if self.ledger.readable(slot) else LookupResult.HIT_PENDING

    def arrive(self, request: str) -> None:
        """Make the request known before its first match or offer, which do so by themselves."""
        if request not in self.ledger.requests:
            self._emit(ev.RequestArrived, request)

    def match(self, request: str, keys: Sequence[bytes]) -> Match:
        """Longest prefix of `keys` that can be read, pinned until loaded or released (S7).

        keys: those beyond what the device has, in prefix order. A second question replaces the first;
        the same answer is no event. A request that is loading or finished has no match.
        """
        entry = self.ledger.requests.get(request) or Request(request)
        state = entry.word & STATE_MASK
        if state in _UNMATCHABLE:
            return Match(0)
        if state == _DEFERRED:
            return Match(0, entry.awaits)
        slots, pending = self._readable_prefix(keys)
        if pending is not None and self._may_wait(entry):
            if state == _MATCHED:
                self._emit(ev.HitReleased, request)
            patience = entry.patience if entry.patience >= 0 else self.ledger.tick + self.config.defer_ticks
            self._emit(ev.RequestDeferred, request, pending, patience)
            return Match(0, pending)
        if state == _MATCHED:
            if to_list(entry.pins) == slots and len(self.ledger.live_pins(entry)) == len(slots):
                return Match(len(slots))
            self._emit(ev.HitReleased, request)
        elif state == _RUNNING and not slots:
            return Match(0)
        missed = keys[len(slots)] if len(slots) < len(keys) else None
        try:
            self._emit(ev.HitMatched, request, pack(slots), missed)
        except IllegalTransition as refusal:
            raise LimitReached(f"request {request} cannot pin one more: {refusal}") from refusal
        return Match(len(slots))

    def release(self, request: str) -> None:
        """Give back the request's match without loading it."""
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.state is RequestState.MATCHED:
            self._emit(ev.HitReleased, request)

    def _readable_prefix(self, keys: Sequence[bytes]) -> tuple[list[int], int | None]:
        """(slots of the readable prefix, the store in flight of the first key that is not readable)."""
        ledger = self.ledger
        words = ledger.blocks.words
        slots: list[int] = []
        for slot in map(ledger.index.get, keys):
            if slot is None:
                break
            # The index names ALLOCATED to LOADING blocks; those before STORED cannot be read yet.
            if words[slot] & STATE_MASK < _STORED:
                return slots, ledger.generation[slot]
            slots.append(slot)
        return slots, None

    def _may_wait(self, entry: Request) -> bool:
        return self.config.defer_ticks > 0 and (entry.patience < 0 or entry.patience > self.ledger.tick)

    # Loading.

    def prepare_load(self, request: str, device_blocks: Sequence[int]) -> TransferPlan | None:
        """Load the first len(device_blocks) blocks of the request's match into these device blocks.

        The engine may accept less than was matched: the rest is released. Returns the plan, to be
        submitted. None means that nothing is loaded: there is no match, nothing was accepted, or the
        promise was voided since (a reset, bytes found bad): the engine computes these blocks (S6).
        """
        entry = self.ledger.requests.get(request)
        if entry is None or entry.word & STATE_MASK != _MATCHED:
            return None
        targets = self._device_ids(device_blocks)
        wanted = len(targets)
        if wanted == 0:
            self._emit(ev.HitReleased, request)
            return None
        if wanted > len(entry.pins):
            raise InvalidEvent(
                self.ledger.seq + 1, f"request {request} matched {len(entry.pins)} blocks, not {wanted}"
            )
        if len(self.ledger.live_pins(entry)) < len(entry.pins):
            self._emit(ev.LoadPlanned, request, NO_IDS, NO_IDS, True)
            return None
        if len(self.ledger.transfers) >= self.config.max_live_transfers:
            raise LimitReached(f"{self.config.max_live_transfers} transfers are live (max_live_transfers)")
        slots = pack(entry.pins[:wanted])
        blocks = pack(targets)
        self._emit(ev.LoadPlanned, request, slots, blocks)
        return TransferPlan(self.ledger.seq, Direction.LOAD, blocks, slots)

    def complete_load(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` has its shard of the load. Same as `report(transfer, worker, True)`."""
        return self._report(transfer, worker, True, Direction.LOAD)

    def fail_load(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` failed. Once all have reported, the keys are gone before the request hears."""
        return self._report(transfer, worker, False, Direction.LOAD)

    # Storing.

    def prepare_store(
        self, request: str, keys: Sequence[bytes], device_blocks: Sequence[int]
    ) -> PreparedStore:
        """Offer computed blocks: device_blocks[i] holds the content of keys[i].

        Stores those that are new, all or none of them: if the pool cannot make room for all, the offer
        is skipped, and said so (StoreSkipped). A key that is resident or offered twice is not stored
        again; one in flight from another block, or on a block with a copy in flight, is deferred (S13).
        """
        if len(keys) != len(device_blocks):
            raise ValueError(f"{len(keys)} keys for {len(device_blocks)} device blocks")
        sources = self._device_ids(device_blocks)
        ledger = self.ledger
        found = list(map(ledger.index.get, keys))
        resident: list[int] = []
        deferred: tuple[bytes, ...] = ()
        if found.count(None) != len(found) or not self._all_new(keys, sources):
            keys, sources, resident, deferred = self._partition(request, keys, device_blocks, found)
        keys = tuple(keys)
        if not keys:
            return PreparedStore(None, (), len(resident), deferred)
        refusal, evicted = self._make_room(keys, resident)
        if refusal:
            self._emit(ev.StoreSkipped, request, keys, refusal)
            return PreparedStore(None, (), len(resident), deferred + keys)
        slots = pack(ledger.free.first(len(keys)))
        blocks = pack(sources)
        self._emit(ev.StorePlanned, request, keys, slots, blocks)
        plan = TransferPlan(ledger.seq, Direction.STORE, blocks, slots)
        return PreparedStore(plan, keys, len(resident), deferred, evicted)

    def complete_store(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` has stored its shard. Same as `report(transfer, worker, True)`."""
        return self._report(transfer, worker, True, Direction.STORE)

    def fail_store(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` failed: once all have reported, the slots are free and nothing was stored."""
        return self._report(transfer, worker, False, Direction.STORE)

    def _device_ids(self, device_blocks: Sequence[int]) -> IdArray:
        """The engine's list as the ledger's array. Raises `InvalidEvent` for a block that does not exist."""
        limit = self.config.device_blocks
        ids: IdArray
        if len(device_blocks) <= SMALL:
            ids = tuple(device_blocks)
            wrong = [one for one in ids if not 0 <= one < limit]
        else:
            ids = np.asarray(device_blocks, dtype=np.int64)
            wrong = ids[(ids < 0) | (ids >= limit)].tolist()
        if wrong:
            raise InvalidEvent(self.ledger.seq + 1, f"device block {wrong[0]} is not one of the {limit}")
        return ids

    def _all_new(self, keys: Sequence[bytes], device_blocks: IdArray) -> bool:
        """The common case of an offer: distinct keys, on distinct device blocks that no copy touches."""
        if len(keys) > 1 and (len(set(keys)) != len(keys) or not self.ledger.leases.distinct(device_blocks)):
            return False
        leases = self.ledger.leases.look(device_blocks)
        return not any(leases) if type(leases) is list else not np.any(leases)

    def _partition(
        self,
        request: str,
        keys: Sequence[bytes],
        device_blocks: Sequence[int],
        found: Sequence[int | None],
    ) -> tuple[list[bytes], tuple[int, ...], list[int], tuple[bytes, ...]]:
        """Split an offer: (keys to store, their device blocks, resident slots, keys to offer again)."""
        ledger = self.ledger
        new: dict[bytes, int] = {}
        taken: set[int] = set()
        resident: list[int] = []
        skipped: dict[str, list[bytes]] = {
            SkipReason.KEY_IN_FLIGHT: [],
            SkipReason.DEVICE_BLOCK_IN_FLIGHT: [],
        }
        for key, block, slot in zip(keys, device_blocks, found, strict=True):
            if slot is not None:
                if ledger.readable(slot):
                    resident.append(slot)
                else:
                    skipped[SkipReason.KEY_IN_FLIGHT].append(key)
            elif key in new:
                continue
            elif block in taken or ledger.leases.state(block) is not LeaseState.NONE:
                skipped[SkipReason.DEVICE_BLOCK_IN_FLIGHT].append(key)
            else:
                new[key] = block
                taken.add(block)
        for reason, which in skipped.items():
            if which:
                self._emit(ev.StoreSkipped, request, tuple(which), reason)
        return (
            list(new),
            tuple(new.values()),
            resident,
            tuple(key for which in skipped.values() for key in which),
        )

    def _make_room(self, keys: tuple[bytes, ...], protected: Collection[int]) -> tuple[str, Sequence[bytes]]:
        """(why there is no room, or "", and the keys that were evicted)."""
        ledger = self.ledger
        if len(ledger.transfers) >= self.config.max_live_transfers:
            return SkipReason.TOO_MANY_TRANSFERS, ()
        lacking = len(keys) - len(ledger.free)
        if lacking > 0 and lacking > len(ledger.policy):
            return SkipReason.POOL_FULL, ()
        recalled = ledger.policy.recall(keys)
        if recalled:
            self._emit(ev.KeysRecalled, recalled)
        if lacking <= 0:
            return "", ()
        choice = ledger.policy.choose(lacking, frozenset(protected))
        if choice is None:
            return SkipReason.POOL_FULL, ()
        evicted = ledger.keys_of(choice.victims)
        # The plan is the event after the eviction, and its number names the transfer.
        self._emit(ev.BlocksEvicted, pack(choice.victims), pack(choice.moved), ledger.seq + 2)
        return "", evicted

    # Transfers.

    def submit(self, transfers: Sequence[int]) -> None:
        """These plans leave for the workers: call it just before they do. Flushes the log first."""
        if transfers:
            self._emit(ev.TransfersSubmitted, tuple(transfers))
            self._flush()

    def report(self, transfer: int, worker: int, good: bool) -> Ended | None:
        """A worker's report. Returns what it ended, if it was the last worker of the transfer.

        A report that names no live transfer, or comes twice, changes nothing and is recorded (S5).
        """
        return self._report(transfer, worker, good, None)

    def _report(self, transfer: int, worker: int, good: bool, direction: Direction | None) -> Ended | None:
        reason = self._why_reject(transfer, worker, direction)
        if reason:
            self._emit(ev.ReportRejected, transfer, worker, good, reason)
            return None
        ended = self._emit(ev.WorkerReported, transfer, worker, good)
        return None if ended is None else _ended(ended)

    def _why_reject(self, transfer: int, worker: int, direction: Direction | None) -> str:
        entry = self.ledger.transfers.get(transfer)
        if entry is None:
            return RejectReason.STALE if 0 < transfer <= self.ledger.seq else RejectReason.UNKNOWN
        if direction is not None and entry.direction is not direction:
            return RejectReason.DIRECTION
        if not 0 <= worker < self.config.workers:
            return RejectReason.WORKER
        if entry.reported >> worker & 1:
            return RejectReason.DUPLICATE
        planned = entry.word & STATE_MASK == _PLANNED
        return RejectReason.NOT_SUBMITTED if planned else ""

    def cancel(self, transfer: int) -> Ended | None:
        """Take back a plan that was not submitted; None if there is nothing to take back."""
        entry = self.ledger.transfers.get(transfer)
        if entry is None or entry.state is not TransferState.PLANNED:
            return None
        self._emit(ev.TransferCancelled, transfer)
        return _ended(entry)

    def lose(self, transfer: int) -> Ended | None:
        """A worker will never report: the transfer is over, and the memory it may touch is retired."""
        entry = self.ledger.transfers.get(transfer)
        if entry is None or entry.state is TransferState.PLANNED:
            return None
        self._emit(ev.TransferLost, transfer)
        return _ended(entry)

    def flush(self, transfers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Ask that these transfers (default: all submitted) end before the engine goes on: the workers
        wait for what is returned."""
        live = self.ledger.transfers
        wanted = live if transfers is None else [one for one in transfers if one in live]
        named = tuple(one for one in wanted if live[one].state is not TransferState.PLANNED)
        fresh = tuple(one for one in named if not live[one].flush)
        if fresh:
            self._emit(ev.FlushRequested, fresh)
        return named

    # Requests and time.

    def preempt(self, request: str) -> None:
        """The engine took the request's device blocks. Copies in flight keep what they touch."""
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.state not in _NOT_PREEMPTABLE:
            self._emit(ev.RequestPreempted, request)

    def finish(self, request: str, *, aborted: bool = False) -> bool:
        """The request is over, at any time. Returns whether no copy of it is left in flight."""
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.word & STATE_MASK != _FINISHED:
            self._emit(ev.RequestFinished, request, aborted)
        return request not in self.ledger.requests

    def touch(self, keys: Sequence[bytes]) -> None:
        """These keys were used without a load: the device had them too. Unknown ones are passed over."""
        ledger = self.ledger
        slots = [slot for slot in map(ledger.index.get, keys) if slot is not None and ledger.readable(slot)]
        if slots:
            self._emit(ev.BlocksTouched, pack(list(dict.fromkeys(slots))))

    def tick(self) -> None:
        """Let the waits grow older; the host calls it once a step. No event if nobody waits."""
        if self.ledger.deferred:
            self._emit(ev.Ticked, self.ledger.tick + 1)

    def end_step(self) -> None:
        """The engine's step is over. Flushes the log, unless `submit` did so in this step and copies are
        still under way: they bring another step, and what came after `submit` can wait for it."""
        if self.ledger.step == self.step:
            self._emit(ev.StepEnded)
            if self._flushed_at != self.step or not self.ledger.transfers:
                self._flush()
        self.step += 1

    def reset(self) -> bool:
        """Make every stored block unmatchable, at once. Returns whether nothing is left to drain.

        Copies in flight go on; their memory stays quarantined until every worker has reported, and
        `draining()` of the ledger says whether any is left. A load that was under way fails.
        """
        self._emit(ev.CacheReset, self.ledger.epoch + 1)
        return not self.ledger.draining()

    # What leaves for schedulers and routers.

    def take_events(self) -> list[kv_events.OffloadingEvent]:
        """What came to the host and left it since the last take, as vLLM's `OffloadingEvent`s."""
        return [] if self._publisher is None else self._publisher.take_events()

    def take_kv_events(self) -> list[kv_events.KVCacheEvent]:
        """The same changes as KV events of the wire. One queue feeds both: choose a form, and keep to it."""
        return [] if self._publisher is None else self._publisher.take_kv_events()

    # The one way to change state.

    def _emit(self, kind: type[OffloadingEvent], *fields: object) -> Transfer | None:
        """Make the next event, check it, apply it and hand it to the log, in one call.

        Returns the transfer that it ended. A refused event leaves no trace; any other failure between
        the fold and the log poisons the core.
        """
        if self._poisoned is not None:
            raise Poisoned(f"this offloader stopped at event {self.ledger.seq}: {self._poisoned}")
        ledger = self.ledger
        event = kind(ledger.seq + 1, self.step, self._clock_ns(), *fields)
        try:
            ended = ledger.apply(event)
            if self.log is not None:
                self.log.append(event)
            return ended
        except (IllegalTransition, InvalidEvent):
            raise
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._poisoned = str(error) or type(error).__name__
            raise

    def _flush(self) -> None:
        self._flushed_at = self.step
        if self.log is None:
            return
        try:
            self.log.flush()
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._poisoned = str(error) or type(error).__name__
            raise


_NOT_PREEMPTABLE = (RequestState.NEW, RequestState.PREEMPTED, RequestState.FINISHED)


def _ended(transfer: Transfer) -> Ended:
    good = transfer.word & STATE_MASK == _COMPLETED
    return Ended(transfer.id, transfer.direction, transfer.request, good, transfer.device_blocks)
