"""Choose the part of a large log that a question needs, so that the whole log need not be indexed.

log_part(LogReader("log"), "cmpl-7")        # Window(first=78203, last=118964)
"""

from __future__ import annotations

from kvsm.core.log import LogReader
from kvsm.core.log.frames import first_event, segment_bytes, segment_paths
from kvsm.errors import LogError
from kvsm.explain.story.mentions import NotSearchable, mentions
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.table_index import unread_bytes

LARGE_BYTES = 32 << 20
"""A log is large if more bytes than this are not indexed: indexing them would take longer than 15 s."""

PART_EVENTS, PART_BYTES = 150_000, 16 << 20
"""The most events of a part that is read in full, and about the most bytes. Its tables take some seconds."""


def is_large(reader: LogReader) -> bool:
    """Whether an index of this log would take long."""
    return unread_bytes(reader) > LARGE_BYTES


def most_events(events: int, size: int) -> int:
    """Return the most events of a part, for a log with this many events and bytes."""
    return max(1, min(PART_EVENTS, PART_BYTES * events // max(1, size)))


def log_part(reader: LogReader, request: str | None, transfer: int | None = None) -> Window:
    """Return the part of a large log that names a request or a transfer, and some events before it.

    It is the whole log if the log is not large, or if an index is needed: to find a key, a slot, or a request
    in a compressed log.

    Raises `LogError` if no event names the request.
    """
    if not is_large(reader) or (request is None and transfer is None):
        return EVERYTHING
    if transfer is not None:
        window: Window | None = Window(transfer, transfer + _margin(reader))
    else:
        try:
            window = mentions(reader.directory, request or "")
        except NotSearchable:
            return EVERYTHING
    if window is None:
        raise LogError(f"{reader.directory}: no event names the request {request}")
    assert window.first is not None
    return Window(
        max(first_event(segment_paths(reader.directory)[0]), window.first - _margin(reader)), window.last
    )


def _margin(reader: LogReader) -> int:
    """The number of events before the first mention that are read as context: a quarter of a part."""
    paths = segment_paths(reader.directory)
    if len(paths) < 2:
        return PART_EVENTS // 4
    events = first_event(paths[-1]) - first_event(paths[0])
    return most_events(events, 4 * segment_bytes(paths[:-1]))
