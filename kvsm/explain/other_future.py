"""Another future: from an event of a log the real core goes on, with other choices.

A log holds what its engine called: a match, a store, a report. `_CALLS` says of each kind of event which call
led to it. After the event `at` these calls are made again, in their order, on a core that goes on from the
state there. Without another choice the core decides the same, event for event. With one its decisions
differ, and so does what follows.

The engine is not simulated: it calls what it called. So a fork shows what the core would have done with the
same calls, not what the engine would have done next. Two things are not in a log. The keys behind the first
missed key of a prompt are not known, so a prefix grows by one block at most. The device blocks of a skipped
offer are not known, so the fork does not offer it; `Forked.not_offered` counts such blocks.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.frozen import freeze
from kvsm.core.ledger.snapshot import restore_foreign
from kvsm.core.log import LogReader, LogWriter
from kvsm.core.log.fold import Moment, walk
from kvsm.core.log.trust import Trust
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, IllegalTransition, InvalidEvent, KvsmError, LogError
from kvsm.events import STORE, Offer, OffloadingEvent, RejectReason, SkipReason
from kvsm.ids import to_list
from kvsm.states.request import FINISHED, MATCHED
from kvsm.states.transfer import PLANNED


class OtherChoices(msgspec.Struct, frozen=True, kw_only=True):
    """What happens otherwise, after the event at which a log is forked.

    policy: another eviction policy, which has seen the log from its first event on.
    abort: requests that are aborted at once.
    reset: whether the cache is reset at once.
    fail: transfers whose reports are bad from then on.
    lose: transfers whose workers never report; they are lost at once, if they have left.
    late: transfers whose reports come that many events later.
    """

    policy: str | None = None
    abort: tuple[str, ...] = ()
    reset: bool = False
    fail: tuple[int, ...] = ()
    lose: tuple[int, ...] = ()
    late: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self != OtherChoices()


class Forked(msgspec.Struct, frozen=True):
    """What became of a fork.

    at: the last event that both logs have for sure.
    parted: the first event of the fork that is another one; None: the fork repeats the log.
    last: the number of the fork's last event.
    not_offered: blocks that the log's core skipped, and that the fork could not offer.
    pointless: calls that make no sense in the fork: what they are about is not there.
    stopped: why the fork ends before the log: an event of the log that cannot follow. None: it does not.
    """

    at: int
    parted: int | None
    last: int
    not_offered: int
    pointless: int
    stopped: str | None = None


def fork(
    log: str | os.PathLike[str],
    at: int,
    choices: OtherChoices,
    directory: str | os.PathLike[str],
    *,
    until: int | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Forked:
    """Write another future of a log to a new log, which begins like the old one.

    at: the last event that is kept as it is.
    directory: of the new log; must be empty or absent. After an error nothing of it is left.
    until: the last event of the log whose call is made; None: to its end.
    allow_policies, max_slots: as in `Trust`.

    Raises `LogError` if the log has no such event or lacks events, and `ConfigError` for a choice that cannot
    be made.
    """
    reader, trust = LogReader(log), Trust(allow_policies, max_slots)
    head = reader.head
    if at <= head.seq:
        raise LogError(f"{log}: event {at} is not kept; the oldest one is {head.seq + 1}")
    config = msgspec.structs.replace(head.config, policy=choices.policy or head.config.policy)
    if head.seq and config != head.config:
        message = "its oldest events were deleted, and another policy would have to see them"
        raise ConfigError(f"{log}: {message}; without --policy it can be forked")
    trust.check(config, reader.directory)
    with trust.guarded(log):
        ledger = restore_foreign(head.snapshot, config) if head.seq else Ledger(config)
        writer = LogWriter(
            directory,
            config=config,
            snapshot=lambda: freeze(ledger),
            durability="none",
            first=head.seq + 1,
        )
        try:
            future = _Future(ledger, writer, choices, at)
            _live_on(future, reader, at, until, trust)
            writer.close()
        except BaseException:
            with suppress(KvsmError):  # What is given up need not be complete.
                writer.close()
            shutil.rmtree(Path(directory))
            raise
    return Forked(at, future.parted, ledger.seq, future.not_offered, future.pointless, future.stopped)


def _live_on(future: _Future, reader: LogReader, at: int, until: int | None, trust: Trust) -> None:
    """Repeat the events up to `at`, then make the calls that led to the others, up to `until`."""
    for moment in walk(reader, trust):
        event = moment.event
        if event.seq != future.recorded + 1:
            missing = f"events {future.recorded + 1} to {event.seq - 1} are not in the log"
            raise LogError(f"{reader.directory}: {missing}; only a log without gaps can be forked")
        future.recorded = event.seq
        if event.seq <= at:
            future.repeat(event)
        else:
            future.call(moment)
        try:
            moment.ledger.apply(event)
        except (IllegalTransition, InvalidEvent) as error:
            if event.seq <= at:
                raise
            future.stopped = str(error)
            break
        if event.seq == at:
            future.begin(event)
        if event.seq == until:
            break
    if future.recorded < at:
        raise LogError(f"{reader.directory}: there is no event {at}; the last one is {future.recorded}")
    future.finish()


class _Future:
    """The core that goes on, and what is known of its way."""

    def __init__(self, ledger: Ledger, writer: LogWriter, choices: OtherChoices, at: int) -> None:
        self.writer, self.choices, self.forked_at = writer, choices, at
        self.now = 0
        self.recorded = ledger.seq
        """The last event of the log that was looked at."""
        self.parted: int | None = None
        self.not_offered = self.pointless = 0
        self.stopped: str | None = None
        self._transfers: dict[int, int] = {}
        """The fork's transfer for a transfer of the log that was planned after the fork."""
        self._unknown = {*choices.fail, *choices.lose, *choices.late}
        """Transfers that a choice names and that were not met yet."""
        self.touching: dict[bytes, bytes | None] = {}
        """The keys touched last -> the parent's key for the first key of a run, else None. If a store follows
        at once, its offer may have found them resident."""
        self.sparing: set[bytes] = set()
        """What an offer found resident before it said what finds no room: its eviction spares these keys."""
        self._late: deque[tuple[int, ev.WorkerReported]] = deque()
        """Reports that come later, each with the event after which it comes."""
        self._log_events: deque[OffloadingEvent] = deque()
        self._own_events: deque[OffloadingEvent] = deque()
        """Events of both after the fork that were not compared yet."""
        self.core = Offloader.resumed(ledger, self, clock_ns=self._clock_ns)

    # What the core takes for its log.

    def append(self, event: OffloadingEvent) -> None:
        """Write an event of the core. The log may have it too."""
        self.writer.append(event)
        self._own_events.append(event)

    def flush(self) -> None:
        """Do nothing: a copy is in no hurry."""

    def _clock_ns(self) -> int:
        """The time of the event that the log has here; without one, the time of the call."""
        ahead = len(self._own_events)
        return self._log_events[ahead].wall_ns if ahead < len(self._log_events) else self.now

    # The way.

    def repeat(self, event: OffloadingEvent) -> None:
        """Take an event of the common past. The first one may have the other policy."""
        ledger = self.core.ledger
        if isinstance(event, ev.LogOpened):
            event = msgspec.structs.replace(event, config=ledger.config)
        ledger.apply(event)
        self.writer.append(event)

    def begin(self, event: OffloadingEvent) -> None:
        """Make the other choices, right after this event. Raises `ConfigError` if one cannot be made."""
        core, choices = self.core, self.choices
        self._unknown -= core.ledger.transfers.keys()
        self.now, core.step = event.wall_ns, event.step
        for request in choices.abort:
            entry = core.ledger.requests.get(request)
            if entry is None or entry.state is FINISHED:
                raise ConfigError(f"request {request} is not alive after event {event.seq}")
            core.finish(request, aborted=True)
        for transfer in choices.lose:
            core.lose(transfer)
        if choices.reset:
            core.reset()

    def call(self, moment: Moment) -> None:
        """Make the call that led to this event of the log."""
        event = moment.event
        self._unknown.discard(event.seq)
        self.now, self.core.step = event.wall_ns, event.step
        self._log_events.append(event)
        if not _may_have_touched(moment, self.touching.keys() | self.sparing):
            is_of_an_offer = isinstance(event, ev.StoreSkipped) and event.reason not in _SKIPPED_BY_ENGINE
            self.sparing = {*self.touching, *self.sparing} if is_of_an_offer else set()
            self._touch()
        call = _CALLS.get(type(event))
        if call is None:
            raise ConfigError(f"event {event.seq}: fork does not know which call leads to {event.kind}")
        try:
            call(self, moment.ledger, event)
        except KvsmError:
            self.pointless += 1
        while self._late and self._late[0][0] <= event.seq:
            self._hand_on(self._late.popleft()[1])
        self._compare()

    def finish(self) -> None:
        """The log has ended. What was to come later comes now.

        Raises `ConfigError` if a choice names a transfer that the log does not have after the fork.
        """
        if self._unknown:
            raise ConfigError(f"transfer {min(self._unknown)} is not alive after event {self.forked_at}")
        self._touch()
        while self._late:
            self._hand_on(self._late.popleft()[1])
        self._compare()
        if self.parted is None and (self._own_events or self._log_events):
            self.parted = (self._own_events or self._log_events)[0].seq

    def _compare(self) -> None:
        own, of_log = self._own_events, self._log_events
        while self.parted is None and own and of_log:
            event, recorded = own.popleft(), of_log.popleft()
            if event != recorded:
                self.parted = event.seq
        if self.parted is not None:
            own.clear()
            of_log.clear()

    # What the calls need.

    def transfer(self, recorded: int) -> int | None:
        """The fork's transfer for one of the log; None if the fork did not plan it."""
        return recorded if recorded <= self.forked_at else self._transfers.get(recorded)

    def planned(self, recorded: int, job: TransferJob | None) -> None:
        """Note the fork's transfer for one of the log."""
        if job is not None:
            self._transfers[recorded] = job.transfer

    def restart(self, event: ev.Restarted) -> None:
        """Another process goes on with what this core has stored, under the policy of the fork."""
        config = msgspec.structs.replace(event.config, policy=self.choices.policy or event.config.policy)
        self.core = Offloader.restarted(
            self.core.ledger, config, self, ended=event.ended, clock_ns=self._clock_ns
        )

    def is_alive(self, request: str) -> bool:
        """Whether the request can still be asked for. One that was aborted in the fork cannot."""
        return request not in self.choices.abort

    def report(self, event: ev.WorkerReported) -> None:
        """A worker reports, unless it comes later or never."""
        if event.transfer in self.choices.lose:
            return
        events = self.choices.late.get(event.transfer, 0)
        if events:
            self._late.append((event.seq + events, event))
            self._late = deque(sorted(self._late, key=itemgetter(0)))
        else:
            self._hand_on(event)

    def _touch(self) -> None:
        """Touch what a call of its own touched, or an offer that has no room for all of its blocks."""
        touched, self.touching = self.touching, {}
        if touched:
            self.core.touch(list(touched), _begins(touched))

    def _hand_on(self, event: ev.WorkerReported) -> None:
        transfer = self.transfer(event.transfer)
        if transfer is None:
            self.pointless += 1
        else:
            fails = event.good and event.transfer in self.choices.fail
            error = "it fails in this fork of the log" if fails else event.error
            times = event.queued_us, event.copied_us
            self.core.report(transfer, event.worker, event.good and not fails, error, *times)


