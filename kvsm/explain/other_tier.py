"""The log of the other tier: host pool and disk have a log each, and a block may be in both.

The two lie beside each other, and their names tell which belong together:

==================  =====================================  ==================================================
written by          the host's log                         the disk's log
==================  =====================================  ==================================================
`kvsm run`          `LOG`                                  `LOG/disk`
vLLM                `20261121T171408Z-engine0-13863`       `20261121T171408Z-engine0-disk-13863`
vLLM, warm restart  `engine0`, which all processes go on   as above, one for each process
==================  =====================================  ==================================================

One process may start several engines one after the other, and a process in a container often has the number
of the last one. So the log of a disk belongs to the log of the host that began last before it.
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
    """tier: `host` or `disk`. log: its log; None: it is not beside the one that was asked.

    one_process: their names say that one process wrote both. Several may have written the log of a kept host
        pool.
    """

    tier: str
    log: Path | None
    one_process: bool


def other_tier(log: OpenedLog) -> OtherTier | None:
    """The tier with which this log's tier exchanges blocks, and its log; None if there is no such tier."""
    engines = "SELECT 1 FROM requests WHERE request NOT GLOB 'fetch-*-for-*' LIMIT 1"
    if is_named_disk(log.directory) and log.sql(engines).fetchone() is None:
        return log_of(HOST, log.directory)
    copies = f"SELECT 1 FROM transfers WHERE source = '{DISK}' OR target = '{DISK}' LIMIT 1"
    return None if log.sql(copies).fetchone() is None else log_of(DISK, log.directory)


def is_named_disk(directory: Path) -> bool:
    """Whether a log has a name that logs of disks have. Any other log may have it too."""
    name = _whole(directory).name
    started = _STARTED.fullmatch(name)
    return name == DISK or (started is not None and started["disk"] is not None)


def log_of(tier: str, directory: Path) -> OtherTier:
    """The log of this tier that belongs to the log of the other one. Only names are looked at."""
    path = _whole(directory)
    found = _disk_of(path) if tier == DISK else _host_of(path)
    host = found if tier == HOST else path
    return OtherTier(tier, found, host is not None and _KEPT.fullmatch(host.name) is None)


def _whole(path: Path) -> Path:
    return path if path.name.strip(".") else path.resolve()


def _host_of(path: Path) -> Path | None:
    """The log of the host above this log of a disk."""
    started = _STARTED.fullmatch(path.name)
    if started is None:
        return _last([path.parent])
    before = [
        one for name, one in _beside(path, started) if not name["disk"] and _when(name) <= _when(started)
    ]
    return _last([path.with_name(f"engine{started['engine']}"), *before])


def _disk_of(path: Path) -> Path | None:
    """The log of the disk below this log of a host."""
    own = _STARTED.fullmatch(path.name) or _KEPT.fullmatch(path.name)
    below = [] if own is None else [one for name, one in _beside(path, own) if name["disk"]]
    return _last([path / DISK, *[one for one in below if _host_of(one) == path]])


def _beside(path: Path, own: re.Match[str]) -> Iterator[tuple[re.Match[str], Path]]:
    """Logs of the same engine, in the order in which they began; of the same process if that is known."""
    beside: list[tuple[re.Match[str], Path]] = []
    with suppress(OSError):
        named = [(_STARTED.fullmatch(one.name), one) for one in path.parent.iterdir()]
        beside = [(name, one) for name, one in named if name is not None]
    same = own.groupdict().keys() & {"engine", "process"}
    for name, one in sorted(beside, key=lambda found: _when(found[0])):
        if all(name[part] == own[part] for part in same):
            yield name, one


def _when(started: re.Match[str]) -> tuple[str, int]:
    """When a log began. The second one of a second has a number behind its name."""
    return started["time"], int(started["again"] or 0)


def _last(logs: list[Path]) -> Path | None:
    return next((one for one in reversed(logs) if _is_log(one)), None)


def _is_log(path: Path) -> bool:
    try:
        return bool(segment_paths(path))
    except LogError:
        return False
