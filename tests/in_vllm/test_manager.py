"""`KvsmManager`, called as vLLM's OffloadingConnector calls a manager, and compared with vLLM's own.

There is no engine and no memory. The tests look at the answers, at what is held, and at the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from hanging_copies import Clock
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsm.core.kv_events import Publisher
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.errors import InvalidEvent, LimitReached
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK
from kvsm.testing import assert_at_rest, assert_replays, assert_sound, assert_verifies
from kvsm.vllm.engine_offloader import EngineOffloader
from kvsm.vllm.spec_manager import PLACEHOLDERS_PER_HOST_BLOCK, HostSlots, KvsmManager
from kvsm.vllm.spec_stats import metric_definitions
from kvsm.vllm.versions import features

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class FlushedLog(MemoryLog):
    """A log in memory that knows how much of it was flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed = len(self)


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(b"block-%04d" % number, group)


def keys(*numbers: int) -> list[Any]:
    return [key(number) for number in numbers]


class Rig:
    """A manager with its log, and short names for vLLM's calls."""

    def __init__(
        self, slots: int = 4, *, timeout_s: float = 0.0, most_steps: int = 1, **options: Any
    ) -> None:
        chunk = options.get("blocks_per_chunk", 1)
        config = OffloadConfig(
            host_blocks=slots,
            device_blocks=PLACEHOLDERS_PER_HOST_BLOCK * slots * chunk,
            defer_ticks=0,
            transfer_ticks=0,
            **options,
        )
        self.log = FlushedLog()
        self.core = Offloader(config, self.log, publisher=Publisher(), clock_ns=lambda: 0)
        core = EngineOffloader(self.core, Metrics.attached_to(self.core), None)
        self.manager = KvsmManager(core, timeout_s, most_steps)
        self.clock = Clock()
        self.manager.deadlines.clock = self.clock.read
        self.told: set[bytes] = set()

    def context(self, request: str, **parameters: Any) -> ReqContext:
        context = ReqContext(request, kv_transfer_params=parameters or None)
        self.manager.on_new_request(context)
        return context

    def begin_store(self, names: Iterable[Any], request: str = "storer") -> tuple[ReqContext, list[int]]:
        context = self.context(request)
        output = self.manager.prepare_store(names, context)
        assert output is not None
        assert output.keys_to_store == list(names)
        return context, output.store_spec.block_ids.tolist()

    def store(self, names: Iterable[Any], request: str = "storer") -> list[int]:
        """Store these keys, and finish the request. Returns the slots."""
        context, slots = self.begin_store(names, request)
        self.manager.complete_store(set(names), context)
        self.manager.on_request_finished(context)
        return slots

    def end_step(self, preempted: Iterable[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), tuple(preempted)))

    def end_reset(self) -> None:
        """The copies from before a reset have ended. A newer vLLM says so, an older one schedules the step
        after the first."""
        if features().tells_of_flushed_resets:
            self.manager.on_reset_flushed()
        else:
            self.end_step()

    def check(self) -> None:
        """The state is sound, published events fold to the readable keys, and placeholders without a copy are
        free."""
        assert_sound(self.core.ledger)
        held = sum(map(bool, self.core.ledger.leases.words))
        assert self.manager._placeholders.num_free == self.core.config.device_blocks - held
        for event in self.manager.take_events():
            assert event.medium is Medium.CPU
            if getattr(event, "metadata_only", False):
                assert not self.told.intersection(event.keys)
            elif event.removed:
                self.told.difference_update(event.keys)
            else:
                self.told.update(event.keys)
        ledger = self.core.ledger
        assert self.told == {name for name, slot in ledger.index.items() if ledger.readable(slot)}

    def check_log(self) -> None:
        assert_replays(self.log, self.core.ledger)
        assert_verifies(self.log)


# Compared with vLLM's own manager.


