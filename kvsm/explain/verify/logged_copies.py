"""What the logs of two tiers say of the copies between them, and whether they say the same.

`disagreements` compares two live ledgers at one moment. Two logs have no common moment: their events have
other numbers, and a kill cuts each of them at a place of its own. But `DiskTier` tells both cores of each
copy, one call after the other. So both logs must tell the same steps in the same order:

====================  =============================================  ======================================
step                  what is compared                               event
====================  =============================================  ======================================
a copy leaves         its transfer in the other ledger, its host     `TransfersSubmitted`
                      slots and their keys
a worker reports it   which one; of a copy from the disk also        `WorkerReported`
                      whether it is good (a bad copy to the disk
                      has only read the host)
it is given up        that it is                                     `TransferLost`
====================  =============================================  ======================================

A plan that never leaves may be in one log alone. What cannot be compared is said, and not guessed:

======================================  ====================================================================
the log                                 what is compared
======================================  ====================================================================
was not closed, or not well             what it tells must be how the other log begins; nobody can say where
                                        the last steps are that only the other log tells
lacks its beginning, or events in it    copies that were planned behind that
has several lives                       the last one: each process has a log of its own for the disk
======================================  ====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogEnd
from kvsm.events import Direction, OffloadingEvent
from kvsm.explain.story import Verification
from kvsm.ids import IdArray, listed
from kvsm.tiers.disk_tier import DISK, HOST

_OTHER_END = re.compile(r"(?:disk-store-|fetch-)([0-9]{1,18})(?:-for-.*)?", re.DOTALL)
_FETCH = re.compile(r"fetch-[0-9]+-for-.*", re.DOTALL)


class CopyStep(NamedTuple):
    """A step of a copy between the tiers, as one log tells it.

    event: its number in this log.
    direction: as the disk's ledger has it: `STORE` is to the disk.
    store: the transfer that stores the blocks: of a copy to the disk in the disk's ledger, of one from the
        disk in the host's. 0 if this log does not say it, as in a redacted copy.
    says: what happens.
    blocks: digest of the host slots and keys of a copy that leaves.
    """

    event: int
    direction: Direction
    store: int
    says: str
    blocks: bytes = b""

    def agrees(self, other: CopyStep) -> bool:
        """Whether this is the same step of the same copy."""
        return self[1:] == other[1:]

    def __str__(self) -> str:
        way, tier = ("to", DISK) if self.direction is Direction.STORE else ("from", HOST)
        store = f", store {self.store} of the {tier}'s log," if self.store else ""
        return f"event {self.event:,}: the copy {way} the disk{store} {self.says}"


class ProcessBegins(NamedTuple):
    """A process begins to write the log."""

    event: int
    wall_ns: int


class EngineArrives(NamedTuple):
    """A request arrives at a core, and it is none for copies: the log is not a disk's."""

    event: int
    wall_ns: int


class CopyPlanned(NamedTuple):
    """A transfer that is a copy between the tiers if this is the log of `tier`. Others: as in `CopyStep`."""

    transfer: int
    tier: str
    direction: Direction
    store: int
    says: str
    blocks: bytes


class TransferLeaves(NamedTuple):
    """A transfer that may be a copy is submitted."""

    event: int
    transfer: int


class TransferReported(NamedTuple):
    """A worker reports it."""

    event: int
    transfer: int
    worker: int
    good: bool


class TransferGivenUp(NamedTuple):
    """It is lost."""

    event: int
    transfer: int


Saying = ProcessBegins | EngineArrives | CopyPlanned | TransferLeaves | TransferReported | TransferGivenUp


