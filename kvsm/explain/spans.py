"""Make spans of the requests of a log, which `kvsm spans` sends to a trace collector.

A request that has ended gets one span, with the events of its lookups (asked, hit, missed, loaded), and a
child span for each of its waits, loads and stores. All texts are the same as in `kvsm why`. Requests are read
one after another from the tables of the log, so memory does not grow with the log.

Ids are computed from the run, the request and the event, so the same log gives the same ids each time. A
collector that identifies spans by their ids keeps each only once, even after a second export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from kvsm.core.log import LogReader
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import LookupRow, RequestRow, RequestStateRow, TransferRow
from kvsm.explain.why.causes import Inquiry
from kvsm.explain.why.questions import explain_request

Value = str | int | float | bool
Attributes = Mapping[str, Value]

REQUEST, WAIT, LOAD, STORE = "kvsm.request", "kvsm.wait", "kvsm.load", "kvsm.store"
"""Names of spans. REQUEST is the root of its trace."""

ASKED, HIT, MISSED, LOADED = "asked", "hit", "missed", "loaded"
"""Names of the events in a request's span."""

_ENDS_WELL = frozenset({"completed", "cancelled"})
"""Outcomes of a transfer that are not errors."""


class SpanEvent(NamedTuple):
    """An event at one moment of a span. at_ns: Unix time (ns)."""

    name: str
    at_ns: int
    attributes: Attributes


class TraceSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span with the fields of an OpenTelemetry span.

    trace_id, span_id: never 0.
    parent_id: the id of the request's span; None if this is the request's span.
    start_ns, end_ns: Unix time (ns), monotonic as in the tables.
    error: what went wrong; None if nothing did.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None


def request_spans(log: OpenedLog, window: Window = EVERYTHING) -> Iterator[list[TraceSpan]]:
    """Yield the spans of each request that ended in the window: the request's own span first.

    Requests that have not ended have no spans yet.
    """
    run = LogReader(log.directory).head.run
    last = log.last if window.last is None else window.last
    for life in log.requests("finished >= ? AND finished <= ?", (window.first or 0, last)):
        yield _Trace(log, run, life).spans()


def open_requests(log: OpenedLog) -> int:
    """Return the number of requests that have not ended where the log ends."""
    (count,) = log.sql("SELECT COUNT(*) FROM requests WHERE finished IS NULL").fetchone()
    return int(count)


