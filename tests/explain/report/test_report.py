"""`kvsm report`: right figures, the cause of every seeded incident, and no false alarm."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import click
import msgspec
import numpy as np
import pytest
from changed_logs import PlainLog, bounded, changed, ended_well, lives, write_plain
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from incidents import (
    HEALTHY,
    INCIDENTS,
    STARTED_NS,
    Rig,
    chats,
    engine_killed,
    engine_stopped,
    processes_killed,
    property_broken,
    stamped,
)
from log_life import names
from replay_life import Life, full_life, gapped, key, random_life, story_life

from examples import seeds_of_today
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.core.log import LogEnd
from kvsm.events import SkipReason
from kvsm.explain.report import cache_measures
from kvsm.explain.report import log_report as report
from kvsm.explain.report.cache_measures import BURST_PART
from kvsm.explain.report.confidence import LEAST_LOGS, MEASURED, confidence_in
from kvsm.explain.report.copy_measures import _episodes, _rate
from kvsm.explain.report.detectors import Limit, number, percent
from kvsm.explain.report.engine_detectors import STILL_WRITTEN_NS
from kvsm.explain.report.figures import (
    BurstFigures,
    CheckFigures,
    ClockFigures,
    ComputeFigures,
    DeviceFigures,
    DirectionFigures,
    EndFigures,
    FallFigures,
    FetchFigures,
    FloodFigures,
    GroupFigures,
    LogFigures,
    RankFigures,
    RejectedFigures,
    RemedyFigures,
    ResetFigures,
    RestartFigures,
    SkipFigures,
    Spread,
    StopFigures,
    TrialFigures,
    WaitedFor,
    WaitSplit,
)
from kvsm.explain.report.log_report import Report, left_open, make_report
from kvsm.explain.report.measures import shortest_run
from kvsm.explain.report.troubles import DETECTORS, Urgency, troubles
from kvsm.explain.story.unfinished import end_rows
from kvsm.explain.story.window import Window
from kvsm.explain.tables import table_index as index
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.opened import open as open_log
from kvsm.explain.tables.row_kinds import Gone
from kvsm.explain.tables.steady_time import ClockJump
from kvsm.explain.verify.auditor import verify_log
from kvsm.serving import RunOptions, run_workload


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def reported(log: Path, window: Window | None = None, **options: Any) -> Report:
    with open_log(log) as opened:
        return make_report(opened, window or Window(), **options)


# Incidents, and their absence.

CAUSES = {
    "pool_too_small": "pool too small",
    "tenant_floods": "tenant floods",
    "hits_fell": "hits fell",
    "rank_fails": "rank fails",
    "rank_silent": "rank silent",
    "reports_lost": "rank silent",
    "requests_unfinished": "requests unfinished",
    "reset_storm": "reset storm",
    "eviction_burst": "eviction burst",
    "slow_store": "waits",
    "window_thrash": "group floods",
    "lazy_behind": "stores behind",
    "preemption_storm": "preemptions",
    "property_broken": "property broken",
    "engine_killed": "engine killed",
    "processes_killed": "processes killed",
    "rank_slow": "rank slow",
    "reports_rejected": "reports rejected",
    "too_few_transfers": "blocks skipped",
    "disk_full": "events missing",
    "engine_stopped": "engine stopped",
    "clock_back": "clock jumped",
    "clock_forward": "clock jumped",
    "other_block_size": "cold start",
    "rank_tail": "rank tail",
    "loads_crawl": "loads slower than computing",
    "gateway_restarts": "requests aborted",
    "device_leak": "device blocks leak",
    "disk_crawls": "disk slower than computing",
}
"""Each seeded incident, and the trouble that is its cause."""


def test_every_seeded_incident_has_a_cause() -> None:
    """Every seeded incident is tried, and every expected cause has a detector."""
    assert CAUSES.keys() == INCIDENTS.keys()
    assert set(CAUSES.values()) <= {one.name for one in DETECTORS}


@pytest.mark.parametrize("seeded", [processes_killed, engine_stopped, property_broken])
def test_report_names_the_cause_of_a_small_incident(seeded: Callable[[Path], Path], tmp_path: Path) -> None:
    found = reported(seeded(tmp_path / "log"))
    assert CAUSES[seeded.__name__] in [one.name for one in found.troubles[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", INCIDENTS)
def test_report_names_the_cause_among_its_first_two(name: str, seed: int, tmp_path: Path) -> None:
    """For every seeded incident: the promise to the engineer on call."""
    found = reported(INCIDENTS[name](tmp_path / "log", seed=seed))
    assert CAUSES[name] in [one.name for one in found.troubles[:2]]


def test_a_stop_and_a_start_are_no_alarm(tmp_path: Path) -> None:
    """Another process resumes the log after a clean close: no request is lost, and all blocks are kept."""
    found = reported(HEALTHY["healthy_next_process"](tmp_path / "log"))
    assert found.troubles == ()
    assert (found.restarts.restarts, found.restarts.killed, found.restarts.lost) == (1, 0, 0)
    assert found.restarts.kept > 0
    assert found.requests.cut_off == 0


def test_a_small_healthy_run_is_no_alarm(tmp_path: Path) -> None:
    found = reported(HEALTHY["healthy_small"](tmp_path / "log"))
    assert found.troubles == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_is_no_alarm(name: str, seed: int, tmp_path: Path) -> None:
    """Whole, and cut to each of its quarters."""
    with open_log(HEALTHY[name](tmp_path / "log", seed=seed)) as log:
        quarter = log.last // 4
        parts = [Window(1 + n * quarter, (n + 1) * quarter) for n in range(4)]
        for window in (Window(), *parts):
            assert make_report(log, window).troubles == (), window


def test_requests_that_ended_in_a_gap_have_no_time(tmp_path: Path) -> None:
    """A report of such a log has figures of the others."""
    gapped(tmp_path / "log")
    with open_log(str(tmp_path / "log")) as log:
        untimed = list(log.requests("finished IS NOT NULL AND finished_ns IS NULL"))
        timed = list(log.requests("finished_ns IS NOT NULL AND NOT cut_off AND aborted"))
        aborts = make_report(log).aborts
    assert untimed
    assert aborts is not None
    assert 0 < aborts.aborted <= len(timed)


def test_an_unclosed_log_that_may_still_be_written_is_no_alarm(tmp_path: Path) -> None:
    """Its last event is less than a minute old. Then it is older, and the engine was killed."""
    with open_log(engine_killed(tmp_path / "log")) as log:
        young = make_report(log, now_ns=log.ended_ns + STILL_WRITTEN_NS - 1)
        old = make_report(log, now_ns=log.ended_ns + STILL_WRITTEN_NS)
    assert young.troubles == ()
    assert [one.name for one in old.troubles] == ["engine killed"]
    assert old.troubles[0].text.startswith("The engine was killed, or hangs: it did not close the log")
    idle = replaced(quiet(), **EDGES["engine killed"].speaks)
    assert troubles(idle)[0].text.startswith("The engine was killed, or is idle: it did not close the log")


# Confidence.


def test_the_confidence_in_a_finding_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a finding was seen in few logs only, no confidence is given."""
    monkeypatch.setitem(MEASURED, "pool too small", (3, 4))
    monkeypatch.setitem(MEASURED, "rank slow", (LEAST_LOGS - 1, LEAST_LOGS - 1))
    assert (confidence_in("pool too small"), confidence_in("rank slow")) == (0.75, None)


