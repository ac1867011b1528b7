"""Fork a log: from one of its events on, run the real core again with other choices.

A log shows which calls its engine made: a match, a store, a report. `_CALLS` has the call that leads to each
kind of event. After the event `at` these calls are made again, in the same order, on a core that resumes from
the state there. Without another choice the core makes the same decisions, event for event. With another
choice its decisions differ, and so do the events that follow.

The engine is not simulated: its calls are repeated. So a fork shows what the core would have done with the
same calls, not what the engine would have done next. Two facts are not in a log. The keys after the first
missed key of a prompt are unknown, so a prefix grows by at most one block. The device blocks of a skipped
offer are unknown, so the fork does not offer them; `Forked.not_offered` counts such blocks.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
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
from kvsm.core.offloader.storing import recall
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, IllegalTransition, InvalidEvent, KvsmError, LogError
from kvsm.events import STORE, Offer, OffloadingEvent, RejectReason, SkipReason
from kvsm.ids import to_list
from kvsm.states.request import FINISHED, MATCHED
from kvsm.states.transfer import PLANNED


class OtherChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The changes in a fork, from the event at which the log is forked.

    policy: another eviction policy, used from the log's first event on; None: the log's.
    abort: requests that are aborted at once.
    reset: whether the cache is reset at once.
    fail: transfers whose later reports are all bad.
    lose: transfers whose workers never report. They are lost at once, or when they are submitted.
    late: transfer -> how many events later its reports come.
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
    """The result of a fork.

    at: the event at which the log was forked: the last one that was copied unchanged.
    parted: the first event of the fork that differs from the log; None: the fork repeats the log.
    last: the number of the fork's last event.
    not_offered: blocks that the log's core skipped, and that the fork could not offer.
    pointless: calls that the fork could not make, for example because it lacks their transfer.
    stopped: why the fork ends before the log: an event of the log that cannot follow; None: it does not.
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
    """Fork a log: write a new log that begins like it and continues with other choices.

    at: the last event that is copied unchanged.
    directory: the new log's directory; must be empty or absent. It is deleted after an error.
    until: the last event of the log whose call is repeated; None: the log's last event.
    allow_policies, max_slots: as in `Trust`.

    Raises `LogError` if the log has no such event or lacks events, and `ConfigError` for an impossible
    choice.
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
            checked=True,
        )
        try:
            future = _Future(ledger, writer, choices, at)
            _live_on(future, reader, at, until, trust)
            writer.close()
        except BaseException:
            with suppress(KvsmError):  # The new log is deleted anyway.
                writer.close()
            shutil.rmtree(Path(directory))
            raise
    return Forked(at, future.parted, ledger.seq, future.not_offered, future.pointless, future.stopped)


def _live_on(future: _Future, reader: LogReader, at: int, until: int | None, trust: Trust) -> None:
    """Copy the events up to `at`, then repeat the calls that led to the later ones, up to `until`."""
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
    """The core of a fork, and how its events relate to the log's."""

    def __init__(self, ledger: Ledger, writer: LogWriter, choices: OtherChoices, at: int) -> None:
        self.writer, self.choices, self.forked_at = writer, choices, at
        self.now = 0
        self.recorded = ledger.seq
        """The last event of the log that was read."""
        self.parted: int | None = None
        self.not_offered = self.pointless = 0
        self.stopped: str | None = None
        self._transfers: dict[int, int] = {}
        """transfer of the log, planned after `at` -> the same transfer in the fork."""
        self._unknown = {*choices.fail, *choices.lose, *choices.late}
        """Transfers that a choice names, and that the log has not had so far."""
        self.touching: dict[bytes, bytes | None] = {}
        """The keys touched last -> the parent's key for the first key of a run, else None. If a store follows
        at once, its offer may have found them resident."""
        self.sparing: set[bytes] = set()
        """Keys that the current offer found resident before it skipped blocks, or before the policy recalled
        keys: its eviction spares them."""
        self._late: deque[tuple[int, ev.WorkerReported]] = deque()
        """Delayed reports, each with the log's event after which it comes."""
        self._log_events: deque[OffloadingEvent] = deque()
        self._own_events: deque[OffloadingEvent] = deque()
        """Events of the log and of the fork after `at` that were not compared yet."""
        self.core = Offloader.resumed(ledger, self, clock_ns=self._clock_ns)

    # The core uses this object as its log.

    def append(self, event: OffloadingEvent) -> None:
        """Write an event of the core, and keep it for the comparison with the log."""
        self.writer.append(event)
        self._own_events.append(event)

    def flush(self) -> None:
        """Do nothing: no copy waits for the log to be on disk."""

    def _clock_ns(self) -> int:
        """The wall time of the log's event in this place; if it has none, the time of the repeated call."""
        ahead = len(self._own_events)
        return self._log_events[ahead].wall_ns if ahead < len(self._log_events) else self.now

    # Following the log.

    def repeat(self, event: OffloadingEvent) -> None:
        """Copy an event up to `at`. The first event of a log gets the other policy, if there is one."""
        ledger = self.core.ledger
        if isinstance(event, ev.LogOpened):
            event = msgspec.structs.replace(event, config=ledger.config)
        ledger.apply(event)
        self.writer.append(event)

    def begin(self, event: OffloadingEvent) -> None:
        """Make the other choices, right after this event. Raises `ConfigError` if one is impossible."""
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
        """Repeat the call that led to this event of the log."""
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
        """End the fork where the log ends: make the delayed reports now.

        Raises `ConfigError` if a choice names a transfer that the log does not have after `at`.
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

    # Used by the repeated calls.

    def transfer(self, recorded: int) -> int | None:
        """The fork's number of a transfer of the log; None if the fork did not plan it."""
        return recorded if recorded <= self.forked_at else self._transfers.get(recorded)

    def planned(self, recorded: int, job: TransferJob | None) -> None:
        """Note the fork's number of a transfer of the log. job: None: the fork did not plan it."""
        if job is not None:
            self._transfers[recorded] = job.transfer

    def restart(self, event: ev.Restarted) -> None:
        """Repeat a restart: another process resumes this core's state, with the fork's policy."""
        config = msgspec.structs.replace(event.config, policy=self.choices.policy or event.config.policy)
        self.core = Offloader.restarted(
            self.core.ledger, config, self, ended=event.ended, clock_ns=self._clock_ns
        )

    def is_alive(self, request: str) -> bool:
        """Whether calls for this request are repeated: not if the fork aborted it."""
        return request not in self.choices.abort

    def report(self, event: ev.WorkerReported) -> None:
        """Repeat a worker's report, unless a choice delays or drops it."""
        if event.transfer in self.choices.lose:
            return
        events = self.choices.late.get(event.transfer, 0)
        if events:
            self._late.append((event.seq + events, event))
            self._late = deque(sorted(self._late, key=itemgetter(0)))
        else:
            self._hand_on(event)

    def recall(self, keys: Sequence[bytes]) -> None:
        """Let the policy recall these keys: for the next offer, or before its caller looks for victims."""
        self.sparing |= self.touching.keys()
        self._touch()
        recall(self.core, keys)

    def _touch(self) -> None:
        """Make the delayed touch: of a call, or of an offer that had no room for all of its blocks, or whose
        keys the policy recalls."""
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


