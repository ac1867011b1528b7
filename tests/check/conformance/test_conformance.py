"""The ledger does what the declared protocol says, on the events of walks, worlds and traces; and it shows
where it does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import msgspec
import pytest
from changed_logs import changed, verified_good, write_plain
from changed_logs import lives as changed_lives
from click.testing import CliRunner, Result
from core_walks import walked
from hypothesis import given, settings
from hypothesis import strategies as st
from places import TRACE_VARIABLE
from replay_life import CONFIGS, OPERATIONS, Life, Operations, gapped, key, random_life
from scheduler_traffic import ACTS, drive

from examples import examples, seeds_of_today
from kvsm import events as ev
from kvsm.check.conformance.offload_books import offload_conformance
from kvsm.check.conformance.request_books import request_conformance
from kvsm.check.conformance.shadow import Keeper, Shadow
from kvsm.check.conformance.verdict import ProtocolMismatch, ProtocolVerdict
from kvsm.check.conformance.verifier import (
    PROTOCOLS,
    MakeConformance,
    ProtocolFollower,
    SavedState,
    verify_protocol,
)
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.model import Verdict
from kvsm.check.explore.rerun import ReachedWorld, RerunModel
from kvsm.check.scopes.serving_scopes import SCOPES as SERVING_SCOPES
from kvsm.check.worlds.core_options import draw_options
from kvsm.check.worlds.requirement import Kind, Requirement
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.cli import main
from kvsm.cli.exit_codes import ExitCode
from kvsm.core.ledger import HANDLERS, Ledger, RequestRecord
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.errors import KvsmError, LogError
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import to_list
from kvsm.states.block import BLOCK_WORDS, BlockState

CONFIG = OffloadConfig(host_blocks=4, device_blocks=4)


@cache
def follower_of(config: OffloadConfig, conformance: MakeConformance) -> tuple[ProtocolFollower, SavedState]:
    """A follower, which takes a while to make, and its state at first."""
    follower = ProtocolFollower(Ledger(config), conformance(config))
    return follower, follower.save()


def first_mismatch(
    config: OffloadConfig,
    events: Sequence[OffloadingEvent],
    every: int = 1,
    ledger: Ledger | None = None,
    conformance: MakeConformance = offload_conformance,
) -> ProtocolMismatch | None:
    """Follow these events, and compare the whole state after each `every`-th and the last one."""
    if ledger is None:
        follower, start = follower_of(config, conformance)
        follower.load(start)
    else:
        follower = ProtocolFollower(ledger, conformance(config))
    for number, event in enumerate(events, 1):
        found = follower.follow(event)
        if found is None and (number % every == 0 or number == len(events)):
            found = follower.check(event)
        if found is not None:
            return found
    return None


@pytest.fixture(params=PROTOCOLS)
def conformance(request: pytest.FixtureRequest) -> MakeConformance:
    """Each of the declared protocols."""
    return request.param  # type: ignore[no-any-return]


# The tables.


def test_every_variable_has_a_keeper_and_every_action_is_told_or_is_anothers(
    conformance: MakeConformance,
) -> None:
    """A variable or an action added to the declaration is not left out of the comparison unseen."""
    one = conformance(CONFIG)
    assert set(one.keepers) == {variable.name for variable in one.declared.variables}
    told = {action for steps in one.steps.values() for action in steps.actions}
    assert not told & set(one.unseen)
    assert told | set(one.unseen) == {action.name for action in one.declared.actions}


def test_only_what_no_log_tells_is_left_out_of_the_guards() -> None:
    """The demands that are not checked: docs/verification.md names them."""
    actions = Shadow(offload_conformance(CONFIG)).actions.values()
    assert {one.action.name: len(one.untold) for one in actions if one.untold} == {
        "compute": 1,  # no kernel is queued for the device block
        "plan_store": 1,  # no share of the new copy has moved
        "store_more": 1,
        "plan_load": 1,
        "load_more": 1,
        "submit": 1,  # the log that is written promises no block of these slots
        "report_good": 1,  # the worker has written all its copies
        "end_good": 1,
    }
    actions = Shadow(request_conformance(CONFIG)).actions.values()
    assert {one.action.name for one in actions if one.untold} == set()


# Good logs.


@settings(deadline=None, max_examples=examples(5, least=2))
@given(OPERATIONS, CONFIGS)
def test_every_life_of_the_core_is_a_run_of_the_protocol(
    operations: Operations, config: dict[str, Any]
) -> None:
    """The whole state agrees after each event, with chunks, parts, failures, losses and resets."""
    life = Life(**config).drive(operations)
    for conformance in PROTOCOLS:
        assert first_mismatch(life.config, life.events, conformance=conformance) is None


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(OPERATIONS, CONFIGS)
def test_every_life_of_the_core_is_a_run_of_the_protocol_in_many(
    operations: Operations, config: dict[str, Any]
) -> None:
    """The same with more examples."""
    life = Life(**config).drive(operations).drain()
    for conformance in PROTOCOLS:
        assert first_mismatch(life.config, life.events, conformance=conformance) is None


def test_every_action_that_an_event_may_tell_is_taken_somewhere(conformance: MakeConformance) -> None:
    """A table of steps that names an action which never comes would hide that nothing checks it."""
    taken: set[str] = set()
    for seed in (3, 4):
        life = random_life(seed, 2000, host_blocks=12)
        follower = ProtocolFollower(Ledger(life.config), conformance(life.config))
        assert [event for event in life.events if follower.follow(event) is not None] == []
        taken |= set(follower.shadow.taken)
    assert taken == set(follower.shadow.actions)


@settings(deadline=None, max_examples=examples(4, least=2))
@given(st.integers(0, 1000), st.integers(0, 300))
def test_a_log_that_begins_in_the_middle_is_followed_like_a_whole_one(seed: int, skipped: int) -> None:
    """What retention deleted is not needed: the head of the next segment has the ledger's state."""
    life = random_life(seed, 200)
    ledger = Ledger(life.config)
    for event in life.events[:skipped]:
        ledger.apply(event)
    for conformance in PROTOCOLS:
        middle = restore(snapshot(ledger))
        assert first_mismatch(life.config, life.events[skipped:], 10, middle, conformance) is None


