"""Looks for an exhibit with the checkers that know nothing of it.

Every checker is run on every exhibit in the same order, until one sees something: so no checker is told where
to look. First come the explorations and the walks; the exhibit's own scenario is the last resort. What limits
a search is a number of states or of runs, never a clock, so that a museum finds the same things every day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import get_context
from traceback import format_exc
from typing import Any

import msgspec

from kvsm.worlds.world import Action, Finding, finding_of
from museum import EXHIBITS
from museum.checkers import CHECKERS
from museum.copy_scenarios import COPY_SCENARIOS
from museum.scenarios import SCENARIOS

SCENARIO = "scenario"
CLEAN = "none"
"""The code as it is: stands beside the ids of the exhibits."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one exhibit. checker: that saw it; "" if none did. trace: what was done in its world, up
    to the step that showed it; none of a scenario. seconds: of the whole search. cut: time was up before all
    checkers had looked."""

    id: str
    checker: str = ""
    finding: Finding | None = None
    trace: tuple[Action, ...] = ()
    seconds: float = 0.0
    cut: bool = False

    @property
    def is_as_expected(self) -> bool:
        return not self.cut and (self.finding is None) == (self.id == CLEAN)


def search(id: str, seconds: float | None = None) -> Result:
    """Put the exhibit back and look for it; or look at the code as it is. seconds: no checker is begun after
    so many."""
    started = time.monotonic()
    result = Result(id=id)
    with nullcontext() if id == CLEAN else EXHIBITS[id].put_back():
        for checker in CHECKERS:
            if seconds is not None and time.monotonic() - started > seconds:
                result = Result(id=id, cut=True)
                break
            sighting = checker.look()
            if sighting is not None:
                result = Result(id=id, checker=checker.name, finding=sighting.finding, trace=sighting.trace)
                break
        else:
            finding = _seen_in(scenario_of(id)) if id != CLEAN else None
            if finding is not None:
                result = Result(id=id, checker=SCENARIO, finding=finding)
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


def search_all(ids: Sequence[str], jobs: int, seconds: float | None = None) -> Iterator[Result]:
    """One process an exhibit, `jobs` of them at a time; in the order asked for. An exhibit that is put back
    in its own process is surely gone with it."""
    with get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap(_Search(seconds), ids, chunksize=1)


class _Search:
    """`search` with a limit, as something that can be sent to a process."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def __call__(self, id: str) -> Result:
        try:
            return search(id, self._seconds)
        except Exception as error:
            # Not every error can be sent from process to process, and who waits for it would wait for ever.
            raise RuntimeError(f"the search for {id} failed:\n{format_exc()}") from error


def scenario_of(id: str) -> Callable[[], None]:
    return SCENARIOS[id] if id in SCENARIOS else COPY_SCENARIOS[id]


def _seen_in(scenario: Callable[[], Any]) -> Finding | None:
    try:
        scenario()
    except Exception as error:
        return finding_of(error)
    return None
