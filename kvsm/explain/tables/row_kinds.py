"""The tables that a log gives: one class a table, one row a thing, one column a field.

Every row says where in the log it comes from: an event number, the engine step and the wall time (Unix time
in ns). A column is None if the log does not tell it, or not yet: a transfer without an end is still in flight
where the log ends. An older log tells less.

A log may lack events: its oldest segments were deleted, or a write failed. A thing that began or ended there
has the last event that the log lacks as its beginning or end, and no step and no time.

`KEYS` names the columns that identify a row of each table. The docs, the SQL schema and the export are made
from these classes.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Gone(str, Enum):
    """Why a key is not readable on the host: why a prefix stops there, and how a block's life ends."""

    __str__ = str.__str__

    NEVER_STORED = "never stored"
    SKIPPED = "offered and skipped"
    IN_FLIGHT = "store in flight"
    EVICTED = "evicted"
    RESET = "reset"
    RESTART = "restart"
    """Its store had not ended when another process went on."""
    STORE_FAILED = "store failed"
    LOAD_FAILED = "load failed"
    CANCELLED = "store cancelled"
    LOST = "copy lost"
    BEFORE_LOG = "before the log begins"
    """The oldest segments were deleted, or events are missing: the log cannot tell."""


class EventRow(msgspec.Struct, frozen=True):
    """An event. The log holds the rest of it."""

    event: int
    step: int
    wall_ns: int
    kind: str


