"""The properties hold in every life, and each check can fail: of a ledger that was damaged by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_life import keys, new_core, store
from hypothesis import given, settings
from replay_life import OPERATIONS, Life, key

from examples import examples
from kvsm.core.ledger import Ledger, RequestRecord
from kvsm.core.ledger.invariants import CHECKS, PROPERTIES, check_ledger, check_rest
from kvsm.errors import KvsmError
from kvsm.events import Direction
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.request import REQUEST_WORDS, RequestState
from kvsm.states.transfer import TRANSFER_WORDS, TransferState
from kvsm.states.words import StateWords


@settings(deadline=None, max_examples=examples(100))
@given(OPERATIONS)
def test_every_ledger_of_any_life_keeps_all_properties(operations: list[tuple[str, int, int]]) -> None:
    """Every property that a ledger shows, after every operation of an engine that does anything."""
    life = Life()
    for operation in operations:
        life.drive([operation])
        assert check_ledger(life.core.ledger) == []


@settings(deadline=None, max_examples=examples(100))
@given(OPERATIONS)
def test_when_all_is_over_nothing_is_left(operations: list[tuple[str, int, int]]) -> None:
    """Progress (S9): let all copies end and all requests finish, from any state."""
    ledger = Life().drive(operations).drain().core.ledger
    assert not ledger.requests
    assert check_rest(ledger) == []


def busy_life() -> Life:
    """Slots 0..2 stored, of which a load in flight (for `reader`) reads 0 and 1; slots 3 and 4 are being
    stored (for `writer`), slot 5 is planned; `holder` has matched 2; slots 6 to 9 are free. Before a reset,
    loads brought something into device blocks 13 and 14; key 20 was offered once."""
    life = Life(defer_ticks=0, store_threshold=3)
    core = life.core
    life.stored("old", [key(30 + n) for n in range(10)], range(10))
    core.match("old", [key(30), key(31)])
    life.ended(core.prepare_load("old", [13, 14]))
    core.finish("old")
    core.reset()
    life.stored("past", [key(0), key(1), key(2)], [0, 1, 2])
    core.match("reader", [key(0), key(1)])
    load = core.prepare_load("reader", [10, 11])
    core.arrive("writer")
    store = core.prepare_store("writer", [key(3), key(4)], [3, 4]).job
    assert load is not None
    assert store is not None
    core.submit([load.transfer, store.transfer])
    core.prepare_store("writer", [key(5)], [5])
    core.match("holder", [key(2)])
    core.advance([("writer", (3,), (5,))])
    core.count_offers([key(20)])
    core.finish("past")
    return life


def write(words: StateWords, number: int, word: int) -> None:
    """Give one thing a word, which is counted, too."""
    words.words[number] = word
    words.recount()


def miscount(words: Callable[[Ledger], StateWords], place: int) -> Callable[[Ledger], None]:
    """As a handler does that writes words without `StateWords.commit`."""

    def damage(ledger: Ledger) -> None:
        words(ledger).totals[place] += 1

    return damage


def set_word(slot: int, state: BlockState, copies: int = 0, pins: int = 0) -> Callable[[Ledger], None]:
    def damage(ledger: Ledger) -> None:
        write(ledger.blocks, slot, BLOCK_WORDS.encode(state, (copies, pins)))

    return damage


def set_lease(block: int, state: LeaseState, readers: int = 0) -> Callable[[Ledger], None]:
    def damage(ledger: Ledger) -> None:
        write(ledger.leases, block, LEASE_WORDS.encode(state, (readers,)))

    return damage


def free_list_forgets(ledger: Ledger) -> None:
    ledger.free.remove((9,))


def free_list_takes(ledger: Ledger) -> None:
    ledger.free.append((0,))


def policy_takes(ledger: Ledger) -> None:
    ledger.policy.idle((2,))


def index_forgets(ledger: Ledger) -> None:
    del ledger.index[key(2)]


def index_mistakes(ledger: Ledger) -> None:
    del ledger.index[key(0)]
    ledger.index[key(2)] = 0


def index_invents(ledger: Ledger) -> None:
    ledger.index[key(77)] = 9


def keys_collide(ledger: Ledger) -> None:
    ledger.key_of[2] = ledger.key_of[1]


def slot_freed_under_copy(ledger: Ledger) -> None:
    """Slot 0 goes to the free queue in the right state, while the load reads it."""
    write(ledger.blocks, 0, BLOCK_WORDS.encode(BlockState.EVICTED))
    del ledger.index[key(0)]
    ledger.free.append((0,))


def published_early(ledger: Ledger) -> None:
    """Slot 3 can be matched while its store is in flight."""
    write(ledger.blocks, 3, BLOCK_WORDS.encode(BlockState.STORED, (1, 0)))


def transfers(ledger: Ledger, direction: Direction, state: TransferState) -> list[int]:
    return [id for id, t in ledger.transfers.items() if t.direction is direction and t.state is state]


def submitted_store(ledger: Ledger) -> int:
    (id,) = transfers(ledger, Direction.STORE, TransferState.SUBMITTED)
    return id


def report_forgotten(ledger: Ledger) -> None:
    ledger.transfers[submitted_store(ledger)].reported = 1


def transfer_renamed(ledger: Ledger) -> None:
    ledger.transfers[submitted_store(ledger)].id = 999


def transfer_over_but_kept(ledger: Ledger) -> None:
    """Both workers have reported the load, and one is still waited for."""
    (id,) = transfers(ledger, Direction.LOAD, TransferState.SUBMITTED)
    ledger.transfers[id].reported = 3
    ledger.transfers[id].word = TRANSFER_WORDS.encode(TransferState.SUBMITTED, (1, 0))


def generation_moved(ledger: Ledger) -> None:
    ledger.generation[3] += 1


def pins_dropped(ledger: Ledger) -> None:
    """`holder` and the block forget the pin. Only the request's state says that there was a match."""
    ledger.requests["holder"].pins = ()
    write(ledger.blocks, 2, BLOCK_WORDS.encode(BlockState.STORED))
    ledger.policy.idle((2,))


