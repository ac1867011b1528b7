"""The copy engine world: every state of a small scope is right, and each removed ordering is found.

S12, S15, S6, S9, B02, B03, B37; with the real stream copy engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Exploration, Verdict
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.world import Action
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.simulated import SimulatedDevice
from kvsm.copies.streams import StreamCopyEngine
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction

TINY = CopyEngineWorldOptions(copies=1, kernels=1, holds=0)


def explored(options: CopyEngineWorldOptions, world: Any = CopyEngineWorld, **made_of: Any) -> Exploration:
    return explore(RerunModel("copies", "", lambda: world(options, **made_of)))


class AnyBlock(CopyEngineWorld):
    """A world that tells untouched blocks apart, although they are interchangeable."""

    def _choosable(self, side: str) -> range:
        return range(len(self._expected[side]))


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (TINY, 184),
        (CopyEngineWorldOptions(copies=1, kernels=1, holds=1, bad=1), 746),
        (CopyEngineWorldOptions(copies=1, kernels=1, holds=0, marks=1, closes=True), 1018),
        (CopyEngineWorldOptions(copies=1, kernels=0, holds=0, transfer_blocks=2, host_blocks=2, bad=1), 81),
    ],
    ids=str,
)
def test_a_small_world_is_right_in_every_state(options: CopyEngineWorldOptions, states: int) -> None:
    """Order of copies (S12), correct bytes (S15), failure is not success (S6), progress (S9).

    The numbers of states are pinned.
    """
    found = explored(options)
    assert (found.verdict, found.refutation) == (Verdict.PROVED, None)
    assert found.states == states


def test_without_the_symmetry_of_blocks_there_are_more_states_and_the_verdict_is_the_same() -> None:
    found = explored(TINY, AnyBlock)
    assert (found.verdict, found.states) == (Verdict.PROVED, 367)


# An order less, and the world sees it.


class StoresDoNotWait(StreamCopyEngine):
    """B02."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        self._streams[Direction.STORE].wait = lambda _event: None  # type: ignore[method-assign]


