"""Host memory: its exact size, page-locked or not, shared by ranks and by nobody else."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies.host_pools import host_pool, pool_sizes, reservations
from kvsm.copies.host_pools.available_memory import Promised, available_memory_bytes
from kvsm.copies.host_pools.borrowed_pool import BorrowedPool
from kvsm.copies.host_pools.host_pool import HostPool, PageLocking
from kvsm.copies.host_pools.pool_file import remove_dead_pools
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES
from kvsm.copies.host_pools.reservations import LEAST_BYTES, reserved
from kvsm.copies.layout import rows_of
from kvsm.errors import ConfigError
from kvsm.system import file_locks
from kvsm.system.file_locks import lock_holder


class Locked:
    """A driver that page-locks. `locked`: bytes by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.unlocked: list[int] = []

    @property
    def page_locking(self) -> PageLocking:
        return PageLocking(self.locked.__setitem__, self.unlocked.append)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def left(path: Path, content: bytes) -> None:
    """A private file of this user, as a killed run leaves one."""
    path.write_bytes(content)
    path.chmod(0o600)


# Sizes and places.


@settings(max_examples=examples(40), deadline=None)
@given(num_blocks=st.integers(1, 300), block_bytes=st.integers(1, 3000))
def test_a_pool_is_zeros_of_exactly_its_size(num_blocks: int, block_bytes: int) -> None:
    """Rounded up to pages, not to powers of two."""
    driver = Locked()
    with HostPool(num_blocks, block_bytes, page_locking=driver.page_locking) as pool:
        assert pool.blocks.shape == (num_blocks, block_bytes)
        assert not pool.blocks.any()
        [(address, size)] = driver.locked.items()
        assert (address, address % PAGE_BYTES) == (rows_of("pool", pool.blocks).address, 0)
        assert 0 <= size - num_blocks * block_bytes < PAGE_BYTES


@settings(max_examples=examples(25), deadline=None)
@given(num_blocks=st.integers(1, 40), ranks=st.integers(1, 4), block_bytes=st.integers(1, 300))
def test_ranks_have_rows_of_their_own_and_a_block_of_all_lies_together(
    tmp_path_factory: pytest.TempPathFactory, num_blocks: int, ranks: int, block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("shared") / "pool"
    with ExitStack() as stack:
        pools = [
            stack.enter_context(HostPool(num_blocks, block_bytes, path=path, ranks=ranks, rank=rank))
            for rank in range(ranks)
        ]
        content = np.random.default_rng(0).integers(0, 256, (num_blocks, ranks, block_bytes), np.uint8)
        for rank, pool in enumerate(pools):
            assert not pool.blocks.any()
            pool.blocks[:] = content[:, rank]
        written = np.fromfile(path, np.uint8)[: content.size]
        assert np.array_equal(written.reshape(content.shape), content)
        assert rows_of("pool", pools[-1].blocks).row_bytes == block_bytes
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0; a host pool needs at least 1"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"ranks": 0}, "ranks is 0"),
        ({"rank": 1}, "rank is 1; it must be from 0 to 0"),
        ({"rank": -1}, "rank is -1"),
        ({"ranks": 2}, "ranks is 2; ranks share a host pool through a file, so give a path"),
        ({"path": "/no/such/folder/pool"}, "/no/such/folder/pool: cannot be opened for a host pool: No such"),
    ],
)
def test_what_cannot_be_a_pool_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostPool(**{"num_blocks": 4, "block_bytes": 8, **arguments})  # type: ignore[arg-type]


# What fits.


def test_a_pool_that_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(host_pool.mmap, "mmap", lambda *_, **__: pytest.fail("memory was taken"))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the file was filled"))
    for place in (None, path):
        with pytest.raises(ConfigError, match=r"needs 1,125,899,906,842,624 bytes of memory, and [\d,]+ are"):
            HostPool(1 << 30, 1 << 20, path=place)
    assert not path.exists()


def test_a_file_system_without_room_is_told_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=PAGE_BYTES))
    with HostPool(2, PAGE_BYTES, path=path):
        pass  # two pages, and one for the sizes: just enough
    with pytest.raises(
        ConfigError, match=r"needs 16,384 bytes, and the file system has 12,288; .*--shm-size"
    ):
        HostPool(3, PAGE_BYTES, path=path)
    assert not path.exists()


