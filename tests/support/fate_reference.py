# ruff: noqa: ARG002 (the hooks take what the calls take)
"""A reference for `kvsm why`, `kvsm show` and the tables: why each key is not on the host.

`OutsideBooks` sits between an `Offloader` and its callers, and keeps plain books from the arguments and
results of the calls. It reads no events and no ledger. From the log it takes only the length, to place each
call between two events, and the kind of the last event, to see whether a call made one. It shares no code
with the ledger, the extractor or the fates, so equal answers were reached in two independent ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvsm.core.offloader import Offloader
from kvsm.events import Direction, OffloadingEvent, Owners, SkipReason
from kvsm.explain.tables.row_kinds import Gone
from kvsm.ids import to_list

Span = tuple[int, int]
"""The numbers of the first and the last event of a call."""


@dataclass(frozen=True)
class Reason:
    """Why a key is not readable.

    at: the call that is the cause; None if there is none.
    kind: the kind of that call's event.
    transfer, requests: the transfer involved, and its requests.
    skip: why the key was not stored, if it was offered and skipped.
    before: the reason before the key was offered and skipped.
    """

    why: Gone
    at: Span | None = None
    kind: str = ""
    transfer: int | None = None
    requests: tuple[str, ...] = ()
    skip: SkipReason | None = None
    before: Reason | None = None


NEVER = Reason(Gone.NEVER_STORED)


@dataclass(eq=False)
class BlockBook:
    """The life of a block in a slot.

    stored: when it became readable; None: never. gone: when it left; None: it is still there.
    """

    store: int
    slot: int
    key: bytes
    requests: tuple[str, ...]
    stored: Span | None = None
    gone: Span | None = None
    reason: Reason | None = None
    hits: list[int] = field(default_factory=list)
    wanted: int | None = None


@dataclass(eq=False)
class TransferBook:
    """A store or a load: its blocks, its requests, and its end."""

    id: int
    direction: Direction
    requests: tuple[str, ...]
    blocks: list[BlockBook]
    device_blocks: tuple[int, ...]
    source: str | None = None
    submitted: bool = False
    abandoned: bool = False
    ended: Span | None = None
    outcome: str | None = None
    reports: dict[int, tuple[Span, bool]] = field(default_factory=dict)


@dataclass(eq=False)
class Stay:
    """A request's wait: DEFERRED for a transfer, or LOADING."""

    request: str
    state: str
    transfer: int
    began: Span
    until: int = 0
    ended: Span | None = None


@dataclass(frozen=True)
class LookupBook:
    """A recorded answer to a prefix lookup: its event, the key at which it stops, and the reason."""

    event: int
    request: str
    slots: tuple[int, ...]
    missed: bytes | None
    reason: Reason | None