class _Trace:
    """Makes the spans of one request."""

    def __init__(self, log: OpenedLog, run: bytes, life: RequestRow) -> None:
        assert life.finished is not None
        self._log, self._life, self._inquiry = log, life, Inquiry(log)
        self._window = Window(life.arrived, life.finished)
        self._seed = run + life.arrived.to_bytes(8, "big") + life.request.encode("utf-8", "surrogateescape")
        self._trace_id = _id(self._seed, 16)
        self._root_id = _id(self._seed + b"request", 8)

    def spans(self) -> list[TraceSpan]:
        """Return the request's span and its child spans."""
        life, within = self._life, (self._life.request, *self._window)
        lookups = list(self._log.lookups("request = ? AND event >= ? AND event <= ?", within))
        stays = list(
            self._log.request_states(
                "request = ? AND began >= ? AND began <= ? AND state = 'DEFERRED'", within
            )
        )
        owned = self._log.sql(
            "SELECT transfer FROM transfers, json_each(requests) AS owner WHERE owner.value = ?"
            " AND transfer >= ? AND transfer <= ? ORDER BY transfer",
            within,
        )
        rows = [row for (id,) in owned.fetchall() if (row := self._inquiry.transfer(id)) is not None]
        events = [event for lookup in lookups for event in self._lookup_events(lookup)]
        events += [
            self._loaded(row) for row in rows if row.direction == "load" and row.outcome == "completed"
        ]
        children = [span for stay in stays if (span := self._wait(stay)) is not None]
        children += [span for row in rows if (span := self._transfer(row)) is not None]
        moments = [event.at_ns for event in events]
        # If a gap of the log hides the arrival, its time is unknown.
        start = life.arrived_ns or min([*moments, life.finished_ns or 0])
        root = TraceSpan(
            name=REQUEST,
            trace_id=self._trace_id,
            span_id=self._root_id,
            parent_id=None,
            start_ns=start,
            end_ns=max(start, life.finished_ns or max([start, *moments])),
            attributes=self._attributes(),
            events=tuple(sorted(events, key=lambda event: event.at_ns)),
            error="its process ended before the request did" if life.cut_off else None,
        )
        return [root, *children]

    def _attributes(self) -> Attributes:
        life = self._life
        end = "cut off" if life.cut_off else "aborted" if life.aborted else "finished"
        found: dict[str, Value | None] = {
            # vLLM's own spans use the same attribute name.
            "gen_ai.request.id": life.request,
            "kvsm.end": end,
            "kvsm.event.first": life.arrived,
            "kvsm.event.last": life.finished,
            "kvsm.blocks.asked": life.asked,
            "kvsm.blocks.on_device": life.on_device,
            "kvsm.blocks.on_host": life.on_host,
            "kvsm.lookups": life.lookups,
            "kvsm.preemptions": life.preemptions,
            "kvsm.loads": life.loads,
            "kvsm.loads.failed": life.failed_loads,
            "kvsm.slots.loaded": life.loaded,
            "kvsm.slots.stored": life.stored,
            "kvsm.slots.held": life.held or None,
            "kvsm.hand_over": life.hand_over,
            "kvsm.deferred_ns": life.deferred_ns,
            "kvsm.loading_ns": life.loading_ns,
            "kvsm.why": " ".join(explain_request(self._log, life.request, self._window).answer),
        }
        return _known(found)

    def _lookup_events(self, row: LookupRow) -> Iterator[SpanEvent]:
        place = {"kvsm.event": row.event, "kvsm.step": row.step}
        counts = {
            "kvsm.blocks.asked": row.asked,
            "kvsm.blocks.on_device": row.on_device,
            "kvsm.blocks.on_host": row.on_host,
            "kvsm.used": row.admitted is not None,
        }
        yield SpanEvent(ASKED, row.wall_ns, _known({**place, **counts}))
        if row.hit_slots:
            yield SpanEvent(HIT, row.wall_ns, {**place, "kvsm.slots": row.hit_slots})
        if row.missed is not None:
            cause = {
                "kvsm.key": row.missed,
                "kvsm.cause": row.why,
                "kvsm.cause.event": row.cause,
                "kvsm.cause.transfer": row.cause_transfer,
                "kvsm.why": self._inquiry.missed(row),
            }
            yield SpanEvent(MISSED, row.wall_ns, _known({**place, **cause}))

    def _loaded(self, row: TransferRow) -> SpanEvent:
        at_ns = row.ended_ns or row.submitted_ns or row.wall_ns or self._life.finished_ns or 0
        attributes = {"kvsm.event": row.ended, "kvsm.transfer": row.transfer, "kvsm.slots": row.slots}
        return SpanEvent(LOADED, at_ns, _known(attributes))

    def _wait(self, stay: RequestStateRow) -> TraceSpan | None:
        """Return the span of a wait for another request's copy; None if a time is not in the log."""
        if stay.began_ns is None or stay.ended_ns is None:
            return None
        transfer = stay.transfer
        what = "a copy" if transfer is None else self._inquiry.name(transfer, stay.request)
        blame = "" if transfer is None else self._inquiry.blame(transfer)
        attributes = _known(
            {
                "kvsm.event.first": stay.began,
                "kvsm.event.last": stay.ended,
                "kvsm.transfer": transfer,
                "kvsm.why": f"{what} ({blame})" if blame else what,
            }
        )
        return self._child(WAIT, stay.began, stay.began_ns, stay.ended_ns, attributes, None)

    def _transfer(self, row: TransferRow) -> TraceSpan | None:
        """Return the span of a load or store, from its plan to its last report; None if a time is not in the
        log."""
        if row.wall_ns is None or row.ended_ns is None:
            return None
        blame = self._inquiry.blame(row.transfer)
        attributes = _known(
            {
                "kvsm.transfer": row.transfer,
                "kvsm.event.last": row.ended,
                "kvsm.slots": row.slots,
                "kvsm.ranks": row.workers,
                "kvsm.outcome": row.outcome,
                "kvsm.source": row.source,
                "kvsm.target": row.target,
                "kvsm.why": blame or None,
            }
        )
        good = row.outcome is None or row.outcome in _ENDS_WELL
        error = None if good else f"{self._inquiry.name(row.transfer)}: {blame or row.outcome}"
        name = LOAD if row.direction == "load" else STORE
        return self._child(name, row.transfer, row.wall_ns, row.ended_ns, attributes, error)

    def _child(
        self, name: str, event: int, start_ns: int, end_ns: int, attributes: Attributes, error: str | None
    ) -> TraceSpan:
        """Return a child of the request's span. event: the number of the event that begins it."""
        return TraceSpan(
            name=name,
            trace_id=self._trace_id,
            span_id=_id(self._seed + name.encode() + event.to_bytes(8, "big"), 8),
            parent_id=self._root_id,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            attributes=attributes,
            error=error,
        )


def _id(seed: bytes, size: int) -> int:
    """Return an id of `size` bytes. It is never 0, because OpenTelemetry refuses 0."""
    return int.from_bytes(hashlib.blake2b(seed, digest_size=size).digest(), "big") or 1


def _known(attributes: Mapping[str, Value | None]) -> Attributes:
    """Leave out attributes whose value is not in the log."""
    return {name: value for name, value in attributes.items() if value is not None}