class CopiesOfPart:
    """What the events of a part of a log say of copies between the tiers. It hears each event after its fold.

    It needs to know nothing of the events before, so parts can be heard side by side.

    named_disk: as in `LoggedCopies`. ledger: the state before the part.

    Attributes: `sayings`; `first`, number and wall time (ns) of its first event; `last`, the number of
    its last one.
    """

    def __init__(self, named_disk: bool, ledger: Ledger) -> None:
        self.sayings: list[Saying] = []
        self.first: tuple[int, int] | None = None
        self.last = ledger.seq
        self._named_disk, self._live = named_disk, set(ledger.transfers)
        """Transfers that have not ended, and may be copies between the tiers."""

    def skip(self, events: Sequence[OffloadingEvent]) -> bool:
        """Whether these events, which come next, say nothing of copies between the tiers."""
        if self._named_disk or self._live or any(map(_may_tell, events)):
            return False
        self._pass(events[0], events[-1])
        return True

    def hear(self, ledger: Ledger, event: OffloadingEvent) -> None:
        """Take note of an event that was applied to this ledger."""
        self._pass(event, event)
        note = NOTES.get(type(event))
        if note is not None:
            note(self, ledger, event)
        if self._live:
            self._live.intersection_update(ledger.transfers)

    def _pass(self, first: OffloadingEvent, last: OffloadingEvent) -> None:
        self.first = self.first or (first.seq, first.wall_ns)
        self.last = last.seq

    def opened(self, _ledger: Ledger, event: ev.LogOpened | ev.Restarted) -> None:
        """A process begins."""
        self.sayings.append(ProcessBegins(event.seq, event.wall_ns))

    def arrived(self, _ledger: Ledger, event: ev.RequestArrived) -> None:
        """Only the requests of an engine have other names than copies."""
        if self._named_disk and not _FETCH.fullmatch(event.request):
            self.sayings.append(EngineArrives(event.seq, event.wall_ns))

    def store_planned(self, ledger: Ledger, event: ev.StorePlanned) -> None:
        """To the disk from the host, or to the host from the disk."""
        record = ledger.transfers[event.seq]
        if event.source == DISK:
            self._plan(HOST, Direction.LOAD, event.seq, event.seq, record.slots, record.keys)
        elif self._named_disk and not event.source:
            self._plan(DISK, Direction.STORE, event.seq, event.seq, record.device_blocks, record.keys)

    def load_planned(self, ledger: Ledger, event: ev.LoadPlanned) -> None:
        """The same copies at their other ends."""
        to_disk = event.target == DISK
        if event.voided or not (to_disk or self._named_disk):
            return
        named, record = _OTHER_END.fullmatch(event.request), ledger.transfers[event.seq]
        store, keys = int(named[1]) if named else 0, ledger.keys_of(record.slots)
        if to_disk:
            self._plan(HOST, Direction.STORE, event.seq, store, record.slots, keys)
        else:
            self._plan(DISK, Direction.LOAD, event.seq, store, record.device_blocks, keys)

    def _plan(
        self,
        tier: str,
        direction: Direction,
        transfer: int,
        store: int,
        host_slots: IdArray,
        keys: Sequence[bytes],
    ) -> None:
        pairs = list(zip(listed(host_slots), keys))
        blocks = blake2b(msgspec.msgpack.encode(pairs), digest_size=16).digest()
        count = f"{len(pairs):,} block{'s' if len(pairs) > 1 else ''}"
        self._live.add(transfer)
        self.sayings.append(CopyPlanned(transfer, tier, direction, store, f"leaves with {count}", blocks))

    def submitted(self, _ledger: Ledger, event: ev.TransfersSubmitted) -> None:
        """Copies leave."""
        self.sayings += [TransferLeaves(event.seq, one) for one in event.transfers if one in self._live]

    def reported(self, _ledger: Ledger, event: ev.WorkerReported) -> None:
        """A worker is done."""
        if event.transfer in self._live:
            self.sayings.append(TransferReported(event.seq, event.transfer, event.worker, event.good))

    def lost(self, _ledger: Ledger, event: ev.TransferLost) -> None:
        """A copy is given up."""
        if event.transfer in self._live:
            self.sayings.append(TransferGivenUp(event.seq, event.transfer))


