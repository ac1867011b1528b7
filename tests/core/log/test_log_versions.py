"""Versions of the log format: older ones are read, and newer ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from changed_logs import PlainLog, read_plain, write_plain
from log_life import write
from replay_life import Life, key, random_life

from kvsm import events as ev
from kvsm.core.ledger.snapshot import digest, snapshot
from kvsm.core.log import LogReader, LogWriter, WholeState, find_end, frames, records, segment_maker
from kvsm.core.log.frames import segment_path
from kvsm.core.log.log_directory import LogDirectory
from kvsm.core.log.records import OLDEST_VERSION, UPGRADES, Upgrade
from kvsm.errors import LogDamaged, LogError
from kvsm.events import SCHEMA_VERSION
from kvsm.explain.story import rebuild, verify_log

HIT, HIT_REQUEST, HIT_SLOTS = ev.HitMatched.__struct_config__.tag, 4, 5
ARRIVED, ARRIVED_REQUEST = ev.RequestArrived.__struct_config__.tag, 4
MACHINES, SNAPSHOT, EPOCH = 1, 9, 4
"""Places in a head, and the place of the epoch in a snapshot."""


@pytest.fixture
def older(tmp_path: Path) -> PlainLog:
    """A log in several segments, the last one closed."""
    random_life(5, 200, tmp_path / "older", writer={"segment_bytes": 1500}).close()
    log = read_plain(tmp_path / "older")
    assert len(log) > 2
    return log


def later_release(monkeypatch: pytest.MonkeyPatch, upgrades: dict[tuple[int, Any], Upgrade]) -> None:
    """Let this kvsm be the release after the next version of the format, with these upgrades."""
    for module in (frames, records, segment_maker):
        monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    for row, upgrade in upgrades.items():
        monkeypatch.setitem(UPGRADES, row, upgrade)


def swapped(record: list[Any], one: int, other: int) -> list[Any]:
    record = list(record)
    record[one], record[other] = record[other], record[one]
    return record


def with_epoch(record: list[Any], more: int) -> list[Any]:
    return [*record[:EPOCH], record[EPOCH] + more, *record[EPOCH + 1 :]]


def test_records_of_an_older_version_read_as_todays(
    older: PlainLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older records have two fields of an event exchanged, another name for requests, a tail with an
    empty text for no error, and epochs that count from ten."""
    today = list(LogReader(tmp_path / "older").events())
    state = digest(rebuild(tmp_path / "older").ledger)
    for segment in older:
        for frame in segment.frames:
            for number, event in enumerate(frame):
                if event[0] == HIT:
                    frame[number] = swapped(event, HIT_REQUEST, HIT_SLOTS)
                elif event[0] == ARRIVED:
                    event[ARRIVED_REQUEST] = event[ARRIVED_REQUEST].removeprefix("r")
        if segment.head[SNAPSHOT]:
            saved = msgspec.msgpack.decode(segment.head[SNAPSHOT])
            segment.head[SNAPSHOT] = msgspec.msgpack.encode(with_epoch(saved, 10))
        segment.head[MACHINES] = segment.head[MACHINES].upper()
        if segment.tail:
            segment.tail[0] = ""
    write_plain(tmp_path / "log", older)
    later_release(
        monkeypatch,
        {
            (SCHEMA_VERSION, HIT): lambda event: swapped(event, HIT_REQUEST, HIT_SLOTS),
            (SCHEMA_VERSION, ARRIVED): lambda event: [*event[:4], f"r{event[4]}", *event[5:]],
            (SCHEMA_VERSION, "head"): lambda head: [head[0], head[1].lower(), *head[2:]],
            (SCHEMA_VERSION, "snapshot"): lambda saved: with_epoch(saved, -10),
            (SCHEMA_VERSION, "tail"): lambda tail: [tail[0] or None, *tail[1:]],
        },
    )
    assert list(LogReader(tmp_path / "log").events()) == today
    found = verify_log(tmp_path / "log")
    assert not found.violations
    assert found.damage is None
    rebuilt = rebuild(tmp_path / "log")
    assert digest(rebuilt.ledger) == state
    assert not rebuilt.condition.other_machines
    assert rebuilt.condition.error is None


