"""How much memory a process may still allocate, limited by the machine and by its control groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Promised(NamedTuple):
    """Memory (bytes) that a process has reserved but not touched, so that the system counts it as free."""

    pid: int
    size: int


def available_memory_bytes(root: Path = Path("/"), promised: Sequence[Promised] = ()) -> int | None:
    """Return how much memory this process may still allocate (bytes). None if the system does not report it.

    root: the directory that contains `proc` and `sys`.
    promised: memory promised to this and other processes. It counts against the machine, and against each
        control group that contains its process.
    """
    limits = [left - sum(promise.size for promise in promised) for left in _left_in_machine(root)]
    for left, files, group in _left_in_cgroups(root):
        inside = [promise.size for promise in promised if _is_in(root, promise.pid, files, group)]
        limits.append(left - sum(inside))
    return max(0, min(limits)) if limits else None


class _CgroupFiles(NamedTuple):
    """The files in which a version of control groups reports memory."""

    folder: str
    limit: str
    used: str
    reclaimable: str


_V1 = _CgroupFiles(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def _left_in_machine(root: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _left_in_cgroups(root: Path) -> Iterator[tuple[int, _CgroupFiles, Path]]:
    """Yield the memory left in each control group of this process and its parents (bytes), with its files and
    directory. A container may mount the groups without their path outside; then only the group at the mount
    counts."""
    for files, group in _groups_of(root, "self"):
        mount = root / files.folder
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                with suppress(OSError, ValueError):  # a group without a limit has "max", or no such file
                    yield _left_in_cgroup(directory, files), files, directory


def _groups_of(root: Path, pid: int | str) -> Iterator[tuple[_CgroupFiles, Path]]:
    """Yield the directories of the memory control groups of a process."""
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        yield files, root / files.folder / path.lstrip("/")


def _is_in(root: Path, pid: int, files: _CgroupFiles, directory: Path) -> bool:
    """Whether a process is in this control group, or in a group below it."""
    return any(
        version is files and group.is_relative_to(directory) for version, group in _groups_of(root, pid)
    )


def _left_in_cgroup(directory: Path, files: _CgroupFiles) -> int:
    limit = int((directory / files.limit).read_text())
    used = int((directory / files.used).read_text())
    for line in (directory / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.reclaimable:
            used -= int(value)  # file cache, which the system reclaims first
    return limit - used
