"""Pools: all forms of the copy move the same bytes (S15), and no others."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np
import pytest
from copy_rigs import Shape, copied, copy_plainly, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import rank_memory as pools_module
from kvsm.copies import vectored
from kvsm.copies.geometry import Fragments
from kvsm.copies.layout import MemoryRows, rows_of
from kvsm.copies.rank_memory import LONG_BYTES, NumpyPools
from kvsm.copies.vectored import LONGEST_BYTES, MOST_FRAGMENTS, copy_vectored, reaches
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is a call of Linux")

SLOW_FROM = {"never slow": None, "slow at once": 0, "slow after some": 3}


class Clock:
    """Stands still. From reading number `slow_from` on, each reading is a minute later than the one
    before."""

    def __init__(self, slow_from: int | None) -> None:
        self.readings, self.slow_from = -1, slow_from  # the first reading begins the copy

    def __call__(self) -> float:
        self.readings += 1
        return 0.0 if self.slow_from is None or self.readings <= self.slow_from else 60.0 * self.readings


long_shapes = st.builds(
    Shape,
    st.lists(st.sampled_from([LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 5]), min_size=1, max_size=3),
    device_gap=st.sampled_from([0, 3]),
    host_gap=st.sampled_from([0, 3]),
    shares_storage=st.booleans(),
)


@pytest.mark.parametrize("vectored", [True, False], ids=["vectored", "not vectored"])
@pytest.mark.parametrize("slow_from", SLOW_FROM.values(), ids=SLOW_FROM)
@pytest.mark.parametrize("sliced_bytes", [LONG_BYTES, 2 * LONG_BYTES])
@settings(max_examples=examples(15))
@given(
    shape=long_shapes | st.builds(Shape, st.just([1, 7]), st.just(1), st.just(0), st.just(False)),
    direction=st.sampled_from(Direction),
    pairs=st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 11)),
        max_size=12,
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    ),
)
def test_all_forms_copy_what_a_plain_copy_does(
    sliced_bytes: int,
    slow_from: int | None,
    vectored: bool,
    shape: Shape,
    direction: Direction,
    pairs: list[tuple[int, int]],
) -> None:
    """Correct bytes (S15): whichever form a copy takes, and wherever it changes form; gaps between rows are
    not touched."""
    device, host = shape.pools(12, 12)
    expected = copied(device, host)
    whole = [np.array(one if one.base is None else one.base) for one in (*device, host)]
    job = TransferJob(1, direction, *(pack(list(ids)) for ids in (list(zip(*pairs)) or [(), ()])))
    copy_plainly(job, *expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools_module, "perf_counter", Clock(slow_from))
        patch.setattr(pools_module, "SLICED_BYTES", sliced_bytes)
        if not vectored:
            patch.setattr(pools_module, "reaches", lambda _: False)
        NumpyPools(device, host).copy(direction, *job.pairs())
    for found, right, before in zip((*device, host), (*expected[0], expected[1]), whole):
        assert np.array_equal(found, right)
        now = found if found.base is None else found.base
        width = max(one.shape[1] for one in (*device, host) if one is found or one.base is now)
        assert np.array_equal(now[:, width:], before[:, width:])


@on_linux
@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_got_slow_ends_in_one_call(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a busy thread each statement waits for the interpreter's lock, so few more may follow."""
    calls: list[int] = []
    monkeypatch.setattr(pools_module, "perf_counter", Clock(2))
    monkeypatch.setattr(pools_module, "SLICED_BYTES", LONG_BYTES)
    monkeypatch.setattr(pools_module, "copy_vectored", lambda rest: calls.append(len(rest.sizes)))
    pools = NumpyPools([random_bytes(64, LONG_BYTES)], random_bytes(64, LONG_BYTES))
    pools.copy(direction, tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))
    assert calls == [30]


@on_linux
def test_a_copy_that_is_quick_makes_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small pages the call costs a third of the speed."""
    monkeypatch.setattr(pools_module, "perf_counter", Clock(None))
    monkeypatch.setattr(pools_module, "SLICED_BYTES", LONG_BYTES)
    monkeypatch.setattr(pools_module, "copy_vectored", lambda _: pytest.fail("not called for"))
    device, host = random_bytes(64, LONG_BYTES, 1), random_bytes(64, LONG_BYTES, 2)
    NumpyPools([device], host).copy(Direction.STORE, tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))
    assert np.array_equal(host[1::2], device[::2])


def test_rows_that_are_short_are_not_given_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long their runs are, the call takes 1 us for each row."""
    monkeypatch.setattr(pools_module, "perf_counter", Clock(1))
    monkeypatch.setattr(pools_module, "copy_vectored", lambda _: pytest.fail("not called for"))
    device, host = Shape([64, 64], 1, 1, False).pools(1000, 1000)
    blocks = np.array([*range(450), *range(500, 950)])
    NumpyPools(device, host).copy(Direction.STORE, blocks, blocks)
    assert np.array_equal(host[blocks], np.hstack(device)[blocks])


