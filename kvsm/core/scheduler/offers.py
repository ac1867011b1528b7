"""Decide which chunks of which requests are offered for a store, in which step, and when again.

A chunk of a request is confirmed, then offered, then settled:

- confirmed (`TrackedRequest.confirmed_tokens`): the engine has certainly computed it;
- offered: it was in an `OfferBatch`, of a step or of the end of its request;
- settled: it is stored or in flight, or will never be stored; otherwise it waits and is offered again.

Each request's cursors are in the ledger. `OffersState` has what else the next offers need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import CodeType, FunctionType
from typing import Annotated, Any, NamedTuple

import msgspec

from kvsm.core import native
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY, Seen, declared, filled
from kvsm.core.offloader import Offloader, PreparedStore
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler import offer_batch
from kvsm.core.scheduler.device_blocks import DeviceBlocks
from kvsm.core.scheduler.groups import FULL, SchedulerConfig, StoreMode
from kvsm.core.scheduler.offer_batch import OfferBatch, OfferedChunks, ReachedCursors
from kvsm.core.scheduler.payloads import describe
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.core.scheduler.tracked import NO_TOKENS, TrackedRequest
from kvsm.events import Offer, SkipReason

Requests = Mapping[str, TrackedRequest]
States = Sequence[tuple[int, int, int]]
"""Mamba states, each (group, device block, tokens of the prefix)."""
AddToPlan = Callable[[TransferJob], None]
"""Adds the job of a store to the step's plan. Called before the cursors move."""


@declared
class OffersState(msgspec.Struct):
    """What the next offers need besides the cursors. Empty at first."""

    awaiting: Annotated[
        dict[str, TrackedRequest],
        filled(lambda one, names: [names.requests[name] for name in one.awaiting]),
    ]
    """The requests whose chunks wait to be offered again, in that order."""
    stamp: Annotated[
        RetryStamp,
        Seen(lambda one, names: one.stamp.seen(names.ledger) if one.awaiting else NOBODY),
    ]
    """The stamp of the last offer. It is only read while a request waits."""
    crowded: Annotated[
        dict[str, Sequence[int]],
        Seen(lambda one, names: one.names_less(names.ledger) if one.crowded and one.awaiting else None),
    ]
    """The requests of the last offer, with their cursors before it, if the offer lacked room although slots
    were available: an offer cannot evict keys that it names itself. Otherwise empty."""

    def names_less(self, ledger: Ledger) -> bool:
        """Whether another offer would name other blocks than the last one."""
        return _cursors(ledger, self.awaiting) != self.crowded

    def tries_again(self, ledger: Ledger, due: Collection[str]) -> bool:
        """Whether to offer the waiting requests now. due: the requests with new chunks in this step."""
        if not self.awaiting:
            return False
        if self.stamp != RetryStamp.of(ledger):
            return True
        return bool(self.crowded) and (bool(due) or self.names_less(ledger))

    def note_offer(self, ledger: Ledger, prepared: PreparedStore, crowded: dict[str, Sequence[int]]) -> None:
        """Note an offer and its result. crowded: its requests with their cursors before it, if chunks had to
        wait because the host was full; otherwise empty."""
        self.stamp = RetryStamp.after(ledger, prepared)
        self.crowded = crowded if self.stamp.available_slots else {}


