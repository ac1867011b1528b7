"""What is there now, read from a ledger, under the names of `kvsm.explain.metrics.METRICS`.

The fold keeps the counts of slots and device blocks, so no gauge looks at a slot. A process that resumes
reads what the last one left: no gauge begins at 0 there.
"""

from __future__ import annotations

from typing import Any

from kvsm.core.ledger import Ledger
from kvsm.events import Direction
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import ABANDONED
from kvsm.states.words import STATE_MASK

_COPIES, _PINS = 1 + STATE_MASK, 2 + STATE_MASK
"""Where a block's counters stand in the totals of `StateWords`."""


def gauges(ledger: Ledger) -> dict[str, Any]:
    """Return the gauges by name, as in `Metrics.values`. `Metrics.gauges` adds the log's.

    Any thread may call it. It iterates over the live transfers, but not over slots.
    """
    blocks = ledger.blocks.totals.tolist()  # Copied in one call: another thread may fold an event meanwhile.
    transfers = list(ledger.transfers.values())
    loads = sum([transfer.direction is Direction.LOAD for transfer in transfers])
    return {
        "capacity_blocks": ledger.config.host_blocks,
        "blocks": {state.name: blocks[state] for state in BlockState},
        "resident_blocks": blocks[BlockState.STORED] + blocks[BlockState.LOADING],
        "pinned_blocks": blocks[_PINS],
        "in_flight_blocks": blocks[_COPIES],
        "quarantined_blocks": blocks[BlockState.QUARANTINED],
        "retired_blocks": blocks[BlockState.RETIRED],
        "free_blocks": blocks[BlockState.FREE] + blocks[BlockState.EVICTED],
        "retired_device_blocks": ledger.leases.totals[LeaseState.RETIRED],
        "live_transfers": {"store": len(transfers) - loads, "load": loads},
        "draining_transfers": sum([one.state is ABANDONED for one in transfers]),
        "known_requests": len(ledger.requests),
        "deferred_requests": len(ledger.deferred),
        "life": ledger.life,
    }
