"""Transfers: loads planned, jobs submitted, reports taken, and the ways in which a transfer may end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.core.ledger import TransferRecord
from kvsm.core.offloader.arguments import checks_request, flag, integer, integers, worker_error
from kvsm.core.offloader.emitter import (
    EventEmitter,
    LogFlush,
    checked_device_blocks,
    checked_ids,
    has_room_for_transfer,
)
from kvsm.core.plan import TransferJob
from kvsm.errors import InvalidEvent, LimitReached, WrongArgument
from kvsm.events import LOAD, STORE, Direction, RejectReason
from kvsm.ids import NO_IDS, IdArray, Ids, listed, pack, unpack
from kvsm.states.request import MATCHED
from kvsm.states.transfer import COMPLETED, LOST, PLANNED
from kvsm.states.words import STATE_MASK

LOOK_EVERY = 128
"""After this number of calls of `tick` and `end_step`, a core looks for plans that were never submitted."""

_LOGGER = logging.getLogger("kvsm")


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A transfer that is over. Its device blocks have no lease of it any more.

    request: which request it loaded for; "" for a store.
    good: whether its bytes are right.
    lost: a worker never reported. Device blocks that a lost load may still write are retired: never use them.
    keys: the keys of a store. Empty for a load.
    """

    transfer: int
    direction: Direction
    request: str
    good: bool
    device_blocks: IdArray
    lost: bool = False
    keys: tuple[bytes, ...] = ()


class ReportResult(msgspec.Struct, frozen=True, gc=False):
    """What became of a worker's report. It counted if `rejected` is None.

    ended: the transfer, if this was its last worker.
    rejected: why the report changed nothing.
    """

    ended: Ended | None = None
    rejected: RejectReason | None = None


_COUNTED = ReportResult()
_REJECTED = {reason: ReportResult(rejected=reason) for reason in RejectReason}


@checks_request
def prepare_load(
    core: EventEmitter,
    request: str,
    device_blocks: Sequence[int],
    parts: Sequence[int] = (),
    target: str = "",
) -> TransferJob | None:
    """Load the first blocks of the request's match into these device blocks. Returns the job to submit.

    device_blocks: a chunk for each block. The engine may accept less than was matched; the rest is released.
    parts: if only parts of the chunks are wanted, the place in the match of each device block: slot by slot,
        blocks_per_chunk places each, ascending.
    target: for the log; see `LoadPlanned`.

    None means that nothing is loaded, and the engine computes these blocks (S6): there is no match, nothing
    was accepted, or the promise was voided since, by a reset or by bytes found bad.
    """
    targets = checked_device_blocks(core, "prepare_load", device_blocks)
    entry = core.ledger.requests.get(request)
    if entry is None or entry.word & STATE_MASK != MATCHED:
        return None
    chunk = core.config.blocks_per_chunk
    if type(parts) is not tuple or parts:
        limit, problem = len(entry.pins) * chunk, "part {} is no place of a match, which has {}"
        parts = listed(checked_ids(core, "prepare_load", "parts", parts, limit, problem))
    wanted = parts[-1] // chunk + 1 if len(parts) else -(-len(targets) // chunk)
    if wanted == 0:
        core.emit(ev.HitReleased, request)
        return None
    if wanted > len(entry.pins):
        raise InvalidEvent(
            core.ledger.seq + 1, f"request {request} matched {len(entry.pins)} blocks, not {wanted}"
        )
    if len(core.ledger.live_pins(entry)) < len(entry.pins):
        core.emit(ev.LoadPlanned, request, NO_IDS, NO_IDS, True)
        return None
    if not has_room_for_transfer(core):
        raise LimitReached(f"{core.config.max_live_transfers} transfers are live (max_live_transfers)")
    slots = pack(entry.pins[:wanted])
    blocks = pack(targets)
    core.emit(ev.LoadPlanned, request, slots, blocks, False, pack(parts), target)
    transfer = core.ledger.transfers[core.ledger.seq]
    if core.using is not None and not target:
        core.using(core.ledger.keys_of(transfer.slots))
    hosts = slots if chunk == 1 else host_blocks(core, transfer.slots, parts)
    return planned_job(core, LOAD, blocks, hosts)


