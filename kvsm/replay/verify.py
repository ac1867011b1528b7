"""Verifying a log: every property that it can show, at every event, and the first event that breaks one.

At each event the `Auditor` folds it, and looks at what it names, in the ledger and against the witness. At
intervals, and at the end, everything is checked: all properties of the whole ledger, the two books against
each other, the published events against what can be matched, and a snapshot restored against its origin.
What is noticed may have begun before, anywhere since the last full check; so that interval is then read and
folded again in ever smaller parts, everything checked, until the first event is found.

Where one segment follows another, the snapshot in its head was taken from the live ledger: the fold must
give the same bytes. That is the replay proving itself (S10).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import isqrt
from pathlib import Path

import msgspec

from kvsm.errors import LogDamaged, LogError
from kvsm.events import OffloadingEvent
from kvsm.invariants import MOST_NAMED, Violation, check_ledger, check_rest
from kvsm.kv_events import Publisher
from kvsm.ledger import Ledger
from kvsm.log import LogReader, Segment
from kvsm.properties import Property
from kvsm.replay.concern import Concern, concern
from kvsm.replay.fold import LogCondition, condition_of, entries, opening, walk
from kvsm.replay.render import render
from kvsm.replay.witness import Witness
from kvsm.snapshot import digest, restore, snapshot

EVERY = 250_000
"""Events and entries from one full check to the next."""

EVENTS_SHOWN = 10

Progress = Callable[[int], None]
"""Called now and then with the number of events verified so far."""


class Breakage(msgspec.Struct, frozen=True, kw_only=True):
    """The first event that breaks a property: its number, step, kind, the event as a line, what it breaks,
    and the last events that concern the same things, oldest first, itself included."""

    event: int
    step: int
    kind: str
    text: str
    violations: tuple[Violation, ...]
    led_there: tuple[str, ...] = ()


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify_log` found.

    events, entries: how many were verified, from event `first` to event `last`. digest: of the state after
    the last one that folds. violations: those of the first event that breaks a property; empty if none
    does. breakage: that event in detail. damage: where and why the log cannot be read any further, or None.
    condition: its torn tail, gaps and broken mark.
    """

    log: str
    first: int
    last: int
    events: int
    entries: int
    digest: str
    violations: tuple[Violation, ...]
    breakage: Breakage | None
    damage: str | None
    condition: LogCondition
    seconds: float

    @property
    def good(self) -> bool:
        """No property is broken, and no event is missing but those of a torn tail."""
        return not self.violations and self.damage is None and self.condition.complete


