"""The whole world finds nothing in unchanged code, and finds faults that only it can see."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds import whole_disk
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.serving_world import RequestSpec
from kvsm.check.worlds.whole_options import draw_whole
from kvsm.check.worlds.whole_process import MirroredLog
from kvsm.check.worlds.whole_world import (
    TroubleLevel,
    WholeBudgets,
    WholeDiskOptions,
    WholeOptions,
    WholeWorld,
)
from kvsm.check.worlds.world import World
from kvsm.core.plan import WorkerReport
from kvsm.properties import Property
from kvsm.tiers import DiskTier, warm_restart
from kvsm.tiers.disk import era
from kvsm.tiers.disk.recovery import Recovered, decide
from kvsm.tiers.fetches import Fetches


def drawn(random: Random) -> World:
    return draw_case("whole", random).make()


def found(seed: int, runs: int = 300) -> Property | str | None:
    """The property that a walk finds broken."""
    failure = walk(drawn, seed, runs=runs).failure
    return None if failure is None else failure.finding.property


def test_scheduler_and_disk_keep_every_promise() -> None:
    taken_counts()
    assert walk(drawn, 3, runs=10).failure is None
    counts = taken_counts()
    for case in ("requests that wait for host or disk", "prompts that the disk has after a kill"):
        assert counts[Property.STORED_SO_SERVED, case] > 10, case
    assert counts[Property.EVENTS_ARE_STATE, "blocks on the host that a next process finds"]
    assert counts[Property.NO_STALE_DATA, "blocks on disk that a next process finds"] > 3


def test_a_reset_that_the_log_does_not_take_makes_nothing_stale() -> None:
    """The process ends and nobody is told of the reset: the next process may serve what was stored before."""
    options = WholeOptions(
        requests=tuple([RequestSpec(tuple(range(tokens)), outputs=3) for tokens in (19, 13)]),
        device_blocks=11,
        slots=5,
        prefix_cache=True,
        chunk_tokens=64,
        blocks_per_chunk=2,
        store_threshold=2,
        budgets=WholeBudgets(resets=1, log_faults=2),
        disk=WholeDiskOptions(slots=15, places=4),
    )
    stored = ("arrive", "step", "arrive", "step", "copy 0 0", "copy 0 1", "report_all", "step")
    on_disk = ("disk 0 0", "disk 0 1", "log_fault 0 0", "log_fault 1 0", "reset")
    actions = [action.split() for action in (*stored, *on_disk)]
    typed = [(name, *map(int, numbers)) for name, *numbers in actions]
    outcome = rerun(lambda: WholeWorld(options), typed, to_rest=True)
    assert outcome.finding is None, str(outcome.finding)


def test_equal_actions_make_equal_worlds() -> None:
    worlds = [drawn(Random(5)) for _ in range(2)]
    random = Random(6)
    for _ in range(200):
        action = worlds[0].draw(random)
        assert worlds[0].do(action) == worlds[1].do(action)
    assert worlds[0].fingerprint() == worlds[1].fingerprint()
    assert worlds[0].describe() == worlds[1].describe()


def test_its_actions_are_those_that_can_happen() -> None:
    for seed in range(4):
        world, random = drawn(Random(seed)), Random(9)
        for _ in range(200):
            # A copy that was given up is offered again, as in every serving world.
            actions = [action for action in world.actions() if action[0] != "lose"]
            assert not actions or world.do(random.choice(actions))


def _never_begins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "may_begin", lambda *_: False)


def _is_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "match", lambda *_: None)


def _is_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "has", lambda *_: False)


def _forgets_a_slot(patch: pytest.MonkeyPatch) -> None:
    def forgetting(scans: list[object], era_id: bytes) -> Recovered:
        everything = decide(scans, era_id)  # type: ignore[arg-type]
        slots = dict(list(everything.slots.items())[1:])
        return Recovered(slots, everything.generations, everything.life, everything.told)

    patch.setattr(whole_disk, "decide", forgetting)


def _believes_failures(patch: pytest.MonkeyPatch) -> None:
    report = DiskTier.report
    patch.setattr(
        DiskTier,
        "report",
        lambda tier, it: report(tier, WorkerReport(it.transfer, it.worker, True)),
    )


def _keeps_what_was_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "reset", lambda *_: None)


def _has_one_era(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(era, "_why_over", lambda *_: "")


def _is_always_warm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(warm_restart, "_differences", lambda *_: [])


def _flushes_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MirroredLog, "flush", lambda *_: None)


@pytest.mark.parametrize(
    ("defect", "breaks", "seed"),
    [
        (_never_begins, {Property.STORED_SO_SERVED}, 6),
        (_is_not_held, {Property.MATCH_HOLDS}, 6),
        (_is_not_asked, {Property.STORED_SO_SERVED, Property.STORED_ONCE}, 6),
        (_forgets_a_slot, {Property.FULL_OFFLOAD}, 6),
        (_believes_failures, {Property.FAILURE_IS_NOT_SUCCESS}, 7),
        (_keeps_what_was_reset, {Property.NO_STALE_DATA, Property.CONSERVATION}, 8),
        (_has_one_era, {Property.NO_STALE_DATA}, 3),
        (_is_always_warm, {Property.EVENTS_ARE_STATE}, 19),
        (_flushes_late, {Property.NO_STALE_DATA}, 1),
    ],
)
def test_what_goes_wrong_between_scheduler_and_disk_is_found(
    monkeypatch: pytest.MonkeyPatch,
    defect: Callable[[pytest.MonkeyPatch], None],
    breaks: set[Property],
    seed: int,
) -> None:
    """The seeds find each defect early."""
    defect(monkeypatch)
    assert found(seed) in breaks


def test_a_calm_run_has_no_fault_and_a_storm_more_than_rough_weather() -> None:
    drawn_levels: dict[TroubleLevel, list[int]] = {level: [] for level in TroubleLevel}
    for seed in range(60):
        options = draw_whole(Random(seed))
        budgets = msgspec.structs.asdict(options.budgets)
        faults = [budgets[name] for name in budgets if name not in ("partial", "waits", "preemptions")]
        drawn_levels[options.trouble].append(sum(faults))
    means = [sum(faults) / len(faults) for faults in drawn_levels.values()]
    assert means[0] == 0 < means[1] < means[2]
