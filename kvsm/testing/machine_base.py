"""What the machines share: when properties are checked, and what a failed run tells."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import note, stateful
from hypothesis.stateful import RuleBasedStateMachine

from kvsm.testing.profiles import for_machines
from kvsm.testing.under_test import UnderTest


def rule(**options: Any) -> Callable[[Any], Any]:
    """Hypothesis' `rule`. An error that the user's objects cause is told with their line."""
    decorate: Any = stateful.rule(**options)
    return lambda function: decorate(_guarded(function))


def initialize(**options: Any) -> Callable[[Any], Any]:
    """Hypothesis' `initialize`, guarded as `rule` is."""
    decorate: Any = stateful.initialize(**options)
    return lambda function: decorate(_guarded(function))


def _guarded(function: Any) -> Any:
    @functools.wraps(function)
    def call(machine: PropertyMachine, *arguments: Any, **named: Any) -> Any:
        with machine.under_test.guard():
            return function(machine, *arguments, **named)

    return call


class PropertyMachine(RuleBasedStateMachine):
    """A Hypothesis machine that checks after each rule, winds down at the end, and tells what happened.

    A subclass gives `check`, `wind_down`, `trace` and `close`. They are called after its first rule has set
    `started`. It tells `under_test` of the user's objects.
    """

    started = False

    def __init__(self) -> None:
        super().__init__()
        self.under_test = UnderTest()

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
            with self.under_test.guard():
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
                with self.under_test.guard():
                    self.wind_down()
                failed = False
        finally:
            if failed:
                for line in self.trace():
                    note(line)
            with self.under_test.guard():
                self.close()
