"""The explorer: verdicts, shortest paths, limits, winding down, processes, and the edges that were taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import search_path
from toy_models import Graph, Plain, TwoPhaseCommit, always, eventually, sometimes

from kvsm.check.explore import explorer
from kvsm.check.explore.budgets import NoBudgets
from kvsm.check.explore.coverage import all_edges, never_taken
from kvsm.check.explore.expansion import Processes, Task
from kvsm.check.explore.explorer import ExplorationProgress, explore
from kvsm.check.explore.model import Exploration, Verdict
from kvsm.check.explore.winding import END, UNEXPLORED, wind_down
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property
from kvsm.states import MACHINES
from kvsm.states.block import BLOCK, BLOCK_WORDS, BlockTrigger
from kvsm.states.words import STATE_MASK

each_number_of_jobs = pytest.mark.parametrize("jobs", [1, 2])


def facts(found: Exploration) -> Exploration:
    """Everything but the time that it took."""
    return msgspec.structs.replace(found, seconds=0)


def path_of(found: Exploration) -> tuple[Any, ...]:
    assert found.refutation is not None
    return found.refutation.path


# What is found.


@pytest.mark.parametrize(("managers", "states"), [(3, 288), (4, 1568)])
def test_two_phase_commit_has_the_known_number_of_states(managers: int, states: int) -> None:
    found = explore(TwoPhaseCommit(managers))
    assert (found.verdict, found.states) == (Verdict.PROVED, states)
    assert (found.reached, found.unreached) == (("all commit", "all abort"), ())
    assert found.transitions == sum(found.actions.values()) > states
    assert set(found.actions) == {"abort", "commit", "hear", "leave", "obey", "prepare"}


@pytest.mark.parametrize("hasty", [False, True])
def test_the_number_of_processes_does_not_change_the_result(hasty: bool) -> None:
    alone = explore(TwoPhaseCommit(4, hasty))
    for jobs in (2, 3):
        assert facts(explore(TwoPhaseCommit(4, hasty), jobs=jobs)) == facts(alone)


@each_number_of_jobs
def test_a_broken_property_is_reached_by_a_shortest_path(jobs: int) -> None:
    found = explore(TwoPhaseCommit(2, hasty=True), jobs=jobs)
    assert found.verdict is Verdict.REFUTED
    # One prepares and is heard, the coordinator commits, one obeys, and the other leaves.
    assert len(path_of(found)) == 5
    assert found.refutation is not None
    assert str(found.refutation.finding) == "consistent: does not hold: it holds"
    assert found.depth <= 5


def test_of_several_shortest_paths_the_first_in_the_order_of_actions_is_told() -> None:
    diamond = {0: {"a": 1, "b": 2}, 1: {"z": 3}, 2: {"a": 3}}
    assert path_of(explore(Graph(diamond, [always(lambda state: state != 3)]))) == ("a", "z")


def test_the_path_names_its_initial_state() -> None:
    found = explore(Graph({0: {}, 5: {"go": 7}}, [always(lambda state: state != 7)], initial=(0, 5)))
    assert found.refutation is not None
    assert (found.refutation.start, found.refutation.path) == (1, ("go",))


def test_an_initial_state_may_be_broken() -> None:
    found = explore(Graph({0: {"go": 1}}, [always(lambda state: state != 0)]))
    assert (found.verdict, path_of(found)) == (Verdict.REFUTED, ())


def test_a_model_without_initial_states_is_refused() -> None:
    with pytest.raises(ConfigError, match="it begins nowhere"):
        explore(Graph({}, initial=()))


class Raising(Graph):
    """An action "raise" raises the state that it leads to."""

    def next(self, state: Any, action: Any) -> Any:
        after = super().next(state, action)
        if action == "raise":
            raise after
        return after


@each_number_of_jobs
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PropertyBroken(Property.NO_REUSE_IN_FLIGHT, "slot 4 is gone"),
            "no reuse in flight (S3): slot 4 is gone",
        ),
        (ConfigError("no"), "every call is legal (S8): a legal call failed: no"),
        (KeyError("slot"), "every call is legal (S8): a legal call raised KeyError: 'slot'"),
    ],
)
def test_an_action_that_raises_is_a_finding(jobs: int, error: Exception, told: str) -> None:
    found = explore(Raising({0: {"go": 1}, 1: {"raise": error}}), jobs=jobs)
    assert found.verdict is Verdict.REFUTED
    assert path_of(found) == ("go", "raise")
    assert found.refutation is not None
    assert str(found.refutation.finding) == told


def test_a_check_that_raises_is_its_own_finding() -> None:
    def check(state: int) -> bool:
        if state == 1:
            raise PropertyBroken(Property.CORRECT_BYTES, "the bytes are wrong")
        return True

    found = explore(Graph({0: {"go": 1}}, [always(check)]))
    assert found.refutation is not None
    assert str(found.refutation.finding) == "correct bytes (S15): the bytes are wrong"


@each_number_of_jobs
def test_a_required_sometimes_that_never_holds_refutes(jobs: int) -> None:
    graph = {0: {"go": 1}, 1: {"go": 2}}
    properties = [sometimes(lambda state: state == 2, "two"), sometimes(lambda state: state == 3, "three")]
    found = explore(Graph(graph, properties), jobs=jobs)
    assert (found.verdict, found.reached, found.unreached) == (Verdict.REFUTED, ("two",), ("three",))
    assert found.refutation is not None
    assert str(found.refutation.finding) == "three: is never reached: it is met"
    assert explore(Graph(graph, properties), jobs=jobs, max_depth=1).verdict is Verdict.UNDETERMINED


@each_number_of_jobs
def test_an_optional_sometimes_is_reported_and_refutes_nothing(jobs: int) -> None:
    graph = {0: {"go": 1}}
    noted = [sometimes(lambda state, at=at: state == at, str(at), required=False) for at in (1, 2)]
    found = explore(Graph(graph, noted), jobs=jobs)
    assert (found.verdict, found.reached, found.unreached) == (Verdict.PROVED, ("1",), ("2",))
    found = explore(Graph(graph, [*noted, sometimes(lambda state: state == 3, "3")]), jobs=jobs)
    assert (found.verdict, found.unreached) == (Verdict.REFUTED, ("2", "3"))
    assert found.refutation is not None
    assert found.refutation.finding.property == "3"


class Living(Graph):
    """States are lists that `next` changes. The action "no" never applies."""

    loaded = 0

    def initial(self) -> Iterable[Any]:
        return [[0]]

    def actions(self, state: Any) -> Iterable[Any]:
        return ["no", *super().actions(state[0])]

    def next(self, state: Any, action: Any) -> Any:
        if action == "no":
            return None
        assert len(state) == 1, "this one was used before"
        state[0] = super().next(state[0], action)
        state.append("used")
        return state

    def fingerprint(self, state: Any) -> Any:
        return state[0]

    def save(self, state: Any) -> Any:
        return state[0]

    def load(self, saved: Any) -> Any:
        self.loaded += 1
        return [saved]


def test_every_action_gets_its_own_state() -> None:
    model = Living({0: {"a": 1, "b": 2, "c": 0}, 2: {"a": 1}})
    found = explore(model)
    assert (found.verdict, found.states, found.transitions) == (Verdict.PROVED, 3, 4)
    # One for each state, and one more for each action after the first that applies.
    assert model.loaded == 3 + 2


# Winding down.


@each_number_of_jobs
def test_winding_down_in_a_cycle_is_refuted(jobs: int) -> None:
    """Progress (S9): the refutation gives the path to the cycle, the cycle, and where it starts."""
    edges = {0: {"go": 1}, 1: {"go": 2, "down": 0}, 2: {"down": 3}, 3: {"down": 2}}
    found = explore(Graph(edges, [eventually(lambda state: state == 0)]), jobs=jobs)
    assert found.refutation is not None
    assert str(found.refutation.finding) == "progress (S9): winding down enters a cycle: it comes to rest"
    assert path_of(found) == ("go", "go", "down", "down")
    assert found.refutation.circle == 2


def test_winding_down_that_stops_too_early_is_refuted() -> None:
    """Progress (S9)."""
    edges: dict[Any, dict[Any, Any]] = {0: {"go": 1}, 1: {"down": 2}, 2: {"down": 3}, 3: {}}
    found = explore(Graph(edges, [eventually(lambda state: state == 0)]))
    assert found.refutation is not None
    assert (
        str(found.refutation.finding)
        == "progress (S9): winding down stops where it does not hold: it comes to rest"
    )
    assert (path_of(found), found.refutation.circle) == (("go", "down", "down"), -1)


def test_winding_down_is_not_followed_beyond_where_it_holds() -> None:
    edges = {0: {"down": 1}, 1: {"down": 2}, 2: {"down": 1}}
    assert explore(Graph(edges, [eventually(lambda state: state == 1)])).verdict is Verdict.PROVED


def test_winding_down_beyond_a_cut_search_is_undetermined() -> None:
    edges = {number: {"down": number + 1} for number in range(9)}
    model = Graph(edges, [eventually(lambda state: state == 9)])
    assert explore(model, max_depth=5).verdict is Verdict.UNDETERMINED
    assert explore(model).verdict is Verdict.PROVED


def test_a_cut_search_still_refutes_what_it_has_seen() -> None:
    """Progress (S9)."""
    edges = {0: {"go": 1, "down": 0}, **{number: {"go": number + 1} for number in range(1, 9)}}
    found = explore(Graph(edges, [eventually(lambda state: state > 0)]), max_depth=5)
    assert (found.verdict, path_of(found)) == (Verdict.REFUTED, ("down",))


def test_what_winds_down_must_be_one_of_the_actions() -> None:
    model = Graph({0: {"go": 1}}, [eventually(lambda state: state == 1)])
    model.wind_down = lambda _state: "vanish"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="'vanish' should wind down and is not among the actions"):
        explore(model)


@given(st.data())
def test_winding_down_agrees_with_a_walk_from_every_state(data: st.DataObject) -> None:
    """Progress (S9), compared with a separate walk from each state."""
    size = data.draw(st.integers(1, 7))
    following = data.draw(st.lists(st.integers(UNEXPLORED, size - 1), min_size=size, max_size=size))
    holds = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))

    def walk(state: int) -> str:
        for _ in range(size + 1):
            if state == UNEXPLORED:
                return "leaves"
            if state == END:
                return "stops"
            if holds[state]:
                return "arrives"
            state = following[state]
        return "goes round"

    ends = [walk(state) for state in range(size)]
    found = wind_down(following, bytes(holds))
    failing = [state for state in range(size) if ends[state] in ("stops", "goes round")]
    assert list(found.way[:1]) == failing[:1]
    if failing:
        assert (found.circle >= 0) == (ends[failing[0]] == "goes round")
        assert list(found.way[1:]) == [following[state] for state in found.way[:-1]]
        last = following[found.way[-1]]
        assert last == (found.way[found.circle] if found.circle >= 0 else END)


# ExplorationLimits.


def endless(properties: Iterable[Any] = ()) -> Graph:
    class Counting(Graph):
        def actions(self, _state: Any) -> Iterable[Any]:
            return ("+1", "+2")

        def next(self, state: Any, action: Any) -> Any:
            return state + int(action)

    return Counting({}, tuple(properties))


@each_number_of_jobs
def test_a_limit_of_states_leaves_the_verdict_undetermined(jobs: int) -> None:
    found = explore(endless(), jobs=jobs, max_states=1000)
    assert (found.verdict, found.states, found.limit) == (Verdict.UNDETERMINED, 1000, "1,000 states")


@each_number_of_jobs
def test_a_limit_of_depth_leaves_the_verdict_undetermined(jobs: int) -> None:
    found = explore(endless(), jobs=jobs, max_depth=10)
    assert (found.verdict, found.states, found.depth) == (Verdict.UNDETERMINED, 21, 10)
    assert found.limit == "the depth of 10 actions"


def test_a_limit_of_time_leaves_the_verdict_undetermined() -> None:
    found = explore(endless(), max_seconds=0.01)
    assert (found.verdict, found.limit) == (Verdict.UNDETERMINED, "0.01 seconds")


def test_a_limit_that_is_not_exceeded_changes_nothing() -> None:
    found = explore(Graph({0: {"a": 1}, 1: {"a": 2, "b": 0}}), max_states=3, max_depth=3)
    assert (found.verdict, found.states, found.limit) == (Verdict.PROVED, 3, "")


@pytest.mark.parametrize("limit", ["jobs", "max_states", "max_depth"])
def test_an_unusable_limit_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"{limit} is 0; it must be at least 1"):
        explore(endless(), **{limit: 0})  # type: ignore[arg-type]


@each_number_of_jobs
def test_an_interrupt_ends_the_search_and_keeps_what_was_seen(jobs: int) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(state: int) -> bool:
        if state == 50 and jobs == 1:
            signal.raise_signal(signal.SIGINT)
        return True

    def interrupt_from_outside(progress: ExplorationProgress) -> None:
        if jobs > 1 and progress.states > 50:
            signal.raise_signal(signal.SIGINT)

    model = endless([always(interrupt)])
    found = explore(model, jobs=jobs, progress=interrupt_from_outside)
    assert (found.verdict, found.limit) == (Verdict.UNDETERMINED, "an interrupt")
    assert found.states > 50
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_works_as_usual() -> None:
    # Whoever runs tests in the background has interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(state: int) -> bool:
        if state == 50:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return True

    try:
        with pytest.raises(KeyboardInterrupt):
            explore(endless([always(interrupt)]))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_search_restores_the_interrupt_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    explore(Graph({0: {"go": 1}}))
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_does_not_touch_the_processes() -> None:
    """A terminal sends Ctrl-C to every process, but only the explorer decides when to stop."""

    def interrupt(state: int) -> bool:
        if state == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return True

    model = Graph({number: {"go": number + 1} for number in range(5)}, [always(interrupt)])
    assert explore(model, jobs=2).verdict is Verdict.PROVED


def test_progress_is_reported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "PROGRESS_SECONDS", 0)
    told: list[ExplorationProgress] = []
    found = explore(TwoPhaseCommit(3), progress=told.append)
    assert [one.states for one in told] == sorted(one.states for one in told)
    assert (told[-1].states, told[-1].transitions, told[-1].queue) == (288, found.transitions, 0)
    assert len(told) == 288


# Processes.


class Failing(Plain):
    """fail: called with each state but the first, before its fingerprint is taken."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self._fail = fail

    def initial(self) -> Iterable[Any]:
        return [0]

    def actions(self, _state: Any) -> Iterable[Any]:
        return ["go"]

    def next(self, state: Any, _action: Any) -> Any:
        return state + 1

    def fingerprint(self, state: Any) -> Any:
        if state == 3:
            self._fail()
        return state


