"""The frame that a writer writes next."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.core.log.frames import FrameEncoder
from kvsm.core.log.retention import FRAME_BYTES
from kvsm.core.log.segment_file import WritePlace

FRAME_EVENTS = 512
"""Most events of one frame. With more, an event does not get cheaper."""


class NextFrame(NamedTuple):
    """A frame: its first event, how many events it has, and its bytes."""

    first: int
    num_events: int
    data: bytes


class FrameMaker:
    """Makes the frames of the events, in order.

    most_events: how many events the next frame should have: about `FRAME_BYTES` of them, by the last frame.
    """

    def __init__(self, encoder: FrameEncoder) -> None:
        self.most_events = FRAME_EVENTS
        self._encoder = encoder
        self._made = NextFrame(0, 0, b"")

    def make(self, place: WritePlace) -> NextFrame:
        """The frame of the first events that wait, the same one until it is written.

        A reader may have seen some bytes of a frame whose write was interrupted. So no other frame may take
        its place.
        """
        if self._made.first != place.first:
            events = place.events[:FRAME_EVENTS]
            count = len(events)
            data = self._encoder.events(events, place.segment.synced.offset)
            self.most_events = min(FRAME_EVENTS, max(FRAME_BYTES * count // len(data), 1))
            self._made = NextFrame(place.first, count, data)
            self._encoder.keep()
        return self._made
