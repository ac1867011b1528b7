"""Marks in pools that record how far the log is written, so that a pool is never newer than its log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvsm.core.log.segment_file import WritePlace


class FlushMark(Protocol):
    """Receives the progress of a log before the jobs of its events are submitted."""

    def advance(self, seq: int) -> None:
        """Record that the log is written up to event `seq`."""

    def void(self) -> None:
        """Record that the log has lost events, and that jobs are submitted anyway."""


class LogBinding(NamedTuple):
    """The binding of a life of a log to persistent pools.

    life_id: random id of the life, `RUN_BYTES` bytes; empty: bound to no pool.
    marks: the marks of the pools. Each is set before `LogWriter.flush` returns.
    """

    life_id: bytes = b""
    marks: Sequence[FlushMark] = ()


UNBOUND = LogBinding()


def set_marks(marks: Sequence[FlushMark], place: WritePlace) -> None:
    """Set the marks once a flush has written up to this place."""
    for mark in marks:
        if place.segment.loss is None:
            mark.advance(place.first - 1)
        else:
            mark.void()
