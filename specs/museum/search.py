"""Looks for an exhibit with the checkers that know nothing of it.

Every checker is run on every exhibit in the same order, until one sees something: so no checker is told where
to look. First come the explorations, the walks and a Hypothesis machine; the exhibit's own scenario is the
last resort. What limits a search is a number of states, of runs or of examples, never a clock, so that a
museum finds the same things every day.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from traceback import format_exc
from typing import Any

import msgspec

from kvsm.errors import ConfigError
from kvsm.worlds.world import Action, Finding, finding_of
from museum import EXHIBITS
from museum.checkers import CHECKERS, Checker, Sighting
from museum.copy_scenarios import COPY_SCENARIOS
from museum.scenarios import SCENARIOS

SCENARIO = "scenario"
CLEAN = "none"
"""The code as it is: stands beside the ids of the exhibits."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one exhibit. checker: that saw it; "" if none did. also: those that saw it too, if all
    were asked. trace: what was done in its world, up to the step that showed it; none of a scenario. seconds:
    of the whole search. cut: time was up before all checkers had looked."""

    id: str
    checker: str = ""
    also: tuple[str, ...] = ()
    finding: Finding | None = None
    trace: tuple[Action, ...] = ()
    seconds: float = 0.0
    cut: bool = False

    @property
    def is_as_expected(self) -> bool:
        return not self.cut and (self.finding is None) == (self.id == CLEAN)


def search(id: str, seconds: float | None = None, *, all_look: bool = False) -> SearchResult:
    """Put the exhibit back and look for it; or look at the code as it is. seconds: no checker is begun after
    so many. all_look: also those that come after the first one that sees it."""
    started = time.monotonic()
    result = SearchResult(id=id)
    with nullcontext() if id == CLEAN else EXHIBITS[id].put_back():
        for checker in _checkers_of(id):
            if seconds is not None and time.monotonic() - started > seconds:
                result = msgspec.structs.replace(result, cut=True)
                break
            sighting = checker.look()
            if sighting is not None:
                result = _with(result, checker.name, sighting)
                if not all_look:
                    break
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


def _checkers_of(id: str) -> Iterator[Checker]:
    yield from CHECKERS
    if id != CLEAN:
        yield Checker(SCENARIO, lambda: _seen_in(scenario_of(id)))


def _with(result: SearchResult, name: str, sighting: Sighting) -> SearchResult:
    if result.finding is not None:
        return msgspec.structs.replace(result, also=(*result.also, name))
    return SearchResult(id=result.id, checker=name, finding=sighting.finding, trace=sighting.trace)


def scenario_of(id: str) -> Callable[[], None]:
    return SCENARIOS[id] if id in SCENARIOS else COPY_SCENARIOS[id]


def _seen_in(scenario: Callable[[], Any]) -> Sighting | None:
    try:
        scenario()
    except Exception as error:
        return Sighting(finding_of(error), ())
    return None


# Many exhibits.


def search_all(
    ids: Sequence[str], jobs: int, seconds: float | None = None, *, all_look: bool = False
) -> Iterator[SearchResult]:
    """One process an exhibit, `jobs` of them at a time; in the order asked for. An exhibit that is put back
    in its own process is surely gone with it. Raises `ConfigError` if a process is killed."""
    # Not a pool: it says late, or never, that a process was killed, and not which exhibit was its own.
    left = deque(enumerate(ids))
    running: list[_SearchProcess] = []
    found: dict[int, SearchResult] = {}
    try:
        for wanted in range(len(ids)):
            while wanted not in found:
                while left and len(running) < jobs:
                    running.append(_SearchProcess(*left.popleft(), seconds, all_look))
                for searching in _that_ended(running):
                    found[searching.number] = searching.result()
                    running.remove(searching)
                    searching.end()
            yield found.pop(wanted)
    finally:
        for searching in running:
            searching.end()


def _that_ended(running: Sequence[_SearchProcess]) -> list[_SearchProcess]:
    ready = wait([one.connection for one in running])
    return [one for one in running if one.connection in ready]


class _SearchProcess:
    """A process that looks for an exhibit."""

    def __init__(self, number: int, id: str, seconds: float | None, all_look: bool) -> None:
        self.number, self._id = number, id
        # Forked, so that it has what was changed here.
        context = get_context("fork")
        self.connection, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_search, args=(there, id, seconds, all_look), daemon=True)
        self._process.start()
        # Else the end of the process would not be the end of the connection.
        there.close()

    def result(self) -> SearchResult:
        """What it has sent."""
        try:
            answer: SearchResult | str = self.connection.recv()
        except (EOFError, OSError):
            looked = f"the process that looked for {self._id} was killed"
            raise ConfigError(f"{looked}, perhaps for lack of memory; try fewer --jobs") from None
        if isinstance(answer, str):
            raise RuntimeError(f"the search for {self._id} failed:\n{answer}")
        return answer

    def end(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()


def _search(there: Connection, id: str, seconds: float | None, all_look: bool) -> None:
    """The life of such a process. Not every error can be sent; its text can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command that stops
    answer: SearchResult | str
    try:
        answer = search(id, seconds, all_look=all_look)
    except Exception:
        answer = format_exc()
    there.send(answer)
