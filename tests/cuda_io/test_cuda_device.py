"""The CUDA engine on the fake driver of `fake_cuda`: which calls it makes, and in which order.

The fake runs nothing before it must, so an order that is not asked for is not there. What no fake can show,
how a GPU's engines overlap, is in `test_cuda_gpu.py`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from copy_rigs import load, store
from cuda_rig import usable_fake
from fake_cuda import INVALID_VALUE, NEWEST_WITHOUT_BATCH, FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from examples import examples
from kvsm.copies.copy_engine import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.cuda_io import copier, driver, paths
from kvsm.cuda_io.cuda_engine import CudaCopyEngine, ThreadSubmitter
from kvsm.cuda_io.paths import CopyPath, PathTable, TableDevice
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction

COMPUTE = 0
"""The handle of the stream that stands for the model's: the default stream."""

CONTEXT_IS_DESTROYED = 709

FAKE_GPU = TableDevice("Fake GPU", 13000)

CALLS = {
    CopyPath.BATCH: "cuMemcpyBatchAsync",
    CopyPath.RUNS: "cuMemcpyAsync",
    CopyPath.PITCHED: "cuMemcpy2DAsync",
    CopyPath.KERNEL: "cuLaunchKernel",
}

every_path = pytest.mark.parametrize("path", list(CopyPath), ids=lambda path: path.value)


@pytest.fixture
def fake() -> FakeDriver:
    return usable_fake()


class Pools:
    """Three layers with gaps between their rows, and a page-locked host pool; random bytes."""

    def __init__(self, fake: FakeDriver, blocks: int = 40, row_bytes: int = 16, pinned: bool = True) -> None:
        random = np.random.default_rng(blocks)
        whole = random.integers(0, 256, (3, blocks, row_bytes + 16), dtype=np.uint8)
        self.device = [layer[:, :row_bytes] for layer in whole]
        self.host = random.integers(0, 256, (blocks, 3 * row_bytes), dtype=np.uint8)
        fake.unlock_all()
        if pinned:
            fake.page_lock(self.host)

    def engine(self, path: CopyPath | None = None) -> closing[CudaCopyEngine]:
        table = None if path else PathTable.default()
        return closing(CudaCopyEngine(self.device, self.host, lambda: COMPUTE, path, table))

    def blocks(self, *blocks: int) -> np.ndarray:
        """What the device pool holds in these blocks."""
        return np.concatenate([layer[list(blocks)] for layer in self.device], axis=1)


def finish(engine: CudaCopyEngine, *jobs: TransferJob) -> list[CopyResult]:
    for job in jobs:
        engine.submit(job)
    engine.drain()
    return engine.poll()


def named(fake: FakeDriver, name: str) -> list[list[str]]:
    """The arguments of each call of this name, oldest first."""
    return [arguments for called, *arguments in (call.split() for call in fake.calls) if called == name]


# The bytes.


@st.composite
def pools_and_pairs(draw: st.DrawFn) -> tuple[list[np.ndarray], np.ndarray, list[int], list[int]]:
    """Layers in one allocation or several, rows with and without gaps, runs and single blocks."""
    blocks, layers = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    gap, host_gap = draw(st.sampled_from([0, 0, 1, 16])), draw(st.sampled_from([0, 16]))
    if draw(st.booleans()):  # one allocation, so that a block over its layers can be a rectangle
        row_bytes = draw(st.sampled_from([1, 4, 16, 48]))
        whole = random.integers(0, 256, (layers, blocks, row_bytes + gap), dtype=np.uint8)
        device = [layer[:, :row_bytes] for layer in whole]
    else:
        sizes = draw(st.lists(st.sampled_from([1, 3, 8, 16, 40]), min_size=layers, max_size=layers))
        device = [random.integers(0, 256, (blocks, size + gap), dtype=np.uint8)[:, :size] for size in sizes]
    block_bytes = sum(layer.shape[1] for layer in device)
    host = random.integers(0, 256, (blocks, block_bytes + host_gap), dtype=np.uint8)[:, :block_bytes]
    count = draw(st.integers(1, blocks))
    device_blocks = draw(st.permutations(range(blocks)))[:count]
    in_order = draw(st.booleans())
    host_blocks = sorted(device_blocks) if in_order else draw(st.permutations(range(blocks)))[:count]
    return device, host, sorted(device_blocks) if in_order else device_blocks, host_blocks


