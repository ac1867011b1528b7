"""Save a world of declared parts as bytes, and load it.

    saver = Saver(ServingWorld(options, keep_events=False))
    again = saver.load(saver.save(world))

Saved are the fields that the world's parts declare (`kvsm.core.ledger.canonical`), and any attribute that a
part has got since it was created: modified code that is being checked may keep state of its own there. The
log is not saved: a loaded world has only the events since it was loaded.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from kvsm.check.worlds.crash import Left
from kvsm.check.worlds.refusing_policy import RefusingPolicy
from kvsm.check.worlds.serving_world import Budgets, ServingOptions, ServingWorld
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.small_workers import ComputedRange, SmallCopy
from kvsm.check.worlds.tier_rank import CopyInFlight, DiskSlot, RankMemory
from kvsm.core import native
from kvsm.core.kv_events import BlockStored, PublisherState, RemovedKeys, StoredKeys
from kvsm.core.ledger import DictIndex, OfferHistory, Provenance, RequestRecord, TransferRecord
from kvsm.core.ledger.canonical import Dropped, Kept, Part, Remade, Seen, rules_of
from kvsm.core.offloader import PendingHit
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.policies.slot_queue import NativeSlotQueue, SlotQueue
from kvsm.core.policies.use_counts import UseCounts
from kvsm.core.scheduler import StoreMode
from kvsm.core.scheduler.device_blocks import DeviceBlocksState
from kvsm.core.scheduler.free_queue import WalkState
from kvsm.core.scheduler.groups import KeyLayout
from kvsm.core.scheduler.offers import OffersState
from kvsm.core.scheduler.request_params import HandOverParams
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.core.scheduler.scheduler_state import LoadEnded, SchedulerState
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.words import StateWords
from kvsm.tiers.disk.era import DiskEra
from kvsm.tiers.disk.formats import SlotGeneration
from kvsm.tiers.disk_tier import TierCopy, TierCounts


class Saved(Protocol):
    """A world that can be saved. Its parts have declared their fields; the first part is the world itself."""

    def parts(self) -> Sequence[object]:
        """All objects of the world, in a fixed order."""


AnySaved = TypeVar("AnySaved", bound=Saved)


class _Plan(NamedTuple):
    """How a part is saved and restored.

    place: its position among the parts.
    original: the same part of another world. Restored parts share its constant fields.
    saved: the names of the saved fields.
    """

    place: int
    original: Any
    saved: tuple[str, ...]
    links: tuple[tuple[str, int], ...]
    """(field that refers to another part, place of that part)."""
    remade: tuple[tuple[str, Callable[[Any], Any]], ...]
    """(field that is computed on load, the function of the restored part that computes it)."""

    def saved_of(self, part: object) -> list[Any]:
        """The values of the saved fields, followed by a dict of undeclared attributes if the part has any."""
        fields = vars(part)
        values = [fields[name] for name in self.saved]
        if len(fields) > len(vars(self.original)):
            values.append({name: fields[name] for name in fields.keys() - vars(self.original).keys()})
        return values

    def packed(self) -> tuple[type, dict[str, Any], tuple[str, ...]]:
        """This plan in the form that the native body takes."""
        return type(self.original), vars(self.original), (*self.saved, *(name for name, _ in self.links))


class Saver(Generic[AnySaved]):
    """Saves and loads worlds with the same options. blank: such a world; it is not changed.

    An object that several fields share is still one object after loading. The native body handles the classes
    that are listed below. If a world contains other objects, as modified code may add, `pickle` saves it.

    Raises `ConfigError` if a part has a field that it has not declared.
    """

    def __init__(self, blank: AnySaved) -> None:
        parts = blank.parts()
        self._num_parts = len(parts)
        self._plans = [_plan(place, part, parts) for place, part in enumerate(parts) if part is not None]
        self._remade = [(plan.place, *one) for plan in self._plans for one in plan.remade]
        self._packer = None
        if not native.WHY_NOT:
            self._packer = native.PackerBody(tuple(plan.packed() for plan in self._plans), _KINDS, _CONSTANTS)

    def save(self, world: AnySaved) -> bytes:
        """The saved fields of a world as bytes."""
        parts = world.parts()
        if self._packer is not None:
            packed = self._packer.pack(tuple([parts[plan.place] for plan in self._plans]))
            if packed is not None:
                return packed
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCERS
        pickler.dump([plan.saved_of(parts[plan.place]) for plan in self._plans])
        return buffer.getvalue()

    def load(self, saved: bytes) -> AnySaved:
        """A new world, equal to the saved one.

        Raises `ConfigError` if the native body of another process has saved it, and this process has none.
        """
        copies: list[Any] = [None] * self._num_parts
        if saved.startswith(_PICKLED):
            self._load_pickled(copies, saved)
        elif self._packer is None:
            raise ConfigError(
                f"a state was saved with the native body, and that does not run here ({native.WHY_NOT}); "
                f"install kvsm alike on all machines, or set {native.VARIABLE}=0 on all"
            )
        else:
            for plan, copy in zip(self._plans, self._packer.unpack(saved)):
                copies[plan.place] = copy
        for place, name, make in self._remade:
            vars(copies[place])[name] = make(copies[place])
        world: AnySaved = copies[0]
        return world

    def _load_pickled(self, copies: list[Any], saved: bytes) -> None:
        for plan, values in zip(self._plans, pickle.loads(saved)):
            copies[plan.place] = copy = plan.original.__new__(type(plan.original))
            copy.__dict__ = fields = vars(plan.original).copy()
            fields.update(zip(plan.saved, values))
            if len(values) > len(plan.saved):
                fields.update(values[-1])
        for plan in self._plans:
            vars(copies[plan.place]).update({name: copies[place] for name, place in plan.links})


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


_PICKLED = pickle.PROTO

# How to save objects that share memory with numpy, and objects whose fields alone do not restore them.


def _words(machine: str, words: bytes, totals: bytes) -> StateWords:
    # Skip the constructor, which would fill the arrays first. The marks are scratch memory of a single call.
    made = StateWords.__new__(StateWords)
    made.codec, made.size, made.words = _CODECS[machine], len(words) // 4, array("i", words)
    made.view, made._mark = np.frombuffer(made.words, np.int32), np.empty(made.size, np.int64)
    made.totals = array("q", totals)
    return made


def _queue(capacity: int, *slots: int) -> SlotQueue:
    queue = SlotQueue(capacity)
    queue.append(slots)
    return queue


def _native_queue(capacity: int, *slots: int) -> SlotQueue:
    queue = NativeSlotQueue(capacity)
    queue.append(slots)
    return queue


def _keys(capacity: int, *keys: bytes) -> KeyQueue:
    queue = KeyQueue(capacity)
    queue.add(keys, capacity)
    return queue


def _uses(most: int, counts: bytes) -> UseCounts:
    # `restore` takes the counts of the slots of a queue; this queue has all slots.
    made, every_slot = UseCounts(len(counts), most), SlotQueue(len(counts))
    every_slot.append(tuple(range(len(counts))))
    made.restore(counts, every_slot)
    return made


def _numbers(numbers: bytes) -> array[int]:
    return array("q", numbers)


def _index(key_of: list[bytes], *items: tuple[bytes, int]) -> DictIndex:
    made = DictIndex(key_of)
    made.update(items)
    return made


def _reduced(take: Callable[[Any], tuple[Any, ...]], make: Callable[..., Any], one: Any) -> Any:
    return make, take(one)


_CODECS = {codec.machine.name: codec for codec in (BLOCK_WORDS, LEASE_WORDS)}
_Kind = tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]
"""(the values to save of an object, the function that makes an object from these values)."""
_OWN_KINDS: dict[type, _Kind] = {
    StateWords: (lambda one: (one.codec.machine.name, one.words.tobytes(), one.totals.tobytes()), _words),
    SlotQueue: (lambda one: (one.capacity, *one), _queue),
    NativeSlotQueue: (lambda one: (one.capacity, *one), _native_queue),
    KeyQueue: (lambda one: (one.capacity, *one), _keys),
    UseCounts: (lambda one: (one._most, bytes(one._bytes)), _uses),
    array: (lambda one: (one.tobytes(),), _numbers),
    DictIndex: (lambda one: (one._key_of, *one.items()), _index),
    OrderedDict: (lambda one: (tuple(one.items()),), OrderedDict),
    range: (attrgetter("start", "stop", "step"), range),
    Counter: (lambda one: (dict(one),), Counter),
}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    cls: partial(_reduced, *kind) for cls, kind in _OWN_KINDS.items()
}

_STRUCTS = (
    *(TransferJob, WorkerReport, TransferRecord, RequestRecord, SchedulerState, OffersState, LoadEnded),
    *(WalkState, DeviceBlocksState, SmallCopy, ComputedRange, PublisherState, StoredKeys, RemovedKeys),
    *(RetryStamp, BlockStored, Left, KeyLayout, HandOverParams),
    *(CopyInFlight, PendingHit, TierCopy, TierCounts, DiskSlot, SlotGeneration, DiskEra),
)
"""Classes that are constructed from their fields, in order."""
_SLOTTED = Provenance, OfferHistory, TrackedRequest
"""Classes with `__slots__`."""
_PLAIN = SmallRequest, LRUPolicy, RefusingPolicy, RankMemory
"""Classes with a `__dict__`."""


def _fields(cls: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = cls._fields if issubclass(cls, tuple) else cls.__struct_fields__
    return fields


def _all_fields(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = _fields(cls)
    return attrgetter(*names) if len(names) > 1 else lambda one: (getattr(one, names[0]),)


_KINDS: tuple[tuple[type, Any, Any], ...] = (
    *((cls, take, make) for cls, (take, make) in _OWN_KINDS.items()),
    *((cls, _all_fields(cls), cls) for cls in _STRUCTS),
    *((cls, attrgetter(*cls.__slots__), cls.__slots__) for cls in _SLOTTED),
    *((cls, None, None) for cls in _PLAIN),
)
_CONSTANTS = (*Direction, *_CODECS, *rules_of(SmallRequest("", ())), "_queue")

# A pickle names classes and functions by number: importing them by name takes a third of the time of `load`.
_FIRST_NUMBER = 0x4B560000
_MAKERS: tuple[Any, ...] = _words, _queue, _native_queue, _keys, _uses, _numbers, _index, OrderedDict
for _number, _one in enumerate((*_MAKERS, Direction, *_STRUCTS, *_SLOTTED, *_PLAIN), _FIRST_NUMBER):
    copyreg.add_extension(_one.__module__, _one.__qualname__, _number)

# Importing this file fails if a part of a serving world has a field that is not declared.
Saver(ServingWorld(ServingOptions(store=StoreMode.LAZY, router=True, budgets=Budgets(crashes=1))))