class Auditor:
    """A ledger under watch: folds events and tells what each of them breaks.

    It starts from a ledger as it is, and takes that as given: an empty one, or one that was restored.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.witness, self._publisher = ledger, Witness.of(ledger), Publisher()
        ledger.listener = self._publisher
        self._announced = _readable(ledger)

    def apply(self, event: OffloadingEvent) -> list[Violation]:
        """Fold one event. What it breaks, as far as the things that it names show."""
        broken = self.witness.follow(event)
        try:
            self.ledger.apply(event)
        except Exception as refusal:  # Whatever stops the fold, the log does not give a state: that is S10.
            return broken or [
                Violation(
                    Property.EVENTS_ARE_STATE, f"the fold stops here: {type(refusal).__name__}: {refusal}"
                )
            ]
        return broken + self.witness.compare(self.ledger)

    def _fold_published(self) -> None:
        for change in self._publisher.take_events():
            if change.removed:
                self._announced.difference_update(change.keys)
            else:
                self._announced.update(change.keys)

    def check(self) -> list[Violation]:
        """Everything that can be checked of the state as it is."""
        self._fold_published()
        ledger, announced = self.ledger, self._announced
        broken = check_ledger(ledger) + self.witness.compare_all(ledger)
        readable = _readable(ledger)
        for keys, message in (
            (announced - readable, "are announced as stored, and cannot be matched"),
            (readable - announced, "can be matched, and were not announced"),
        ):
            if keys:
                named = ", ".join(sorted(key.hex() for key in keys)[:MOST_NAMED])
                broken.append(Violation(Property.EVENTS_ARE_STATE, f"{len(keys)} keys {message}: {named}"))
        # A finished request is forgotten while its stores go on: it is not all over yet.
        if not ledger.requests and not ledger.transfers:
            broken += check_rest(ledger)
        # A broken ledger need not survive a restore.
        if not broken and snapshot(restore(saved := snapshot(ledger))) != saved:
            broken.append(
                Violation(Property.EVENTS_ARE_STATE, "a ledger restored from its snapshot is another one")
            )
        return broken


def _readable(ledger: Ledger) -> set[bytes]:
    """The keys that can be matched."""
    return {key for key, slot in ledger.index.items() if ledger.readable(slot)}


def verify_log(
    log: str | os.PathLike[str], *, every: int = EVERY, progress: Progress | None = None
) -> Verification:
    """Check every property that a log can show, at every event, up to the first that breaks one.

    every: events and entries from one full check to the next. A torn tail is cut; beyond a gap the next
    segment's snapshot is taken as given. Raises `LogError` if there is no log; damage is part of the answer.
    """
    began = time.perf_counter()
    reader = LogReader(log)
    run = _Pass(reader, every, progress)
    damage = None
    try:
        for segment in reader.segments():
            if run.open(segment) or run.fold(segment):
                break
        else:
            run.close()
    except LogDamaged as error:
        damage = str(error)
        run.close()
    if run.auditor is None and damage is None:
        raise LogError(f"{log}: there is no whole event in this log")
    breakage = run.breakage
    if breakage is not None:
        breakage = msgspec.structs.replace(breakage, led_there=_led_there(reader.directory, breakage))
    last = run.auditor.ledger if run.auditor is not None else None
    return Verification(
        log=str(log),
        first=run.first,
        last=max(0 if last is None else last.seq, 0 if breakage is None else breakage.event),
        events=run.events,
        entries=run.entries,
        digest="" if last is None else digest(last),
        violations=() if breakage is None else breakage.violations,
        breakage=breakage,
        damage=damage,
        condition=condition_of(reader) if last is not None else LogCondition(reader.torn, None, (), False),
        seconds=time.perf_counter() - began,
    )


class _Pass:
    """One pass over a log: the auditor, and the state in which everything was last known to be good."""

    def __init__(self, reader: LogReader, every: int, progress: Progress | None) -> None:
        self.auditor: Auditor | None = None
        self.breakage: Breakage | None = None
        self.first = self.events = self.entries = 0
        self._directory, self._every, self._progress = reader.directory, every, progress
        self._saved, self._good_until = b"", 0
        self._weight = 0

    def open(self, segment: Segment) -> bool:
        """Begin a segment; true if something is broken.

        Without a gap its snapshot must be the state that the fold has reached.
        """
        if self.auditor is None or segment.gap is not None:
            if self.auditor is not None and self.check():
                return True
            auditor = Auditor(opening(segment))
            self._start(auditor)
            broken = auditor.check()
            return bool(broken) and self._break(None, broken, segment.path.name)
        if segment.head.snapshot == snapshot(self.auditor.ledger):
            return False
        message = f"the live state in the head of {segment.path.name} is not what the fold gives"
        return self.check() or self._break(
            None, [Violation(Property.EVENTS_ARE_STATE, message)], segment.path.name
        )

    def fold(self, segment: Segment) -> bool:
        """Fold the events of a segment; true if one breaks something."""
        assert self.auditor is not None
        apply = self.auditor.apply
        for batch in segment.batches():
            for event in batch:
                broken = apply(event)
                if broken:
                    self._count(batch[: event.seq - batch[0].seq + 1])
                    return self._locate(broken, event.seq)
            self._count(batch)
            if self._weight >= self._every and self.check():
                return True
            if self._progress is not None:
                self._progress(self.events)
        return False

    def close(self) -> None:
        """The log has ended, or cannot be read any further."""
        if self.auditor is not None:
            self.check()

    def check(self) -> bool:
        """Check everything; true if something is broken, by an event that is then found."""
        assert self.auditor is not None
        broken = self.auditor.check()
        if broken:
            return self._locate(broken, self.auditor.ledger.seq)
        self._hold(self.auditor)
        return False

    def _locate(self, broken: Sequence[Violation], until: int) -> bool:
        """Something is broken after event `until`: find the first event after which it shows."""
        events = _between(self._directory, self._good_until, until)
        event, found = _first_broken(self._saved, events)
        # Who has followed longer knows better what went before: a restored witness takes that as given.
        earlier = event is not None and event.seq < until
        return self._break(event, found if earlier else broken)

    def _start(self, auditor: Auditor) -> None:
        """Take a state as given, and go on from there."""
        self.auditor = auditor
        self.first = self.first or auditor.ledger.seq + 1
        self._hold(auditor)

    def _hold(self, auditor: Auditor) -> None:
        """All is good up to here."""
        self._saved, self._good_until, self._weight = snapshot(auditor.ledger), auditor.ledger.seq, 0

    def _count(self, batch: Sequence[OffloadingEvent]) -> None:
        named = entries(batch)
        self.events += len(batch)
        self.entries += named
        self._weight += len(batch) + named

    def _break(self, event: OffloadingEvent | None, broken: Sequence[Violation], segment: str = "") -> bool:
        """Note what is broken, by an event or, without one, by the snapshot that opens a segment."""
        assert self.auditor is not None
        ledger = self.auditor.ledger
        self.breakage = Breakage(
            event=ledger.seq if event is None else event.seq,
            step=ledger.step if event is None else event.step,
            kind="SegmentHead" if event is None else event.kind,
            text=f"the snapshot in the head of {segment}" if event is None else render(event),
            violations=tuple(broken),
        )
        return True


def _between(directory: Path, good_until: int, until: int) -> list[OffloadingEvent]:
    """The events after `good_until`, up to `until`, read again."""
    events: list[OffloadingEvent] = []
    for segment in LogReader(directory).segments(good_until + 1):
        for batch in segment.batches():
            events += [event for event in batch if good_until < event.seq <= until]
            if batch[-1].seq >= until:
                return events
    return events


def _first_broken(
    saved: bytes, events: Sequence[OffloadingEvent]
) -> tuple[OffloadingEvent | None, list[Violation]]:
    """The first of `events` after which a full check finds something, and what it finds.

    Looks first at each of about sqrt(n) parts, then at each event of the first broken part. If the fault
    does not show again (it was not in the fold), the last event stands for the interval, without a find.
    """
    parts = isqrt(len(events)) + 1
    auditor = Auditor(restore(saved))
    for start in range(0, len(events), parts):
        part = events[start : start + parts]
        saved = snapshot(auditor.ledger)
        if any(auditor.apply(event) for event in part) or auditor.check():
            auditor = Auditor(restore(saved))
            for event in part:
                found = auditor.apply(event) or auditor.check()
                if found:
                    return event, found
    return (events[-1] if events else None), []


def _led_there(directory: Path, breakage: Breakage) -> tuple[str, ...]:
    """The last events that concern what is broken, the breaking one included, as lines."""
    lines: deque[str] = deque(maxlen=EVENTS_SHOWN)
    wanted = Concern(
        *(
            [one for violation in breakage.violations for one in getattr(violation, sort)]
            for sort in ("slots", "device_blocks", "transfers", "requests")
        )
    )
    if not any(wanted):
        wanted = _own_concern(directory, breakage.event)
    for ledger, event, _ in walk(LogReader(directory)):
        breaks = event.seq == breakage.event
        if breaks or concern(ledger, event).meets(wanted):
            lines.append(f"event {event.seq} step {event.step}: {render(event)}")
        if breaks:
            break
        ledger.apply(event)
    return tuple(lines)


def _own_concern(directory: Path, seq: int) -> Concern:
    """What the breaking event itself concerns: for a violation that names nothing."""
    for ledger, event, _ in walk(LogReader(directory)):
        if event.seq == seq:
            return concern(ledger, event)
        ledger.apply(event)
    return Concern()