def planned_job(core: EventEmitter, direction: Direction, device_blocks: Ids, hosts: Ids) -> TransferJob:
    """The job of the transfer that was planned last. hosts: its host blocks.

    If the host pool outlives this process, the job names what its host blocks hold, for their checksums.
    """
    ledger, chunk = core.ledger, core.config.blocks_per_chunk
    if ledger.kept is None:
        return TransferJob(ledger.seq, direction, device_blocks, hosts)
    slots = tuple([block // chunk for block in listed(unpack(hosts))])
    generations = tuple([ledger.generation[slot] for slot in slots])
    return TransferJob(ledger.seq, direction, device_blocks, hosts, tuple(ledger.keys_of(slots)), generations)


def host_blocks(core: EventEmitter, slots: IdArray, parts: Sequence[int] = ()) -> Ids:
    """The host blocks of whole slots, or of the named parts of them."""
    chunk, numbers = core.config.blocks_per_chunk, listed(slots)
    places = parts if len(parts) else range(len(numbers) * chunk)
    return pack([numbers[place // chunk] * chunk + place % chunk for place in places])


def submit(core: EventEmitter, transfers: Sequence[int]) -> None:
    """These jobs leave for the workers; call it just before they do. Flushes the log first."""
    transfers = integers("submit", "transfers", transfers)
    if transfers:
        core.emit(ev.TransfersSubmitted, transfers)
        core.flush_log(LogFlush.JOBS_LEAVE)


def report(
    core: EventEmitter,
    transfer: int,
    worker: int,
    good: bool,
    error: str = "",
    queued_us: int | None = None,
    copied_us: int | None = None,
) -> ReportResult:
    """Take a worker's report. Its result says whether it counted, and whether the transfer is over.

    error: why the copy failed, for people. Of a good report it is ignored.
    queued_us, copied_us: for the log; see `WorkerReported`.

    A report that names no live transfer, or comes twice, changes nothing and is recorded (S5).
    """
    return _report(core, "report", transfer, worker, good, None, error, queued_us, copied_us)


def _duration(call: str, argument: str, value: object) -> int | None:
    """A duration as a log can hold it. Raises `WrongArgument`."""
    if value is None:
        return None
    duration = integer(call, argument, value)
    if not 0 <= duration < 1 << 63:
        raise WrongArgument(call, argument, f"is {duration}; it must be from 0 to {(1 << 63) - 1} (us)")
    return duration


def complete_load(core: EventEmitter, transfer: int, worker: int = 0) -> ReportResult:
    """Worker `worker` has loaded its shard: `report`, of a load."""
    return _report(core, "complete_load", transfer, worker, True, LOAD)


def fail_load(core: EventEmitter, transfer: int, worker: int = 0, error: str = "") -> ReportResult:
    """Worker `worker` failed. When all have reported, the keys are gone before the request hears of it."""
    return _report(core, "fail_load", transfer, worker, False, LOAD, error)


def complete_store(core: EventEmitter, transfer: int, worker: int = 0) -> ReportResult:
    """Worker `worker` has stored its shard: `report`, of a store."""
    return _report(core, "complete_store", transfer, worker, True, STORE)


def fail_store(core: EventEmitter, transfer: int, worker: int = 0, error: str = "") -> ReportResult:
    """Worker `worker` failed. When all have reported, the slots are free and nothing was stored."""
    return _report(core, "fail_store", transfer, worker, False, STORE, error)


def _report(
    core: EventEmitter,
    call: str,
    transfer: int,
    worker: int,
    good: bool,
    direction: Direction | None,
    error: str = "",
    queued_us: int | None = None,
    copied_us: int | None = None,
) -> ReportResult:
    if type(transfer) is not int or type(worker) is not int or type(good) is not bool:
        transfer, worker = integer(call, "transfer", transfer), integer(call, "worker", worker)
        good = flag(call, "good", good)
    if type(error) is not str or error:
        error = worker_error(call, error)
    if queued_us is not None or copied_us is not None:
        queued_us = _duration(call, "queued_us", queued_us)
        copied_us = _duration(call, "copied_us", copied_us)
    reason = _why_reject(core, transfer, worker, direction)
    if reason is not None:
        # A transfer or a worker that does not exist may have any number, even one that no log can hold.
        transfer, worker = integer(call, "transfer", transfer), integer(call, "worker", worker)
        core.emit(ev.ReportRejected, transfer, worker, good, reason)
        return _REJECTED[reason]
    ended = core.emit(ev.WorkerReported, transfer, worker, good, "" if good else error, queued_us, copied_us)
    return _COUNTED if ended is None else ReportResult(_ended(core, ended))


def _why_reject(
    core: EventEmitter, transfer: int, worker: int, direction: Direction | None
) -> RejectReason | None:
    """Why this report changes nothing; None if it counts."""
    entry = core.ledger.transfers.get(transfer)
    if entry is None:
        return RejectReason.STALE if 0 < transfer <= core.ledger.seq else RejectReason.UNKNOWN
    if direction is not None and entry.direction is not direction:
        return RejectReason.DIRECTION
    if not 0 <= worker < core.config.workers:
        return RejectReason.WORKER
    if entry.reported >> worker & 1:
        return RejectReason.DUPLICATE
    planned = entry.word & STATE_MASK == PLANNED
    return RejectReason.NOT_SUBMITTED if planned else None


def cancel(core: EventEmitter, transfer: int) -> Ended | None:
    """Take back a plan that was not submitted; None if there is nothing to take back."""
    if type(transfer) is not int:
        transfer = integer("cancel", "transfer", transfer)
    entry = core.ledger.transfers.get(transfer)
    if entry is None or entry.state is not PLANNED:
        return None
    core.emit(ev.TransferCancelled, transfer)
    return _ended(core, entry)


def lose(core: EventEmitter, transfer: int) -> Ended | None:
    """A worker will never report: the transfer is over, and the memory that it may write is retired."""
    if type(transfer) is not int:
        transfer = integer("lose", "transfer", transfer)
    entry = core.ledger.transfers.get(transfer)
    if entry is None or entry.state is PLANNED:
        return None
    core.emit(ev.TransferLost, transfer)
    return _ended(core, entry)


def lose_overdue(core: EventEmitter) -> list[Ended]:
    """Lose every transfer that has been in flight for `transfer_ticks`. `tick` counts the time.

    A plan that has not left is not in flight, and `lose` leaves it alone.
    """
    ticks, ledger = core.config.transfer_ticks, core.ledger
    if not ticks:
        return []
    overdue = [one.id for one in ledger.transfers.values() if ledger.tick - one.since >= ticks]
    return [ended for one in overdue if (ended := lose(core, one)) is not None]


def _ended(core: EventEmitter, transfer: TransferRecord) -> Ended:
    """Tell the publisher and the caller that this transfer is over."""
    if core.publisher is not None:
        core.publisher.ended(transfer.id)
    state = transfer.word & STATE_MASK
    request = transfer.owners[0][0] if transfer.direction is LOAD else ""
    good, lost = state == COMPLETED, state == LOST
    return Ended(transfer.id, transfer.direction, request, good, transfer.device_blocks, lost, transfer.keys)


def warn_of_unsubmitted(core: EventEmitter) -> None:
    """Warn once of each plan that was there at the last look, and is not submitted yet: its request may wait
    for it, and hear nothing."""
    ledger, seen = core.ledger, core.looked_at
    core.until_look, core.looked_at = LOOK_EVERY, ledger.seq
    for one in ledger.transfers.values():
        if core.warned_of < one.id <= seen and one.word & STATE_MASK == PLANNED:
            core.warned_of = one.id
            waiting = [repr(name) for name, entry in ledger.deferred.items() if entry.awaits == one.id]
            _LOGGER.warning(
                "transfer %d, a %s of %d blocks, was planned many steps ago and never submitted; %s. "
                "Call submit([%d]) when its job goes to the workers, or cancel(%d)",
                one.id,
                one.direction.name.lower(),
                len(one.slots),
                f"requests wait for it: {', '.join(waiting[:4])}" if waiting else "it holds its blocks",
                one.id,
                one.id,
            )


def flush(core: EventEmitter, transfers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ask that these transfers end before the engine goes on. Returns those that the workers wait for.

    transfers: all submitted ones if None.
    """
    live = core.ledger.transfers
    wanted = live if transfers is None else integers("flush", "transfers", transfers)
    named = tuple([one for one in wanted if one in live and live[one].state is not PLANNED])
    fresh = tuple([one for one in named if not live[one].flush])
    if fresh:
        core.emit(ev.FlushRequested, fresh)
    return named


def leased(core: EventEmitter, device_blocks: Sequence[int]) -> bool:
    """Whether a copy in flight touches one of these; an engine without references must not reuse it."""
    blocks = np.asarray(checked_device_blocks(core, "leased", device_blocks), dtype=np.int64)
    return bool(np.any(core.ledger.leases.view[blocks]))
