"""The simulated disk loses what a disk may lose, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest

from kvsm.check.worlds.simulated_disk import MOST_VERSIONS, SECTOR, DiskFile, SimulatedDisk
from kvsm.system.private_files import sync_directory

OLD, NEW = b"o" * SECTOR, b"n" * SECTOR


def after_power_losses(file: DiskFile) -> set[bytes]:
    return {file.after_power_loss(Random(seed)) for seed in range(200)}


def test_a_power_loss_keeps_any_sectors_that_were_not_synced() -> None:
    file = DiskFile(OLD * 2)
    file.write(NEW * 2, 0)
    assert after_power_losses(file) == {one + other for one in (OLD, NEW) for other in (OLD, NEW)}
    assert file.after_kill() == NEW * 2


def test_what_was_synced_is_kept() -> None:
    file = DiskFile(OLD)
    file.write(NEW, 0)
    file.sync()
    assert after_power_losses(file) == {NEW}


def test_allocated_room_reads_as_zeros_where_nothing_was_written() -> None:
    """Also after its end: a lost sector does not move the sectors after it."""
    file = DiskFile()
    file.allocate(3 * SECTOR)
    file.write(NEW, 2 * SECTOR)
    zeros = bytes(SECTOR)
    assert file.after_kill() == zeros * 2 + NEW
    assert after_power_losses(file) == {zeros * 3, zeros * 2 + NEW}


def test_a_size_that_was_not_synced_may_be_lost() -> None:
    """And the size may be there without the bytes."""
    file = DiskFile(OLD)
    file.write(NEW, SECTOR)
    assert after_power_losses(file) == {OLD, OLD + bytes(SECTOR), OLD + NEW}
    file.cut(SECTOR)
    file.sync()
    assert after_power_losses(file) == {OLD}


def test_a_sector_keeps_its_synced_version_and_a_few_of_the_last() -> None:
    """So a long run without a sync costs no more than a short one."""
    file = DiskFile(OLD)
    contents = [bytes([number]) * SECTOR for number in range(2 * MOST_VERSIONS)]
    for content in contents:
        file.write(content, 0)
    assert after_power_losses(file) == {OLD, *contents[-MOST_VERSIONS:]}


def test_a_copy_is_not_changed_by_later_calls() -> None:
    file = DiskFile(OLD)
    file.write(NEW, 0)
    copied = file.copy()
    file.sync()
    assert after_power_losses(copied) == {OLD, NEW}


# Real files.


@contextmanager
def written(disk: SimulatedDisk, path: Path) -> Iterator[int]:
    """Yield the descriptor of a new file on the attached disk."""
    with disk.attached(), path.open("w+b") as file:
        yield file.fileno()


def test_what_a_failed_sync_has_dropped_stays_lost(tmp_path: Path) -> None:
    """A second sync succeeds, but proves nothing: the system has marked the sectors clean."""
    disk, path = SimulatedDisk(), tmp_path / "file"
    with written(disk, path) as file:
        for fill in (b"a", b"b"):
            os.pwrite(file, fill * SECTOR, 0 if fill == b"a" else SECTOR)
            os.fdatasync(file)
        os.pwrite(file, b"c" * SECTOR, SECTOR)
        disk.arm("sync", _dropping())
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(file)
        os.fdatasync(file)
        assert path.read_bytes() == b"a" * SECTOR + b"c" * SECTOR
    disk.lose_power(tmp_path, Random(0))
    assert path.read_bytes() == b"a" * SECTOR + b"b" * SECTOR


def _dropping() -> int:
    """Return a seed with which the first of two versions stays."""
    return next(seed for seed in range(99) if Random(seed).choice((0, 1)) == 0)


def test_dropped_sectors_that_are_written_again_become_durable(tmp_path: Path) -> None:
    """Even with the same bytes, as a log does that continues another one."""
    disk, path = SimulatedDisk(), tmp_path / "file"
    with written(disk, path) as file:
        os.pwrite(file, OLD, 0)
        os.fdatasync(file)
        os.pwrite(file, NEW, 0)
        disk.arm("sync", _dropping())
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(file)
        os.pwrite(file, NEW, 0)
        os.fdatasync(file)
    disk.lose_power(tmp_path, Random(0))
    assert path.read_bytes() == NEW


def test_a_failed_write_leaves_whole_sectors(tmp_path: Path) -> None:
    left = set()
    for seed in range(20):
        disk, path = SimulatedDisk(), tmp_path / f"file-{seed}"
        with written(disk, path) as file:
            os.pwrite(file, OLD[:20], 0)
            disk.arm("write", seed)
            with pytest.raises(OSError, match="No space left"):
                os.pwrite(file, bytes(4 * SECTOR), 20)
        left.add(path.read_bytes())
    assert left == {OLD[:20], OLD[:20].ljust(2 * SECTOR, b"\0")}


def test_a_fault_meets_the_call_that_was_armed(tmp_path: Path) -> None:
    """Calls before it succeed, and so do calls after it."""
    disk = SimulatedDisk()
    with written(disk, tmp_path / "file") as file:
        disk.arm("any", 0, skips=1)
        os.pwrite(file, NEW, 0)
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(file)
        os.fdatasync(file)
    assert disk.failed == 1


def test_a_system_without_some_of_the_calls_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    for name in ("fdatasync", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    disk, path = SimulatedDisk(), tmp_path / "file"
    with written(disk, path) as file:
        os.posix_fallocate(file, 0, SECTOR)
        os.pwrite(file, NEW, 0)
        os.fdatasync(file)
    disk.lose_power(tmp_path, Random(0))
    assert path.read_bytes() == NEW
    assert not hasattr(os, "fdatasync")


# Names.


@pytest.fixture
def named(tmp_path: Path) -> Iterator[SimulatedDisk]:
    """A disk that loses names, attached; its directory has a durable segment."""
    disk = SimulatedDisk(loses_names=True)
    with disk.attached():
        create(tmp_path / "1.kvsm")
        sync_directory(tmp_path)
        yield disk


def create(path: Path, content: bytes = OLD) -> None:
    """Make a file, and sync its content."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.pwrite(descriptor, content, 0)
    os.fdatasync(descriptor)
    os.close(descriptor)


