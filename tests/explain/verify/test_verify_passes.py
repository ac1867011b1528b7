"""A verified log: many events in one call, or one by one, with either body: the same answer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from changed_logs import changed, read_plain, write_plain
from replay_life import Life, full_life, key, random_life, written
from verified_parts import OneAfterTheOther, cut

from examples import examples, seeds_of_today
from kvsm import events as ev
from kvsm.core import native
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.log.fold import gathered
from kvsm.core.policies import POLICIES
from kvsm.errors import KvsmError, LogDamaged
from kvsm.events import Direction, OffloadingEvent
from kvsm.explain.story import Auditor, Verification, verify_log
from kvsm.explain.verify.logged_copies import CopyPlanned, LoggedCopies
from kvsm.properties import Property


def answer(log: Path, every: int | None = None) -> Verification | str:
    try:
        return msgspec.structs.replace(verify_log(log, every=every), seconds=0.0)
    except KvsmError as error:
        return str(error)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(examples(40, least=20)), id="fast"),
        pytest.param(seeds_of_today(1_000), id="slow", marks=pytest.mark.slow),
    ],
)
def test_changed_logs_are_answered_alike_by_both_bodies(tmp_path: Path, seeds: range) -> None:
    """The same first event, properties and words, whatever was changed, at each interval of checks."""
    logs = []
    for number, policy in enumerate(POLICIES):
        writer = {"segment_bytes": 1500 if number % 2 else 1 << 30}
        random_life(number, 60, tmp_path / policy, writer=writer, policy=policy).close()
        logs.append(read_plain(tmp_path / policy))
    broken = 0
    for seed in seeds:
        log = write_plain(tmp_path / f"{seed}", changed(logs[seed % len(logs)], random.Random(seed)))
        found = answer(log)
        with native.without():
            assert answer(log) == found, seed
        assert told(answer(log, every=1)) == told(found), seed
        broken += isinstance(found, Verification) and bool(found.violations)
    assert broken > len(seeds) / 8


def told(found: Verification | str) -> object:
    """(first wrong event, properties that it breaks)"""
    if isinstance(found, str) or found.breakage is None:
        return found
    return found.breakage.event, {one.property for one in found.violations}


# What happens between two events.


@pytest.mark.usefixtures("_python_folds")
def test_what_is_published_late_is_found_at_the_event(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Events are state (S10): a key that is announced an event too late is announced in the end. It could be
    matched before a router heard of it."""
    full_life(tmp_path / "log")
    late: list[tuple[object, Any]] = []
    stored, apply = Publisher.stored, Ledger.apply

    def apply_late(self: Ledger, event: OffloadingEvent) -> object:
        for publisher, told in late:
            if publisher is self.listener:
                stored(publisher, *told)  # type: ignore[arg-type]
        late.clear()
        return apply(self, event)

    monkeypatch.setattr(Publisher, "stored", lambda self, *told: late.append((self, told)))
    monkeypatch.setattr(Ledger, "apply", apply_late)
    found = verify_log(tmp_path / "log")
    assert found.breakage is not None
    assert found.breakage.kind == "WorkerReported"
    assert [one.property for one in found.violations] == [Property.EVENTS_ARE_STATE]


@pytest.mark.usefixtures("_python_folds")
@pytest.mark.parametrize("kind", [ev.CacheReset, ev.Restarted])
def test_what_a_reset_writes_over_is_compared_before_it(kind: type[OffloadingEvent]) -> None:
    """No reuse in flight (S3): a slot that no event names was changed. A reset would mend it."""
    life = random_life(3, 200, host_blocks=12, device_blocks=8)
    number = next(number for number, event in enumerate(life.events) if type(event) is kind)
    auditor = Auditor(Ledger(life.config))
    assert auditor.apply_all(list(life.events[:number])) == (number, [])
    auditor.ledger.blocks.words[0] ^= 1 << 20
    done, broken = auditor.apply_all(list(life.events[number : number + 1]))
    assert done == 1
    assert broken
    assert auditor.ledger.seq == number


