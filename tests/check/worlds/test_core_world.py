"""The core world: the real core keeps all its promises in it, and each broken promise is detected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from core_walks import walked
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_bugs import evict_what_is_pinned, free_slots_under_copies, plant, take_doubled_reports

from examples import examples
from kvsm.check.explore.coverage import forget, never_taken, taken
from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.walk import random_of, walk
from kvsm.check.worlds.core_options import CoreOptions, draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.check.worlds.world import Action
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Provenance, requests, transfers
from kvsm.core.offloader import Offloader, storing
from kvsm.core.offloader.storing import PreparedStore
from kvsm.core.policies.lru import LRUPolicy
from kvsm.errors import PropertyBroken
from kvsm.events import (
    KINDS,
    HintAnswered,
    OffloadingEvent,
    ReportRejected,
    SkipReason,
    SlowHitFound,
    StoreSkipped,
    TimesMeasured,
)
from kvsm.properties import Property

SMALL = CoreOptions(host_blocks=2, chunks=2, workers=1, requests=1, prompts=1, length=2)
Plant = Callable[[pytest.MonkeyPatch], None]


def drawn_world(random: Random) -> CoreWorld:
    return CoreWorld(draw_options(random))


def encoded(events: list[OffloadingEvent]) -> bytes:
    return msgspec.msgpack.encode(events)


# The real core.


def test_the_core_keeps_every_promise() -> None:
    """15,000 actions in drawn configurations, each with compared answers, and then rest (S1 to S14)."""
    result = walk(drawn_world, seed=20, operations=15_000)
    assert result.failure is None, result.failure
    assert result.operations >= 15_000
    assert result.most_in_flight >= 4


@pytest.mark.parametrize("policy", ["auto", REFUSING])
def test_the_core_keeps_every_promise_while_its_policy_refuses_blocks(policy: str) -> None:
    """A refused block is neither stored nor deferred, and the log gives the reason (S13)."""
    logs = list[list[OffloadingEvent]]()

    def world(random: Random) -> CoreWorld:
        drawn = CoreWorld(msgspec.structs.replace(draw_options(random), policy=policy))
        logs.append(drawn.events)
        return drawn

    result = walk(world, seed=20, operations=examples(15_000, least=5_000))
    assert result.failure is None, result.failure
    skips = [event for log in logs for event in log if isinstance(event, StoreSkipped)]
    assert any(skip.reason is SkipReason.NOT_ADMITTED for skip in skips)


def test_a_walk_meets_every_event_and_nearly_every_edge() -> None:
    """The events and edges that it cannot reach are listed here, so that no other is missed unnoticed."""
    forget()
    kinds = set()
    for run in range(120):
        world, _ = walked(draw_options(random_of(7, run)), run, 600)
        kinds |= {type(event) for event in world.events}
    others = {HintAnswered, TimesMeasured, SlowHitFound}
    assert kinds == set(KINDS) - others, "the targets `hints` and `slow-loads` walk them"
    missing = {str(edge).split(" (")[0] for edge in never_taken(taken())}
    assert missing <= _OUT_OF_REACH | _RARE


_OUT_OF_REACH = {
    # A reset cancels plans, and invalidates what was ever used.
    "block FREE --INVALIDATE--> FREE",
    "block ALLOCATED --INVALIDATE--> EVICTED",
    # The core does not store a device block that a store reads (S13).
    "lease READING --BEGIN_READ--> READING",
    "lease READING --END_READ--> READING",
    # That a request misses again is no event; and it is told nothing while its load runs (S4).
    "request RUNNING --MISS--> RUNNING",
    "request RUNNING --END_LOAD--> RUNNING",
    "request RUNNING --FINISH--> FINISHED",
    "request MATCHED --FINISH--> FINISHED",
    "request LOADING --FINISH--> RELEASED",
}
_RARE = {
    # Two loads read one slot, and a reset or a loss comes between them.
    "block QUARANTINED --END_COPY_GOOD--> QUARANTINED",
    "block QUARANTINED --INVALIDATE--> QUARANTINED",
    "block RETIRED --LOSE--> RETIRED",
    # The same with a load that failed, before a restart brings the slot back.
    "block RETIRED --INVALIDATE--> RETIRED",
    # A request that waits for its own load waits no longer, and ends.
    "request NEW --FINISH--> FINISHED",
}


# What a world promises.


def test_a_walk_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It makes wrong calls on purpose, after restarts too; a warning for each would flood the output."""
    walked(CoreOptions(), 4, 1_000)
    assert caplog.records == []