def loads_miscounted(ledger: Ledger) -> None:
    ledger.requests["writer"].word = REQUEST_WORDS.encode(RequestState.NEW, (1,))


def load_unnamed(ledger: Ledger) -> None:
    ledger.requests["reader"].load = 0


def load_mistaken(ledger: Ledger) -> None:
    ledger.requests["reader"].load = submitted_store(ledger)


def load_of_another(ledger: Ledger) -> None:
    """`writer` would be told of the end of a load that it never asked for."""
    (id,) = transfers(ledger, Direction.LOAD, TransferState.SUBMITTED)
    ledger.transfers[id].owners = (("writer", 2),)


def loading_request_forgotten(ledger: Ledger) -> None:
    del ledger.requests["reader"]


def request_waits_for_nothing(ledger: Ledger) -> None:
    request = ledger.requests["writer"]
    request.word, request.awaits = REQUEST_WORDS.encode(RequestState.DEFERRED), 999
    ledger.deferred["writer"] = request


def request_not_among_deferred(ledger: Ledger) -> None:
    ledger.requests["writer"].word = REQUEST_WORDS.encode(RequestState.DEFERRED)


def finished_but_kept(ledger: Ledger) -> None:
    ledger.requests["writer"].word = REQUEST_WORDS.encode(RequestState.FINISHED)


def settled_unseen(ledger: Ledger) -> None:
    ledger.requests["writer"].settled = (6,)


def cursor_of_a_group_lost(ledger: Ledger) -> None:
    ledger.requests["writer"].offered = (5, 5)


def brought_in_two_epochs(ledger: Ledger) -> None:
    ledger.provenance.brought[13] = key(30)


def brought_nowhere(ledger: Ledger) -> None:
    ledger.provenance.stale[24] = key(30)


def history_overflows(ledger: Ledger) -> None:
    ledger.offers.times.update({key(100 + n): 1 for n in range(ledger.offers.limit)})


def history_invents(ledger: Ledger) -> None:
    ledger.offers.times[key(21)] = 0


def epoch_left_behind(ledger: Ledger) -> None:
    ledger.transfers[submitted_store(ledger)].epoch = 3


def stored_twice(ledger: Ledger) -> None:
    """The planned store reads the same device block as the store in flight. The lease counts both."""
    (id,) = transfers(ledger, Direction.STORE, TransferState.PLANNED)
    ledger.transfers[id].device_blocks = (3,)
    write(ledger.leases, 3, LEASE_WORDS.encode(LeaseState.READING, (2,)))
    write(ledger.leases, 5, LEASE_WORDS.encode(LeaseState.NONE))


