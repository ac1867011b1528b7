"""The two-tier world: the real code keeps every promise in it, and planted bugs are found."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from planted_bugs import plant

from examples import examples
from kvsm.check.walks import failures
from kvsm.check.walks.drawn_options import draw_two_tier_options
from kvsm.check.walks.fuzz_target import WorldTarget
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.check.worlds.world import Action, World
from kvsm.cli import main
from kvsm.core.offloader import Offloader
from kvsm.errors import ConfigError
from kvsm.properties import Property
from kvsm.tiers import DiskTier, disk_tier
from kvsm.tiers.disk import recovery
from kvsm.tiers.fetches import Fetches


def drawn(random: Random) -> World:
    return draw_case("tiers", random).make()


def test_two_tiers_keep_every_promise_over_crashes_and_power_losses() -> None:
    """All properties in the world's docstring hold, with the real recovery. The museum's checkers walk this
    target at length, and `kvsm fuzz` does so with another seed each day."""
    assert walk(drawn, 1, runs=examples(20)).failure is None


Planted = Callable[[pytest.MonkeyPatch], None]


def nothing_is_adopted(patch: pytest.MonkeyPatch) -> None:
    """LMCache#4564: blocks on the disk are ignored after a restart."""
    patch.setattr(Offloader, "adopt_blocks", lambda *_: None)


def a_reset_begins_no_era(patch: pytest.MonkeyPatch) -> None:
    reset = DiskTier.reset

    def without_era(tier: DiskTier, weights: str | None = None) -> None:
        tier._void = lambda _: None
        reset(tier, weights)

    patch.setattr(DiskTier, "reset", without_era)


def other_meanings_are_believed(patch: pytest.MonkeyPatch) -> None:
    decide = recovery.decide

    def believing(scans: Any, era: Any) -> Any:
        for one in scans:
            one.found[:, recovery.CONDITIONS.index("same identity")] = True
        return decide(scans, era)

    patch.setattr("kvsm.check.worlds.two_tiers.decide", believing)


def places_are_kept(patch: pytest.MonkeyPatch) -> None:
    """LMCache#4546: ended copies still count as in use."""
    end = DiskTier._end
    patch.setattr(DiskTier, "_end", lambda tier, copy: end(tier, copy._replace(places=())))


def a_failed_load_is_good_for_the_host(patch: pytest.MonkeyPatch) -> None:
    """vllm#54363: bytes that failed their check are used."""
    report = Offloader.report

    def always_good(
        core: Offloader, transfer: int, worker: int, good: bool, error: str = "", *times: int
    ) -> Any:
        imported = core.config.device_blocks != core.config.host_blocks and not good and error == "it broke"
        return report(core, transfer, worker, good or imported, error, *times)

    patch.setattr(Offloader, "report", always_good)


def what_has_come_is_not_held(patch: pytest.MonkeyPatch) -> None:
    """Fetched blocks may be evicted by stores and other copies before their request asks again."""
    patch.setattr(Fetches, "match", lambda *_: None)


def what_was_there_is_held_for_ever(patch: pytest.MonkeyPatch) -> None:
    plant(patch, DiskTier._end, "self.host.finish(copy.holder)", "pass")


def a_turn_comes_after_a_copy_that_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "turn", lambda fetches: fetches._host.ledger.seq)


def uses_are_not_heard(patch: pytest.MonkeyPatch) -> None:
    """A prompt that the host serves repeatedly is never stored on the disk."""
    patch.setattr(DiskTier, "used", lambda *_: None)


def what_the_host_has_gives_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk_tier, "spared", lambda *_: ())


def the_oldest_that_wait_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """The host may still have the dropped keys, and have lost younger ones."""
    plant(patch, DiskTier.stored, "self._queue(keys)", "self._queue(list(keys)[1:])")


