"""What the machines share: when properties are checked, and what a failed run tells."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from kvsm.testing.profiles import for_machines


class PropertyMachine(RuleBasedStateMachine):
    """A Hypothesis machine that checks after each rule, winds down at the end, and tells what happened.

    A subclass gives `check`, `wind_down`, `trace` and `close`. They are called after its first rule has set
    `started`.
    """

    started = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.TestCase.settings = for_machines(cls.TestCase.settings)

    def check(self) -> None:
        """What must hold after each rule. (Not an `@invariant`: those print a line a step.)"""

    def wind_down(self) -> None:
        """End a run that has not failed, and check its end."""

    def trace(self) -> Iterable[str]:
        """What happened, in words. Printed when a run fails."""
        return ()

    def close(self) -> None:
        """Give back what the machine holds, after a good or a failed run."""

    def check_invariants(self, *args: Any, **options: Any) -> None:
        """Hypothesis calls this after each rule."""
        super().check_invariants(*args, **options)
        if self.started:
            self.check()

    def teardown(self) -> None:
        """The run is over."""
        if not self.started:
            return
        # Hypothesis calls this in a `finally`. A new error must not hide the one that ended the run.
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
