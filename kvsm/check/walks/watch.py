"""Record the features that a run reaches: edges of the machine tables, pairs of edges, and the target's own
events.

`kvsm.check.explore.coverage` needs no hook to see which edges were taken. A guided walk also needs their
order, and the action that took them. So while a `Watch` is active, a watched memo replaces each memo of
`kvsm.states.words`; unwatched runs cost nothing. The native body has no memos, so ledgers that are created
under a watch use the Python body.

A *feature* is one of

    edge   block STORING --WORKER_DONE--> STORED (...)     an edge of a table was taken
    pair   EDGE > EDGE                       two edges of one table, one right after the other
    event  NAME                              an event that the target itself reports
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

from kvsm.check.explore.coverage import CODECS, edge_of
from kvsm.core import native
from kvsm.states.words import Codec

_NAMES: dict[tuple[str, int], dict[int, str]] = {}
"""(machine, trigger) -> word -> the name of the edge. A cache for all watches: tables do not change."""


class Watch:
    """Records the new features of one run.

    done: a list that grows with the run, as its actions.
    known: the features that count as reached already.

    Attributes: `new`, the names of the new features; `length`, the length of `done` when the last was
    reached.
    """

    def __init__(self, done: Sized, known: Collection[str]) -> None:
        self._done, self._known = done, known
        self._seen: set[tuple[str, str]] = set()
        self.new: set[str] = set()
        self.length = 0
        self._last = dict.fromkeys((codec.machine.name for codec in CODECS), "")
        """Machine -> its last edge; empty at first."""

    def step(self, machine: str, edge: str) -> None:
        """Record that an edge was taken."""
        pair = self._last[machine], edge
        self._last[machine] = edge
        if pair not in self._seen:
            self._seen.add(pair)
            self.reach(f"edge {edge}")
            if pair[0]:
                self.reach(f"pair {pair[0]} > {edge}")

    def reach(self, feature: str) -> None:
        """Record that a feature was reached."""
        if feature not in self._known and feature not in self.new:
            self.new.add(feature)
            self.length = len(self._done)

    def say(self, events: Iterable[str]) -> None:
        """Record events that the target itself reports."""
        for event in events:
            self.reach(f"event {event}")


@contextmanager
def watching(done: Sequence[object] = (), known: Collection[str] = ()) -> Iterator[Watch]:
    """A `with` block whose features are recorded by the returned watch."""
    watch = Watch(done, known)
    memos = [codec.next for codec in CODECS]
    for codec in CODECS:
        codec.next = tuple(
            _WatchedMemo(watch, codec, trigger, memo)
            for trigger, memo in zip(codec.machine.triggers, codec.next)
        )
    try:
        with native.without():
            yield watch
    finally:
        for codec, memo_of in zip(CODECS, memos):
            codec.next = memo_of


class _WatchedMemo(dict[int, int]):
    """A memo that looks up the original memo, and records the edge that was taken."""

    __slots__ = ("_codec", "_edges", "_machine", "_memo", "_step", "_trigger")

    def __init__(self, watch: Watch, codec: Codec, trigger: int, memo: dict[int, int]) -> None:
        super().__init__()
        self._codec, self._trigger, self._memo, self._step = codec, trigger, memo, watch.step
        self._machine = codec.machine.name
        self._edges = _NAMES.setdefault((self._machine, trigger), {})

    def __getitem__(self, word: int) -> int:
        after = self._memo[word]  # raises if the table has no such step
        edge = self._edges.get(word)
        if edge is None:
            edge = self._edges[word] = self._edge(word)
        self._step(self._machine, edge)
        return after

    def _edge(self, word: int) -> str:
        machine = self._codec.machine
        state, counts = self._codec.decode(word)
        arcs = machine.dense[self._trigger][state]
        return next(str(edge_of(machine, state, self._trigger, one)) for one in arcs if one.admits(counts))
