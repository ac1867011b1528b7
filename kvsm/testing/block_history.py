"""Record which calls touched each block, so that a failure about wrong bytes names the calls that wrote and
read them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvsm.testing.under_test import Call, UnderTest

MOST_TOUCHES = 6
"""A failure lists at most this many of the last calls that touched a block."""


class Block(NamedTuple):
    """A block of memory: `Block("slot", 3)`."""

    memory: str
    number: int

    def __str__(self) -> str:
        return f"{self.memory} {self.number}"


class _Touch(NamedTuple):
    """A touch of a block.

    source: the block whose bytes were copied to it; None: it was computed or read.
    call: the user's call that led to it, if that is known.
    """

    what: str
    writes: bool
    source: Block | None
    call: Call | None


class BlockStory(NamedTuple):
    """The calls that touched a block. text: lines for a failure. suspect: the user's call that led to its
    present bytes."""

    text: str = ""
    suspect: Call | None = None


class BlockHistory:
    """Records the latest calls that touched each block."""

    def __init__(self, under_test: UnderTest) -> None:
        self._under_test = under_test
        self._touches: dict[Block, deque[_Touch]] = {}

    def latest_call(self, method: str = "") -> Call | None:
        """The latest call of the user's objects. method: of this method only."""
        called = reversed(self._under_test.calls)
        return next((call for call in called if call.words.startswith(f"{method}(" if method else "")), None)

    def suspect(self, call: Call | None) -> None:
        """Mark the present failure at the method of this call."""
        self._under_test.suspect = call

    def read(self, block: Block, what: str) -> None:
        """Note that this reads the block."""
        self._note(block, _Touch(what, False, None, None))

    def wrote(self, block: Block, what: str, source: Block | None = None, call: Call | None = None) -> None:
        """Note that this writes the block.

        source: the block whose bytes are copied; None: they are computed.
        call: the user's call that led to it.
        """
        if source is not None:
            self._note(source, _Touch(what, False, None, None))
        self._note(block, _Touch(what, True, source, call))

    def _note(self, block: Block, touch: _Touch) -> None:
        touches = self._touches.setdefault(block, deque(maxlen=MOST_TOUCHES))
        if not touches or touches[-1][:2] != touch[:2]:
            touches.append(touch)

    def blame(self, block: Block) -> str:
        """Return the calls that touched a block with wrong bytes, and suspect the call that wrote it last."""
        told = self.told(block)
        self.suspect(told.suspect)
        return told.text

    def told(self, block: Block) -> BlockStory:
        """Describe the calls that touched a block, and those that touched the block that its bytes were
        copied from."""
        lines, seen, writer = [], set[Block](), None
        at: Block | None = block
        while at is not None and at not in seen:
            seen.add(at)
            touches = self._touches.get(at, ())
            last = next((touch for touch in reversed(touches) if touch.writes), None)
            lines.append(f"{at} was last written by {last.what if last else 'no call that was seen'}")
            if last is not None and last.call is not None:
                lines[-1] += f", after {last.call.named()}"
                writer = writer or last.call
            lines.append(f"calls that touched {at}: {'; '.join(touch.what for touch in touches) or 'none'}")
            at = last.source if last else None
        return BlockStory("".join(f"\n  {line}" for line in lines), writer)
