"""Pools that outlive their processes: warm only if every byte is what an earlier life has left."""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import HostPool
from kvsm.copies.host_pools import kept_file, kept_record
from kvsm.copies.host_pools.kept_file import read_kept_pool
from kvsm.copies.host_pools.kept_record import RECORD_BYTES, KeptPool
from kvsm.copies.host_pools.pool_file import map_to_read, remove_dead_pools
from kvsm.copies.host_pools.pool_locks import lock
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES, PoolSizes
from kvsm.errors import ConfigError
from kvsm.identity import PoolIdentity
from kvsm.system.processes import ProcessName

IDENTITY = PoolIdentity.of({"model": "m", "dtype": "bfloat16"})
OTHER = PoolIdentity.of({"model": "m", "dtype": "float16"})

_STAY: list[Any] = []
"""What a child holds until it is killed."""

BLOCKS, BLOCK_BYTES = 6, 8
RANKS = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def kept(path: Path, rank: int = 0, identity: PoolIdentity = IDENTITY, **more: Any) -> HostPool:
    """A kept pool that waits for nobody."""
    given = {"num_blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "ranks": RANKS, "lock_timeout_s": 0.0, **more}
    run = given.pop("run", "")
    return HostPool(path=path, rank=rank, keep=KeptPool(identity, run), **given)


class Child(NamedTuple):
    """A process that this one has forked. said: what it has told."""

    pid: int
    said: int

    def end(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        os.close(self.said)


def forked(act: Callable[[], Any]) -> Child:
    """A process that acts, tells what it found, and stays until it is killed."""
    said, say = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            try:
                answer = act()
            except ConfigError as error:
                answer = str(error)
            os.write(say, msgspec.msgpack.encode(answer))
            time.sleep(60)
        os._exit(0)
    os.close(say)
    return Child(pid, said)


def told(child: Child) -> Any:
    return msgspec.msgpack.decode(os.read(child.said, 1 << 16))


# Which pools are warm.


class Reference:
    """What the file must hold: who made it, in which run of the system, and the value in each rank's rows."""

    def __init__(self) -> None:
        self.identity, self.blocks, self.boot = IDENTITY, 0, ""
        self.values: list[int] | None = None
        """None: nothing that is whole."""

    def is_warm(self, identity: PoolIdentity, blocks: int, boot: str) -> bool:
        return self.values is not None and (self.identity, self.blocks, self.boot) == (identity, blocks, boot)


steps = st.one_of(
    st.tuples(
        st.just("life"),
        st.sampled_from([IDENTITY, IDENTITY, IDENTITY, OTHER]),
        st.sampled_from([BLOCKS, BLOCKS, BLOCKS, 2 * BLOCKS]),
        st.sampled_from(["closed", "killed", "killed early"]),
    ),
    st.tuples(st.sampled_from(["reboot", "remove"])),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.integers(1, RECORD_BYTES + PAGE_BYTES), st.integers(0, 7)),
)


def live(path: Path, identity: PoolIdentity, blocks: int, end: str, values: list[int]) -> list[Any]:
    """The ranks of a run come in, look, write, and end."""
    found: list[Any] = []
    with ExitStack() as stack:
        for rank in range(1 if end == "killed early" else RANKS):
            pool = stack.enter_context(kept(path, rank, identity, num_blocks=blocks))
            found.append((pool.is_warm, sorted(map(int, np.unique(pool.blocks))), bool(pool.cold_reason)))
            pool.blocks[:] = values[rank]
        if end != "closed":
            _STAY.append(stack.pop_all())
    return found


@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(steps, min_size=2, max_size=12))
def test_a_pool_is_warm_exactly_if_all_of_it_is_what_an_earlier_life_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, plan: list[tuple[Any, ...]]
) -> None:
    """Correct bytes (S15): runs with other identities and sizes, killed at any time, beside damage."""
    path, expected, boot, life = tmp_path_factory.mktemp("lives") / "pool", Reference(), 0, 0
    for step, *what in plan:
        monkeypatch.setattr(kept_file, "boot_id", lambda boot=boot: f"boot {boot}")
        if step == "reboot":
            boot += 1
        elif step == "remove":
            path.unlink(missing_ok=True)
            expected.values = None
        elif step == "truncate" and path.exists():
            size = int(what[0] * max(0, path.stat().st_size - 1))
            os.truncate(path, size)
            expected.values = None
        elif step == "flip" and path.exists() and path.stat().st_size > what[0]:
            damage(path, path.stat().st_size - what[0], what[1])
            expected.values = None
        elif step == "life":
            identity, blocks, end = what
            life += 1
            values = [2 * life, 2 * life + 1]
            child = forked(partial(live, path, identity, blocks, end, values))
            found = told(child)
            child.end()
            if isinstance(found, str):
                assert "is not a host pool" in found
                assert expected.values is None
                path.unlink()
                continue
            is_warm = expected.is_warm(identity, blocks, f"boot {boot}")
            before = expected.values if is_warm and expected.values is not None else [0, 0]
            assert found == [[is_warm, [value], not is_warm] for value in before[: len(found)]]
            expected.identity, expected.blocks, expected.boot = identity, blocks, f"boot {boot}"
            expected.values = values[: len(found)] + before[len(found) :]


