"""`Offloader` has all calls of the core. Those for requests, time and the reset are defined here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar

from kvsm import events as ev
from kvsm.core import native
from kvsm.core.kv_events import KeysChanged, KVCacheEvent, Publisher
from kvsm.core.ledger import Ledger, NativeLedger, readable_keys
from kvsm.core.ledger.frozen import freeze
from kvsm.core.log import (
    Durability,
    EndedLog,
    LateLog,
    LogBinding,
    LogWriter,
    MemoryLog,
    OnFailure,
    StateCopy,
)
from kvsm.core.log.flush_mark import UNBOUND
from kvsm.core.offloader import matching, slow_hits, storing
from kvsm.core.offloader import transferring as transfers
from kvsm.core.offloader.arguments import (
    KEY_BYTES_MAX,
    checks_request,
    flag,
    integers,
    request_name,
    weights_version,
)
from kvsm.core.offloader.emitter import NOBODY, THE_LOG, EventEmitter, EventSink, LogFlush
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import IllegalTransition, InvalidEvent, Poisoned, WrongArgument, described
from kvsm.events import OffloadConfig, recorded_ns
from kvsm.states import machines_digest
from kvsm.states.request import FINISHED, NEW, PREEMPTED
from kvsm.states.transfer import ABANDONED
from kvsm.states.words import STATE_MASK

_Core = TypeVar("_Core", bound="Offloader")


class Offloader(EventEmitter):
    """One offload core over one host pool. Not thread safe: one scheduler drives it.

    `Offloader.open(config, directory)` makes a core with a log on disk, for a `with` block, which closes the
    log. `Offloader(config, log)` takes a log that the caller closes.
    """

    writer: LogWriter | LateLog | None = None
    """The log that `open` or `kvsm.tiers.warm_restart.start` made; None if there is none."""

    def __new__(cls, *_: object, **__: object) -> Offloader:
        """Make a core with the native or the Python body (`kvsm.core.native`)."""
        is_native = cls is Offloader and native.runs() and not _are_replaced()
        return super().__new__(NativeOffloader if is_native else cls)

    @classmethod
    def open(
        cls: type[_Core],
        config: OffloadConfig,
        directory: str | os.PathLike[str] | EndedLog | None = None,
        *,
        publisher: Publisher | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        durability: Durability = "interval",
        sync_interval_ms: int = 100,
        sync_thread: bool = False,
        segment_bytes: int = 64 << 20,
        max_bytes: int | None = None,
        compress: bool = False,
        on_failure: OnFailure = "stop",
        run: bytes | None = None,
        binding: LogBinding = UNBOUND,
        **more: Any,
    ) -> _Core:
        """Make a core that writes its own log. `close` ends both.

        directory: of the log; made if absent, and must be empty. Or a locked directory without events, as
            `kvsm.core.log.find_end` returns it. None: no log.
        publisher, clock_ns: as for `Offloader`.
        more: other arguments of `Offloader`.

        The other options are those of `LogWriter`. Raises what `LogWriter` raises.
        """
        opened = MemoryLog()
        # Make the core first: if it refuses an argument, no directory is made.
        core = cls(config, opened, publisher=publisher, clock_ns=clock_ns, **more)
        core.log = None
        if directory is None:
            return core
        core.log = core.writer = LogWriter(
            directory,
            config=config,
            snapshot=core.state_for_log,
            durability=durability,
            sync_interval_ms=sync_interval_ms,
            sync_thread=sync_thread,
            segment_bytes=segment_bytes,
            max_bytes=max_bytes,
            compress=compress,
            on_failure=on_failure,
            clock=clock_ns,
            run=run,
            binding=binding,
            checked=True,
        )
        for event in opened:
            core.log.append(event)
        return core

    @classmethod
    def resumed(
        cls: type[_Core],
        ledger: Ledger,
        log: EventSink | None = None,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        flush_within_ms: int = 0,
    ) -> _Core:
        """Make a core that continues this ledger, which then belongs to it. `log` gets the later events."""
        core = cls(ledger.config, clock_ns=clock_ns, flush_within_ms=flush_within_ms)
        core.ledger, core.log, core.step = ledger, log, ledger.step
        return core

    @classmethod
    def restarted(
        cls: type[_Core],
        ledger: Ledger,
        config: OffloadConfig,
        log: EventSink | None = None,
        *,
        life: int | None = None,
        ended: str = "",
        publisher: Publisher | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        flush_within_ms: int = 0,
    ) -> _Core:
        """Make the core of a new process, which serves the stored blocks of the last process.
        `kvsm.tiers.warm_restart` makes sure that the last process has ended.

        ledger: the fold of the last process's log. It belongs to the new core.
        config: of this process. The fields in `kvsm.core.ledger.ALIKE` must be unchanged.
        life: number of this process in the log; None: the next one.
        ended: how the last process ended, for readers of the log; empty if it closed the log.
        log, publisher, clock_ns, flush_within_ms: as for `Offloader`. The log gets the later events. The
            publisher gets all readable keys, the oldest first.

        Raises `InvalidEvent` if `config` cannot follow.
        """
        core = cls.resumed(ledger, log, clock_ns=clock_ns, flush_within_ms=flush_within_ms)
        core.emit(ev.Restarted, life or ledger.life + 1, config, machines_digest(), ended)
        core.config, core.publisher = config, publisher
        if publisher is not None:
            publisher.stored(ledger.seq, readable_keys(ledger))
            ledger.listener = publisher
        core.flush_log(LogFlush.RESTARTED)
        return core

    def close(self, error: BaseException | None = None) -> None:
        """Flush and close the log that `open` made. Idempotent; later calls raise `Poisoned`. Plans that were
        never submitted are named in a warning; `kvsm verify` lists them.

        error: the error that ended the run, for the log; None if it ended well.

        Raises `LogWriteFailed` if the log cannot be completed.
        """
        with suppress(Poisoned):
            self.check_thread()
            transfers.warn_at_close(self)
            self._may_change = THE_LOG
        try:
            if self.writer is not None:
                self.writer.close(error)
        finally:
            self._stop(self._poisoned or "it was closed")

    def state_for_log(self) -> StateCopy:
        """Begin a copy of the state for a `LogWriter`. Raises `OSError` if the ledger may be half changed."""
        if self._may_change == NOBODY:
            raise OSError(f"the offloader stopped in event {self.ledger.seq + 1}, and its state is not known")
        return freeze(self.ledger)

    def _stop(self, reason: str) -> None:
        super()._stop(reason)
        # A call reads the ledger before it emits, and an interrupt may have left the ledger half changed.
        self.__dict__.update(dict.fromkeys(_CALLS, self._refuse))

    def __enter__(self: _Core) -> _Core:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # Hits.
    lookup = matching.lookup
    match = matching.match
    waits_for = matching.waits_for
    may_match = matching.may_match
    pin = matching.pin
    admit = matching.admit
    defer = matching.defer
    release = matching.release
    in_flight = matching.in_flight
    note_times = slow_hits.note_times
    is_slow_hit = slow_hits.is_slow_hit
    declines = slow_hits.declines

    # Stores.
    prepare_store = storing.prepare_store
    store = storing.store
    skip = storing.skip
    advance = storing.advance
    count_offers = storing.count_offers
    offered_enough = storing.offered_enough
    rewrite = storing.rewrite
    touch = storing.touch
    import_blocks = storing.import_blocks
    adopt_blocks = storing.adopt_blocks
    next_victims = storing.next_victims

    # Loads, and the life of every transfer.
    prepare_load = transfers.prepare_load
    submit = transfers.submit
    report = transfers.report
    complete_load = transfers.complete_load
    fail_load = transfers.fail_load
    complete_store = transfers.complete_store
    fail_store = transfers.fail_store
    cancel = transfers.cancel
    lose = transfers.lose
    lose_overdue = transfers.lose_overdue
    flush = transfers.flush
    leased = transfers.leased

    def report_all(self, reports: Iterable[WorkerReport], note: Callable[[transfers.Ended], object]) -> None:
        """`report` each of these reports, in order.

        note: called with each transfer that a report ends, before the next report.

        If a report or `note` raises an error, the reports before it have taken effect.
        """
        for report in tuple(reports):
            ended = self.report(*report.arguments()).ended
            if ended is not None:
                note(ended)

    @checks_request
    def arrive(self, request: str, target: str = "") -> None:
        """Make a record of the request, unless it has one. `match` also makes it; `advance` needs it.

        target: for the log; see `RequestArrived`.
        """
        if request not in self.ledger.requests:
            self.emit(ev.RequestArrived, request, target)

    @checks_request
    def answer_hint(
        self,
        request: str,
        session: str,
        lease: str,
        outcome: ev.HintOutcome,
        *,
        asked: int = 0,
        leased: int = 0,
        ttl_ms: int = 0,
        why: ev.HintReason = ev.HintReason.NONE,
    ) -> None:
        """Log what became of a client's hint (`HintAnswered`). The request may be over."""
        session = request_name("answer_hint", session, "session")
        lease = request_name("answer_hint", lease, "lease")
        counts = integers("answer_hint", "asked, leased, ttl_ms", (asked, leased, ttl_ms))
        if type(outcome) is not ev.HintOutcome or type(why) is not ev.HintReason or min(counts) < 0:
            what = f"are {outcome!r}, {why!r} and {counts}: a HintOutcome, a HintReason and counts from 0 on"
            raise WrongArgument("answer_hint", "outcome, why, counts", what)
        self.emit(ev.HintAnswered, request, session, lease, outcome, *counts, why)

    @checks_request
    def preempt(self, request: str) -> None:
        """Handle a preemption: the engine took the request's device blocks. Copies in flight keep their
        leases.

        Afterwards the request may be deferred again for the full `defer_ticks`.
        """
        self.last_keys.pop(request, None)
        entry = self.ledger.requests.get(request)
        if entry is None or entry.word & STATE_MASK == FINISHED:
            return
        if entry.offered or entry.patience >= 0 or entry.state not in (NEW, PREEMPTED):
            self.emit(ev.RequestPreempted, request)

    @checks_request
    def finish(self, request: str, *, aborted: bool = False, hand_over: str = "") -> bool:
        """End the request; legal at any time. Returns whether it has no load in flight.

        hand_over: for the log; see `RequestFinished`.
        """
        if type(aborted) is not bool:
            aborted = flag("finish", "aborted", aborted)
        if type(hand_over) is not str or not hand_over.isascii():
            raise WrongArgument("finish", "hand_over", f"is {hand_over!r}; it must be ASCII text")
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.word & STATE_MASK != FINISHED:
            self.emit(ev.RequestFinished, request, aborted, hand_over)
        self.last_keys.pop(request, None)
        return request not in self.ledger.requests

    def tick(self) -> None:
        """Advance the tick; call it once per step. Emits no event if no wait depends on ticks."""
        if self.ledger.deferred or (self.ledger.transfers and self.config.transfer_ticks):
            self.emit(ev.Ticked, self.ledger.tick + 1)
        self.until_look -= 1
        if not self.until_look:
            transfers.warn_of_unsubmitted(self)

    def end_step(self) -> None:
        """End the engine's step. Flushes the log unless a later flush is certain."""
        if get_ident() != self._may_change:
            self.check_thread()
        if self.ledger.step == self.step:
            self.emit(ev.StepEnded)
            self.flush_log(LogFlush.STEP_ENDED)
        self.step += 1
        self.until_look -= 1
        if not self.until_look:
            transfers.warn_of_unsubmitted(self)

    def reset(self, weights: str | None = None) -> bool:
        """Make every stored block unmatchable, at once. Returns whether nothing is left to drain.

        weights: version of the weights from here on, if they have changed; None: unchanged.

        Idempotent; legal at any time. Copies in flight continue. Their memory stays quarantined until every
        worker has reported; `ledger.draining()` says whether any copy is left. A load in flight fails. Emits
        no event if nothing was stored or loaded since the last reset, and the weights are the same. Flushes
        the log.
        """
        if weights is not None:
            weights = weights_version("reset", weights)
        ledger = self.ledger
        live = any(transfer.state is not ABANDONED for transfer in ledger.transfers.values())
        changed = weights is not None and weights != ledger.weights
        if live or ledger.index or ledger.provenance.brought or changed:
            self.emit(ev.CacheReset, ledger.epoch + 1, weights if changed else None)
        self.flush_log(LogFlush.CACHE_RESET)
        return not ledger.draining()

    def take_events(self) -> list[KeysChanged]:
        """Take the keys stored on the host and removed since the last take, as vLLM's `OffloadingEvent`s."""
        self.check_thread()
        return [] if self.publisher is None else self.publisher.take_events()

    def take_kv_events(self) -> list[KVCacheEvent]:
        """Take the same changes as KV events. Both calls take from one queue: use only one of them."""
        self.check_thread()
        return [] if self.publisher is None else self.publisher.take_kv_events()


