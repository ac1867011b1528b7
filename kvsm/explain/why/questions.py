"""Explain what happened to a request, key, transfer or host slot, and why: the answer, then the evidence.

    with kvsm.open("log") as log:
        found = explain_request(log, "r700")
        print(*found.answer)

All answers come from the tables of the log: fast with an index, and correct only if the tables are.
tests/explain/why/test_why_truth.py compares the tables with a reference that watched whole runs from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.errors import LogError
from kvsm.explain.story.names import key_pattern
from kvsm.explain.story.times import duration
from kvsm.explain.story.unfinished import engine_end
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import BlockRow, LookupRow, RequestRow, RequestStateRow, TransferRow
from kvsm.explain.why.block_search import lives_of_keys, lives_of_slot
from kvsm.explain.why.causes import Explanation, Inquiry, counted
from kvsm.ids import render_key

MOST_KEYS = 4
"""Most keys explained in one call. In a hybrid model, keys of different KV cache groups share a prefix."""

MOST_LIVES, MOST_WAITS, MOST_NAMES = 6, 6, 4
"""Most lives of blocks, waits, and requests that an answer or its evidence lists one by one."""

_WAITS = ("DEFERRED", "LOADING")


# A request.


def explain_request(log: OpenedLog, request: str, window: Window = EVERYTHING) -> Explanation:
    """Explain a request: what the host served of its prompt, what it missed and why, its waits, and its end.

    request: its full id. If several requests had this id, the last one in the window is explained.
    window: the part of the log to search.

    Raises `LogError` if there is no such request in the window.
    """
    lives = [life for life in log.requests("request = ?", (request,)) if _overlaps(life, window)]
    if not lives:
        raise LogError(f"{log.directory}: request {request} is not in this part of the log")
    inquiry, life = Inquiry(log), lives[-1]
    until = log.sql(
        "SELECT MIN(arrived) FROM requests WHERE request = ? AND arrived > ?", (request, life.arrived)
    ).fetchone()[0]
    span = Window(
        max(life.arrived, window.first or 0),
        min([event for event in (until and until - 1, window.last) if event is not None], default=log.last),
    )
    lookups = list(log.lookups("request = ? AND event >= ? AND event <= ?", (request, *span)))
    stays = list(log.request_states("request = ? AND began >= ? AND began <= ?", (request, *span)))
    again = f" (the last of {len(lives)} requests of this name)" if len(lives) > 1 else ""
    inquiry.note(life.arrived, f"request {request} arrives", "--request", request)
    return inquiry.explanation(
        f"request {request}{again}",
        _found(inquiry, life, lookups),
        _brought(inquiry, life),
        _waited(inquiry, stays),
        _request_end(inquiry, life, stays, len(lookups)),
    )


def _overlaps(life: RequestRow, window: Window) -> bool:
    begun = window.last is None or life.arrived <= window.last
    return begun and (window.first is None or life.finished is None or life.finished >= window.first)


def _found(inquiry: Inquiry, life: RequestRow, lookups: Sequence[LookupRow]) -> str:
    """Explain which blocks of its prompt the request found at its first admitted lookup, and why no more."""
    request = life.request
    if life.held:
        whom = "another engine" if life.session is None else f"session {life.session}"
        return f"It held {counted(life.held, 'slot')} on the host for {whom}."
    if not lookups:
        return f"No lookup of request {request} was answered."
    lookups = [row for row in lookups if row.admitted is not None] or lookups
    for row in lookups[1:]:
        if row.missed is None:
            inquiry.note(row.event, f"request {request} looks up again: {_share(inquiry, row)}", *_show(row))
    first = lookups[0]
    told = f"Request {request} found {_share(inquiry, first)}"
    if first.missed is None:
        inquiry.note(first.event, f"request {request} found {_share(inquiry, first)}", *_show(first))
        told = f"{told}{_unasked(inquiry, first)}."
    else:
        told = f"{told}: {inquiry.missed(first)}."
    for row in lookups[1:]:
        if row.missed is not None:
            inquiry.missed(row)
    return told


def _unasked(inquiry: Inquiry, row: LookupRow) -> str:
    """Explain a lookup that names no missed key: no key was missing, its hit was declined, or no block was
    looked up."""
    if row.declined is not None:
        return _declined(inquiry, row)
    if row.asked is None or row.on_device is None or row.hit_slots or row.asked - row.on_device < 2:
        return "; no key was missing"
    query = (
        "SELECT COUNT(*), MIN(transfer), (SELECT MAX(event) FROM resets WHERE event < ?) FROM transfers"
        " WHERE transfer < ? AND (ended IS NULL OR ended > ?)"
    )
    copies, oldest, reset = inquiry.log.sql(query, (row.event,) * 3).fetchone()
    if reset is not None and copies and oldest < reset:
        text = f"the cache is reset while {inquiry.name(oldest)} is under way"
        inquiry.note(reset, text, "--transfer", str(oldest))
        return f"; nothing was looked for, because the reset at event {reset:,} was still draining"
    if copies >= inquiry.log.config.max_live_transfers:
        return f"; nothing was looked for, because {copies:,} copies were in flight (max_live_transfers)"
    return "; nothing was looked for, and the log does not tell why (a request may read no cache)"


def _declined(inquiry: Inquiry, row: LookupRow) -> str:
    """Explain why the hit of a lookup was not loaded, with the expected times."""
    times = f"expected to take {row.load_us:,} us, and computing them {row.compute_us:,} us"
    what = f"loading {counted(row.declined_tokens or 0, 'token')}"
    inquiry.note(row.declined, f"{what} is {times}: declined", *_show(row))
    return (
        f"; {what} from the host was declined at event {row.declined:,}, because it was {times} "
        "(load_only_if_faster)"
    )


def _show(lookup: LookupRow) -> tuple[str, str]:
    return "--request", lookup.request


def _brought(inquiry: Inquiry, life: RequestRow) -> str:
    """Describe what was copied from another engine for this request."""
    query = (
        "SELECT transfer FROM transfers, json_each(requests) AS owner WHERE source IS NOT NULL"
        " AND owner.value = ? AND transfer >= ? AND transfer <= ? ORDER BY transfer"
    )
    last = inquiry.log.last if life.finished is None else life.finished
    told = []
    for (id,) in inquiry.log.sql(query, (life.request, life.arrived, last)).fetchmany(MOST_WAITS):
        row = inquiry.transfer(id)
        assert row is not None
        inquiry.note_transfer(id)
        what = f"{counted(row.slots, 'slot')} from {row.source}"
        told.append(f"Store {id} copied {what} for it; {_transfer_end(inquiry, row)}.")
    return " ".join(told)


def _share(inquiry: Inquiry, row: LookupRow) -> str:
    """`8 of the 20 blocks of its prompt on the device, 4 on the host, and missed 8`, with tokens."""
    if row.asked is None or row.on_host is None:
        return f"{counted(row.hit_slots, 'slot')} on the host (the log does not tell how much it asked for)"
    size = inquiry.log.config.block_tokens

    def told(blocks: int) -> str:
        return f"{blocks:,} ({blocks * size:,} tokens)" if size and blocks else f"{blocks:,}"

    missed = row.asked - (row.on_device or 0) - row.on_host
    rest = f", and missed {told(missed)}" if missed else ""
    if row.on_device is None:
        return f"{told(row.on_host)} of the {counted(row.asked, 'block')} that it asked for on the host{rest}"
    return (
        f"{told(row.on_device)} of the {counted(row.asked, 'block')} of its prompt on the device and "
        f"{told(row.on_host)} on the host{rest}"
    )


def _waited(inquiry: Inquiry, stays: Sequence[RequestStateRow]) -> str:
    """Describe the request's waits that are over, and their time. `_request_end` describes one still open."""
    over = [stay for stay in stays if stay.state in _WAITS and stay.ended is not None]
    for stay in sorted(over, key=_length)[-MOST_WAITS:]:
        _note_wait(inquiry, stay)
    deferred = [stay for stay in over if stay.state == "DEFERRED"]
    loading = [stay for stay in over if stay.state == "LOADING"]
    parts = [_longest(inquiry, "It waited", deferred)] if deferred else []
    parts += [_longest(inquiry, "It waited" if not parts else "it was loading", loading)] if loading else []
    if parts:
        return "; ".join(parts) + "."
    waits = any(stay.state in _WAITS for stay in stays)
    return "" if waits else "It waited for no copy."


