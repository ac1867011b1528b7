"""Verification finds a wrong fold at any interval of full checks, and names the first event.

Each fault is one missing line in the ledger or in one of its parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from replay_life import Life, full_life, offered_life

from kvsm import events as ev
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import (
    HANDLERS,
    Ledger,
    OfferHistory,
    Provenance,
    cache,
    index,
    loads,
    requests,
    stores,
    transfers,
)
from kvsm.core.policies.lru import LRUPolicy
from kvsm.explain.story import Auditor, verify_log
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states import LeaseTrigger

pytestmark = pytest.mark.usefixtures("_python_folds")


def nothing(*_: object, **__: object) -> None:
    """What a forgotten line does."""


def replace(patch: pytest.MonkeyPatch, function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put `other` where the fold finds `function`: in its module and in the table of handlers."""
    patch.setattr(sys.modules[function.__module__], function.__name__, other)
    for kind, handler in HANDLERS.items():
        if handler is function:
            patch.setitem(HANDLERS, kind, other)


def forgets(function: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: replace(patch, function, nothing)


def policy_forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(LRUPolicy, name, nothing)


def publishes_early(patch: pytest.MonkeyPatch) -> None:
    """A store is readable when it is submitted."""
    original = transfers.transfers_submitted

    def submitted(ledger: Ledger, event: ev.TransfersSubmitted) -> None:
        original(ledger, event)
        for id in event.transfers:
            for slot in ledger.transfers[id].slots:
                ledger.blocks.words[slot] += 1

    replace(patch, original, submitted)


def publishes_failures(patch: pytest.MonkeyPatch) -> None:
    """A failed store ends like a good one."""
    original = transfers.end_copies

    def end_copies(ledger: Ledger, transfer: Any, good: bool, seq: int) -> None:
        original(ledger, transfer, good or transfer.direction is ev.Direction.STORE, seq)

    replace(patch, original, end_copies)


def keeps_leases(patch: pytest.MonkeyPatch) -> None:
    replace(patch, transfers.end, transfers.close)


def drops_leases(patch: pytest.MonkeyPatch) -> None:
    """Make plans take no lease."""
    original = stores.store_planned

    def planned(ledger: Ledger, event: ev.StorePlanned) -> None:
        original(ledger, event)
        for block in event.device_blocks:
            ledger.leases.words[block] = 0

    replace(patch, original, planned)


def rejected_acts(patch: pytest.MonkeyPatch) -> None:
    """A rejected report changes the transfer."""

    def rejected(ledger: Ledger, event: ev.ReportRejected) -> None:
        if event.transfer in ledger.transfers:
            ledger.transfers[event.transfer].reported |= 1 << event.worker

    patch.setitem(HANDLERS, ev.ReportRejected, rejected)


def reset_spares(patch: pytest.MonkeyPatch) -> None:
    """A reset begins an epoch and voids nothing."""

    def reset(ledger: Ledger, event: ev.CacheReset) -> None:
        ledger.epoch = event.epoch

    patch.setitem(HANDLERS, ev.CacheReset, reset)


def publisher_forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(Publisher, name, nothing)


def wrong_victim_leaves_the_order(patch: pytest.MonkeyPatch) -> None:
    """The eviction order drops a slot that was not evicted. All counts stay right."""
    original = LRUPolicy.evicted

    def evicted(self: LRUPolicy, choice: Any, keys: Sequence[bytes]) -> None:
        others = [slot for slot in self._queue if slot not in choice.victims][: len(choice.victims)]
        original(self, choice._replace(victims=tuple(others)), keys)

    patch.setattr(LRUPolicy, "evicted", evicted)


def leaves_leases_of_chunks(patch: pytest.MonkeyPatch) -> None:
    """A store leases only the first device block of each chunk."""
    original = stores.store_planned

    def planned(ledger: Ledger, event: ev.StorePlanned) -> None:
        original(ledger, event)
        for block in to_list(event.device_blocks)[1::2]:
            ledger.leases.words[block] = 0

    replace(patch, original, planned)


def spares_what_a_lost_load_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvsm.states.lease.LOSE", LeaseTrigger.END_WRITE)


def keeps(record: str, field: str, function: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """`function` does not change this field of the ledger, or of its requests or transfers."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        def changed(ledger: Ledger, *arguments: Any) -> Any:
            things = [ledger] if record == "ledger" else list(getattr(ledger, record).values())
            before = [getattr(one, field) for one in things]
            result = function(ledger, *arguments)
            for one, value in zip(things, before):
                setattr(one, field, value)
            return result

        replace(patch, function, changed)

    return fault


def record_forgets(record: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(record, name, nothing)


def mixes_up_what_was_brought(patch: pytest.MonkeyPatch) -> None:
    original = loads.keys_by_device_block
    replace(patch, original, lambda *arguments: list(original(*arguments))[::-1])


FAULTS: list[tuple[set[str], Callable[[pytest.MonkeyPatch], None]]] = [
    ({Property.ONE_RELEASE_PER_HOLD}, forgets(requests.unpin)),
    ({Property.CONSERVATION}, policy_forgets("admitted")),
    ({Property.CONSERVATION}, policy_forgets("busy")),
    ({Property.CONSERVATION}, policy_forgets("idle")),
    ({Property.CONSERVATION}, policy_forgets("evicted")),
    ({Property.PUBLISH_AFTER_COMMIT}, publishes_early),
    ({Property.FAILURE_IS_NOT_SUCCESS}, publishes_failures),
    ({Property.ONE_RELEASE_PER_HOLD}, keeps_leases),
    ({Property.NO_REUSE_IN_FLIGHT}, drops_leases),
    ({Property.STALE_REPORTS}, rejected_acts),
    ({Property.NO_STALE_DATA}, reset_spares),
    ({Property.EVENTS_ARE_STATE}, publisher_forgets("stored")),
    ({Property.EVENTS_ARE_STATE}, publisher_forgets("removed")),
    ({Property.CONSERVATION}, wrong_victim_leaves_the_order),
]

FAULTS_OF_OFFERS: list[tuple[set[str], Callable[[pytest.MonkeyPatch], None]]] = [
    ({Property.STORED_ONCE}, forgets(stores.blocks_offered)),
    ({Property.STORED_ONCE}, keeps("requests", "settled", requests.request_preempted)),
    ({Property.STORED_ONCE}, keeps("requests", "offered", cache.cache_reset)),
    ({Property.STORED_ONCE}, keeps("ledger", "ended_at", transfers.close)),
    ({Property.STORED_ONCE}, keeps("ledger", "forgotten_at", index.remove)),
    ({Property.PROGRESS}, keeps("transfers", "since", transfers.transfers_submitted)),
    ({Property.NO_STALE_DATA}, record_forgets(Provenance, "bring")),
    ({Property.NO_STALE_DATA}, record_forgets(Provenance, "age")),
    ({Property.NO_STALE_DATA}, record_forgets(Provenance, "rewritten")),
    ({Property.NO_STALE_DATA}, mixes_up_what_was_brought),
    ({Property.EVENTS_ARE_STATE}, record_forgets(OfferHistory, "count")),
    ({Property.EVENTS_ARE_STATE}, record_forgets(OfferHistory, "forget")),
    ({Property.NO_REUSE_IN_FLIGHT}, leaves_leases_of_chunks),
    ({Property.NO_REUSE_IN_FLIGHT}, spares_what_a_lost_load_writes),
]


@pytest.mark.parametrize("every", [1, 250_000])
@pytest.mark.parametrize(("properties", "fault"), FAULTS)
def test_a_wrong_fold_is_found_at_the_event_where_it_goes_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: set[str],
    fault: Callable[[pytest.MonkeyPatch], None],
    every: int,
) -> None:
    """The interval of full checks changes neither the first event nor the property that is named."""
    life = full_life(tmp_path / "log")
    fault_is_found(life, tmp_path / "log", monkeypatch, properties, fault, every)


@pytest.mark.parametrize("every", [1, 250_000])
@pytest.mark.parametrize(("properties", "fault"), FAULTS_OF_OFFERS)
def test_a_wrong_fold_of_offers_loads_and_losses_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: set[str],
    fault: Callable[[pytest.MonkeyPatch], None],
    every: int,
) -> None:
    """The same for cursors, chunks, what loads brought, counted offers and lost transfers."""
    life = offered_life(tmp_path / "log")
    fault_is_found(life, tmp_path / "log", monkeypatch, properties, fault, every)


def fault_is_found(
    life: Life,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: set[str],
    fault: Callable[[pytest.MonkeyPatch], None],
    every: int,
) -> None:
    assert verify_log(log).good
    fault(monkeypatch)
    expected = first_broken_of(life)
    found = verify_log(log, every=every)
    assert found.breakage is not None
    assert found.breakage.event == expected
    assert properties <= {violation.property for violation in found.violations}


def first_broken_of(life: Life) -> int:
    """The first event after which a full check finds something."""
    auditor = Auditor(Ledger(life.config))
    for event in life.events:
        if auditor.apply(event) or auditor.check():
            return event.seq
    raise AssertionError("the fault has no effect in this life")
