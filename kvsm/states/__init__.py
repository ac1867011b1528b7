"""The four machines: block, transfer, lease, request. Each is one table in one file."""

from __future__ import annotations

from hashlib import blake2b

from kvsm.states.block import BLOCK, BlockState, BlockTrigger
from kvsm.states.lease import LEASE, LeaseState, LeaseTrigger
from kvsm.states.machine import Machine
from kvsm.states.request import REQUEST, RequestState, RequestTrigger
from kvsm.states.transfer import TRANSFER, TransferState, TransferTrigger

MACHINES: dict[str, Machine] = {machine.name: machine for machine in (BLOCK, TRANSFER, LEASE, REQUEST)}


def machines_digest() -> str:
    """Return 16 hex digits that change with any table. A log records the digest of the tables that wrote
    it."""
    text = "\n".join(machine.signature() for machine in MACHINES.values())
    return blake2b(text.encode(), digest_size=8).hexdigest()


__all__ = [
    "BLOCK",
    "LEASE",
    "MACHINES",
    "REQUEST",
    "TRANSFER",
    "BlockState",
    "BlockTrigger",
    "LeaseState",
    "LeaseTrigger",
    "Machine",
    "RequestState",
    "RequestTrigger",
    "TransferState",
    "TransferTrigger",
    "machines_digest",
]
