"""The trace for Perfetto, read back with the classes that Perfetto generates from its own protos."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_timeline import ERROR, MadeTimeline
from replay_life import random_life

import kvsm
from kvsm.explain.story import Trust
from kvsm.explain.timeline.columns import read_tables
from kvsm.explain.timeline.hits import HIT_LOOKUPS
from kvsm.explain.timeline.perfetto import event_times, field, fixed64, perfetto_trace, varint
from kvsm.explain.timeline.stream import PARTS, EventStream, read_stream

proto = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="pip install 'kvsm[test]'"
)


def read(made: MadeTimeline) -> Any:
    """The trace, as Perfetto's classes read it."""
    return proto.Trace.FromString(b"".join(perfetto_trace(made.stream, made.tables)))


@pytest.fixture(scope="module")
def made() -> MadeTimeline:
    return MadeTimeline(260)


@pytest.fixture(scope="module")
def trace(made: MadeTimeline) -> Any:
    return read(made)


def events_by_track(trace: Any) -> dict[str, list[Any]]:
    """Name of each track with its parents, such as `requests/lane 1` -> its (time, event) pairs."""
    tracks = {
        one.track_descriptor.uuid: one.track_descriptor
        for one in trace.packet
        if one.HasField("track_descriptor")
    }
    found: dict[str, list[Any]] = defaultdict(list)
    for packet in trace.packet:
        if packet.HasField("track_event"):
            track = tracks[packet.track_event.track_uuid]
            above = f"{tracks[track.parent_uuid].name}/" if track.parent_uuid else ""
            found[above + track.name].append((packet.timestamp, packet.track_event))
    return found


@given(st.integers(0, (1 << 64) - 1))
def test_a_number_is_written_as_protobuf_writes_it(number: int) -> None:
    packet = proto.TracePacket(timestamp=number)
    assert field(8, number) == packet.SerializeToString()
    assert proto.TrackEvent.FromString(fixed64(47, number)).flow_ids == [number]
    assert varint(number)[-1] < 0x80


def test_every_field_is_one_that_perfetto_knows(trace: Any) -> None:
    """A wrong number of a field would be kept as unknown, and the trace would show nothing."""
    unknown = pytest.importorskip("google.protobuf.unknown_fields")

    def check(message: Any) -> None:
        assert len(unknown.UnknownFieldSet(message)) == 0, message
        for _, value in message.ListFields():
            for one in value if hasattr(value, "__len__") and not isinstance(value, str | bytes) else [value]:
                if hasattr(one, "ListFields"):
                    check(one)

    check(trace)
    assert len(trace.packet) > 1000
    assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {1}


def test_slices_of_a_lane_nest(made: MadeTimeline, trace: Any) -> None:
    """A slice ends after it begins, and inside the one around it. What never ended stays open."""
    stuck = sum(one.finished is None for one in made.rows.rows["requests"])
    left_open = Counter[str]()
    for name, events in events_by_track(trace).items():
        depth, latest = 0, 0
        for time, event in events:
            assert time >= latest, name
            latest = time
            depth += {1: 1, 2: -1}.get(event.type, 0)
            assert 0 <= depth <= (2 if name.startswith("requests/") else 1), name
        left_open[name.split("/")[0]] += depth
    assert left_open["requests"] == 2 * stuck > 0
    assert left_open["rank 1 stores"] == stuck
    assert left_open["rank 0 stores"] == 0


def test_every_request_and_copy_is_a_slice(made: MadeTimeline, trace: Any) -> None:
    begun = Counter[str]()
    for name, events in events_by_track(trace).items():
        begun[name.split("/")[0]] += sum(
            event.type == proto.TrackEvent.TYPE_SLICE_BEGIN for _, event in events
        )
    rows = made.rows.rows
    assert begun["requests"] == len(rows["requests"]) + len(rows["request_states"])
    assert sum(begun[f"rank {worker} {way}s"] for worker in (0, 1) for way in ("store", "load")) == len(
        rows["copies"]
    )


def test_a_failed_copy_has_its_error(made: MadeTimeline, trace: Any) -> None:
    failed = [
        {one.name: one.string_value for one in event.debug_annotations}
        for name, events in events_by_track(trace).items()
        for _, event in events
        if name.startswith("rank 1 stores") and event.name.endswith("failed")
    ]
    assert len(failed) == sum(one.good is False for one in made.rows.rows["copies"]) > 20
    assert all(facts["error"].startswith(ERROR) for facts in failed)


