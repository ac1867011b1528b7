"""What the machines share: when properties are looked at, and what is told of a run that failed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from kvsm.testing.profiles import for_machines


class PropertyMachine(RuleBasedStateMachine):
    """A Hypothesis machine that checks after each rule, winds down at the end, and tells what happened.

    A subclass fills in `check`, `wind_down`, `trace` and `close`. They are called only once `started` is set,
    which its first rule does.
    """

    started = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.TestCase.settings = for_machines(cls.TestCase.settings)

    def check(self) -> None:
        """What must hold after each rule. (Not an `@invariant`: those print a line a step.)"""

    def wind_down(self) -> None:
        """Lead a run in which nothing went wrong to its end, and check that."""

    def trace(self) -> Iterable[str]:
        """What happened, in words; noted when a run failed."""
        return ()

    def close(self) -> None:
        """Give back what the machine holds, however the run ended."""

    def check_invariants(self, *args: Any, **options: Any) -> None:
        super().check_invariants(*args, **options)
        if self.started:
            self.check()

    def teardown(self) -> None:
        if not self.started:
            return
        # Hypothesis calls this in a `finally`: what failed before must not be hidden by what fails now.
        failed = sys.exc_info()[0] is not None
        try:
            if not failed:
                failed = True
                self.wind_down()
                failed = False
        finally:
            if failed:
                for line in self.trace():
                    note(line)
            self.close()
