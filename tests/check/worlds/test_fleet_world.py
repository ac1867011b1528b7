"""The fleet finds nothing in unchanged code, and finds faults that smaller worlds cannot show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.targets import case_of, draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.fleet_engine import (
    TIMEOUT_S,
    FleetEngine,
    FleetNetwork,
    OfferedBlocks,
    _check_held,
)
from kvsm.check.worlds.fleet_options import draw_fleet
from kvsm.check.worlds.fleet_world import (
    FleetBudgets,
    FleetMember,
    FleetMemberOptions,
    FleetOptions,
    FleetWorld,
)
from kvsm.check.worlds.hand_over_parts import ModelChannel
from kvsm.check.worlds.serving_world import RequestSpec
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_engine import WholeEngine
from kvsm.check.worlds.whole_process import MirroredLog
from kvsm.check.worlds.world import Action, World
from kvsm.core.plan import ImportJob, TransferJob, TransferPlan
from kvsm.core.scheduler import GroupKind, KVCacheGroup
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import HandOverState, LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import Answer, HandOverClaim

FULL = KVCacheGroup(4)
PREFILL, DECODE = 0, 1


def drawn(random: Random) -> World:
    return draw_case("fleet", random).make()


def a_fleet(
    prompt: int,
    *,
    outputs: int = 1,
    chunk: int = 1,
    groups: tuple[KVCacheGroup, ...] = (FULL,),
    decodes_too: bool = False,
    **more: Any,
) -> FleetWorld:
    """Two engines. The first has a request with a prompt of so many tokens, for the second.

    decodes_too: the second has a request of its own with this prompt.
    """
    request = RequestSpec(tuple(range(prompt)), outputs, {"do_remote_decode": True})
    member = FleetMemberOptions(
        requests=(request,),
        device_blocks=32,
        slots=8,
        workers=1,
        groups=groups,
        blocks_per_chunk=chunk,
        **more,
    )
    own = (msgspec.structs.replace(request, parameters=None),) if decodes_too else ()
    return FleetWorld(FleetOptions(members=(member, msgspec.structs.replace(member, requests=own))))


def act(world: FleetWorld, *actions: str) -> None:
    """Do these actions, each of which must be possible: "serve 1 0"."""
    for action in map(str.split, actions):
        name, *numbers = action
        assert world.do((name, *map(int, numbers))), action


def prefill(world: FleetWorld) -> None:
    """Let the first engine compute its request, and the second one get the answer."""
    act(world, "arrive 0")
    for _ in range(60):
        if world.network.answered and not world.members[PREFILL].engine.core.ledger.transfers:
            break
        action = world.members[PREFILL].wind_down()
        assert action is not None
        world.do((action[0], PREFILL, *action[1:]))
    act(world, "decode 1 0")


def rest(world: FleetWorld) -> None:
    for _ in range(2_000):
        action = world.wind_down()
        if action is None:
            world.check()
            return
        assert world.do(action)
    raise AssertionError("the fleet does not come to rest")


def imported(world: FleetWorld) -> int:
    """The number of blocks that the second engine has imported."""
    return sum(getattr(event, "source", "") == "engine 0" for event in world.members[DECODE].events)


def test_engines_that_hand_over_keep_every_promise() -> None:
    taken_counts()
    assert walk(drawn, 3, runs=6).failure is None
    counts = taken_counts()
    assert counts[Property.STORED_SO_SERVED, "hand-overs that are copied"] > 2
    assert counts[Property.CORRECT_BYTES, "hand-overs that are confirmed"] > 1
    assert counts[Property.EVENTS_ARE_STATE, "blocks on the host that a next process finds"]


@pytest.mark.parametrize(
    ("prompt", "outputs", "chunk", "groups"),
    [
        (13, 9, 2, (FULL,)),
        (13, 1, 3, (FULL, KVCacheGroup(8, GroupKind.SLIDING_WINDOW, window=1))),
    ],
    ids=["generated tokens fill the last chunk", "a group needs no block"],
)
def test_the_full_chunks_of_a_prompt_are_handed_over(
    prompt: int, outputs: int, chunk: int, groups: tuple[KVCacheGroup, ...]
) -> None:
    """The decode engine has no key of a chunk that generated tokens have filled."""
    world = a_fleet(prompt, outputs=outputs, chunk=chunk, groups=groups)
    prefill(world)
    rest(world)
    assert imported(world) == 1
    assert world.members[DECODE].engine.incoming.missed == 0


def copying(**budgets: int) -> FleetWorld:
    """A fleet whose second engine has an import in flight."""
    world = a_fleet(9, disk=WholeDiskOptions(slots=16), budgets=FleetBudgets(**budgets))
    prefill(world)
    act(world, "serve 1 0", "step 1")
    assert world.members[DECODE].engine.incoming._by_transfer
    return world


@pytest.mark.parametrize(
    "trouble",
    [
        ("kill 0 1 0 0", "copy 1 0 0", "report 1 0"),
        ("kill 0 1 1 0", "copy 1 0 0", "report 1 0"),
        ("kill 0 0 0 0", "copy 1 0 0", "report 1 0"),
        ("copy 1 0 0", "kill 0 1 0 0", "report 1 0"),
        ("copy 1 0 0", "report 1 0", "kill 0 1 0 0"),
        ("reset 0", "copy 1 0 0", "report 1 0"),
        ("cut 1 0", "copy 1 0 0", "report 1 0"),
        ("expire 0 0", "copy 1 0 0", "report 1 0"),
    ],
)
def test_blocks_are_not_believed_if_their_engine_was_killed_reset_or_late(trouble: Sequence[str]) -> None:
    world = copying(kills=2, resets=2, cuts=2, expiries=2)
    act(world, *trouble)
    rest(world)
    engine = world.members[DECODE].engine
    assert engine.incoming.missed == 1
    assert all(request.finished for request in engine.requests.values())


def test_a_decode_engine_that_is_killed_gives_up_its_claim_and_its_client_asks_again() -> None:
    world = copying(kills=1)
    killed = world.members[DECODE].engine
    act(world, "kill 1 0 0 0")
    assert world.members[PREFILL].engine.outgoing.leases._leases
    act(world, "reap 1")
    assert not world.members[PREFILL].engine.outgoing.leases._leases
    rest(world)
    (request,) = world.members[DECODE].engine.requests.values()
    assert world.members[DECODE].engine is not killed
    assert request.finished


def test_blocks_are_handed_over_without_any_trouble() -> None:
    world = copying()
    act(world, "copy 1 0 0", "report 1 0", "serve 1 0", "step 1")
    assert world.members[DECODE].engine.incoming.missed == 0
    assert len(world.members[DECODE].engine.core.ledger.index) == 2
    rest(world)


def test_equal_actions_make_equal_fleets() -> None:
    worlds = [drawn(Random(5)) for _ in range(2)]
    random = Random(6)
    for _ in range(200):
        action = worlds[0].draw(random)
        assert worlds[0].do(action) == worlds[1].do(action)
    assert worlds[0].fingerprint() == worlds[1].fingerprint()
    assert worlds[0].describe() == worlds[1].describe()


def test_its_actions_are_those_that_can_happen() -> None:
    for seed in range(3):
        world, random = drawn(Random(seed)), Random(9)
        for _ in range(150):
            # A copy that was given up is offered again, as in every serving world.
            actions = [action for action in world.actions() if action[0] != "lose"]
            assert not actions or world.do(random.choice(actions))


def test_each_engine_has_actions_and_is_described() -> None:
    world = a_fleet(9, decodes_too=True)
    assert world.actions() == [("arrive", PREFILL), ("arrive", DECODE)]
    act(world, "arrive 0", "arrive 1")
    assert {name.split(":")[0] for name in world.describe()} == {"engine 0", "engine 1"}


def test_what_concerns_a_hand_over_is_among_the_actions() -> None:
    world = a_fleet(9, readers=2, budgets=FleetBudgets(cuts=1, expiries=1))
    prefill(world)
    expected: set[Action] = {("decode", 1, 0), ("serve", 1, 0), ("cut", 1, 0), ("expire", 0, 0)}
    assert expected <= {*world.actions()}


@pytest.mark.parametrize("held", ["_by_transfer", "_imports"])
def test_an_import_needs_another_step(held: str) -> None:
    engine: Any = a_fleet(9).members[DECODE].engine
    assert not engine.has_hand_over_work()
    setattr(engine if held == "_imports" else engine.incoming, held, [None])
    assert engine.has_hand_over_work()


def test_drawn_engines_differ_and_hand_over_most_prompts() -> None:
    fleets = [draw_fleet(Random(seed)).members for seed in range(20)]
    for field in ("slots", "policy", "defer_ticks", "disk", "trouble", "budgets", "share", "readers"):
        assert any(getattr(fleet[0], field) != getattr(fleet[1], field) for fleet in fleets), field
    drawn = [one.parameters for fleet in fleets for member in fleet for one in member.requests]
    assert drawn.count({"do_remote_decode": True}) > len(drawn) / 2
    assert None in drawn


def test_an_action_of_no_engine_does_nothing() -> None:
    world = a_fleet(9)
    actions: list[Action] = [("step", 7), ("decode", 1, 3), ("serve", 1, 0), ("cut", 1, 0), ("expire", 0, 0)]
    for action in actions:
        assert not world.do(action)


@pytest.mark.parametrize("readers", [1, 2])
def test_only_so_many_requests_name_a_hand_over(readers: int) -> None:
    world = a_fleet(9, readers=readers)
    prefill(world)
    assert not world.do(("decode", PREFILL, 0))
    assert [world.do(("decode", DECODE, 0)) for _ in range(2)] == [readers == 2, False]


def test_a_saved_fleet_is_made_again() -> None:
    options = draw_fleet(Random(3))
    saved = case_of("fleet", msgspec.to_builtins(options))
    assert saved.options == options
    outcome = rerun(saved.make, [("arrive", 0), ("step", 0)], to_rest=True)
    assert outcome.finding is None


def test_members_that_cannot_hand_over_are_refused() -> None:
    one = FleetMemberOptions()
    no_share, named = FleetMemberOptions(share=0.0), FleetMemberOptions(names=1)
    for members in (
        (one,),
        (one, FleetMemberOptions(workers=1)),
        (one, no_share),
        (no_share, one),
        (named, named),
    ):
        with pytest.raises(ConfigError):
            FleetOptions(members=members)


@pytest.mark.parametrize("first", [PREFILL, DECODE])
def test_a_kill_breaks_the_connections_to_its_process(first: int) -> None:
    world = copying(kills=1)
    processes = world.network.processes
    world.network.processes = {number: processes[number] for number in (first, 1 - first)}
    act(world, "kill 0 0 0 0")
    assert not world.members[DECODE].engine.channel.open


def test_a_hand_over_is_open_until_its_lease_ends() -> None:
    world = copying()
    (sent,) = world.network.answered
    assert world.network.is_open(sent)
    rest(world)
    assert not world.network.is_open(sent)


# What its own checks find.


def a_store(slot: int) -> TransferPlan:
    return TransferPlan(stores=(TransferJob(99, Direction.STORE, [0], [slot]),))


def test_a_store_into_a_leased_slot_is_found() -> None:
    engine = copying().members[PREFILL].engine
    for slot in engine.core.ledger.index.values():
        with pytest.raises(PropertyBroken, match=rf"a copy writes host slots \[{slot}\], which hand-over"):
            engine._check_targets(a_store(slot))
        engine.disk.tier.copies[99] = SimpleNamespace(host=0)  # type: ignore[assignment]
        with pytest.raises(PropertyBroken, match=rf"a copy writes host slots \[{slot}\], which hand-over"):
            engine._check_disk_job(TransferJob(99, Direction.LOAD, (slot,), (0,)))


def test_a_store_into_a_slot_that_an_import_writes_is_found() -> None:
    engine = copying().members[DECODE].engine
    (copy,) = engine.copies.values()
    for slot in to_list(copy.job.host_blocks):
        with pytest.raises(PropertyBroken, match=rf"writes host slots \[{slot}\], which another copy"):
            engine._check_targets(a_store(slot))
    engine._imports = [ImportJob(98, "0", [0, 1], [5, 6])]
    for slot in (5, 6):
        with pytest.raises(PropertyBroken, match=rf"writes host slots \[{slot}\], which another copy"):
            engine._check_targets(a_store(slot))


def test_a_lease_that_is_still_claimed_when_nobody_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = copying()
    monkeypatch.setattr(FleetMember, "wind_down", lambda _: ("outlast",))
    with pytest.raises(PropertyBroken, match="of engine 0, but it is still claimed"):
        world.wind_down()


def test_a_lease_that_outlives_its_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = copying().members[PREFILL].engine
    monkeypatch.setattr(LeaseTable, "expire", lambda _: None)
    engine.now_s = 2 * TIMEOUT_S
    with pytest.raises(PropertyBroken, match="s ago, but still pins blocks"):
        engine.look_at_hand_overs()


def test_a_share_that_is_exceeded_and_a_wait_for_nothing_are_found() -> None:
    world = copying()
    member = world.members[PREFILL]
    (lease,) = member.engine.outgoing.leases._leases.values()
    lease.state = HandOverState.PREPARING
    with pytest.raises(PropertyBroken, match="waits, and no block of its prompt is on its way"):
        act(world, "copy 1 0 0")
    member.options = msgspec.structs.replace(member.options, share=0.1)
    with pytest.raises(PropertyBroken, match="hand-overs pin 2 slots, and their share is 1"):
        member.check_hand_overs()


def test_a_hand_over_of_another_process_or_for_a_second_reader_is_found() -> None:
    network, engine = FleetNetwork(), a_fleet(9).members[PREFILL].engine
    with pytest.raises(PropertyBroken, match="by a process that has not opened it"):
        network.check_grant("x", engine)
    network.opened("x", engine)
    network.check_grant("x", engine)
    with pytest.raises(PropertyBroken, match="to a second reader"):
        network.check_grant("x", engine)


def test_a_confirmation_by_another_process_or_after_a_reset_is_found() -> None:
    other, engine = (member.engine for member in a_fleet(9).members)
    epoch = engine.core.ledger.epoch
    _check_held("x", engine, OfferedBlocks(engine, epoch, ()))
    for wrong in (OfferedBlocks(other, epoch, ()), OfferedBlocks(engine, epoch - 1, ())):
        with pytest.raises(PropertyBroken, match="its engine was killed or reset since the offer"):
            _check_held("x", engine, wrong)
    with pytest.raises(PropertyBroken, match="which has lost the offered block"):
        _check_held("x", engine, OfferedBlocks(engine, epoch, ((0, b"key", 1),)))


LEFT: dict[str, Callable[[Any], Any]] = {
    "leases": lambda engine: engine.outgoing.leases._leases.update(x=None),
    "hand-overs": lambda engine: engine.outgoing._out.update(x=None),
    "stores that hand-overs wait for": lambda engine: engine.outgoing._awaiting.update({1: {}}),
    "pinned slots": lambda engine: engine.outgoing._holders.put(0, 1),
    "claims": lambda engine: engine.incoming._by_ticket.update({1: None}),
    "requests with a claim": lambda engine: engine.incoming._by_request.update(x=None),
    "imports": lambda engine: engine.incoming._by_transfer.update({1: None}),
    "connections": lambda engine: engine.channel.open.append(None),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_hand_over_leaves_at_rest_is_found(what: str) -> None:
    member = a_fleet(9).members[DECODE]
    assert member.is_at_rest()
    LEFT[what](member.engine)
    with pytest.raises(PropertyBroken, match=f"at rest, 1 {what} are left"):
        member.engine.check_no_hand_over_is_left()
    if what == "requests with a claim":  # Nothing else is done for it on the way to rest.
        with pytest.raises(PropertyBroken, match="at rest, 1 "):
            member.is_at_rest()


def test_a_decode_engine_that_hides_the_reason_why_it_declines_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has computed the prompt itself, and says that it has given up."""
    give_back = ModelChannel.give_back
    world = a_fleet(9, decodes_too=True)
    act(world, "arrive 1")
    while action := world.members[DECODE].wind_down():
        act(world, " ".join(map(str, (action[0], DECODE, *action[1:]))))
    prefill(world)
    act(world, "serve 1 0")
    monkeypatch.setattr(
        ModelChannel, "give_back", lambda channel, ticket, *, read, **_: give_back(channel, ticket, read=read)
    )
    with pytest.raises(PropertyBroken, match="has given up, and lacks 0 blocks"):
        act(world, "step 1")


