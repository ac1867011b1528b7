"""What an offer stores, where, and what becomes of the rest: call by call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_life import begin_store, fold, keys, kinds, load, new_core, store
from hypothesis import given
from hypothesis import strategies as st

from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LookupResult, Offloader, PreparedStore
from kvsm.core.policies import POLICIES
from kvsm.errors import InvalidEvent, LimitReached, WrongArgument
from kvsm.events import SkipReason, StorePlanned, StoreSkipped
from kvsm.ids import SMALL, to_list


class TestStore:
    def test_resident_keys_are_not_stored_again(self) -> None:
        """No doubled or lost store (S13): they are touched."""
        core, _ = new_core()
        store(core, "r", keys(2))
        prepared = core.prepare_store("r", keys(3), [4, 5, 6])
        assert prepared.keys == tuple(keys(3)[2:])
        assert prepared.resident == 2
        assert core.prepare_store("r", keys(2), [7, 8]) == PreparedStore(None, resident=2)

    def test_key_offered_twice_in_one_call_is_stored_once(self) -> None:
        """Conservation (S1): otherwise a slot is never reached again (B11)."""
        core, _ = new_core()
        prepared = core.prepare_store("r", [*keys(1), *keys(1)], [0, 1])
        assert prepared.keys == tuple(keys(1))
        assert len(core.ledger.free) == 7

    def test_device_block_at_two_positions_is_leased_once(self) -> None:
        """One release per hold (S4): one device block at two positions of a request (B10)."""
        core, _ = new_core()
        prepared = core.prepare_store("r", keys(2), [3, 3])
        assert prepared.keys == tuple(keys(1))
        assert prepared.deferred == (1,)

    def test_device_block_with_a_store_in_flight_is_deferred(self) -> None:
        """No doubled or lost store (S13): its lease tells, while the transfer lives (B01)."""
        core, log = new_core()
        job = core.prepare_store("r", keys(1), [3]).job
        assert job is not None
        core.submit([job.transfer])
        core.end_step()
        assert core.prepare_store("q", keys(1, "rehashed"), [3]).deferred == (0,)
        assert log[-1].reason == SkipReason.DEVICE_BLOCK_IN_FLIGHT
        core.complete_store(job.transfer)
        assert core.prepare_store("q", keys(1, "rehashed"), [3]).job is not None

    @pytest.mark.parametrize("count", [1, SMALL, SMALL + 1])
    def test_whole_batch_on_device_blocks_with_a_store_in_flight_is_deferred(self, count: int) -> None:
        """No doubled or lost store (S13): in a batch of any size, wherever the block stands in it."""
        core, _ = new_core(host_blocks=4 * count, device_blocks=4 * count)
        begin_store(core, "r", keys(1), count - 1)
        prepared = core.prepare_store("q", keys(count, "rehashed"), range(count))
        assert prepared.deferred == (count - 1,)
        assert prepared.keys == tuple(keys(count, "rehashed")[:-1])

    def test_key_in_flight_from_another_block_is_deferred_and_stored_if_that_fails(self) -> None:
        """No doubled or lost store (S13): deferred, not forgotten."""
        core, _ = new_core()
        job = core.prepare_store("r", keys(1), [3]).job
        assert job is not None
        core.submit([job.transfer])
        assert core.prepare_store("q", keys(1), [4]).deferred == (0,)
        core.fail_store(job.transfer)
        assert core.prepare_store("q", keys(1), [4]).keys == tuple(keys(1))

    def test_offered_keys_are_not_evicted_for_each_other(self) -> None:
        """A match holds what it counts (S7).

        An offer of [2, 3, 4, 5], where 2 is resident and least recent (B07).
        """
        core, _ = new_core(host_blocks=4)
        store(core, "r", [*keys(1), *keys(3, "other")])
        prepared = core.prepare_store("r", keys(3), [4, 5, 6])
        assert keys(1)[0] not in prepared.evicted
        assert prepared.keys == tuple(keys(3)[1:])

    def test_eviction_names_the_store_that_it_makes_room_for(self) -> None:
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(2))
        job = core.prepare_store("r", keys(1, "new"), [4]).job
        assert job is not None
        assert log[-2].transfer == log[-1].seq == job.transfer

    def test_eviction_names_its_store_if_a_part_of_the_offer_is_skipped(self) -> None:
        """What does not fit is recorded before the eviction, not between it and its store."""
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(2))
        job = core.prepare_store("r", keys(3, "new"), [4, 5, 6]).job
        assert job is not None
        assert kinds(log)[-3:] == ["StoreSkipped", "BlocksEvicted", "StorePlanned"]
        assert log[-2].transfer == log[-1].seq == job.transfer

    def test_request_without_a_key_in_the_offer_owns_nothing(self) -> None:
        """A reader of the log would name it as one for which others were evicted."""
        core, log = new_core()
        core.store((("r", 0), ("s", 1)), keys(1), [0])
        core.skip((("r", 0), ("s", 1)), keys(1), SkipReason.DRAINING)
        assert [one.owners for one in log[-2:]] == [(("s", 1),), (("s", 1),)]

    def test_failed_store_gives_its_slots_back(self) -> None:
        """Failure is not success (S6), conservation (S1): and the key can be stored again."""
        core, _ = new_core(workers=2)
        job = core.prepare_store("r", keys(3), [0, 1, 2]).job
        assert job is not None
        core.submit([job.transfer])
        core.complete_store(job.transfer, 0)
        core.fail_store(job.transfer, 1)
        assert core.lookup(keys(3)[0]) is LookupResult.MISS
        assert len(core.ledger.free) == 8

    def test_live_transfers_are_limited(self) -> None:
        core, log = new_core(max_live_transfers=1)
        core.prepare_store("r", keys(1), [0])
        assert core.prepare_store("r", keys(1, "b"), [1]).job is None
        assert log[-1].reason == SkipReason.TOO_MANY_TRANSFERS

    def test_load_beyond_the_limit_is_a_named_refusal(self) -> None:
        core, _ = new_core(max_live_transfers=1)
        store(core, "r", keys(1))
        core.match("q", keys(1))
        core.prepare_store("r", keys(1, "b"), [1])
        with pytest.raises(LimitReached, match="max_live_transfers"):
            core.prepare_load("q", [2])

    @pytest.mark.parametrize("block", [-1, 16])
    def test_device_block_that_does_not_exist_is_refused(self, block: int) -> None:
        core, log = new_core()
        with pytest.raises(InvalidEvent, match=f"device block {block} is not one of the 16"):
            core.prepare_store("r", keys(1), [block])
        assert kinds(log) == ["LogOpened"]

    def test_cancelled_plan_leaves_nothing(self) -> None:
        core, _ = new_core()
        job = core.prepare_store("r", keys(3), [0, 1, 2]).job
        assert job is not None
        assert core.cancel(job.transfer) is not None
        assert core.cancel(job.transfer) is None
        assert (len(core.ledger.free), core.ledger.index, core.ledger.transfers) == (8, {}, {})

    @given(count=st.integers(1, 3 * SMALL), resident=st.integers(0, 3 * SMALL))
    def test_batches_of_any_size_store_what_is_new(self, count: int, resident: int) -> None:
        """Tuples and arrays behave alike. They could differ at the sizes around SMALL."""
        core, log = new_core(host_blocks=3 * SMALL, device_blocks=6 * SMALL)
        names = keys(count)
        if min(resident, count):
            store(core, "r", names[: min(resident, count)])
        if resident < count:
            assert store(core, "r", names, 3 * SMALL)
        core.complete_load(load(core, "q", names, 0))
        assert core.finish("q")
        assert core.finish("r")
        assert len(core.ledger.policy) == count
        assert digest(fold(log, core.config)) == digest(core.ledger)


class TestWaiting:
    """No doubled or lost store (S13).

    What cannot be stored now is deferred by its place, recorded once, and offered again.
    """

    def test_own_store_in_flight_is_neither_deferred_nor_skipped(self) -> None:
        """A block under its own store is dealt with: to offer it again is no event."""
        core, log = new_core()
        begin_store(core, "r", keys(2), 3)
        events = len(log)
        assert core.prepare_store("r", keys(2), [3, 4]) == PreparedStore(None)
        assert len(log) == events

    def test_key_in_flight_from_another_block_is_deferred_and_recorded(self) -> None:
        core, log = new_core()
        begin_store(core, "r", keys(2), 3)
        prepared = core.prepare_store("q", keys(3), [3, 8, 9])
        assert prepared.deferred == (1,)
        assert prepared.keys == tuple(keys(3)[2:])
        assert skips(log) == [(SkipReason.KEY_IN_FLIGHT, keys(2)[1:])]

    def test_what_waits_still_is_no_event(self) -> None:
        core, log = new_core()
        begin_store(core, "r", keys(1), 3)
        again = core.prepare_store("q", keys(1), [4]).deferred
        events = len(log)
        assert core.store((("q", 1),), keys(1), [4], again).deferred == again
        assert len(log) == events

    def test_only_what_is_new_among_the_waiting_is_said(self) -> None:
        core, log = new_core()
        begin_store(core, "r", keys(3), 3)
        core.store((("q", 2),), keys(2), [8, 9])
        prepared = core.store((("q", 3),), keys(3), [8, 9, 10], again=(0, 1))
        assert prepared.deferred == (0, 1, 2)
        assert skips(log)[1:] == [(SkipReason.KEY_IN_FLIGHT, keys(3)[2:])]

    def test_resident_keys_are_touched(self) -> None:
        """Full offload (S16): resident keys count as just used: they are evicted last."""
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(1, "old"))
        store(core, "r", keys(1, "young"), 1)
        core.prepare_store("q", keys(1, "old"), [5])
        assert kinds(log)[-1] == "BlocksTouched"
        assert core.prepare_store("q", keys(1, "new"), [6]).evicted == tuple(keys(1, "young"))

    def test_block_that_a_load_writes_is_deferred(self) -> None:
        """Order of copies (S12): no order between the two would make the bytes right."""
        core, log = new_core()
        store(core, "r", keys(1))
        load(core, "q", keys(1), 4)
        assert core.prepare_store("s", keys(1, "other"), [4]).deferred == (0,)
        assert skips(log) == [(SkipReason.DEVICE_BLOCK_IN_FLIGHT, keys(1, "other"))]


class TestRoom:
    def test_the_first_that_fit_are_stored_and_the_rest_is_deferred(self) -> None:
        """A part of a prefix is worth storing. The rest is offered again."""
        core, log = new_core(host_blocks=3)
        store(core, "r", keys(3))
        core.match("q", keys(2))
        prepared = core.prepare_store("r", keys(3, "new"), [4, 5, 6])
        assert prepared.keys == tuple(keys(1, "new"))
        assert prepared.deferred == (1, 2)
        assert prepared.evicted == (keys(3)[2],)
        assert skips(log) == [(SkipReason.POOL_FULL, keys(3, "new")[1:])]

    def test_without_any_room_nothing_is_evicted(self) -> None:
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(2))
        core.match("q", keys(2))
        prepared = core.prepare_store("r", keys(2, "new"), [4, 5])
        assert (prepared.job, prepared.keys, prepared.deferred) == (None, (), (0, 1))
        assert kinds(log)[-1] == "StoreSkipped"

    def test_a_full_pool_is_said_once_and_tried_again(self) -> None:
        """No doubled or lost store (S13).

        A skipped block is offered again, and stored when there is room (B07).
        """
        core, log = new_core(host_blocks=2)
        store(core, "r", keys(2))
        core.match("q", keys(2))
        again = core.prepare_store("r", keys(2, "new"), [4, 5]).deferred
        events = len(log)
        for _ in range(3):
            again = core.store((("r", 2),), keys(2, "new"), [4, 5], again).deferred
        assert len(log) == events
        core.finish("q")
        assert core.store((("r", 2),), keys(2, "new"), [4, 5], again).keys == tuple(keys(2, "new"))

    @given(
        free=st.integers(0, 4),
        idle=st.integers(0, 4),
        pinned=st.integers(0, 3),
        offered=st.integers(1, 3 * SMALL),
        resident=st.integers(0, 4),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def test_as_many_as_there_is_room_for_under_every_policy(
        self, free: int, idle: int, pinned: int, offered: int, resident: int, policy: str
    ) -> None:
        """A match holds what it counts (S7).

        Room is made of free and idle slots, but not of pinned slots, nor of slots that the offer needs.
        """
        size = free + idle + pinned
        if not size:
            return
        core, _ = new_core(host_blocks=size, device_blocks=8 * SMALL, policy=policy)
        if pinned:
            store(core, "p", keys(pinned, "pinned"))
            core.match("p", keys(pinned, "pinned"))
        if idle:
            store(core, "i", keys(idle, "idle"))
        found = keys(min(resident, idle), "idle")
        prepared = core.prepare_store("r", [*found, *keys(offered)], range(len(found) + offered))
        room = min(offered, free + idle - len(found))
        assert prepared.keys == tuple(keys(offered)[:room])
        assert prepared.deferred == tuple(range(len(found) + room, len(found) + offered))
        assert prepared.resident == len(found)
        assert set(prepared.evicted).isdisjoint([*found, *keys(pinned, "pinned")])
        assert len(prepared.evicted) == max(0, room - free)


class TestOwners:
    def test_blocks_of_several_requests_are_one_transfer(self) -> None:
        core, log = new_core()
        names = [*keys(2, "a"), *keys(1, "b")]
        prepared = core.store((("a", 2), ("b", 1)), names, [1, 2, 3])
        assert prepared.keys == tuple(names)
        assert kinds(log) == ["LogOpened", "StorePlanned"]
        assert log[-1].owners == (("a", 2), ("b", 1))

    def test_blocks_may_be_nobodys(self) -> None:
        """Blocks near eviction in the device's free queue belong to no request."""
        core, log = new_core()
        assert core.store((), keys(2), [1, 2]).keys == tuple(keys(2))
        assert log[-1].owners == ()

    @given(
        owned=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=5),
        stored=st.lists(st.integers(0, 9), max_size=4, unique=True),
        storing=st.lists(st.integers(0, 9), max_size=4, unique=True),
        host_blocks=st.integers(8, 14),
    )
    def test_owner_runs_stay_right_whatever_is_left_out(
        self, owned: list[list[int]], stored: list[int], storing: list[int], host_blocks: int
    ) -> None:
        """Of an offer in which keys are resident, in flight, doubled, or find no room, every plan and every
        skip names whose each of its keys is: told by an own count from the places."""
        core, log = new_core(host_blocks=host_blocks, device_blocks=64)
        if stored:
            store(core, "s", [named(n) for n in stored])
        if storing := [n for n in storing if n not in stored]:
            begin_store(core, "t", [named(n) for n in storing], 12)
        owners = tuple((f"r{number}", len(numbers)) for number, numbers in enumerate(owned))
        names = [named(n) for numbers in owned for n in numbers]
        owner_of = [owner for owner, count in owners for _ in range(count)]
        since = len(log)
        prepared = core.store(owners, names, range(20, 20 + len(names)))
        waiting = iter(prepared.deferred)
        told: dict[str, list[str]] = {"stored": [], "waiting": []}
        for event in log[since:]:
            if isinstance(event, (StorePlanned, StoreSkipped)):
                own = [owner for owner, count in event.owners for _ in range(count)]
                assert len(own) == len(event.keys)
                assert all(count for _, count in event.owners)
                assert [name for name, _ in event.owners] == sorted(set(own))
                told["stored" if isinstance(event, StorePlanned) else "waiting"] += own
        places = list(prepared.stored)
        assert [names[place] for place in places] == list(prepared.keys)
        assert told["stored"] == [owner_of[place] for place in places]
        assert sorted(told["waiting"]) == [owner_of[place] for place in waiting]
        assert digest(fold(log, core.config)) == digest(core.ledger)


