"""The named queries of `kvsm query`: each finds the known answer of a log, and refuses what does not fit."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result
from places import ROOT
from replay_life import Life, gapped, key, random_life

import kvsm
from kvsm import events as ev
from kvsm.cli import main
from kvsm.cli.query import query as query_command
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError
from kvsm.events import SkipReason
from kvsm.explain.story.times import utc
from kvsm.explain.tables.named_queries import NAMED_QUERIES, NamedQuery, ParameterType, named_query
from kvsm.explain.tables.queries import run_query
from kvsm.explain.tables.sqlite_tables import make_tables

BEGAN_NS = 1_763_802_000_000_000_000
"""2025-11-22T09:00:00Z."""
MS = 1_000_000
DOCS = ROOT / "docs"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def asked(log: Path, name: str, **given: object) -> list[dict[str, Any]]:
    """The rows of a named query, as `kvsm query --json` gives them."""
    sets = [word for one, value in given.items() for word in ("--set", f"{one}={value}")]
    result = run("query", log, "--named", name, *sets, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


class TimedLife(Life):
    """A life whose clock stands still until it is set. One step takes 100 ms."""

    def __init__(self, log: Path, **config: Any) -> None:
        self.now_ns = BEGAN_NS
        super().__init__(log, clock_ns=lambda: self.now_ns, **{"defer_ticks": 1000, **config})

    def at(self, ms: int) -> None:
        """Set the clock to `ms` after the beginning."""
        self.now_ns = BEGAN_NS + ms * MS

    def planned(self, name: str, keys: list[bytes], blocks: list[int]) -> int:
        """Plan a store and submit it; returns the transfer."""
        return self.submitted(self.core.prepare_store(name, keys, blocks).job)

    def submitted(self, job: TransferJob | None) -> int:
        assert job is not None
        self.core.submit([job.transfer])
        return job.transfer


class Case(NamedTuple):
    """A log, the values that are given, and columns of the rows that the query must find in it.

    without: values with each of which it must find nothing in the same log.
    """

    make: Callable[[TimedLife], dict[str, Any] | list[dict[str, Any]]]
    given: dict[str, object]
    without: Sequence[dict[str, object]]


def late_report(life: TimedLife) -> dict[str, Any]:
    transfer = life.planned("r1", [key(1)], [1])
    life.core.report(transfer, 0, True)
    life.core.end_step()
    life.at(2500)
    life.core.report(transfer, 1, True)
    return {
        "event": transfer + 1,
        "step": 0,
        "time": "2025-11-22T09:00:00.000Z",
        "transfer": transfer,
        "worker": 1,
        "requests": '["r1"]',
        "reported": transfer + 4,
        "outcome": "completed",
        "waited_events": 3,
        "waited_steps": 1,
        "waited_ms": 2500.0,
    }


def silent_store(life: TimedLife) -> list[dict[str, Any]]:
    """Of four stores, the first is lost after 12 s, no rank reports the second, both ranks report the third
    late, and one of them reports the fourth in time."""
    lost, open_, late, half = (life.planned(f"r{one}", [key(one)], [one]) for one in range(4))
    life.core.report(half, 0, True)
    life.at(11_500)
    life.core.report(late, 0, True)
    first_report = life.core.ledger.seq
    life.at(12_000)
    life.core.report(late, 1, True)
    life.core.report(half, 1, True)
    life.core.tick()
    life.core.lose(lost)
    life.at(20_000)
    life.core.end_step()
    return [
        {"transfer": lost, "first_report": None, "outcome": "lost", "pending": 2, "waited_ms": 12_000.0},
        {"transfer": open_, "first_report": None, "outcome": None, "pending": 2, "waited_ms": 20_000.0},
        {"transfer": late, "first_report": first_report, "outcome": "completed", "waited_ms": 11_500.0},
    ]


def slow_load(life: TimedLife) -> list[dict[str, Any]]:
    """A store ends at once, a load after 3 s, and a load that is planned 1 s later has not ended."""
    life.stored("r1", [key(1)], [1])
    life.core.match("r2", [key(1)])
    load = life.submitted(life.core.prepare_load("r2", [2]))
    life.at(1000)
    life.core.match("r3", [key(1)])
    late = life.submitted(life.core.prepare_load("r3", [3]))
    life.at(3000)
    for worker in range(2):
        life.core.report(load, worker, True)
    life.at(4000)
    life.core.end_step()
    return [
        {"event": load, "direction": "load", "slots": 1, "outcome": "completed", "took_ms": 3000.0},
        {"event": late, "ended": None, "outcome": None, "pending": 2, "took_ms": 3000.0},
    ]


def failed_store(life: TimedLife) -> dict[str, Any]:
    transfer = life.planned("r1", [key(1)], [1])
    life.core.report(transfer, 0, True)
    life.core.report(transfer, 1, False, "no room")
    return {"event": transfer + 3, "transfer": transfer, "worker": 1, "error": "no room", "slots": 1}


def rejected_report(life: TimedLife) -> list[dict[str, Any]]:
    """A report of no transfer, one that comes twice, and one that comes after the end."""
    life.core.report(999, 1, False)
    transfer = life.planned("r1", [key(1)], [1])
    for worker in (1, 1, 0):
        life.core.report(transfer, worker, True)
    life.at(70)
    life.core.report(transfer, 1, True)
    return [
        {"transfer": 999, "worker": 1, "good": 0, "direction": None, "outcome": None},
        {"transfer": transfer, "worker": 1, "good": 1, "outcome": None, "after_end_ms": None},
        {"transfer": transfer, "worker": 1, "good": 1, "outcome": "completed", "after_end_ms": 70.0},
    ]


def imported_store(life: TimedLife) -> dict[str, Any]:
    life.stored("r1", [key(1)], [1])
    job = life.core.import_blocks((("r2", 1),), [key(2)], "engine p-1").job
    life.at(40)
    transfer = life.ended(job)
    return {"event": transfer, "source": "engine p-1", "requests": '["r2"]', "took_ms": 40.0}


def hit_after_reset(life: TimedLife) -> dict[str, Any]:
    """A lookup after the first reset, one right after the second that finds nothing, and one that finds two
    slots 1.5 s later."""
    life.stored("r1", [key(1)], [1])
    life.core.reset()
    life.at(1000)
    life.stored("r1", [key(1)], [1])
    life.at(4000)
    life.core.match("r2", [key(1)])
    life.core.release("r2")
    life.core.reset()
    reset = life.core.ledger.seq
    life.core.match("r3", [key(1)])
    life.stored("r1", [key(2), key(3)], [2, 3])
    life.at(5500)
    life.core.match("r4", [key(2), key(3)])
    hit = life.core.ledger.seq
    return {"event": hit, "request": "r4", "hit_slots": 2, "reset": reset, "after_reset_ms": 1500.0}


def lookups_after_reset(life: TimedLife) -> list[dict[str, Any]]:
    """The last reset before a lookup counts, whether the lookup found something or not."""
    found = hit_after_reset(life)
    reset = found["reset"]
    return [
        {"event": reset - 2, "kind": "HitMatched", "before": 6, "after_ms": 4000.0},
        {"event": reset + 1, "kind": "HitMatched", "before": reset, "events": 1, "after_ms": 0.0},
        {"event": found["event"], "before_kind": "CacheReset", "before": reset, "after_ms": 1500.0},
    ]


def full_pool(life: TimedLife) -> tuple[int, int]:
    """Six slots are in flight, and the store of r2 has no room. Returns the events of the skip and of r2's
    next lookup, half a second later."""
    life.core.arrive("r2")
    life.planned("r1", [key(one) for one in range(6)], list(range(6)))
    life.core.prepare_store("r2", [key(7)], [7])
    skip = life.core.ledger.seq
    life.at(500)
    life.core.match("r1", [key(8)])
    life.core.match("r2", [key(7)])
    lookup = life.core.ledger.seq
    life.core.match("r2", [key(9)])
    return skip, lookup


def skipped_then_looked_up(life: TimedLife) -> dict[str, Any]:
    skip, lookup = full_pool(life)
    return {"event": skip, "request": "r2", "reason": "pool full", "lookup": lookup, "after_ms": 500.0}


def skipped_then_missed(life: TimedLife) -> dict[str, Any]:
    skip, lookup = full_pool(life)
    return {"event": lookup, "missed": key(7).hex(), "skip": skip, "skipped_for": '["r2"]', "after_ms": 500.0}


def evicted_then_missed(life: TimedLife) -> dict[str, Any]:
    """A block that a reset dropped is missed, too: it was not evicted."""
    life.stored("r1", [key(8)], [8])
    life.core.reset()
    life.core.match("r4", [key(8)])
    life.stored("r1", [key(one) for one in range(6)], list(range(6)))
    life.at(1000)
    store = life.stored("r2", [key(7)], [7])
    evicted = store - 1
    life.at(4000)
    life.core.match("r3", [key(5)])
    wanted = life.core.ledger.seq
    found = {"event": evicted, "step": 0, "key": key(5).hex(), "gone_for": store, "wanted": wanted}
    return {**found, "time": "2025-11-22T09:00:01.000Z", "wanted_by": "r3", "after_ms": 3000.0}


def long_wait(life: TimedLife) -> list[dict[str, Any]]:
    """r1 does not wait; r2 waits 5 s for its store, and r3 still waits after 4 s for another store."""
    life.core.arrive("r1")
    first = life.planned("r1", [key(1)], [1])
    life.core.match("r2", [key(1)])
    began = life.core.ledger.seq
    life.at(2000)
    second = life.planned("r1", [key(2)], [2])
    life.core.match("r3", [key(2)])
    life.at(5000)
    for worker in range(2):
        life.core.report(first, worker, True)
    life.at(6000)
    life.core.end_step()
    return [
        {"event": began, "request": "r2", "state": "DEFERRED", "transfer": first, "waited_ms": 5000.0},
        {"request": "r3", "transfer": second, "ended": None, "waited_ms": 4000.0},
    ]


def slow_request(life: TimedLife) -> list[dict[str, Any]]:
    """One finishes late, after a wait of 1 s; one has not finished; one finishes at once."""
    for name in ("r1", "r2", "r3"):
        life.core.arrive(name)
    life.core.finish("r3")
    transfer = life.planned("r2", [key(1)], [1])
    life.core.match("r1", [key(1)])
    life.at(1000)
    for worker in range(2):
        life.core.report(transfer, worker, True)
    life.core.match("r1", [key(1)])
    load = life.submitted(life.core.prepare_load("r1", [2]))
    life.at(3500)
    for worker in range(2):
        life.core.report(load, worker, True)
    life.at(61_000)
    life.core.finish("r1", aborted=True)
    life.at(62_000)
    life.core.end_step()
    return [
        {
            "request": "r1",
            "took_ms": 61_000.0,
            "deferred_ms": 1000.0,
            "loading_ms": 2500.0,
        },
        {"request": "r2", "state": "NEW", "finished": None, "took_ms": 62_000.0},
    ]


def reset_then_eviction(life: TimedLife) -> list[dict[str, Any]]:
    """Two resets, the second one 1 s later, and then an eviction."""
    resets = []
    for second in range(2):
        life.at(1000 * second)
        life.stored("r1", [key(second)], [second])
        life.core.reset()
        resets.append(life.core.ledger.seq)
    life.stored("r1", [key(one) for one in range(6)], list(range(6)))
    life.at(2500)
    evicted = life.stored("r2", [key(7)], [7]) - 1
    return [
        {"event": resets[0], "kind": "CacheReset", "next": evicted, "after_ms": 2500.0},
        {"event": resets[1], "kind": "CacheReset", "next": evicted, "after_ms": 1500.0},
    ]


def unanswered_plan(life: TimedLife) -> dict[str, Any]:
    life.stored("r1", [key(1)], [1])
    life.planned("r1", [key(2)], [2])
    submitted = life.core.ledger.seq
    life.at(9000)
    life.core.end_step()
    return {"event": submitted, "kind": "TransfersSubmitted", "next": None, "passed_ms": 9000.0}


CASES: dict[str, Case] = {
    "late-reports": Case(late_report, {"events": 2}, [{"events": 3}, {"worker": 0}, {"seconds": "2.5"}]),
    "silent-transfers": Case(silent_store, {"seconds": "11.499"}, [{"seconds": 20}]),
    "slow-transfers": Case(slow_load, {"direction": "load"}, [{"direction": "store"}, {"seconds": 3}]),
    "failed-copies": Case(failed_store, {"worker": 1}, [{"worker": 0}, {"direction": "load"}]),
    "rejected-reports": Case(rejected_report, {"worker": 1}, [{"worker": 0}]),
    "imported-stores": Case(imported_store, {"source": "engine p-1"}, [{"source": "engine 'p-2'"}]),
    "hits-after-reset": Case(
        hit_after_reset, {"seconds": "1.5", "slots": 2}, [{"seconds": "1.4"}, {"slots": 3}]
    ),
    "lookups-after-skip": Case(
        skipped_then_looked_up, {"seconds": "0.5"}, [{"seconds": "0.4"}, {"reason": "key in flight"}]
    ),
    "misses-after-skip": Case(
        skipped_then_missed, {"seconds": "0.5"}, [{"seconds": "0.4"}, {"reason": "key in flight"}]
    ),
    "misses-after-eviction": Case(evicted_then_missed, {"seconds": 3}, [{"seconds": 2}]),
    "long-waits": Case(long_wait, {"state": "DEFERRED"}, [{"state": "LOADING"}, {"seconds": 5}]),
    "slow-requests": Case(slow_request, {"seconds": "60.9"}, [{"seconds": 62}]),
    "events-followed": Case(reset_then_eviction, {"seconds": "2.5"}, [{"seconds": 1}, {"by": "Ticked"}]),
    "events-not-followed": Case(unanswered_plan, {"seconds": 8}, [{"seconds": 9}]),
    "events-preceded": Case(lookups_after_reset, {"seconds": 4}, [{"by": "BlocksEvicted"}]),
}


def test_each_query_has_a_case() -> None:
    assert [*CASES] == [one.name for one in NAMED_QUERIES]


@pytest.mark.parametrize("name", CASES)
def test_a_query_finds_what_its_question_means(name: str, tmp_path: Path) -> None:
    """With its defaults, with values that keep the answer, and with values that leave nothing of it."""
    case = CASES[name]
    life = TimedLife(tmp_path / "log", host_blocks=6)
    made = case.make(life)
    life.close()
    expected = made if isinstance(made, list) else [made]
    for given in ({}, case.given):
        rows = asked(tmp_path / "log", name, **given)
        shown = [{column: row[column] for column in one} for one, row in zip(expected, rows, strict=True)]
        assert shown == expected
    for given in case.without:
        assert asked(tmp_path / "log", name, **given) == []


@pytest.mark.parametrize("query", NAMED_QUERIES, ids=lambda one: one.name)
def test_a_query_reads_columns_that_there_are(query: NamedQuery) -> None:
    """And begins with where in the log its row begins, and uses each of its parameters."""
    connection = sqlite3.connect(":memory:")
    make_tables(connection)
    columns, rows = run_query(connection, query.filled(), (), 10)
    assert columns[:3] == ["event", "step", "time"]
    assert len(set(columns)) == len(columns)
    assert list(rows) == []
    assert set(re.findall(r":([a-z]\w*)", query.sql)) == {one.name for one in query.parameters}
    assert re.fullmatch(r"Which [^.?]*\?", query.question)
    assert all(re.fullmatch(r"[A-Z][^?]*\.", one.sentence) for one in query.parameters)


# Against a look at every event.


class BusyClock:
    """Many events share a time, and sometimes the clock is set back."""

    def __init__(self, seed: int) -> None:
        self._random, self._now_ns = Random(seed), BEGAN_NS + MS - 1

    def __call__(self) -> int:
        self._now_ns += self._random.choice((0, 0, 1, 5, 20, -7)) * MS
        return self._now_ns


@pytest.fixture(scope="module", params=range(3))
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A log of every kind of event, and its events."""
    log = tmp_path_factory.mktemp("busy") / "log"
    life = random_life(request.param, 400, log, clock_ns=BusyClock(request.param))
    life.close()
    return log, list(life.events)


