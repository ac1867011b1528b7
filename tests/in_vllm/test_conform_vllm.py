"""`kvsm conform` walks vLLM's connectors, managers and tiers, and does not call a known defect held."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("vllm", reason="vLLM is not installed")

import broken_tiers
from broken_tiers import TierOf

from kvsm.check.vllm_fuzz.completions import Completions
from kvsm.check.worlds.check_counts import taken_counts
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


@pytest.mark.parametrize("matches", [[0, 0, 0], [0, 16, 0]])
def test_without_a_match_no_data_can_be_stale(matches: list[int]) -> None:
    """A connector that never has anything would hold "no stale data" in each request after a reset."""

    class Connector:
        def get_num_new_matched_tokens(self, request: Any, _computed: int) -> tuple[int, bool]:
            return request.has, False

    connector: Any = Connector()
    completions = Completions(connector, 1)
    completions.all_reset = True
    taken_counts()
    for has in matches:
        connector.get_num_new_matched_tokens(SimpleNamespace(request_id="a", has=has), 0)
    counted = [times for (tried, _), times in taken_counts().items() if tried is Property.NO_STALE_DATA]
    assert counted == ([2] if any(matches) else [])


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
