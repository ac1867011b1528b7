"""The failing engine: which transfers fail, how much of them is copied, and what happens to impossible
jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from plain_engine import PlainCopyEngine

from kvsm.copies import CopyEngine, FailingCopyEngine, HostCopyEngine, SimulatedCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.ids import listed, pack, unpack

real_engines = pytest.mark.parametrize(
    "real",
    [
        pytest.param(PlainCopyEngine, id="plain"),
        pytest.param(HostCopyEngine, id="host"),
        pytest.param(lambda device, host: SimulatedCopyEngine(device, host, seed=3), id="simulated"),
    ],
)


def store_all(transfer: int, blocks: int = 8) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, pack(range(blocks)), pack(range(blocks)))


@real_engines
def test_a_failing_copy_copies_a_part(real: Callable[[Any, Any], CopyEngine]) -> None:
    """Seed and id decide which transfers fail and after how many blocks, on every engine. A prefix of the
    blocks is copied, and no byte of the others."""
    device = np.full((8, 16), 7, np.uint8)
    outcomes = []
    for _ in range(2):
        host = np.zeros((8, 16), np.uint8)
        engine, copied = FailingCopyEngine(real(device, host), 5, 0.5), []
        for transfer in range(1, 40):
            host[:] = 0
            engine.submit(store_all(transfer))
            engine.wait([transfer])
            [result] = engine.poll()
            whole = (host == 7).all(axis=1)
            assert result.good == (not result.error)
            assert whole.all() if result.good else result.bytes == 0
            assert whole[: int(whole.sum())].all()
            copied.append((result.good, int(whole.sum())))
        engine.close()
        outcomes.append(copied)
    assert outcomes[0] == outcomes[1]
    assert {good for good, _ in copied} == {True, False}
    assert len({count for good, count in copied if not good} - {0, 8}) > 0


@given(seed=st.integers(0, 1 << 40))
def test_a_part_has_the_names_of_its_blocks(seed: int) -> None:
    """A kept pool needs a key and a generation for each block, and refuses a job with too many."""
    inner, submitted = PlainCopyEngine(*[np.zeros((8, 1), np.uint8) for _ in range(2)]), list[TransferJob]()
    inner.submit = lambda job, _after=None: submitted.append(job)  # type: ignore[method-assign]
    engine = FailingCopyEngine(inner, seed, 1.0)
    keys, generations = tuple(b"%d" % block for block in range(8)), tuple(range(100, 108))
    engine.submit(structs.replace(store_all(1), keys=keys, generations=generations))
    (part,) = submitted
    count = len(listed(unpack(part.host_blocks)))
    assert (part.keys, part.generations) == (keys[:count], generations[:count])


def test_workers_fail_on_their_own() -> None:
    """A failure on one rank must fail the transfer everywhere, so the ranks do not fail together."""
    pools = [np.zeros((1, 8), np.uint8) for _ in range(2)]
    failed = []
    for seed in range(2):
        engine = FailingCopyEngine(PlainCopyEngine(*pools), seed, 0.3)
        for transfer in range(100):
            engine.submit(store_all(transfer, 1))
        engine.wait(range(100))
        failed.append({result.transfer for result in engine.poll() if not result.good})
    assert all(15 < len(one) < 45 for one in failed)
    assert failed[0] - failed[1]


WRONG = {
    "ids that cannot be read": TransferJob(1, Direction.STORE, b"\x09\x00\x00", (0,)),
    "unequal lengths": TransferJob(1, Direction.STORE, (0, 1, 2, 3, 4), (0, 1)),
    "a target used twice": TransferJob(1, Direction.LOAD, (0, 1, 2, 3, 0), (0, 1, 2, 3, 4)),
    "a host block beyond the pool": TransferJob(1, Direction.STORE, (0, 1, 2, 3, 4), (0, 1, 2, 3, 8)),
}


@real_engines
@pytest.mark.parametrize("case", WRONG)
def test_of_a_job_that_cannot_be_right_nothing_runs(
    real: Callable[[Any, Any], CopyEngine], case: str
) -> None:
    """No reuse in flight (S3): a part of a wrong job might be right and would be copied. So the job is
    passed on whole, and `submit` does not raise. Each seed fails after a different number of blocks."""
    for seed in range(8):
        device, host = np.full((8, 4), 7, np.uint8), np.zeros((8, 4), np.uint8)
        with closing(FailingCopyEngine(real(device, host), seed, 1.0)) as engine:
            engine.submit(WRONG[case])
            engine.drain()
            [result] = engine.poll()
        assert (result.good, result.bytes) == (False, 0)
        assert result.error.startswith(f"{WRONG[case].direction.name.lower()} 1: ")
        assert not host.any()
        assert (device == 7).all()


@given(seed=st.integers(0, 1 << 40), rate=st.sampled_from([0.0, 0.5, 1.0]), blocks=st.integers(0, 40))
def test_each_transfer_ends_once_and_a_bad_one_is_told_as_one(seed: int, rate: float, blocks: int) -> None:
    """Progress (S9), failure is not success (S6): also without blocks, and with packed ids."""
    pools = np.zeros((40, 1), np.uint8), np.zeros((40, 1), np.uint8)
    engine = FailingCopyEngine(PlainCopyEngine(*pools), seed, rate)
    for transfer in range(5):
        engine.submit(store_all(transfer, blocks))
    engine.close()
    results = engine.poll()
    assert [result.transfer for result in results] == list(range(5))
    assert engine.poll() == []
    for result in results:
        assert result.good is (result.error == "")
        assert result.bytes == (blocks if result.good else 0)
    if rate != 0.5:
        assert {result.good for result in results} == {rate == 0.0}


def test_a_live_id_is_refused_and_its_first_copy_still_fails() -> None:
    """Stale reports change nothing (S5): the second use of an id does not affect the first transfer."""
    engine = FailingCopyEngine(PlainCopyEngine(*np.zeros((2, 8, 4), np.uint8)), 0, 1.0)
    engine.submit(store_all(1))
    with pytest.raises(TransferFailed, match="transfer 1 is live"):
        engine.submit(store_all(1))
    assert [(result.transfer, result.good) for result in engine.poll()] == [(1, False)]


def test_order_and_waits_are_those_of_the_engine_below() -> None:
    """Order of copies (S12): marks and holds reach the engine below."""
    below = PlainCopyEngine(*np.zeros((2, 8, 4), np.uint8))
    engine = FailingCopyEngine(below, 0, 1.0)
    engine.submit(store_all(1), engine.mark())
    engine.hold_compute([1])
    engine.drain()
    assert below.calls == [("submit", 1, "mark 0"), ("hold_compute", [1]), ("drain",)]
    assert engine.num_host_blocks == 8