class TestChunks:
    """With n device blocks a slot, place p of slot s is host block n * s + p."""

    @given(chunk=st.integers(1, 4), count=st.integers(1, SMALL), first=st.integers(0, 5))
    def test_each_device_block_goes_to_its_place(self, chunk: int, count: int, first: int) -> None:
        """Correct bytes (S15): and comes back from there, for batches of any size."""
        core, log = new_core(host_blocks=SMALL, device_blocks=8 * SMALL, blocks_per_chunk=chunk)
        prepared = core.prepare_store("r", keys(count), range(first, first + count * chunk))
        assert prepared.job is not None
        assert to_list(prepared.job.device_blocks) == list(range(first, first + count * chunk))
        assert to_list(prepared.job.host_blocks) == list(range(count * chunk))
        core.submit([prepared.job.transfer])
        core.complete_store(prepared.job.transfer)
        assert core.match("q", keys(count)).hits == count
        job = core.prepare_load("q", range(count * chunk))
        assert job is not None
        assert to_list(job.host_blocks) == list(range(count * chunk))
        assert digest(fold(log, core.config)) == digest(core.ledger)

    def test_slots_in_any_order_keep_their_places(self) -> None:
        core, _ = new_core(host_blocks=4, device_blocks=32, blocks_per_chunk=3)
        for name, block in (("a", 0), ("b", 3), ("c", 6)):
            store(core, "r", keys(1, name), block)
        core.match("q", [*keys(1, "c"), *keys(1, "a")])
        job = core.prepare_load("q", range(10, 16))
        assert job is not None
        assert to_list(job.host_blocks) == [6, 7, 8, 0, 1, 2]

    def test_parts_of_chunks_are_loaded(self) -> None:
        """The first chunk is needed from its middle on, the last one up to its middle."""
        core, _ = new_core(host_blocks=4, device_blocks=32, blocks_per_chunk=3)
        store(core, "r", keys(3))
        core.match("q", keys(3))
        job = core.prepare_load("q", [20, 21, 22, 23, 24], parts=[2, 3, 4, 5, 6])
        assert job is not None
        assert to_list(job.device_blocks) == [20, 21, 22, 23, 24]
        assert to_list(job.host_blocks) == [2, 3, 4, 5, 6]

    def test_parts_of_the_first_chunks_release_the_others(self) -> None:
        core, _ = new_core(host_blocks=4, device_blocks=32, blocks_per_chunk=2)
        store(core, "r", keys(3))
        core.match("q", keys(3))
        job = core.prepare_load("q", [20, 21], parts=[1, 2])
        assert job is not None
        assert to_list(job.host_blocks) == [1, 2]
        assert len(core.ledger.policy) == 1

    def test_a_part_before_the_first_is_refused_and_the_match_kept(self) -> None:
        core, _ = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        assert core.match("q", keys(1)).hits == 1
        with pytest.raises(InvalidEvent, match="part -1"):
            core.prepare_load("q", [9], parts=[-1])
        assert core.prepare_load("q", [8, 9]) is not None

    @pytest.mark.parametrize(
        ("device_blocks", "parts"),
        [
            ([20, 21], [2, 1]),
            ([20, 21], [1, 1]),
            ([20, 21], [2, 3]),
            ([20, 21, 22], [1, 2]),
            ([20, 21, 22], []),
        ],
        ids=["descending", "doubled", "first slot unused", "one block too many", "half a chunk"],
    )
    def test_parts_that_cannot_be_right_are_refused(
        self, device_blocks: Sequence[int], parts: Sequence[int]
    ) -> None:
        """The match stays as it was."""
        core, _ = new_core(host_blocks=4, device_blocks=32, blocks_per_chunk=2)
        store(core, "r", keys(2))
        core.match("q", keys(2))
        before = digest(core.ledger)
        with pytest.raises(InvalidEvent, match=r"parts ascend|a chunk of device blocks"):
            core.prepare_load("q", device_blocks, parts)
        assert digest(core.ledger) == before

    def test_half_a_chunk_cannot_be_stored(self) -> None:
        core, _ = new_core(blocks_per_chunk=2)
        with pytest.raises(WrongArgument, match="device_blocks has 3 blocks; 2 keys have 4"):
            core.prepare_store("r", keys(2), [0, 1, 2])

    def test_chunk_that_shares_a_device_block_with_a_copy_is_deferred(self) -> None:
        """No doubled or lost store (S13): one leased device block of the chunk is enough."""
        core, _ = new_core(blocks_per_chunk=2)
        begin_store(core, "r", keys(1), 0)
        prepared = core.prepare_store("q", keys(3, "other"), [2, 3, 1, 4, 3, 5])
        assert prepared.keys == tuple(keys(1, "other"))
        assert prepared.deferred == (1, 2)

    def test_chunk_under_its_own_store_is_told_by_all_its_blocks(self) -> None:
        """No doubled or lost store (S13).

        Of two requests that share the first block of a chunk only, the second's own chunk waits: if the store
        fails, it is the one that is left.
        """
        core, _ = new_core(blocks_per_chunk=2)
        transfer = begin_store(core, "r", keys(1), 0)
        assert core.prepare_store("r", keys(1), [0, 1]) == PreparedStore(None)
        assert core.prepare_store("q", keys(1), [0, 5]).deferred == (0,)
        core.fail_store(transfer)
        assert core.prepare_store("q", keys(1), [0, 5]).keys == tuple(keys(1))

    def test_what_is_left_of_an_offer_takes_its_own_device_blocks(self) -> None:
        core, _ = new_core(host_blocks=8, device_blocks=32, blocks_per_chunk=2)
        store(core, "r", keys(3)[1:2], 30)
        prepared = core.prepare_store("q", keys(3), range(10, 16))
        assert prepared.job is not None
        assert to_list(prepared.job.device_blocks) == [10, 11, 14, 15]
        assert to_list(prepared.job.host_blocks) == [2, 3, 4, 5]


