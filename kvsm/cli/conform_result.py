"""The result of `kvsm conform`."""

from __future__ import annotations

from typing import Any

import msgspec

HELD, BROKEN, NOT_EXERCISED, NOT_APPLICABLE = "held", "broken", "not exercised", "not applicable"


class CheckedCase(msgspec.Struct, frozen=True):
    """A case in which a check could have failed. times: how often it arose."""

    case: str
    times: int


class PropertyVerdict(msgspec.Struct, frozen=True):
    """What the walk shows about a property.

    verdict: "held", "broken", "not exercised" (no case arose) or "not applicable".
    cases: the cases in which it could have been found broken.
    why: why it does not apply.
    """

    property_id: str
    verdict: str
    cases: tuple[CheckedCase, ...] = ()
    why: str = ""


class ConformDefect(msgspec.Struct, frozen=True):
    """A defect.

    place: the line that raised the error, "FILE:LINE"; empty if that is irrelevant.
    times: the number of runs that ended with this defect.
    run: the number of the first of these runs.
    variant: the variant of the target in that run; empty if there is only one.
    reduced: the number of steps, and how far they were reduced.
    steps: the steps and what they show, line by line; empty if the failure was not repeated.
    directory: where it is saved; empty if it is not.
    """

    property_id: str
    message: str
    place: str
    times: int
    run: int
    variant: str
    reduced: str
    steps: tuple[str, ...]
    directory: str = ""


class ConformAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.conform/1"):
    """What `kvsm conform --json` prints: what a walk shows about each property of a target.

    says: what a built-in target is; empty for others.
    config: the connector's kv_connector_extra_config, as given.
    date: the day of the walk (UTC).
    versions: package -> its version.
    operations: the number of steps of all runs.
    limit: how long the walk was to take (s).
    seconds: time of the runs (s), without imports and reductions. The first run is never cut short.
    interrupted: whether the walk ended early: by a signal, or because its process ended too often.
    properties: all of kvsm's properties.
    """

    target: str
    says: str
    config: dict[str, Any]
    date: str
    versions: dict[str, str]
    seed: int
    runs: int
    operations: int
    limit: float
    seconds: float
    interrupted: bool
    properties: tuple[PropertyVerdict, ...]
    defects: tuple[ConformDefect, ...]
