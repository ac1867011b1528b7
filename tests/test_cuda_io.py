"""Copy engines: one conformance suite for every engine, then what is particular to each.

The suite checks the promises of `kvsm.cuda_io.engine`: refusals before anything runs, one end for each
transfer (S9), a failure that is told as one (S6), and the right bytes (S15).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsm.cuda_io import CopyEngine, CopyResult, HostCopyEngine, SimulatedCopyEngine
from kvsm.cuda_io import host as host_module
from kvsm.cuda_io.simulated import LONGEST_POLLS
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import SMALL, pack
from kvsm.plan import TransferJob

MakeEngine = Callable[[Any, Any], CopyEngine]

every_engine = pytest.mark.parametrize(
    "make_engine",
    [
        pytest.param(HostCopyEngine, id="host"),
        pytest.param(lambda device, host: HostCopyEngine(device, host, threads=1), id="host-1-thread"),
        pytest.param(lambda device, host: SimulatedCopyEngine(device, host, seed=7), id="simulated"),
    ],
)


def random_pools(
    blocks: int = 40, block_bytes: int = 3, seed: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    device = random.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    host = random.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    return device, host


def store(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, pack(device_blocks), pack(host_blocks))


def load(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.LOAD, pack(device_blocks), pack(host_blocks))


def finish(engine: CopyEngine, transfers: list[int]) -> list[CopyResult]:
    engine.wait(transfers)
    return engine.poll()


@contextmanager
def short_pieces(blocks: int, block_bytes: int) -> Iterator[None]:
    """Host engines that are made inside cut a transfer into pieces of this many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "PIECE_BYTES", blocks * block_bytes)
        yield


@st.composite
def rounds_of_jobs(draw: st.DrawFn, blocks: int) -> list[list[TransferJob]]:
    """Rounds of transfers both ways; those of one round touch no block of either pool in common."""
    rounds, transfer = [], 0
    for _ in range(draw(st.integers(1, 3))):
        device_blocks = draw(st.permutations(range(blocks)))
        host_blocks = draw(st.permutations(range(blocks)))
        if draw(st.booleans()):  # so that runs are long, which random permutations never give
            host_blocks = device_blocks
        cuts = sorted(draw(st.lists(st.integers(0, blocks), max_size=6)))
        jobs = []
        for first, last in pairwise(cuts):
            make = store if draw(st.booleans()) else load
            jobs.append(make(transfer, device_blocks[first:last], host_blocks[first:last]))
            transfer += 1
        rounds.append(jobs)
    return rounds


def copy_plainly(job: TransferJob, device: np.ndarray[Any, Any], host: np.ndarray[Any, Any]) -> None:
    """The reference: a loop over single blocks."""
    for device_block, host_block in zip(*job.pairs()):
        if job.direction is Direction.STORE:
            host[host_block] = device[device_block]
        else:
            device[device_block] = host[host_block]


# The conformance suite.


@every_engine
@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_bytes=st.sampled_from([1, 3, 600]), piece=st.integers(1, 40))
def test_bytes_are_those_of_a_plain_copy_and_each_transfer_ends_once(
    make_engine: MakeEngine, data: st.DataObject, block_bytes: int, piece: int
) -> None:
    """S15, S9: random transfers both ways, overlapping waits, some of them left to close."""
    device, host = random_pools(40, block_bytes)
    expected_device, expected_host = device.copy(), host.copy()
    rounds = data.draw(rounds_of_jobs(40))
    results: list[CopyResult] = []
    with short_pieces(piece, block_bytes), closing(make_engine(device, host)) as engine:
        for number, jobs in enumerate(rounds):
            for job in jobs:
                copy_plainly(job, expected_device, expected_host)
                engine.submit(job)
            transfers = [job.transfer for job in jobs]
            if transfers:
                engine.wait(data.draw(st.lists(st.sampled_from(transfers))))
                results += engine.poll()
            if number < len(rounds) - 1:
                results += finish(engine, transfers)
        engine.close()
        results += engine.poll()
        assert engine.poll() == []
    assert np.array_equal(device, expected_device)
    assert np.array_equal(host, expected_host)
    submitted = {job.transfer: job for jobs in rounds for job in jobs}
    assert sorted(result.transfer for result in results) == sorted(submitted)
    for result in results:
        job = submitted[result.transfer]
        assert (result.good, result.error, result.direction) == (True, "", job.direction)
        assert result.bytes == len(job.pairs()[0]) * block_bytes