class TestOffers:
    """store_threshold: a key is stored when it is offered for the n-th time."""

    def test_key_is_due_at_its_nth_offer(self) -> None:
        core, _ = new_core(store_threshold=3)
        due = []
        for _ in range(4):
            core.count_offers(keys(1))
            due.append(core.offered_enough(keys(1)[0]))
        assert due == [False, False, True, True]

    def test_key_that_was_never_offered_is_not_due(self) -> None:
        core, _ = new_core(store_threshold=1)
        assert not core.offered_enough(keys(1)[0])

    def test_resident_key_is_due_and_not_counted(self) -> None:
        core, log = new_core(store_threshold=2)
        store(core, "r", keys(1))
        events = len(log)
        core.count_offers(keys(1))
        assert core.offered_enough(keys(1)[0])
        assert len(log) == events

    def test_count_starts_again_once_the_key_is_planned(self) -> None:
        """An evicted key must be offered often enough again."""
        core, _ = new_core(store_threshold=2, host_blocks=1)
        core.count_offers(keys(1))
        core.count_offers(keys(1))
        store(core, "r", keys(1))
        store(core, "r", keys(1, "other"))
        core.count_offers(keys(1))
        assert not core.offered_enough(keys(1)[0])

    @given(offers=st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), max_size=20))
    def test_counts_are_those_of_the_keys_offered_last(self, offers: list[list[int]]) -> None:
        """Rule 10: at most two keys a slot. The key that was offered longest ago is forgotten first."""
        core, log = new_core(host_blocks=2, store_threshold=9)
        counts: dict[int, int] = {}
        for batch in offers:
            core.count_offers([named(n) for n in batch])
            for n in batch:
                counts[n] = counts.pop(n, 0) + 1
            for n in list(counts)[: max(0, len(counts) - 4)]:
                del counts[n]
            assert list(core.ledger.offers.times.items()) == [(named(n), c) for n, c in counts.items()]
        assert digest(fold(log, core.config)) == digest(core.ledger)

    def test_store_that_fails_leaves_the_counts_of_its_keys(self) -> None:
        """No doubled or lost store (S13): it is made again, and needs no further offers."""
        core, log = new_core(store_threshold=2)
        for _ in range(2):
            core.count_offers(keys(1))
        for good in (False, True):
            assert core.offered_enough(keys(1)[0])
            job = core.prepare_store("r", keys(1), [0]).job
            assert job is not None
            core.submit([job.transfer])
            core.report(job.transfer, 0, good)
        assert core.ledger.offers.times == {}
        assert digest(fold(log, core.config)) == digest(core.ledger)


