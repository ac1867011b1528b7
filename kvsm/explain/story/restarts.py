"""Count the blocks that survive a restart: another process resumes the log of one that ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsm.core.ledger import Ledger
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK


class Survivors(NamedTuple):
    """The slots of the pool at a restart, by what they held.

    kept: a readable block, which stays readable.
    storing: a block that a copy was writing.
    planned: a block whose store had not left for the workers.
    quarantined: a void block that a copy still touched.
    retired: nothing; the slot was given up because a copy was lost.

    All slots except the kept ones can be allocated after the restart.
    """

    kept: int
    storing: int
    planned: int
    quarantined: int
    retired: int

    @property
    def freed(self) -> int:
        """Slots that can be allocated again, and could not before the restart."""
        return self.quarantined + self.retired

    @property
    def lost(self) -> int:
        """Blocks whose stores the restart cut off: they never become readable."""
        return self.storing + self.planned

    def told(self) -> str:
        """`12,345 blocks kept, 17 not: 12 were being stored, 5 were planned`."""
        why = [
            f"{count:,} {'was' if count == 1 else 'were'} {words}"
            for count, words in ((self.storing, "being stored"), (self.planned, "planned"))
            if count
        ]
        kept = f"{self.kept:,} block{'' if self.kept == 1 else 's'} kept, {self.lost:,} not"
        again = f"; {self.freed:,} quarantined or retired slots can be used again" if self.freed else ""
        return kept + (f": {', '.join(why)}" if why else "") + again


def survivors(ledger: Ledger) -> Survivors:
    """What a restart keeps of this ledger. Call it before the `Restarted` event is applied."""
    counts = np.bincount(ledger.blocks.view & STATE_MASK, minlength=len(BlockState)).tolist()
    return Survivors(
        kept=counts[BlockState.STORED] + counts[BlockState.LOADING],
        storing=counts[BlockState.STORING],
        planned=counts[BlockState.ALLOCATED],
        quarantined=counts[BlockState.QUARANTINED],
        retired=counts[BlockState.RETIRED],
    )


def told_process(life: int, ended: str) -> str:
    """`another process goes on (life 2; before it: the process was killed)`."""
    return f"another process goes on (life {life:,}; before it: {ended or 'the log was closed'})"
