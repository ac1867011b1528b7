"""Contracts of the compiled tables: the two functions of each pair return the same for all arguments.

The first of a pair is the code's step (`Machine.step`, with ranges that are computed when the machine is
declared). The second reads the rows. Counts are any ints, also negative or above the limits.
"""

from __future__ import annotations

from contracts.steps import Step, by_rows, taken
from kvsm.states import (
    BLOCK,
    LEASE,
    REQUEST,
    TRANSFER,
    BlockState,
    BlockTrigger,
    LeaseState,
    LeaseTrigger,
    RequestState,
    RequestTrigger,
    TransferState,
    TransferTrigger,
)


def block_compiled(state: BlockState, copies: int, pins: int, trigger: BlockTrigger) -> Step:
    """post: _ == block_read(state, copies, pins, trigger)"""
    return taken(BLOCK, state, (copies, pins), trigger)


def block_read(state: BlockState, copies: int, pins: int, trigger: BlockTrigger) -> Step:
    return by_rows(BLOCK, state, (copies, pins), trigger)


def transfer_compiled(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    """post: _ == transfer_read(state, pending, failed, trigger)"""
    return taken(TRANSFER, state, (pending, failed), trigger)


def transfer_read(state: TransferState, pending: int, failed: int, trigger: TransferTrigger) -> Step:
    return by_rows(TRANSFER, state, (pending, failed), trigger)


def lease_compiled(state: LeaseState, readers: int, trigger: LeaseTrigger) -> Step:
    """post: _ == lease_read(state, readers, trigger)"""
    return taken(LEASE, state, (readers,), trigger)


def lease_read(state: LeaseState, readers: int, trigger: LeaseTrigger) -> Step:
    return by_rows(LEASE, state, (readers,), trigger)


def request_compiled(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    """post: _ == request_read(state, loads, trigger)"""
    return taken(REQUEST, state, (loads,), trigger)


def request_read(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    return by_rows(REQUEST, state, (loads,), trigger)


PAIRS = (
    (block_compiled, block_read),
    (transfer_compiled, transfer_read),
    (lease_compiled, lease_read),
    (request_compiled, request_read),
)