def test_an_import_that_leaves_before_its_event_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = a_fleet(9, budgets=FleetBudgets(kills=1))
    prefill(world)
    act(world, "serve 1 0")
    monkeypatch.setattr(MirroredLog, "flush", lambda _: None)
    with pytest.raises(PropertyBroken, match="leaves, but the log on disk ends"):
        act(world, "step 1")


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda ledger, slot: ledger.index.pop(ledger.key_of[slot]),
        lambda ledger, slot: ledger.generation.__setitem__(slot, ledger.generation[slot] + 1),
    ],
    ids=["not in the index", "of another store"],
)
def test_a_leased_block_that_changes_is_found_by_any_action(
    place: int, change: Callable[[Any, int], Any]
) -> None:
    world = copying()
    ledger = world.members[PREFILL].engine.core.ledger
    change(ledger, [*ledger.index.values()][place])
    with pytest.raises(PropertyBroken, match="which has lost the offered block"):
        act(world, "copy 1 0 0")


def test_an_import_into_a_slot_that_a_disk_copy_touches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = copying().members[DECODE].engine
    engine._imports = [ImportJob(98, "0", (0, 1), (5, 6))]
    monkeypatch.setattr(engine.disk, "touched", lambda: [("", [6, 5], None)])
    with pytest.raises(PropertyBroken, match=r"writes host slots \[5, 6\], which another copy"):
        engine._check_targets(TransferPlan())


