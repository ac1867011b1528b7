"""A schedule that breaks something, as numbered steps: the thread, the line, and what it did there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from kvsm.check.explore.counterexample import Counterexample, CounterexampleStep
from kvsm.check.explore.model import Refutation
from kvsm.check.threads.control import GOES_ON, ThreadStep
from kvsm.check.threads.scenario import ThreadScope, controlled


def steps_of(scope: ThreadScope, refutation: Refutation) -> list[ThreadStep]:
    """Run the schedule of a refutation again, and return its steps."""
    with controlled(scope) as runs:
        return runs.run(refutation.path, telling=True)[0].told


def retell_schedule(scope: ThreadScope, refutation: Refutation) -> Counterexample:
    """Run the schedule of a refutation again, and describe each step."""
    told = list(_without_lines(steps_of(scope, refutation)))
    steps = tuple(CounterexampleStep(number, _text(one), ()) for number, one in enumerate(told, 1))
    preempting = [number for number, one in enumerate(told, 1) if one.preempts]
    choices = ", ".join(f"{number}:{option}" for number, option in refutation.path)
    because = (
        f"{_count(len(preempting))}: {_places(preempting)}; the schedule, as choice:option, is "
        f"{choices or 'empty'}"
    )
    return Counterexample("threads", scope.told, refutation.finding, steps, 0, because)


def switches_of(steps: Iterable[ThreadStep]) -> tuple[tuple[str, str], ...]:
    """Return each switch to another thread: (thread, its first operation)."""
    turns = groupby(steps, lambda step: step.thread)
    return tuple((thread, next(iter(turn)).what) for thread, turn in turns)


def _without_lines(steps: Iterable[ThreadStep]) -> Iterator[ThreadStep]:
    """Yield the steps, with consecutive line steps of a thread merged into the last of them."""
    for _, together in groupby(steps, lambda step: (step.thread, step.what == GOES_ON)):
        some = list(together)
        if some[0].what != GOES_ON:
            yield from some
        else:
            last = some[-1]
            yield last._replace(what="goes on from here", preempts=some[0].preempts)


def _text(step: ThreadStep) -> str:
    marks = "  [comes between]" if step.preempts else ""
    return f"{step.thread}  {step.place or 'starts'}  {step.what}{marks}"


def _count(preemptions: int) -> str:
    return f"{preemptions} preemption{'s' * (preemptions != 1)}"


def _places(numbers: list[int]) -> str:
    if not numbers:
        return "threads need not be interrupted for it"
    which = "step" if len(numbers) == 1 else "steps"
    return f"look at {which} {', '.join(map(str, numbers))}, where another thread could have gone on"
