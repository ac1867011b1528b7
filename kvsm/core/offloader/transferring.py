"""Loads, and the life of all transfers: submission, reports, and each way to end."""

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
"""Number of calls of `tick` and `end_step` between two searches for plans that were never submitted."""

_LOGGER = logging.getLogger("kvsm")


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A transfer that is over. It no longer leases its device blocks.

    request: the request of a load; "" for a store.
    good: whether its bytes are right.
    lost: a worker never reported. A lost load may still write its device blocks, so they are retired: never
        use them.
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
    """The result of a worker's report.

    ended: the transfer, if this was its last report; else None.
    rejected: why the report changed nothing; None if it counted.
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

    device_blocks: a chunk for each matched block. They may be fewer than were matched; the rest is released.
    parts: if only parts of the chunks are wanted, the place of each device block in the match, ascending.
        Each slot has blocks_per_chunk places.
    target: for the log; see `LoadPlanned`.

    None means that nothing is loaded, and the engine computes these blocks (S6): there is no match, there are
    no device blocks, or a pin was voided since, by a reset or by a failed or lost load.
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
    """Return the job of the transfer that the last event planned. hosts: its host blocks.

    If the host pool outlives this process, the job has keys and generations, for the checksums of the pool.
    """
    ledger, chunk = core.ledger, core.config.blocks_per_chunk
    if ledger.kept is None:
        return TransferJob(ledger.seq, direction, device_blocks, hosts)
    slots = tuple([block // chunk for block in listed(unpack(hosts))])
    generations = tuple([ledger.generation[slot] for slot in slots])
    return TransferJob(ledger.seq, direction, device_blocks, hosts, tuple(ledger.keys_of(slots)), generations)


def host_blocks(core: EventEmitter, slots: IdArray, parts: Sequence[int] = ()) -> Ids:
    """Return the host blocks of whole slots, or of the named parts of the slots."""
    chunk, numbers = core.config.blocks_per_chunk, listed(slots)
    places = parts if len(parts) else range(len(numbers) * chunk)
    return pack([numbers[place // chunk] * chunk + place % chunk for place in places])


def submit(core: EventEmitter, transfers: Sequence[int]) -> None:
    """Record that these jobs leave for the workers, and flush the log; call it just before they leave."""
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
    """Process a worker's report. The result says whether it counted, and whether the transfer is over.

    error: why the copy failed, for people. Ignored if the report is good.
    queued_us, copied_us: for the log; see `WorkerReported`.

    A report that names no live transfer, or comes twice, changes nothing and is recorded (S5).
    """
    return _report(core, "report", transfer, worker, good, None, error, queued_us, copied_us)


def _duration(call: str, argument: str, value: object) -> int | None:
    """Return a duration that a log can hold, or raise `WrongArgument`."""
    if value is None:
        return None
    duration = integer(call, argument, value)
    if not 0 <= duration < 1 << 63:
        raise WrongArgument(call, argument, f"is {duration}; it must be from 0 to {(1 << 63) - 1} (us)")
    return duration


def complete_load(core: EventEmitter, transfer: int, worker: int = 0) -> ReportResult:
    """Report that worker `worker` has loaded its shard. A store is rejected."""
    return _report(core, "complete_load", transfer, worker, True, LOAD)


def fail_load(core: EventEmitter, transfer: int, worker: int = 0, error: str = "") -> ReportResult:
    """Report that worker `worker` failed to load. The last report of the load also removes its keys."""
    return _report(core, "fail_load", transfer, worker, False, LOAD, error)


def complete_store(core: EventEmitter, transfer: int, worker: int = 0) -> ReportResult:
    """Report that worker `worker` has stored its shard. A load is rejected."""
    return _report(core, "complete_store", transfer, worker, True, STORE)


def fail_store(core: EventEmitter, transfer: int, worker: int = 0, error: str = "") -> ReportResult:
    """Report that worker `worker` failed to store. The last report of the store also frees its slots."""
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
        # The number of an unknown transfer or worker may be too large for a log.
        transfer, worker = integer(call, "transfer", transfer), integer(call, "worker", worker)
        core.emit(ev.ReportRejected, transfer, worker, good, reason)
        _warn_of_rejected(core, transfer, worker, reason)
        return _REJECTED[reason]
    ended = core.emit(ev.WorkerReported, transfer, worker, good, "" if good else error, queued_us, copied_us)
    return _COUNTED if ended is None else ReportResult(_ended(core, ended))


def _why_reject(
    core: EventEmitter, transfer: int, worker: int, direction: Direction | None
) -> RejectReason | None:
    """Return why this report changes nothing; None if it counts."""
    # Check the rank first: the transfer does not wait for it, so it may have ended already.
    if not 0 <= worker < core.config.workers:
        return RejectReason.WORKER
    entry = core.ledger.transfers.get(transfer)
    if entry is None:
        return RejectReason.STALE if 0 < transfer <= core.ledger.seq else RejectReason.UNKNOWN
    if direction is not None and entry.direction is not direction:
        return RejectReason.DIRECTION
    if entry.reported >> worker & 1:
        return RejectReason.DUPLICATE
    planned = entry.word & STATE_MASK == PLANNED
    return RejectReason.NOT_SUBMITTED if planned else None


_MISUSES = {
    RejectReason.WORKER: "rank {worker} reports, but the configuration has {workers}: transfer {transfer} "
    "does not wait for this rank, so its blocks may be used before this rank has copied them. Make "
    "OffloadConfig.workers the number of ranks, which count from 0",
    RejectReason.NOT_SUBMITTED: "rank {worker} reports transfer {transfer}, which was planned but not "
    "submitted. Call submit([{transfer}]) before its job goes to the workers; earlier reports are ignored",
    RejectReason.UNKNOWN: "rank {worker} reports transfer {transfer}, but the last event of this core is "
    "{seq}. Give each report to the core that planned the transfer",
    RejectReason.DIRECTION: "rank {worker} reports transfer {transfer} as a copy in the other direction. "
    "Call report, or the call that fits the direction of the job",
}
"""What to do about a report that a correct engine never makes. Late and duplicate reports occur in every
engine."""


def expect_misuse(core: EventEmitter) -> None:
    """Log no warning for such reports to this core: its caller makes them on purpose."""
    core.warned_reports = tuple(reason.name for reason in _MISUSES)


def _warn_of_rejected(core: EventEmitter, transfer: int, worker: int, reason: RejectReason) -> None:
    """Warn of a report that a correct engine never makes, once for each reason."""
    misuse = _MISUSES.get(reason)
    if misuse is None or reason.name in core.warned_reports:
        return
    core.warned_reports = (*core.warned_reports, reason.name)
    workers = core.config.workers
    ranks = f"{workers} worker{'s' if workers > 1 else ''}"
    text = misuse.format(transfer=transfer, worker=worker, workers=ranks, seq=core.ledger.seq)
    _LOGGER.warning("%s. The report changes nothing; further ones like it are only logged as events", text)


def cancel(core: EventEmitter, transfer: int) -> Ended | None:
    """Cancel a plan that was not submitted. None if there is no such plan."""
    if type(transfer) is not int:
        transfer = integer("cancel", "transfer", transfer)
    entry = core.ledger.transfers.get(transfer)
    if entry is None or entry.state is not PLANNED:
        return None
    core.emit(ev.TransferCancelled, transfer)
    return _ended(core, entry)


def lose(core: EventEmitter, transfer: int) -> Ended | None:
    """End a transfer that a worker will never report, and retire the memory that it may write. None if it is
    not in flight."""
    if type(transfer) is not int:
        transfer = integer("lose", "transfer", transfer)
    entry = core.ledger.transfers.get(transfer)
    if entry is None or entry.state is PLANNED:
        return None
    core.emit(ev.TransferLost, transfer)
    return _ended(core, entry)


def lose_overdue(core: EventEmitter) -> list[Ended]:
    """`lose` every transfer that has been in flight for `transfer_ticks`, as `tick` counts them.

    A plan that was not submitted is not in flight, and `lose` ignores it.
    """
    ticks, ledger = core.config.transfer_ticks, core.ledger
    if not ticks:
        return []
    overdue = [entry.id for entry in ledger.transfers.values() if ledger.tick - entry.since >= ticks]
    return [ended for transfer in overdue if (ended := lose(core, transfer)) is not None]


def _ended(core: EventEmitter, transfer: TransferRecord) -> Ended:
    """Notify the publisher that a transfer is over, and return the caller's result."""
    if core.publisher is not None:
        core.publisher.ended(transfer.id)
    state = transfer.word & STATE_MASK
    request = transfer.owners[0][0] if transfer.direction is LOAD else ""
    good, lost = state == COMPLETED, state == LOST
    return Ended(transfer.id, transfer.direction, request, good, transfer.device_blocks, lost, transfer.keys)


