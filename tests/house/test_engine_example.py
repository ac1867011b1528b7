"""The engine of `examples/engine` makes the same tokens as the model without a cache, in every workload."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("torch")

from engine_example import (
    ACTIONS,
    PROMPTS,
    engine_module,
    pool_module,
    serving,
    serving_without,
    with_mistake,
)
from test_examples import code_lines

from examples import examples
from kvsm.errors import PropertyBroken
from kvsm.explain.story import verify_log
from kvsm.testing import OffloadMachine, configurations

ENGINE = Path(engine_module.__file__).parent


def is_finished(log: Path) -> bool:
    """Whether `kvsm verify --strict` passes on this log."""
    found = verify_log(log)
    return found.good and found.unfinished is not None and found.unfinished.finished


def workload(seed: int, count: int) -> list[tuple[Any, ...]]:
    """Draw repeated prompts that together do not fit into the device."""
    random, actions = Random(seed), list[tuple[Any, ...]]()
    for _ in range(count):
        actions += [
            ("add", random.choice(PROMPTS), random.randrange(30, 80), random.randrange(1, 8)),
            ("step", random.randrange(1, 8)),
        ]
    return actions


def check_tokens_and_log(actions: list[tuple[Any, ...]], fail_rate: float, seed: int) -> None:
    with TemporaryDirectory() as directory:
        log = Path(directory, "log")
        with serving(log, fail_rate, seed) as served:
            served.serve(actions)
            assert served.wrong() == []
        assert served.engine.pool.num_free() == len(served.engine.pool.references)
        assert is_finished(log)


RANDOM = given(
    actions=st.lists(ACTIONS, max_size=20), fail_rate=st.sampled_from((0.0, 0.3)), seed=st.integers(0, 99)
)


@settings(max_examples=examples(20), deadline=None)
@RANDOM
def test_tokens_are_equal_and_the_log_is_finished(
    actions: list[tuple[Any, ...]], fail_rate: float, seed: int
) -> None:
    """The workloads have chunked prefill, preemptions, failed copies, aborts and new weights."""
    check_tokens_and_log(actions, fail_rate, seed)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@RANDOM
def test_tokens_are_equal_and_the_log_is_finished_long(
    actions: list[tuple[Any, ...]], fail_rate: float, seed: int
) -> None:
    check_tokens_and_log(actions, fail_rate, seed)


def test_the_host_saves_compute_and_changes_no_token(tmp_path: Path) -> None:
    """The same workload runs with and without kvsm."""
    actions = workload(3, 20)
    without = serving_without()
    without.serve(actions)
    with serving(tmp_path / "log", 0.2, 1) as served:
        served.serve(actions)
    assert [request.tokens for request in served.requests] == [r.tokens for r in without.requests]
    assert served.wrong() == []
    assert min(served.engine.counts.values()) > 0, served.engine.counts
    assert served.engine.counts["computed"] < without.engine.counts["computed"]
    assert is_finished(tmp_path / "log")


BEFORE_PLAN = "        plan = self.kvsm.build_connector_meta("
EARLY = "        for name, count in tokens.items(): self.requests[name].num_computed_tokens += count\n"
FAILED = 'self.counts["failed loads"] += 1\n                self.preempt(request)'

WRONG_TOKENS = {
    "new weights are not reported": ("self.kvsm.reset_cache(weights=version)  #", "#"),
    "groups share keys": (
        "block_key(self.block_hashes[index], group)",
        "block_key(self.block_hashes[index], 0)",
    ),
}
REFUSED = {
    "a step counts before its plan": (BEFORE_PLAN, EARLY + BEFORE_PLAN),
    "a failed load counts as good": (
        FAILED,
        "request.num_computed_tokens = request.num_tokens // BLOCK * BLOCK",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_TOKENS)
def test_a_mistake_of_an_embedder_gives_other_tokens(mistake: str, tmp_path: Path) -> None:
    """This shows that the tests above can fail."""
    actions = [*workload(3, 6), ("weights",), *workload(3, 4)]
    with serving(tmp_path / "log", module=with_mistake(*WRONG_TOKENS[mistake])) as served:
        served.serve(actions)
        assert served.wrong() != []


@pytest.mark.parametrize("mistake", REFUSED)
def test_tokens_that_nothing_has_computed_are_refused(mistake: str, tmp_path: Path) -> None:
    """`CheckedScheduler` names the request, before wrong bytes are stored."""
    module = with_mistake(*REFUSED[mistake])
    with (
        pytest.raises(PropertyBroken, match=r"request r\d+ counts"),
        serving(tmp_path / "log", 0.3, 1, module) as served,
    ):
        served.serve(workload(3, 20))


def test_a_request_that_can_never_be_served_is_refused(tmp_path: Path) -> None:
    """Otherwise it would preempt itself forever."""
    with serving(tmp_path / "log") as served:
        with pytest.raises(ValueError, match="r is too long"):
            served.engine.add(engine_module.Request("r", [1, 2], 12 * 8 + 1))
        served.engine.add(engine_module.Request("r", [1, 2], 12 * 8))


class Pool(OffloadMachine):
    """Tests the pool of the example as docs/testing.md describes."""

    configurations = configurations(prefix_cache=True)

    def make_pool(self, blocks: int) -> Any:
        return pool_module.BlockPool(blocks)


def test_the_pool_passes_the_tests_for_pools() -> None:
    run_state_machine_as_test(
        Pool, settings=settings(Pool.TestCase.settings, max_examples=examples(20), deadline=None)
    )


def test_the_example_is_shorter_than_300_lines() -> None:
    assert sum(len(code_lines(path)) for path in ENGINE.glob("*.py")) < 300
