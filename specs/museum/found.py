"""Which checker finds each exhibit first, as which broken property, and in how many steps.

A slow test runs a quarter of the museum each day and compares its results with this table. docs/bugs.md is
generated from it.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsm.properties import Property

DISTURBED = "exploration: serving, disturbed"
BARE = "exploration: serving, without references"
CHUNKS = "exploration: serving, in chunks"
LAZY = "exploration: serving, lazy"
EVENTS = "exploration: serving, with a router"
COPIES = "exploration: copies"
CORE = "walk: core"
DISK = "walk: disk"
TIERS = "walk: tiers"
ERAS = "walk: eras"
KILLED = "exploration: serving, killed"
SERVING = "walk: serving"
LAYERS = "walk: serving with layers"
AUDITED = "walk: audited serving"


class FoundBy(NamedTuple):
    """The first sighting of an exhibit.

    checker: the first checker, in their order, that finds the exhibit.
    property: the property that it reports as broken.
    steps: the length of its trace.
    """

    checker: str
    property: Property
    steps: int


FOUND = {
    "B01": FoundBy(BARE, Property.LEGAL_CALLS, 6),
    "B02": FoundBy(COPIES, Property.COPY_ORDER, 3),
    "B03": FoundBy(COPIES, Property.COPY_ORDER, 3),
    "B04": FoundBy(BARE, Property.CORRECT_BYTES, 7),
    "B05": FoundBy(CHUNKS, Property.NO_REUSE_IN_FLIGHT, 13),
    "B06": FoundBy(DISTURBED, Property.LEGAL_CALLS, 7),
    "B07": FoundBy(CORE, Property.STORED_ONCE, 5),
    "B08": FoundBy(DISTURBED, Property.STORED_SO_SERVED, 4),
    "B09": FoundBy(CORE, Property.PROGRESS, 8),
    "B10": FoundBy(CORE, Property.LEGAL_CALLS, 1),
    "B11": FoundBy(CORE, Property.LEGAL_CALLS, 1),
    "B12": FoundBy(CORE, Property.STALE_REPORTS, 5),
    "B13": FoundBy(DISTURBED, Property.NO_REUSE_IN_FLIGHT, 4),
    "B14": FoundBy(DISTURBED, Property.NO_REUSE_IN_FLIGHT, 6),
    "B15": FoundBy(DISTURBED, Property.PROGRESS, 7),
    "B16": FoundBy(DISTURBED, Property.LEGAL_CALLS, 5),
    "B17": FoundBy(DISTURBED, Property.CORRECT_BYTES, 5),
    "B18": FoundBy(BARE, Property.LEGAL_CALLS, 8),
    "B19": FoundBy(DISTURBED, Property.LEGAL_CALLS, 2),
    "B20": FoundBy(DISTURBED, Property.LEGAL_CALLS, 3),
    "B21": FoundBy(DISTURBED, Property.LAST_STEP, 3),
    "B22": FoundBy(CORE, Property.LEGAL_CALLS, 8),
    "B23": FoundBy(LAZY, Property.STORED_ONCE, 11),
    "B24": FoundBy(DISTURBED, Property.PROGRESS, 12),
    "B25": FoundBy(COPIES, Property.LEGAL_CALLS, 2),
    "B26": FoundBy(EVENTS, Property.EVENTS_ARE_STATE, 16),
    "B27": FoundBy(DISTURBED, Property.CORRECT_BYTES, 10),
    "B28": FoundBy(DISTURBED, Property.CORRECT_BYTES, 5),
    "B29": FoundBy(DISTURBED, Property.ONE_RELEASE_PER_HOLD, 4),
    "B30": FoundBy(DISTURBED, Property.LEGAL_CALLS, 2),
    "B31": FoundBy(BARE, Property.ONE_RELEASE_PER_HOLD, 9),
    "B32": FoundBy(BARE, Property.LEGAL_CALLS, 9),
    "B33": FoundBy(BARE, Property.ONE_RELEASE_PER_HOLD, 9),
    "B34": FoundBy(CORE, Property.FAILURE_IS_NOT_SUCCESS, 3),
    "B35": FoundBy(DISTURBED, Property.CONSERVATION, 7),
    "B36": FoundBy(DISTURBED, Property.LEGAL_CALLS, 10),
    "B37": FoundBy(COPIES, Property.COPY_ORDER, 2),
    "B38": FoundBy(DISTURBED, Property.PUBLISH_AFTER_COMMIT, 3),
    "B39": FoundBy(CORE, Property.STALE_REPORTS, 16),
    "B40": FoundBy(CORE, Property.LEGAL_CALLS, 10),
    "B41": FoundBy(CORE, Property.STORED_ONCE, 5),
    "B42": FoundBy(CORE, Property.CONSERVATION, 5),
    "B43": FoundBy(CORE, Property.CONSERVATION, 5),
    "B44": FoundBy(CORE, Property.CONSERVATION, 2),
    "B45": FoundBy(KILLED, Property.NO_STALE_DATA, 3),
    "B46": FoundBy(CORE, Property.EVENTS_ARE_STATE, 6),
    "B47": FoundBy(DISTURBED, Property.STORED_SO_SERVED, 5),
    "B48": FoundBy(DISTURBED, Property.NO_STALE_DATA, 4),
    "B49": FoundBy(DISK, Property.NO_STALE_DATA, 3),
    "B50": FoundBy(DISK, Property.NO_STALE_DATA, 3),
    "B51": FoundBy(DISK, Property.NO_STALE_DATA, 3),
    "B52": FoundBy(DISK, Property.CORRECT_BYTES, 2),
    "B53": FoundBy(DISK, Property.FAILURE_IS_NOT_SUCCESS, 1),
    "B54": FoundBy(DISK, Property.PUBLISH_AFTER_COMMIT, 3),
    "B55": FoundBy(DISK, Property.PROGRESS, 2),
    "B56": FoundBy(TIERS, Property.CONSERVATION, 5),
    "B57": FoundBy(TIERS, Property.CONSERVATION, 7),
    "B58": FoundBy(TIERS, Property.NO_STALE_DATA, 5),
    "B59": FoundBy(TIERS, Property.FAILURE_IS_NOT_SUCCESS, 18),
    "B60": FoundBy(TIERS, Property.PROGRESS, 7),
    "B61": FoundBy(TIERS, Property.LEGAL_CALLS, 4),
    "B62": FoundBy(TIERS, Property.NO_STALE_DATA, 6),
    "B63": FoundBy(SERVING, Property.LEGAL_CALLS, 6),
    "B64": FoundBy(BARE, Property.LEGAL_CALLS, 7),
    "B65": FoundBy(BARE, Property.CORRECT_BYTES, 10),
    "B66": FoundBy(TIERS, Property.NO_STALE_DATA, 7),
    "B67": FoundBy(LAYERS, Property.LEGAL_CALLS, 2),
    "B68": FoundBy(AUDITED, Property.CORRECT_BYTES, 146),
    "B69": FoundBy(CORE, Property.EVENTS_ARE_STATE, 6),
    "B70": FoundBy(AUDITED, Property.PROGRESS, 8),
    "B71": FoundBy(TIERS, Property.MATCH_HOLDS, 7),
    "B72": FoundBy(CORE, Property.EVENTS_ARE_STATE, 3),
}