def test_a_confirmation_of_blocks_that_a_reset_has_ended_is_found_when_it_is_served() -> None:
    world = copying()
    read = world.members[DECODE].engine._read
    act(world, "copy 1 0 0", "report 1 0")
    read.update({ticket: blocks._replace(epoch=-1) for ticket, blocks in read.items()})
    with pytest.raises(PropertyBroken, match="its engine was killed or reset since the offer"):
        act(world, "serve 1 0")


@pytest.mark.parametrize("number", [PREFILL, DECODE])
def test_each_engine_is_checked(number: int) -> None:
    world = copying()
    engine = world.members[number].engine
    engine.core.ledger.free.remove(tuple(engine.core.ledger.free)[:1])
    with pytest.raises(PropertyBroken):
        world.check()


# Faults that the targets `whole` and `hand-over` cannot show.


def _keeps_the_leases_of_a_killed_process(patch: pytest.MonkeyPatch) -> None:
    begin = FleetEngine.__init__

    def with_old_leases(engine: FleetEngine, *options: Any, **more: Any) -> None:
        before = more["network"].processes.get(more["number"])
        begin(engine, *options, **more)
        if before is not None:
            engine.outgoing.leases._leases.update(before.outgoing.leases._leases)
            engine.outgoing._out.update(before.outgoing._out)

    patch.setattr(FleetEngine, "__init__", with_old_leases)