@pytest.mark.parametrize("chunk", [1, 2])
def test_what_is_in_flight_is_known_from_the_middle_on(chunk: int, conformance: MakeConformance) -> None:
    """The reports of each transfer, and in the offload protocol the keys that its device blocks hold."""
    life = Life(blocks_per_chunk=chunk, workers=2)
    core = life.core
    core.arrive("r")
    for first in (0, 2):
        wanted = [key(first), key(first + 1)]
        job = core.prepare_store("r", wanted, [block for one in wanted for block in life.home(one)]).job
        assert job is not None
        core.submit([job.transfer])
        core.report(job.transfer, 0, first > 0, "" if first else "no room")
    whole = ProtocolFollower(Ledger(life.config), conformance(life.config))
    assert [one for event in life.events if (one := whole.follow(event))] == []
    middle = ProtocolFollower(restore(snapshot(core.ledger)), conformance(life.config))
    for name in ("report", "key") if "key" in whole.shadow.cells else ("report",):
        assert middle.shadow.cells[name].values == whole.shadow.cells[name].values, name
        assert len(middle.shadow.cells[name].values) > 0, name


def walks(seeds: range, actions: int) -> Iterator[tuple[OffloadConfig, Sequence[OffloadingEvent]]]:
    for seed in seeds:
        world, _ = walked(draw_options(Random(seed)), seed, actions)
        yield world.core.config, world.events


