"""kvsm's connector under vLLM's real schedulers, with several steps in flight and copies that end at any
time.

`real_scheduler` describes the checks in every step: correct content, the order of copies and compute, leases,
and the ledger. At the end of each engine every client has its tokens, nothing is left, and the log folds to
the same state and verifies.
"""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hanging_copies import TIMEOUT_S
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from real_scheduler import Engine, walk
from scheduler_shapes import BLOCK_TOKENS, CHOICES, Shape, valid

from kvsm.testing.machine_base import PropertyMachine
from kvsm.vllm import scheduler_side

STEPS = 6000

SHAPES = st.builds(
    Shape, role=st.just("kv_both"), **{name: st.sampled_from(values) for name, values in CHOICES.items()}
).map(valid)


def test_thousands_of_steps() -> None:
    """Seeded walks over all shapes. A failure names its seed; `walk(seed, acts)` repeats it."""
    counts, seed = Counter[str](), 0
    while counts["steps"] < STEPS:
        counts += walk(seed, acts=400)
        seed += 1
    # The walks must have met each of these.
    for what, least in {
        "overlapping steps": 1000,
        "finished": 500,
        "loads": 100,
        "stores": 500,
        "failed loads": 5,
        "errors": 1,
        "preemptions": 30,
        "aborts": 50,
        "aborts in mid-load": 2,
        "resets": 20,
        "whole resets": 2,
        "host resets": 5,
    }.items():
        assert counts[what] >= least, f"{counts[what]} {what} in {counts['steps']} steps"


class RealSchedulers(PropertyMachine):
    """Every order of calls that Hypothesis finds."""

    @initialize(shape=SHAPES, seed=st.integers(0, 2**16))
    def start(self, shape: Shape, seed: int) -> None:
        self.engine = Engine(shape, seed)
        self.started = True

    @rule(
        family=st.integers(0, 7), length=st.integers(0, 40), own=st.integers(1, 5), outputs=st.integers(1, 9)
    )
    def arrive(self, family: int, length: int, own: int, outputs: int) -> None:
        self.engine.arrive(family, length, own, outputs)

    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.steps_under_way)
    @rule()
    def execute(self) -> None:
        self.engine.execute()

    @precondition(lambda self: self.engine.steps_under_way)
    @rule()
    def deliver(self) -> None:
        self.engine.deliver()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(number=st.integers(0, 5))
    def abort(self, number: int) -> None:
        self.engine.abort(number)

    @rule(running=st.booleans(), connector=st.booleans())
    def reset(self, running: bool, connector: bool) -> None:
        self.engine.reset(running, connector)

    @rule()
    def reset_host(self) -> None:
        self.engine.reset_host()

    def check(self) -> None:
        self.engine.check()

    def wind_down(self) -> None:
        self.engine.drain()
        self.engine.close()

    def close(self) -> None:
        self.engine.discard()


TestRealSchedulers = RealSchedulers.TestCase
TestRealSchedulers.settings = settings(TestRealSchedulers.settings, max_examples=40, stateful_step_count=50)


def served(shape: Shape, length: int = 16) -> Engine:
    """An engine that has served a prompt of this length and has it in host memory only."""
    engine = Engine(shape, seed=0)
    engine.arrive(0, length, 0, 1)
    engine.drain()
    engine.reset(running=False, connector=False)
    assert engine.counts["stores"]
    return engine


def ask_again(engine: Engine, length: int = 16) -> list[int]:
    """Ask the same prompt with one token more. Returns the transfers of the step that loads it."""
    engine.arrive(0, length, 1, 3)
    assert engine.schedule()
    return [load.transfer for load in engine.plan.loads]