def warn_of_unsubmitted(core: EventEmitter) -> None:
    """Warn once of each plan that was live at the last call and is still not submitted: a request may wait
    for it forever."""
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


def warn_at_close(core: EventEmitter) -> None:
    """Warn of plans that were never submitted when the core closes."""
    plans = [one for one in core.ledger.transfers.values() if one.word & STATE_MASK == PLANNED]
    if plans:
        named = [f"{one.direction.name.lower()} {one.id} ({len(one.slots)} blocks)" for one in plans[:4]]
        _LOGGER.warning(
            "the offloader closes with plans that were never submitted: %s%s. None of their blocks was "
            "copied. Call submit when jobs go to the workers, or cancel the plans",
            ", ".join(named),
            f", and {len(plans) - 4} more" if len(plans) > 4 else "",
        )


def flush(core: EventEmitter, transfers: Sequence[int] | None = None) -> tuple[int, ...]:
    """Request that the workers wait for these transfers. Returns the ones that are in flight.

    transfers: None: all that are in flight.
    """
    live = core.ledger.transfers
    wanted = live if transfers is None else integers("flush", "transfers", transfers)
    named = tuple([id for id in wanted if id in live and live[id].state is not PLANNED])
    fresh = tuple([id for id in named if not live[id].flush])
    if fresh:
        core.emit(ev.FlushRequested, fresh)
    return named


def leased(core: EventEmitter, device_blocks: Sequence[int]) -> bool:
    """Whether a live transfer leases one of these blocks. An engine that holds no references must not reuse
    it."""
    blocks = np.asarray(checked_device_blocks(core, "leased", device_blocks), dtype=np.int64)
    return bool(np.any(core.ledger.leases.view[blocks]))
