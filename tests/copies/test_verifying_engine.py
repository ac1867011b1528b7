"""The verifying engine: a wrong byte makes a failed transfer, and nothing else does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engine import PlainCopyEngine

from examples import examples
from kvsm.copies import (
    CopyEngine,
    CopyResult,
    FailingCopyEngine,
    HostCopyEngine,
    SimulatedCopyEngine,
    VerifyingCopyEngine,
    VerifyingStatistics,
    checksums,
)
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack

BLOCKS = 24

engines = pytest.mark.parametrize(
    "make_engine",
    [
        pytest.param(PlainCopyEngine, id="plain"),
        pytest.param(HostCopyEngine, id="host"),
        pytest.param(lambda device, host: SimulatedCopyEngine(device, host, seed=7), id="simulated"),
    ],
)


def store(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, pack(device_blocks), pack(host_blocks))


def load(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return TransferJob(transfer, Direction.LOAD, pack(device_blocks), pack(host_blocks))


def random_pools(block_bytes: int = 5, seed: int = 0) -> tuple[Any, Any]:
    """The host pool is one rank's part of a pool that two ranks share, so its rows have gaps."""
    random = np.random.default_rng(seed)
    device = random.integers(0, 256, (BLOCKS, block_bytes), np.uint8)
    return device, random.integers(0, 256, (BLOCKS, 2, block_bytes), np.uint8)[:, 1]


def finish(engine: CopyEngine, jobs: list[TransferJob]) -> list[CopyResult]:
    for job in jobs:
        engine.submit(job)
    engine.wait([job.transfer for job in jobs])
    return sorted(engine.poll(), key=lambda result: result.transfer)


@st.composite
def jobs_side_by_side(draw: st.DrawFn, first_id: int) -> list[TransferJob]:
    """Transfers both ways that have no block in common."""
    device_blocks, host_blocks = (draw(st.permutations(range(BLOCKS))) for _ in range(2))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, BLOCKS), max_size=5)))]
    return [
        (store if draw(st.booleans()) else load)(
            first_id + place, device_blocks[first:last], host_blocks[first:last]
        )
        for place, (first, last) in enumerate(pairwise(cuts))
    ]


@st.composite
def flips(draw: st.DrawFn, block_bytes: int) -> list[tuple[int, int, int]]:
    """Bytes that change by themselves: in which row, which byte, by which bits."""
    return draw(
        st.lists(
            st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, block_bytes - 1), st.integers(1, 255)),
            max_size=3,
        )
    )


class Expected:
    """The reference: what was stored, byte by byte."""

    def __init__(self, host: Any) -> None:
        self.host, self.stored = host, {}
        self.checked = self.mismatched = self.unverified = 0

    def ended(self, job: TransferJob, good: bool) -> bool:
        """Whether the transfer must be good. good: whether its copy was."""
        hosts = [int(one) for one in job.pairs()[1]]
        if job.direction is Direction.STORE:
            for one in hosts:
                self.stored[one] = self.host[one].tobytes() if good else None
            return good
        if not good:
            return False
        known = [one for one in hosts if self.stored.get(one) is not None]
        wrong = [one for one in known if self.stored[one] != self.host[one].tobytes()]
        self.checked += len(known)
        self.mismatched += len(wrong)
        self.unverified += len(hosts) - len(known)
        return not wrong

    @property
    def statistics(self) -> VerifyingStatistics:
        return VerifyingStatistics(self.checked, self.mismatched, self.unverified)


@engines
@pytest.mark.parametrize("threads", [0, 1, 3])
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data(), block_bytes=st.sampled_from([1, 7, 300]), rate=st.sampled_from([0.0, 0.3]))
def test_a_byte_that_changed_at_rest_fails_just_the_loads_that_bring_it(
    make_engine: Callable[..., CopyEngine], threads: int, data: st.DataObject, block_bytes: int, rate: float
) -> None:
    """Correct bytes (S15): blocks are stored, overwritten, stored in part by a failed copy, and changed in
    between."""
    device, host = random_pools(block_bytes)
    expected = Expected(host)
    below = FailingCopyEngine(make_engine(device, host), 3, rate)
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(VerifyingCopyEngine(below, host, device, threads)) as engine,
    ):
        patch.setattr(checksums, "PIECE_BYTES", data.draw(st.integers(1, 30 * block_bytes)))
        for round_number in range(data.draw(st.integers(1, 5))):
            for block, place, bits in data.draw(flips(block_bytes)):
                host[block, place] ^= bits
            jobs = data.draw(jobs_side_by_side(100 * round_number))
            results = finish(engine, jobs)
            assert [result.transfer for result in results] == [job.transfer for job in jobs]
            for job, result in zip(jobs, results):
                made_to_fail = result.error.startswith("made to fail")
                assert result.good is expected.ended(job, not made_to_fail)
                assert result.good is (result.error == "")
                assert result.bytes == (len(job.pairs()[0]) * block_bytes if result.good else 0)
        assert engine.statistics() == expected.statistics