def test_room_that_goes_meanwhile_is_an_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """Otherwise a signal would kill the process when it first touches a page without room."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no room for a host pool of 8,192 bytes: .*No space left"):
        HostPool(3, 5, path=path)
    assert not path.exists()


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def memory_group(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    if "fs/cgroup/memory" in folder:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        names = ("memory.max", "memory.current", "inactive_file")
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"cache 1\n{names[2]} {cached}\nother 7\n",
    }


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   5000 kB\n"}
V1 = {"proc/self/cgroup": "5:devices:/x\n4:cpu,memory:/a/b\n0::/\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}

MACHINES = {
    "no control group": (MEMINFO, 5000 * 1024),
    "nothing is told": ({}, None),
    "version 2: the nearest group is the tightest": (
        MEMINFO | V2 | memory_group("sys/fs/cgroup/a/b", "1000", 400, 50),
        650,
    ),
    "version 2: a group above is the tightest": (
        MEMINFO
        | V2
        | memory_group("sys/fs/cgroup/a/b", "max", 400)
        | memory_group("sys/fs/cgroup/a", "800", 500),
        300,
    ),
    "version 2: the machine is the tightest": (
        MEMINFO | V2 | memory_group("sys/fs/cgroup/a/b", str(1 << 40), 400),
        5000 * 1024,
    ),
    "version 2: in a container the path is not there": (
        MEMINFO | V2 | memory_group("sys/fs/cgroup", "900", 100),
        800,
    ),
    "version 1: the nearest group is the tightest": (
        MEMINFO | V1 | memory_group("sys/fs/cgroup/memory/a/b", "1000", 400, 50),
        650,
    ),
    "version 1: in a container the path is not there": (
        MEMINFO | V1 | memory_group("sys/fs/cgroup/memory", "900", 100),
        800,
    ),
    "version 1: no limit is a huge one": (
        MEMINFO | V1 | memory_group("sys/fs/cgroup/memory/a/b", "9223372036854771712", 400),
        5000 * 1024,
    ),
    "more is used than allowed": (MEMINFO | V2 | memory_group("sys/fs/cgroup/a/b", "100", 400), 0),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path, machine: str) -> None:
    files, available = MACHINES[machine]
    write_tree(tmp_path, files)
    assert available_memory_bytes(tmp_path) == available


PROMISED = [Promised(7, 300), Promised(8, 500)]
"""To a process in the group a/b, and to one outside it."""

SHARING: dict[str, tuple[dict[str, str], int]] = {
    "the machine": (MEMINFO | V2, 5000 * 1024 - 800),
    "their own group": (MEMINFO | V2 | memory_group("sys/fs/cgroup/a/b", "1000", 400), 300),
    "a group above": (MEMINFO | V2 | memory_group("sys/fs/cgroup/a", "1000", 400), 300),
    "version 1": (MEMINFO | V1 | memory_group("sys/fs/cgroup/memory/a/b", "1000", 400), 300),
    "more is promised than there is": (MEMINFO | V2 | memory_group("sys/fs/cgroup/a/b", "600", 400), 0),
}


@pytest.mark.parametrize("machine", SHARING)
def test_what_other_pools_are_promised_counts_where_they_are(tmp_path: Path, machine: str) -> None:
    files, available = SHARING[machine]
    own = files["proc/self/cgroup"]
    write_tree(tmp_path, files | {"proc/7/cgroup": own, "proc/8/cgroup": own.replace("/a/b", "/other")})
    assert available_memory_bytes(tmp_path, PROMISED) == available


def pool_of(share: float, tell: Any, stay: Any) -> None:
    """A rank that takes this share of what is available, and says how it went."""
    size = int((pool_sizes.available_memory_bytes() or 0) * share)
    try:
        pool = HostPool(size >> 20, 1 << 20)
    except ConfigError as error:
        tell.put(str(error))
        stay.wait(60)  # With all that the error refers to.
        return
    tell.put("")
    stay.wait(60)
    pool.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with 8 GiB available, whatever runs beside this test, and without pools of others."""
    write_tree(tmp_path, {"proc/meminfo": f"MemAvailable: {8 << 20} kB\n"})
    monkeypatch.setattr(pool_sizes, "available_memory_bytes", partial(available_memory_bytes, tmp_path))
    monkeypatch.setattr(reservations, "DIRECTORY", tmp_path)