# Which call led to an event. One entry a kind.


def _nothing(_future: _Future, _recorded: Ledger, _event: OffloadingEvent) -> None:
    """Another call makes this event."""


def _about_request(call: Callable[[Offloader, Any], object]) -> _Call:
    def make(future: _Future, _recorded: Ledger, event: Any) -> None:
        if future.is_alive(event.request):
            call(future.core, event)

    return make


def _about_transfer(call: Callable[[Offloader, int], object]) -> _Call:
    def make(future: _Future, _recorded: Ledger, event: Any) -> None:
        transfer = future.transfer(event.transfer)
        if transfer is None:
            future.pointless += 1
        else:
            call(future.core, transfer)

    return make


def _about_transfers(call: Callable[[Offloader, list[int]], object]) -> _Call:
    def make(future: _Future, _recorded: Ledger, event: Any) -> None:
        found = [future.transfer(one) for one in event.transfers]
        live = [one for one in found if one is not None and one in future.core.ledger.transfers]
        if live:
            call(future.core, live)

    return make


def _matched(future: _Future, recorded: Ledger, event: ev.HitMatched) -> None:
    """Pin what the fork can serve of the keys that the log served, and of the first one that it missed."""
    if not future.is_alive(event.request):
        return
    ledger, slots = future.core.ledger, list[int]()
    keys = [recorded.key_of[slot] for slot in to_list(event.slots)]
    missed = None
    for key in [*keys, *([] if event.missed is None else [event.missed])]:
        slot = ledger.index.get(key)
        if slot is None or not ledger.readable(slot):
            missed = key
            break
        slots.append(slot)
    on_host = _on_host(event.on_host, len(keys), len(slots), future.core.config.blocks_per_chunk)
    future.core.pin(event.request, slots, missed, event.asked, event.on_device, on_host)