class Beside:
    """Our manager and vLLM's, called the same way. Raises if they answer differently."""

    def __init__(self, slots: int, store_threshold: int) -> None:
        self.ours = Rig(slots, store_threshold=store_threshold)
        self.theirs = CPUOffloadingManager(slots, "lru", store_threshold=store_threshold)
        self.live: list[tuple[str, list[Any], ReqContext, ReqContext]] = []
        self.requests = 0

    def ask(self, names: list[Any], *, offer: bool) -> None:
        """A new request looks these keys up. It loads them if all are there, and offers them if not, or if
        `offer`."""
        request = f"r{self.requests}"
        self.requests += 1
        mine, its = self.ours.context(request), ReqContext(request)
        self.theirs.on_new_request(its)
        found = [self.ours.manager.lookup(name, mine) for name in names]
        assert found == [self.theirs.lookup(name, its) for name in names]
        self.ours.end_step()
        if offer or MISS in found:
            self._offer(names, mine, its)
        elif PENDING not in found:
            self._load(names, mine, its)
        else:
            self._finish(mine, its)

    def _offer(self, names: list[Any], mine: ReqContext, its: ReqContext) -> None:
        output, expected = self.ours.manager.prepare_store(names, mine), self.theirs.prepare_store(names, its)
        assert (output is None) == (expected is None)
        if output is None or expected is None:
            return self._finish(mine, its)
        assert output.keys_to_store == expected.keys_to_store
        assert output.evicted_keys == expected.evicted_keys
        assert len(output.store_spec.block_ids) == len(expected.store_spec.block_ids)
        if not output.keys_to_store:
            return self._finish(mine, its)
        return self.live.append(("store", output.keys_to_store, mine, its))

    def _load(self, names: list[Any], mine: ReqContext, its: ReqContext) -> None:
        slots = self.ours.manager.prepare_load(names, mine)
        assert len(slots.block_ids) == len(self.theirs.prepare_load(names, its).block_ids)
        assert isinstance(slots, HostSlots)
        self.live.append(("load", names, mine, its))

    def end(self, which: int) -> None:
        if not self.live:
            return
        sort, names, mine, its = self.live.pop(which % len(self.live))
        # vLLM passes a set.
        getattr(self.ours.manager, f"complete_{sort}")(set(names), mine)
        getattr(self.theirs, f"complete_{sort}")(names, its)
        self._finish(mine, its)

    def _finish(self, mine: ReqContext, its: ReqContext) -> None:
        self.ours.manager.on_request_finished(mine)
        self.theirs.on_request_finished(its)

    def reset(self) -> None:
        """As in vLLM: jobs in flight are not reported as completed."""
        self.ours.manager.reset_cache()
        self.theirs.reset_cache()
        for _, _, mine, its in self.live:
            self._finish(mine, its)
        self.live.clear()
        self.ours.end_step()
        self.ours.end_reset()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 9), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("reset")),
    ),
    max_size=60,
)


def drive(actions: list[tuple[Any, ...]], *, slots: int, longest: int, threshold: int = 1) -> None:
    pair = Beside(slots, threshold)
    for action in actions:
        if action[0] == "ask":
            _, first, length, offer = action
            names = keys(*range(first, first + min(length, longest)))
            pair.ask(names, offer=offer)
        elif action[0] == "end":
            pair.end(action[1])
        elif threshold == 1:  # vLLM's manager keeps its counts of offers after a reset.
            pair.reset()
        pair.ours.check()
    while pair.live:
        pair.end(0)
    pair.ours.check()
    assert_at_rest(pair.ours.core.ledger)
    pair.ours.check_log()


@given(ACTIONS)
@settings(max_examples=150, deadline=None)
def test_a_full_pool_answers_and_evicts_to_vllm_kv_event(actions: list[tuple[Any, ...]]) -> None:
    """LRU with three slots and any number of copies in flight. A request has one key, so order within it
    cannot differ.

    The log replays and verifies.
    """
    drive(actions, slots=3, longest=1)


@given(ACTIONS, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_a_roomy_pool_answers_to_vllm_kv_event(actions: list[tuple[Any, ...]], threshold: int) -> None:
    """Requests with several keys, some resident and some in flight, and store thresholds."""
    drive(actions, slots=64, longest=4, threshold=threshold)


# What the interface does not say.


class Ordered(set[Any]):
    """A set that is iterated in this order, as it may be in another process."""

    def __init__(self, members: Iterable[Any]) -> None:
        self._members = list(members)
        super().__init__(self._members)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)


