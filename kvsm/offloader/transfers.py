"""Transfers: loads planned, jobs submitted, reports taken, and the ways in which a transfer may end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.errors import InvalidEvent, LimitReached
from kvsm.events import Direction, RejectReason
from kvsm.ids import NO_IDS, IdArray, Ids, listed, pack
from kvsm.ledger import TransferRecord
from kvsm.offloader.core import Core
from kvsm.plan import TransferJob
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

_PLANNED, _COMPLETED, _LOST = TransferState.PLANNED, TransferState.COMPLETED, TransferState.LOST
_MATCHED = RequestState.MATCHED


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A transfer that is over, and whether its bytes are right; its device blocks are free of leases.

    request: that it loaded for; "" for a store. lost: a worker never reported; what a lost load was to
    write is retired, and must not be used again.
    """

    transfer: int
    direction: Direction
    request: str
    good: bool
    device_blocks: IdArray
    lost: bool = False


class Transfers(Core):
    def prepare_load(
        self, request: str, device_blocks: Sequence[int], parts: Sequence[int] = ()
    ) -> TransferJob | None:
        """Load the first blocks of the request's match into these device blocks, a chunk of them for each.

        parts: if not all of every chunk is wanted, which place of the match (slot by slot, blocks_per_chunk
        places each, ascending) goes to the device block beside it. The engine may accept less than was
        matched: the rest is released. Returns the job, to be submitted. None means that nothing is
        loaded: there is no match, nothing was accepted, or the promise was voided since (a reset, bytes
        found bad): the engine computes these blocks (S6).
        """
        entry = self.ledger.requests.get(request)
        if entry is None or entry.word & STATE_MASK != _MATCHED:
            return None
        targets = self._device_ids(device_blocks)
        chunk = self.config.blocks_per_chunk
        if len(parts) and parts[0] < 0:
            raise InvalidEvent(self.ledger.seq + 1, f"part {parts[0]} is no place of a match")
        wanted = parts[-1] // chunk + 1 if len(parts) else -(-len(targets) // chunk)
        if wanted == 0:
            self._emit(ev.HitReleased, request)
            return None
        if wanted > len(entry.pins):
            raise InvalidEvent(
                self.ledger.seq + 1, f"request {request} matched {len(entry.pins)} blocks, not {wanted}"
            )
        if len(self.ledger.live_pins(entry)) < len(entry.pins):
            self._emit(ev.LoadPlanned, request, NO_IDS, NO_IDS, True)
            return None
        if not self._has_room_for_transfer():
            raise LimitReached(f"{self.config.max_live_transfers} transfers are live (max_live_transfers)")
        slots, blocks = pack(entry.pins[:wanted]), pack(targets)
        self._emit(ev.LoadPlanned, request, slots, blocks, False, pack(parts))
        seq = self.ledger.seq
        hosts = slots if chunk == 1 else self._host_blocks(self.ledger.transfers[seq].slots, parts)
        return TransferJob(seq, Direction.LOAD, blocks, hosts)

    def _host_blocks(self, slots: IdArray, parts: Sequence[int] = ()) -> Ids:
        """The places of whole slots in the host pool, or of the named parts of them."""
        chunk, numbers = self.config.blocks_per_chunk, listed(slots)
        places = parts if len(parts) else range(len(numbers) * chunk)
        return pack([numbers[place // chunk] * chunk + place % chunk for place in places])

    def complete_load(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` has its shard of the load. Same as `report(transfer, worker, True)`."""
        return self._report(transfer, worker, True, Direction.LOAD)

    def fail_load(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` failed. Once all have reported, the keys are gone before the request hears."""
        return self._report(transfer, worker, False, Direction.LOAD)

    def complete_store(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` has stored its shard. Same as `report(transfer, worker, True)`."""
        return self._report(transfer, worker, True, Direction.STORE)

    def fail_store(self, transfer: int, worker: int = 0) -> Ended | None:
        """Worker `worker` failed: once all have reported, the slots are free and nothing was stored."""
        return self._report(transfer, worker, False, Direction.STORE)

    def submit(self, transfers: Sequence[int]) -> None:
        """These jobs leave for the workers: call it just before they do. Flushes the log first."""
        if transfers:
            self._emit(ev.TransfersSubmitted, tuple(transfers))
            self._flush()

    def report(self, transfer: int, worker: int, good: bool) -> Ended | None:
        """A worker's report. Returns what it ended, if it was the last worker of the transfer.

        A report that names no live transfer, or comes twice, changes nothing and is recorded (S5).
        """
        return self._report(transfer, worker, good, None)

    def _report(self, transfer: int, worker: int, good: bool, direction: Direction | None) -> Ended | None:
        reason = self._why_reject(transfer, worker, direction)
        if reason:
            self._emit(ev.ReportRejected, transfer, worker, good, reason)
            return None
        ended = self._emit(ev.WorkerReported, transfer, worker, good)
        if ended is None:
            return None
        if self.publisher is not None:
            self.publisher.ended(transfer)
        return _ended(ended)

    def _why_reject(self, transfer: int, worker: int, direction: Direction | None) -> str:
        entry = self.ledger.transfers.get(transfer)
        if entry is None:
            return RejectReason.STALE if 0 < transfer <= self.ledger.seq else RejectReason.UNKNOWN
        if direction is not None and entry.direction is not direction:
            return RejectReason.DIRECTION
        if not 0 <= worker < self.config.workers:
            return RejectReason.WORKER
        if entry.reported >> worker & 1:
            return RejectReason.DUPLICATE
        planned = entry.word & STATE_MASK == _PLANNED
        return RejectReason.NOT_SUBMITTED if planned else ""

    def cancel(self, transfer: int) -> Ended | None:
        """Take back a plan that was not submitted; None if there is nothing to take back."""
        entry = self.ledger.transfers.get(transfer)
        if entry is None or entry.state is not TransferState.PLANNED:
            return None
        return self._end(ev.TransferCancelled, entry)

    def lose(self, transfer: int) -> Ended | None:
        """A worker will never report: the transfer is over, and the memory that it may write is retired."""
        entry = self.ledger.transfers.get(transfer)
        if entry is None or entry.state is TransferState.PLANNED:
            return None
        return self._end(ev.TransferLost, entry)

    def lose_overdue(self) -> list[Ended]:
        """Give up every transfer that has been in flight for `transfer_ticks`. `tick` lets time pass."""
        ticks, ledger = self.config.transfer_ticks, self.ledger
        if not ticks:
            return []
        overdue = [
            one.id
            for one in ledger.transfers.values()
            if ledger.tick - one.since >= ticks and one.word & STATE_MASK != _PLANNED
        ]
        return [ended for ended in map(self.lose, overdue) if ended is not None]

    def _end(self, kind: type[ev.OffloadingEvent], entry: TransferRecord) -> Ended:
        self._emit(kind, entry.id)
        if self.publisher is not None:
            self.publisher.ended(entry.id)
        return _ended(entry)

    def flush(self, transfers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Ask that these transfers (default: all submitted) end before the engine goes on: the workers
        wait for what is returned."""
        live = self.ledger.transfers
        wanted = live if transfers is None else [one for one in transfers if one in live]
        named = tuple([one for one in wanted if live[one].state is not TransferState.PLANNED])
        fresh = tuple([one for one in named if not live[one].flush])
        if fresh:
            self._emit(ev.FlushRequested, fresh)
        return named

    def leased(self, device_blocks: Sequence[int]) -> bool:
        """Whether a copy in flight touches one of these: an engine without references must not reuse it."""
        words = self.ledger.leases.view[np.asarray(device_blocks, dtype=np.int64)]
        return bool(np.any(words))


def _ended(transfer: TransferRecord) -> Ended:
    state = transfer.word & STATE_MASK
    load = transfer.direction is Direction.LOAD
    request = transfer.owners[0][0] if load else ""
    return Ended(
        transfer.id, transfer.direction, request, state == _COMPLETED, transfer.device_blocks, state == _LOST
    )
