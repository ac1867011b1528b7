"""An engine's own record of a run, to compare with the figures that are computed from its log.

The engine of a world records which requests read the cache, what each had when it was admitted, and the
copies: from its own actions, not from events. After each action of a world the admissions are compared with
the events of that action. At rest, if the world keeps its log, all counts are compared: the metrics
(`kvsm.explain.metrics`), the tables, and the figures that `kvsm report` computes from the tables.

Not compared: times, and the reasons why a match ended where it did.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import msgspec

from kvsm import events as ev
from kvsm.check.worlds.metric_oracles import check_metrics
from kvsm.check.worlds.past_log import PastLog, in_time
from kvsm.check.worlds.past_metrics import check_past_metrics
from kvsm.check.worlds.report_oracles import check_report
from kvsm.check.worlds.table_oracles import check_tables
from kvsm.check.worlds.whatif_oracles import check_whatif
from kvsm.core.ledger import Ledger
from kvsm.core.plan import ImportJob, TransferJob, WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.explain.metrics import Metrics
from kvsm.explain.report.cache_measures import hit_figures, stored_blocks
from kvsm.explain.report.measures import ADMITTED, Tables
from kvsm.explain.story.window import Window
from kvsm.explain.tables.extract import Extractor
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.sqlite_tables import TableWriter, make_tables
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.tiers.disk_tier import TierCounts

STORED, LOADED, COPIED_OUT, IMPORTED = "stored", "loaded", "copied out", "imported"
ON_DISK = "stored on the disk"


class AdmittedRequest(NamedTuple):
    """The admission of a request that reads the cache.

    asked: blocks of its tokens.
    on_device, on_host: how many of these blocks the device had, and how many are loaded from the host.
    resumed: it had blocks before, and has lost them.
    """

    request: str
    asked: int
    on_device: int
    on_host: int
    resumed: bool


class CopiedSlots(NamedTuple):
    """A copy that all ranks have ended well, and that was neither given up nor followed by a reset before.

    way: `STORED`, `LOADED`, `COPIED_OUT`, `IMPORTED` or `ON_DISK`. An import is recorded as `STORED`, too. A
        copy to the disk that ends well there is recorded as `COPIED_OUT` and `ON_DISK`, all others only as
        `COPIED_OUT`: the host's log does not say whether the disk has the blocks.
    """

    way: str
    slots: int


class _Noted(NamedTuple):
    """An entry of the record. event: if a crash loses this event, the entry is dropped."""

    event: int
    what: AdmittedRequest | CopiedSlots


class _UnderWay(msgspec.Struct):
    """A copy in flight.

    job: its job; an `ImportJob` for a copy from another engine.
    left: ranks that have not reported.
    good: whether all reports so far are good.
    """

    job: TransferJob | ImportJob
    left: set[int]
    good: bool = True


class RunNotes:
    """An engine's record of a run; empty in a world that is loaded without events.

    admissions: the admissions of the last action.
    """

    def __init__(self) -> None:
        self.admissions: list[AdmittedRequest] = []
        self._noted: list[_Noted] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._ended: dict[int, CopiedSlots] = {}  # reported by all ranks; the event of the end is to come
        self._checked: OffloadingEvent | None = None  # the last event at the previous `check`

    def begin_action(self) -> None:
        """Forget the admissions of the last action."""
        self.admissions.clear()

    def admit(self, event: int, *admitted: Any) -> None:
        """Record an admission. event: the last event. admitted: the fields of an `AdmittedRequest`."""
        self.admissions.append(AdmittedRequest(*admitted))
        self._noted.append(_Noted(event, self.admissions[-1]))

    def copy(self, event: int, way: str, slots: int) -> None:
        """Record a copy that has ended well. event: the last event."""
        self._noted.append(_Noted(event, CopiedSlots(way, slots)))

    # For an engine that passes reports on one by one.

    def leave(self, job: TransferJob | ImportJob, workers: int) -> None:
        """Record that a job is sent to the workers."""
        self._under_way[job.transfer] = _UnderWay(job, set(range(workers)))

    def report(self, ledger: Ledger, reports: Sequence[WorkerReport]) -> None:
        """Record the reports that the engine passes on now. Reports on given-up copies do not count."""
        for report in reports:
            copy = self._under_way.get(report.transfer)
            if copy is None:
                continue
            copy.left.discard(report.worker)
            copy.good &= report.good
            if not copy.left:
                del self._under_way[report.transfer]
                if copy.good and report.transfer in ledger.transfers:
                    chunk = ledger.config.blocks_per_chunk
                    slots = {place // chunk for place in to_list(copy.job.host_blocks)}
                    self._ended[report.transfer] = CopiedSlots(_way(copy.job), len(slots))

    def reported(self, ledger: Ledger, news: Sequence[OffloadingEvent]) -> None:
        """Record the copies that end with these events, if all ranks have reported success."""
        for event in reversed(news):  # the last report of a copy ends it
            if isinstance(event, ev.WorkerReported) and event.transfer not in ledger.transfers:
                copied = self._ended.pop(event.transfer, None)
                if copied is not None:
                    self._noted.append(_Noted(event.seq, copied))
                    if copied.way == IMPORTED:
                        self._noted.append(_Noted(event.seq, copied._replace(way=STORED)))

    def reset(self) -> None:
        """The cache is reset: copies in flight do not count."""
        self._under_way.clear()
        self._ended.clear()

    def crash(self, notes: RunNotes, last: int) -> None:
        """Take over the record `notes` of a killed process, up to the last event that was written."""
        self._noted = [one for one in notes._noted if one.event <= last]

    # What must hold.

    def check_action(self, news: Sequence[OffloadingEvent]) -> None:
        """Check that the events of an action describe its admissions. Raises `PropertyBroken`."""
        logged = [
            (event.request, event.asked, event.on_device, event.on_host, event.resumed)
            for event in news
            if isinstance(event, ev.RequestAdmitted)
        ]
        for ours, theirs in zip([*self.admissions, None], [*logged, None]):
            if ours != theirs:
                message = f"the engine admits {ours or 'no request'}, and the log says {theirs or 'nothing'}"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)

    def check(self, config: OffloadConfig, log: Sequence[OffloadingEvent]) -> None:
        """Compare each figure of a log with the engine's record. Raises `PropertyBroken`.

        A log without its first event is not checked, because it lacks a part of the run.
        """
        if not log or not isinstance(log[0], ev.LogOpened) or log[-1] is self._checked:
            return
        truth = _truth([one.what for one in self._noted])
        for name, figures in _figures(config, log).items():
            for figure, value in figures.items():
                if value != truth[figure]:
                    message = f"{name} says {value} for {figure}, and the engine counts {truth[figure]}"
                    raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        self._checked = log[-1]

    def check_disk(self, counts: TierCounts, log: Sequence[OffloadingEvent]) -> None:
        """Compare the counts of a disk tier with the engine's record, as `check` does with a log."""
        if log and isinstance(log[0], ev.LogOpened):
            slots = _slots([one.what for one in self._noted])
            for figure, value in ((ON_DISK, counts.to_disk), (IMPORTED, counts.from_disk)):
                if value != slots[figure]:
                    message = (
                        f"the disk tier says {value} for {figure}, and the engine counts {slots[figure]}"
                    )
                    raise PropertyBroken(Property.EVENTS_ARE_STATE, message)