def _longest(inquiry: Inquiry, verb: str, stays: Sequence[RequestStateRow]) -> str:
    """`It waited 0.61 s for store 12 of request r1 (rank 3 was late: ...)`."""
    longest = max(stays, key=_length)
    known = sum(map(_length, stays))
    transfer = longest.transfer
    what = "a copy" if transfer is None else inquiry.name(transfer, longest.request)
    if transfer is not None and (blame := inquiry.blame(transfer)):
        what += f" ({blame})"
    if len(stays) == 1:
        return f"{verb} {duration(known)} for {what}"
    return (
        f"{verb} {counted(len(stays), 'time')}, {duration(known)} in all, "
        f"the longest {duration(_length(longest))} for {what}"
    )


def _length(stay: RequestStateRow) -> int:
    """How long a request stayed in this state (ns); 0 if the log lacks the beginning or the end."""
    return 0 if stay.began_ns is None or stay.ended_ns is None else max(0, stay.ended_ns - stay.began_ns)


def _note_wait(inquiry: Inquiry, stay: RequestStateRow) -> None:
    show = "--request", stay.request
    what = "a copy" if stay.transfer is None else inquiry.name(stay.transfer, stay.request)
    inquiry.note(stay.began, f"request {stay.request} begins to wait for {what}", *show)
    row = None if stay.transfer is None else inquiry.transfer(stay.transfer)
    if row is not None and row.ended == stay.ended:
        why = f"{what} {row.outcome}"
    else:
        why = "its wait ends, and the copy continues"
    inquiry.note(stay.ended, f"request {stay.request}: {why}, after {duration(_length(stay))}", *show)
    if stay.transfer is not None:
        inquiry.note_transfer(stay.transfer)


