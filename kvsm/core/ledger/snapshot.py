"""Snapshots: a ledger as bytes, and back. The digest of a ledger is the hash of its snapshot.

A snapshot is canonical: equal ledgers give equal bytes. Collections without an order (requests, transfers,
the index) are sorted; those with an order (the free queue, the eviction order) keep it. So two ledgers are
equal if their digests are, and a restored ledger has the same digest (events are state, S10).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from kvsm.core.ledger import Ledger, RequestRecord, TransferRecord, indexed_slots
from kvsm.core.ledger.expected_times import LOADED_EVERY, are_possible
from kvsm.errors import described
from kvsm.events import Direction, OffloadConfig, Owners, Parents
from kvsm.identity import KeptPools
from kvsm.ids import IdArray, Ids, pack, unpack
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import REQUEST_WORDS, RequestState
from kvsm.states.transfer import TRANSFER_WORDS

_SavedTransfer = tuple[int, Direction, Owners, Ids, Ids, tuple[bytes, ...], int, int, int, int, bool, Parents]
_SavedRequest = tuple[str, int, Ids, int, int, int, int, tuple[int, ...], tuple[int, ...], str]
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
    """Key -> number of offers; the key whose last offer is oldest comes first."""
    life: int = 1
    kept: KeptPools | None = None
    weights: str = ""
    times: tuple[int, int, int] | None = None
    declined_hits: int = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SavedLedger)


def snapshot(ledger: Ledger) -> bytes:
    """Return the whole state as bytes: a few bytes per slot, and each resident key once."""
    return _ENCODER.encode(_state_of(ledger))


def _state_of(ledger: Ledger) -> SavedLedger:
    return SavedLedger(
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
        keys=tuple(ledger.keys_of(indexed_slots(ledger))),
        free=ledger.free.order().astype("<u4").tobytes(),
        policy=ledger.policy.snapshot(),
        transfers=tuple([saved_record(ledger.transfers[id]) for id in sorted(ledger.transfers)]),
        requests=tuple([saved_record(ledger.requests[name]) for name in sorted(ledger.requests)]),
        brought=tuple(sorted(ledger.provenance.brought.items())),
        stale=tuple(sorted(ledger.provenance.stale.items())),
        offers=tuple(ledger.offers.times.items()),
        life=ledger.life,
        kept=ledger.kept,
        weights=ledger.weights,
        times=ledger.times,
        declined_hits=ledger.declined_hits,
    )


def restore(saved: bytes) -> Ledger:
    """Restore the saved ledger. Raises `msgspec.DecodeError` if these bytes are no snapshot."""
    return _ledger_of(_DECODER.decode(saved))


def is_saved_as(ledger: Ledger, saved: bytes) -> bool:
    """Whether these bytes are the ledger's state. Snapshots of an older kvsm lack fields that have
    defaults."""
    if saved == snapshot(ledger):
        return True
    try:
        return _DECODER.decode(saved) == _state_of(ledger)
    except msgspec.MsgspecError:
        return False


def saved_step(saved: bytes) -> int:
    """Return the engine step of a snapshot. Raises `msgspec.DecodeError` if these bytes are no snapshot."""
    return _DECODER.decode(saved).step


def restore_foreign(saved: bytes, config: OffloadConfig) -> Ledger:
    """Restore a ledger from untrusted bytes.

    config: the configuration that the snapshot must have. Its policy and its sizes must be trusted.

    Raises `ValueError` if the bytes are no snapshot of this configuration. Nothing is allocated before the
    sizes agree. The state may still contradict itself; `kvsm.core.ledger.invariants.check_ledger` finds that.
    """
    try:
        state = _DECODER.decode(saved)
        check_saved(state, config)
        ledger = _ledger_of(state)
    except ValueError:
        raise
    except Exception as error:  # of msgspec, or of a policy that restores a state of another policy
        raise ValueError(described(error)) from error
    if _state_of(ledger) != state:
        raise ValueError("a ledger that is restored from it has another snapshot")
    return ledger


def check_saved(state: SavedLedger, config: OffloadConfig) -> None:
    """Raises `ValueError` unless all sizes and numbers in a snapshot are possible under `config`."""
    slots, blocks, bound = config.host_blocks, config.device_blocks, state.seq
    if state.config != config:
        raise ValueError("its configuration is not the one of its segment")
    for name, wanted in (("blocks", 4 * slots), ("leases", 4 * blocks), ("generations", 8 * slots)):
        if len(getattr(state, name)) != wanted:
            raise ValueError(f"its {name} take {len(getattr(state, name))} bytes; the pools need {wanted}")
    if len(state.free) % 4 or len(state.free) > 4 * slots:
        raise ValueError("its free queue does not fit the pool")
    numbers = [bound, state.step, state.tick, state.epoch, *(times for _, times in state.offers)]
    events = (state.voided_at, state.ended_at, state.forgotten_at)
    _refuse(min(numbers) < 0 or max(numbers) > _MOST, "a number that is negative or too large")
    _refuse(not all(0 <= one <= bound for one in events), "an event after its own")
    for name, codec in (("blocks", BLOCK_WORDS), ("leases", LEASE_WORDS)):
        words = np.unique(np.frombuffer(getattr(state, name), np.int32)).tolist()
        _refuse(not all(map(codec.holds, words)), f"an impossible word in its {name}")
    born = np.frombuffer(state.generations, np.int64)
    _refuse(bool(born.min() < 0 or born.max() > bound), "a generation that is no event before it")
    _refuse(_beyond(np.frombuffer(state.free, "<u4"), slots), "a slot that the pool does not have")
    _refuse(
        not all(0 <= block < blocks for block, _ in (*state.brought, *state.stale)), "a wrong device block"
    )
    _refuse(not 0 <= state.declined_hits < LOADED_EVERY, "an impossible number of declined hits")
    _refuse(state.times is not None and not are_possible(state.times), "an impossible measured time")
    for transfer in state.transfers:
        _check_transfer(_restored(TransferRecord, transfer), state, config)
    for request in state.requests:
        _check_request(_restored(RequestRecord, request), state, config)


_MOST = 1 << 62
"""The largest number that is accepted as a count."""


def _check_transfer(one: TransferRecord, state: SavedLedger, config: OffloadConfig) -> None:
    chunk, store = config.blocks_per_chunk, one.direction is Direction.STORE
    whole = len(one.slots) * chunk
    # A store whose source is not the device names no device blocks.
    fits = len(one.device_blocks) in (0, whole) if store else 0 < len(one.device_blocks) <= whole
    owned = len(one.keys) == len(one.slots) if store else len(one.owners) == 1 and not one.keys
    _refuse(not 1 <= one.id <= state.seq or not TRANSFER_WORDS.holds(one.word), "an impossible transfer")
    _refuse(not (fits and owned), f"a transfer {one.id} whose parts do not fit together")
    _refuse(not 0 <= one.reported < 1 << config.workers, f"a transfer {one.id} with unknown workers")
    _refuse(not (0 <= one.epoch <= state.epoch and 0 <= one.since <= state.tick), "a transfer of the future")
    _refuse(_beyond(one.slots, config.host_blocks), "a slot that the pool does not have")
    places, parents = [place for place, _ in one.parents], [slot or 0 for _, slot in one.parents]
    _refuse(places != sorted(set(places)) or _beyond(tuple(places), len(one.slots)), "a wrong place of a run")
    _refuse(_beyond(tuple(parents), config.host_blocks), "a slot that the pool does not have")
    _refuse(_beyond(one.device_blocks, config.device_blocks), "a device block that the pool does not have")


def _check_request(one: RequestRecord, state: SavedLedger, config: OffloadConfig) -> None:
    numbers = (one.awaits, one.load, one.patience + 1, *one.settled, *one.offered)
    _refuse(not REQUEST_WORDS.holds(one.word), f"request {one.name} in an impossible state")
    _refuse(not all(0 <= number <= _MOST for number in numbers), f"request {one.name} with a wrong number")
    _refuse(not 0 <= one.pinned_at <= state.seq, f"request {one.name} with a match of the future")
    _refuse(_beyond(one.pins, config.host_blocks), "a slot that the pool does not have")


def _beyond(ids: IdArray | NDArray[Any], limit: int) -> bool:
    """Whether a batch has an id outside 0 to `limit` - 1."""
    if type(ids) is tuple:
        return any(not 0 <= one < limit for one in ids)
    return len(ids) > 0 and int(np.max(ids)) >= limit


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(f"it holds {what}")


def _ledger_of(state: SavedLedger) -> Ledger:
    ledger = Ledger(state.config)
    ledger.seq, ledger.step, ledger.tick = state.seq, state.step, state.tick
    ledger.epoch, ledger.voided_at = state.epoch, state.voided_at
    ledger.ended_at, ledger.forgotten_at = state.ended_at, state.forgotten_at
    ledger.provenance.brought.update(state.brought)
    ledger.provenance.stale.update(state.stale)
    ledger.offers.times.update(state.offers)
    ledger.life, ledger.kept, ledger.weights = state.life, state.kept, state.weights
    ledger.times, ledger.declined_hits = state.times, state.declined_hits
    ledger.blocks.view[:] = np.frombuffer(state.blocks, dtype=np.int32)
    ledger.leases.view[:] = np.frombuffer(state.leases, dtype=np.int32)
    ledger.blocks.recount()
    ledger.leases.recount()
    ledger.generation_view[:] = np.frombuffer(state.generations, dtype=np.int64)
    for slot, key in zip(indexed_slots(ledger).tolist(), state.keys, strict=True):
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
    ledger.copied_out = ledger.count_copies_out()
    return ledger


def digest(ledger: Ledger) -> str:
    """Return 32 hex digits, equal for equal states, including the free queue's and the eviction order."""
    return blake2b(snapshot(ledger), digest_size=16).hexdigest()


def saved_record(record: TransferRecord | RequestRecord) -> Any:
    """Return the fields of a record in order, with packed ids."""
    return tuple([pack(one) if isinstance(one, np.ndarray) else one for one in astuple(record)])


def _restored(kind: type[_Record], saved: tuple[Any, ...]) -> _Record:
    """Inverse of `saved_record`."""
    fields = zip(kind.__struct_fields__, saved, strict=True)
    values: list[Any] = [unpack(value) if name in _IDS else value for name, value in fields]
    return kind(*values)
