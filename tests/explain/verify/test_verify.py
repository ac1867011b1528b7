"""Verification finds faults of a log or of the fold, and names the broken property and the event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_bugs import plant
from replay_life import (
    CONFIGS,
    OPERATIONS,
    Life,
    Operations,
    after_reset,
    gapped,
    head,
    key,
    random_life,
    scene,
    written,
)

from examples import examples
from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import digest, restore, snapshot
from kvsm.core.log import LogGap, WholeState
from kvsm.core.scheduler.hits import HitSearch
from kvsm.errors import LogDamaged
from kvsm.events import KINDS, HintOutcome, OffloadingEvent
from kvsm.explain.story import (
    Auditor,
    entries,
    rebuild,
    render,
    verify_log,
)
from kvsm.properties import Property
from kvsm.serving import RunOptions, run_workload
from kvsm.states import machines_digest

# Verifying good logs.


@settings(deadline=None, max_examples=examples(60))
@given(OPERATIONS, CONFIGS)
def test_no_life_of_the_core_breaks_a_property(operations: Operations, config: dict[str, Any]) -> None:
    """After each event the witness, the ledger and the published events agree."""
    life = Life(**config).drive(operations)
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        assert auditor.apply(event) == []
        assert auditor.check() == []


@settings(deadline=None, max_examples=examples(100))
@given(OPERATIONS, CONFIGS, st.integers(0, 80))
def test_a_witness_can_start_in_the_middle(
    operations: Operations, config: dict[str, Any], skipped: int
) -> None:
    """A log that begins with a snapshot is verified like a whole one."""
    life = Life(**config).drive(operations)
    ledger = Ledger(life.config)
    for event in life.events[:skipped]:
        ledger.apply(event)
    auditor = Auditor(restore(snapshot(ledger)))
    for event in life.events[skipped:]:
        assert auditor.apply(event) == []
    assert auditor.check() == []


def test_a_witness_that_starts_after_a_reset_knows_which_pins_have_ended() -> None:
    """One release per hold (S4): the next event that ends the match must not release them again."""
    life = Life()
    life.stored("r0", [key(0)], [0])
    life.core.match("r1", [key(0)])
    life.core.reset("")
    ledger = Ledger(life.config)
    for event in life.events:
        ledger.apply(event)
    assert len(ledger.requests["r1"].pins)
    begun, auditor = len(life.events), Auditor(restore(snapshot(ledger)))
    life.core.finish("r1")
    for event in life.events[begun:]:
        assert auditor.apply(event) == []
    assert auditor.check() == []


@pytest.mark.slow
@settings(deadline=None, max_examples=1_500)
@given(OPERATIONS, CONFIGS)
def test_no_life_of_the_core_breaks_a_property_in_thousands(
    operations: Operations, config: dict[str, Any]
) -> None:
    """The same with more examples."""
    life = Life(**config).drive(operations).drain()
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        assert auditor.apply(event) == []
    assert auditor.check() == []


def test_a_log_of_every_kind_of_event_verifies(tmp_path: Path) -> None:
    """Digest, counts and range of a good log that has every kind of event."""
    options = {"policy": "arc", "load_only_if_faster": True}
    life = random_life(1, 4000, tmp_path / "log", writer={"segment_bytes": 20_000}, **options)
    life.drain()
    life.core.note_times(9, 0, 0)
    life.core.arrive("slow")
    assert life.core.declines("slow", 1, 1)
    life.core.finish("slow")
    life.core.count_offers([b"offered once"])
    life.core.answer_hint("r1", "a session", "", HintOutcome.REFUSED)
    life.close()
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


# Verifying logs with wrong events.


WRONG: list[tuple[str, Callable[[Life], list[OffloadingEvent]]]] = [
    (Property.PUBLISH_AFTER_COMMIT, lambda life: [ev.HitMatched(*head(life), "r3", (2,))]),
    (Property.NO_REUSE_IN_FLIGHT, lambda life: [ev.BlocksEvicted(*head(life), (2,), (), 99)]),
    (Property.MATCH_HOLDS, lambda life: [ev.BlocksEvicted(*head(life), (0,), (), 99)]),
    (Property.CONSERVATION, lambda life: [ev.StorePlanned(*head(life), (("r3", 1),), (key(9),), (0,), (9,))]),
    (
        Property.NO_REUSE_IN_FLIGHT,
        lambda life: [ev.StorePlanned(*head(life), (("r3", 1),), (key(9),), (3,), (9,))],
    ),
    (Property.MATCH_HOLDS, lambda life: [ev.LoadPlanned(*head(life), "r1", (1, 0), (9, 10))]),
    (Property.MATCH_HOLDS, lambda life: [ev.LoadPlanned(*head(life), "r3", (0,), (9,))]),
    (Property.NO_REUSE_IN_FLIGHT, lambda life: [ev.LoadPlanned(*head(life), "r1", (0, 1), (2, 9))]),
    (Property.STALE_REPORTS, lambda life: [ev.WorkerReported(*head(life), 99, 0, True)]),
    (
        Property.STALE_REPORTS,
        lambda life: [ev.WorkerReported(*head(life), life.core.ledger.seq - 1, 1, True)],
    ),
    (Property.STALE_REPORTS, lambda life: [ev.TransfersSubmitted(*head(life), (life.core.ledger.seq - 1,))]),
    (Property.STALE_REPORTS, lambda life: [ev.TransferCancelled(*head(life), 99)]),
    (Property.STALE_REPORTS, lambda life: [ev.TransferLost(*head(life), 99)]),
    (Property.MATCH_HOLDS, lambda life: [ev.HitMatched(*head(life), "r1", (0,))]),
    (Property.PUBLISH_AFTER_COMMIT, lambda life: [ev.BlocksTouched(*head(life), (2,))]),
    (Property.CONSERVATION, lambda life: [ev.BlocksTouched(*head(life), (5,))]),
    (Property.STORED_ONCE, lambda life: [ev.BlocksOffered(*head(life), (("r1", (3, 1), (2, 2)),))]),
    (Property.STORED_ONCE, lambda life: [ev.BlocksOffered(*head(life), (("r1", (1,), (2, 2)),))]),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.BlocksOffered(*head(life), (("nobody", (1,), (2,)),))]),
    (
        Property.EVENTS_ARE_STATE,
        lambda life: [ev.StorePlanned(*head(life), (("r3", 2),), (key(9),), (4,), (9,))],
    ),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.StorePlanned(*head(life), (), (key(9),), (4,), (9, 10))]),
    (
        Property.EVENTS_ARE_STATE,
        lambda life: [ev.LoadPlanned(*head(life), "r1", (0, 1), (9, 10), False, (1, 0))],
    ),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.LoadPlanned(*head(life), "r1", (0, 1), (9,), False, (0,))]),
    (Property.CONSERVATION, lambda life: [ev.LoadPlanned(*head(life), "r1", (0, 1), (9, 10), False, (0, 2))]),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.RequestFinished(*head(life), "nobody")]),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.Ticked(*head(life), 7)]),
    (Property.EVENTS_ARE_STATE, lambda life: [ev.CacheReset(*head(life), 7)]),
    (Property.STORED_SO_SERVED, lambda life: [ev.HitMatched(*head(life), "r3", (), key(0), 2, 0, 0)]),
    (Property.STORED_SO_SERVED, lambda life: [ev.HitMatched(*head(life), "r3", (0,), key(1), 3, None, 1)]),
    (Property.STORED_SO_SERVED, lambda life: [ev.HitMatched(*head(life), "r3", (0,), None, 2, None, 1)]),
    (Property.STORED_SO_SERVED, lambda life: [ev.RequestAdmitted(*head(life), "r1", 2, 0, 1, key(1))]),
]


@pytest.mark.parametrize(("property", "lie"), WRONG)
def test_an_event_that_cannot_be_is_found_and_named(
    tmp_path: Path, property: Property, lie: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """One wrong event in a log: the property that it breaks, and its number."""
    life = scene(host_blocks=5)
    events = [*life.events, *lie(life), ev.StepEnded(0, 0, 0)]
    found = verify_log(written(tmp_path / "log", life, events))
    assert not found.good
    assert found.breakage is not None
    assert {violation.property for violation in found.violations} == {property}
    assert found.breakage.event == len(life.events) + 1
    assert f" event {found.breakage.event} step " in found.breakage.led_there[-1]


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    """The answer to r3 ends at a key that r1 has matched: the violation names r3, the key and its slot."""
    life = scene(host_blocks=5)
    short = ev.HitMatched(*head(life), "r3", (0,), key(1), 3, None, 1)
    found = verify_log(written(tmp_path / "log", life, [*life.events, short]))
    [violation] = found.violations
    assert (violation.slots, violation.requests) == ((1,), ("r3",))
    assert key(1).hex() in violation.message


def answers_that_end_for_a_reason(life: Life) -> list[OffloadingEvent]:
    """At a key in flight, at a key that is not on the host, and at a limit that the log does not know."""
    seq, step, wall = head(life)
    return [
        ev.HitMatched(seq, step, wall, "r3", (0, 1), key(2), 3, None, 2),
        ev.HitMatched(seq + 1, step, wall, "r4", (), key(9), 3, 0, 0),
        ev.HitMatched(seq + 2, step, wall, "r5", (0,), None, 3, 0, 1),
        ev.RequestAdmitted(seq + 3, step, wall, "r4", 3, 0, 0, key(9)),
        ev.RequestAdmitted(seq + 4, step, wall, "r4", None, None, None, key(1)),
    ]


def test_an_answer_may_end_at_what_cannot_be_read_or_at_a_limit(tmp_path: Path) -> None:
    life = scene(host_blocks=5)
    events = [*life.events, *answers_that_end_for_a_reason(life)]
    found = verify_log(written(tmp_path / "log", life, events))
    assert found.violations == ()


def after_failed_store(life: Life) -> list[OffloadingEvent]:
    store = life.core.ledger.seq - 1
    seq, step, wall = head(life)
    failed = ev.WorkerReported(seq, step, wall, store, 0, False)
    return [failed, ev.HitMatched(seq + 1, step, wall, "r3", (2,))]


def stored_again(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    evicted = ev.HitReleased(seq, step, wall, "r1"), ev.BlocksEvicted(seq + 1, step, wall, (0,), (), seq + 2)
    return [*evicted, ev.StorePlanned(seq + 2, step, wall, (("r3", 1),), (key(1),), (0,), (9,))]


def stored_from_a_busy_block(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    evicted = ev.HitReleased(seq, step, wall, "r1"), ev.BlocksEvicted(seq + 1, step, wall, (0,), (), seq + 2)
    return [*evicted, ev.StorePlanned(seq + 2, step, wall, (("r3", 1),), (key(9),), (0,), (2,))]


def cursors_back(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth = ev.BlocksOffered(seq, step, wall, (("r1", (1, 2), (3, 2)),))
    return [forth, ev.BlocksOffered(seq + 1, step, wall, (("r1", (2, 1), (3, 2)),))]


def offered_back(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth = ev.BlocksOffered(seq, step, wall, (("r1", (1,), (3,)),))
    return [forth, ev.BlocksOffered(seq + 1, step, wall, (("r1", (1,), (2,)),))]


def failed_between(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth, back = cursors_back(life)
    failed = ev.WorkerReported(seq + 1, step, wall, seq - 2, 0, False)
    return [forth, failed, msgspec.structs.replace(back, seq=seq + 2)]


def cursors_back_twice(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    return [*failed_between(life), ev.BlocksOffered(seq + 3, step, wall, (("r1", (1, 1), (3, 2)),))]


def offered_back_after_a_failure(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth, failed, _ = failed_between(life)
    return [forth, failed, ev.BlocksOffered(seq + 2, step, wall, (("r1", (1, 1), (2, 2)),))]


def a_group_less(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth = ev.BlocksOffered(seq, step, wall, (("r1", (1, 1), (3, 1)),))
    return [forth, ev.BlocksOffered(seq + 1, step, wall, (("r1", (1,), (3,)),))]


def loaded_and_reset(life: Life) -> list[OffloadingEvent]:
    """Keys 0 and 1 come to device blocks 9 and 10, and then an epoch begins."""
    seq, step, wall = head(life)
    return [
        ev.LoadPlanned(seq, step, wall, "r1", (0, 1), (9, 10)),
        ev.TransfersSubmitted(seq + 1, step, wall, (seq,)),
        ev.WorkerReported(seq + 2, step, wall, seq, 0, True),
        ev.CacheReset(seq + 3, step, wall, 1),
    ]


def stored_from(life: Life, offset: int, wanted: bytes, block: int) -> ev.StorePlanned:
    seq, step, wall = head(life)
    return ev.StorePlanned(seq + offset, step, wall, (), (wanted,), (0,), (block,))


def stored_of_an_older_epoch(life: Life) -> list[OffloadingEvent]:
    return [*loaded_and_reset(life), stored_from(life, 4, key(1), 10)]


def lost(life: Life, plan: OffloadingEvent) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    submitted = ev.TransfersSubmitted(seq + 1, step, wall, (seq,))
    return [plan, submitted, ev.TransferLost(seq + 2, step, wall, seq)]


def stored_from_where_a_lost_load_writes(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    load = ev.LoadPlanned(seq, step, wall, "r1", (0, 1), (9, 10))
    return [*lost(life, load), ev.StorePlanned(seq + 3, step, wall, (), (key(9),), (4,), (9,))]


def stored_where_a_lost_store_writes(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    store = ev.StorePlanned(seq, step, wall, (), (key(9),), (4,), (9,))
    return [*lost(life, store), ev.StorePlanned(seq + 3, step, wall, (), (key(8),), (4,), (9,))]


@pytest.mark.parametrize(
    ("property", "story"),
    [
        (Property.STORED_ONCE, cursors_back),
        (Property.STORED_ONCE, offered_back),
        (Property.STORED_ONCE, cursors_back_twice),
        (Property.STORED_ONCE, offered_back_after_a_failure),
        (Property.STORED_ONCE, a_group_less),
        (Property.NO_STALE_DATA, stored_of_an_older_epoch),
        (Property.NO_REUSE_IN_FLIGHT, stored_from_where_a_lost_load_writes),
        (Property.NO_REUSE_IN_FLIGHT, stored_where_a_lost_store_writes),
        (Property.FAILURE_IS_NOT_SUCCESS, after_failed_store),
        (Property.NO_STALE_DATA, after_reset),
        (Property.STORED_ONCE, stored_again),
        (Property.STORED_ONCE, stored_from_a_busy_block),
    ],
)
def test_the_last_of_several_events_is_the_false_one(
    tmp_path: Path, property: Property, story: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """Earlier events decide which property a match, a store or an offer breaks."""
    life = scene(host_blocks=5)
    lies = story(life)
    found = verify_log(written(tmp_path / "log", life, [*life.events, *lies]))
    assert found.breakage is not None
    assert {violation.property for violation in found.violations} == {property}
    assert found.breakage.event == len(life.events) + len(lies)


def preempted_between(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth, back = cursors_back(life)
    again = msgspec.structs.replace(back, seq=seq + 2)
    return [forth, ev.RequestPreempted(seq + 1, step, wall, "r1"), again]


def reset_between(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth, back = cursors_back(life)
    return [forth, ev.CacheReset(seq + 1, step, wall, 1), msgspec.structs.replace(back, seq=seq + 2)]


def finished_between(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    forth, back = cursors_back(life)
    over = ev.RequestFinished(seq + 1, step, wall, "r1"), ev.RequestArrived(seq + 2, step, wall, "r1")
    return [forth, *over, msgspec.structs.replace(back, seq=seq + 3)]


def rewritten_before(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    rewritten = ev.BlocksRewritten(seq + 4, step, wall, (10,))
    return [*loaded_and_reset(life), rewritten, stored_from(life, 5, key(1), 10)]


def stored_under_another_key(life: Life) -> list[OffloadingEvent]:
    return [*loaded_and_reset(life), stored_from(life, 4, key(0), 10)]


def stored_from_where_a_lost_store_reads(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    store = ev.StorePlanned(seq, step, wall, (), (key(9),), (4,), (9,))
    released = ev.HitReleased(seq + 3, step, wall, "r1")
    evicted = ev.BlocksEvicted(seq + 4, step, wall, (0,), (), seq + 5)
    return [*lost(life, store), released, evicted, stored_from(life, 5, key(9), 9)]


@pytest.mark.parametrize(
    "story",
    [
        preempted_between,
        reset_between,
        finished_between,
        failed_between,
        rewritten_before,
        stored_under_another_key,
        stored_from_where_a_lost_store_reads,
    ],
)
def test_what_is_allowed_is_not_called_wrong(
    tmp_path: Path, story: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """Cursors restart with a preemption, a reset and a new life, and go back after a failed store. A device
    block that was computed again, or that a lost store read, may be stored."""
    life = scene(host_blocks=5)
    found = verify_log(written(tmp_path / "log", life, [*life.events, *story(life)]))
    assert found.violations == ()


def test_a_block_that_begins_the_chunk_of_another_key_is_of_the_older_epoch_too(tmp_path: Path) -> None:
    """No stale data (S14): a new key proves only that a chunk's last device block was computed since."""
    life = Life(tmp_path / "log", workers=1, host_blocks=8, device_blocks=16, blocks_per_chunk=2)
    life.stored("r1", [key(0)], [0, 1])
    life.core.match("r2", [key(0)])
    life.ended(life.core.prepare_load("r2", [4, 5]))
    life.core.reset()
    seq, step, wall = head(life)
    for blocks, broken in (((4, 6), [Property.NO_STALE_DATA]), ((6, 5), []), ((6, 4), [])):
        auditor = Auditor(restore(snapshot(life.core.ledger)))
        found = auditor.apply(ev.StorePlanned(seq, step, wall, (), (key(5),), (3,), blocks))
        assert [violation.property for violation in found] == broken, blocks
    life.close()