@given(st.permutations(range(6)), st.permutations(range(6)))
@settings(max_examples=40, deadline=None)
def test_the_order_of_a_set_is_not_seen(stored: list[int], loaded: list[int]) -> None:
    """Determinism (S11): the same calls give the same log, however their sets are hashed."""
    names = [key(9 - number, number % 2) for number in range(6)]
    logs = []
    for places, others in ((range(6), range(6)), (stored, loaded)):
        rig = Rig(8)
        context = rig.context("r")
        for position, name in enumerate(names):
            context.set_offload_key_position(name, 32 * position)
        output = rig.manager.prepare_store(Ordered(names[place] for place in places), context)
        assert output is not None
        rig.manager.complete_store(Ordered(names[place] for place in others), context)
        rig.manager.touch(Ordered(names[place] for place in places), context)
        slots = rig.manager.prepare_load(Ordered(names[place] for place in others), context)
        rig.manager.complete_load(Ordered(names[place] for place in places), context)
        logs.append((list(rig.log), output.keys_to_store, slots.block_ids.tolist()))
    assert logs[0] == logs[1]
    # Group after group, in the order of the prompt.
    assert logs[0][1] == [*names[0::2], *names[1::2]]


def test_a_list_keeps_its_order() -> None:
    """vLLM pairs slots with device blocks by their position."""
    rig = Rig()
    names = keys(3, 1, 2)
    slots = rig.store(names)
    context = rig.context("r")
    assert rig.manager.prepare_load(keys(2, 3), context).block_ids.tolist() == [slots[2], slots[0]]


def test_a_hit_holds_until_the_step_is_scheduled() -> None:
    """A match holds what it counts (S7): until the step is scheduled, a store takes no slot that a lookup
    found."""
    rig = Rig(2)
    rig.store(keys(1, 2))
    asking, storing = rig.context("asking"), rig.context("storing")
    assert [rig.manager.lookup(name, asking) for name in keys(1, 2)] == [HIT, HIT]
    assert rig.manager.prepare_store(keys(3), storing) is None
    assert rig.manager.get_load_source(key(1), asking) is CacheHitSource.HOST
    rig.manager.prepare_load(keys(1, 2), asking)
    rig.manager.complete_load(set(keys(1, 2)), asking)
    assert [rig.manager.lookup(name, asking) for name in keys(1, 2)] == [HIT, HIT]
    assert rig.manager.prepare_store(keys(3), storing) is None
    rig.end_step()
    output = rig.manager.prepare_store(keys(3), storing)
    assert output is not None
    assert output.evicted_keys == keys(2)
    rig.check()
    rig.check_log()


def test_an_unused_promise_is_no_event() -> None:
    """A request that vLLM cannot place asks in every step. The log must not grow."""
    rig = Rig()
    rig.store(keys(1))
    context = rig.context("r")
    rig.end_step()
    for _ in range(3):
        assert [rig.manager.lookup(name, context) for name in keys(1, 2)] == [HIT, MISS]
        before = len(rig.log)
        rig.end_step()
        assert len(rig.log) == before


def test_a_miss_is_recorded_once_with_its_key() -> None:
    """So the log can explain why a request was computed."""
    rig = Rig()
    context = rig.context("r")
    for _ in range(2):
        assert [rig.manager.lookup(name, context) for name in keys(5, 6)] == [MISS, MISS]
        rig.end_step()
    misses = [event for event in rig.log if event.kind == "HitMatched"]
    assert [(event.request, event.slots, event.missed) for event in misses] == [("r", (), key(5))]


