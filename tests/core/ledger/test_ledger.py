"""The fold refuses what cannot follow, and a refused event leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import pytest
from core_life import begin_store, fold, keys, kinds, load, new_core, store
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm import events as ev
from kvsm.core.ledger import Ledger, RequestRecord
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError
from kvsm.events import TRIGGERS, OffloadConfig, OffloadingEvent
from kvsm.ids import SMALL, pack, to_list
from kvsm.states import MACHINES
from kvsm.states.words import Codec, StateWords

HOST_BLOCKS, DEVICE_BLOCKS = 4, 5
NAMES = st.sampled_from(["a", "b", "never"])
KEYS = st.lists(st.sampled_from(keys(6)), max_size=3).map(tuple)
SLOTS = st.lists(st.integers(0, HOST_BLOCKS), max_size=3).map(tuple)
BLOCKS = st.lists(st.integers(0, DEVICE_BLOCKS), max_size=3).map(tuple)
TRANSFERS = st.integers(0, 30)
OWNERS = st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=2).map(tuple)
PARTS = st.lists(st.integers(0, 2 * HOST_BLOCKS), max_size=3).map(tuple)
CURSORS = st.lists(st.integers(0, 2), max_size=2).map(tuple)
FIELDS: dict[type[OffloadingEvent], tuple[st.SearchStrategy[object], ...]] = {
    ev.RequestArrived: (NAMES,),
    ev.RequestPreempted: (NAMES,),
    ev.RequestFinished: (NAMES, st.booleans()),
    ev.HitMatched: (NAMES, SLOTS),
    ev.HitReleased: (NAMES,),
    ev.RequestDeferred: (NAMES, TRANSFERS, st.integers(0, 3)),
    ev.BlocksEvicted: (SLOTS, st.just(()), TRANSFERS),
    ev.StorePlanned: (OWNERS, KEYS, SLOTS, BLOCKS),
    ev.LoadPlanned: (NAMES, SLOTS, BLOCKS, st.booleans(), PARTS),
    ev.TransfersSubmitted: (st.lists(TRANSFERS, max_size=2).map(tuple),),
    ev.TransferCancelled: (TRANSFERS,),
    ev.WorkerReported: (TRANSFERS, st.integers(0, 2), st.booleans()),
    ev.TransferLost: (TRANSFERS,),
    ev.BlocksTouched: (SLOTS,),
    ev.FlushRequested: (st.lists(TRANSFERS, max_size=2).map(tuple),),
    ev.CacheReset: (st.integers(0, 3),),
    ev.Ticked: (st.integers(0, 3),),
    ev.BlocksOffered: (st.lists(st.tuples(NAMES, CURSORS, CURSORS), max_size=2).map(tuple),),
    ev.OffersCounted: (KEYS,),
    ev.BlocksRewritten: (BLOCKS,),
    ev.RequestAdmitted: (NAMES, st.integers(0, 3)),
    ev.HintAnswered: (NAMES, NAMES, NAMES, st.sampled_from(ev.HintOutcome)),
}


@st.composite
def any_event(draw: st.DrawFn) -> tuple[type[OffloadingEvent], tuple[object, ...]]:
    """An event whose fields are often plausible and often wrong."""
    kind = draw(st.sampled_from(list(FIELDS)))
    return kind, tuple(draw(field) for field in FIELDS[kind])


def lived_in(chunk: int, workers: int = 2) -> tuple[Offloader, MemoryLog]:
    """A core in which no machine is at its beginning or its end."""
    core, log = new_core(
        HOST_BLOCKS,
        DEVICE_BLOCKS * chunk,
        workers,
        blocks_per_chunk=chunk,
        store_threshold=2,
    )
    store(core, "a", keys(2))
    load(core, "a", keys(2), 2 * chunk)
    core.match("b", keys(1))
    core.report(begin_store(core, "b", keys(3)[2:], 4 * chunk), 1, True)
    core.advance([("b", (0,), (1,))])
    core.count_offers(keys(5)[4:])
    return core, log


def apply_or_refuse(ledger: Ledger, event: OffloadingEvent) -> str | None:
    try:
        ledger.apply(event)
    except (IllegalTransition, InvalidEvent) as refusal:
        return str(refusal)
    return None


def refused_events_leave_no_trace(
    chunk: int, attempts: list[tuple[type[OffloadingEvent], tuple[object, ...]]]
) -> None:
    core, log = lived_in(chunk)
    ledger = core.ledger
    applied = MemoryLog(log)
    for kind, fields in attempts:
        before = digest(ledger)
        event = kind(ledger.seq + 1, ledger.step, 0, *fields)
        refusal = apply_or_refuse(ledger, event)
        if refusal is None:
            applied.append(event)
        else:
            assert digest(ledger) == before, f"{refusal}, and yet something changed"
            assert str(event.seq) in refusal, "a refusal names the event"
    assert digest(fold(applied, core.config)) == digest(ledger)
    assert digest(restore(snapshot(ledger))) == digest(ledger)


@given(st.sampled_from([1, 2]), st.lists(any_event(), max_size=12))
@settings(max_examples=examples(400))
def test_refused_events_leave_no_trace(
    chunk: int, attempts: list[tuple[type[OffloadingEvent], tuple[object, ...]]]
) -> None:
    """Rule 2: an illegal transition raises before anything changes."""
    refused_events_leave_no_trace(chunk, attempts)


@pytest.mark.slow
@given(st.sampled_from([1, 2]), st.lists(any_event(), max_size=12))
@settings(max_examples=1_500)
def test_refused_events_leave_no_trace_long(
    chunk: int, attempts: list[tuple[type[OffloadingEvent], tuple[object, ...]]]
) -> None:
    refused_events_leave_no_trace(chunk, attempts)


def test_event_numbers_have_no_gaps() -> None:
    ledger = Ledger(OffloadConfig(host_blocks=1, device_blocks=1))
    with pytest.raises(InvalidEvent, match="event 2: expected event 1"):
        ledger.apply(ev.StepEnded(2, 0, 0))


def test_log_of_another_configuration_is_refused() -> None:
    ledger = Ledger(OffloadConfig(host_blocks=1, device_blocks=1))
    with pytest.raises(InvalidEvent, match="configuration"):
        ledger.apply(ev.LogOpened(1, 0, 0, OffloadConfig(host_blocks=2, device_blocks=1), ""))


def test_load_of_blocks_that_were_not_matched_is_refused() -> None:
    """A match holds what it counts (S7): a load uses what its request's match holds, and nothing else."""
    core, _ = new_core()
    store(core, "r", keys(3))
    core.match("q", keys(2))
    with pytest.raises(InvalidEvent, match="does not hold"):
        core.ledger.apply(ev.LoadPlanned(core.ledger.seq + 1, 0, 0, "q", (2,), (5,)))


