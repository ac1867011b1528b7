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
    "B01": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 8, 1158),
    "B02": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 9, 9175),
    "B03": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 6, 5588),
    "B04": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 8, 113029
    ),
    "B05": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_REUSE_IN_FLIGHT, 24, 114382
    ),
    "B06": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "core", Property.ONE_RELEASE_PER_HOLD, 5, 1595
    ),
    "B07": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STORED_ONCE, 5, 1402),
    "B08": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PROGRESS, 2, 1365),
    "B09": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PROGRESS, 8, 4040),
    "B10": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 1, 1531),
    "B11": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 1, 1924),
    "B12": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PUBLISH_AFTER_COMMIT, 9, 24157
    ),
    "B13": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_REUSE_IN_FLIGHT, 5, 20
    ),
    "B14": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.ONE_RELEASE_PER_HOLD, 6, 23
    ),
    "B15": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.PROGRESS, 5, 1343),
    "B16": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 6, 1212),
    "B17": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 8, 7732),
    "B18": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 151, 242327
    ),
    "B19": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 7, 7899),
    "B20": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 8, 1147),
    "B21": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LAST_STEP, 4, 5),
    "B22": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 7, 13937),
    "B23": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.STORED_ONCE, 36, 210511),
    "B24": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.EVENTS_ARE_STATE, 5, 7600
    ),
    "B25": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.LEGAL_CALLS, 2, 7229),
    "B26": AloneBy(
        "kvsm check serving --scope router --states 1000",
        "serving, router",
        Property.EVENTS_ARE_STATE,
        15,
        249,
    ),
    "B27": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_STALE_DATA, 159, 113055
    ),
    "B28": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 13, 11814
    ),
    "B29": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.ONE_RELEASE_PER_HOLD, 8, 1344
    ),
    "B30": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 1, 1349),
    "B31": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "core", Property.ONE_RELEASE_PER_HOLD, 8, 17225
    ),
    "B32": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 8, 1603),
    "B34": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.PROGRESS, 18, 24972),
    "B35": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 5, 1595),
    "B36": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 1, 1158),
    "B37": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "copies", Property.COPY_ORDER, 7, 5567),
    "B38": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_REUSE_IN_FLIGHT, 5, 20
    ),
    "B39": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STALE_REPORTS, 7, 24225),
    "B40": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.LEGAL_CALLS, 9, 137352),
    "B41": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.STORED_ONCE, 5, 1397),
    "B42": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 5, 1397),
    "B43": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 5, 1397),
    "B44": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.CONSERVATION, 2, 1356),
    "B45": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_STALE_DATA, 4, 8567),
    "B46": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 6, 3910),
    "B47": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.MATCH_HOLDS, 18, 15765),
    "B48": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.NO_STALE_DATA, 5, 17),
    "B54": AloneBy(
        "kvsm check tiers --scope ranks --states 1000", "tiers, ranks", Property.PUBLISH_AFTER_COMMIT, 6, 166
    ),
    "B56": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.CONSERVATION, 4, 12822),
    "B57": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.CONSERVATION, 20, 65148),
    "B58": AloneBy(
        "kvsm check tiers --scope restarts --states 1000", "tiers, restarts", Property.NO_STALE_DATA, 6, 195
    ),
    "B59": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.MATCH_HOLDS, 15, 33982),
    "B60": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.PROGRESS, 11, 34179),
    "B61": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.LEGAL_CALLS, 3, 12821),
    "B62": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.NO_STALE_DATA, 6, 100061),
    "B63": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 5, 23920),
    "B64": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.LEGAL_CALLS, 31, 15798),
    "B65": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 13, 12394
    ),
    "B66": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.CONSERVATION, 4, 121042),
    "B68": AloneBy(
        "kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.CORRECT_BYTES, 27, 90222
    ),
    "B69": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 6, 3886),
    "B70": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "serving", Property.PROGRESS, 1, 20977),
    "B71": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "tiers", Property.MATCH_HOLDS, 14, 33922),
    "B72": AloneBy("kvsm fuzz --target all --seed 1 --runs 300", "core", Property.EVENTS_ARE_STATE, 3, 24266),
}
