"""The tables of a log: one class for each table, one field for each column.

Every row has its place in the log: an event number, the engine step and the wall time (Unix time in ns). A
column is None if its value is not in the log, or not yet: a transfer without an end is still in flight where
the log ends. Older logs have fewer values.

A log may lack events: its oldest segments were deleted, or a write failed. If a thing began or ended in such
a gap, its beginning or end is the last missing event, and its step and time are None.

`KEYS` has the columns that identify a row of each table. The docs, the SQL schema and the export are made
from these classes.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Gone(str, Enum):
    """Why a key is not readable on the host, so that a lookup stops there, or why a block's life ended."""

    __str__ = str.__str__

    NEVER_STORED = "never stored"
    SKIPPED = "offered and skipped"
    IN_FLIGHT = "store in flight"
    EVICTED = "evicted"
    RESET = "reset"
    RESTART = "restart"
    """Its store had not ended when another process resumed the log."""
    STORE_FAILED = "store failed"
    LOAD_FAILED = "load failed"
    CANCELLED = "store cancelled"
    LOST = "copy lost"
    BEFORE_LOG = "before the log begins"
    """Unknown: the oldest segments were deleted, or events are missing."""


class EventRow(msgspec.Struct, frozen=True):
    """An event. Its other fields are only in the log."""

    event: int
    step: int
    wall_ns: int
    kind: str


class RequestRow(msgspec.Struct, frozen=True):
    """A request, from its arrival to its end. If several requests had the same name, each has a row.

    While the load of a finished request is in flight, later requests of the same name are in the log only
    with their admissions. Each of them has a row that begins and ends with its first admission. If the core
    still has such a request when the load ends, a second row begins there, with `asked` None.

    arrived, arrived_step, arrived_ns: the event with which it arrived at the core.
    finished, finished_step, finished_ns: the event with which it finished, was aborted or was cut off; None:
        it has not ended.
    cut_off: whether its process ended before it did; then `finished` is the restart. Its time is that of the
        last event before the restart, as for all that a restart ends, because no process ran in between.
    state: its state where the log ends (`kvsm.states.request.RequestState`), RELEASED if it is over.
    asked: blocks of its prompt, in device blocks, when it was admitted for the first time; the device had
        `on_device` of them, and the host served `on_host`. None: it was not admitted, it reads no cache, or
        the log has no counts.
    loads: loads that were planned for it; `failed_loads` of them did not bring all their blocks.
    loaded: host slots that were loaded for it. stored: host slots that were stored for it.
    held: host slots that it holds for another engine or for a session; 0: none.
    hand_over: how the hand-over to the other engine ended (`kvsm.tiers.hand_over.leases.LeaseEnd`); None: it
        has not ended, or this is no hand-over.
    session: the session for which it holds them (`HintAnswered`); None: this is no lease of a session.
    deferred_ns: time that it waited for transfers of other requests, up to the end of the log.
    loading_ns: time that it waited for its own loads, up to the end of the log.
    """

    request: str
    arrived: int
    arrived_step: int | None
    arrived_ns: int | None
    finished: int | None
    finished_step: int | None
    finished_ns: int | None
    aborted: bool
    cut_off: bool
    state: str
    lookups: int
    preemptions: int
    asked: int | None
    on_device: int | None
    on_host: int | None
    loads: int
    failed_loads: int
    loaded: int
    stored: int
    held: int
    hand_over: str | None
    session: str | None
    deferred_ns: int
    loading_ns: int


class RequestStateRow(msgspec.Struct, frozen=True):
    """The time that a request stayed in one state. It waits in the states DEFERRED and LOADING.

    transfer: the transfer that it waits for; None: it does not wait.
    ended: the event with which it left the state; None: it is in it where the log ends.
    """

    request: str
    began: int
    began_step: int | None
    began_ns: int | None
    state: str
    transfer: int | None
    ended: int | None
    ended_step: int | None
    ended_ns: int | None