def test_every_walk_on_the_core_is_a_run_of_the_protocol() -> None:
    """Imports from another engine, doubled keys and late reports included."""
    imports = 0
    for config, events in walks(range(2), 400):
        imports += sum(bool(event.source) for event in events if isinstance(event, ev.StorePlanned))
        for conformance in PROTOCOLS:
            assert first_mismatch(config, events, 100, conformance=conformance) is None
    assert imports


@pytest.mark.slow
def test_every_walk_on_the_core_is_a_run_of_the_protocol_in_many() -> None:
    """The same with more walks."""
    for config, events in walks(seeds_of_today(20), 1500):
        for conformance in PROTOCOLS:
            assert first_mismatch(config, events, 50, conformance=conformance) is None


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(ACTS, st.integers(1, 3))
def test_the_scheduler_s_traffic_is_a_run_of_the_protocol(acts: list[int], workers: int) -> None:
    """With an engine that frees, computes and preempts, what the plans rely on can have come about."""
    engine = SmallEngine(host_blocks=6, device_blocks=16, workers=workers)
    drive(engine, acts)
    for conformance in PROTOCOLS:
        assert first_mismatch(engine.core.config, engine.log, 20, conformance=conformance) is None


class ConformingModel(RerunModel[ServingWorld]):
    """A scope of the serving world. In every state, the log that led there is a run of the protocol."""

    def __init__(self, scope: str) -> None:
        options = SERVING_SCOPES[scope].options
        super().__init__(scope, "", lambda: ServingWorld(options, keep_events=True))
        self.requirements = (Requirement(Kind.ALWAYS, "conforms", "", self.conforms),)
        self.states = 0

    def conforms(self, state: ReachedWorld[ServingWorld]) -> bool:
        self.states += 1
        config = state.world.engine.core.config
        events = state.world.events
        found = (first_mismatch(config, events, 1 << 30, conformance=one) for one in PROTOCOLS)
        return not any(found)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["small", "aborts", "preemptions", "evictions", "losing"])
def test_every_log_of_an_explored_scope_is_a_run_of_the_protocol(scope: str) -> None:
    """All interleavings of a small scope, each with the log of the real core on its way there."""
    model = ConformingModel(scope)
    assert explore(model).verdict is Verdict.PROVED
    assert model.states > 200


@pytest.mark.slow
@pytest.mark.skipif(TRACE_VARIABLE not in os.environ, reason=f"{TRACE_VARIABLE} names no Mooncake trace")
def test_a_third_of_a_trace_is_a_run_of_the_protocol(tmp_path: Path) -> None:
    """4,000 of 12,031 requests, with failures, preemptions and resets."""
    options = ["--copies", "simulated", "--block-bytes", "64", "--fail-rate", "0.05", "--preempt", "0.01"]
    options += [
        *("--requests", "4000", "--reset-every", "700"),
        "--trace",
        os.environ[TRACE_VARIABLE],
        "--log",
        str(tmp_path / "log"),
    ]
    assert CliRunner().invoke(main, ["run", *options]).exit_code == 0
    for conformance in PROTOCOLS:
        found = verify_protocol(tmp_path / "log", conformance=conformance)
        assert (found.verdict, found.mismatch, found.stopped) == (ProtocolVerdict.CONFORMS, None, None)
        assert sum(found.actions.values()) > 200_000


# It can fail: handlers that do something else than the protocol.

Spoiling = Callable[[Ledger, Any, "Before"], None]


class Before:
    """What a ledger was before an event."""

    def __init__(self, ledger: Ledger) -> None:
        self.blocks, self.leases = list(ledger.blocks.words), list(ledger.leases.words)
        self.index = dict(ledger.index)
        self.transfers = {id: msgspec.structs.replace(one) for id, one in ledger.transfers.items()}
        self.requests = {name: one.word for name, one in ledger.requests.items()}
        self.pins = {name: (one.pins, one.pinned_at) for name, one in ledger.requests.items()}