def _request_end(inquiry: Inquiry, life: RequestRow, stays: Sequence[RequestStateRow], lookups: int) -> str:
    """How the request ended; if it did not, what it waits for."""
    name = life.request
    for stay in [stay for stay in stays if stay.state == "PREEMPTED"][:MOST_WAITS]:
        inquiry.note(stay.began, f"request {name} is preempted", "--request", name)
    also = _also(life, lookups)
    if life.finished is not None:
        how = "was aborted" if life.aborted else "finished"
        if life.cut_off:
            how = "was cut off, because another process went on"
        took = inquiry.passed(life.arrived, life.finished)
        inquiry.note(life.finished, f"request {name} {how}", "--request", name)
        after = f", {took} after it came" if took else ""
        late = ", and its load has not ended" if life.state == "FINISHED" else ""
        ended = _process_end(inquiry, life.finished) if life.cut_off else ""
        return f"It {how} at event {life.finished:,}{after}{ended}{late}{also}."
    if life.state in _WAITS:
        return f"It never ended: it still waits for {inquiry.chain(name)}{also}."
    condition = inquiry.log.condition
    engine = engine_end(condition.end, condition.stopped_by)
    idle = f"it is {life.state} where the log ends, and waits for no copy"
    return f"It never ended: {idle}{also}. As for the engine, {engine}."


def _process_end(inquiry: Inquiry, event: int) -> str:
    """How the process ended before this restart: `; before it, the process was killed`."""
    row = next(inquiry.log.restarts("event = ?", (event,)))
    return f"; before it, {row.last_end or 'the log was closed'}"


