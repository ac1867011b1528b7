"""Replay gives the live state back, verification finds what is wrong and where, stories tell the causes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_life import disk
from replay_life import OFTEN, OPERATIONS, SELDOM, Life, key

from kvsm import events as ev
from kvsm.errors import ConfigError, LogDamaged, LogError
from kvsm.events import KINDS, OffloadingEvent
from kvsm.ids import NO_IDS, pack
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger
from kvsm.log import LogGap, LogReader, LogWriter
from kvsm.policies.lru import LRUPolicy
from kvsm.replay import (
    Auditor,
    Block,
    Key,
    Line,
    Request,
    Transfer,
    Witness,
    entries,
    rebuild,
    render,
    tell,
    verify_log,
)
from kvsm.snapshot import digest, snapshot
from kvsm.states import machines_digest

Operations = list[tuple[str, int, int]]
POLICIES = st.sampled_from(("lru", "arc", "s3fifo", "slru"))


def random_life(seed: int, count: int, log: Path | None = None, **options: Any) -> Life:
    """A long life of every kind of operation."""
    rng = random.Random(seed)
    life = Life(log, **options)
    names = OFTEN * 4 + SELDOM
    return life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(count))


# Folding.


@settings(deadline=None)
@given(OPERATIONS, POLICIES)
def test_the_fold_has_the_live_digest_at_every_event(operations: Operations, policy: str) -> None:
    """S10: fold(log) equals live state, at every prefix."""
    live: list[str] = []
    life = Life(policy=policy)
    for operation in operations:
        life.drive([operation])
        if len(life.events) > len(live):
            live += [""] * (len(life.events) - len(live) - 1) + [digest(life.core.ledger)]
    ledger = Ledger(life.config)
    for event, expected in zip(life.events, live):
        ledger.apply(event)
        assert expected in ("", digest(ledger))


def test_a_log_rebuilds_whole_at_any_event_and_at_any_step(tmp_path: Path) -> None:
    """S10: from disk, across segments, from the nearest snapshot or from the first event."""
    life = random_life(1, 600, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    assert len(list((tmp_path / "log").iterdir())) > 3
    ledger, steps = Ledger(life.config), {}
    digests = []
    for event in life.events:
        ledger.apply(event)
        digests.append(digest(ledger))
        steps[event.step] = digests[-1]
    whole = rebuild(tmp_path / "log")
    assert (whole.events, whole.first) == (len(life.events), 1)
    assert whole.entries == entries(life.events)
    assert digest(whole.ledger) == digest(life.core.ledger) == digests[-1]
    for seq in range(1, len(digests) + 1, 7):
        assert digest(rebuild(tmp_path / "log", seq=seq).ledger) == digests[seq - 1]
    for step in range(0, max(steps), 3):
        reached = max(one for one in steps if one <= step)
        assert digest(rebuild(tmp_path / "log", step=step).ledger) == steps[reached]


def test_a_state_in_the_middle_starts_from_the_nearest_snapshot(tmp_path: Path) -> None:
    """Asking for one point does not fold the whole log."""
    life = random_life(2, 600, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    last = len(life.events)
    rebuilt = rebuild(tmp_path / "log", seq=last - 1)
    assert rebuilt.first > 1
    assert rebuilt.events < last / 2
    by_step = rebuild(tmp_path / "log", step=life.core.step - 1)
    assert by_step.first > 1


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"seq": 10_000}, "there is no event 10000; the last one is"),
        ({"step": 10_000}, "there is no step 10000; the last one is"),
        ({"seq": 1, "step": 1}, "give an event number or a step, not both"),
    ],
)
def test_a_point_that_is_not_there_is_refused(tmp_path: Path, point: dict[str, int], message: str) -> None:
    """An answer is never about another point than the one asked for."""
    random_life(3, 50, tmp_path / "log").close()
    with pytest.raises((LogError, ConfigError), match=message):
        rebuild(tmp_path / "log", **point)


def test_what_retention_dropped_is_not_invented(tmp_path: Path) -> None:
    """A log whose first segments are gone replays from the oldest that is kept, and says so."""
    life = random_life(4, 800, tmp_path / "log", writer={"segment_bytes": 2000, "max_bytes": 8000})
    life.close()
    whole = rebuild(tmp_path / "log")
    assert whole.first > 1
    assert digest(whole.ledger) == digest(life.core.ledger)
    assert verify_log(tmp_path / "log").good
    with pytest.raises(LogError, match="event 1 is not kept"):
        rebuild(tmp_path / "log", seq=1)
    with pytest.raises(LogError, match="step 0 is not kept"):
        rebuild(tmp_path / "log", step=0)


def test_entries_are_the_slots_that_an_event_names() -> None:
    """The unit of the throughput figures."""
    many = pack(range(40))
    assert entries([ev.HitMatched(1, 0, 0, "r", (1, 2)), ev.BlocksTouched(2, 0, 0, many)]) == 42
    assert entries([ev.BlocksEvicted(1, 0, 0, (1, 2), (3,), 2), ev.StepEnded(2, 0, 0)]) == 3


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


def written(directory: Path, life: Life, events: Sequence[OffloadingEvent]) -> Path:
    """A log of these events, whatever they say, numbered anew."""
    writer = LogWriter(
        directory, config=life.config, snapshot=lambda: b"", durability="none", clock=lambda: 7
    )
    with writer:
        for number, event in enumerate(events, 1):
            writer.append(msgspec.structs.replace(event, seq=number))
    return directory


def scene(**config: Any) -> Life:
    """Two blocks stored for `r0`, matched by `r1`, and a store of two more in flight for `r2`."""
    life = Life(**{"host_blocks": 4, "workers": 1, "defer_ticks": 0, **config})
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.finish("r0")
    life.core.match("r1", [key(0), key(1)])
    plan = life.core.prepare_store("r2", [key(2), key(3)], [2, 3]).plan
    assert plan is not None
    life.core.submit([plan.transfer])
    return life


def head(life: Life) -> tuple[int, int, int]:
    return life.core.ledger.seq + 1, 0, 0


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


def after_reset(life: Life) -> list[OffloadingEvent]:
    seq, step, wall = head(life)
    return [ev.CacheReset(seq, step, wall, 1), ev.HitMatched(seq + 1, step, wall, "r3", (0,))]


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


def full_life(log: Path) -> Life:
    """Stores, matches, loads, a failure, an eviction, a rejected report and a reset, one after another."""
    life = Life(log, host_blocks=3, workers=2, defer_ticks=0)
    core = life.core
    life.stored("r0", [key(0), key(1)], [0, 1])
    core.report(core.ledger.seq, 0, True)
    core.match("r1", [key(0), key(1)])
    life.ended(core.prepare_load("r1", [5]))
    plan = core.prepare_store("r1", [key(2)], [2]).plan
    assert plan is not None
    core.report(plan.transfer, 1, True)
    core.submit([plan.transfer])
    core.report(plan.transfer, 0, True)
    core.report(plan.transfer, 1, False)
    life.stored("r2", [key(3), key(4)], [3, 4])
    core.reset()
    life.stored("r2", [key(5), key(6), key(7)], [3, 4, 5])
    life.stored("r3", [key(8)], [3])
    for name in ("r0", "r1", "r2", "r3"):
        core.finish(name)
    core.end_step()
    life.close()
    return life


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


def gapped(log: Path) -> Life:
    """A log on a disk that was full for a while: events are missing, then it goes on."""
    life = Life(log, writer={"on_failure": "continue", "segment_bytes": 3000})
    rng = random.Random(8)
    names = OFTEN * 4 + SELDOM
    for room in (1 << 20, 0, 1 << 20):
        with disk(room):
            life.drive((rng.choice(names), rng.randrange(30), rng.randrange(30)) for _ in range(700))
    life.close()
    return life


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


# Stories.


def story_life(log: Path) -> Life:
    """Two slots. r1 stores keys 1 and 2; r2 loads key 1; r3 stores keys 3 and 4, for which both go; r4 asks
    for key 1, and misses."""
    life = Life(log, host_blocks=2, workers=1, defer_ticks=0)
    core = life.core
    core.arrive("r1")
    life.stored("r1", [key(1), key(2)], [11, 12])
    core.finish("r1")
    core.end_step()
    core.match("r2", [key(1), key(7)])
    life.ended(core.prepare_load("r2", [15]))
    core.finish("r2")
    core.end_step()
    life.stored("r3", [key(3), key(4)], [13, 14])
    core.finish("r3")
    core.match("r4", [key(1)])
    core.finish("r4", aborted=True)
    core.end_step()
    life.close()
    return life


def told(lines: Sequence[Line]) -> list[str]:
    return [f"{one.event} {one.text} [{one.before} -> {one.after}]" for one in lines]


STORED, EVICTED = "STORED(copies=0, pins=0)", "EVICTED(copies=0, pins=0)"


def test_the_life_of_a_block(tmp_path: Path) -> None:
    """Who stored it, who read it, who evicted it and for whom."""
    story_life(tmp_path / "log")
    assert told(list(tell(tmp_path / "log", Block(0))))[:8] == [
        "3 allocated for key 000000010000.., from device block 11, by store 3 of request r1 "
        "[FREE(copies=0, pins=0) -> ALLOCATED(copies=0, pins=0)]",
        "4 submitted: store 3 of request r1 [ALLOCATED(copies=0, pins=0) -> STORING(copies=1, pins=0)]",
        "5 worker 0 reports store 3 of request r1: good; the last one: stored, and can be matched "
        f"[STORING(copies=1, pins=0) -> {STORED}]",
        f"8 request r2 matches it (block 1 of 1) [{STORED} -> STORED(copies=0, pins=1)]",
        "9 load 9 of request r2 will read it into device block 15 "
        "[STORED(copies=0, pins=1) -> LOADING(copies=1, pins=0)]",
        "10 submitted: load 9 of request r2 [LOADING(copies=1, pins=0) -> LOADING(copies=1, pins=0)]",
        f"11 worker 0 reports load 9 of request r2: good; the last one: loaded "
        f"[LOADING(copies=1, pins=0) -> {STORED}]",
        f"14 key 000000010000.. evicted to make room for store 15 of request r3 [{STORED} -> {EVICTED}]",
    ]


def test_the_life_of_a_key(tmp_path: Path) -> None:
    """Stored, matched, evicted for another request, and missed by a third, with the reason."""
    story_life(tmp_path / "log")
    lines = told(list(tell(tmp_path / "log", Key("00000001"))))
    assert [line.split()[0] for line in lines] == ["3", "4", "5", "8", "9", "10", "11", "14", "19"]
    assert lines[0].endswith("[not on the host -> slot 0 ALLOCATED(copies=0, pins=0)]")
    assert lines[-2].endswith(f"[slot 0 {STORED} -> not on the host]")
    assert lines[-1] == (
        "19 request r4 matches nothing; it misses key 000000010000..: evicted at event 14 to make room for "
        "store 15 of request r3 [not on the host -> not on the host]"
    )


def test_the_life_of_a_request(tmp_path: Path) -> None:
    """From its first match to its release, and why it missed what it missed."""
    story_life(tmp_path / "log")
    assert told(list(tell(tmp_path / "log", Request("r2")))) == [
        "8 request r2 matches slot 0; it misses key 000000070000..: never stored [not there -> MATCHED]",
        "9 load 9 of request r2 is planned: slot 0 to device block 15 [MATCHED -> LOADING]",
        "10 submitted: load 9 of request r2 [LOADING -> LOADING]",
        "11 worker 0 reports load 9 of request r2: good; the last one: loaded [LOADING -> RUNNING]",
        "12 request r2 finishes [RUNNING -> RELEASED]",
    ]
    assert told(list(tell(tmp_path / "log", Request("r3"))))[:2] == [
        "14 slots 1, 0 (2), keys 000000020000.. to 000000010000.. (2), evicted to make room for store 15 of "
        "request r3 [not there -> not there]",
        "15 store 15 of request r3 is planned: keys 000000030000.. to 000000040000.. (2), "
        "device blocks 13..14 (2) to slots 1, 0 (2) [not there -> NEW]",
    ]
    assert told(list(tell(tmp_path / "log", Request("r4")))) == [
        "19 request r4 matches nothing; it misses key 000000010000..: evicted at event 14 to make room for "
        "store 15 of request r3 [not there -> RUNNING]",
        "20 request r4 is aborted [RUNNING -> RELEASED]",
    ]


def test_the_life_of_a_transfer(tmp_path: Path) -> None:
    """From what made room for it to the report that ended it."""
    story_life(tmp_path / "log")
    lines = told(list(tell(tmp_path / "log", Transfer(15))))
    assert [line.split(" [")[1] for line in lines] == [
        "not planned -> not planned]",
        "not planned -> PLANNED]",
        "PLANNED -> SUBMITTED]",
        "SUBMITTED -> COMPLETED]",
    ]


def why_missed(life: Life, wanted: bytes, log: Path) -> str:
    """What the story of a new request says of a key that it misses."""
    life.core.match("asker", [wanted])
    life.flush()
    (line,) = tell(log, Request("asker"))
    return line.text.split(": ", 1)[1]


def test_a_miss_because_the_store_is_in_flight(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    store = life.core.ledger.seq - 1
    assert why_missed(life, key(2), tmp_path / "log") == f"store {store} of request r2 is still in flight"


def test_a_miss_because_the_store_failed(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    store = life.core.ledger.seq - 1
    life.core.report(store, 0, False)
    expected = f"store {store} of request r2 failed at event {life.core.ledger.seq}"
    assert why_missed(life, key(2), tmp_path / "log") == expected


def test_a_miss_because_a_load_failed(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log")
    load = life.ended(life.core.prepare_load("r1", [9, 10]), good=False)
    expected = f"load {load} of request r1 failed at event {life.core.ledger.seq}"
    assert why_missed(life, key(0), tmp_path / "log") == expected


def test_a_miss_because_of_a_reset_and_the_pool_being_full_since(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log", host_blocks=4)
    life.core.reset()
    reset = life.core.ledger.seq
    assert life.core.prepare_store("r5", [key(0), key(8), key(9)], [8, 9, 10]).plan is None
    skipped = life.core.ledger.seq
    assert why_missed(life, key(0), tmp_path / "log") == (
        f"reset at event {reset}; offered at event {skipped} and skipped (pool full) since"
    )


def test_a_miss_because_the_transfer_was_cancelled_or_lost(tmp_path: Path) -> None:
    life = scene(log=tmp_path / "log", host_blocks=8)
    plan = life.core.prepare_store("r6", [key(6)], [6]).plan
    assert plan is not None
    life.core.cancel(plan.transfer)
    cancelled = life.core.ledger.seq
    life.core.lose(cancelled - 3)
    life.core.match("other", [key(2)])
    life.flush()
    (line,) = tell(tmp_path / "log", Request("other"))
    assert line.text.endswith(f": store {cancelled - 3} of request r2 was lost at event {cancelled + 1}")
    assert why_missed(life, key(6), tmp_path / "log") == (
        f"store {plan.transfer} of request r6 was cancelled at event {cancelled}"
    )


def test_a_miss_of_what_was_before_the_log_is_not_called_never(tmp_path: Path) -> None:
    """A log that begins with a snapshot knows nothing of before."""
    life = random_life(10, 800, tmp_path / "log", writer={"segment_bytes": 2000, "max_bytes": 8000})
    oldest = LogReader(tmp_path / "log").head.seq + 1
    assert why_missed(life, key(999), tmp_path / "log").startswith(f"not stored since event {oldest}")


@settings(deadline=None, max_examples=40)
@given(OPERATIONS)
def test_every_story_is_a_chain_of_states(operations: Operations) -> None:
    """Each line begins in the state in which the one before ended: no event that matters is left out."""
    with TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        Life(log).drive(operations).drain().close()
        for target in (*map(Block, range(4)), Request("r1"), Key("000003e8")):
            lines = list(tell(log, target))
            for earlier, later in pairwise(lines):
                if earlier.after != "RELEASED":
                    assert later.before == earlier.after, (target, earlier, later)


def test_a_slot_that_the_pool_does_not_have_is_refused(tmp_path: Path) -> None:
    story_life(tmp_path / "log")
    with pytest.raises(LogError, match="there is no slot 2; the pool has 2"):
        list(tell(tmp_path / "log", Block(2)))


# Rendering.


def test_every_kind_of_event_renders_as_one_short_line() -> None:
    """However many blocks it names."""
    life = random_life(11, 2000, host_blocks=40)
    for event in life.events:
        line = render(event)
        assert line.startswith(event.kind)
        assert "\n" not in line
        assert len(line) < 200
    keys = tuple(key(number) for number in range(3000))
    big = ev.StorePlanned(1, 0, 0, "r1", keys, tuple(range(3000)), tuple(range(3000)))
    assert render(big) == (
        "StorePlanned request r1 keys 000000000000.. to 00000bb70000.. (3000) slots 0..2999 (3000) "
        "device blocks 0..2999 (3000)"
    )


def test_fields_that_say_nothing_are_left_out() -> None:
    assert render(ev.HitMatched(1, 0, 0, "r1", NO_IDS)) == "HitMatched request r1 no slots"
    assert render(ev.RequestFinished(1, 0, 0, "r1")) == "RequestFinished request r1"
    assert render(ev.RequestFinished(1, 0, 0, "r1", True)) == "RequestFinished request r1 aborted"
    assert render(ev.BlocksEvicted(1, 0, 0, (5, 6, 9), (), 3)) == "BlocksEvicted slots 5..6, 9 (3) transfer 3"


def test_a_witness_needs_no_ledger() -> None:
    """Two books: the witness follows the events alone."""
    life = random_life(12, 500)
    witness = Witness(life.config)
    for event in life.events:
        assert witness.follow(event) == []
    assert witness.compare_all(life.core.ledger) == []