@every_engine
@settings(max_examples=30, deadline=None)
@given(data=st.data(), piece=st.integers(1, 40))
def test_a_failing_copy_is_an_outcome_and_the_engine_goes_on(
    make_engine: MakeEngine, data: st.DataObject, piece: int
) -> None:
    """S6, S9: a host pool that refuses writes fails every store that has blocks; loads are still served."""
    device, host = random_pools()
    host.flags.writeable = False
    (jobs,) = data.draw(rounds_of_jobs(40).filter(lambda rounds: len(rounds) == 1))
    with short_pieces(piece, 3), closing(make_engine(device, host)) as engine:
        for job in jobs:
            engine.submit(job)
        results = finish(engine, [job.transfer for job in jobs])
        blocks = {job.transfer: len(job.pairs()[0]) for job in jobs}
        assert sorted(result.transfer for result in results) == sorted(blocks)
        for result in results:
            fails = result.direction is Direction.STORE and blocks[result.transfer] > 0
            assert result.good is not fails
            assert ("ValueError: " in result.error and "read-only" in result.error) is fails
            assert result.bytes == (0 if fails else 3 * blocks[result.transfer])
        engine.submit(load(1000, [5], [6]))
        assert [result.good for result in finish(engine, [1000])] == [True]
        assert np.array_equal(device[5], host[6])


REFUSED = {
    "a device block beyond the pool": (store(1, [0, 40], [0, 1]), "store 1: device block 40 .* pool of 40"),
    "a host block beyond the pool": (load(1, [0, 1], [40, 0]), "load 1: host block 40 .* pool of 40"),
    "a negative device block": (load(1, [-1, 0], [0, 1]), "load 1: device block -1 .* pool of 40"),
    "a negative host block": (store(1, [0, 1], [0, -1]), "store 1: host block -1 .* pool of 40"),
    "a host block stored twice": (
        store(1, [0, 1, 2], [3, 4, 3]),
        "store 1: host block 3 is the target of two",
    ),
    "a device block loaded twice": (load(1, [5, 5], [0, 1]), "load 1: device block 5 is the target of two"),
    "more device blocks than host blocks": (
        store(1, [0, 1], [0]),
        "store 1: 2 device blocks for 1 host blocks",
    ),
    "ids that cannot be read": (
        TransferJob(1, Direction.STORE, b"\x09\x00\x00", (0,)),
        "store 1: packed ids start with their width",
    ),
    "a host block beyond the pool, in a large job": (
        store(1, list(range(20)), [*range(19), 40]),
        "store 1: host block 40 .* pool of 40",
    ),
    "a device block loaded twice, in a large job": (
        load(1, [*range(19), 7], list(range(20))),
        "load 1: device block 7 is the target of two",
    ),
}


@every_engine
@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_cannot_be_right_is_refused_before_anything_runs(
    make_engine: MakeEngine, case: str
) -> None:
    """S3: not a byte is touched, there is no result, and the id is free for a job that can be right."""
    job, message = REFUSED[case]
    device, host = random_pools()
    before = device.copy(), host.copy()
    with closing(make_engine(device, host)) as engine:
        with pytest.raises(TransferFailed, match=message):
            engine.submit(job)
        assert finish(engine, [1]) == []
        assert np.array_equal(device, before[0])
        assert np.array_equal(host, before[1])
        engine.submit(store(1, [0], [0]))
        assert [result.good for result in finish(engine, [1])] == [True]


@every_engine
def test_one_source_may_be_copied_to_two_targets(make_engine: MakeEngine) -> None:
    """Only targets must be distinct: two reads of a block do not disturb each other."""
    device, host = random_pools()
    with closing(make_engine(device, host)) as engine:
        engine.submit(store(1, [4, 4], [0, 9]))
        assert [result.good for result in finish(engine, [1])] == [True]
    assert np.array_equal(host[0], device[4])
    assert np.array_equal(host[9], device[4])


