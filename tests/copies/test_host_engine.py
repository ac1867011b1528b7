"""The host engine: its threads, what they share, what they survive, and what they do not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from copy_rigs import Bytes, copied, copy_plainly, finish, load, random_pools, rounds_of_jobs, store
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import HostCopyEngine, threaded
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction


class HeldEngine(HostCopyEngine):
    """A host engine in which the copies from device block 0 on wait for `release`."""

    def __init__(self, device: list[Bytes], host: Bytes, threads: int = 2) -> None:
        self.held = threading.Event()
        self.release = threading.Event()
        super().__init__(device, host, threads)

    def copy_blocks(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
        if len(device_blocks) and device_blocks[0] == 0:
            self.holder = threading.current_thread()
            self.held.set()
            assert self.release.wait(30), "the test never released the copy"
        super().copy_blocks(direction, device_blocks, host_blocks)


@pytest.fixture
def held_engine() -> Iterator[HeldEngine]:
    engine = HeldEngine(*random_pools())
    yield engine
    engine.release.set()
    engine.close()


@pytest.fixture
def pieces_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many blocks of 3 bytes a piece has."""
    return lambda blocks: monkeypatch.setattr(threaded, "PIECE_BYTES", 3 * blocks)


# Order and waiting.


def test_transfers_end_out_of_order(held_engine: HeldEngine) -> None:
    """A later transfer overtakes one that hangs, and poll returns them in the order in which they ended."""
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


