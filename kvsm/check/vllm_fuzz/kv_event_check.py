"""Check that the published KV events, folded, give the content of device and host (events are state, S10).

vLLM does not define how its events are to be folded. So the check folds them in every way that a router may
choose, and fails only if all ways are wrong about a block:

- A block that was stored twice and removed once is gone (events of a set) or present (counted events, as
  vLLM's offloading events require).
- `AllBlocksCleared` names no medium. If the device's pool publishes it, it clears the device alone, or the
  host as well. If the connector publishes it, it clears the connector's blocks.

Events are delayed: vLLM publishes them at the end of a step. So the check is made at rest, and includes the
events that the next step would publish. The real content comes from vLLM's block pool, and from the connector
by requests that are never served (`host_probe.py`). That folded events equal the content is a requirement of
kvsm, not of vLLM: a router has no other source.

A connector that has published no event in a run is not checked, because publishing is optional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from kvsm.check.vllm_fuzz.host_probe import AskedBlock
from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

EventName = tuple[int, "bytes | int"]
"""A block as events name it: (KV cache group, block hash as vLLM publishes it)."""


class EventReading:
    """One way to fold the events of the device or the host: the set of blocks that a router would assume
    there.

    counts: whether it counts how often a block was stored and removed.
    is_cleared_by_device: whether the device's `AllBlocksCleared` applies.
    """

    def __init__(self, counts: bool, is_cleared_by_device: bool) -> None:
        self._counts, self.is_cleared_by_device = counts, is_cleared_by_device
        self._stored: Counter[EventName] = Counter()

    def take(self, event: Any) -> None:
        """Fold an event."""
        if isinstance(event, AllBlocksCleared):
            self._stored.clear()
        elif isinstance(event, BlockStored):
            for name in _names(event):
                self._stored[name] = self._stored[name] + 1 if self._counts else 1
        elif isinstance(event, BlockRemoved):
            for name in _names(event):
                self._stored[name] = self._stored[name] - 1 if self._counts else 0
                if self._stored[name] < 1:
                    del self._stored[name]

    def names(self) -> set[EventName]:
        """The blocks that are present."""
        return set(self._stored)


class PublishedEvents:
    """All readings of the events that a scheduler publishes. It wraps the methods that return the events."""

    def __init__(self, scheduler: Any) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._manager, self._connector = scheduler.kv_cache_manager, scheduler.connector
        self._take_of_device, self._take_of_host = self._manager.take_events, self._connector.take_events
        self._device = [EventReading(counts, True) for counts in (False, True)]
        self._host = [EventReading(counts, both) for counts in (False, True) for both in (False, True)]
        self._host_has_published = False
        self._manager.take_events = self._device_events
        self._connector.take_events = self._host_events

    def stored_on_host(self) -> set[EventName]:
        """Return the blocks that the connector's events say are stored, in all readings."""
        self._host_events()
        return _in_all(self._host)

    def check_device(self) -> None:
        """Compare the device's events with the cached blocks of vLLM's pool. Raises `PropertyBroken`."""
        self._device_events()
        cached = {
            (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)))
            for key in self._pool.cached_block_hash_to_block._cache
        }
        for name in _in_all(self._device) - cached:
            raise _broken(f"the events say that the device has {_text(name)}, and vLLM's block pool lacks it")
        for name in cached - _in_any(self._device):
            raise _broken(f"vLLM's block pool has {_text(name)}, and the events do not say so")

    def check_host(self, asked: Sequence[AskedBlock], is_whole: bool) -> None:
        """Compare the connector's events with its matches. Raises `PropertyBroken`.

        asked: the blocks of the requests of this run, with what the connector matches.
        is_whole: whether the connector must match each block that the host has.
        """
        self._host_events()
        if not self._host_has_published:
            return
        count_case(Property.EVENTS_ARE_STATE, "engines whose KV events were compared", bool(asked))
        surely_there, maybe_there = _in_all(self._host), _in_any(self._host)
        known: dict[EventName, AskedBlock] = {event_name(0, block.hash): block for block in asked}
        for name, block in known.items():
            if block.ends_a_match and name not in maybe_there:
                raise _broken(
                    f"the connector matches {block.text} ({_text(name)}), and no event says that it has it"
                )
        if not is_whole:
            return
        for name in sorted(surely_there, key=str):
            found = known.get(name)
            if found is not None and found.is_matched is False:
                raise _broken(
                    f"the events say that the host has {found.text} ({_text(name)}), and the connector does "
                    "not match it"
                )

    def _device_events(self) -> list[Any]:
        events = list(self._take_of_device() or ())
        for event in events:
            for reading in self._device:
                reading.take(event)
            if isinstance(event, AllBlocksCleared):
                for reading in self._host:
                    if reading.is_cleared_by_device:
                        reading.take(event)
        return events

    def _host_events(self) -> list[Any]:
        events = list(self._take_of_host() or ())
        for event in events:
            self._host_has_published = True
            for reading in self._host:
                reading.take(event)
        return events


def event_name(group: int, block_hash: bytes) -> EventName:
    """Return the name of a block in events."""
    return group, maybe_convert_block_hash(block_hash)


def _names(event: Any) -> Iterable[EventName]:
    return [(event.group_idx or 0, block_hash) for block_hash in event.block_hashes]


def _in_all(readings: Sequence[EventReading]) -> set[EventName]:
    return set.intersection(*[reading.names() for reading in readings])


def _in_any(readings: Sequence[EventReading]) -> set[EventName]:
    return set.union(*[reading.names() for reading in readings])


def _text(name: EventName) -> str:
    group, block_hash = name
    shown = block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash:016x}"
    return f"block {shown[-16:]} of group {group}"


def _broken(message: str) -> PropertyBroken:
    return PropertyBroken(Property.EVENTS_ARE_STATE, message)