@pytest.mark.parametrize("query", NAMED_QUERIES, ids=lambda one: one.name)
def test_rows_begin_with_where_they_are_in_the_order_of_the_log(
    busy: tuple[Path, list[Any]], query: NamedQuery
) -> None:
    """Step and time are the event's. Things that a restart ends have the time of the event before it."""
    log, events = busy
    names = [one.name for one in query.parameters]
    given = {"seconds": "0"} if "seconds" in names and "kind" not in names else {}
    rows = asked(log, query.name, **given)
    assert [one["event"] for one in rows] == sorted(one["event"] for one in rows)
    for row in rows:
        event = events[row["event"] - 1]
        assert (row["step"], row["time"]) == (event.step, utc(event.wall_ns))


def test_the_time_of_a_virtual_clock_is_no_date(tmp_path: Path) -> None:
    """Such a clock counts from 0; a date in 1970 says nothing about the run."""
    random_life(1, 200, tmp_path / "log", clock_ns=count(0, 1_000_000).__next__).close()
    rows = asked(tmp_path / "log", "events-followed", kind="StepEnded", by="StepEnded")
    assert rows
    assert {row["time"] for row in rows} == {None}


KIND_PAIRS = [
    ("StorePlanned", "WorkerReported"),
    ("HitMatched", "CacheReset"),
    ("StepEnded", "StepEnded"),
    ("CacheReset", "BlocksEvicted"),
]


