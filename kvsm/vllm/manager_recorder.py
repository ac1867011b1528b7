"""`ManagerRecorder`: record the calls of a vLLM manager and its answers as kvsm's events, and check them.

It is called after each call of the manager, and emits the events that kvsm's own core would have written. A
wrong answer, or an event that the ledger refuses, becomes a finding with the property that it breaks.
docs/vllm-recording.md says which properties these calls show.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

from kvsm import events as ev
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import TransferRecord
from kvsm.core.ledger.invariants import Violation
from kvsm.core.log import LogWriter
from kvsm.core.offloader import LogFlush, LookupResult, Offloader
from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, SkipReason
from kvsm.explain.verify.witness import Witness
from kvsm.ids import Ids, listed, pack
from kvsm.properties import Property
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.vllm.placeholder_blocks import PlaceholderBlocks

log = init_logger("vllm.kvsm")

LOADED_AT_ONCE = 1 << 16
"""The most blocks in all loads in flight together: the log has this many placeholders for them."""

STORES_PER_SLOT = 2
"""A slot may have a store in flight, and one from before a reset, whose end the manager does not see."""

KEPT = 100
"""The most findings that are kept and written out. All are counted."""

FINDINGS = "findings.txt"
"""The file beside the event log that lists the findings, one a line. It is created by the first finding."""


class ManagerRecorder(Offloader):
    """An offloader that does not decide: it records a manager's decisions as events, and checks them.

    findings: the first broken properties.
    found: the number of times that each property was broken.
    stopped: why recording has ended; None while it records.
    """

    def __init__(
        self,
        config: OffloadConfig,
        event_log: LogWriter | None = None,
        *,
        announces: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Make a recorder. announces: whether the manager publishes KV events, which are then checked."""
        self.findings: list[Violation] = []
        self.found: Counter[Property] = Counter()
        self.stopped: str | None = None
        self._written: set[tuple[Property, str]] = set()
        self._reset_at = 0
        """The number of the last reset's event; 0 before the first reset."""
        self._missed: dict[str, bytes] = {}
        """Request -> the first key that its lookups missed in this step."""
        self._answers: dict[str, bytes | None] = {}
        """Request -> the first key that its last lookups missed, until a later call shows its admission."""
        self._admitted: set[str] = set()
        """Requests whose admission is recorded."""
        self._failed: set[bytes] = set()
        """Keys whose last store failed."""
        self._skipped: dict[str, tuple[bytes, ...]] = {}
        """Request -> the keys of its last offer that were not stored. Equal keys emit no second event."""
        self._loads: dict[int, frozenset[bytes]] = {}
        """Load in flight -> its keys."""
        stores = range(STORES_PER_SLOT * config.host_blocks)
        loads = range(len(stores), config.device_blocks)
        self._placeholders = {
            Direction.STORE: PlaceholderBlocks(stores),
            Direction.LOAD: PlaceholderBlocks(loads),
        }
        """Stores and loads have separate placeholders. After a reset, a placeholder that a load wrote counts
        as a device block with stale content, which must not be stored."""
        self._writer = event_log
        super().__init__(config, event_log, publisher=Publisher() if announces else None, clock_ns=clock_ns)

    # The calls of the manager.

    def looked_up(self, request: str, key: bytes, answer: str) -> None:
        """Record the manager's answer to a lookup. answer: the name of a member of vLLM's `LookupResult`."""
        expected = self.lookup(key)
        if answer == "MISS":
            self._missed.setdefault(request, key)
        if answer in (expected.name, "RETRY"):
            return
        broken, why = Property.PUBLISH_AFTER_COMMIT, "no store brought it, or it was evicted since"
        if answer != "HIT":
            broken, why = Property.EVENTS_ARE_STATE, f"the recorded calls add up to {expected.name}"
        elif expected is LookupResult.HIT_PENDING:
            why = "its store is in flight"
        elif self._is_from_before_reset(key):
            broken, why = Property.NO_STALE_DATA, "it was stored before the last reset"
        elif key in self._failed:
            broken, why = Property.FAILURE_IS_NOT_SUCCESS, "its store failed"
        self._find(broken, f"a lookup of request {request} answers {answer} for key {key.hex()}, but {why}")

    def load_prepared(self, request: str, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Record that the manager prepared a load of these keys from these slots for the request."""
        if not keys:
            return
        for key, slot in zip(keys, slots):
            stored = self.ledger.index.get(key)
            if stored is not None and stored != slot:
                self._find(
                    Property.CORRECT_BYTES,
                    f"request {request} loads key {key.hex()} from slot {slot}, but it is in slot {stored}",
                )
        packed = pack(slots)
        self._answers[request] = missed = self._missed.pop(request, None)
        self.emit(ev.HitMatched, request, packed, missed)
        self._note_admission(request)
        self.emit(ev.LoadPlanned, request, packed, self._placeholders_for(Direction.LOAD, len(slots)))
        transfer = self.ledger.seq
        self._loads[transfer] = frozenset(keys)
        self.submit([transfer])

    def _note_admission(self, request: str) -> None:
        """Record the request's admission, if it had lookups since the last admission."""
        if request in self._answers:
            missed, resumed = self._answers.pop(request), request in self._admitted
            self._admitted.add(request)
            self.admit(request, missed=missed, resumed=resumed)

    def load_completed(self, request: str, keys: Collection[bytes]) -> None:
        """Record that vLLM reported the end of the request's load of these keys."""
        entry = self.ledger.requests.get(request)
        transfer = self._in_flight(entry.load) if entry is not None else None
        if transfer is None or self._loads[transfer.id] != frozenset(keys):
            self._find_stale_completion("load", request, keys, True)
        else:
            self._end_copy(transfer, True)

    def store_prepared(
        self,
        request: str,
        keys: Sequence[bytes],
        stored: Sequence[bytes],
        slots: Sequence[int],
        evicted: Sequence[bytes],
        *,
        has_room: bool = True,
    ) -> None:
        """Record the manager's answer to the request's offer of these keys.

        stored, slots: the keys that the manager stores, and the slot of each.
        evicted: the keys that it evicted for them.
        has_room: whether the manager had room; if not, it stores none.
        """
        self._note_admission(request)
        chosen, held = set(stored), self.ledger.index
        skipped = tuple([key for key in keys if key not in chosen and key not in held])
        if skipped != self._skipped.get(request, ()):
            self._skipped[request] = skipped
            if skipped:
                reason = SkipReason.BELOW_THRESHOLD if has_room else SkipReason.POOL_FULL
                self.skip(((request, len(skipped)),), skipped, reason)
        self._evict(evicted)
        if stored:
            placeholders = self._placeholders_for(Direction.STORE, len(slots))
            self.emit(ev.StorePlanned, ((request, len(stored)),), tuple(stored), pack(slots), placeholders)
            self._failed.difference_update(stored)
            self.submit([self.ledger.seq])

    def store_completed(self, request: str, keys: Collection[bytes], good: bool) -> None:
        """Record that vLLM reported the end of the request's store of these keys."""
        slot = next((self.ledger.index[key] for key in keys if key in self.ledger.index), None)
        transfer = self._in_flight(self.ledger.generation[slot]) if slot is not None else None
        if transfer is None or set(transfer.keys) != set(keys):
            self._find_stale_completion("store", request, keys, good)
        else:
            self._end_copy(transfer, good)
            if not good:
                self._failed.update(keys)

    def request_finished(self, request: str) -> None:
        """Record that vLLM reported the end of the request."""
        self._missed.pop(request, None)
        self._answers.pop(request, None)
        self._admitted.discard(request)
        self._skipped.pop(request, None)
        self.finish(request)

    def cache_reset(self) -> None:
        """Record that the manager dropped all its keys."""
        self.flush()
        self.reset()
        if self.publisher is not None:
            # vLLM publishes a reset as one event for the whole cache, and not through the manager.
            self.publisher.take_events()
        self._reset_at = self.ledger.seq
        self._skipped.clear()

    def schedule_ended(self, preempted: Iterable[str]) -> None:
        """Record that vLLM has scheduled a step. In the log, a step lasts from one such call to the next."""
        for request in sorted(preempted):
            self.preempt(request)
        self.abandoned_ended()
        for request, key in self._missed.items():
            entry = self.ledger.requests.get(request)
            if entry is not None and entry.state in _UNANSWERED:
                self.emit(ev.HitMatched, request, (), key)
        self._answers.update(self._missed)
        self._missed.clear()
        self.end_step()

    def abandoned_ended(self) -> None:
        """Record the end of all copies from before a reset: the workers finish these copies before they begin
        any copy that is planned from now on."""
        for transfer in list(self.ledger.transfers.values()):
            if transfer.state is TransferState.ABANDONED:
                self._end_copy(transfer, True)

    def announced(self, events: Sequence[tuple[Collection[bytes], bool]]) -> None:
        """Compare the KV events that the manager published: (keys, whether they were removed)."""
        if self.publisher is None:
            return
        expected = [(event.keys, event.removed) for event in self.publisher.take_events()]
        published, happened = (
            {key: "removed" if removed else "stored" for keys, removed in changes for key in keys}
            for changes in (events, expected)
        )
        for key in sorted(published.keys() | happened.keys()):
            ours, theirs = happened.get(key, "unchanged"), published.get(key, "unchanged")
            if ours != theirs:
                self._find(
                    Property.EVENTS_ARE_STATE,
                    f"KV events say that key {key.hex()} is {theirs}, but it is {ours}",
                )

    def counted(self, gauges: Mapping[str, float]) -> None:
        """Compare the gauges that the manager reported, as fractions of its slots."""
        copies = [copy for copy in self.ledger.transfers.values() if copy.state is TransferState.SUBMITTED]
        stores = sum(len(copy.slots) for copy in copies if copy.direction is Direction.STORE)
        read = [copy.slots for copy in copies if copy.direction is Direction.LOAD]
        held = stores + len(set().union(*map(listed, read)))
        for gauge, slots in (
            (CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, stores),
            (CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, held),
        ):
            used = round(gauges.get(gauge, slots / self.config.host_blocks) * self.config.host_blocks)
            if used != slots:
                self._find(
                    Property.ONE_RELEASE_PER_HOLD,
                    f"{gauge} says that {used} slots are in use, but copies in flight hold {slots}",
                )

    def stop(self, reason: str) -> None:
        """Close the log, and stop recording."""
        self.stopped = reason
        if self._writer is not None:
            with suppress(KvsmError, OSError):
                self._writer.close()

    # Events and findings.

    def emit(self, kind: type[OffloadingEvent], *fields: object) -> TransferRecord | None:
        """Emit an event. An illegal one ends the recording."""
        try:
            return super().emit(kind, *fields)
        except (IllegalTransition, InvalidEvent) as refusal:
            event = kind(self.ledger.seq + 1, self.step, self._clock_ns(), *fields)
            self._end_with(event, refusal)
            raise

    def _end_with(self, event: OffloadingEvent, refusal: KvsmError) -> None:
        """Report an event that the ledger refuses, make it the log's last event, and stop."""
        broken = Witness.of(self.ledger).follow(event)
        for violation in broken or [Violation(Property.EVENTS_ARE_STATE, str(refusal))]:
            self._find(violation.property, violation.message)
        if self._writer is not None:
            self._writer.append(event)
        self.stop(f"event {event.seq} is illegal")
        log.error("kvsm: recording ends with event %d: what happened is illegal (%s)", event.seq, refusal)

    def _find(self, property: Property, message: str) -> None:
        """Report a broken property, in vLLM's log and beside the event log: many findings leave no event."""
        if (property, message) in self._written:
            return  # A wrong manager may give vLLM the same answer many times.
        self.found[property] += 1
        if len(self.findings) >= KEPT:
            return
        self._written.add((property, message))
        self.findings.append(Violation(property, message))
        line = f"{property}, after event {self.ledger.seq}: {message}"
        log.error("kvsm: vLLM's offload breaks %s", line)
        if self._writer is not None:
            try:
                with open(self._writer.directory / FINDINGS, "a") as file:
                    file.write(line + "\n")
            except OSError as error:
                log.warning("kvsm: %s cannot be written: %s", FINDINGS, error)

    def _evict(self, keys: Sequence[bytes]) -> None:
        known = [key for key in keys if key in self.ledger.index]
        for key in keys:
            if key not in self.ledger.index:
                self._find(Property.EVENTS_ARE_STATE, f"key {key.hex()} is evicted, but it is in no slot")
        if known:
            # The event behind the eviction is the store that needs the room.
            slots = pack([self.ledger.index[key] for key in known])
            self.emit(ev.BlocksEvicted, slots, (), self.ledger.seq + 2)

    def _in_flight(self, transfer: int) -> TransferRecord | None:
        """Return this transfer; None if it has ended, or if a reset has abandoned it."""
        found = self.ledger.transfers.get(transfer)
        return found if found is not None and found.state is TransferState.SUBMITTED else None

    def _find_stale_completion(self, what: str, request: str, keys: Collection[bytes], good: bool) -> None:
        if keys:
            self._find(
                Property.STALE_REPORTS,
                f"complete_{what} of request {request} names {len(keys)} keys, the first is "
                f"{min(keys).hex()}, but no {what} in flight has exactly these keys",
            )
            self.report(0, 0, good)
            # vLLM may stop with an error now.
            self.flush_log(LogFlush.ENGINE_FAILS)

    def _end_copy(self, transfer: TransferRecord, good: bool) -> None:
        self.report(transfer.id, 0, good)
        self._loads.pop(transfer.id, None)
        self._placeholders[transfer.direction].give_back(listed(transfer.device_blocks))
        self.flush_log(LogFlush.REPORTS_TAKEN)

    def _placeholders_for(self, direction: Direction, count: int) -> Ids:
        taken = self._placeholders[direction].take(count)
        if taken is None:
            raise KvsmError(f"the {direction.name.lower()}s in flight have more blocks than placeholders")
        return pack(taken)

    def _is_from_before_reset(self, key: bytes) -> bool:
        ledger = self.ledger
        return any(
            0 < ledger.generation[slot] <= self._reset_at
            for slot, held in enumerate(ledger.key_of)
            if held == key
        )


_UNANSWERED = (RequestState.NEW, RequestState.PREEMPTED)
