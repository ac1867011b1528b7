"""What a scenario is: a little program over real code, whose threads run in every order within a bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kvsm.check.threads.control import Deviations, RunOutcome, ThreadControl
from kvsm.check.threads.replacing import under_control
from kvsm.check.threads.shared_lines import tracing_of


class ThreadScenario:
    """A program that is run again for each schedule.

    The order of its threads must decide everything: it uses no random numbers, and no clock but the
    controlled one.

    says: one line for people.
    sizes: how large it is, by name; a scope may have others.
    modules: whose threads, locks, queues and calls of the system are controlled.
    line_modules: where a switch may happen within a line, if a scope has `lines`.
    constants: other values for constants of modules; see `under_control`.
    notable: the words of `ThreadControl.note_reached` that some schedule must reach. Without them, a scenario
        whose threads never interact would count as proved.
    """

    says = ""
    sizes: Mapping[str, int] = {}
    modules: Sequence[str] = ()
    line_modules: Sequence[str] = ()
    constants: Mapping[str, Any] = {}
    notable: Sequence[str] = ()

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.size = {**self.sizes, **sizes}

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Calls of the system that the scenario makes itself, by their name in `os`."""
        return {}

    def body(self) -> None:
        """The main thread. Raises `PropertyBroken`."""
        raise NotImplementedError


class ThreadScope(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario with its bounds.

    preemptions: most switches away from a runnable thread, plus early timeouts.
    delays: count each deviation from the order in which the threads were started, also where the running one
        is blocked (delay bounding): for scenarios with many threads.
    lines: also switch within lines of the modules under test, and not only at operations on locks, queues,
        events, threads and files.
    sizes: replace the scenario's own.
    required: whether every notable word must be reached. False with bounds that may exclude one.
    """

    scenario: type[ThreadScenario]
    preemptions: int = 2
    delays: bool = False
    lines: bool = False
    sizes: Mapping[str, int] = {}
    required: bool = True

    @property
    def bounds(self) -> dict[str, int]:
        """All numbers by name. A switch is 0 or 1."""
        return {
            "preemptions": self.preemptions,
            "delays": int(self.delays),
            "lines": int(self.lines),
            **self.scenario.sizes,
            **self.sizes,
        }

    @property
    def told(self) -> str:
        """The scenario and its bounds, for people."""
        sizes = {**self.scenario.sizes, **self.sizes}
        told = [self.scenario.says, *(f"{number} {name.replace('_', ' ')}" for name, number in sizes.items())]
        where = "shared lines" if self.lines else "operations on locks, queues, threads and files"
        what = "delays" if self.delays else "preemptions"
        return f"{', '.join(told)}; every schedule with at most {self.preemptions} {what} at {where}"


class ScenarioRuns:
    """Makes runs of a scope. The code under test must be under control (`controlled`)."""

    def __init__(self, scope: ThreadScope, scenario: ThreadScenario) -> None:
        self._scenario, self._delays = scenario, scope.delays
        self.says = scenario.says
        self._trace = tracing_of(scenario.line_modules) if scope.lines else None

    def run(self, deviations: Deviations = (), telling: bool = False) -> tuple[RunOutcome, int]:
        """Run with this schedule. Return the outcome, and the signature of the run up to the last deviation.

        telling: whether to keep the steps.
        """
        run = ThreadControl(deviations, self._trace, telling, self._delays)
        outcome = run.run(self._scenario.body)
        return outcome, run.signature_at_last


@contextmanager
def controlled(scope: ThreadScope) -> Iterator[ScenarioRuns]:
    """Use `with` to control the code under test and to disable logging; both are restored on exit."""
    scenario, disabled = scope.scenario(scope.sizes), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # a warning for each schedule in which a disk fails
    try:
        with under_control(scenario.modules, scenario.calls(), scenario.constants):
            yield ScenarioRuns(scope, scenario)
    finally:
        logging.disable(disabled)