class LoadsDoNotWait(StreamCopyEngine):
    """B03."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device)
        self._streams[Direction.LOAD].wait = lambda _event: None  # type: ignore[method-assign]


class DropsItsTable(StreamCopyEngine):
    """B37: memory that the device still reads is freed when the call returns."""

    def _issue(self, transfer: Any) -> None:
        super()._issue(transfer)
        transfer.keep = None


class ReusesItsTable(SimulatedDevice):
    """B37: all copies share one table of ids, which each copy overwrites."""

    table: Any = None

    def copy(self, stream: Any, transfer: int, direction: Direction, pairs: Any) -> object:
        if self.table is None:
            self.table = np.zeros((2, 4), np.int64)
        ids = self.table[:, : len(pairs[1])]
        ids[0], ids[1] = pairs
        return super().copy(stream, transfer, direction, (ids[0], ids[1]))


class HoldsNothing(StreamCopyEngine):
    def hold_compute(self, transfers: Iterable[int]) -> None: ...


class EndsAtOnce(StreamCopyEngine):
    """A copy counts as ended as soon as it is queued on the device."""

    def _is_over(self, _transfer: Any) -> bool:
        return True


class Forgives(StreamCopyEngine):
    """A copy that failed counts as good."""

    def _is_over(self, transfer: Any) -> bool:
        over = super()._is_over(transfer)
        transfer.error = ""
        return over


class EndsTwice(StreamCopyEngine):
    last: Sequence[CopyResult] = ()

    def poll(self) -> list[CopyResult]:
        again, self.last = self.last, super().poll()
        return [*again, *self.last]


class NeverEnds(StreamCopyEngine):
    def _collect(self) -> None: ...


class DoesNotWait(StreamCopyEngine):
    def wait(self, transfers: Iterable[int]) -> None: ...


class CopiesToTheWrongBlock(SimulatedDevice):
    """The order of copies is right; only the bytes are wrong."""

    def copy(self, stream: Any, transfer: int, direction: Direction, pairs: Any) -> object:
        device, host = pairs
        return super().copy(stream, transfer, direction, (tuple(1 - one for one in device), host))


WITH_HOLD = CopyEngineWorldOptions(copies=1, kernels=1, holds=1)
WITH_BAD = CopyEngineWorldOptions(copies=1, kernels=0, holds=0, bad=1)
TWO_COPIES = CopyEngineWorldOptions(copies=2, kernels=0, holds=0, host_blocks=2)


@pytest.mark.parametrize(
    ("broken", "options", "told", "steps"),
    [
        (
            {"make_engine": StoresDoNotWait},
            TINY,
            "order of copies (S12): device block 0: kernel 'write of block 0'",
            3,
        ),
        (
            {"make_engine": LoadsDoNotWait},
            TINY,
            "order of copies (S12): device block 0: kernel 'write of block 0'",
            3,
        ),
        ({"make_engine": DropsItsTable}, TINY, "order of copies (S12): id table of transfer 4", 2),
        ({"make_device": ReusesItsTable}, TWO_COPIES, "order of copies (S12): id table 0", 3),
        ({"make_engine": HoldsNothing}, WITH_HOLD, "order of copies (S12): device block 0", 4),
        ({"make_engine": EndsAtOnce}, TINY, "order of copies (S12): id table of transfer 4", 6),
        (
            {"make_engine": Forgives},
            WITH_BAD,
            "failure is not success (S6): the end of transfer 4 is good; it is not",
            2,
        ),
        ({"make_engine": EndsTwice}, TINY, "progress (S9): transfer 4 has ended twice", 3),
        ({"make_engine": NeverEnds}, TINY, "progress (S9): transfer 4 was waited for, and has not ended", 2),
        (
            {"make_engine": DoesNotWait},
            TINY,
            "progress (S9): transfer 4 was waited for, and has not ended",
            2,
        ),
        (
            {"make_device": CopiesToTheWrongBlock},
            TINY,
            "correct bytes (S15): host block 0 holds 1, where 0 must be",
            2,
        ),
    ],
    ids=lambda one: next(iter(one.values())).__name__ if isinstance(one, dict) else "",
)
def test_what_is_broken_is_found_by_a_shortest_way(
    broken: dict[str, Any], options: CopyEngineWorldOptions, told: str, steps: int
) -> None:
    found = explored(options, **broken)
    assert found.refutation is not None
    assert str(found.refutation.finding).startswith(told)
    assert len(found.refutation.path) == steps


# The world itself.


def test_worlds_of_one_fingerprint_go_on_alike() -> None:
    """All paths to a state of a small scope have the same possible actions, which lead to the same states."""
    options = CopyEngineWorldOptions(copies=2, kernels=0, holds=1, bad=1)
    following: dict[bytes, dict[Action, bytes]] = {}

    def world_after(path: Sequence[Action]) -> CopyEngineWorld:
        world = CopyEngineWorld(options)
        for action in path:
            assert world.do(action)
        return world

    def successors(path: tuple[Action, ...]) -> dict[Action, bytes]:
        actions = world_after(path).actions()
        return {action: world_after((*path, action)).fingerprint() for action in actions}

    level: list[tuple[Action, ...]] = [()]
    compared = 0
    random = Random(5)
    for _ in range(7):
        ways = [(*path, action) for path in level for action in successors(path)]
        level = []
        for way in random.sample(ways, min(len(ways), 40)):
            fingerprint, after = world_after(way).fingerprint(), successors(way)
            compared += fingerprint in following
            assert following.setdefault(fingerprint, after) == after
            level.append(way)
    assert compared > 50


def test_what_cannot_happen_changes_nothing() -> None:
    world = CopyEngineWorld(TINY)
    before = world.fingerprint()
    for action in (("poll",), ("wait", 0), ("hold", 0), ("mark",), ("close",), ("step", "compute", 0)):
        assert not world.do(action)
    assert not world.do(("store", 1, 0, 1))
    assert not world.do(("write", 7))
    assert world.fingerprint() == before


def test_a_seed_draws_the_same_actions_and_each_of_them_can_happen() -> None:
    def drawn() -> list[Action]:
        random, world, done = Random(3), CopyEngineWorld(CopyEngineWorldOptions(copies=4, kernels=4)), []
        for _ in range(60):
            if world.is_at_rest and not world.actions():
                break
            done.append(world.draw(random))
            assert world.do(done[-1])
        return done

    assert drawn() == drawn()
    assert len({action[0] for action in drawn()}) > 4


def test_winding_down_ends_at_rest() -> None:
    """Progress (S9)."""
    world = CopyEngineWorld(CopyEngineWorldOptions(kernels=2))
    for action in (("write", 0), ("store", 0, 0, 1), ("read", 1)):
        assert world.do(action)
    while action := world.wind_down():
        assert world.do(action)
    assert world.is_at_rest
    world.check()


def test_bytes_are_held_against_the_reference_at_rest() -> None:
    """Correct bytes (S15)."""
    world = CopyEngineWorld(CopyEngineWorldOptions())
    world._pools["host"][0] = 99
    with pytest.raises(
        PropertyBroken, match=r"correct bytes \(S15\): host block 0 holds 99, where 2 must be"
    ):
        world.check()


@pytest.mark.parametrize("name", ["device_blocks", "host_blocks", "transfer_blocks", "copies"])
def test_a_world_that_is_too_small_or_too_large_is_refused(name: str) -> None:
    for number in (0, 9):
        with pytest.raises(ConfigError, match=f"{name} is {number}; it must be from 1 to 8"):
            CopyEngineWorldOptions(**{name: number})
