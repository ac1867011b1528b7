"""A call of the native body that gets no memory raises `MemoryError`, leaves no trace, and then succeeds.

Each allocation of each call fails once. The slow suite repeats this with `malloc`, and under sanitizers
(`test_native_build.py`).
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import sub
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "_testcapi", reason="this Python was built without the test module that fails allocations"
)

from call_twins import KEYS, make_core
from native_twins import RecordingListener, saved, walked
from scarce_memory import CALM, Allocator, OfC, OfPython, Scene, fail_each, is_counted, python_survives
from scheduler_traffic import Hand

from kvsm import events as ev
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.small_request import HASH_TOKENS, SmallRequest
from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.frozen import freeze
from kvsm.core.ledger.key_index import NativeIndex
from kvsm.core.native import _body
from kvsm.core.offloader import LogFlush, Offloader
from kvsm.core.plan import WorkerReport
from kvsm.core.policies.slot_queue import NativeSlotQueue
from kvsm.events import LOAD, STORE, CacheReset, OffloadConfig, OffloadingEvent, Restarted
from kvsm.ids import pack, unpack

if native.WHY_NOT:
    pytest.skip(f"Python folds: {native.WHY_NOT}", allow_module_level=True)
if not python_survives():
    pytest.skip("this Python itself crashes where memory lacks", allow_module_level=True)

ALLOCATORS: list[Allocator] = [OfPython(), *([OfC()] if is_counted() else [])]
MANY = tuple(range(20))
"""A batch that is an array."""
ARRAY = unpack(pack(MANY))
each_allocator = pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda one: type(one).__name__)


# The containers.


def queue_scene(use: Callable[[NativeSlotQueue], Any]) -> Scene:
    queue = NativeSlotQueue(100)
    queue.append((7, 5, 3, *range(30, 60)))
    return Scene(lambda: plain(use(queue)), lambda: list(queue))


def plain(value: Any) -> Any:
    """An array as a tuple, which can be compared."""
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


QUEUE_USES: dict[str, Callable[[NativeSlotQueue], Any]] = {
    "append": lambda queue: queue.append((9, 3)),
    "append many": lambda queue: queue.append(MANY),
    "insert": lambda queue: queue.insert((9, 3), 5),
    "remove": lambda queue: queue.remove((7, 3)),
    "refill": lambda queue: queue.refill((1, 2)),
    "which": lambda queue: queue.which((1, 7)),
    "first": lambda queue: queue.first(2),
    "first many": lambda queue: queue.first(30, {5}),
    "following": lambda queue: queue.following(7, 3),
    "length": len,
    "contains": lambda queue: 7 in queue,
}


@each_allocator
@pytest.mark.parametrize("name", QUEUE_USES)
def test_a_queue_without_memory_is_as_it_was(name: str, allocator: Allocator) -> None:
    fail_each(lambda: queue_scene(QUEUE_USES[name]), allocator)


def index_scene(use: Callable[[NativeIndex], Any]) -> Scene:
    key_of = [b""] * 100
    index = NativeIndex(key_of, 100)
    for slot in range(0, 100, 2):
        index[b"%d" % slot] = slot
    return Scene(lambda: plain(use(index)), lambda: (dict(index), list(key_of)))


class _Key(bytes):
    """An index makes plain bytes of it."""


INDEX_USES: dict[str, Callable[[NativeIndex], Any]] = {
    "get": lambda index: index.get(b"4"),
    "get a key of a class below bytes": lambda index: index.get(_Key(b"4")),
    "set": lambda index: index.__setitem__(_Key(b"new"), 1),
    "delete": lambda index: index.__delitem__(_Key(b"4")),
    "contains": lambda index: _Key(b"4") in index,
    "find": lambda index: index.find([b"4", b"none", b"6"]),
    "find_prefix": lambda index: index.find_prefix([b"2", b"4", b"5"], 1, b"", 0, 3),
    "find_prefix of many": lambda index: index.find_prefix(
        [b"%d" % slot for slot in range(0, 60, 2)], 1, b"", 0, 30
    ),
    "keys_by_slot": lambda index: index.keys_by_slot(),
    "keys_of": lambda index: index.keys_of((2, 4)),
    "keys_of many": lambda index: index.keys_of(np.arange(20)),
    "enter": lambda index: index.enter((b"a", b"b"), (1, 3)),
    "clear": lambda index: index.clear(),
}


@each_allocator
@pytest.mark.parametrize("name", INDEX_USES)
def test_an_index_without_memory_is_as_it_was(name: str, allocator: Allocator) -> None:
    fail_each(lambda: index_scene(INDEX_USES[name]), allocator)


@each_allocator
@pytest.mark.parametrize(
    "make",
    [
        lambda: list(NativeSlotQueue(100)),
        lambda: dict(NativeIndex([b""] * 100, 100)),
        lambda: plain(_body.pack_ids(MANY)),
        lambda: plain(_body.unpack_ids(_body.pack_ids((*MANY, 5, 4, 3)) or b"")),
        lambda: make_packer().pack((numbered(2),)),
    ],
    ids=["queue", "index", "pack_ids", "unpack_ids", "packer"],
)
def test_what_cannot_be_made_is_refused(make: Callable[[], Any], allocator: Allocator) -> None:
    assert fail_each(lambda: Scene(make, lambda: None), allocator) > 0


# A ledger.


class Moment:
    """A ledger before one event of a walk, as often as it is wanted."""

    def __init__(self, config: OffloadConfig, events: Sequence[OffloadingEvent], place: int) -> None:
        self._config, self._before, self.event = config, events[:place], events[place]

    def ledger(self) -> Ledger:
        ledger = Ledger(self._config, RecordingListener())
        for event in self._before:
            ledger.apply(event)
        return ledger


def moments(seeds: int) -> Iterator[Moment]:
    """The moments before each event of some walks."""
    for seed in range(seeds):
        options = draw_options(Random(seed))
        events = walked(options, seed, 14)
        for place, event in enumerate(events):
            if not isinstance(event, Restarted):  # only Python folds it, and numpy raises `SystemError` then
                yield Moment(options.config(), events, place)


def moments_of_many() -> Iterator[Moment]:
    """The moments at which a store of many blocks ends, each way, and at which its blocks are used later.
    Walks rarely fail a store of more than 20 blocks, and Python reuses the memory of smaller tuples."""
    config, many = OffloadConfig(host_blocks=40, device_blocks=40), pack(range(30))
    plan = ev.StorePlanned(1, 0, 0, (), tuple([b"key-%d" % slot for slot in range(30)]), many, many)
    submitted = (plan, ev.TransfersSubmitted(2, 0, 0, (1,)))
    stored = (*submitted, ev.WorkerReported(3, 0, 0, 1, 0, True))
    for before, event in (
        ((), plan),
        ((plan,), ev.TransferCancelled(2, 0, 0, 1)),
        (submitted, ev.WorkerReported(3, 0, 0, 1, 0, True)),
        (submitted, ev.WorkerReported(3, 0, 0, 1, 0, False)),
        (submitted, CacheReset(3, 0, 0, 1)),
        (stored, ev.BlocksEvicted(4, 0, 0, many, (), 0)),
        (stored, ev.HitMatched(4, 0, 0, "r", many)),
        (stored, CacheReset(4, 0, 0, 1)),
    ):
        yield Moment(config, (*before, event), len(before))


more_seeds = pytest.mark.parametrize("seeds", [3, pytest.param(25, marks=pytest.mark.slow)])


@each_allocator
@more_seeds
def test_an_event_is_folded_or_refused(seeds: int, allocator: Allocator) -> None:
    """An event whose fold has begun may be half folded: its core then stops, but can be read."""

    def make(moment: Moment) -> Scene:
        ledger = moment.ledger()

        def state() -> Any:
            return saved(ledger), dict(ledger.index), list(ledger.key_of)

        before = state()

        def is_half_folded() -> bool:
            ledger.not_stored(())
            return state() != before

        return Scene(lambda: ledger.apply(moment.event) and None, state, is_half_folded)

    for moment in (*moments(seeds), *moments_of_many()):
        fail_each(partial(make, moment), allocator)


@each_allocator
@more_seeds
def test_a_copy_in_progress_is_right_or_says_that_memory_lacks(seeds: int, allocator: Allocator) -> None:
    """Even if an event has no memory to keep what the copy still needs."""
    for moment in (*moments(seeds), *moments_of_many()):
        number = calm = 0
        while calm < CALM:
            ledger = moment.ledger()
            wanted, copy = saved(ledger), freeze(ledger)
            try:
                with allocator.failing(number):
                    ledger.apply(moment.event)
                while not copy.go_on():
                    pass
            except MemoryError:
                calm = 0
            else:
                calm += 1
            number += 1
            with suppress(MemoryError, RuntimeError):  # broken or dropped
                while not copy.go_on():
                    pass
                assert b"".join(copy.pieces()) == wanted, (moment.event, number)


@each_allocator
@pytest.mark.parametrize("slots", [(0, 21), np.arange(22)], ids=["tuple", "array"])
def test_which_slots_are_not_stored_is_told_or_refused(slots: Any, allocator: Allocator) -> None:
    """If there is no memory to look at an array, the error must not say that it is no array."""

    def make() -> Scene:
        ledger = matched(Offloader(CONFIG)).ledger
        return Scene(lambda: list(ledger.not_stored(slots)), lambda: saved(ledger))

    assert fail_each(make, allocator) > 0 or isinstance(allocator, OfC)


# A core.


CONFIG = OffloadConfig(host_blocks=40, device_blocks=100)


def matched(core: Offloader) -> Offloader:
    """A new core gets some stored blocks, a store and a load in flight, a match that is not loaded, and a
    store that is only planned."""
    core.end_step()  # The first one looks for plans that were never submitted, in Python.
    for keys, blocks in ((KEYS[:20], range(20)), (KEYS[20:22], range(20, 22))):
        job = core.prepare_store("r", keys, blocks).job
        assert job is not None
        core.submit([job.transfer])
        if len(keys) == 20:
            core.complete_store(job.transfer)
    core.match("q", KEYS[:2])
    load = core.prepare_load("q", [40, 41])
    assert load is not None
    core.submit([load.transfer])
    core.match("p", KEYS[:20])
    core.prepare_store("t", [b"planned"], [80])
    return core


CALLS: dict[str, Callable[[Offloader], Any]] = {
    "match": lambda core: core.match("new", KEYS[:3]),
    "match many": lambda core: core.match("new", KEYS),
    "match nothing": lambda core: core.match("new", [b"none"]),
    "prepare_store": lambda core: core.prepare_store("p", [b"new", b"newer"], [50, 51]),
    "prepare_store of many": lambda core: core.prepare_store(
        "p", [b"%d" % n for n in range(10)], range(50, 60)
    ),
    "store for several": lambda core: core.store(
        (("p", 1), ("new", 2)), [b"a", b"b", b"c"], [50, 51, 52], parents={1: b"a"}
    ),
    "store of resident": lambda core: core.store((), KEYS[:3], [50, 51, 52]),
    "prepare_load": lambda core: core.prepare_load("p", [50, 51]),
    "prepare_load of many": lambda core: core.prepare_load("p", range(50, 70)) and None,
    "report": lambda core: core.report(*live(core, 1), 0, True),
    "complete_load": lambda core: core.complete_load(*live(core, 1)),
    "complete_store": lambda core: core.complete_store(*live(core, 0)),
    "finish": lambda core: core.finish("p", aborted=False),
    "arrive": lambda core: core.arrive("new"),
    "waits_for": lambda core: core.waits_for("q"),
    "may_match": lambda core: core.may_match("q"),
    "pin": lambda core: core.pin("new", (2, 3), b"none", 3, 0, 2),
    "pin many": lambda core: core.pin("new", ARRAY, None, 1000, 1000, 1000),
    "pin a list": lambda core: core.pin("new", [2, 3], None),
    "pin nothing": lambda core: core.pin("new", (), b"none", 1, 0, 0),
    "pin the same": lambda core: core.pin("p", ARRAY, None),
    "admit": lambda core: core.admit("q", 1000, 1000, 1000, b"none", True),
    "release": lambda core: core.release("p"),
    "advance": lambda core: core.advance([("p", (1,), (2,)), ("q", (1,), (2,))]),
    "rewrite": lambda core: core.rewrite([50]),
    "flush_log": lambda core: core.flush_log(LogFlush.RESTARTED),
    "tick": lambda core: core.tick(),
    # One report: if memory lacks at a later one, those before it have taken effect.
    "report_all": lambda core: core.report_all([WorkerReport(*live(core, 1), 0, True)], str),
    "submit": lambda core: core.submit(live(core, 2)),
    "submit nothing": lambda core: core.submit([]),
    "end_step": lambda core: core.end_step(),
}


def live(core: Offloader, place: int) -> tuple[int]:
    return (list(core.ledger.transfers)[place],)


def core_scene(use: Callable[[Offloader], Any], make: Callable[[], Offloader]) -> Scene:
    core = matched(make())
    return Scene(
        lambda: use(core),
        lambda: (saved(core.ledger), core._poisoned, core._may_change),
        lambda: core._poisoned is not None,
    )


@each_allocator
@pytest.mark.parametrize("name", CALLS)
def test_a_core_without_memory_is_as_it_was_or_stops(name: str, allocator: Allocator) -> None:
    fail_each(lambda: core_scene(CALLS[name], lambda: make_core(CONFIG, publisher=True)), allocator)


@each_allocator
def test_a_store_without_memory_for_its_keys_stops_nothing(allocator: Allocator) -> None:
    """Python keeps some tuples of each length for reuse. They are taken first: else no memory would lack."""

    taken = [tuple(range(10)) for _ in range(2500)]

    def make() -> Scene:
        core = matched(make_core(CONFIG))

        def state() -> Any:
            found = saved(core.ledger)
            taken.extend([tuple(range(10)) for _ in range(50)])
            return found

        store = partial(core.prepare_store, "p", [b"%d" % n for n in range(10)], range(50, 60))
        return Scene(store, state, lambda: core._poisoned is not None)

    assert fail_each(make, allocator) > 0


# Offers.


@cache
def hand_with_due() -> Hand:
    """Three requests whose next blocks are due. One of them was offered before."""
    hand = Hand(core={"host_blocks": 40})
    requests = [SmallRequest(f"r{number}", range(100 * number, 100 * number + 13)) for number in range(3)]
    for number, request in enumerate(requests):
        hand.admit(request, [*range(4 * number, 4 * number + 4)])
        hand.compute(request, HASH_TOKENS)
    hand.end(hand.step(*requests[1:]))
    hand.core.advance([("r2", (1,), (2,))])
    for request in requests:
        hand.compute(request)
    return hand


def offers_scene(call: str) -> Scene:
    """A step that fails drops its batch. Then `next_offer` may have changed only for its requests."""
    scheduler = hand_with_due().scheduler
    tracked, batch = scheduler.state.tracked, scheduler.offers._batch()
    due = dict(tracked)
    for one in tracked.values():
        one.next_offer = 0
    parts = batch.keys, batch.blocks, batch._parents, batch._offered_before, batch._starts

    def state() -> Any:
        cursors = [(one.settled, one.offered) for one in batch._reached.values()]
        waiting = {name: one.next_offer for name, one in tracked.items()}
        return [part.copy() for part in parts], cursors, waiting  # type: ignore[attr-defined]

    def is_dropped() -> bool:
        moved = {name for name, one in tracked.items() if one.next_offer}
        return any(parts) and moved <= batch._reached.keys()

    if call == "find_due":
        return Scene(lambda: list(native.find_due(tracked, (*tracked,), True) or ()), state)
    return Scene(lambda: native.collect_due(batch, due), state, is_dropped)  # type: ignore[func-returns-value]


@each_allocator
@pytest.mark.parametrize("call", ["find_due", "collect_due"])
def test_offers_without_memory_are_as_they_were_or_dropped(call: str, allocator: Allocator) -> None:
    fail_each(lambda: offers_scene(call), allocator)


# Copies.


def copy_scene() -> Scene:
    ledger = matched(Offloader(CONFIG)).ledger

    def copy() -> Any:
        parts = ledger.freeze()  # type: ignore[attr-defined]
        for part in parts:
            while not part.go_on(1000):
                pass
        return [part.take() for part in parts]

    return Scene(copy, lambda: saved(ledger))


@each_allocator
def test_a_copy_of_the_state_without_memory_leaves_the_ledger(allocator: Allocator) -> None:
    assert fail_each(copy_scene, allocator) > 0


# Worlds.


class _Part:
    value: Any


class _Made:
    def __init__(self, value: object = None) -> None:
        self.value = value


def make_packer() -> Any:
    return native.PackerBody(
        ((_Part, {"kept": 0}, ("value",)),),
        ((_Made, lambda one: (one.value,), lambda value: _Made(value)), (_Part, None, None)),
        ("constant",),
    )


def packer_scene(use: Callable[[Any, Any], Any], part: _Part | None = None) -> Scene:
    packer, part = make_packer(), part or mixed()
    return Scene(lambda: use(packer, (part,)), lambda: packer.pack((part,)))


def mixed() -> _Part:
    """A part with objects of each kind."""
    part, inner = _Part(), _Part()
    inner.value = 5
    part.value = [1, 1000, -7, 2.5, b"bytes", "text", "constant", (1, 2), {3, 4}, {"a": _Made([6])}, inner]
    return part


def numbered(count: int) -> _Part:
    """A part with this many objects, which a packer numbers."""
    part = _Part()
    part.value = [b"%d" % number for number in range(count)]
    return part


def round_trip(packer: Any, parts: Any) -> Any:
    return packer.pack(tuple(packer.unpack(packer.pack(parts))))


@each_allocator
def test_a_world_without_memory_is_not_saved(allocator: Allocator) -> None:
    fail_each(lambda: packer_scene(lambda packer, parts: packer.pack(parts)), allocator)


@each_allocator
def test_a_world_without_memory_is_not_loaded(allocator: Allocator) -> None:
    fail_each(lambda: packer_scene(round_trip), allocator)


# Nothing is left.

CONTAINERS: list[Callable[[], Scene]] = [
    *(lambda use=use: queue_scene(use) for use in QUEUE_USES.values()),
    *(lambda use=use: index_scene(use) for name, use in INDEX_USES.items() if name != "enter"),
    lambda: packer_scene(lambda packer, parts: packer.pack(parts)),
    lambda: packer_scene(lambda packer, parts: packer.pack(parts), numbered(300)),
    lambda: packer_scene(round_trip),
    lambda: offers_scene("find_due"),
    lambda: offers_scene("collect_due"),
]
"""Calls that enter no other Python function: CPython itself leaks references if it gets no memory for a
function's frame, and from 3.13 on the objects of an unfinished comprehension."""
CORES: list[Callable[[], Scene]] = [
    *(lambda call=call: core_scene(call, lambda: Offloader(CONFIG)) for call in CALLS.values()),
    copy_scene,
]


