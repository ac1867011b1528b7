"""Counts that are read off the events on their way to the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvsm import events as ev
from kvsm.events import OffloadingEvent
from kvsm.ids import count
from kvsm.offloader import EventSink


class CountingLog:
    """An `EventSink` that passes on what it counts.

    key_bytes: bytes of the keys in events. evicted: blocks. skipped: blocks that were offered and not
    stored, by reason (`SkipReason`); one that is offered again counts again.
    """

    def __init__(self, log: EventSink) -> None:
        self._log = log
        self.key_bytes = self.evicted = 0
        self.skipped: Counter[str] = Counter()
        self._handlers: dict[type[OffloadingEvent], Callable[[Any], None]] = {
            ev.HitMatched: self._matched,
            ev.KeysRecalled: self._recalled,
            ev.BlocksEvicted: self._evicted,
            ev.StorePlanned: self._store_planned,
            ev.StoreSkipped: self._skipped,
        }

    def append(self, event: OffloadingEvent) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        self._log.append(event)

    def flush(self) -> None:
        self._log.flush()

    def _matched(self, event: ev.HitMatched) -> None:
        self.key_bytes += len(event.missed or b"")

    def _recalled(self, event: ev.KeysRecalled) -> None:
        self.key_bytes += sum(map(len, event.keys))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self.evicted += count(event.slots)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        self.key_bytes += sum(map(len, event.keys))

    def _skipped(self, event: ev.StoreSkipped) -> None:
        self.skipped[event.reason] += len(event.keys)
        self.key_bytes += sum(map(len, event.keys))
