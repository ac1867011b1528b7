"""Running a ledger and its protocol on the same events, and comparing them.

After each event, the cells that the actions wrote are compared with the ledger, and so are the cells that
the event names. After every `EVERY` events, and at the end, the whole state is compared. This also
finds a change of the ledger that no action explains. The change may have happened anywhere since the last
whole comparison, so that interval is repeated in smaller parts until the first wrong event is found.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.check.conformance.cells import CellKey
from kvsm.check.conformance.formulas import assigned, cells_read, indices_of
from kvsm.check.conformance.offload_books import offload_conformance
from kvsm.check.conformance.request_books import request_conformance
from kvsm.check.conformance.shadow import CannotFollow, Conformance, Keeper, Refusal, Shadow, Step
from kvsm.check.conformance.verdict import ProtocolMismatch, ProtocolVerdict, ProtocolVerification
from kvsm.check.conformance.wording import cell_name, demand_text, value_name
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.log import LogReader, Segment
from kvsm.core.log.fold import go_on
from kvsm.core.log.trust import Trust
from kvsm.errors import InvalidEvent, KvsmError, LogDamaged, LogError
from kvsm.events import OffloadConfig, OffloadingEvent, Restarted
from kvsm.explain.story.render import render
from kvsm.ids import MalformedIds

EVERY = 100_000
"""Events from one comparison of the whole state to the next."""

MakeConformance = Callable[[OffloadConfig], Conformance]

PROTOCOLS: tuple[MakeConformance, ...] = (offload_conformance, request_conformance)
"""Makes the conformance of each declared protocol."""


class SavedState(NamedTuple):
    """A state of a `ProtocolFollower`, after event `seq`."""

    seq: int
    ledger: bytes
    shadow: dict[str, dict[CellKey, Any]]
    noted: Any


class ProtocolFollower:
    """A ledger, and beside it the state of its protocol.

    ledger: its initial state is taken on trust.
    """

    def __init__(self, ledger: Ledger, conformance: Conformance) -> None:
        self.ledger = ledger
        self._take(conformance)
        if ledger.seq:
            self.books.begin(self.shadow)

    def _take(self, conformance: Conformance) -> None:
        """Start to follow by this conformance, with a shadow in its initial state."""
        self.conformance, self._config = conformance, self.ledger.config
        self.shadow = Shadow(conformance)
        self.books = conformance.books(self.ledger, self.shadow)
        actions = self.shadow.actions
        self._written = {
            kind: sorted({name for action in one.actions for name in actions[action].writes})
            for kind, one in conformance.steps.items()
        }
        """The variables that the actions of each kind of event may write."""
        self._compared = [name for name, who in conformance.keepers.items() if who is Keeper.LEDGER]

    def follow(self, event: OffloadingEvent) -> ProtocolMismatch | None:
        """Take the event's actions, apply it to the ledger, and compare what changed.

        Raises `InvalidEvent` or `IllegalTransition` if the ledger refuses the event.
        """
        if type(event) is Restarted:
            return self._restart(event)
        steps = self.conformance.steps[type(event)]
        mismatch, taken = None, list[Step]()
        try:
            if steps.steps is not None:
                for action, rows in steps.steps(self.shadow, self.ledger, event):
                    refusal = self.shadow.take(action, rows) if rows else None
                    if refusal is not None:
                        mismatch = self._refused(event, refusal)
                        break
                    taken.append((action, rows))
            self.books.heard(event)
        except MalformedIds as error:
            raise InvalidEvent(event.seq, str(error)) from None
        self.ledger.apply(event)
        if mismatch is not None:
            return mismatch
        for name in self._written[type(event)]:
            cells = self.shadow.cells[name].touched
            if cells:
                mismatch = mismatch or self._compare(event, name, cells, taken)
                cells.clear()
        if not self._written[type(event)]:
            for name, named in self.books.named_by(event).items():
                mismatch = mismatch or self._compare(event, name, list(named), ())
        return mismatch

    def _restart(self, event: Restarted) -> ProtocolMismatch | None:
        """Take a restart, and compare the whole state before and after it, because it changes nearly all.

        The next process may have other device blocks.
        """
        mismatch = self.check(event)
        if mismatch is not None:
            self.ledger.apply(event)
            return mismatch
        self.books.restart(self.shadow)
        self.books.heard(event)
        self.ledger.apply(event)
        mismatch = self.check(event)
        if mismatch is None and self._has_other_members():
            taken = self.shadow.taken
            self._take(self.conformance.under(self.ledger.config))
            self.shadow.taken = taken
            self.books.begin(self.shadow)
        return mismatch

    def _has_other_members(self) -> bool:
        """Whether a new configuration of the ledger changes the members of index sets.

        All actions must then be compiled again.
        """
        config = self.ledger.config
        if config == self._config:
            return False
        self._config = config
        return self.conformance.under(config).members != self.conformance.members

    def check(self, event: OffloadingEvent) -> ProtocolMismatch | None:
        """Compare the whole state after this event."""
        books = self.books
        for name in self._compared:
            ledger = books.every(name)
            cells = self.shadow.cells[name]
            known = books.known(name, list(cells.values))
            (first,) = books.seen(name, [cells.initial])
            values = books.seen(name, [cells.values[cell] for cell in known])
            shadow = {cell: value for cell, value in zip(known, values) if value != first}
            if shadow != ledger:
                for cell in (*shadow, *ledger):
                    expected, found = shadow.get(cell, first), ledger.get(cell, first)
                    if expected != found:
                        return self._differs(event, name, cell, expected, found, "")
        return None

    def save(self) -> SavedState:
        """The state, for `load`."""
        return SavedState(self.ledger.seq, snapshot(self.ledger), self.shadow.saved(), self.books.noted())

    def load(self, saved: SavedState) -> None:
        """Return to a saved state."""
        self.ledger = restore(saved.ledger)
        if self._has_other_members():
            self._take(self.conformance.under(self.ledger.config))
        self.shadow.load(saved.shadow)
        self.books = self.conformance.books(self.ledger, self.shadow)
        self.books.resume(saved.noted)

    def _compare(
        self, event: OffloadingEvent, name: str, cells: list[CellKey], taken: Sequence[Step]
    ) -> ProtocolMismatch | None:
        if self.conformance.keepers[name] is not Keeper.LEDGER:
            return None
        books, shadow = self.books, self.shadow.cells[name]
        known = books.known(name, cells)
        get, first = shadow.values.get, shadow.initial
        expected = books.seen(name, [get(cell, first) for cell in known])
        found = books.values(name, known)
        if expected == found:
            return None
        place = next(n for n, (one, other) in enumerate(zip(expected, found)) if one != other)
        action = self._writer(taken, name, known[place])
        return self._differs(event, name, known[place], expected[place], found[place], action)

    def _writer(self, taken: Sequence[Step], name: str, cell: CellKey) -> str:
        """The last of these actions that may have written this cell."""
        for action, rows in reversed(taken):
            params = self.shadow.actions[action].action.params
            for bound, assign in assigned(self.shadow.actions[action].action.effects):
                if assign.cell.variable.name == name:
                    indices = indices_of(assign.cell)
                    for row in rows:
                        values = dict(zip(params, row))
                        written = tuple(values.get(one) for one in indices)
                        if bound or (written[0] if len(written) == 1 else written) == cell:
                            return action
        return taken[-1][0] if taken else ""

    def _differs(
        self, event: OffloadingEvent, name: str, cell: CellKey, expected: Any, found: Any, action: str
    ) -> ProtocolMismatch:
        cells, named = self.shadow.cells[name], self.conformance.named
        said = [
            self.books.told(name, value) or value_name(cells, value, named) for value in (expected, found)
        ]
        return self._mismatch(
            event,
            action,
            name,
            cell_name(cells, cell, named),
            said[0],
            said[1],
        )

    def _refused(self, event: OffloadingEvent, refusal: Refusal) -> ProtocolMismatch:
        action = self.shadow.actions[refusal.action].action
        named = self.conformance.named
        values = dict(zip(action.params, refusal.row))
        given = {param: named(param.members.name, value) for param, value in values.items()}
        demand = f"{demand_text(refusal.demand, given)} (a demand of its guard)"
        for read in cells_read(refusal.demand):
            params = indices_of(read)
            cell = values[params[0]] if len(params) == 1 else tuple(values[one] for one in params)
            cells = self.shadow.cells[read.variable.name]
            found = value_name(cells, cells.get(cell), named)
            where = cell_name(cells, cell, named)
            return self._mismatch(
                event,
                refusal.action,
                read.variable.name,
                where,
                demand,
                found,
            )
        return self._mismatch(
            event,
            refusal.action,
            "",
            "the protocol's state",
            demand,
            "it does not hold",
        )

    def _mismatch(
        self, event: OffloadingEvent, action: str, variable: str, cell: str, expected: str, found: str
    ) -> ProtocolMismatch:
        return ProtocolMismatch(
            protocol=self.conformance.declared.name,
            event=event.seq,
            step=event.step,
            kind=event.kind,
            text=render(event),
            action=action,
            variable=variable,
            cell=cell,
            expected=expected,
            found=found,
        )


def verify_protocol(
    log: str | os.PathLike[str],
    *,
    conformance: MakeConformance = offload_conformance,
    every: int = EVERY,
    progress: Callable[[int], None] | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> ProtocolVerification:
    """Whether each event of a log is an instance of the protocol's actions, up to the first that is not.

    conformance: makes the relation of the log to the protocol.
    every: events from one comparison of the whole state to the next.
    progress: called repeatedly with the number of events followed so far.
    allow_policies, max_slots: as in `Trust`.

    A torn tail is cut. After a gap the next segment's snapshot is taken on trust. Raises `LogError` if there
    is no log, or if it claims more than is allowed.
    """
    trust = Trust(allow_policies, max_slots)
    with trust.guarded(log):
        began = time.perf_counter()
        run = _ProtocolPass(LogReader(log), conformance, every, progress, trust)
        stopped = run.run()
        if run.conformance is None and stopped is None:
            raise LogError(f"{log}: there is no whole event in this log")
        taken = run.taken + (run.follower.shadow.taken if run.follower is not None else Counter())
        verdict = ProtocolVerdict.UNDETERMINED if stopped is not None else ProtocolVerdict.CONFORMS
        return ProtocolVerification(
            protocol=(run.conformance or conformance(_ANY)).declared.name,
            verdict=verdict if run.mismatch is None else ProtocolVerdict.DIFFERS,
            events=run.events,
            actions=dict(sorted(taken.items())),
            mismatch=run.mismatch,
            stopped=stopped,
            trusted=tuple(run.trusted),
            seconds=time.perf_counter() - began,
        )


_ANY = OffloadConfig(host_blocks=1, device_blocks=1)
"""The name of a protocol is the same with any configuration."""


class _ProtocolPass:
    """One pass over a log, with the last state that was compared whole."""

    def __init__(
        self,
        reader: LogReader,
        conformance: MakeConformance,
        every: int,
        progress: Callable[[int], None] | None,
        trust: Trust,
    ) -> None:
        self.conformance: Conformance | None = None
        self.follower: ProtocolFollower | None = None
        self.mismatch: ProtocolMismatch | None = None
        self.events, self.taken, self.trusted = 0, Counter[str](), list[int]()
        self._reader, self._make, self._trust = reader, conformance, trust
        self._every, self._progress = every, progress
        self._good: SavedState | None = None
        self._last: OffloadingEvent | None = None

    def run(self) -> str | None:
        """Follow the log. Returns why it was not followed to its end."""
        try:
            for segment in self._reader.segments():
                if self._open(segment) or self._follow(segment):
                    return None
            self._check()
        except LogDamaged as error:
            self._check()
            return str(error)
        except CannotFollow as error:
            return str(error)
        return None

    def _open(self, segment: Segment) -> bool:
        """Begin a segment: at the start, and after a gap, its state is taken on trust.

        Returns whether something differs before a gap.
        """
        self._trust.admit(segment)
        if self.follower is not None and segment.gap is None:
            return False
        if self.follower is not None:
            if self._check():
                return True
            self.taken += self.follower.shadow.taken
            self.follower = None
        ledger = go_on(None, segment, self._trust)
        if ledger.seq:
            self.trusted.append(ledger.seq + 1)
        self.conformance = self._make(ledger.config)
        self.follower = ProtocolFollower(ledger, self.conformance)
        self._last = None
        self._good = self.follower.save()
        return False

    def _follow(self, segment: Segment) -> bool:
        """Follow the events of a segment. Returns whether one differs."""
        assert self.follower is not None
        follow = self.follower.follow
        for batch in segment.batches():
            for event in batch:
                try:
                    self.mismatch = follow(event)
                except Exception as error:  # A log can hold any event.
                    self.events += event.seq - batch[0].seq
                    if self._locate():
                        return True
                    raise CannotFollow(f"the ledger refuses event {event.seq}: {error}") from error
                self._last = event
                if self.mismatch is not None:
                    self.events += event.seq - batch[0].seq + 1
                    self._locate()
                    return True
            before, self.events = self.events, self.events + len(batch)
            if before // self._every != self.events // self._every and self._check():
                return True
            if self._progress is not None:
                self._progress(self.events)
        return False

    def _check(self) -> bool:
        """Compare the whole state. Returns whether it differs."""
        if self.follower is None or self._last is None or self.mismatch is not None:
            return self.mismatch is not None
        self.mismatch = self.follower.check(self._last)
        if self.mismatch is not None:
            self._locate()
            return True
        self._good = self.follower.save()
        return False

    def _locate(self) -> bool:
        """Find the first event after which something differs, up to the last event that the ledger took.

        Returns whether something does.
        """
        assert self._good is not None
        if self._last is None:
            return False
        assert self.follower is not None
        events = _between(self._reader.directory, self._good.seq, self._last.seq)
        self.follower.load(self._good)
        self.mismatch = _first_mismatch(self.follower, events) or self.mismatch
        return self.mismatch is not None


def _between(directory: Path, good_until: int, until: int) -> list[OffloadingEvent]:
    """The events after `good_until`, up to `until`, read again."""
    events: list[OffloadingEvent] = []
    for segment in LogReader(directory).segments(good_until + 1):
        for batch in segment.batches():
            events += [event for event in batch if good_until < event.seq <= until]
            if batch[-1].seq >= until:
                return events
    return events


def _first_mismatch(follower: ProtocolFollower, events: Sequence[OffloadingEvent]) -> ProtocolMismatch | None:
    """Return the first mismatch: compare the whole state after ever smaller parts."""
    parts = max(1, isqrt(len(events)))
    for start in range(0, len(events), parts):
        part, before = events[start : start + parts], follower.save()
        try:
            differs = any(follower.follow(event) for event in part) or follower.check(part[-1])
        except KvsmError:  # The ledger was changed so much that it refuses an event.
            differs = True
        if differs:
            follower.load(before)
            for event in part:
                found = follower.follow(event) or follower.check(event)
                if found is not None:
                    return found
    return None
