"""Find the events that name a request by a search for the name in the bytes of a log's files, without
decoding events.

mentions(Path("log"), "cmpl-7")        # Window(first=118203, last=118964)
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log.frames import COMPRESSED, HEADER, PREAMBLE_BYTES, segment_paths
from kvsm.explain.story.window import Window


class NotSearchable(Exception):
    """The events are compressed."""


class _FrameAt(NamedTuple):
    first: int
    last: int


def mentions(directory: Path, name: str) -> Window | None:
    """Return the window from the first to the last frame that names a request; None: no frame does.

    name: the request's id, or the beginning of it. Other text that contains the name may make the window
        longer.

    Raises `NotSearchable` if the log is compressed, and `LogError` if there is no log.
    """
    wanted, first, last = name.encode(), None, None
    for path in segment_paths(directory):
        found = _frames_with(path, wanted)
        if found is not None:
            first = found[0].first if first is None else first
            last = found[1].last
    return None if first is None else Window(first, last)


def _frames_with(path: Path, wanted: bytes) -> tuple[_FrameAt, _FrameAt] | None:
    """Return the first and the last frame of events with these bytes. Damage ends the search."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = PREAMBLE_BYTES
        if len(data) < begin + HEADER.size:
            return None
        begin += (
            HEADER.size + HEADER.unpack_from(data, begin)[1]
        )  # the head, whose snapshot names requests too
        if begin + HEADER.size <= len(data) and HEADER.unpack_from(data, begin)[2] & COMPRESSED:
            raise NotSearchable
        early, late = data.find(wanted, begin), data.rfind(wanted, begin)
        first = None
        while begin + HEADER.size <= len(data) and early >= 0:
            _, length, _, events, number, *_ = HEADER.unpack_from(data, begin)
            end = begin + HEADER.size + length
            frame = _FrameAt(number, number + events - 1)
            if first is None and early < end:
                first = frame
            if late < end:
                return first or frame, frame
            begin = end
        return None
