"""The ledger as bytes, and back; and the digest that says whether two ledgers are equal.

A snapshot is canonical: equal ledgers give equal bytes. What has no order (requests, transfers, the key
index) is written sorted; what has one (the free queue, the eviction order) is written in it. So the
digest is a hash of the snapshot, and a restored ledger has the digest of the one that was saved (S10).
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np

from kvsm.events import Direction, OffloadConfig, Owners
from kvsm.ids import Ids, pack, unpack
from kvsm.ledger import Ledger, RequestRecord, TransferRecord, indexed_slots
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK


class _TransferState(msgspec.Struct, array_like=True, frozen=True):
    id: int
    direction: Direction
    owners: Owners
    slots: Ids
    device_blocks: Ids
    keys: tuple[bytes, ...]
    word: int
    epoch: int
    since: int
    reported: int
    flush: bool


class _RequestState(msgspec.Struct, array_like=True, frozen=True):
    name: str
    word: int
    pins: Ids
    pinned_at: int
    awaits: int
    patience: int
    load: int
    settled: tuple[int, ...]
    offered: tuple[int, ...]


class LedgerState(msgspec.Struct, array_like=True, frozen=True):
    config: OffloadConfig
    seq: int
    step: int
    tick: int
    epoch: int
    voided_at: int
    ended_at: int
    forgotten_at: int
    blocks: bytes
    leases: bytes
    generations: bytes
    keys: tuple[bytes, ...]
    """Of the indexed slots, by slot number."""
    free: bytes
    policy: bytes
    transfers: tuple[_TransferState, ...]
    requests: tuple[_RequestState, ...]
    brought: tuple[tuple[int, bytes], ...]
    stale: tuple[tuple[int, bytes], ...]
    offers: tuple[tuple[bytes, int], ...]
    """The longest unoffered first."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(LedgerState)


def snapshot(ledger: Ledger) -> bytes:
    """The whole state, a few bytes a slot and each resident key once."""
    return _ENCODER.encode(
        LedgerState(
            config=ledger.config,
            seq=ledger.seq,
            step=ledger.step,
            tick=ledger.tick,
            epoch=ledger.epoch,
            voided_at=ledger.voided_at,
            ended_at=ledger.ended_at,
            forgotten_at=ledger.forgotten_at,
            blocks=ledger.blocks.view.tobytes(),
            leases=ledger.leases.view.tobytes(),
            generations=ledger.generation_view.tobytes(),
            keys=tuple([ledger.key_of[slot] for slot in indexed_slots(ledger)]),
            free=ledger.free.order().astype("<u4").tobytes(),
            policy=ledger.policy.snapshot(),
            transfers=tuple([_save_transfer(ledger.transfers[id]) for id in sorted(ledger.transfers)]),
            requests=tuple([_save_request(ledger.requests[name]) for name in sorted(ledger.requests)]),
            brought=tuple(sorted(ledger.provenance.brought.items())),
            stale=tuple(sorted(ledger.provenance.stale.items())),
            offers=tuple(ledger.offers.times.items()),
        )
    )


def restore(saved: bytes) -> Ledger:
    """A ledger equal to the one that was saved. Raises `msgspec.DecodeError` if these are other bytes."""
    state = _DECODER.decode(saved)
    ledger = Ledger(state.config)
    ledger.seq, ledger.step, ledger.tick = state.seq, state.step, state.tick
    ledger.epoch, ledger.voided_at = state.epoch, state.voided_at
    ledger.ended_at, ledger.forgotten_at = state.ended_at, state.forgotten_at
    ledger.provenance.brought.update(state.brought)
    ledger.provenance.stale.update(state.stale)
    ledger.offers.times.update(state.offers)
    ledger.blocks.view[:] = np.frombuffer(state.blocks, dtype=np.int32)
    ledger.leases.view[:] = np.frombuffer(state.leases, dtype=np.int32)
    ledger.generation_view[:] = np.frombuffer(state.generations, dtype=np.int64)
    for slot, key in zip(indexed_slots(ledger), state.keys, strict=True):
        ledger.key_of[slot] = key
        ledger.index[key] = slot
    ledger.free.remove(np.arange(state.config.host_blocks))
    ledger.free.append(np.frombuffer(state.free, "<u4").astype(np.int64))
    ledger.policy.restore(state.policy)
    for saved_transfer in state.transfers:
        ledger.transfers[saved_transfer.id] = _load_transfer(saved_transfer)
    for saved_request in state.requests:
        request = _load_request(saved_request)
        ledger.requests[request.name] = request
        if request.word & STATE_MASK == RequestState.DEFERRED:
            ledger.deferred[request.name] = request
    return ledger


def digest(ledger: Ledger) -> str:
    """32 hex digits; equal for equal states, the orders of the free queue and of eviction included."""
    return blake2b(snapshot(ledger), digest_size=16).hexdigest()


def _save_transfer(one: TransferRecord) -> _TransferState:
    return _TransferState(
        one.id,
        one.direction,
        one.owners,
        pack(one.slots),
        pack(one.device_blocks),
        one.keys,
        one.word,
        one.epoch,
        one.since,
        one.reported,
        one.flush,
    )


def _load_transfer(saved: _TransferState) -> TransferRecord:
    transfer = TransferRecord(
        saved.id,
        saved.direction,
        saved.owners,
        unpack(saved.slots),
        unpack(saved.device_blocks),
        saved.keys,
        saved.word,
        saved.epoch,
        saved.since,
    )
    transfer.reported, transfer.flush = saved.reported, saved.flush
    return transfer


def _save_request(one: RequestRecord) -> _RequestState:
    return _RequestState(
        one.name,
        one.word,
        pack(one.pins),
        one.pinned_at,
        one.awaits,
        one.patience,
        one.load,
        one.settled,
        one.offered,
    )


def _load_request(saved: _RequestState) -> RequestRecord:
    request = RequestRecord(saved.name)
    request.word, request.pins = saved.word, unpack(saved.pins)
    request.pinned_at, request.awaits, request.patience = saved.pinned_at, saved.awaits, saved.patience
    request.load, request.settled, request.offered = saved.load, saved.settled, saved.offered
    return request