@every_path
@settings(max_examples=examples(40))
@given(drawn=pools_and_pairs())
def test_each_path_copies_the_bytes_of_a_plain_loop_both_ways(path: CopyPath, drawn: Any) -> None:
    """Correct bytes (S15): a store, then a load of the same blocks to another place."""
    device, host, device_blocks, host_blocks = drawn
    fake = usable_fake()
    fake.page_lock(host)
    back = device_blocks[::-1]
    expected_host, expected_device = host.copy(), [layer.copy() for layer in device]
    for device_block, host_block in zip(device_blocks, host_blocks):
        expected_host[host_block] = np.concatenate([layer[device_block] for layer in device])
    for device_block, host_block in zip(back, host_blocks):
        parts = np.split(expected_host[host_block], np.cumsum([layer.shape[1] for layer in device])[:-1])
        for layer, part in zip(expected_device, parts):
            layer[device_block] = part
    with closing(CudaCopyEngine(device, host, lambda: COMPUTE, path)) as engine:
        results = finish(engine, store(1, device_blocks, host_blocks))
        results += finish(engine, load(2, back, host_blocks))
    assert [(result.good, result.error) for result in results] == [(True, "")] * 2
    assert {result.bytes for result in results} == {len(back) * host.shape[1]}
    assert np.array_equal(host, expected_host)
    assert all(np.array_equal(one, other) for one, other in zip(device, expected_device))


def test_page_locks_of_a_deleted_array_do_not_hide_those_of_its_successor(fake: FakeDriver) -> None:
    """The driver of the tests once called a new pool pageable, if a deleted one had begun inside of it."""
    pools = Pools(fake)
    fake.page_lock(pools.host[1:2])
    fake.page_lock(pools.host[-1:])
    fake.page_lock(pools.host)
    with pools.engine(CopyPath.KERNEL) as engine:
        assert [result.error for result in finish(engine, store(1, [1, 9], [8, 2]))] == [""]


@every_path
def test_a_forced_path_is_the_only_one(fake: FakeDriver, path: CopyPath) -> None:
    pools = Pools(fake)
    with pools.engine(path) as engine:
        finish(engine, store(1, [1, 9, 4, 30], [8, 2, 3, 17]))
        assert engine.statistics().transfers == {one: int(one is path) for one in CopyPath}
    assert {one for one in CALLS.values() if named(fake, one)} == {CALLS[path]}


def test_time_of_a_transfer_is_the_devices(fake: FakeDriver) -> None:
    with Pools(fake).engine(CopyPath.RUNS) as engine:
        (result,) = finish(engine, store(1, [1, 9], [8, 2]))
    # Six copies and the recording of the end, a microsecond each.
    assert result.seconds == pytest.approx(7e-6, rel=0.01)


def test_a_transfer_of_no_blocks_asks_nothing_of_the_copy_calls(fake: FakeDriver) -> None:
    with Pools(fake).engine() as engine:
        (result,) = finish(engine, store(1, [], []))
    assert (result.good, result.bytes) == (True, 0)
    assert not any(named(fake, call) for call in CALLS.values())


# The order (S12).


@every_path
def test_a_store_reads_what_compute_wrote_before_its_mark(fake: FakeDriver, path: CopyPath) -> None:
    """Order of copies (S12): compute is queued and has not run when the store is submitted."""
    pools = Pools(fake)
    with pools.engine(path) as engine:
        fake.compute(pools.device[1][5], 77, COMPUTE)
        (result,) = finish(engine, store(1, [5, 2], [3, 7]))
    assert result.good
    assert (pools.host[3][16:32] == 77).all()


@every_path
def test_a_load_writes_after_compute_before_its_mark_has_read(fake: FakeDriver, path: CopyPath) -> None:
    """Order of copies (S12): the block's former owner still reads it when the load is submitted."""
    pools = Pools(fake)
    read, before = np.zeros(16, np.uint8), pools.device[0][5].copy()
    with pools.engine(path) as engine:
        fake.compute_reads(pools.device[0][5], read, COMPUTE)
        (result,) = finish(engine, load(1, [5], [3]))
    assert result.good
    assert np.array_equal(read, before)
    assert np.array_equal(pools.blocks(5)[0], pools.host[3])


@every_path
def test_compute_that_is_held_reads_what_the_load_brought(fake: FakeDriver, path: CopyPath) -> None:
    """Order of copies (S12): `hold_compute` orders on the device, with nothing awaited by the host."""
    pools = Pools(fake)
    read = np.zeros(16, np.uint8)
    with pools.engine(path) as engine:
        engine.submit(load(1, [5], [3]))
        engine.hold_compute([1])
        fake.compute_reads(pools.device[0][5], read, COMPUTE)
        fake.run(COMPUTE)
        assert np.array_equal(read, pools.host[3][:16])