@pytest.mark.parametrize("threads", [0, 1])
@settings(max_examples=examples(20), deadline=None)
@given(
    data=st.data(),
    make=st.sampled_from([store, load]),
    flip=st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, 6), st.integers(1, 255)),
)
def test_a_byte_that_changed_on_its_way_fails_the_copy(
    threads: int, data: st.DataObject, make: Callable[..., TransferJob], flip: tuple[int, int, int]
) -> None:
    """Correct bytes (S15): in both directions, if the device pool can be read. One of the two tensors has
    words instead of bytes."""
    rows = np.random.default_rng(1).integers(0, 256, (BLOCKS, 11), np.uint8)
    first, second = rows[:, :3], np.ascontiguousarray(rows[:, 3:7]).view(np.float16)
    host = np.zeros((BLOCKS, 7), np.uint8)
    job = make(1, data.draw(st.permutations(range(BLOCKS))), data.draw(st.permutations(range(BLOCKS))))
    place, offset, bits = flip

    def change_a_target(job: TransferJob) -> None:
        device_blocks, host_blocks = job.pairs()
        if job.direction is Direction.STORE:
            host[host_blocks[place], offset] ^= bits
        elif offset < 3:
            first[device_blocks[place], offset] ^= bits
        else:
            second.view(np.uint8)[device_blocks[place], offset - 3] ^= bits

    below = PlainCopyEngine([first, second], host)
    with closing(VerifyingCopyEngine(below, host, [first, second], threads)) as engine:
        assert [result.good for result in finish(engine, [job])] == [True]
        below.meddle = change_a_target
        [result] = finish(engine, [job])
        pair = "device block {} and host block {}".format(*(int(one[place]) for one in job.pairs()))
        assert not result.good
        assert result.error.startswith(f"{job.direction.name.lower()} 1: {pair} do not hold the same bytes")
        assert engine.statistics().mismatched == 1
        below.meddle = lambda _: None
        assert [result.good for result in finish(engine, [job])] == [True]


def test_a_block_that_came_from_another_place_fails_the_copy() -> None:
    """Correct bytes (S15): right bytes of the wrong block are wrong."""
    device, host = random_pools()

    def swap(_: TransferJob) -> None:
        host[[3, 4]] = host[[4, 3]]

    below = PlainCopyEngine(device, host)
    with closing(VerifyingCopyEngine(below, host, device)) as engine:
        below.meddle = swap
        [result] = finish(engine, [store(1, [0, 1, 2], [2, 3, 4])])
        assert "device block 1 and host block 3" in result.error
        # Nobody knows what a bad store has left; a load says that it did not look.
        below.meddle = lambda _: None
        assert [result.good for result in finish(engine, [load(2, [0, 1], [3, 9])])] == [True]
        assert engine.statistics() == VerifyingStatistics(checked=0, mismatched=2, unverified=2)


def test_the_error_names_the_first_wrong_host_block_and_both_checksums() -> None:
    import xxhash

    device, host = random_pools()
    with closing(VerifyingCopyEngine(PlainCopyEngine(device, host), host)) as engine:
        finish(engine, [store(1, [0, 1, 2], [7, 17, 5])])
        was = xxhash.xxh3_64_hexdigest(device[1])
        host[17, 4] ^= 1
        host[5, 0] ^= 1
        now = xxhash.xxh3_64_hexdigest(host[17].tobytes())
        [result] = finish(engine, [load(2, [3, 4, 5], [7, 17, 5])])
    assert result.error.startswith(
        f"load 2: host block 17 does not hold what was stored in it: its checksum is {now}, and was {was};"
    )


def test_a_store_over_a_damaged_slot_makes_it_good_again() -> None:
    device, host = random_pools()
    with closing(VerifyingCopyEngine(PlainCopyEngine(device, host), host, threads=0)) as engine:
        finish(engine, [store(1, [0], [0])])
        host[0] ^= 1
        goods = []
        for transfer in (2, 3):  # wrong until it is overwritten
            goods += [result.good for result in finish(engine, [load(transfer, [1], [0])])]
        finish(engine, [store(4, [2], [0])])
        goods += [result.good for result in finish(engine, [load(5, [3], [0])])]
    assert goods == [False, False, True]
    assert np.array_equal(device[3], device[2])


