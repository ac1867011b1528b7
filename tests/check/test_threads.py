"""Real threads under control: every schedule within a bound, and what it finds.

The scenarios check failure is not success (S6), progress (S9), no reuse in flight (S3), order of copies
(S12), correct bytes (S15) and events are state (S10) of kvsm's own threads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import racy_code
from click.testing import CliRunner
from thread_bugs import BUGS, ThreadBug

from kvsm.check.explore.checked_model import ExplorationLimits
from kvsm.check.explore.model import Exploration, Verdict
from kvsm.check.scopes.models import MODELS
from kvsm.check.threads import SCOPES, ThreadScenario, ThreadScope, controlled, explore_schedules
from kvsm.check.threads.retold import retell_schedule, steps_of, switches_of
from kvsm.cli import main
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.properties import Property
from kvsm.system.executors.executor import LostWorker
from kvsm.system.executors.forked import ForkedProcesses

COSTLY = ("store-lines",)
"""Scopes in which a planted bug is found after a second or more."""

COUNTS = {
    "copies": 7466,
    "closing": 1082,
    "closing-lines": None,
    "dying": 1284,
    "opened": 3618,
    "rotated-fails": 286,
    "rotated-goes-on": 383,
    "rotated-deletes": 131,
    "read-once": 575,
    "disk-interval": 1281,
    "submitters": 1943,
    "closed-twice": 2240,
}
"""How many schedules these scopes have. Lines have other instructions in each version of Python."""


old_tracing = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on, switches within lines do not repeat themselves"
)


def scenario(body: Callable[[], None], lines: bool = False, preemptions: int = 2) -> ThreadScope:
    """A scope whose main thread runs this."""

    class TestScenario(ThreadScenario):
        says = "a test"
        modules = ("racy_code",)
        line_modules = ("racy_code",)
        sizes: Mapping[str, int] = {}

        def body(self) -> None:
            body()

    return ThreadScope(scenario=TestScenario, preemptions=preemptions, lines=lines)


def count_to_two(locks: bool) -> None:
    found = racy_code.count_in_threads(racy_code.Counter(locks), 2)
    if found != 2:
        raise PropertyBroken(Property.CONSERVATION, f"two threads have counted to {found}")


def preemptions_of(scope: ThreadScope, found: Exploration) -> int:
    assert found.refutation is not None
    with controlled(scope) as runs:
        return runs.run(found.refutation.path)[0].preemptions


# What is found.


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(one, marks=pytest.mark.slow)
        if one.scope in COSTLY or "came while it ran" in one.says
        else one
        for one in BUGS
    ],
    ids=lambda bug: bug.says,
)
def test_a_planted_bug_is_found_with_its_number_of_preemptions(bug: ThreadBug) -> None:
    """Blind: the scope does not know of it. Four are mutants that no checker saw, three are past bugs."""
    scope = SCOPES[bug.scope]
    with bug.planted():
        found = explore_schedules(scope)
        assert found.refutation is not None
        assert found.refutation.finding.property is bug.breaks
        assert preemptions_of(scope, found) == bug.preemptions


def test_the_small_scope_is_proved_and_the_same_each_time() -> None:
    first, again = (explore_schedules(SCOPES["small"]) for _ in range(2))
    assert first.verdict is Verdict.PROVED
    assert (first.states, first.transitions, first.depth) == (606, 20410, 36)
    assert (again.states, again.transitions, again.depth) == (606, 20410, 36)
    assert first.actions == {"with 0 preemptions": 18, "with 1 preemptions": 588}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_a_scope_is_proved(name: str) -> None:
    found = explore_schedules(SCOPES[name])
    assert (found.verdict, found.states) == (Verdict.PROVED, COUNTS[name] or found.states)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCOPES if name not in COUNTS and name != "small"])
def test_the_cheap_part_of_a_large_scope_is_proved(name: str) -> None:
    """The whole takes minutes: docs/verification.md has the figures."""
    lower = msgspec.structs.replace(SCOPES[name], preemptions=0, required=False)
    assert explore_schedules(lower).verdict is Verdict.PROVED


@old_tracing
def test_a_lost_update_needs_switches_within_a_line() -> None:
    """`self.count += 1` has no operation on a lock. With a lock no schedule loses it."""
    assert explore_schedules(scenario(lambda: count_to_two(locks=False))).verdict is Verdict.PROVED
    found = explore_schedules(scenario(lambda: count_to_two(locks=False), lines=True))
    assert found.refutation is not None
    assert found.refutation.finding.property is Property.CONSERVATION
    assert explore_schedules(scenario(lambda: count_to_two(locks=True), lines=True)).verdict is Verdict.PROVED


def test_a_deadlock_names_each_thread_and_where_it_is() -> None:
    """Progress (S9)."""
    scope = scenario(racy_code.take_in_two_orders)
    found = explore_schedules(scope)
    assert found.refutation is not None
    finding = found.refutation.finding
    assert finding.property is Property.PROGRESS
    assert "main is at racy_code.py:" in finding.message
    assert "takes left" in finding.message
    assert "other is at racy_code.py:" in finding.message
    assert preemptions_of(scope, found) == 1
    one = msgspec.structs.replace(scope, preemptions=0)
    assert explore_schedules(one).verdict is Verdict.PROVED


def test_an_error_of_a_thread_is_a_finding() -> None:
    """The interpreter would print it and go on."""

    def body() -> None:
        racy_code.Thread(target=int, args=("no number",), name="worker").start()

    found = explore_schedules(scenario(body))
    assert found.refutation is not None
    assert found.refutation.finding.property is Property.LEGAL_CALLS
    assert "in thread worker: " in found.refutation.finding.message


# How threads are controlled.


def test_a_wait_with_a_limit_may_end_early_and_time_is_virtual() -> None:
    seen = set()

    def body() -> None:
        misses, seconds = racy_code.poll_with_a_limit(3600.0)
        assert int(seconds) // 3600 == misses
        seen.add(misses)

    assert explore_schedules(scenario(body)).verdict is Verdict.PROVED
    assert seen == {0, 1, 2}


def test_a_condition_behaves_as_the_real_one() -> None:
    """Its lock may be taken twice, a wait gives all of it away, and all that wait are woken."""
    orders = set()

    def body() -> None:
        orders.add(tuple(racy_code.wake_one_of_two()))

    assert explore_schedules(scenario(body)).verdict is Verdict.PROVED
    assert orders == {("a", "b"), ("b", "a")}
    assert sorted(racy_code.wake_one_of_two()) == ["a", "b"]


def test_names_are_as_before_and_no_thread_is_left() -> None:
    """Also after a finding, when others were in the middle of something."""
    before = dict(vars(racy_code))
    threads = threading.active_count()
    explore_schedules(scenario(racy_code.take_in_two_orders))
    assert dict(vars(racy_code)) == before
    assert threading.active_count() == threads


def test_a_scenario_that_decides_by_chance_is_refused() -> None:
    """Its schedules could not be repeated, and the count would mean nothing."""

    def body() -> None:
        lock = racy_code.Lock()
        for _ in range(random.randrange(5, 50)):
            racy_code.Thread(target=racy_code.take_both, args=(lock, racy_code.Lock())).start()
            lock.acquire()
            lock.release()

    with pytest.raises(ConfigError, match="the same schedule went another way the second time"):
        explore_schedules(scenario(body), max_seconds=20)


def test_what_no_schedule_comes_to_is_told() -> None:
    """A scenario whose threads never meet proves nothing."""
    scope = msgspec.structs.replace(SCOPES["small"], preemptions=0)
    found = explore_schedules(scope)
    assert (found.verdict, found.unreached) == (Verdict.REFUTED, ("a load ends before an older store",))


def test_a_limit_leaves_it_undetermined() -> None:
    found = explore_schedules(SCOPES["small"], max_states=10)
    assert (found.verdict, found.states, found.limit) == (Verdict.UNDETERMINED, 10, "10 schedules")


# Who runs the schedules.


@pytest.mark.parametrize(
    ("name", "max_states"),
    [pytest.param("small", None, marks=pytest.mark.slow), ("small", 40), ("rotated-deletes", 30)],
)
def test_the_result_is_the_same_whoever_runs_the_schedules(name: str, max_states: int | None) -> None:
    scope = SCOPES[name]
    alone = explore_schedules(scope, max_states=max_states)
    for workers in (1, 3):
        found = explore_schedules(scope, max_states=max_states, executor=ForkedProcesses(workers))
        assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


def test_a_bug_is_found_at_the_same_schedule_whoever_runs_them() -> None:
    """The first one in the order of one process, and reduced to the same choices."""
    scope = SCOPES["copies"]
    with BUGS[0].planted():
        alone = explore_schedules(scope)
        found = explore_schedules(scope, executor=ForkedProcesses(2))
    assert alone.refutation is not None
    assert msgspec.structs.replace(found, seconds=alone.seconds) == alone


def test_a_process_that_is_killed_is_told_and_made_up_for(tmp_path: Path) -> None:
    once = tmp_path / "once"

    class Deadly(ThreadScenario):
        says = "a run whose process is killed once"
        modules = ("racy_code",)

        def body(self) -> None:
            racy_code.poll_with_a_limit(3600.0)
            if os.getpid() != here:
                with suppress(FileExistsError):
                    once.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)

    here, heard = os.getpid(), list[LostWorker]()
    scope = ThreadScope(scenario=Deadly, preemptions=1)
    alone = explore_schedules(scope)
    limits = ExplorationLimits(jobs=2, heard=heard.append)
    found = MODELS["threads"].explore(scope, limits)
    assert msgspec.structs.replace(found, seconds=alone.seconds) == alone
    assert [one.name for one in heard] == ["schedules of model threads"]


# How it is told.


def test_a_counterexample_is_numbered_steps_and_a_schedule_that_repeats_it() -> None:
    scope = SCOPES["copies"]
    with BUGS[0].planted():
        found = explore_schedules(scope)
        assert found.refutation is not None
        told = retell_schedule(scope, found.refutation)
        steps = steps_of(scope, found.refutation)
    assert [one.number for one in told.steps] == list(range(1, len(told.steps) + 1))
    texts = [one.action for one in told.steps]
    assert texts[0] == "main  starts  begins"
    assert sum(text.endswith("[comes between]") for text in texts) == 1
    assert any(text.startswith("kvsm-copy 2  threaded.py:") for text in texts)
    assert "1 preemption: look at step" in told.because
    assert "the schedule, as choice:option, is 2:1" in told.because
    assert [thread for thread, _ in switches_of(steps)][:2] == ["main", "kvsm-copy"]


@old_tracing
def test_lines_that_a_thread_passes_are_told_as_one_step() -> None:
    scope = scenario(lambda: count_to_two(locks=False), lines=True)
    found = explore_schedules(scope)
    assert found.refutation is not None
    texts = [one.action for one in retell_schedule(scope, found.refutation).steps]
    assert not any(one == other for one, other in pairwise(texts))
    assert any("adder" in text and "goes on from here" in text for text in texts)


def test_the_command_tells_bounds_and_schedules() -> None:
    result = CliRunner().invoke(main, ["check", "threads", "-b", "preemptions=0"])
    assert result.exit_code == 0
    assert "PROVED" in result.output
    assert "18 schedules, " in result.output
    assert "every schedule with at most 0 preemptions" in result.output
    listed = CliRunner().invoke(main, ["check", "--list"]).output
    assert "threads: real threads of engines, log and submitters" in listed


def test_the_command_takes_bounds_and_ends_with_the_verdict() -> None:
    with BUGS[0].planted():
        arguments = ["check", "threads", "--scope", "small", "-b", "preemptions=2", "-b", "loads=0", "--json"]
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert answer["finding"]["property_id"] == "S6"
    assert answer["counterexample"]["steps"][0]["action"] == "main  starts  begins"
    assert "0 loads" in answer["bounds"]
    refused = CliRunner().invoke(main, ["check", "threads", "--depth", "3"])
    assert refused.exit_code == 2
    assert "threads are explored without a limit of depth" in refused.output