def test_a_model_that_fails_in_a_process_is_told_with_its_traceback() -> None:
    def fail() -> None:
        raise ValueError("no fingerprint")

    with pytest.raises(RuntimeError, match=r"(?s)in fingerprint.*ValueError: no fingerprint"):
        explore(Failing(fail), jobs=2)


@each_number_of_jobs
def test_a_broken_state_without_a_fingerprint_is_a_finding(jobs: int) -> None:
    """The broken state of real code may be impossible to fingerprint."""

    def fail() -> None:
        raise KeyError("no fingerprint")

    model = Failing(fail)
    model.requirements = (always(lambda state: state != 3),)
    found = explore(model, jobs=jobs)
    assert (found.verdict, path_of(found)) == (Verdict.REFUTED, ("go",) * 3)


def test_a_process_that_is_killed_is_told() -> None:
    with pytest.raises(ConfigError, match="was killed, perhaps for lack of memory; try fewer --jobs"):
        explore(Failing(lambda: os.kill(os.getpid(), signal.SIGKILL)), jobs=2)


def test_a_process_that_is_killed_while_it_waits_is_told() -> None:
    """A killed process can neither take a batch nor report its edges."""
    model = Failing(lambda: None)
    with Processes(model, NoBudgets(model), 1) as processes:
        ((worker, _),) = processes._workers
        worker.kill()
        worker.join()
        with pytest.raises(ConfigError, match="was killed, perhaps for lack of memory"):
            list(processes.expand([Task(0, [("go", ())])]))
        with pytest.raises(ConfigError, match="was killed, perhaps for lack of memory"):
            processes.edges()