def test_the_same_actions_give_the_same_log() -> None:
    """Determinism (S11): the logs are equal byte for byte."""
    first, actions = walked(CoreOptions(), 4, 500)
    second = rerun(CoreWorld, actions)
    assert second.finding is None
    assert encoded(list(second.world.events)) == encoded(list(first.events))


_LOG_OF_A_WALK = """
from random import Random
from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.refusing_policy import REFUSING
world, random = CoreWorld(CoreOptions(policy="arc")), Random(4)
for _ in range(400):
    world.do(world.draw(random))
print(world.events)
"""


def test_the_hash_seed_decides_nothing() -> None:
    """Determinism (S11): processes with different hash seeds draw the same actions, and log equal events."""
    told = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        told.add(subprocess.check_output([sys.executable, "-c", _LOG_OF_A_WALK], env=environment))
    assert len(told) == 1


@settings(max_examples=examples(25), deadline=None)
@given(kept=st.lists(st.booleans(), min_size=150, max_size=150), seed=st.integers(0, 5))
def test_a_run_from_which_actions_were_left_out_is_a_run(kept: list[bool], seed: int) -> None:
    """Actions name objects by position, because reduction needs that any part of a run can be done."""
    _, actions = walked(CoreOptions(blocks_per_chunk=2, policy="s3fifo"), seed, 150)
    outcome = rerun(
        lambda: CoreWorld(CoreOptions(blocks_per_chunk=2, policy="s3fifo")),
        [action for action, is_kept in zip(actions, kept) if is_kept],
    )
    assert outcome.finding is None


def test_all_that_may_happen_is_listed() -> None:
    """Each drawn action is among the listed ones, and each listed action can be tried in a separate world."""
    world, done = walked(SMALL, 1, 60)
    listed = world.actions()
    assert len(set(listed)) == len(listed)
    assert {world.draw(Random(seed)) for seed in range(160)} <= set(listed)
    for action in Random(2).sample(listed, 120):
        assert rerun(lambda: CoreWorld(SMALL), [*done, action]).finding is None


def test_what_cannot_happen_changes_nothing() -> None:
    world = CoreWorld(SMALL)
    for action in (("land", 0, 0), ("report", 0, 0), ("cancel", 0), ("load", 0, 1, 0), ("no such thing",)):
        assert not world.do(action)
    assert len(world.events) == 1