class LoggedCopies:
    """The steps of all copies between the tiers in one log. It takes what each part of the log says.

    named_disk: whether the log is named as the log of a disk. It is one unless its events tell otherwise.

    Attributes: `tier`, `host` or `disk`; `steps`; `first`, for each direction the first copy that is planned
    in the log; `began`, the first event of this life, or behind lost ones; `began_ns`, its Unix time (ns);
    `lacks_beginning`, whether events of this life are missing before it.
    """

    def __init__(self, named_disk: bool) -> None:
        self.tier = DISK if named_disk else HOST
        self._named_disk, self._next = named_disk, 1
        self._begin(0, 0, lacks=False)

    def _begin(self, event: int, wall_ns: int, lacks: bool) -> None:
        self.began, self.began_ns, self.lacks_beginning = event, wall_ns, lacks
        self.steps: list[CopyStep] = []
        self.first: dict[Direction, int] = {}
        self._left: dict[int, CopyPlanned] = {}
        """Copies by their transfer in this log, and what to say when they leave."""

    def part(self, ledger: Ledger) -> CopiesOfPart:
        """What hears the events that follow this state."""
        return CopiesOfPart(self._named_disk, ledger)

    def take(self, part: CopiesOfPart) -> None:
        """Take note of what the next part of the log says. Events may be missing before it."""
        if part.first is None:
            return
        if part.first[0] != self._next:
            self._begin(*part.first, lacks=True)
        self._next = part.last + 1
        for saying in part.sayings:
            self._note(saying)

    def _note(self, saying: Saying) -> None:
        match saying:
            case ProcessBegins(event, wall_ns):
                self._begin(event, wall_ns, lacks=False)
            case EngineArrives(event, wall_ns) if self.tier == DISK:
                self.tier = HOST
                if self._left:
                    self._begin(event, wall_ns, lacks=True)
            case CopyPlanned(transfer, tier, direction, store) if tier == self.tier:
                self.first.setdefault(direction, store)
                self._left[transfer] = saying
            case TransferLeaves(event, transfer) if transfer in self._left:
                copy = self._left[transfer]
                self.steps.append(CopyStep(event, copy.direction, copy.store, copy.says, copy.blocks))
            case TransferReported(event, transfer, worker, good) if transfer in self._left:
                copy = self._left[transfer]
                how = "" if copy.direction is Direction.STORE else " as good" if good else " as bad"
                says = f"is reported by worker {worker}{how}"
                self.steps.append(CopyStep(event, copy.direction, copy.store, says))
            case TransferGivenUp(event, transfer) if transfer in self._left:
                copy = self._left[transfer]
                self.steps.append(CopyStep(event, copy.direction, copy.store, "is given up"))


def _may_tell(event: OffloadingEvent) -> bool:
    """Whether an event in the log of a host begins a process, or a copy from or to the disk."""
    if isinstance(event, ev.StorePlanned):
        return event.source == DISK
    if isinstance(event, ev.LoadPlanned):
        return event.target == DISK
    return isinstance(event, ev.LogOpened | ev.Restarted)


NOTES: dict[type[OffloadingEvent], Callable[[CopiesOfPart, Ledger, Any], None]] = {
    ev.LogOpened: CopiesOfPart.opened,
    ev.Restarted: CopiesOfPart.opened,
    ev.RequestArrived: CopiesOfPart.arrived,
    ev.StorePlanned: CopiesOfPart.store_planned,
    ev.LoadPlanned: CopiesOfPart.load_planned,
    ev.TransfersSubmitted: CopiesOfPart.submitted,
    ev.WorkerReported: CopiesOfPart.reported,
    ev.TransferLost: CopiesOfPart.lost,
}
"""What a kind of event says of copies between the tiers. Copies that end are found in the ledger."""


class LogDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of a copy that the logs of two tiers tell differently.

    host, disk: what each log tells at this place; null: nothing more.
    host_event, disk_event: the events that tell it.
    """

    host: str | None
    disk: str | None
    host_event: int | None
    disk_event: int | None

    def told(self) -> list[str]:
        """A line for each log."""
        texts = ((HOST, self.host), (DISK, self.disk))
        return [f"by the log of the {tier}, {text or 'no further step of a copy'}" for tier, text in texts]


class LogAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the logs of two tiers tell the same of each copy between them: conservation (S1) for both.

    steps: that both logs tell.
    difference: the first step that they tell differently; null: there is none.
    not_compared: what was not compared, and why, a line each.
    """

    steps: int = 0
    difference: LogDifference | None = None
    not_compared: tuple[str, ...] = ()