@pytest.mark.parametrize(
    ("property", "story"),
    [
        (Property.STORED_ONCE, cursors_back),
        (Property.STORED_ONCE, a_group_less),
        (Property.NO_STALE_DATA, stored_of_an_older_epoch),
    ],
)
def test_a_witness_who_starts_late_knows_cursors_and_what_was_brought(
    property: Property, story: Callable[[Life], list[OffloadingEvent]]
) -> None:
    """It reads them from the snapshot, and detects the next event that contradicts them."""
    life = scene(host_blocks=5)
    *before, false = story(life)
    for event in before:
        life.core.ledger.apply(event)
    auditor = Auditor(restore(snapshot(life.core.ledger)))
    assert auditor.check() == []
    assert [violation.property for violation in auditor.apply(false)] == [property]


def test_what_led_there_are_the_last_ten_events_of_the_same_things(tmp_path: Path) -> None:
    """At most ten lines about the same slots, oldest first, the wrong event last."""
    life = Life(host_blocks=4, workers=1, defer_ticks=0)
    life.stored("r0", [key(0)], [0])
    life.stored("r9", [key(9)], [9])
    for _ in range(8):
        life.core.match("r1", [key(0)])
        life.core.release("r1")
        life.core.match("r2", [key(9)])
        life.core.release("r2")
    seq = life.core.ledger.seq + 1
    events = [*life.events, ev.StorePlanned(seq, 0, 0, (("r3", 1),), (key(5),), (0,), (3,))]
    found = verify_log(written(tmp_path / "log", life, events))
    assert found.breakage is not None
    lines = found.breakage.led_there
    assert len(lines) == 10
    assert all("slot 0" in line or "request r1" in line for line in lines)
    dated = "+0.000s"
    assert lines[-1] == f"{dated} event {seq} step 0: {render(events[-1])}"


