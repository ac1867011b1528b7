"""A world of declared parts as bytes, and back.

    saver = Saver(ServingWorld(options, keep_events=False))
    again = saver.load(saver.save(world))

What is saved is what the fields of the world's parts declare (`kvsm.canonical`), and each field that a part
has got since it was made: a change of the code that is being checked may keep a memory of its own. The log is
not saved: a world that was loaded knows the events since then.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from kvsm.canonical import Dropped, Kept, Part, Remade, Seen, rules_of
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.kv_events import BlockStored, PublisherState, RemovedKeys, StoredKeys
from kvsm.ledger import DictIndex, OfferHistory, Provenance, RequestRecord, TransferRecord
from kvsm.plan import TransferJob, WorkerReport
from kvsm.policies.lru import LRUPolicy
from kvsm.policies.slot_queue import NativeSlotQueue, SlotQueue
from kvsm.policies.use_counts import UseCounts
from kvsm.scheduler import StoreMode
from kvsm.scheduler.device_blocks import DeviceBlocksState
from kvsm.scheduler.free_queue import WalkState
from kvsm.scheduler.retry import RetryStamp
from kvsm.scheduler.state import LoadEnded, SchedulerState
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.words import StateWords
from kvsm.worlds.crash import Left
from kvsm.worlds.serving import Budgets, ServingOptions, ServingWorld
from kvsm.worlds.small_request import SmallRequest
from kvsm.worlds.small_workers import ComputedRange, SmallCopy


class Saved(Protocol):
    """A world whose parts have declared their fields. The first part is the world itself."""

    def parts(self) -> Sequence[object]:
        """All objects that it is made of, in a fixed order."""


AnySaved = TypeVar("AnySaved", bound=Saved)


class _Plan(NamedTuple):
    """How a part is saved and restored. original: a part of another world, which lends what never changes."""

    place: int
    original: Any
    saved: tuple[str, ...]
    links: tuple[tuple[str, int], ...]
    """(field, place of the part that it is)."""
    remade: tuple[tuple[str, Callable[[Any], Any]], ...]

    def saved_of(self, part: object) -> list[Any]:
        """The saved fields of such a part. Behind them, if there are any, the fields that it got later."""
        fields = vars(part)
        values = [fields[name] for name in self.saved]
        if len(fields) > len(vars(self.original)):
            values.append({name: fields[name] for name in fields.keys() - vars(self.original).keys()})
        return values


class Saver(Generic[AnySaved]):
    """Saves and loads worlds of the same options. blank: one of them; it is not changed.

    Raises `ConfigError` if a part has a field that it has not declared.
    """

    def __init__(self, blank: AnySaved) -> None:
        parts = blank.parts()
        self._num_parts = len(parts)
        self._plans = [_plan(place, part, parts) for place, part in enumerate(parts) if part is not None]

    def save(self, world: AnySaved) -> bytes:
        """All saved fields in one pickle: what is one object in the world is one object in the copy."""
        parts = world.parts()
        values = [plan.saved_of(parts[plan.place]) for plan in self._plans]
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(values)
        return buffer.getvalue()

    def load(self, saved: bytes) -> AnySaved:
        """A world of its own, equal to the one that was saved."""
        copies: list[Any] = [None] * self._num_parts
        for plan, values in zip(self._plans, pickle.loads(saved)):
            copies[plan.place] = copy = plan.original.__new__(type(plan.original))
            copy.__dict__ = fields = vars(plan.original).copy()
            fields.update(zip(plan.saved, values))
            if len(values) > len(plan.saved):
                fields.update(values[-1])
        for plan in self._plans:
            copy = copies[plan.place]
            fields = vars(copy)
            for name, place in plan.links:
                fields[name] = copies[place]
            for name, make in plan.remade:
                fields[name] = make(copy)
        world: AnySaved = copies[0]
        return world


def _plan(place: int, part: object, parts: Sequence[object]) -> _Plan:
    rules = rules_of(part)
    places = {id(other): number for number, other in enumerate(parts) if other is not None}
    links = []
    for name, rule in rules.items():
        other = getattr(part, name)
        if isinstance(rule, Part) and other is not None:
            if id(other) not in places:
                raise ConfigError(f"{type(part).__name__}.{name} is none of the parts of its world")
            links.append((name, places[id(other)]))
    return _Plan(
        place,
        part,
        tuple(name for name, rule in rules.items() if isinstance(rule, Kept | Seen | Dropped)),
        tuple(links),
        tuple((name, rule.by) for name, rule in rules.items() if isinstance(rule, Remade)),
    )


# How to pickle what shares its memory with numpy.


def _words(machine: str, words: bytes) -> StateWords:
    # Not by its constructor, which fills what is filled here.
    made = StateWords.__new__(StateWords)
    made.codec, made.size, made.words = _CODECS[machine], len(words) // 4, array("i", words)
    made.view = np.frombuffer(made.words, dtype=np.int32)
    made._mark = np.zeros(made.size, dtype=np.int64)
    return made


def _queue(capacity: int, slots: tuple[int, ...]) -> SlotQueue:
    queue = SlotQueue(capacity)
    queue.append(slots)
    return queue


def _uses(most: int, counts: bytes) -> UseCounts:
    # What `restore` saves and restores of the slots of a queue, here of all slots.
    made, every_slot = UseCounts(len(counts), most), SlotQueue(len(counts))
    every_slot.append(tuple(range(len(counts))))
    made.restore(counts, every_slot)
    return made


def _numbers(numbers: bytes) -> array[int]:
    return array("q", numbers)


_CODECS = {codec.machine.name: codec for codec in (BLOCK_WORDS, LEASE_WORDS)}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    StateWords: lambda one: (_words, (one.codec.machine.name, one.words.tobytes())),
    SlotQueue: lambda one: (_queue, (one.capacity, tuple(one))),
    NativeSlotQueue: lambda one: (_queue, (one.capacity, tuple(one))),
    UseCounts: lambda one: (_uses, (one._most, bytes(one._bytes))),
    array: lambda one: (_numbers, (one.tobytes(),)),
}

# A pickle names classes and functions by numbers: to import them by name takes a third of the time of `load`.
_FIRST_NUMBER = 0x4B560000
_NUMBERED: tuple[Any, ...] = (
    *(_words, _queue, _uses, _numbers, LRUPolicy, OrderedDict, Direction, TransferJob, WorkerReport),
    *(TransferRecord, RequestRecord, Provenance, OfferHistory, DictIndex),
    *(SchedulerState, RetryStamp, LoadEnded, WalkState, DeviceBlocksState, TrackedRequest),
    *(SmallRequest, SmallCopy, ComputedRange, PublisherState, StoredKeys, RemovedKeys, BlockStored, Left),
)
for _number, _one in enumerate(_NUMBERED, _FIRST_NUMBER):
    copyreg.add_extension(_one.__module__, _one.__qualname__, _number)

# Importing this file fails if a part of some world has a field that is not declared.
Saver(ServingWorld(ServingOptions(store=StoreMode.LAZY, router=True, budgets=Budgets(crashes=1))))
