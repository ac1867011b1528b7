"""Misuse of the native types that no code of kvsm makes.

Wrong types and numbers, containers that report a wrong length or change during a call, buffers of other
formats, and keys and numbers whose own methods change the reading object.

    python tests/support/hostile_native.py FIRST COUNT    # plays these seeds, in this process

A native type must refuse with a Python error. A crash ends the process. A `SystemError` is a refusal without
a reason, so it fails the seed. An endless loop is ended after `LIMIT_S`. Each seed is printed before it runs.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
from array import array
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from native_twins import RecordingListener, spoiled, walked

from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.key_index import NativeIndex
from kvsm.core.native import _body
from kvsm.core.offloader import LogFlush, Offloader
from kvsm.core.plan import WorkerReport
from kvsm.core.policies.slot_queue import NativeSlotQueue
from kvsm.core.scheduler import KVCacheGroup, OffloadScheduler, SchedulerConfig
from kvsm.events import KINDS, OffloadConfig
from kvsm.ids import pack

LIMIT_S = 60.0
"""The time limit of one seed. Most take milliseconds."""
_CALLS = 60
_SLOTS = 40
_LARGE = (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63))
_NUMBERS = (0, 1, 2, 7, _SLOTS - 1, _SLOTS, -1, *_LARGE)
_DUNDERS = ("__len__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__repr__", "__iter__")


class Scene:
    """The objects of one seed, and the actions on them that may happen at any moment."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.depth = 0
        self.key_of: list[Any] = [b""] * _SLOTS
        self.index = NativeIndex(self.key_of, _SLOTS)
        self.queue = NativeSlotQueue(_SLOTS)
        self.queue.append(tuple(range(0, _SLOTS, 2)))
        for slot in range(0, _SLOTS, 3):
            self.index[b"key-%d" % slot] = slot
        self.options = draw_options(random)
        self.events = list(walked(self.options, seed, random.choice((0, 10, 20))))
        listener = random.choice((None, RecordingListener(), Listener(self)))
        self.ledger = Ledger(self.options.config(), listener)
        self.core = Offloader(OffloadConfig(host_blocks=_SLOTS, device_blocks=_SLOTS))
        self.core.prepare_store("stored", [b"one", b"two"], [0, 1])
        self.core._clock_ns = self.clock
        self.core.log = random.choice((None, Sink(self)))
        self.parts: list[Any] = [self.queue.frozen_part(), *(self.core.ledger.freeze() or ())]
        kinds = ((_Made, lambda one: (one.value, self.mischief())[:1], lambda value: _Made(value)),)
        self.packer = native.PackerBody(((_Part, {"kept": 0}, ("value",)),), kinds, ("constant",))
        self.packed = b""

    def objects(self) -> list[Any]:
        """Return one object of each native type."""
        return [
            *(self.index, self.queue, self.ledger, self.core, self.packer),
            self.random.choice(self.parts),
        ]

    # What may happen while native code looks at something.

    def mischief(self) -> None:
        """Change an object, or use a native object, in the middle of another use."""
        if self.depth > 2:
            return
        self.depth += 1
        try:
            self.random.choice(self._mischiefs())()
        finally:
            self.depth -= 1

    def _mischiefs(self) -> list[Callable[[], object]]:
        random, slot = self.random, self.random.randrange(_SLOTS)
        return [
            lambda: self.key_of.__delitem__(slice(slot, None)),
            lambda: self.key_of.extend([b"new"] * _SLOTS),
            lambda: self.key_of.__setitem__(slice(slot, slot + 1), [self.value()]),
            self.index.clear,
            lambda: self.queue.refill((slot,)),
            lambda: self.queue.append((slot,)),
            lambda: self.parts.append(self.queue.frozen_part()),
            lambda: self.parts.extend(self.ledger.freeze() or ()),
            lambda: random.choice(self.parts).drop(),
            lambda: random.choice(self.parts).go_on(random.choice((1, 3, 1000))),
            lambda: setattr(self.ledger, random.choice([*vars(self.ledger)]), self.value()),
            lambda: vars(self.ledger).pop(random.choice([*vars(self.ledger)])),
            lambda: setattr(self.core, random.choice([*vars(self.core)]), self.value()),
            lambda: random.choice(self.containers()).clear(),
            lambda: random.choice(self.containers()).__delitem__(slice(1, None)),
            self.call,
            self.apply,
            gc.collect,
        ]

    def containers(self) -> list[Any]:
        """Return lists, dicts and sets that native code reads."""
        owners = (self.ledger, self.core.ledger)
        inside = [
            getattr(one, name, None) for one in owners for name in dir(one) if not name.startswith("__")
        ]
        return [one for one in inside if isinstance(one, list | dict | set)] or [self.key_of]

    # Values.

    def value(self, depth: int = 0) -> Any:
        """Draw any value. depth: the number of containers around it."""
        random = self.random
        kind = random.randrange(12 if depth < 2 else 6)
        if kind < 3:
            return random.choice(_NUMBERS)
        if kind == 3:
            return random.choice(
                (None, True, 1.5, "name", "", b"", b"key-3", b"k" * 300, (), [], {}, object())
            )
        if kind == 4:
            return random.choice((Bytes, Text, Number))(self)
        if kind == 5:
            return random.choice((Collection, LongList, LongTuple))(self)
        if kind == 6:
            return tuple([self.value(depth + 1) for _ in range(random.choice((1, 2, 3, 20)))])
        if kind == 7:
            return [self.value(depth + 1) for _ in range(random.choice((1, 2, 3, 20)))]
        if kind == 8:
            return random.choice(self.objects())
        if kind == 9:
            return random.choice((pack(range(random.randrange(40))), random.randbytes(random.randrange(30))))
        return self.buffer()

    def buffer(self) -> Any:
        """Draw a buffer of any format, mostly a wrong one."""
        random = self.random
        size = random.choice((0, 1, 3, 17, 40))
        memory = np.array([random.randrange(-1, _SLOTS + 1) for _ in range(2 * size + 2)], np.int64)
        return random.choice(
            (
                memory[:size],
                np.arange(size, dtype=np.int64),
                np.arange(2 * size, dtype=np.int64)[::-2],
                memory[: 2 * size].reshape(2, size),
                memory[:size].astype(random.choice((np.int32, np.uint64, np.float64, np.bool_, ">i8", "S8"))),
                np.frombuffer(bytes(memory)[: 8 * size + 1], np.uint8)[1:].view(np.int64)
                if size
                else memory[:0],
                np.zeros(size, [("a", "i1"), ("b", "i8")])["b"],
                array(random.choice("bilqd"), [1] * size),
                memoryview(bytes(8 * size)),
                memoryview(bytearray(8 * size)).cast("q"),
                random.randbytes(8 * size),
            )
        )

    # Uses.

    def call(self) -> None:
        """Call a method of a native object, or a function of the module, with any arguments."""
        random = self.random
        if random.random() < 0.1:
            name = random.choice(_FUNCTIONS)
            called = getattr(_body, name)
        else:
            one = random.choice(self.objects())
            name = random.choice(_METHODS[_native_type(type(one))])
            called = getattr(one, name, None)
            if called is None:
                return
        arguments = [self.value() for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 5)))]
        if name == "pack":
            part = _Part()
            part.value = random.choice((self.value(), _Made([self.value()]), {b"key": {1, 2}}))
            arguments = random.choice((arguments, [(part,)]))
        if name == "unpack" and self.packed:
            damaged = bytearray(self.packed)
            damaged[random.randrange(len(damaged))] = random.randrange(256)
            arguments = [bytes(damaged[: random.randint(1, len(damaged))])]
        made = called(*arguments)
        if name == "pack" and made is not None:
            self.packed = made
        if name == "__iter__":
            list(zip(made, range(3 * _SLOTS)))

    def clock(self) -> int:
        """Tell the time to the core, which is in the middle of a call, and perhaps change its ledger."""
        if self.random.random() < 0.3:
            self.mischief()
            ledger = self.core.ledger
            if self.random.random() < 0.3 and isinstance(ledger, Ledger):
                setattr(ledger, self.random.choice([*vars(ledger)]), self.value())
        return 7

    def offer(self) -> None:
        """Offer blocks, several events at once: new and resident keys, which may need evictions."""
        random = self.random
        keys = [b"one", b"two", *(b"offered-%d" % n for n in range(30))]
        offered = random.sample(keys, random.choice((1, 2, 5, 20)))
        blocks = random.sample(range(_SLOTS), len(offered))
        parents = {random.randrange(len(offered)): random.choice(keys)}
        job = self.core.store((), offered, blocks, parents=parents).job
        if job is not None:
            self.core.submit([job.transfer])
            self.core.complete_store(job.transfer)

    def serve(self) -> None:
        """Make the calls of a request that hits, and report a store. What is called back changes objects."""
        core, random = self.core, self.random
        name = random.choice(("stored", "served", Text(self)))
        core.arrive(name)
        core.pin(name, random.choice(((0,), [0, 1], np.arange(20), self.value())), b"key-3", 1, 0, 1)
        core.admit(name, 1, 0, 0, Bytes(self), False)
        core.advance([(name, (1,), (Number(self),)), (name, (1,), (2,))])
        core.release(name)
        for transfer in list(core.ledger.transfers):
            reports: list[Any] = [WorkerReport(transfer, one, True) for one in (0, Number(self), 0)]
            core.report_all(random.choice((reports, reports[:1])), lambda _: self.mischief())
        core.flush_log(random.choice(list(LogFlush)))

    def collect(self) -> None:
        """Collect what an engine's requests offer. Their attributes may be anything, and may run code."""
        random = self.random
        core = Offloader(
            OffloadConfig(host_blocks=_SLOTS, device_blocks=_SLOTS, blocks_per_chunk=random.choice((1, 2)))
        )
        scheduler = OffloadScheduler(core, SchedulerConfig(groups=(KVCacheGroup(4),)))
        tracked, batch = scheduler.state.tracked, scheduler.offers._batch()
        for name in ("r0", "r1", "r2"):
            request = Request(name, random.choice((5, 12, 30)))
            scheduler.add_request(request)
            tracked[name].tables[0].extend(range(8))
            request.begin(self, lambda: self._spoil(random.choice((*tracked.values(), batch, tracked))))
        if random.random() < 0.5:
            self._spoil(random.choice((*tracked.values(), batch, *core.ledger.requests.values())))
        for _ in range(3):
            due = _body.find_due(
                tracked, random.choice(([*tracked], tracked, self.value())), random.random() < 0.9
            )
            _body.collect_due(batch, due or dict(tracked))

    def _spoil(self, owner: Any) -> None:
        """Give an attribute of the owner any value, or empty a container that it has."""
        if isinstance(owner, dict):
            owner.clear()
            return
        name = self.random.choice([name for name in dir(owner) if not name.startswith("__")])
        old = getattr(owner, name, None)
        if isinstance(old, list | dict | set) and self.random.random() < 0.5:
            old.clear()
        else:
            setattr(owner, name, self.value())

    def apply(self) -> None:
        """Fold an event: a right one, one with a wrong field, or one with any fields."""
        random, next_seq = self.random, getattr(self.ledger, "seq", 0)
        if self.events and random.random() < 0.7:
            event = self.events.pop(0)
            if random.random() < 0.3:
                event = spoiled(event, random)
        else:
            kind = random.choice(KINDS)
            count = len(kind.__struct_fields__) - 3
            event = kind(
                next_seq + 1 if type(next_seq) is int else 1, 0, 0, *[self.value() for _ in range(count)]
            )
        self.ledger.apply(event)

    def make(self) -> None:
        """Make a native object from any arguments, and drop it."""
        self.random.choice(_TYPES)(*[self.value() for _ in range(self.random.choice((0, 1, 2, 3)))])

    def play(self) -> None:
        """Make some uses. Each may be refused, but not with `SystemError`."""
        for _ in range(_CALLS):
            use = self.random.choice(
                (
                    self.call,
                    self.call,
                    self.call,
                    self.offer,
                    self.serve,
                    self.collect,
                    self.apply,
                    self.mischief,
                    self.make,
                )
            )
            try:
                use()
            except (SystemError, KeyboardInterrupt):
                raise
            except BaseException:
                continue