def loaded_into_while_stored(ledger: Ledger) -> None:
    """The load writes a device block that a store reads."""
    (id,) = transfers(ledger, Direction.LOAD, TransferState.SUBMITTED)
    ledger.transfers[id].device_blocks = (10, 5)
    ledger.provenance.brought[5] = key(1)
    write(ledger.leases, 11, LEASE_WORDS.encode(LeaseState.NONE))
    write(ledger.leases, 5, LEASE_WORDS.encode(LeaseState.WRITING))


DAMAGES: list[tuple[str, Callable[[Ledger], None]]] = [
    (Property.CONSERVATION, free_list_forgets),
    (Property.CONSERVATION, free_list_takes),
    (Property.CONSERVATION, policy_takes),
    (Property.CONSERVATION, index_forgets),
    (Property.CONSERVATION, index_mistakes),
    (Property.CONSERVATION, index_invents),
    (Property.CONSERVATION, history_overflows),
    (Property.CONSERVATION, history_invents),
    *((Property.CONSERVATION, miscount(lambda ledger: ledger.blocks, place)) for place in (0, 3, 16, 17)),
    *((Property.CONSERVATION, miscount(lambda ledger: ledger.leases, place)) for place in (0, 3, 16)),
    (Property.PUBLISH_AFTER_COMMIT, published_early),
    (Property.NO_REUSE_IN_FLIGHT, slot_freed_under_copy),
    (Property.NO_REUSE_IN_FLIGHT, set_lease(3, LeaseState.NONE)),
    (Property.NO_REUSE_IN_FLIGHT, set_lease(10, LeaseState.NONE)),
    (Property.NO_REUSE_IN_FLIGHT, loaded_into_while_stored),
    (Property.ONE_RELEASE_PER_HOLD, set_lease(20, LeaseState.READING, 1)),
    (Property.ONE_RELEASE_PER_HOLD, set_lease(3, LeaseState.READING, 2)),
    (Property.ONE_RELEASE_PER_HOLD, set_word(0, BlockState.LOADING, copies=2)),
    (Property.ONE_RELEASE_PER_HOLD, set_word(0, BlockState.LOADING, copies=1, pins=1)),
    (Property.ONE_RELEASE_PER_HOLD, set_word(2, BlockState.STORED, pins=2)),
    (Property.ONE_RELEASE_PER_HOLD, loads_miscounted),
    (Property.ONE_RELEASE_PER_HOLD, load_unnamed),
    (Property.ONE_RELEASE_PER_HOLD, load_mistaken),
    (Property.ONE_RELEASE_PER_HOLD, load_of_another),
    (Property.ONE_RELEASE_PER_HOLD, loading_request_forgotten),
    (Property.STALE_REPORTS, report_forgotten),
    (Property.STALE_REPORTS, transfer_renamed),
    (Property.STALE_REPORTS, transfer_over_but_kept),
    (Property.STALE_REPORTS, generation_moved),
    (Property.MATCH_HOLDS, pins_dropped),
    (Property.PROGRESS, request_waits_for_nothing),
    (Property.PROGRESS, request_not_among_deferred),
    (Property.PROGRESS, finished_but_kept),
    (Property.STORED_ONCE, keys_collide),
    (Property.STORED_ONCE, stored_twice),
    (Property.STORED_ONCE, settled_unseen),
    (Property.STORED_ONCE, cursor_of_a_group_lost),
    (Property.NO_STALE_DATA, epoch_left_behind),
    (Property.NO_STALE_DATA, brought_in_two_epochs),
    (Property.NO_STALE_DATA, brought_nowhere),
]


@pytest.mark.usefixtures("_python_folds")  # no entry of the native index can name a slot that has another key
@pytest.mark.parametrize(("property", "damage"), DAMAGES, ids=lambda one: getattr(one, "__qualname__", one))
def test_damage_breaks_exactly_its_property(property: Property, damage: Callable[[Ledger], None]) -> None:
    """No check is blind, and none names another property."""
    ledger = busy_life().core.ledger
    assert check_ledger(ledger) == []
    damage(ledger)
    assert {violation.property for violation in check_ledger(ledger)} == {property}


def tiered_life() -> Life:
    """Slots 0 to 3 stored. 0 is idle; copies to the disk hold 1, and 2 and 3; an engine's match holds 3."""
    life = Life(defer_ticks=0)
    core = life.core
    life.stored("r", [key(0), key(1), key(2), key(3)], [0, 1, 2, 3])
    core.match("r", [key(3)])
    for name, held in (("copy 1", [key(1)]), ("copy 2", [key(2), key(3)])):
        core.arrive(name, target="disk")
        core.match(name, held)
    return life