def keep_blocks(ledger: Ledger, event: Any, before: Before) -> None:
    """The event's slots stay as they were."""
    for slot in to_list(event.slots):
        ledger.blocks.words[slot] = before.blocks[slot]


def keep_leases(ledger: Ledger, event: Any, before: Before) -> None:
    for block in to_list(event.device_blocks):
        ledger.leases.words[block] = before.leases[block]


def free_lost_targets(ledger: Ledger, event: ev.TransferLost, before: Before) -> None:
    """The device blocks of a lost load are handed out again."""
    for block in to_list(before.transfers[event.transfer].device_blocks):
        ledger.leases.words[block] = 0


def free_under_copy(ledger: Ledger, _: ev.CacheReset, __: Before) -> None:
    """A reset frees the slots that copies still touch."""
    for slot in range(len(ledger.blocks.words)):
        if ledger.blocks.state(slot) is BlockState.QUARANTINED:
            ledger.blocks.words[slot] = BLOCK_WORDS.encode(BlockState.EVICTED)


def publish_early(ledger: Ledger, event: ev.WorkerReported, _: Before) -> None:
    """The first report of a store makes its blocks readable."""
    one = ledger.transfers.get(event.transfer)
    for slot in to_list(one.slots) if one is not None and one.keys else ():
        if ledger.blocks.state(slot) is BlockState.STORING:
            ledger.blocks.words[slot] = BLOCK_WORDS.encode(BlockState.STORED)


def publish_failed(ledger: Ledger, event: ev.WorkerReported, before: Before) -> None:
    """A store that failed is readable."""
    one = before.transfers[event.transfer]
    if event.transfer not in ledger.transfers and not event.good:
        for slot in to_list(one.slots) if one.keys else ():
            ledger.blocks.words[slot] = BLOCK_WORDS.encode(BlockState.STORED)


def keep_pins(ledger: Ledger, event: Any, before: Before) -> None:
    """A request that leaves a match keeps what it pinned."""
    if event.request in ledger.requests:
        one = ledger.requests[event.request]
        one.pins, one.pinned_at = before.pins[event.request]


def keep_key(ledger: Ledger, event: ev.TransferCancelled, before: Before) -> None:
    """The key of a cancelled store stays in the index."""
    for slot in to_list(before.transfers[event.transfer].slots):
        if before.index.get(ledger.key_of[slot]) == slot:
            ledger.index[ledger.key_of[slot]] = slot


def evict_another(ledger: Ledger, event: ev.BlocksEvicted, _: Before) -> None:
    """One more block is evicted than the event says."""
    idle = BLOCK_WORDS.encode(BlockState.STORED)
    for slot in range(len(ledger.blocks.words)):
        if ledger.blocks.words[slot] == idle and slot not in to_list(event.slots):
            ledger.blocks.words[slot] = BLOCK_WORDS.encode(BlockState.EVICTED)
            return


def end_a_lease(ledger: Ledger, _: ev.StepEnded, __: Before) -> None:
    """The end of a step ends the leases of the reading copies."""
    for block, word in enumerate(ledger.leases.words):
        ledger.leases.words[block] = 0 if word else word


def drop_a_copy(ledger: Ledger, event: ev.LoadPlanned, _: Before) -> None:
    """The last block of a load is forgotten."""
    if event.seq in ledger.transfers:
        one = ledger.transfers[event.seq]
        one.slots = one.slots[:-1]


def swap_copies(ledger: Ledger, event: ev.StorePlanned, _: Before) -> None:
    """Each block is copied to the slot of another one."""
    one = ledger.transfers[event.seq]
    one.slots = one.slots[::-1]


def count_a_report_twice(ledger: Ledger, event: ev.WorkerReported, _: Before) -> None:
    """A worker's report is not noted, so it could report again."""
    if event.transfer in ledger.transfers:
        ledger.transfers[event.transfer].reported = 0