# Against a plain reference.


graphs = st.dictionaries(
    st.integers(0, 9), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=3), max_size=10
)


@given(graphs, st.integers(0, 9))
def test_any_graph_is_explored_like_a_plain_search(edges: dict[int, dict[str, int]], broken: int) -> None:
    distances, level = {0: 0}, [0]
    while level:
        following = [after for state in level for after in edges.get(state, {}).values()]
        level = [state for state in dict.fromkeys(following) if state not in distances]
        distances.update(dict.fromkeys(level, max(distances.values()) + 1))
    found = explore(Graph(edges))
    assert (found.verdict, found.states) == (Verdict.PROVED, len(distances))
    assert (found.depth, found.transitions) == (
        max(distances.values()),
        sum(len(edges.get(state, {})) for state in distances),
    )
    refuted = explore(Graph(edges, [always(lambda state: state != broken)]))
    if broken not in distances:
        assert refuted.verdict is Verdict.PROVED
        return
    state = 0
    for action in path_of(refuted):
        state = edges[state][action]
    assert (state, len(path_of(refuted))) == (broken, distances[broken])


# Coverage.


class OneBlock(Graph):
    """A block's word, with some of its triggers as actions."""

    def __init__(self, *triggers: BlockTrigger) -> None:
        super().__init__({})
        self.triggers = triggers

    def actions(self, state: Any) -> Iterable[Any]:
        named = {trigger.name: trigger for trigger in self.triggers}
        return [name for name, trigger in named.items() if BLOCK.dense[trigger][state & STATE_MASK]]

    def next(self, state: Any, action: Any) -> Any:
        return BLOCK_WORDS.step(state, BlockTrigger[action], 0, 0)


