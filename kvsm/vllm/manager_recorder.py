"""The recorder: what a manager of vLLM was asked and answered, as kvsm's events, checked as they come.

Each call below is told of after the fact. What it means becomes the events that kvsm's own core would have
written; what the ledger says to them, and what is wrong with an answer itself, becomes a finding with the id
of the property that it breaks. `recording` says which properties these calls show.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from kvsm import events as ev
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, SkipReason
from kvsm.ids import Ids, listed, pack
from kvsm.invariants import Violation
from kvsm.kv_events import Publisher
from kvsm.ledger import TransferRecord
from kvsm.log import LogWriter
from kvsm.offloader import LogFlush, LookupResult, Offloader
from kvsm.properties import Property
from kvsm.replay.witness import Witness
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.vllm.placeholder_blocks import PlaceholderBlocks

log = init_logger("vllm.kvsm")

LOADED_AT_ONCE = 1 << 16
"""How many blocks the loads in flight may have together; the log has a number for each."""

STORES_PER_SLOT = 2
"""One in flight, and one of before a reset whose end nobody tells."""

KEPT = 100
"""Findings that are kept, and told in vLLM's log and beside the event log; all are counted."""

FINDINGS = "findings.txt"
"""Where they are told, a line each, in the directory of the event log; absent if there are none."""


class StoreAnswer(NamedTuple):
    """keys: what is stored, each in the slot of its place. evicted: the keys that made room."""

    keys: list[bytes]
    slots: list[int]
    evicted: list[bytes]