_CALLS = [
    name for name in vars(Offloader) if not name.startswith("_") and name not in ("open", "close", "writer")
]
"""The calls that a stopped core refuses."""


class NativeOffloader(native.CoreBody, Offloader):
    """A core whose most frequent calls are native. Their rare cases fall back to `Offloader`."""


NativeOffloader.__name__ = Offloader.__name__  # The name that users see in errors.


_HAVE_TWO_BODIES = {
    name: getattr(Offloader, name) for name in vars(native.CoreBody) if not name.startswith("__")
}


def _are_replaced() -> bool:
    """Whether a method that also has a native body was replaced, as tests do. Then the Python body must
    run."""
    return any(getattr(Offloader, name) is not function for name, function in _HAVE_TWO_BODIES.items())


native.connect_core(
    Offloader,
    matching.Match,
    storing.PreparedStore,
    TransferJob,
    transfers.Ended,
    transfers.ReportResult,
    recorded_ns,
    described,
    time.time_ns,
    NativeLedger,
    IllegalTransition,
    InvalidEvent,
    matching.cannot_pin,
    NOBODY,
    THE_LOG,
    KEY_BYTES_MAX,
    time,
    LogFlush.JOBS_LEAVE,
    LogFlush.STEP_ENDED,
    LogFlush.REPORTS_TAKEN,
)
