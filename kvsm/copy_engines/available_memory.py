"""How much memory a process may still take: of the machine, and of the control groups above it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may still take. None if the system does not tell.

    root: of the file system in which the system tells it.
    """
    limits = [*_left_in_machine(root), *_left_in_cgroups(root)]
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


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each control group above this process leaves. A container may mount the groups without the path
    that they have outside; then the group at the mount counts."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        mount = root / files.folder
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                with suppress(OSError, ValueError):  # a group without a limit has "max", or no such file
                    yield _left_in_cgroup(directory, files)


def _left_in_cgroup(directory: Path, files: _CgroupFiles) -> int:
    limit = int((directory / files.limit).read_text())
    used = int((directory / files.used).read_text())
    for line in (directory / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.reclaimable:
            used -= int(value)  # cached files, which the system gives up first
    return limit - used