@pytest.mark.parametrize(("kind", "by"), KIND_PAIRS)
@pytest.mark.parametrize("seconds", ["any", "0.03"])
def test_kinds_are_paired_as_a_look_at_every_pair_does(
    busy: tuple[Path, list[Any]], kind: str, by: str, seconds: str
) -> None:
    log, events = busy
    within_ns = None if seconds == "any" else float(seconds) * 1e9
    followed, not_followed, preceded = [], [], []
    for place, event in enumerate(events):
        if event.kind != kind:
            continue
        after = next((one for one in events[place + 1 :] if one.kind == by), None)
        before = next((one for one in reversed(events[:place]) if one.kind == by), None)
        passed = (after or events[-1]).wall_ns - event.wall_ns
        if after is not None and (within_ns is None or passed <= within_ns):
            followed.append((event.seq, after.seq))
        elif (after is None) if within_ns is None else (passed > within_ns):
            not_followed.append(event.seq)
        if before is not None and (within_ns is None or event.wall_ns - before.wall_ns <= within_ns):
            preceded.append((event.seq, before.seq))
    given = {"kind": kind, "by": by, "seconds": seconds}
    assert [(one["event"], one["next"]) for one in asked(log, "events-followed", **given)] == followed
    assert [one["event"] for one in asked(log, "events-not-followed", **given)] == not_followed
    assert [(one["event"], one["before"]) for one in asked(log, "events-preceded", **given)] == preceded


