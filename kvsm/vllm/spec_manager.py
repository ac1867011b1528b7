"""`KvsmManager`: the offload core behind vLLM's `OffloadingManager`, for its own OffloadingConnector.

vLLM's connector decides when to ask, this decides what to answer, and what that interface cannot say is made
up for here:

=============================  ============================================================================
it does not say                so
=============================  ============================================================================
which transfer has ended       (request, direction, keys) names it: of a request at most one load is under
                               way, and a key is in one store at a time
in which order a set is        it is sorted, by group, position in the prompt and key; lists keep their order
that a hit is not wanted       a lookup promises its hit until `on_schedule_end`: what may evict before that
                               pins all promises first, and nothing else makes an event of them
that a load must wait          a hit that cannot be promised is HIT_PENDING: vLLM asks again
that part of an offer is       all of an offer is stored, or None is answered and vLLM offers it again. What
not stored                     is in flight for another request counts as stored, as vLLM will have it
that jobs of before a reset    they count as ended at the second `on_schedule_end` after it. With the first,
have ended                     vLLM sends the workers the order to wait for them, and before they have waited
                               they may start a store that was planned behind that call. Where vLLM has
                               `on_reset_flushed`, that says it
which device blocks are        a copy holds places, numbers in their stead: leases and events name these.
copied                         Whether a device block is free (S3, S12), and whether a load of an older epoch
                               brought what is in it (S14), is vLLM's to know: it fences them itself
that a copy failed on a rank   vLLM counts the ranks, and reports what all have done: the core has one worker.
                               Its workers stop at a copy that fails (`spec_worker`)
=============================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

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

from kvsm import offloader
from kvsm.errors import InvalidEvent, LimitReached
from kvsm.events import Direction, SkipReason
from kvsm.ids import listed
from kvsm.kv_events import GROUP_INDEX_BYTES
from kvsm.states.transfer import TransferState
from kvsm.vllm.connector_stats import StatsSource
from kvsm.vllm.engine_offloader import EngineOffloader
from kvsm.vllm.placeholder_blocks import PlaceholderBlocks
from kvsm.vllm.spec_stats import to_offloading_stats

PLACEHOLDERS_PER_HOST_BLOCK = 2
"""All stores together need at most one for each host block, and so does the load of one request."""

_STEPS_TO_FLUSH = 2

_TELLS_FLUSHED = hasattr(OffloadingManager, "on_reset_flushed")

_UNKNOWN_TRANSFER = 0

_HIT, _MISS = offloader.LookupResult.HIT, offloader.LookupResult.MISS


class HostSlots(CPULoadStoreSpec):
    """Slots of the host pool, and how many it has: a rank that counts fewer makes a larger pool."""

    def __init__(self, slots: Sequence[int], num_slots: int) -> None:
        super().__init__(list(slots))
        self.num_slots = num_slots


class KvsmManager(OffloadingManager):
    """Decides for one engine. Needs a core with one worker and `PLACEHOLDERS_PER_HOST_BLOCK`; closes it."""

    def __init__(self, core: EngineOffloader) -> None:
        self._engine_core, self._core = core, core.offloader
        config = core.offloader.config
        self._chunk, self._num_slots = config.blocks_per_chunk, config.host_blocks
        self._max_transfers = config.max_live_transfers
        self._placeholders = PlaceholderBlocks(range(config.device_blocks))
        self._promises = _Promises()
        self._missed: dict[str, bytes] = {}
        """Request -> the first key that a lookup of it missed in this step."""
        self._jobs: dict[tuple[str, Direction, frozenset[bytes]], int] = {}
        """What names a transfer in this interface -> its id."""
        self._refused: set[str] = set()
        """Requests whose offer there was no room for: that they offer it again is no event."""
        self._steps_to_flush = 0
        self._stats = StatsSource(core.metrics, core.offloader.ledger)

    # Loads.

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """A HIT holds until `on_schedule_end`."""
        request = req_context.req_id
        found = self._core.lookup(key)
        if found is _MISS:
            self._missed.setdefault(request, key)
            return LookupResult.MISS
        if found is _HIT and self._may_promise(request):
            self._promises.add(request, key)
            return LookupResult.HIT
        return LookupResult.HIT_PENDING

    def _may_promise(self, request: str) -> bool:
        """Whether one more key could be loaded for it, beside all that is promised."""
        transfers = len(self._core.ledger.transfers) + len(self._promises.by_request)
        blocks = (self._promises.num_keys + 1) * self._chunk
        has_room = transfers < self._max_transfers and blocks <= self._placeholders.num_free
        return has_room and self._core.may_match(request)

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:  # noqa: ARG002 (vLLM's signature)
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> HostSlots:
        """Raises `InvalidEvent` for a key that cannot be read, and `LimitReached` where no lookup promised
        that there is room for the load."""
        request, wanted = req_context.req_id, in_order(keys, req_context)
        if not wanted:
            return HostSlots((), self._num_slots)
        core = self._core
        for key in wanted:
            if core.lookup(key) is not _HIT:
                raise InvalidEvent(
                    core.ledger.seq + 1, f"request {request} loads {key.hex()}, which is not on the host"
                )
        slots = [core.ledger.index[key] for key in wanted]
        places = self._placeholders.take(len(wanted) * self._chunk)
        if places is None:
            raise LimitReached(f"request {request} loads {len(wanted)} keys; too many loads are under way")
        self._promises.drop(request)
        core.pin(request, slots, self._missed.pop(request, None))
        job = core.prepare_load(request, places)
        assert job is not None, "a match that was pinned just now holds"
        self._leave(request, Direction.LOAD, wanted, job.transfer)
        return HostSlots(slots, self._num_slots)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        self._complete(req_context.req_id, Direction.LOAD, keys, good=True)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        self._core.touch(in_order(keys, req_context))

    # Stores.

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        """None: there is no room for all of it now."""
        request, core = req_context.req_id, self._core
        self._pin_promises()
        offered = in_order(keys, req_context)
        seldom = () if is_remote_decode(req_context) else self._offered_too_seldom(offered)
        left_out = set(seldom)
        wanted = [key for key in offered if key not in left_out]
        places = self._places_for(wanted)
        if places is None:
            self._refuse(request, wanted)
            return None
        self._refused.discard(request)
        if core.config.store_threshold > 1:
            core.count_offers(offered)
        if seldom:
            core.skip(((request, len(seldom)),), seldom, SkipReason.BELOW_THRESHOLD)
        # What a load brought to these places is nobody's any more.
        core.rewrite(places)
        prepared = core.prepare_store(request, wanted, places)
        if prepared.job is None:
            self._placeholders.give_back(places)
            return PrepareStoreOutput([], HostSlots((), self._num_slots), [])
        transfer = core.ledger.transfers[prepared.job.transfer]
        used = set(listed(transfer.device_blocks))
        self._placeholders.give_back([place for place in places if place not in used])
        self._leave(request, Direction.STORE, prepared.keys, transfer.id)
        slots = HostSlots(listed(transfer.slots), self._num_slots)
        return PrepareStoreOutput(list(prepared.keys), slots, list(prepared.evicted))

    def _offered_too_seldom(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those that this offer does not bring to the threshold. It counts only if there is room for it."""
        threshold, ledger = self._core.config.store_threshold, self._core.ledger
        if threshold < 2:
            return ()
        times = ledger.offers.times
        return [key for key in keys if key not in ledger.index and times.get(key, 0) + 1 < threshold]

    def _places_for(self, keys: Sequence[bytes]) -> list[int] | None:
        """Places for these keys, if all of them that are new can be stored now."""
        ledger = self._core.ledger
        slots = list(map(ledger.index.get, keys))
        new = slots.count(None)
        # What the offer itself finds on the host is not evicted for the rest of it.
        kept = sum(slot in ledger.policy for slot in slots if slot is not None)
        if new > len(ledger.free) + len(ledger.policy) - kept:
            return None
        # The other half is for loads, which cannot be put off once they are promised.
        if new and len(ledger.transfers) >= self._max_transfers // 2:
            return None
        return self._placeholders.take(len(keys) * self._chunk)

    def _refuse(self, request: str, keys: Sequence[bytes]) -> None:
        new = [key for key in keys if key not in self._core.ledger.index]
        if request not in self._refused:
            self._refused.add(request)
            self._core.skip(((request, len(new)),), new, SkipReason.POOL_FULL)

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        self._complete(req_context.req_id, Direction.STORE, keys, good=success)

    # Transfers.

    def _leave(self, request: str, direction: Direction, keys: Iterable[bytes], transfer: int) -> None:
        """vLLM says nothing more before this job goes to the workers: the log must have it now."""
        self._jobs[request, direction, frozenset(keys)] = transfer
        self._core.submit([transfer])

    def _complete(self, request: str, direction: Direction, keys: Iterable[bytes], *, good: bool) -> None:
        """All ranks have done it. What names no live transfer changes nothing, and is recorded (S5)."""
        named = frozenset(keys)
        if named:
            self._end(self._jobs.pop((request, direction, named), _UNKNOWN_TRANSFER), good=good)
        self._core.flush_log(offloader.LogFlush.REPORTS_TAKEN)

    def _end(self, transfer: int, *, good: bool) -> None:
        ended = self._core.report(transfer, 0, good)
        if ended is not None:
            self._placeholders.give_back(listed(ended.device_blocks))

    # Requests and steps.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Of a request that is decoded elsewhere everything is stored, its prefix hits too (S16)."""
        self._core.arrive(req_context.req_id)
        whole = is_remote_decode(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        request = req_context.req_id
        self._promises.drop(request)
        self._missed.pop(request, None)
        self._refused.discard(request)
        self._core.finish(request)

    def on_schedule_end(self, context: Any) -> None:
        core = self._core
        for request, key in self._missed.items():
            if request not in self._promises.by_request and core.may_match(request):
                core.pin(request, (), key)
        self._missed.clear()
        for request in self._promises.by_request:
            core.release(request)
        self._promises = _Promises()
        for request in sorted(context.preempted_req_ids):
            core.preempt(request)
        if self._steps_to_flush and not _TELLS_FLUSHED:
            self._steps_to_flush -= 1
            if not self._steps_to_flush:
                self._drain()
        core.end_step()

    def _pin_promises(self) -> None:
        """Before anything is evicted: what a lookup found stays until the step is scheduled (S7)."""
        index = self._core.ledger.index
        for request, keys in self._promises.by_request.items():
            self._core.pin(request, [index[key] for key in keys], None)

    # The cache as a whole.

    def reset_cache(self) -> None:
        """Nothing of before is found any more. Slots that a copy touches are used again when it has ended."""
        self._promises = _Promises()
        self._missed.clear()
        self._refused.clear()
        self._jobs.clear()
        if not self._core.reset():
            self._steps_to_flush = _STEPS_TO_FLUSH

    def on_reset_flushed(self) -> None:
        """Every job of before the last reset has ended on all ranks."""
        self._steps_to_flush = 0
        self._drain()

    def _drain(self) -> None:
        for transfer in list(self._core.ledger.transfers.values()):
            if transfer.state is TransferState.ABANDONED:
                self._end(transfer.id, good=True)

    def has_pending_work(self) -> bool:
        return self._core.ledger.draining()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [
            OffloadingEvent(one.keys, Medium(one.medium), one.removed) for one in self._core.take_events()
        ]

    def get_stats(self) -> Any:
        return to_offloading_stats(self._stats.take())

    def shutdown(self) -> None:
        self._engine_core.close()


class _Promises:
    """Keys that lookups of this step found, and that are not loaded yet."""

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
    """Each once, in the order given; of a set, in that of the prompt, group after group."""
    if not isinstance(keys, (set, frozenset)):
        return list(dict.fromkeys(keys))

    def place(key: bytes) -> tuple[bytes, int, bytes]:
        return key[-GROUP_INDEX_BYTES:], req_context.get_offload_key_position(key) or 0, key

    return sorted(keys, key=place)


def is_remote_decode(req_context: Any) -> bool:
    """Whether another engine is to decode what this one prefills."""
    return bool((req_context.kv_transfer_params or {}).get("do_remote_decode"))