def _way(job: TransferJob | ImportJob) -> str:
    if isinstance(job, ImportJob):
        return IMPORTED
    return STORED if job.direction is Direction.STORE else LOADED


def _slots(noted: Sequence[AdmittedRequest | CopiedSlots]) -> Counter[str]:
    """Way -> the number of slots that were copied."""
    slots = Counter[str]()
    for one in noted:
        if isinstance(one, CopiedSlots):
            slots[one.way] += one.slots
    return slots


def _truth(noted: Sequence[AdmittedRequest | CopiedSlots]) -> dict[str, Any]:
    admitted = [one for one in noted if isinstance(one, AdmittedRequest) and not one.resumed]
    slots = _slots(noted)
    return {
        "admitted": len(admitted),
        "hits": sum(one.on_host > 0 for one in admitted),
        "asked": sum(one.asked for one in admitted),
        "on the device": sum(one.on_device for one in admitted),
        "on the host": sum(one.on_host for one in admitted),
        **{way: slots[way] for way in (STORED, LOADED, COPIED_OUT, IMPORTED)},
    }


_COUNTED_AGAIN = 20
"""One of this many logs, chosen by its length, gets times and is counted a second time as a whole."""


@cache
def _empty_tables() -> sqlite3.Connection:
    """Empty tables, to be copied: copying is faster than creating."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    make_tables(connection)
    connection.commit()
    return connection


def _figures(config: OffloadConfig, log: Sequence[OffloadingEvent]) -> dict[str, dict[str, Any]]:
    """Source of the figures ("metrics", "tables", "report") -> figure -> value."""
    counts_again = len(log) % _COUNTED_AGAIN == 0
    if counts_again:
        log = in_time(log)
    connection, ledger = sqlite3.connect(":memory:"), Ledger(config)
    _empty_tables().backup(connection)
    tables, metrics = TableWriter(connection), Metrics(ledger)
    extractor = Extractor(tables)
    for event in log:
        extractor.follow(ledger, event)
        metrics.append(event)
    check_metrics(metrics, log)
    extractor.write_unfinished()
    if counts_again:
        past = PastLog(config, log)
        check_past_metrics(metrics, past)
        check_tables(connection, past)
        check_whatif(past)
        check_report(Tables(cast(OpenedLog, _InMemory(connection, config, log)), Window()), past)
    return {
        "metrics": _of_metrics(metrics.values()),
        "tables": _of_tables(connection),
        "report": _of_report(connection, config, log),
    }


def _of_metrics(values: dict[str, Any]) -> dict[str, Any]:
    found, matches = values["blocks_asked"], values["matches"]
    return {
        "admitted": matches["hit"] + matches["miss"],
        "hits": matches["hit"],
        "asked": sum(found.values()),
        "on the device": found["on the device"],
        "on the host": found["on the host"],
        STORED: values["blocks_stored"],
        LOADED: values["blocks_loaded"],
        COPIED_OUT: values["blocks_copied_out"],
        IMPORTED: values["blocks_imported"],
    }


def _of_tables(connection: sqlite3.Connection) -> dict[str, Any]:
    def one(query: str) -> int:
        return int(connection.execute(query).fetchone()[0] or 0)

    ended = "SELECT sum(slots) FROM transfers WHERE outcome = 'completed' AND"
    return {
        "admitted": one(f"SELECT count(*) FROM lookups WHERE {ADMITTED}"),
        "asked": one("SELECT sum(asked) FROM requests"),
        "on the device": one("SELECT sum(on_device) FROM requests"),
        "on the host": one("SELECT sum(on_host) FROM requests"),
        STORED: one(f"{ended} direction = 'store'"),
        LOADED: one("SELECT sum(loaded) FROM requests"),
        COPIED_OUT: one(f"{ended} target IS NOT NULL"),
        IMPORTED: one(f"{ended} source IS NOT NULL"),
    }


class _InMemory:
    """A stand-in for an `OpenedLog`, with the attributes that `Tables` reads."""

    def __init__(
        self, connection: sqlite3.Connection, config: OffloadConfig, log: Sequence[OffloadingEvent]
    ) -> None:
        self.sql, self.config = connection.execute, config
        self.first, self.last = log[0].seq, log[-1].seq


def _of_report(
    connection: sqlite3.Connection, config: OffloadConfig, log: Sequence[OffloadingEvent]
) -> dict[str, Any]:
    tables = Tables(cast(OpenedLog, _InMemory(connection, config, log)), Window())
    hits = hit_figures(tables)
    return {
        "admitted": hits.lookups,
        "asked": hits.asked or 0,
        "on the device": hits.on_device or 0,
        "on the host": hits.on_host or 0,
        STORED: stored_blocks(tables),
    }
