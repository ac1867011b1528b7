"""What a run reaches: the edges of the machine tables, pairs of them, and events of the target's own.

`kvsm.check.explore.coverage` sees which edges were taken, and needs no hook for it. A guided walk also asks
in which order, and after which action. So a `Watch` puts a memo of its own before each memo of
`kvsm.states.words` while it watches. An unwatched run pays nothing. The native body has no memos: what is
made while somebody watches has the Python body.

A *feature* is one of

    edge   block STORING --WORKER_DONE--> STORED (...)     an edge of a table was taken
    pair   EDGE > EDGE                       two edges of one table, one right after the other
    event  NAME                              what the target itself says that it reached
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

from kvsm.check.explore.coverage import CODECS, edge_of
from kvsm.core import native
from kvsm.states.words import Codec

_NAMES: dict[tuple[str, int], dict[int, str]] = {}
"""(machine, trigger) -> word -> the name of the edge. Kept, because the tables do not change."""


class Watch:
    """Notes the features of one run. done: whatever grows with the run; its length tells when.

    known: features that are not new.

    Attributes: `new`, the new features by name; `length`, the length of `done` when the last of them came.
    """

    def __init__(self, done: Sized, known: Collection[str]) -> None:
        self._done, self._known = done, known
        self._seen: set[tuple[str, str]] = set()
        self.new: set[str] = set()
        self.length = 0
        self._last = dict.fromkeys((codec.machine.name for codec in CODECS), "")
        """For each machine its last edge; none at first."""

    def step(self, machine: str, edge: str) -> None:
        """An edge was taken."""
        pair = self._last[machine], edge
        self._last[machine] = edge
        if pair not in self._seen:
            self._seen.add(pair)
            self.reach(f"edge {edge}")
            if pair[0]:
                self.reach(f"pair {pair[0]} > {edge}")

    def reach(self, feature: str) -> None:
        """A feature was reached."""
        if feature not in self._known and feature not in self.new:
            self.new.add(feature)
            self.length = len(self._done)

    def say(self, events: Iterable[str]) -> None:
        """The target itself says that it has reached these."""
        for event in events:
            self.reach(f"event {event}")


@contextmanager
def watching(done: Sequence[object] = (), known: Collection[str] = ()) -> Iterator[Watch]:
    """A watch that notes what happens in this block."""
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
    """Gives what the memo behind it gives, and tells the watch which edge that was."""

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