def test_a_hit_that_cannot_be_loaded_now_is_pending() -> None:
    """Loads of one key by several requests use a bounded number of placeholders; the error names the
    limit."""
    rig = Rig(2)
    rig.store(keys(1, 2))
    contexts = [rig.context(f"r{number}") for number in range(3)]
    for context in contexts[:2]:
        assert [rig.manager.lookup(name, context) for name in keys(1, 2)] == [HIT, HIT]
        rig.manager.prepare_load(keys(1, 2), context)
        rig.end_step()
    assert rig.manager.lookup(key(1), contexts[2]) is PENDING
    with pytest.raises(LimitReached, match="r2 loads 1 keys"):
        rig.manager.prepare_load(keys(1), contexts[2])
    rig.manager.complete_load(set(keys(1, 2)), contexts[0])
    # Promises of one step count together.
    assert [rig.manager.lookup(name, contexts[2]) for name in keys(1, 2)] == [HIT, HIT]
    assert rig.manager.lookup(key(1), contexts[0]) is PENDING
    rig.check()


def test_what_is_promised_stays_promised_when_it_is_asked_for_again() -> None:
    """vLLM asks for a key more than once in a step, if a model has several KV cache groups. The first answer
    has counted the key and its transfer."""
    rig = Rig(2)
    rig.store(keys(1, 2))
    loading, asking = rig.context("loading"), rig.context("asking")
    rig.manager.prepare_load(keys(1, 2), loading)
    for _ in range(2):
        assert [rig.manager.lookup(name, asking) for name in keys(1, 2)] == [HIT, HIT]
    rig.manager.prepare_load(keys(1, 2), asking)
    rig.check()


def test_a_promised_load_has_room_for_its_next_key() -> None:
    """It is one transfer, whatever the number of its keys."""
    rig = Rig(16, max_live_transfers=2)
    rig.store(keys(1, 2, 3))
    loading, asking = rig.context("loading"), rig.context("asking")
    rig.manager.prepare_load(keys(3), loading)
    assert [rig.manager.lookup(name, asking) for name in keys(1, 2)] == [HIT, HIT]
    rig.manager.prepare_load(keys(1, 2), asking)
    rig.check()


def test_loads_find_room_that_stores_must_leave() -> None:
    """Stores take at most half of the transfers, because a load cannot wait."""
    rig = Rig(16, max_live_transfers=4)
    rig.store(keys(1))
    rig.begin_store(keys(2), "a")
    rig.begin_store(keys(3), "b")
    context = rig.context("r")
    assert rig.manager.prepare_store(keys(4), context) is None
    for request in ("c", "d"):
        loading = rig.context(request)
        assert rig.manager.lookup(key(1), loading) is HIT
        rig.manager.prepare_load(keys(1), loading)
    assert rig.manager.lookup(key(1), context) is PENDING


def test_a_request_that_loads_waits_with_its_next_load() -> None:
    """Two loads of one request could not be told apart."""
    rig = Rig()
    rig.store(keys(1, 2))
    context = rig.context("r")
    rig.manager.prepare_load(keys(1), context)
    rig.end_step(preempted=["r"])
    assert rig.manager.lookup(key(2), context) is PENDING
    rig.manager.complete_load(set(keys(1)), context)
    assert rig.manager.lookup(key(2), context) is HIT


def test_all_of_an_offer_or_nothing() -> None:
    """No doubled or lost store (S13): vLLM never offers again what it believes stored. The reason is recorded
    once."""
    rig = Rig(3)
    first, _ = rig.begin_store(keys(1, 2), "first")
    context = rig.context("r")
    for _ in range(3):
        assert rig.manager.prepare_store(keys(3, 4), context) is None
        rig.end_step()
    skipped = [event for event in rig.log if event.kind == "StoreSkipped"]
    assert [(event.keys, event.reason) for event in skipped] == [(tuple(keys(3, 4)), "pool full")]
    rig.manager.complete_store(set(keys(1, 2)), first)
    output = rig.manager.prepare_store(keys(3, 4), context)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == (keys(3, 4), keys(2))


def offer(rig: Rig, names: list[Any], context: ReqContext) -> None:
    """Store these keys, which all find room."""
    output = rig.manager.prepare_store(names, context)
    assert output is not None
    rig.manager.complete_store(set(names), context)


