"""`KvsmManager`: the offload core behind vLLM's `OffloadingManager`, for vLLM's own OffloadingConnector.

vLLM's connector decides when to ask, and this manager decides what to answer. It makes up for what the
interface does not say:

- **Which transfer has ended.** (request, direction, keys) identifies it: a request has at most one load in
  flight, and a key is in one store at a time.
- **The order of a set.** Sets are sorted by group, position in the prompt and key. Lists keep their order.
- **Which block an offer continues.** For each request and group the manager remembers the last key that was
  used or offered. When a load ends, what the device had before it is touched again: it must not be evicted
  first.
- **That a hit is not wanted.** A hit is promised until `on_schedule_end`. Before anything is evicted, all
  promises are pinned; otherwise a promise is no event.
- **That a load must wait.** A hit that cannot be promised is HIT_PENDING: vLLM asks again.
- **That part of an offer is not stored.** All of an offer is stored, or the answer is None and vLLM offers it
  again. Like vLLM, a key in flight for another request counts as stored.
- **That jobs from before a reset have ended.** In the first step after it vLLM orders the workers to wait
  for these jobs. They count as ended at the first `on_schedule_end` after this step's output: the second one
  after the reset if only one step is in flight at a time. A vLLM with `on_reset_flushed` says so itself.
- **That a job never ends.** `TransferDeadlines` finds it. vLLM itself remembers such a job forever. So a rank
  gives a store up when its age is `GIVEN_UP_AFTER` timeouts, and reports it as done (`spec_worker`). Here a
  store of that age counts as lost, whatever is reported.
- **Which device blocks are copied.** Leases and events name `PlaceholderBlocks`. vLLM itself ensures that a
  device block is not reused in flight and that no stale data stays after a reset: it waits for its jobs.
- **That a copy failed on one rank.** vLLM counts the ranks and reports what all of them have done, so the
  core has one worker. A rank stops at a copy that fails (`spec_worker`). With `KvsmOffloadingConnector`, a
  `ReportedManager` hears each rank instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsm.core import offloader
from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.scheduler.request_params import read_request_params, wants_remote_decode
from kvsm.errors import InvalidEvent, LimitReached
from kvsm.events import Direction, SkipReason
from kvsm.ids import IdArray, listed
from kvsm.states.transfer import TransferState
from kvsm.vllm.connector_stats import StatsSource
from kvsm.vllm.deadlines import TransferDeadlines
from kvsm.vllm.engine_offloader import EngineOffloader
from kvsm.vllm.placeholder_blocks import PlaceholderBlocks
from kvsm.vllm.spec_stats import to_offloading_stats
from kvsm.vllm.versions import features

PLACEHOLDERS_PER_HOST_BLOCK = 2
"""All stores together need at most one for each host block. So does the load of one request."""

GIVEN_UP_AFTER = 2
"""A rank gives a store up when its age is this many timeouts. The manager hears of a job before any rank
does, so for the manager a store is older. If it is reported at a lower age, it has ended on all ranks."""

_UNKNOWN_TRANSFER = 0

log = init_logger("vllm.kvsm")

_HIT, _MISS = offloader.LookupResult.HIT, offloader.LookupResult.MISS


class HostSlots(CPULoadStoreSpec):
    """Slots of the host pool.

    num_slots: the size of the pool; a rank with fewer slots enlarges its own.
    transfer: the transfer that copies them; 0 if nothing is copied.
    """

    def __init__(
        self, slots: Sequence[int] | IdArray, num_slots: int, transfer: int = _UNKNOWN_TRANSFER
    ) -> None:
        super().__init__(slots)
        self.num_slots, self.transfer = num_slots, transfer


class KvsmManager(OffloadingManager):
    """The manager of one engine. Its core has one worker, and `PLACEHOLDERS_PER_HOST_BLOCK`.

    deadlines: which transfers have waited too long for their end.
    """

    def __init__(
        self,
        core: EngineOffloader,
        transfer_timeout_s: float = 0.0,
        most_steps: int = 1,
        config_info: Mapping[str, Any] | None = None,
    ) -> None:
        """transfer_timeout_s: see `CommonOptions`. most_steps: how many steps may be in flight at once.
        config_info: what `vllm:kv_offload_config_info` says of the host pool."""
        self._engine_core, self._core = core, core.offloader
        self.deadlines = TransferDeadlines(transfer_timeout_s, most_steps)
        self._most_steps = most_steps
        config = core.offloader.config
        self._chunk, self._num_slots = config.blocks_per_chunk, config.host_blocks
        self._max_transfers = config.max_live_transfers
        self._placeholders = PlaceholderBlocks(range(config.device_blocks))
        self._promises = _Promises()
        self._missed: dict[str, bytes] = {}
        """Request -> the first key that its lookups missed in this step."""
        self._answers: dict[str, bytes | None] = {}
        """Request -> the first key that its last lookups missed, until it is known to be admitted: vLLM loads
        or offers its blocks only then."""
        self._admitted: set[str] = set()
        self._jobs: dict[tuple[str, Direction, frozenset[bytes]], int] = {}
        """What identifies a transfer in this interface -> its id."""
        self._refused: set[str] = set()
        """Requests whose offer found no room. When they offer it again, that is no event."""
        self._touched: dict[str, list[bytes]] = {}
        """Request -> the keys that it has touched and not loaded, while a load may follow."""
        self._steps_to_flush = 0
        self._not_stored: list[bytes] = []
        """Keys whose store has failed or was lost since the last `take_events`."""
        # vLLM tells the end of a request in the next step, which may never come. Any step may be the last.
        self._stats = StatsSource(core.metrics)
        self._not_offloaded: set[str] = set()
        """Requests whose client wants none of their blocks stored."""
        self._config_info = dict(config_info or {})

    # Loads.

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether this key can be loaded. A HIT holds until `on_schedule_end`."""
        request = req_context.req_id
        found = self._core.lookup(key)
        if found is _MISS:
            self._missed.setdefault(request, key)
            return LookupResult.MISS
        if found is _HIT and self._may_promise(request, key):
            self._promises.add(request, key)
            return LookupResult.HIT
        return LookupResult.HIT_PENDING

    def _may_promise(self, request: str, key: bytes) -> bool:
        """Whether the request could load this key besides all that is promised. What is promised stays so:
        several KV cache groups ask for a key more than once in a step."""
        promised = self._promises.by_request
        blocks = (self._promises.num_keys + 1) * self._chunk
        if (mine := promised.get(request)) is not None:
            # Its load is counted already, and a load takes any number of keys.
            return key in mine or blocks <= self._placeholders.num_free
        transfers = len(self._core.ledger.transfers) + len(promised) + 1
        has_room = transfers <= self._max_transfers and blocks <= self._placeholders.num_free
        return has_room and self._core.may_match(request)

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:  # noqa: ARG002 (vLLM's signature)
        """Where a hit comes from: host memory."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> HostSlots:
        """Plan the load of these keys, and say which slots to read.

        Raises `InvalidEvent` for a key that cannot be read, and `LimitReached` if no lookup has promised the
        load and there is no room for it.
        """
        request, wanted = req_context.req_id, in_order(keys, req_context)
        if not wanted:
            return HostSlots((), self._num_slots)
        core = self._core
        index, readable = core.ledger.index, core.ledger.readable
        slots = []
        for key in wanted:
            slot = index.get(key)
            if slot is None or not readable(slot):
                raise InvalidEvent(
                    core.ledger.seq + 1, f"request {request} loads key {key.hex()}, which is not on the host"
                )
            slots.append(slot)
        blocks = self._placeholders.take(len(wanted) * self._chunk)
        if blocks is None:
            raise LimitReached(f"request {request} loads {len(wanted)} keys; too many loads are in flight")
        self._promises.drop(request)
        self._answers[request] = missed = self._missed.pop(request, None)
        core.pin(request, slots, missed)
        self._admit(request)
        job = core.prepare_load(request, blocks)
        assert job is not None, "the match was pinned just now"
        self._submit(request, Direction.LOAD, wanted, job.transfer)
        _note_last(req_context, wanted)
        loaded = set(wanted)
        self._touched[request] = [key for key in self._touched.get(request, ()) if key not in loaded]
        return HostSlots(slots, self._num_slots, job.transfer)

    def _admit(self, request: str) -> None:
        """Record that the request is admitted, if it has asked since the last time."""
        if request in self._answers:
            missed, resumed = self._answers.pop(request), request in self._admitted
            self._admitted.add(request)
            self._core.admit(request, missed=missed, resumed=resumed)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """The load of these keys has ended on all ranks."""
        self._complete(req_context.req_id, Direction.LOAD, keys, good=True)
        # The device had the beginning. It was touched when the load began, and is older than what was loaded.
        head = self._touched.pop(req_context.req_id, ())
        if head:
            self._core.touch(head)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """The request used these keys."""
        used = in_order(keys, req_context)
        self._core.touch(used)
        _note_last(req_context, used)
        self._touched[req_context.req_id] = used

    # Stores.

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        """Plan the store of these keys. None: there is no room for all of them now."""
        request, core = req_context.req_id, self._core
        if request in self._not_offloaded:
            return PrepareStoreOutput([], HostSlots((), self._num_slots), [])
        self._admit(request)
        self._pin_promises()
        offered = in_order(keys, req_context)
        seldom = [] if is_remote_decode(req_context) else self._offered_too_seldom(offered)
        wanted = offered
        if seldom:
            left_out = set(seldom)
            wanted = [key for key in offered if key not in left_out]
        blocks = self._placeholders_for(request, wanted)
        if blocks is None:
            self._refuse(request, wanted)
            return None
        self._refused.discard(request)
        if core.config.store_threshold > 1:
            core.count_offers(offered)
        if seldom:
            core.skip(((request, len(seldom)),), seldom, SkipReason.BELOW_THRESHOLD)
        # A load may have written these placeholders before; its content is gone.
        core.rewrite(blocks)
        parents = _parents_of(req_context, wanted)
        _note_last(req_context, wanted)
        self._touched.pop(request, None)
        prepared = core.store(((request, len(wanted)),), wanted, blocks, parents=parents)
        if prepared.job is None:
            self._placeholders.give_back(blocks)
            return PrepareStoreOutput([], HostSlots((), self._num_slots), [])
        transfer = core.ledger.transfers[prepared.job.transfer]
        if len(transfer.device_blocks) < len(blocks):
            used = set(listed(transfer.device_blocks))
            self._placeholders.give_back([block for block in blocks if block not in used])
        self._submit(request, Direction.STORE, prepared.keys, transfer.id)
        slots = HostSlots(transfer.slots, self._num_slots, transfer.id)
        return PrepareStoreOutput(list(prepared.keys), slots, list(prepared.evicted))

    def _offered_too_seldom(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys that stay below `store_threshold` with this offer, which counts only if there is room."""
        threshold, ledger = self._core.config.store_threshold, self._core.ledger
        if threshold < 2:
            return []
        times = ledger.offers.times
        return [key for key in keys if key not in ledger.index and times.get(key, 0) + 1 < threshold]

    def _placeholders_for(self, request: str, keys: Sequence[bytes]) -> list[int] | None:
        """Placeholders for these keys, if all new ones among them can be stored now."""
        ledger, kept = self._core.ledger, 0
        slots = list(map(ledger.index.get, keys))
        new = slots.count(None)
        absent = keys
        if new < len(keys):
            absent = [key for key, slot in zip(keys, slots) if slot is None]
            # A key of the offer that is on the host already is not evicted for the others.
            kept = sum(slot in ledger.policy for slot in slots if slot is not None)
        if (request, Direction.STORE, frozenset(absent)) in self._jobs:
            # The same store was lost, and vLLM will report its end: that would be taken for the new store's.
            return None
        if new > len(ledger.free) + ledger.evictable() - kept:
            return None
        # Half of the transfers are for loads: a promised load cannot wait.
        if new and len(ledger.transfers) >= self._max_transfers // 2:
            return None
        return self._placeholders.take(len(keys) * self._chunk)

    def _refuse(self, request: str, keys: Sequence[bytes]) -> None:
        new = [key for key in keys if key not in self._core.ledger.index]
        if request not in self._refused:
            self._refused.add(request)
            self._core.skip(((request, len(new)),), new, SkipReason.POOL_FULL)

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """The store of these keys has ended on all ranks."""
        self._complete(req_context.req_id, Direction.STORE, keys, good=success)

    # Transfers.

    def _submit(self, request: str, direction: Direction, keys: Iterable[bytes], transfer: int) -> None:
        # vLLM says nothing more before this job goes to the workers, so the log is flushed now.
        self._jobs[request, direction, frozenset(keys)] = transfer
        self._core.submit([transfer])
        self.deadlines.began(transfer, direction)

    def _complete(self, request: str, direction: Direction, keys: Iterable[bytes], *, good: bool) -> None:
        """A job has ended. One that names no live transfer changes nothing, and is recorded (S5)."""
        named = frozenset(keys)
        if named:
            transfer = self._jobs.pop((request, direction, named), _UNKNOWN_TRANSFER)
            # A rank never reports a load that it gave up: vLLM would hand its blocks to the model.
            self._end(transfer, good=good, may_be_given_up=direction is Direction.STORE)
        self._core.flush_log(offloader.LogFlush.REPORTS_TAKEN)

    def _end(self, transfer: int, *, good: bool, may_be_given_up: bool) -> None:
        """vLLM counts this transfer as ended on all ranks."""
        patience_s = GIVEN_UP_AFTER * self.deadlines.timeout_s
        if may_be_given_up and patience_s and self.deadlines.age_s(transfer) >= patience_s:
            self._lose(transfer)
        ended = self._core.report(transfer, 0, good).ended
        self.deadlines.ended(transfer)
        if ended is not None:
            self._let_go(ended)

    def _lose(self, transfer: int) -> None:
        """Give this transfer up: a rank may never end it."""
        ended = self._core.lose(transfer)
        if ended is None:
            return
        self._let_go(ended)
        is_load = ended.direction is Direction.LOAD
        log.warning(
            "kvsm: transfer %d (a %s) is given up: some rank has not ended it for %g s. %d host slots are "
            "retired: they are not used again until the engine restarts%s",
            transfer,
            ended.direction.name.lower(),
            self.deadlines.timeout_s,
            len(ended.device_blocks) // self._chunk,
            _waits_on(ended.request) if is_load else "",
        )

    def _let_go(self, ended: offloader.Ended) -> None:
        """Free the placeholders. If a load was given up, they are retired, as its device blocks would be."""
        if not (ended.lost and ended.direction is Direction.LOAD):
            self._placeholders.give_back(listed(ended.device_blocks))
        if self._core.publisher is not None and not ended.good:
            self._not_stored += ended.keys

    # Requests and steps.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Make the request known. If another engine decodes it, its prefix hits are stored too (S16)."""
        request = req_context.req_id
        self._core.arrive(request)
        if not read_request_params(request, req_context.kv_transfer_params).offload:
            self._not_offloaded.add(request)
        whole = is_remote_decode(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        """The request is over."""
        request = req_context.req_id
        self._not_offloaded.discard(request)
        self._promises.drop(request)
        self._missed.pop(request, None)
        self._answers.pop(request, None)
        self._admitted.discard(request)
        self._refused.discard(request)
        self._touched.pop(request, None)
        self._core.finish(request)

    def on_schedule_end(self, context: Any) -> None:
        """A step is scheduled: promises that were not loaded are void, and overdue transfers are given up."""
        core = self._core
        for transfer in self.deadlines.overdue():
            self._lose(transfer)
        for request, key in self._missed.items():
            if request not in self._promises.by_request and core.may_match(request):
                core.pin(request, (), key)
        for request in self._promises.by_request:
            core.release(request)
        self._answers.update(dict.fromkeys(self._promises.by_request))
        self._answers.update(self._missed)
        self._missed.clear()
        self._promises = _Promises()
        for request in sorted(context.preempted_req_ids):
            core.preempt(request)
        if self._steps_to_flush and not features().tells_of_flushed_resets:
            self._steps_to_flush -= 1
            if not self._steps_to_flush:
                self._drain()
        core.end_step()

    def _pin_promises(self) -> None:
        """Called before anything is evicted: what a lookup found stays until the step is scheduled (S7)."""
        index = self._core.ledger.index
        for request, keys in self._promises.by_request.items():
            self._core.pin(request, [index[key] for key in keys], None)

    # The cache as a whole.

    def reset_cache(self) -> None:
        """No key is found any more. A slot that a copy touches is used again when the copy has ended."""
        self._promises = _Promises()
        self._missed.clear()
        self._refused.clear()
        self._not_stored.clear()
        self._jobs.clear()
        if not self._core.reset():
            self._steps_to_flush = 1 + self._most_steps

    def on_reset_flushed(self) -> None:
        """Every job from before the last reset has ended on all ranks."""
        self._steps_to_flush = 0
        self._drain()

    def _drain(self) -> None:
        for transfer in list(self._core.ledger.transfers.values()):
            if transfer.state is TransferState.ABANDONED:
                self._end(transfer.id, good=True, may_be_given_up=True)

    def has_pending_work(self) -> bool:
        """Whether a reset still waits for copies."""
        return self._core.ledger.draining()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The KV events since the last call."""
        events = [
            OffloadingEvent(one.keys, Medium(one.medium), one.removed) for one in self._core.take_events()
        ]
        if self._not_stored and features().has_metadata_only_events:
            # vLLM keeps a description of each key from its offer on. A key that is offered again needs it.
            index = self._core.ledger.index
            forgotten = [key for key in self._not_stored if key not in index]
            if forgotten:
                events.append(OffloadingEvent(forgotten, Medium.CPU, removed=True, metadata_only=True))
        self._not_stored.clear()
        return events

    def get_stats(self) -> Any:
        """The metrics that have changed since the last call."""
        return to_offloading_stats(self._stats.take())

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """The labels of `vllm:kv_offload_config_info`: there is one pool."""
        return [self._config_info]

    def shutdown(self) -> None:
        """Close the event log."""
        self._engine_core.close()


def _waits_on(request: str) -> str:
    return (
        f". Request {request} and its device blocks wait until the copy ends, because vLLM's "
        "OffloadingConnector cannot be told that a load failed; with KvsmOffloadingConnector it is recomputed"
    )


class _Promises:
    """Keys that lookups found in this step, and that are not loaded yet."""

    def __init__(self) -> None:
        self.by_request: dict[str, dict[bytes, None]] = {}
        self.num_keys = 0

    def add(self, request: str, key: bytes) -> None:
        keys = self.by_request.setdefault(request, {})
        self.num_keys += key not in keys
        keys[key] = None

    def drop(self, request: str) -> None:
        self.num_keys -= len(self.by_request.pop(request, ()))


def in_order(keys: Collection[bytes], req_context: Any) -> list[bytes]:
    """Each key once, in the given order. A set is sorted by group and position in the prompt."""
    if not isinstance(keys, (set, frozenset)):
        return list(dict.fromkeys(keys))

    def place(key: bytes) -> tuple[bytes, int, bytes]:
        return key[-GROUP_INDEX_BYTES:], req_context.get_offload_key_position(key) or 0, key

    return sorted(keys, key=place)


class _LastKeys(dict[bytes, bytes]):
    """KV cache group -> the last key that a request used or offered. vLLM keeps it with the request."""


def _note_last(req_context: Any, keys: Sequence[bytes]) -> None:
    """Remember with the request which keys it used or offered last."""
    last = req_context.get_state(_LastKeys) or _LastKeys()
    last.update({key[-GROUP_INDEX_BYTES:]: key for key in keys})
    req_context.set_state(last)


def _parents_of(req_context: Any, keys: Sequence[bytes]) -> dict[int, bytes]:
    """Map the place of each group's first key to its parent: the group's last key so far, if that comes
    earlier in the prompt. Else to b""."""
    last, position = req_context.get_state(_LastKeys) or _LastKeys(), req_context.get_offload_key_position
    parents: dict[int, bytes] = {}
    for place, key in enumerate(keys):
        group = key[-GROUP_INDEX_BYTES:]
        if not place or group != keys[place - 1][-GROUP_INDEX_BYTES:]:
            before = last.get(group, b"")
            parents[place] = before if before and (position(before) or 0) < (position(key) or 0) else b""
    return parents


def is_remote_decode(req_context: Any) -> bool:
    """Whether another engine will decode what this one prefills."""
    return wants_remote_decode(req_context.kv_transfer_params)
