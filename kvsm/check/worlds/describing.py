"""Describe a ledger for people: one line for each thing, by name, so that two states can be compared."""

from __future__ import annotations

from kvsm.core.ledger import Ledger
from kvsm.ids import listed, render_key
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS


def describe_ledger(ledger: Ledger) -> dict[str, str]:
    """Describe the used slots, the leased device blocks, the live transfers and the requests."""
    seen = {}
    keys = {slot: key for key, slot in ledger.index.items()}
    for slot, word in enumerate(ledger.blocks.words):
        if word:
            seen[f"slot {slot}"] = BLOCK_WORDS.describe(word)
        if slot in keys:
            seen[f"key of slot {slot}"] = render_key(keys[slot])
    for block, word in enumerate(ledger.leases.words):
        if word:
            seen[f"device block {block}"] = LEASE_WORDS.describe(word)
    for number, transfer in ledger.transfers.items():
        pairs = zip(listed(transfer.device_blocks), listed(transfer.slots))
        blocks = ", ".join(f"device block {block} and slot {slot}" for block, slot in pairs)
        seen[f"{transfer.direction.name.lower()} {number} copies"] = blocks or "nothing"
        seen[f"transfer {number}"] = TRANSFER_WORDS.describe(transfer.word)
    for name, request in ledger.requests.items():
        seen[f"request {name}"] = REQUEST_WORDS.describe(request.word)
    return seen
