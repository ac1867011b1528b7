"""What a checker found, as `--json` prints it."""

from __future__ import annotations

import msgspec

from kvsm.check.worlds.world import Finding
from kvsm.properties import Property


class ToldFinding(msgspec.Struct, frozen=True):
    """What is broken, and what was seen. property_id: "S3", or a word of the model's own."""

    property_id: str
    message: str


def told_finding(finding: Finding) -> ToldFinding:
    """A finding, its property as an id."""
    name = finding.property
    return ToldFinding(name.id if isinstance(name, Property) else name, finding.message)