@settings(max_examples=examples(40))
@given(chosen=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=2, max_size=8))
def test_each_mark_is_on_the_stream_on_which_the_model_computes_then(chosen: list[tuple[int, bool]]) -> None:
    """Order of copies (S12): the model may compute on another stream in each step. A store waits for the
    stream of its step, and compute that is held on that stream waits for the load."""
    fake = usable_fake()
    pools, context = Pools(fake), driver.CudaContext(0)
    with context:
        streams = [driver.create_stream() for _ in range(3)]
    current, reads = streams[0], list[tuple[np.ndarray, int]]()
    with closing(CudaCopyEngine(pools.device, pools.host, lambda: current, CopyPath.BATCH)) as engine:
        for transfer, (place, is_load) in enumerate(chosen, 1):
            current = streams[place]
            if is_load:
                engine.submit(load(transfer, [20 + transfer], [20 + transfer]))
                engine.hold_compute([transfer])
                reads.append((np.zeros(16, np.uint8), 20 + transfer))
                fake.compute_reads(pools.device[0][20 + transfer], reads[-1][0], current)
            else:
                fake.compute(pools.device[1][transfer], 100 + transfer, current)
                engine.submit(store(transfer, [transfer], [transfer]))
        engine.drain()
        assert all(result.good for result in engine.poll())
        for stream in streams:
            fake.run(stream)
    with context:
        for stream in streams:
            driver.call("cuStreamDestroy", stream)
    context.release()
    for transfer, (_, is_load) in enumerate(chosen, 1):
        assert is_load or (pools.host[transfer][16:32] == 100 + transfer).all()
    for read, block in reads:
        assert np.array_equal(read, pools.host[block][:16])


def test_the_copy_stream_waits_for_the_mark_before_the_copy_is_handed_over(fake: FakeDriver) -> None:
    """Order of copies (S12), as calls: record on the compute stream, wait for it on the copy's, copy
    there."""
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        finish(engine, store(1, [5], [3]))
    calls = [call.split() for call in fake.calls]
    (copied,) = (place for place, call in enumerate(calls) if call[0] == "cuMemcpyBatchAsync")
    stream = calls[copied][1]
    (waited,) = (place for place, call in enumerate(calls) if call[:2] == ["cuStreamWaitEvent", stream])
    recorded = calls.index(["cuEventRecord", calls[waited][2], "(nil)"])
    assert recorded < waited < copied


def test_a_store_reads_in_stream_order_and_a_load_in_any(fake: FakeDriver) -> None:
    """Order of copies (S12): CU_MEMCPY_SRC_ACCESS_ORDER_STREAM is 1, ANY is 3."""
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        finish(engine, store(1, [5], [3]))
        finish(engine, load(2, [5], [3]))
    assert [call[-1] for call in named(fake, "cuMemcpyBatchAsync")] == ["1", "3"]


def test_each_direction_has_a_stream_of_the_least_priority_that_waits_for_no_other(fake: FakeDriver) -> None:
    """The fake's priorities go from 0, the least, to -5; flag 1 is CU_STREAM_NON_BLOCKING."""
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        finish(engine, store(1, [5], [3]), load(2, [6], [4]))
    assert named(fake, "cuStreamCreateWithPriority") == [["1", "0"], ["1", "0"]]
    assert len({call[0] for call in named(fake, "cuMemcpyBatchAsync")}) == 2


def test_tables_of_copies_in_flight_are_not_used_again(fake: FakeDriver) -> None:
    """B37: the kernel reads its table when it runs, long after the next copy was handed over."""
    pools = Pools(fake)
    with pools.engine(CopyPath.KERNEL) as engine:
        finish(engine, store(1, [1, 2], [1, 2]), store(2, [7, 9], [4, 3]))
        finish(engine, store(3, [11], [5]))
        first, second, third = (call[-1] for call in named(fake, "cuLaunchKernel"))
    assert first != second
    assert third in (first, second)
    assert np.array_equal(pools.host[[1, 2, 4, 3, 5]], pools.blocks(1, 2, 7, 9, 11))


def test_the_table_of_parts_is_there_before_a_kernel_reads_it(fake: FakeDriver) -> None:
    """It is uploaded on the default stream. Nothing waits for that stream if the model computes on another
    one."""
    pools = Pools(fake)
    context = driver.CudaContext(0)
    with context:
        compute = driver.create_stream()
    with closing(CudaCopyEngine(pools.device, pools.host, lambda: compute, CopyPath.KERNEL)) as engine:
        (result,) = finish(engine, store(1, [5], [3]))
    with context:
        driver.call("cuStreamDestroy", compute)
    context.release()
    assert result.good
    assert np.array_equal(pools.host[3], pools.blocks(5)[0])