@each_number_of_jobs
def test_taken_edges_are_known_and_the_others_are_named(jobs: int) -> None:
    ways = (BlockTrigger.ALLOCATE, BlockTrigger.SUBMIT_STORE, BlockTrigger.END_COPY_GOOD, BlockTrigger.EVICT)
    found = explore(OneBlock(*ways), jobs=jobs)
    assert [str(edge) for edge in found.edges] == [
        "block ALLOCATED --SUBMIT_STORE--> STORING (the plan left for the workers)",
        "block EVICTED --ALLOCATE--> ALLOCATED (a store is planned)",
        "block FREE --ALLOCATE--> ALLOCATED (a store is planned)",
        "block STORED --EVICT--> EVICTED (its slot is wanted)",
        "block STORING --END_COPY_GOOD--> STORED (every worker stored its shard)",
    ]
    missed = never_taken(found.edges, ["block"])
    assert set(missed) | set(found.edges) == set(all_edges(BLOCK))
    assert "block ALLOCATED --CANCEL--> EVICTED (the plan never left the scheduler)" in map(str, missed)
    assert len(missed) == len(all_edges(BLOCK)) - 5


def test_every_edge_of_the_tables_is_distinct() -> None:
    """Otherwise a taken edge could hide one that was never taken."""
    for machine in MACHINES.values():
        assert len(set(all_edges(machine))) == len(all_edges(machine))


def test_edges_taken_before_a_search_do_not_count() -> None:
    explore(OneBlock(BlockTrigger.ALLOCATE, BlockTrigger.CANCEL))
    assert [edge.trigger for edge in explore(OneBlock(BlockTrigger.ALLOCATE)).edges] == ["ALLOCATE"]


def test_processes_end_with_the_explorer() -> None:
    """A killed explorer cannot end its processes, so they must notice its end themselves."""
    script = (
        "from test_explorer import endless\n"
        "from kvsm.check.explore.explorer import explore\n"
        "explore(endless(), jobs=2, progress=lambda _: print('begun', flush=True))\n"
    )
    explorer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path(Path(__file__).parent)},
    )
    assert explorer.stdout is not None
    assert explorer.stdout.readline() == b"begun\n"
    explorer.kill()
    # The pipe ends when the last process that writes to it does.
    explorer.communicate(timeout=60)
