"""The events of measured times and of slow hits (`load_only_if_faster`)."""

from __future__ import annotations

from kvsm import events as ev
from kvsm.core.ledger.expected_times import LOADED_EVERY, are_possible, expected
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.states.request import FINISHED
from kvsm.states.words import STATE_MASK


def times_measured(ledger: LedgerState, event: ev.TimesMeasured) -> None:
    """Use these times for later decisions."""
    times = event.start_us, event.block_ns, event.token_ns
    if not are_possible(times):
        raise InvalidEvent(event.seq, "a measured time is negative or too long")
    ledger.times = times


def slow_hit_found(ledger: LedgerState, event: ev.SlowHitFound) -> None:
    """Count a slow hit whose figures and decision follow from the ledger; reject any other."""
    request = ledger.requests.get(event.request)
    if request is None or request.word & STATE_MASK == FINISHED:
        raise InvalidEvent(event.seq, f"request {event.request} is unknown or over, so it has no hit")
    times = expected(ledger, event.blocks, event.tokens)
    named = event.blocks_ahead, event.load_us, event.compute_us
    if not ledger.config.load_only_if_faster or times is None or not times.is_slow or named != times:
        raise InvalidEvent(event.seq, "a slow hit does not follow from the measured times")
    if event.declined != (ledger.declined_hits < LOADED_EVERY - 1):
        raise InvalidEvent(
            event.seq, f"the slow hit after {ledger.declined_hits} declined ones has a wrong decision"
        )
    ledger.declined_hits = ledger.declined_hits + 1 if event.declined else 0
