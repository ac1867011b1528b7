"""Search for an exhibit, or for a mutant of `specs/mutants`, with checkers that do not know it.

The checkers run on every exhibit in the same order until one finds something, so none gets a hint where to
look. First come the explorations, the walks and a Hypothesis machine; the exhibit's own scenario is the last
resort. A mutant has no scenario. Searches are limited by numbers of states, runs or examples, and never by a
clock, so the results are the same every day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
from mutants import MUTANTS

from kvsm.check.worlds.world import Action, Finding, finding_of
from museum import EXHIBITS
from museum.adapter_worlds import VLLM_IS_THERE
from museum.checkers import CHECKERS, Checker, Sighting, Unexplored
from museum.copy_scenarios import COPY_SCENARIOS
from museum.disk_scenarios import DISK_SCENARIOS
from museum.exhibit import Bug
from museum.finding_scenarios import FINDING_SCENARIOS
from museum.restart_scenarios import RESTART_SCENARIOS
from museum.scenarios import SCENARIOS
from museum.tier_scenarios import TIER_SCENARIOS

BUGS: dict[str, Bug] = {**EXHIBITS, **MUTANTS}
SCENARIO = "scenario"
_ALL_SCENARIOS = {
    **SCENARIOS,
    **COPY_SCENARIOS,
    **RESTART_SCENARIOS,
    **DISK_SCENARIOS,
    **TIER_SCENARIOS,
    **FINDING_SCENARIOS,
}
CLEAN = "none"
"""Stands for the unchanged code, in place of an exhibit's id."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one exhibit.

    checker: the first checker that found it; empty if none did.
    also: the other checkers that found it, if all were run.
    trace: the actions that lead to the finding; empty for a scenario.
    seconds: the time of the whole search.
    cut: whether the time limit stopped the search before all checkers had run.
    """

    id: str
    checker: str = ""
    also: tuple[str, ...] = ()
    finding: Finding | None = None
    trace: tuple[Action, ...] = ()
    seconds: float = 0.0
    cut: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether a bug escaped every checker, or the unchanged code is not clean."""
        return self.finding is not None if self.id == CLEAN else self.finding is None and not self.cut

    @property
    def is_as_expected(self) -> bool:
        """Whether a bug was found, or the unchanged code is clean."""
        return not self.cut and not self.is_wrong


def search(id: str, seconds: float | None = None, *, all_look: bool = False) -> SearchResult:
    """Put an exhibit or a mutant into the code and look for it, or look at the unchanged code.

    seconds: start no further checker after this time.
    all_look: run every checker, even after one has found the bug.

    For a mutant of the adapters, only the checkers that run adapters are used. Without vLLM there are none,
    so the mutant escapes.
    """
    started = time.monotonic()
    result = SearchResult(id=id)
    if id != CLEAN and BUGS[id].needs_vllm and not VLLM_IS_THERE:
        return result
    with nullcontext() if id == CLEAN else BUGS[id].put_back():
        for checker in _checkers_of(id):
            if seconds is not None and time.monotonic() - started > seconds:
                result = msgspec.structs.replace(result, cut=True)
                break
            sighting = _seen_by(checker, id)
            if sighting is not None:
                result = _with(result, checker.name, sighting)
                if not all_look:
                    break
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


def _seen_by(checker: Checker, id: str) -> Sighting | None:
    """Run a checker.

    If the bug makes a scope too large to explore, that alone does not count as a sighting.
    """
    try:
        return checker.look()
    except Unexplored:
        if id == CLEAN:
            raise
        return None


def _checkers_of(id: str) -> Iterator[Checker]:
    if id in MUTANTS and MUTANTS[id].needs_vllm:
        yield from (checker for checker in CHECKERS if checker.needs_vllm)
        return
    yield from CHECKERS
    if id in EXHIBITS:
        yield Checker(SCENARIO, lambda: _seen_in(scenario_of(id)))


def _with(result: SearchResult, name: str, sighting: Sighting) -> SearchResult:
    if result.finding is not None:
        return msgspec.structs.replace(result, also=(*result.also, name))
    return SearchResult(id=result.id, checker=name, finding=sighting.finding, trace=sighting.trace)


def scenario_of(id: str) -> Callable[[], None]:
    """Return the exhibit's own scenario."""
    return _ALL_SCENARIOS[id]


def _seen_in(scenario: Callable[[], Any]) -> Sighting | None:
    try:
        scenario()
    except Exception as error:
        return Sighting(finding_of(error), ())
    return None