class LookupRow(msgspec.Struct, frozen=True):
    """An answer to a request's lookup (`HitMatched`). A request may look up many times. Figures of a run
    count only the answer used at its first admission: `WHERE admitted IS NOT NULL AND NOT resumed`.

    event: the answer's event, or the admission's, if it used another answer than the last logged one.
    asked, on_device, on_host: as in `RequestRow`; of a used answer, at the admission.
    hit_slots: host slots that the answer pins, over all KV cache groups.
    admitted: the event that admitted the request with this answer (`RequestAdmitted`); None: it was not used.
    resumed: whether the request was admitted before, and has lost its blocks since.
    missed: the key at which the prefix stops, in hex; None: none was missing, or nothing was looked up.
    why: why the key is missing (`Gone`).
    cause: the event that made the key unreadable; None: there is none.
    cause_transfer: the transfer behind that event: the store for which the key was evicted, the store in
        flight, or the transfer that failed, was cancelled, lost or cut off.
    cause_requests: the requests of this transfer, as a JSON list.
    skipped: the last event since `cause` that skipped an offer of the key; None: there is none.
    declined: the event that declined its slow hit (`SlowHitFound`); None: there is none.
    declined_tokens, load_us, compute_us: the tokens of that hit, and the expected times of their load and
        computation (us).
    """

    event: int
    step: int
    wall_ns: int
    request: str
    asked: int | None
    on_device: int | None
    on_host: int | None
    hit_slots: int
    admitted: int | None
    resumed: bool
    missed: str | None
    why: str | None
    cause: int | None
    cause_transfer: int | None
    cause_requests: str | None
    skipped: int | None
    declined: int | None = None
    declined_tokens: int | None = None
    load_us: int | None = None
    compute_us: int | None = None


class TransferRow(msgspec.Struct, frozen=True):
    """A store or a load. `transfer` is also the number of the event that planned it.

    direction: `store` or `load`.
    requests: a JSON list of the requests that own it.
    slots: host slots that it copies.
    workers: ranks that must report it; `pending` of them have not.
    submitted: the event with which it left for the workers; None: it did not.
    ended: the event that ended it; None: it has not ended.
    outcome: `completed`, `failed`, `cancelled`, `drained` or `lost`; `cut off`: its process ended before it
        did, planned or in flight; None: it has not ended, or the log lacks its end.
    waited_for: number of flushes (`FlushRequested`) that named it: the engine stood still for it.
    source: the source of a store that does not copy from the device, such as `engine p-1`; `elsewhere` if the
        log begins later. None: it is a load, or a store from the device.
    target: the target of a load that does not copy to the device, such as `disk`. None: it is a store, or a
        load to the device, or the log begins later.
    """

    transfer: int
    step: int | None
    wall_ns: int | None
    direction: str
    requests: str
    slots: int
    workers: int
    pending: int
    submitted: int | None
    submitted_step: int | None
    submitted_ns: int | None
    ended: int | None
    ended_step: int | None
    ended_ns: int | None
    outcome: str | None
    waited_for: int
    source: str | None
    target: str | None


class CopyRow(msgspec.Struct, frozen=True):
    """One rank's part of a submitted transfer.

    reported, reported_ns: the rank's report; None: the rank has not reported.
    queued_ns: time from the copy's submission on the worker until it began, by the worker's clock; None: the
        worker did not measure it.
    copied_ns: time from the first byte of the copy to the last, by the worker's clock; None: not measured.
    noticed_ns: the rest of the time from `submitted_ns` to `reported_ns`: the way to the worker and back, and
        the wait for the step that noticed the end. None: one of these times is unknown.
    good: whether its bytes are right; None: the rank has not reported.
    error: the worker's error if they are not; None: there is none, or it is not in the log.
    """

    transfer: int
    worker: int
    direction: str
    submitted_ns: int | None
    reported: int | None
    reported_step: int | None
    reported_ns: int | None
    queued_ns: int | None
    copied_ns: int | None
    noticed_ns: int | None
    good: bool | None
    error: str | None


class BlockRow(msgspec.Struct, frozen=True):
    """The life of one block in a host slot: from the plan of its store until its key leaves the index.

    transfer: the store that made it.
    key: its key in hex.
    requests: a JSON list of the requests that stored it.
    planned_ns: when its store was planned; None: before the log begins, or in a gap of it.
    stored, stored_ns: the event that completed its store; None: it never became readable.
    hits: answers to lookups that include it, used or not; `last_hit`, `last_hit_ns`: the latest of them.
    gone, gone_ns: the event that ended its life; None: the slot holds it where the log ends.
    why: why its life ended (`Gone`).
    gone_for: the store for which it was evicted; `gone_for_requests`: a JSON list of the store's requests.
    gone_by: the transfer that ended its life, because it failed, was cancelled, lost or cut off.
    wanted, wanted_ns: the first lookup that stopped at its key after its life ended, and before the key was
        stored again. wanted_by: the lookup's request.
    life: its number. Blocks of one store and KV cache group that follow each other have consecutive numbers.
    """

    transfer: int
    slot: int
    key: str
    requests: str
    planned_ns: int | None
    stored: int | None
    stored_ns: int | None
    hits: int
    last_hit: int | None
    last_hit_ns: int | None
    gone: int | None
    gone_ns: int | None
    why: str | None
    gone_for: int | None
    gone_for_requests: str | None
    gone_by: int | None
    wanted: int | None
    wanted_ns: int | None
    wanted_by: str | None
    life: int


