"""`EventEmitter` makes events, applies and logs them; and decides when the log is flushed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from threading import Thread, current_thread, get_ident
from typing import NoReturn, Protocol

import numpy as np

from kvsm import events as ev
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger, TransferRecord
from kvsm.core.offloader.arguments import a, ids_of
from kvsm.errors import IllegalTransition, InvalidEvent, Poisoned, WrongArgument, WrongThread, described
from kvsm.events import OffloadConfig, OffloadingEvent, Parents, recorded_ns
from kvsm.identity import KeptPools
from kvsm.ids import SMALL, IdArray, listed, pack, unpack
from kvsm.states import machines_digest

_CLOCK_END = 1 << 63
"""The first wall time (ns) that does not fit in an event."""


class EventSink(Protocol):
    """Receives events after they are applied: a `LogWriter`, or a list in tests."""

    def append(self, event: OffloadingEvent) -> None:
        """Append the next event."""

    def flush(self) -> None:
        """Write the appended events."""


class LogFlush(Enum):
    """Why the log is flushed. `EventEmitter.flush_log` says which flushes can wait."""

    JOBS_LEAVE = "jobs leave for the workers"
    """The log must have a plan before a worker acts on it."""
    STEP_ENDED = "the step has ended"
    REPORTS_TAKEN = "the workers' reports were taken"
    CACHE_RESET = "the cache was reset"
    """Nothing may follow for a long time: an idle engine takes no steps."""
    ONLY_LEASES = "only leases of agents' sessions are left"
    """They count as requests of the ledger, but an idle engine takes no steps for them."""
    ENGINE_FAILS = "the engine may stop with an error"
    RESTARTED = "another process goes on with the log"


NOBODY, THE_LOG, _FIRST_TO_ASK = 0, -1, -2
"""Values of `_may_change` that are no thread identities. NOBODY: no thread may change the ledger. THE_LOG:
the log writes. _FIRST_TO_ASK: the next thread that calls."""


class EventEmitter:
    """A ledger, a log, and the one way to change the ledger: `emit`.

    Not thread safe: the thread that emits the first event after `LogOpened` drives this emitter as long as
    it lives, and other threads are refused. So an engine may be built in one thread and run in another.
    """

    warned_reports: tuple[str, ...]
    """The reasons of rejected reports of which a warning was logged, by name."""

    def __init__(
        self,
        config: OffloadConfig,
        log: EventSink | None = None,
        *,
        publisher: Publisher | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        flush_within_ms: int = 0,
        kept: KeptPools | None = None,
        weights: str = "",
        cold: Sequence[str] = (),
    ) -> None:
        """Emits the first event, `LogOpened`.

        config: fixed for life, and written into the log.
        log: receives the events; None: they are not kept.
        publisher: collects KV events for schedulers and routers. It grows until they are taken.
        clock_ns: wall time (ns); recorded, and read by no decision.
        flush_within_ms: the longest delay of a flush at the end of a step, or after reports, while there are
            requests (ms). Before jobs leave for the workers the log is flushed at once.
        kept: the host pools that outlive this process; None if none does.
        weights: version of the model's weights.
        cold: why this process does not take over the blocks of an earlier one, a line each.
        """
        if not isinstance(config, OffloadConfig):
            raise WrongArgument(type(self).__name__, "config", f"is {a(config)}; it must be an OffloadConfig")
        opened_ns = self._checked_time(clock_ns())
        self.config = config
        self.publisher = publisher
        self.ledger = Ledger(config, publisher)
        self.log = log
        self.step = 0
        self.evicting: Callable[[Sequence[bytes]], None] | None = None
        """Called with the keys that are evicted for a store. It must not call the core."""
        self.using: Callable[[Sequence[bytes]], None] | None = None
        """Called with the keys that a request loads, or uses without a load, in prefix order. It must not
        call the core."""
        self.last_keys: dict[str, bytes] = {}
        """Request -> the last key that it has matched, or offered with `prepare_store`: its next offer
        continues this block."""
        self._clock_ns: Callable[[], int] = lambda: opened_ns
        self._poisoned: str | None = None
        self._flushed_seq = 0
        """The number of the last event when the log was last flushed."""
        self._flush_within_ns, self._flush_by_ns = flush_within_ms * 1_000_000, 0
        """The longest delay of a flush (ns), and the latest time of the next flush (monotonic ns)."""
        self.until_look, self.looked_at, self.warned_of, self.warned_reports = 1, 0, 0, ()
        """State of `warn_of_unsubmitted`: calls until it runs again, the last event when it ran, and the last
        transfer that it warned of."""
        self._drivers: list[Thread] = []
        """The threads that have called this emitter. The first one that is alive drives it."""
        self._may_change = _FIRST_TO_ASK
        """The identity of the thread that may change the ledger now. While an event is applied and logged, no
        thread may: so an interrupt at that time stops the emitter, even if no handler sees the interrupt.
        While the log writes (THE_LOG), the ledger is consistent, and a snapshot of it can be taken."""
        self.emit(ev.LogOpened, config, machines_digest(), ev.SCHEMA_VERSION, kept, weights, tuple(cold))
        self._clock_ns = clock_ns
        self._drivers.clear()
        self._may_change = _FIRST_TO_ASK

    def _checked_time(self, now: object) -> int:
        """Return the first time of the clock. Raises `WrongArgument` if it is no int."""
        if type(now) is not int:
            problem = f"gives {a(now)}; it must give ints, as time.time_ns does"
            raise WrongArgument(type(self).__name__, "clock_ns", problem)
        return now

    def emit(self, kind: type[OffloadingEvent], *fields: object) -> TransferRecord | None:
        """Make the next event, apply it, and append it to the log. Returns the transfer that it ended.

        A refused event changes nothing. Any other failure poisons this emitter: the ledger may have an event
        that the log lacks.
        """
        thread = get_ident()
        if thread != self._may_change:
            self._admit()
        ledger = self.ledger
        now = self._clock_ns()
        if type(now) is not int or not 0 <= now < _CLOCK_END:
            now = recorded_ns(now)
        event = kind(ledger.seq + 1, self.step, now, *fields)
        self._may_change = NOBODY
        try:
            ended = ledger.apply(event)
            if self.log is not None:
                self._may_change = THE_LOG
                self.log.append(event)
        except (IllegalTransition, InvalidEvent):
            self._may_change = thread
            raise
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._stop(described(error))
            raise
        self._may_change = thread
        return ended

    def check_thread(self) -> None:
        """Check the thread of a call that changes state without an event, as `emit` does.

        Raises `WrongThread`, or `Poisoned` if this emitter has stopped.
        """
        if get_ident() != self._may_change:
            self._admit()

    def _admit(self) -> None:
        """Let this thread drive the emitter if it is the first to ask, or if the last driver has ended."""
        # No lock: an interrupt could leave it locked. Threads that ask at once are in the list in some order,
        # and each thread sees which one is first.
        thread, drivers = current_thread(), self._drivers
        if self._poisoned is None and self._may_change not in (NOBODY, THE_LOG):
            if thread not in drivers:
                drivers.append(thread)
            if self._driver() is thread:
                self._may_change = get_ident()
                return
            drivers.remove(thread)
        driver = self._driver()
        if self._poisoned is not None or driver is None or driver is thread:
            self._refuse()
        raise WrongThread(
            f"thread {thread.name!r} called an offloader that thread {driver.name!r} drives; "
            f"let one thread make all calls, or give each thread an offloader of its own"
        )

    def _driver(self) -> Thread | None:
        """The thread that drives this emitter; None if there is none, or if it has ended."""
        return next((thread for thread in self._drivers if thread.is_alive()), None)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise the error of every call to a stopped emitter."""
        why = self._poisoned or "it was interrupted"
        raise Poisoned(
            f"this offloader stopped at event {self.ledger.seq}: {why}. Its log has what was decided before; "
            f"make a new offloader, with a log in a new directory"
        )

    def _stop(self, reason: str) -> None:
        """Stop: every later call raises `Poisoned` with this reason."""
        self._may_change = NOBODY
        self._poisoned = reason

    def flush_log(self, reason: LogFlush) -> None:
        """Flush the log, unless `reason` can wait for a later step.

        Copies in flight guarantee a later step. While there are any, reports can wait. So can `StepEnded`, if
        it is the only event since the last flush, as in most steps whose jobs have left. A request guarantees
        a later step too, but perhaps a late one: with `flush_within_ms` both wait at most for that time.
        """
        thread = get_ident()
        if thread != self._may_change:
            self._admit()
        ledger = self.ledger
        if ledger.transfers and (
            reason is LogFlush.REPORTS_TAKEN
            or (reason is LogFlush.STEP_ENDED and self._flushed_seq == ledger.seq - 1)
        ):
            return
        if self._flush_within_ns:
            now = time.monotonic_ns()
            waits = reason is LogFlush.REPORTS_TAKEN or reason is LogFlush.STEP_ENDED
            # More time than the whole interval is left only if the clock has gone back.
            is_early = 0 < self._flush_by_ns - now <= self._flush_within_ns
            if waits and is_early and (ledger.requests or ledger.transfers):
                return
            self._flush_by_ns = now + self._flush_within_ns
        self._flushed_seq = ledger.seq
        if self.log is None:
            return
        self._may_change = THE_LOG
        try:
            self.log.flush()
        except BaseException as error:  # An interrupt too: the log would lack what the ledger has.
            self._stop(described(error))
            raise
        self._may_change = thread