def test_each_measured_finding_has_a_detector() -> None:
    assert MEASURED.keys() <= {one.name for one in DETECTORS}
    assert all(0 <= right <= shown for right, shown in MEASURED.values())


# Limits.


@cache
def quiet() -> LogFigures:
    """The figures of a log in which nothing stands out: 1,000 lookups of 1,000 requests, four ranks."""
    found = reported(_small_log())
    named = {name: getattr(found, name) for name in LogFigures.__struct_fields__}
    figures = LogFigures(**named)
    ranks = tuple([rank(number) for number in range(4)])
    return replaced(
        figures,
        **{
            "log_began_ns": 0,
            "began_ns": 0,
            "ended_ns": 10**12,
            "stored": 1000,
            "stops": (),
            "hits.lookups": 1000,
            "requests.requests": 1000,
            "waits.lived_ns": 10**12,
            "copies.ranks": ranks,
        },
    )


_logs: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _one_small_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("report") / "log"
    _logs.append(HEALTHY["healthy_small"](place))
    yield
    shutil.rmtree(_logs.pop())


def _small_log() -> Path:
    return _logs[0]


def replaced(figures: Any, **changes: Any) -> Any:
    """The figures with other values: `replaced(figures, **{"hits.lookups": 7})`."""
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        inner = replaced(getattr(figures, head), **{rest: value}) if rest else value
        figures = msgspec.structs.replace(figures, **{head: inner})
    return figures


def rank(number: int, **changes: Any) -> RankFigures:
    """A rank whose 1,000 copies took 10 ms each."""
    usual = Spread(1000, 10_000_000, 10_000_000, 10_000_000)
    one = RankFigures(
        rank=number,
        copies=1000,
        reported=1000,
        failed=0,
        missing=0,
        missing_since_ns=None,
        cut_off=0,
        waiting=0,
        latency=usual,
        queued=Spread(0, None, None, None),
        copied=Spread(0, None, None, None),
        noticed=Spread(0, None, None, None),
        errors=(),
        last_ns=10**12,
    )
    return msgspec.structs.replace(one, **changes)


class Edge(NamedTuple):
    """What lets a detector speak, and what just does not."""

    speaks: dict[str, Any]
    silent: dict[str, Any]


def ranks(**changes: Any) -> dict[str, Any]:
    return {"copies.ranks": (rank(0), rank(1), rank(2, **changes), rank(3))}


def stops(why: Gone, lookups: int) -> tuple[StopFigures, ...]:
    return (StopFigures(why.value, lookups, None),)


def restarts(killed: int) -> RestartFigures:
    ended = (("the process was killed", killed),) if killed else ()
    return RestartFigures(restarts=1, killed=killed, stopped=0, ended=ended, kept=9, lost=1, transfers=1)


def burst(until_ns: int, **changes: Any) -> BurstFigures:
    """The burst evicts 700 blocks in a time in which 100 are usual. The pool is full from the log's start."""
    found = BurstFigures(
        began_ns=0,
        ended_ns=until_ns,
        full_ns=0,
        last_ns=10**12,
        wanted=70,
        evicted=700,
        batches=100,
        usual=100,
        lowest=200,
        deviations=4.0,
        requests=3,
        unread=2,
        names=("a", "b"),
    )
    return msgspec.structs.replace(found, **changes)


def fall(**changes: Any) -> FallFigures:
    """Hits fell from 80 % to 48 % after 20 of 40 lookups."""
    found = FallFigures(
        event=20,
        at_ns=10**11,
        lookups_before=20,
        lookups_after=20,
        before=0.8,
        after=0.48,
        rate=0.75,
        new=0.7,
        shared_before=5,
        part_at=0,
        parted_before=0.1,
        parting=0.5,
        deviations=4.0,
        request="r20",
    )
    return msgspec.structs.replace(found, **changes)


SLOTS = RunOptions().offload_config().host_blocks
ERROR = 0.02


def tried(larger: float, refused: float | None = None) -> RemedyFigures:
    """Return figures of a log for which doubling the pool gains `larger`, and refusing some requests' stores
    gains `refused`."""
    flood = FloodFigures(
        who="named a..",
        requests=40,
        of=900,
        names=("a1",),
        stored=800,
        read=1,
        all_stored=1000,
        all_read=300,
        gain=refused or 0.0,
        doubled=larger,
        error=ERROR,
    )
    return RemedyFigures(
        why_not=None,
        first=1,
        last=9,
        trials=(TrialFigures(2 * SLOTS, "lru", 1, larger, ERROR),),
        flood=None if refused is None else flood,
    )


