"""What an event does to the blocks of the host pool, in the words of the block machine.

A log names events, and the fold turns them into words of blocks. A person wants the edges between: "3 blocks
STORED -> EVICTED by EVICT". `route` finds them from a block's word before and after the event, and from the
triggers that the kind of the event may pull (`kvsm.events.TRIGGERS`). The triggers are tried in the order in
which the fold pulls them, so the first shortest way is the way that the fold took. A test compares the two.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from kvsm.core.ledger import TransferRecord
from kvsm.events import KINDS, TRIGGERS, OffloadingEvent
from kvsm.states import BLOCK, BlockState, BlockTrigger
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.machine import UndefinedStep
from kvsm.states.transfer import TransferState


class BlockEdge(NamedTuple):
    """A step of the block machine. why: the reason that the table gives."""

    source: BlockState
    trigger: BlockTrigger
    target: BlockState
    why: str


def _edges() -> tuple[BlockEdge, ...]:
    found: dict[tuple[int, int, int], BlockEdge] = {}
    for row in BLOCK.rows:
        for source in row.sources:
            target = source if row.target is None else row.target
            key = (int(source), int(row.trigger), int(target))
            edge = BlockEdge(BlockState(source), BlockTrigger(row.trigger), BlockState(target), row.why)
            found.setdefault(key, edge)
    return tuple(found.values())


EDGES = _edges()
"""Every edge of the block machine once, in the order of its table."""

_NUMBER = {(edge.source, edge.trigger, edge.target): number for number, edge in enumerate(EDGES)}

BLOCK_TRIGGERS = {
    kind: tuple(one for one in TRIGGERS[kind] if isinstance(one, BlockTrigger)) for kind in KINDS
}
"""What each kind of event may pull on blocks. A kind without a trigger leaves all blocks as they are."""


def moves(
    event: OffloadingEvent, words: Iterable[tuple[int, int]], ended: TransferRecord | None
) -> Counter[int]:
    """How many blocks took each edge with this event: number in `EDGES` -> blocks.

    words: the word before and after of each block that the event concerns.
    ended: the transfer that the event ended.
    """
    triggers = _triggers(event, ended)
    taken: Counter[int] = Counter()
    for (before, after), blocks in Counter(words).items():
        for edge in route(before, after, triggers):
            taken[edge] += blocks
    return taken


def _triggers(event: OffloadingEvent, ended: TransferRecord | None) -> tuple[BlockTrigger, ...]:
    """The triggers that this event may pull: a copy that has ended was either good or bad."""
    triggers = BLOCK_TRIGGERS[type(event)]
    if ended is None:
        return triggers
    good = ended.state is TransferState.COMPLETED
    other = BlockTrigger.END_COPY_BAD if good else BlockTrigger.END_COPY_GOOD
    return tuple(one for one in triggers if one is not other)


@cache
def route(before: int, after: int, triggers: tuple[BlockTrigger, ...]) -> tuple[int, ...]:
    """The edges, as numbers in `EDGES`, that lead from one word to another by these triggers.

    A word that stays may have been touched: this is the only trigger that never changes a word.

    Raises `ValueError` if no way leads there.
    """
    if before == after:
        state = BlockState(BLOCK_WORDS.decode(before)[0])
        touched = (state, BlockTrigger.TOUCH, state)
        return (_NUMBER[touched],) if BlockTrigger.TOUCH in triggers and touched in _NUMBER else ()
    ways: deque[tuple[int, tuple[int, ...]]] = deque([(before, ())])
    seen = {before}
    while ways:
        word, way = ways.popleft()
        number, counts = BLOCK_WORDS.decode(word)
        for trigger in triggers:
            try:
                target, left = BLOCK.step(number, counts, trigger)
            except UndefinedStep:
                continue
            following = BLOCK_WORDS.encode(target, left)
            longer = (*way, _NUMBER[BlockState(number), trigger, BlockState(target)])
            if following == after:
                return longer
            if following not in seen:
                seen.add(following)
                ways.append((following, longer))
    named = ", ".join(one.name for one in triggers)
    words = f"{BLOCK_WORDS.describe(before)} does not become {BLOCK_WORDS.describe(after)}"
    raise ValueError(f"{words} by {named}")
