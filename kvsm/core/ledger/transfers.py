"""The events of transfers: plan, submission, reports of workers, and each way to end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

from kvsm import events as ev
from kvsm.core.ledger import index, order, requests
from kvsm.core.ledger.records import TransferRecord
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.events import LOAD, STORE, Direction, Owners, Parents
from kvsm.ids import NO_IDS, IdArray, listed
from kvsm.states import block as block_machine
from kvsm.states import lease as lease_machine
from kvsm.states import request as request_machine
from kvsm.states import transfer as transfer_machine
from kvsm.states.block import EVICTED_WORD
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import STATE_MASK, pick

_UNDER_WAY = (transfer_machine.SUBMITTED, transfer_machine.ABANDONED)


def plan(
    ledger: LedgerState,
    seq: int,
    direction: Direction,
    owners: Owners,
    slots: IdArray,
    device_blocks: IdArray,
    keys: tuple[bytes, ...],
    parents: Parents = (),
) -> None:
    """Make the record of the transfer that event `seq` plans."""
    word, epoch = ledger.planned_word, ledger.epoch
    ledger.transfers[seq] = TransferRecord(
        seq, direction, owners, slots, device_blocks, keys, word, epoch, parents=parents
    )


def check_pairs(
    ledger: LedgerState, seq: int, slots: IdArray, device_blocks: IdArray, parts: IdArray = NO_IDS
) -> None:
    """Refuse a plan whose device blocks are not the chunks of its slots, or the named parts of them."""
    chunk = ledger.config.blocks_per_chunk
    if not 0 < len(device_blocks) == (len(parts) or len(slots) * chunk):
        raise InvalidEvent(seq, "a plan names a chunk of device blocks for each slot, at least one")
    if len(parts):
        named = listed(parts)
        ascending = all(map(gt, named[1:], named))
        if not ascending or {part // chunk for part in named} != set(range(len(slots))):
            raise InvalidEvent(seq, "parts ascend, and name each slot of the plan and no other")


def transfers_submitted(ledger: LedgerState, event: ev.TransfersSubmitted) -> None:
    """Submit plans to the workers. Their time in flight begins."""
    seq = event.seq
    transfers = _distinct_transfers(ledger, seq, event.transfers)
    words = [TRANSFER_WORDS.step(one.word, transfer_machine.SUBMIT, one.id, seq) for one in transfers]
    # The slots of a planned store are ALLOCATED for it, so SUBMIT_STORE cannot be refused.
    for transfer, word in zip(transfers, words):
        transfer.word, transfer.since = word, ledger.tick
        if transfer.direction is STORE:
            ledger.blocks.advance(transfer.slots, block_machine.SUBMIT_STORE, seq)


def flush_requested(ledger: LedgerState, event: ev.FlushRequested) -> None:
    """Mark the transfers that the engine waits for."""
    for transfer in _distinct_transfers(ledger, event.seq, event.transfers):
        transfer.flush = True


def worker_reported(ledger: LedgerState, event: ev.WorkerReported) -> TransferRecord | None:
    """Count the report of a worker. The last report ends the transfer; a failed load voids its slots."""
    seq, transfer = event.seq, _named(ledger, event.seq, event.transfer)
    if event.worker >= ledger.config.workers or transfer.reported >> event.worker & 1:
        raise InvalidEvent(seq, f"worker {event.worker} cannot report transfer {transfer.id} (again)")
    trigger = transfer_machine.REPORT_GOOD if event.good else transfer_machine.REPORT_BAD
    transfer.word = TRANSFER_WORDS.step(transfer.word, trigger, transfer.id, seq)
    transfer.reported |= 1 << event.worker
    state = transfer.word & STATE_MASK
    if state in _UNDER_WAY:
        return None
    end_copies(ledger, transfer, state == transfer_machine.COMPLETED, seq)
    if state == transfer_machine.FAILED and transfer.direction is LOAD:
        index.invalidate(ledger, transfer.slots, seq)
    end(ledger, transfer, seq)
    return transfer


def transfer_cancelled(ledger: LedgerState, event: ev.TransferCancelled) -> TransferRecord:
    """Cancel a plan that was not submitted."""
    transfer = _named(ledger, event.seq, event.transfer)
    cancel(ledger, transfer, event.seq)
    return transfer


def transfer_lost(ledger: LedgerState, event: ev.TransferLost) -> TransferRecord:
    """Retire the memory that a worker that will never report may still write."""
    seq, transfer = event.seq, _named(ledger, event.seq, event.transfer)
    slots = transfer.slots
    transfer.word = TRANSFER_WORDS.step(transfer.word, transfer_machine.LOSE, transfer.id, seq)
    new = ledger.blocks.check(slots, block_machine.LOSE, seq)
    index.withdraw(ledger, slots)
    ledger.blocks.commit(slots, new)
    ledger.voided_at = seq
    # The device blocks of a store can be reused: the lost copy only reads them, into retired slots.
    store = transfer.direction is STORE
    ledger.leases.advance(
        transfer.device_blocks, lease_machine.END_READ if store else lease_machine.LOSE, seq
    )
    close(ledger, transfer, seq)
    return transfer


def cancel(ledger: LedgerState, transfer: TransferRecord, seq: int) -> None:
    """End a plan that no worker has received, so no byte was copied."""
    transfer.word = TRANSFER_WORDS.step(transfer.word, transfer_machine.CANCEL, transfer.id, seq)
    if transfer.direction is LOAD:
        end_copies(ledger, transfer, good=False, seq=seq)
    else:
        ledger.blocks.advance(transfer.slots, block_machine.CANCEL, seq)
        index.remove(ledger, transfer.slots)
        ledger.free.append(transfer.slots)
    end(ledger, transfer, seq)


def end_copies(ledger: LedgerState, transfer: TransferRecord, good: bool, seq: int) -> None:
    """End the transfer's hold on its slots. Their table decides the next state of each slot."""
    slots = transfer.slots
    trigger = block_machine.END_COPY_GOOD if good else block_machine.END_COPY_BAD
    new = ledger.blocks.advance(slots, trigger, seq)
    if transfer.direction is LOAD:
        target = ledger.requests[transfer.owners[0][0]].target
        if order.come_back(ledger, slots, new, target) == len(slots):
            return
    elif good:
        order.admit(ledger, slots, transfer.keys, transfer.parents, transfer.id)
        # Not before: a store that fails is made again, and needs no further offers.
        ledger.offers.forget(transfer.keys)
        if ledger.listener is not None:
            ledger.listener.stored(transfer.id, transfer.keys)
        return
    elif transfer.word & STATE_MASK == transfer_machine.FAILED:
        index.remove(ledger, slots)
    freed = pick(slots, new, EVICTED_WORD)
    if len(freed):
        ledger.free.append(freed)