def keep_request(ledger: Ledger, event: Any, before: Before) -> None:
    """The event does not move its request."""
    if event.request in ledger.requests and event.request in before.requests:
        ledger.requests[event.request].word = before.requests[event.request]


def forget_late(ledger: Ledger, event: ev.RequestFinished, _: Before) -> None:
    """A request that is over stays known."""
    ledger.requests.setdefault(event.request, RequestRecord(event.request))


def wait_for_ever(ledger: Ledger, event: ev.RequestDeferred, _: Before) -> None:
    """The wait has no bound."""
    ledger.requests[event.request].patience = -1


def wait_for_another(ledger: Ledger, event: ev.RequestDeferred, _: Before) -> None:
    """The request waits for a transfer that the event does not name."""
    ledger.requests[event.request].awaits += 1


def forget_the_load(ledger: Ledger, event: ev.LoadPlanned, _: Before) -> None:
    """The request does not know its load."""
    ledger.requests[event.request].load = 0


def wake_late(ledger: Ledger, _: ev.Ticked, before: Before) -> None:
    """A tick wakes nobody."""
    for name, word in before.requests.items():
        ledger.requests[name].word = word


PLANTED_IN_REQUESTS: list[tuple[type[OffloadingEvent], Spoiling, set[str], str]] = [
    (ev.HitMatched, keep_request, {"hit", "miss"}, "request"),
    (ev.HitReleased, keep_request, {"unmatch"}, "request"),
    (ev.RequestPreempted, keep_request, {"preempt"}, "request"),
    (ev.RequestFinished, forget_late, {"finish"}, "known"),
    (ev.RequestDeferred, wait_for_ever, {"defer"}, "patience"),
    (ev.RequestDeferred, wait_for_another, {"defer"}, "awaits"),
    (ev.LoadPlanned, forget_the_load, {"begin_load"}, "hold_transfer"),
    (ev.Ticked, wake_late, {"run_out"}, "awaits"),
    (ev.HitReleased, keep_pins, {"unmatch"}, "hold_request"),
]

PLANTED: list[tuple[type[OffloadingEvent], Spoiling, set[str], str]] = [
    (ev.HitMatched, keep_blocks, {"match"}, "block"),
    (ev.StorePlanned, keep_blocks, {"plan_store", "store_more"}, "block"),
    (ev.StorePlanned, keep_leases, {"plan_store", "store_more"}, "lease"),
    (ev.StorePlanned, swap_copies, {"plan_store", "store_more"}, "copy_slot"),
    (ev.LoadPlanned, keep_blocks, {"plan_load", "load_more"}, "block"),
    (ev.LoadPlanned, drop_a_copy, {"plan_load", "load_more"}, "copy_slot"),
    (ev.BlocksEvicted, keep_blocks, {"evict"}, "block"),
    (ev.BlocksEvicted, evict_another, {""}, "block"),
    (ev.TransferLost, free_lost_targets, {"lose"}, "lease"),
    (ev.CacheReset, free_under_copy, {"reset"}, "block"),
    (ev.WorkerReported, publish_early, {""}, "block"),
    (ev.WorkerReported, publish_failed, {"end_bad"}, "block"),
    (ev.WorkerReported, count_a_report_twice, {"report_good", "report_bad"}, "report"),
    (ev.HitReleased, keep_pins, {"release"}, "match_slot"),
    (ev.TransferCancelled, keep_key, {"cancel"}, "slot_key"),
    (ev.StepEnded, end_a_lease, {""}, "lease"),
]


def plant(monkeypatch: pytest.MonkeyPatch, kind: type[OffloadingEvent], spoil: Spoiling) -> None:
    """Let the handler of a kind do something else."""
    handler = HANDLERS[kind]

    def spoiled(ledger: Any, event: Any) -> Any:
        before = Before(ledger)
        ended = handler(ledger, event)
        spoil(ledger, event, before)
        return ended

    monkeypatch.setitem(HANDLERS, kind, spoiled)