class _Made:
    """A class that a packer knows."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class _Part:
    """A part of a world."""

    value: Any


class Bytes(bytes):
    """A key whose methods do mischief."""

    scene: Scene

    def __new__(cls, scene: Scene) -> Bytes:
        made = super().__new__(cls, scene.random.choice((b"key-3", b"key-4", b"one")))
        made.scene = scene
        return made

    def __eq__(self, other: object) -> Any:
        self.scene.mischief()
        return self.scene.random.choice((True, False, NotImplemented))

    def __hash__(self) -> int:
        self.scene.mischief()
        return bytes.__hash__(self)


class Text(str):
    """A name whose methods do mischief."""

    scene: Scene

    def __new__(cls, scene: Scene) -> Text:
        made = super().__new__(cls, scene.random.choice(("stored", "request-0")))
        made.scene = scene
        return made

    def __eq__(self, other: object) -> Any:
        self.scene.mischief()
        return self.scene.random.choice((True, False, NotImplemented))

    def __hash__(self) -> int:
        self.scene.mischief()
        return str.__hash__(self)


class Number:
    """A number, perhaps a large one, whose conversion does mischief."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def __index__(self) -> int:
        self.scene.mischief()
        return self.scene.random.choice(_NUMBERS)

    def __eq__(self, other: object) -> Any:
        self.scene.mischief()
        return self.scene.random.choice((True, False, NotImplemented))

    def __hash__(self) -> int:
        return self.scene.random.choice((0, 1, 2))