UNKNOWN = WaitSplit(0, 0, 0, 30_000_000_000)
"""The ranks did not say when their copies ran."""

FLOODED = (GroupFigures(0, 400, 40, 0, 0, 0), GroupFigures(1, 600, 20, 500, 490, 90))
"""Group 1 has 60 % of the blocks. They are read a third as often as the others."""

OPEN = EndFigures(engine=LogEnd.OPEN.value, error=None, complete=True, notes=("open",), silent_ns=0)


def tail(copies: int, episodes: int = 5) -> dict[str, Any]:
    """Rank 2 of 4 has this many of 1,000 loads in its tail; another rank has two."""
    one = DirectionFigures(
        direction="load",
        latency=Spread(1000, 10_000_000, 20_000_000, 90_000_000),
        tail=copies,
        episodes=episodes,
        tail_ns=40_000_000,
        others_tail=2,
        others=3000,
    )
    return ranks(directions=(one,))


def fetched(place: str, spent_ns: int) -> dict[str, Any]:
    """Return figures of copies from a place, for as many tokens as the engine computes in a second."""
    return {
        "computing": ComputeFigures(
            requests=50, tokens=10**6, fast_ns=8 * 10**6, usual_ns=9 * 10**6, slow_ns=10**7
        ),
        "fetches": (
            FetchFigures(
                place=place,
                copies=20,
                tokens=100_000,
                took=Spread(20, 10**7, 10**7, 10**7),
                spent_ns=spent_ns,
                compute_ns=10**9,
                slower=10,
            ),
        ),
    }


def jumped(jumps: int) -> ClockFigures:
    return ClockFigures(jumps=jumps, largest=ClockJump(7, 5 * 10**9, 10**9, 4 * 10**9) if jumps else None)


def held(blocks: int) -> dict[str, Any]:
    """Requests are preempted at five steps, and hold so many of 100 blocks."""
    return {
        "config.device_blocks": 100,
        "requests.preempted": 99,
        "device": DeviceFigures(steps=5, held=blocks),
    }


EDGES = {
    "property broken": Edge({"check.broken": ("stale",), "check.event": 7}, {"check.broken": ()}),
    "log damaged": Edge({"check.damage": "here"}, {"check.damage": None}),
    "events missing": Edge(
        {"end.complete": False, "end.notes": ("gone",)}, {"end.complete": True, "end.notes": ("gone",)}
    ),
    "engine stopped": Edge(
        {"end.engine": LogEnd.STOPPED.value, "end.error": "x"}, {"end.engine": LogEnd.CLOSED.value}
    ),
    "engine killed": Edge(
        {"end": msgspec.structs.replace(OPEN, silent_ns=STILL_WRITTEN_NS)},
        {"end": msgspec.structs.replace(OPEN, silent_ns=STILL_WRITTEN_NS - 1)},
    ),
    "rank silent": Edge(ranks(missing=1), ranks(waiting=100)),
    "requests unfinished": Edge(
        {"requests.overdue": 1, "requests.open": 3, "requests.oldest": ("r7",)},
        {"requests.overdue": 0, "requests.open": 3},
    ),
    "processes killed": Edge({"restarts": restarts(1)}, {"restarts": restarts(0)}),
    "rank fails": Edge(ranks(failed=10), ranks(failed=9)),
    "rank slow": Edge(
        ranks(latency=Spread(1000, 30_000_000, 0, 0)), ranks(latency=Spread(1000, 29_999_999, 0, 0))
    ),
    "rank tail": Edge(tail(10), tail(9)),
    "pool not pinned": Edge(
        {"copies.measured": 30, "copies.bytes_per_s": 7 * 10**9 - 1},
        {"copies.measured": 30, "copies.bytes_per_s": 7 * 10**9},
    ),
    "reports rejected": Edge(
        {"rejected": (RejectedFigures(0, "late", 41),)}, {"rejected": (RejectedFigures(0, "late", 40),)}
    ),
    "clock jumped": Edge({"clock": jumped(1)}, {"clock": jumped(0)}),
    "requests aborted": Edge(
        {"requests.aborted": 400, "requests.finished": 1000},
        {"requests.aborted": 399, "requests.finished": 1000},
    ),
    "device blocks leak": Edge(held(80), held(81)),
    "cold start": Edge(
        {"cold": ("block_bytes: 4096, and now 8192",)}, {"cold": ("weights: v1, and now v2",)}
    ),
    "hits fell": Edge({"hits.fall": fall()}, {"hits.fall": fall(after=0.481)}),
    "eviction burst": Edge(
        {"stops": stops(Gone.EVICTED, 50), "evictions.burst": burst(2 * 10**11)},
        {"stops": stops(Gone.EVICTED, 49), "evictions.burst": burst(2 * 10**11)},
    ),
    "group floods": Edge(
        {"stops": stops(Gone.EVICTED, 100), "groups": FLOODED},
        {"stops": stops(Gone.EVICTED, 99), "groups": FLOODED},
    ),
    "tenant floods": Edge(
        {"stops": stops(Gone.EVICTED, 48), "remedies": tried(0.0, 0.03)},
        {"stops": stops(Gone.EVICTED, 47), "remedies": tried(0.0, 0.03)},
    ),
    "pool too small": Edge(
        {"stops": stops(Gone.EVICTED, 100), "remedies": tried(ERROR + 0.001)},
        {"stops": stops(Gone.EVICTED, 999), "remedies": tried(ERROR)},
    ),
    "reset storm": Edge(
        {"stops": stops(Gone.RESET, 200), "resets": ResetFigures(3, 9)},
        {"stops": stops(Gone.RESET, 999), "resets": ResetFigures(2, 9)},
    ),
    "stores behind": Edge({"recomputed.lookups": 50}, {"recomputed.lookups": 49}),
    "blocks skipped": Edge(
        {"skips": (SkipFigures(SkipReason.POOL_FULL.value, 112),)},
        {"skips": (SkipFigures(SkipReason.KEY_IN_FLIGHT.value, 999),)},
    ),
    "preemptions": Edge({"requests.preempted": 100}, {"requests.preempted": 99}),
    "waits": Edge(
        {
            "waits.deferred": 3,
            "waits.deferred_ns": 30_000_000_000,
            "waits.top": (WaitedFor(9, "store", 3, 30_000_000_000, 1, 10**10, UNKNOWN),),
        },
        {
            "waits.deferred": 3,
            "waits.deferred_ns": 29_999_999_999,
            "waits.top": (WaitedFor(9, "store", 3, 29_999_999_999, 1, 10**10, UNKNOWN),),
        },
    ),
    "loads slow": Edge({"waits.loading_ns": 10**11}, {"waits.loading_ns": 10**11 - 1}),
    "loads slower than computing": Edge(fetched("host", 10**9), fetched("host", 10**9 - 1)),
    "disk slower than computing": Edge(fetched("disk", 10**9), fetched("disk", 10**9 - 1)),
}