class TestOlderEpoch:
    """No stale data (S14).

    What a load of an older epoch brought is not stored again, unless the engine computed it since.
    """

    def loaded_then_reset(self) -> tuple[Offloader, MemoryLog]:
        core, log = new_core()
        store(core, "r", keys(2))
        core.complete_load(load(core, "q", keys(2), 4))
        core.reset()
        return core, log

    def test_block_is_not_stored_under_the_key_that_was_brought(self) -> None:
        core, log = self.loaded_then_reset()
        assert core.prepare_store("q", keys(2), [4, 5]) == PreparedStore(None)
        assert skips(log) == [(SkipReason.OLDER_EPOCH, keys(2))]

    def test_same_key_computed_in_another_block_is_stored(self) -> None:
        core, _ = self.loaded_then_reset()
        assert core.prepare_store("q", keys(2), [4, 6]).keys == tuple(keys(2)[1:])

    def test_block_that_begins_another_chunk_is_not_stored_in_it(self) -> None:
        """Two prompts that differ from the middle of a chunk on share its first device block, and no key."""
        core, log = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        core.reset()
        assert core.prepare_store("p", keys(1, "parted"), [4, 6]) == PreparedStore(None)
        assert skips(log) == [(SkipReason.OLDER_EPOCH, keys(1, "parted"))]

    def test_block_that_was_computed_before_the_reset_is_stored_in_any_chunk(self) -> None:
        """What the engine rewrote before the reset is not stale after it."""
        core, _ = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        core.rewrite([4])
        core.reset()
        assert core.prepare_store("p", keys(1, "other"), [4, 6]).keys == tuple(keys(1, "other"))

    def test_last_block_of_a_chunk_tells_by_its_key_whether_it_was_computed_since(self) -> None:
        core, _ = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        core.reset()
        assert core.prepare_store("p", keys(1, "other"), [6, 5]).keys == tuple(keys(1, "other"))

    def test_same_block_computed_with_another_content_is_stored(self) -> None:
        core, _ = self.loaded_then_reset()
        assert core.prepare_store("q", keys(2, "other"), [4, 5]).keys == tuple(keys(2, "other"))

    def test_load_of_this_epoch_may_be_stored_again(self) -> None:
        """If it was evicted since, its bytes are good."""
        core, _ = new_core(host_blocks=1)
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        store(core, "r", keys(1, "other"), 6)
        assert core.prepare_store("q", keys(1), [4]).keys == tuple(keys(1))

    def test_block_that_was_rewritten_is_stored(self) -> None:
        core, log = self.loaded_then_reset()
        core.rewrite([3, 4])
        assert core.prepare_store("q", keys(2), [4, 5]).keys == tuple(keys(1))
        assert [to_list(event.device_blocks) for event in log if event.kind == "BlocksRewritten"] == [[4]]

    def test_rewriting_what_holds_nothing_old_is_no_event(self) -> None:
        core, log = self.loaded_then_reset()
        events = len(log)
        core.rewrite([0, 6, 7])
        assert len(log) == events

    @pytest.mark.parametrize("chunk", [1, 2])
    def test_rewriting_is_an_event_only_if_a_key_does_not_tell_the_content(self, chunk: int) -> None:
        """A load of this epoch matters in chunks of several blocks alone; blocks never loaded, nowhere."""
        core, log = new_core(blocks_per_chunk=chunk)
        store(core, "r", keys(1))
        core.complete_load(load(core, "q", keys(1), 4))
        core.rewrite(range(8, 12))
        core.rewrite(range(4, 6))
        rewritten = [to_list(event.device_blocks) for event in log if event.kind == "BlocksRewritten"]
        assert rewritten == ([[4, 5]] if chunk == 2 else [])

    def test_load_that_the_reset_abandoned_counts_until_it_has_failed(self) -> None:
        """Its bytes are of the older epoch, whenever they arrive; and its request, told that it failed,
        computes these blocks before it offers them."""
        core, log = new_core()
        store(core, "r", keys(1))
        transfer = load(core, "q", keys(1), 4)
        core.reset()
        assert core.ledger.provenance.stale == {4: keys(1)[0]}
        assert core.prepare_store("q", keys(1), [4]).deferred == (0,)
        core.complete_load(transfer)
        assert core.prepare_store("q", keys(1), [4]).keys == tuple(keys(1))
        assert digest(fold(log, core.config)) == digest(core.ledger)

    def test_note_ends_with_the_next_load_into_the_block(self) -> None:
        core, _ = self.loaded_then_reset()
        store(core, "r", keys(1), 8)
        core.complete_load(load(core, "s", keys(1), 4))
        core.fail_load(load(core, "t", keys(1), 9))
        assert core.prepare_store("s", keys(1), [4]).keys == tuple(keys(1))

    def test_whole_chunk_is_old_if_one_block_of_it_is(self) -> None:
        core, log = new_core(blocks_per_chunk=2)
        store(core, "r", keys(1))
        core.match("q", keys(1))
        job = core.prepare_load("q", [4], parts=[1])
        assert job is not None
        core.submit([job.transfer])
        core.complete_load(job.transfer)
        core.reset()
        assert core.prepare_store("q", keys(1), [7, 4]).job is None
        assert skips(log) == [(SkipReason.OLDER_EPOCH, keys(1))]