def _on_host(logged: int | None, served: int, serves: int, blocks_per_chunk: int) -> int | None:
    """Return how many blocks the fork's host serves. None if that does not follow from the number of slots.

    logged: blocks that the log's host served, in `served` slots. serves: slots of the fork's host.
    """
    if serves == served:
        return logged
    return serves * blocks_per_chunk if logged == served * blocks_per_chunk else None


def _admitted(future: _Future, recorded: Ledger, event: ev.RequestAdmitted) -> None:
    """Admit the request in the fork, with the blocks of its match that the fork's host serves."""
    entry = future.core.ledger.requests.get(event.request)
    if entry is None or not future.is_alive(event.request):
        return
    pins, serves = to_list(recorded.requests[event.request].pins), len(to_list(entry.pins))
    on_host, missed = event.on_host, event.missed
    is_unused = on_host == 0 and bool(pins)  # The engine uses none of the match, and releases it next.
    if serves != len(pins) and not is_unused:
        on_host = _on_host(event.on_host, len(pins), serves, future.core.config.blocks_per_chunk)
        missed = recorded.key_of[pins[serves]] if serves < len(pins) else None
    future.core.admit(event.request, event.asked, event.on_device, on_host, missed, event.resumed)


def _deferred(future: _Future, _recorded: Ledger, event: ev.RequestDeferred) -> None:
    transfer = future.transfer(event.transfer)
    if transfer in future.core.ledger.transfers and future.is_alive(event.request):
        future.core.defer(event.request, transfer)