def test_every_detector_has_an_edge() -> None:
    """A new detector is tried here, and its name is its own."""
    assert [*EDGES] == [one.name for one in DETECTORS]


@pytest.mark.parametrize("name", EDGES)
def test_a_detector_speaks_at_its_limit_and_not_below(name: str) -> None:
    edge = EDGES[name]
    assert [one.name for one in troubles(replaced(quiet(), **edge.speaks))] == [name]
    assert troubles(replaced(quiet(), **edge.silent)) == ()


@pytest.mark.parametrize("name", EDGES)
def test_every_trouble_has_numbers_and_commands_that_can_be_pasted(name: str) -> None:
    """For any name of the log."""
    log = "a log; rm -rf $HOME `x` 'y'"
    [one] = troubles(replaced(quiet(), **EDGES[name].speaks, log=log))
    assert one.text
    assert one.commands
    assert 0 < one.impact <= 1
    for command in one.commands:
        words = shlex.split(command)
        assert (words[0], words[2]) == ("kvsm", log)


@pytest.mark.parametrize("name", EDGES)
def test_the_commands_of_a_trouble_exist(name: str) -> None:
    """With their options: none is refused before it has looked at the log."""
    [one] = troubles(replaced(quiet(), **EDGES[name].speaks, log=str(_small_log())))
    for command in one.commands:
        _, verb, *arguments = shlex.split(command)
        found = main.get_command(click.Context(main), verb)
        assert found is not None, verb
        found.make_context(verb, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", INCIDENTS)
def test_the_commands_of_an_incident_answer(name: str, tmp_path: Path) -> None:
    """Pasted as they stand. A broken property or a lost event is an answer too."""
    for one in reported(INCIDENTS[name](tmp_path / "log")).troubles:
        for command in one.commands:
            result = kvsm(*shlex.split(command)[1:])
            assert result.exit_code in (ExitCode.GOOD, ExitCode.BROKEN), (command, result.stderr)
            assert result.stdout


def test_the_most_urgent_comes_first_and_then_the_most_costly() -> None:
    """A dead engine before a slow rank before any cost, and the larger of two costs first."""
    many = {
        **EDGES["engine stopped"].speaks,
        **EDGES["rank fails"].speaks,
        **EDGES["pool too small"].speaks,
        "requests.preempted": 300,
    }
    found = [(one.name, one.urgency) for one in troubles(replaced(quiet(), **many))]
    assert found == [
        ("engine stopped", "DOWN"),
        ("rank fails", "FAULTY"),
        ("preemptions", "COSTLY"),
        ("pool too small", "COSTLY"),
    ]
    assert [one.name for one in sorted(Urgency)] == ["BROKEN", "DOWN", "FAULTY", "COSTLY"]


def test_one_cause_is_told_once() -> None:
    """If a burst, a KV cache group or some requests explain the evictions, the pool is not called too
    small."""
    evicted = {"stops": stops(Gone.EVICTED, 300), "remedies": tried(0.05)}
    for more, name in (
        ({"evictions.burst": burst(10**11)}, "eviction burst"),
        ({"groups": FLOODED}, "group floods"),
        ({"remedies": tried(0.05, 0.05)}, "tenant floods"),
        ({"remedies": tried(0.05, 0.04)}, "pool too small"),
        ({"evictions.burst": burst(10**11), "remedies": tried(0.05, 0.05)}, "eviction burst"),
    ):
        assert [one.name for one in troubles(replaced(quiet(), **{**evicted, **more}))] == [name]


@pytest.mark.parametrize(
    "changes",
    [
        {"ended_ns": 3 * 10**11},
        {"full_ns": 6 * 10**11, "began_ns": 8 * 10**11, "ended_ns": 9 * 10**11},
        {"last_ns": 10**11},
        {"lowest": 199},
        {"deviations": 3.9},
        {"batches": 19},
        {"unread": 1},
    ],
    ids=["long", "full late", "silent later", "as usual", "by chance", "few", "read"],
)
def test_evictions_that_are_no_burst_are_not_called_one(changes: dict[str, Any]) -> None:
    """A burst takes a short part of the time with evictions, at a rate above the usual one that is not due to
    chance."""
    evicted = {"stops": stops(Gone.EVICTED, 300), "remedies": tried(0.05)}
    for more, name in (({}, "eviction burst"), (changes, "pool too small")):
        figures = replaced(quiet(), **evicted, **{"evictions.burst": burst(10**11, **more)})
        assert [one.name for one in troubles(figures)] == [name]


@pytest.mark.parametrize(
    "changes",
    [
        {"lookups_before": 19},
        {"lookups_after": 19},
        {"parting": 0.49},
        {"deviations": 3.9},
        {"rate": 0.76},
        {"new": 0.69},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_hits_that_fall_for_another_reason_are_not_shown(changes: dict[str, Any]) -> None:
    """Other reasons are: too few lookups, chance, additional requests of another kind, evicted blocks."""
    assert troubles(replaced(quiet(), **{"hits.fall": fall(**changes)})) == ()


def test_hits_that_fall_in_a_flood_are_shown_as_the_flood() -> None:
    flood = {"stops": stops(Gone.EVICTED, 300), "remedies": tried(0.0, 0.05)}
    assert [one.name for one in troubles(replaced(quiet(), **flood, **{"hits.fall": fall()}))] == [
        "tenant floods"
    ]


@pytest.mark.parametrize("block", [0, 2])
def test_a_time_in_the_system_prompt_is_found(block: int, tmp_path: Path) -> None:
    """The report names the moment, the hit rates and the block that the trace was made with."""
    trace = stamped(chats(200, 1), 40_000, block)
    began = next(one for one in trace if one.arrival_ms >= 40_000)
    found = reported(Rig(tmp_path / "log", 1, trace, device_blocks=800).serve().close())
    [one] = found.troubles
    hit = found.hits.fall
    assert (one.name, hit is not None) == ("hits fell", True)
    assert hit is not None
    assert abs(hit.at_ns - STARTED_NS - began.arrival_ms * 10**6) < 5 * 10**9
    assert hit.before > 0.4
    assert hit.after < 0.15 + block / 10
    assert (hit.part_at, hit.parting > 0.9) == (block, True)
    assert one.text.startswith("Hits fell at +")
    assert f"at block {block} (tokens {512 * block:,} to {512 * block + 511:,})" in one.text


@pytest.mark.slow
def test_a_pool_that_is_full_late_has_no_burst(tmp_path: Path) -> None:
    """70 % of the evictions of wanted blocks are in 17 % of the log's time, but in a third of the time since
    the first eviction."""
    rig = Rig(tmp_path / "log", 4, chats(500, 4), device_blocks=500, host_blocks=1000)
    found = reported(rig.serve().close())
    assert [one.name for one in found.troubles] == ["pool too small"]


def test_a_remedy_that_cannot_be_tried_is_told_so() -> None:
    """The report says that the pool may be too small, and why this is uncertain."""
    why_not = RemedyFigures(why_not="it is of a lazy store", first=1, last=9)
    [one] = troubles(replaced(quiet(), stops=stops(Gone.EVICTED, 300), remedies=why_not))
    assert one.text.startswith("The host pool may be too small: 30 % of the lookups")
    assert "whatif cannot try a remedy on this log: it is of a lazy store" in one.evidence
    assert not any("whatif" in command for command in one.commands)


def test_requests_that_wait_for_a_silent_rank_are_no_trouble_of_their_own() -> None:
    """Other forgotten requests are still reported."""
    waiting = {"requests.overdue": 9, "requests.oldest": ("r7",), **ranks(missing=1)}
    for running, told in ((0, ["rank silent"]), (1, ["rank silent", "requests unfinished"])):
        found = troubles(replaced(quiet(), **waiting, **{"requests.overdue_running": running}))
        assert sorted(one.name for one in found) == told


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        ("rank slow", "loads slower than computing"),
        ("rank tail", "waits"),
        ("rank silent", "loads slow"),
        ("pool not pinned", "loads slower than computing"),
        ("loads slower than computing", "loads slow"),
        ("disk slower than computing", "waits"),
        ("device blocks leak", "preemptions"),
    ],
)
def test_a_symptom_is_not_shown_beside_its_cause(cause: str, symptom: str) -> None:
    figures = replaced(replaced(quiet(), **EDGES[symptom].speaks), **EDGES[cause].speaks)
    assert [one.name for one in troubles(figures)] == [cause]


def test_a_silent_rank_is_not_called_slow() -> None:
    """It has not reported the same transfers as the other ranks, so its median does not compare."""
    slow = Spread(1000, 90_000_000, 90_000_000, 90_000_000)
    for name, missing in (("rank slow", 0), ("rank silent", 1)):
        [found] = troubles(replaced(quiet(), **ranks(latency=slow, missing=missing)))
        assert found.name == name


def test_a_threshold_that_keeps_wanted_blocks_out_is_found() -> None:
    """A threshold that keeps out only blocks that no lookup wants is no trouble."""
    skips = {"skips": (SkipFigures(SkipReason.BELOW_THRESHOLD.value, 500),)}
    wanted = replaced(quiet(), **skips, stops=stops(Gone.SKIPPED, 100))
    [one] = troubles(wanted)
    assert one.name == "blocks skipped"
    assert "store_threshold is too high" in one.evidence[0]
    assert troubles(replaced(quiet(), **skips, stops=stops(Gone.SKIPPED, 49))) == ()


def test_copies_behind_one_slow_copy_are_no_tail() -> None:
    assert [one.name for one in troubles(replaced(quiet(), **tail(30, episodes=3)))] == ["rank tail"]
    assert troubles(replaced(quiet(), **tail(30, episodes=2))) == ()


@given(times=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=30))
def test_slow_copies_that_are_under_way_together_are_one_episode(times: list[tuple[int, int]]) -> None:
    """The expected number is that of the time intervals in which at least one copy is in flight."""
    rows = np.array([(0, 1, took, begun + took) for begun, took in times], dtype=np.int64).reshape(-1, 4)
    busy = {moment for begun, took in times for moment in range(2 * begun, 2 * (begun + took) + 1)}
    assert _episodes(rows) == sum(moment - 1 not in busy for moment in busy)