def test_a_late_report_reaches_the_core() -> None:
    """Stale reports (S5): the world gives the core a report on a transfer that has ended."""
    world, _ = walked(draw_options(Random(1)), 1, 200)
    ended = world._bench.ended[0]
    assert world.do(("report_late", 0, 0, 1))
    rejected = world.events[-1]
    assert isinstance(rejected, ReportRejected)
    assert rejected.transfer == ended.id


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda one: {"resident": one.resident + 1}, "does not name what is stored"),
        (lambda _: {"job": None}, "keys are to be stored, but the job is None"),
    ],
)
def test_a_wrong_result_of_an_offer_is_seen(
    changed: Callable[[PreparedStore], dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Offloader.store

    def stored(core: Offloader, *offer: Any) -> PreparedStore:
        outcome = store(core, *offer)
        return msgspec.structs.replace(outcome, **changed(outcome))

    monkeypatch.setattr(Offloader, "store", stored)
    failure = walk(drawn_world, 1, runs=8).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_ONCE
    assert says in failure.finding.message


def test_an_answer_to_a_repeated_match_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    match, last = Offloader.match, list[Any]()

    def matched(core: Offloader, *asked: Any) -> Any:
        found = match(core, *asked)
        is_repeated, last[:] = last == [*asked], asked
        return msgspec.structs.replace(found, hits=found.hits + 1) if is_repeated else found

    monkeypatch.setattr(Offloader, "match", matched)
    failure = walk(drawn_world, 1, runs=1).failure
    assert failure is not None
    assert "asked the same again" in failure.finding.message


def test_a_flush_that_names_another_transfer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = Offloader.flush
    monkeypatch.setattr(
        Offloader, "flush", lambda core, *named: flush(core, *named) + (() if named else (10**6,))
    )
    failure = walk(drawn_world, 1, runs=4).failure
    assert failure is not None
    assert failure.finding.property is Property.LAST_STEP
    assert "the copies under way are" in failure.finding.message


def test_winding_down_ends_at_rest() -> None:
    """Progress (S9): all kinds of copies end, all requests finish, and `check` finds nothing left."""
    world, _ = walked(CoreOptions(), 11, 300)
    assert world.books.copies
    while (action := world.wind_down()) is not None:
        assert world.do(action)
    world.check()
    assert not world.core.ledger.transfers
    assert not world.core.ledger.requests


def test_a_favoured_world_draws_nothing_else() -> None:
    world = CoreWorld(SMALL)
    world.favour(lambda name: float(name in ("match", "tick")))
    assert {world.draw(Random(seed))[0] for seed in range(100)} == {"match", "tick"}


# Fingerprints.


def test_a_fingerprint_does_not_tell_ids_apart() -> None:
    """A request that came and went has changed only the numbers of later events, which do not matter."""
    actions: list[Action] = [("store", 0, 0, 0, 1, 0, 0, 1), ("submit", 0), ("match", 0, 0, 0, 1)]
    early, late = CoreWorld(SMALL), CoreWorld(SMALL)
    late.do(("arrive", 0))
    late.do(("finish", 0, 0))
    late.do(("end_step",))
    for action in actions:
        assert early.do(action)
        assert late.do(action)
    assert early.core.ledger.seq < late.core.ledger.seq
    assert early.fingerprint() == late.fingerprint()


@pytest.mark.parametrize(
    "action", [("land", 0, 0), ("report", 0, 0), ("reset",), ("flush",), ("tick",)], ids=str
)
def test_a_fingerprint_tells_apart_what_matters(action: Action) -> None:
    """Also moved bytes, which no event records."""
    world = CoreWorld(SMALL)
    for before in (("store", 0, 0, 0, 1, 0, 0, 1), ("submit", 0)):
        world.do(before)
    fingerprint = world.fingerprint()
    assert world.do(action)
    assert world.fingerprint() != fingerprint


# Each promise, broken once.


def publish_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker's good report ends a transfer."""
    plant(
        monkeypatch,
        transfers.worker_reported,
        "if state in _UNDER_WAY:",
        "if state in _UNDER_WAY and not event.good:",
    )


def forget_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        requests._leave,
        "unpin(ledger, request, ledger.live_pins(request), seq)",
        "request.pins = ()",
    )


def swap_places(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, storing._plan_store, "blocks, hosts)", "blocks, hosts[::-1])")


def serve_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        Offloader.lookup,
        "LookupResult.HIT if core.ledger.readable(slot) else LookupResult.HIT_PENDING",
        "LookupResult.HIT",
    )


def keep_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, transfers.worker_reported, "index.invalidate(ledger, transfer.slots, seq)", "pass")


def store_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device block that is offered again during its store is stored again, instead of passed over."""
    plant(monkeypatch, storing._admit, "return Admission.BEING_STORED", "return Admission.STORE")


def forget_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Provenance.age, "self.stale.update(self.brought)", "pass")


def say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Publisher.removed, "self.state.changes.append(RemovedKeys(keys, names))", "pass")


def wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, requests.ticked, "request.patience <= event.tick", "request.patience < event.tick - 9")


def lose_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Offloader.lose_overdue, "entry.since >= ticks", "entry.since >= ticks - 1")


def keep_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        requests._leave,
        "request.patience, request.settled, request.offered = -1, (), ()",
        "request.patience = -1",
    )


def flush_half(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Offloader.flush, "return named", "return fresh")


def evict_the_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy chooses a block that is in use."""
    plant(monkeypatch, LRUPolicy.busy, "self._queue.remove(slots)", "pass")


def publish_an_import_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's good report ends an import, before the other ranks have copied."""
    plant(
        monkeypatch,
        transfers.worker_reported,
        "if state in _UNDER_WAY:",
        "if state in _UNDER_WAY and (not event.good or len(transfer.device_blocks)):",
    )


