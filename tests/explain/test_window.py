"""`--since` and `--until`: which events of a log they leave."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_life import Life

from examples import examples
from kvsm.core.log import LogReader
from kvsm.errors import ConfigError, LogError
from kvsm.events import OffloadingEvent
from kvsm.explain.story.times import utc
from kvsm.explain.story.window import LogPoint, PointUnit, Window, find_window, point_of

S = 10**9
BEGAN = 1_700_000_000 * S


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[OffloadingEvent]]:
    """A log of several segments, whose clock advances by a second after every third event."""
    log, ticks = tmp_path_factory.mktemp("window") / "log", count()
    one = Life(log, {"segment_bytes": 600}, clock_ns=lambda: BEGAN + next(ticks) // 3 * S)
    for number in range(25):
        one.drive([("store", number, number), ("submit", number, 0), ("report", number, 0)])
        one.flush()
    one.close()
    assert len(list(log.glob("*.kvsm"))) > 3
    return log, list(one.events)


def expected(
    events: list[OffloadingEvent], since: LogPoint | None, until: LogPoint | None
) -> list[OffloadingEvent]:
    """The events that lie between two points, found by looking at each of them."""

    def measured(event: OffloadingEvent, point: LogPoint) -> int:
        after = event.wall_ns - (BEGAN if point.unit is PointUnit.AFTER_START else 0)
        return event.seq if point.unit is PointUnit.EVENT else after

    return [
        event
        for event in events
        if (since is None or measured(event, since) >= since.value)
        and (until is None or measured(event, until) <= until.value)
    ]


POINTS = st.none() | st.one_of(
    st.builds(LogPoint, st.just(PointUnit.EVENT), st.integers(1, 200)),
    st.builds(LogPoint, st.just(PointUnit.AFTER_START), st.integers(0, 60 * 2).map(lambda one: one * S // 2)),
    st.builds(LogPoint, st.just(PointUnit.UTC), st.integers(-2, 120).map(lambda one: BEGAN + one * S // 2)),
)


@settings(max_examples=examples(40))
@given(POINTS, POINTS)
def test_a_window_holds_what_lies_between_its_points(
    life: tuple[Path, list[OffloadingEvent]], since: LogPoint | None, until: LogPoint | None
) -> None:
    """Against a look at every event. A window without an event is an error that names the log's span."""
    log, events = life
    wanted = expected(events, since, until)
    if not wanted:
        with pytest.raises(LogError, match=rf"it has events 1 to {len(events)}, from {utc(BEGAN)}"):
            find_window(LogReader(log), since, until)
        return
    window = find_window(LogReader(log), since, until)
    assert [event.seq for event in events if event.seq in window] == [event.seq for event in wanted]


def test_without_points_the_window_is_the_whole_log(life: tuple[Path, list[OffloadingEvent]]) -> None:
    """And the log is not read."""
    reader = LogReader(life[0])
    assert find_window(reader, None, None) == Window(None, None)


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("1200", LogPoint(PointUnit.EVENT, 1200)),
        ("+12.5s", LogPoint(PointUnit.AFTER_START, 12_500_000_000)),
        ("+300ms", LogPoint(PointUnit.AFTER_START, 300_000_000)),
        ("+2m", LogPoint(PointUnit.AFTER_START, 120 * S)),
        ("+1h", LogPoint(PointUnit.AFTER_START, 3600 * S)),
        ("2026-11-22T11:04:29", LogPoint(PointUnit.UTC, 1_795_345_469 * S)),
        ("2026-11-22 11:04:29.25Z", LogPoint(PointUnit.UTC, 1_795_345_469_250_000_000)),
    ],
)
def test_a_point_is_read_in_three_forms(text: str, point: LogPoint) -> None:
    assert point_of(text) == point


@pytest.mark.parametrize("text", ["", "0", "-3", "yesterday", "+5", "12s", "11:04:29", "2026-13-01T00:00:00"])
def test_what_names_no_point_is_refused(text: str) -> None:
    """The message shows the text, and the forms or what is wrong with it."""
    with pytest.raises(ConfigError, match=r"names no point of a log; give an event|is no time"):
        point_of(text)
