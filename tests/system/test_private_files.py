"""Memory is private: what kvsm makes only its user can touch, and what another user made it does not open."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsm.copies import FileCopyEngine, HostPool
from kvsm.cuda_io.paths import NOT_MEASURED, PathTable
from kvsm.errors import ConfigError
from kvsm.system import private_files
from kvsm.system.private_files import open_private, private_directory

NOBODY = 65534

USERS_OF_FILES: dict[str, Callable[[Path], Any]] = {
    "HostPool": lambda path: HostPool(4, 8, path=path),
    "FileCopyEngine": lambda path: FileCopyEngine(np.zeros((4, 8), np.uint8), path, 4),
}
"""All that take the path of a file which may hold what people wrote."""


@pytest.fixture(params=USERS_OF_FILES)
def opened(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return USERS_OF_FILES[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory in which every user can do everything, like a badly kept /tmp."""
    directory = Path(tempfile.mkdtemp(prefix="kvsm-test-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def as_nobody(action: Callable[[], None]) -> int:
    """Carry this out as another user of the machine, in a forked process. Returns 0 if it went well."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0)
            action()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("mask", [0, 0o077])
def test_what_is_made_is_private_whatever_the_umask_allows(
    path: Path, opened: Callable[[Path], Any], mask: int
) -> None:
    before = os.umask(mask)
    try:
        with closing(opened(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user; see the next tests")
def test_another_user_cannot_read_what_is_made(open_directory: Path, opened: Callable[[Path], Any]) -> None:
    path = open_directory / "pool"

    def attack() -> None:
        for access in (os.O_RDONLY, os.O_WRONLY):
            with pytest.raises(PermissionError):
                os.open(path, access)

    with closing(opened(path)):
        assert as_nobody(attack) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user; the next test plays it")
@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_a_file_that_another_user_made_is_refused_and_left_alone(
    open_directory: Path, opened: Callable[[Path], Any], mode: int
) -> None:
    """That user keeps it open, so it would read every block, whatever the mode becomes later."""
    path = open_directory / "pool"
    assert as_nobody(lambda: os.close(os.open(path, os.O_CREAT | os.O_RDWR, mode))) == 0
    with pytest.raises(ConfigError, match=f"pool: belongs to user {NOBODY}, and this process runs as user 0"):
        opened(path)
    found = path.stat()
    assert (found.st_uid, found.st_size, stat.S_IMODE(found.st_mode)) == (NOBODY, 0, mode)


def test_a_file_of_another_owner_is_refused_and_left_alone(
    path: Path, opened: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where no second user is to be had: this process takes itself for another one."""
    path.touch(mode=0o600)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, and this process"):
        opened(path)
    assert path.stat().st_size == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_touch_is_refused_and_left_alone(
    path: Path, opened: Callable[[Path], Any], mode: int
) -> None:
    path.touch()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"can be touched by other users \(its mode is {mode:04o}\)"):
        opened(path)
    assert (path.stat().st_size, stat.S_IMODE(path.stat().st_mode)) == (0, mode)


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_not_followed(path: Path, opened: Callable[[Path], Any], exists: bool) -> None:
    """Whoever made the link would choose which file of this user is overwritten."""
    letters = path.with_name("letters")
    if exists:
        letters.touch(mode=0o600)
    path.symlink_to(letters)
    with pytest.raises(ConfigError, match="pool: is a symbolic link"):
        opened(path)
    assert path.is_symlink()
    assert letters.exists() == exists
    assert not exists or letters.stat().st_size == 0


def test_a_hard_link_is_refused(path: Path, opened: Callable[[Path], Any]) -> None:
    letters = path.with_name("letters")
    letters.touch(mode=0o600)
    os.link(letters, path)
    with pytest.raises(ConfigError, match=r"pool: has 2 names \(hard links\)"):
        opened(path)
    assert (path.stat().st_size, letters.stat().st_nlink) == (0, 2)


def test_a_pipe_is_refused_without_waiting(path: Path, opened: Callable[[Path], Any]) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="pool: is no regular file"):
        opened(path)
    assert path.is_fifo()