@pytest.mark.usefixtures("alone")
def test_ranks_of_one_host_share_its_memory() -> None:
    """Each sees the same memory, because no page is touched yet. One of four at 60 % fits. One that is
    refused takes nothing from the others, whichever comes first. The memory of a rank that is killed or has
    closed its pool is free again."""
    context = multiprocessing.get_context("fork")
    tell, stay = context.Queue(), context.Event()
    ranks = [context.Process(target=pool_of, args=(0.6, tell, stay)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    answers = sorted(tell.get(timeout=60) for _ in ranks)
    assert [bool(answer) for answer in answers] == [False, True, True, True]
    assert all("1 other pools here will take" in answer for answer in answers[1:]), answers
    alive = all(rank.is_alive() for rank in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert alive
    for _ in range(2):
        HostPool(int((pool_sizes.available_memory_bytes() or 0) * 0.6) >> 20, 1 << 20).close()


def test_memory_that_a_pool_has_touched_counts_once() -> None:
    """The system counts it as used."""
    with HostPool(64, 1 << 20) as pool:
        with reserved(LEAST_BYTES) as others:
            before = sum(one.size for one in others.promised if one.pid == os.getpid())
        pool.blocks[:32] = 1
        with reserved(LEAST_BYTES) as others:
            after = sum(one.size for one in others.promised if one.pid == os.getpid())
    assert before - after >= 32 << 20
    with reserved(LEAST_BYTES) as others:
        assert sum(one.size for one in others.promised if one.pid == os.getpid()) <= before - (64 << 20)


def test_pools_that_cannot_be_noted_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a directory each rank is checked by itself, as on a machine without /dev/shm."""
    monkeypatch.setattr(reservations, "DIRECTORY", tmp_path / "absent")
    with HostPool(LEAST_BYTES, 1) as pool:
        pool.blocks[:] = 1


# Page-locking and large pages.


def test_a_locked_pool_is_unlocked_once() -> None:
    driver = Locked()
    pool = HostPool(4, 8, page_locking=driver.page_locking)
    assert pool.page_locked
    pool.close()
    pool.close()
    assert driver.unlocked == list(driver.locked)
    assert not pool.page_locked
    assert pool.blocks.shape == (0, 8)


def refused(_: int, size: int) -> None:
    raise MemoryError(f"no {size}")


def test_a_refused_lock_is_a_warning_and_a_working_pool(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 1 << 16))
    unlocked: list[int] = []
    with (
        caplog.at_level(logging.WARNING, "kvsm"),
        HostPool(4, 8, page_locking=PageLocking(refused, unlocked.append)) as pool,
    ):
        assert not pool.page_locked
        pool.blocks[:] = 3
        assert (pool.blocks == 3).all()
    [record] = caplog.records
    for part in (
        "4,096 bytes is not page-locked",
        "MemoryError: no 4096",
        "may lock 65,536 bytes",
        "ulimit -l",
        "--ulimit memlock=-1",
    ):
        assert part in record.getMessage()
    assert unlocked == []


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("ext4", "pool, on ext4. Only files in memory can be page-locked: use /dev/shm"),
        ("tmpfs", "This process may lock all memory, so the log of the kernel (dmesg) may show the reason"),
        ("", "This process may lock all memory, so the log of the kernel (dmesg) may show the reason"),
    ],
    ids=("on a disk", "in memory", "unknown"),
)
def test_a_pool_that_cannot_be_locked_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    advice: str,
) -> None:
    """On an H200 the driver refused a file on a disk as an invalid argument, with no limit of memory."""
    device = tmp_path.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / {tmp_path} rw,noatime - {kind} none rw"
    (tmp_path / "mountinfo").write_text(
        "35 1 99:99 / / rw - overlay none rw\n" + (f"{mount}\n" if kind else "")
    )
    monkeypatch.setattr(host_pool, "_MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    with HostPool(4, 8, path=tmp_path / "pool", page_locking=PageLocking(refused, refused)) as pool:
        assert not pool.page_locked
    [record] = caplog.records
    assert record.getMessage().endswith(advice)


def test_without_a_device_nothing_is_locked_and_nobody_warned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvsm"), HostPool(4, 8) as pool:
        assert not pool.page_locked
    assert caplog.records == []


def test_a_view_outlives_the_close() -> None:
    """A view keeps the memory, which goes with the last view."""
    pool = HostPool(4, 8)
    pool.blocks[:] = 5
    view = pool.blocks
    pool.close()
    assert (view == 5).all()


# One file, several ranks, never two runs.


def test_ranks_of_other_sizes_are_refused(path: Path) -> None:
    """Also if the file would have the same size, because its bytes would be different blocks."""
    with HostPool(6, 8, path=path, ranks=2):
        for num_blocks, ranks, block_bytes in ((6, 2, 4), (12, 2, 4), (4, 3, 8)):
            with pytest.raises(
                ConfigError, match="is in use as a host pool of 6 blocks for 2 ranks, 8 bytes"
            ):
                HostPool(num_blocks, block_bytes, path=path, ranks=ranks, rank=1)
        HostPool(6, 8, path=path, ranks=2, rank=1).close()


def test_a_rank_is_not_taken_twice(path: Path) -> None:
    """No reuse in flight (S3): two runs on one path, of equal sizes, would write over each other's blocks."""
    with HostPool(6, 8, path=path, ranks=2) as first, HostPool(6, 8, path=path, ranks=2, rank=1) as second:
        for rank in (0, 1):
            with pytest.raises(ConfigError, match=f"rank {rank} of this host pool is in use"):
                HostPool(6, 8, path=path, ranks=2, rank=rank)
        view = second.blocks
        second.close()
        HostPool(6, 8, path=path, ranks=2, rank=1).close()
        first.blocks[:] = 1
        assert not view.any()


@pytest.mark.parametrize("content", [b"x", b"x" * 3 * PAGE_BYTES])
def test_somebodys_file_is_left_alone(path: Path, content: bytes) -> None:
    left(path, content)
    with pytest.raises(ConfigError, match="is not a host pool; give another path, or remove the file"):
        HostPool(6, 8, path=path)
    assert path.read_bytes() == content


def test_the_file_goes_with_the_pool_that_made_it_and_the_others_keep_their_memory(path: Path) -> None:
    maker = HostPool(6, 8, path=path, ranks=2, rank=1)
    other = HostPool(6, 8, path=path, ranks=2, rank=0)
    other.close()
    assert path.exists()
    other = HostPool(6, 8, path=path, ranks=2, rank=0)
    maker.close()
    assert not path.exists()
    other.blocks[:] = 9
    assert (other.blocks == 9).all()
    with HostPool(6, 8, path=path, ranks=2, rank=0):
        other.close()
        assert path.exists()


def test_a_file_of_that_name_that_is_another_runs_is_not_removed(path: Path) -> None:
    first = HostPool(6, 8, path=path)
    path.unlink()
    with HostPool(6, 8, path=path):
        first.close()
        assert path.exists()


PROGRAM = """
import os, signal, sys
from kvsm.copies.host_pools.host_pool import HostPool
path, blocks, ranks, rank, end = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
pool = HostPool(blocks, 8, path=path, ranks=ranks, rank=rank)
pool.blocks[:] = 1 + rank
print(os.stat(path).st_ino, flush=True)
sys.stdin.readline()
print(int((pool.blocks == 1 + rank).all()), flush=True)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def start() -> Iterator[object]:
    """Start a process with a pool; it goes on, to its end, when it gets a line."""
    with ExitStack() as stack:

        def started(path: Path, blocks: int, ranks: int, rank: int, end: str) -> subprocess.Popen[str]:
            arguments = [str(path), *map(str, (blocks, ranks, rank)), end]
            return stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

        yield started


def test_a_killed_run_leaves_a_file_that_the_next_one_makes_its_own(start: object, path: Path) -> None:
    """No stale data (S14): whatever sizes the dead run had, its bytes belong to nobody."""
    process = start(path, 6, 2, 0, "killed")  # type: ignore[operator]
    process.stdout.readline()
    with pytest.raises(ConfigError, match="in use"):
        HostPool(50, 8, path=path)
    process.communicate("go\n")
    assert process.returncode == -signal.SIGKILL
    assert path.exists()
    with HostPool(1000, 8, path=path, ranks=3, rank=2) as pool:
        pool.blocks[:] = 1
    assert not path.exists()


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(2, 8), (1000, 8), (9, PAGE_BYTES)])
def test_what_a_dead_run_left_gets_the_sizes_of_the_next(
    path: Path, num_blocks: int, block_bytes: int
) -> None:
    """Smaller or larger: the second rank finds the sizes of the first, and not of the dead run."""
    with HostPool(700, 64, path=path) as pool:
        pool.blocks[:] = 7
        dead = path.read_bytes()
    left(path, dead)
    sizes = {"num_blocks": num_blocks, "block_bytes": block_bytes, "path": path, "ranks": 2}
    with HostPool(**sizes) as first, HostPool(**sizes, rank=1) as second:
        assert not first.blocks.any()
        assert not second.blocks.any()
        first.blocks[:], second.blocks[:] = 1, 2
        assert (first.blocks == 1).all()
        with pytest.raises(ConfigError, match="in use as a host pool of"):
            HostPool(700, 64, path=path)
    assert not path.exists()


def test_what_a_dead_run_left_goes_before_there_must_be_room(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    """Progress (S9): a file in /dev/shm is memory, so a pool of more than half of it could not be started
    again."""

    def room(*_: int, **__: object) -> int:
        return 64 * PAGE_BYTES - path.stat().st_blocks * 512

    monkeypatch.setattr(pool_sizes, "available_memory_bytes", room)
    monkeypatch.setattr(
        os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=room() // PAGE_BYTES, f_frsize=PAGE_BYTES)
    )
    with HostPool(50, PAGE_BYTES, path=path):
        dead = path.read_bytes()
    left(path, dead)
    assert room() < 50 * PAGE_BYTES
    with HostPool(50, PAGE_BYTES, path=path) as pool:
        assert len(pool.blocks) == 50


def test_a_rank_waits_while_another_makes_the_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """It would find a file without sizes."""
    fill, begun, go_on = os.posix_fallocate, threading.Event(), threading.Event()

    def slow(*arguments: int) -> None:
        begun.set()
        assert go_on.wait(30)
        fill(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    pools: list[HostPool] = []
    ranks = [
        threading.Thread(target=lambda rank=rank: pools.append(HostPool(6, 8, path=path, ranks=2, rank=rank)))
        for rank in range(2)
    ]
    ranks[0].start()
    assert begun.wait(30)
    ranks[1].start()
    ranks[1].join(0.05)
    assert ranks[1].is_alive()
    go_on.set()
    for rank in ranks:
        rank.join(30)
    assert len(pools) == 2
    for pool in pools:
        pool.close()
    assert not path.exists()


def test_a_rank_that_comes_back_sees_zeros(path: Path) -> None:
    """No stale data (S14): nobody knows any more which keys the old bytes have."""
    with HostPool(6, 8, path=path, ranks=2) as first:
        first.blocks[:] = 1
        for content in (2, 3):
            with HostPool(6, 8, path=path, ranks=2, rank=1) as second:
                assert not second.blocks.any()
                second.blocks[:] = content
        assert (first.blocks == 1).all()


def test_a_killed_rank_that_comes_back_sees_zeros(start: object, path: Path) -> None:
    """No stale data (S14), and the rank is free as soon as its process is dead."""
    with HostPool(6, 8, path=path, ranks=2):
        process = start(path, 6, 2, 1, "killed")  # type: ignore[operator]
        process.communicate("go\n")
        assert process.returncode == -signal.SIGKILL
        with HostPool(6, 8, path=path, ranks=2, rank=1) as second:
            assert not second.blocks.any()


def test_the_last_rank_removes_the_file_of_a_maker_that_was_killed(start: object, path: Path) -> None:
    process = start(path, 6, 2, 0, "killed")  # type: ignore[operator]
    process.stdout.readline()
    with HostPool(6, 8, path=path, ranks=2, rank=1) as second:
        process.communicate("go\n")
        second.blocks[:] = 3
        assert path.exists()
    assert not path.exists()


def test_a_rank_that_leaves_waits_for_one_that_is_just_looking(start: object, path: Path) -> None:
    """Two that leave at once get the lock one after the other. The second one removes the file."""
    process = start(path, 6, 2, 0, "killed")  # type: ignore[operator]
    process.stdout.readline()
    second = HostPool(6, 8, path=path, ranks=2, rank=1)
    process.communicate("go\n")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        release = threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        second.close()
        release.join()
    assert not path.exists()


def test_the_pool_of_a_killed_run_is_named_when_the_next_run_has_another_path(
    start: object, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In /dev/shm it takes memory until somebody removes it. Pools in use and other files are not named."""
    process = start(path, 6, 1, 0, "killed")  # type: ignore[operator]
    process.communicate("go\n")
    left(path.with_name("letters"), b"somebody's letters".ljust(2 * PAGE_BYTES))
    with caplog.at_level(logging.WARNING, "kvsm"), HostPool(6, 8, path=path.with_name("second")):
        HostPool(6, 8, path=path.with_name("third")).close()
    assert [record.getMessage() for record in caplog.records] == 2 * [
        f"{path} is the host pool of a run that was killed; nobody uses its {2 * PAGE_BYTES:,} bytes: remove "
        "the file"
    ]


def test_a_view_of_a_dead_run_keeps_its_bytes(path: Path) -> None:
    """No reuse in flight (S3): a copy of a closed pool may still run when the next run makes the file."""
    pool = HostPool(600, 64, path=path)
    pool.blocks[:] = 5
    view = pool.blocks
    os.link(path, path.with_name("kept"))
    pool.close()
    path.with_name("kept").rename(path)
    with HostPool(600, 64, path=path) as second:
        second.blocks[:] = 6
        assert (view == 5).all()


def test_a_lock_that_is_never_given_back_is_an_error_that_names_its_holder(path: Path) -> None:
    """Progress (S9): a rank that is stopped while it makes the file must not hold all others."""
    with HostPool(6, 8, path=path, ranks=2), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=rf"pool: (process {os.getpid()} \(.+\)|another process) holds"):
            HostPool(6, 8, path=path, ranks=2, rank=1, lock_timeout_s=0.05)
        fcntl.flock(file, fcntl.LOCK_UN)
        HostPool(6, 8, path=path, ranks=2, rank=1, lock_timeout_s=0).close()


def test_the_holder_of_a_lock_is_found_where_the_system_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a made-up table, because not every system has one."""
    table, file = tmp_path / "locks", tmp_path / "file"
    monkeypatch.setattr(file_locks, "_LOCKS", table)
    with file.open("wb") as opened:
        found = os.fstat(opened.fileno())
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        lines = f"1: POSIX  ADVISORY  WRITE 7 {place}:{found.st_ino} 0 EOF\n"
        lines += f"2: FLOCK  ADVISORY  WRITE 8 {place}:{found.st_ino}1 0 EOF\n"
        assert lock_holder(opened.fileno()) == "another process"
        table.write_text(lines)
        assert lock_holder(opened.fileno()) == "another process"
        table.write_text(lines + f"3: FLOCK  ADVISORY  WRITE {1 << 30} {place}:{found.st_ino} 0 EOF\n")
        assert lock_holder(opened.fileno()) == f"process {1 << 30}"


def test_a_file_that_is_replaced_while_a_rank_waits_is_not_entered(path: Path) -> None:
    """Its ranks would be in a file without a name, where no other rank finds them."""
    path.touch(mode=0o600)
    pools: list[HostPool] = []
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rank = threading.Thread(target=lambda: pools.append(HostPool(6, 8, path=path)))
        rank.start()
        rank.join(0.05)
        path.unlink()
    rank.join(30)
    with pools[0], pytest.raises(ConfigError, match="in use"):
        HostPool(6, 8, path=path)
    assert not path.exists()


def test_a_pool_that_fails_removes_only_what_it_made(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="no room"):
        HostPool(3, 5, path=path)
    assert path.stat().st_size == 0


def test_a_pool_has_at_most_a_thousand_ranks(path: Path) -> None:
    """The last page has a byte for each."""
    with pytest.raises(ConfigError, match="ranks is 1,025; at most 1,024 share a host pool"):
        HostPool(1, 1, path=path, ranks=1025)
    with HostPool(1, 1, path=path, ranks=1024, rank=1023), pytest.raises(ConfigError, match="in use"):
        HostPool(1, 1, path=path, ranks=1024, rank=1023)


def test_ranks_that_start_at_once_agree_on_one_file_and_remove_it_at_their_exit(
    start: object, path: Path
) -> None:
    """The first one makes it. None of them calls `close`; the end of the process does."""
    processes = [start(path, 2000, 3, rank, "exit") for rank in range(3)]  # type: ignore[operator]
    files = {process.stdout.readline() for process in processes}
    assert files == {f"{path.stat().st_ino}\n"}
    assert [process.communicate("go\n")[0] for process in processes] == ["1\n"] * 3
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert not path.exists()


def test_a_forked_child_gives_nothing_back(path: Path) -> None:
    """The file, the locks and the page-locking belong to the parent."""
    driver = Locked()
    with HostPool(6, 8, path=path, page_locking=driver.page_locking) as pool:
        child = os.fork()
        if not child:
            pool.close()
            os._exit(len(driver.unlocked))
        assert os.waitpid(child, 0)[1] == 0
        assert path.exists()
        with pytest.raises(ConfigError, match="in use"):
            HostPool(6, 8, path=path)
    assert driver.unlocked == list(driver.locked)


# A pool of another process.


@settings(max_examples=examples(25), deadline=None)
@given(num_blocks=st.integers(1, 40), ranks=st.integers(1, 3), block_bytes=st.integers(1, 300))
def test_a_borrowed_pool_shows_the_rows_of_one_rank_and_cannot_be_written(
    tmp_path_factory: pytest.TempPathFactory, num_blocks: int, ranks: int, block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("borrowed") / "pool"
    with ExitStack() as stack:
        for rank in range(ranks):
            pool = stack.enter_context(HostPool(num_blocks, block_bytes, path=path, ranks=ranks, rank=rank))
            pool.blocks[:] = 1 + rank
        for rank in range(ranks):
            with BorrowedPool(path, block_bytes, rank) as borrowed:
                assert borrowed.blocks.shape == (num_blocks, block_bytes)
                assert (borrowed.blocks == 1 + rank).all()
                with pytest.raises(ValueError, match="read-only"):
                    borrowed.blocks[0] = 0
            assert not len(borrowed.blocks)


@pytest.mark.parametrize(("block_bytes", "rank"), [(9, 0), (8, 2), (8, -1)])
def test_a_pool_of_other_sizes_is_not_borrowed(path: Path, block_bytes: int, rank: int) -> None:
    with (
        HostPool(6, 8, path=path, ranks=2),
        pytest.raises(ConfigError, match="is a host pool of 6 blocks for 2 ranks, 8 bytes each; rank"),
    ):
        BorrowedPool(path, block_bytes, rank)


@pytest.mark.parametrize("end", ["no pool", "cut off", "longer"])
def test_a_file_that_is_no_whole_pool_is_not_borrowed(path: Path, end: str) -> None:
    """A look at a page that the file does not have would kill the process with a signal."""
    with HostPool(1000, 8, path=path):
        content = path.read_bytes()
    pieces = {
        "no pool": content[:-PAGE_BYTES],
        "cut off": content[PAGE_BYTES:],
        "longer": bytes(PAGE_BYTES) + content,
    }
    left(path, pieces[end])
    with pytest.raises(ConfigError, match="is not a host pool"):
        BorrowedPool(path, 8)


def test_only_a_private_file_is_borrowed(path: Path) -> None:
    """Another user must not choose what is served as KV cache."""
    with HostPool(6, 8, path=path):
        link = path.with_name("link")
        link.symlink_to(path)
        with pytest.raises(ConfigError, match="is a symbolic link"):
            BorrowedPool(link, 8)
        path.chmod(0o644)
        with pytest.raises(ConfigError, match="can be touched by other users"):
            BorrowedPool(path, 8)
    with pytest.raises(ConfigError, match="cannot be opened for a host pool: No such file"):
        BorrowedPool(path, 8)


def test_a_borrowed_pool_outlives_its_owner(start: object, path: Path) -> None:
    """A copy out of it may be under way when the other process is killed."""
    process = start(path, 600, 1, 0, "killed")  # type: ignore[operator]
    process.stdout.readline()
    with BorrowedPool(path, 8) as borrowed:
        process.communicate("go\n")
        path.unlink()
        assert (borrowed.blocks == 1).all()


def test_pools_of_killed_runs_are_removed_and_nothing_else(start: object, path: Path) -> None:
    """On tmpfs they take the memory that the next start needs."""
    process = start(path, 6, 1, 0, "killed")  # type: ignore[operator]
    process.communicate("go\n")
    letters = path.with_name("letters")
    left(letters, b"somebody's letters".ljust(2 * PAGE_BYTES))
    with HostPool(6, 8, path=path.with_name("second")) as pool:
        remove_dead_pools(path.parent)
        assert sorted(one.name for one in path.parent.iterdir()) == ["letters", "second"]
        assert not pool.blocks.any()