def at_positions(rig: Rig, request: str, blocks: int) -> ReqContext:
    """A request of so many blocks in two KV cache groups, as vLLM makes it."""
    context = rig.context(request)
    for number in range(blocks):
        for group in range(2):
            context.set_offload_key_position(key(number, group), 16 * (number + 1))
    return context


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("piece", [1, 2, 4])
def test_pieces_of_a_prompt_are_evicted_from_its_end(policy: str, piece: int) -> None:
    """In each KV cache group: behind a prefix that the request has loaded, and after a preemption, when it
    offers all its blocks again."""
    rig = Rig(12, policy=policy)
    context = at_positions(rig, "first", 2)
    offer(rig, [key(0), key(1), key(0, 1), key(1, 1)], context)
    context = at_positions(rig, "r", 6)
    hits = [key(number, group) for group in range(2) for number in range(2)]
    assert {rig.manager.lookup(name, context) for name in hits} == {HIT}
    rig.manager.touch(hits, context)
    rig.manager.prepare_load(hits, context)
    rig.manager.complete_load(set(hits), context)
    for start in range(2, 6, piece):
        stop = min(start + piece, 6)
        offer(rig, [key(number, group) for group in range(2) for number in range(start, stop)], context)
    rig.end_step(["r"])
    for start in range(0, 6, piece):
        stop = min(start + piece, 6)
        output = rig.manager.prepare_store([key(number, 0) for number in range(start, stop)], context)
        assert output is not None
        assert not output.keys_to_store
    policy_of = rig.core.ledger.policy
    choice = policy_of.choose(12, ())
    assert choice is not None
    order = [rig.core.ledger.key_of[slot] for slot in choice.victims]
    new = [one for one in order if one not in hits]
    for group in range(2):
        assert [one for one in new if one[-1] == group] == [key(number, group) for number in range(5, 1, -1)]
        assert [one for one in order if one in hits and one[-1] == group] == [key(1, group), key(0, group)]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_offer_does_not_evict_what_it_finds_there(policy: str) -> None:
    rig = Rig(2, policy=policy)
    rig.store(keys(1))
    rig.store(keys(2))
    assert rig.manager.prepare_store(keys(1, 3, 4), rig.context("q")) is None
    output = rig.manager.prepare_store(keys(1, 3), rig.context("r"))
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == (keys(3), keys(2))


def test_an_end_that_names_no_transfer_changes_nothing() -> None:
    """Stale reports change nothing (S5): doubled, with other keys, of another request, or of the other
    direction."""
    rig = Rig()
    context, _ = rig.begin_store(keys(1, 2))
    state = rig.core.ledger.blocks.words.tolist()
    rig.manager.complete_store(set(keys(1)), context)
    rig.manager.complete_store(set(keys(1, 2)), rig.context("another"))
    rig.manager.complete_load(set(keys(1, 2)), context)
    assert rig.core.ledger.blocks.words.tolist() == state
    rig.manager.complete_store(set(keys(1, 2)), context)
    rig.manager.complete_store(set(keys(1, 2)), context)
    rejected = [event.reason for event in rig.log if event.kind == "ReportRejected"]
    assert rejected == ["no such transfer was planned"] * 4
    rig.check()
    rig.check_log()


def test_a_store_that_failed_is_not_found() -> None:
    """Failure is not success (S6), if a vLLM reports one: 0.32 never does."""
    rig = Rig()
    context, _ = rig.begin_store(keys(1))
    rig.manager.complete_store(set(keys(1)), context, success=False)
    assert rig.manager.lookup(key(1), context) is MISS
    rig.check()


def test_what_is_not_on_the_host_is_not_loaded() -> None:
    rig = Rig()
    context, _ = rig.begin_store(keys(1))
    before = len(rig.log)
    for name in keys(1, 2):
        with pytest.raises(InvalidEvent, match="not on the host"):
            rig.manager.prepare_load([name], context)
    assert len(rig.log) == before


# A reset.


def states(rig: Rig) -> list[BlockState]:
    return [BlockState(word & STATE_MASK) for word in rig.core.ledger.blocks.words]