def test_loads_alone_that_are_slow_do_not_slow_the_rate_of_the_memory() -> None:
    """Memory that is not page-locked slows both directions."""
    ns = {0: 50_000, 1: 5_000_000}  # of a slot: stores, loads
    rows = [(0, way, slots, 1000 + slots * ns[way]) for slots in range(1, 41) for way in (0, 1)]
    config = SimpleNamespace(block_bytes=10**6, blocks_per_chunk=1)
    tables = SimpleNamespace(
        log=SimpleNamespace(config=config), within=lambda _: "1", numbers=lambda *_: np.array(rows)
    )
    measured, bytes_per_s = _rate(cast(Any, tables))
    assert (measured, bytes_per_s) == (80, 20_000_000_000)


def test_copies_that_are_slower_than_any_memory_have_another_cause() -> None:
    slow = {"copies.measured": 30, "copies.bytes_per_s": 15 * 10**8 - 1}
    assert troubles(replaced(quiet(), **slow)) == ()


def test_a_disk_is_not_judged_as_page_locked_memory() -> None:
    figures = replaced(quiet(), **EDGES["pool not pinned"].speaks)
    assert troubles(figures, "disk") == ()


def test_skips_in_a_pool_that_is_too_small_are_no_other_trouble() -> None:
    """If a larger pool gains nothing, they are reported, and the report says that a larger pool was tried."""
    full = {"stops": stops(Gone.EVICTED, 300), "skips": (SkipFigures(SkipReason.POOL_FULL.value, 500),)}
    for gain, name in ((0.05, "pool too small"), (0.01, "blocks skipped")):
        [one] = troubles(replaced(quiet(), **full, remedies=tried(gain)))
        assert one.name == name
    assert any(line.startswith("no gain beyond the error of whatif with") for line in one.evidence)