@pytest.mark.parametrize("count", [2, SMALL, SMALL + 1, 3 * SMALL])
def test_planned_key_that_has_a_block_is_refused_whole(count: int) -> None:
    """No doubled or lost store (S13): no key has two blocks. A batch of any size is refused as a whole."""
    core, log = new_core(host_blocks=8 * SMALL, device_blocks=8 * SMALL)
    store(core, "r", keys(1, "resident"))
    names = (*keys(count - 1), *keys(1, "resident"))
    ids = pack(range(1, count + 1))
    before = digest(core.ledger)
    with pytest.raises(InvalidEvent, match="has a block already"):
        core.ledger.apply(ev.StorePlanned(core.ledger.seq + 1, 0, 0, (("r", count),), names, ids, ids))
    assert digest(core.ledger) == before
    assert core.ledger.index == fold(log, core.config).index


def test_refused_plan_leaves_the_keys_of_planned_stores_in_the_index() -> None:
    """No doubled or lost store (S13): a key whose store has not left yet has a block, too."""
    core, _ = new_core()
    core.prepare_store("r", keys(1), [0])
    before = dict(core.ledger.index)
    with pytest.raises(InvalidEvent, match="has a block already"):
        core.ledger.apply(ev.StorePlanned(core.ledger.seq + 1, 0, 0, (), (b"new", *keys(1)), (1, 2), (1, 2)))
    assert core.ledger.index == before == {keys(1)[0]: 0}


def test_new_ledger_holds_nothing_and_nothing_has_happened() -> None:
    """Events are state (S10): everything that is not so was made so by an event."""
    ledger = Ledger(OffloadConfig(host_blocks=3, device_blocks=1))
    assert (ledger.voided_at, ledger.ended_at, ledger.forgotten_at) == (0, 0, 0)
    assert (ledger.key_of, ledger.index, list(ledger.free)) == ([b""] * 3, {}, [0, 1, 2])


