"""Shared by the four questions of `kvsm why`: the text of a cause, and the evidence for it.

An `Inquiry` reads the tables of one log. It names transfers, finds ranks that were late or failed, explains
why a key is gone, and follows what a request waits for. It collects the events that it mentions as evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvsm.explain.story.render import render_requests
from kvsm.explain.story.times import duration
from kvsm.explain.story.window import EVERYTHING
from kvsm.explain.tables.open_rows import CUT_OFF
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.tables.row_kinds import BlockRow, CopyRow, Gone, LookupRow, RequestStateRow, TransferRow
from kvsm.ids import render_key

MOST_EVIDENCE = 40
"""Most lines of evidence in one answer."""

MOST_RANKS = 4
"""Most failures of ranks that one answer names."""

_LATE = 2
"""A late rank took at least this many times as long as the second slowest rank."""

_LATE_NS = 1_000_000
"""A late rank also took at least this much longer (ns)."""


class Evidence(msgspec.Struct, frozen=True):
    """One event that an answer rests on.

    event: its number.
    step: the engine's step.
    wall_ns: when it was written (ns since 1970, UTC).
    text: what it means for the question.
    show: the option of `kvsm show`, with its value, whose output has this event too.
    """

    event: int
    step: int
    wall_ns: int
    text: str
    show: tuple[str, str]


class Explanation(msgspec.Struct, frozen=True):
    """An answer and its evidence.

    about: the subject of the question, such as `request r7`.
    answer: sentences.
    evidence: in the order of the log.
    left_out: how many more lines of evidence there are.
    key: the key in hex if the answer is about one: the log of another tier may have blocks of this key too.
    """

    about: str
    answer: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    left_out: int = 0
    key: str | None = None


class Wording(NamedTuple):
    """What happened to a key: the text before `at event 12` and the text after it."""

    verb: str
    rest: str = ""


class Inquiry:
    """Reads the tables of one log, and collects evidence."""

    def __init__(self, log: OpenedLog) -> None:
        self.log = log
        self._noted: dict[tuple[int, str], Evidence] = {}
        self._transfers: dict[int, TransferRow | None] = {}
        self._copies: dict[int, list[CopyRow]] = {}

    # Evidence.

    def note(self, event: int | None, text: str, *show: str) -> None:
        """Add an event to the evidence, if it is in the log.

        show: the option of `kvsm show` that prints the event, and the option's value.
        """
        option, value = show
        found = None if event is None else self.place_of(event)
        if event is not None and found is not None:
            self._noted.setdefault((event, text), Evidence(event, *found, text, (option, value)))

    def place_of(self, event: int) -> tuple[int, int] | None:
        """(step, wall time) of an event; None if the log lacks it."""
        row: tuple[int, int] | None = self.log.sql(
            "SELECT step, wall_ns FROM events WHERE event = ?", (event,)
        ).fetchone()
        return row

    def explanation(self, about: str, *answer: str, key: str | None = None) -> Explanation:
        """The answer with its evidence; of more than `MOST_EVIDENCE` lines, the first and the last ones."""
        lines = sorted(self._noted.values(), key=lambda line: line.event)
        more = len(lines) - MOST_EVIDENCE
        if more > 0:
            lines = lines[: MOST_EVIDENCE // 2] + lines[-MOST_EVIDENCE // 2 :]
        return Explanation(about, tuple(filter(None, answer)), tuple(lines), max(0, more), key)

    # Time.

    def passed(self, first: int | None, last: int | None) -> str:
        """The time between two events: `0.61 s`; empty if the log lacks one of them."""
        places = [None if event is None else self.place_of(event) for event in (first, last)]
        if places[0] is None or places[1] is None:
            return ""
        return duration(places[1][1] - places[0][1])

    def at(self, event: int, seen_from: int | None = None) -> str:
        """` at event 12`; with `seen_from`, ` at event 12, 0.61 s before`: how long before that event."""
        passed = self.passed(event, seen_from)
        return f" at event {event:,}" + (f", {passed} before" if passed else "")

    # Transfers.

    def transfer(self, id: int) -> TransferRow | None:
        """The row of a transfer; None if the log has no such transfer."""
        if id not in self._transfers:
            self._transfers[id] = next(self.log.transfers("transfer = ?", (id,)), None)
        return self._transfers[id]

    def copies(self, id: int) -> list[CopyRow]:
        """The rows of a transfer's copies, one for each rank."""
        if id not in self._copies:
            self._copies[id] = list(self.log.copies("transfer = ?", (id,)))
        return self._copies[id]

    def name(self, id: int, own: str | None = None) -> str:
        """`store 12 of request r1`; `transfer 12` if the log has no row of it.

        With its other engine, if there is one: `store 12 of request r1 (from engine p-1)`.

        own: a request; if the transfer belongs to this request alone, the name is `its load 13`.
        """
        row = self.transfer(id)
        if row is None:
            return f"transfer {id}"
        source = f" (from {row.source})" if row.source else f" (to {row.target})" if row.target else ""
        if own is not None and names_in(row.requests) == [own]:
            return f"its {row.direction} {id}{source}"
        return f"{row.direction} {id} of {requests_of(row.requests)}{source}"

    def blame(self, id: int) -> str:
        """Which ranks failed, did not report, or were late: `rank 3 failed (CUDA error)`; empty if none."""
        copies, row = self.copies(id), self.transfer(id)
        faults = [
            f"rank {copy.worker} failed ({copy.error or 'the log does not tell why'})"
            for copy in copies
            if copy.good is False
        ]
        if len(faults) > MOST_RANKS:
            faults = [*faults[:MOST_RANKS], f"{len(faults) - MOST_RANKS} more failed"]
        silent = [copy.worker for copy in copies if copy.reported is None]
        if silent and not (row is not None and row.outcome == CUT_OFF):
            over = row is not None and row.ended is not None
            faults.append(f"{ranks(silent)} {'never' if over else f'{have(silent)} not'} reported")
        return "; ".join(faults) or self._late(copies)

    def _late(self, copies: Sequence[CopyRow]) -> str:
        took = sorted(
            (copy.reported_ns - copy.submitted_ns, copy.worker)
            for copy in copies
            if copy.reported_ns is not None and copy.submitted_ns is not None
        )
        if len(took) < 2 or len(took) < len(copies):
            return ""
        (others, _), (longest, worker) = took[-2:]
        if longest < _LATE * others or longest - others < _LATE_NS:
            return ""
        rest = f"the others took {duration(others)} at most"
        return f"rank {worker} was late: it took {duration(longest)}, and {rest}"

    def note_transfer(self, id: int) -> None:
        """Add the life of a transfer to the evidence: its plan, its failures, and its end."""
        row = self.transfer(id)
        if row is None:
            return
        show, name = ("--transfer", str(id)), self.name(id)
        self.note(id, f"{name} is planned, {counted(row.slots, 'slot')}", *show)
        self.note(row.submitted, f"{name} leaves for the workers", *show)
        copies = self.copies(id)
        for copy in copies:
            if copy.good is False:
                why = copy.error or "the log does not tell why"
                self.note(copy.reported, f"rank {copy.worker} reports {name}: failed ({why})", *show)
        last = max((copy for copy in copies if copy.reported is not None), key=_reported, default=None)
        if last is not None and last.good:
            took = self.passed(row.submitted, last.reported)
            self.note(last.reported, f"rank {last.worker} is the last to report {name}, after {took}", *show)
        if row.ended is not None and (last is None or row.ended != last.reported):
            self.note(row.ended, f"{name} ends: {row.outcome}", *show)

    # Keys.

    def note_life(self, block: BlockRow) -> None:
        """Add the life of a block to the evidence: its store, its last hit, and its end."""
        show, key = ("--key", block.key), render_key(bytes.fromhex(block.key))
        store = f"store {block.transfer} of {requests_of(block.requests)}"
        self.note(block.transfer, f"{store} is planned: key {key} goes to slot {block.slot}", *show)
        if block.stored is not None:
            self.note(block.stored, f"{store} is complete: key {key} can be read", *show)
        if block.last_hit is not None:
            row = next(self.log.lookups("event = ?", (block.last_hit,)), None)
            who = "" if row is None else f" of request {row.request}"
            self.note(
                block.last_hit, f"key {key} serves a lookup{who}, its {ordinal(block.hits)} and last", *show
            )
        if block.why is not None:
            by = block.gone_for if block.gone_for is not None else block.gone_by
            wording = self.wording(Gone(block.why), by)
            self.note(block.gone, f"key {key} {wording.verb}{wording.rest}", *show)

    def wording(self, why: Gone, transfer: int | None) -> Wording:
        """The text for why a key is gone. transfer: the transfer that caused it; None if none is known."""
        return _WORDINGS[why](self, transfer)

    def ended_life(self, block: BlockRow) -> str:
        """How a block's life ended: `was evicted at event 12, 3.1 s before, to make room for store 13`."""
        assert block.why is not None
        by = block.gone_for if block.gone_for is not None else block.gone_by
        return self._told(Gone(block.why), by, block.gone, None)

    def _told(self, why: Gone, transfer: int | None, event: int | None, seen_from: int | None) -> str:
        verb, rest = self.wording(why, transfer)
        when = "" if event is None else self.at(event, seen_from)
        comma = "," if ", " in when and rest.startswith(" ") else ""
        return f"{verb}{when}{comma}{rest}"

    def missed(self, lookup: LookupRow) -> str:
        """Why a lookup missed its key: `key 0a1b.. was evicted at event 12, ...`. Adds the evidence."""
        assert lookup.missed is not None
        key, show = render_key(bytes.fromhex(lookup.missed)), ("--key", lookup.missed)
        self.note(lookup.event, f"request {lookup.request} misses key {key}", *show)
        if lookup.why is None:  # In a recording of another manager, which may answer wrongly.
            return f"key {key} was answered as missing, although it could be read"
        why = Gone(lookup.why)
        told = self._told(why, lookup.cause_transfer, lookup.cause, lookup.event)
        if lookup.skipped is not None:
            if why is not Gone.SKIPPED:
                told += f"; it was offered again and skipped{self.at(lookup.skipped)}"
            told += self._skip(lookup.skipped)
            self.note(lookup.skipped, f"key {key} is offered and skipped{self._skip(lookup.skipped)}", *show)
        if lookup.cause is not None and why is not Gone.SKIPPED:
            where = "transfer = ? AND key = ?" if why is Gone.IN_FLIGHT else "gone = ? AND key = ?"
            for block in self.log.blocks(where, (lookup.cause, lookup.missed)):
                self.note_life(block)
        if lookup.cause_transfer is not None:
            self.note_transfer(lookup.cause_transfer)
        return f"key {key} {told}"

    def _skip(self, event: int) -> str:
        """Why a key was skipped, and which requests offered it: `: reason; offered by request r1`."""
        skip = next(self.log.skips("event = ?", (event,)), None)
        return "" if skip is None else f": {skip.reason}; offered by {requests_of(skip.requests)}"

    # Waits.

    def open_stay(self, request: str) -> RequestStateRow | None:
        """The state that a request is in where the log ends; None if the request is over."""
        return next(self.log.request_states("request = ? AND ended IS NULL", (request,)), None)

    def chain(self, request: str, seen: tuple[str, ...] = ()) -> str:
        """What a request that never ended waits for: a transfer, the request that owns it, and so on."""
        if request in seen:
            return f"request {request}, and so they wait for each other"
        stay = self.open_stay(request)
        if stay is None:
            return f"request {request}, which is over"
        if stay.transfer is None:
            return f"request {request}, which is {stay.state} and waits for no copy"
        if seen:
            return f"request {request}, which waits for {self._awaited(request, stay, stay.transfer, seen)}"
        return self._awaited(request, stay, stay.transfer, seen)

    def _awaited(self, request: str, stay: RequestStateRow, transfer: int, seen: tuple[str, ...]) -> str:
        """The transfer that a request waits for, and why it has not ended."""
        waits = self.name(transfer, request)
        self.note(stay.began, f"request {request} begins to wait for {waits}", "--request", request)
        self.note_transfer(transfer)
        row = self.transfer(transfer)
        if row is None or self.copies(transfer):
            blame = self.blame(transfer)
            return f"{waits}, and {blame}" if blame else waits
        unsent = f"{waits}, which was planned and never left for the workers"
        others = [one for one in names_in(row.requests) if one != request]
        return f"{unsent}; it belongs to {self.chain(others[0], (*seen, request))}" if others else unsent


