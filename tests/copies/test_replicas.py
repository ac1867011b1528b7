"""Ranks with the same KV cache share a host pool: each row is written once, and all of them load it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_life import keys, new_core
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_engine import PlainCopyEngine

from examples import examples
from kvsm.copies import CopyEngine, FailingCopyEngine, HostPool, ReplicaCopyEngine, VerifyingCopyEngine
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.worker import Worker
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import pack

Bytes = NDArray[np.uint8]

BLOCK_BYTES = 8


def job(
    direction: Direction, device_blocks: Sequence[int], host_blocks: Sequence[int], id: int = 1
) -> TransferJob:
    return TransferJob(id, direction, pack(device_blocks), pack(host_blocks))


def contents(count: int) -> Bytes:
    """Blocks that all differ."""
    return np.random.default_rng(0).integers(1, 256, (count, BLOCK_BYTES), np.uint8)


# The copies.


@settings(max_examples=examples(60), deadline=None)
@given(replicas=st.integers(1, 5), blocks=st.lists(st.integers(0, 39), unique=True, max_size=40))
def test_replicas_write_every_row_once_and_load_all_of_it(replicas: int, blocks: list[int]) -> None:
    """Bytes that are the same on all ranks are kept once, and every rank gets them back."""
    content, host = contents(40), np.zeros((40, BLOCK_BYTES), np.uint8)
    devices = [content.copy() for _ in range(replicas)]
    engines = [
        ReplicaCopyEngine(PlainCopyEngine(device, host), replicas, number)
        for number, device in enumerate(devices)
    ]
    copied = 0
    for engine in engines:
        engine.submit(job(Direction.STORE, range(len(blocks)), blocks))
        [result] = engine.poll()
        assert result.good
        copied += result.bytes
    assert copied == len(blocks) * BLOCK_BYTES, "each row is written once"
    assert np.array_equal(host[blocks], content[: len(blocks)])
    for device, engine in zip(devices, engines):
        device[:] = 0
        engine.submit(job(Direction.LOAD, range(len(blocks)), blocks, 2))
        assert [result.good for result in engine.poll()] == [True]
        assert np.array_equal(device[: len(blocks)], content[: len(blocks)])


def test_all_replicas_refuse_a_job_that_cannot_be_right() -> None:
    """A part of it may look right. No replica may copy such a part."""
    pools = [np.zeros((4, BLOCK_BYTES), np.uint8) for _ in range(2)]
    wrong = job(Direction.STORE, [0, 1, 2], [0, 1, 9])
    for number in range(2):
        engine = ReplicaCopyEngine(PlainCopyEngine(*pools), 2, number)
        engine.submit(wrong)
        assert [result.good for result in engine.poll()] == [False]


@pytest.mark.parametrize("number", [-1, 2])
def test_a_replica_has_a_number(number: int) -> None:
    pools = [np.zeros((1, BLOCK_BYTES), np.uint8) for _ in range(2)]
    with pytest.raises(ConfigError, match=f"number is {number}; it must be from 0 to 1"):
        ReplicaCopyEngine(PlainCopyEngine(*pools), 2, number)


# With the core: who reports, and what may begin before.


class Ranks:
    """A core and two ranks that are replicas. Each of them copies one transfer when it is polled."""

    def __init__(self, failing: float = 0.0, host_blocks: int = 6) -> None:
        self.core, _ = new_core(host_blocks, device_blocks=400, workers=2)
        self.host = np.zeros((host_blocks, BLOCK_BYTES), np.uint8)
        self.devices = [np.zeros((400, BLOCK_BYTES), np.uint8) for _ in range(2)]
        self.workers = []
        for rank, device in enumerate(self.devices):
            plain: CopyEngine = PlainCopyEngine(device, self.host)
            engine = ReplicaCopyEngine(FailingCopyEngine(plain, rank, failing), 2, rank)
            self.workers.append(Worker(rank, engine))
        self.next_block = 0
        self.words: dict[bytes, Bytes] = {}
        self.loads: dict[int, tuple[int, list[bytes]]] = {}
        """Transfer -> (its first device block, its keys)."""
        self.loaded = 0

    def take(self, count: int) -> int:
        """Device blocks that nothing has used."""
        self.next_block += count
        return self.next_block - count

    def store(self, request: str, names: list[bytes]) -> None:
        first = self.take(len(names))
        for place, key in enumerate(names):
            word = self.words.setdefault(key, contents(200)[len(self.words)])
            for device in self.devices:
                device[first + place] = word
        planned = self.core.prepare_store(request, names, range(first, first + len(names))).job
        if planned is not None:
            self.submit(TransferPlan(stores=(planned,)))

    def load(self, request: str, names: list[bytes]) -> None:
        hits = self.core.match(request, names).hits
        if not hits:
            return
        first = self.take(hits)
        planned = self.core.prepare_load(request, range(first, first + hits))
        assert planned is not None
        self.loads[planned.transfer] = first, names[:hits]
        self.submit(TransferPlan(loads=(planned,)))

    def submit(self, plan: TransferPlan) -> None:
        self.core.submit([one.transfer for one in (*plan.loads, *plan.stores)])
        for worker in self.workers:
            worker.start(plan)

    def poll(self, rank: int) -> None:
        """One copy of this rank runs, and is reported. A load that ended well brought the right bytes."""
        for report in self.workers[rank].poll():
            ended = self.core.report(report.transfer, rank, report.good).ended
            if ended is None or ended.direction is Direction.STORE:
                continue
            first, names = self.loads.pop(report.transfer)
            if not ended.good:
                continue
            self.loaded += 1
            for place, key in enumerate(names):
                for device in self.devices:
                    assert np.array_equal(device[first + place], self.words[key]), key


ACTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "load"]), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("poll"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    max_size=50,
)


@settings(max_examples=examples(80), deadline=None)
@given(ACTS, st.sampled_from([0.0, 0.3]))
def test_a_load_reads_what_the_other_replica_has_stored(
    acts: list[tuple[str, int, int]], failing: float
) -> None:
    """Data (S15), whatever rank is late, and whatever copies fail on one rank.

    The core plans no load before all ranks have reported the store, and overwrites no row before all have
    reported its loads.
    """
    ranks = Ranks(failing)
    for number, (act, which, count) in enumerate(acts):
        names = keys(count, f"prompt {which}")
        if act == "store":
            ranks.store(f"{number}", names)
        elif act == "load":
            ranks.load(f"{number}", names)
        elif act == "poll":
            for _ in range(count):
                ranks.poll(which)
        else:
            ranks.core.reset()
        assert check_ledger(ranks.core.ledger) == []
    while ranks.core.ledger.transfers:
        for rank in range(2):
            ranks.poll(rank)


def test_a_store_is_readable_when_its_last_writer_has_ended() -> None:
    """Publish after commit (S2). The rows are right then; before, the other half is missing."""
    ranks = Ranks()
    names = keys(4)
    ranks.store("first", names)
    ranks.poll(0)
    assert ranks.core.match("early", names).hits == 0
    assert not ranks.host[:4].any(axis=1).all()
    ranks.poll(1)
    ranks.load("late", names)
    for rank in range(2):
        ranks.poll(rank)
    assert ranks.loaded == 1


def test_a_writer_that_fails_fails_the_store_for_all() -> None:
    """Failure is not success (S6): the other replica's half was good."""
    ranks = Ranks()
    ranks.workers[0] = Worker(0, FailingCopyEngine(PlainCopyEngine(ranks.devices[0], ranks.host), 0, 1.0))
    ranks.store("first", keys(4))
    for rank in range(2):
        ranks.poll(rank)
    assert ranks.core.match("later", keys(4)).hits == 0
    assert not ranks.core.ledger.transfers