def test_what_a_batch_is_described_by_lives_until_it_is_over(fake: FakeDriver) -> None:
    """B37: the driver may read the descriptors after the call."""
    pools = Pools(fake)
    with pools.engine(CopyPath.BATCH) as engine, driver.CudaContext(0) as context:
        stream = engine._streams[Direction.STORE]
        prepared = engine._device.prepare(Direction.STORE, (1, 2), (3, 4))
        kept = engine._device.copy(stream, 1, Direction.STORE, prepared)
        context.release()
        assert [column.dtype for column in kept] == [np.uint64] * 3
        assert sum(kept.sizes) == 2 * 48


# Who waits for what.


def test_submit_returns_while_the_driver_is_busy_with_a_copy(fake: FakeDriver) -> None:
    """The caller does not wait for work that grows with the blocks, and a small copy keeps its place behind a
    large one of its direction."""
    release, many, begun = threading.Event(), list(range(100)), []
    with Pools(fake, blocks=200).engine(CopyPath.BATCH) as engine:
        copy = engine._device.copy

        def wait_and_copy(stream: Any, transfer: int, *arguments: Any) -> Any:
            begun.append((transfer, threading.current_thread()))
            release.wait(60)
            return copy(stream, transfer, *arguments)

        engine._device.copy = wait_and_copy  # type: ignore[method-assign]
        engine.submit(store(1, many, many))
        engine.submit(store(2, [106], [104]))
        assert engine.poll() == []
        release.set()
        engine.submit(load(3, [150], [150]))
        engine.drain()
        assert sorted(result.transfer for result in engine.poll() if result.good) == [1, 2, 3]
    threads = dict(begun)
    assert [transfer for transfer, _ in begun if transfer != 3] == [1, 2]
    assert threads[1] is threads[2] is not threading.current_thread()
    assert threads[3] is threading.current_thread()


def test_any_thread_may_call_and_none_gets_another_current_context(fake: FakeDriver) -> None:
    """PyTorch takes the current context for its current device."""
    seen: list[Any] = []

    def other(engine: CudaCopyEngine) -> None:
        seen.extend(finish(engine, store(1, [5], [3])))
        seen.append(int(driver.call("cuCtxGetCurrent")))

    with Pools(fake).engine() as engine:
        thread = threading.Thread(target=other, args=(engine,))
        thread.start()
        thread.join()
    assert seen[0].good
    assert seen[1] == 0


def test_the_submitter_stays_out_of_graphs_that_others_capture(fake: FakeDriver) -> None:
    """Mode 2 is CU_STREAM_CAPTURE_MODE_RELAXED; in another, page-locking a table would break the capture."""
    with Pools(fake).engine() as engine:
        finish(engine, store(1, [5], [3]))
    assert named(fake, "cuThreadExchangeStreamCaptureMode") == [["2"], ["2"]]  # one each way


def test_closing_gives_everything_back(fake: FakeDriver) -> None:
    before = fake.retained
    with Pools(fake).engine(CopyPath.KERNEL) as engine:
        finish(engine, *(store(number, [number], [number]) for number in range(9)))
    assert fake.retained == before
    for made, unmade in [
        ("cuMemHostAlloc", "cuMemFreeHost"),
        ("cuMemAlloc", "cuMemFree"),
        ("cuEventCreate", "cuEventDestroy"),
        ("cuStreamCreateWithPriority", "cuStreamDestroy"),
        ("cuModuleLoadData", "cuModuleUnload"),
    ]:
        assert len(named(fake, made)) == len(named(fake, unmade)) > 0, made


def test_events_are_used_again(fake: FakeDriver) -> None:
    with Pools(fake).engine() as engine:
        for number in range(20):
            finish(engine, store(number, [5], [3]))
    assert len(named(fake, "cuEventCreate")) <= 6


# Failures (S6, S9).


@every_path
def test_a_call_that_fails_makes_its_transfer_bad_and_the_engine_goes_on(
    fake: FakeDriver, path: CopyPath
) -> None:
    pools = Pools(fake)
    with pools.engine(path) as engine:
        fake.fail(CALLS[path])
        results = finish(engine, store(1, [1, 5, 9], [1, 9, 5]), store(2, [7], [7]))
        results += finish(engine, load(3, [30], [7]))
    assert [result.good for result in results] == [False, True, True]
    assert CALLS[path] in results[0].error
    assert "CUDA_ERROR_INVALID_VALUE" in results[0].error
    assert np.array_equal(pools.blocks(30)[0], pools.host[7])