def test_preempted_request_is_as_it_was_when_it_arrived() -> None:
    """Every call is legal (S8): neither its cursors nor the bound of its wait outlive its blocks."""
    core, _ = new_core(defer_ticks=3)
    begin_store(core, "r", keys(1))
    core.match("q", keys(1))
    core.advance([("q", (1,), (2,))])
    core.preempt("q")
    left, new = core.ledger.requests["q"], RequestRecord("q")
    assert (left.patience, left.settled, left.offered) == (new.patience, new.settled, new.offered)


@pytest.mark.parametrize(("parts", "fits"), [((0, 1), True), ((1, 0), False), ((0, 0), False)])
def test_parts_of_one_chunk_ascend(parts: tuple[int, int], fits: bool) -> None:
    """No stale data (S14): in another order, or twice, a part would go to a block that stands for another."""
    core, _ = lived_in(2)
    refusal = apply_or_refuse(
        core.ledger, ev.LoadPlanned(core.ledger.seq + 1, 0, 0, "b", (0,), (0, 1), False, parts)
    )
    assert (refusal is None) == fits
    assert fits or "parts ascend" in str(refusal)


@pytest.mark.parametrize("count", [2, SMALL + 2])
def test_match_that_lost_a_block_cannot_load_the_others(count: int) -> None:
    """A match holds what it counts (S7): its promise is whole, or voided as a whole."""
    core, _ = new_core(host_blocks=2 * count, device_blocks=4 * count)
    store(core, "r", keys(count))
    core.match("q", keys(count))
    core.fail_load(load(core, "s", keys(count)[-1:], 2 * count))
    slots, blocks = pack(range(count - 1)), pack(range(2 * count, 3 * count - 1))
    with pytest.raises(InvalidEvent, match="does not hold"):
        core.ledger.apply(ev.LoadPlanned(core.ledger.seq + 1, 0, 0, "q", slots, blocks))


@pytest.mark.parametrize("count", [2, SMALL + 2])
def test_block_that_another_request_loads_stays_pinned_when_others_are_voided(count: int) -> None:
    """A match holds what it counts (S7): LOADING is as readable as STORED."""
    core, _ = new_core(host_blocks=2 * count, device_blocks=4 * count)
    store(core, "r", keys(count))
    core.match("q", keys(count))
    load(core, "s", keys(1), 2 * count)
    core.match("t", keys(count))
    core.match("u", keys(count))
    failing = core.ledger.index[keys(count)[-1]]
    core.pin("u", [failing], None)
    job = core.prepare_load("u", [3 * count])
    assert job is not None
    core.submit([job.transfer])
    core.fail_load(job.transfer)
    pins = core.ledger.requests["q"].pins
    assert list(core.ledger.live_pins(core.ledger.requests["q"])) == to_list(pins)[:-1]


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        (((), (), True), True),
        (((0,), (), True), False),
        (((), (3,), True), False),
        (((), (), True, (0,)), False),
        (((0,), (3,), True), False),
    ],
)
def test_load_of_a_voided_match_plans_nothing(fields: tuple[object, ...], fits: bool) -> None:
    """Failure is not success (S6): the event only says that the promise is broken."""
    core, _ = new_core()
    store(core, "r", keys(2))
    core.match("q", keys(2))
    core.fail_load(load(core, "s", keys(2)[1:], 4))
    refusal = apply_or_refuse(core.ledger, ev.LoadPlanned(core.ledger.seq + 1, 0, 0, "q", *fields))  # type: ignore[arg-type]
    assert (refusal is None) == fits