def publish_an_import_when_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import can be matched as soon as it is submitted."""
    plant(
        monkeypatch,
        storing.import_blocks,
        "core.emit(ev.StorePlanned, _owners_of(owners, new), wanted, slots, NO_IDS, source, runs)",
        "core.emit(ev.StorePlanned, _owners_of(owners, new), wanted, slots, NO_IDS, source, runs)\n"
        "    plan = ledger.seq\n"
        "    core.emit(ev.TransfersSubmitted, (plan,))\n"
        "    for worker in range(core.config.workers):\n"
        "        core.emit(ev.WorkerReported, plan, worker, True)",
    )


def import_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        storing.import_blocks,
        "if found[place] is None}",
        "if found[place] is None or not ledger.readable(found[place])}",
    )


def evict_for_its_own_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import evicts its own resident blocks to make room for its other blocks."""
    plant(
        monkeypatch,
        storing.import_blocks,
        "_room_for(core, wanted, [*resident, *spared])",
        "_room_for(core, wanted, ())",
    )


def say_nothing_of_what_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        storing.import_blocks,
        "_skip_places(core, owners, keys, new[room:], reason, ())",
        "pass",
    )


def say_nothing_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        storing._store,
        "_skip_places(core, owners, keys, refused, SkipReason.NOT_ADMITTED, ())",
        "pass",
    )


def refuse_where_all_blocks_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core refuses a block although its policy admits all."""
    plant(
        monkeypatch,
        storing._store,
        "answer = _ask(core, owners, keys, new, deferred, parents, protected, required)",
        "answer = NotStored(new[:1])",
    )


def store_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, storing._store, "difference(refused, unasked)", "difference(unasked)")


@pytest.mark.parametrize(
    ("bug", "properties", "seed"),
    [
        (take_doubled_reports, "S2 S5 S15", 2),
        (evict_what_is_pinned, "S1 S4", 4),
        (free_slots_under_copies, "S1 S3", 1),
        (publish_at_once, "S2 S5 S8", 2),
        (forget_a_pin, "S4", 2),
        (swap_places, "S2 S7 S15", 2),
        (serve_what_is_in_flight, "S2", 2),
        (keep_what_failed, "S6 S13", 4),
        (store_twice, "S13 S8", 2),
        (forget_what_is_old, "S13 S14", 7),
        (say_nothing, "S10", 7),
        (wait_for_ever, "S9 S19", 7),
        (lose_too_early, "S9", 9),
        (keep_a_cursor, "S13", 3),
        (flush_half, "S17", 2),
        (evict_the_busy, "S1 S4", 11),
        (publish_an_import_at_once, "S2 S5", 8),
        (publish_an_import_when_it_leaves, "S2 S8 S13", 1),
        (import_what_is_in_flight, "S8 S13", 0),
        (evict_for_its_own_import, "S1 S7 S13", 0),
        (say_nothing_of_what_finds_no_room, "S13", 3),
        (refuse_where_all_blocks_are_wanted, "S13", 0),
    ],
)
def test_a_walk_finds(bug: Plant, properties: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds are those that find it soon."""
    bug(monkeypatch)
    failure = walk(drawn_world, seed=seed, operations=60_000).failure
    assert failure is not None
    assert failure.finding.property.id in properties.split(), failure.finding


@pytest.mark.parametrize("bug", [say_nothing_of_a_refusal, store_what_is_refused])
def test_a_walk_whose_policy_refuses_blocks_finds(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """No doubled or lost store (S13)."""
    bug(monkeypatch)
    options = CoreOptions(policy=REFUSING)
    failure = walk(lambda _: CoreWorld(options), seed=0, operations=5_000).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_ONCE


def test_a_second_reset_that_answers_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is legal (S8): the first reset has left nothing to do."""
    reset, calls = Offloader.reset, list[int]()

    def alternating(core: Offloader, *given: object) -> bool:
        calls.append(1)
        return reset(core, *given) == bool(len(calls) % 2)  # type: ignore[arg-type]

    world = CoreWorld(SMALL)
    monkeypatch.setattr(Offloader, "reset", alternating)
    with pytest.raises(PropertyBroken, match="the second of two resets") as caught:
        world.do(("reset",))
    assert caught.value.property is Property.LEGAL_CALLS