@every_engine
def test_a_live_id_is_refused_and_its_first_transfer_is_not_disturbed(make_engine: MakeEngine) -> None:
    """S5: live is from submit until poll has told the end, not only until the copy is over."""
    device, host = random_pools()
    untouched = host[2].copy()
    with closing(make_engine(device, host)) as engine:
        engine.submit(store(1, [1], [1]))
        engine.wait([1])
        with pytest.raises(TransferFailed, match="transfer 1 is live"):
            engine.submit(store(1, [2], [2]))
        assert [(result.transfer, result.good) for result in engine.poll()] == [(1, True)]
    assert np.array_equal(host[1], device[1])
    assert np.array_equal(host[2], untouched)


@every_engine
def test_a_transfer_that_was_told_is_forgotten(make_engine: MakeEngine) -> None:
    """An engine that runs for weeks keeps nothing of what has ended, its id neither: whoever plans sees to
    it that ids differ."""
    device, host = random_pools()
    with closing(make_engine(device, host)) as engine:
        for _ in range(2):
            engine.submit(store(1, [1], [1]))
            assert [result.good for result in finish(engine, [1])] == [True]


@every_engine
def test_a_job_without_blocks_ends_as_good(make_engine: MakeEngine) -> None:
    device, host = random_pools()
    with closing(make_engine(device, host)) as engine:
        engine.submit(load(1, [], []))
        (result,) = finish(engine, [1])
    assert (result.good, result.bytes) == (True, 0)


@every_engine
def test_the_size_of_the_host_pool_is_told(make_engine: MakeEngine) -> None:
    """Ranks with pools of different sizes must agree on the smallest."""
    device, _ = random_pools(5)
    _, host = random_pools(9)
    with closing(make_engine(device, host)) as engine:
        assert engine.num_host_blocks == 9


@every_engine
def test_waiting_for_what_is_not_live_returns(make_engine: MakeEngine) -> None:
    """S9: a wait for a transfer that ended long ago, or never was, has nothing to wait for."""
    device, host = random_pools()
    with closing(make_engine(device, host)) as engine:
        engine.submit(store(1, [1], [1]))
        assert len(finish(engine, [1])) == 1
        engine.wait([1, 999])
        assert engine.poll() == []


@every_engine
def test_close_drains_and_then_refuses(make_engine: MakeEngine) -> None:
    """S9, S17: what was submitted ends and is told, also when closing twice."""
    device, host = random_pools()
    engine = make_engine(device, host)
    for transfer in range(10):
        engine.submit(store(transfer, [transfer], [transfer]))
    engine.close()
    engine.close()
    assert sorted(result.transfer for result in engine.poll() if result.good) == list(range(10))
    assert np.array_equal(host[:10], device[:10])
    with pytest.raises(TransferFailed, match="transfer 11: the engine is closed"):
        engine.submit(store(11, [11], [11]))
    engine.wait([11])
    assert engine.poll() == []


def test_torch_tensors_are_viewed_not_copied() -> None:
    torch = pytest.importorskip("torch")
    device = torch.arange(24, dtype=torch.uint8).reshape(8, 3)
    host = torch.zeros((8, 3), dtype=torch.uint8)
    with closing(HostCopyEngine(device, host)) as engine:
        engine.submit(store(1, [2, 5], [7, 0]))
        assert [result.good for result in finish(engine, [1])] == [True]
    assert host[7].tolist() == [6, 7, 8]
    assert host[0].tolist() == [15, 16, 17]


