"""The expected times of a hit: to load its blocks, and to compute its tokens (`load_only_if_faster`)."""

from __future__ import annotations

from typing import NamedTuple

from kvsm.core.ledger.records import TransferRecord
from kvsm.core.ledger.state import LedgerState
from kvsm.events import LOAD
from kvsm.states.transfer import ABANDONED
from kvsm.states.words import STATE_MASK

LOADED_EVERY = 16
"""One in this many slow hits is loaded nevertheless: without loads, their times would never be measured
again."""

MOST_TIME = 1 << 40
"""The largest number in `TimesMeasured`: 12 days for a load, and 18 minutes for a block or a token."""

_MOST_US = 1 << 62


class Expected(NamedTuple):
    """The expected times of a hit: to load its blocks, and to compute its tokens (us).

    blocks_ahead: device blocks of the loads for which requests wait.
    """

    blocks_ahead: int
    load_us: int
    compute_us: int

    @property
    def is_slow(self) -> bool:
        """Whether the load takes at least as long as the computation."""
        return self.load_us >= self.compute_us


def expected(ledger: LedgerState, blocks: int, tokens: int) -> Expected | None:
    """Return the expected times of a hit of `tokens` tokens, whose load fills `blocks` device blocks. None:
    no times were measured yet."""
    if ledger.times is None:
        return None
    start_us, block_ns, token_ns = ledger.times
    ahead = sum([len(one.device_blocks) for one in ledger.transfers.values() if _is_awaited(ledger, one)])
    load_us = start_us + (ahead + blocks) * block_ns // 1000
    return Expected(ahead, min(load_us, _MOST_US), min(tokens * token_ns // 1000, _MOST_US))


def _is_awaited(ledger: LedgerState, transfer: TransferRecord) -> bool:
    """Whether a request of the engine waits for this load. None waits for a copy to another tier, or for a
    load that a reset has abandoned."""
    if transfer.direction is not LOAD or transfer.word & STATE_MASK == ABANDONED:
        return False
    return not ledger.requests[transfer.owners[0][0]].target


def are_possible(times: tuple[int, int, int]) -> bool:
    """Whether `TimesMeasured` may have these times."""
    return all(0 <= time <= MOST_TIME for time in times)