def _also(life: RequestRow, lookups: int) -> str:
    """Count the request's preemptions, repeated lookups and failed loads; empty if there were none."""
    parts = []
    if life.preemptions:
        parts.append(f"it was preempted {counted(life.preemptions, 'time')}")
    if lookups > 1:
        parts.append(f"it looked up {counted(lookups, 'time')}")
    if life.failed_loads:
        parts.append(f"{life.failed_loads:,} of its {counted(life.loads, 'load')} failed")
    return f"; {' and '.join(parts)}" if parts else ""


# A key.


def explain_keys(log: OpenedLog, text: str, window: Window = EVERYTHING) -> tuple[Explanation, ...]:
    """Explain each key that matches `text`: who stored it, who used it, and why it is gone.

    text: a prefix of the key in hex, or a key as kvsm prints it; see `key_pattern`.
    window: the part of the log to search.

    Raises `ConfigError` if the text is no key, and `LogError` if the log has no such key, or more than
    `MOST_KEYS`.
    """
    pattern = key_pattern(text)
    lives: dict[str, list[BlockRow]] = {}
    for block in lives_of_keys(log, pattern):
        lives.setdefault(block.key, []).append(block)
        if len(lives) > MOST_KEYS:
            break
    query = "SELECT DISTINCT missed FROM lookups WHERE missed >= ? AND missed < ?"
    for (key,) in log.sql(query, (pattern.first, f"{pattern.first}g")):  # No hex digit comes behind "f".
        if pattern.fits(bytes.fromhex(key)):
            lives.setdefault(key, [])
    if not lives:
        raise LogError(f"{log.directory}: no key {pattern} was stored or looked for")
    if len(lives) > MOST_KEYS:
        some = ", ".join(render_key(bytes.fromhex(key)) for key in list(lives)[:MOST_KEYS])
        raise LogError(
            f"{log.directory}: more than {MOST_KEYS} keys are like {pattern}: {some}, ...; give more"
        )
    return tuple(_explain_key(log, key, blocks, window) for key, blocks in sorted(lives.items()))


def _explain_key(log: OpenedLog, key: str, blocks: Sequence[BlockRow], window: Window) -> Explanation:
    """Explain who stored a key, who used it, why it is gone, and who missed it afterwards.

    blocks: the rows of all blocks that had this key, oldest first.
    """
    inquiry, short = Inquiry(log), render_key(bytes.fromhex(key))
    lives = [block for block in blocks if _lived_in(block, window)]
    wanted = [lookup for lookup in log.lookups("missed = ?", (key,)) if lookup.event in window]
    for block in lives[-MOST_LIVES:]:
        inquiry.note_life(block)
    for row in wanted[:MOST_WAITS]:
        inquiry.note(row.event, f"request {row.request} misses key {short}", "--key", key)
    if not lives:
        why = f" {inquiry.missed(wanted[0])}." if wanted else ""
        return inquiry.explanation(
            f"key {short}",
            f"Key {short} was never stored.",
            _wanted(inquiry, wanted, None),
            why.strip(),
            key=key,
        )
    return inquiry.explanation(
        f"key {short}",
        f"Key {short} {_times_stored(lives)}; {_now(inquiry, lives[-1])}.",
        _uses(inquiry, lives),
        _wanted(inquiry, wanted, lives[-1]),
        key=key,
    )


def _times_stored(lives: Sequence[BlockRow]) -> str:
    stored = sum(block.stored is not None for block in lives)
    if stored == len(lives):
        return f"was stored {counted(stored, 'time')}"
    return f"was stored {counted(stored, 'time')} in {counted(len(lives), 'attempt')}"


def _lived_in(block: BlockRow, window: Window) -> bool:
    begun = window.last is None or block.transfer <= window.last
    return begun and (window.first is None or block.gone is None or block.gone >= window.first)


def _now(inquiry: Inquiry, block: BlockRow) -> str:
    """Say how the last block of a key or slot ended, or where it is now. block: the row of this block."""
    store = inquiry.name(block.transfer)
    if block.gone is not None:
        lasted = inquiry.passed(block.stored, block.gone)
        after = f", {lasted} after it could be read" if lasted else ""
        return f"the last time by {store}, and it {inquiry.ended_life(block)}{after}"
    if block.stored is None:
        return f"{store} has not ended: {inquiry.blame(block.transfer) or 'it never left for the workers'}"
    return f"it is in slot {block.slot}, stored by {store} at event {block.stored:,}"


