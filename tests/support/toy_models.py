"""Small models for the tests of the explorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsm.check.worlds.requirement import Kind, Requirement
from kvsm.properties import Property


class Plain:
    """The parts of a model that all models with immutable states share."""

    name, bounds = "toy", "all of it"
    requirements: Sequence[Requirement[Any]] = ()

    def fingerprint(self, state: Any) -> Any:
        return state

    def save(self, state: Any) -> Any:
        return state

    def load(self, saved: Any) -> Any:
        return saved

    def wind_down(self, _state: Any) -> Any:
        return None

    def describe(self, state: Any) -> dict[str, str]:
        return {"the state": str(state)}


class Graph(Plain):
    """A model of a graph: `edges[state]` maps each action to the next state.

    Winding down takes the action "down", if the state has it.
    """

    def __init__(
        self,
        edges: dict[Any, dict[Any, Any]],
        requirements: Sequence[Requirement[Any]] = (),
        initial: Sequence[Any] = (0,),
    ) -> None:
        self.edges, self.requirements, self._initial = edges, requirements, initial

    def initial(self) -> Iterable[Any]:
        return self._initial

    def actions(self, state: Any) -> Iterable[Any]:
        return self.edges.get(state, {})

    def next(self, state: Any, action: Any) -> Any:
        return self.edges[state][action]

    def wind_down(self, state: Any) -> Any:
        return "down" if "down" in self.edges.get(state, {}) else None


def always(holds: Callable[[Any], bool], id: str = Property.CONSERVATION) -> Requirement[Any]:
    return Requirement(Kind.ALWAYS, id, "it holds", holds)


def sometimes(holds: Callable[[Any], bool], id: str, *, required: bool = True) -> Requirement[Any]:
    return Requirement(Kind.SOMETIMES, id, "it is met", holds, required)


def eventually(holds: Callable[[Any], bool]) -> Requirement[Any]:
    return Requirement(Kind.EVENTUALLY, Property.PROGRESS, "it comes to rest", holds)


WORKING, PREPARED, COMMITTED, ABORTED = range(4)


class TwoPhaseCommit(Plain):
    """Gray's protocol (Lamport's specification): 288 states with 3 managers, 1,568 with 4, 8,832 with 5.

    A state has the states of the resource managers and of the coordinator, the managers that the coordinator
    knows to be prepared, the managers that have announced it, and the coordinator's messages.

    hasty: whether the coordinator commits when all but one have prepared.
    """

    name = "commit"

    def __init__(self, managers: int, hasty: bool = False) -> None:
        self.managers, self.enough = managers, managers - hasty
        self.bounds = f"{managers} resource managers"
        self.requirements = (
            always(lambda state: not {COMMITTED, ABORTED} <= set(state[0]), "consistent"),
            sometimes(lambda state: set(state[0]) == {COMMITTED}, "all commit"),
            sometimes(lambda state: set(state[0]) == {ABORTED}, "all abort"),
            eventually(lambda state: not {WORKING, PREPARED} & set(state[0])),
        )

    def initial(self) -> Iterable[Any]:
        nobody = (False,) * self.managers
        return [((WORKING,) * self.managers, WORKING, nobody, nobody, "")]

    def actions(self, state: Any) -> Iterable[Any]:
        managers, coordinator, known, said, decision = state
        if coordinator == WORKING:
            if sum(known) >= self.enough:
                yield ("commit",)
            yield ("abort",)
        for one in range(self.managers):
            if coordinator == WORKING and said[one]:
                yield ("hear", one)
            if managers[one] == WORKING:
                yield ("prepare", one)
                yield ("leave", one)
            if decision:
                yield ("obey", one)

    def next(self, state: Any, action: Any) -> Any:
        managers, coordinator, known, said, decision = state
        match action:
            case ("commit",):
                return managers, COMMITTED, known, said, "commit"
            case ("abort",):
                return managers, ABORTED, known, said, "abort"
            case ("hear", one):
                return managers, coordinator, _with(known, one, True), said, decision
            case ("prepare", one):
                return _with(managers, one, PREPARED), coordinator, known, _with(said, one, True), decision
            case ("leave", one):
                return _with(managers, one, ABORTED), coordinator, known, said, decision
        end = COMMITTED if decision == "commit" else ABORTED
        return _with(managers, action[1], end), coordinator, known, said, decision

    def wind_down(self, state: Any) -> Any:
        managers, coordinator, *_ = state
        if coordinator == WORKING:
            return ("abort",)
        left = [one for one in range(self.managers) if managers[one] in (WORKING, PREPARED)]
        return ("obey", left[0]) if left else None

    def describe(self, state: Any) -> dict[str, str]:
        names = ("working", "prepared", "committed", "aborted")
        seen = {f"manager {one}": names[what] for one, what in enumerate(state[0])}
        return seen | ({"the decision": state[4]} if state[4] else {})


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])