class BlockRunRow(msgspec.Struct, frozen=True):
    """Consecutive blocks of one store and one KV cache group that lived alike. Counting blocks is much faster
    with this table than with `blocks`.

    life: the life of the first block. blocks: number of blocks; their lives are numbered from `life` on.
    store: the first life of their store.

    The other columns are as in `BlockRow`.
    """

    life: int
    blocks: int
    store: int
    transfer: int
    requests: str
    planned_ns: int | None
    stored: int | None
    stored_ns: int | None
    hits: int
    last_hit: int | None
    last_hit_ns: int | None
    gone: int | None
    gone_ns: int | None
    why: str | None
    gone_for: int | None
    gone_for_requests: str | None
    gone_by: int | None
    wanted: int | None
    wanted_ns: int | None
    wanted_by: str | None


class SkipRow(msgspec.Struct, frozen=True):
    """Offered blocks that were not stored, by one event (`StoreSkipped`).

    requests: a JSON list of the requests that offered them.
    """

    event: int
    step: int
    wall_ns: int
    requests: str
    blocks: int
    reason: str


class ResetRow(msgspec.Struct, frozen=True):
    """A reset of the cache.

    keys: number of keys that it dropped.
    cancelled, abandoned: number of transfers that it cancelled, and abandoned in flight.
    weights: version of the model weights from here on; None: unchanged.
    """

    event: int
    step: int
    wall_ns: int
    epoch: int
    keys: int
    cancelled: int
    abandoned: int
    weights: str | None


class RestartRow(msgspec.Struct, frozen=True):
    """A restart: another process resumed the log and the pool (`Restarted`).

    life: number of processes that have written the log, including this one.
    last_end: how the previous process ended; None: it closed the log.
    kept: blocks that were readable and stay readable.
    storing, planned: blocks that were being stored, or were planned to be. They are gone.
    freed: slots that were quarantined or retired, and can be used again.
    transfers_cut_off, requests_cut_off: transfers and requests that ended with the previous process.
    """

    event: int
    step: int
    wall_ns: int
    life: int
    last_end: str | None
    kept: int
    storing: int
    planned: int
    freed: int
    transfers_cut_off: int
    requests_cut_off: int


class RejectionRow(msgspec.Struct, frozen=True):
    """A worker's report that was rejected and changed nothing (`ReportRejected`), and why."""

    event: int
    step: int
    wall_ns: int
    transfer: int
    worker: int
    good: bool
    reason: str


class OccupancyRow(msgspec.Struct, frozen=True):
    """A sample of the pool, every `SAMPLE_EVENTS` events and at the end: the number of slots in each state.

    free: empty. idle: stored and evictable. pinned: stored and promised to a request, or being loaded.
    storing: their store is planned or in flight. quarantined: void, and a copy may still touch them.
    retired: never used again.
    """

    event: int
    step: int
    wall_ns: int
    free: int
    idle: int
    pinned: int
    storing: int
    quarantined: int
    retired: int
    stores_in_flight: int
    loads_in_flight: int
    known_requests: int
    deferred_requests: int


Row = (
    EventRow
    | RequestRow
    | RequestStateRow
    | LookupRow
    | TransferRow
    | CopyRow
    | BlockRow
    | BlockRunRow
    | SkipRow
    | ResetRow
    | RestartRow
    | RejectionRow
    | OccupancyRow
)

SAMPLE_EVENTS = 256
"""Number of events from one row of the table `occupancy` to the next."""

TABLES: dict[str, type[Row]] = {
    "events": EventRow,
    "requests": RequestRow,
    "request_states": RequestStateRow,
    "lookups": LookupRow,
    "transfers": TransferRow,
    "copies": CopyRow,
    "blocks": BlockRow,
    "block_runs": BlockRunRow,
    "skips": SkipRow,
    "resets": ResetRow,
    "restarts": RestartRow,
    "rejections": RejectionRow,
    "occupancy": OccupancyRow,
}

KEYS: dict[str, tuple[str, ...]] = {
    "events": ("event",),
    "requests": ("request", "arrived"),
    "request_states": ("request", "began"),
    "lookups": ("event",),
    "transfers": ("transfer",),
    "copies": ("transfer", "worker"),
    "blocks": ("life",),
    "block_runs": ("life",),
    "skips": ("event",),
    "resets": ("event",),
    "restarts": ("event",),
    "rejections": ("event",),
    "occupancy": ("event",),
}
"""The columns that identify a row."""