# The call that led to an event: one function for each kind.


def _nothing(_future: _Future, _recorded: Ledger, _event: OffloadingEvent) -> None:
    """Make no call: the call for another event makes this event too."""


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
        own = [future.transfer(transfer) for transfer in event.transfers]
        live = [id for id in own if id is not None and id in future.core.ledger.transfers]
        if live:
            call(future.core, live)

    return make


def _matched(future: _Future, recorded: Ledger, event: ev.HitMatched) -> None:
    """Pin the keys that the fork can serve, of those that the log served and the first that it missed."""
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
    asked = event.asked
    if event.on_device is None and missed is None:
        asked = on_host  # The log does not name the keys after the one that was missed.
    future.core.pin(event.request, slots, missed, asked, event.on_device, on_host)


def _on_host(logged: int | None, served: int, serves: int, blocks_per_chunk: int) -> int | None:
    """Return how many blocks the fork's host serves; None if that does not follow from the number of slots.

    logged: blocks that the log's host served; None: not in the log.
    served, serves: slots with which the log's host and the fork's host serve them.
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
    is_unused = on_host == 0 and bool(pins)  # The engine uses no block of the match, and releases it next.
    if serves != len(pins) and not is_unused:
        on_host = _on_host(event.on_host, len(pins), serves, future.core.config.blocks_per_chunk)
        missed = recorded.key_of[pins[serves]] if serves < len(pins) else None
    future.core.admit(event.request, event.asked, event.on_device, on_host, missed, event.resumed)


def _deferred(future: _Future, _recorded: Ledger, event: ev.RequestDeferred) -> None:
    transfer = future.transfer(event.transfer)
    if transfer in future.core.ledger.transfers and future.is_alive(event.request):
        future.core.defer(event.request, transfer)


def _load_planned(future: _Future, _recorded: Ledger, event: ev.LoadPlanned) -> None:
    """Load the blocks that the fork has pinned, at most as many as the log loaded."""
    core = future.core
    entry = core.ledger.requests.get(event.request)
    if entry is None or entry.state is not MATCHED or not future.is_alive(event.request):
        future.pointless += 1
        return
    chunk, broken = core.config.blocks_per_chunk, len(core.ledger.live_pins(entry)) < len(entry.pins)
    if event.voided and not broken:
        core.release(event.request)  # The device blocks of the load that was voided are not in the log.
        return
    blocks, parts = to_list(event.device_blocks) or [*range(chunk)], to_list(event.parts)
    if parts:
        parts = [part for part in parts if part < len(entry.pins) * chunk]
        blocks = blocks[: len(parts)]
    blocks = blocks[: len(entry.pins) * chunk]
    future.planned(event.seq, core.prepare_load(event.request, blocks, parts, event.target))


def _store_planned(future: _Future, recorded: Ledger, event: ev.StorePlanned) -> None:
    """Offer the stored blocks, after those that the offer found resident, which are not evicted for it."""
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
    wanted = _orphans(parents, len(keys))
    future.planned(event.seq, core.store(owners, keys, blocks, (), spared, parents, wanted).job)


def _skipped(future: _Future, _recorded: Ledger, event: ev.StoreSkipped) -> None:
    if event.reason not in _SKIPPED_BY_ENGINE:
        future.not_offered += len(event.keys)
    future.core.skip(event.owners, event.keys, event.reason)


_SKIPPED_BY_ENGINE = (SkipReason.BELOW_THRESHOLD, SkipReason.DRAINING)
"""The reasons for which the caller of a core skips blocks. For all other reasons the core itself does."""


def _submitted(future: _Future, recorded: Ledger, event: ev.TransfersSubmitted) -> None:
    _about_transfers(_submit_planned)(future, recorded, event)
    for transfer in event.transfers:
        own = future.transfer(transfer)
        if transfer in future.choices.lose and own is not None:
            future.core.lose(own)


def _submit_planned(core: Offloader, transfers: list[int]) -> None:
    core.submit([id for id in transfers if core.ledger.transfers[id].state is PLANNED])


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
    """Delay the touch until the next event, which shows whether an offer touched the blocks."""
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
    """Map the position of each run's first key in an offer of `keys` to the run's parent key."""
    return {place: parent for place, parent in enumerate(keys.values()) if parent is not None}


def _orphans(parents: Mapping[int, bytes], count: int) -> list[int]:
    """Return the places, of `count`, of runs whose parent the host does not have. The log's policy admitted
    them because the same offer had the parent, too, whose store had to wait."""
    ends = [*sorted(parents)[1:], count]
    runs = [range(begin, end) for begin, end in zip(sorted(parents), ends) if parents[begin] == _GONE]
    return [*chain.from_iterable(runs)]


_GONE = b"a block that the host does not have"


def _may_have_touched(moment: Moment, keys: Iterable[bytes]) -> bool:
    """Whether this event may come from the offer that touched these keys, which it never evicts."""
    ledger, event = moment.ledger, moment.event
    if isinstance(event, ev.BlocksEvicted):
        return not {ledger.key_of[slot] for slot in to_list(event.slots)} & set(keys)
    return isinstance(event, ev.KeysRecalled | ev.StorePlanned)


def _offered(future: _Future, _recorded: Ledger, event: ev.BlocksOffered) -> None:
    """Advance the cursors. With other choices none goes back, because other stores fail than in the log."""
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


def _slow_hit_found(future: _Future, _recorded: Ledger, event: ev.SlowHitFound) -> None:
    if future.is_alive(event.request):
        future.core.declines(event.request, event.blocks, event.tokens)


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
    ev.KeysRecalled: lambda future, _, event: future.recall(event.keys),
    ev.BlocksEvicted: _nothing,
    ev.HintAnswered: _nothing,
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
    ev.TimesMeasured: lambda future, _, event: future.core.note_times(
        event.start_us, event.block_ns, event.token_ns
    ),
    ev.SlowHitFound: _slow_hit_found,
    ev.Restarted: _restarted,
    ev.BlocksRewritten: lambda future, _, event: future.core.rewrite(to_list(event.device_blocks)),
}
"""The call that leads to each kind of event. A log with an event of another kind is refused."""