@on_linux
def test_short_runs_are_one_call_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise copying threads take the lock from each other for each run."""
    calls: list[int] = []
    monkeypatch.setattr(pools_module, "copy_vectored", lambda rest: calls.append(len(rest.sizes)))
    pools = NumpyPools([random_bytes(64, LONG_BYTES)], random_bytes(64, LONG_BYTES))
    pools.copy(Direction.STORE, tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))
    assert calls == [32]


@pytest.mark.parametrize("direction", Direction)
def test_read_only_targets_are_refused_and_read_only_sources_are_not(direction: Direction) -> None:
    """The kernel would write to memory that numpy counts as read-only. A pool that is mapped read-only can
    still be loaded from."""
    for block_bytes in (3, LONG_BYTES):
        device, host = random_bytes(4, block_bytes, 1), random_bytes(4, block_bytes, 2)
        (host if direction is Direction.STORE else device).flags.writeable = False
        expected = copied([device], host)
        pools = NumpyPools([device], host)
        with pytest.raises(TransferFailed, match="pool is read-only; give a writable one"):
            pools.copy(direction, (0, 2), (1, 3))
        assert np.array_equal(device, expected[0][0])
        assert np.array_equal(host, expected[1])
        other = Direction.LOAD if direction is Direction.STORE else Direction.STORE
        pools.copy(other, (0, 2), (1, 3))
        assert np.array_equal(device[[0, 2]], host[[1, 3]])


def test_one_tensor_needs_no_list() -> None:
    device, host = random_bytes(8, 3, 1), random_bytes(8, 3, 2)
    NumpyPools(device, host).copy(Direction.STORE, (1, 4, 6), (0, 3, 7))
    assert np.array_equal(host[[0, 3, 7]], device[[1, 4, 6]])


def test_items_of_any_type_are_copied_as_bytes() -> None:
    device = np.arange(24, dtype=np.float64).reshape(4, 6)[:, :3]
    host = np.zeros((4, 3))
    NumpyPools(device, host).copy(Direction.STORE, (3, 1), (0, 2))
    assert np.array_equal(host[[0, 2]], device[[3, 1]])


def test_torch_tensors_are_viewed_not_copied() -> None:
    """Also tensors of a type that numpy does not know."""
    torch = pytest.importorskip("torch")
    device = torch.arange(24, dtype=torch.bfloat16).reshape(8, 3)
    host = torch.zeros((8, 3), dtype=torch.bfloat16)
    NumpyPools([device], host).copy(Direction.STORE, (2, 5), (7, 0))
    assert host[7].tolist() == [6, 7, 8]
    assert host[0].tolist() == [15, 16, 17]


def test_a_tensor_that_numpy_cannot_view_is_refused() -> None:
    torch = pytest.importorskip("torch")
    device = torch.zeros((4, 3), device="meta")
    with pytest.raises(ConfigError, match="device tensor 0 cannot be viewed as bytes by numpy: "):
        NumpyPools([device], np.zeros((4, 12), np.uint8))


# The one call.


def fragments_between(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], *spans: Any) -> Fragments:
    """Spans are (from byte, to byte, length)."""
    starts = np.array([source.ctypes.data, target.ctypes.data, 0], np.uint64)
    return Fragments(*np.ascontiguousarray((np.array(spans, np.uint64).reshape(-1, 3) + starts).T))


def listened_to(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the fragments of each call from now on."""
    lengths: list[list[int]] = []
    call = vectored._process_vm_readv()

    def listen(process: int, targets: int, count: int, *rest: int) -> Any:
        vectors = (ctypes.c_int64 * 2 * count).from_address(targets)
        lengths.append([length for _, length in vectors])
        return call(process, targets, count, *rest)

    patch.setattr(vectored, "_process_vm_readv", lambda: listen)
    return lengths