def test_a_transfer_that_failed_half_way_ends_behind_its_half(fake: FakeDriver) -> None:
    """Promise 4: nothing is written after the result. The first two fragments were queued."""
    pools = Pools(fake)
    with pools.engine(CopyPath.RUNS) as engine:
        fake.fail("cuMemcpyAsync", nth=3)
        (result,) = finish(engine, store(1, [5], [3]))
        written = pools.host.copy()
    assert not result.good
    assert np.array_equal(written[3][:32], pools.blocks(5)[0][:32])
    assert np.array_equal(pools.host, written)


def test_a_bad_descriptor_is_named(fake: FakeDriver) -> None:
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        fake.fail("cuMemcpyBatchAsync")
        (result,) = finish(engine, store(1, [5], [3]))
    assert "a batch of 3 copies" in result.error


def test_a_lost_device_ends_every_transfer_and_takes_no_more(fake: FakeDriver) -> None:
    """Progress (S9): each ends once, as bad; nothing runs any more."""
    pools = Pools(fake)
    before = pools.host.copy()
    with pools.engine() as engine:
        engine.submit(store(1, [5], [3]))
        engine.submit(load(2, [6], [4]))
        engine.hold_compute([1, 2])  # both are with the device
        fake.lose()
        engine.drain()
        results = engine.poll()
        with pytest.raises(TransferFailed, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*restart the process"):
            engine.submit(store(3, [7], [7]), after=None)
    assert sorted((result.transfer, result.good) for result in results) == [(1, False), (2, False)]
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in result.error for result in results)
    assert engine.poll() == []
    assert np.array_equal(pools.host, before)


@pytest.mark.parametrize("code", [214, 226, 700, 719, 721])
def test_each_error_after_which_nothing_runs_is_a_lost_device(fake: FakeDriver, code: int) -> None:
    """Progress (S9): errors of memory, contained and illegal accesses, kernels that fail or leak."""
    with Pools(fake).engine() as engine:
        fake.lose(code)
        with pytest.raises(TransferFailed, match="restart the process"):
            engine.submit(store(1, [5], [3]))


def test_a_kernel_that_reads_memory_which_is_not_there_loses_the_device(fake: FakeDriver) -> None:
    """The fake checks the engine's addresses."""
    pools = Pools(fake)
    with pools.engine(CopyPath.KERNEL) as engine:
        fake.unlock_all()
        (result,) = finish(engine, store(1, [5], [3]))
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in result.error


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (1, "queuing a copy failed: cuEventRecord"),
        (100, "the submitting thread died of cuEventRecord"),
    ],
    ids=("in the caller", "in its thread"),
)
def test_a_submitter_that_dies_ends_its_transfers_when_nothing_of_them_runs(
    fake: FakeDriver, blocks: int, reason: str
) -> None:
    """Progress (S9), promise 4: the event behind the copy cannot be recorded, so nobody else would wait for
    the copy."""
    pools, ids = Pools(fake, blocks=200), list(range(blocks))
    with pools.engine(CopyPath.BATCH) as engine:
        fake.fail("cuEventRecord", nth=3)  # the mark, the begin, the end
        (result,) = finish(engine, store(1, ids, ids))
        written = pools.host.copy()
        with pytest.raises(TransferFailed, match=reason):
            engine.submit(store(2, [107], [107]))
    assert not result.good
    assert reason in result.error
    assert np.array_equal(pools.host, written)
    assert np.array_equal(written[ids], pools.blocks(*ids))


def test_an_interrupted_caller_gets_its_interrupt_and_the_transfer_ends(fake: FakeDriver) -> None:
    """Progress (S9): Ctrl-C reaches a caller while it hands a copy over."""
    pools = Pools(fake)
    with pools.engine(CopyPath.BATCH) as engine:
        engine._device.copy = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.submit(store(1, [5], [3]))
        engine.drain()
        (result,) = engine.poll()
    assert not result.good
    assert "KeyboardInterrupt" in result.error


