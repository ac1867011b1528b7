"""The hit rate over a window, for a track of the page and a counter of the trace."""

from __future__ import annotations

from collections import deque

import msgspec

from kvsm.explain.timeline.columns import Columns

HIT_LOOKUPS = 20
"""The hit rate at an admission is that of so many requests: this one and those admitted before it."""


class HitTrack(msgspec.Struct):
    """Columns: with the admission at this event, the hit rate is so many percent."""

    event: list[int] = msgspec.field(default_factory=list)
    percent: list[int] = msgspec.field(default_factory=list)


def hit_track(lookups: Columns) -> HitTrack:
    """Compute the share of the asked blocks that the device or the host had, of the last requests.

    A request counts once, with the lookup that it was first admitted with, as in `kvsm report`. A request
    that asked for no whole block does not count.
    """
    found: dict[int, tuple[int, int]] = {}
    names = ("admitted", "resumed", "asked", "on_device", "on_host")
    for admitted, resumed, asked, on_device, on_host in zip(*(lookups[name] for name in names)):
        if admitted is not None and not resumed and asked and on_device is not None and on_host is not None:
            found[admitted] = asked, on_device + on_host
    track, last = HitTrack(), deque[tuple[int, int]](maxlen=HIT_LOOKUPS)
    for event, blocks in sorted(found.items()):
        last.append(blocks)
        track.event.append(event)
        track.percent.append(round(100 * sum(hits for _, hits in last) / sum(asked for asked, _ in last)))
    return track
