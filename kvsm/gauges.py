"""What is there now, read from a ledger, under the names of `kvsm.metrics.METRICS`.

A process that goes on after a restart reads what the last one left: no gauge begins at 0 there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.events import Direction
from kvsm.ledger import Ledger
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import ABANDONED
from kvsm.states.words import STATE_MASK

_COPIES_SHIFT, _PINS_SHIFT = BLOCK_WORDS.shifts
_MAY_BE_IDLE = sorted(
    BlockState, key=lambda state: state not in (BlockState.STORED, BlockState.FREE, BlockState.EVICTED)
)
"""The states, those that most slots are in first."""


def gauges(ledger: Ledger) -> dict[str, Any]:
    """Name -> what is there now, as in `kvsm.metrics.Metrics.values`. `Metrics.gauges` has the log's too."""
    words = ledger.blocks.view.copy()  # Another thread may change them between two looks.
    # A slot with a copy or a pin: few slots have one, and the word of any other is its state alone.
    busy = _where(words, words > STATE_MASK)
    states = _states(words, busy)
    leases = _where(ledger.leases.view, ledger.leases.view != int(LeaseState.NONE))
    # Copied at once, so that no other thread changes it meanwhile.
    transfers = list(ledger.transfers.values())
    loads = sum([transfer.direction is Direction.LOAD for transfer in transfers])
    copies = busy >> _COPIES_SHIFT & BLOCK_WORDS.limits[0]
    return {
        "capacity_blocks": ledger.config.host_blocks,
        "blocks": {state.name: states[state] for state in BlockState},
        "resident_blocks": states[BlockState.STORED] + states[BlockState.LOADING],
        "pinned_blocks": int(np.count_nonzero(busy >> _PINS_SHIFT)),
        "in_flight_blocks": int(np.count_nonzero(copies)),
        "quarantined_blocks": states[BlockState.QUARANTINED],
        "retired_blocks": states[BlockState.RETIRED],
        "free_blocks": states[BlockState.FREE] + states[BlockState.EVICTED],
        "retired_device_blocks": int(np.count_nonzero(leases & STATE_MASK == LeaseState.RETIRED)),
        "live_transfers": {"store": len(transfers) - loads, "load": loads},
        "draining_transfers": sum([one.state is ABANDONED for one in transfers]),
        "known_requests": len(ledger.requests),
        "deferred_requests": len(ledger.deferred),
        "life": ledger.life,
    }


def _where(words: NDArray[np.int32], chosen: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The chosen words. To see that there is none takes a tenth of the time of a search."""
    return words[np.flatnonzero(chosen)] if chosen.any() else words[:0]


def _states(words: NDArray[np.int32], busy: NDArray[np.int32]) -> list[int]:
    """How many slots are in each state. busy: the words that are more than a state.

    To sort all words into states takes five times as long as to look for one state after another.
    """
    counts: list[int] = np.bincount(busy & STATE_MASK, minlength=len(BlockState)).tolist()
    left = len(words) - len(busy)
    for state in _MAY_BE_IDLE:
        if not left:
            break
        idle = int(np.count_nonzero(words == int(state)))
        counts[state] += idle
        left -= idle
    return counts
