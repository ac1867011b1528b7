"""Find the events that name a request by a search for the name in the bytes of a log's files, without
decoding events.

mentions(Path("log"), "cmpl-7")        # Window(first=118203, last=118964)
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log.frames import COMPRESSED, HEADER, PREAMBLE_BYTES, first_event, segment_paths
from kvsm.errors import LogError
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

    Raises `NotSearchable` if the log is compressed, and `LogError` if there is no log or it cannot be read.
    """
    wanted, first, last = name.encode(errors="surrogatepass"), None, None
    for path in segment_paths(directory):
        try:
            found = _frames_with(path, wanted)
        except FileNotFoundError:
            continue  # Retention has deleted it.
        except OSError as error:
            raise LogError(f"{path}: cannot be read: {error}") from error
        if found is not None:
            first = found[0].first if first is None else first
            last = found[1].last
    return None if first is None else Window(first, last)


def _frames_with(path: Path, wanted: bytes) -> tuple[_FrameAt, _FrameAt] | None:
    """Return the first and the last frame of events with these bytes. A torn or damaged frame ends the
    search."""
    if path.stat().st_size < PREAMBLE_BYTES + HEADER.size:  # An empty file cannot be mapped.
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Skip the head, whose snapshot names requests too.
        begin = end = PREAMBLE_BYTES + HEADER.size + HEADER.unpack_from(data, PREAMBLE_BYTES)[1]
        ends: list[int] = []
        frames: list[_FrameAt] = []
        following = first_event(path)
        while end + HEADER.size <= len(data):
            _, length, flags, events, number, *_ = HEADER.unpack_from(data, end)
            end += HEADER.size + length
            if end > len(data) or number != following:
                break
            if flags & COMPRESSED:
                raise NotSearchable
            ends.append(end)
            frames.append(_FrameAt(number, number + events - 1))
            following = number + events
        if not frames:
            return None
        early, late = data.find(wanted, begin, ends[-1]), data.rfind(wanted, begin, ends[-1])
        return (frames[bisect_right(ends, early)], frames[bisect_right(ends, late)]) if early >= 0 else None
