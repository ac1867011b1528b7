"""Files of users that come one after another: taken if a group shares them, else refused with advice."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.copies import HostPool, KeptPool
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.errors import ConfigError, LogError, UnusableFiles
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.system import private_files
from kvsm.system.private_files import (
    open_private,
    open_private_to_read,
    private_directory,
    read_trusted,
    share_with_group,
    write_whole,
)
from kvsm.tiers.disk import TierDirectory
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.peer_messages import hand_over_directory, socket_path
from kvsm.tiers.hand_over.service import HandOverService
from kvsm.tiers.warm_restart import start

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as other users")

ONE, OTHER, GROUP, OTHER_GROUP = 61_001, 61_002, 62_001, 62_002
IDENTITY = PoolIdentity.of({"model": "m"})
CONFIG = OffloadConfig(host_blocks=4, device_blocks=4)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory that every user can write in, as an `emptyDir` is."""
    directory = Path(tempfile.mkdtemp(prefix="kvsm-test-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def as_user(user: int, act: Callable[[], None], groups: Sequence[int] = (GROUP,), mask: int = 0o077) -> None:
    """Carry this out as this user, who is in these groups, in a forked process. It must go well."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups(list(groups))
            os.setgid(user)
            os.setuid(user)
            os.umask(mask)
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def life(volume: Path, group: int | None, kept: int, value: int = 7) -> Callable[[], None]:
    """An engine that finds `kept` blocks, stores one, and is killed."""

    def act() -> None:
        share_with_group(group)
        private_directory(volume / "pools")
        keep = KeptPool(IDENTITY)
        pool = HostPool(4, 8, path=volume / "pools/pool", keep=keep, lock_timeout_s=0)
        table = HostPool(4, CHECKSUM_BYTES, path=volume / "pools/sums", keep=keep, lock_timeout_s=0)
        pools = KeptPools(IDENTITY, (pool.pool_id, table.pool_id))
        started = start(volume / "pools/log", CONFIG, pools)
        assert started.kept == kept, started.why_cold
        core = started.offloader
        assert not kept or (pool.blocks[:kept] == value).any()
        job = core.prepare_store("r", [b"key %d" % kept], [0]).job
        assert job is not None
        core.submit([job.transfer])
        pool.blocks[list(job.pairs()[1])] = value
        core.complete_store(job.transfer)
        core.end_step()

    return act


def test_a_user_of_the_group_goes_on_with_what_another_one_left(volume: Path) -> None:
    """Pool, log and directory, whatever the umask is. Nobody else can touch them."""
    as_user(ONE, life(volume, GROUP, kept=0))
    as_user(OTHER, life(volume, GROUP, kept=1))
    as_user(ONE, life(volume, GROUP, kept=2))
    found = [path.lstat() for path in [volume / "pools", *(volume / "pools").rglob("*")]]
    assert len(found) > 4
    for one in found:
        assert one.st_gid == GROUP
        assert stat.S_IMODE(one.st_mode) == (0o770 if stat.S_ISDIR(one.st_mode) else 0o660)


def test_files_that_were_made_before_are_shared_by_their_owner(volume: Path) -> None:
    as_user(ONE, life(volume, None, kept=0))
    (volume / "pools").chmod(0o770)
    os.chown(volume / "pools", ONE, GROUP)
    (volume / "pools/log").chmod(0o770)
    os.chown(volume / "pools/log", ONE, GROUP)
    as_user(ONE, life(volume, GROUP, kept=1))
    as_user(OTHER, life(volume, GROUP, kept=2))


USES: dict[str, Callable[[Path], object]] = {
    "directory": private_directory,
    "disk tier": lambda path: TierDirectory(path, "engine0").make(),
    "file": lambda path: open_private(path, "a host pool"),
    "file to read": lambda path: open_private_to_read(path, "a host pool"),
}


@pytest.mark.parametrize("use", USES)
def test_without_the_option_the_refusal_names_it(volume: Path, use: str) -> None:
    """Both users, and what to do. The group alone changes nothing."""
    path = volume / "made"

    def make() -> None:
        share_with_group(GROUP)
        if "file" in use:
            os.close(open_private(path, "a host pool")[0])
        else:
            private_directory(path)

    def refused() -> None:
        for group in (None, OTHER_GROUP):
            share_with_group(group)
            with pytest.raises(ConfigError) as error:
                USES[use](path)
            for part in (str(ONE), str(OTHER), "file_group", "another"):
                assert part in str(error.value), str(error.value)

    as_user(ONE, make)
    as_user(OTHER, refused, groups=(GROUP, OTHER_GROUP))
    before = path.lstat()
    as_user(OTHER, refused, groups=(OTHER_GROUP,))
    assert path.lstat() == before


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o662, 0o661])
def test_what_others_can_touch_is_refused_in_the_group_too(volume: Path, mode: int) -> None:
    path = volume / "made"
    path.touch()
    os.chown(path, ONE, GROUP)
    path.chmod(mode)

    def refused() -> None:
        share_with_group(GROUP)
        with pytest.raises(ConfigError, match="can be touched by other users"):
            open_private(path, "a host pool")

    as_user(OTHER, refused)


def test_small_files_are_believed_from_the_group_alone(volume: Path) -> None:
    """The era of a disk tier, and what its ranks have found."""
    path = volume / "era"

    def write() -> None:
        share_with_group(GROUP)
        write_whole(path, b"era")

    def read() -> None:
        share_with_group(GROUP)
        assert read_trusted(path, 100) == b"era"
        write_whole(path, b"another era")
        share_with_group(None)
        path.chmod(0o666)
        share_with_group(GROUP)
        with pytest.raises(ConfigError, match="can be written by other users"):
            read_trusted(path, 100)

    as_user(ONE, write)
    as_user(OTHER, read)


def test_a_kept_file_that_kubernetes_has_given_group_rights_names_the_option(volume: Path) -> None:
    """`fsGroup` does so at each mount. The owner could not use the files any more, and the error says why."""
    path = volume / "made"

    def made() -> None:
        os.close(open_private(path, "a host pool")[0])

    def again() -> None:
        with pytest.raises(ConfigError, match="file_group"):
            open_private(path, "a host pool")
        share_with_group(GROUP)
        os.close(open_private(path, "a host pool")[0])

    as_user(ONE, made)
    os.chown(path, ONE, GROUP)
    path.chmod(0o660)
    as_user(ONE, again)


def test_a_group_that_this_process_is_not_in_is_refused() -> None:
    def refused() -> None:
        with pytest.raises(ConfigError, match=rf"file_group is {OTHER_GROUP}, .* not in that group.*fsGroup"):
            share_with_group(OTHER_GROUP)
        assert private_files._shared_group is None

    as_user(ONE, refused)


def test_a_log_of_another_user_is_no_reason_to_stop(volume: Path) -> None:
    """Its process may still run, so it is left alone."""
    as_user(ONE, life(volume, None, kept=0))

    def other() -> None:
        path, pools, marks = volume / "pools/log", KeptPools(IDENTITY, (b"pool", b"sums")), memory_marks()
        with pytest.raises(LogError, match="make room there or make it writable, or name another"):
            start(path, CONFIG, pools, marks=marks)
        started = start(path, CONFIG, pools, marks=marks, log={"on_failure": "continue"})
        assert started.kept == 0
        assert "Permission denied" in " ".join(started.why_cold)
        assert [mark.places() for mark in marks] == [[], []]

    as_user(OTHER, other)


def hand_over_service(volume: Path) -> HandOverService:
    share_with_group(GROUP)
    directory = hand_over_directory(str(volume / "meet"))
    assert directory is not None
    return HandOverService(directory, "p", LeaseTable(5.0), {})


def test_a_dead_hand_over_socket_of_the_group_is_replaced(volume: Path) -> None:
    def killed() -> None:
        hand_over_service(volume)

    for user in (ONE, OTHER, ONE):
        as_user(user, killed)
        found = socket_path(volume / "meet", "p").stat()
        assert (found.st_uid, found.st_gid) == (user, GROUP)
        assert found.st_mode == stat.S_IFSOCK | 0o660


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_an_engine_takes_no_hand_over_socket_that_may_be_alive(
    volume: Path, is_shared: bool, listens: bool
) -> None:
    """Of another user. If the group shares it, that tells who is alive; else the engine serves without."""
    path = socket_path(volume / "meet", "p")

    def refused() -> None:
        with pytest.raises(ConfigError) as error:
            hand_over_service(volume)
        if is_shared:
            assert error.type is ConfigError
            assert "another engine with this engine_id listens there" in str(error.value)
        else:
            assert error.type is UnusableFiles
            for part in (str(path), "Permission denied", "remove the file", "file_group"):
                assert part in str(error.value)

    def replaced() -> None:
        hand_over_service(volume).close()

    path.parent.mkdir()
    path.parent.chmod(0o770)
    os.chown(path.parent, ONE, GROUP)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        os.chown(path, ONE, GROUP if is_shared else ONE)
        path.chmod(0o660 if is_shared else 0o600)
        if listens:
            other.listen()
        as_user(OTHER, replaced if is_shared and not listens else refused)
