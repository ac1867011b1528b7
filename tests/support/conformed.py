"""Targets for the tests of `kvsm conform`, which walks them in other processes."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from random import Random
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, rule

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.world import Action
from kvsm.copies import CopyEngine, CopyResult, HostCopyEngine
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.testing import CopyEngineMachine


class Shelf:
    """A world of a number of books. Checks conservation (S1) at each return, if there is one."""

    events: tuple[OffloadingEvent, ...] = ()
    returns = True

    def __init__(self, random: Random) -> None:
        self.size = self.here = random.randint(2, 4)

    def actions(self) -> list[Action]:
        return [("lend",)] * (self.here > 0) + [("return",)] * (self.here < self.size and self.returns)

    def draw(self, random: Random) -> Action:
        return random.choice(self.actions())

    def do(self, action: Action) -> bool:
        if action not in self.actions():
            return False
        self.here += 1 if action == ("return",) else -1
        if action == ("return",):
            self.returned()
        return True

    def returned(self) -> None:
        count_case(Property.CONSERVATION, "books that were returned")

    def check(self) -> None:
        pass

    def wind_down(self) -> Action | None:
        return ("return",) if self.here < self.size and self.returns else None

    def describe(self) -> dict[str, str]:
        return {"here": str(self.here)}

    def fingerprint(self) -> bytes:
        return bytes((self.size, self.here))


class LendsOnly(Shelf):
    """A shelf on which no case of any check arises."""

    returns = False


class CountsNothing(Shelf):
    """A shelf whose check had nothing to look at."""

    def returned(self) -> None:
        count_case(Property.CONSERVATION, "books that were returned", 0)


class TwoFaults(Shelf):
    """Breaks one of two properties, by its size. The message has another number each time."""

    made = 0

    def returned(self) -> None:
        super().returned()
        TwoFaults.made += 1
        if self.size == 4:
            raise PropertyBroken(Property.CONSERVATION, f"book b{self.made} is lost")
        raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, f"[b{self.made}, b1] are returned twice")


class EndsTheProcess(Shelf):
    def returned(self) -> None:
        ctypes.string_at(0)


class _FailsAtTheThirdPoll(HostCopyEngine):
    polls = 0

    def fail(self) -> None:
        raise NotImplementedError

    def poll(self) -> list[CopyResult]:
        self.polls += 1
        if self.polls == 3:
            self.fail()
        return super().poll()


class _Exits(_FailsAtTheThirdPoll):
    def fail(self) -> None:
        os._exit(7)


class _ExitsNicely(_FailsAtTheThirdPoll):
    def fail(self) -> None:
        sys.exit(3)


class _Hangs(_FailsAtTheThirdPoll):
    def fail(self) -> None:
        threading.Event().wait()


class Exits(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return _Exits(device, host)


class ExitsNicely(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return _ExitsNicely(device, host)


class Hangs(CopyEngineMachine):
    def make_engine(self, device: Any, host: Any) -> CopyEngine:
        return _Hangs(device, host)


class NeedsArguments(RuleBasedStateMachine):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @rule()
    def look(self) -> None:
        pass


class OnlyLooks(NeedsArguments):
    """Its rules do nothing, and no check counts a case."""

    def __init__(self) -> None:
        super().__init__(1)


class HasNoRules(RuleBasedStateMachine):
    pass