def damage(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content[place : place + 1])


def test_a_pool_whose_making_was_cut_off_is_cold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct bytes (S15): the process is killed before each system call that writes."""

    def make_but(left: list[int]) -> None:
        def counted(call: Callable[..., Any], *arguments: Any) -> Any:
            if not left[0]:
                os._exit(0)
            left[0] -= 1
            return call(*arguments)

        for name in ("pwrite", "posix_fallocate", "urandom"):
            monkeypatch.setattr(os, name, partial(counted, getattr(os, name)))
        kept(path)

    for cut in range(4):
        path.unlink(missing_ok=True)
        child = forked(partial(make_but, [cut]))
        os.waitpid(child.pid, 0)
        os.close(child.said)
        with kept(path) as pool:
            assert (pool.is_warm, bool(pool.cold_reason)) == (False, True), cut
            assert not pool.blocks.any()


def test_a_cold_pool_says_what_is_different(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(path) as pool:
        assert pool.cold_reason == ["there was no pool under this name"]
        first = pool.pool_id
    with kept(path) as pool:
        assert (pool.is_warm, pool.cold_reason, pool.pool_id) == (True, [], first)
    monkeypatch.setattr(kept_file, "boot_id", lambda: "another")
    with kept(path, identity=OTHER, num_blocks=7) as pool:
        assert pool.cold_reason == [
            "the system was started again since, and the log may lack what the pool holds",
            "the pool that was here is of 6 blocks for 2 ranks, 8 bytes each, and now 7 blocks for 2 ranks, "
            "8 bytes each are asked for",
            "dtype: bfloat16, and now float16",
        ]
        assert len(pool.pool_id) == 16
        assert pool.pool_id != first


def test_ranks_of_a_run_agree_with_the_first(path: Path) -> None:
    for is_warm in (False, True):
        with kept(path) as first, kept(path, 1) as second:
            assert first.is_warm is second.is_warm is is_warm
            assert first.pool_id == second.pool_id
            assert first.cold_reason == second.cold_reason


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rank": 0}, "rank 0 was in it before"),
        ({"rank": 1, "run": "second"}, "it is in use by run '', and this is run 'second'"),
        ({"rank": 1, "identity": OTHER}, "dtype: bfloat16, and now float16"),
        ({"rank": 1, "num_blocks": 7}, "the pool that was here is of 6 blocks"),
    ],
)
def test_who_does_not_belong_to_a_run_is_refused_with_the_names_of_its_ranks(
    path: Path, more: dict[str, Any], message: str
) -> None:
    """No reuse in flight (S3): two runs never share bytes."""
    with kept(path) as pool, pytest.raises(ConfigError, match=message) as refused:
        kept(path, **more)
    assert f"rank 0 by process {os.getpid()} (" in str(refused.value)
    assert not pool.is_warm


def test_a_rank_does_not_join_ranks_of_a_dead_run(path: Path) -> None:
    """Correct bytes (S15): some of its ranks have gone, so the others are about to go."""
    with kept(path, ranks=3), kept(path, 1, ranks=3) as second:
        second.close()
        with pytest.raises(ConfigError, match="some ranks of its run have left"):
            kept(path, 2, ranks=3)


def test_a_kept_pool_is_not_removed_zeroed_or_replaced_by_another_kind(path: Path) -> None:
    with kept(path) as pool:
        pool.blocks[:] = 3
    remove_dead_pools(path.parent)
    with pytest.raises(ConfigError, match="is a host pool that is kept, and this one is not to be kept"):
        HostPool(BLOCKS, BLOCK_BYTES, path=path, ranks=RANKS)
    with kept(path) as pool:
        assert (pool.blocks == 3).all()
        with pytest.raises(ConfigError, match="is in use as a host pool that is kept"):
            HostPool(BLOCKS, BLOCK_BYTES, path=path, ranks=RANKS)
    mapping, sizes = map_to_read(path)
    assert sizes == PoolSizes(BLOCKS, RANKS, BLOCK_BYTES)
    mapping.close()


def test_a_pool_of_another_kind_is_replaced_if_nobody_is_in_it(path: Path) -> None:
    with HostPool(BLOCKS, BLOCK_BYTES, path=path, ranks=RANKS) as other:
        other.blocks[:] = 3
        with pytest.raises(ConfigError, match="is in use, and is not a host pool that is kept"):
            kept(path)
        content = path.read_bytes()
    for replaced, reason in ((b"pool 5", "was not kept"), (b"pool 3", "is of another version of kvsm")):
        path.unlink(missing_ok=True)
        path.write_bytes(content.replace(b"pool 5", replaced))
        path.chmod(0o600)
        with kept(path) as pool:
            assert pool.cold_reason == [f"the pool that was here {reason}"]
            assert not pool.blocks.any()


def test_what_cannot_be_kept_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a file with a name"):
        HostPool(1, 1, keep=KeptPool(IDENTITY))
    with pytest.raises(ConfigError, match="needs a file with a name"):
        kept(path, nameless=True)
    with pytest.raises(ConfigError, match=r"has 9,\d+ bytes, and a pool has room for 8,192; shorten"):
        kept(path, identity=PoolIdentity.of({"model": "m" * 9000}))


def test_all_ranks_that_there_may_be_have_room(path: Path) -> None:
    """Of the largest numbers that a record may hold."""
    own = ProcessName(2**63, 2**63, 2**63)
    ranks = tuple(kept_record.RankInPool(rank, own) for rank in range(1024))
    reasons = ["x" * 200] * 1000
    identity = PoolIdentity.of({"model": "m" * 8000})
    record = kept_record.new_record(KeptPool(identity), "boot", reasons)
    kept(path).close()
    with path.open("r+b") as file:
        sizes = PoolSizes(BLOCKS, RANKS, BLOCK_BYTES)
        whole = msgspec.structs.replace(record, ranks=ranks)
        kept_record.write_record(file.fileno(), sizes, whole)
        assert kept_record.read_record(file.fileno(), sizes) == whole
    assert record.cold_reason[-1] == "and more"


# Who is still there.


@pytest.fixture
def children() -> Iterator[Callable[[Callable[[], Any]], Child]]:
    with ExitStack() as stack:

        def start(act: Callable[[], Any]) -> Child:
            child = forked(act)
            stack.callback(lambda: suppress_all(child.end))
            return child

        yield start


def suppress_all(call: Callable[[], None]) -> None:
    with suppress(OSError):
        call()


def test_facts_are_read_without_coming_in(path: Path, children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child = children(lambda: kept(path, 1).is_warm)
    assert told(child) is False
    facts = read_kept_pool(path)
    assert (facts.sizes, facts.identity) == (PoolSizes(BLOCKS, RANKS, BLOCK_BYTES), IDENTITY)
    assert [(one.rank, one.process.pid) for one in facts.users if one.process] == [(1, child.pid)]
    child.end()
    facts = read_kept_pool(path)
    assert (facts.users, facts.cold_reason) == ([], [])
    with kept(path) as pool:
        assert (pool.is_warm, pool.pool_id) == (True, facts.pool_id)
    monkeypatch.setattr(kept_file, "boot_id", lambda: "another")
    assert "started again" in read_kept_pool(path).cold_reason[0]
    damage(path, path.stat().st_size - PAGE_BYTES - RECORD_BYTES, 0)
    facts = read_kept_pool(path)
    assert (facts.identity, facts.pool_id) == (None, None)
    assert "not whole" in facts.cold_reason[0]
    path.write_bytes(b"somebody's letters")
    with pytest.raises(ConfigError, match="is not a host pool that is kept"):
        read_kept_pool(path)


def test_a_killed_holder_leaves_a_warm_pool(path: Path, children: Any) -> None:
    def hold() -> bool:
        pool = kept(path)
        pool.blocks[:] = 7
        _STAY.append(pool)
        return pool.is_warm

    child = children(hold)
    assert told(child) is False
    with pytest.raises(ConfigError, match=rf"rank 0 by process {child.pid} \("):
        kept(path)
    child.end()
    with kept(path) as pool:
        assert pool.is_warm
        assert (pool.blocks == 7).all()


def test_a_process_without_a_lock_that_has_not_ended_is_waited_for(path: Path, children: Any) -> None:
    """No reuse in flight (S3): its device may still write when its lock is gone."""

    def let_go() -> bool:
        pool = kept(path)
        _STAY.append(pool)
        file = pool._file
        assert file is not None
        lock(file._descriptor, fcntl.F_UNLCK)
        return True

    child = children(let_go)
    assert told(child)
    with pytest.raises(ConfigError, match=rf"process {child.pid} .*: of its last run, and has not ended yet"):
        kept(path)
    child.end()
    assert kept(path).is_warm


def test_the_end_of_a_process_does_not_say_that_its_copies_are_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reuse in flight (S3): a daemon thread may copy at the end, so only `close` leaves."""
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    with kept(path):
        assert registered == []
        [user] = read_kept_pool(path).users
        assert user.is_locked
    assert read_kept_pool(path).users == []


