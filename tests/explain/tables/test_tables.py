"""The tables of a log agree with the ledger at its end, with the metrics, and with `kvsm show`."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from core_walks import walked
from extracted_tables import Rows, extracted, rows_of
from hypothesis import example, given, settings
from replay_life import CONFIGS, OPERATIONS, Life, Operations, gapped, key, random_life, scene, written

import kvsm
from examples import examples
from kvsm import events as ev
from kvsm.check.walks.walk import random_of
from kvsm.check.worlds.core_options import draw_options
from kvsm.core.ledger import Ledger
from kvsm.core.log.fold import Moment
from kvsm.errors import ConfigError, InvalidEvent, LogError
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.explain.metrics import Metrics, gauges
from kvsm.explain.story.concern import concern
from kvsm.explain.tables.extract import Extractor
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import TABLES, Gone
from kvsm.explain.tables.sqlite_tables import TableWriter, make_tables
from kvsm.explain.why.fates import Fates


def assert_end_is_the_ledgers(rows: Rows, ledger: Ledger) -> None:
    """Things without an end in the tables are exactly those that the ledger holds."""
    living = {(row["transfer"], row["slot"]): row for row in rows["blocks"] if row["gone"] is None}
    assert {(ledger.generation[slot], slot): key.hex() for key, slot in ledger.index.items()} == {
        block: row["key"] for block, row in living.items()
    }
    for (_, slot), row in living.items():
        assert (row["stored"] is not None) == ledger.readable(slot)
        assert row["why"] is None
    states = {row["request"]: row["state"] for row in rows["requests"] if row["state"] != "RELEASED"}
    assert states == {name: one.state.name for name, one in ledger.requests.items()}
    stays = {row["request"]: row for row in rows["request_states"] if row["ended"] is None}
    assert {name: row["state"] for name, row in stays.items()} == states
    for name, one in ledger.deferred.items():
        assert stays[name]["transfer"] == one.awaits
    flying = {row["transfer"]: row for row in rows["transfers"] if row["ended"] is None}
    assert {id: one.state.name == "PLANNED" for id, one in ledger.transfers.items()} == {
        id: row["submitted"] is None for id, row in flying.items()
    }
    silent = Counter(row["transfer"] for row in rows["copies"] if row["reported"] is None)
    for id, one in ledger.transfers.items():
        pending = ledger.config.workers - one.reported.bit_count()
        assert flying[id]["pending"] == pending
        assert silent[id] == (0 if one.state.name == "PLANNED" else pending)
    now, last = gauges(ledger), rows["occupancy"][-1]
    assert last["event"] == ledger.seq
    held = ("free", "idle", "pinned", "storing", "quarantined", "retired")
    assert sum(last[name] for name in held) == now["capacity_blocks"]
    assert (last["free"], last["quarantined"], last["retired"]) == (
        now["free_blocks"],
        now["quarantined_blocks"],
        now["retired_blocks"],
    )
    assert last["idle"] + last["pinned"] == now["resident_blocks"]
    assert (last["stores_in_flight"], last["loads_in_flight"]) == tuple(now["live_transfers"].values())
    assert (last["known_requests"], last["deferred_requests"]) == (len(ledger.requests), len(ledger.deferred))


def is_of_a_later_request(lookup: dict[str, Any], rows: Rows) -> bool:
    """Whether an earlier request of this name still loads. The row of the later one ends with its first
    admission."""
    return any(
        stay["request"] == lookup["request"]
        and stay["state"] == "FINISHED"
        and stay["began"] < lookup["event"]
        and (stay["ended"] is None or lookup["event"] < stay["ended"])
        for stay in rows["request_states"]
    )


def assert_counts_are_the_metrics(rows: Rows, counted: dict[str, Any]) -> None:
    """The same events, counted by other code."""
    lookups = rows["lookups"]
    used = [row for row in lookups if row["admitted"] is not None and not row["resumed"]]
    assert counted["matches"] == {
        "hit": sum(row["hit_slots"] > 0 for row in used),
        "miss": sum(row["hit_slots"] == 0 for row in used),
    }
    assert counted["blocks_matched"] == sum(row["hit_slots"] for row in used)
    assert len(lookups) - sum(row["resumed"] and is_of_a_later_request(row, rows) for row in lookups) == sum(
        row["lookups"] for row in rows["requests"]
    )
    evicted = [row for row in rows["blocks"] if row["why"] == Gone.EVICTED]
    assert counted["blocks_evicted"] == len(evicted)
    ended = Counter((row["direction"], row["outcome"]) for row in rows["transfers"])
    for direction, outcomes in counted["transfers_ended"].items():
        for outcome, times in outcomes.items():
            assert ended[direction, outcome] == times, (direction, outcome)
    stored = [row for row in rows["blocks"] if row["stored"] is not None]
    assert counted["blocks_stored"] == len(stored)
    assert counted["blocks_loaded"] == sum(row["loaded"] for row in rows["requests"])
    skipped = Counter[str]()
    for row in rows["skips"]:
        skipped[row["reason"]] += row["blocks"]
    assert {reason: times for reason, times in counted["blocks_skipped"].items() if times} == skipped
    rejected = {reason: times for reason, times in counted["reports_rejected"].items() if times}
    assert rejected == Counter(row["reason"] for row in rows["rejections"])
    assert counted["preemptions"] == sum(row["preemptions"] for row in rows["requests"])
    waits = [row for row in rows["request_states"] if row["state"] == "DEFERRED"]
    assert counted["deferrals"] == len(waits)
    assert counted["resets"] == len(rows["resets"])
    assert counted["restarts"] == len(rows["restarts"])
    assert counted["transfers_flushed"] == sum(row["waited_for"] for row in rows["transfers"])
    assert counted["loads_voided"] == sum(row["loads"] for row in rows["requests"]) - sum(
        row["direction"] == "load" for row in rows["transfers"]
    )
    aborted = sum(row["aborted"] for row in rows["requests"])
    cut_off = sum(row["cut_off"] for row in rows["requests"])
    finished = sum(row["finished"] is not None for row in rows["requests"]) - aborted - cut_off
    assert counted["requests"] == {"finished": finished, "aborted": aborted}


WORDS = {
    r"never stored$": Gone.NEVER_STORED,
    r"never stored; offered at event (\d+)": Gone.SKIPPED,
    r"store (\d+) of .* is still in flight": Gone.IN_FLIGHT,
    r"evicted at event (\d+) to make room for": Gone.EVICTED,
    r"reset at event (\d+)": Gone.RESET,
    r"store .* had not ended when another process went on at event (\d+)": Gone.RESTART,
    r"store .* failed at event (\d+)": Gone.STORE_FAILED,
    r"load .* failed at event (\d+)": Gone.LOAD_FAILED,
    r"store .* was cancelled at event (\d+)": Gone.CANCELLED,
    r"(?:store|load) .* was lost at event (\d+)": Gone.LOST,
}
"""What `kvsm show` says of a missed key, and the event that it names."""


def told_causes(
    config: OffloadConfig, events: Sequence[OffloadingEvent]
) -> dict[int, tuple[Gone, int | None]]:
    """Lookup -> why its missed key is gone and since which event, according to `kvsm show`."""
    ledger, fates, causes = Ledger(config), Fates(lambda _: True), {}
    for event, following in zip(events, [*events[1:], None]):
        moment = Moment(ledger, event, following)
        if isinstance(event, ev.HitMatched) and event.missed is not None:
            slot = ledger.index.get(event.missed)
            if slot is None or not ledger.readable(slot):
                text = fates.why(ledger, event.missed)
                (found,) = [(gone, match) for word, gone in WORDS.items() if (match := re.match(word, text))]
                causes[event.seq] = found[0], int(found[1][1]) if found[1].groups() else None
        fates.before(moment, concern(ledger, event))
        fates.after(moment, ledger.apply(event))
    return causes


def assert_tables_are_right(config: OffloadConfig, events: Sequence[OffloadingEvent]) -> None:
    rows, ledger = extracted(config, events)
    assert [(row["event"], row["kind"]) for row in rows["events"]] == [(one.seq, one.kind) for one in events]
    assert_end_is_the_ledgers(rows, ledger)
    metrics = Metrics(Ledger(config))
    for event in events:
        metrics.ledger.apply(event)
        metrics.append(event)
    assert_counts_are_the_metrics(rows, metrics.values())
    told = told_causes(config, events)
    found = {row["event"]: (row["why"], row["cause"]) for row in rows["lookups"] if row["why"] is not None}
    assert found == told
    assert_rows_agree_among_themselves(rows)


def assert_rows_agree_among_themselves(rows: Rows) -> None:
    """No two tables contradict each other."""
    transfers = {row["transfer"]: row for row in rows["transfers"]}
    blocks = {(row["transfer"], row["slot"]): row for row in rows["blocks"]}
    wanted = {(row["gone"], row["key"], row["wanted"]) for row in blocks.values() if row["wanted"]}
    first_wanted: dict[tuple[int, str], int] = {}
    gone_at = {(row["gone"], row["key"]) for row in blocks.values() if row["gone"]}
    for row in rows["lookups"]:
        if (row["cause"], row["missed"]) in gone_at:
            first_wanted.setdefault((row["cause"], row["missed"]), row["event"])
        if row["cause_transfer"] is not None and row["cause_transfer"] in transfers:
            assert row["cause_requests"] == transfers[row["cause_transfer"]]["requests"]
    assert wanted == {(gone, key, event) for (gone, key), event in first_wanted.items()}
    for row in blocks.values():
        if row["gone_for"] is not None and row["gone_for"] in transfers:
            assert row["gone_for_requests"] == transfers[row["gone_for"]]["requests"]
        store = transfers[row["transfer"]]
        assert row["requests"] == store["requests"]
        assert row["planned_ns"] == store["wall_ns"]
        if store["outcome"] == "completed":
            assert (row["stored"], row["stored_ns"]) == (store["ended"], store["ended_ns"])
    arrivals = {(row["request"], row["arrived"]) for row in rows["requests"]}
    for row, following in pairwise(rows["request_states"]):
        if following["request"] == row["request"] and (row["request"], following["began"]) not in arrivals:
            assert row["ended"] == following["began"]
            assert row["state"] != following["state"]


LATER_ADMISSION: Operations = [("store", 0, 0), ("submit", 0, 0), ("report", 0, 0), ("match", 9, 0)]
LATER_ADMISSION += [("load", 21, 0), ("finish", 15, 0), ("load", 15, 0)]
"""A later request of the same name is admitted again while the earlier one loads."""


@settings(deadline=None, max_examples=examples(25))
@given(OPERATIONS, CONFIGS)
@example(LATER_ADMISSION, {"policy": "arc", "workers": 1, "blocks_per_chunk": 1})
def test_tables_are_right_for_any_life_of_the_core(operations: Operations, config: dict[str, Any]) -> None:
    """A wrong row is a wrong cause in a report."""
    life = Life(**config).drive(operations)
    assert_tables_are_right(life.config, life.events)
    life.drain()
    assert_tables_are_right(life.config, life.events)


@pytest.mark.parametrize("run", range(6))
def test_tables_are_right_in_the_world_of_the_core(run: int) -> None:
    """The same over random walks, which meet every kind of event."""
    world, _ = walked(draw_options(random_of(5, run)), run, 500)
    assert_tables_are_right(world.events[0].config, world.events)


# What the log lacks.


def test_what_a_log_lacks_is_not_made_up(tmp_path: Path) -> None:
    """A failed write took events away: the tables end as the ledger, with no cause before the gap."""
    life = gapped(tmp_path / "log")
    with kvsm.open(tmp_path / "log") as log:
        rows = rows_of(log.connection)
        (gap,) = log.condition.gaps
        assert_end_is_the_ledgers(rows, life.core.ledger)
    for row in rows["lookups"]:
        if row["event"] > gap[1] and row["why"] not in (None, Gone.IN_FLIGHT):
            assert row["cause"] is None or row["cause"] > gap[1]
            assert row["why"] != Gone.NEVER_STORED


# An opened log.


def test_an_opened_log_gives_typed_rows_and_events(tmp_path: Path) -> None:
    life = random_life(3, 400, tmp_path / "log")
    life.close()
    with kvsm.open(tmp_path / "log") as log:
        assert isinstance(log, OpenedLog)
        assert (log.first, log.last) == (1, len(life.events))
        assert (log.began_ns, log.ended_ns) == (life.events[0].wall_ns, life.events[-1].wall_ns)
        assert log.config == life.config
        assert list(log.events()) == list(life.events)
        assert list(log.events(5, 9)) == life.events[4:9]
        for table, kind in TABLES.items():
            if table != "events":
                rows = list(getattr(log, table)())
                assert all(type(row) is kind for row in rows)
                assert len(rows) == log.sql(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        good = [row.good for row in log.copies("reported IS NOT NULL")]
        assert {True, False} == set(good)
        assert all(type(one) is bool for one in good)


def test_tables_of_an_opened_log_cannot_be_changed(tmp_path: Path) -> None:
    random_life(3, 40, tmp_path / "log").close()
    with kvsm.open(tmp_path / "log") as log, pytest.raises(ConfigError, match="cannot be run"):
        log.sql("DELETE FROM requests")


def test_a_wrong_condition_is_one_clear_line(tmp_path: Path) -> None:
    random_life(3, 40, tmp_path / "log").close()
    with kvsm.open(tmp_path / "log") as log, pytest.raises(ConfigError, match="no such column: nonsense"):
        list(log.requests("nonsense = 1"))


def test_a_client_finds_its_request_by_the_name_that_it_gave(tmp_path: Path) -> None:
    """An engine adds a suffix to the name: `r7` becomes `r7-0a1b2c3d`."""
    life = Life(tmp_path / "log")
    for name in ("r7-b", "r70-a", "r7-a", "r", "r-1"):
        life.core.arrive(name)
    life.close()
    with kvsm.open(tmp_path / "log") as log:
        assert log.resolve_request("r7") == ["r7-b", "r7-a"]
        assert log.resolve_request("r") == ["r"]
        assert log.resolve_request("r7-a") == ["r7-a"]
        assert log.resolve_request("r71") == []


def test_an_event_that_cannot_follow_ends_the_tables_and_is_told(tmp_path: Path) -> None:
    """The rows up to it are what an engineer needs then."""
    life = scene()
    wrong = ev.WorkerReported(0, 0, 0, 999, 0, True)
    written(tmp_path / "log", life, [*life.events, wrong, *life.events])
    with kvsm.open(tmp_path / "log") as log:
        assert isinstance(log.stopped, InvalidEvent)
        assert log.last == len(life.events)
        assert_end_is_the_ledgers(rows_of(log.connection), life.core.ledger)


def test_no_log_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no log here"):
        kvsm.open(tmp_path)


def test_saved_tables_continue_while_a_copy_to_another_tier_is_live() -> None:
    """The ledger has such a copy as a request; the tables have its transfers only."""
    life = Life()
    life.stored("r0", [key(0)], [0])
    life.core.arrive("r1")
    life.core.arrive("disk-store-1", "disk")
    connection, ledger = sqlite3.connect(":memory:"), Ledger(life.config)
    make_tables(connection)
    tables = TableWriter(connection)
    extractor = Extractor(tables)
    for event in life.events:
        extractor.follow(ledger, event)
    tables.flush()
    again, seen = Extractor(tables, extractor.save(), ledger), len(life.events)
    life.core.finish("disk-store-1")
    for event in life.events[seen:]:
        again.follow(ledger, event)
    again.write_unfinished()
    assert [row["request"] for row in rows_of(connection)["requests"]] == ["r1"]
