"""How much memory a process may still take: of the machine, and of the control groups above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Promised(NamedTuple):
    """Memory that a process has been promised, and that the system does not count as used yet (bytes)."""

    pid: int
    size: int


def available_memory_bytes(root: Path = Path("/"), promised: Sequence[Promised] = ()) -> int | None:
    """Memory that this process may still take. None if the system does not tell.

    root: of the file system in which the system tells it.
    promised: to this process and others. It counts against the machine, and against a control group if the
        process is in that group.
    """
    limits = [left - sum(one.size for one in promised) for left in _left_in_machine(root)]
    for left, files, group in _left_in_cgroups(root):
        inside = [one.size for one in promised if _is_in(root, one.pid, files, group)]
        limits.append(left - sum(inside))
    return max(0, min(limits)) if limits else None


class _CgroupFiles(NamedTuple):
    """The files in which a version of control groups tells about memory."""

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
    """What each control group above this process leaves. A container may mount the groups without the path
    that they have outside; then the group at the mount counts."""
    for files, group in _groups_of(root, "self"):
        mount = root / files.folder
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                with suppress(OSError, ValueError):  # a group without a limit has "max", or no such file
                    yield _left_in_cgroup(directory, files), files, directory


def _groups_of(root: Path, pid: int | str) -> Iterator[tuple[_CgroupFiles, Path]]:
    """The control groups of memory in which a process is, as directories."""
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
    """Whether a process is in this control group."""
    return any(
        version is files and group.is_relative_to(directory) for version, group in _groups_of(root, pid)
    )


def _left_in_cgroup(directory: Path, files: _CgroupFiles) -> int:
    limit = int((directory / files.limit).read_text())
    used = int((directory / files.used).read_text())
    for line in (directory / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.reclaimable:
            used -= int(value)  # cached files, which the system gives up first
    return limit - used