def end(ledger: LedgerState, transfer: TransferRecord, seq: int) -> None:
    """End the transfer's leases, and close it."""
    store = transfer.direction is STORE
    trigger = lease_machine.END_READ if store else lease_machine.END_WRITE
    ledger.leases.advance(transfer.device_blocks, trigger, seq)
    close(ledger, transfer, seq)


def close(ledger: LedgerState, transfer: TransferRecord, seq: int) -> None:
    """Forget the transfer; step the request that it loads for, and wake the requests that wait for it."""
    del ledger.transfers[transfer.id]
    ledger.ended_at = seq
    if transfer.direction is LOAD:
        request = ledger.requests[transfer.owners[0][0]]
        request.load = 0
        if transfer.word & STATE_MASK != transfer_machine.COMPLETED:
            # The request computes these blocks itself before it offers them.
            ledger.provenance.forget(transfer.device_blocks)
        word = REQUEST_WORDS.step(request.word, request_machine.END_LOAD, request.name, seq)
        requests.settle(ledger, request, word)
    if ledger.deferred:
        requests.wake(ledger, seq, [one for one in ledger.deferred.values() if one.awaits == transfer.id])


def _named(ledger: LedgerState, seq: int, id: int) -> TransferRecord:
    transfer = ledger.transfers.get(id)
    if transfer is None:
        raise InvalidEvent(seq, f"transfer {id} is not live")
    return transfer


def _distinct_transfers(ledger: LedgerState, seq: int, ids: Sequence[int]) -> list[TransferRecord]:
    if len(set(ids)) != len(ids):
        raise InvalidEvent(seq, "a transfer is named twice")
    return [_named(ledger, seq, id) for id in ids]