def _uses(inquiry: Inquiry, lives: Sequence[BlockRow]) -> str:
    hits = sum(block.hits for block in lives)
    last = max((block.last_hit for block in lives if block.last_hit is not None), default=None)
    if last is None:
        return "It served no lookup."
    row = next(inquiry.log.lookups("event = ?", (last,)), None)
    who = "" if row is None else f" of request {row.request}"
    return f"It served {counted(hits, 'lookup')}, the last one{who} at event {last:,}."


def _wanted(inquiry: Inquiry, wanted: Sequence[LookupRow], last: BlockRow | None) -> str:
    """Which requests missed a key after its last block was gone; if it had no block, in the whole window.

    last: the last block of the key; None if it was never stored.
    """
    since = 0 if last is None or last.gone is None else last.gone
    later = [lookup for lookup in wanted if lookup.event > since]
    if not later:
        return "" if last is None or last.gone is None else "No request has looked for it since."
    first = later[0]
    after = inquiry.passed(since, first.event) if since else ""
    more = f", and {counted(len(later) - 1, 'lookup')} after that" if len(later) > 1 else ""
    when = f", {after} later" if after else ""
    return f"Request {first.request} missed it at event {first.event:,}{when}{more}."


# A transfer.


def explain_transfer(log: OpenedLog, id: int) -> Explanation:
    """Explain a transfer: what it copied, for which requests, how it ended, and who waited for it.

    Raises `LogError` if the log has no such transfer.
    """
    inquiry = Inquiry(log)
    row = inquiry.transfer(id)
    if row is None:
        near = "SELECT transfer FROM transfers ORDER BY ABS(transfer - ?), transfer LIMIT 2"
        names = " and ".join(str(transfer) for (transfer,) in log.sql(near, (id,)))
        hint = f"the nearest are {names}" if names else "it has no transfer at all"
        raise LogError(f"{log.directory}: there is no transfer {id}; {hint}")
    inquiry.note_transfer(id)
    for copy in inquiry.copies(id)[:MOST_LIVES]:
        if copy.reported is not None and copy.good:
            inquiry.note(copy.reported, f"rank {copy.worker} reports it: good", "--transfer", str(id))
    name = inquiry.name(id)
    what = f"{name[0].upper()}{name[1:]} copied {counted(row.slots, 'host slot')}{_evicted_for(inquiry, row)}"
    return inquiry.explanation(
        f"transfer {id}",
        f"{what}; {_transfer_end(inquiry, row)}.",
        _waiting_for(inquiry, row),
        _what_became(inquiry, row),
    )


def _evicted_for(inquiry: Inquiry, row: TransferRow) -> str:
    """How many blocks were evicted for a store; empty if none."""
    # A store's eviction is the event right before it.
    query = "SELECT SUM(blocks), MIN(gone) FROM block_runs WHERE gone >= ? - 2 AND gone < ? AND gone_for = ?"
    evicted, event = inquiry.log.sql(query, (row.transfer,) * 3).fetchone()
    if not evicted:
        return ""
    what = counted(evicted, "block")
    inquiry.note(event, f"{what} evicted to make room for it", "--transfer", str(row.transfer))
    return f" and had {what} evicted for it"


def _transfer_end(inquiry: Inquiry, row: TransferRow) -> str:
    blame = inquiry.blame(row.transfer)
    because = f": {blame}" if blame else ""
    if not inquiry.copies(row.transfer):
        end = "" if row.ended is None else f"; it {_ENDS.get(row.outcome or '', 'ended')}"
        when = "" if row.ended is None else inquiry.at(row.ended)
        return f"it was planned and never left for the workers{end}{when}"
    if row.ended is None:
        since = inquiry.passed(row.submitted, inquiry.log.last)
        return f"it has not ended, {since} after it left for the workers{because}"
    took = inquiry.passed(row.submitted, row.ended)
    end = _ENDS.get(row.outcome or "", "ended where the log lacks events")
    return f"it {end}{inquiry.at(row.ended)}" + (f", {took} after it left" if took else "") + because