class StoreOffers:
    """Offers the chunks of an engine's requests for stores: in its steps, and at the end of each request.

    `requests` in its calls: the engine's unfinished requests, by name.
    """

    def __new__(cls, *_: object, **__: object) -> StoreOffers:
        """Make it with the native or the Python body (`kvsm.core.native`)."""
        return super().__new__(NativeStoreOffers if cls is StoreOffers and native.runs() else cls)

    def __init__(self, offloader: Offloader, config: SchedulerConfig, device_blocks: DeviceBlocks) -> None:
        self._offloader, self._config, self._device_blocks = offloader, config, device_blocks
        self.state = OffersState({}, RetryStamp.of(offloader.ledger), {})
        self._blocks_per_chunk = offloader.config.blocks_per_chunk
        self._stores_early = config.store is StoreMode.EAGER
        self._has_drafter = any(group.drafter for group in config.groups)
        """Whether a group holds back its last chunk until the request ends."""

    def is_eager(self, tracked: TrackedRequest) -> bool:
        """Whether the chunks of this request are offered as soon as they are confirmed."""
        return self._stores_early or tracked.remote_decode

    def due(self, requests: Requests, scheduled: Iterable[str]) -> dict[str, TrackedRequest]:
        """Return the scheduled requests that may have a chunk to offer. An idle step costs only this."""
        due = {}
        for name in scheduled:
            tracked = requests.get(name)
            if tracked is None:
                continue
            request = tracked.request
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            if confirmed >= tracked.next_offer and self.is_eager(tracked):
                due[name] = tracked
        return due

    def offer_in_step(
        self,
        requests: Requests,
        scheduled: Iterable[str],
        boundary_states: Mapping[str, States],
        add_to_plan: AddToPlan,
    ) -> None:
        """Offer newly confirmed chunks, waiting chunks, and the mamba states that the engine hands over."""
        ledger, state = self._offloader.ledger, self.state
        due = self.due(requests, scheduled)
        if state.tries_again(ledger, due):
            due.update(state.awaiting)
        if not due and not boundary_states:
            return
        batch = self._batch()
        self.collect_due(batch, due)
        for name, states in boundary_states.items():
            owner = requests.get(name)
            if owner is not None and self.is_eager(owner):
                for group, block, tokens in states:
                    batch.hand_over(owner, group, block, tokens)
        prepared = self._offer(batch, add_to_plan)
        crowded = _cursors(ledger, due) if prepared.lacks_room else {}
        batch.advance(prepared)
        state.note_offer(ledger, prepared, crowded)
        for name, tracked in due.items() if prepared.deferred or state.awaiting else ():
            entry = ledger.requests.get(name)
            if entry is not None and entry.settled != entry.offered:
                state.awaiting[name] = tracked
            else:
                state.awaiting.pop(name, None)

    def collect_due(self, batch: OfferBatch, due: dict[str, TrackedRequest]) -> None:
        """Add the chunks of these requests to a batch."""
        for tracked in due.values():
            batch.collect(tracked)

    def offer_at_end(self, tracked: TrackedRequest, add_to_plan: AddToPlan) -> None:
        """Offer the unsettled chunks of a request that has just finished, for the last time."""
        ledger = self._offloader.ledger
        everything = tracked.remote_decode or (
            not tracked.refused
            and ledger.forgotten_at > tracked.watched_from
            and self._lost_something(tracked)
        )
        if not everything and not self._has_more_to_offer(tracked):
            return
        batch = self._batch()
        batch.collect(tracked, finished=True, everything=everything)
        if ledger.draining():
            batch.skip(SkipReason.DRAINING)
        else:
            batch.advance(self._offer(batch, add_to_plan))

    def _batch(self) -> OfferBatch:
        return OfferBatch(self._offloader, self._config, self._device_blocks.pool)

    def _offer(self, batch: OfferBatch, add_to_plan: AddToPlan) -> PreparedStore:
        prepared, publisher = batch.store(), self._offloader.publisher
        job = prepared.job
        if job is not None:
            add_to_plan(job)
            if publisher is not None:
                stored = batch.stored(prepared)
                publisher.describe(job.transfer, describe(self._config, self._blocks_per_chunk, stored))
        return prepared

    def _has_more_to_offer(self, tracked: TrackedRequest) -> bool:
        """Whether a request at its end may have chunks that were never offered, or that wait."""
        entry = self._offloader.ledger.requests.get(tracked.name)
        if entry is None or entry.settled != entry.offered or self._has_drafter:
            return True
        request = tracked.request
        return request.num_computed_tokens - request.num_output_placeholders >= tracked.next_offer

    def _lost_something(self, tracked: TrackedRequest) -> bool:
        """Whether the host has lost chunks that were stored from this request, or that its load brought."""
        ledger = self._offloader.ledger
        entry = ledger.requests.get(tracked.name)
        return tracked.lacks_a_key(ledger.index, () if entry is None else entry.settled, self._config)

    def move_back(self, requests: Requests, failed: Set[bytes]) -> None:
        """Let requests offer the chunks with these keys again, because their stores have failed.

        This affects requests that still have the blocks. Preempted requests have no cursors. After a reset no
        request has cursors until the last copy of the older epoch has ended.
        """
        ledger, moved = self._offloader.ledger, list[Offer]()
        for name, tracked in requests.items():
            entry = ledger.requests.get(name)
            if entry is None or not entry.settled:
                continue
            settled = tracked.settled_before(entry.settled, entry.offered, failed)
            if settled != entry.settled:
                moved.append((name, settled, entry.offered))
                self.state.awaiting[name] = tracked
        self._offloader.advance(moved)

    def move_behind(self, requests: Requests, loaded: Iterable[str], chunk_tokens: int) -> None:
        """Set the first cursors of requests whose loads have just brought all of their full chunks.

        The host had these chunks just now, so the next offer waits until another chunk is full. Use this only
        with full attention: other layers do not load all chunks.
        """
        ledger, moved = self._offloader.ledger, list[Offer]()
        for name in loaded:
            tracked, entry = requests.get(name), ledger.requests.get(name)
            if tracked is not None and entry is not None and not entry.settled:
                chunks = tracked.settle_loaded(chunk_tokens)
                if chunks:
                    moved.append((name, (chunks,), (chunks,)))
        self._offloader.advance(moved)