class Collection:
    """Returns any value for its own attributes."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def __len__(self) -> int:
        self.scene.mischief()
        return self.scene.random.choice((0, 1, 40, 2**62))

    def __contains__(self, one: object) -> bool:
        self.scene.mischief()
        return self.scene.random.random() < 0.5

    def __getitem__(self, place: int) -> Any:
        if place > 20:
            raise IndexError(place)
        return self.scene.value()

    def __iter__(self) -> Iterator[Any]:
        self.scene.mischief()
        yield self.scene.value()


class LongList(list[Any]):
    """A list that reports a larger length."""

    def __init__(self, scene: Scene) -> None:
        super().__init__([scene.random.choice(_NUMBERS), b"key-3"])

    def __len__(self) -> int:
        return 1000


class LongTuple(tuple[Any, ...]):
    """The same."""

    def __new__(cls, scene: Scene) -> LongTuple:
        return super().__new__(cls, (scene.random.choice(_NUMBERS), b"key-3"))

    def __len__(self) -> int:
        return 1000


class Sink:
    """A log that uses the core while it is called."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def append(self, _: object) -> None:
        self._scene.mischief()

    def flush(self) -> None:
        self._scene.mischief()


class Listener:
    """A listener that uses the ledger while it is called."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def stored(self, *_: object) -> None:
        self._scene.mischief()

    def removed(self, *_: object) -> None:
        self._scene.mischief()

    def cleared(self) -> None:
        self._scene.mischief()


class Request(SmallRequest):
    """A request of an engine. To read one of its attributes may run code, and may give any value."""

    _hostile: tuple[Scene, Callable[[], None]] | None = None

    def __init__(self, name: str, computed: int) -> None:
        super().__init__(name, range(30))
        self.num_computed_tokens = computed

    def begin(self, scene: Scene, spoil: Callable[[], None]) -> None:
        """From now on it is hostile. spoil: changes the scheduler."""
        self._hostile = scene, spoil

    def __getattribute__(self, name: str) -> Any:
        hostile = None if name.startswith("_") else self._hostile
        if hostile is None:
            return super().__getattribute__(name)
        scene, spoil = hostile
        value = super().__getattribute__(name)
        if scene.random.random() < 0.1:
            scene.random.choice((spoil, scene.mischief, value.clear if isinstance(value, list) else spoil))()
        return scene.value() if scene.random.random() < 0.1 else value


def native_types() -> list[type]:
    """Return the native types that may be constructed directly."""
    return [one for one in vars(_body).values() if isinstance(one, type)]


def _native_type(cls: type) -> type:
    return next(one for one in cls.__mro__ if one.__module__ == "kvsm.core.native._body")


def methods_of(cls: type) -> list[str]:
    """Return the methods of a native type that may be called."""
    return [name for name in vars(cls) if not name.startswith("__") or name in _DUNDERS]


_TYPES = native_types()
_FROZEN = type(NativeSlotQueue(1).frozen_part())
_METHODS = {one: methods_of(one) for one in (*_TYPES, _FROZEN)}
_FUNCTIONS = [name for name, one in vars(_body).items() if callable(one) and not isinstance(one, type)]


def main(first: int, count: int) -> None:
    """Play these seeds."""
    faulthandler.enable()
    sys.unraisablehook = lambda _: None
    for seed in range(first, first + count):
        print(seed, flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        Scene(seed).play()
        gc.collect()
    faulthandler.cancel_dump_traceback_later()
    print("all were refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