def test_a_flow_leads_from_an_eviction_to_the_miss(made: MadeTimeline, trace: Any) -> None:
    """The miss gives the reason, in the words of the page."""
    events = events_by_track(trace)
    begins = {flow: time for time, event in events["evictions"] for flow in event.flow_ids}
    ends = {
        flow: (time, event) for time, event in events["missed keys"] for flow in event.terminating_flow_ids
    }
    wanted = [one for one in made.rows.rows["blocks"] if one.wanted is not None]
    assert len(begins) == len(wanted) > 10
    assert {(begins[flow], ends[flow][0]) for flow in begins} == {
        (made.stream.at[one.gone - 1], made.stream.at[one.wanted - 1]) for one in wanted
    }
    for _, event in ends.values():
        said = {one.name: one.string_value for one in event.debug_annotations}["why"]
        assert said.startswith("it was evicted at event ")
        assert "to make room for store " in said


def test_the_pool_is_a_counter_for_each_part(made: MadeTimeline, trace: Any) -> None:
    events = events_by_track(trace)
    for part, column in zip(PARTS, made.stream.pool.parts, strict=True):
        assert [event.counter_value for _, event in events[f"host pool (slots)/{part}"]] == column


def test_the_hit_rate_is_a_counter(made: MadeTimeline, trace: Any) -> None:
    """It has a value at each admission, over the last 20 requests. In this log one request in ten has no hit
    on the host."""
    counted = events_by_track(trace)[f"hits (% of the last {HIT_LOOKUPS} requests)"]
    rows = made.rows.rows["lookups"]
    assert [time for time, _ in counted] == [made.stream.at[one.admitted - 1] for one in rows]
    found = [one.on_device + one.on_host for one in rows]
    expected = [
        round(100 * sum(found[max(0, n - HIT_LOOKUPS + 1) : n + 1]) / (8 * min(n + 1, HIT_LOOKUPS)))
        for n in range(len(rows))
    ]
    assert [event.counter_value for _, event in counted] == expected
    assert min(expected) < max(expected)


def test_the_clock_is_unix_time(made: MadeTimeline, trace: Any) -> None:
    clocks = {one.clock_id: one.timestamp for one in trace.packet[0].clock_snapshot.clocks}
    assert set(clocks) == {proto.BUILTIN_CLOCK_REALTIME, proto.BUILTIN_CLOCK_BOOTTIME}
    assert set(clocks.values()) == {made.stream.at[0]}


def test_a_clock_that_goes_back_or_stands_still_turns_no_slice_around() -> None:
    assert event_times(EventStream(number=[4, 5, 6], at=[10, 8, 12])) == [10, 10, 12]
    assert event_times(EventStream(number=[4, 5, 6], at=[7, 7, 7])) == [7, 1007, 2007]
    assert event_times(EventStream(number=[4, 5, 6], at=[-7, 3, 5])) == [0, 3, 5]


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_a_real_log_nest_in_every_window(seed: int, tmp_path: Path) -> None:
    """Lives that begin again, loads that end after their request, resets, and a window that cuts them."""
    random_life(seed, 400, tmp_path).close()
    with kvsm.open(tmp_path) as log:
        for first, last in ((1, log.last), (log.last // 3, 2 * log.last // 3)):
            stream = read_stream(tmp_path, Trust(), first, last)
            tables = read_tables(log, first, last)
            packets = b"".join(perfetto_trace(stream, tables))
            begun = 0
            for name, events in events_by_track(proto.Trace.FromString(packets)).items():
                depth, latest = 0, 0
                for time, event in events:
                    assert time >= latest, (name, first)
                    latest = time
                    depth += {1: 1, 2: -1}.get(event.type, 0)
                    assert 0 <= depth <= (2 if name.startswith("requests/") else 1), (name, first)
                    begun += event.type == proto.TrackEvent.TYPE_SLICE_BEGIN
            assert begun > 20


def test_names_are_printable() -> None:
    trace = read(MadeTimeline(3, ["\x1b[31mred", "a\nb", "\u202ex"]))
    names = {
        event.name
        for name, events in events_by_track(trace).items()
        for _, event in events
        if "requests" in name
    }
    assert {r"\x1b[31mred", r"a\nb", r"\u202ex"} <= names
