"""Every short schedule of a world is run once, and the shortest failing one is found first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvsm.check.walks.short_schedules import ScheduleCounts, search
from kvsm.check.worlds.world import Action
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.system.executors.executor import Executor
from kvsm.system.executors.forked import ForkedProcesses

ALPHABET: dict[Action, str] = {("put",): "client", ("take",): "server", ("shake",): "client"}


class Box:
    """Holds things. Nothing can be taken from an empty box, and one with two things must not be shaken."""

    events: Sequence[OffloadingEvent] = ()
    made: list[Box] = []  # noqa: RUF012 (of all tests in this process)

    def __init__(self) -> None:
        self.things, self.done = 0, list[Action]()
        Box.made.append(self)

    def do(self, action: Action) -> bool:
        if action == ("take",) and not self.things:
            return False
        if action == ("shake",) and self.things == 2:
            raise PropertyBroken(Property.CONSERVATION, "something in it is broken")
        self.things += {"put": 1, "take": -1, "shake": 0}[str(action[0])]
        self.done.append(action)
        return True

    def check(self) -> None:
        """Nothing to check."""

    def wind_down(self) -> Action | None:
        return ("take",) if self.things else None


def searched(most: int, executor: Executor | None = None) -> list[tuple[ScheduleCounts, object]]:
    def actor(action: Action) -> str:
        return ALPHABET[action]

    return [*search(Box, list(ALPHABET), actor, most, executor)]  # type: ignore[arg-type]


def test_every_schedule_of_at_most_so_many_actions_runs_once() -> None:
    """By hand: (put), (shake); then 3 after each of them, without a taking from an empty box."""
    Box.made.clear()
    counts, _ = searched(2)[-1]
    assert (counts.schedules, counts.skipped, counts.complete) == (2 + 5, 1 + 1, 2)
    assert counts.actions == 2 + 2 * 5


def test_the_shortest_failing_schedule_is_found_and_not_extended() -> None:
    failures = [failure for _, failure in searched(4) if failure is not None]
    found = [failure.actions for failure in failures]  # type: ignore[attr-defined]
    assert found[0] == (("put",), ("put",), ("shake",))
    assert not [one for one in found[1:] if one[:3] == found[0]]
    assert (("put",), ("shake",), ("put",), ("shake",)) in found


def test_schedules_with_few_changes_of_actor_come_first() -> None:
    order = [failure.actions for _, failure in searched(5) if failure is not None]  # type: ignore[attr-defined]
    last = [one for one in order if len(one) == 5]
    changes = [sum(ALPHABET[a] != ALPHABET[b] for a, b in itertools.pairwise(one)) for one in last]
    assert changes == sorted(changes)
    assert changes[0] < changes[-1]


def test_processes_change_nothing() -> None:
    def key(result: list[tuple[ScheduleCounts, object]]) -> list[tuple[int, int, object]]:
        return [(counts.schedules, counts.skipped, failure) for counts, failure in result]

    assert key(searched(3, ForkedProcesses(2))) == key(searched(3))
