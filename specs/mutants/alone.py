"""Which mutants a target of `kvsm fuzz` finds by itself, with two seeds.

This is a lower bound: each mutant was searched for with the target that is nearest to the checker which
finds it, and with `layers` or `serving`. The budget of a target is that of `museum.product_alone`, whose
`--mutants` searches with all targets.
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
        "M54": FoundAlone("eras", Property.CONSERVATION, 0, 211),
        "M62": FoundAlone("eras", Property.STORED_ONCE, 0, 839),
        "M64": FoundAlone("eras", Property.NO_STALE_DATA, 0, 18),
        "M65": FoundAlone("disk", Property.LEGAL_CALLS, 1, 349),
        "M66": FoundAlone("eras", Property.NO_STALE_DATA, 0, 576),
        "M69": FoundAlone("eras", Property.NO_STALE_DATA, 0, 47),
        "M70": FoundAlone("eras", Property.STORED_ONCE, 0, 53),
        "M71": FoundAlone("eras", Property.STORED_ONCE, 0, 116),
        "M86": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 2, 1296),
        "M88": FoundAlone("restarts", Property.LEGAL_CALLS, 0, 3),
        "M91": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 1, 838),
        "M92": FoundAlone("restarts", Property.EVENTS_ARE_STATE, 0, 3),
        "M111": FoundAlone("restarts", Property.NO_STALE_DATA, 1, 841),
    },
    2: {},
}
"""Seed -> mutant -> how it is found."""
