"""The ledger as bytes, and back; and the digest that says whether two ledgers are equal.

A snapshot is canonical: equal ledgers give equal bytes. What has no order (requests, transfers, the index) is
written sorted. What has an order (the free queue, the eviction order) is written in that order. So the hash
of the snapshot is the ledger's digest, and restoring keeps it (events are state, S10).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from kvsm.events import Direction, OffloadConfig, Owners
from kvsm.ids import Ids, pack, unpack
from kvsm.ledger import Ledger, RequestRecord, TransferRecord, indexed_slots
from kvsm.states.request import RequestState

_SavedTransfer = tuple[int, Direction, Owners, Ids, Ids, tuple[bytes, ...], int, int, int, int, bool]
_SavedRequest = tuple[str, int, Ids, int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""The fields of a `TransferRecord` and a `RequestRecord`, with packed ids."""
_IDS = frozenset({"slots", "device_blocks", "pins"})
_Record = TypeVar("_Record", TransferRecord, RequestRecord)


class SavedLedger(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot, decoded."""

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
    """Keys of the indexed slots, by slot number."""
    free: bytes
    policy: bytes
    transfers: tuple[_SavedTransfer, ...]
    requests: tuple[_SavedRequest, ...]
    brought: tuple[tuple[int, bytes], ...]
    stale: tuple[tuple[int, bytes], ...]
    offers: tuple[tuple[bytes, int], ...]
    """The key that was offered longest ago comes first."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SavedLedger)


def snapshot(ledger: Ledger) -> bytes:
    """The whole state, a few bytes a slot and each resident key once."""
    return _ENCODER.encode(
        SavedLedger(
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
            transfers=tuple([_saved(ledger.transfers[id]) for id in sorted(ledger.transfers)]),
            requests=tuple([_saved(ledger.requests[name]) for name in sorted(ledger.requests)]),
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
        transfer = _restored(TransferRecord, saved_transfer)
        ledger.transfers[transfer.id] = transfer
    for saved_request in state.requests:
        request = _restored(RequestRecord, saved_request)
        ledger.requests[request.name] = request
        if request.state is RequestState.DEFERRED:
            ledger.deferred[request.name] = request
    return ledger


def digest(ledger: Ledger) -> str:
    """32 hex digits; equal for equal states, the orders of the free queue and of eviction included."""
    return blake2b(snapshot(ledger), digest_size=16).hexdigest()


def _saved(record: TransferRecord | RequestRecord) -> Any:
    """The record's fields in order, with packed ids."""
    return tuple([pack(one) if isinstance(one, np.ndarray) else one for one in astuple(record)])


def _restored(kind: type[_Record], saved: tuple[Any, ...]) -> _Record:
    """Inverse of `_saved`."""
    fields = zip(kind.__struct_fields__, saved, strict=True)
    values: list[Any] = [unpack(value) if name in _IDS else value for name, value in fields]
    return kind(*values)