def policy_forgets(ledger: Ledger) -> None:
    ledger.policy.busy((0,))


def policy_counts_twice(ledger: Ledger) -> None:
    """The order has the slot of the engine's match, and not the idle slot: its length is right."""
    ledger.policy.busy((0,))
    ledger.policy.idle((3,))


def free_list_exchanges(ledger: Ledger) -> None:
    """The free queue has a stored slot and not a free one: its length is right."""
    ledger.free.remove((9,))
    ledger.free.append((0,))


def copies_out_miscounted(slot: int, count: int) -> Callable[[Ledger], None]:
    def damage(ledger: Ledger) -> None:
        ledger.copied_out[slot] = count

    return damage


def allocated_for_nothing(ledger: Ledger) -> None:
    ledger.free.remove((9,))
    write(ledger.blocks, 9, BLOCK_WORDS.encode(BlockState.ALLOCATED))
    ledger.key_of[9] = key(99)
    ledger.index[key(99)] = 9


SAID: list[tuple[Callable[[Ledger], None], set[str]]] = [
    (free_list_forgets, {"unused, but not in the free queue", "the free queue counts 5 slots, and 6"}),
    (free_list_takes, {"in the free queue although in use", "the free queue counts 7 slots, and 6"}),
    (free_list_exchanges, {"unused, but not in the free queue", "in the free queue although in use"}),
    (policy_forgets, {"idle, but not in the eviction order", "the eviction order counts 2 slots, and 3"}),
    (policy_counts_twice, {"idle, but not in the", "in the eviction order although not idle"}),
    (copies_out_miscounted(1, 2), {"slot 1 STORED(copies=0, pins=1): copies to other tiers are miscounted"}),
    (copies_out_miscounted(0, 1), {"slot 0 STORED(copies=0, pins=0): copies to other tiers are miscounted"}),
    (allocated_for_nothing, {"slot 9 ALLOCATED(copies=0, pins=0): allocated by no planned store"}),
]
"""How a ledger of `tiered_life` is damaged -> the parts of all messages."""


@pytest.mark.parametrize(("damage", "said"), SAID)
def test_each_list_and_count_of_slots_has_its_message(
    damage: Callable[[Ledger], None], said: set[str]
) -> None:
    """Conservation (S1): a wrong list or count has its own message, not only the property."""
    ledger = tiered_life().core.ledger
    assert check_ledger(ledger) == []
    damage(ledger)
    found = [violation.message for violation in check_ledger(ledger)]
    assert len(found) == len(said)
    assert all(any(part in message for message in found) for part in said), found


def test_a_copy_to_the_disk_whose_block_was_voided_is_counted_nowhere() -> None:
    """Conservation (S1): only copies of readable blocks are counted."""
    core = tiered_life().core
    copy = core.prepare_load("copy 1", [20])
    assert copy is not None
    core.submit([copy.transfer])
    core.reset()
    assert check_ledger(core.ledger) == []


def test_the_only_request_is_asked_for_what_it_waits() -> None:
    """Progress (S9): no check skips the first of the requests, transfers or device blocks."""
    life = Life(defer_ticks=0)
    life.core.arrive("only")
    life.core.ledger.requests["only"].word = REQUEST_WORDS.encode(RequestState.RELEASED)
    (violation,) = check_ledger(life.core.ledger)
    assert (violation.property, violation.requests) == (Property.PROGRESS, ("only",))


def more_failed_than_reported(ledger: Ledger) -> None:
    """No worker has reported the store and both are pending, but one report counts as bad."""
    word = TRANSFER_WORDS.encode(TransferState.SUBMITTED, (2, 1))
    ledger.transfers[submitted_store(ledger)].word = word


def listed_as_deferred(ledger: Ledger) -> None:
    ledger.deferred["writer"] = ledger.requests["writer"]


def first_brought_nowhere(ledger: Ledger) -> None:
    """The first recorded load names a device block that does not exist."""
    ledger.provenance.brought = {99: key(30), **ledger.provenance.brought}


def counts_a_pin_too_many(ledger: Ledger) -> None:
    write(ledger.blocks, 2, BLOCK_WORDS.encode(BlockState.STORED, (0, 2)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (more_failed_than_reported, "0 workers reported, 2 pending, 1 failed"),
        (listed_as_deferred, "request writer is NEW, and the list of deferred requests says otherwise"),
        (first_brought_nowhere, "device blocks [99]: not in the pool"),
        (counts_a_pin_too_many, "(hold it: 0 transfers and 1 matches)"),
    ],
)
def test_a_check_of_several_parts_asks_each(damage: Callable[[Ledger], None], says: str) -> None:
    ledger = busy_life().core.ledger
    damage(ledger)
    (violation,) = check_ledger(ledger)
    assert says in violation.message