class VerifiedLog(NamedTuple):
    """A log that was verified, and what it says of copies between the tiers."""

    found: Verification
    copies: LoggedCopies

    @property
    def lacks_end(self) -> str | None:
        """Why it may lack its last events; None if it has all of them."""
        if self.found.violations:
            return f"is read up to event {self.found.last:,}, which breaks a property"
        if self.found.damage is not None:
            return f"is damaged behind event {self.found.last:,}"
        return _ENDS[self.found.condition.end]


_ENDS: dict[LogEnd, str | None] = {
    LogEnd.NOT_REACHED: "is not read to its end",
    LogEnd.OPEN: "was not closed",
    LogEnd.MISSING: "lacks its last segments",
    LogEnd.BROKEN: "lacks its last events",
    LogEnd.CLOSED: None,
    LogEnd.STOPPED: "was closed after an error",
}


def compare_logs(host: VerifiedLog, disk: VerifiedLog, one_process: bool) -> LogAgreement:
    """Compare what the logs of two tiers tell of the copies between them.

    one_process: their names say that one process has written both.
    """
    above, below = host.copies, disk.copies
    if not _have_one_writer(above, below, one_process):
        why = "the process that wrote the end of the host's log may not have written the log of the disk"
        return LogAgreement(not_compared=(f"all copies: {why}",))
    left_out = list(_left_out(host, disk))
    first = _first_in_both(above, below)
    steps = 0
    for one, other in zip_longest(_from(above, first), _from(below, first)):
        if one is None or other is None:
            shorter, tier = (host, HOST) if one is None else (disk, DISK)
            if shorter.lacks_end is not None:
                step = one or other
                left_out.append(f"{step} and what follows: the log of the {tier} {shorter.lacks_end}")
                break
        if one is None or other is None or not one.agrees(other):
            return LogAgreement(steps=steps, difference=_difference(one, other), not_compared=tuple(left_out))
        steps += 1
    return LogAgreement(steps=steps, not_compared=tuple(left_out))


def _have_one_writer(host: LoggedCopies, disk: LoggedCopies, one_process: bool) -> bool:
    """Whether the last life of the host's log and the disk's log are of one process, as far as they tell."""
    if host.lacks_beginning:
        return one_process
    return disk.began_ns >= host.began_ns  # The core of a disk is made after the core above it.


def _left_out(host: VerifiedLog, disk: VerifiedLog) -> Iterator[str]:
    for tier, log in ((HOST, host), (DISK, disk)):
        if log.copies.lacks_beginning:
            began = log.copies.began
            yield f"copies that were planned before event {began:,} of the {tier}'s log: it lacks events"
    if host.found.restarts and not host.copies.lacks_beginning:
        began = host.copies.began
        yield f"copies before event {began:,} of the host's log, where another process goes on"


def _first_in_both(*logs: LoggedCopies) -> dict[Direction, float]:
    """For each direction the first copy whose plan no log lacks."""
    late = [one.first for one in logs if one.lacks_beginning]
    return {way: max([first.get(way, inf) for first in late], default=0) for way in Direction}


def _from(copies: LoggedCopies, first: dict[Direction, float]) -> Iterator[CopyStep]:
    return (step for step in copies.steps if step.store >= first[step.direction])


def _difference(host: CopyStep | None, disk: CopyStep | None) -> LogDifference:
    more = ""
    if host is not None and disk is not None and host[1:-1] == disk[1:-1]:
        more = ", with other host slots or keys"
    return LogDifference(
        host=None if host is None else f"{host}{more}",
        disk=None if disk is None else f"{disk}{more}",
        host_event=None if host is None else host.event,
        disk_event=None if disk is None else disk.event,
    )