def test_a_caller_that_cannot_use_the_context_ends_its_transfer(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress (S9): `submit` raised, and the transfer stayed live."""
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        mark = engine.mark()
        with monkeypatch.context() as patch:
            patch.setattr(driver._quick(), "push", lambda _: CONTEXT_IS_DESTROYED)
            engine.submit(store(1, [5], [3]), mark)
        (result,) = engine.poll()
        with pytest.raises(TransferFailed, match="CUDA_ERROR_CONTEXT_IS_DESTROYED"):
            engine.submit(store(2, [6], [4]), mark)
    assert not result.good
    assert "queuing a copy failed: cuCtxPushCurrent failed" in result.error


def test_an_interrupt_of_a_caller_is_not_lost_with_the_device(fake: FakeDriver) -> None:
    pools = Pools(fake)
    with pools.engine(CopyPath.BATCH) as engine:

        def copy(*_: object) -> None:
            fake.lose()
            raise KeyboardInterrupt

        engine._device.copy = copy  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            engine.submit(store(1, [5], [3]))
        (result,) = engine.poll()
    assert not result.good
    assert "KeyboardInterrupt" in result.error


def test_a_job_whose_blocks_cannot_be_counted_is_refused(fake: FakeDriver) -> None:
    """`submit` raised, but the transfer stayed live."""
    with Pools(fake).engine(CopyPath.BATCH) as engine:
        with pytest.raises(TypeError):
            engine.submit(TransferJob(1, Direction.STORE, (5,), 3))  # type: ignore[arg-type]
        engine.submit(store(1, [5], [3]))
        engine.drain()
        assert [result.good for result in engine.poll()] == [True]


def test_what_was_put_behind_a_death_never_runs_and_nobody_waits_for_it() -> None:
    died, ran, ready = [], [], threading.Event()

    def die() -> None:
        ready.wait()
        raise MemoryError("no more")

    submitter = ThreadSubmitter(
        "own", died.append, lambda: None, nullcontext(), settle=lambda: ran.append("settled")
    )
    submitter.put(die)
    submitter.put(lambda: ran.append("called"))
    waiting = threading.Thread(target=submitter.flush)
    waiting.start()
    ready.set()
    waiting.join()
    submitter.put(lambda: ran.append("called"))
    submitter.flush()
    submitter.close()
    assert submitter._queue.empty()
    assert died == ["the submitting thread died of MemoryError: no more"]
    assert ran == ["settled"]


def test_a_claim_that_an_interrupt_kept_from_running_stops_the_submitter() -> None:
    """Ctrl-C may come between a claim and its call. Then a flush must not wait for that turn to end."""
    died, ran = list[str](), list[str]()
    submitter = ThreadSubmitter(
        "own", died.append, lambda: None, nullcontext(), settle=lambda: ran.append("settled")
    )
    assert submitter.claim()
    submitter.put(lambda: ran.append("called"))
    submitter.flush()
    submitter.close()
    assert not submitter.claim()
    assert died == ["a caller was interrupted before it queued its copy"]
    assert ran == ["settled"]


def test_a_thread_that_cannot_use_the_gpu_says_so(fake: FakeDriver) -> None:
    pools = Pools(fake)
    with pools.engine() as engine:
        for own in engine._submitters.values():
            own.flush()  # they have a context
        died: list[str] = []
        fake.fail("cuCtxSetCurrent")
        submitter = engine._device.new_submitter("own", died.append)
        submitter.flush()
        submitter.close()
    assert died == [
        "the submitting thread died of cuCtxSetCurrent failed with CUDA_ERROR_INVALID_VALUE: "
        "what the driver says of it"
    ]


# What is there, and what is missing.


def test_a_driver_without_batches_copies_run_by_run_and_says_so(
    fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set_version(NEWEST_WITHOUT_BATCH)
    pools = Pools(fake)
    with pools.engine() as engine:
        (result,) = finish(engine, store(1, [5], [3]))
        statistics = engine.statistics()
    assert result.good
    assert CopyPath.BATCH not in statistics.available
    assert statistics.transfers[CopyPath.RUNS] == 1
    assert "cuMemcpyBatchAsync came with 12.8" in caplog.text
    with pytest.raises(ConfigError, match=r"the driver has CUDA 12\.6.*install a newer driver"):
        CudaCopyEngine(pools.device, pools.host, lambda: COMPUTE, CopyPath.BATCH)


def test_the_choice_is_logged(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvsm.cuda_io"), Pools(fake).engine(CopyPath.PITCHED):
        pass
    assert "Fake GPU (driver 13.0) copies by pitched" in caplog.text


def test_a_host_pool_that_is_not_page_locked_works_without_the_kernel(
    fake: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    pools = Pools(fake, pinned=False)
    with pools.engine() as engine:
        (result,) = finish(engine, store(1, [1, 5, 9], [1, 9, 5]))
        statistics = engine.statistics()
    assert result.good
    assert (statistics.page_locked, CopyPath.KERNEL in statistics.available) == (False, False)
    assert "not page-locked" in caplog.text
    retained = fake.retained
    with pytest.raises(ConfigError, match="not page-locked, so no kernel can reach it"):
        CudaCopyEngine(pools.device, pools.host, lambda: COMPUTE, CopyPath.KERNEL)
    assert fake.retained == retained


def test_a_pool_that_is_page_locked_in_part_does_not_count(fake: FakeDriver) -> None:
    pools = Pools(fake, pinned=False)
    fake.page_lock(pools.host[:20])
    with pools.engine() as engine:
        assert not engine.statistics().page_locked


def test_without_a_kernel_the_other_paths_serve(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    fake.fail("cuModuleLoadData", code=222)  # PTX of a version that the driver does not know
    with Pools(fake).engine() as engine:
        (result,) = finish(engine, store(1, [1, 5, 9], [1, 9, 5]))
        assert CopyPath.KERNEL not in engine.statistics().available
    assert result.good
    assert "no copy kernel" in caplog.text


def test_host_memory_is_page_locked_and_unlocked(fake: FakeDriver) -> None:
    pools = Pools(fake, pinned=False)
    driver.register_host(pools.host.ctypes.data, pools.host.nbytes)
    with pools.engine() as engine:
        assert engine.statistics().page_locked
    driver.unregister_host(pools.host.ctypes.data)
    with pools.engine() as engine:
        assert not engine.statistics().page_locked


def test_refusal_of_page_locking_tells_the_call_and_the_error(fake: FakeDriver) -> None:
    fake.fail("cuMemHostRegister", code=2)
    with pytest.raises(driver.CudaError, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY"):
        driver.register_host(4096, 4096)


@pytest.mark.usefixtures("fresh_bindings")
def test_missing_bindings_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvsm\[cuda\]'"):
        driver.bindings()


@pytest.fixture
def fresh_bindings() -> Iterator[None]:
    """Forget before and after that the driver was found."""
    driver.bindings.cache_clear()
    yield
    driver.bindings.cache_clear()


@pytest.mark.usefixtures("fresh_bindings")
def test_a_missing_gpu_is_told(fake: FakeDriver) -> None:
    fake.fail("cuInit", code=100)
    with pytest.raises(ConfigError, match=r"an NVIDIA GPU.*CUDA_ERROR_NO_DEVICE"):
        driver.bindings()


@pytest.mark.usefixtures("fake")
def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="device 3 is asked for, and the driver shows 1"):
        driver.CudaContext(3)


def test_a_missing_driver_is_told() -> None:
    """In a separate process, because this one may have the fake driver."""
    usable_fake()  # so there is no real driver
    program = "from kvsm.cuda_io import driver; driver.bindings()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ConfigError: the CUDA copy engine needs the NVIDIA driver (libcuda.so.1)" in ran.stderr


def test_it_imports_without_torch_and_without_bindings() -> None:
    program = "import sys; sys.modules |= {'torch': None, 'cuda': None}; import kvsm.cuda_io.cuda_engine"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def tensor_on(kind: str, address: int = 4096, index: int = 0) -> Any:
    """The attributes of a torch tensor of 4 blocks of 4 bytes that are read."""
    return SimpleNamespace(
        ndim=2, shape=(4, 4), itemsize=1, stride=lambda: (4, 1), data_ptr=lambda: address,
        device=SimpleNamespace(type=kind, index=index),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "xpu"])
def test_tensors_elsewhere_are_refused(kind: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=f"device tensor 0 is on {kind}.*needs an NVIDIA GPU"):
        CudaCopyEngine(tensor_on(kind), np.zeros((4, 4), np.uint8))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ConfigError, match=r"on ROCm.*needs an NVIDIA GPU"):
        CudaCopyEngine(tensor_on("cuda"), np.zeros((4, 4), np.uint8))


def test_tensors_of_two_gpus_are_refused() -> None:
    pytest.importorskip("torch")
    tensors = [tensor_on("cuda"), tensor_on("cuda", address=8192, index=1)]
    with pytest.raises(ConfigError, match=r"on GPUs \[0, 1\]"):
        CudaCopyEngine(tensors, np.zeros((4, 8), np.uint8))


def test_arrays_need_a_compute_stream() -> None:
    with pytest.raises(ConfigError, match="give compute"):
        CudaCopyEngine(np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8))


# The table of paths.


@pytest.fixture
def quick_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes measuring quick. Returns where the file of the table will be."""
    for module in (copier, paths):
        monkeypatch.setattr(module, "MEASURED_BYTES", 1 << 19)
    monkeypatch.setattr(paths, "FRAGMENT_BYTES", (1 << 10, 1 << 12))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvsm" / "copy-paths-Fake-GPU-driver-13000.json"


def measured_copies(fake: FakeDriver) -> int:
    """Make an engine and close it. Returns how many copies that took."""
    pools = Pools(fake)
    before = sum(len(named(fake, call)) for call in CALLS.values())
    CudaCopyEngine(pools.device, pools.host, lambda: COMPUTE).close()
    return sum(len(named(fake, call)) for call in CALLS.values()) - before


def test_paths_are_measured_once_for_a_gpu_and_its_driver(fake: FakeDriver, quick_table: Path) -> None:
    assert measured_copies(fake) > 0
    assert PathTable.load(quick_table, FAKE_GPU).device == FAKE_GPU
    assert measured_copies(fake) == 0


def test_every_available_path_is_measured_but_runs_beside_batches(
    fake: FakeDriver, quick_table: Path
) -> None:
    measured_copies(fake)
    assert named(fake, "cuMemcpyBatchAsync")
    assert named(fake, "cuMemcpy2DAsync")
    assert named(fake, "cuLaunchKernel")
    table = PathTable.load(quick_table, FAKE_GPU)
    assert sorted(path.value for path in table.stores[0][0]) == ["batch", "kernel", "pitched"]


@pytest.mark.usefixtures("quick_table")
def test_measuring_gives_its_memory_back(fake: FakeDriver) -> None:
    measured_copies(fake)
    assert len(named(fake, "cuMemAlloc")) == len(named(fake, "cuMemFree"))
    assert len(named(fake, "cuMemHostAlloc")) == len(named(fake, "cuMemFreeHost"))
    assert len(named(fake, "cuEventCreate")) == len(named(fake, "cuEventDestroy"))


def test_a_damaged_table_is_measured_again(
    fake: FakeDriver, quick_table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick_table.parent.mkdir(parents=True)
    quick_table.write_text("{")
    assert measured_copies(fake) > 0
    assert "measuring the copy paths of Fake GPU, driver 13000 again" in caplog.text
    assert measured_copies(fake) == 0


def test_a_cache_that_cannot_be_written_is_a_warning(
    fake: FakeDriver, quick_table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick_table.parent.parent.write_text("a file, where a directory should be")
    assert measured_copies(fake) > 0
    assert "set XDG_CACHE_HOME" in caplog.text


@pytest.mark.usefixtures("quick_table")
def test_a_user_without_a_home_has_its_table_with_the_temporary_files(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pod's random user id may have no entry in passwd, and its image may set no HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert measured_copies(fake) > 0
    assert measured_copies(fake) == 0
    assert [*tmp_path.glob("cache-*/kvsm/copy-paths-*")] != []


@pytest.mark.parametrize(("call", "nth"), [("cuMemAlloc", 2), ("cuMemHostAlloc", 1)])
def test_paths_are_guessed_where_there_is_no_room_to_measure(
    fake: FakeDriver, quick_table: Path, caplog: pytest.LogCaptureFixture, call: str, nth: int
) -> None:
    """An engine may start after the model has taken all memory. The next process tries again."""
    fake.fail(call, nth, code=2)
    assert measured_copies(fake) == 0
    assert "could not be measured" in caplog.text
    assert not quick_table.exists()
    # The allocation that failed has nothing to free.
    assert len(named(fake, "cuMemAlloc")) + len(named(fake, "cuMemHostAlloc")) == 1 + len(
        named(fake, "cuMemFree")
    ) + len(named(fake, "cuMemFreeHost"))


@pytest.mark.usefixtures("quick_table")
def test_the_measured_copies_never_merge(fake: FakeDriver) -> None:
    """The table is measured with fragments and rectangles of the stated sizes, up to 512 of them and 16
    rows."""
    measured_copies(fake)
    counts = {int(call[1]) for call in named(fake, "cuMemcpyBatchAsync")}
    assert counts == {1 << power for power in range(10)}
    assert {int(call[2]) for call in named(fake, "cuMemcpy2DAsync")} == {2, 4, 8, 16}


@pytest.mark.usefixtures("fake")
def test_invalid_value_is_what_the_driver_calls_it() -> None:
    """The error numbers in these tests are the driver's."""
    assert driver.bindings().CUresult(INVALID_VALUE).name == "CUDA_ERROR_INVALID_VALUE"