@pytest.mark.slow
def test_a_forked_child_that_writes_on_keeps_the_pool(path: Path, children: Any) -> None:
    """No reuse in flight (S3): it has the mapping. So the next run waits for it, and names it."""

    def hold_and_fork() -> int:
        pool = kept(path)
        _STAY.append(pool)
        child = os.fork()
        while not child:
            pool.blocks[:] += 1
        return child

    holder = children(hold_and_fork)
    writer = told(holder)
    holder.end()
    try:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=f"rank 0 by a child of process {holder.pid}, which has ended"):
            kept(path, lock_timeout_s=0.5)
        assert time.monotonic() - begun >= 0.5
    finally:
        os.kill(writer, signal.SIGKILL)
    with kept(path, lock_timeout_s=10) as pool:
        assert pool.is_warm
        before = pool.blocks.copy()
        time.sleep(0.1)
        assert np.array_equal(pool.blocks, before)


@pytest.mark.slow
def test_a_stopped_holder_is_refused_by_name_and_waited_for(path: Path, children: Any) -> None:
    def hold() -> bool:
        _STAY.append(kept(path))
        return True

    holder = children(hold)
    told(holder)
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match=rf"rank 0 by process {holder.pid} \("):
        kept(path, lock_timeout_s=0.3)
    waiting = children(lambda: kept(path, lock_timeout_s=20).is_warm)
    time.sleep(0.3)
    holder.end()
    assert told(waiting) is True