class RequestRow(msgspec.Struct, frozen=True):
    """A request, from its arrival to its end. A name that is used again has a row for each life.

    While the load of a finished request is in flight, the log has only the admissions of later requests of
    its name. Each of them has a row that begins and ends with its first admission. If the core
    still knows such a request when the load ends, a second row begins there, with `asked` None.

    arrived, arrived_step, arrived_ns: the event with which the core heard of it.
    finished, finished_step, finished_ns: the event with which it finished, was aborted or cut off; None: none
        did that.
    cut_off: its process ended before it did, and `finished` is the restart that says so. What a restart ends
        has the time of the last event before it, here and in the other tables: nobody worked between.
    state: its state where the log ends (`kvsm.states.request.RequestState`), RELEASED if it is over.
    asked: blocks of its prompt, in device blocks, when it was admitted for the first time; `on_device` of
        them the device had, `on_host` of them the host served. None: it was not admitted, it reads no cache,
        or the log does not say.
    loads: loads that were planned for it; `failed_loads` of them did not bring all their blocks.
    loaded: host slots that its loads brought. stored: host slots that were stored for it.
    held: host slots that it holds for another engine; 0: it is a request of this engine.
    hand_over: how that ended (`kvsm.tiers.hand_over.leases.LeaseEnd`); None: it has not, or it is no
    hand-over.
    deferred_ns, loading_ns: how long it waited for other transfers, and for its own loads, so far.
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
    deferred_ns: int
    loading_ns: int


class RequestStateRow(msgspec.Struct, frozen=True):
    """One stay of a request in a state, DEFERRED and LOADING among them: its waits.

    transfer: what it waits for, if it is DEFERRED or LOADING.
    ended: the event that ended the stay; None: it lasts where the log ends.
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
    """An answer to a request's lookup (`HitMatched`). A request may ask many times. Figures of a run count
    only the answer used at its first admission: `WHERE admitted IS NOT NULL AND NOT resumed`.

    event: of the answer. If the used answer differs from the last one that was logged: of the admission.
    asked, on_device, on_host: as in `RequestRow`; of a used answer, at the admission.
    hit_slots: host slots that the answer pins, over all KV cache groups.
    admitted: the event that admitted the request with this answer (`RequestAdmitted`); None: it was not used.
    resumed: the request was admitted before, and has lost its blocks since.
    missed: the key at which the prefix stops, in hex; None: none was missing, or nothing was looked up.
    why: the `Gone` of that key.
    cause: the event because of which the key is not readable; None: there is none.
    cause_transfer: the transfer behind it: the store for which the key was evicted, the store in flight, or
        the transfer that failed, was cancelled, lost or cut off.
    cause_requests: the requests of this transfer, as a JSON list.
    skipped: the last event since then that was an offer of the key and did not store it; None: there is none.
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


class TransferRow(msgspec.Struct, frozen=True):
    """A store or a load. `transfer` is also the number of the event that planned it.

    direction: `store` or `load`. requests: a JSON list of the requests it is for.
    slots: host slots that it copies. workers: ranks that must report it; `pending` have not.
    submitted: the event with which it left for the workers. ended: the event that ended it.
    outcome: `completed`, `failed`, `cancelled`, `drained` or `lost`; `cut off`: its process ended before it
        did, planned or in flight; None: it has not ended, or the log lacks its end.
    waited_for: events of flushes (`FlushRequested`) that named it: the engine stood still for it.
    source: where the bytes of a store come from, if not from the device: `engine p-1`; `elsewhere` if the log
        begins later. None: it is a load, or stores from the device.
    target: where the bytes of a load go, if not to the device: `disk`. None: it is a store, or loads to the
        device, or the log begins later.
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

    reported, reported_ns: the report that counted; None: the rank has not reported.
    queued_ns: from the submission to the worker until its copy began. copied_ns: from the first byte of the
        copy to the last. Both are durations by the worker's clock; None: the worker did not say.
    noticed_ns: the rest of the time from `submitted_ns` to `reported_ns`: the way to the worker and back, and
        the step that noticed the end. None: one of these is not known.
    good: whether its bytes are right. error: why not, as the worker said it; None: the log does not tell.
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
    """The life of one block in a host slot: from the plan to store it until its key is not found any more.

    transfer: the store that made it. key: in hex. requests: a JSON list of the requests that stored it.
    planned_ns: when its store was planned; None: before the log begins, or in a gap of it.
    stored, stored_ns: the event from which on it could be read; None: it never could.
    hits: answers to lookups that it was part of, used or not; `last_hit`, `last_hit_ns`: the latest of them.
    gone, gone_ns: the event that ended its life; None: the slot holds it where the log ends.
    why: the `Gone` of its end.
    gone_for: the store for which it was evicted; `gone_for_requests`: a JSON list of the store's requests.
    gone_by: the transfer that failed, was cancelled, lost or cut off, and so ended it.
    wanted, wanted_ns, wanted_by: the first lookup that stopped at its key after its end, and before the key
        was stored again; and the lookup's request.
    life: its number. The blocks of a store have numbers one after another, in the order of its keys.
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
    """Blocks of one store and one KV cache group, one after another, whose lives were alike. Count them here:
    it is much faster.

    life: the number of the first of them. blocks: how many there are, and so lives `life` and following.
    store: the number of the first life of their store.

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
    """Offered blocks of one event that were not stored (`StoreSkipped`). requests: a JSON list."""

    event: int
    step: int
    wall_ns: int
    requests: str
    blocks: int
    reason: str


class ResetRow(msgspec.Struct, frozen=True):
    """A reset of the cache: how many keys it dropped, and how many transfers it cancelled and abandoned.

    weights: version of the weights that compute from here on; None: the same as before.
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
    """Another process went on with the log and the pool (`Restarted`).

    life: how many processes have written the log, this one included.
    last_end: how the last one ended; None: it closed the log.
    kept: blocks that could be read, and still can.
    storing, planned: blocks that were being stored, or were planned to be. They are gone.
    freed: slots that were quarantined or retired, and can be used again.
    transfers_cut_off, requests_cut_off: how many ended with the last process.
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
    """A worker's report that changed nothing (`ReportRejected`), and why."""

    event: int
    step: int
    wall_ns: int
    transfer: int
    worker: int
    good: bool
    reason: str


class OccupancyRow(msgspec.Struct, frozen=True):
    """The pool after an event, taken every `SAMPLE_EVENTS` events and at the end: slots by what holds them.

    free: empty. idle: stored and evictable. pinned: stored and promised to a request, or being loaded.
    storing: planned or in flight. quarantined: a copy may still write it. retired: never used again.
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
"""Events from one row of the table `occupancy` to the next."""

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