def test_late_reports_are_those_that_the_events_show(busy: tuple[Path, list[Any]]) -> None:
    """Each submitted copy waits for its rank's report, for the end of its transfer, or until the log ends."""
    log, events = busy
    ends = {  # Besides reports, these end a transfer for all of its ranks.
        "TransferLost": lambda event, _flying: [event.transfer],
        "TransferCancelled": lambda event, _flying: [event.transfer],
        "Restarted": lambda _event, flying: list(flying),
    }
    waiting: dict[int, dict[int, Any]] = {}
    waited: list[tuple[int, int, int]] = []
    last_before_restart = events[0]
    for event in events:
        if event.kind == "TransfersSubmitted":
            waiting |= {transfer: dict.fromkeys(range(2), event) for transfer in event.transfers}
        elif event.kind == "WorkerReported":
            since = waiting[event.transfer].pop(event.worker)
            waited.append((event.transfer, event.worker, event.wall_ns - since.wall_ns))
        elif event.kind in ends:
            ended_ns = last_before_restart.wall_ns if event.kind == "Restarted" else event.wall_ns
            for transfer in ends[event.kind](event, waiting):
                for worker, since in waiting.pop(transfer, {}).items():
                    waited.append((transfer, worker, ended_ns - since.wall_ns))
        last_before_restart = event
    for transfer, workers in waiting.items():
        for worker, since in workers.items():
            waited.append((transfer, worker, events[-1].wall_ns - since.wall_ns))
    late = sorted((transfer, worker, ns / 1e6) for transfer, worker, ns in waited if ns > 15 * MS)
    rows = asked(log, "late-reports", seconds="0.015")
    assert late
    assert sorted((one["transfer"], one["worker"], one["waited_ms"]) for one in rows) == late


