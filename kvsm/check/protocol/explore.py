"""The exploration of the protocol with numpy: breadth first, many thousand states at a time.

Why it stands beside two other ways to check the same declaration:

- The explorer of real code (`kvsm.check.explore.explorer`) runs one state after the other. On `plain.py` it
  sees 500 states a second: hours for the full scope. numpy takes an action in 32,768 states with one call,
  and sees about 100,000 states a second: the full scope, 10.3 million states, takes two minutes.
- Rumur and TLC (specs/protocol) share no code with kvsm and give second opinions, in small scopes. They need
  a C compiler and Java. `kvsm check protocol` needs neither, so the proof can be repeated wherever kvsm is
  installed, and a counterexample is printed in kvsm's terms.

Each level is the set of states at one distance from the start. Its chunks are unpacked, checked and
expanded: every action for all states at once (`arrays.py`). The successors are renamed (`symmetry.py`) and
packed (`packed.py`), and those that are new make the next level. No state stores its parent. The
shortest path to a broken property is found backwards, by searching each level for a state that leads to the
next state of the path.

Progress (S9) needs no search for cycles. Each draining action must lower the rank, and wherever a state is
not at rest a draining action must be possible. Then winding down ends, and ends at rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.check.explore.coverage import TableEdge, edge_of
from kvsm.check.explore.explorer import ExplorationProgress
from kvsm.check.explore.model import INTERRUPT, Exploration, Refutation, Verdict
from kvsm.check.protocol.arrays import Successors, Taken, Transitions, columns_of, rows_of
from kvsm.check.protocol.cell_layout import CellLayout
from kvsm.check.protocol.nodes import ArrayNode, Columns, StateBatch
from kvsm.check.protocol.packed import Packed, Packing, Visited, distinct
from kvsm.check.protocol.plain import Move, ProtocolModel, State
from kvsm.check.protocol.symmetry import Symmetry
from kvsm.check.protocol.terms import TRUE, Claim, Declaration
from kvsm.check.worlds.world import Finding
from kvsm.properties import Property

CHUNK = 1 << 15
"""States that are expanded at once: enough to make numpy's calls cheap, few enough to fit in memory."""


class _Expanded(NamedTuple):
    """The result for one chunk.

    unseen: its successors that are in no level yet, sorted.
    taken: how often each action was taken.
    steps: the machine words that took each trigger.
    reached: the "sometimes" that hold in it.
    broken: a broken claim, or a finding about winding down; and the place of a state that shows it.
    """

    unseen: Packed
    taken: dict[str, int]
    steps: Taken
    reached: frozenset[str]
    broken: tuple[Claim | Finding, int] | None = None


class _SearchEnds(Exception):
    """A limit ends the search before all states are seen."""


def explore(
    declared: Declaration,
    *,
    symmetry: bool = True,
    jobs: int = 1,
    max_states: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[ExplorationProgress], None] | None = None,
) -> Exploration:
    """Look at all reachable states, until a property is broken.

    symmetry: count states that differ only in numbering as one.
    jobs: threads. numpy runs them in parallel.
    max_states, max_seconds: limits. A limit or Ctrl-C leaves the verdict undetermined.
    progress: called after each chunk of states.
    """
    search = _ProtocolSearch(declared, symmetry, max_states, max_seconds, progress)
    with ThreadPoolExecutor(jobs) as threads:
        search.run(threads.map if jobs > 1 else map)
    return search.exploration()


class ReachedStates:
    """The reachable states of a declaration themselves, whatever holds in them; nothing is merged.

    max_seconds: the limit of the exploration.
    complete: whether these are all.
    """

    def __init__(self, declared: Declaration, max_seconds: float) -> None:
        actions = tuple(replace(action, drains=False) for action in declared.actions)
        bare = replace(declared, actions=actions, always=(), sometimes=(), rest=TRUE)
        self._search = _ProtocolSearch(bare, False, None, max_seconds, None)
        self._search.run(map)
        self.complete = not self._search.limit

    def holding(self, facts: Mapping[int, int]) -> bool:
        """Whether some of these states has all these values. facts: place of a cell -> its value."""
        return any(
            bool(np.logical_and.reduce([columns[place] == value for place, value in facts.items()]).any())
            for columns in self._search.columns()
        )