def _grants_a_claim_twice(patch: pytest.MonkeyPatch) -> None:
    claim = LeaseTable.claim

    def forgetful(table: LeaseTable, asked: HandOverClaim, reader: int) -> Answer:
        lease = table._leases.get(asked.hand_over)
        if lease is not None and lease.offer is not None:
            lease.state = HandOverState.READY
        return claim(table, asked, reader)

    patch.setattr(LeaseTable, "claim", forgetful)


def _imports_what_was_claimed_before_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IncomingHandOvers, "reset", lambda *_: None)


def _digests_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetEngine, "_digest", lambda _, request, count: repr(request.cells[count - 1]).encode())


def _offers_chunks_with_generated_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutgoingHandOvers, "_prompt_keys", lambda _, tracked, __: tracked.all_keys())


def _does_not_look_after_a_report_of_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FleetEngine, "hand_on_disk", WholeEngine.hand_on_disk)


def _reports_imports_to_the_core_alone(patch: pytest.MonkeyPatch) -> None:
    def take_hand_overs(engine: FleetEngine) -> None:
        jobs, reports = engine.incoming.look()
        engine._imports += jobs
        for report in reports:
            engine.core.report(*report.arguments())

    patch.setattr(FleetEngine, "take_hand_overs", take_hand_overs)


