"""Published KV events beside what is true: folded, they must give what the device and the host have (S10).

vLLM does not say what a reader of its events may conclude. So the check reads them in every way that a router
may, and complains only if all readings are wrong about a block:

- A block that is stored twice and removed once is gone (the events are a set), or is there (they are counted:
  vLLM's offloading events ask for this).
- `AllBlocksCleared` names no medium. One from the device's pool clears the device alone, or the host as well.
  One that the connector publishes clears what the connector has.

Events become true with a delay: vLLM publishes them at the end of a step. The check is made at rest, after
what the next step would publish. What is true is asked of vLLM's block pool, and of the connector by requests
that are never served (`host_probe.py`). That folded events give this state is kvsm's requirement, not vLLM's.
Routers of requests have no other source.

A connector that has published nothing in a run is not blamed: it need not publish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from kvsm.check.vllm_fuzz.host_probe import AskedBlock
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

EventName = tuple[int, "bytes | int"]
"""A block as events name it: its KV cache group, and its hash as vLLM publishes it."""


class EventReading:
    """What a router believes that one place has.

    counts: whether it counts how often a block was stored and removed.
    is_cleared_by_device: whether the device's `AllBlocksCleared` clears this place.
    """

    def __init__(self, counts: bool, is_cleared_by_device: bool) -> None:
        self._counts, self.is_cleared_by_device = counts, is_cleared_by_device
        self._stored: Counter[EventName] = Counter()

    def take(self, event: Any) -> None:
        """Fold an event of this place."""
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
        """All blocks that are there."""
        return set(self._stored)


class PublishedEvents:
    """The events that a scheduler publishes, by what they are about. Takes them where the scheduler does."""

    def __init__(self, scheduler: Any) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._manager, self._connector = scheduler.kv_cache_manager, scheduler.connector
        self._take_of_device, self._take_of_host = self._manager.take_events, self._connector.take_events
        self._device = [EventReading(counts, True) for counts in (False, True)]
        self._host = [EventReading(counts, both) for counts in (False, True) for both in (False, True)]
        self._spoke = False
        self._manager.take_events = self._device_events
        self._connector.take_events = self._host_events

    def check_device(self) -> None:
        """The device's events give what vLLM's block pool has cached. Raises `PropertyBroken`."""
        self._device_events()
        cached = {
            (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)))
            for key in self._pool.cached_block_hash_to_block._cache
        }
        for name in _in_all(self._device) - cached:
            raise _broken(f"the events say that the device has {_told(name)}, and vLLM's block pool lacks it")
        for name in cached - _in_any(self._device):
            raise _broken(f"vLLM's block pool has {_told(name)}, and the events do not say so")

    def check_host(self, asked: Sequence[AskedBlock], is_whole: bool) -> None:
        """The connector's events give what it matches. Raises `PropertyBroken`.

        asked: what it matched, for each block that a request of this run has.
        is_whole: whether a block that the host has is always matched: it alone decides.
        """
        self._host_events()
        if not self._spoke:
            return
        said, maybe_said = _in_all(self._host), _in_any(self._host)
        known: dict[EventName, AskedBlock] = {(0, maybe_convert_block_hash(one.hash)): one for one in asked}
        for name, one in known.items():
            if one.ends_a_match and name not in maybe_said:
                raise _broken(
                    f"the connector matches {one.told} ({_told(name)}), and no event says that it has it"
                )
        if not is_whole:
            return
        for name in sorted(said, key=str):
            found = known.get(name)
            if found is not None and found.is_matched is False:
                raise _broken(
                    f"the events say that the host has {found.told} ({_told(name)}), and the connector does "
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
            self._spoke = True
            for reading in self._host:
                reading.take(event)
        return events


def _names(event: Any) -> Iterable[EventName]:
    return [(event.group_idx or 0, block_hash) for block_hash in event.block_hashes]


def _in_all(readings: Sequence[EventReading]) -> set[EventName]:
    return set.intersection(*[reading.names() for reading in readings])


def _in_any(readings: Sequence[EventReading]) -> set[EventName]:
    return set.union(*[reading.names() for reading in readings])


def _told(name: EventName) -> str:
    group, block_hash = name
    shown = block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash:016x}"
    return f"block {shown[-16:]} of group {group}"


def _broken(message: str) -> PropertyBroken:
    return PropertyBroken(Property.EVENTS_ARE_STATE, message)
