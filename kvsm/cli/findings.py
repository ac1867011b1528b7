"""What a checker found, as `--json` prints it."""

from __future__ import annotations

import msgspec

from kvsm.check.worlds.world import Finding
from kvsm.properties import Property


class ToldFinding(msgspec.Struct, frozen=True):
    """A broken property, and what was seen. property_id: "S3", or a name that only the model uses."""

    property_id: str
    message: str


def told_finding(finding: Finding) -> ToldFinding:
    """Convert a finding for `--json`: its property becomes an id."""
    name = finding.property
    return ToldFinding(name.id if isinstance(name, Property) else name, finding.message)