def test_a_directory_is_told(path: Path, opened: Callable[[Path], Any]) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match="pool: cannot be opened for a host pool: Is a directory"):
        opened(path)
    assert path.is_dir()


def test_a_name_that_changes_between_two_calls_is_tried_again_and_not_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run removes its file between this run's two ways to open it."""

    def gone(*_: Any) -> int:
        raise FileNotFoundError

    path.touch(mode=0o600)
    with monkeypatch.context() as patch:
        patch.setattr(private_files, "_open_existing", gone)
        with pytest.raises(ConfigError, match="comes and goes while it is opened for a host pool"):
            open_private(path, "a host pool")
        patch.setattr(private_files, "_open_existing", lambda *_: path.unlink() or gone())
        descriptor, is_new = open_private(path, "a host pool")
    os.close(descriptor)
    assert is_new


# The table of copy paths: no secret, but what is in it is believed.


def test_a_table_that_others_can_write_is_not_believed(path: Path) -> None:
    PathTable.default().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PathTable.load(path, NOT_MEASURED) == PathTable.default()
    path.chmod(0o622)
    with pytest.raises(ConfigError, match="can be written by other users"):
        PathTable.load(path, NOT_MEASURED)


def test_a_table_of_another_owner_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PathTable.default().save(path)
    os.chown(path, NOBODY, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(ConfigError, match="can be written by other users"):
        PathTable.load(path, NOT_MEASURED)


def test_a_table_that_is_a_pipe_or_has_no_end_is_refused(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        PathTable.load(path, NOT_MEASURED)
    path.unlink()
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="has 1,099,511,627,776 bytes; it must have less than"):
        PathTable.load(path, NOT_MEASURED)


def test_saving_follows_no_link_that_waits_beside_the_file(path: Path) -> None:
    """The name of the file that is written first cannot be guessed."""
    letters = path.with_name("letters")
    letters.write_text("somebody's letters")
    path.with_name(f"{path.name}.{os.getpid()}").symlink_to(letters)
    PathTable.default().save(path)
    assert letters.read_text() == "somebody's letters"


# The promises of a pool's file that only several processes can break.


def test_ranks_that_come_and_go_at_random_share_nothing_but_the_file(path: Path) -> None:
    """No reuse in flight (S3): each one sees zeros when it comes, and then only its own bytes."""
    wrong: list[str] = []

    def come_and_go(rank: int) -> None:
        try:
            for turn in range(1, 40):
                with HostPool(5, 64, path=path, ranks=3, rank=rank) as pool:
                    if pool.blocks.any():
                        wrong.append(f"rank {rank} comes for the {turn}. time and sees old bytes")
                    pool.blocks[:] = 1 + rank
                    if not (pool.blocks == 1 + rank).all():
                        wrong.append(f"rank {rank} sees foreign bytes")
        except ConfigError as error:
            wrong.append(str(error))

    ranks = [threading.Thread(target=come_and_go, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert not any(thread.is_alive() for thread in ranks)
    assert wrong == []
    assert not path.exists()


# Directories in which processes of one user meet.


def test_a_private_directory_is_made_for_its_user_alone(path: Path) -> None:
    private_directory(path)
    private_directory(path)  # it is there now
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_is_refused(path: Path, mode: int) -> None:
    """Another user could put a socket of his own under the name that is looked for."""
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"can be written by other users \(its mode is {mode:04o}\)"):
        private_directory(path)


def test_what_is_no_directory_of_this_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = path.with_name("link")
    path.mkdir(mode=0o700)
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="link: is no directory"):
        private_directory(link)
    with pytest.raises(ConfigError, match="missing/pool: cannot be used as a directory: No such file"):
        private_directory(path.with_name("missing") / "pool")
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, and this process"):
        private_directory(path)
