"""Verification finds what is wrong with a log, or with the fold, names it, and says where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import (
    OPERATIONS,
    POLICIES,
    Life,
    Operations,
    after_reset,
    full_life,
    gapped,
    head,
    key,
    random_life,
    scene,
    written,
)

from kvsm import events as ev
from kvsm.errors import LogDamaged
from kvsm.events import KINDS, OffloadingEvent
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger
from kvsm.log import LogGap
from kvsm.policies.lru import LRUPolicy
from kvsm.replay import (
    Auditor,
    entries,
    rebuild,
    render,
    verify_log,
)
from kvsm.snapshot import digest, snapshot
from kvsm.states import machines_digest

# Verifying good logs.


@settings(deadline=None, max_examples=60)
@given(OPERATIONS, POLICIES, st.integers(1, 3))
def test_no_life_of_the_core_breaks_a_property(operations: Operations, policy: str, workers: int) -> None:
    """Everything checked in full after each event: the witness, the ledger and the published events agree."""
    life = Life(policy=policy, workers=workers).drive(operations)
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        assert auditor.apply(event) == []
        assert auditor.check() == []


@settings(deadline=None)
@given(OPERATIONS, st.integers(0, 40))
def test_a_witness_can_start_in_the_middle(operations: Operations, skipped: int) -> None:
    """A log that begins with a snapshot is verified as well as a whole one."""
    events = Life().drive(operations).events
    ledger = Ledger(Life().config)
    for event in events[:skipped]:
        ledger.apply(event)
    auditor = Auditor(ledger)
    for event in events[skipped:]:
        assert auditor.apply(event) == []
    assert auditor.check() == []


@pytest.mark.slow
@settings(deadline=None, max_examples=10_000)
@given(OPERATIONS, POLICIES, st.integers(1, 3))
def test_no_life_of_the_core_breaks_a_property_in_ten_thousand(
    operations: Operations, policy: str, workers: int
) -> None:
    """The same, many times."""
    life = Life(policy=policy, workers=workers).drive(operations).drain()
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        assert auditor.apply(event) == []
    assert auditor.check() == []


def test_a_log_of_every_kind_of_event_verifies(tmp_path: Path) -> None:
    """Digest, counts and range of a good log; every kind of event was in it."""
    life = random_life(5, 4000, tmp_path / "log", policy="arc", writer={"segment_bytes": 20_000})
    life.drain().close()
    assert {type(event) for event in life.events} >= set(KINDS) - {ev.RequestArrived}
    seen: list[int] = []
    found = verify_log(tmp_path / "log", every=500, progress=seen.append)
    assert found.good
    assert (found.violations, found.breakage, found.damage) == ((), None, None)
    assert (found.first, found.last, found.events) == (1, len(life.events), len(life.events))
    assert found.entries == entries(life.events)
    assert found.digest == digest(life.core.ledger)
    assert seen == sorted(seen)
    assert seen


# Verifying logs that tell of something wrong.


WRONG: list[tuple[str, Callable[[Life], list[OffloadingEvent]]]] = [
    ("S2", lambda life: [ev.HitMatched(*head(life), "r3", (2,))]),
    ("S3", lambda life: [ev.BlocksEvicted(*head(life), (2,), (), 99)]),
    ("S7", lambda life: [ev.BlocksEvicted(*head(life), (0,), (), 99)]),
    ("S1", lambda life: [ev.StorePlanned(*head(life), "r3", (key(9),), (0,), (9,))]),
    ("S3", lambda life: [ev.StorePlanned(*head(life), "r3", (key(9),), (3,), (9,))]),
    ("S7", lambda life: [ev.LoadPlanned(*head(life), "r1", (1, 0), (9, 10))]),
    ("S7", lambda life: [ev.LoadPlanned(*head(life), "r3", (0,), (9,))]),
    ("S3", lambda life: [ev.LoadPlanned(*head(life), "r1", (0, 1), (2, 9))]),
    ("S5", lambda life: [ev.WorkerReported(*head(life), 99, 0, True)]),
    ("S5", lambda life: [ev.WorkerReported(*head(life), life.core.ledger.seq - 1, 1, True)]),
    ("S5", lambda life: [ev.TransfersSubmitted(*head(life), (life.core.ledger.seq - 1,))]),
    ("S5", lambda life: [ev.TransferCancelled(*head(life), 99)]),
    ("S5", lambda life: [ev.TransferLost(*head(life), 99)]),
    ("S7", lambda life: [ev.HitMatched(*head(life), "r1", (0,))]),
    ("S2", lambda life: [ev.BlocksTouched(*head(life), (2,))]),
    ("S1", lambda life: [ev.BlocksTouched(*head(life), (4,))]),
    ("S10", lambda life: [ev.RequestFinished(*head(life), "nobody")]),
    ("S10", lambda life: [ev.Ticked(*head(life), 7)]),
    ("S10", lambda life: [ev.CacheReset(*head(life), 7)]),
]


@pytest.mark.parametrize(("property_id", "lie"), WRONG)
def test_an_event_that_cannot_be_is_found_and_named(
    tmp_path: Path, property_id: str, lie: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """A log with one false event in it: the property that it breaks, and its number."""
    life = scene()
    events = [*life.events, *lie(life), ev.StepEnded(0, 0, 0)]
    found = verify_log(written(tmp_path / "log", life, events))
    assert not found.good
    assert found.breakage is not None
    assert {violation.property_id for violation in found.violations} == {property_id}
    assert found.breakage.event == len(life.events) + 1
    assert found.breakage.led_there[-1].startswith(f"event {found.breakage.event} ")


def after_failed_store(life: Life) -> list[OffloadingEvent]:
    store = life.core.ledger.seq - 1
    seq, step, wall = head(life)
    failed = ev.WorkerReported(seq, step, wall, store, 0, False)
    return [failed, ev.HitMatched(seq + 1, step, wall, "r3", (2,))]


def stored_again(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    evicted = ev.HitReleased(seq, step, wall, "r1"), ev.BlocksEvicted(seq + 1, step, wall, (0,), (), seq + 2)
    return [*evicted, ev.StorePlanned(seq + 2, step, wall, "r3", (key(1),), (0,), (9,))]


def stored_from_a_busy_block(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    evicted = ev.HitReleased(seq, step, wall, "r1"), ev.BlocksEvicted(seq + 1, step, wall, (0,), (), seq + 2)
    return [*evicted, ev.StorePlanned(seq + 2, step, wall, "r3", (key(9),), (0,), (2,))]


@pytest.mark.parametrize(
    ("property_id", "story"),
    [
        ("S6", after_failed_store),
        ("S14", after_reset),
        ("S13", stored_again),
        ("S13", stored_from_a_busy_block),
    ],
)
def test_the_last_of_several_events_is_the_false_one(
    tmp_path: Path, property_id: str, story: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """S6, S13, S14: what went before decides which property a match or a store breaks."""
    life = scene()
    lies = story(life)
    found = verify_log(written(tmp_path / "log", life, [*life.events, *lies]))
    assert found.breakage is not None
    assert {violation.property_id for violation in found.violations} == {property_id}
    assert found.breakage.event == len(life.events) + len(lies)


# Verifying with a fold that is wrong: each fault is one line that the ledger, or its policy, forgets.


def nothing(*_: object, **__: object) -> None:
    """What a forgotten line does."""


def forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(Ledger, name, nothing)


def policy_forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(LRUPolicy, name, nothing)


def publishes_early(patch: pytest.MonkeyPatch) -> None:
    """A store is readable when it is submitted."""
    original = Ledger._submitted

    def submitted(self: Ledger, event: ev.TransfersSubmitted) -> None:
        original(self, event)
        for id in event.transfers:
            for slot in self.transfers[id].slots:
                self.blocks.words[slot] += 1

    patch.setattr(Ledger, "_submitted", submitted)


def publishes_failures(patch: pytest.MonkeyPatch) -> None:
    """A failed store ends like a good one."""
    original = Ledger._end_copies

    def end_copies(self: Ledger, transfer: Any, good: bool, seq: int) -> None:
        original(self, transfer, good or transfer.direction is ev.Direction.STORE, seq)

    patch.setattr(Ledger, "_end_copies", end_copies)


def keeps_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_end", lambda self, transfer, seq: self._close(transfer, seq))


def drops_leases(patch: pytest.MonkeyPatch) -> None:
    """A plan takes no lease."""
    original = Ledger._store_planned

    def planned(self: Ledger, event: ev.StorePlanned) -> None:
        original(self, event)
        for block in event.device_blocks:
            self.leases.words[block] = 0

    patch.setattr(Ledger, "_store_planned", planned)


def rejected_acts(patch: pytest.MonkeyPatch) -> None:
    """A rejected report counts after all."""

    def rejected(self: Ledger, event: OffloadingEvent) -> None:
        if isinstance(event, ev.ReportRejected) and event.transfer in self.transfers:
            self.transfers[event.transfer].reported |= 1 << event.worker

    patch.setattr(Ledger, "_noted", rejected)


def reset_spares(patch: pytest.MonkeyPatch) -> None:
    """A reset begins an epoch and voids nothing."""

    def reset(self: Ledger, event: ev.CacheReset) -> None:
        self.epoch = event.epoch

    patch.setattr(Ledger, "_reset", reset)


def publisher_forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(Publisher, name, nothing)


def wrong_victim_leaves_the_order(patch: pytest.MonkeyPatch) -> None:
    """The eviction order drops another slot than the one that was evicted: all counts stay right."""
    original = LRUPolicy.evicted

    def evicted(self: LRUPolicy, choice: Any, keys: Sequence[bytes]) -> None:
        others = [slot for slot in self._queue if slot not in choice.victims][: len(choice.victims)]
        original(self, choice._replace(victims=tuple(others)), keys)

    patch.setattr(LRUPolicy, "evicted", evicted)


FAULTS: list[tuple[set[str], Callable[[pytest.MonkeyPatch], None]]] = [
    ({"S4"}, forgets("_unpin")),
    ({"S1"}, policy_forgets("admitted")),
    ({"S1"}, policy_forgets("busy")),
    ({"S1"}, policy_forgets("idle")),
    ({"S1"}, policy_forgets("evicted")),
    ({"S2"}, publishes_early),
    ({"S6"}, publishes_failures),
    ({"S4"}, keeps_leases),
    ({"S3"}, drops_leases),
    ({"S5"}, rejected_acts),
    ({"S14"}, reset_spares),
    ({"S10"}, publisher_forgets("stored")),
    ({"S10"}, publisher_forgets("removed")),
    ({"S1"}, wrong_victim_leaves_the_order),
]


@pytest.mark.parametrize("every", [1, 250_000])
@pytest.mark.parametrize(("properties", "fault"), FAULTS)
def test_a_wrong_fold_is_found_at_the_event_where_it_goes_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: set[str],
    fault: Callable[[pytest.MonkeyPatch], None],
    every: int,
) -> None:
    """However seldom everything is checked, the same first event is named, and the same property."""
    life = full_life(tmp_path / "log")
    assert verify_log(tmp_path / "log").good
    fault(monkeypatch)
    expected = first_broken_of(life)
    found = verify_log(tmp_path / "log", every=every)
    assert found.breakage is not None
    assert found.breakage.event == expected
    assert properties <= {violation.property_id for violation in found.violations}


def first_broken_of(life: Life) -> int:
    """The event after which everything, checked at every event, first finds something."""
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        if auditor.apply(event) or auditor.check():
            return event.seq
    raise AssertionError("the fault has no effect in this life")


def test_what_led_there_are_the_last_ten_events_of_the_same_things(tmp_path: Path) -> None:
    """At most ten lines, oldest first, all of them about the slots concerned, the false event last."""
    life = Life(host_blocks=4, workers=1, defer_ticks=0)
    life.stored("r0", [key(0)], [0])
    life.stored("r9", [key(9)], [9])
    for _ in range(8):
        life.core.match("r1", [key(0)])
        life.core.release("r1")
        life.core.match("r2", [key(9)])
        life.core.release("r2")
    seq = life.core.ledger.seq + 1
    events = [*life.events, ev.StorePlanned(seq, 0, 0, "r3", (key(5),), (0,), (3,))]
    found = verify_log(written(tmp_path / "log", life, events))
    assert found.breakage is not None
    lines = found.breakage.led_there
    assert len(lines) == 10
    assert all("slot 0" in line or "request r1" in line for line in lines)
    assert lines[-1] == f"event {seq} step 0: {render(events[-1])}"


# Verifying logs whose bytes are not all there.


def test_a_torn_tail_is_cut_and_told(tmp_path: Path) -> None:
    """A crash in the middle of a write: good up to the last whole record."""
    life = random_life(6, 300, tmp_path / "log")
    life.close()
    (path,) = (tmp_path / "log").glob("*.kvsm")
    path.write_bytes(path.read_bytes()[:-3])
    found = verify_log(tmp_path / "log")
    assert found.good
    assert found.condition.torn is not None
    assert found.last == found.condition.torn.seq - 1 < len(life.events)
    assert found.digest == digest(rebuild(tmp_path / "log").ledger)


def test_damage_is_told_with_its_place_and_the_events_before_it_are_verified(tmp_path: Path) -> None:
    """A flipped byte in the middle of a log."""
    random_life(7, 300, tmp_path / "log").close()
    (path,) = (tmp_path / "log").glob("*.kvsm")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    found = verify_log(tmp_path / "log")
    assert not found.good
    assert found.damage is not None
    assert str(path) in found.damage
    assert f"event {found.last + 1}" in found.damage
    assert found.violations == ()
    with pytest.raises(LogDamaged):
        rebuild(tmp_path / "log")


def test_a_gap_is_told_and_the_log_verified_on_both_sides(tmp_path: Path) -> None:
    """From the snapshot after the gap on, everything is checked again; the end is the live state."""
    life = gapped(tmp_path / "log")
    found = verify_log(tmp_path / "log")
    assert found.violations == ()
    assert not found.good
    ((first, last),) = found.condition.gaps
    assert found.events == len(life.events) - (last - first + 1)
    assert found.digest == digest(life.core.ledger)
    rebuilt = rebuild(tmp_path / "log")
    assert digest(rebuilt.ledger) == digest(life.core.ledger)
    assert not rebuilt.condition.complete
    with pytest.raises(LogGap):
        rebuild(tmp_path / "log", seq=first)
    assert digest(rebuild(tmp_path / "log", seq=last + 1).ledger)


def test_a_segment_whose_snapshot_is_not_the_fold_is_found(tmp_path: Path) -> None:
    """S10: the live state, as the writer saved it at a rotation, against the fold of the events before."""
    false = Life()
    life = Life(
        tmp_path / "log", writer={"segment_bytes": 1000, "snapshot_of": None} and {"segment_bytes": 1000}
    )
    assert life.writer is not None
    life.writer._snapshot = lambda: lied(life, false)
    life.drive([("store", n, n) for n in range(5)] * 20)
    life.close()
    found = verify_log(tmp_path / "log")
    assert [violation.property_id for violation in found.violations] == ["S10"]
    assert "is not what the fold gives" in found.violations[0].message


def lied(life: Life, false: Life) -> bytes:
    """The live state, but for the tick."""
    false.core.ledger.__dict__.update(life.core.ledger.__dict__)
    false.core.ledger.tick = life.core.ledger.tick + 1
    return snapshot(false.core.ledger)


def test_a_log_by_other_tables_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kvsm's machines may give another state: that is said, not passed over."""
    random_life(9, 30, tmp_path / "log").close()
    assert not verify_log(tmp_path / "log").condition.other_machines
    monkeypatch.setattr("kvsm.replay.fold.machines_digest", lambda: "other")
    assert machines_digest() != "other"
    condition = verify_log(tmp_path / "log").condition
    assert "other machine tables" in condition.notes()[0]