def test_two_slots_of_one_key_are_both_named() -> None:
    ledger = busy_life().core.ledger
    ledger.key_of[1] = ledger.key_of[0]
    (violation,) = check_ledger(ledger)
    assert violation.slots == (0, 1)


@pytest.mark.parametrize("requests", ["requests", "deferred"])
def test_a_request_in_either_list_is_left_at_rest(requests: str) -> None:
    """Progress (S9)."""
    ledger = busy_life().drain().core.ledger
    getattr(ledger, requests)["gone"] = RequestRecord("gone")
    assert [violation.property for violation in check_rest(ledger)] == [Property.PROGRESS]


def test_a_transfer_that_has_ended_is_not_kept() -> None:
    """Stale reports (S5): all workers have reported it, so its counts are right."""
    ledger = busy_life().core.ledger
    store = ledger.transfers[submitted_store(ledger)]
    store.word, store.reported = TRANSFER_WORDS.encode(TransferState.COMPLETED), 3
    said = [violation.message for violation in check_ledger(ledger)]
    assert any(f"is kept as live transfer {store.id}" in message for message in said), said


def test_all_device_blocks_with_a_wrong_lease_are_named() -> None:
    ledger = busy_life().core.ledger
    for block in (3, 4):
        write(ledger.leases, block, LEASE_WORDS.encode(LeaseState.READING, (2,)))
    (violation,) = check_ledger(ledger)
    assert violation.device_blocks == (3, 4)
    assert "device block 3 READING(readers=2), device block 4 READING(readers=2): " in violation.message


def test_every_check_is_broken_by_some_damage() -> None:
    """Each function of the full check fails for one of the damages above, and not all functions for all."""
    silent = {check.__name__ for check in CHECKS}
    for _, damage in DAMAGES:
        ledger = busy_life().core.ledger
        damage(ledger)
        for check in CHECKS:
            only = pytest.MonkeyPatch()
            only.setattr("kvsm.core.ledger.invariants.CHECKS", (check,))
            if check_ledger(ledger):
                silent.discard(check.__name__)
            only.undo()
    assert silent == set()


@pytest.mark.parametrize(
    "leave",
    [
        set_word(0, BlockState.QUARANTINED, copies=1),
        set_word(0, BlockState.ALLOCATED),
        set_word(0, BlockState.LOADING, copies=1),
        set_word(0, BlockState.STORED, pins=1),
        set_lease(3, LeaseState.READING, 1),
        set_lease(3, LeaseState.WRITING),
    ],
)
def test_what_is_left_at_rest_is_named(leave: Callable[[Ledger], None]) -> None:
    """Progress (S9), one release per hold (S4): a hold that is left when all requests are over is found."""
    ledger = busy_life().drain().core.ledger
    assert check_rest(ledger) == []
    leave(ledger)
    assert [violation.property for violation in check_rest(ledger)] == [Property.PROGRESS]


def test_violations_name_known_properties_and_what_they_concern() -> None:
    """A report can always say which property is broken, and where to look."""
    for property, damage in DAMAGES:
        ledger = busy_life().core.ledger
        damage(ledger)
        for violation in check_ledger(ledger):
            assert violation.property in PROPERTIES
            assert violation.message
            assert (
                violation.slots or violation.device_blocks or violation.transfers or violation.requests
            ) or property == Property.CONSERVATION, violation


def test_refused_calls_leave_all_properties() -> None:
    """A refused call changes nothing."""
    life = busy_life()
    with pytest.raises(KvsmError):
        life.core.prepare_load("holder", [3])
    with pytest.raises(KvsmError):
        life.core.prepare_store("writer", [key(9)], [999])
    assert check_ledger(life.core.ledger) == []


def test_block_may_be_given_away_under_the_load_that_writes_it() -> None:
    """No stale data (S14).

    An engine without references waits for the load, and then computes. No note of the load stays.
    """
    core, _ = new_core(blocks_per_chunk=2)
    store(core, "a", keys(1), 0)
    core.match("r", keys(1))
    core.prepare_load("r", [8, 9])
    core.preempt("r")
    core.rewrite([8, 9])
    assert check_ledger(core.ledger) == []