class OutsideBooks:
    """The outside books of one core. Create them before the core's first call.

    log: the core's events; only their number and the kind of the last event are read.
    """

    def __init__(self, core: Offloader, log: Sequence[OffloadingEvent]) -> None:
        self._log = log
        self._chunk = core.config.blocks_per_chunk
        self.here: dict[bytes, BlockBook] = {}
        self.in_slot: dict[int, BlockBook] = {}
        self.blocks: list[BlockBook] = []
        self.transfers: dict[int, TransferBook] = {}
        self.live: dict[int, TransferBook] = {}
        self.stays: list[Stay] = []
        self.lookups: list[LookupBook] = []
        self._answers: dict[str, tuple[int, bytes | None]] = {}
        """Request -> (slots, missed key) of its last answer, unless the request was admitted with it."""
        self.resets: list[Span] = []
        self.restarts: list[Span] = []
        self._last_life: dict[bytes, BlockBook] = {}
        self._gone: dict[bytes, Reason] = {}
        self._skipped: dict[bytes, Reason] = {}
        self._waiting: dict[str, Stay] = {}
        self._patience: dict[str, int] = {}
        self._load_of: dict[str, TransferBook] = {}
        self._retired: set[int] = set()
        self._tick = 0
        self._keep_of(core)

    def _keep_of(self, core: Offloader) -> None:
        self._core = core
        for name in vars(OutsideBooks):
            if name.startswith("after_"):
                self._listen(name.removeprefix("after_"), getattr(self, name))

    def _listen(self, name: str, after: Callable[..., None]) -> None:
        call = getattr(self._core, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            first = len(self._log) + 1
            result = call(*args, **kwargs)
            after((first, len(self._log)), result, *args, **kwargs)
            return result

        setattr(self._core, name, heard)

    def _kind(self, span: Span) -> str:
        """Return the kind of the last event of a call; empty if the call made no event."""
        return "" if span[1] < span[0] else self._log[-1].kind

    # What can be read, and why not.

    def readable(self, key: bytes) -> bool:
        """Whether this key is readable."""
        block = self.here.get(key)
        return block is not None and block.stored is not None

    def why(self, key: bytes) -> Reason:
        """Return why this key is not readable now."""
        block = self.here.get(key)
        if block is not None:
            assert block.stored is None, "it can be read"
            at = block.store, block.store
            return Reason(Gone.IN_FLIGHT, at, "StorePlanned", block.store, block.requests)
        gone, skipped = self._gone.get(key), self._skipped.get(key)
        if skipped is None:
            return gone or NEVER
        return Reason(skipped.why, skipped.at, skipped.kind, skip=skipped.skip, before=gone)

    def _goes(self, block: BlockBook, reason: Reason) -> None:
        if block.gone is not None:
            return
        assert self.here.pop(block.key) is block
        block.gone, block.reason = reason.at, reason
        self._gone[block.key] = reason
        self._skipped.pop(block.key, None)

    # Lookups.

    def after_match(
        self, span: Span, answer: Any, request: str, keys: Sequence[bytes], *_: Any, **__: Any
    ) -> None:
        """Note the lookup of a prefix on the host."""
        if answer.waits_for is not None:
            self._waits(span, request, answer.waits_for)
            return
        if self._kind(span) != "HitMatched":
            return
        for key in keys[: answer.hits]:
            assert self.readable(key)
        missed = keys[answer.hits] if answer.hits < len(keys) else None
        self._looked_up(span, request, [self.here[key].slot for key in keys[: answer.hits]], missed)

    def after_pin(
        self, span: Span, _: None, request: str, slots: Sequence[int], missed: bytes | None, *__: Any
    ) -> None:
        """Note the pins of slots that the scheduler has found by its own search."""
        assert missed is None or not self.readable(missed), "the key that was missed can be read"
        self._looked_up(span, request, slots, missed)

    def _looked_up(self, span: Span, request: str, slots: Sequence[int], missed: bytes | None) -> None:
        if self._kind(span) != "HitMatched":
            return
        for slot in slots:
            self.in_slot[slot].hits.append(span[1])
        self._answers[request] = len(slots), missed
        self._note_lookup(span, request, slots, missed)

    def after_admit(
        self,
        span: Span,
        _: None,
        request: str,
        asked: int | None = None,
        on_device: int | None = None,
        on_host: int | None = None,
        missed: bytes | None = None,
        resumed: bool = False,
    ) -> None:
        """Note that a request gets its blocks. If it uses an earlier answer, that is recorded as a lookup."""
        if self._kind(span) == "RequestAdmitted":
            slots = to_list(self._core.ledger.requests[request].pins) if on_host != 0 else []
            if self._answers.pop(request, None) != (len(slots), missed):
                self._note_lookup(span, request, slots, missed)

    def _note_lookup(self, span: Span, request: str, slots: Sequence[int], missed: bytes | None) -> None:
        reason = None if missed is None else self.why(missed)
        last = None if missed is None else self._last_life.get(missed)
        if last is not None and last.gone is not None and last.wanted is None:
            last.wanted = span[1]
        self.lookups.append(LookupBook(span[1], request, tuple(slots), missed, reason))

    # Waits.

    def after_defer(self, span: Span, waits: bool, request: str, transfer: int) -> None:
        """Note whether the request waits for this transfer."""
        if waits:
            self._waits(span, request, transfer)

    def after_waits_for(self, span: Span, transfer: int | None, request: str) -> None:
        """Note whether the request waits; a preempted request may begin to wait in this call."""
        if transfer is not None:
            self._waits(span, request, transfer)

    def _waits(self, span: Span, request: str, transfer: int) -> None:
        stay = self._waiting.get(request)
        if stay is not None and stay.state == "DEFERRED":
            assert stay.transfer == transfer
            assert span[1] < span[0]
            return
        until = self._patience.setdefault(request, self._tick + self._core.config.defer_ticks)
        self._begins(Stay(request, "DEFERRED", transfer, (span[1], span[1]), until))

    def _begins(self, stay: Stay) -> None:
        assert stay.request not in self._waiting
        self._waiting[stay.request] = stay
        self.stays.append(stay)

    def _wakes(self, request: str, span: Span) -> None:
        stay = self._waiting.pop(request, None)
        if stay is not None:
            stay.ended = span

    def after_tick(self, span: Span, _: None) -> None:
        """Note a tick, which counts only if a request or transfer has a time limit."""
        if span[1] < span[0]:
            return
        self._tick += 1
        for stay in list(self._waiting.values()):
            if stay.state == "DEFERRED" and stay.until <= self._tick:
                self._wakes(stay.request, span)

    def after_preempt(self, span: Span, _: None, request: str) -> None:
        """Note that the request loses its device blocks."""
        if span[1] >= span[0]:
            self._wakes(request, span)
            self._patience.pop(request, None)

    def after_finish(self, span: Span, _: bool, request: str, *, aborted: bool = False) -> None:
        """Note the end of the request."""
        self.after_preempt(span, None, request)

    # Stores.

    def after_store(
        self,
        span: Span,
        result: Any,
        owners: Owners,
        keys: Sequence[bytes],
        device_blocks: Sequence[int],
        again: Sequence[int] = (),
        parents: Mapping[int, bytes] | None = None,
        required: Sequence[int] = (),
    ) -> None:
        """Note an offer of blocks."""
        self._book_skips(span, result, keys, device_blocks, again)
        self._book_store(result, owners, keys, None)

    def after_import_blocks(
        self,
        span: Span,
        result: Any,
        owners: Owners,
        keys: Sequence[bytes],
        source: str,
        parents: Mapping[int, bytes] | None = None,
    ) -> None:
        """Note an import of blocks from another engine. Blocks without room are skipped."""
        full = len(self.live) >= self._core.config.max_live_transfers
        new = [key for key in dict.fromkeys(keys) if key not in self.here]
        for key in new[len(result.keys) :]:
            self._skip(span, key, SkipReason.TOO_MANY_TRANSFERS if full else SkipReason.POOL_FULL)
        self._book_store(result, owners, keys, source)

    def _book_store(self, result: Any, owners: Owners, keys: Sequence[bytes], source: str | None) -> None:
        if result.job is None:
            assert not result.evicted
            return
        id, names = result.job.transfer, _names(owners, len(keys))
        requests = tuple(dict.fromkeys(names[place] for place in result.stored if names[place]))
        for key in result.evicted:
            evicted = Reason(Gone.EVICTED, (id - 1, id - 1), "BlocksEvicted", id, requests)
            self._goes(self.here[key], evicted)
        blocks = []
        for key, slot in zip(result.keys, self._slots(result.job), strict=True):
            assert key not in self.here
            block = BlockBook(id, slot, key, requests)
            self.here[key] = self.in_slot[slot] = self._last_life[key] = block
            self._skipped.pop(key, None)
            blocks.append(block)
        self.blocks += blocks
        device_blocks = self._device_blocks(result.job)
        self._plan(TransferBook(id, Direction.STORE, requests, blocks, device_blocks, source))

    def _slots(self, job: Any) -> list[int]:
        return list(dict.fromkeys(host // self._chunk for host in to_list(job.host_blocks)))

    def _device_blocks(self, job: Any) -> tuple[int, ...]:
        return tuple(to_list(job.device_blocks))

    def _plan(self, transfer: TransferBook) -> None:
        self.transfers[transfer.id] = self.live[transfer.id] = transfer

    def _book_skips(
        self,
        span: Span,
        result: Any,
        keys: Sequence[bytes],
        device_blocks: Sequence[int],
        again: Sequence[int],
    ) -> None:
        """Note which offered keys are not stored, and why. Keys that waited before are not noted again."""
        busy = self._retired.union(*[one.device_blocks for one in self.live.values()])
        full = len(self.live) >= self._core.config.max_live_transfers
        stored, waits, new, taken = set(result.stored), set(result.deferred), set(), set()
        no_room: list[bytes] = []
        for place in result.refused:
            self._skip(span, keys[place], SkipReason.NOT_ADMITTED)
        for place, key in enumerate(keys):
            sources = device_blocks[place * self._chunk : (place + 1) * self._chunk]
            if self.readable(key) or place in result.refused:
                continue
            under_copy = not busy.isdisjoint(sources)
            if place not in stored | waits:
                if under_copy:
                    continue  # It is being stored from there.
                reason = SkipReason.OLDER_EPOCH
            elif key in self.here or key in new:
                reason = SkipReason.KEY_IN_FLIGHT
            elif under_copy or not taken.isdisjoint(sources):
                reason = SkipReason.DEVICE_BLOCK_IN_FLIGHT
            else:
                new.add(key)
                taken.update(sources)
                if place not in stored and place not in again:
                    no_room.append(key)
                continue
            if place not in again:
                self._skip(span, key, reason)
        for key in no_room:
            self._skip(span, key, SkipReason.TOO_MANY_TRANSFERS if full else SkipReason.POOL_FULL)

    def after_skip(
        self,
        span: Span,
        _: None,
        owners: Owners,
        keys: Sequence[bytes],
        reason: SkipReason,
    ) -> None:
        """Note blocks that the scheduler does not even offer."""
        for key in keys:
            self._skip(span, key, reason)

    def _skip(self, span: Span, key: bytes, reason: SkipReason) -> None:
        self._skipped[key] = Reason(Gone.SKIPPED, span, "StoreSkipped", skip=reason)

    # Loads and the ends of transfers.

    def after_prepare_load(
        self,
        span: Span,
        job: Any,
        request: str,
        device_blocks: Sequence[int],
        parts: Sequence[int] = (),
    ) -> None:
        """Note the load of a match, if there is a job."""
        if job is None:
            return
        blocks = [self.in_slot[slot] for slot in self._slots(job)]
        load = TransferBook(job.transfer, Direction.LOAD, (request,), blocks, self._device_blocks(job))
        self._plan(load)
        self._load_of[request] = load
        self._begins(Stay(request, "LOADING", job.transfer, (job.transfer, job.transfer)))

    def after_submit(self, _span: Span, _: None, transfers: Sequence[int]) -> None:
        """Note the submission of jobs to the workers."""
        for id in transfers:
            self.live[id].submitted = True

    def after_report(self, span: Span, result: Any, transfer: int, worker: int, good: bool, *_: Any) -> None:
        """Note a worker's report."""
        if result.rejected is not None:
            return
        book = self.live[transfer]
        book.reports[worker] = span, good
        if len(book.reports) < self._core.config.workers:
            assert result.ended is None
            return
        assert result.ended is not None
        failed = not all(one for _, one in book.reports.values())
        if book.abandoned:
            self._ends(book, span, "drained")
        elif failed:
            why = Gone.STORE_FAILED if book.direction is Direction.STORE else Gone.LOAD_FAILED
            for block in book.blocks:
                self._goes(block, Reason(why, span, "WorkerReported", transfer, book.requests))
            self._ends(book, span, "failed")
        else:
            for block in book.blocks:
                block.stored = block.stored or span
            self._ends(book, span, "completed")

    def _report_as(
        self, direction: Direction, good: bool, span: Span, result: Any, transfer: int, worker: int
    ) -> None:
        assert result.rejected is not None or self.live[transfer].direction is direction
        self.after_report(span, result, transfer, worker, good)

    def after_complete_load(self, span: Span, result: Any, transfer: int, worker: int = 0, *_: Any) -> None:
        """Note that a worker has loaded its shard."""
        self._report_as(Direction.LOAD, True, span, result, transfer, worker)

    def after_fail_load(self, span: Span, result: Any, transfer: int, worker: int = 0, *_: Any) -> None:
        """Note that a worker could not load its shard."""
        self._report_as(Direction.LOAD, False, span, result, transfer, worker)

    def after_complete_store(self, span: Span, result: Any, transfer: int, worker: int = 0, *_: Any) -> None:
        """Note that a worker has stored its shard."""
        self._report_as(Direction.STORE, True, span, result, transfer, worker)

    def after_fail_store(self, span: Span, result: Any, transfer: int, worker: int = 0, *_: Any) -> None:
        """Note that a worker could not store its shard."""
        self._report_as(Direction.STORE, False, span, result, transfer, worker)

    def after_cancel(self, span: Span, ended: Any, transfer: int) -> None:
        """Note the cancellation of a plan before its submission."""
        if ended is None:
            return
        book = self.live[transfer]
        if book.direction is Direction.STORE:
            for block in book.blocks:
                self._goes(block, Reason(Gone.CANCELLED, span, "TransferCancelled", transfer, book.requests))
        self._ends(book, span, "cancelled")

    def after_lose(self, span: Span, ended: Any, transfer: int) -> None:
        """Note that a transfer is given up."""
        if ended is not None:
            self._lose(span, transfer)

    def after_lose_overdue(self, span: Span, lost: Sequence[Any]) -> None:
        """Note that all overdue transfers are given up, with one event each."""
        assert len(lost) == span[1] - span[0] + 1
        for number, ended in enumerate(lost, span[0]):
            self._lose((number, number), ended.transfer)

    def _lose(self, span: Span, transfer: int) -> None:
        book = self.live[transfer]
        for block in book.blocks:
            self._goes(block, Reason(Gone.LOST, span, "TransferLost", transfer, book.requests))
        if book.direction is Direction.LOAD:
            self._retired.update(book.device_blocks)
        self._ends(book, span, "lost")

    def after_reset(self, span: Span, _: bool, *__: Any) -> None:
        """Note a reset: no block stored so far may match."""
        if span[1] < span[0]:
            assert not self.here
            return
        self.resets.append(span)
        for block in list(self.here.values()):
            self._goes(block, Reason(Gone.RESET, span, "CacheReset"))
        for book in list(self.live.values()):
            if book.submitted:
                book.abandoned = True
            else:
                self._ends(book, span, "cancelled")

    def restarted(self, core: Offloader) -> None:
        """Note a restart, the log's last event: another core takes over the readable blocks."""
        span = len(self._log), len(self._log)
        self.restarts.append(span)
        for book in list(self.live.values()):
            if book.direction is Direction.STORE:
                for block in book.blocks:
                    self._goes(block, Reason(Gone.RESTART, span, "Restarted", book.id, book.requests))
            self._ends(book, span, "cut off")
        for request in list(self._waiting):
            self._wakes(request, span)
        self._patience.clear()
        self._load_of.clear()
        self._retired.clear()
        self._keep_of(core)

    def _ends(self, book: TransferBook, span: Span, outcome: str) -> None:
        book.ended, book.outcome = span, outcome
        del self.live[book.id]
        for stay in list(self._waiting.values()):
            if stay.transfer == book.id:
                self._wakes(stay.request, span)


def _names(owners: Owners, count: int) -> list[str]:
    """Return the owner of each key of an offer; empty for a key without an owner."""
    if not owners:
        return [""] * count
    ends = list(accumulate(keys for _, keys in owners))
    return [next(name for (name, _), end in zip(owners, ends) if place < end) for place in range(count)]