def test_an_upgrade_takes_each_version_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is two versions old passes both rows, the older one first."""
    monkeypatch.setattr(records, "SCHEMA_VERSION", SCHEMA_VERSION + 2)
    monkeypatch.setitem(UPGRADES, (SCHEMA_VERSION, ARRIVED), lambda event: [*event, "one"])
    monkeypatch.setitem(UPGRADES, (SCHEMA_VERSION + 1, ARRIVED), lambda event: [*event, "two"])
    event = msgspec.msgpack.encode([[ARRIVED, 1]])

    def read(version: int) -> Any:
        return msgspec.msgpack.decode(records.upgraded(event, version, "events"))

    assert read(SCHEMA_VERSION) == [[ARRIVED, 1, "one", "two"]]
    assert read(SCHEMA_VERSION + 1) == [[ARRIVED, 1, "two"]]
    assert read(SCHEMA_VERSION + 2) == [[ARRIVED, 1]]


def test_a_later_release_continues_an_older_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its own version behind the older segments, and reads both."""
    life = Life(tmp_path / "log", workers=1)
    life.stored("r0", [key(0), key(1)], [0, 1])
    life.core.match("r1", [key(0)])
    life.close()
    later_release(monkeypatch, {(SCHEMA_VERSION, HIT): lambda event: swapped(event, HIT_SLOTS, HIT_SLOTS)})
    life.core.ledger = rebuild(tmp_path / "log").ledger
    life.writer = LogWriter(
        find_end(LogDirectory(tmp_path / "log", durable=False)),
        config=life.config,
        snapshot=lambda: WholeState(snapshot(life.core.ledger)),
        durability="none",
    )
    life.restart(1, 1)
    life.core.match("r2", [key(1)])
    life.close()
    versions = [segment.head.schema for segment in LogReader(tmp_path / "log").segments()]
    assert versions == [SCHEMA_VERSION, SCHEMA_VERSION + 1]
    assert not verify_log(tmp_path / "log").violations


@pytest.mark.parametrize("record", [[[HIT, 1]], [[HIT]], [[]], [7], 7, [[[HIT]]], [[{}]]])
def test_bytes_that_no_upgrade_takes_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any
) -> None:
    """A wrong record of an older version is refused as one of today is, whatever the upgrade does with it."""
    write(tmp_path / "today", [1])
    (segment,) = read_plain(tmp_path / "today")
    segment.frames.append(record if isinstance(record, list) else [record])
    write_plain(tmp_path / "log", [segment])
    later_release(monkeypatch, {(SCHEMA_VERSION, HIT): lambda event: swapped(event, HIT_REQUEST, HIT_SLOTS)})
    with pytest.raises(LogDamaged):
        list(LogReader(tmp_path / "log").events())


def of_version(directory: Path, version: int) -> Path:
    """Make a log whose preamble names this version, with content that this kvsm does not know."""
    write(directory, [1])
    path = segment_path(directory, 1)
    covered = path.read_bytes()[:8] + version.to_bytes(4, "little")
    path.write_bytes(covered + crc32(covered).to_bytes(4, "little") + b"whatever that version may bring")
    return directory


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (
            SCHEMA_VERSION + 1,
            r"A later release wrote it: read it with that one \(pip install --upgrade kvsm\)",
        ),
        (
            OLDEST_VERSION - 1,
            r"older than kvsm 0\.1\.0: read it with the kvsm that wrote it, or begin a new log",
        ),
    ],
)
def test_a_version_that_cannot_be_read_says_what_to_do(tmp_path: Path, version: int, advice: str) -> None:
    """It is not called damage: its bytes are as they were written."""
    log = of_version(tmp_path / "log", version)
    with pytest.raises(
        LogError, match=f"version {version} of the log format; this kvsm reads.*{advice}"
    ) as caught:
        list(LogReader(log).events())
    assert not isinstance(caught.value, LogDamaged)


def test_the_version_of_release_0_1_0_stays_readable() -> None:
    """docs/versions.md promises it. Each raise of `SCHEMA_VERSION` reads everything from here on."""
    assert OLDEST_VERSION == 3
    assert all(OLDEST_VERSION <= version < SCHEMA_VERSION for version, _ in UPGRADES)