def test_a_skip_is_paired_with_the_next_lookup_of_its_request(busy: tuple[Path, list[Any]]) -> None:
    """The lookups are those of the table: an answer that was used and not logged has a row there, too."""
    log, events = busy
    with kvsm.open(log) as opened:
        lookups = [(row.event, row.request) for row in opened.lookups()]
    expected = []
    for event in events:
        for name in dict.fromkeys(one for one, _ in event.owners) if event.kind == "StoreSkipped" else ():
            after = [seq for seq, request in lookups if request == name and seq > event.seq]
            expected += [(event.seq, name, after[0])] if after else []
    rows = asked(log, "lookups-after-skip")
    assert expected
    assert sorted((one["event"], one["request"], one["lookup"]) for one in rows) == sorted(expected)


# The command.


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("named") / "log"
    random_life(3, 300, directory).close()
    return directory


def test_the_answer_comes_as_a_table_json_and_csv_with_a_limit(log: Path) -> None:
    words = ("query", log, "--named", "events-followed", "--set", "kind=StorePlanned", "--set", "by=Ticked")
    rows = asked(log, "events-followed", kind="StorePlanned", by="Ticked")
    assert len(rows) > 3
    table = CliRunner(env={"COLUMNS": "300"}).invoke(main, [*map(str, words)]).stdout.splitlines()
    assert (table[0].split(), len(table)) == ([*rows[0]], len(rows) + 1)
    lines = list(csv.DictReader(io.StringIO(run(*words, "--csv").stdout)))
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
    assert lines == texts
    cut = json.loads(run(*words, "--json", "--limit", 2).stdout)
    assert (cut["rows"], cut["more"]) == ([[*row.values()] for row in rows[:2]], True)


