"""`kvsm conform` walks vLLM's connectors, managers and tiers, and does not call a known defect held."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("vllm", reason="vLLM is not installed")

import broken_tiers
from broken_tiers import TierOf
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.outputs import KVConnectorOutput

from kvsm.check.vllm_fuzz.completions import Completions
from kvsm.check.vllm_fuzz.faults import LOAD, RankFaults
from kvsm.check.vllm_fuzz.host_probe import AskedBlock
from kvsm.check.vllm_fuzz.kv_event_check import PublishedEvents
from kvsm.check.vllm_fuzz.lost_copies import LostCopies
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, EngineShape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.world import Action
from kvsm.cli import main
from kvsm.cli.conform_targets import BUILT_IN
from kvsm.cli.exit_codes import ExitCode
from kvsm.properties import Property
from kvsm.testing import PropertyBroken, SecondaryTierMachine

KNOWN = {
    "vllm:OffloadingConnector": {"S4", "S8", "S9", "S10", "S12", "S15", "S19"},
    "vllm:OffloadingConnector-tiers": {"S4", "S8", "S9", "S10", "S12", "S15", "S19"},
    "vllm:SimpleCPUOffloadConnector": {"S8"},
    "vllm:SimpleCPUOffloadConnector-lazy": {"S8", "S9"},
    "vllm:TieringOffloadingManager": {"S9", "S10"},
    "vllm:fs": {"S6", "S19"},
}
"""Target -> the properties that known defects break (docs/findings.md and docs/field.md)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUILT_IN if not name.startswith("kvsm:File")])
def test_a_short_walk_breaks_only_what_is_known(name: str) -> None:
    if name == "vllm:kvcr":
        pytest.importorskip("kvcr", reason="kvcr is not installed: pip install --no-deps kvcr nixl nixl-cu12")
    limits = ("--seconds", "3", "--reduce-seconds", "0", "--seed", "1")
    result = CliRunner().invoke(main, ["conform", name, "--json", *limits])
    assert result.exit_code in (ExitCode.GOOD, ExitCode.BROKEN), result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    broken = {one["property_id"] for one in answer["properties"] if one["verdict"] == "broken"}
    assert broken <= KNOWN.get(name, set()), answer["defects"]
    assert answer["runs"] > 0
    assert any(one["verdict"] == "held" and one["cases"] for one in answer["properties"])


@pytest.mark.slow
def test_known_defects_of_a_connector_are_found_and_told_in_a_few_steps(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    limits = ("--seconds", "20", "--reduce-seconds", "20", "--seed", "1")
    result = CliRunner().invoke(main, ["conform", "vllm:OffloadingConnector", *limits, "-o", str(page)])
    assert result.exit_code == ExitCode.BROKEN
    assert "every call is legal (S8)" in page.read_text()
    assert "reset 0 1" in page.read_text()


def counted(tried: Property) -> dict[str, int]:
    """The cases of this property since the last call, and their numbers."""
    return {case: times for (one, case), times in taken_counts().items() if one is tried}


class Asked:
    """A connector that answers as it is told, and what `Completions` counts for it."""

    def __init__(self) -> None:
        self.matched = 0
        self.completions = Completions(self, 1)
        counted(Property.NO_STALE_DATA)

    def get_num_new_matched_tokens(self, _request: Any, _computed: int) -> tuple[int, bool]:
        return self.matched, False

    def update_state_after_alloc(self, _request: Any, _blocks: Any, _tokens: int) -> None:
        pass

    def serve(self, *hashes: bytes, matched: int = 0, computed: int = 0, is_aborted: bool = False) -> None:
        """Let a request arrive whose full blocks have these hashes. It is served unless it is aborted."""
        request = SimpleNamespace(
            request_id="a", block_hashes=hashes, num_tokens=BLOCK_TOKENS * len(hashes) + 1
        )
        self.matched = matched
        self.get_num_new_matched_tokens(request, computed)
        if not is_aborted:
            self.update_state_after_alloc(request, None, matched)

    def counted(self) -> int:
        return sum(counted(Property.NO_STALE_DATA).values())


@pytest.mark.parametrize("matches", [(0, 0), (BLOCK_TOKENS, 0), (0, BLOCK_TOKENS)])
def test_without_a_match_no_data_can_be_stale(matches: tuple[int, int]) -> None:
    """A connector that never has anything would hold "no stale data" in each request after a reset."""
    connector = Asked()
    connector.serve(b"1", b"2", matched=matches[0])
    connector.completions.all_were_reset()
    connector.serve(b"1", b"2")
    connector.serve(b"3", matched=matches[1])
    assert connector.counted() == any(matches)


def test_only_a_block_from_before_the_reset_can_be_stale() -> None:
    connector = Asked()
    connector.serve(b"1", b"2", matched=BLOCK_TOKENS)
    connector.serve(b"9", is_aborted=True)
    assert not connector.counted()
    connector.completions.all_were_reset()
    connector.serve(b"3")
    connector.serve(b"9")  # It was never computed.
    connector.serve(b"1", b"2", is_aborted=True)
    connector.serve(b"1", b"2", b"4", computed=2 * BLOCK_TOKENS)  # The device has computed them again.
    assert not connector.counted()
    connector.serve(b"1", b"5")
    connector.serve(b"1", b"2", computed=BLOCK_TOKENS)
    assert connector.counted() == 2


def test_a_prompt_within_one_block_matches_nothing_that_could_be_stale() -> None:
    connector = Asked()
    connector.serve(b"1", matched=BLOCK_TOKENS)
    connector.completions.all_were_reset()
    request = SimpleNamespace(request_id="a", block_hashes=[b"1"], num_tokens=BLOCK_TOKENS)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, None, 0)
    assert not connector.counted()


