"""The outcome of `museum.product_alone` with each of its seeds: which command finds which exhibit.

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
    "B01": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 1, 725),
    "B02": AloneBy("kvsm fuzz --target copies --seed 1 --runs 500", "copies", Property.COPY_ORDER, 8, 561),
    "B03": AloneBy("kvsm fuzz --target copies --seed 1 --runs 500", "copies", Property.COPY_ORDER, 19, 22),
    "B04": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.CORRECT_BYTES, 14, 1507
    ),
    "B05": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.NO_REUSE_IN_FLIGHT, 31, 20172
    ),
    "B06": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 5, 974
    ),
    "B07": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 5, 781),
    "B08": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PROGRESS, 2, 263),
    "B09": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PROGRESS, 8, 3419),
    "B10": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 1, 910),
    "B11": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 1, 1303),
    "B12": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STALE_REPORTS, 5, 13085),
    "B13": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.NO_REUSE_IN_FLIGHT, 3, 370
    ),
    "B14": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.NO_REUSE_IN_FLIGHT, 11, 572
    ),
    "B15": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STALE_REPORTS, 4, 371),
    "B16": AloneBy("kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.LEGAL_CALLS, 6, 646),
    "B17": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.CORRECT_BYTES, 5, 414
    ),
    "B18": AloneBy("kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 44, 4994),
    "B19": AloneBy("kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.LEGAL_CALLS, 2, 567),
    "B20": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 2, 270),
    "B21": AloneBy("kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.LAST_STEP, 4, 16),
    "B22": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 8, 7181),
    "B23": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.STORED_ONCE, 22, 2128
    ),
    "B24": AloneBy("kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.STORED_ONCE, 5, 570),
    "B25": AloneBy("kvsm fuzz --target copies --seed 1 --runs 500", "copies", Property.LEGAL_CALLS, 3, 73),
    "B26": AloneBy(
        "kvsm fuzz --target router --seed 1 --runs 200", "router", Property.EVENTS_ARE_STATE, 15, 3945
    ),
    "B27": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.FULL_OFFLOAD, 153, 768
    ),
    "B28": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.CORRECT_BYTES, 11, 1015
    ),
    "B29": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.ONE_RELEASE_PER_HOLD, 6, 414
    ),
    "B30": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 1, 1),
    "B31": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 7, 8386
    ),
    "B32": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 8, 982),
    "B33": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.ONE_RELEASE_PER_HOLD, 14, 14601
    ),
    "B34": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.FAILURE_IS_NOT_SUCCESS, 3, 64
    ),
    "B35": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.CONSERVATION, 5, 974),
    "B36": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 2, 753),
    "B37": AloneBy("kvsm fuzz --target copies --seed 1 --runs 500", "copies", Property.COPY_ORDER, 5, 5),
    "B38": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PUBLISH_AFTER_COMMIT, 2, 53
    ),
    "B39": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STALE_REPORTS, 16, 7142),
    "B40": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 10, 44669),
    "B41": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 5, 776),
    "B42": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.CONSERVATION, 5, 776),
    "B43": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.CONSERVATION, 5, 776),
    "B44": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.CONSERVATION, 2, 154),
    "B45": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.NO_STALE_DATA, 4, 16
    ),
    "B46": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.EVENTS_ARE_STATE, 6, 3289),
    "B47": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_SO_SERVED, 6, 12589
    ),
    "B48": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.NO_STALE_DATA, 5, 568
    ),
    "B49": AloneBy("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.NO_STALE_DATA, 3, 177),
    "B50": AloneBy("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.NO_STALE_DATA, 3, 259),
    "B51": AloneBy("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.NO_STALE_DATA, 3, 259),
    "B52": AloneBy("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.CORRECT_BYTES, 2, 155),
    "B53": AloneBy(
        "kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.FAILURE_IS_NOT_SUCCESS, 1, 9
    ),
    "B54": AloneBy(
        "kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.PUBLISH_AFTER_COMMIT, 83, 145
    ),
    "B55": AloneBy("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.PROGRESS, 2, 155),
    "B56": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.CONSERVATION, 5, 32),
    "B57": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.CONSERVATION, 7, 158),
    "B58": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.NO_STALE_DATA, 5, 4764),
    "B59": AloneBy(
        "kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.FAILURE_IS_NOT_SUCCESS, 18, 1251
    ),
    "B60": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.PROGRESS, 7, 49),
    "B61": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.LEGAL_CALLS, 4, 30),
    "B62": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.NO_STALE_DATA, 6, 2169),
    "B63": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.LEGAL_CALLS, 5, 1845
    ),
    "B64": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.LEGAL_CALLS, 36, 1154
    ),
    "B65": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.CORRECT_BYTES, 4, 995
    ),
    "B66": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.NO_STALE_DATA, 7, 3930),
    "B67": AloneBy("kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 2, 765),
    "B68": AloneBy(
        "kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.CORRECT_BYTES, 40, 4025
    ),
    "B69": AloneBy("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.EVENTS_ARE_STATE, 6, 3265),
    "B70": AloneBy("kvsm fuzz --target serving --seed 1 --runs 200", "serving", Property.PROGRESS, 10, 9824),
    "B71": AloneBy("kvsm fuzz --target tiers --seed 1 --runs 150", "tiers", Property.MATCH_HOLDS, 7, 49),
    "B72": AloneBy(
        "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.EVENTS_ARE_STATE, 3, 12606
    ),
}
"""With the first seed."""

ALONE_AGAIN: Mapping[str, AloneBy] = {
    "B01": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 1, 4),
    "B02": AloneBy("kvsm fuzz --target copies --seed 2 --runs 500", "copies", Property.COPY_ORDER, 17, 62),
    "B03": AloneBy("kvsm fuzz --target copies --seed 2 --runs 500", "copies", Property.COPY_ORDER, 8, 25),
    "B04": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 14, 18567
    ),
    "B05": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.NO_REUSE_IN_FLIGHT, 56, 569
    ),
    "B06": AloneBy(
        "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 6, 142
    ),
    "B07": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 6, 56),
    "B08": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PROGRESS, 2, 508),
    "B09": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PROGRESS, 7, 1444),
    "B10": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 1, 3183),
    "B11": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 2, 733),
    "B12": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STALE_REPORTS, 5, 3936),
    "B13": AloneBy(
        "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.NO_REUSE_IN_FLIGHT, 15, 2414
    ),
    "B14": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.ONE_RELEASE_PER_HOLD, 6, 142
    ),
    "B15": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STALE_REPORTS, 4, 3156),
    "B16": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.LEGAL_CALLS, 17, 110
    ),
    "B17": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 1, 2242
    ),
    "B18": AloneBy("kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 29, 419),
    "B19": AloneBy("kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.LEGAL_CALLS, 7, 340),
    "B20": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 5, 60),
    "B21": AloneBy("kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.LAST_STEP, 6, 673),
    "B22": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 7, 1846),
    "B23": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.STORED_ONCE, 199, 2588
    ),
    "B24": AloneBy("kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.STORED_ONCE, 4, 95),
    "B25": AloneBy("kvsm fuzz --target copies --seed 2 --runs 500", "copies", Property.LEGAL_CALLS, 9, 57),
    "B26": AloneBy(
        "kvsm fuzz --target router --seed 2 --runs 200", "router", Property.EVENTS_ARE_STATE, 10, 21569
    ),
    "B27": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 38, 2522
    ),
    "B28": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 9, 2328
    ),
    "B29": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.ONE_RELEASE_PER_HOLD, 5, 340
    ),
    "B30": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 1, 22),
    "B31": AloneBy(
        "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 7, 5617
    ),
    "B32": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 7, 301),
    "B33": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.ONE_RELEASE_PER_HOLD, 22, 18580
    ),
    "B34": AloneBy(
        "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.FAILURE_IS_NOT_SUCCESS, 4, 641
    ),
    "B35": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.CONSERVATION, 6, 142),
    "B36": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 2, 8),
    "B37": AloneBy("kvsm fuzz --target copies --seed 2 --runs 500", "copies", Property.COPY_ORDER, 5, 38),
    "B38": AloneBy(
        "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PUBLISH_AFTER_COMMIT, 2, 11
    ),
    "B39": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STALE_REPORTS, 7, 7890),
    "B40": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 8, 31303),
    "B41": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 5, 1148),
    "B42": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.CONSERVATION, 5, 1148),
    "B43": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.CONSERVATION, 5, 1148),
    "B44": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.CONSERVATION, 2, 632),
    "B45": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.NO_STALE_DATA, 1, 5352
    ),
    "B46": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.EVENTS_ARE_STATE, 5, 1190),
    "B47": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_SO_SERVED, 4, 7123),
    "B48": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.NO_STALE_DATA, 4, 64
    ),
    "B49": AloneBy("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.NO_STALE_DATA, 4, 33),
    "B50": AloneBy("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.NO_STALE_DATA, 57, 189),
    "B51": AloneBy("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.NO_STALE_DATA, 36, 189),
    "B52": AloneBy("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.CORRECT_BYTES, 7, 62),
    "B53": AloneBy(
        "kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.FAILURE_IS_NOT_SUCCESS, 1, 7
    ),
    "B54": AloneBy(
        "kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.PUBLISH_AFTER_COMMIT, 4, 87
    ),
    "B55": AloneBy("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.PROGRESS, 2, 1578),
    "B56": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.CONSERVATION, 5, 32),
    "B57": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.CONSERVATION, 20, 243),
    "B58": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.NO_STALE_DATA, 21, 2676),
    "B59": AloneBy(
        "kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.FAILURE_IS_NOT_SUCCESS, 12, 3179
    ),
    "B60": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.PROGRESS, 7, 243),
    "B61": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.LEGAL_CALLS, 4, 31),
    "B62": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.NO_STALE_DATA, 6, 763),
    "B63": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.LEGAL_CALLS, 5, 23772
    ),
    "B64": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.LEGAL_CALLS, 108, 569
    ),
    "B65": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 16, 2700
    ),
    "B66": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.NO_STALE_DATA, 6, 85),
    "B67": AloneBy("kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 2, 164),
    "B68": AloneBy(
        "kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.CORRECT_BYTES, 18, 177
    ),
    "B69": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.EVENTS_ARE_STATE, 4, 3021),
    "B70": AloneBy("kvsm fuzz --target serving --seed 2 --runs 200", "serving", Property.PROGRESS, 1, 3331),
    "B71": AloneBy("kvsm fuzz --target tiers --seed 2 --runs 150", "tiers", Property.MATCH_HOLDS, 7, 243),
    "B72": AloneBy("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.EVENTS_ARE_STATE, 3, 8994),
}
"""With the second seed."""