@pytest.mark.parametrize(
    ("bug", "broken", "seed"),
    [
        (uses_are_not_heard, Property.STORED_ONCE, 2),
        pytest.param(what_the_host_has_gives_way, Property.STORED_ONCE, 17, marks=pytest.mark.slow),
        (the_oldest_that_wait_are_dropped, Property.STORED_ONCE, 14),
        (a_reset_begins_no_era, Property.NO_STALE_DATA, 8),
        (places_are_kept, Property.CONSERVATION, 2),
        (a_failed_load_is_good_for_the_host, Property.FAILURE_IS_NOT_SUCCESS, 14),
        (what_has_come_is_not_held, Property.MATCH_HOLDS, 11),
        (what_was_there_is_held_for_ever, Property.PROGRESS, 8),
        (a_turn_comes_after_a_copy_that_is_over, Property.LEGAL_CALLS, 4),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_planted_is_found(
    bug: Planted, broken: Property, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds are those that find it soon."""
    bug(monkeypatch)
    failure = walk(drawn, seed, runs=60).failure
    assert failure is not None
    assert failure.finding.property == broken, failure.finding


def test_a_failure_is_reduced_to_few_steps_and_saved_with_a_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`kvsm fuzz --target tiers` saves what other targets do: numbered steps, a log, and a failing test."""
    a_failed_load_is_good_for_the_host(monkeypatch)
    failure = walk(drawn, 2, runs=60).failure
    assert failure is not None
    tiers = WorldTarget("tiers")
    saved = tiers.reduced(tiers.unreduced(2, failure, ()))
    assert len(saved.actions) <= 6 < len(failure.actions)
    failures.claim(tmp_path / "it")
    failures.save(saved, tmp_path / "it")
    [test] = (tmp_path / "it").glob("test_*.py")
    told = (tmp_path / "it" / "steps.txt").read_text()
    assert told.startswith("tiers: failure is not success (S6) is broken: 6 steps, reduced from ")
    assert re.search(r"\n  4\. plan\n     host: slot .: STORED\(.*\) -> LOADING\(copies=1, pins=0\)", told)
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "it" / "log"), "--block", "0"])
    assert shown.exit_code == 0, shown.output
    run = runpy.run_path(str(test))["test_tiers_keeps_failure_is_not_success"]
    with pytest.raises(AssertionError, match="can still be found"):
        run()
    monkeypatch.undo()
    run()


@pytest.mark.parametrize("seed", range(4))
def test_an_action_that_says_it_did_not_happen_has_emitted_nothing(seed: int) -> None:
    """Such an action is left out of a saved failure, which must repeat without it."""
    random = Random(seed)
    world = TwoTierWorld(draw_two_tier_options(random))
    for _ in range(400):
        before = world.host.ledger.seq, world.disk.ledger.seq
        if not world.do(world.draw(random)):
            assert (world.host.ledger.seq, world.disk.ledger.seq) == before


def test_what_cannot_happen_changes_nothing() -> None:
    """The actions of a failure come from a file that may be written by hand."""
    world = TwoTierWorld(TwoTierOptions())
    before = world.fingerprint()
    nonsense: list[Action] = [("store", 9), ("ask", 9), ("host", 0, 0, 1), ("late",), ("lose", 0), ("none",)]
    for action in nonsense:
        assert not world.do(action)
    assert world.fingerprint() == before


def test_a_block_that_one_rank_of_two_has_stored_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish after commit (S2): it would come back if the recovery asked only the first rank."""
    steps: list[Action] = [("store", 0), ("host", 0, 0, 1), ("host", 0, 1, 1), ("plan",), ("disk", 0, 0, 1)]

    def crashed() -> TwoTierWorld:
        world = TwoTierWorld(TwoTierOptions(ranks=2))
        for step in [*steps, ("crash", 0, 0)]:
            assert world.do(step), step
        return world

    assert not crashed().disk.ledger.index
    decide = recovery.decide
    monkeypatch.setattr("kvsm.check.worlds.two_tiers.decide", lambda scans, era: decide(scans[:1], era))
    with pytest.raises(Exception, match="was not sealed with it"):
        crashed()


def test_options_that_mean_nothing_are_refused() -> None:
    """Options may come from a failure's file that was written by hand."""
    with pytest.raises(ConfigError, match="writes is 'nobody'; choose one of through, back"):
        TwoTierOptions(writes="nobody")
    with pytest.raises(ConfigError, match="host_slots is 0"):
        TwoTierOptions(host_slots=0)