def _load_planned(future: _Future, _recorded: Ledger, event: ev.LoadPlanned) -> None:
    """Load what the fork has pinned, at most what the log loaded."""
    core = future.core
    entry = core.ledger.requests.get(event.request)
    if entry is None or entry.state is not MATCHED or not future.is_alive(event.request):
        future.pointless += 1
        return
    chunk, broken = core.config.blocks_per_chunk, len(core.ledger.live_pins(entry)) < len(entry.pins)
    if event.voided and not broken:
        core.release(event.request)  # The log does not tell which device blocks it would have loaded.
        return
    blocks, parts = to_list(event.device_blocks) or [*range(chunk)], to_list(event.parts)
    if parts:
        parts = [part for part in parts if part < len(entry.pins) * chunk]
        blocks = blocks[: len(parts)]
    blocks = blocks[: len(entry.pins) * chunk]
    future.planned(event.seq, core.prepare_load(event.request, blocks, parts, event.target))


def _store_planned(future: _Future, recorded: Ledger, event: ev.StorePlanned) -> None:
    """Offer what was stored, behind what the same offer found resident: that is touched and not evicted."""
    core, ledger = future.core, future.core.ledger
    touched, future.touching = future.touching, {}
    spared = [slot for slot in ledger.index.find(tuple(future.sparing)) if slot is not None]
    found = [key for key in touched if key in ledger.index and ledger.readable(ledger.index[key])]
    owners = ((event.owners[0][0], len(found)), *event.owners) if found and event.owners else event.owners
    planned = dict.fromkeys(event.keys) | {event.keys[0]: b""} | _parents(recorded, event, event.keys)
    parents = _begins({key: touched[key] for key in found} | planned)
    keys = (*found, *event.keys)
    if event.source:
        future.planned(event.seq, core.import_blocks(owners, keys, event.source, parents, spared).job)
        return
    # The device blocks of resident keys are unknown. Any will do, because these keys are not copied.
    unknown = [*range(core.config.blocks_per_chunk)] * len(found)
    blocks = [*unknown, *to_list(event.device_blocks)]
    future.planned(event.seq, core.store(owners, keys, blocks, (), spared, parents).job)


def _skipped(future: _Future, _recorded: Ledger, event: ev.StoreSkipped) -> None:
    if event.reason not in _SKIPPED_BY_ENGINE:
        future.not_offered += len(event.keys)
    future.core.skip(event.owners, event.keys, event.reason)


_SKIPPED_BY_ENGINE = (SkipReason.BELOW_THRESHOLD, SkipReason.DRAINING)
"""Reasons with which the caller of a core skips blocks. The others are the core's own."""


def _submitted(future: _Future, recorded: Ledger, event: ev.TransfersSubmitted) -> None:
    _about_transfers(_submit_planned)(future, recorded, event)
    for transfer in event.transfers:
        own = future.transfer(transfer)
        if transfer in future.choices.lose and own is not None:
            future.core.lose(own)


def _submit_planned(core: Offloader, transfers: list[int]) -> None:
    core.submit([one for one in transfers if core.ledger.transfers[one].state is PLANNED])


def _rejected(future: _Future, _recorded: Ledger, event: ev.ReportRejected) -> None:
    core, good = future.core, event.good
    own = future.transfer(event.transfer)
    transfer = event.transfer if own is None else own
    entry = core.ledger.transfers.get(transfer)
    if own is None and entry is not None:
        future.pointless += 1  # In the fork another transfer has this number.
        return
    if event.reason is RejectReason.DIRECTION and entry is not None:
        if entry.direction is STORE:
            (core.complete_load if good else core.fail_load)(transfer, event.worker)
        else:
            (core.complete_store if good else core.fail_store)(transfer, event.worker)
        return
    core.report(transfer, event.worker, good)