def _reported(copy: CopyRow) -> int:
    return copy.reported or 0


def requests_of(json: str) -> str:
    """`request r1`, `requests r1, r2` or `no request`. json: a list of names, from a table."""
    return render_requests(names_in(json))


def names_in(json: str) -> list[str]:
    """The names of requests in a JSON list from a table."""
    return msgspec.json.decode(json, type=list[str])


def counted(number: int, noun: str) -> str:
    """`1 block`, `1,200 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `11th`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2 and 5`."""
    *most, last = [str(number) for number in numbers]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def have(several: Sequence[object]) -> str:
    """`has` or `have`."""
    return "has" if len(several) == 1 else "have"


# Why a key is gone, in words.


def _evicted(inquiry: Inquiry, transfer: int | None) -> Wording:
    return Wording("was evicted", "" if transfer is None else f" to make room for {inquiry.name(transfer)}")


def _because(verb: str, what: str) -> Callable[[Inquiry, int | None], Wording]:
    def wording(inquiry: Inquiry, transfer: int | None) -> Wording:
        if transfer is None:
            return Wording(f"{verb}, because its copy {what}")
        blame = inquiry.blame(transfer)
        return Wording(f"{verb}, because {inquiry.name(transfer)} {what}", f": {blame}" if blame else "")

    return wording