@on_linux
@given(lengths=st.lists(st.integers(1, 9), max_size=40), data=st.data())
def test_the_call_copies_all_fragments_and_nothing_else(lengths: list[int], data: st.DataObject) -> None:
    """Correct bytes (S15): more fragments than one call takes, and longer fragments than one call is
    given."""
    source = random_bytes(1, 400)[0]
    spans, used = [], 0
    for length in lengths:
        used += data.draw(st.integers(0, 1))
        spans.append((data.draw(st.integers(0, 390)), used, length))
        used += length
    expected = np.zeros(400, np.uint8)
    for here, there, length in spans:
        expected[there : there + length] = source[here : here + length]
    target = np.zeros(400, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectored, "MOST_FRAGMENTS", 5)
        patch.setattr(vectored, "LONGEST_BYTES", 4)
        given = listened_to(patch)
        copy_vectored(fragments_between(source, target, *spans))
    assert np.array_equal(target, expected)
    assert all(len(call) <= 5 and max(call) <= 4 for call in given)
    assert sum(map(sum, given)) == sum(lengths)


@on_linux
def test_the_kernel_takes_as_much_in_one_call_as_it_is_given() -> None:
    """The limits are the kernel's: one more fragment is refused."""
    assert MOST_FRAGMENTS * LONGEST_BYTES < 1 << 31
    source, target = random_bytes(1, 2 * MOST_FRAGMENTS)[0], np.zeros(2 * MOST_FRAGMENTS, np.uint8)
    spans = [(place, place, 1) for place in range(MOST_FRAGMENTS + 1)]
    copy_vectored(fragments_between(source, target, *spans))
    assert np.array_equal(target[: len(spans)], source[: len(spans)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectored, "MOST_FRAGMENTS", MOST_FRAGMENTS + 1)
        with pytest.raises(OSError, match="Invalid argument"):
            copy_vectored(fragments_between(source, target, *spans))


def unmapped() -> int:
    """An address of a page that nobody may touch."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, *[ctypes.c_size_t] * 5)
    return int(libc.mmap(None, 1 << 16, 0, 0x22, 2**64 - 1, 0))  # PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS


@on_linux
def test_memory_that_is_not_there_is_an_error_not_the_end_of_the_process() -> None:
    """Failure is not success (S6): also if a part of the memory was there and was copied."""
    target = np.zeros(8, np.uint8)
    nowhere, here = unmapped(), random_bytes(1, 8)[0]
    with pytest.raises(OSError, match="process_vm_readv: Bad address"):
        copy_vectored(Fragments(*(np.array([one], np.uint64) for one in (nowhere, target.ctypes.data, 8))))
    targets = [target.ctypes.data, target.ctypes.data + 4]
    columns = [here.ctypes.data, nowhere], targets, [4, 4]
    some = Fragments(*(np.array(column, np.uint64) for column in columns))
    with pytest.raises(OSError, match="copied 4 of 8 bytes"):
        copy_vectored(some)


@on_linux
def test_pools_that_the_call_cannot_read_are_found_before_any_copy() -> None:
    """Device memory has no pages. Pages that may not be read stand for it here."""
    pool = rows_of("host pool", random_bytes(4, 8))
    assert reaches([pool])
    assert reaches([pool, MemoryRows(0, 8, 0, 8)])
    assert not reaches([pool, MemoryRows(unmapped(), 8, 4, 8)])


@pytest.mark.parametrize("error", [AttributeError, TypeError, PermissionError])
def test_pools_copy_without_the_call(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that lack it, and sandboxes that forbid it."""

    def refused() -> Any:
        raise error("no such call")

    monkeypatch.setattr(vectored, "_process_vm_readv", refused)
    monkeypatch.setattr(pools_module, "perf_counter", Clock(1))
    device, host = random_bytes(64, LONG_BYTES, 1), random_bytes(64, LONG_BYTES, 2)
    NumpyPools([device], host).copy(Direction.STORE, tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))
    assert np.array_equal(host[1::2], device[::2])


@on_linux
def test_a_forked_process_copies_its_own_memory() -> None:
    """Correct bytes (S15): a forked child copies its own memory, and not its parent's at the same
    addresses."""
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    copy = fragments_between(source, target, (0, 0, 8))
    copy_vectored(copy)
    child = os.fork()
    if not child:
        try:
            source[:] = 2
            copy_vectored(copy)
        finally:  # whatever happens, the child must not go on with the tests
            os._exit(int(target.sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 16
    assert target.sum() == 8
