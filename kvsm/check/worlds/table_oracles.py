"""A second count of the tables of a log, to compare with `kvsm.explain.tables`.

Each function makes the rows of one table from a `PastLog`, column by column. `block_runs` is compared by the
view `blocks`, which has a row for each block of its runs.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvsm import events as ev
from kvsm.check.worlds.past_blocks import PastAnswer, PastBlock
from kvsm.check.worlds.past_log import PastLog
from kvsm.check.worlds.past_requests import PastRequest, PastStay
from kvsm.check.worlds.past_transfers import COMPLETED, CUT_OFF, LOST, PastTransfer
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.explain.tables.row_kinds import KEYS, SAMPLE_EVENTS, TABLES
from kvsm.ids import to_list
from kvsm.properties import Property

Rows = Iterator[tuple[Any, ...]]
_Place = tuple[int | None, int | None, int | None]


def _at(past: PastLog, event: OffloadingEvent | None) -> _Place:
    """The event, its step and its time. A restart has the time of the last event before it."""
    if event is None:
        return None, None, None
    timed = past.log[event.seq - 2] if isinstance(event, ev.Restarted) else event
    return event.seq, event.step, timed.wall_ns


def _names(requests: Sequence[str] | None) -> str | None:
    return None if requests is None else json.dumps(requests, separators=(",", ":"), ensure_ascii=False)


def _events(past: PastLog) -> Rows:
    for event in past.log:
        yield event.seq, event.step, event.wall_ns, type(event).__name__


def _transfers(past: PastLog) -> Rows:
    for transfer in past.transfers.values():
        plan = transfer.plan
        yield (
            plan.seq,
            plan.step,
            plan.wall_ns,
            transfer.direction,
            _names(transfer.requests),
            len(transfer.slots),
            past.config.workers,
            past.config.workers - len(transfer.reports),
            *_at(past, transfer.submitted),
            *_at(past, transfer.ended),
            transfer.outcome,
            transfer.flushes,
            (plan.source or None) if isinstance(plan, ev.StorePlanned) else None,
            (plan.target or None) if isinstance(plan, ev.LoadPlanned) else None,
        )


def _copies(past: PastLog) -> Rows:
    for number, transfer in past.transfers.items():
        if transfer.submitted is None:
            continue
        left_ns = transfer.submitted.wall_ns
        for worker in range(past.config.workers):
            begin = number, worker, transfer.direction, left_ns
            report = transfer.reports.get(worker)
            if report is None:
                yield (*begin, *[None] * 8)
                continue
            queued, copied, noticed = report.queued_us, report.copied_us, None
            if queued is not None and copied is not None:
                noticed = max(0, report.wall_ns - left_ns - 1000 * (queued + copied))
            times = [None if us is None else us * 1000 for us in (queued, copied)]
            at = report.seq, report.step, report.wall_ns
            yield (*begin, *at, *times, noticed, report.good, report.error or None)


def _blocks(past: PastLog) -> Rows:
    assert past.answers is not None  # They note who wanted a block.
    for block in past.blocks:
        store, last = block.store, block.hits[-1] if block.hits else None
        ready = store.ended if store.outcome == COMPLETED else None
        yield (
            store.plan.seq,
            block.slot,
            block.key.hex(),
            _names(store.requests),
            store.plan.wall_ns,
            *_event_and_time(past, ready),
            len(block.hits),
            *_event_and_time(past, last),
            *_event_and_time(past, block.gone),
            block.why,
            block.evictor,
            _names(block.evicted_for),
            None if block.destroyer is None else block.destroyer.plan.seq,
            *_event_and_time(past, block.wanted),
            None if block.wanted is None else block.wanted.request,
        )


def _event_and_time(past: PastLog, event: OffloadingEvent | None) -> tuple[int | None, int | None]:
    number, _, wall_ns = _at(past, event)
    return number, wall_ns


def _lookups(past: PastLog) -> Rows:
    has_slow_hits = any(isinstance(event, ev.SlowHitFound) for event in past.log)
    for answer in past.answers:
        event, used = answer.event, answer.admitted
        counts = used or event
        yield (
            event.seq,
            event.step,
            event.wall_ns,
            event.request,
            counts.asked,
            counts.on_device,
            counts.on_host,
            answer.slots,
            None if used is None else used.seq,
            used is not None and used.resumed,
            None if event.missed is None else event.missed.hex(),
            answer.why,
            answer.cause,
            answer.transfer,
            _names(answer.requests),
            answer.skipped,
            *(_declined(past, answer) if has_slow_hits else (None,) * 4),
        )


def _declined(past: PastLog, answer: PastAnswer) -> tuple[int | None, ...]:
    """The declined hit of an answer without hit: event, tokens, and the expected times."""
    event = answer.event
    if not answer.slots and event.missed is None:
        for before in reversed([one for one in past.log if one.seq < event.seq]):
            if getattr(before, "request", None) != event.request:
                continue
            if isinstance(before, ev.SlowHitFound) and before.declined:
                return before.seq, before.tokens, before.load_us, before.compute_us
            if isinstance(before, ev.RequestArrived | ev.RequestAdmitted | ev.RequestFinished):
                break
    return (None,) * 4


def _requests(past: PastLog) -> Rows:
    assert past.answers is not None  # They count the answers of each request.
    loads, stored = dict[str, list[PastTransfer]](), dict[str, list[tuple[int, int]]]()
    for transfer in past.transfers.values():
        if isinstance(transfer.plan, ev.LoadPlanned):
            loads.setdefault(transfer.plan.request, []).append(transfer)
        elif transfer.outcome == COMPLETED:
            for name, blocks in transfer.plan.owners:
                stored.setdefault(name, []).append((transfer.plan.seq, blocks))
    for request in past.requests:
        if not request.target and not (request.is_shadow and request.events[0].resumed):
            yield _request(past, request, loads.get(request.name, ()), stored.get(request.name, ()))


def _request(
    past: PastLog,
    request: PastRequest,
    loads: Sequence[PastTransfer],
    stored: Sequence[tuple[int, int]],
) -> tuple[Any, ...]:
    """The row of a request. loads, stored: the loads, and (event, blocks) of the good stores, of its name."""
    own = {event.seq for event in request.events}
    loads = [load for load in loads if load.plan.seq in own]
    voided = sum(load.voided for load in request.of_kind(ev.LoadPlanned))
    bad = [load for load in loads if load.outcome not in (COMPLETED, CUT_OFF, None)]
    firsts = [event for event in request.of_kind(ev.RequestAdmitted) if not event.resumed]
    held = [event for event in request.of_kind(ev.HitMatched) if event.asked == 0 and event.slots]
    ends = request.of_kind(ev.RequestFinished)
    if request.is_shadow:
        ended, state, owned = _at(past, request.arrived), "RELEASED", []
    else:
        ended, state = _at(past, request.finished), request.state
        owned = [blocks for plan, blocks in stored if _knows(request, plan)]
    return (
        request.name,
        *_at(past, request.arrived),
        *ended,
        bool(ends and ends[0].aborted),
        request.cut_off,
        state,
        request.answers,
        len(request.of_kind(ev.RequestPreempted)),
        firsts[-1].asked if firsts else None,
        firsts[-1].on_device if firsts else None,
        firsts[-1].on_host if firsts else None,
        len(loads) + voided,
        len(bad) + voided,
        sum(len(load.slots) for load in loads if load.outcome == COMPLETED),
        sum(owned),
        len(to_list(held[-1].slots)) if held else 0,
        (ends[0].hand_over or None) if ends else None,
        _session(past, request),
        _stayed_ns(past, request, "DEFERRED"),
        _stayed_ns(past, request, "LOADING"),
    )


def _session(past: PastLog, request: PastRequest) -> str | None:
    """The session for which a lease pins blocks; None for any other request."""
    named = [event for event in past.log if isinstance(event, ev.HintAnswered) and event.lease]
    return next((event.session for event in named if event.lease == request.name), None)


def _knows(request: PastRequest, event: int) -> bool:
    """Whether the core knows the request just before this event."""
    last = request.stays[-1]
    return request.arrived.seq < event and (last.state != "RELEASED" or last.began.seq >= event)


def _stayed_ns(past: PastLog, request: PastRequest, state: str) -> int:
    """The time that a request spent in a state, up to the end of the log."""
    whole = 0
    for stay in request.stays:
        if stay.state == state:
            _, _, until_ns = _at(past, stay.ended or past.log[-1])
            whole += max(0, (until_ns or 0) - stay.began.wall_ns)
    return whole


def _request_states(past: PastLog) -> Rows:
    for request in past.requests:
        if not request.target and not request.is_shadow:
            for stay in request.stays:
                if stay.state != "RELEASED":
                    yield _stay(past, request.name, stay)


def _stay(past: PastLog, name: str, stay: PastStay) -> tuple[Any, ...]:
    return (name, *_at(past, stay.began), stay.state, stay.transfer, *_at(past, stay.ended))


def _skips(past: PastLog) -> Rows:
    for event in past.log:
        if isinstance(event, ev.StoreSkipped):
            names = _names([*dict.fromkeys(name for name, _ in event.owners)])
            yield event.seq, event.step, event.wall_ns, names, len(event.keys), event.reason.value


def _rejections(past: PastLog) -> Rows:
    for event in past.log:
        if isinstance(event, ev.ReportRejected):
            whose = event.transfer, event.worker, event.good
            yield (event.seq, event.step, event.wall_ns, *whose, event.reason.value)


def _resets(past: PastLog) -> Rows:
    for event in past.log:
        if isinstance(event, ev.CacheReset):
            ended = [one for one in past.transfers.values() if one.ended is event]
            abandoned = [one for one in past.transfers.values() if one.abandoned is event]
            keys = sum(block.gone is event for block in past.blocks)
            counts = event.epoch, keys, len(ended), len(abandoned)
            yield (event.seq, event.step, event.wall_ns, *counts, event.weights)


def _restarts(past: PastLog) -> Rows:
    for event in past.log:
        if isinstance(event, ev.Restarted):
            cut = [one for one in past.transfers.values() if one.ended is event]
            living = [block for block in past.blocks if block.lives_at(event.seq - 1)]
            kept = sum(block.is_stored_at(event.seq - 1) for block in living)
            storing = sum(block.store in cut and block.store.submitted is not None for block in living)
            over = [one for one in _engine_requests(past) if one.stays[-1].began is event]
            yield (
                event.seq,
                event.step,
                event.wall_ns,
                event.life,
                event.ended or None,
                kept,
                storing,
                len(living) - kept - storing,
                sum(map(len, _given_up(past, event.seq - 1))),
                len(cut),
                len(over),
            )


def _engine_requests(past: PastLog) -> list[PastRequest]:
    return [request for request in past.requests if not request.target and not request.is_shadow]


def _given_up(past: PastLog, event: int) -> tuple[set[int], set[int]]:
    """The slots without a living block that cannot be used after an event: (quarantined, retired)."""
    restarts = [one.seq for one in past.log if isinstance(one, ev.Restarted) and one.seq <= event]
    since = max(restarts, default=0)
    retired, touched = set[int](), set[int]()
    for transfer in past.transfers.values():
        if _is_live(transfer, event):
            touched.update(transfer.slots)
        elif transfer.outcome == LOST and transfer.ended is not None and since < transfer.ended.seq <= event:
            retired.update(transfer.slots)
    living = {block.slot for block in past.blocks if block.lives_at(event)}
    return touched - living - retired, retired


def _is_live(transfer: PastTransfer, event: int) -> bool:
    return transfer.plan.seq <= event and (transfer.ended is None or transfer.ended.seq > event)


def _occupancy(past: PastLog) -> Rows:
    last = past.log[-1].seq
    for event in past.log:
        if event.seq % SAMPLE_EVENTS == 0 or event.seq == last:
            yield (event.seq, event.step, event.wall_ns, *_pool_at(past, event.seq))


def _pool_at(past: PastLog, event: int) -> tuple[int, ...]:
    """The columns of a sample after this event."""
    living = {block.slot: block for block in past.blocks if block.lives_at(event)}
    readable = {slot for slot, block in living.items() if block.is_stored_at(event)}
    live = [transfer for transfer in past.transfers.values() if _is_live(transfer, event)]
    used = {slot for transfer in live if not transfer.is_store for slot in transfer.slots}
    known = [one for one in past.requests if not one.is_shadow and _knows(one, event + 1)]
    for request in known:
        used |= {slot for slot in _pinned(request, event, living) if slot in readable}
    quarantined, retired = _given_up(past, event)
    stores = sum(transfer.is_store for transfer in live)
    waiting = [wait for wait in past.waits if wait.began.seq <= event]
    return (
        past.config.host_blocks - len(living) - len(quarantined) - len(retired),
        len(readable - used),
        len(readable & used),
        len(living) - len(readable),
        len(quarantined),
        len(retired),
        stores,
        len(live) - stores,
        len(known),
        sum(wait.ended is None or wait.ended.seq > event for wait in waiting),
    )


def _pinned(request: PastRequest, event: int, living: Mapping[int, PastBlock]) -> list[int]:
    """The slots that a request's match holds after an event, with the blocks that they had then."""
    match: ev.HitMatched | None = None
    for own in request.events:
        if own.seq <= event and isinstance(own, ev.HitMatched):
            match = own
        elif own.seq <= event and isinstance(own, _LET_GO):
            match = None
    if match is None:
        return []
    slots = [slot for slot in to_list(match.slots) if slot in living]
    return [slot for slot in slots if living[slot].store.plan.seq < match.seq]