def names_after_power_losses(disk: SimulatedDisk, directory: Path) -> set[tuple[str, ...]]:
    names, left = disk._names, set()
    assert names is not None
    for seed in range(50):
        left.add(tuple(sorted(deepcopy(names).lose_power(directory, Random(seed)))))
    return left


def test_a_power_loss_keeps_the_first_names_and_the_first_deletions(
    named: SimulatedDisk, tmp_path: Path
) -> None:
    """It keeps the first few of each, independently of each other, unless the directory was synced."""
    create(tmp_path / "2.new")
    os.rename(tmp_path / "2.new", tmp_path / "2.kvsm")
    (tmp_path / "1.kvsm").unlink()
    kept: set[tuple[str, ...]] = {(), ("2.new",), ("2.kvsm",)}
    assert names_after_power_losses(named, tmp_path) == kept | {("1.kvsm", *names) for names in kept}
    sync_directory(tmp_path)
    assert names_after_power_losses(named, tmp_path) == {("2.kvsm",)}


def test_a_file_that_a_power_loss_brings_back_has_its_bytes(tmp_path: Path) -> None:
    """Another file may have got its inode number in the meantime."""
    left = set()
    for seed in range(20):
        disk, directory = SimulatedDisk(loses_names=True), tmp_path / f"{seed}"
        directory.mkdir()
        with disk.attached():
            create(directory / "1.kvsm")
            sync_directory(directory)
            (directory / "1.kvsm").unlink()
            create(directory / "2.kvsm", NEW)
            disk.lose_power(directory, Random(seed))
        left.add(tuple((path.name, path.read_bytes()) for path in sorted(directory.iterdir())))
    first, second = ("1.kvsm", OLD), ("2.kvsm", NEW)
    assert left == {(), (first,), (second,), (first, second)}


def test_a_deletion_before_a_newer_segment_has_a_durable_name_is_noted(
    named: SimulatedDisk, tmp_path: Path
) -> None:
    create(tmp_path / "0.kvsm")
    (tmp_path / "0.kvsm").unlink()
    create(tmp_path / "2.new")
    (tmp_path / "2.new").unlink()
    assert named.early_deletion == ""
    create(tmp_path / "2.kvsm")
    (tmp_path / "1.kvsm").unlink()
    assert named.early_deletion == "1.kvsm is deleted, but the name of 2.kvsm is not on the disk"