def test_a_rank_that_reports_again_is_not_silent() -> None:
    """It loses copies, but it is alive: a restart would not help."""
    late_ns = 10**9
    for last_ns, told in ((7 * 10**9 + late_ns, "went silent"), (7 * 10**9 + late_ns + 1, "loses copies")):
        figures = replaced(quiet(), **ranks(missing=2, missing_since_ns=7 * 10**9, last_ns=last_ns))
        [one] = troubles(replaced(figures, **{"copies.late_ns": late_ns}))
        assert one.text.startswith(f"Rank 2 {told}")


def test_a_limit_is_told_in_words() -> None:
    """docs/troubles.md shows it."""
    assert [str(one) for one in (Limit(), Limit(0.1, 10), Limit(3.0, 20), Limit(0.1))] == [
        "1",
        "10 %, and 10 cases",
        "3 times, and 20 cases",
        "10 %",
    ]


def test_numbers_are_told_as_people_write_them() -> None:
    assert [percent(one, 1000) for one in (620, 41, 2, 0)] == ["62 %", "4.1 %", "0.2 %", "0 %"]
    assert [number(one, "copy", "copies") for one in (1, 1200)] == ["1 copy", "1,200 copies"]
    assert percent(1, 0) == "0 %"


# Figures.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_shortest_run_is_the_shortest(counts: list[int]) -> None:
    """Against all runs, tried one by one."""
    needed = BURST_PART * sum(counts)
    runs = [
        (last - first, first, last)
        for first in range(len(counts))
        for last in range(first, len(counts))
        if sum(counts[first : last + 1]) >= needed
    ]
    found = shortest_run(counts, BURST_PART)
    if not sum(counts):
        assert found is None
    else:
        assert found is not None
        assert found[1] - found[0] == min(runs)[0]
        assert sum(counts[found[0] : found[1] + 1]) >= needed