def test_a_window_takes_rows_by_their_event_and_the_query_knows_the_rest(log: Path) -> None:
    rows = asked(log, "events-followed", kind="StorePlanned", by="CacheReset")
    since, until = rows[1]["event"], rows[-2]["event"]
    assert until < rows[-1]["next"]
    words = ("--set", "kind=StorePlanned", "--set", "by=CacheReset", "--since", since, "--until", until)
    part = json.loads(run("query", log, "--named", "events-followed", *words, "--json").stdout)
    assert part["rows"] == [[*row.values()] for row in rows[1:-1]]


def test_the_list_needs_no_log_and_names_each_query() -> None:
    shown = run("query", "--list")
    assert shown.exit_code == 0
    assert [line.split("  ")[0] for line in shown.stdout.splitlines()] == [one.name for one in NAMED_QUERIES]
    assert all(one.question in shown.stdout for one in NAMED_QUERIES)
    told = [json.loads(line) for line in run("query", "--list", "--json").stdout.splitlines()]
    assert [one["name"] for one in told] == [one.name for one in NAMED_QUERIES]
    assert [one["sql"] for one in told] == [one.filled() for one in NAMED_QUERIES]


@pytest.mark.parametrize("query", NAMED_QUERIES, ids=lambda one: one.name)
def test_the_sql_of_the_list_can_be_changed_and_asked(log: Path, query: NamedQuery) -> None:
    """It holds the values that are given, and is a query as it is."""
    one = query.parameters[0]
    value = one.choices[-1] if one.choices else "x'y" if one.type is ParameterType.TEXT else "0"
    shown = run("query", "--list", "--named", query.name, "--set", f"{one.name}={value}").stdout
    assert all(f"  {name.name} " in shown and name.sentence in shown for name in query.parameters)
    sql = shown.split("\n\n")[-1]
    assert sql == query.filled({one.name: value}) + "\n"
    answer = json.loads(run("query", log, sql, "--json").stdout)
    rows = asked(log, query.name, **{one.name: value})
    assert [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]] == rows


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--named", "late-report"), "(did you mean late-reports?); there are late-reports, silent-"),
        (("--named", "zzz"), "there is no named query 'zzz'; there are late-reports, silent-transfers,"),
        (
            ("--named", "late-reports", "--set", "second=2"),
            "late-reports has no parameter 'second' (did you mean seconds?); it has seconds, events, worker",
        ),
        (("--named", "late-reports", "--set", "seconds=-1"), "give a number, such as 2 or 0.5, in s that is"),
        (("--named", "late-reports", "--set", "seconds=nan"), "seconds cannot be 'nan'"),
        (("--named", "late-reports", "--set", "seconds=2; DELETE"), "seconds cannot be '2; DELETE'"),
        (("--named", "late-reports", "--set", "seconds=any"), "seconds cannot be 'any'"),
        (("--named", "late-reports", "--set", "worker=1.5"), "worker cannot be '1.5': give a whole number"),
        (("--named", "long-waits", "--set", "state=LOADIN"), "give one of any, DEFERRED, LOADING"),
        (("--named", "events-followed", "--set", "by=Tick"), "give one of LogOpened, RequestArrived,"),
        (("--named", "late-reports", "--set", "seconds"), "'seconds' is no NAME=VALUE."),
        (("--named", "late-reports", "--set", "worker=1", "--set", "worker=2"), "worker is given twice"),
        (("SELECT 1", "--named", "late-reports"), "query takes one of QUERY and --named NAME"),
        ((), "query takes one of QUERY and --named NAME; see kvsm query --list"),
        (("SELECT 1", "--set", "seconds=2"), "--set, --since and --until go with --named"),
        (("SELECT 1", "--since", "5"), "--set, --since and --until go with --named"),
        (("--named", "late-reports", "--csv", "--json"), "query prints one format, not csv and json"),
    ],
)
def test_a_wrong_question_is_refused_with_what_there_is(log: Path, words: tuple[str, ...], says: str) -> None:
    refused = run("query", log, *words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_without_a_log_only_the_list_can_be_asked_for() -> None:
    refused = run("query", "--named", "late-reports")
    assert refused.exit_code == 2
    assert refused.stderr == "kvsm: Missing argument 'LOG'. See kvsm query --help.\n"


def test_a_name_is_completed_with_its_question() -> None:
    context = query_command.make_context("query", [], resilient_parsing=True)
    (named,) = [one for one in query_command.params if one.name == "named"]
    found = named.shell_complete(context, "misses")
    assert [one.value for one in found] == ["misses-after-skip", "misses-after-eviction"]
    assert [one.help for one in found] == [named_query(one.value).question for one in found]


def test_a_value_is_text_and_no_sql(log: Path) -> None:
    assert asked(log, "imported-stores", source="x' OR '1' = '1") == []
    with pytest.raises(ConfigError, match="cannot be"):
        named_query("lookups-after-skip").filled({"reason": "' OR 1 --"})


def test_choices_are_what_the_log_can_hold() -> None:
    choices = {(one.name, p.name): p.choices for one in NAMED_QUERIES for p in one.parameters if p.choices}
    assert choices["misses-after-skip", "reason"] == tuple(str(one) for one in SkipReason)
    assert choices["slow-transfers", "direction"] == ("store", "load")
    assert choices["events-followed", "kind"] == tuple(kind.__name__ for kind in ev.KINDS)
    assert choices["long-waits", "state"] == ("DEFERRED", "LOADING")


def test_a_log_that_lacks_events_ends_with_1(tmp_path: Path) -> None:
    """The query runs on the events that are there."""
    gapped(tmp_path / "log")
    result = run("query", tmp_path / "log", "--named", "events-preceded")
    assert result.exit_code == 1
    assert "are not in the log" in result.stderr
    assert "CacheReset" in result.stdout


# The docs.


def shown_commands() -> Iterator[list[str]]:
    """The words of each `kvsm query` that a page or the help shows."""
    pages = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")]
    for text in (*pages, run("query", "--help").stdout):
        for line in re.findall(r"kvsm query (?:DIR|kvsm-log|--list)[^`\n]*", text):
            yield shlex.split(line.split("   ")[0])[1:]


def test_queries_that_the_docs_show_can_be_pasted(log: Path) -> None:
    commands = [["query", *words[1:]] for words in shown_commands() if not {"NAME", "SELECT ..."} & {*words}]
    assert len(commands) >= 12
    assert sum("--named" in words for words in commands) >= 8
    for words in commands:
        asked_of = [str(log) if word in ("DIR", "kvsm-log") else word for word in words]
        result = run(*asked_of)
        assert result.exit_code == 0, (words, result.stderr)
