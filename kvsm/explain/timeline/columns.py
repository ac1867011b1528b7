"""Read the rows of a window of a log as columns, for the page and the trace.

The page places everything by event number. So rows keep event numbers, and the page looks up steps and times
in the stream of events. Names of requests are replaced by indices into one list of names. All text is made
printable here, so that text from a log is only shown, and never run as code or markup.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from kvsm.explain.tables import row_kinds as rows
from kvsm.explain.tables.open_rows import CUT_OFF
from kvsm.explain.timeline.lanes import pack
from kvsm.explain.timeline.page_words import ACTIVITY
from kvsm.ids import render_key
from kvsm.states import RequestState
from kvsm.system.printable import printable

MOST_ROWS = 200_000
"""Most rows of one table on one page."""


class WindowRows(Protocol):
    """The tables of an opened log (`kvsm.open`). where: an SQL condition. params: its parameters."""

    def requests(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.RequestRow]: ...
    def request_states(
        self, where: str = "", params: Sequence[Any] = ()
    ) -> Iterator[rows.RequestStateRow]: ...
    def lookups(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.LookupRow]: ...
    def transfers(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.TransferRow]: ...
    def copies(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.CopyRow]: ...
    def blocks(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.BlockRow]: ...
    def skips(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.SkipRow]: ...
    def resets(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.ResetRow]: ...
    def restarts(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.RestartRow]: ...
    def rejections(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[rows.RejectionRow]: ...


Columns = dict[str, list[Any]]

COLUMNS: dict[str, tuple[str, ...]] = {
    "requests": (
        "request", "arrived", "finished", "aborted", "cut_off", "state", "lookups", "preemptions", "asked",
        "on_device", "on_host", "loads", "failed_loads", "loaded", "stored", "deferred_ns", "loading_ns",
    ),
    "request_states": ("request", "began", "ended", "state", "transfer"),
    "lookups": (
        "event", "request", "asked", "on_device", "on_host", "hit_slots", "admitted", "resumed", "missed",
        "why", "cause", "cause_transfer", "cause_requests",
    ),
    "transfers": (
        "transfer", "direction", "requests", "slots", "workers", "pending", "submitted", "ended", "outcome",
        "waited_for",
    ),
    "copies": ("transfer", "worker", "direction", "reported", "good", "error"),
    "blocks": (
        "transfer", "slot", "key", "requests", "stored", "hits", "gone", "why", "gone_for",
        "gone_for_requests", "wanted", "wanted_by",
    ),
    "skips": ("event", "requests", "blocks", "reason"),
    "resets": ("event", "epoch", "keys", "cancelled", "abandoned"),
    "restarts": (
        "event", "life", "last_end", "kept", "storing", "planned", "freed", "transfers_cut_off",
        "requests_cut_off",
    ),
    "rejections": ("event", "transfer", "worker", "good", "reason"),
}  # fmt: skip
"""The columns that the page shows of each table."""

_POINT = "event BETWEEN ?1 AND ?2"
_SPAN = "{began} <= ?2 AND ({ended} IS NULL OR {ended} >= ?1)"
_TRANSFERS = _SPAN.format(began="transfer", ended="ended")
CONDITIONS: dict[str, str] = {
    # A finished request may still have a load in flight; its rows in request_states show when that ends.
    "requests": _SPAN.format(began="arrived", ended="finished"),
    "request_states": _SPAN.format(began="began", ended="ended"),
    "lookups": _POINT,
    "transfers": _TRANSFERS,
    "copies": f"transfer IN (SELECT transfer FROM transfers WHERE {_TRANSFERS})",
    "blocks": _SPAN.format(began="transfer", ended="gone") + " OR wanted BETWEEN ?1 AND ?2",
    "skips": _POINT,
    "resets": _POINT,
    "restarts": _POINT,
    "rejections": _POINT,
}
"""SQL conditions for the rows of each table that overlap the window from event ?1 to event ?2."""

_NAMES = {"request", "wanted_by"}
_NAME_LISTS = {"requests", "cause_requests", "gone_for_requests"}
_KEYS = {"key", "missed"}


class WindowTables(msgspec.Struct):
    """The rows of a window.

    first, last: first and last event of the window.
    names: the names of requests; a column of requests has indices into this list.
    columns: table -> column -> values. These columns are added: `lane` in `requests` and `copies`; `life` in
        `request_states`, the index of the request's row in `requests`; in `copies` also `submitted`, None if
        the copy was not submitted before the window ends, and `until`, its report or the restart that cut it
        off.
    left_out: what was left out, one line for each table.
    """

    first: int
    last: int
    names: list[str]
    columns: dict[str, Columns]
    left_out: list[str]


def read_tables(log: WindowRows, first: int, last: int, most_rows: int = MOST_ROWS) -> WindowTables:
    """Read the rows that overlap the events `first` to `last`, at most `most_rows` of each table."""
    reader = _Reader(log, first, last, most_rows)
    columns = {table: reader.read(table) for table in COLUMNS}
    found = WindowTables(first, last, [printable(name) for name in reader.names], columns, reader.left_out)
    _give_lives(found)
    _give_copy_lanes(found)
    return found


class _Reader:
    def __init__(self, log: WindowRows, first: int, last: int, most_rows: int) -> None:
        self._log, self._window, self._most = log, (first, last), most_rows
        self.names: dict[str, int] = {}
        self.left_out: list[str] = []

    def read(self, table: str) -> Columns:
        """Read the columns of one table."""
        names = COLUMNS[table]
        columns: Columns = {name: [] for name in names}
        found = iter(getattr(self._log, table)(where=CONDITIONS[table], params=self._window))
        adders = [(name, columns[name].append) for name in names]
        for row in islice(found, self._most):
            for name, add in adders:
                add(self._plain(name, getattr(row, name)))
        more = sum(1 for _ in found)
        if more:
            self.left_out.append(
                f"{more:,} rows of the table {table} are left out: a page has {self._most:,} of each table; "
                "choose a smaller window with --since and --until"
            )
        return columns

    def _plain(self, column: str, value: Any) -> Any:
        if value is None:
            return None
        if column in _NAMES:
            return self._name(value)
        if column in _NAME_LISTS:
            return [self._name(name) for name in msgspec.json.decode(value, type=list[str])]
        if column in _KEYS:
            return render_key(bytes.fromhex(value))
        return printable(value) if isinstance(value, str) else value

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def _give_lives(found: WindowTables) -> None:
    """Find the request of each row of `request_states`, and give each request a lane free for its time."""
    requests, stays = found.columns["requests"], found.columns["request_states"]
    begins: dict[int, list[tuple[int, int]]] = defaultdict(list)
    order = sorted(range(len(requests["request"])), key=lambda life: requests["arrived"][life])
    for life in order:
        begins[requests["request"][life]].append((requests["arrived"][life], life))
    until: list[int] = [
        found.last if finished is None else min(finished, found.last) for finished in requests["finished"]
    ]
    stays["life"] = []
    for request, began, ended, state in zip(stays["request"], stays["began"], stays["ended"], stays["state"]):
        place = bisect_right(begins.get(request, ()), began, key=lambda begin: begin[0]) - 1
        owner = begins[request][place][1] if place >= 0 else None
        stays["life"].append(owner)
        if owner is not None and ACTIVITY[RequestState[state]] is not None:
            until[owner] = max(until[owner], found.last if ended is None else min(ended, found.last))
    lanes = pack([(max(requests["arrived"][life], found.first), until[life]) for life in order])
    requests["lane"] = [0] * len(order)
    for life, lane in zip(order, lanes):
        requests["lane"][life] = lane


def _give_copy_lanes(found: WindowTables) -> None:
    """Give each copy a lane among those of its rank and direction, if it was submitted before the end."""
    copies, transfers = found.columns["copies"], found.columns["transfers"]
    submitted = {
        transfer: event
        for transfer, event in zip(transfers["transfer"], transfers["submitted"])
        if event is not None and event <= found.last
    }
    copies["submitted"] = [submitted.get(transfer) for transfer in copies["transfer"]]
    ends = zip(transfers["transfer"], transfers["ended"], transfers["outcome"])
    cut_off = {transfer: ended for transfer, ended, outcome in ends if outcome == CUT_OFF}
    copies["until"] = [
        cut_off.get(transfer) if reported is None else reported
        for transfer, reported in zip(copies["transfer"], copies["reported"])
    ]
    copies["lane"] = [0] * len(copies["transfer"])
    tracks: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, (worker, direction) in enumerate(zip(copies["worker"], copies["direction"])):
        if copies["submitted"][place] is not None:
            tracks[worker, direction].append(place)
    for places in tracks.values():
        places.sort(key=lambda place: copies["submitted"][place])
        for place, lane in zip(places, pack([_span(copies, place, found) for place in places])):
            copies["lane"][place] = lane


def _span(copies: Columns, place: int, found: WindowTables) -> tuple[int, int]:
    """(first, last) event of a copy, cut to the window."""
    until, began = copies["until"][place], max(copies["submitted"][place], found.first)
    return began, found.last if until is None else max(began, min(until, found.last))