def test_a_reset_keeps_slots_until_vllm_has_waited() -> None:
    """No reuse in flight (S3), no stale data (S14): the first step after the reset is too early.

    vLLM sends the order to wait with this step. A store that is planned in it may start before that.
    """
    rig = Rig(2)
    rig.store(keys(1))
    loading = rig.context("loading")
    rig.manager.prepare_load(keys(1), loading)
    rig.begin_store(keys(2), "storing")
    rig.manager.reset_cache()
    assert rig.manager.has_pending_work()
    assert [rig.manager.lookup(name, loading) for name in keys(1, 2)] == [MISS, MISS]
    later = rig.context("later")
    rig.end_step()
    assert states(rig) == [BlockState.QUARANTINED] * 2
    assert rig.manager.prepare_store(keys(3), later) is None
    rig.end_reset()
    assert not rig.manager.has_pending_work()
    assert rig.manager.prepare_store(keys(3), later) is not None
    rig.check()
    rig.check_log()


def test_a_second_reset_waits_again() -> None:
    rig = Rig(2)
    rig.begin_store(keys(1), "a")
    rig.manager.reset_cache()
    rig.end_step()
    rig.begin_store(keys(2), "b")
    rig.manager.reset_cache()
    rig.end_step()
    assert states(rig) == [BlockState.QUARANTINED] * 2
    rig.end_reset()
    assert states(rig) == [BlockState.EVICTED] * 2
    assert not rig.manager.has_pending_work()


def test_a_vllm_that_tells_that_all_has_ended_is_believed() -> None:
    rig = Rig(1)
    rig.begin_store(keys(1))
    rig.manager.reset_cache()
    rig.manager.on_reset_flushed()
    assert not rig.manager.has_pending_work()
    assert states(rig) == [BlockState.EVICTED]


@pytest.mark.parametrize("good", [True, False])
def test_vllm_forgets_the_description_of_a_key_that_was_not_stored(good: bool) -> None:
    """vLLM keeps one from the offer to the removal, and no removal follows a failed or lost store."""
    rig = Rig(4, timeout_s=10)
    failing, _ = rig.begin_store(keys(1), "failing")
    rig.manager.complete_store(set(keys(1)), failing, success=good)
    rig.begin_store(keys(2), "lost")
    rig.clock.advance(10)
    rig.end_step()
    rig.end_step()
    expected = keys(2) if good else keys(1, 2)
    told = [one for one in rig.manager.take_events() if getattr(one, "metadata_only", False)]
    assert [one.keys for one in told] == ([expected] if features().has_metadata_only_events else [])
    assert all(one.removed for one in told)
    assert not list(rig.manager.take_events())


def test_vllm_keeps_the_description_of_a_key_that_is_offered_again() -> None:
    """The second store is in flight, and its event will need the tokens."""
    rig = Rig(4)
    context, _ = rig.begin_store(keys(1))
    rig.manager.complete_store(set(keys(1)), context, success=False)
    rig.begin_store(keys(1))
    assert not list(rig.manager.take_events())


def test_what_ended_before_a_reset_is_not_taken_for_what_came_after() -> None:
    """Stale reports change nothing (S5): the same request stores the same keys again, and then the first
    store ends."""
    rig = Rig(2)
    context, _ = rig.begin_store(keys(1), "r")
    rig.manager.reset_cache()
    rig.manager.complete_store(set(keys(1)), context)
    assert rig.log[-1].kind == "ReportRejected"
    assert rig.manager.lookup(key(1), context) is MISS


def test_what_a_load_brought_before_a_reset_does_not_stop_a_store_after_it() -> None:
    """A placeholder does not stand for the device block that had it before."""
    rig = Rig(1)
    rig.store(keys(1))
    loading = rig.context("r")
    rig.manager.prepare_load(keys(1), loading)
    rig.manager.complete_load(set(keys(1)), loading)
    rig.manager.reset_cache()
    output = rig.manager.prepare_store(keys(1), loading)
    assert output is not None
    assert output.keys_to_store == keys(1)
    rig.manager.complete_store(set(keys(1)), loading)
    rig.check()
    rig.check_log()


# Copies that never end.


