"""The figures of `benchmarks/connector_steps.py` follow from the steps that it measured.

With vLLM, its engine also runs, in a small size: each contestant serves the same requests, and loads the
blocks that it stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT

from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import pack

BENCHMARKS = ROOT / "benchmarks"
PHASES = ["prefill", "decode", "preempted", "ending", "hits", "alone"]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """Import the benchmark, which is a script outside the package, and its world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        steps, world = import_module("connector_steps"), import_module("connector_world")
        yield SimpleNamespace(steps=steps, world=world)


def costs(script: Any, *times_us: int) -> list[Any]:
    """Return steps with one call of the connector each."""
    return [script.world.StepCost({"call": 1000 * us}, {"report": 100}, 5000 * us) for us in times_us]


def rounds(script: Any, *times_us: int) -> Any:
    return script.steps.Rounds({"decode": [script.steps.figures(costs(script, *times_us))]})


def test_figures_are_of_single_steps_and_of_all_together(script: Any) -> None:
    found = script.steps.figures(costs(script, *range(1, 201)))
    assert (found.steps, found.middle, found.p99, found.longest) == (200, 100.5, 198, 200)
    assert (found.total, found.scheduler_total) == (20.1, 100.5)
    assert found.calls == {"call": 20.1}


@pytest.mark.parametrize(("share", "value"), [(0.01, 1), (0.5, 2), (0.99, 3), (1.0, 3)])
def test_a_share_of_few_values_is_one_of_them(script: Any, share: float, value: int) -> None:
    assert script.steps.at_share([3, 1, 2], share) == value


def test_ours_is_compared_with_the_better_of_the_two_in_each_figure(script: Any) -> None:
    """One rival may have the shorter steps, and the other one the shorter sum."""
    few_long, all_even = script.steps.RIVALS
    found = {
        script.steps.OURS: rounds(script, 2, 2, 2),
        few_long: rounds(script, 1, 1, 100),
        all_even: rounds(script, 4, 4, 4),
    }
    *_, row, _ = script.steps.verdict_table(found)
    assert row == f"| decode | 2.00 ({few_long}) | 0.50 ({all_even}) |"


def test_single_steps_are_compared_with_a_rival_that_takes_as_many(script: Any) -> None:
    """An engine that waits for its loads runs more steps, most of them empty: their median is meaningless."""
    waits, other = script.steps.RIVALS
    found = {
        script.steps.OURS: rounds(script, 2, 2),
        waits: rounds(script, 1, 1, 1, 1, 100),
        other: rounds(script, 4, 4),
    }
    *_, row, _ = script.steps.verdict_table(found)
    assert row == f"| decode | 0.50 ({other}) | 0.50 ({other}) |"


def test_a_call_that_a_connector_makes_to_itself_counts_once(script: Any) -> None:
    class Side:
        def outer(self) -> int:
            return self.inner() + 1

        def inner(self) -> int:
            return 1

    clock, side = script.world.CallClock(), Side()
    clock.watch(side)
    assert side.outer() == 2
    assert set(clock.take()) == {"outer"}
    assert not clock.take()


@pytest.mark.parametrize("copy_steps", [0, 2])
def test_a_copy_ends_so_many_steps_after_it_began(script: Any, copy_steps: int) -> None:
    copies = script.world.InstantCopies(8, 8, copy_steps)
    copies.submit(TransferJob(1, Direction.STORE, pack([1, 2]), pack([3, 4])))
    for _ in range(copy_steps):
        assert not copies.poll()
        copies.step += 1
    assert [(one.transfer, one.good) for one in copies.poll()] == [(1, True)]
    assert not copies.poll()
    assert copies.moved == {Direction.STORE: 2}


def test_a_copy_that_somebody_waits_for_ends_now(script: Any) -> None:
    copies = script.world.InstantCopies(8, 8, 5)
    for transfer in (1, 2):
        copies.submit(TransferJob(transfer, Direction.LOAD, pack([transfer]), pack([transfer])))
    copies.wait([2])
    assert [one.transfer for one in copies.poll()] == [2]


@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("copy_steps", [0, 1])
def test_each_contestant_serves_the_same_requests_and_loads_what_it_stored(
    script: Any, tmp_path: Path, copy_steps: int
) -> None:
    """A contestant that stores or loads less would look faster than it is."""
    world, traffic = (
        script.steps.VllmWorld(tmp_path),
        script.steps.Traffic(4, 64, decode_steps=16, each_step=2),
    )
    configs = script.steps.contestants(2 * traffic.blocks, tmp_path / "log")
    found = {
        name: script.steps.measure(world, config, traffic, copy_steps) for name, config in configs.items()
    }
    for one in found.values():
        assert list(one.phases) == PHASES
    prompts = traffic.requests * traffic.prompt_tokens // script.steps.BLOCK_TOKENS
    del found[script.steps.NOTHING]
    for name, one in found.items():
        stored, loaded = one.moved[Direction.STORE], one.moved[Direction.LOAD]
        assert prompts <= stored, name
        # After the preemption, at once again, and one by one; the last block of a prompt is computed.
        assert 3 * (prompts - traffic.requests) <= loaded <= 3 * stored, name