class TestCursors:
    def test_cursors_are_part_of_the_state(self) -> None:
        """Events are state (S10): a replay gives them."""
        core, log = new_core()
        core.arrive("r")
        core.arrive("q")
        core.advance([("r", (1, 0), (3, 2)), ("q", (2, 2), (2, 2))])
        request = fold(log, core.config).requests["r"]
        assert (request.settled, request.offered) == ((1, 0), (3, 2))

    def test_advancing_nobody_is_no_event(self) -> None:
        core, log = new_core()
        core.advance([])
        assert kinds(log) == ["LogOpened"]

    @pytest.mark.parametrize(
        ("offer", "message"),
        [
            (("r", (3,), (2,)), "settled more than it offered"),
            (("r", (1, 1), (2,)), "settled more than it offered"),
            (("nobody", (1,), (2,)), "has not arrived"),
        ],
    )
    def test_impossible_cursors_are_refused_whole(
        self, offer: tuple[str, tuple[int, ...], tuple[int, ...]], message: str
    ) -> None:
        core, _ = new_core()
        core.arrive("r")
        core.arrive("first")
        with pytest.raises(InvalidEvent, match=message):
            core.advance([("first", (1,), (1,)), offer])
        assert core.ledger.requests["first"].offered == ()

    def test_reset_restarts_the_cursors(self) -> None:
        """Running requests are stored again, from their first block on."""
        core, _ = new_core()
        store(core, "r", keys(1))
        core.arrive("r")
        core.advance([("r", (1,), (1,))])
        core.reset()
        assert core.ledger.requests["r"].offered == ()


def named(number: int) -> bytes:
    return b"key-%d" % number + bytes(4)


def skips(log: MemoryLog) -> list[tuple[str, list[bytes]]]:
    return [(event.reason, list(event.keys)) for event in log if isinstance(event, StoreSkipped)]