def touch_slots(core: EventEmitter, slots: Sequence[int], parents: Parents = ()) -> None:
    """Record that blocks, at least one, are used without a load. parents: the blocks that precede them."""
    packed = pack(slots)
    core.emit(ev.BlocksTouched, packed, parents)
    if core.using is not None:
        core.using(core.ledger.keys_of(unpack(packed)))


def checked_device_blocks(core: EventEmitter, call: str, device_blocks: Sequence[int]) -> IdArray:
    """Return device blocks in the ledger's form. Raises `InvalidEvent` if a block does not exist."""
    kind, limit = type(device_blocks), core.config.device_blocks
    if (kind is list or kind is tuple or kind is range) and len(device_blocks) <= SMALL:
        ids = tuple(device_blocks)
        for one in ids:
            if type(one) is not int or not 0 <= one < limit:
                break
        else:
            return ids
    problem = "device block {} is not one of the {}"
    return checked_ids(core, call, "device_blocks", device_blocks, limit, problem)


def checked_ids(
    core: EventEmitter, call: str, argument: str, ids: Sequence[int] | IdArray, limit: int, problem: str
) -> IdArray:
    """Return ids in the ledger's form. Raises `InvalidEvent` unless each is from 0 to `limit` - 1."""
    batch = ids_of(call, argument, ids)
    # As an unsigned number, a negative id is huge.
    if isinstance(batch, np.ndarray) and batch.view(np.uint64).max() < limit:
        return batch
    for one in listed(batch):
        if not 0 <= one < limit:
            raise InvalidEvent(core.ledger.seq + 1, problem.format(one, limit))
    return batch


def has_room_for_transfer(core: EventEmitter) -> bool:
    """Whether one more transfer may be planned."""
    return len(core.ledger.transfers) < core.config.max_live_transfers
