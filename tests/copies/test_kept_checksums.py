"""The proof of bytes after a restart: a load brings what an earlier life has stored, or does not begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import copy_rigs
import msgspec
import numpy as np
import pytest
from copy_rigs import checksums_of, finish, named, random_bytes
from plain_engine import PlainCopyEngine

from kvsm.copies import (
    CopyResult,
    HostCopyEngine,
    HostPool,
    KeptPool,
    VerifyingCopyEngine,
    VerifyingStatistics,
)
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed
from kvsm.identity import PoolIdentity

BLOCKS, BLOCK_BYTES = 24, 5


def load(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return named(copy_rigs.load(transfer, device_blocks, host_blocks))


def store(transfer: int, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    return named(copy_rigs.store(transfer, device_blocks, host_blocks))


class Life:
    """Pools of which an earlier life has stored every block, and an engine of the present one."""

    def __init__(self, threads: int = 0, every_load: bool = False, **more: Any) -> None:
        self.device = random_bytes(BLOCKS, BLOCK_BYTES, 1)
        self.host = random_bytes(BLOCKS, BLOCK_BYTES, 2)
        self.table = checksums_of(self.host)
        self.below = PlainCopyEngine(self.device, self.host)
        self.engine = VerifyingCopyEngine(
            self.below,
            self.host,
            threads=threads,
            table=self.table,
            kept=True,
            every_load=every_load,
            **more,
        )

    def end(self, *jobs: Any) -> list[CopyResult]:
        for job in jobs:
            self.engine.submit(job)
        return sorted(finish(self.engine, [job.transfer for job in jobs]), key=lambda one: one.transfer)


@pytest.mark.parametrize("every_load", [False, True])
@pytest.mark.parametrize("where", ["host", "table"])
def test_each_changed_bit_is_found_before_its_block_is_loaded(where: str, every_load: bool) -> None:
    """Correct bytes (S15): 200 bits of the rows, and 200 of the checksums. Other blocks are loaded."""
    random = np.random.default_rng(3)
    for transfer in range(200):
        life = Life(every_load=every_load)
        memory = getattr(life, where)
        block, byte = int(random.integers(BLOCKS)), int(random.integers(memory.shape[1]))
        memory[block, byte] ^= 1 << int(random.integers(8))
        before, other = life.device.copy(), (block + 1) % BLOCKS
        with closing(life.engine):
            bad, good = life.end(load(transfer, [0, 1], [other, block]), load(transfer + 1, [2], [other]))
        assert (bad.good, bad.bytes, good.good) == (False, 0, True)
        assert bad.error.startswith(f"load {transfer}: host block {block} ")
        assert np.array_equal(life.device[:2], before[:2])
        assert np.array_equal(life.device[2], life.host[other])


def test_the_error_names_the_block_and_what_an_earlier_run_stored() -> None:
    life = Life()
    life.host[7, 0] ^= 1
    life.table[8] = 0
    with closing(life.engine):
        changed, unknown = life.end(load(1, [0], [7]), load(2, [1], [8]))
        assert "host block 7 does not hold what an earlier run stored in it: its checksum" in changed.error
        assert "host block 8 has no checksum, so it is unknown whether it holds what" in unknown.error
        assert life.engine.statistics() == VerifyingStatistics(checked=1, mismatched=1, unverified=1)


@pytest.mark.parametrize("every_load", [False, True])
def test_a_block_is_proved_once(every_load: bool) -> None:
    """Its later loads are as fast as without checks, and then find no change, or are checked as ever."""
    life = Life(every_load=every_load)
    with closing(life.engine):
        assert life.end(load(1, [0, 1], [4, 5]))[0].good
        life.host[4] ^= 1
        assert life.end(load(2, [0], [4]))[0].good is not every_load
        assert life.engine.statistics().checked == (5 if every_load else 2)


def test_what_this_process_stored_needs_no_proof_and_what_another_rank_stored_does() -> None:
    life = Life()
    with closing(life.engine):
        assert [one.good for one in life.end(store(1, [0, 1], [4, 5]))] == [True]
        assert life.end(load(2, [2], [4]))[0].good
        assert life.engine.statistics().checked == 0
        life.host[5] = 9
        life.table[5] = checksums_of(life.host)[5]
        assert life.end(load(3, [2], [5]))[0].good
        assert life.engine.statistics().checked == 1


def test_what_something_else_has_written_into_a_pool_that_is_not_kept_is_what_it_must_hold() -> None:
    host = random_bytes(BLOCKS, BLOCK_BYTES, 2)
    with closing(VerifyingCopyEngine(PlainCopyEngine(host.copy(), host), host, threads=0)) as engine:
        engine.took_over([6])
        engine.submit(copy_rigs.load(1, [2], [6]))
        host[6] ^= 1
        assert not finish(engine, [1])[0].good


OTHERS: dict[str, Callable[[TransferJob], TransferJob]] = {
    "key": lambda job: msgspec.structs.replace(job, keys=(b"another",)),
    "generation": lambda job: msgspec.structs.replace(job, generations=(job.generations[0] + 1,)),
    "host block": lambda job: msgspec.structs.replace(
        job, keys=load(1, [0], [5]).keys, generations=load(1, [0], [5]).generations
    ),
}


@pytest.mark.parametrize(
    ("other", "is_known"),
    # In the log of one process a generation belongs to one key.
    [*((other, False) for other in OTHERS), ("generation", True), ("host block", True)],
)
def test_a_slot_that_holds_another_block_than_the_log_says_is_refused(other: str, is_known: bool) -> None:
    """Correct bytes (S15): a log, a pool or checksums of another time. The bytes themselves are whole.

    is_known: whether this process has proved the slot before.
    """
    life = Life()
    life.host[5], life.table[5] = life.host[4], life.table[4]
    wanted = OTHERS[other](load(2, [0], [4]))
    with closing(life.engine):
        if is_known:
            assert life.end(load(1, [1], [4]))[0].good
        before = life.device.copy()
        [result] = life.end(wanted)
        assert result.error.startswith("load 2: host block 4 holds another block, or one of another time")
        assert np.array_equal(life.device, before)
        assert life.end(load(3, [0], [4]))[0].good
        assert not life.end(load(4, [0], [5]))[0].good, "its entry belongs to another host block"


@pytest.mark.parametrize("make", [copy_rigs.load, copy_rigs.store])
def test_a_kept_pool_takes_no_job_that_does_not_name_its_blocks(make: Callable[..., TransferJob]) -> None:
    """Correct bytes (S15): without names its checksums would say nothing of which block they belong to."""
    life = Life()
    with closing(life.engine):
        for job in (make(1, [0], [4]), msgspec.structs.replace(load(1, [0], [4]), keys=(b"a", b"b"))):
            with pytest.raises(TransferFailed, match="a kept pool needs one of each for each block"):
                life.engine.submit(job)
        assert life.below.calls == []


def test_a_store_that_is_cut_off_leaves_no_checksum() -> None:
    """Correct bytes (S15): the process is killed between the submission of a store and its end."""
    life = Life()
    life.engine.submit(store(1, [0], [4]))
    later = VerifyingCopyEngine(
        PlainCopyEngine(life.device, life.host), life.host, table=life.table, kept=True, every_load=False
    )
    with closing(later):
        later.submit(load(1, [0], [4]))
        [result] = finish(later, [1])
    assert "host block 4 has no checksum" in result.error


def test_a_store_that_is_refused_or_cannot_be_leaves_the_checksums() -> None:
    life = Life()
    table = life.table.copy()
    with closing(life.engine):
        assert not life.end(store(1, [0, 1], [4, BLOCKS]))[0].good
    with pytest.raises(TransferFailed):
        life.engine.submit(store(2, [0], [4]))
    other = VerifyingCopyEngine(life.below, life.host, table=life.table, kept=True, threads=0)
    with pytest.raises(TransferFailed):
        other.submit(store(2, [0], [4]))
    assert np.array_equal(life.table, table)


def gated() -> tuple[Life, threading.Event, threading.Event]:
    begun, go_on = threading.Event(), threading.Event()

    def reads(_: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    return Life(threads=1, reads=reads), begun, go_on


@pytest.mark.parametrize("end", ["wait", "drain", "close", "hold_compute"])
def test_a_submission_does_not_wait_for_the_proof_and_what_waits_does(end: str) -> None:
    """Progress (S9), order of copies (S12): the load goes on with the mark of its submission."""
    life, begun, go_on = gated()
    engine = life.engine
    before = life.device.copy()
    engine.submit(load(1, [0], [4]), "its mark")
    assert begun.wait(30)
    with pytest.raises(TransferFailed, match="transfer 1 is live"):
        engine.submit(load(1, [0], [4]))
    assert engine.poll() == []
    assert life.below.calls == []
    ends = {
        "wait": lambda: engine.wait([1]),
        "drain": engine.drain,
        "close": engine.close,
        "hold_compute": lambda: engine.hold_compute([1]),
    }
    waiting = threading.Thread(target=ends[end])
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert np.array_equal(life.device, before)
    go_on.set()
    waiting.join(30)
    assert life.below.calls[0] == ("submit", 1, "its mark")
    assert (("hold_compute", [1]) in life.below.calls) is (end == "hold_compute")
    assert [(one.transfer, one.good) for one in engine.poll()] == [(1, True)]
    engine.close()


def test_a_load_without_a_mark_gets_the_mark_of_its_submission() -> None:
    """Order of copies (S12): a later mark would be behind compute that may wait for this load."""
    life = Life()
    marks = iter(["first", "second"])
    life.below.mark = lambda: next(marks)  # type: ignore[method-assign]
    with closing(life.engine):
        life.engine.submit(load(1, [0], [4]))
        life.engine.mark()
        finish(life.engine, [1])
    assert life.below.calls[0] == ("submit", 1, "first")


def test_an_engine_that_refuses_a_proved_load_makes_it_bad() -> None:
    """Failure is not success (S6), progress (S9)."""
    life = Life()
    life.engine.submit(load(1, [0], [4]))
    life.below.close()
    [result] = finish(life.engine, [1])
    assert (result.good, "the engine is closed" in result.error) == (False, True)
    life.engine.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_proof_that_fails_is_a_bad_load_and_a_dead_thread_ends_all_that_wait() -> None:
    """Progress (S9): nothing waits for a thread that is gone."""
    errors: list[BaseException] = [SystemExit("for a test"), MemoryError("for a test")]

    def reads(_: Any) -> None:
        raise errors.pop()

    life = Life(threads=1, reads=reads)
    [result] = life.end(load(1, [0], [4]))
    assert result.error == "load 1: its bytes could not be checked: MemoryError: for a test"
    before = life.device.copy()
    first, second = life.end(load(2, [0], [4]), load(3, [1], [5]))
    for one in (first, second):
        assert one.error == "a checking thread died of SystemExit: for a test"
    with pytest.raises(TransferFailed, match="make a new engine"):
        life.engine.submit(load(4, [0], [4]))
    life.engine.close()
    assert np.array_equal(life.device, before)


def test_a_mark_that_is_refused_refuses_the_load() -> None:
    life = Life()

    def lost() -> str:
        raise RuntimeError("the device is lost")

    life.below.mark = lost  # type: ignore[method-assign]
    with pytest.raises(TransferFailed, match="transfer 1: RuntimeError: the device is lost; make a new"):
        life.engine.submit(load(1, [0], [4]))
    assert life.engine.poll() == []
    life.engine.close()


def test_pools_that_are_not_kept_are_checked_at_every_load() -> None:
    with pytest.raises(ConfigError, match="every_load is False; only loads from kept pools"):
        VerifyingCopyEngine(Life().below, Life().host, every_load=False)


def test_what_a_process_stored_is_loaded_by_the_next_one(tmp_path: Path) -> None:
    """Correct bytes (S15): rows and checksums in kept pools, and a byte that changes between the two."""
    keep = KeptPool(PoolIdentity.of({"model": "m"}))
    device = random_bytes(BLOCKS, BLOCK_BYTES, 1)
    stored = device[:4].copy()
    for life in range(3):
        with (
            HostPool(BLOCKS, BLOCK_BYTES, path=tmp_path / "pool", keep=keep) as pool,
            HostPool(BLOCKS, CHECKSUM_BYTES, path=tmp_path / "sums", keep=keep) as sums,
        ):
            assert pool.is_warm is sums.is_warm is (life > 0)
            below = HostCopyEngine(device, pool.blocks, threads=1)
            with closing(
                VerifyingCopyEngine(below, pool.blocks, table=sums.blocks, kept=True, every_load=False)
            ) as engine:
                if not life:
                    engine.submit(store(1, [0, 1, 2, 3], [9, 8, 7, 6]))
                    assert [one.good for one in finish(engine, [1])] == [True]
                    continue
                device[:4] = 0
                engine.submit(load(1, [0, 1, 2, 3], [9, 8, 7, 6]))
                assert [one.good for one in finish(engine, [1])] == [life == 1]
                assert np.array_equal(device[:4], stored if life == 1 else np.zeros_like(stored))
                pool.blocks[8, 2] ^= 4
