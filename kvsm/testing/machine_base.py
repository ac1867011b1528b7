"""The base class of all machines: when properties are checked, and what a failed run prints."""

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
    """Hypothesis' `rule`; an error caused by the user's objects names the user's line."""
    decorate: Any = stateful.rule(**options)
    return lambda function: decorate(_guarded(function))


def initialize(**options: Any) -> Callable[[Any], Any]:
    """Hypothesis' `initialize`; errors are handled as in `rule`."""
    decorate: Any = stateful.initialize(**options)
    return lambda function: decorate(_guarded(function))


def _guarded(function: Any) -> Any:
    @functools.wraps(function)
    def call(machine: PropertyMachine, *arguments: Any, **named: Any) -> Any:
        with machine.under_test.guard():
            return function(machine, *arguments, **named)

    return call


class PropertyMachine(RuleBasedStateMachine):
    """A Hypothesis machine that checks after each rule, winds down at the end, and prints a failure's trace.

    A subclass overrides `check`, `wind_down`, `trace` and `close`, which are called only after its first rule
    has set `started`. It registers the user's objects with `under_test.watch`.
    """

    started = False

    def __init__(self) -> None:
        super().__init__()
        self.under_test = UnderTest()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.TestCase.settings = for_machines(cls.TestCase.settings)

    def check(self) -> None:
        """Check what must hold after each rule. (Not an `@invariant`: these print a line at each step.)"""

    def wind_down(self) -> None:
        """Bring a run that has not failed to its end, and check the final state."""

    def trace(self) -> Iterable[str]:
        """Lines that describe what happened. Printed when a run fails."""
        return ()

    def close(self) -> None:
        """Release the machine's resources, after a good or a failed run."""

    def check_invariants(self, *args: Any, **options: Any) -> None:
        """Run `check`. Hypothesis calls this after each rule."""
        super().check_invariants(*args, **options)
        if self.started:
            with self.under_test.guard():
                self.check()

    def teardown(self) -> None:
        """Wind down a run that has not failed, print the trace of one that has, and close the machine."""
        if not self.started:
            return
        # Hypothesis calls this in a `finally` block. A new error must not hide the one that ended the run.
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