_ENDS = {
    "completed": "completed",
    "failed": "failed",
    "cancelled": "was cancelled",
    "drained": "was void, because a reset came while it was in flight, and drained",
    "lost": "was given up as lost",
    "cut off": "was cut off, because another process went on",
}
"""The text for a transfer's end, by its outcome."""


def _waiting_for(inquiry: Inquiry, row: TransferRow) -> str:
    """Which requests waited for the transfer and how long, and how often the engine waited for it."""
    stays = list(inquiry.log.request_states("transfer = ? AND state = 'DEFERRED'", (row.transfer,)))
    for stay in sorted(stays, key=_length)[-MOST_WAITS:]:
        _note_wait(inquiry, stay)
    flushes = f"The engine stood still for it {counted(row.waited_for, 'time')}." if row.waited_for else ""
    if not stays:
        return flushes or "No other request waited for it."
    names = list(dict.fromkeys(stay.request for stay in stays))
    total = sum(map(_length, stays))
    still = [stay.request for stay in stays if stay.ended is None]
    open_waits = f"; {counted(len(still), 'request')} still wait" if still else ""
    return f"{_requests(names)} waited for it, {duration(total)} in all{open_waits}. {flushes}".strip()


def _requests(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMES:
        return f"{counted(len(names), 'request')} ({', '.join(names[:MOST_NAMES])}, ...)"
    return f"Request{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _what_became(inquiry: Inquiry, row: TransferRow) -> str:
    """How many blocks of a completed store are still on the host, and how many lookups they served."""
    if row.direction != "store" or row.outcome != "completed":
        return ""
    query = (
        "SELECT SUM(blocks), SUM(hits * blocks), SUM((gone IS NULL) * blocks),"
        " SUM((hits = 0 AND gone IS NOT NULL) * blocks) FROM block_runs WHERE transfer = ?"
    )
    blocks, hits, left, unused = inquiry.log.sql(query, (row.transfer,)).fetchone()
    if not blocks:
        return ""
    return (
        f"Of its {counted(blocks, 'block')}, {left:,} are still on the host, and {unused:,} went without "
        f"serving a lookup; together they served {counted(hits, 'lookup')}."
    )


# A host slot.


def explain_block(log: OpenedLog, slot: int, window: Window = EVERYTHING) -> Explanation:
    """Explain a host slot: which blocks it held, and how the last one ended.

    window: the part of the log to search.

    Raises `LogError` if the pool has no such slot.
    """
    if slot >= log.config.host_blocks:
        size = log.config.host_blocks
        raise LogError(f"{log.directory}: there is no slot {slot}; the pool has slots 0 to {size - 1}")
    inquiry = Inquiry(log)
    lives = [block for block in lives_of_slot(log, slot) if _lived_in(block, window)]
    if not lives:
        return inquiry.explanation(f"slot {slot}", f"Slot {slot} held no block.")
    for block in lives[-MOST_LIVES:]:
        inquiry.note_life(block)
    last = lives[-1]
    unused = sum(not block.hits for block in lives)
    key, name = render_key(bytes.fromhex(last.key)), inquiry.name(last.transfer)
    if last.gone is not None:
        now = f"Its last block had key {key}, from {name}; it {inquiry.ended_life(last)}."
    elif last.stored is None:
        now = f"It is to hold key {key}, but {_now(inquiry, last)}."
    else:
        now = f"It holds key {key} since event {last.stored:,}, from {name}."
    return inquiry.explanation(
        f"slot {slot}",
        f"Slot {slot} held {counted(len(lives), 'block')} in turn; {unused:,} of them served no lookup."
        if len(lives) > 1
        else f"Slot {slot} held one block.",
        now,
        _uses(inquiry, [last]),
        key=last.key,
    )
