"""The times of an opened log increase with its events even if the engine's clock was set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from incidents import Rig, chats
from msgspec.structs import replace

import kvsm
from kvsm.cli import main
from kvsm.core.log import LogReader
from kvsm.explain.story.window import Window, find_window, point_of
from kvsm.explain.tables import table_index
from kvsm.explain.tables.named_queries import NAMED_QUERIES
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import TABLES

JUMPS = {
    "back": [(20, -3432.0)],
    "forward": [(20, 300.0)],
    "both": [(15, -40.0), (25, 3600.0), (30, -2.0)],
}
"""When the clock is set, and by how much (s)."""

APART_NS = 1_500_000_000
"""At a jump, the time between two events is unknown: it is taken to be 0, or that of the steps between."""


def log_of(directory: Path, jumps: Sequence[tuple[float, float]], **more: Any) -> Path:
    options = {"device_blocks": 200, "host_blocks": 90, "reset_every": 900, "abort_rate": 0.1, **more}
    return (
        Rig(
            directory, 5, chats(120, 5), jumps=[(1000 * at_s, 1000 * by_s) for at_s, by_s in jumps], **options
        )
        .serve()
        .close()
    )


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of an engine whose clock is never set."""
    return log_of(tmp_path_factory.mktemp("steady") / "log", ())


@pytest.fixture(scope="module", params=JUMPS)
def jumped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The log of the same run, with jumps, and their number."""
    jumps = JUMPS[request.param]
    return log_of(tmp_path_factory.mktemp("jumped") / "log", jumps), len(jumps)


def test_each_row_is_that_of_a_clock_that_was_never_set(steady: Path, jumped: tuple[Path, int]) -> None:
    """All tables are equal except for times, and these differ by less than the real time that passed during a
    jump."""
    with kvsm.open(steady) as expected, kvsm.open(jumped[0]) as found:
        assert (expected.clock_jumps, len(found.clock_jumps)) == ((), jumped[1])
        for table, kind in TABLES.items():
            rows = [list(log.sql(f"SELECT * FROM {table} ORDER BY 1, 2")) for log in (expected, found)]
            assert len(rows[0]) == len(rows[1]) > 0 or table in ("restarts", "rejections")
            for one, other in zip(*rows, strict=True):
                for name, value, steady_value in zip(kind.__struct_fields__, one, other, strict=True):
                    if name.endswith("_ns") and value is not None:
                        assert abs(steady_value - value) < APART_NS, (table, name, one)
                    else:
                        assert steady_value == value


def test_what_the_clock_said_remains(jumped: tuple[Path, int]) -> None:
    """The logged times are in the tables of `main`, which a query can read."""
    with kvsm.open(jumped[0]) as log:
        said = [ns for (ns,) in log.sql("SELECT wall_ns FROM main.events ORDER BY event")]
        assert said == [event.wall_ns for event in log.events()]
        steady = [ns for (ns,) in log.sql("SELECT wall_ns FROM events ORDER BY event")]
        assert steady == sorted(steady)
        assert [ns - log.shift_ns(event) for event, ns in enumerate(steady, 1)] == said


def test_an_index_gives_the_same_times(jumped: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The jumps are cached in it."""
    with kvsm.open(jumped[0]) as log:
        expected = log.clock_jumps, list(log.copies())
    monkeypatch.setattr(table_index, "SMALL_LOG", 0)
    for _ in range(2):
        with kvsm.open(jumped[0]) as log:
            assert (log.clock_jumps, list(log.copies())) == expected
    (jumped[0] / table_index.INDEX_NAME).unlink()


def test_a_window_is_given_in_the_time_that_is_shown(steady: Path, jumped: tuple[Path, int]) -> None:
    with kvsm.open(steady) as expected, kvsm.open(jumped[0]) as found:
        for since, until in (("+5s", "+10s"), ("+40s", "+60s"), ("+1s", "+70s")):
            windows = [_window(log, since, until) for log in (expected, found)]
            for one, other in zip(*windows, strict=True):
                assert one is not None
                assert other is not None
                assert abs(_at(expected, one) - _at(found, other)) < APART_NS