def test_submit_never_looks_at_the_blocks(held_engine: HeldEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit` is equally short for one block and for a million. A copying thread finds what is wrong with
    a job."""
    checkers: list[threading.Thread] = []
    checked_pairs = threaded.checked_pairs

    def check(*arguments: Any) -> Any:
        checkers.append(threading.current_thread())
        return checked_pairs(*arguments)

    monkeypatch.setattr(threaded, "checked_pairs", check)
    held_engine.submit(store(1, [5], [6]))
    held_engine.submit(TransferJob(2, Direction.STORE, b"no ids", (0,)))
    assert {one.transfer: one.good for one in finish(held_engine, [1, 2])} == {1: True, 2: False}
    assert len(checkers) == 2
    assert set(checkers) <= set(held_engine._threads)


def test_compute_is_held_until_the_transfers_have_ended(held_engine: HeldEngine) -> None:
    """Order of copies (S12): compute here runs when it is called, so the hold is a wait; there is nothing
    to mark."""
    assert held_engine.mark() is None
    held_engine.submit(load(1, [0], [3]))
    held_engine.submit(load(2, [7], [7]))
    released_at_return: list[bool] = []

    def hold() -> None:
        held_engine.hold_compute([1])
        released_at_return.append(held_engine.release.is_set())

    held_engine.hold_compute([2])
    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held_engine.held.wait(30)
    held_engine.release.set()
    holder.join(30)
    assert released_at_return == [True]


def test_waits_of_several_threads_overlap(held_engine: HeldEngine) -> None:
    """Progress (S9): each waiter wakes when its own transfers have ended, and none takes a result from
    another."""
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


@pytest.mark.parametrize("end", [HostCopyEngine.close, HostCopyEngine.drain])
def test_who_closes_or_drains_waits_for_the_copy(
    end: Callable[[HostCopyEngine], None], held_engine: HeldEngine
) -> None:
    """Flush at last step (S17): from two threads at once; both return only when the transfer in flight has
    ended."""
    held_engine.submit(store(1, [0], [0]))
    assert held_engine.held.wait(30)
    released_at_return: list[bool] = []

    def call() -> None:
        end(held_engine)
        released_at_return.append(held_engine.release.is_set())

    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    held_engine.release.set()
    for caller in callers:
        caller.join(30)
    assert released_at_return == [True, True]
    assert [result.transfer for result in held_engine.poll()] == [1]


def test_a_close_that_was_interrupted_is_finished_by_the_next(
    monkeypatch: pytest.MonkeyPatch, held_engine: HeldEngine
) -> None:
    """Progress (S9): after a Ctrl-C during the wait, a second close still stops the threads."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    held_engine.submit(store(1, [0], [0]))
    with monkeypatch.context() as patch:
        patch.setattr(held_engine, "_await", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held_engine.close()
    held_engine.release.set()
    closer = threading.Thread(target=held_engine.close, daemon=True)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    assert [result.transfer for result in held_engine.poll()] == [1]


def test_close_lets_every_piece_be_copied(pieces_of: Callable[[int], None]) -> None:
    """Progress (S9), flush at last step (S17): also transfers that no thread has claimed yet."""
    pieces_of(1)
    device, host = random_pools()
    engine = HeldEngine(device, host, threads=1)
    job = store(1, list(range(10)), list(range(10)))
    engine.submit(job)
    assert engine.held.wait(30)
    closer = threading.Thread(target=engine.close, daemon=True)
    closer.start()
    refusal = ""
    while "closed" not in refusal:  # refused as a live one until then
        with pytest.raises(TransferFailed) as refused:
            engine.submit(job)
        refusal = str(refused.value)
    engine.release.set()
    closer.join(30)
    assert not closer.is_alive()
    assert [(result.transfer, result.good) for result in engine.poll()] == [(1, True)]
    assert np.array_equal(host[:10], device[0][:10])


# Pieces.


def test_one_large_transfer_is_shared_by_the_threads(pieces_of: Callable[[int], None]) -> None:
    """While one thread hangs in the first piece, the other copies more pieces. The end waits for both."""
    pieces_of(4)
    device, host = random_pools(41)
    before = host.copy()
    with closing(HeldEngine(device, host)) as engine:
        engine.submit(store(1, list(range(40)), list(range(40))))
        assert engine.held.wait(30)
        # The only free thread takes the second piece first: it was in the queue before this transfer.
        engine.submit(store(2, [39], [40]))
        assert [result.transfer for result in finish(engine, [2])] == [2]
        assert np.array_equal(host[4:8], device[0][4:8])
        assert np.array_equal(host[:4], before[:4])
        engine.release.set()
        assert [result.transfer for result in finish(engine, [1])] == [1]
    assert np.array_equal(host[:40], device[0][:40])


@pytest.mark.parametrize(
    ("threads", "blocks", "pieces"),
    [(1, 64, [48, 16]), (2, 40, [20, 20]), (4, 40, [10, 10, 10, 10]), (4, 4, [2, 2]), (2, 0, [0])],
)
def test_every_thread_gets_a_piece(
    threads: int, blocks: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer shorter than the longest piece is shared too, unless it is not worth it."""
    monkeypatch.setattr(threaded, "PIECE_BYTES", 3 * 48)
    monkeypatch.setattr(threaded, "SHARED_BYTES", 3 * 2)
    copied_pieces: list[int] = []

    class Listening(HostCopyEngine):
        def copy_blocks(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
            copied_pieces.append(len(host_blocks))
            super().copy_blocks(direction, device_blocks, host_blocks)

    with closing(Listening(*random_pools(64), threads=threads)) as engine:
        engine.submit(store(1, list(range(blocks)), list(range(blocks))))
        assert [result.good for result in finish(engine, [1])] == [True]
    assert sorted(copied_pieces, reverse=True) == pieces


def test_one_bad_piece_makes_the_transfer_bad_although_the_last_piece_is_good(
    pieces_of: Callable[[int], None],
) -> None:
    """Failure is not success (S6): two pieces run at once and the failing one ends first; the end of the
    transfer waits for the other."""

    class FailingEngine(HeldEngine):
        def copy_blocks(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
            if device_blocks[0] == 4:
                raise OSError("out of luck")
            super().copy_blocks(direction, device_blocks, host_blocks)

    pieces_of(4)
    with closing(FailingEngine(*random_pools())) as engine:
        engine.submit(store(1, list(range(8)), list(range(8))))
        assert engine.held.wait(30)
        engine.submit(store(2, [20], [20]))  # ends behind the second piece, in the thread that is free
        assert [result.transfer for result in finish(engine, [2])] == [2]
        engine.release.set()
        (result,) = finish(engine, [1])
    assert (result.good, result.error, result.bytes) == (False, "OSError: out of luck", 0)


def test_what_is_left_of_a_failed_transfer_is_not_copied(pieces_of: Callable[[int], None]) -> None:
    """Its bytes would be useless, and other transfers wait for the thread."""
    copied_blocks: list[int] = []

    class FailingEngine(HostCopyEngine):
        def copy_blocks(self, direction: Direction, device_blocks: Any, host_blocks: Any) -> None:
            copied_blocks.extend(device_blocks)
            if 5 in device_blocks:
                raise OSError("out of luck")
            super().copy_blocks(direction, device_blocks, host_blocks)

    pieces_of(1)
    with closing(FailingEngine(*random_pools(), threads=1)) as engine:
        engine.submit(store(1, [4, 5, 6, 7], [4, 5, 6, 7]))
        assert [result.good for result in finish(engine, [1])] == [False]
    assert copied_blocks == [4, 5]


# Failures.


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data(), piece=st.integers(1, 40), threads=st.integers(1, 3))
def test_a_failing_copy_is_an_outcome_and_the_engine_goes_on(
    data: st.DataObject, piece: int, threads: int
) -> None:
    """Failure is not success (S6), progress (S9): a read-only host pool fails every store that has blocks;
    loads are served."""
    device, host = random_pools()
    expected, before = copied(device, host)
    host.flags.writeable = False
    (jobs,) = data.draw(rounds_of_jobs(40, most=1))
    blocks = {job.transfer: len(job.pairs()[0]) for job in jobs}
    with pytest.MonkeyPatch.context() as patch, closing(HostCopyEngine(device, host, threads)) as engine:
        patch.setattr(threaded, "PIECE_BYTES", 3 * piece)
        for job in jobs:
            engine.submit(job)
        results = finish(engine, list(blocks))
        assert sorted(result.transfer for result in results) == sorted(blocks)
        for result in results:
            fails = result.direction is Direction.STORE and blocks[result.transfer] > 0
            assert result.good is not fails
            assert ("the host pool is read-only" in result.error) is fails
            assert result.bytes == (0 if fails else 3 * blocks[result.transfer])
        engine.submit(load(1000, [5], [6]))
        assert [result.good for result in finish(engine, [1000])] == [True]
    for job in (*jobs, load(1000, [5], [6])):
        if job.direction is Direction.LOAD:
            copy_plainly(job, expected, before)
    assert np.array_equal(device[0], expected[0])
    assert np.array_equal(host, before)


@pytest.mark.parametrize("where", ["copy_blocks", "checked_pairs"])
@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt, MemoryError])
def test_no_exception_ends_a_copy_thread(
    raised: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress (S9): if copying or checking raises anything, the transfer ends as bad, and the only thread
    goes on."""

    def out_of_luck(*_: Any) -> Any:
        monkeypatch.undo()
        raise raised("out of luck")

    with closing(HostCopyEngine(*random_pools(), threads=1)) as engine:
        monkeypatch.setattr(engine if where == "copy_blocks" else threaded, where, out_of_luck)
        engine.submit(store(1, [0], [0]))
        engine.submit(store(2, [1], [1]))
        first, second = finish(engine, [1, 2])
        engine.close()
    assert (first.good, first.error, first.bytes) == (False, f"{raised.__name__}: out of luck", 0)
    assert second.good


def deadly_clock(deaths: int) -> Callable[[], float]:
    """A clock whose first readings kill the thread, outside of the code that guards a copy."""
    left = [SystemExit("clock gone")] * deaths

    def clock() -> float:
        if left:
            raise left.pop()
        return 0.0

    return clock


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_dead_thread_ends_all_transfers_as_bad_and_new_ones_are_refused(
    threads: int, monkeypatch: pytest.MonkeyPatch, pieces_of: Callable[[int], None]
) -> None:
    """Progress (S9): nobody waits for a dead thread, and later submits are refused with the reason."""
    reason = "a copying thread died of SystemExit: clock gone"
    monkeypatch.setattr(threaded, "perf_counter", deadly_clock(1))
    pieces_of(1)
    engine = HeldEngine(*random_pools(), threads)
    engine.submit(store(1, [5, 6, 7], [5, 6, 7]))
    engine.drain()
    assert [(one.transfer, one.good, one.error) for one in engine.poll()] == [(1, False, reason)]
    with pytest.raises(TransferFailed, match=f"transfer 2: {reason}; make a new engine"):
        engine.submit(store(2, [8], [8]))
    engine.wait([1, 2])
    engine.drain()
    engine.close()
    assert engine.poll() == []
    assert not any(thread.is_alive() for thread in engine._threads)


def test_no_transfer_ends_while_a_living_thread_still_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reuse in flight (S3): one thread is copying when the other dies; its transfer stays live until
    that copy is over."""
    engine = HeldEngine(*random_pools())
    engine.submit(store(1, [0], [0]))
    assert engine.held.wait(30)
    monkeypatch.setattr(threaded, "perf_counter", deadly_clock(1))
    engine.submit(store(2, [2], [2]))
    (dying,) = [thread for thread in engine._threads if thread is not engine.holder]
    dying.join(30)
    assert not dying.is_alive()
    assert engine.poll() == []
    engine.release.set()
    results = {one.transfer: one.good for one in finish(engine, [1, 2])}
    engine.close()
    assert results == {1: True, 2: False}


def test_a_wrong_job_that_is_not_checked_yet_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): transfers that are queued when the last thread dies end as bad."""
    engine = HeldEngine(*random_pools(), threads=1)
    engine.submit(store(1, [0], [0]))
    assert engine.held.wait(30)
    engine.submit(store(2, [99], [0]))
    engine.submit(store(3, [3], [3]))
    # The next reading is the one behind the copy in hand.
    monkeypatch.setattr(threaded, "perf_counter", deadly_clock(1))
    engine.release.set()
    engine.drain()
    results = engine.poll()
    engine.close()
    assert sorted((one.transfer, one.good) for one in results) == [(1, False), (2, False), (3, False)]
    assert all("a copying thread died" in one.error for one in results)


# What it is made of.


def test_an_engine_without_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        HostCopyEngine(*random_pools(), threads=0)


def test_pools_that_do_not_fit_are_refused_before_any_thread_starts() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="they must be equal"):
        HostCopyEngine([np.zeros((4, 2), np.uint8)], np.zeros((4, 3), np.uint8))
    assert threading.active_count() == before


def test_torch_tensors_are_viewed_not_copied() -> None:
    torch = pytest.importorskip("torch")
    device = [torch.arange(24, dtype=torch.uint8).reshape(8, 3), torch.ones((8, 2), dtype=torch.int16)]
    host = torch.zeros((8, 7), dtype=torch.uint8)
    with closing(HostCopyEngine(device, host)) as engine:
        engine.submit(store(1, [2, 5], [7, 0]))
        assert [result.good for result in finish(engine, [1])] == [True]
    assert host[7].tolist() == [6, 7, 8, 1, 0, 1, 0]
    assert host[0].tolist() == [15, 16, 17, 1, 0, 1, 0]


def test_the_engine_works_without_torch_and_without_cuda() -> None:
    """Design: an engine over numpy pools imports neither."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['cuda'] = None\n"
        "import numpy as np, kvsm.copies.worker\n"
        "from kvsm.copies import HostCopyEngine\n"
        "HostCopyEngine(np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.uint8)).close()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
