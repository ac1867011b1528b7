"""Times for people: what is shown reads back, and stays in order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.explain.story.times import VIRTUAL_NS, after_start, duration, moment, utc
from kvsm.explain.story.window import PointUnit, point_of

CLOCK = st.integers(0, 4_000_000_000 * 10**9)
DATED = st.integers(VIRTUAL_NS, 4_000_000_000 * 10**9)
MS = 10**6


@settings(max_examples=examples(30))
@given(DATED)
def test_a_shown_wall_time_reads_back_to_its_millisecond(ns: int) -> None:
    """`--since` with a time that a line showed begins at this line, not after it."""
    point = point_of(utc(ns))
    assert point.unit is PointUnit.UTC
    assert point.value == ns // MS * MS


@settings(max_examples=examples(30))
@given(CLOCK, CLOCK)
def test_a_shown_time_after_the_start_reads_back_to_its_millisecond(one: int, other: int) -> None:
    began, now = sorted((one, other))
    point = point_of(after_start(now, began))
    assert point.unit is PointUnit.AFTER_START
    assert point.value == (now - began) // MS * MS


@settings(max_examples=examples(30))
@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-(1 << 63), (1 << 64) - 1))
def test_any_number_of_a_log_can_be_shown_as_a_time(one: int, other: int) -> None:
    """Anybody may have written a log; a record may hold any 64-bit number as its time."""
    assert utc(one).endswith("Z" if one >= VIRTUAL_NS else "s of a virtual clock")
    assert moment(one, other).endswith(after_start(one, other))
    assert after_start(one, other).endswith("s")
    assert duration(one - other)


@settings(max_examples=examples(30))
@given(st.integers(0, VIRTUAL_NS - 1), st.integers(0, VIRTUAL_NS - 1))
def test_a_time_of_a_virtual_clock_has_no_date_and_reads_back(one: int, other: int) -> None:
    """Such a clock counts from 0; a date in 1970 says nothing about the run."""
    began, now = sorted((one, other))
    assert "1970" not in utc(now)
    assert point_of(moment(now, began)).unit is PointUnit.AFTER_START


@pytest.mark.parametrize(
    ("ns", "told"),
    [
        (0, "0 ns"),
        (350, "350 ns"),
        (1_250, "1.25 us"),
        (18_200_000, "18.2 ms"),
        (99_999_999, "100.0 ms"),
        (610_000_000, "0.61 s"),
        (12_300_000_000, "12.3 s"),
        (312 * 10**9, "5 min 12 s"),
        (120 * 10**9, "2 min"),
        (3 * 3600 * 10**9 + 5 * 60 * 10**9, "3 h 5 min"),
        (50 * 3600 * 10**9, "2 d 2 h"),
        (-18_200_000, "-18.2 ms"),
    ],
)
def test_a_duration_has_two_or_three_digits(ns: int, told: str) -> None:
    assert duration(ns) == told