@engines
@pytest.mark.parametrize(
    "job",
    [
        TransferJob(1, Direction.STORE, b"\x09\x00\x00", (0,)),
        store(1, [0, 1], [5]),
        store(1, [0, 1], [5, BLOCKS]),
        store(1, [0, 1], [5, 1 << 70]),
        store(1, [0, 1], [5, -1]),
    ],
    ids=["unreadable", "unequal", "beyond the pool", "beyond any pool", "negative"],
)
def test_a_job_that_cannot_be_right_ends_as_bad_and_forgets_no_checksum(
    make_engine: Callable[..., CopyEngine], job: TransferJob
) -> None:
    """Failure is not success (S6), correct bytes (S15): nothing of the job ran, so the contents of the
    other block are still known."""
    device, host = random_pools()
    with closing(VerifyingCopyEngine(make_engine(device, host), host)) as engine:
        finish(engine, [store(0, [7], [5])])
        assert [result.good for result in finish(engine, [job])] == [False]
        host[5] ^= 1
        assert [result.good for result in finish(engine, [load(2, [0], [5])])] == [False]


# Ends: each once, after its check.


def held_engine(threads: int = 1) -> tuple[VerifyingCopyEngine, threading.Event, threading.Event]:
    """An engine whose checks begin and then wait; with the event that a check has begun, and the event to
    go on."""
    begun, go_on = threading.Event(), threading.Event()

    def reads(_: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    device, host = random_pools()
    return VerifyingCopyEngine(PlainCopyEngine(device, host), host, device, threads, reads), begun, go_on


def test_a_result_comes_after_its_check() -> None:
    """Correct bytes (S15): the caller does not wait for the check."""
    engine, begun, go_on = held_engine()
    engine.submit(load(1, [0], [1]))
    assert engine.poll() == []
    assert begun.wait(30)
    assert engine.poll() == []
    with pytest.raises(TransferFailed, match="transfer 1 is live"):
        engine.submit(load(1, [0], [1]))
    go_on.set()
    engine.wait([1])
    assert [result.transfer for result in engine.poll()] == [1]
    engine.close()


@pytest.mark.parametrize("end", ["wait", "drain", "close"])
def test_waits_cover_the_checks(end: str) -> None:
    """Progress (S9): an awaited transfer is in the next `poll`, also if its check was running."""
    engine, begun, go_on = held_engine()
    engine.submit(load(1, [0], [1]))
    engine.poll()
    engine.submit(load(2, [3], [4]))
    assert begun.wait(30)
    ends = {"wait": lambda: engine.wait([2, 1, 99]), "drain": engine.drain, "close": engine.close}
    waiting = threading.Thread(target=ends[end])
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(30)
    assert sorted(result.transfer for result in engine.poll()) == [1, 2]
    assert engine.poll() == []
    engine.close()


def test_checks_in_the_callers_thread_are_over_at_its_poll() -> None:
    """Determinism (S11): without threads nothing depends on when a thread runs."""
    names = set()
    device, host = random_pools()
    below = PlainCopyEngine(device, host)
    before = threading.active_count()
    engine = VerifyingCopyEngine(below, host, device, 0, lambda _: names.add(threading.current_thread().name))
    assert threading.active_count() == before
    jobs = [store(transfer, [transfer], [transfer]) for transfer in range(3)]
    references = sys.getrefcount(jobs[0])
    for job in jobs:
        engine.submit(job)
    below.drain()
    assert [result.transfer for result in engine.poll()] == [0, 1, 2]
    kept = sys.getrefcount(jobs[0]) - references
    assert kept == 0
    assert names == {threading.current_thread().name}
    engine.close()


def test_host_blocks_are_told_before_they_are_read() -> None:
    """For a race detector: the host blocks of stores and of loads."""
    told: list[list[int]] = []
    device, host = random_pools()
    engine = VerifyingCopyEngine(
        PlainCopyEngine(device, host), host, threads=0, reads=lambda blocks: told.append(list(blocks))
    )
    finish(engine, [store(1, [0, 1], [4, 2]), load(2, list(range(20)), list(range(3, 23)))])
    assert told == [[4, 2], list(range(3, 23))]


@pytest.mark.parametrize("threads", [0, 1])
def test_a_check_that_fails_is_a_bad_transfer_and_the_engine_goes_on(threads: int) -> None:
    """Progress (S9), failure is not success (S6): a transfer that could not be checked is bad, and the
    contents after such a store are unknown."""
    fails = [MemoryError("for a test")]

    def reads(_: Any) -> None:
        if fails:
            raise fails.pop()

    device, host = random_pools()
    with closing(VerifyingCopyEngine(PlainCopyEngine(device, host), host, device, threads, reads)) as engine:
        [result] = finish(engine, [store(1, [0], [0])])
        assert (result.good, result.bytes) == (False, 0)
        assert result.error == "its bytes could not be checked: MemoryError: for a test"
        assert [result.good for result in finish(engine, [load(2, [0], [0])])] == [True]
        assert engine.statistics().unverified == 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_a_checking_thread_dies_every_transfer_ends_and_no_more_are_taken(threads: int) -> None:
    """Progress (S9): transfers that are being checked, that wait for their check, and that are still
    copied."""

    def reads(_: Any) -> None:
        raise SystemExit("for a test")

    device, host = random_pools()
    engine = VerifyingCopyEngine(PlainCopyEngine(device, host), host, None, threads, reads)
    for transfer in range(4):
        engine.submit(store(transfer, [transfer], [transfer]))
    engine.wait([0, 1])
    engine.drain()
    results = engine.poll()
    assert sorted(result.transfer for result in results) == [0, 1, 2, 3]
    for result in results:
        assert (result.good, result.bytes) == (False, 0)
        assert result.error == "a checking thread died of SystemExit: for a test"
    with pytest.raises(TransferFailed, match=r"transfer 9: a checking thread died of .*; make a new engine"):
        engine.submit(store(9, [0], [0]))
    engine.close()
    assert engine.poll() == []


def test_a_check_that_ends_after_all_was_given_up_ends_nothing_again() -> None:
    """Progress (S9): one thread dies while another one checks."""
    begun, go_on = threading.Event(), threading.Event()

    def reads(host_blocks: Any) -> None:
        if host_blocks == (1,):
            begun.wait(30)
            raise SystemExit("for a test")
        begun.set()
        go_on.wait(30)

    device, host = random_pools()
    engine = VerifyingCopyEngine(PlainCopyEngine(device, host), host, None, 2, reads)
    results = finish(engine, [load(0, [0], [0]), load(1, [1], [1])])
    assert [(result.transfer, result.good) for result in results] == [(0, False), (1, False)]
    go_on.set()
    engine.close()
    assert engine.poll() == []
    assert engine.statistics() == VerifyingStatistics()


def test_a_closed_engine_takes_no_more_and_closing_twice_is_as_once() -> None:
    device, host = random_pools()
    below = PlainCopyEngine(device, host)
    engine = VerifyingCopyEngine(below, host, device)
    engine.submit(store(1, [0], [0]))
    engine.close()
    engine.close()
    assert [result.transfer for result in engine.poll()] == [1]
    for one in (engine, below):
        with pytest.raises(TransferFailed, match="transfer 2: the engine is closed"):
            one.submit(store(2, [0], [0]))
    assert not [one for one in threading.enumerate() if one.name == "kvsm-verify" and one.is_alive()]


def test_what_the_engine_below_refuses_is_not_live() -> None:
    device, host = random_pools()
    below = PlainCopyEngine(device, host)
    below.close()
    engine = VerifyingCopyEngine(below, host)
    for _ in range(2):
        with pytest.raises(TransferFailed, match="transfer 1: the engine is closed"):
            engine.submit(store(1, [0], [0]))
    engine.wait([1])
    assert engine.poll() == []
    engine.close()


def test_order_and_waits_are_those_of_the_engine_below() -> None:
    """Order of copies (S12): a mark reaches the engine below. Compute may change what a check reads, so it
    is held until after the check."""
    device, host = random_pools()
    below = PlainCopyEngine(device, host)
    with closing(VerifyingCopyEngine(below, host)) as engine:
        engine.submit(store(1, [0], [0]), engine.mark())
        engine.hold_compute([1])
        assert below.calls == [("submit", 1, "mark 0")]
        assert [result.good for result in engine.poll()] == [True]
        assert engine.num_host_blocks == BLOCKS


# Configuration.


def test_a_pool_of_another_size_is_refused() -> None:
    device, host = random_pools()
    with pytest.raises(ConfigError, match="to verify has 23 blocks, the engine's has 24"):
        VerifyingCopyEngine(PlainCopyEngine(device, host), host[1:])
    with pytest.raises(ConfigError, match="4 bytes in the device pool and 5 in the host pool"):
        VerifyingCopyEngine(PlainCopyEngine(device, host), host, device[:, 1:])


def test_memory_that_the_host_cannot_read_is_refused() -> None:
    """Reading it would be a crash, not an error."""
    device, host = random_pools()
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match="device tensor 1 is in the memory of a cuda device"):
        VerifyingCopyEngine(PlainCopyEngine(device, host), host, [device, on_gpu])
    with pytest.raises(ConfigError, match="threads is -1"):
        VerifyingCopyEngine(PlainCopyEngine(device, host), host, device, -1)


def test_torch_tensors_are_checked_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    device = torch.arange(BLOCKS * 6, dtype=torch.bfloat16).reshape(BLOCKS, 6)
    host = torch.zeros((BLOCKS, 12), dtype=torch.uint8)
    with closing(VerifyingCopyEngine(PlainCopyEngine(device, host), host, device)) as engine:
        assert [result.good for result in finish(engine, [store(1, [5, 6], [0, 1])])] == [True]
        host[1, 11] ^= 1
        goods = [result.good for result in finish(engine, [load(2, [0], [0]), load(3, [1], [1])])]
    assert goods == [True, False]