class Publishing:
    """The parts of a scheduler that `PublishedEvents` reads. The device has and publishes nothing."""

    def __init__(self, *events: Any) -> None:
        pool = SimpleNamespace(cached_block_hash_to_block=SimpleNamespace(_cache={}))
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, take_events=list)
        self.connector = SimpleNamespace(take_events=lambda: list(events))


@pytest.mark.parametrize(("publishes", "asks"), [(True, True), (True, False), (False, True)])
def test_a_connector_that_publishes_nothing_is_not_compared(publishes: bool, asks: bool) -> None:
    name = maybe_convert_block_hash(BlockHash(bytes(32)))
    stored = BlockStored(
        block_hashes=[name],
        parent_block_hash=None,
        token_ids=[0],
        block_size=BLOCK_TOKENS,
        lora_id=None,
        medium="CPU",
        lora_name=None,
    )
    events = PublishedEvents(Publishing(*[stored] * publishes))
    asked = [AskedBlock(bytes(32), "a block", True, True)] * asks
    counted(Property.EVENTS_ARE_STATE)
    events.check_device()
    events.check_host(asked, True)
    assert bool(counted(Property.EVENTS_ARE_STATE)) is (publishes and asks)


class FaultyRank:
    """The faults of a rank whose connector copies by itself. It loads a request into block 1."""

    def __init__(self, *waiting: str) -> None:
        self.faults = RankFaults(np.zeros((2, BLOCK_TOKENS), np.uint64), LostCopies(EngineShape()))
        self.faults.blocks_of = lambda name: [1] if name in waiting else []

    def report(self, loaded: str = "", reports: object = None, may_hold: bool = False) -> Any:
        output = KVConnectorOutput(
            finished_recving={loaded} if loaded else None,
            kv_connector_worker_meta=reports,  # type: ignore[arg-type,unused-ignore]
        )
        return self.faults.reported(output, may_hold, 1)


@pytest.mark.parametrize(("waiting", "times"), [(["a"], 1), ([], 0)])
def test_a_failed_load_counts_only_for_a_request_that_waits(waiting: list[str], times: int) -> None:
    rank = FaultyRank(*waiting)
    counted(Property.FAILURE_IS_NOT_SUCCESS)
    rank.faults.fail(LOAD)
    rank.report()
    assert not counted(Property.FAILURE_IS_NOT_SUCCESS)  # Nothing has failed yet.
    assert bool(rank.report("a").failed_recving) is bool(times)
    assert sum(counted(Property.FAILURE_IS_NOT_SUCCESS).values()) == times


class Reports:
    """The messages of a rank to the scheduler side."""

    def aggregate(self, _other: Any) -> Reports:
        return self


@pytest.mark.parametrize("may_hold", [False, True])
def test_a_repeated_report_counts_when_it_is_passed_on(may_hold: bool) -> None:
    rank = FaultyRank()
    counted(Property.STALE_REPORTS)
    rank.faults.double()
    rank.report()
    rank.faults.hold(1)
    rank.report(reports=Reports(), may_hold=may_hold)
    assert not counted(Property.STALE_REPORTS)
    rank.report()
    assert sum(counted(Property.STALE_REPORTS).values()) == 1
    rank.report()
    assert not counted(Property.STALE_REPORTS)


STORE_FAILS: tuple[Action, ...] = (("fail", 0, 1), ("arrive", 0, 8, 1, 1, 0), *[("settle",)] * 8)


@pytest.mark.parametrize(("after", "times"), [((), 0), ((2, 23, 2, 1, 0), 0), ((0, 8, 1, 1, 0), 1)])
def test_a_failed_store_counts_only_if_its_block_is_wanted_later(after: tuple[int, ...], times: int) -> None:
    """Another prompt, or none, could not be served from it."""
    world = VllmWorld(EngineShape())
    counted(Property.FAILURE_IS_NOT_SUCCESS)
    wanted = [("reset", 0, 0), ("arrive", *after), *[("settle",)] * 8] if after else []
    for action in (*STORE_FAILS, *wanted):
        world.do(action)
    while (action := world.wind_down()) is not None:
        world.do(action)
    assert sum(counted(Property.FAILURE_IS_NOT_SUCCESS).values()) == times


def run(machine: type[SecondaryTierMachine], examples: int, **options: Any) -> None:
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        stateful_step_count=20,
        derandomize=True,
        database=None,
        deadline=None,
        **options,
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("name", ["MemoryTier", "Bounded"])
def test_a_good_tier_passes(name: str) -> None:
    run(TierOf(getattr(broken_tiers, name)), 20)


BROKEN = {
    "LoadsTheNextChunk": ("correct bytes (S15): ",),
    "HitsEverything": ("publish after commit (S2): ",),
    "ForgetsAStore": ("stored, so served (S19): ",),
    "EndsTwice": ("one release per hold (S4): ",),
    "LosesAJob": ("progress (S9): after a drain",),
    "ClaimsFailedLoads": ("correct bytes (S15): ", "failure is not success (S6): "),
    "NeverAnswers": ("progress (S9): for ",),
    "WritesElsewhere": ("no reuse in flight (S3): ",),
    "KeepsTooMuch": ("conservation (S1): ",),
    "KeepsAThread": ("progress (S9): thread ",),
    "Raises": ("every call is legal (S8): ",),
}
"""A fault -> what is said of it."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tier_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.testing.secondary_tier_machine.WAIT_S", 0.3)
    with pytest.raises(PropertyBroken) as caught:
        run(TierOf(getattr(broken_tiers, name)), 500, phases=[Phase.generate])
    assert str(caught.value).startswith(BROKEN[name])