def end(engine: Engine) -> None:
    engine.drain()
    engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_prefix_of_the_same_step_is_stored_a_step_later(is_async: bool) -> None:
    """Order of copies (S12): a request finds on the device what another request computes in the same step.

    A store that leaves with this step would read it too early.
    """
    engine = Engine(Shape(is_async=is_async, step_tokens=64), seed=0)
    for _ in range(2):
        engine.arrive(0, 16, 1, 3)
    engine.schedule()
    found = [one.num_computed_tokens for one in engine.scheduler.requests.values()]
    assert found == [17, 17]
    assert engine.plan.stores == ()
    engine.deliver()
    engine.schedule()
    assert [len(store.device_blocks) for store in engine.plan.stores] == [16 // BLOCK_TOKENS]
    end(engine)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_the_step_do_not_count_as_cached(seed: int) -> None:
    """Order of copies (S12): vLLM caches a block when it schedules its last token.

    Blocks that a sliding window has given back are looked for in the pool. A block that the step has yet to
    write must not be found there.
    """
    shape = Shape(is_async=True, groups=2, device_blocks=34, host_blocks=6)
    engine = Engine(shape, seed)
    side = engine.scheduler.connector._side
    pool, plan = side._pool, side._scheduler.build_connector_meta
    hidden: list[set[int]] = []

    def watched(output: object) -> object:
        hidden.append({block for block in pool.computing if pool.key_of(block) is None})
        return plan(output)

    with patch.object(side._scheduler, "build_connector_meta", watched):
        for number in range(12):
            engine.arrive(2 * (number % 3), 24, 2, 4)
            engine.schedule()
            step = engine.latest
            assert set(step.writes.blocks.tolist()) <= hidden[-1]
            engine.step()
    assert any(hidden)
    end(engine)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_failed_load_is_computed(is_async: bool, shards: int) -> None:
    """Failure is not success (S6): one rank fails. The request hears of it once, its keys do not match, its
    tokens are right.
    """
    engine = served(Shape(is_async=is_async, shards=shards))
    (load,) = ask_again(engine)
    engine.ranks[-1].device.failing[load] = 0
    end(engine)
    assert (engine.counts["failed loads"], engine.counts["loads"]) == (1, 1)
    assert len(engine.told["r1"]) == 3


def test_failed_load_ends_the_request_where_that_is_asked_for() -> None:
    """Failure is not success (S6): with `fail` the client gets an error, and nothing of the request is
    left."""
    engine = served(Shape(is_async=True, on_failed_load="fail"))
    (load,) = ask_again(engine)
    engine.ranks[0].device.failing[load] = 0
    end(engine)
    assert (engine.counts["errors"], engine.told["r1"]) == (1, [])


def test_request_whose_load_failed_blocks_no_other() -> None:
    """Progress (S9): vLLM takes the request's blocks, but leaves it in the queue of requests that hold
    blocks.

    That queue is served in order. If no blocks are free, the requests behind it would wait forever
    (`Engine.schedule` checks it).
    """
    engine = served(Shape(is_async=True))
    (load,) = ask_again(engine)
    engine.ranks[0].device.failing[load] = 0
    while not engine.counts["failed loads"]:
        engine.step()
    with patch.object(engine.scheduler.kv_cache_manager, "allocate_slots", return_value=None) as refused:
        for _ in range(4):
            engine.step()
    assert refused.called
    end(engine)


def test_a_store_that_failed_is_made_again() -> None:
    """Publish after commit (S2): what one rank could not copy is not matched. The request that still runs
    offers it again in the next step, and then it is."""
    engine = Engine(Shape(shards=2, host_blocks=40), seed=0)
    engine.arrive(0, 16, 0, 8)
    engine.schedule()
    while not engine.plan.stores:
        engine.deliver()
        engine.schedule()
    (store,) = engine.plan.stores
    engine.ranks[-1].device.failing[store.transfer] = 0
    while engine.plan.stores in ((), (store,)):
        assert not any(engine.ledger.readable(slot) for slot in engine.ledger.index.values())
        engine.deliver()
        assert engine.schedule()
    assert engine.plan.stores[0].device_blocks == store.device_blocks
    end(engine)
    assert len(engine.ledger.index) >= 16 // BLOCK_TOKENS


# Copies that one rank never reports.


def rejected(engine: Engine) -> int:
    """How many reports changed nothing."""
    return sum(engine._core.metrics.values()["reports_rejected"].values())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_lost_store_does_not_stop_the_cache(is_async: bool) -> None:
    """Progress (S9): one rank of two never reports one store.

    Its blocks are held and no reset succeeds, but only until its time is up. Then the engine is idle, a reset
    succeeds, and later requests are stored and loaded.
    """
    engine = Engine(Shape(is_async=is_async, shards=2, host_blocks=160), seed=0)
    engine.arrive(0, 16, 0, 1)
    engine.schedule()
    while not engine.plan.stores:
        engine.deliver()
        engine.schedule()
    (store,) = engine.plan.stores
    engine.ranks[1].silent.add(store.transfer)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.has_requests()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.drain()
    assert engine.clock.now < 2 * TIMEOUT_S
    assert (engine.counts["retired slots"], engine.counts["retired device blocks"]) == (4, 0)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    for number in range(40):
        engine.arrive(2 * (number % 8), 16, 0, 1)
        engine.drain()
        engine.scheduler.reset_prefix_cache()
    assert engine.counts["loads"] == 32
    end(engine)


@pytest.mark.parametrize("shards", [1, 2])
def test_lost_load_is_computed(shards: int) -> None:
    """Progress (S9): a rank never reports its copy. When its time is up, the request hears of it once.

    The blocks of the load are not reused, and the prefix cache can be reset although they are held.
    """
    engine = served(Shape(is_async=True, shards=shards))
    (load,) = ask_again(engine)
    engine.ranks[-1].silent.add(load)
    engine.drain()
    assert (engine.counts["failed loads"], engine.counts["loads"]) == (1, 1)
    assert len(engine.told["r1"]) == 3
    assert engine.counts["retired device blocks"] == engine.counts["retired slots"] == 16 // BLOCK_TOKENS
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    end(engine)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_lost_load_may_end_its_request_or_find_it_aborted(aborts: bool) -> None:
    """With `fail` the client gets an error. An aborted request is held no longer than its load."""
    engine = served(Shape(is_async=True, on_failed_load="fail"))
    (load,) = ask_again(engine)
    engine.ranks[0].silent.add(load)
    if aborts:
        engine.abort(0)
    end(engine)
    assert (engine.counts["errors"], engine.told["r1"]) == (not aborts, [])


def test_a_report_that_comes_too_late_is_rejected() -> None:
    """Stale reports change nothing (S5): the load has failed by then, and fails only once."""
    engine = served(Shape(is_async=True, shards=2))
    (load,) = ask_again(engine)
    engine.ranks[1].silent.add(load)
    engine.drain()
    before = rejected(engine)
    engine.ranks[1].speak()
    engine.arrive(2, 16, 1, 3)
    end(engine)
    assert rejected(engine) == before + 1
    assert (engine.counts["failed loads"], len(engine.told["r1"])) == (1, 3)


def test_a_step_longer_than_the_bound_loses_nothing() -> None:
    """The copies end during the step, and their reports come with its output."""
    engine = served(Shape(is_async=True, shards=2))
    ask_again(engine)
    engine.execute()
    for rank in engine.ranks:
        rank.copies.drain()
    engine.clock.advance(100 * TIMEOUT_S)
    end(engine)
    assert engine.counts["failed loads"] == engine.counts["retired slots"] == 0


def test_zero_never_gives_a_copy_up() -> None:
    engine = served(Shape(is_async=True, extra={"transfer_timeout_s": 0}))
    (load,) = ask_again(engine)
    engine.ranks[0].silent.add(load)
    engine.clock.advance(1e9)
    for _ in range(20):
        engine.step()
    assert engine.counts["failed loads"] == 0
    engine.ranks[0].speak()
    end(engine)
    assert len(engine.told["r1"]) == 3


def test_a_loss_names_what_is_lost() -> None:
    """The warning has the transfer, its direction, the silent ranks, the request and what is retired."""
    engine = served(Shape(is_async=True, shards=2))
    (load,) = ask_again(engine)
    engine.ranks[1].silent.add(load)
    with patch.object(scheduler_side.log, "warning") as warned:
        end(engine)
    (((text, *values), _),) = warned.call_args_list
    assert text % tuple(values) == (
        f"kvsm: transfer {load} (a load) is given up: ranks [1] have not reported it for 20 s. 4 host slots "
        "and 4 device blocks are retired: they are not used again until the engine restarts. The load of "
        "request r1 has failed"
    )


def test_whatever_hangs_the_words_are_right() -> None:
    """No reuse in flight (S3): copies hang on any rank, and write wrong bytes after they were given up."""
    counts = Counter[str]()
    for seed, shape in HANGING.items():
        counts += walk(seed, acts=300, shape=shape)
    for what in ("failed loads", "retired slots", "retired device blocks", "whole resets"):
        assert counts[what], what


HANGING = {
    0: Shape(is_async=True, shards=2, device_blocks=48, host_blocks=160, hanging=0.15),
    1: Shape(stages=2, groups=2, device_blocks=48, host_blocks=40, hanging=0.15, on_failed_load="fail"),
    2: Shape(is_async=True, runner=2, device_blocks=48, host_blocks=160, failing=0.2, hanging=0.15),
    4: Shape(is_async=True, drafts=2, device_blocks=48, hanging=0.15, extra={"blocks_per_chunk": 2}),
    13: Shape(shards=2, host_blocks=40, hanging=0.3, extra={"store": "lazy", "lazy_target_blocks": 6}),
}
"""Seed of the walk -> its engine."""