def lives() -> list[Life]:
    """Lives in which every handler has something to do. In the last one a load is lost."""
    one = Life(host_blocks=4)
    one.stored("r0", [key(0), key(1)], [0, 1])
    for name in ("r1", "r2"):
        one.core.match(name, [key(0), key(1)])
    one.core.release("r2")
    one.lost(one.core.prepare_load("r1", [5, 6]))
    return [*(random_life(seed, 900) for seed in (1, 4)), one]


LIVES = lives()


def first_mismatch_of_lives(conformance: MakeConformance) -> ProtocolMismatch | None:
    for life in LIVES:
        try:
            found = first_mismatch(life.config, life.events, 25, conformance=conformance)
        except KvsmError:  # The ledger was changed so much that it refuses an event.
            found = first_mismatch(life.config, life.events, conformance=conformance)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    ("kind", "spoil", "actions", "variable"),
    PLANTED,
    ids=[f"{one[0].__name__}-{one[1].__name__}" for one in PLANTED],
)
@pytest.mark.usefixtures("_python_folds")
def test_a_handler_that_does_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[OffloadingEvent],
    spoil: Spoiling,
    actions: set[str],
    variable: str,
) -> None:
    """The first event that it spoils, the action that it is no instance of, and the field. (The event of a
    change that no action makes is found by `test_a_change_that_no_action_makes_is_traced_to_its_event`.)"""
    plant(monkeypatch, kind, spoil)
    found = first_mismatch_of_lives(offload_conformance)
    assert found is not None
    assert found.variable == variable, found.told()
    assert found.action in actions
    assert not found.action or found.kind == kind.__name__


@pytest.mark.parametrize(
    ("kind", "spoil", "actions", "variable"),
    PLANTED_IN_REQUESTS,
    ids=[f"{one[0].__name__}-{one[1].__name__}" for one in PLANTED_IN_REQUESTS],
)
@pytest.mark.usefixtures("_python_folds")
def test_a_handler_that_treats_a_request_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[OffloadingEvent],
    spoil: Spoiling,
    actions: set[str],
    variable: str,
) -> None:
    """The same for what the request protocol says."""
    plant(monkeypatch, kind, spoil)
    found = first_mismatch_of_lives(request_conformance)
    assert found is not None
    assert (found.kind, found.variable) == (kind.__name__, variable), found.told()
    assert found.action in actions
    assert found.expected != found.found


def test_an_eviction_that_a_pin_forbids_is_named_by_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that takes what no row allows: the demand of the action's guard is told."""
    life = Life(host_blocks=2, workers=1)
    life.stored("r0", [key(0)], [0])
    life.core.match("r1", [key(0)])
    monkeypatch.setitem(HANDLERS, ev.BlocksEvicted, lambda *_: None)
    seq = len(life.events) + 1
    found = first_mismatch(life.config, [*life.events, ev.BlocksEvicted(seq, 0, 0, (0,), (), seq + 1)])
    assert found is not None
    assert (found.event, found.action, found.variable) == (seq, "evict", "block")
    assert found.cell == "block of slot 0"
    assert found.expected == "block[slot 0] after EVICT is legal (a demand of its guard)"
    assert found.found == "STORED(copies=0, pins=1)"


def test_a_report_that_is_rejected_without_cause_is_named() -> None:
    """Only a late or doubled report changes nothing: the transfer of this one waits for it."""
    life = Life(host_blocks=4, workers=2)
    job = life.core.prepare_store("r0", [key(0)], [3]).job
    assert job is not None
    life.core.submit([job.transfer])
    life.core.report(job.transfer, 0, True)
    seq = len(life.events) + 1
    twice, first = (
        ev.ReportRejected(seq, 0, 0, job.transfer, worker, True, ev.RejectReason.DUPLICATE)
        for worker in (0, 1)
    )
    assert first_mismatch(life.config, [*life.events, twice]) is None
    found = first_mismatch(life.config, [*life.events, first])
    assert found is not None
    assert (found.event, found.action) == (seq, "refuse_report")