def grown(
    scenes: list[Callable[[], Scene]], allocator: Allocator, counted: Callable[[], list[int]]
) -> list[int]:
    """By how much each count grows while each allocation of each scene fails once: the least growth of
    several rounds, because Python's own caches sometimes grow."""
    counts = [array("q", counted()) for _ in range(5)]  # made before: they would count, too
    for before in counts:
        for scene in scenes:
            fail_each(scene, allocator)
        gc.collect()
        before[:] = array("q", counted())
    return [min(map(sub, same[1:], same)) for same in zip(*counts)]


def references() -> list[int]:
    """The references to objects that live forever, and the C memory that was not freed, if it is counted."""
    fixed = [LOAD, STORE, *KEYS]
    if sys.version_info < (3, 12):  # later ones do not count these
        fixed += [None, True, False, (), "", 0, 1]
    return [*map(sys.getrefcount, fixed), *(one.live() for one in ALLOCATORS if isinstance(one, OfC))]


@each_allocator
def test_failures_of_containers_leave_nothing_behind(allocator: Allocator) -> None:
    assert max(grown(CONTAINERS, allocator, lambda: [sys.getallocatedblocks(), *references()])) < 1


@each_allocator
def test_failures_of_calls_leave_nothing_behind(allocator: Allocator) -> None:
    """Each core is new, and fills caches of Python, so only references are counted."""
    assert max(grown(CORES, allocator, references)) < 1