def test_the_engines_work_without_torch() -> None:
    """Design: an engine over numpy pools imports no torch."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, kvsm.worker\n"
        "from kvsm.cuda_io import HostCopyEngine\n"
        "HostCopyEngine(np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.uint8)).close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# The host engine.


class HeldEngine(HostCopyEngine):
    """A host engine in which the copies from device block 0 on wait for `release`."""

    def __init__(self, device: Any, host: Any, threads: int = 2) -> None:
        self.held = threading.Event()
        self.release = threading.Event()
        super().__init__(device, host, threads)

    def _copy(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
        if device_blocks[0] == 0:
            self.holder = threading.current_thread()
            self.held.set()
            assert self.release.wait(30), "the test never released the copy"
        super()._copy(direction, device_blocks, host_blocks)


@pytest.fixture
def held_engine() -> Iterator[HeldEngine]:
    device, host = random_pools()
    engine = HeldEngine(device, host)
    yield engine
    engine.release.set()
    engine.close()


def test_transfers_end_out_of_order(held_engine: HeldEngine) -> None:
    """A later transfer overtakes one that hangs, and poll tells them in the order in which they ended."""
    held_engine.submit(store(1, [0, 1], [0, 1]))
    held_engine.submit(store(2, [5], [5]))
    assert [result.transfer for result in finish(held_engine, [2])] == [2]
    held_engine.release.set()
    assert [result.transfer for result in finish(held_engine, [1])] == [1]


def test_submit_never_waits_for_a_copy(held_engine: HeldEngine) -> None:
    """With every thread held in a copy, submit still returns, poll is empty, and nothing is lost."""
    held_engine.submit(store(1, [0], [0]))
    held_engine.submit(load(2, [0], [1]))
    for transfer in range(3, 30):
        held_engine.submit(store(transfer, [transfer], [transfer]))
    assert held_engine.held.wait(30)
    assert held_engine.poll() == []
    held_engine.release.set()
    assert sorted(result.transfer for result in finish(held_engine, list(range(30)))) == list(range(1, 30))


def test_one_large_transfer_is_shared_by_the_threads() -> None:
    """While one thread hangs in the first piece, the other copies further ones; the end waits for both."""
    device, host = random_pools(41, 3)
    before = host.copy()
    with short_pieces(4, 3):
        engine = HeldEngine(device, host)
    with closing(engine):
        engine.submit(store(1, list(range(40)), list(range(40))))
        assert engine.held.wait(30)
        # The only free thread takes the second piece first: it was in the queue before this transfer.
        engine.submit(store(2, [39], [40]))
        assert [result.transfer for result in finish(engine, [2])] == [2]
        assert np.array_equal(host[4:8], device[4:8])
        assert np.array_equal(host[:4], before[:4])
        engine.release.set()
        assert [result.transfer for result in finish(engine, [1])] == [1]
    assert np.array_equal(host[:40], device[:40])


def test_one_bad_piece_makes_the_transfer_bad_although_the_last_piece_is_good() -> None:
    """S6: of two pieces in work at once, the one that fails ends first."""

    class FailingEngine(HeldEngine):
        def _copy(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
            if device_blocks[0] == 4:
                raise OSError("out of luck")
            super()._copy(direction, device_blocks, host_blocks)

    with short_pieces(4, 3):
        engine = FailingEngine(*random_pools())
    with closing(engine):
        engine.submit(store(1, list(range(8)), list(range(8))))
        assert engine.held.wait(30)
        engine.submit(store(2, [20], [20]))  # ends behind the second piece, in the thread that is free
        assert [result.transfer for result in finish(engine, [2])] == [2]
        engine.release.set()
        (result,) = finish(engine, [1])
    assert (result.good, result.error, result.bytes) == (False, "OSError: out of luck", 0)


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_no_exception_ends_a_copy_thread(raised: type[BaseException]) -> None:
    """S9: whatever a copy raises, the transfer ends as bad, and the only thread serves the next one."""

    class RaisingEngine(HostCopyEngine):
        def _copy(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
            if device_blocks[0] == 0:
                raise raised("out of luck")
            super()._copy(direction, device_blocks, host_blocks)

    device, host = random_pools()
    with closing(RaisingEngine(device, host, threads=1)) as engine:
        engine.submit(store(1, [0], [0]))
        engine.submit(store(2, [1], [1]))
        first, second = finish(engine, [1, 2])
    assert (first.good, first.error) == (False, f"{raised.__name__}: out of luck")
    assert second.good


@pytest.mark.parametrize("raised", [SystemExit, MemoryError])
def test_a_pool_that_raises_anything_fails_its_transfers_and_the_engine_goes_on(
    raised: type[BaseException],
) -> None:
    """S6, S9: what reads the pool raises, out of every copy while it does; each transfer is told once."""

    class Pool(np.ndarray):  # type: ignore[type-arg]
        broken = True

        def __getitem__(self, place: Any) -> Any:
            if Pool.broken:
                raise raised("no pool")
            return super().__getitem__(place)

    device, host = random_pools()
    with closing(HostCopyEngine(device.view(Pool), host)) as engine:
        for transfer in range(6):
            engine.submit(store(transfer, [transfer], [transfer]))
        results = finish(engine, list(range(6)))
        assert sorted((one.transfer, one.good, one.error) for one in results) == [
            (transfer, False, f"{raised.__name__}: no pool") for transfer in range(6)
        ]
        Pool.broken = False
        engine.submit(store(6, [6], [6]))
        assert [one.good for one in finish(engine, [6])] == [True]


def deadly_clock(deaths: int) -> Callable[[], float]:
    """A clock whose first readings kill the thread that reads it: outside of what guards a copy."""
    left = [SystemExit("clock gone")] * deaths

    def clock() -> float:
        if left:
            raise left.pop()
        return 0.0

    return clock


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_dead_thread_ends_all_transfers_as_bad_and_new_ones_are_refused(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: nobody waits for a thread that is gone; and who submits afterwards hears what it died of."""
    reason = "a copying thread died of SystemExit: clock gone"
    monkeypatch.setattr(host_module, "perf_counter", deadly_clock(1))
    with short_pieces(1, 3):
        engine = HeldEngine(*random_pools(), threads)
    engine.submit(store(1, [5, 6, 7], [5, 6, 7]))
    engine.wait([1])
    assert [(one.transfer, one.good, one.error) for one in engine.poll()] == [(1, False, reason)]
    with pytest.raises(TransferFailed, match=f"transfer 2: {reason}; make a new engine"):
        engine.submit(store(2, [8], [8]))
    engine.wait([1, 2])
    engine.close()
    assert engine.poll() == []
    assert not any(thread.is_alive() for thread in engine._threads)