# Verifying incomplete logs.


def test_a_torn_tail_is_cut_and_told(tmp_path: Path) -> None:
    """After a crash in the middle of a write the log is good up to the last whole record."""
    life = random_life(6, 300, tmp_path / "log")
    life.kill()
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
    """From the snapshot after the gap on everything is checked; the end is the live state."""
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
    """Events are state (S10): a snapshot that the writer saved must be what the events before it fold to."""
    false = Life()
    life = Life(tmp_path / "log", writer={"segment_bytes": 500})
    assert life.writer is not None
    life.writer._snapshot = lambda: lied(life, false)
    life.drive([(name, n, n) for n in range(20) for name in ("store", "submit", "step")])
    life.close()
    assert len(list((tmp_path / "log").iterdir())) > 1
    found = verify_log(tmp_path / "log")
    assert [violation.property for violation in found.violations] == [Property.EVENTS_ARE_STATE]
    assert "is not what the fold gives" in found.violations[0].message
    with pytest.raises(LogDamaged, match="is not what the fold gives"):
        rebuild(tmp_path / "log")


def lied(life: Life, false: Life) -> WholeState:
    """The live state with another tick."""
    false.core.ledger.__dict__.update(life.core.ledger.__dict__)
    false.core.ledger.tick = life.core.ledger.tick + 1
    return WholeState(snapshot(false.core.ledger))


def test_a_log_by_other_tables_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machine tables may fold to another state, and the report says so."""
    random_life(9, 30, tmp_path / "log").close()
    assert not verify_log(tmp_path / "log").condition.other_machines
    monkeypatch.setattr("kvsm.core.log.fold.machines_digest", lambda: "other")
    assert machines_digest() != "other"
    condition = verify_log(tmp_path / "log").condition
    assert "other machine tables" in condition.notes()[0]


@pytest.mark.usefixtures("_python_folds")
def test_a_search_that_serves_half_of_a_hit_is_found_in_the_log_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored, so served (S19): no crash and no wrong byte, but the log names a key that could be read."""
    options = RunOptions(requests=60, device_blocks=64, host_blocks=160, log=str(tmp_path / "good"))
    run_workload(options)
    assert verify_log(tmp_path / "good").good
    plant(
        monkeypatch,
        HitSearch._served,
        "_first_missing(keys, first, last, has)",
        "(first + _first_missing(keys, first, last, has)) // 2",
    )
    run_workload(msgspec.structs.replace(options, log=str(tmp_path / "short")))
    found = verify_log(tmp_path / "short")
    assert [one.property for one in found.violations] == [Property.STORED_SO_SERVED]