def test_an_overdue_store_is_retired() -> None:
    """Progress (S9): its slot is lost and its key is not found. What vLLM reports of it later is rejected."""
    rig = Rig(2, timeout_s=10)
    context, (slot,) = rig.begin_store(keys(1))
    rig.clock.advance(9.9)
    for _ in range(3):
        rig.end_step()
    assert states(rig)[slot] is BlockState.STORING
    rig.clock.advance(0.1)
    rig.end_step()
    assert states(rig)[slot] is BlockState.STORING, "a step in flight may still report it"
    rig.end_step()
    assert states(rig)[slot] is BlockState.RETIRED
    rig.manager.complete_store(set(keys(1)), context)
    assert rig.log[-1].kind == "ReportRejected"
    assert rig.manager.lookup(key(1), context) is MISS
    assert rig.store(keys(2)) != [slot]
    rig.check()
    rig.check_log()


def test_an_overdue_load_is_retired_and_may_still_end() -> None:
    """Its slots stay as they are, so the request may use what it brings late."""
    rig = Rig(2, timeout_s=10)
    (slot,) = rig.store(keys(1))
    loading = rig.context("loading")
    rig.manager.prepare_load(keys(1), loading)
    rig.clock.advance(10)
    rig.end_step()
    rig.end_step()
    assert states(rig)[slot] is BlockState.RETIRED
    assert rig.manager.lookup(key(1), loading) is MISS
    rig.manager.complete_load(set(keys(1)), loading)
    rig.manager.on_request_finished(loading)
    rig.check()
    assert_at_rest(rig.core.ledger)
    rig.check_log()


@pytest.mark.parametrize(("age_s", "state"), [(19.9, BlockState.STORED), (20, BlockState.RETIRED)])
def test_a_store_that_a_rank_may_have_given_up_is_not_believed(age_s: float, state: BlockState) -> None:
    """Failure is not success (S6): from this age on, a rank reports a store that it has given up."""
    rig = Rig(2, timeout_s=10)
    context, (slot,) = rig.begin_store(keys(1))
    rig.clock.advance(age_s)
    rig.manager.complete_store(set(keys(1)), context)
    assert states(rig)[slot] is state
    rig.check()
    rig.check_log()


@pytest.mark.parametrize(("age_s", "state"), [(9, BlockState.EVICTED), (20, BlockState.RETIRED)])
def test_after_a_reset_a_copy_that_a_rank_may_have_given_up_is_lost(age_s: float, state: BlockState) -> None:
    """No reuse in flight (S3): the workers wait for the jobs from before the reset, but not forever."""
    rig = Rig(2, timeout_s=10)
    rig.store(keys(1))
    rig.manager.prepare_load(keys(1), rig.context("loading"))
    rig.begin_store(keys(2))
    rig.manager.reset_cache()
    rig.end_step()
    rig.clock.advance(age_s)
    rig.end_reset()
    assert states(rig) == [state] * 2
    assert not rig.manager.has_pending_work()
    rig.check()
    rig.check_log()


def test_a_reset_is_over_when_its_first_step_is() -> None:
    """With several steps in flight the workers may still wait when the next steps are scheduled."""
    rig = Rig(1, most_steps=3)
    rig.begin_store(keys(1))
    rig.manager.reset_cache()
    for _ in range(3):
        rig.end_step()
        assert states(rig) == [BlockState.QUARANTINED]
    rig.end_reset()
    assert states(rig) == [BlockState.EVICTED]


def test_a_store_is_not_begun_again_before_its_lost_twin_is_reported() -> None:
    """Generation (S5): the end of the lost one would be taken for the end of the new one."""
    rig = Rig(2, timeout_s=10)
    context, _ = rig.begin_store(keys(1))
    rig.clock.advance(10)
    rig.end_step()
    rig.end_step()
    assert rig.manager.prepare_store(keys(1), context) is None
    rig.manager.complete_store(set(keys(1)), context)
    output = rig.manager.prepare_store(keys(1), context)
    assert output is not None
    assert output.keys_to_store == keys(1)


# Requests, and what is published.