def _touched(future: _Future, recorded: Ledger, event: ev.BlocksTouched) -> None:
    """Wait for the next event: it tells whether an offer touched them."""
    keys = [recorded.key_of[slot] for slot in to_list(event.slots)]
    future.touching = dict.fromkeys(keys) | _parents(recorded, event, keys)


def _parents(
    recorded: Ledger, event: ev.StorePlanned | ev.BlocksTouched, keys: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Map the first key of each run among these keys of an event to its parent's key."""
    slots, found = to_list(event.slots), dict[bytes, bytes]()
    own = dict(zip(slots, keys))
    for place, slot in event.parents:
        parent = _GONE if slot is None else own.get(slot) or recorded.key_of[slot]
        found[keys[place]] = b"" if slot == slots[place] else parent
    return found


def _begins(keys: Mapping[bytes, bytes | None]) -> dict[int, bytes]:
    """Return the parent key of each run by the run's first place in an offer of `keys`."""
    return {place: parent for place, parent in enumerate(keys.values()) if parent is not None}


_GONE = b"a block that the host does not have"


def _may_have_touched(moment: Moment, keys: Iterable[bytes]) -> bool:
    """Whether this event comes from the offer that touched these keys. An offer never evicts such a key."""
    ledger, event = moment.ledger, moment.event
    if isinstance(event, ev.BlocksEvicted):
        return not {ledger.key_of[slot] for slot in to_list(event.slots)} & set(keys)
    return isinstance(event, ev.KeysRecalled | ev.StorePlanned)


def _offered(future: _Future, _recorded: Ledger, event: ev.BlocksOffered) -> None:
    """Move the cursors on. With other choices none goes back: other stores fail than in the log."""
    requests, offers = future.core.ledger.requests, list[Offer]()
    for name, settled, offered in event.offers:
        entry = requests.get(name)
        if entry is None or not future.is_alive(name):
            continue
        if future.choices and entry.offered:
            settled = tuple(map(max, settled, entry.settled))
            offered = tuple(map(max, offered, entry.offered))
        offers.append((name, settled, offered))
    if offers:
        future.core.advance(offers)


def _reset(future: _Future, _recorded: Ledger, _event: ev.CacheReset) -> None:
    future.core.reset()


def _restarted(future: _Future, _recorded: Ledger, event: ev.Restarted) -> None:
    future.restart(event)


_Call = Callable[[_Future, Ledger, Any], None]

_CALLS: dict[type[OffloadingEvent], _Call] = {
    ev.LogOpened: _nothing,
    ev.RequestArrived: _about_request(lambda core, event: core.arrive(event.request, event.target)),
    ev.RequestPreempted: _about_request(lambda core, event: core.preempt(event.request)),
    ev.RequestFinished: _about_request(
        lambda core, event: core.finish(event.request, aborted=event.aborted, hand_over=event.hand_over)
    ),
    ev.HitMatched: _matched,
    ev.RequestAdmitted: _admitted,
    ev.HitReleased: _about_request(lambda core, event: core.release(event.request)),
    ev.RequestDeferred: _deferred,
    ev.KeysRecalled: _nothing,
    ev.BlocksEvicted: _nothing,
    ev.StorePlanned: _store_planned,
    ev.StoreSkipped: _skipped,
    ev.LoadPlanned: _load_planned,
    ev.TransfersSubmitted: _submitted,
    ev.TransferCancelled: _about_transfer(lambda core, transfer: core.cancel(transfer)),
    ev.WorkerReported: lambda future, _, event: future.report(event),
    ev.ReportRejected: _rejected,
    ev.TransferLost: _about_transfer(lambda core, transfer: core.lose(transfer)),
    ev.BlocksTouched: _touched,
    ev.FlushRequested: _about_transfers(lambda core, transfers: core.flush(transfers)),
    ev.CacheReset: _reset,
    ev.StepEnded: lambda future, _, __: future.core.end_step(),
    ev.Ticked: lambda future, _, __: future.core.tick(),
    ev.BlocksOffered: _offered,
    ev.OffersCounted: lambda future, _, event: future.core.count_offers(event.keys),
    ev.Restarted: _restarted,
    ev.BlocksRewritten: lambda future, _, event: future.core.rewrite(to_list(event.device_blocks)),
}
"""The call that leads to an event of each kind. A log with another kind is refused."""
