"""Read older versions of the log format: convert their records to the current version.

Each segment states its version in its preamble and in its head. The writer writes `SCHEMA_VERSION`, also when
it continues an older log; the older segments stay as they are. From release 0.1.0 on, each later release
reads the logs of all earlier ones.

A new optional field at the end of a record needs no change here. For any other change of records that a
release has written, add a row to `UPGRADES`. docs/extending.md has the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvsm.errors import described
from kvsm.events import SCHEMA_VERSION

OLDEST_VERSION = 3
"""The oldest version that this kvsm reads: release 0.1.0 writes it. No later release may raise this
number."""

Part = Literal["events", "head", "tail", "snapshot"]
"""Which records a frame holds. A snapshot is a field of a head."""

Upgrade = Callable[[list[Any]], list[Any]]
"""Takes a record of one version as plain msgpack values, and returns it as the next version has it."""

UPGRADES: dict[tuple[int, int | Part], Upgrade] = {}
"""(version, tag of an event) or (version, part) -> the upgrade of such records to the next version. Records
without a row are the same in both versions. An upgraded event is still one event, with the same number."""


def why_unreadable(version: int) -> str | None:
    """Return why this kvsm cannot read a segment of this version, and what to do; None if it can."""
    if OLDEST_VERSION <= version <= SCHEMA_VERSION:
        return None
    reads = f"written in version {version} of the log format; this kvsm reads {_versions()}. "
    if version > SCHEMA_VERSION:
        return reads + "A later release wrote it: read it with that one (pip install --upgrade kvsm)"
    return (
        reads
        + "It is older than kvsm 0.1.0: read it with the kvsm that wrote it, or begin a new log elsewhere"
    )


def _versions() -> str:
    if OLDEST_VERSION == SCHEMA_VERSION:
        return f"version {SCHEMA_VERSION}"
    return f"versions {OLDEST_VERSION} to {SCHEMA_VERSION}"


def upgraded(content: bytes | memoryview, version: int, part: Part) -> bytes | memoryview:
    """Return the encoded records of a frame, or a snapshot, as `SCHEMA_VERSION` has them.

    Raises `msgspec.MsgspecError` for bytes that are no records of that version.
    """
    later = {which for at, which in UPGRADES if at >= version}
    if part not in later and not (part == "events" and any(type(which) is int for which in later)):
        return content
    value = msgspec.msgpack.decode(content)
    try:
        for at in range(version, SCHEMA_VERSION):
            value = [_next(one, at, one[0]) for one in value] if part == "events" else _next(value, at, part)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise msgspec.ValidationError(f"no record of version {version}: {described(error)}") from error
    return msgspec.msgpack.encode(value)


def _next(record: list[Any], version: int, which: int | Part) -> list[Any]:
    upgrade = UPGRADES.get((version, which))
    return record if upgrade is None else upgrade(record)
