"""The hit rate over a window, for a track of the page and a counter of the trace."""

from __future__ import annotations

from collections import deque

import msgspec

from kvsm.explain.timeline.columns import Columns

HIT_LOOKUPS = 20
"""The hit rate at an admission is computed over this many requests: the admitted one and the last ones before
it."""


class HitTrack(msgspec.Struct):
    """The hit rate over time, as columns: the event of each admission, and the rate (percent) from then
    on."""

    event: list[int] = msgspec.field(default_factory=list)
    percent: list[int] = msgspec.field(default_factory=list)


def hit_track(lookups: Columns) -> HitTrack:
    """Compute the share of the requested blocks that were found on the device or the host, over the last
    requests. A request counts once, with the lookup with which it was first admitted, as in `kvsm report`. A
    request that asked for no whole block does not count.
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