@pytest.mark.usefixtures("_python_folds")
def test_a_report_that_the_ledger_does_not_note_is_named_in_words(
    monkeypatch: pytest.MonkeyPatch, conformance: MakeConformance
) -> None:
    """The ledger has a set of workers, and the protocol a word for each worker."""
    plant(monkeypatch, ev.WorkerReported, count_a_report_twice)
    found = first_mismatch_of_lives(conformance)
    assert found is not None
    assert (found.variable, found.expected, found.found) == ("report", "reported", "not reported")


def test_device_blocks_of_another_engine_are_forgotten_after_an_import() -> None:
    """Nobody asks for them again, and a log may have millions of imports."""
    life = Life(host_blocks=4, workers=1)
    job = life.core.import_blocks((("r0", 2),), [key(0), key(1)], "engine p-1").job
    follower = ProtocolFollower(Ledger(life.config), offload_conformance(life.config))
    held = follower.shadow.cells["key"].values
    for event in life.events:
        assert follower.follow(event) is None
    assert len(held) == 2
    planned = len(life.events)
    life.ended(job)
    for event in life.events[planned:]:
        assert follower.follow(event) is None
    assert held == {}


def test_a_device_block_computed_under_a_copy_is_named() -> None:
    """The engine may not compute another key into a device block that a store still reads."""
    life = Life(host_blocks=4, workers=1)
    life.core.submit([life.core.prepare_store("r0", [key(0)], [3]).job.transfer])  # type: ignore[union-attr]
    seq = len(life.events) + 1
    store = ev.StorePlanned(seq, 0, 0, (), (key(1),), (1,), (3,))
    found = first_mismatch(life.config, [*life.events, store])
    assert found is not None
    assert (found.action, found.variable) == ("compute", "lease")


# Logs.