_LET_GO = (ev.HitReleased, ev.LoadPlanned, ev.RequestPreempted, ev.RequestFinished)
"""The events with which a request's match ends."""

TABLE_ORACLES: Mapping[str, Callable[[PastLog], Rows]] = {
    "events": _events,
    "requests": _requests,
    "request_states": _request_states,
    "lookups": _lookups,
    "transfers": _transfers,
    "copies": _copies,
    "blocks": _blocks,
    "skips": _skips,
    "resets": _resets,
    "restarts": _restarts,
    "rejections": _rejections,
    "occupancy": _occupancy,
}


def check_tables(connection: sqlite3.Connection, past: PastLog) -> None:
    """Compare every column of the tables of a log with the second count. Raises `PropertyBroken`."""
    for table, oracle in TABLE_ORACLES.items():
        columns = [name for name in TABLES[table].__struct_fields__ if (table, name) != ("blocks", "life")]
        order = "life" if table == "blocks" else ", ".join(KEYS[table])
        rows = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}").fetchall()
        places = [columns.index(name) for name in KEYS[table] if name in columns]
        expected = sorted(oracle(past), key=lambda row: [row[place] for place in places])
        if rows != expected:
            _raise_difference(table, columns, rows, expected)
    _check_lives(connection)


def _raise_difference(
    table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]]
) -> None:
    """Name the first column of the first row that differs."""
    message = f"the table {table} has {len(rows)} rows, but a second count gives {len(expected)}"
    for row, other in zip(rows, expected):
        for column, value, counted in zip(columns, row, other):
            if value != counted:
                where = f"the row that begins with {row[:2]}"
                message = f"{table}.{column} says {value!r} in {where}, but a second count gives {counted!r}"
                raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
    raise PropertyBroken(Property.EVENTS_ARE_STATE, message)


def _check_lives(connection: sqlite3.Connection) -> None:
    """Check that lives have ascending numbers, and blocks of a store and KV cache group consecutive ones."""
    rows = connection.execute("SELECT transfer, key, life FROM blocks ORDER BY life").fetchall()
    for (store, key, life), (next_store, next_key, next_life) in pairwise(rows):
        like = store == next_store and (len(key), key[-8:]) == (len(next_key), next_key[-8:])
        if next_life <= life or (like and next_life != life + 1):
            message = (
                f"the blocks {key} and {next_key} of store {store} have the lives {life} and {next_life}"
            )
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
