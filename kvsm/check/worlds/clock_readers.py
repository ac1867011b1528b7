"""Check that the readers of a log work, and show no negative duration, however its clock was set."""

from __future__ import annotations

from pathlib import Path

from kvsm.errors import PropertyBroken
from kvsm.explain.report.log_report import make_report
from kvsm.explain.spans import request_spans
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.opened import open as open_tables
from kvsm.explain.why.questions import explain_request
from kvsm.properties import Property

_DURATIONS = (
    "SELECT request, min(deferred_ns, loading_ns) FROM requests",
    "SELECT transfer, min(coalesce(queued_ns, 0), coalesce(copied_ns, 0), coalesce(noticed_ns, 0))"
    " FROM copies",
)
"""Queries, each with rows of (name, shortest duration)."""


def check_readers(directory: Path) -> None:
    """Read a log with the commands for people. Raises `PropertyBroken`, or the error of a reader."""
    opened = open_tables(directory)
    with opened:
        if opened.stopped is not None:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the log cannot be read: {opened.stopped}")
        make_report(opened, verify=False)
        for name in [life.request for life in opened.requests()]:
            explain_request(opened, name)
        _check_durations(opened)
        _check_spans(opened)


def _check_durations(opened: OpenedLog) -> None:
    for query in _DURATIONS:
        for name, least in opened.sql(query):
            if least is not None and least < 0:
                raise PropertyBroken(Property.EVENTS_ARE_STATE, f"{name} takes {least} ns: {query}")


def _check_spans(opened: OpenedLog) -> None:
    for trace in request_spans(opened):
        for span in trace:
            if span.end_ns < span.start_ns:
                message = f"the span {span.name} takes {span.end_ns - span.start_ns} ns"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
