"""The outcome of `museum.product_alone`: which command finds which exhibit, after how many steps.

An exhibit that is not here was found by none of the commands within the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsm.properties import Property


class AloneBy(NamedTuple):
    """The first failure that a shipped command reports for an exhibit.

    command: the command, without options for output and processes.
    target: the target of the walk, or the model with its scope.
    property: the property that it reports as broken.
    steps: the length of the path to it; of a walk, after the reduction.
    effort: the number of operations of the walk, or of states of all models, until then.
    """

    command: str
    target: str
    property: Property
    steps: int
    effort: int


ALONE: Mapping[str, AloneBy] = {
    "B01": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "hand-over", Property.LEGAL_CALLS, 2, 589),
    "B02": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 4, 36244),
    "B03": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 6, 68926),
    "B04": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.CORRECT_BYTES, 15, 53553),
    "B05": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.NO_REUSE_IN_FLIGHT, 25, 1643
    ),
    "B06": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 33, 581),
    "B07": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STORED_ONCE, 6, 846),
    "B08": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PROGRESS, 2, 806),
    "B09": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PROGRESS, 8, 1320),
    "B10": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 1, 13063),
    "B11": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 1, 769),
    "B12": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STALE_REPORTS, 7, 17930),
    "B13": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.NO_REUSE_IN_FLIGHT, 8, 20
    ),
    "B14": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.ONE_RELEASE_PER_HOLD, 10, 22206
    ),
    "B15": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STALE_REPORTS, 4, 2658),
    "B16": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 6, 1499),
    "B17": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 8, 1487),
    "B18": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 41, 55425),
    "B19": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 7, 1560),
    "B20": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "hand-over", Property.LEGAL_CALLS, 3, 587),
    "B21": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LAST_STEP, 14, 19),
    "B22": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 114, 1625),
    "B23": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.STORED_ONCE, 8, 87007),
    "B24": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.COPY_ORDER, 3, 6932),
    "B25": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.LEGAL_CALLS, 3, 36269),
    "B26": AloneBy(
        "kvsm check serving --scope router --states 1000",
        "serving, router",
        Property.EVENTS_ARE_STATE,
        15,
        249,
    ),
    "B27": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.CORRECT_BYTES, 11, 1522),
    "B28": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 9, 1476),
    "B29": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.ONE_RELEASE_PER_HOLD, 10, 581
    ),
    "B30": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 2, 1420),
    "B31": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "core", Property.ONE_RELEASE_PER_HOLD, 7, 2834
    ),
    "B32": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 10, 581),
    "B33": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.ONE_RELEASE_PER_HOLD, 35, 110705
    ),
    "B34": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.EVENTS_ARE_STATE, 135, 1653
    ),
    "B35": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 6, 1313),
    "B36": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 11, 14),
    "B37": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 5, 5103),
    "B38": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.NO_REUSE_IN_FLIGHT, 8, 20
    ),
    "B39": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STALE_REPORTS, 7, 5631),
    "B40": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 7, 75875),
    "B41": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.STORED_SO_SERVED, 10, 581
    ),
    "B42": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 6, 840),
    "B43": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 6, 840),
    "B44": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.CONSERVATION, 8, 420),
    "B45": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.NO_STALE_DATA, 7, 9),
    "B46": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 6, 1190),
    "B47": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.STORED_SO_SERVED, 9, 1509
    ),
    "B48": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.NO_STALE_DATA, 8, 20),
    "B54": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.PUBLISH_AFTER_COMMIT, 9, 119415
    ),
    "B56": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.CONSERVATION, 7, 20428),
    "B57": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.CONSERVATION, 19, 20875),
    "B58": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.NO_STALE_DATA, 7, 25637),
    "B59": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.FAILURE_IS_NOT_SUCCESS, 22, 119411
    ),
    "B60": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.STORED_SO_SERVED, 13, 20875
    ),
    "B61": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.LEGAL_CALLS, 5, 20423),
    "B62": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.NO_STALE_DATA, 9, 79811),
    "B63": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 6, 23563),
    "B64": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 26, 1571),
    "B65": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 11, 84585
    ),
    "B66": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.NO_STALE_DATA, 8, 20475),
    "B67": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "layers", Property.LEGAL_CALLS, 2, 3),
    "B68": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 36, 22425
    ),
    "B69": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 6, 1166),
    "B70": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.PROGRESS, 2, 35580),
    "B71": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.MATCH_HOLDS, 13, 20875),
    "B72": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 3, 2690),
}