def _two_readers() -> None:
    world = a_fleet(9, readers=2)
    prefill(world)
    act(world, "decode 1 0", "serve 1 0", "serve 1 1")
    rest(world)


def _a_reset_of_the_decode_engine() -> None:
    world = a_fleet(9, budgets=FleetBudgets(resets=1))
    prefill(world)
    act(world, "reset 1")
    rest(world)
    assert not imported(world)


def _other_weights() -> None:
    world = a_fleet(9, budgets=FleetBudgets(kills=1))
    act(world, "kill 0 1 1 0")
    prefill(world)
    rest(world)
    assert not imported(world)


def _generated_tokens() -> None:
    world = a_fleet(13, outputs=9, chunk=2)
    prefill(world)
    rest(world)


def _an_import() -> None:
    world = copying()
    rest(world)
    assert imported(world) == 1


def _walk_from(first_run: int) -> None:
    failure = walk(drawn, 1, first_run=first_run, runs=20).failure
    if failure is not None:
        broken = failure.finding.property
        assert isinstance(broken, Property)
        raise PropertyBroken(broken, failure.finding.message)


Defect = Callable[[pytest.MonkeyPatch], None]
DEFECTS: dict[Defect, tuple[Callable[[], None], set[Property]]] = {
    _keeps_the_leases_of_a_killed_process: (
        partial(_walk_from, 3),
        {Property.NO_REUSE_IN_FLIGHT, Property.PROGRESS},
    ),
    _grants_a_claim_twice: (_two_readers, {Property.ONE_RELEASE_PER_HOLD}),
    _imports_what_was_claimed_before_a_reset: (_a_reset_of_the_decode_engine, {Property.NO_STALE_DATA}),
    _digests_no_weights: (_other_weights, {Property.CORRECT_BYTES}),
    _offers_chunks_with_generated_tokens: (_generated_tokens, {Property.STORED_SO_SERVED}),
    _does_not_look_after_a_report_of_the_disk: (partial(_walk_from, 10), {Property.PROGRESS}),
    _reports_imports_to_the_core_alone: (_an_import, {Property.EVENTS_ARE_STATE}),
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__.strip("_"))
def test_what_goes_wrong_between_engines_is_found(monkeypatch: pytest.MonkeyPatch, defect: Defect) -> None:
    scene, breaks = DEFECTS[defect]
    if not isinstance(scene, partial):  # Walks without a defect have a test of their own.
        scene()
    defect(monkeypatch)
    with pytest.raises(PropertyBroken) as raised:
        scene()
    assert raised.value.property in breaks


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__.strip("_"))
def test_the_hand_over_world_does_not_find_it(monkeypatch: pytest.MonkeyPatch, defect: Defect) -> None:
    """It has no kills, no disk, no weights and no generated tokens. The target `whole` has no hand-overs."""
    defect(monkeypatch)
    assert walk(lambda random: draw_case("hand-over", random).make(), 1, runs=60).failure is None