def _window(log: OpenedLog, since: str, until: str) -> Window:
    return log.window(point_of(since), point_of(until))


def _at(log: OpenedLog, event: int) -> int:
    [ns] = log.sql(f"SELECT wall_ns FROM events WHERE event = {event}").fetchone()
    return int(ns)


@pytest.mark.parametrize("query", NAMED_QUERIES, ids=lambda one: one.name)
def test_no_query_answers_with_a_negative_duration(
    query: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.getbasetemp() / "set-back" / "log"
    if not log.exists():
        log.parent.mkdir()
        log_of(log, [(20, -3432.0)])
    with kvsm.open(log) as opened:
        rows = opened.sql(query.filled({}))
        names = [column[0] for column in rows.description]
        for row in rows:
            assert all(value is None or value >= 0 for name, value in zip(names, row) if name.endswith("_ms"))


def test_no_jump_is_seen_where_the_engine_is_idle(tmp_path: Path) -> None:
    """The engine is idle for a minute between two conversations; some forgotten requests never ended."""
    trace = [*chats(20, 1), *[replace(one, arrival_ms=one.arrival_ms + 200_000) for one in chats(20, 2)]]
    rig = Rig(tmp_path / "log", 1, trace, device_blocks=400, abort_rate=0.3)
    finished = rig.connector.request_finished

    def forgets_aborts(request: Any, blocks: Any, *, aborted: bool = False) -> Any:
        return (False, None) if aborted else finished(request, blocks, aborted=aborted)

    rig.connector.request_finished = forgets_aborts  # type: ignore[method-assign]
    with kvsm.open(rig.serve().close()) as log:
        times = [event.wall_ns for event in log.events()]
        assert max(later - time for time, later in pairwise(times)) > 60 * 10**9
        assert log.sql("SELECT count(*) FROM requests WHERE finished IS NULL").fetchone()[0] > 0
        assert log.clock_jumps == ()


def test_a_window_of_raw_times_finds_its_event_before_the_jump(tmp_path: Path) -> None:
    """The log has many segments, and some begin at an earlier time than the previous one."""
    log = log_of(tmp_path / "log", [(20, -3432.0)], writer={"segment_bytes": 1 << 14})
    reader = LogReader(log)
    events = [event for segment in reader.segments() for event in segment.events()]
    first = next(event for event in events if event.wall_ns >= events[0].wall_ns + 10**10)
    assert find_window(reader, point_of("+10s"), None) == Window(first.seq, None)


def test_a_report_has_no_time_before_the_log(tmp_path: Path) -> None:
    """The same holds for all other results from the tables."""
    log = log_of(tmp_path / "log", [(20, -3432.0)])
    for verb in ("report", "why"):
        words = [verb, str(log), *(["r80"] if verb == "why" else ["--no-verify"])]
        found = CliRunner().invoke(main, words)
        assert found.exit_code in (0, 1, 2), found.output
        assert "+-" not in found.stdout
        assert " -" not in found.stdout.replace(" - ", "").replace(" --", "")


def test_a_time_after_the_start_counts_from_the_start_of_the_log_in_a_part_too(
    tmp_path: Path,
) -> None:
    directory = log_of(tmp_path / "log", [(30, -2.0)])
    with kvsm.open(directory) as whole:
        first = whole.clock_jumps[0].event // 8
    since = point_of("+10s")
    with kvsm.open(directory, window=Window(first, None)) as part:
        assert part.clock_jumps
        found = part.window(since, None).first
        assert found is not None
        [(wall_ns,)] = part.sql("SELECT wall_ns FROM events WHERE event = ?", (found,))
        assert wall_ns - part.log_began_ns >= since.value
        assert found == max(first, find_window(LogReader(directory), since, None).first or 0)