class ManagerRecorder(Offloader):
    """An offloader whose decisions are somebody else's: it is told of them, and writes and checks them.

    findings: the first broken properties. found: how many of each. stopped: why nothing is recorded any more.
    announces: whether the manager publishes KV events, so that these are checked too.
    """

    def __init__(
        self,
        config: OffloadConfig,
        event_log: LogWriter | None = None,
        *,
        announces: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.findings: list[Violation] = []
        self.found: Counter[Property] = Counter()
        self.stopped: str | None = None
        self._told: set[tuple[Property, str]] = set()
        self._reset_at = 0
        """Number of the last reset's event."""
        self._missed: dict[str, bytes] = {}
        """request -> the first key of its that a lookup missed in this step."""
        self._failed: set[bytes] = set()
        """Keys whose last store failed."""
        self._skipped: dict[str, tuple[bytes, ...]] = {}
        """request -> what was last not stored of it: said again, it is no event."""
        self._loads: dict[int, frozenset[bytes]] = {}
        stores = range(STORES_PER_SLOT * config.host_blocks)
        loads = range(len(stores), config.device_blocks)
        self._placeholders = {
            Direction.STORE: PlaceholderBlocks(stores),
            Direction.LOAD: PlaceholderBlocks(loads),
        }
        """Stores and loads have separate numbers. A number that a load wrote before a reset would count as a
        device block with stale content, which must not be stored."""
        self._writer = event_log
        super().__init__(config, event_log, publisher=Publisher() if announces else None, clock_ns=clock_ns)

    # What the manager was asked, and answered.

    def looked_up(self, request: str, key: bytes, answer: str) -> None:
        """answer: the name of one of vLLM's `LookupResult`s."""
        expected = self.lookup(key)
        if answer == "MISS":
            self._missed.setdefault(request, key)
        if answer == expected.name or answer == "RETRY":
            return
        told = f"a lookup of request {request} answers {answer} for key {key.hex()}"
        if answer != "HIT":
            self._find(Property.EVENTS_ARE_STATE, f"{told}, and what was recorded adds up to {expected.name}")
        elif expected is LookupResult.HIT_PENDING:
            self._find(Property.PUBLISH_AFTER_COMMIT, f"{told}, and its store is in flight")
        elif self._is_of_before_the_reset(key):
            self._find(Property.NO_STALE_DATA, f"{told}, which was stored before the last reset")
        elif key in self._failed:
            self._find(Property.FAILURE_IS_NOT_SUCCESS, f"{told}, and its store failed")
        else:
            self._find(
                Property.PUBLISH_AFTER_COMMIT, f"{told}, and no store brought it, or it was evicted since"
            )

    def load_prepared(self, request: str, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """The manager gave these slots to be read for these keys."""
        if not keys:
            return
        for key, slot in zip(keys, slots):
            stored = self.ledger.index.get(key)
            if stored is not None and stored != slot:
                told = f"request {request} loads key {key.hex()} from slot {slot}"
                self._find(Property.CORRECT_BYTES, f"{told}; it was stored in slot {stored}")
        packed = pack(slots)
        self.emit(ev.HitMatched, request, packed, self._missed.pop(request, None))
        self.emit(ev.LoadPlanned, request, packed, self._numbers(Direction.LOAD, len(slots)))
        transfer = self.ledger.seq
        self._loads[transfer] = frozenset(keys)
        self.submit([transfer])

    def load_completed(self, request: str, keys: Collection[bytes]) -> None:
        entry = self.ledger.requests.get(request)
        transfer = self._in_flight(entry.load) if entry is not None else None
        if transfer is None or self._loads[transfer.id] != frozenset(keys):
            self._completes_nothing("load", request, keys, True)
        else:
            self._end_copy(transfer, True)

    def store_prepared(self, request: str, keys: Sequence[bytes], plan: StoreAnswer | None) -> None:
        """Offered these keys, the manager planned this; None: it had no room."""
        stored, slots, evicted = plan or StoreAnswer([], [], [])
        chosen, held = set(stored), self.ledger.index
        left = tuple([key for key in keys if key not in chosen and key not in held])
        if left != self._skipped.get(request, ()):
            self._skipped[request] = left
            if left:
                reason = SkipReason.POOL_FULL if plan is None else SkipReason.BELOW_THRESHOLD
                self.skip(((request, len(left)),), left, reason)
        self._evict(evicted)
        if stored:
            numbers = self._numbers(Direction.STORE, len(slots))
            self.emit(ev.StorePlanned, ((request, len(stored)),), tuple(stored), pack(slots), numbers)
            self._failed.difference_update(stored)
            self.submit([self.ledger.seq])

    def store_completed(self, request: str, keys: Collection[bytes], good: bool) -> None:
        slot = next((self.ledger.index[key] for key in keys if key in self.ledger.index), None)
        transfer = self._in_flight(self.ledger.generation[slot]) if slot is not None else None
        if transfer is None or set(transfer.keys) != set(keys):
            self._completes_nothing("store", request, keys, good)
        else:
            self._end_copy(transfer, good)
            if not good:
                self._failed.update(keys)

    def request_finished(self, request: str) -> None:
        self._missed.pop(request, None)
        self._skipped.pop(request, None)
        self.finish(request)

    def cache_reset(self) -> None:
        self.flush()
        self.reset()
        if self.publisher is not None:
            # vLLM announces a reset in one event for the whole cache, and not through the manager.
            self.publisher.take_events()
        self._reset_at = self.ledger.seq
        self._skipped.clear()

    def schedule_ended(self, preempted: Iterable[str]) -> None:
        """A step, as a log of this kind counts them, is from here to the next time."""
        for request in sorted(preempted):
            self.preempt(request)
        for transfer in list(self.ledger.transfers.values()):
            if transfer.state is TransferState.ABANDONED:
                self._end_copy(transfer, True)
        for request, key in self._missed.items():
            entry = self.ledger.requests.get(request)
            if entry is not None and entry.state in _WITHOUT_ANSWER:
                self.emit(ev.HitMatched, request, (), key)
        self._missed.clear()
        self.end_step()

    def announced(self, events: Sequence[tuple[Collection[bytes], bool]]) -> None:
        """The manager published these: (keys, whether they were removed)."""
        if self.publisher is None:
            return
        said: dict[bytes, bool] = {}
        for keys, removed in events:
            said.update(dict.fromkeys(keys, not removed))
        happened: dict[bytes, bool] = {}
        for event in self.publisher.take_events():
            happened.update(dict.fromkeys(event.keys, not event.removed))
        for key in sorted(said.keys() | happened.keys()):
            if said.get(key) is not happened.get(key):
                told = {True: "stored", False: "removed", None: "nothing"}
                self._find(
                    Property.EVENTS_ARE_STATE,
                    f"KV events say of key {key.hex()}: {told[said.get(key)]}; what happened to it: "
                    f"{told[happened.get(key)]}",
                )

    def counted(self, gauges: Mapping[str, float]) -> None:
        """The manager's gauges, as fractions of its slots."""
        copies = [one for one in self.ledger.transfers.values() if one.state is TransferState.SUBMITTED]
        stores = sum(len(one.slots) for one in copies if one.direction is Direction.STORE)
        read = [one.slots for one in copies if one.direction is Direction.LOAD]
        held = stores + len(set().union(*map(listed, read)))
        for gauge, slots in (
            (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, stores),
            (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, held),
        ):
            used = gauges.get(gauge)
            if used is not None and round(used * self.config.host_blocks) != slots:
                self._find(
                    Property.ONE_RELEASE_PER_HOLD,
                    f"{gauge} says that {round(used * self.config.host_blocks)} slots are in use; copies in "
                    f"flight hold {slots}",
                )

    def stop(self, reason: str) -> None:
        """Close the log; nothing is recorded any more."""
        self.stopped = reason
        if self._writer is not None:
            with suppress(KvsmError, OSError):
                self._writer.close()

    # What that comes to.

    def emit(self, kind: type[OffloadingEvent], *fields: object) -> TransferRecord | None:
        try:
            return super().emit(kind, *fields)
        except (IllegalTransition, InvalidEvent) as refusal:
            event = kind(self.ledger.seq + 1, self.step, self._clock_ns(), *fields)
            self._end_with(event, refusal)
            raise

    def _end_with(self, event: OffloadingEvent, refusal: KvsmError) -> None:
        """What happened is illegal: say so, let it be the log's last event, and stop."""
        broken = Witness.of(self.ledger).follow(event)
        for one in broken or [Violation(Property.EVENTS_ARE_STATE, str(refusal))]:
            self._find(one.property, one.message)
        if self._writer is not None:
            self._writer.append(event)
        self.stop(f"event {event.seq} is illegal")
        log.error("kvsm: recording ends with event %d: what happened is illegal (%s)", event.seq, refusal)

    def _find(self, property: Property, message: str) -> None:
        if (property, message) in self._told:
            return
        self.found[property] += 1
        if len(self.findings) < KEPT:
            # Asked again and again, a manager that is wrong is wrong again; it is told once.
            self._told.add((property, message))
            self.findings.append(Violation(property, message))
            told = f"{property}, after event {self.ledger.seq}: {message}"
            log.error("kvsm: vLLM's offload breaks %s", told)
            self._write_down(told)

    def _write_down(self, told: str) -> None:
        """Beside the log: not all that is broken is an event."""
        if self._writer is not None:
            try:
                with open(self._writer.directory / FINDINGS, "a") as file:
                    file.write(told + "\n")
            except OSError as error:
                log.warning("kvsm: %s cannot be written: %s", FINDINGS, error)

    def _evict(self, keys: Sequence[bytes]) -> None:
        known = [key for key in keys if key in self.ledger.index]
        for key in keys:
            if key not in self.ledger.index:
                self._find(Property.EVENTS_ARE_STATE, f"key {key.hex()} is evicted, and was in no slot")
        if known:
            # The store that room is made for is the event after this one.
            slots = pack([self.ledger.index[key] for key in known])
            self.emit(ev.BlocksEvicted, slots, (), self.ledger.seq + 2)

    def _in_flight(self, transfer: int) -> TransferRecord | None:
        """This transfer, if its end is still to be told; None for one that a reset has made void."""
        found = self.ledger.transfers.get(transfer)
        return found if found is not None and found.state is TransferState.SUBMITTED else None

    def _completes_nothing(self, what: str, request: str, keys: Collection[bytes], good: bool) -> None:
        if keys:
            self._find(
                Property.STALE_REPORTS,
                f"complete_{what} of request {request} names {len(keys)} keys, which no {what} in flight has "
                f"as its own; the first is {min(keys).hex()}",
            )
            self.report(0, 0, good)
            # vLLM may end with an error now.
            self.flush_log(LogFlush.ENGINE_FAILS)

    def _end_copy(self, transfer: TransferRecord, good: bool) -> None:
        self.report(transfer.id, 0, good)
        self._loads.pop(transfer.id, None)
        self._placeholders[transfer.direction].give_back(listed(transfer.device_blocks))
        self.flush_log(LogFlush.REPORTS_TAKEN)

    def _numbers(self, direction: Direction, count: int) -> Ids:
        taken = self._placeholders[direction].take(count)
        if taken is None:
            raise KvsmError(f"{direction.name.lower()}s in flight have more blocks than the log has numbers")
        return pack(taken)

    def _is_of_before_the_reset(self, key: bytes) -> bool:
        ledger = self.ledger
        return any(
            0 < ledger.generation[slot] <= self._reset_at
            for slot, held in enumerate(ledger.key_of)
            if held == key
        )


_WITHOUT_ANSWER = (RequestState.NEW, RequestState.PREEMPTED)
