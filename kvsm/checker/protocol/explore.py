"""Explores a protocol breadth first, a level at a time, and a level in chunks of many thousand states.

Of each level a chunk after the other is unpacked, held against the properties, and expanded: every action
instance for all its states at once (`arrays.py`). What follows is renamed (`symmetry.py`), packed
(`packing.py`), and what was not seen before is the next level. No state remembers where it came from: the
shortest way to a broken property is found by looking, from level to level backwards, for a state from which
the next one follows.

"Eventually" is shown for all states, and needs no search: where a state is not at rest some draining action
is possible, and each makes the rank smaller. So any sequence of them ends, and it can only end at rest (S9).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.checker.coverage import TableEdge, edge_of
from kvsm.checker.explorer import ExplorationProgress
from kvsm.checker.model import Exploration, Refutation, Verdict
from kvsm.checker.protocol.arrays import Successors, Taken, Transitions, columns_of, rows_of
from kvsm.checker.protocol.layout import CellLayout
from kvsm.checker.protocol.nodes import ArrayNode, Columns, StateBatch
from kvsm.checker.protocol.offload import Variant, offload_protocol
from kvsm.checker.protocol.packed import Packed, Packing, Visited, distinct
from kvsm.checker.protocol.plain import Move, ProtocolModel, State
from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.symmetry import Symmetry
from kvsm.checker.protocol.terms import Claim, Declaration
from kvsm.properties import Property
from kvsm.worlds.world import Finding

CHUNK = 1 << 15
"""States that are expanded at once: enough that numpy's calls cost nothing, few enough to fit in memory."""


class _Expanded(NamedTuple):
    """Of one chunk. unseen: what follows on it and is in no level yet, sorted. broken: a claim that does not
    hold, or what is wrong with winding down, and in which state of the chunk."""

    unseen: Packed
    taken: dict[str, int]
    steps: Taken
    reached: frozenset[str]
    broken: tuple[Claim | Finding, int] | None = None


class _SearchEnds(Exception):
    """Ends a search that is not over."""


def explore_protocol(
    scope: ProtocolScope,
    *,
    variant: Variant | None = None,
    symmetry: bool = True,
    jobs: int = 1,
    max_states: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[ExplorationProgress], None] | None = None,
) -> Exploration:
    """Explore the offload protocol, or a broken variant of it, within a scope; see `explore`."""
    return explore(
        offload_protocol(scope, variant),
        symmetry=symmetry,
        jobs=jobs,
        max_states=max_states,
        max_seconds=max_seconds,
        progress=progress,
    )


def explore(
    declared: Declaration,
    *,
    symmetry: bool = True,
    jobs: int = 1,
    max_states: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[ExplorationProgress], None] | None = None,
) -> Exploration:
    """Look at all states that can be reached, until a property is broken.

    symmetry: states that differ only in numbering are one. jobs: threads, which numpy lets run beside each
    other. A limit that is reached, or Ctrl-C, leaves the verdict undetermined. progress: called after
    each chunk of states.
    """
    search = _ProtocolSearch(declared, symmetry, max_states, max_seconds, progress)
    with ThreadPoolExecutor(jobs) as threads:
        search.run(threads.map if jobs > 1 else map)
    return search.exploration()