# Checksums.


def test_a_replica_checks_what_the_other_one_has_stored() -> None:
    """Data (S15): the checksums are shared as well, so no half is loaded unverified."""
    content, host = contents(4), np.zeros((4, BLOCK_BYTES), np.uint8)
    table = np.zeros((4, CHECKSUM_BYTES), np.uint8)
    devices = [content.copy() for _ in range(2)]
    below = [
        VerifyingCopyEngine(PlainCopyEngine(one, host), host, one, threads=0, table=table) for one in devices
    ]
    engines = [ReplicaCopyEngine(engine, 2, number) for number, engine in enumerate(below)]
    for engine in engines:
        engine.submit(job(Direction.STORE, range(4), range(4)))
        assert [result.good for result in engine.poll()] == [True]
    for engine in engines:
        engine.submit(job(Direction.LOAD, range(4), range(4), 2))
        assert [result.good for result in engine.poll()] == [True]
    assert [(one.statistics().checked, one.statistics().unverified) for one in below] == [(4, 0), (4, 0)]
    host[0, 0] ^= 1  # the first replica has written it
    engines[1].submit(job(Direction.LOAD, range(4), range(4), 3))
    [result] = engines[1].poll()
    assert not result.good
    assert "host block 0 does not hold what was stored in it" in result.error


