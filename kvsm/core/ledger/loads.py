"""The events of loads: a match becomes a load into device blocks, which the engine may rewrite later."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm import events as ev
from kvsm.core.ledger import requests, transfers
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.events import LOAD
from kvsm.ids import IdArray, equal, listed, unpack
from kvsm.states import block as block_machine
from kvsm.states import lease as lease_machine
from kvsm.states import request as request_machine
from kvsm.states.request import REQUEST_WORDS


def load_planned(ledger: LedgerState, event: ev.LoadPlanned) -> None:
    """Turn pins into readers, lease the device blocks for writing, and release the other pins."""
    seq, slots, device_blocks = event.seq, unpack(event.slots), unpack(event.device_blocks)
    parts = unpack(event.parts)
    request = requests.named(ledger, seq, event.request)
    word = REQUEST_WORDS.step(request.word, request_machine.BEGIN_LOAD, request.name, seq)
    live = ledger.live_pins(request)
    whole = len(live) == len(request.pins)
    if event.voided:
        if whole or len(slots) or len(device_blocks) or len(parts):
            raise InvalidEvent(seq, "no pin of this request was voided, or the plan is not empty")
        requests.unpin(ledger, request, live, seq)
        request.word = REQUEST_WORDS.step(word, request_machine.END_LOAD, request.name, seq)
        return
    loaded = len(slots)
    if not whole or not equal(slots, live[:loaded]):
        raise InvalidEvent(seq, f"request {request.name} loads blocks that its match does not hold")
    transfers.check_pairs(ledger, seq, slots, device_blocks, parts)
    new = ledger.blocks.check(slots, block_machine.BEGIN_LOAD, seq)
    leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_WRITE, seq)
    ledger.blocks.commit(slots, new)
    ledger.leases.commit(device_blocks, leased)
    requests.unpin(ledger, request, live[loaded:], seq)
    request.word, request.load = word, seq
    ledger.provenance.bring(device_blocks, keys_by_device_block(ledger, slots, parts))
    transfers.plan(ledger, seq, LOAD, ((request.name, loaded),), slots, device_blocks, ())


def keys_by_device_block(ledger: LedgerState, slots: IdArray, parts: IdArray) -> Sequence[bytes]:
    """Return the key that is loaded into each device block."""
    keys, chunk = ledger.keys_of(slots), ledger.config.blocks_per_chunk
    if len(parts):
        return [keys[part // chunk] for part in listed(parts)]
    return keys if chunk == 1 else [key for key in keys for _ in range(chunk)]


def blocks_rewritten(ledger: LedgerState, event: ev.BlocksRewritten) -> None:
    """Forget what loads brought into these device blocks: the engine computes into them."""
    ledger.provenance.forget(unpack(event.device_blocks))