def _in_flight(inquiry: Inquiry, transfer: int | None) -> Wording:
    if transfer is None:
        return Wording("was in flight")
    row, blame = inquiry.transfer(transfer), inquiry.blame(transfer)
    name = inquiry.name(transfer)
    if row is None or row.ended is None:
        end = "which has not ended" + (f": {blame}" if blame else "")
    else:
        took = inquiry.passed(transfer, row.ended)
        end = f"which {row.outcome} at event {row.ended:,}" + (f", {took} after its plan" if took else "")
        end += f" ({blame})" if blame else ""
    return Wording("was in flight: planned", f" by {name}, {end}")


def _words(verb: str) -> Callable[[Inquiry, int | None], Wording]:
    return lambda _inquiry, _transfer: Wording(verb)


def _before_log(inquiry: Inquiry, _transfer: int | None) -> Wording:
    log = inquiry.log
    why = (
        "the log lacks earlier events"
        if log.part == EVERYTHING
        else f"no event before {log.first:,} was read"
    )
    return Wording(f"is not on the host; the reason is unknown, because {why}")


_WORDINGS: dict[Gone, Callable[[Inquiry, int | None], Wording]] = {
    Gone.NEVER_STORED: _words("was never stored before"),
    Gone.SKIPPED: _words("was offered and skipped"),
    Gone.IN_FLIGHT: _in_flight,
    Gone.EVICTED: _evicted,
    Gone.RESET: _words("was dropped by a reset of the cache"),
    Gone.RESTART: _because("was not stored", "had not ended when another process went on"),
    Gone.STORE_FAILED: _because("was not stored", "failed"),
    Gone.LOAD_FAILED: _because("became void", "failed"),
    Gone.CANCELLED: _because("was not stored", "was cancelled before it left"),
    Gone.LOST: _because("was given up", "was lost"),
    Gone.BEFORE_LOG: _before_log,
}
"""The text for each reason why a key is gone."""
