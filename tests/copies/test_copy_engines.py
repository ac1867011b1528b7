"""The conformance suite: the promises of `kvsm.copies.copy_engine`, on every copy engine.

Refusals before anything runs (S3), one end for each transfer (S9), a failure that is told as one (S6), and
the right bytes (S15). Not here: the order against compute (S12), which takes a device whose compute a test
can hold; the tests of the simulated device and of the GPU have it.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing

import numpy as np
import pytest
from copy_rigs import (
    Bytes,
    MakeRig,
    Rig,
    Shape,
    copied,
    copy_plainly,
    every_engine,
    every_engine_for_threads,
    finish,
    load,
    random_pools,
    rounds_of_jobs,
    shapes,
    short_pieces,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import CopyEngine, CopyResult
from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed
from kvsm.events import Direction


def assert_pools(rig: Rig, device: list[Bytes], host: Bytes) -> None:
    for place, (found, expected) in enumerate(zip(rig.read_device(), device, strict=True)):
        assert np.array_equal(found, expected), f"device tensor {place}"
    assert np.array_equal(rig.read_host(), host)


@every_engine
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), shape=shapes, piece=st.integers(1, 40), num_host_blocks=st.sampled_from([40, 43]))
def test_bytes_are_those_of_a_plain_copy_and_each_transfer_ends_once(
    make_rig: MakeRig, data: st.DataObject, shape: Shape, piece: int, num_host_blocks: int
) -> None:
    """Correct bytes (S15), progress (S9): random transfers both ways on pools of any layout, overlapping
    waits, some left to close."""
    device, host = shape.pools(40, num_host_blocks)
    expected = copied(device, host)
    rounds = data.draw(rounds_of_jobs(40))
    results: list[CopyResult] = []
    rig = make_rig(device, host)
    with short_pieces(piece, shape.block_bytes), closing(rig.engine) as engine:
        for number, jobs in enumerate(rounds):
            for job in jobs:
                copy_plainly(job, *expected)
                engine.submit(job, engine.mark() if data.draw(st.booleans()) else None)
            transfers = [job.transfer for job in jobs]
            if transfers:
                engine.wait(data.draw(st.lists(st.sampled_from(transfers))))
                results += engine.poll()
                engine.hold_compute(data.draw(st.lists(st.sampled_from(transfers))))
            if number < len(rounds) - 1:
                engine.drain()
                results += engine.poll()
        engine.close()
        results += engine.poll()
        assert engine.poll() == []
    assert_pools(rig, *expected)
    submitted = {job.transfer: job for jobs in rounds for job in jobs}
    assert sorted(result.transfer for result in results) == sorted(submitted)
    for result in results:
        job = submitted[result.transfer]
        assert (result.good, result.error, result.direction) == (True, "", job.direction)
        assert result.bytes == len(job.pairs()[0]) * shape.block_bytes
        assert result.seconds >= 0


REFUSED = {
    "a device block beyond the pool": (store(1, [0, 40], [0, 1]), "store 1: device block 40 .* pool of 40"),
    "a host block beyond the pool": (load(1, [0, 1], [41, 0]), "load 1: host block 41 .* pool of 41"),
    "a negative device block": (load(1, [-1, 0], [0, 1]), "load 1: device block -1 .* pool of 40"),
    "a negative host block": (store(1, [0, 1], [0, -1]), "store 1: host block -1 .* pool of 41"),
    "a host block stored twice": (
        store(1, [0, 1, 2], [3, 4, 3]),
        "store 1: host block 3 is the target of two",
    ),
    "a device block loaded twice": (load(1, [5, 5], [0, 1]), "load 1: device block 5 is the target of two"),
    "more device blocks than host blocks": (
        store(1, [0, 1], [0]),
        "store 1: 2 device blocks for 1 host blocks",
    ),
    "more host blocks than device blocks": (
        load(1, list(range(19)), list(range(20))),
        "load 1: 19 device blocks for 20 host blocks",
    ),
    "ids that cannot be read": (
        TransferJob(1, Direction.STORE, b"\x09\x00\x00", (0,)),
        "store 1: packed ids start with their width",
    ),
    "no ids at all": (TransferJob(1, Direction.LOAD, (0,), b""), "load 1: packed ids start with their width"),
    "a host block beyond the pool, in a large job": (
        store(1, list(range(20)), [*range(19), 41]),
        "store 1: host block 41 .* pool of 41",
    ),
    "a device block beyond the pool, in a large job": (
        load(1, [*range(19), 40], list(range(20))),
        "load 1: device block 40 .* pool of 40",
    ),
    "a device block loaded twice, in a large job": (
        load(1, [*range(19), 7], list(range(20))),
        "load 1: device block 7 is the target of two",
    ),
}


@every_engine
@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_cannot_be_right_ends_as_bad_before_anything_runs(make_rig: MakeRig, case: str) -> None:
    """No reuse in flight (S3), failure is not success (S6): submit accepts it and no byte is touched, not
    even for pairs before the wrong one. The result says what is wrong, and the engine goes on."""
    job, message = REFUSED[case]
    device, _ = random_pools()
    _, host = random_pools(41)
    expected = copied(device, host)
    rig = make_rig(device, host)
    with short_pieces(1, 3), closing(rig.engine) as engine:
        engine.submit(job)
        (result,) = finish(engine, [1])
        assert (result.transfer, result.direction, result.good, result.bytes) == (1, job.direction, False, 0)
        with pytest.raises(TransferFailed, match=message):
            raise TransferFailed(result.error)
        assert_pools(rig, *expected)
        good = store(1, [0], [0])
        engine.submit(good)
        assert [result.good for result in finish(engine, [1])] == [True]
    copy_plainly(good, *expected)
    assert_pools(rig, *expected)


@every_engine
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data(), piece=st.integers(1, 40))
def test_bad_jobs_among_good_ones_are_told_apart(make_rig: MakeRig, data: st.DataObject, piece: int) -> None:
    """Failure is not success (S6), progress (S9): each wrong job ends as bad without touching a byte, and
    does not affect the other jobs."""
    device, host = random_pools()
    expected = copied(device, host)
    (jobs,) = data.draw(rounds_of_jobs(40, most=1))
    wrong = data.draw(st.sets(st.sampled_from([job.transfer for job in jobs]))) if jobs else set()
    rig = make_rig(device, host)
    with short_pieces(piece, 3), closing(rig.engine) as engine:
        for job in jobs:
            if job.transfer not in wrong:
                copy_plainly(job, *expected)
                engine.submit(job)
            else:
                make = store if job.direction is Direction.STORE else load
                devices, hosts = ([int(one) for one in ids] for ids in job.pairs())
                engine.submit(make(job.transfer, [*devices, 40], [*hosts, 0]))
        engine.drain()
        results = {result.transfer: result for result in engine.poll()}
    assert {transfer: result.good for transfer, result in results.items()} == {
        job.transfer: job.transfer not in wrong for job in jobs
    }
    assert all(bool(result.error) is not result.good for result in results.values())
    assert_pools(rig, *expected)


@every_engine
@pytest.mark.parametrize("count", [2, 40])
def test_one_source_may_be_copied_to_many_targets(make_rig: MakeRig, count: int) -> None:
    """Only targets must be distinct: two reads of a block do not disturb each other."""
    rig = make_rig(*random_pools())
    with closing(rig.engine) as engine:
        engine.submit(store(1, [4] * count, list(range(count))))
        assert [result.good for result in finish(engine, [1])] == [True]
        (device,), host = rig.read_device(), rig.read_host()
        assert (host[:count] == device[4]).all()
        engine.submit(load(2, list(range(count)), [0] * count))
        assert [result.good for result in finish(engine, [2])] == [True]
    (device,) = rig.read_device()
    assert (device[:count] == rig.read_host()[0]).all()


@every_engine
def test_a_live_id_is_refused_and_its_first_transfer_is_not_disturbed(make_rig: MakeRig) -> None:
    """Stale reports change nothing (S5): a transfer is live from submit until poll has returned its result,
    not only until the copy is over. A refused id has no second result."""
    device, host = random_pools()
    expected = copied(device, host)
    rig = make_rig(device, host)
    with closing(rig.engine) as engine:
        first = store(1, [1], [1])
        engine.submit(first)
        with pytest.raises(TransferFailed, match="transfer 1 is live"):
            engine.submit(store(1, [3], [3]))
        engine.wait([1])
        with pytest.raises(TransferFailed, match="transfer 1 is live"):
            engine.submit(store(1, [2], [2]))
        assert [(result.transfer, result.good) for result in engine.poll()] == [(1, True)]
        engine.drain()
        assert engine.poll() == []
    copy_plainly(first, *expected)
    assert_pools(rig, *expected)


@every_engine
def test_a_transfer_that_was_told_is_forgotten(make_rig: MakeRig) -> None:
    """An engine that runs for weeks keeps nothing about ended transfers, not even their ids. The planner
    keeps ids distinct."""
    with closing(make_rig(*random_pools()).engine) as engine:
        for _ in range(2):
            engine.submit(store(1, [1], [1]))
            assert [result.good for result in finish(engine, [1])] == [True]


@every_engine
@pytest.mark.parametrize("make", [store, load])
def test_a_job_without_blocks_ends_as_good(make_rig: MakeRig, make: type[TransferJob]) -> None:
    device, host = random_pools()
    expected = copied(device, host)
    rig = make_rig(device, host)
    with closing(rig.engine) as engine:
        engine.submit(make(1, [], []))
        (result,) = finish(engine, [1])
    assert (result.transfer, result.good, result.error, result.bytes) == (1, True, "", 0)
    assert_pools(rig, *expected)


@every_engine
def test_blocks_of_one_byte_are_copied(make_rig: MakeRig) -> None:
    """Correct bytes (S15): the smallest block there is, scattered, with more blocks than a tuple of ids
    holds."""
    device, host = random_pools(300, 1)
    expected = copied(device, host)
    job = store(1, list(range(0, 300, 2)), list(range(299, 149, -1)))
    copy_plainly(job, *expected)
    rig = make_rig(device, host)
    with closing(rig.engine) as engine:
        engine.submit(job)
        (result,) = finish(engine, [1])
    assert (result.good, result.bytes) == (True, 150)
    assert_pools(rig, *expected)


@every_engine
def test_pools_of_no_blocks_take_jobs_of_none(make_rig: MakeRig) -> None:
    """A host pool without blocks is a valid pool. A job that names a block of it is wrong."""
    device, host = random_pools(3)
    with closing(make_rig(device, host[:0]).engine) as engine:
        assert engine.num_host_blocks == 0
        engine.submit(store(1, [], []))
        engine.submit(store(2, [0], [0]))
        results = {result.transfer: result for result in finish(engine, [1, 2])}
    assert results[1].good
    assert "host block 0 is not in its pool of 0" in results[2].error


@every_engine
def test_the_size_of_the_host_pool_is_told(make_rig: MakeRig) -> None:
    """Ranks with pools of different sizes must agree on the smallest."""
    device, _ = random_pools(5)
    _, host = random_pools(9)
    with closing(make_rig(device, host).engine) as engine:
        assert engine.num_host_blocks == 9


@every_engine
def test_what_is_not_live_is_passed_over(make_rig: MakeRig) -> None:
    """Progress (S9): a wait or hold for a transfer that ended long ago or never existed returns at once."""
    with closing(make_rig(*random_pools()).engine) as engine:
        engine.drain()
        engine.submit(store(1, [1], [1]))
        assert len(finish(engine, [1])) == 1
        engine.wait([1, 999])
        engine.hold_compute([1, 999])
        engine.drain()
        assert engine.poll() == []


@every_engine
def test_a_wait_takes_no_result_away(make_rig: MakeRig) -> None:
    """Progress (S9): waits, holds and drains may overlap and name ended transfers; `poll` returns each
    result once."""
    with closing(make_rig(*random_pools()).engine) as engine:
        for transfer in range(6):
            engine.submit(store(transfer, [transfer], [transfer]))
        engine.wait([0, 1, 1])
        engine.wait(iter([1, 2]))
        engine.hold_compute(iter([2, 3]))
        engine.drain()
        engine.wait([0, 5])
        assert sorted(result.transfer for result in engine.poll() if result.good) == list(range(6))
        assert engine.poll() == []


@every_engine
def test_all_have_ended_after_drain(make_rig: MakeRig) -> None:
    """Progress (S9): drain waits for every transfer, and the engine accepts new ones afterwards."""
    device, host = random_pools()
    expected = copied(device, host)
    rig = make_rig(device, host)
    with closing(rig.engine) as engine:
        for first in (0, 20):
            for block in range(first, first + 20):
                job = (store if block % 2 else load)(block, [block], [39 - block])
                copy_plainly(job, *expected)
                engine.submit(job)
            engine.drain()
            assert_pools(rig, *expected)
            assert sorted(result.transfer for result in engine.poll()) == list(range(first, first + 20))


@every_engine
def test_several_transfers_may_stand_behind_one_mark(make_rig: MakeRig) -> None:
    """One mark serves all transfers of a step, and other things happen in between."""
    device, host = random_pools()
    expected = copied(device, host)
    rig = make_rig(device, host)
    with closing(rig.engine) as engine:
        mark = engine.mark()
        jobs = [store(1, [1, 2], [3, 4]), load(2, [5, 6], [7, 8]), store(3, [9], [10])]
        for job in jobs:
            engine.mark()
            copy_plainly(job, *expected)
            engine.submit(job, mark)
        assert sorted(result.transfer for result in finish(engine, [1, 2, 3]) if result.good) == [1, 2, 3]
        engine.submit(store(4, [1], [11]), mark)
        assert [result.good for result in finish(engine, [4])] == [True]
    copy_plainly(store(4, [1], [11]), *expected)
    assert_pools(rig, *expected)


@every_engine
def test_close_drains_and_then_refuses(make_rig: MakeRig) -> None:
    """Progress (S9), flush at last step (S17): submitted transfers end and have results, also when the
    engine is closed twice."""
    device, host = random_pools()
    expected = copied(device, host)
    rig = make_rig(device, host)
    engine = rig.engine
    for transfer in range(10):
        job = store(transfer, [transfer], [transfer])
        copy_plainly(job, *expected)
        engine.submit(job)
    engine.submit(store(10, [0], [99]))
    engine.close()
    engine.close()
    assert sorted((result.transfer, result.good) for result in engine.poll()) == [
        *((transfer, True) for transfer in range(10)),
        (10, False),
    ]
    assert_pools(rig, *expected)
    with pytest.raises(TransferFailed, match="transfer 11: the engine is closed"):
        engine.submit(store(11, [11], [11]))
    engine.wait([11])
    engine.drain()
    assert engine.poll() == []


# Engines that may be called from any thread.


def run_all(*calls: threading.Thread) -> None:
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join(30)
    assert not any(thread.is_alive() for thread in calls)


def in_thread(call: object, *arguments: object) -> threading.Thread:
    return threading.Thread(target=call, args=arguments, daemon=True)  # type: ignore[arg-type]


@every_engine_for_threads
def test_polls_of_two_threads_share_the_results(make_rig: MakeRig) -> None:
    """Progress (S9): while one thread submits, two poll; together they get each result once."""
    device, host = random_pools(200)
    rig = make_rig(device, host)
    told: list[list[int]] = [[], []]
    ended = threading.Event()

    def poll(engine: CopyEngine, mine: list[int]) -> None:
        while True:
            last = ended.is_set()
            mine.extend(result.transfer for result in engine.poll())
            time.sleep(0.0005)  # or it leaves the copying threads no time
            if last:
                return

    def submit(engine: CopyEngine) -> None:
        for transfer in range(200):
            engine.submit(store(transfer, [transfer], [transfer]))
        engine.drain()
        ended.set()

    with closing(rig.engine) as engine:
        run_all(*(in_thread(poll, engine, mine) for mine in told), in_thread(submit, engine))
    assert sorted(told[0] + told[1]) == list(range(200))
    assert np.array_equal(rig.read_host(), rig.read_device()[0])


@every_engine_for_threads
def test_threads_may_submit_wait_and_hold_at_once(make_rig: MakeRig) -> None:
    """Progress (S9): each waiter returns when its own transfers have ended; afterwards all results are
    there."""
    rig = make_rig(*random_pools(120))

    def use(engine: CopyEngine, first: int) -> None:
        for transfer in range(first, first + 40):
            engine.submit(store(transfer, [transfer], [transfer]))
            (engine.wait if transfer % 2 else engine.hold_compute)([transfer, first])

    with closing(rig.engine) as engine:
        run_all(*(in_thread(use, engine, first) for first in (0, 40, 80)))
        engine.drain()
        assert sorted(result.transfer for result in engine.poll() if result.good) == list(range(120))


@every_engine_for_threads
def test_close_while_another_thread_submits(make_rig: MakeRig) -> None:
    """Progress (S9), flush at last step (S17): accepted transfers end and refused ones do not, wherever
    close falls between two submits. Two threads that close at once both wait for the rest."""
    rig = make_rig(*random_pools(200))
    engine, begun = rig.engine, threading.Event()
    taken: list[int] = []

    def submit() -> None:
        for transfer in range(200):
            try:
                engine.submit(store(transfer, [transfer], [transfer]))
            except TransferFailed as error:
                assert "the engine is closed" in str(error)  # noqa: PT017  others would be lost in a thread
                return
            taken.append(transfer)
            if transfer == 20:
                begun.set()

    def close() -> None:
        begun.wait(30)
        engine.close()

    run_all(in_thread(submit), in_thread(close), in_thread(close))
    assert len(taken) > 20
    assert sorted(result.transfer for result in engine.poll() if result.good) == taken
