"""The log of the other tier: host pool and disk have a log each, and a block may be in both.

The two lie beside each other, and their names tell which belong together:

==================  =====================================  ==================================================
written by          the host's log                         the disk's log
==================  =====================================  ==================================================
`kvsm run`          `LOG`                                  `LOG/disk`
vLLM                `20261121T171408Z-engine0-13863`       `20261121T171408Z-engine0-disk-13863`
vLLM, warm restart  `engine0`, which all processes go on   as above, one for each process
==================  =====================================  ==================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvsm.analysis.opened import OpenedLog
from kvsm.errors import LogError
from kvsm.log.frames import segment_paths
from kvsm.tiers.disk_tier import DISK

HOST = "host"

_STARTED = re.compile(
    r"(?P<time>[0-9]{8}T[0-9]{6}Z)-engine(?P<engine>[0-9]+)(?P<disk>-disk)?-(?P<process>[0-9]+)(-[0-9]+)?"
)
_KEPT = re.compile(r"engine(?P<engine>[0-9]+)")


class OtherTier(NamedTuple):
    """tier: `host` or `disk`. log: its log; None: it is not beside the one that was asked."""

    tier: str
    log: Path | None


def other_tier(log: OpenedLog) -> OtherTier | None:
    """The tier with which this log's tier exchanges blocks, and its log; None if there is no such tier."""
    path = log.directory
    path = path if path.name.strip(".") else path.resolve()
    if _is_of_disk(path, log):
        return OtherTier(HOST, _last(_hosts_of(path)))
    query = f"SELECT 1 FROM transfers WHERE source = '{DISK}' OR target = '{DISK}' LIMIT 1"
    if log.sql(query).fetchone() is None:
        return None
    return OtherTier(DISK, _last(_disks_of(path)))


def _is_of_disk(path: Path, log: OpenedLog) -> bool:
    """By its name, and because no request of an engine is in it."""
    started = _STARTED.fullmatch(path.name)
    if path.name != DISK and (started is None or not started["disk"]):
        return False
    query = "SELECT 1 FROM requests WHERE request NOT GLOB 'fetch-*-for-*' LIMIT 1"
    return log.sql(query).fetchone() is None


def _hosts_of(path: Path) -> Iterator[Path]:
    started = _STARTED.fullmatch(path.name)
    if started is None:
        yield path.parent
        return
    yield path.with_name(f"engine{started['engine']}")
    yield from _beside(path, started, disk=False)


def _disks_of(path: Path) -> Iterator[Path]:
    started, kept = _STARTED.fullmatch(path.name), _KEPT.fullmatch(path.name)
    yield path / DISK
    if started is not None:
        yield from _beside(path, started, disk=True)
    elif kept is not None:
        yield from _beside(path, kept, disk=True)


def _beside(path: Path, own: re.Match[str], *, disk: bool) -> Iterator[Path]:
    """Logs of the same engine, the one that began last at the end; of the same process if that is known."""
    beside: list[Path] = []
    with suppress(OSError):
        beside = sorted(path.parent.iterdir())
    for one in beside:
        found = _STARTED.fullmatch(one.name)
        if found is None or bool(found["disk"]) != disk:
            continue
        names = own.groupdict().keys() & {"engine", "process"}
        if all(found[name] == own[name] for name in names):
            yield one


def _last(logs: Iterator[Path]) -> Path | None:
    return next((one for one in reversed(list(logs)) if _is_log(one)), None)


def _is_log(path: Path) -> bool:
    try:
        return bool(segment_paths(path))
    except LogError:
        return False