class _ProtocolSearch:
    """All that is known so far: the levels, and what was met in them."""

    def __init__(
        self,
        declared: Declaration,
        symmetry: bool,
        max_states: int | None,
        max_seconds: float | None,
        progress: Callable[[ExplorationProgress], None] | None,
    ) -> None:
        self._model, self._declared = ProtocolModel(declared), declared
        self._layout = CellLayout(declared)
        self._transitions = Transitions(self._layout)
        self._packing = Packing([cell.variable.domain.size for cell in self._layout.cells])
        self._symmetry = Symmetry(self._layout) if symmetry else None
        nodes = self._transitions.nodes
        self._always = [(claim, nodes.of(claim.term, {})) for claim in declared.always]
        self._sometimes = {claim.id: nodes.of(claim.term, {}) for claim in declared.sometimes}
        self._rest, self._rank = nodes.of(declared.rest, {}), nodes.of(declared.rank, {})
        self._max_states, self._max_seconds, self._report = max_states, max_seconds, progress
        self._visited, self._levels = Visited(), [self._packed(columns_of([self._layout.initial]))]
        self._visited.add(self._levels[0])
        self._actions: Counter[str] = Counter()
        self._steps: Taken = {}
        self._reached: set[str] = set()
        self._expanded = 0
        self._started = time.monotonic()
        self._limit = ""
        self._refutation: Refutation | None = None

    def run(self, over: Callable[..., Iterable[_Expanded]]) -> None:
        """over: `map`, or one that works on several chunks at the same time."""
        try:
            while self._refutation is None and self._levels[-1].shape[1]:
                self._next_level(over)
        except _SearchEnds as limit:
            self._limit = str(limit)
        except KeyboardInterrupt:
            self._limit = "an interrupt"

    def exploration(self) -> Exploration:
        """What the search came to."""
        unreached = [claim for claim in self._declared.sometimes if claim.id not in self._reached]
        if self._refutation is None and not self._limit and unreached:
            missed = Finding(unreached[0].name, f"is never reached: {unreached[0].says}")
            self._refutation = Refutation(missed, ())
        verdict = Verdict.REFUTED if self._refutation else Verdict.PROVED
        if self._limit and verdict is Verdict.PROVED:
            verdict = Verdict.UNDETERMINED
        return Exploration(
            model=self._declared.name,
            bounds=self._declared.bounds,
            verdict=verdict,
            states=len(self._visited),
            transitions=self._actions.total(),
            depth=len([level for level in self._levels if level.shape[1]]) - 1,
            seconds=time.monotonic() - self._started,
            limit=self._limit,
            refutation=self._refutation,
            reached=tuple(claim.id for claim in self._declared.sometimes if claim.id in self._reached),
            unreached=tuple(claim.id for claim in unreached),
            actions=dict(sorted(self._actions.items())),
            edges=tuple(sorted(_edges(self._steps))),
        )

    def _next_level(self, over: Callable[..., Iterable[_Expanded]]) -> None:
        level = self._levels[-1]
        chunks = [level[:, start : start + CHUNK] for start in range(0, level.shape[1], CHUNK)]
        found: list[Packed] = []
        for chunk, expanded in zip(chunks, over(self._expand, chunks)):
            self._note(chunk, expanded)
            if expanded.broken is not None:
                broken, place = expanded.broken
                path, state = self._path(len(self._levels) - 1, chunk[:, place : place + 1])
                finding = broken if isinstance(broken, Finding) else self._model.finding(broken, state)
                self._refutation = Refutation(finding, path)
                return
            found.append(expanded.unseen)
            self._look_at_limits(sum(one.shape[1] for one in found))
        self._levels.append(distinct(np.concatenate(found, axis=1)))
        self._visited.add(self._levels[-1])

    def _note(self, chunk: Packed, expanded: _Expanded) -> None:
        self._expanded += chunk.shape[1]
        self._actions.update(expanded.taken)
        self._reached |= expanded.reached
        for key, met in expanded.steps.items():
            self._steps[key] = met | self._steps[key] if key in self._steps else met

    def _look_at_limits(self, found: int) -> None:
        """found: states of the next level, some of them several times."""
        seconds, states = time.monotonic() - self._started, len(self._visited)
        if self._report is not None:
            queue = states - self._expanded + found
            depth = len(self._levels) - 1
            self._report(ExplorationProgress(states, self._actions.total(), depth, queue, seconds))
        if self._max_states is not None and states >= self._max_states:
            raise _SearchEnds(f"{self._max_states:,} states")
        if self._max_seconds is not None and seconds >= self._max_seconds:
            raise _SearchEnds(f"{self._max_seconds:,g} seconds")

    def _expand(self, chunk: Packed) -> _Expanded:
        columns = self._packing.unpack(chunk)
        batch = StateBatch(columns)
        for claim, node in self._always:
            place = _first_without(node, batch)
            if place >= 0:
                return _Expanded(chunk[:, :0], {}, {}, frozenset(), (claim, place))
        reached = frozenset(
            name
            for name, node in self._sometimes.items()
            if name not in self._reached and bool(np.any(node.of(batch)))
        )
        successors = self._transitions.after(columns)
        stuck = self._stuck(batch, successors)
        if stuck is not None:
            return _Expanded(chunk[:, :0], {}, {}, reached, stuck)
        taken: Counter[str] = Counter()
        for number, move in enumerate(self._transitions.moves):
            taken[move.instance.action.name] += successors.bounds[number + 1] - successors.bounds[number]
        unseen = self._visited.unseen(distinct(self._packed(successors.columns)))
        return _Expanded(unseen, taken, successors.taken, reached)

    def _packed(self, columns: Columns) -> Packed:
        """Renames the columns in place."""
        if self._symmetry is not None:
            self._symmetry.rename(columns)
        return self._packing.pack(columns)

    def _stuck(self, batch: StateBatch, successors: Successors) -> tuple[Finding, int] | None:
        """The first state that cannot be wound down, with what is in the way."""
        moves, bounds, sources = self._transitions.moves, successors.bounds, successors.sources
        draining = np.zeros(len(sources), dtype=np.bool_)
        for number, move in enumerate(moves):
            draining[bounds[number] : bounds[number + 1]] = move.instance.action.drains
        before, after = self._rank.of(batch)[sources], self._rank.of(StateBatch(successors.columns))
        useless = np.flatnonzero(draining & (after >= before))
        if len(useless):
            move = moves[int(np.searchsorted(bounds, useless[0], side="right")) - 1]
            message = f"{move.instance.action.name} winds down, and brings it no nearer to rest"
            return Finding(Property.PROGRESS, message), int(sources[useless[0]])
        going = np.array(self._rest.of(batch), dtype=np.bool_)
        going[sources[draining]] = True
        if not going.all():
            return Finding(Property.PROGRESS, "not all is at rest, and nothing winds it down"), int(
                np.argmin(going)
            )
        return None

    def _path(self, depth: int, state: Packed) -> tuple[tuple[Move, ...], State]:
        """The actions that lead from the start to a state of the level `depth`, and that state as they number
        it."""
        way = [state]
        for level in reversed(self._levels[:depth]):
            way.append(self._before(level, way[-1]))
        path: list[Move] = []
        concrete = columns_of([self._layout.initial])
        for wanted in reversed(way[:-1]):
            successors = self._transitions.after(concrete)
            place = int(np.argmax(_equal(self._packed(successors.columns.copy()), wanted)))
            number = int(np.searchsorted(successors.bounds, place, side="right")) - 1
            path.append(self._transitions.moves[number].instance.move)
            concrete = successors.columns[:, place : place + 1].copy()
        return tuple(path), rows_of(concrete)[0]

    def _before(self, level: Packed, state: Packed) -> Packed:
        """The first state of a level from which another one follows."""
        for start in range(0, level.shape[1], CHUNK):
            chunk = level[:, start : start + CHUNK]
            successors = self._transitions.after(self._packing.unpack(chunk))
            same = _equal(self._packed(successors.columns), state)
            if same.any():
                place = int(successors.sources[same].min())
                return chunk[:, place : place + 1]
        raise AssertionError("a state of a level follows on none of the level before")


def _equal(states: Packed, wanted: Packed) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (states == wanted).all(axis=0)
    return same


def _first_without(node: ArrayNode, batch: StateBatch) -> int:
    """The first state in which a truth does not hold; -1 if it holds in all."""
    holds = node.of(batch)
    return -1 if holds.all() else int(np.argmin(holds))


def _edges(steps: Taken) -> set[TableEdge]:
    """The rows of the machines' tables that were taken."""
    edges = set()
    for (words, trigger), met in steps.items():
        for value in np.flatnonzero(met).tolist():
            word = words.words[value]
            if word is not None:
                state, counts = word
                arcs = words.machine.dense[trigger][state]
                edges |= {edge_of(words.machine, state, trigger, arc) for arc in arcs if arc.admits(counts)}
    return edges