class _ProtocolSearch:
    """A search level by level, and its results so far."""

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
        self.limit = ""
        self._refutation: Refutation | None = None

    def run(self, over: Callable[..., Iterable[_Expanded]]) -> None:
        """Find level after level.

        over: `map`, or a `map` that works on several chunks in parallel.
        """
        try:
            while self._refutation is None and self._levels[-1].shape[1]:
                self._next_level(over)
        except _SearchEnds as limit:
            self.limit = str(limit)
        except KeyboardInterrupt:
            self.limit = INTERRUPT

    def exploration(self) -> Exploration:
        """The result."""
        unreached = [claim for claim in self._declared.sometimes if claim.id not in self._reached]
        if self._refutation is None and not self.limit and unreached:
            missed = Finding(unreached[0].name, f"is never reached: {unreached[0].says}")
            self._refutation = Refutation(missed, ())
        verdict = Verdict.REFUTED if self._refutation else Verdict.PROVED
        if self.limit and verdict is Verdict.PROVED:
            verdict = Verdict.UNDETERMINED
        return Exploration(
            model=self._declared.name,
            bounds=self._declared.bounds,
            verdict=verdict,
            states=len(self._visited),
            transitions=self._actions.total(),
            depth=len([level for level in self._levels if level.shape[1]]) - 1,
            seconds=time.monotonic() - self._started,
            limit=self.limit,
            refutation=self._refutation,
            reached=tuple(claim.id for claim in self._declared.sometimes if claim.id in self._reached),
            unreached=tuple(claim.id for claim in unreached),
            actions=dict(sorted(self._actions.items())),
            edges=tuple(sorted(_edges(self._steps))),
        )

    def columns(self) -> Iterator[Columns]:
        """The states of each level, in chunks."""
        for level in self._levels:
            for start in range(0, level.shape[1], CHUNK):
                yield self._packing.unpack(level[:, start : start + CHUNK])

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
            self._check_limits(sum(one.shape[1] for one in found))
        self._levels.append(distinct(np.concatenate(found, axis=1)))
        self._visited.add(self._levels[-1])

    def _note(self, chunk: Packed, expanded: _Expanded) -> None:
        self._expanded += chunk.shape[1]
        self._actions.update(expanded.taken)
        self._reached |= expanded.reached
        for key, met in expanded.steps.items():
            self._steps[key] = met | self._steps[key] if key in self._steps else met

    def _check_limits(self, found: int) -> None:
        """Report progress, and end the search at a limit.

        found: states of the next level so far, repetitions included.
        """
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
            place = _first_false(node, batch)
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
        """Pack the states. With symmetry, the columns are renamed in place first."""
        if self._symmetry is not None:
            self._symmetry.rename(columns)
        return self._packing.pack(columns)

    def _stuck(self, batch: StateBatch, successors: Successors) -> tuple[Finding, int] | None:
        """What is wrong with winding down, and the place of the first state that shows it."""
        moves, bounds, sources = self._transitions.moves, successors.bounds, successors.sources
        draining = np.zeros(len(sources), dtype=np.bool_)
        for number, move in enumerate(moves):
            draining[bounds[number] : bounds[number + 1]] = move.instance.action.drains
        before, after = self._rank.of(batch)[sources], self._rank.of(StateBatch(successors.columns))
        useless = np.flatnonzero(draining & (after >= before))
        if len(useless):
            action = moves[successors.maker(int(useless[0]))].instance.action
            message = f"{action.name} winds down, but the state is no nearer to rest"
            return Finding(Property.PROGRESS, message), int(sources[useless[0]])
        going = np.array(self._rest.of(batch), dtype=np.bool_)
        going[sources[draining]] = True
        if not going.all():
            message = "the state is not at rest, and no action winds it down"
            return Finding(Property.PROGRESS, message), int(np.argmin(going))
        return None

    def _path(self, depth: int, state: Packed) -> tuple[tuple[Move, ...], State]:
        """The actions from the start to a state of the level `depth`, and the state that they reach."""
        way = [state]
        for level in reversed(self._levels[:depth]):
            way.append(self._before(level, way[-1]))
        path: list[Move] = []
        concrete = columns_of([self._layout.initial])
        for wanted in reversed(way[:-1]):
            successors = self._transitions.after(concrete)
            place = int(np.argmax(_equal(self._packed(successors.columns.copy()), wanted)))
            path.append(self._transitions.moves[successors.maker(place)].instance.move)
            concrete = successors.columns[:, place : place + 1].copy()
        return tuple(path), rows_of(concrete)[0]

    def _before(self, level: Packed, state: Packed) -> Packed:
        """The first state of a level that leads to `state`."""
        for start in range(0, level.shape[1], CHUNK):
            chunk = level[:, start : start + CHUNK]
            successors = self._transitions.after(self._packing.unpack(chunk))
            same = _equal(self._packed(successors.columns), state)
            if same.any():
                place = int(successors.sources[same].min())
                return chunk[:, place : place + 1]
        raise AssertionError("no state of a level leads to a state of the next")


def _equal(states: Packed, wanted: Packed) -> NDArray[np.bool_]:
    """Which of the states equal the wanted one."""
    same: NDArray[np.bool_] = (states == wanted).all(axis=0)
    return same


def _first_false(node: ArrayNode, batch: StateBatch) -> int:
    """The place of the first state in which the node is false; -1 if there is none."""
    holds = node.of(batch)
    return -1 if holds.all() else int(np.argmin(holds))


def _edges(steps: Taken) -> set[TableEdge]:
    """The rows of the machines' tables that were taken, by source state."""
    edges = set()
    for (words, trigger), met in steps.items():
        for value in np.flatnonzero(met).tolist():
            word = words.words[value]
            if word is not None:
                state, counts = word
                arcs = words.machine.dense[trigger][state]
                edges |= {edge_of(words.machine, state, trigger, arc) for arc in arcs if arc.admits(counts)}
    return edges
