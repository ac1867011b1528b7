"""Write a window as a trace in Perfetto's own format, for ui.perfetto.dev and its trace processor.

A trace is a `Trace` message of `TracePacket`s. Each track is described once (`TrackDescriptor`). Then each
`TrackEvent` begins or ends a slice, marks an instant, or sets a counter. An eviction and the miss that it
caused share a flow. https://perfetto.dev/docs/reference/synthetic-track-event describes such traces. The
constants below are field numbers in Perfetto's protos/perfetto/trace. A test reads the trace with the classes
that Perfetto generates from these files.

Times are Unix times in nanoseconds that never decrease: if a clock was set back, a slice could end before it
begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, count
from typing import Any

from kvsm.explain.story.render import render_requests
from kvsm.explain.timeline.columns import Columns, WindowTables
from kvsm.explain.timeline.hits import HIT_LOOKUPS, hit_track
from kvsm.explain.timeline.page_words import ACTIVITY, why_gone
from kvsm.explain.timeline.stream import PARTS, EventStream
from kvsm.states import RequestState

# Field numbers of messages, and values of enums.
_TRACE_PACKET = 1
_CLOCK_SNAPSHOT, _TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _TRACK_DESCRIPTOR = 6, 8, 10, 11, 60
_CLOCKS, _CLOCK_ID, _CLOCK_TIME = 1, 1, 2
_UUID, _NAME, _PARENT, _COUNTER, _CHILD_ORDER, _RANK = 1, 2, 5, 8, 11, 12
_ANNOTATION, _TYPE, _TRACK, _EVENT_NAME, _VALUE, _FLOWS, _LAST_FLOWS = 4, 9, 11, 23, 30, 47, 48
_ANNOTATION_NAME, _ANNOTATION_INT, _ANNOTATION_TEXT = 10, 4, 6

_BEGIN, _END, _INSTANT, _SAMPLE = 1, 2, 3, 4
_REALTIME, _BOOTTIME = 1, 6
_EXPLICIT = 3
_ONE_WRITER = 1
"""`trusted_packet_sequence_id` of all packets."""

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_STILL_CLOCK_NS = 1000
"""Time between two events in the trace if the log's clock stood still (ns)."""


def varint(value: int) -> bytes:
    """Encode a number below 2**64 in groups of seven bits, the lowest first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def field(number: int, value: int | str | bytes) -> bytes:
    """Encode one field of a message: an int as a varint, text and bytes with their length in front."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def fixed64(number: int, value: int) -> bytes:
    """Encode a field of eight bytes."""
    return varint(number << 3 | _FIXED64) + value.to_bytes(8, "little")


def annotation(name: str, value: int | str) -> bytes:
    """Encode a named value that the viewer shows with a slice."""
    kind = _ANNOTATION_INT if isinstance(value, int) else _ANNOTATION_TEXT
    return field(_ANNOTATION, field(_ANNOTATION_NAME, name) + field(kind, value))


def perfetto_trace(stream: EventStream, tables: WindowTables) -> Iterator[bytes]:
    """Yield the trace in pieces; each is one encoded packet."""
    for packet in _Tracer(stream, tables).packets():
        yield field(_TRACE_PACKET, packet + field(_SEQUENCE, _ONE_WRITER))


def event_times(stream: EventStream) -> list[int]:
    """The time of each event in the trace (Unix time in ns), never before the previous event or 1970.

    If the clock of the log stood still, events are one microsecond apart.
    """
    times = [max(time, 0) for time in accumulate(stream.at, max)]
    if times[0] == times[-1]:
        times = [times[0] + place * _STILL_CLOCK_NS for place in range(len(times))]
    return times