def _cursors(ledger: Ledger, requests: Iterable[str]) -> dict[str, Sequence[int]]:
    """Return each request's settled cursors, by group: the chunk from which it offers. Empty: the first."""
    records = ledger.requests
    return {name: records[name].settled if name in records else () for name in requests}


class NativeStoreOffers(StoreOffers):
    """`StoreOffers` with native `due` and `collect_due`. Their rare cases fall back to Python.

    If a program replaces a function that has a twin in C, or the code of one, the Python body runs.
    """

    def due(self, requests: Requests, scheduled: Iterable[str]) -> dict[str, TrackedRequest]:
        due = None
        if not _any_replaced(_TWINS_OF_DUE):
            due = native.find_due(requests, scheduled, self._stores_early)
        return super().due(requests, scheduled) if due is None else due

    def collect_due(self, batch: OfferBatch, due: dict[str, TrackedRequest]) -> None:
        if _any_replaced(_TWINS_OF_COLLECT):
            super().collect_due(batch, due)
        else:
            native.collect_due(batch, due)


class _Twin(NamedTuple):
    """A function that has a twin in C (`kvsm/core/native/offers.c`)."""

    owner: Any
    name: str
    function: FunctionType
    code: CodeType


def _twins(owner: Any, *names: str) -> list[_Twin]:
    return [_Twin(owner, name, getattr(owner, name), getattr(owner, name).__code__) for name in names]


_TWINS_OF_DUE = _twins(StoreOffers, "due", "is_eager")
_TWINS_OF_COLLECT = [
    *_twins(StoreOffers, "collect_due"),
    *_twins(OfferBatch, "collect", "_add", "_counts_offers", "_open"),
    *_twins(TrackedRequest, "full_chunks", "confirmed_tokens", "store_limit", "make_keys"),
    *_twins(offer_batch, "_later"),
]


def _any_replaced(twins: list[_Twin]) -> bool:
    for owner, name, function, code in twins:
        if getattr(owner, name) is not function or function.__code__ is not code:
            return True
    return False


native.connect_offers(OfferBatch, OfferedChunks, ReachedCursors, FULL, NO_TOKENS)