# The memory.


def test_replicas_have_their_rows_together(tmp_path: Path) -> None:
    """A pool for two pairs of replicas is as large as a pool for two ranks."""
    path = tmp_path / "pool"
    with ExitStack() as stack:
        pools = [
            stack.enter_context(HostPool(5, BLOCK_BYTES, path=path, ranks=4, rank=rank, replicas=2))
            for rank in range(4)
        ]
        pools[0].blocks[:], pools[3].blocks[:] = 1, 2
        assert [int(pool.blocks.max()) for pool in pools] == [1, 1, 2, 2]
        assert np.fromfile(path, np.uint8)[: 5 * 2 * BLOCK_BYTES].all()
    assert not path.exists()


def test_a_replica_that_comes_back_finds_what_the_others_know(tmp_path: Path) -> None:
    """Zeroing its rows would take them from the replica that is still there."""
    given: dict[str, Any] = {"path": tmp_path / "pool", "ranks": 2, "replicas": 2}
    with HostPool(5, BLOCK_BYTES, rank=0, **given) as stays:
        with HostPool(5, BLOCK_BYTES, rank=1, **given) as goes:
            goes.blocks[:] = 7
        with HostPool(5, BLOCK_BYTES, rank=1, **given) as back:
            assert (back.blocks == 7).all()
        assert (stays.blocks == 7).all()


def test_a_file_has_no_name_once_all_ranks_are_in(tmp_path: Path) -> None:
    """Nothing is left of ranks that are killed, and nobody else opens the file. The ranks still share it."""
    path = tmp_path / "pool"
    given: dict[str, Any] = {"path": path, "ranks": 2, "replicas": 2, "nameless": True}
    with HostPool(5, BLOCK_BYTES, rank=0, **given) as first:
        assert path.exists()
        with HostPool(5, BLOCK_BYTES, rank=1, **given) as second:
            assert not path.exists()
            second.blocks[:] = 3
            assert (first.blocks == 3).all()
        path.write_text("somebody else's")
    assert path.exists(), "a rank removes only its own file"


def test_ranks_are_a_multiple_of_their_replicas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replicas is 2; the number of ranks, 3, must be a multiple"):
        HostPool(1, 8, path=tmp_path / "pool", ranks=3, replicas=2)


def test_ranks_must_agree_on_their_replicas(tmp_path: Path) -> None:
    """A rank with other options would read rows of another place."""
    path = tmp_path / "pool"
    with HostPool(4, 8, path=path, ranks=2, rank=0, replicas=2):  # noqa: SIM117 (the second one fails)
        with pytest.raises(
            ConfigError, match="in use as a host pool of 4 blocks for 2 ranks, 2 ranks together"
        ):
            HostPool(4, 8, path=path, ranks=2, rank=1)


def test_a_job_that_is_live_is_refused_as_before() -> None:
    """The engine below keeps its promises through the wrapper."""
    pools = [np.zeros((4, BLOCK_BYTES), np.uint8) for _ in range(2)]
    engine = ReplicaCopyEngine(PlainCopyEngine(*pools), 2, 0)
    engine.submit(job(Direction.LOAD, [0], [0]))
    with pytest.raises(TransferFailed, match="is live"):
        engine.submit(job(Direction.LOAD, [1], [1]))
