"""A store that failed is made again at the next step with room, while its request runs.

No doubled or lost store (S13), progress (S9).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_traffic import (
    ACTS,
    FULL,
    MAMBA,
    SLIDING,
    WIDE,
    Hand,
    come_to_rest,
    drive,
    keys_of,
    of_kind,
    stored_keys,
)

from examples import examples, seeds_of_today
from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core.offloader import LookupResult
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler import KVCacheGroup, LastStep, StepOutput, StoreMode
from kvsm.ids import to_list, unpack
from kvsm.testing import assert_verifies


def blocks_stored(plan: TransferPlan) -> list[int]:
    return [block for job in plan.stores for block in to_list(job.device_blocks)]


def running(hand: Hand, name: str = "r", first: int = 0, blocks: tuple[int, ...] = (0, 1)) -> SmallRequest:
    """A request that has computed two blocks and decodes."""
    request = SmallRequest(name, range(first, first + 9), 9)
    hand.admit(request, [*blocks, blocks[-1] + 1])
    hand.compute(request)
    return request


@pytest.mark.parametrize("failed_rank", [0, 1])
def test_failed_store_is_made_again_in_the_next_step(failed_rank: int) -> None:
    """One rank of two fails. A second request hits what the second try stored."""
    hand = Hand(core={"workers": 2})
    request = running(hand)
    (job,) = hand.step(request).stores
    for rank in range(2):
        hand.report(job.transfer, rank, good=rank != failed_rank)
    again = hand.step()
    assert blocks_stored(again) == [0, 1]
    hand.end(again)
    assert hand.admit(SmallRequest("second", range(9)), [10, 11, 12]) == 8
    assert_verifies(hand.log)


def test_lost_store_is_not_made_again_before_the_end_of_its_request() -> None:
    """Its worker is most likely dead, and each lost store retires its slots for good."""
    hand = Hand(core={"transfer_ticks": 2})
    request = running(hand)
    assert blocks_stored(hand.step(request)) == [0, 1]
    assert [blocks_stored(hand.step(request)) for _ in range(4)] == [[]] * 4
    hand.scheduler.request_finished(request, [[0, 1, 2]])
    assert blocks_stored(hand.step()) == [0, 1]


def test_failed_store_waits_for_room() -> None:
    """Another request waited for room before, and gets it. Its blocks can be evicted when they are stored."""
    hand = Hand(core={"host_blocks": 2})
    first, other = running(hand), running(hand, "other", 50, (5, 6))
    plan = hand.step(first)
    assert blocks_stored(hand.step(other)) == []
    hand.end(plan, good=False)
    plan = hand.step()
    assert blocks_stored(plan) == [5, 6]
    assert blocks_stored(hand.step()) == []
    hand.end(plan)
    assert blocks_stored(hand.step()) == [0, 1]
    assert_verifies(hand.log)


def test_store_that_fails_again_waits_for_the_end_of_its_request() -> None:
    """A rank that always fails is given each block twice, and once more when the request ends."""
    hand, request = Hand(), SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2])
    hand.compute(request)
    tries = []
    for _ in range(5):
        plan = hand.step(request)
        tries.append(blocks_stored(plan))
        hand.end(plan, good=False)
    assert tries == [[0, 1], [0, 1], [], [], []]
    hand.scheduler.request_finished(request, [[0, 1, 2]])
    assert blocks_stored(hand.step()) == [0, 1]


def test_only_the_blocks_that_failed_are_stored_again() -> None:
    """Blocks behind them that are on the host, or on their way there, stay as they are."""
    hand, request = Hand(), SmallRequest("r", range(17), 9)
    hand.admit(request, [0, 1, 2, 3, 4])
    plans = []
    for tokens in (4, 8, 12):
        hand.compute(request, tokens)
        plans.append(hand.step(request))
    hand.end(plans[1])
    hand.end(plans[0], good=False)
    hand.compute(request, 16)
    assert blocks_stored(hand.step(request)) == [0, 3]
    assert hand.core.ledger.requests["r"].settled == (4,)


def test_stores_that_fail_in_another_order_than_they_were_planned_are_all_made_again() -> None:
    hand, request = Hand(), SmallRequest("r", range(17), 9)
    hand.admit(request, [0, 1, 2, 3, 4])
    plans = []
    for tokens in (4, 8):
        hand.compute(request, tokens)
        plans.append(hand.step(request))
    hand.end(plans[1], good=False)
    assert blocks_stored(hand.step()) == [1]
    hand.end(plans[0], good=False)
    assert blocks_stored(hand.step()) == [0]
    assert_verifies(hand.log)


def test_request_that_shares_the_block_on_the_device_stores_it() -> None:
    """The request that offered the block is over when its store fails. The other one holds the block."""
    hand = Hand()
    first, second = running(hand, "first"), running(hand, "second")
    (job,) = hand.step(first).stores
    assert not hand.step(second).stores
    hand.scheduler.request_finished(first, [[0, 1, 2]])
    hand.report(job.transfer, good=False)
    assert blocks_stored(hand.step()) == [0, 1]
    assert of_kind(hand, ev.StorePlanned)[-1].owners == (("second", 2),)


def test_request_that_is_over_stores_nothing_again() -> None:
    """Its blocks may have another content by then."""
    hand = Hand(last_step=LastStep.KEEP_STEPPING)
    request = running(hand)
    (job,) = hand.step(request).stores
    hand.scheduler.request_finished(request, [[0, 1, 2]])
    hand.report(job.transfer, good=False)
    assert blocks_stored(hand.step()) == []
    assert not hand.scheduler.has_pending_work()


def test_preempted_request_stores_nothing_again_until_it_has_computed() -> None:
    """Its blocks are gone. Then its cursors restart, and so does the count of its tries."""
    hand = Hand()
    request = running(hand)
    (job,) = hand.step(request).stores
    hand.step(preempted={"r"})
    request.num_computed_tokens = 0
    hand.report(job.transfer, good=False)
    assert blocks_stored(hand.step()) == []
    hand.admit(request, [7, 8, 9])
    hand.compute(request)
    for _ in range(2):
        plan = hand.step(request)
        assert blocks_stored(plan) == [7, 8]
        hand.end(plan, good=False)


def test_store_of_an_older_epoch_is_not_made_again_by_itself() -> None:
    """The reset restarts all cursors. The blocks are offered once, by that."""
    hand = Hand()
    request = running(hand)
    (job,) = hand.step(request).stores
    hand.scheduler.reset_cache()
    assert blocks_stored(hand.step(request)) == []
    hand.report(job.transfer, good=False)
    assert hand.core.ledger.requests["r"].settled == ()
    plan = hand.step(request)
    assert blocks_stored(plan) == [0, 1]
    hand.end(plan, good=False)
    assert blocks_stored(hand.step()) == [0, 1]
    assert_verifies(hand.log)


def test_block_that_a_failed_load_was_to_bring_is_not_stored() -> None:
    """Correct bytes (S15): the cursor goes back to a block that the request has; what it does not have yet
    stays behind `trusted`."""
    hand = Hand(core={"workers": 2})
    hand.store(SmallRequest("before", range(8)), [20, 21])
    hand.core.match("holder", keys_of(SmallRequest("before", range(8))))
    request = SmallRequest("r", range(17), 9)
    hand.admit(request, [0, 1, 2, 3, 4])
    (load,) = hand.step().loads
    assert blocks_stored(hand.step(request)) == []
    for rank in range(2):
        hand.report(load.transfer, rank, good=False)
    request.num_computed_tokens = 0
    assert blocks_stored(hand.step(request)) == []
    hand.compute(request, 4)
    assert blocks_stored(hand.step(request)) == [0]


@pytest.mark.parametrize("groups", [(FULL, SLIDING), (FULL, WIDE)])
def test_failed_store_of_several_groups_is_made_again(groups: tuple[KVCacheGroup, ...]) -> None:
    hand, request = Hand(*groups), SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2], [5, 6, 7])
    hand.compute(request)
    plan = hand.step(request)
    hand.end(plan, good=False)
    assert blocks_stored(hand.step()) == blocks_stored(plan)


def test_mamba_state_that_failed_is_not_stored_again() -> None:
    """The engine hands a state over once. The attention blocks of the same transfer are stored again."""
    hand, request = Hand(FULL, MAMBA), SmallRequest("r", range(9), 9)
    hand.admit(request, [0, 1, 2], [])
    hand.compute(request)
    plan = hand.step(request, boundary_states={"r": [(1, 9, 8)]})
    assert blocks_stored(plan) == [0, 1, 9]
    hand.end(plan, good=False)
    assert blocks_stored(hand.step()) == [0, 1]


def test_failed_store_of_a_chunk_is_made_again() -> None:
    hand = Hand(core={"blocks_per_chunk": 2})
    request = running(hand)
    hand.end(hand.step(request), good=False)
    assert blocks_stored(hand.step()) == [0, 1]


def test_failed_store_needs_no_further_offers() -> None:
    """The blocks had been offered often enough for `store_threshold`."""
    hand = Hand(core={"store_threshold": 2})
    first, second = running(hand, "first"), running(hand, "second", blocks=(5, 6))
    hand.step(first)
    hand.end(hand.step(second), good=False)
    plan = hand.step()
    assert sorted(blocks_stored(plan)) in ([0, 1], [5, 6])
    hand.end(plan)
    assert hand.core.lookup(keys_of(first)[1]) is LookupResult.HIT


def test_failed_store_for_a_remote_decode_is_made_again_by_a_lazy_engine() -> None:
    engine = SmallEngine(store=StoreMode.LAZY, lazy_target_blocks=1)
    engine.arrive(SmallRequest("r", range(9), 9, {"do_remote_decode": True}))
    for _ in range(2):
        engine.step()
    (transfer,) = engine.copies
    engine.carry_out(transfer, good=False)
    engine.hand_on()
    assert blocks_stored(engine.step()) == blocks_stored_of(engine, transfer)
    come_to_rest(engine)


def blocks_stored_of(engine: SmallEngine, transfer: int) -> list[int]:
    (planned,) = [event for event in of_kind(engine, ev.StorePlanned) if event.seq == transfer]
    return to_list(planned.device_blocks)


def fail_often(engine: SmallEngine, good: Sequence[bool]) -> None:
    """Whether each copy of a worker is good, in turn. It fails in any case if `carry_out` says so."""
    real, turns = engine.carry_out, cycle(good)

    def carry_out(transfer: int, worker: int | None = None, *, good: bool = True) -> None:
        for one in range(engine.workers) if worker is None else [worker]:
            real(transfer, one, good=good and next(turns))

    engine.carry_out = carry_out  # type: ignore[method-assign]


@given(ACTS, st.sampled_from(list(LastStep)), st.booleans(), st.sampled_from([1, 2]))
@settings(max_examples=examples(30))
@example([3419, 54, 275, 44, 15], LastStep.FLUSH, False, 1)
@example([3471, 24, 76, 340, 382, 24, 327], LastStep.FLUSH, False, 1)
def test_rank_that_always_fails_is_not_given_a_block_without_end(
    acts: list[int], last_step: LastStep, references: bool, blocks_per_chunk: int
) -> None:
    """Progress (S9): under any traffic the engine comes to rest. For each time that a request gets blocks or
    the cache is reset, each of its keys is stored at first, at its end, and again at most once for each chunk
    whose store has failed: that takes the cursor back, and offers the chunks behind it again, too."""
    engine = SmallEngine(
        device_blocks=64,
        chunk_tokens=8,
        references=references,
        last_step=last_step,
        prefix_cache=False,
        core={"blocks_per_chunk": blocks_per_chunk},
    )
    fail_often(engine, [False])
    drive(engine, acts)
    stores = stored_keys(engine)
    restarts = len(of_kind(engine, ev.RequestPreempted)) + len(of_kind(engine, ev.CacheReset))
    lives = len(engine.requests) * (1 + restarts)
    assert all(stores.count(key) <= (2 + len(set(stores))) * lives for key in set(stores))


Life = tuple[str, int, int]
"""A request, the event after which it got its blocks, and the epoch."""


class RetryWatch:
    """Follows in the log which stores fail: what must the next step with room store again?"""

    def __init__(self, engine: SmallEngine) -> None:
        self.engine, self.retries = engine, 0
        self._read = 0
        """How many events were looked at."""
        self._stores: dict[int, tuple[bytes, ...]] = {}
        """Store of this epoch -> its keys."""
        self._failed: set[int] = set()
        """Stores that a worker reported as failed."""
        self._due: dict[Life, set[bytes]] = {}
        """The keys that each request must store again."""
        self._seen: set[tuple[Life, bytes]] = set()
        self._full_at = (-1, -1)
        """`_stamp` after the last step without room."""
        self._update = engine.scheduler.update_connector_output
        self._build = engine.scheduler.build_connector_meta
        engine.scheduler.update_connector_output = self.update  # type: ignore[method-assign]
        engine.scheduler.build_connector_meta = self.build  # type: ignore[method-assign]

    def update(self, reports: Any) -> Any:
        results = self._update(reports)
        self._follow()
        return results

    def _follow(self) -> None:
        live = self.engine.core.ledger.transfers
        for event in self.engine.log[self._read :]:
            if isinstance(event, ev.CacheReset):
                self._stores.clear()
            elif isinstance(event, ev.StorePlanned):
                self._stores[event.seq] = event.keys
            elif isinstance(event, ev.WorkerReported) and event.transfer in self._stores:
                if not event.good:
                    self._failed.add(event.transfer)
                if event.transfer not in live and event.transfer in self._failed:
                    self._note(self._stores.pop(event.transfer))
        self._read = len(self.engine.log)

    def _note(self, failed: Sequence[bytes]) -> None:
        for life, keys in self._held().items():
            for key in keys.intersection(failed):
                if (life, key) not in self._seen:
                    self._seen.add((life, key))
                    self._due.setdefault(life, set()).add(key)

    def _held(self) -> dict[Life, set[bytes]]:
        """The keys of the full blocks that each request has computed."""
        engine, held = self.engine, {}
        tokens = HASH_TOKENS * engine.core.config.blocks_per_chunk
        for name, tracked in engine.scheduler.state.tracked.items():
            request = engine.requests[name]
            if request.tables and not request.loading:
                computed = request.num_computed_tokens - request.num_output_placeholders
                confirmed = min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))
                life = name, tracked.watched_from, engine.core.ledger.epoch
                held[life] = set(keys_of(request, tokens=tokens)[: confirmed // tokens])
        return held

    def build(self, output: StepOutput) -> TransferPlan:
        ledger, decided, before = self.engine.core.ledger, len(self.engine.log), self._stamp()
        plan = self._build(output)
        self._follow()
        if ledger.draining():
            return plan
        held, room = self._held(), before != self._full_at and self._has_room(decided)
        if not room:
            self._full_at = self._stamp()
        for life, due in self._due.items():
            lacking = {key for key in due & held.get(life, set()) if key not in ledger.index}
            assert not (lacking and room), f"{life[0]} has room for {len(lacking)} keys whose store failed"
            self.retries += len(due - lacking)
            self._due[life] = lacking
        return plan

    def _stamp(self) -> tuple[int, int]:
        """After a step without room the blocks that wait are tried again when this has changed."""
        ledger = self.engine.core.ledger
        return ledger.ended_at, len(ledger.free) + len(ledger.policy)

    def _has_room(self, decided: int) -> bool:
        """Whether the step could store one more block. decided: where its events begin.

        A step evicts nothing that it finds on the host itself.
        """
        ledger = self.engine.core.ledger
        touched = [event for event in self.engine.log[decided:] if isinstance(event, ev.BlocksTouched)]
        used = {slot for event in touched for slot in to_list(unpack(event.slots))}
        idle = {slot for slot in range(ledger.config.host_blocks) if slot in ledger.policy}
        return bool(len(ledger.free) or idle - used)


def walk_with_failures(seed: int) -> int:
    """Any traffic, in which about half of the copies fail. Returns how many blocks had to be stored again."""
    random = Random(seed)
    core = {
        "blocks_per_chunk": random.choice([1, 1, 2]),
        "transfer_ticks": random.choice([0, 0, 3]),
        "store_threshold": random.choice([1, 1, 2]),
        "defer_ticks": 2,
    }
    engine = SmallEngine(
        device_blocks=48,
        host_blocks=random.choice([4, 12, 32]),
        workers=random.choice([1, 2]),
        references=random.random() < 0.5,
        asynchronous=random.random() < 0.5,
        prefix_cache=random.random() < 0.5,
        chunk_tokens=4,
        core=core,
    )
    watch = RetryWatch(engine)
    fail_often(engine, [random.random() < 0.5 for _ in range(9)])
    drive(engine, [random.randrange(10_000) for _ in range(random.randint(10, 45))])
    assert_verifies(engine.log)
    return watch.retries


def test_failed_store_is_made_again_under_any_traffic() -> None:
    """After each step with room, a block whose store failed is on the host or on its way there, as long as
    its request has it. A second failure does not count."""
    assert sum(walk_with_failures(seed) for seed in range(25)) > 50


@pytest.mark.slow
def test_failed_store_is_made_again_in_long_campaigns() -> None:
    assert sum(walk_with_failures(seed) for seed in seeds_of_today(150)) > 300