def exact(values: list[int]) -> Spread:
    """The spread of some values, found by sorting them."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, None, None, None)
    middle, high = [ordered[(len(ordered) - 1) * part // 100] for part in (50, 99)]
    return Spread(len(ordered), middle, high, ordered[-1])


def check_figures_of(log: OpenedLog, found: Report) -> None:
    """The figures of a whole log against its rows, counted in Python."""
    lookups, blocks = list(log.lookups("admitted IS NOT NULL AND NOT resumed")), list(log.blocks())
    copies, requests = list(log.copies()), list(log.requests())
    assert (found.hits.lookups, found.hits.stopped) == (
        len(lookups),
        sum(one.missed is not None for one in lookups),
    )
    whys = Counter(one.why for one in lookups if one.why is not None)
    assert {one.why: one.lookups for one in found.stops} == whys
    told = [one for one in requests if one.on_device is not None]
    sums = [sum(getattr(one, name) for one in told) for name in ("asked", "on_device", "on_host")]
    assert [found.hits.asked, found.hits.on_device, found.hits.on_host] == (sums if told else [None] * 3)
    evicted = [one for one in blocks if one.why == Gone.EVICTED]
    ages = [one.gone_ns - one.stored_ns for one in evicted if one.gone_ns and one.stored_ns is not None]
    assert (found.evictions.evicted, found.evictions.age) == (len(evicted), exact(ages))
    assert found.evictions.wanted == sum(one.wanted is not None for one in evicted)
    assert sum(found.evictions.over_time) == found.evictions.wanted
    assert found.stored == sum(one.stored is not None for one in blocks)
    assert sum(one.stored for one in found.groups) == sum(
        one.stored is not None for one in blocks if len(one.key) >= 8
    )
    for one in found.copies.ranks:
        own = [copy for copy in copies if copy.worker == one.rank]
        took = [
            copy.reported_ns - copy.submitted_ns for copy in own if copy.reported_ns and copy.submitted_ns
        ]
        assert (one.copies, one.latency) == (len(own), exact(took))
        assert one.failed == sum(copy.good is False for copy in own)
        assert one.copies == one.reported + one.missing + one.cut_off + one.waiting
    assert found.requests.requests == len(requests)
    assert found.requests.open == sum(one.finished is None for one in requests)
    assert sum(found.requests.states.values()) == found.requests.open
    assert found.waits.deferred_ns == sum(one.deferred_ns for one in requests)
    assert sum(one.reports for one in found.rejected) == len(list(log.rejections()))


@pytest.mark.parametrize("seed", range(4))
def test_the_figures_match_the_rows(seed: int, tmp_path: Path) -> None:
    """Of random lives of the core: copies fail, get lost, requests are aborted, the cache is reset."""
    random_life(seed, 300, tmp_path / "log").close()
    with open_log(tmp_path / "log") as log:
        check_figures_of(log, make_report(log, verify=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pool_too_small", "reset_storm", "slow_store", "window_thrash"])
def test_the_figures_of_an_incident_match_its_rows(name: str, tmp_path: Path) -> None:
    with open_log(INCIDENTS[name](tmp_path / "log")) as log:
        check_figures_of(log, make_report(log, verify=False))


def test_the_figures_of_two_parts_add_up(tmp_path: Path) -> None:
    """A window cuts every sum, and cuts nothing twice."""
    log = Rig(tmp_path / "log", 3, chats(60, 3), device_blocks=200, host_blocks=90, reset_every=500)
    with open_log(log.serve().close()) as opened:
        middle = opened.last // 2
        parts = [make_report(opened, one) for one in (Window(None, middle), Window(middle + 1, None))]
        whole = make_report(opened)

    def counts(one: Report) -> Counter[str]:
        found = Counter({f"stop {stop.why}": stop.lookups for stop in one.stops})
        found.update({f"skip {skip.reason}": skip.blocks for skip in one.skips})
        found.update({f"copies {rank.rank}": rank.copies for rank in one.copies.ranks})
        found.update(
            {
                "lookups": one.hits.lookups,
                "asked": one.hits.asked or 0,
                "evicted": one.evictions.evicted,
                "stored": one.stored,
                "requests": one.requests.requests,
                "resets": one.resets.resets,
                "samples": one.pool.samples,
            }
        )
        return found

    assert counts(parts[0]) + counts(parts[1]) == counts(whole)
    assert min(counts(whole).values()) > 0
    assert [one.whole for one in (*parts, whole)] == [False, False, True]


def test_the_hit_shares_match_the_engine(tmp_path: Path) -> None:
    """`kvsm run` counts tokens on its own. A request that computes its last block in part asks for no whole
    block there, so the engine computes a few tokens more."""
    options = RunOptions(requests=60, block_bytes=64, copies="simulated", log=str(tmp_path / "log"))
    result = run_workload(options)
    hits = reported(tmp_path / "log").hits
    assert result.preemptions == result.failed_loads == 0
    assert None not in (hits.on_device, hits.on_host)
    assert hits.on_device * hits.block_tokens == result.device_hit_tokens
    assert hits.on_host * hits.block_tokens == result.host_hit_tokens


def test_the_end_is_told_as_verify_tells_it(tmp_path: Path) -> None:
    """From the tables alone: the same requests, copies, waits and plans."""
    for life in (full_life, story_life):
        log = tmp_path / life.__name__
        life(log)
        _check_end(log)
    for seed in range(4):
        log = tmp_path / f"random-{seed}"
        random_life(seed, 200, log).kill()
        _check_end(log)


def _check_end(log: Path) -> None:
    unfinished = verify_log(log).unfinished
    assert unfinished is not None
    with open_log(log) as opened:
        told = left_open(opened)
    for name in ("requests", "copies", "plans"):
        assert sorted(getattr(told, name), key=repr) == sorted(getattr(unfinished, name), key=repr), name
    assert {one.request for one in told.waits} == {one.request for one in unfinished.waits if one.request}
    assert [name for name, _ in end_rows(told) if name == "engine"] == ["engine"]


# The command.


def test_report_prints_figures_and_then_what_stands_out(tmp_path: Path) -> None:
    log = engine_stopped(tmp_path / "log")
    result = kvsm("report", log)
    assert result.exit_code == 0
    told, troubled = result.stdout.split("what stands out:\n")
    for word in ("lookups", "device", "host", "missed", "stopped", "copies", "p99", "waits", "pool"):
        assert word in told
    assert troubled.startswith("1. The engine ended with an error: RuntimeError: CUDA out of memory")
    assert f"   $ kvsm verify {log}" in troubled


def test_report_says_that_nothing_stands_out() -> None:
    result = kvsm("report", _small_log())
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("\n\nnothing stands out\n")


def test_report_exits_with_1_for_a_broken_property(tmp_path: Path) -> None:
    log = property_broken(tmp_path / "log")
    result = kvsm("report", log)
    assert result.exit_code == 1
    assert "1. Event 428 breaks a property: no stale data (S14)" in result.stdout


def test_a_property_that_the_fold_notices_is_found_without_verification(tmp_path: Path) -> None:
    """The log is too large to be verified by default."""
    log = property_broken(tmp_path / "log")
    found = json.loads(kvsm("report", log, "--no-verify", "--json").stdout)
    assert found["check"]["verified"] is False
    assert [one["name"] for one in found["troubles"]] == ["property broken"]
    assert found["check"]["event"] == 428


def test_report_of_a_part_of_a_log(tmp_path: Path) -> None:
    """The part is given by time. The end of the log is not in it, so the report does not mention the end."""
    log = engine_stopped(tmp_path / "log")
    whole, part = [
        json.loads(kvsm("report", log, *arguments, "--json").stdout)
        for arguments in ((), ("--since", "+10s", "--until", "+20s"))
    ]
    assert part["whole"] is False
    assert whole["hits"]["lookups"] > part["hits"]["lookups"] > 0
    assert (part["end"]["engine"], part["troubles"]) == ("not reached", [])
    assert "at the end" not in kvsm("report", log, "--until", "+20s").stdout


def test_report_reads_the_newest_log_of_a_directory(tmp_path: Path) -> None:
    shutil.copytree(_small_log(), tmp_path / "logs" / "one")
    result = kvsm("report", tmp_path / "logs")
    assert result.exit_code == 0
    assert "the only log in" in result.stderr


@pytest.mark.parametrize("make", ["missing", "empty", "foreign"])
def test_what_is_no_log_is_one_clear_line(make: str, tmp_path: Path) -> None:
    """And nothing is written."""
    log = tmp_path / "log"
    if make != "missing":
        log.mkdir()
    if make == "foreign":
        (log / "00000000000000000001.kvsm").write_bytes(b"something else" * 100)
    before = sorted(tmp_path.rglob("*"))
    result = kvsm("report", log)
    assert result.exit_code in (1, 2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_log_is_told_up_to_the_damage(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.copytree(_small_log(), log)
    [first, *_] = names(log)
    path = log / f"{first:020}.kvsm"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = kvsm("report", log)
    assert result.exit_code == 1
    assert "what stands out:\n1. The log is damaged, and is read up to event" in result.stdout


def test_a_growing_log_is_reported(tmp_path: Path) -> None:
    """While the engine writes it."""
    rig = Rig(tmp_path / "log", 1, chats(60, 1)).serve(seconds=20)
    with open_log(rig.directory) as log:
        found = make_report(log, now_ns=log.ended_ns)
    rig.close()
    assert found.troubles == ()
    assert found.hits.lookups > 0


def test_names_of_a_log_do_nothing_on_a_terminal(tmp_path: Path) -> None:
    """Escapes in the name of a forgotten request are shown, and its command is one line."""
    life = Life(tmp_path / "log", workers=1)
    hostile = "\x1b[31mr1\n2. nothing"
    life.core.arrive(hostile)
    life.stored("r2", [key(1)], [0])
    for _ in range(3):
        life.step(0, 0)
    life.core.finish("r2")
    life.close()
    with open_log(tmp_path / "log") as log:
        found = make_report(log)
    requests = msgspec.structs.replace(found.requests, overdue=1, oldest=(hostile,))
    [one] = troubles(replaced(found, requests=requests))
    assert shlex.split(one.commands[0])[-1] == hostile
    result = kvsm("report", tmp_path / "log")
    assert "\x1b" not in result.stdout
    assert r"\x1b[31mr1\n2. nothing" in result.stdout


def test_an_older_log_is_reported_without_what_it_lacks(tmp_path: Path) -> None:
    """The caller passes no counts of asked blocks; logs from before these counts have none either."""
    story_life(tmp_path / "log")
    result = kvsm("report", tmp_path / "log")
    assert "the log does not record how many blocks they asked for" in result.stdout


def test_check_figures_tell_what_was_not_checked() -> None:
    """The report never says "hold" for properties that were not checked."""
    assert "(verified)" in kvsm("report", _small_log()).stdout
    result = kvsm("report", _small_log(), "--no-verify")
    assert "hold" not in result.stdout.split("properties")[1].split("\n")[0]
    assert (
        CheckFigures(verified=False, event=None, broken=(), damage=None)
        == reported(_small_log(), verify=False).check
    )


# A large log.


def test_the_figures_of_a_large_log_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second report makes no queries and is equal. The figures of a part of the log are not cached."""
    monkeypatch.setattr(index, "SMALL_LOG", 0)
    log = tmp_path / "log"
    shutil.copytree(_small_log(), log)
    first = reported(log)
    part = Window(None, first.last // 2)
    of_part = reported(log, part)
    monkeypatch.setattr(cache_measures, "hit_figures", lambda _: pytest.fail("it looks again"))
    monkeypatch.setattr(report, "verify_log", lambda *_, **__: pytest.fail("it verifies again"))
    assert reported(log) == first
    monkeypatch.undo()
    assert reported(log, part) == of_part != first


def test_a_log_that_has_grown_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered holds up to one event."""
    monkeypatch.setattr(index, "SMALL_LOG", 0)
    rig = Rig(tmp_path / "log", 1, chats(60, 1)).serve(seconds=10)
    before = reported(rig.directory)
    rig.serve(seconds=20).close()
    after = reported(rig.directory)
    assert after.last > before.last
    assert after.hits.lookups > before.hits.lookups
    assert (before.check.verified, after.check.verified) == (True, True)
    assert after.end.engine == LogEnd.CLOSED.value


def test_what_is_remembered_and_cannot_be_read_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another kvsm may have written it."""
    monkeypatch.setattr(index, "SMALL_LOG", 0)
    log = tmp_path / "log"
    shutil.copytree(_small_log(), log)
    first = reported(log)
    with closing(sqlite3.connect(log / index.INDEX_NAME)) as writer:
        writer.execute("UPDATE _memos SET value = x'93'")
        writer.commit()
    assert reported(log) == first


# Hostile logs.


def check_changed(logs: list[PlainLog], seed: int, log: Path) -> None:
    """A log with changed records, and right checksums, is reported or refused in words."""
    rng = random.Random(f"report {seed}")
    write_plain(log, changed(rng.choice(logs), rng))
    for form in ((), ("--json", "--no-verify")):
        with bounded(f"seed {seed}"):
            ended_well(kvsm("report", log, *form), f"seed {seed}")
    shutil.rmtree(log)


@pytest.fixture(scope="module")
def plain_logs(tmp_path_factory: pytest.TempPathFactory) -> list[PlainLog]:
    return lives(tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_log_is_told_in_words(plain_logs: list[PlainLog], seed: int, tmp_path: Path) -> None:
    check_changed(plain_logs, seed, tmp_path / "log")


@pytest.mark.slow
def test_many_changed_logs_are_told_in_words(plain_logs: list[PlainLog], tmp_path: Path) -> None:
    """No traceback, and no figure that divides by nothing."""
    for seed in seeds_of_today(150):
        check_changed(plain_logs, seed, tmp_path / "log")