@pytest.mark.usefixtures("_python_folds")
@pytest.mark.parametrize("damaged", [False, True])
def test_what_no_event_names_is_found_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: bool
) -> None:
    """The fold changes a slot that no event names, and the log ends, or cannot be read, before a full check.
    The event is found all the same."""
    life = Life(tmp_path / "log", host_blocks=5, defer_ticks=0)
    for number in range(60):
        life.core.match(f"r{number}", [key(number)])
        life.flush()
    life.close()
    wrong, apply = 9, Ledger.apply

    def apply_wrongly(self: Ledger, event: OffloadingEvent) -> object:
        ended = apply(self, event)
        if event.seq == wrong:
            self.blocks.words[4] ^= 1 << 20
        return ended

    monkeypatch.setattr(Ledger, "apply", apply_wrongly)
    if damaged:
        (segment,) = LogReader(tmp_path / "log").segments()
        content = bytearray(segment.path.read_bytes())
        content[-len(content) // 4] ^= 1
        segment.path.write_bytes(content)
    found = verify_log(tmp_path / "log")
    assert (found.damage is not None) is damaged
    assert found.breakage is not None
    assert found.breakage.event == wrong


@pytest.mark.usefixtures("_python_folds")
def test_what_no_event_names_is_found_at_the_end_of_a_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    life = random_life(3, 60, host_blocks=12, device_blocks=8)
    log = cut(written(tmp_path / "whole", life, life.events), tmp_path / "log", [20])
    wrong, apply = len(life.events), Ledger.apply

    def apply_wrongly(self: Ledger, event: OffloadingEvent) -> object:
        ended = apply(self, event)
        if event.seq == wrong:
            self.declined_hits += 1
        return ended

    monkeypatch.setattr(Ledger, "apply", apply_wrongly)
    breakage = verify_log(log, executor=OneAfterTheOther()).breakage
    assert breakage is not None
    assert breakage.event == wrong


# How events are read and heard.


def test_small_frames_are_gathered_and_the_events_before_damage_come_first(tmp_path: Path) -> None:
    """Lists have some hundreds of events. An error is raised behind the events that stand before it."""
    life = random_life(5, 600, tmp_path / "log", writer={"segment_bytes": 1 << 30})
    life.close()
    (segment,) = LogReader(tmp_path / "log").segments()
    lists = list(gathered(segment))
    assert [event for events in lists for event in events] == list(life.events)
    assert len(lists) < len(life.events) / 50
    path = segment.path
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 1
    path.write_bytes(content)
    (segment,) = LogReader(tmp_path / "log").segments()
    read: list[OffloadingEvent] = []
    with pytest.raises(LogDamaged) as damage:
        read.extend(chain.from_iterable(gathered(segment)))
    assert read == list(life.events[: damage.value.seq - 1])
    assert read


def test_events_of_one_tier_are_skipped_and_copies_between_tiers_heard() -> None:
    """A log without another tier costs no call for each event. Copies to another one are heard."""
    life = Life()
    life.stored("r1", [b"key"], [0])
    ledger = Ledger(life.config)
    copies = LoggedCopies(named_disk=False).part(ledger)
    events = list(life.events)
    assert not copies.skip(events)
    for event in events:
        ledger.apply(event)
        copies.hear(ledger, event)
    following = len(events)
    life.core.match("r2", [b"key"])
    life.core.finish("r2")
    assert copies.skip(list(life.events[following:]))
    following = len(life.events)
    life.core.arrive("disk-store-9", "disk")
    life.core.match("disk-store-9", [b"key"])
    life.core.prepare_load("disk-store-9", [1], (), "disk")
    assert not copies.skip(list(life.events[following:]))


@pytest.mark.parametrize(("source", "blocks"), [("", (0,)), ("engine 0", ())])
def test_a_store_in_the_log_of_a_disk_is_a_copy_unless_it_comes_from_elsewhere(
    source: str, blocks: tuple[int, ...]
) -> None:
    ledger = Ledger(Life().config)
    copies = LoggedCopies(named_disk=True).part(ledger)
    event = ev.StorePlanned(1, 0, 0, (), (b"key",), (0,), blocks, source)
    ledger.apply(event)
    copies.hear(ledger, event)
    assert [type(one) for one in copies.sayings] == ([] if source else [CopyPlanned])


def test_a_load_of_a_voided_match_in_the_log_of_a_disk_is_no_copy() -> None:
    life = Life()
    life.stored("disk-store-1", [b"key"], [0])
    life.core.match("fetch-9-for-r", [b"key"])
    life.core.reset()
    assert life.core.prepare_load("fetch-9-for-r", [1]) is None
    ledger = Ledger(life.config)
    copies = LoggedCopies(named_disk=True).part(ledger)
    for event in life.events:
        ledger.apply(event)
        copies.hear(ledger, event)
    assert [one.direction for one in copies.sayings if isinstance(one, CopyPlanned)] == [Direction.STORE]


def test_a_restart_is_told_though_many_events_are_folded_at_once(tmp_path: Path) -> None:
    """The blocks that it kept are counted before the event is folded."""
    life = random_life(3, 200, host_blocks=12, device_blocks=8)
    found = verify_log(written(tmp_path / "log", life, life.events))
    restarts = [event for event in life.events if isinstance(event, ev.Restarted)]
    assert [line.split(":")[0] for line in found.restarts] == [f"event {one.seq:,}" for one in restarts]
    assert restarts


def whole(events: Sequence[OffloadingEvent]) -> Iterator[OffloadingEvent]:
    yield from events


def test_a_ledger_folds_a_list_of_events_up_to_the_one_that_it_refuses() -> None:
    """As one by one. An iterator is taken, too."""
    life = random_life(7, 100)
    one, many = Ledger(life.config), Ledger(life.config)
    for event in life.events:
        one.apply(event)
    many.apply_all(whole(life.events))
    assert (one.seq, one.step, dict(one.index)) == (many.seq, many.step, dict(many.index))
    wrong = ev.RequestFinished(many.seq + 1, 0, 0, "nobody")
    with pytest.raises(KvsmError, match="nobody has not arrived"):
        many.apply_all(
            [ev.StepEnded(many.seq + 1, 0, 0), msgspec.structs.replace(wrong, seq=many.seq + 2), wrong]
        )
    assert many.seq == one.seq + 1
