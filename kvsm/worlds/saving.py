"""A serving world as bytes, and back: what changes is pickled, what never does is shared with a blank world.

    saver = Saver(ServingWorld(options, keep_events=False))
    again = saver.load(saver.save(world))

The log is not saved: a world that was loaded knows the events since then. `PARTS` says what is saved of each
object, and what is not; `check_covered` refuses a world with an attribute that is in neither list, so that
none is lost in silence when one is added.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsm.errors import ConfigError
from kvsm.policies.slot_queue import SlotQueue
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.words import StateWords

if TYPE_CHECKING:
    from kvsm.worlds.serving import ServingWorld


class Part(NamedTuple):
    """An object of the world, by its path. saved: what changes. shared: what is the same for ever, or is made
    anew by `load`."""

    path: str
    saved: tuple[str, ...]
    shared: tuple[str, ...]


PARTS = (
    Part(
        "",
        ("left", "arrived", "owes_step", "over"),
        ("options", "keep_events", "engine", "router", "_mark", "_contents"),
    ),
    Part(
        "engine",
        (
            "waiting",
            "running",
            "requests",
            "sending",
            "preempted",
            "states",
            "computing",
            "copies",
            "reports",
            "brought",
            "device",
            "host",
            "_fresh",
        ),
        (
            # The configuration.
            *("groups", "workers", "config", "references", "prefix_cache", "asynchronous", "drafts"),
            "chunk_tokens",
            # Other parts.
            *("core", "scheduler", "pool"),
            # What the last action came to, for who looks at it.
            *("log", "results", "plan"),
        ),
    ),
    Part("engine.pool", ("references", "queue", "caches", "cached"), ()),
    Part(
        "engine.scheduler",
        (
            "_tracked",
            "_held",
            "_tried_at",
            "_planned",
            "_promises",
            "_ended_loads",
            "_sending",
            "_given",
            "_taken_back",
        ),
        ("offloader", "config", "_chunk", "_pool", "_walk"),
    ),
    Part(
        "engine.core",
        ("step", "_flushed_at", "_poisoned"),
        ("config", "publisher", "ledger", "log", "_clock_ns"),
    ),
    Part(
        "engine.core.ledger",
        (
            *("seq", "step", "tick", "epoch", "voided_at", "ended_at", "forgotten_at"),
            *("blocks", "leases", "generation", "key_of", "index", "free", "policy"),
            *("transfers", "requests", "deferred", "provenance", "offers"),
        ),
        ("config", "listener", "generation_view", "planned_word"),
    ),
)
WALK = Part(
    "engine.scheduler._walk",
    ("_ahead", "_walked_at", "_refused", "_paid"),
    ("_offloader", "_pool", "_target"),
)
"""A part of a world that stores lazily."""
ROUTER = (
    Part("router", ("known",), ("publisher", "wants_tokens")),
    Part("router.publisher", ("_changes", "_payloads", "_blocks_of", "_chunks_with"), ("self_describing",)),
)
"""Parts of a world with a router."""


def _parts_of(world: ServingWorld) -> tuple[Part, ...]:
    lazy = () if world.engine.scheduler._walk is None else (WALK,)
    return (*PARTS, *lazy, *(ROUTER if world.router else ()))


class Saver:
    """Saves and loads worlds of the same options. blank: one of them; it is not changed."""

    def __init__(self, blank: ServingWorld) -> None:
        check_covered(blank)
        self._parts = _parts_of(blank)
        self._is_lazy = WALK in self._parts
        paths = [f"{part.path}.{name}".lstrip(".") for part in self._parts for name in part.saved]
        self._values = attrgetter(*paths)
        self._originals = [attrgetter(part.path)(blank) if part.path else blank for part in self._parts]

    def save(self, world: ServingWorld) -> bytes:
        """What changes of it, in one pickle: what is one object in the world is one object in the copy."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(self._values(world))
        return buffer.getvalue()

    def load(self, saved: bytes) -> ServingWorld:
        """A world of its own, as if it were the one that was saved."""
        values = iter(pickle.loads(saved))
        world: ServingWorld
        world, engine, pool, scheduler, core, ledger, *others = [
            _copied(original, part.saved, values) for original, part in zip(self._originals, self._parts)
        ]
        world.engine, world._mark = engine, 0
        engine.pool, engine.scheduler, engine.core, engine.results = pool, scheduler, core, []
        engine.log = core.log = type(engine.log)()
        core.ledger, scheduler.offloader = ledger, core
        if scheduler._pool is not None:
            scheduler._pool = pool
        if self._is_lazy:
            walk = scheduler._walk = others.pop(0)
            walk._offloader, walk._pool = core, pool
        publisher = None
        if others:
            world.router, publisher = others
            world.router.publisher = core.publisher = publisher
        # It is a copy that is made here, not a ledger that is changed.
        vars(ledger).update(
            listener=publisher,
            generation_view=np.frombuffer(ledger.generation, dtype=np.int64),
        )
        return world


def _copied(original: Any, names: Iterable[str], values: Iterator[Any]) -> Any:
    """An object like this one, with the next of these values under these names."""
    copy = object.__new__(type(original))
    copy.__dict__ = attributes = original.__dict__.copy()
    # By the names first: else a value would be taken, and lost, when there is no name left for it.
    attributes.update(zip(names, values))
    return copy


def check_covered(world: ServingWorld) -> None:
    """Raises `ConfigError` if it has an attribute of which nothing is said here."""
    for part in _parts_of(world):
        has = set(vars(attrgetter(part.path)(world) if part.path else world))
        unknown = has ^ {*part.saved, *part.shared}
        if unknown:
            place = part.path or "the world"
            raise ConfigError(f"{place}: is {sorted(unknown)} to be saved? kvsm.worlds.saving does not say")


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


def _numbers(numbers: bytes) -> array[int]:
    return array("q", numbers)


_CODECS = {codec.machine.name: codec for codec in (BLOCK_WORDS, LEASE_WORDS)}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    StateWords: lambda one: (_words, (one.codec.machine.name, one.words.tobytes())),
    SlotQueue: lambda one: (_queue, (len(one._place), tuple(one))),
    array: lambda one: (_numbers, (one.tobytes(),)),
}