class _Tracer:
    def __init__(self, stream: EventStream, tables: WindowTables) -> None:
        self._stream, self._tables = stream, tables
        self._numbers, self._times = stream.number, event_times(stream)
        self._held = set(stream.number)
        self._last = stream.number[-1]
        self._uuids = count(1)
        self._columns = tables.columns
        transfers = self._columns["transfers"]
        self._transfer_row = {id: row for row, id in enumerate(transfers["transfer"])}

    def packets(self) -> Iterator[bytes]:
        """Yield all packets: the clocks, then each track with its events."""
        began = self._times[0]
        clocks = [field(_CLOCK_ID, id) + field(_CLOCK_TIME, began) for id in (_REALTIME, _BOOTTIME)]
        yield field(_CLOCK_SNAPSHOT, b"".join(field(_CLOCKS, clock) for clock in clocks))
        yield from self._hits()
        yield from self._pool()
        yield from self._resets()
        yield from self._restarts()
        yield from self._evictions_and_misses()
        yield from self._copies()
        yield from self._requests()

    # Tracks and their events.

    def _hits(self) -> Iterator[bytes]:
        uuid, described = self._track(
            f"hits (% of the last {HIT_LOOKUPS} requests)", None, field(_COUNTER, b"")
        )
        yield described
        hits = hit_track(self._columns["lookups"])
        for event, percent in zip(hits.event, hits.percent):
            yield self._event(uuid, _SAMPLE, min(event, self._last), field(_VALUE, percent))

    def _pool(self) -> Iterator[bytes]:
        group, described = self._track("host pool (slots)")
        yield described
        pool = self._stream.pool
        for part, values in zip(PARTS, pool.parts):
            uuid, described = self._track(part, group, field(_COUNTER, b""))
            yield described
            for place, value in zip(pool.event, values):
                yield self._event(uuid, _SAMPLE, self._stream.number[place], field(_VALUE, value))

    def _resets(self) -> Iterator[bytes]:
        resets = self._columns["resets"]
        uuid, described = self._track("resets")
        yield described
        for event, epoch, keys in zip(resets["event"], resets["epoch"], resets["keys"]):
            facts = annotation("event", event) + annotation("keys dropped", keys)
            yield self._event(uuid, _INSTANT, event, field(_EVENT_NAME, f"reset, epoch {epoch}") + facts)

    def _restarts(self) -> Iterator[bytes]:
        restarts = self._columns["restarts"]
        uuid, described = self._track("restarts")
        yield described
        for place, event in enumerate(restarts["event"]):
            facts = annotation("event", event) + annotation("blocks kept", restarts["kept"][place])
            facts += annotation("before it", restarts["last_end"][place] or "the log was closed")
            name = field(_EVENT_NAME, f"restart, life {restarts['life'][place]}")
            yield self._event(uuid, _INSTANT, event, name + facts)

    def _evictions_and_misses(self) -> Iterator[bytes]:
        """Yield an instant for each eviction and miss, and a flow from an eviction to each miss it caused."""
        blocks, lookups = self._columns["blocks"], self._columns["lookups"]
        wanted_at: dict[int, set[int]] = defaultdict(set)
        evicted: dict[int, int] = defaultdict(int)
        for gone, why, wanted in zip(blocks["gone"], blocks["why"], blocks["wanted"]):
            if why == "evicted" and self._holds(gone):
                evicted[gone] += 1
                if self._holds(wanted):
                    wanted_at[gone].add(wanted)
        flows = {pair: flow for flow, pair in enumerate(
            sorted((gone, wanted) for gone, lookups_at in wanted_at.items() for wanted in lookups_at), 1
        )}  # fmt: skip
        uuid, described = self._track("evictions")
        yield described
        for gone, number in sorted(evicted.items()):
            facts = field(_EVENT_NAME, f"{number:,} evicted") + annotation("event", gone)
            begun = b"".join(fixed64(_FLOWS, flows[gone, wanted]) for wanted in sorted(wanted_at[gone]))
            yield self._event(uuid, _INSTANT, gone, facts + begun)
        ended: dict[int, list[int]] = defaultdict(list)
        for (_, wanted), flow in flows.items():
            ended[wanted].append(flow)
        uuid, described = self._track("missed keys")
        yield described
        for row, event in enumerate(lookups["event"]):
            if lookups["missed"][row] is not None:
                arrows = b"".join(fixed64(_LAST_FLOWS, flow) for flow in ended[event])
                yield self._event(uuid, _INSTANT, event, self._miss(lookups, row) + arrows)

    def _miss(self, lookups: Columns, row: int) -> bytes:
        why, name = lookups["why"][row], self._tables.names[lookups["request"][row]]
        facts = field(_EVENT_NAME, f"{name} misses") + annotation("event", lookups["event"][row])
        facts += annotation("key", lookups["missed"][row])
        if why is None:
            return facts
        transfer = lookups["cause_transfer"][row]
        named = None if transfer is None else self._transfer(transfer, lookups["cause_requests"][row])
        return facts + annotation("why", why_gone(why, lookups["cause"][row], named))

    def _copies(self) -> Iterator[bytes]:
        copies = self._columns["copies"]
        tracks: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, (worker, direction) in enumerate(zip(copies["worker"], copies["direction"])):
            if copies["submitted"][row] is not None:
                tracks[worker, direction][copies["lane"][row]].append(row)
        for (worker, direction), lanes in sorted(tracks.items()):
            group, described = self._track(f"rank {worker} {direction}s")
            yield described
            for lane, rows in sorted(lanes.items()):
                uuid, described = self._track(f"lane {lane + 1}", group)
                yield described
                for row in sorted(rows, key=lambda row: copies["submitted"][row]):
                    yield from self._slice(
                        uuid, copies["submitted"][row], copies["until"][row], self._copy(copies, row)
                    )

    def _copy(self, copies: Columns, row: int) -> bytes:
        transfer, good, error = copies["transfer"][row], copies["good"][row], copies["error"][row]
        failed = " failed" if good is False else ""
        facts = field(_EVENT_NAME, f"{copies['direction'][row]} {transfer}{failed}")
        facts += annotation("what", self._transfer(transfer, None))
        return facts + (annotation("error", error) if error else b"")

    def _requests(self) -> Iterator[bytes]:
        requests, stays = self._columns["requests"], self._columns["request_states"]
        of_life: dict[int, list[int]] = defaultdict(list)
        for row, life in enumerate(stays["life"]):
            if life is not None and ACTIVITY[RequestState[stays["state"][row]]] is not None:
                of_life[life].append(row)
        lanes: dict[int, list[int]] = defaultdict(list)
        for life in sorted(range(len(requests["lane"])), key=lambda life: requests["arrived"][life]):
            lanes[requests["lane"][life]].append(life)
        group, described = self._track("requests")
        yield described
        for lane, lives in sorted(lanes.items()):
            uuid, described = self._track(f"lane {lane + 1}", group)
            yield described
            for life in lives:
                yield from self._life(uuid, requests, stays, life, of_life[life])

    def _life(
        self, uuid: int, requests: Columns, stays: Columns, life: int, rows: list[int]
    ) -> Iterator[bytes]:
        """Yield a slice for the request, and inside it one for each time in a state."""
        ends = [requests["finished"][life], *(stays["ended"][row] for row in rows)]
        ended = None if None in ends else max(ends)
        facts = field(_EVENT_NAME, self._tables.names[requests["request"][life]])
        facts += annotation("event", requests["arrived"][life])
        yield self._event(uuid, _BEGIN, requests["arrived"][life], facts)
        for row in sorted(rows, key=lambda row: stays["began"][row]):
            activity, transfer = ACTIVITY[RequestState[stays["state"][row]]], stays["transfer"][row]
            assert activity is not None
            said = field(_EVENT_NAME, activity)
            if transfer is not None:
                said += annotation("waits for", self._transfer(transfer, None))
            yield from self._slice(uuid, stays["began"][row], stays["ended"][row], said)
        if ended is not None and ended <= self._last:
            yield self._event(uuid, _END, ended)

    # Packets.

    def _track(self, name: str, parent: int | None = None, more: bytes = b"") -> tuple[int, bytes]:
        """Return a new track's uuid, and the packet that describes it. The viewer keeps this order."""
        uuid = next(self._uuids)
        track = field(_UUID, uuid) + field(_NAME, name) + field(_CHILD_ORDER, _EXPLICIT) + field(_RANK, uuid)
        track += more if parent is None else field(_PARENT, parent) + more
        return uuid, field(_TRACK_DESCRIPTOR, track)

    def _slice(self, uuid: int, began: int, ended: int | None, facts: bytes) -> Iterator[bytes]:
        """Yield a slice. It gets no end if it ends after the window, or not at all."""
        yield self._event(uuid, _BEGIN, began, facts)
        if ended is not None and ended <= self._last:
            yield self._event(uuid, _END, ended)

    def _event(self, uuid: int, kind: int, event: int, facts: bytes = b"") -> bytes:
        """Return a packet with a track event. If the window lacks `event`, it gets the next event's time."""
        track_event = field(_TYPE, kind) + field(_TRACK, uuid) + facts
        time = self._times[bisect_left(self._numbers, event)]
        return field(_TIMESTAMP, time) + field(_TRACK_EVENT, track_event)

    def _holds(self, event: Any) -> bool:
        return event in self._held

    def _transfer(self, id: int, requests: list[int] | None) -> str:
        """`store 12 of requests r1, r2`."""
        row, names = self._transfer_row.get(id), self._tables.names
        if row is None:
            owners = "" if requests is None else f" of {render_requests([names[name] for name in requests])}"
            return f"transfer {id}{owners}"
        transfers: dict[str, list[Any]] = self._columns["transfers"]
        owners = render_requests([names[name] for name in transfers["requests"][row]])
        return f"{transfers['direction'][row]} {id} of {owners}"
