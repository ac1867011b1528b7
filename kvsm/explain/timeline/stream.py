"""The events of a window, each with its text, its moves in the block machine, and the pool after it.

The list of events, the diagram of the block machine and the pool's occupancy are views of this one stream.
The fold starts from the nearest snapshot before the window, so a late window of a long log costs what the
window costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader
from kvsm.core.log.fold import go_on, refuse_malformed
from kvsm.core.log.trust import Trust
from kvsm.errors import LogError
from kvsm.events import KINDS, OffloadingEvent
from kvsm.explain.story.concern import concern
from kvsm.explain.story.render import render
from kvsm.explain.timeline.moves import BLOCK_TRIGGERS, EDGES, moves
from kvsm.states import BlockState
from kvsm.states.block import BLOCK_WORDS
from kvsm.system.printable import printable

CHECKPOINT_EVENTS = 1024
"""Events from one count of all blocks by state to the next."""

PARTS = ("free", "idle", "pinned", "storing", "quarantined", "retired")
"""What a slot of the pool can be, as in the table `occupancy`, from the bottom of the chart to its top."""

PART_OF: dict[BlockState, str] = {
    BlockState.FREE: "free",
    BlockState.EVICTED: "free",
    BlockState.ALLOCATED: "storing",
    BlockState.STORING: "storing",
    BlockState.STORED: "idle",
    BlockState.LOADING: "pinned",
    BlockState.QUARANTINED: "quarantined",
    BlockState.RETIRED: "retired",
}
"""The part of the pool that a block in each state belongs to. A STORED block with a pin is pinned."""

KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def part_of(word: int) -> int:
    """The place in `PARTS` of a block with this word."""
    state, (_, pins) = BLOCK_WORDS.decode(word)
    return PARTS.index("pinned" if state == BlockState.STORED and pins else PART_OF[BlockState(state)])


class BlockMoves(msgspec.Struct):
    """Columns: with the event at place `event` of the stream, `blocks` blocks took `edge` of `EDGES`."""

    event: list[int] = msgspec.field(default_factory=list)
    edge: list[int] = msgspec.field(default_factory=list)
    blocks: list[int] = msgspec.field(default_factory=list)


class Pool(msgspec.Struct):
    """Columns: from the event at place `event` of the stream on, the pool is split like this (slots)."""

    event: list[int] = msgspec.field(default_factory=list)
    parts: list[list[int]] = msgspec.field(default_factory=lambda: [[] for _ in PARTS])


class Checkpoints(msgspec.Struct):
    """Columns: blocks by state, in the order of `BlockState`, before the event at place `event`."""

    event: list[int] = msgspec.field(default_factory=list)
    blocks: list[list[int]] = msgspec.field(default_factory=list)


class EventStream(msgspec.Struct):
    """The events of a window, by columns. An event's place is its index in them.

    number: its number in the log. A number is left out if the log lacks its event.
    kind: its place in `KINDS`. at: wall time (Unix time in ns). text: one harmless line.
    """

    number: list[int] = msgspec.field(default_factory=list)
    kind: list[int] = msgspec.field(default_factory=list)
    step: list[int] = msgspec.field(default_factory=list)
    at: list[int] = msgspec.field(default_factory=list)
    text: list[str] = msgspec.field(default_factory=list)
    moves: BlockMoves = msgspec.field(default_factory=BlockMoves)
    pool: Pool = msgspec.field(default_factory=Pool)
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)


def read_stream(
    log: str | os.PathLike[str],
    trust: Trust,
    first: int,
    last: int,
    progress: Callable[[int], None] | None = None,
) -> EventStream:
    """The events `first` to `last` of a log, folded.

    trust: what the log may claim.
    progress: called now and then with the number of events in the stream so far.

    Raises `LogError`, `LogDamaged` and what `Ledger.apply` raises, as far as the window is read.
    """
    recorder: _Recorder | None = None
    stream = EventStream()
    for ledger, event in _folded(LogReader(log), trust, first, last):
        if recorder is None or recorder.ledger is not ledger:
            recorder = _Recorder(ledger, stream)
        recorder.take(event)
        if progress is not None and len(stream.number) % CHECKPOINT_EVENTS == 0:
            progress(len(stream.number))
    if not stream.number:
        raise LogError(f"{log}: there is no event from {first:,} to {last:,}")
    return stream


def _folded(
    reader: LogReader, trust: Trust, first: int, last: int
) -> Iterator[tuple[Ledger, OffloadingEvent]]:
    """The events of a window, each with the ledger right before it. The caller applies it."""
    ledger: Ledger | None = None
    for segment in reader.segments(first):
        ledger = go_on(ledger, segment, trust)
        for event in segment.events():
            refuse_malformed(event)
            if event.seq < first:
                ledger.apply(event)
            elif event.seq <= last:
                yield ledger, event
            if event.seq >= last:
                return  # Before the next event is read: it may be damaged.


class _Recorder:
    """Applies events to a ledger, and notes in a stream what they did."""

    def __init__(self, ledger: Ledger, stream: EventStream) -> None:
        self.ledger, self._stream = ledger, stream
        values, counts = np.unique(ledger.blocks.view, return_counts=True)
        self._states = [0] * len(BlockState)
        self._parts = [0] * len(PARTS)
        self._part_of: dict[int, int] = {}
        for word, count in zip(values.tolist(), counts.tolist()):
            self._states[BLOCK_WORDS.decode(word)[0]] += count
            self._parts[part_of(word)] += count
        self._checkpoint(len(stream.number))
        self._sample(len(stream.number))

    def take(self, event: OffloadingEvent) -> None:
        """Apply the event."""
        ledger, stream, place = self.ledger, self._stream, len(self._stream.number)
        if place - stream.checkpoints.event[-1] >= CHECKPOINT_EVENTS:
            self._checkpoint(place)
        words = ledger.blocks.words
        slots = concern(ledger, event).slots if BLOCK_TRIGGERS[type(event)] else ()
        before = [words[slot] for slot in slots]
        ended = ledger.apply(event)
        stream.number.append(event.seq)
        stream.kind.append(KIND_NUMBER[type(event)])
        stream.step.append(event.step)
        stream.at.append(event.wall_ns)
        stream.text.append(printable(render(event)))
        if not slots:
            return
        changed = [(old, words[slot]) for old, slot in zip(before, slots)]
        for edge, blocks in moves(event, changed, ended).items():
            stream.moves.event.append(place)
            stream.moves.edge.append(edge)
            stream.moves.blocks.append(blocks)
            self._states[EDGES[edge].source] -= blocks
            self._states[EDGES[edge].target] += blocks
        if self._moved_parts(changed):
            self._sample(place)

    def _moved_parts(self, changed: list[tuple[int, int]]) -> bool:
        moved = False
        for old, new in changed:
            if old != new:
                source, target = self._part(old), self._part(new)
                if source != target:
                    self._parts[source] -= 1
                    self._parts[target] += 1
                    moved = True
        return moved

    def _part(self, word: int) -> int:
        part = self._part_of.get(word)
        if part is None:
            part = self._part_of[word] = part_of(word)
        return part

    def _checkpoint(self, place: int) -> None:
        self._stream.checkpoints.event.append(place)
        self._stream.checkpoints.blocks.append(list(self._states))

    def _sample(self, place: int) -> None:
        pool = self._stream.pool
        pool.event.append(place)
        for column, slots in zip(pool.parts, self._parts):
            column.append(slots)
