"""Which mutants a target of `kvsm fuzz` finds by itself, with two seeds.

This is a lower bound. Not all mutants were searched for yet, and those only with two targets: the one that is
closest to the checker that finds the mutant, and `layers` or `serving`. The budget of a target is that of
`museum.product_alone`, whose `--mutants` searches with all targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsm.properties import Property


class FoundAlone(NamedTuple):
    """The first failure in the walk of a target.

    property: the property that it reports as broken.
    run: the number of the run.
    operations: the number of operations of the walk until then.
    """

    target: str
    property: Property
    run: int
    operations: int


FOUND_ALONE: Mapping[int, Mapping[str, FoundAlone]] = {
    1: {
        "M31": FoundAlone("core", Property.PUBLISH_AFTER_COMMIT, 1, 1016),
        "M32": FoundAlone("core", Property.LEGAL_CALLS, 5, 6668),
        "M34": FoundAlone("core", Property.LAST_STEP, 6, 7107),
        "M35": FoundAlone("audited", Property.PROGRESS, 6, 4986),
        "M38": FoundAlone("skewed-core", Property.NO_STALE_DATA, 143, 176854),
        "M42": FoundAlone("skewed-core", Property.MATCH_HOLDS, 30, 39161),
        "M43": FoundAlone("policies", Property.MATCH_HOLDS, 6, 3266),
        "M44": FoundAlone("skewed-core", Property.CONSERVATION, 2, 3593),
        "M48": FoundAlone("wrong-books", Property.EVENTS_ARE_STATE, 0, 43),
        "M50": FoundAlone("audited", Property.STORED_ONCE, 0, 56),
        "M53": FoundAlone("skewed-core", Property.LEGAL_CALLS, 42, 54412),
        "M54": FoundAlone("eras", Property.CONSERVATION, 0, 211),
        "M57": FoundAlone("audited", Property.STORED_ONCE, 1, 1198),
        "M62": FoundAlone("eras", Property.STORED_ONCE, 0, 839),
        "M64": FoundAlone("eras", Property.NO_STALE_DATA, 0, 18),
        "M65": FoundAlone("disk", Property.LEGAL_CALLS, 1, 349),
        "M66": FoundAlone("eras", Property.NO_STALE_DATA, 0, 576),
        "M69": FoundAlone("eras", Property.NO_STALE_DATA, 0, 47),
        "M70": FoundAlone("eras", Property.STORED_ONCE, 0, 53),
        "M71": FoundAlone("eras", Property.STORED_ONCE, 0, 116),
        "M73": FoundAlone("audited", Property.EVENTS_ARE_STATE, 9, 6367),
        "M74": FoundAlone("audited", Property.EVENTS_ARE_STATE, 9, 6362),
        "M75": FoundAlone("audited", Property.EVENTS_ARE_STATE, 21, 17183),
        "M76": FoundAlone("audited", Property.EVENTS_ARE_STATE, 0, 871),
        "M77": FoundAlone("audited", Property.EVENTS_ARE_STATE, 2, 2084),
        "M78": FoundAlone("audited", Property.EVENTS_ARE_STATE, 66, 55506),
        "M80": FoundAlone("audited", Property.EVENTS_ARE_STATE, 0, 871),
        "M82": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 0, 38),
        "M83": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 2, 2509),
        "M84": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 0, 114),
        "M86": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 2, 1296),
        "M88": FoundAlone("restarts", Property.LEGAL_CALLS, 0, 3),
        "M91": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 1, 838),
        "M92": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 0, 3),
        "M93": FoundAlone("wrong-books", Property.MATCH_HOLDS, 0, 138),
        "M94": FoundAlone("wrong-books", Property.NO_REUSE_IN_FLIGHT, 0, 43),
        "M95": FoundAlone("wrong-books", Property.NO_STALE_DATA, 30, 24901),
        "M96": FoundAlone("audited", Property.STORED_ONCE, 9, 6887),
        "M97": FoundAlone("wrong-books", Property.MATCH_HOLDS, 7, 6051),
        "M98": FoundAlone("wrong-books", Property.PROGRESS, 0, 43),
        "M99": FoundAlone("wrong-books", Property.NO_REUSE_IN_FLIGHT, 5, 4540),
        "M100": FoundAlone("wrong-books", Property.NO_STALE_DATA, 0, 43),
        "M101": FoundAlone("wrong-books", Property.PROGRESS, 1, 145),
        "M102": FoundAlone("wrong-books", Property.ONE_RELEASE_PER_HOLD, 0, 138),
        "M103": FoundAlone("wrong-books", Property.STALE_REPORTS, 13, 10989),
        "M104": FoundAlone("workers", Property.PROGRESS, 0, 118),
        "M105": FoundAlone("workers", Property.PROGRESS, 62, 64318),
        "M106": FoundAlone("workers", Property.COPY_ORDER, 0, 2),
        "M107": FoundAlone("workers", Property.PROGRESS, 0, 35),
        "M108": FoundAlone("router", Property.EVENTS_ARE_STATE, 1, 1190),
        "M109": FoundAlone("router", Property.EVENTS_ARE_STATE, 1, 1190),
        "M110": FoundAlone("router", Property.EVENTS_ARE_STATE, 5, 1349),
        "M111": FoundAlone("restarts", Property.NO_STALE_DATA, 1, 841),
        "M112": FoundAlone("restarts", Property.CORRECT_BYTES, 3, 2727),
        "M113": FoundAlone("restarts", Property.CORRECT_BYTES, 2, 1265),
        "M115": FoundAlone("workers", Property.NO_REUSE_IN_FLIGHT, 17, 19642),
        "M117": FoundAlone("workers", Property.CORRECT_BYTES, 4, 4720),
        "M135": FoundAlone("audited", Property.STORED_SO_SERVED, 55, 46530),
    },
    2: {
        "M35": FoundAlone("audited", Property.PROGRESS, 1, 1274),
        "M38": FoundAlone("skewed-core", Property.NO_STALE_DATA, 9, 12313),
        "M42": FoundAlone("skewed-core", Property.MATCH_HOLDS, 1, 2138),
        "M43": FoundAlone("policies", Property.MATCH_HOLDS, 9, 6136),
        "M44": FoundAlone("skewed-core", Property.LEGAL_CALLS, 2, 2825),
        "M48": FoundAlone("wrong-books", Property.EVENTS_ARE_STATE, 0, 6),
        "M50": FoundAlone("audited", Property.STORED_ONCE, 0, 134),
        "M53": FoundAlone("skewed-core", Property.LEGAL_CALLS, 93, 118083),
        "M54": FoundAlone("eras", Property.CONSERVATION, 1, 1103),
        "M57": FoundAlone("audited", Property.STORED_ONCE, 0, 181),
        "M62": FoundAlone("eras", Property.STORED_ONCE, 11, 12406),
        "M64": FoundAlone("eras", Property.NO_STALE_DATA, 0, 766),
        "M65": FoundAlone("disk", Property.LEGAL_CALLS, 2, 2966),
        "M66": FoundAlone("eras", Property.NO_STALE_DATA, 3, 2977),
        "M69": FoundAlone("eras", Property.NO_STALE_DATA, 0, 487),
        "M70": FoundAlone("eras", Property.STORED_ONCE, 1, 1713),
        "M71": FoundAlone("eras", Property.STORED_ONCE, 3, 2483),
        "M73": FoundAlone("audited", Property.EVENTS_ARE_STATE, 1, 500),
        "M74": FoundAlone("audited", Property.EVENTS_ARE_STATE, 2, 1839),
        "M76": FoundAlone("audited", Property.EVENTS_ARE_STATE, 2, 1885),
        "M77": FoundAlone("audited", Property.EVENTS_ARE_STATE, 1, 558),
        "M78": FoundAlone("audited", Property.EVENTS_ARE_STATE, 1, 1363),
        "M80": FoundAlone("audited", Property.EVENTS_ARE_STATE, 10, 7923),
        "M82": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 0, 31),
        "M83": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 1, 1337),
        "M84": FoundAlone("log-ahead", Property.EVENTS_ARE_STATE, 2, 2157),
        "M86": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 5, 6002),
        "M87": FoundAlone("log", Property.EVENTS_ARE_STATE, 40, 9972),
        "M88": FoundAlone("restarts", Property.LEGAL_CALLS, 0, 7),
        "M91": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 0, 123),
        "M92": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 0, 7),
        "M93": FoundAlone("wrong-books", Property.MATCH_HOLDS, 0, 88),
        "M94": FoundAlone("wrong-books", Property.NO_REUSE_IN_FLIGHT, 0, 97),
        "M95": FoundAlone("wrong-books", Property.NO_STALE_DATA, 28, 19562),
        "M96": FoundAlone("audited", Property.STORED_ONCE, 11, 8435),
        "M97": FoundAlone("wrong-books", Property.MATCH_HOLDS, 28, 19266),
        "M98": FoundAlone("wrong-books", Property.PROGRESS, 0, 20),
        "M99": FoundAlone("wrong-books", Property.NO_REUSE_IN_FLIGHT, 5, 4798),
        "M100": FoundAlone("wrong-books", Property.NO_STALE_DATA, 0, 6),
        "M101": FoundAlone("wrong-books", Property.PROGRESS, 0, 73),
        "M102": FoundAlone("wrong-books", Property.ONE_RELEASE_PER_HOLD, 0, 88),
        "M103": FoundAlone("wrong-books", Property.STALE_REPORTS, 8, 5573),
        "M104": FoundAlone("workers", Property.PROGRESS, 0, 250),
        "M105": FoundAlone("workers", Property.PROGRESS, 8, 9982),
        "M106": FoundAlone("workers", Property.COPY_ORDER, 0, 33),
        "M107": FoundAlone("workers", Property.PROGRESS, 0, 28),
        "M108": FoundAlone("router", Property.EVENTS_ARE_STATE, 3, 864),
        "M109": FoundAlone("router", Property.EVENTS_ARE_STATE, 0, 28),
        "M110": FoundAlone("router", Property.EVENTS_ARE_STATE, 20, 4828),
        "M111": FoundAlone("restarts", Property.NO_STALE_DATA, 0, 44),
        "M112": FoundAlone("restarts", Property.CORRECT_BYTES, 0, 53),
        "M113": FoundAlone("restarts", Property.CORRECT_BYTES, 0, 99),
        "M115": FoundAlone("workers", Property.NO_REUSE_IN_FLIGHT, 3, 3770),
        "M117": FoundAlone("workers", Property.CORRECT_BYTES, 3, 3910),
    },
}
"""Seed -> mutant -> how it is found."""

SEARCHED_FOR: Mapping[int, int] = {1: 59, 2: 54}
"""Seed -> how many mutants were searched for."""