def test_no_transfer_ends_while_a_living_thread_still_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: one thread is in the middle of a copy when the other dies; its transfer is live until it let go."""
    with short_pieces(1, 3):
        engine = HeldEngine(*random_pools())
    engine.submit(store(1, [0], [0]))
    assert engine.held.wait(30)
    monkeypatch.setattr(host_module, "perf_counter", deadly_clock(1))
    engine.submit(store(2, [2], [2]))
    (dying,) = [thread for thread in engine._threads if thread is not engine.holder]
    dying.join(30)
    assert not dying.is_alive()
    assert engine.poll() == []
    engine.release.set()
    results = {one.transfer: one.good for one in finish(engine, [1, 2])}
    engine.close()
    assert results == {1: True, 2: False}


def test_waits_of_several_threads_overlap(held_engine: HeldEngine) -> None:
    """S9: each waiter wakes when its own transfers have ended, and none takes a result from another."""
    held_engine.submit(store(1, [0], [0]))
    held_engine.submit(store(2, [2], [2]))
    waiters = [
        threading.Thread(target=held_engine.wait, args=(transfers,), daemon=True)
        for transfers in ([1], [1, 2], [2])
    ]
    for waiter in waiters:
        waiter.start()
    waiters[2].join(30)
    held_engine.release.set()
    for waiter in waiters:
        waiter.join(30)
    assert not any(waiter.is_alive() for waiter in waiters)
    assert sorted(result.transfer for result in held_engine.poll()) == [1, 2]


def test_closing_from_another_thread_waits_for_the_copy(held_engine: HeldEngine) -> None:
    """S17: close returns only when the transfer in flight has ended; submit is refused from then on."""
    held_engine.submit(store(1, [0], [0]))
    assert held_engine.held.wait(30)
    released_at_return: list[bool] = []

    def close() -> None:
        held_engine.close()
        released_at_return.append(held_engine.release.is_set())

    closers = [threading.Thread(target=close, daemon=True) for _ in range(2)]
    for closer in closers:
        closer.start()
    held_engine.release.set()
    for closer in closers:
        closer.join(30)
    assert released_at_return == [True, True]
    assert [result.transfer for result in held_engine.poll()] == [1]
    with pytest.raises(TransferFailed, match="closed"):
        held_engine.submit(store(2, [2], [2]))


def test_an_engine_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        HostCopyEngine(*random_pools(), threads=0)


# The simulated engine.


def drive(seed: int, failure_rate: float = 0.3) -> str:
    """A run of submissions, polls and waits, told as text."""
    device, host = random_pools()
    engine = SimulatedCopyEngine(device, host, seed, failure_rate)
    told = []
    for transfer in range(40):
        make = store if transfer % 3 else load
        engine.submit(make(transfer, [transfer], [39 - transfer]))
        if transfer % 7 == 0:
            engine.wait({transfer, transfer - 1, transfer - 2})
        if transfer % 2:
            told.append(repr(engine.poll()))
    engine.close()
    return "\n".join([*told, repr(engine.poll()), device.tobytes().hex(), host.tobytes().hex()])


@given(seed=st.integers(0, 2**64))
@settings(max_examples=20, deadline=None)
def test_one_seed_gives_one_run(seed: int) -> None:
    """S11."""
    assert drive(seed) == drive(seed)


def test_seeds_differ() -> None:
    """Else the test of determinism could not fail."""
    assert len({drive(seed) for seed in range(5)}) == 5


def test_the_hash_seed_decides_nothing() -> None:
    """S11: the same run, results and bytes, in processes with different PYTHONHASHSEED."""
    script = "import test_cuda_io; print(test_cuda_io.drive(5))"
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=os.path.dirname(__file__),
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "1")
    }
    assert told == {drive(5)}


@given(seed=st.integers(0, 2**32), count=st.integers(1, 3 * SMALL))
@settings(max_examples=50, deadline=None)
def test_memory_is_touched_at_the_end_not_at_the_submission(seed: int, count: int) -> None:
    """S12 can only be checked on an engine that reads late: a store takes what is there when it ends."""
    device, host = random_pools(3 * SMALL)
    before = host.copy()
    engine = SimulatedCopyEngine(device, host, seed)
    blocks = list(range(count))
    engine.submit(store(1, blocks, blocks))
    assert np.array_equal(host, before)
    device[:count] = 77
    engine.wait([1])
    assert (host[:count] == 77).all()
    assert np.array_equal(host[count:], before[count:])


@given(seed=st.integers(0, 2**32))
def test_every_transfer_ends_within_the_bound(seed: int) -> None:
    """S9: an engine that is only polled ends everything, after as many polls as it says."""
    engine = SimulatedCopyEngine(*random_pools(), seed)
    for transfer in range(20):
        engine.submit(store(transfer, [transfer], [transfer]))
    results = [result for _ in range(LONGEST_POLLS) for result in engine.poll()]
    assert sorted(result.transfer for result in results) == list(range(20))


def test_transfers_end_in_many_orders() -> None:
    """The engine is of use only if seeds reach all orders, of polled and of awaited transfers."""

    def order(seed: int, waits: bool) -> tuple[int, ...]:
        engine = SimulatedCopyEngine(*random_pools(), seed)
        for transfer in range(3):
            engine.submit(store(transfer, [transfer], [transfer]))
        if waits:
            engine.wait([0, 1, 2])
        return tuple(result.transfer for _ in range(4) for result in engine.poll())

    for waits in (False, True):
        assert len({order(seed, waits) for seed in range(200)}) == 6


@given(seed=st.integers(0, 2**32), count=st.integers(0, 3 * SMALL))
@settings(max_examples=50, deadline=None)
def test_an_injected_failure_is_bad_and_touches_only_its_targets(seed: int, count: int) -> None:
    """S6: a prefix of the blocks was copied, the rest was not, and no other host block is touched."""
    device, host = random_pools(3 * SMALL)
    before = host.copy()
    engine = SimulatedCopyEngine(device, host, seed)
    blocks = list(range(count))
    engine.submit(store(1, blocks, blocks))
    engine.fail(1)
    (result,) = finish(engine, [1])
    assert (result.good, result.bytes) == (False, 0)
    copied = int(result.error.removeprefix("simulated failure after ").split()[0])
    assert 0 <= copied <= count
    assert np.array_equal(host[:copied], device[:copied])
    assert np.array_equal(host[copied:], before[copied:])


def test_the_failure_rate_is_a_share_of_the_transfers() -> None:
    for failure_rate, least, most in ((0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)):
        engine = SimulatedCopyEngine(*random_pools(), 3, failure_rate)
        for transfer in range(1000):
            engine.submit(store(transfer, [1], [2]))
        engine.close()
        assert least <= sum(not result.good for result in engine.poll()) <= most


def test_only_a_transfer_in_flight_can_be_made_to_fail() -> None:
    engine = SimulatedCopyEngine(*random_pools(), 1)
    engine.submit(store(1, [1], [1]))
    engine.wait([1])
    with pytest.raises(TransferFailed, match="transfer 1 cannot be made to fail"):
        engine.fail(1)


@pytest.mark.parametrize("failure_rate", [-0.1, 1.1, float("nan")])
def test_a_failure_rate_is_from_0_to_1(failure_rate: float) -> None:
    with pytest.raises(ConfigError, match="failure_rate is"):
        SimulatedCopyEngine(*random_pools(), 1, failure_rate)
