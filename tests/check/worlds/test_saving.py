"""Worlds as bytes: the native body saves like `pickle`, and leaves objects of unknown classes to `pickle`."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from contextlib import suppress
from random import Random
from typing import Any
from weakref import ref

import pytest

from kvsm.check.explore.live_model import WorldScope
from kvsm.check.scopes.serving_scopes import SCOPES, ServingModel
from kvsm.check.scopes.tier_scopes import SCOPES as TIER_SCOPES
from kvsm.check.scopes.tier_scopes import TiersModel
from kvsm.check.worlds.fingerprint import canonical
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.serving_world import ServingOptions, ServingWorld
from kvsm.core import native
from kvsm.core.ledger.snapshot import digest
from kvsm.errors import ConfigError

needs_native = pytest.mark.skipif(bool(native.WHY_NOT), reason=native.WHY_NOT)
SMALL = SCOPES["small"].options


def saver_of(options: ServingOptions = SMALL, *, pickles: bool = False) -> Saver[ServingWorld]:
    saver = Saver(ServingWorld(options, keep_events=False))
    if pickles:
        saver._packer = None
    return saver


def walked(options: ServingOptions, seed: int, actions: int = 40) -> ServingWorld:
    random, world = Random(seed), ServingWorld(options, keep_events=False)
    for _ in range(actions):
        world.do(world.draw(random))
    return world


def is_packed(saved: bytes) -> bool:
    return not saved.startswith(pickle.PROTO)


@needs_native
@pytest.mark.parametrize("name", SCOPES)
def test_the_native_body_knows_each_object_of_a_serving_world(name: str) -> None:
    """Otherwise a search would be slow without anyone noticing."""
    options = SCOPES[name].options
    saver = saver_of(options)
    for seed in range(5):
        assert is_packed(saver.save(walked(options, seed)))


@needs_native
@pytest.mark.parametrize("name", TIER_SCOPES)
def test_the_native_body_knows_each_object_of_two_tiers(name: str) -> None:
    model = TiersModel(TIER_SCOPES[name])
    for seed in range(5):
        [world], random = model.initial(), Random(seed)
        for _ in range(40):
            world.do(world.draw(random))
        assert is_packed(model.save(world))


@needs_native
@pytest.mark.parametrize("name", ["full", "full-lazy", "full-hybrid", "full-restarts", "restarts-router"])
def test_both_ways_save_the_same(name: str) -> None:
    options = SCOPES[name].options
    for seed in range(5):
        world, random = walked(options, seed), Random(seed)
        packed, pickled = [
            saver.load(saver.save(world)) for saver in (saver_of(options), saver_of(options, pickles=True))
        ]
        for _ in range(12):
            assert canonical(packed, renamed=False) == canonical(pickled, renamed=False)
            assert digest(packed.engine.core.ledger) == digest(pickled.engine.core.ledger)
            action = packed.draw(random)
            assert packed.do(action) == pickled.do(action)


@pytest.mark.parametrize("pickles", [False, True])
def test_what_is_one_object_stays_one(pickles: bool) -> None:
    saver, world = saver_of(pickles=pickles), ServingWorld(SMALL, keep_events=False)
    world.do(("arrive",))
    again = saver.load(saver.save(world))
    [request] = again.engine.waiting
    assert again.engine.requests["r0"] is request
    assert again.engine.scheduler.state.tracked["r0"].request is request
    assert again.engine.scheduler.offloader is again.engine.core


@pytest.mark.parametrize("pickles", [False, True])
@pytest.mark.parametrize("memory", [[1, -1, 1 << 62, 1.5, "text", {b"key": (2, None)}], 1 << 200, "\ud800"])
def test_what_a_part_got_later_is_saved(memory: Any, pickles: bool) -> None:
    """Changed code under check may add fields."""
    saver, world = saver_of(pickles=pickles), ServingWorld(SMALL, keep_events=False)
    world.engine.scheduler.memory = memory  # type: ignore[attr-defined]
    again: Any = saver.load(saver.save(world)).engine.scheduler
    assert again.memory == memory
    assert not hasattr(saver.load(saver.save(ServingWorld(SMALL))).engine.scheduler, "memory")


class Novelty:
    """An object of a class that no list names. request: a request of the engine."""

    def __init__(self, request: object) -> None:
        self.request = request


def test_an_object_of_another_class_is_left_to_pickle() -> None:
    """Then the whole world is pickled, so that shared objects stay shared."""
    saver, world = saver_of(), ServingWorld(SMALL, keep_events=False)
    world.do(("arrive",))
    world.engine.novelty = Novelty(world.engine.waiting[0])  # type: ignore[attr-defined]
    saved = saver.save(world)
    assert not is_packed(saved)
    again: Any = saver.load(saved).engine
    assert again.novelty.request is again.waiting[0]


@needs_native
def test_damaged_bytes_are_refused() -> None:
    """They are not read past their end."""
    saver = saver_of()
    saved, random = saver.save(walked(SMALL, 1)), Random(1)
    for end in range(len(saved)):
        with pytest.raises(ValueError, match="cut short"):
            saver._packer.unpack(saved[:end])  # type: ignore[union-attr]
    for _ in range(2000):
        damaged = bytearray(saved)
        damaged[random.randrange(2, len(saved))] = random.randrange(256)
        with suppress(Exception):
            saver.load(bytes(damaged))


@needs_native
def test_an_object_of_a_class_that_makes_none_is_not_loaded() -> None:
    """Such a class has no `__new__` to call."""

    class Part:
        value: object

    iterator, part = iter(()), Part()
    part.value = iterator
    packer = native.PackerBody(((Part, {}, ("value",)),), ((type(iterator), lambda _: (1,), ("one",)),), ())
    with pytest.raises(TypeError, match="makes no objects"):
        packer.unpack(packer.pack((part,)))


@needs_native
def test_saving_and_loading_keeps_no_memory() -> None:
    """Even one leaked object of the smallest size would take 28 bytes per call."""
    saver, world, times = saver_of(), walked(SMALL, 2), 400
    saved = saver.save(world)
    taken = []
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(times):
                assert saver.save(saver.load(saved)) == saved
                with suppress(ValueError):
                    saver.load(saved[:-9])
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert taken[2] - taken[1] < 28 * times


@pytest.mark.parametrize(
    ("make_model", "scope"),
    [
        (ServingModel, SCOPES["full-restarts"]),
        (ServingModel, SCOPES["router"]),
        *((TiersModel, scope) for scope in TIER_SCOPES.values()),
    ],
)
def test_a_world_that_is_dropped_is_gone_at_once(make_model: Any, scope: WorldScope) -> None:
    """A search drops a world per action.

    In a reference cycle they would stay until the garbage collection.
    """
    model = make_model(scope)
    [start] = model.initial()
    world = model.load(model.save(start))
    random, gone = Random(1), ref(world)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            world.do(world.draw(random))
        model.save(world)
        model.fingerprint(world)
        del world
        assert gone() is None
    finally:
        gc.enable()


def test_a_model_is_sent_to_other_processes() -> None:
    model = pickle.loads(pickle.dumps(ServingModel(SCOPES["small"])))
    [start] = model.initial()
    assert model.fingerprint(model.load(model.save(start))) == model.fingerprint(start)


@needs_native
def test_a_machine_without_the_native_body_says_that_it_cannot_load_what_another_saved() -> None:
    """The machines of a cluster may have different installations."""
    saved = saver_of(SMALL).save(walked(SMALL, 1))
    with pytest.raises(ConfigError, match=r"install kvsm alike on all machines, or set KVSM_NATIVE=0 on all"):
        saver_of(SMALL, pickles=True).load(saved)