def test_a_request_that_is_decoded_elsewhere_is_stored_whole() -> None:
    """Full offload (S16): prefix hits too, however rarely they were offered."""
    rig = Rig(store_threshold=3)
    context = ReqContext("r", kv_transfer_params={"do_remote_decode": True})
    assert rig.manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    assert rig.manager.on_new_request(ReqContext("s")).policy is OffloadPolicy.CHUNK_LEVEL
    output = rig.manager.prepare_store(keys(1, 2), context)
    assert output is not None
    assert output.keys_to_store == keys(1, 2)
    other = rig.manager.prepare_store(keys(3), rig.context("s"))
    assert other is not None
    assert other.keys_to_store == []


def test_an_offer_without_room_does_not_count() -> None:
    """A refused offer is made again. If it counted each time, any threshold would be reached by waiting."""
    rig = Rig(1, store_threshold=2)
    busy = rig.context("busy", do_remote_decode=True)
    assert rig.manager.prepare_store(keys(9), busy) is not None
    context = rig.context("r")
    assert rig.manager.prepare_store(keys(1), context) is not None
    for _ in range(3):
        assert rig.manager.prepare_store(keys(1), context) is None
    assert rig.core.ledger.offers.times[key(1)] == 1
    rig.manager.complete_store(set(keys(9)), busy)
    output = rig.manager.prepare_store(keys(1), context)
    assert output is not None
    assert output.keys_to_store == keys(1)
    rig.check_log()


def test_a_finished_request_leaves_nothing() -> None:
    """Progress (S9), in every state of the request. Its copies end as usual."""
    rig = Rig()
    rig.store(keys(1))
    rig.end_step()
    context = rig.context("r")
    rig.manager.lookup(key(1), context)
    rig.manager.lookup(key(7), context)
    rig.manager.on_request_finished(context)
    rig.end_step()
    assert not rig.core.ledger.requests
    again = rig.context("again")
    rig.manager.prepare_load(keys(1), again)
    rig.manager.on_request_finished(again)
    rig.manager.complete_load(set(keys(1)), again)
    assert_at_rest(rig.core.ledger)
    rig.check_log()


def test_a_job_leaves_after_its_log() -> None:
    """vLLM takes a job as soon as it has the answer, so the log must have it before."""
    rig = Rig()
    context, _ = rig.begin_store(keys(1))
    assert rig.log.flushed == len(rig.log)
    rig.manager.complete_store(set(keys(1)), context)
    assert rig.log.flushed == len(rig.log)
    rig.manager.prepare_load(keys(1), context)
    assert rig.log.flushed == len(rig.log)


def test_a_chunk_is_whole_in_the_log() -> None:
    """The manager does not hear which blocks of a chunk a load wants: one slot, and placeholders for all its
    blocks."""
    rig = Rig(2, blocks_per_chunk=3)
    slots = rig.store(keys(1, 2))
    assert sorted(slots) == [0, 1]
    context = rig.context("r")
    assert rig.manager.prepare_load(keys(2), context).block_ids.tolist() == [slots[1]]
    rig.manager.complete_load(set(keys(2)), context)
    assert len(next(event for event in rig.log if event.kind == "LoadPlanned").device_blocks) == 3
    rig.check()
    rig.check_log()


def test_a_request_may_ask_not_to_be_stored() -> None:
    """`offload` false, as with the connector. What others stored is loaded all the same."""
    rig = Rig()
    rig.store(keys(1))
    context = rig.context("r", offload=False)
    output = rig.manager.prepare_store(keys(1, 2), context)
    assert output is not None
    assert (output.keys_to_store, output.store_spec.block_ids.tolist()) == ([], [])
    assert rig.manager.lookup(*keys(1), context) is LookupResult.HIT
    rig.manager.on_request_finished(context)
    # The name may be used again.
    assert rig.store(keys(2), "r")


def test_statistics_are_of_metrics_that_vllm_was_told() -> None:
    """vLLM asserts this. Each change is reported once."""
    rig = Rig()
    rig.store(keys(1, 2))
    stats = rig.manager.get_stats()
    assert stats is not None
    told = stats.data["data"]
    definitions = metric_definitions()
    for name, series in told.items():
        assert all(len(labels) == len(definitions[name].labelnames) for labels in series)
    assert told["vllm:kvsm_blocks_stored"] == {(): 2}
    assert told["vllm:kvsm_resident_blocks"] == {(): 2}
    assert rig.manager.get_stats() is None
