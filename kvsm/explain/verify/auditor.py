"""Verifying a log: every property that it can show, at every event, and the first event that breaks one.

The `Auditor` takes each event through three steps: the second book follows it, the ledger folds it, and both
are compared in all that the event changes. What was published is compared, too. So no property can be broken
by one event and mended by a later one unseen; docs/verification.md tells it property by property.

At intervals, and at the end, everything is checked: all properties of the whole ledger, both books against
each other, and a restored snapshot against its origin. This finds an event that changed what it must not
change. It may be anywhere since the last full check. So that interval is read and folded again in smaller
parts, with full checks, until the first wrong event is found. A reset and a restart write over everything,
so both books are compared whole before one.

The head of each later segment holds a snapshot of the live ledger, and the fold must give the same state.
That proves that a replay gives the live state: events are state (S10).
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import MOST_NAMED, Violation, check_ledger, check_rest
from kvsm.core.ledger.snapshot import digest, is_saved_as, restore, snapshot
from kvsm.core.log import LogReader, Segment
from kvsm.core.log.fold import LogCondition, condition_of, entries, gathered, opening, walk
from kvsm.core.log.frames import first_event, segment_paths
from kvsm.core.log.trust import Trust
from kvsm.errors import InvalidEvent, KvsmError, LogDamaged, LogError
from kvsm.events import CacheReset, OffloadingEvent, Restarted
from kvsm.explain.story.concern import Concern, concern
from kvsm.explain.story.render import dated, render
from kvsm.explain.story.restarts import survivors, told_process
from kvsm.explain.story.unfinished import Unfinished, unfinished_at_end
from kvsm.explain.verify.book_entries import Told
from kvsm.explain.verify.witness import CursorsBack, LeasesTold, Witness
from kvsm.properties import Property
from kvsm.system.executors.executor import Executor
from kvsm.system.printable import printable

EVERY, EVERY_PER_SLOT = 250_000, 16
"""How many events and entries lie between two full checks: the first number, or the second one times the
number of slots and device blocks if that is larger. So full checks take a small share of the time."""

PARTS = 16
"""The number of parts into which an interval is split to find the first wrong event."""

EVENTS_SHOWN = 10
"""Events that are shown of those that led to a broken property."""

Progress = Callable[[int], None]
"""Called now and then with the number of events verified so far."""


class HeardPart(Protocol):
    """Hears the events of a part of a log. It is pickled when another process has read the part."""

    def skip(self, events: Sequence[OffloadingEvent]) -> bool:
        """Whether these events, which come next, tell nothing to it. Otherwise it hears each."""

    def hear(self, ledger: Ledger, event: OffloadingEvent) -> None:
        """The next event. It breaks nothing, and the ledger was just changed by it."""


Part = TypeVar("Part", bound=HeardPart)


class Hearer(Protocol[Part]):
    """Wants more of the same pass over a log, part by part."""

    def part(self, ledger: Ledger) -> Part:
        """What hears the events that follow this state."""

    def take(self, part: Part) -> None:
        """What was heard of the next part, in the order of the log."""


_WRITE_OVER = (CacheReset, Restarted)

OnRestart = Callable[[Ledger, Restarted], None]


class Breakage(msgspec.Struct, frozen=True, kw_only=True):
    """The first event that breaks a property.

    event: its number.
    text: the event as a line.
    violations: what it breaks.
    led_there: the last events that concern the same things, oldest first, with this one.
    """

    event: int
    step: int
    kind: str
    text: str
    violations: tuple[Violation, ...]
    led_there: tuple[str, ...] = ()

    def told(self) -> list[str]:
        """The event, what it breaks, and what led there: lines for people, made printable."""
        lines = [f"first broken by event {self.event}, step {self.step}: {self.text}"]
        for violation in self.violations:
            lines += [f"  {violation.property}: {violation.message}", f"      {violation.property.sentence}"]
        lines += ["", "what led there:", *[f"  {line}" for line in self.led_there]]
        return [printable(line) for line in lines]


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify_log` found.

    first, last: numbers of the events that were verified.
    events, entries: how many they are.
    digest: the digest of the state after the last event that folds.
    violations: what the first wrong event breaks; empty if none does.
    breakage: that event in detail.
    damage: where and why the log cannot be read further, or None.
    condition: its torn tail, gaps and broken mark.
    restarts: what each restart kept of the process before it, a line each.
    unfinished: what is open at the end; None if the log could not be folded to its end.
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
    restarts: tuple[str, ...]
    unfinished: Unfinished | None
    seconds: float

    @property
    def good(self) -> bool:
        """Whether no property is broken, and no event is missing except in a torn tail."""
        return not self.violations and self.damage is None and self.condition.complete


class Auditor:
    """Folds events into a ledger, and tells what each of them breaks.

    It takes the state of the ledger that it starts with on trust: empty or restored.

    on_restart: called before a restart is folded.
    """

    def __init__(self, ledger: Ledger, on_restart: OnRestart | None = None) -> None:
        self.ledger, self.witness, self._publisher = ledger, Witness.of(ledger), Publisher()
        ledger.listener = self._publisher
        self._on_restart = on_restart

    def apply(self, event: OffloadingEvent) -> list[Violation]:
        """Fold one event. Returns what it breaks in the things that it names."""
        _, broken = self.apply_all([event])
        return broken

    def apply_all(self, events: Sequence[OffloadingEvent]) -> tuple[int, list[Violation]]:
        """Fold events up to the first that breaks something, and that one.

        Returns how many were folded or refused, and what is broken then. It may have begun earlier, if
        everything was compared.
        """
        ledger, witness, published = self.ledger, self.witness, self._publisher.state
        for done, event in enumerate(events, 1):
            if type(event) in _WRITE_OVER and (broken := self._before(event)):
                return done, broken
            broken = witness.follow(event)
            try:
                ledger.apply(event)
            except Exception as error:  # The log gives no state, whatever stops the fold.
                message = f"the fold stops here: {type(error).__name__}: {error}"
                return done, broken or [Violation(Property.EVENTS_ARE_STATE, message)]
            broken += witness.compare(ledger)
            if witness.told or published.changes:
                broken += self._compare_published(witness.told)
            if broken:
                return done, broken
        return len(events), []

    def _before(self, event: OffloadingEvent) -> list[Violation]:
        """What must be looked at before an event writes over everything."""
        if isinstance(event, Restarted) and self._on_restart is not None:
            self._on_restart(self.ledger, event)
        return self.witness.compare_all(self.ledger)

    def _compare_published(self, told: Sequence[Told]) -> list[Violation]:
        """Compare what was published with what a router must hear of an event, change by change."""
        published: list[Told] = [(one.removed, one.keys) for one in self._publisher.take_events()]
        told = [one for one in told if one[1]]
        if published == told or [*map(_in_any_order, published)] == [*map(_in_any_order, told)]:
            return []
        heard, expected = _changes(published), _changes(told)
        broken = [
            Violation(Property.EVENTS_ARE_STATE, f"{len(keys)} keys {message}: {_named(keys)}")
            for keys, message in (
                (heard[False] - expected[False], "are announced as stored, but cannot be matched"),
                (expected[False] - heard[False], "can be matched, but were not announced"),
                (heard[True] - expected[True], "are announced as removed, but were not"),
                (
                    expected[True] - heard[True],
                    "cannot be matched any more, but were not announced as removed",
                ),
            )
            if keys
        ]
        message = "the published events have not the order of what happened"
        return broken or [Violation(Property.EVENTS_ARE_STATE, message)]

    def check(self) -> list[Violation]:
        """Check the whole state. Returns what is broken."""
        ledger = self.ledger
        broken = _looked_at(check_ledger, ledger) + _looked_at(self.witness.compare_all, ledger)
        # Stores of a finished request may go on after the request is forgotten.
        if not ledger.requests and not ledger.transfers:
            broken += check_rest(ledger)
        # A broken ledger need not survive a restore.
        if not broken and snapshot(restore(saved := snapshot(ledger))) != saved:
            broken.append(
                Violation(
                    Property.EVENTS_ARE_STATE, "a ledger restored from its snapshot differs from its origin"
                )
            )
        return broken


def _looked_at(check: Callable[[Ledger], list[Violation]], ledger: Ledger) -> list[Violation]:
    """Run a check. A state that it cannot even read, such as a slot that does not exist, is also wrong."""
    try:
        return check(ledger)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        message = f"the state cannot be read: {type(error).__name__}: {error}"
        return [Violation(Property.EVENTS_ARE_STATE, message)]


def _in_any_order(told: Told) -> Told:
    return told[0], sorted(told[1])


def _changes(told: Iterable[Told]) -> dict[bool, Counter[bytes]]:
    """How often each key was removed (True) and stored (False)."""
    changes = {True: Counter[bytes](), False: Counter[bytes]()}
    for removed, keys in told:
        changes[removed].update(keys)
    return changes


def _named(keys: Iterable[bytes]) -> str:
    return ", ".join(sorted(key.hex() for key in keys)[:MOST_NAMED])


def verify_log(
    log: str | os.PathLike[str],
    *,
    every: int | None = None,
    progress: Progress | None = None,
    hearer: Hearer[Any] | None = None,
    executor: Executor | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Verification:
    """Check every property that a log can show, at every event, up to the first that breaks one.

    every: events and entries from one full check to the next; None: as fits the pool (`EVERY`).
    progress: called now and then.
    hearer: hears the events, if it wants to.
    executor: verifies parts of the log side by side. None: this process reads it from its begin to its end.
        The answer is the same.
    allow_policies, max_slots: as in `Trust`.

    A torn tail is cut. After a gap the next segment's snapshot is taken on trust. Raises `LogError` if there
    is no log, or if it claims more than is allowed; damage is part of the answer.
    """
    began = time.perf_counter()
    trust = Trust(allow_policies, max_slots)
    with trust.guarded(log):
        found = None
        if executor is not None:
            progress = None if progress is None else _forward(progress)
            found = _verify_side_by_side(executor, log, every, progress, hearer, trust)
        if found is None:
            found = _verify(log, every, progress, hearer, trust)
    return msgspec.structs.replace(found, seconds=time.perf_counter() - began)


def _forward(progress: Progress) -> Progress:
    """The same, but never back to fewer events than it was called with before."""
    most = 0

    def show(events: int) -> None:
        nonlocal most
        if events > most:
            most = events
            progress(events)

    return show


def _verify(
    log: str | os.PathLike[str],
    every: int | None,
    progress: Progress | None,
    hearer: Hearer[Any] | None,
    trust: Trust,
) -> Verification:
    reader = LogReader(log)
    run = _Pass(reader, every, progress, hearer, trust)
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
        breakage = msgspec.structs.replace(breakage, led_there=_led_there(reader.directory, breakage, trust))
    last = run.auditor.ledger if run.auditor is not None else None
    condition = condition_of(reader) if last is not None else LogCondition(reader.torn, None, (), False)
    whole = breakage is None and damage is None
    if hearer is not None:
        for part in run.heard:
            hearer.take(part)
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
        condition=condition,
        restarts=tuple(run.restarts),
        unfinished=unfinished_at_end(reader, last, condition) if last is not None and whole else None,
        seconds=0.0,
    )


JOB_BYTES = 4 << 20
"""A smaller log is verified faster by one process: bytes of the log for each more."""

SLOTS_OF_JOBS = 1 << 23
"""Host slots and device blocks of all processes together, unless more are asked for: about 2.5 GB."""


def default_jobs(log: str | os.PathLike[str]) -> int:
    """The number of processes that verify a log, unless somebody wants another: one for each CPU, and no more
    than it has segments, than its size is worth, and than memory allows."""
    try:
        config, paths = LogReader(log).head.config, segment_paths(Path(log))
        size = sum(path.stat().st_size for path in paths)
    except (LogError, OSError):  # Reading it will say why.
        return 1
    slots = config.host_blocks + config.device_blocks
    return max(1, min(os.cpu_count() or 1, len(paths), size // JOB_BYTES, SLOTS_OF_JOBS // slots))


PARTS_OF_WORKER = 4
"""Parts of a log for each worker, if it has so many segments: the last one waits for less."""


class _Bounds(NamedTuple):
    """A part of a log: some of its segments, from the one that begins with event `first` on.

    until: the first event of the next part; None: the part goes to the end.
    """

    first: int
    until: int | None

    def __str__(self) -> str:
        return f"the events from {self.first:,} on"


class _GoodPart(NamedTuple):
    """A part that breaks nothing, if what it took on trust is so.

    found: as for a whole log. Only the last part knows what is at the end: `digest` and `unfinished`.
    """

    found: Verification
    back: CursorsBack
    leases: LeasesTold
    heard: list[Any]


def _parts(log: str | os.PathLike[str], workers: int) -> list[_Bounds]:
    """All of a log, in parts of about as many segments."""
    firsts = list(map(first_event, segment_paths(Path(log))))
    count = min(len(firsts), PARTS_OF_WORKER * workers)
    begins = [firsts[number * len(firsts) // count] for number in range(count)]
    return [_Bounds(*bounds) for bounds in zip_longest(begins, begins[1:])]


def _verify_side_by_side(
    executor: Executor,
    log: str | os.PathLike[str],
    every: int | None,
    progress: Progress | None,
    hearer: Hearer[Any] | None,
    trust: Trust,
) -> Verification | None:
    """Verify the parts of a log, each from the snapshot that it begins with.

    Returns None if there is anything to say but that the log is whole and breaks nothing. Then one pass from
    the begin to the end finds it, and knows all that went before it.
    """
    parts, good = _parts(log, executor.workers), list[_GoodPart]()
    if len(parts) < 2:
        return None
    events, may_go_back, leases = 0, frozenset[str](), dict[str, str]()
    task = partial(_verify_part, log, every, hearer, trust)
    with suppress(KvsmError), executor.results(task, parts) as results:
        for part in results:
            if part is None:
                return None
            if not good:  # A log that begins late: nobody knows more.
                may_go_back = part.back.trusted | part.back.relied_on
            if not (part.back.relied_on <= may_go_back and part.leases.allows(leases)):
                return None
            may_go_back, leases = part.back.behind(may_go_back), part.leases.after(leases)
            events += part.found.events
            good.append(part)
            if progress is not None:
                progress(events)
    if len(good) < len(parts):
        return None
    for heard in chain.from_iterable(part.heard for part in good):
        if hearer is not None:
            hearer.take(heard)
    founds = [part.found for part in good]
    return msgspec.structs.replace(
        founds[-1],
        first=founds[0].first,
        events=events,
        entries=sum(found.entries for found in founds),
        restarts=tuple(chain.from_iterable(found.restarts for found in founds)),
    )


def _verify_part(
    log: str | os.PathLike[str],
    every: int | None,
    hearer: Hearer[Any] | None,
    trust: Trust,
    bounds: _Bounds,
) -> _GoodPart | None:
    """Verify a part of a log; None if there is more to say. Raises `LogError`.

    It must end in the state that the next part begins with.
    """
    reader = LogReader(log)
    run = _PartPass(reader, every, None, hearer, trust)
    is_last = True
    with trust.guarded(log):
        for segment in reader.segments(bounds.first):
            if segment.gap is not None or run.open(segment):
                return None
            is_last = segment.head.seq + 1 != bounds.until
            if not is_last:
                break
            if run.fold(segment):
                return None
        if run.auditor is None or run.check():
            return None
        ledger, condition = run.auditor.ledger, condition_of(reader)
        found = Verification(
            log=str(log),
            first=run.first,
            last=ledger.seq,
            events=run.events,
            entries=run.entries,
            digest=digest(ledger) if is_last else "",
            violations=(),
            breakage=None,
            damage=None,
            condition=condition,
            restarts=tuple(run.restarts),
            unfinished=unfinished_at_end(reader, ledger, condition) if is_last else None,
            seconds=0.0,
        )
        witness = run.auditor.witness
        return _GoodPart(found, witness.cursors_back(), witness.leases_told(), run.heard)


class _Pass:
    """One pass over a log, with the last state that was checked whole and found good."""

    def __init__(
        self,
        reader: LogReader,
        every: int | None,
        progress: Progress | None,
        hearer: Hearer[Any] | None,
        trust: Trust,
    ) -> None:
        self.auditor: Auditor | None = None
        self.breakage: Breakage | None = None
        self.first = self.events = self.entries = 0
        self._directory, self._every, self._progress = reader.directory, every, progress
        self._hearer, self._trust = hearer, trust
        self.restarts: list[str] = []
        self.heard: list[HeardPart] = []
        """What was heard since each state that was taken on trust."""
        self._saved, self._good_until = b"", 0
        self._weight = 0

    def open(self, segment: Segment) -> bool:
        """Begin a segment. Returns whether something is broken.

        Without a gap its snapshot must be the state that the fold has reached.
        """
        self._trust.admit(segment)
        if self.auditor is None or segment.gap is not None:
            if self.auditor is not None and self.check():
                return True
            auditor = Auditor(opening(segment), self._note)
            self._start(auditor)
            broken = auditor.check()
            return bool(broken) and self._break(None, broken, segment.path.name)
        if is_saved_as(self.auditor.ledger, segment.head.snapshot):
            return False
        message = f"the live state in the head of {segment.path.name} is not what the fold gives"
        return self.check() or self._break(
            None, [Violation(Property.EVENTS_ARE_STATE, message)], segment.path.name
        )

    def fold(self, segment: Segment) -> bool:
        """Fold the events of a segment. Returns whether one breaks something."""
        assert self.auditor is not None
        for batch in gathered(segment):
            heard = self._hearer is not None and not self.heard[-1].skip(batch)
            done, broken = self._heard(batch) if heard else self.auditor.apply_all(batch)
            self._count(batch[:done])
            if broken:
                # By its place: what is wrong may be its number.
                return self._locate(broken, batch[0].seq + done - 1)
            if self._weight >= self._most_weight() and self.check():
                return True
            if self._progress is not None:
                self._progress(self.events)
        return False

    def _heard(self, batch: list[OffloadingEvent]) -> tuple[int, list[Violation]]:
        """The same as `apply_all`, and each event is heard after its fold."""
        assert self.auditor is not None
        for number, event in enumerate(batch, 1):
            broken = self.auditor.apply(event)
            if broken:
                return number, broken
            self.heard[-1].hear(self.auditor.ledger, event)
        return len(batch), []

    def _most_weight(self) -> int:
        """Events and entries up to the next full check."""
        assert self.auditor is not None
        config = self.auditor.ledger.config
        return self._every or max(EVERY, EVERY_PER_SLOT * (config.host_blocks + config.device_blocks))

    def _note(self, ledger: Ledger, event: Restarted) -> None:
        kept = survivors(ledger).told()
        self.restarts.append(f"event {event.seq:,}: {told_process(event.life, event.ended)}: {kept}")

    def close(self) -> None:
        """The log has ended, or cannot be read further."""
        if self.auditor is not None:
            self.check()

    def check(self) -> bool:
        """Check everything. Returns whether something is broken, and finds the event that broke it."""
        assert self.auditor is not None
        broken = self.auditor.check()
        if broken:
            return self._locate(broken, self.auditor.ledger.seq)
        self._mark_good(self.auditor)
        return False

    def _locate(self, broken: Sequence[Violation], until: int) -> bool:
        """Something is broken after event `until`. Find the first event after which it shows."""
        events = _between(self._directory, self._good_until, until)
        event, found = _first_broken(self._saved, events, until - self._good_until)
        # A witness that followed all events knows more than one that was restored.
        earlier = event is not None and event.seq < until
        return self._break(event, found if earlier else broken)

    def _start(self, auditor: Auditor) -> None:
        """Take a state on trust, and go on from there."""
        self.auditor = auditor
        self.first = self.first or auditor.ledger.seq + 1
        if self._hearer is not None:
            self.heard.append(self._hearer.part(auditor.ledger))
        self._mark_good(auditor)

    def _mark_good(self, auditor: Auditor) -> None:
        """Note that everything is good so far."""
        self._saved, self._good_until, self._weight = snapshot(auditor.ledger), auditor.ledger.seq, 0

    def _count(self, batch: Sequence[OffloadingEvent]) -> None:
        named = entries(batch)
        self.events += len(batch)
        self.entries += named
        self._weight += len(batch) + named

    def _break(self, event: OffloadingEvent | None, broken: Sequence[Violation], segment: str = "") -> bool:
        """Note what is broken by an event or, if that is None, by the snapshot that opens a segment."""
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


class _PartPass(_Pass):
    """A pass over a part of a log that says only whether anything is broken."""

    def _mark_good(self, _auditor: Auditor) -> None:
        self._weight = 0

    def _locate(self, _broken: Sequence[Violation], _until: int) -> bool:
        return True

    def _break(
        self, _event: OffloadingEvent | None, _broken: Sequence[Violation], _segment: str = ""
    ) -> bool:
        return True


def _between(directory: Path, good_until: int, until: int) -> Iterator[OffloadingEvent]:
    """The events after `good_until`, up to `until`, read again."""
    for segment in LogReader(directory).segments(good_until + 1):
        for batch in segment.batches():
            yield from batch[max(0, good_until + 1 - batch[0].seq) : until + 1 - batch[0].seq]
            if batch[0].seq + len(batch) > until:
                return


def _first_broken(
    saved: bytes, events: Iterator[OffloadingEvent], count: int
) -> tuple[OffloadingEvent | None, list[Violation]]:
    """The first of `count` events after which a full check finds something, and what it finds.

    Checks after each of some parts, then splits the first broken part again. A fault that does not show again
    was not in the fold: then the last event stands for the interval, with nothing found.
    """
    last = None
    while True:
        length = max(1, count // PARTS)
        auditor = Auditor(restore(saved))
        while part := list(islice(events, length)):
            last, saved = part[-1], snapshot(auditor.ledger)
            _, found = auditor.apply_all(part)
            found = found or auditor.check()
            if found and length == 1:
                return last, found
            if found:
                break
        else:
            return last, []
        events, count = iter(part), len(part)


def _led_there(directory: Path, breakage: Breakage, trust: Trust) -> tuple[str, ...]:
    """The last events that concern what is broken, as lines, with the breaking one."""
    lines: deque[str] = deque(maxlen=EVENTS_SHOWN)
    wanted = Concern(
        *(
            [one for violation in breakage.violations for one in getattr(violation, sort)]
            for sort in ("slots", "device_blocks", "transfers", "requests")
        )
    )
    if not any(wanted):
        wanted = _own_concern(directory, breakage.event, trust)
    began_ns: int | None = None
    with suppress(LogDamaged, InvalidEvent):  # What is broken may be the head, or the form of the event.
        for ledger, event, _ in walk(LogReader(directory), trust):
            began_ns = event.wall_ns if began_ns is None else began_ns
            breaks = event.seq == breakage.event
            if breaks or concern(ledger, event).meets(wanted):
                lines.append(dated(event.seq, event.step, event.wall_ns, began_ns, render(event)))
            if breaks:
                break
            ledger.apply(event)
    return tuple(lines)


def _own_concern(directory: Path, seq: int, trust: Trust) -> Concern:
    """What the breaking event itself concerns, for a violation that names nothing."""
    with suppress(LogDamaged, InvalidEvent):
        for ledger, event, _ in walk(LogReader(directory), trust):
            if event.seq == seq:
                return concern(ledger, event)
            ledger.apply(event)
    return Concern()