def kvsm(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", "--protocol", *map(str, arguments)])


def test_a_log_of_many_segments_conforms(tmp_path: Path) -> None:
    """From the first event to the last, across segments; nothing is taken on trust."""
    life = random_life(1, 600, tmp_path / "log", writer={"segment_bytes": 2000})
    life.close()
    found = verify_protocol(tmp_path / "log", every=50)
    assert (found.verdict, found.events, found.trusted) == (ProtocolVerdict.CONFORMS, len(life.events), ())


def test_a_log_without_a_whole_event_is_refused(tmp_path: Path) -> None:
    """It is not a log that conforms."""
    Life(tmp_path / "log").close()
    (segment,) = (tmp_path / "log").glob("*.kvsm")
    segment.write_bytes(segment.read_bytes()[:20])
    with pytest.raises(LogError, match="there is no whole event in this log"):
        verify_protocol(tmp_path / "log")


def test_a_log_whose_first_segments_are_gone_conforms(tmp_path: Path) -> None:
    """Retention deletes them. The answer says where a state was taken on trust."""
    random_life(1, 600, tmp_path / "log", writer={"segment_bytes": 2000}).close()
    first, *left = sorted((tmp_path / "log").glob("*.kvsm"))
    first.unlink()
    found = verify_protocol(tmp_path / "log")
    assert found.verdict is ProtocolVerdict.CONFORMS
    assert found.trusted == (int(left[0].stem),)


def test_a_log_with_a_gap_conforms_on_both_sides(tmp_path: Path) -> None:
    """After a gap the state of the next head is taken on trust."""
    gapped(tmp_path / "log")
    found = verify_protocol(tmp_path / "log")
    assert found.verdict is ProtocolVerdict.CONFORMS
    assert found.trusted


@pytest.mark.usefixtures("_python_folds")
def test_a_change_that_no_action_makes_is_traced_to_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows only when the whole state is compared, and the event is found all the same."""
    life = random_life(3, 900, tmp_path / "log", host_blocks=8)
    life.close()
    plant(monkeypatch, ev.StepEnded, end_a_lease)
    found = verify_protocol(tmp_path / "log", every=100_000).mismatch
    expected = first_mismatch(life.config, life.events)
    assert found is not None
    assert found == expected
    assert "no action of the protocol changes this" in found.told()[1]


@pytest.mark.usefixtures("_python_folds")
def test_a_cell_that_only_the_ledger_has_is_named(conformance: MakeConformance) -> None:
    """The whole comparison reads all cells of the ledger, not only those that the actions have written."""
    life = random_life(3, 900, host_blocks=8, workers=2)
    one = conformance(life.config)
    follower = ProtocolFollower(Ledger(life.config), one)
    to_see = {name for name, who in one.keepers.items() if who is Keeper.LEDGER}
    for event in life.events:
        assert follower.follow(event) is None
        for name in [*to_see]:
            values = follower.shadow.cells[name].values
            cell = next(iter(follower.books.known(name, [*values])), None)
            if cell is not None:
                value = values.pop(cell)
                found = follower.check(event)
                values[cell] = value
                assert found is not None, name
                assert found.variable == name
                assert follower.check(event) is None
                to_see.remove(name)
    assert not to_see


@pytest.mark.usefixtures("_python_folds")
def test_the_command_tells_and_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event, action, field, expected and found, for people and for scripts."""
    random_life(3, 300, tmp_path / "log", host_blocks=8).close()
    result = kvsm(tmp_path / "log")
    assert result.exit_code == 0
    assert "instance of the offload protocol's actions" in " ".join(result.stdout.split())
    plant(monkeypatch, ev.StorePlanned, keep_leases)
    result = kvsm(tmp_path / "log")
    assert result.exit_code == 1
    assert "field     lease of device block" in result.stdout
    told, _ = json.loads(kvsm("--json", tmp_path / "log").stdout)["protocols"]
    assert told["verdict"] == "differs"
    assert told["mismatch"]["kind"] == "StorePlanned"


@pytest.mark.slow
def test_every_changed_log_ends_in_a_verdict(tmp_path: Path) -> None:
    """Logs that somebody else wrote, with right checksums. What `verify` finds good conforms.

    Only a report that is rejected without cause is not seen by `verify`.
    """
    logs = changed_lives(tmp_path / "lives")
    for seed in seeds_of_today(60):
        log = write_plain(tmp_path / "log", changed(logs[seed % len(logs)], Random(seed)))
        verdicts = {verdict_of(log, conformance) for conformance in PROTOCOLS}
        assert not verified_good(log) or verdicts <= {ProtocolVerdict.CONFORMS, "refuse_report"}, seed
        rmtree(log)


def verdict_of(log: Path, conformance: MakeConformance) -> ProtocolVerdict | str | None:
    """The verdict, or the action that differs. None: the log cannot be used at all."""
    try:
        found = verify_protocol(log, conformance=conformance)
    except KvsmError:
        return None
    return found.verdict if found.mismatch is None else found.mismatch.action


def test_a_log_that_cannot_be_followed_is_undetermined(tmp_path: Path) -> None:
    """It begins while a load of parts is in flight, and the ledger does not keep which parts: exit code 3."""
    writer = {"segment_bytes": 1000, "max_bytes": 5000}
    life = Life(tmp_path / "log", blocks_per_chunk=2, workers=1, writer=writer)
    life.stored("r0", [key(0)], [0, 1])
    life.core.match("r1", [key(0)])
    life.core.prepare_load("r1", [5], [1])
    life.core.submit([life.core.ledger.seq])
    for _ in range(200):
        life.step(0, 0)
    life.close()
    found = verify_protocol(tmp_path / "log")
    assert found.verdict is ProtocolVerdict.UNDETERMINED
    assert "does not tell which parts" in str(found.stopped)
    assert kvsm(tmp_path / "log").exit_code == ExitCode.UNDETERMINED
