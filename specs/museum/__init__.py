"""A museum of real bugs: seventy-two bugs of public KV offload systems, each put back into kvsm by edits."""

from __future__ import annotations

from museum.copying import COPYING
from museum.ending import ENDING
from museum.exhibit import Edit, Exhibit
from museum.holding import HOLDING
from museum.matching import MATCHING
from museum.own_findings import OWN_FINDINGS
from museum.persisting import PERSISTING
from museum.resetting import RESETTING
from museum.restarting import RESTARTING
from museum.storing import STORING
from museum.tiering import TIERING

EXHIBITS: dict[str, Exhibit] = {
    exhibit.id: exhibit
    for exhibit in sorted(
        (
            *STORING,
            *MATCHING,
            *HOLDING,
            *RESETTING,
            *ENDING,
            *COPYING,
            *RESTARTING,
            *PERSISTING,
            *TIERING,
            *OWN_FINDINGS,
        ),
        key=lambda exhibit: exhibit.id,
    )
}

__all__ = ["EXHIBITS", "Edit", "Exhibit"]
