"""Find the log of the other tier: host pool and disk have a log each, and a block may be in both.

The logs are in one directory, or one inside the other, and their names show which belong together:

==================  =====================================  ==================================================
written by          the host's log                         the disk's log
==================  =====================================  ==================================================
`kvsm run`          `LOG`                                  `LOG/disk`
vLLM                `20261121T171408Z-engine0-13863`       `20261121T171408Z-engine0-disk-13863`
vLLM, warm restart  `engine0`, written by all processes    as above, one for each process
==================  =====================================  ==================================================

One process may start several engines one after the other, and in a container a new process often has the same
number as the one before. So a disk's log belongs to the latest host log that began before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log.frames import segment_paths
from kvsm.errors import LogError
from kvsm.explain.tables.opened import OpenedLog
from kvsm.tiers.disk_tier import DISK, HOST

_STARTED = re.compile(
    r"(?P<time>[0-9]{8}T[0-9]{6}Z)-engine(?P<engine>[0-9]+)(?P<disk>-disk)?-(?P<process>[0-9]+)"
    r"(-(?P<again>[0-9]+))?"
)
_KEPT = re.compile(r"engine(?P<engine>[0-9]+)")


class OtherTier(NamedTuple):
    """The other tier of a log.

    tier: `host` or `disk`.
    log: the other tier's log; None: it was not found.
    one_process: whether one process wrote both logs, according to their names. Several processes may have
        written the log of a host pool that outlives its process.
    """

    tier: str
    log: Path | None
    one_process: bool


def other_tier(log: OpenedLog) -> OtherTier | None:
    """The tier with which this log's tier exchanges blocks; None: there is no such tier."""
    engines = "SELECT 1 FROM requests WHERE request NOT GLOB 'fetch-*-for-*' LIMIT 1"
    if is_named_disk(log.directory) and log.sql(engines).fetchone() is None:
        return log_of(HOST, log.directory)
    copies = f"SELECT 1 FROM transfers WHERE source = '{DISK}' OR target = '{DISK}' LIMIT 1"
    return None if log.sql(copies).fetchone() is None else log_of(DISK, log.directory)


def is_named_disk(directory: Path) -> bool:
    """Whether a log has the name of a disk's log. Other logs may have such a name too."""
    name = _whole(directory).name
    started = _STARTED.fullmatch(name)
    return name == DISK or (started is not None and started["disk"] is not None)


def log_of(tier: str, directory: Path) -> OtherTier:
    """Find the log of `tier` that belongs to the other tier's log in `directory`, by names alone."""
    path = _whole(directory)
    found = _disk_of(path) if tier == DISK else _host_of(path)
    host = found if tier == HOST else path
    return OtherTier(tier, found, host is not None and _KEPT.fullmatch(host.name) is None)


def _whole(path: Path) -> Path:
    return path if path.name.strip(".") else path.resolve()


def _host_of(path: Path) -> Path | None:
    """The log of the host above a disk, by the path of the disk's log; None: not found."""
    started = _STARTED.fullmatch(path.name)
    if started is None:
        return _last([path.parent])
    before = [
        log for name, log in _beside(path, started) if not name["disk"] and _when(name) <= _when(started)
    ]
    return _last([path.with_name(f"engine{started['engine']}"), *before])


def _disk_of(path: Path) -> Path | None:
    """The log of the disk below a host, by the path of the host's log; None: not found."""
    own = _STARTED.fullmatch(path.name) or _KEPT.fullmatch(path.name)
    below = [] if own is None else [log for name, log in _beside(path, own) if name["disk"]]
    return _last([path / DISK, *[log for log in below if _host_of(log) == path]])


def _beside(path: Path, own: re.Match[str]) -> Iterator[tuple[re.Match[str], Path]]:
    """Yield the logs in the same directory of the same engine, and of the same process if the name has one.

    They are sorted by the time at which they began.

    own: the parsed name of `path`.
    """
    beside: list[tuple[re.Match[str], Path]] = []
    with suppress(OSError):
        named = [(_STARTED.fullmatch(log.name), log) for log in path.parent.iterdir()]
        beside = [(name, log) for name, log in named if name is not None]
    same = own.groupdict().keys() & {"engine", "process"}
    for name, log in sorted(beside, key=lambda found: _when(found[0])):
        if all(name[part] == own[part] for part in same):
            yield name, log


def _when(started: re.Match[str]) -> tuple[str, int]:
    """When a log began, for sorting. If several began in one second, the later names end in a number."""
    return started["time"], int(started["again"] or 0)


def _last(logs: list[Path]) -> Path | None:
    return next((log for log in reversed(logs) if _is_log(log)), None)


def _is_log(path: Path) -> bool:
    try:
        return bool(segment_paths(path))
    except LogError:
        return False