class Ears:
    """Writes down what a listener hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[bytes]]] = []

    def stored(self, _transfer: int, keys: Sequence[bytes]) -> None:
        self.heard.append(("stored", list(keys)))

    def removed(self, keys: Sequence[bytes]) -> None:
        self.heard.append(("removed", list(keys)))

    def cleared(self) -> None:
        self.heard.append(("cleared", []))


@pytest.mark.parametrize("count", [1, 2, SMALL + 2])
@pytest.mark.parametrize("loses", ["a store", "a load"])
def test_listener_hears_of_a_loss_what_was_readable_and_no_more(loses: str, count: int) -> None:
    """Publish after commit (S2): of keys that were never readable nobody hears that they went."""
    core, _ = new_core(host_blocks=2 * count, device_blocks=4 * count)
    if loses == "a load":
        store(core, "r", keys(count))
    transfer = (load if loses == "a load" else begin_store)(core, "q", keys(count), 2 * count)
    ears = core.ledger.listener = Ears()
    core.lose(transfer)
    assert ears.heard == ([("removed", keys(count))] if loses == "a load" else [])
    assert not core.ledger.index


def test_count_of_another_key_is_left_when_a_key_that_was_never_counted_is_stored() -> None:
    core, _ = new_core(store_threshold=2)
    core.count_offers(keys(1, "counted"))
    store(core, "r", keys(1, "never counted"))
    assert dict(core.ledger.offers.times) == {keys(1, "counted")[0]: 1}


def test_illegal_transition_names_block_state_trigger_and_event() -> None:
    core, _ = new_core()
    store(core, "r", keys(1))
    core.match("q", keys(1))
    with pytest.raises(IllegalTransition) as refusal:
        core.ledger.apply(ev.BlocksEvicted(core.ledger.seq + 1, 0, 0, (0,), (), 9))
    assert str(refusal.value) == "event 6: block 0: EVICT is illegal in STORED(copies=0, pins=1)"


SMALLER = OffloadConfig(host_blocks=1, device_blocks=1)
REFUSED: list[tuple[type[OffloadingEvent], tuple[object, ...], str]] = [
    (ev.LogOpened, (lived_in(1)[0].config, ""), "the log opens once"),
    (ev.RequestArrived, ("a",), "request a has arrived before"),
    (ev.RequestPreempted, ("never",), "request never has not arrived"),
    (ev.RequestFinished, ("never", True), "request never has not arrived"),
    (ev.HitMatched, ("a", (0,)), "request a: HIT is illegal in LOADING(loads=1)"),
    (ev.HitMatched, ("b", ()), "request b: MISS is illegal in MATCHED(loads=0)"),
    (ev.HitMatched, ("c", (2,)), "block 2: PIN is illegal in STORING(copies=1, pins=0)"),
    (ev.HitMatched, ("c", (0, 4)), "block 4: PIN is illegal in none of the 4"),
    (ev.HitMatched, ("c", (-1,)), "block -1: PIN is illegal in none of the 4"),
    (ev.HitReleased, ("never",), "request never has not arrived"),
    (ev.HitReleased, ("a",), "request a: UNMATCH is illegal in LOADING(loads=1)"),
    (ev.RequestDeferred, ("a", 10, 5), "request a: DEFER is illegal in LOADING(loads=1)"),
    (ev.RequestDeferred, ("c", 99, 5), "transfer 99 is not live"),
    (ev.BlocksEvicted, ((0,), (), 16), "block 0: EVICT is illegal in LOADING(copies=1, pins=1)"),
    (ev.BlocksEvicted, ((1, 1), (), 16), "block 1: EVICT is illegal: named twice in one batch"),
    (ev.BlocksEvicted, ((), (2,), 16), "block 2: TOUCH is illegal in STORING(copies=1, pins=0)"),
    (ev.StorePlanned, ((), (b"x",), (3,), (0, 1)), "a plan names a chunk of device blocks for each slot"),
    (ev.StorePlanned, ((), (), (), ()), "a plan names a chunk of device blocks for each slot"),
    (ev.StorePlanned, ((), (b"x",), (), (0,)), "a store names as many slots as keys"),
    (ev.StorePlanned, ((("a", 2),), (b"x",), (3,), (0,)), "a store names as many slots as keys"),
    (ev.StorePlanned, ((), tuple(keys(1)), (3,), (0,)), "a planned key has a block already"),
    (ev.StorePlanned, ((), (b"x",), (2,), (0,)), "block 2: ALLOCATE is illegal in STORING(copies=1, pins=0)"),
    (ev.StorePlanned, ((), (b"x",), (3,), (2,)), "lease 2: BEGIN_READ is illegal in WRITING(readers=0)"),
    (ev.LoadPlanned, ("never", (0,), (0,)), "request never has not arrived"),
    (ev.LoadPlanned, ("a", (0,), (0,)), "request a: BEGIN_LOAD is illegal in LOADING(loads=1)"),
    (ev.LoadPlanned, ("b", (), (), True), "no pin of this request was voided"),
    (ev.LoadPlanned, ("b", (0,), (0, 1)), "a plan names a chunk of device blocks for each slot"),
    (ev.LoadPlanned, ("b", (0,), (0,), False, (1,)), "parts ascend, and name each slot"),
    (ev.LoadPlanned, ("b", (0,), (4,)), "lease 4: BEGIN_WRITE is illegal in READING(readers=1)"),
    (ev.TransfersSubmitted, ((99,),), "transfer 99 is not live"),
    (ev.TransfersSubmitted, ((10, 10),), "a transfer is named twice"),
    (ev.TransfersSubmitted, ((10,),), "transfer 10: SUBMIT is illegal in SUBMITTED(pending=1, failed=0)"),
    (ev.TransferCancelled, (99,), "transfer 99 is not live"),
    (ev.TransferCancelled, (10,), "transfer 10: CANCEL is illegal in SUBMITTED(pending=1, failed=0)"),
    (ev.WorkerReported, (99, 0, True), "transfer 99 is not live"),
    (ev.WorkerReported, (10, 1, True), "worker 1 cannot report transfer 10 (again)"),
    (ev.WorkerReported, (10, 2, True), "worker 2 cannot report transfer 10 (again)"),
    (ev.TransferLost, (99,), "transfer 99 is not live"),
    (ev.BlocksTouched, ((2,),), "block 2: TOUCH is illegal in STORING(copies=1, pins=0)"),
    (ev.FlushRequested, ((99,),), "transfer 99 is not live"),
    (ev.FlushRequested, ((10, 10),), "a transfer is named twice"),
    (ev.CacheReset, (2,), "epoch 2 cannot follow epoch 0"),
    (ev.Ticked, (2,), "tick 2 cannot follow tick 0"),
    (ev.Restarted, (1, SMALLER, ""), "life 1 cannot follow life 1"),
    (ev.Restarted, (2, SMALLER, ""), "the next process has another pool"),
    (ev.BlocksOffered, ((("never", (), ()),),), "request never has not arrived"),
    (ev.BlocksOffered, ((("b", (2,), (1,)),),), "request b has settled more than it offered"),
    (ev.BlocksOffered, ((("b", (0,), (1, 2)),),), "request b has settled more than it offered"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "reason"), REFUSED, ids=[f"{row[0].__name__}-{row[2]}" for row in REFUSED]
)
def test_refusal_says_at_which_event_what_is_wrong(
    kind: type[OffloadingEvent], fields: tuple[object, ...], reason: str
) -> None:
    """Rule 2: a refusal names the event, the thing and its state."""
    core, log = lived_in(1)
    before = digest(core.ledger)
    with pytest.raises((IllegalTransition, InvalidEvent)) as refusal:
        core.ledger.apply(kind(15, 0, 0, *fields))
    assert str(refusal.value).startswith(f"event 15: {reason}")
    assert digest(core.ledger) == before
    assert len(log) == 14


@pytest.mark.parametrize(
    ("kind", "fields", "trigger"),
    [(ev.WorkerReported, (2, 0, True), "REPORT_GOOD"), (ev.TransferLost, (2,), "LOSE")],
)
def test_plan_that_did_not_leave_has_no_copy_to_hear_of(
    kind: type[OffloadingEvent], fields: tuple[object, ...], trigger: str
) -> None:
    """Stale reports change nothing (S5): a plan that no worker has cannot be reported or lost."""
    core, _ = new_core()
    core.prepare_store("r", keys(1), [0])
    with pytest.raises(IllegalTransition, match=f"^event 3: transfer 2: {trigger} is illegal in PLANNED"):
        core.ledger.apply(kind(3, 0, 0, *fields))


class TestTriggerTable:
    """`TRIGGERS` says which kind of event pulls which trigger. It is compared with the fold."""

    @pytest.mark.usefixtures("_python_folds")
    def test_table_says_what_the_fold_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pulled: dict[type[OffloadingEvent], list[IntEnum]] = {kind: [] for kind in TRIGGERS}
        folding: list[type[OffloadingEvent]] = []
        step, check, advance, apply = Codec.step, StateWords.check, StateWords.advance, Ledger.apply

        def spy_apply(ledger: Ledger, event: OffloadingEvent) -> object:
            folding.append(type(event))
            return apply(ledger, event)

        def spy_step(codec: Codec, word: int, trigger: IntEnum, name: int | str, seq: int) -> int:
            pulled[folding[-1]].append(trigger)
            return step(codec, word, trigger, name, seq)

        def spy_check(words: StateWords, ids: object, trigger: IntEnum, seq: int) -> object:
            pulled[folding[-1]].append(trigger)
            return check(words, ids, trigger, seq)  # type: ignore[arg-type]

        monkeypatch.setattr(Ledger, "apply", spy_apply)
        monkeypatch.setattr(Codec, "step", spy_step)

        def spy_advance(words: StateWords, ids: object, trigger: IntEnum, seq: int) -> object:
            pulled[folding[-1]].append(trigger)
            return advance(words, ids, trigger, seq)  # type: ignore[arg-type]

        monkeypatch.setattr(StateWords, "check", spy_check)
        monkeypatch.setattr(StateWords, "advance", spy_advance)
        every_kind_of_event()
        difference = {
            kind.__name__: sorted(repr(one) for one in members(pulled[kind]) ^ members(TRIGGERS[kind]))
            for kind in TRIGGERS
        }
        assert {kind: wrong for kind, wrong in difference.items() if wrong} == {}

    def test_every_trigger_is_pulled_by_some_kind(self) -> None:
        declared = {one for machine in MACHINES.values() for one in members(machine.triggers)}
        assert {one for triggers in TRIGGERS.values() for one in members(triggers)} == declared


def members(triggers: Iterable[IntEnum]) -> set[tuple[str, str]]:
    """By class and name: members of two machines can be equal as numbers."""
    return {(type(one).__name__, one.name) for one in triggers}


def every_kind_of_event() -> None:
    """A life that has every kind of event, with each of its triggers."""
    small, _ = new_core(host_blocks=4, policy="s3fifo")
    store(small, "r", keys(1, "used"))
    for block in (4, 5):
        small.complete_load(load(small, "r", keys(1, "used"), block))
    store(small, "other", keys(3), 1)
    store(small, "new", keys(1, "new"), 6)

    core, _ = new_core(host_blocks=8, device_blocks=32, defer_ticks=1)

    def planned(request: str, name: str, block: int) -> int:
        job = core.prepare_store(request, keys(1, name), [block]).job
        assert job is not None
        return job.transfer

    def submitted(request: str, name: str, block: int) -> int:
        transfer = planned(request, name, block)
        core.submit([transfer])
        return transfer

    core.arrive("r")
    core.match("r", keys(1, "nowhere"))
    store(core, "r", keys(4))
    core.touch(keys(2))
    # Loads: good, bad, cancelled, in part, voided, lost.
    core.complete_load(load(core, "a", keys(2), 8))
    core.match("b", keys(3))
    job = core.prepare_load("b", [10])
    assert job is not None
    core.cancel(job.transfer)
    core.match("c", keys(2))
    core.fail_load(load(core, "d", keys(1), 11))
    core.prepare_load("c", [12, 13])
    store(core, "r", keys(1), 0)
    core.lose(load(core, "e", keys(1), 14))
    # Stores: failed, lost, cancelled, each with a request that waits. A tick ends a wait too.
    for name, end in (("f", core.fail_store), ("l", core.lose), ("x", core.cancel)):
        transfer = planned("r", name, 2) if name == "x" else submitted("r", name, 2 if name == "f" else 3)
        core.match("w" + name, keys(1, name))
        end(transfer)
    transfer = submitted("r", "t", 4)
    core.match("wt", keys(1, "t"))
    core.tick()
    core.flush()
    core.complete_store(transfer)
    core.complete_store(transfer)
    # Pins given back by release, preemption and finish.
    for request, end_of in (("g", core.release), ("h", core.preempt), ("i", core.finish)):
        core.match(request, keys(1, "t"))
        end_of(request)
    # A reset with plans and copies of both directions and a waiting request. It drains.
    store(core, "r", keys(2, "last"), 5)
    core.match("j", keys(2, "last"))
    core.prepare_load("j", [16, 17])
    loading = load(core, "k", keys(2, "last"), 18)
    storing = submitted("r", "s", 20)
    planned("r", "p", 21)
    core.match("wp", keys(1, "p"))
    core.reset()
    core.fail_load(loading)
    core.complete_store(storing)
    core.end_step()
    # Another process, while copies are planned and in flight.
    submitted("r", "u", 22)
    planned("r", "v", 23)
    Offloader.restarted(core.ledger, core.config)


def test_recalled_keys_reach_the_policy() -> None:
    """Rule 11: a ghost hit is its own event, before the eviction that it may change."""
    core, log = new_core(host_blocks=2, policy="arc")
    # While its recent list fills the cache, ARC keeps no ghosts of blocks that were used once.
    store(core, "r", keys(2))
    core.complete_load(load(core, "r", keys(1), 4))
    store(core, "r", keys(1, "new"), 6)
    gone = [key for key in keys(2) if core.lookup(key).name == "MISS"]
    store(core, "r", gone, 8)
    assert "KeysRecalled" in kinds(log)
    assert digest(fold(log, core.config)) == digest(core.ledger)


def test_errors_share_one_base() -> None:
    assert issubclass(IllegalTransition, KvsmError)
    assert issubclass(InvalidEvent, KvsmError)
