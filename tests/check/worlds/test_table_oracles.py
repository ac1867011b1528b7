"""Every column of the tables of a log is counted a second time in the worlds: events are state (S10)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any, cast

import msgspec
import pytest
from planted_bugs import plant
from scheduler_traffic import Hand

from kvsm.check.walks.targets import TARGETS
from kvsm.check.walks.walk import walk
from kvsm.check.worlds import run_figures, table_oracles
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.past_log import PastLog, in_time
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.table_oracles import TABLE_ORACLES, check_tables
from kvsm.check.worlds.world import World
from kvsm.core.ledger import Ledger
from kvsm.errors import PropertyBroken
from kvsm.events import LogOpened, OffloadConfig, OffloadingEvent, WorkerReported
from kvsm.explain.tables.block_lives import BlockLives
from kvsm.explain.tables.extract import Extractor, occupancy
from kvsm.explain.tables.open_rows import Flight, RequestInProgress
from kvsm.explain.tables.row_kinds import TABLES
from kvsm.explain.tables.sqlite_tables import TableWriter, make_tables
from kvsm.properties import Property

Log = Sequence[OffloadingEvent]


def drawn_log(seed: int, actions: int = 150) -> Log:
    """The log of a core after drawn actions, with times. Most things in it have not ended."""
    random = Random(seed)
    world = CoreWorld(msgspec.structs.replace(draw_options(random), folds_log=True))
    for _ in range(actions):
        world.do(world.draw(random))
    return in_time(world.events)


def config_of(log: Log) -> OffloadConfig:
    assert isinstance(log[0], LogOpened)
    return log[0].config


def tables_of(log: Log) -> sqlite3.Connection:
    connection, ledger = sqlite3.connect(":memory:"), Ledger(config_of(log))
    make_tables(connection)
    extractor = Extractor(TableWriter(connection))
    for event in log:
        extractor.follow(ledger, event)
    extractor.write_unfinished()
    return connection


def agrees(log: Log) -> bool:
    try:
        check_tables(tables_of(log), PastLog(config_of(log), log))
    except PropertyBroken:
        return False
    return True


@pytest.mark.parametrize("seed", range(16))
def test_the_tables_of_a_log_that_is_still_written_agree_with_the_second_count(seed: int) -> None:
    log = drawn_log(seed)
    check_tables(tables_of(log), PastLog(config_of(log), log))


def test_tables_agree_on_a_hit_that_was_declined_and_then_loaded() -> None:
    """Only the answer without hit has a declined one."""
    made, request = Hand(core={"load_only_if_faster": True}), SmallRequest("r", range(9))
    made.store(SmallRequest("stored", range(9)), [0, 1, 2])
    made.core.note_times(1_000, 0, 1)
    answers = [made.scheduler.get_num_new_matched_tokens(request, 0)]
    made.core.note_times(0, 0, 1_000_000)
    answers.append(made.scheduler.get_num_new_matched_tokens(request, 0))
    assert [tokens for tokens, _ in answers] == [0, 8]
    assert agrees([*made.log])


def test_every_table_has_an_oracle() -> None:
    """`block_runs` is compared as `blocks`."""
    assert sorted([*TABLE_ORACLES, "block_runs"]) == sorted(TABLES)


RICH = 31
"""The seed of a log that has rows in all tables."""


@cache
def rich() -> tuple[sqlite3.Connection, PastLog]:
    log = drawn_log(RICH, 600)
    connection, past = tables_of(log), PastLog(config_of(log), log)
    check_tables(connection, past)
    return connection, past


class ChangedTables:
    """The tables of a log with one wrong value: in the last row of a table."""

    def __init__(self, connection: sqlite3.Connection, table: str, column: str) -> None:
        self._connection, self._table, self._column = connection, table, column

    def execute(self, query: str) -> ChangedTables:
        found = self._connection.execute(query)
        names = [one[0] for one in found.description]
        self._rows = found.fetchall()
        if f" {self._table} " in f"{query} " and self._column in names:
            place, last = names.index(self._column), list(self._rows[-1])
            last[place] = f"{last[place]}x" if isinstance(last[place], str) else (last[place] or 0) + 1
            self._rows[-1] = tuple(last)
        return self

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows


COLUMNS = [(table, column) for table in TABLE_ORACLES for column in TABLES[table].__struct_fields__]


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_a_wrong_value_in_any_column_is_seen(table: str, column: str) -> None:
    connection, past = rich()
    changed = cast(sqlite3.Connection, ChangedTables(connection, table, column))
    with pytest.raises(PropertyBroken) as caught:
        check_tables(changed, past)
    assert caught.value.property is Property.EVENTS_ARE_STATE
    assert (
        "lives" in caught.value.message
        if (table, column) == ("blocks", "life")
        else f"{table}.{column} says" in str(caught.value)
    )


@pytest.mark.parametrize("table", TABLE_ORACLES)
def test_a_row_too_few_is_seen(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, past = rich()
    rows = list(TABLE_ORACLES[table](past))
    assert rows
    monkeypatch.setitem(cast(dict[str, Any], TABLE_ORACLES), table, lambda _: iter(rows[:-1]))
    with pytest.raises(PropertyBroken, match=rf"table {table} has {len(rows)} rows|{table}\."):
        check_tables(connection, past)


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (Extractor._answer, "request.lookups += 1", "request.lookups = 1"),
        (Extractor._use_answer, "!= (slots, missed)", "== (slots, missed)"),
        (Extractor._land, "completed, failed = outcome", "completed, failed = True or outcome"),
        (Extractor._restarted, "self._last.wall_ns or event.wall_ns", "event.wall_ns"),
        (Extractor._reset, "one.epoch == event.epoch - 1", "one.epoch == event.epoch"),
        (Extractor._flushed, "+= 1", "= 2"),
        (BlockLives.matched, "self._hits[slots] += 1", "self._hits[slots] = 1"),
        (BlockLives.missed, "if run.wanted is None:", "if True:"),
        (BlockLives.missed, "if (skipped or 0) <= known_from:", "if False:"),
        (Flight.copy, "- submitted_ns - queued - copied", "- submitted_ns - copied"),
        (RequestInProgress.move, "self.loading_ns += wait", "self.deferred_ns += wait"),
        (occupancy, "- free - idle - sum(held)", "- free - idle"),
    ],
)
def test_a_wrong_table_is_seen(
    function: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, right, wrong)
    assert any(not agrees(drawn_log(seed, 300)) for seed in range(40))


@pytest.mark.parametrize("target", ["serving", "tiers"])
def test_the_worlds_compare_the_tables(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each log here, and of one in `_COUNTED_AGAIN` in a walk."""
    monkeypatch.setattr(run_figures, "_COUNTED_AGAIN", 1)
    monkeypatch.setitem(cast(dict[str, Any], table_oracles.TABLE_ORACLES), "copies", lambda _: iter(()))
    known = TARGETS[target]

    def drawn(random: Random) -> World:
        return known.world(known.draw(random))

    failure = walk(drawn, 3, runs=2).failure
    assert failure is not None
    assert "the table copies has" in failure.finding.message


def test_equal_logs_get_equal_times() -> None:
    """Otherwise a failure could not be repeated. The clock is set back, and some reports have times."""
    log, other = drawn_log(1), drawn_log(1)
    assert log == other
    times = [event.wall_ns for event in log]
    assert times != sorted(times)
    reports = [event for event in log if isinstance(event, WorkerReported)]
    assert {event.queued_us is None for event in reports} == {False, True}
