"""The outcome of `museum.product_alone --mutants` with each of its seeds: which command finds which mutant.

A mutant that is neither in `FOUND_ALONE` nor in `UNFOUND` has not been searched for with that seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvsm.properties import Property


class FoundAlone(NamedTuple):
    """The first failure that a shipped command reports for a mutant.

    command: the command, without options for output and processes.
    target: the target of the walk, or the model with its scope.
    property: the property that it reports as broken.
    effort: the number of operations of the walk, or of states of all models, until then.
    """

    command: str
    target: str
    property: Property
    effort: int


FOUND_ALONE: Mapping[int, Mapping[str, FoundAlone]] = {
    1: {
        "M01": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.MATCH_HOLDS, 7687
        ),
        "M02": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 677
        ),
        "M03": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 1465
        ),
        "M04": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 16417
        ),
        "M05": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.FAILURE_IS_NOT_SUCCESS, 33905
        ),
        "M06": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 861
        ),
        "M07": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 871
        ),
        "M08": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 19950
        ),
        "M09": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 39556
        ),
        "M10": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 3871
        ),
        "M100": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.NO_STALE_DATA, 43
        ),
        "M101": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.PROGRESS, 145
        ),
        "M102": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50",
            "wrong-books",
            Property.ONE_RELEASE_PER_HOLD,
            138,
        ),
        "M103": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.STALE_REPORTS, 10989
        ),
        "M104": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.PROGRESS, 118
        ),
        "M105": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.PROGRESS, 64318
        ),
        "M106": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.COPY_ORDER, 2
        ),
        "M107": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.PROGRESS, 35
        ),
        "M108": FoundAlone(
            "kvsm fuzz --target router --seed 1 --runs 200", "router", Property.EVENTS_ARE_STATE, 1190
        ),
        "M109": FoundAlone(
            "kvsm fuzz --target router --seed 1 --runs 200", "router", Property.EVENTS_ARE_STATE, 1190
        ),
        "M11": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 65
        ),
        "M110": FoundAlone(
            "kvsm fuzz --target router --seed 1 --runs 200", "router", Property.EVENTS_ARE_STATE, 1349
        ),
        "M111": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.NO_STALE_DATA, 841
        ),
        "M112": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.CORRECT_BYTES, 2727
        ),
        "M113": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.CORRECT_BYTES, 1265
        ),
        "M115": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.NO_REUSE_IN_FLIGHT, 19642
        ),
        "M117": FoundAlone(
            "kvsm fuzz --target workers --seed 1 --runs 200", "workers", Property.CORRECT_BYTES, 4720
        ),
        "M12": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.NO_REUSE_IN_FLIGHT, 1569
        ),
        "M128": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 3088
        ),
        "M129": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 949
        ),
        "M130": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 1929
        ),
        "M131": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 1533
        ),
        "M132": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 878
        ),
        "M133": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 1003
        ),
        "M134": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 898
        ),
        "M135": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_SO_SERVED, 46530
        ),
        "M136": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 861
        ),
        "M15": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.ONE_RELEASE_PER_HOLD, 2431
        ),
        "M150": FoundAlone(
            "kvsm check threads --scope disk-interval --states 5000",
            "threads",
            Property.FAILURE_IS_NOT_SUCCESS,
            157,
        ),
        "M151": FoundAlone(
            "kvsm fuzz --target log --seed 1 --runs 150", "log", Property.EVENTS_ARE_STATE, 932
        ),
        "M16": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 717
        ),
        "M160": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.STALE_REPORTS, 43
        ),
        "M161": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.PROGRESS, 221
        ),
        "M162": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.PROGRESS, 158
        ),
        "M17": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.NO_STALE_DATA, 17601
        ),
        "M19": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 939
        ),
        "M20": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 973
        ),
        "M21": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_SO_SERVED, 997
        ),
        "M23": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 745
        ),
        "M25": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 530
        ),
        "M26": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.PROGRESS, 21109
        ),
        "M27": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.STORED_ONCE, 12721
        ),
        "M28": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.ONE_TOKEN_LEFT, 662
        ),
        "M29": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.FULL_OFFLOAD, 430
        ),
        "M30": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 9045
        ),
        "M31": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PUBLISH_AFTER_COMMIT, 1016
        ),
        "M32": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 6668),
        "M33": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PROGRESS, 3419),
        "M34": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LAST_STEP, 7107),
        "M35": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.PROGRESS, 4986
        ),
        "M36": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PROGRESS, 765),
        "M37": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 128690
        ),
        "M38": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150",
            "skewed-core",
            Property.NO_STALE_DATA,
            176854,
        ),
        "M39": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.NO_STALE_DATA, 6391
        ),
        "M40": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 14171),
        "M42": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.MATCH_HOLDS, 39161
        ),
        "M43": FoundAlone(
            "kvsm fuzz --target policies --seed 1 --runs 200", "policies", Property.MATCH_HOLDS, 3266
        ),
        "M44": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.CONSERVATION, 3593
        ),
        "M45": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.CONSERVATION, 2924),
        "M47": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 982),
        "M48": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.EVENTS_ARE_STATE, 43
        ),
        "M49": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 7086),
        "M50": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_ONCE, 56
        ),
        "M51": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 7554),
        "M52": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 5363),
        "M53": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.LEGAL_CALLS, 54412
        ),
        "M54": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.CONSERVATION, 211),
        "M55": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 5344
        ),
        "M56": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.NO_STALE_DATA, 89688
        ),
        "M57": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_ONCE, 1198
        ),
        "M58": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.EVENTS_ARE_STATE, 14255
        ),
        "M60": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.STORED_ONCE, 5269),
        "M61": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.NO_REUSE_IN_FLIGHT, 14712
        ),
        "M62": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.STORED_ONCE, 839),
        "M64": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.NO_STALE_DATA, 18),
        "M65": FoundAlone("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.LEGAL_CALLS, 349),
        "M66": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.NO_STALE_DATA, 576),
        "M68": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.CONSERVATION, 1746),
        "M69": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.NO_STALE_DATA, 47),
        "M70": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.STORED_ONCE, 53),
        "M71": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.STORED_ONCE, 116),
        "M73": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 6367
        ),
        "M74": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 6362
        ),
        "M75": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 17183
        ),
        "M76": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 871
        ),
        "M77": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 2084
        ),
        "M78": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 55506
        ),
        "M79": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 6362
        ),
        "M80": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.EVENTS_ARE_STATE, 871
        ),
        "M82": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 38
        ),
        "M83": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 2509
        ),
        "M84": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 114
        ),
        "M85": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.NO_STALE_DATA, 25
        ),
        "M86": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 1296
        ),
        "M88": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.LEGAL_CALLS, 3
        ),
        "M89": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.LEGAL_CALLS, 1524
        ),
        "M90": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 1 --runs 200", "log-ahead", Property.LEGAL_CALLS, 303
        ),
        "M91": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 838
        ),
        "M92": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 3
        ),
        "M93": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.MATCH_HOLDS, 138
        ),
        "M94": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50",
            "wrong-books",
            Property.NO_REUSE_IN_FLIGHT,
            43,
        ),
        "M95": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.NO_STALE_DATA, 24901
        ),
        "M96": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_ONCE, 6887
        ),
        "M97": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.MATCH_HOLDS, 6051
        ),
        "M98": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.PROGRESS, 43
        ),
        "M99": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50",
            "wrong-books",
            Property.NO_REUSE_IN_FLIGHT,
            4540,
        ),
    },
    2: {
        "M01": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.CORRECT_BYTES, 18212
        ),
        "M02": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 612
        ),
        "M03": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 3921
        ),
        "M04": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.CORRECT_BYTES, 9501
        ),
        "M06": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 52
        ),
        "M07": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.CORRECT_BYTES, 1814
        ),
        "M09": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 31818
        ),
        "M10": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 19155
        ),
        "M100": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.NO_STALE_DATA, 6
        ),
        "M101": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.PROGRESS, 73
        ),
        "M102": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50",
            "wrong-books",
            Property.ONE_RELEASE_PER_HOLD,
            88,
        ),
        "M103": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.STALE_REPORTS, 5573
        ),
        "M104": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.PROGRESS, 250
        ),
        "M105": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.PROGRESS, 9982
        ),
        "M106": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.COPY_ORDER, 33
        ),
        "M107": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.PROGRESS, 28
        ),
        "M108": FoundAlone(
            "kvsm fuzz --target router --seed 2 --runs 200", "router", Property.EVENTS_ARE_STATE, 864
        ),
        "M109": FoundAlone(
            "kvsm fuzz --target router --seed 2 --runs 200", "router", Property.EVENTS_ARE_STATE, 28
        ),
        "M11": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 19114
        ),
        "M110": FoundAlone(
            "kvsm fuzz --target router --seed 2 --runs 200", "router", Property.EVENTS_ARE_STATE, 4828
        ),
        "M111": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.NO_STALE_DATA, 44
        ),
        "M112": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.CORRECT_BYTES, 53
        ),
        "M113": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.CORRECT_BYTES, 99
        ),
        "M115": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.NO_REUSE_IN_FLIGHT, 3770
        ),
        "M117": FoundAlone(
            "kvsm fuzz --target workers --seed 2 --runs 200", "workers", Property.CORRECT_BYTES, 3910
        ),
        "M12": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.NO_REUSE_IN_FLIGHT, 8727
        ),
        "M128": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 17374
        ),
        "M129": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 328
        ),
        "M130": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 243
        ),
        "M131": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 344
        ),
        "M132": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 705
        ),
        "M133": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 344
        ),
        "M134": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 717
        ),
        "M135": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 717
        ),
        "M136": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 19
        ),
        "M14": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.NO_REUSE_IN_FLIGHT, 26773
        ),
        "M15": FoundAlone("kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.PROGRESS, 71),
        "M16": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.CORRECT_BYTES, 202
        ),
        "M150": FoundAlone(
            "kvsm check threads --scope disk-interval --states 5000",
            "threads",
            Property.FAILURE_IS_NOT_SUCCESS,
            157,
        ),
        "M151": FoundAlone(
            "kvsm fuzz --target log --seed 2 --runs 150", "log", Property.EVENTS_ARE_STATE, 16966
        ),
        "M152": FoundAlone(
            "kvsm fuzz --target hand-over --seed 2 --runs 200",
            "hand-over",
            Property.ONE_RELEASE_PER_HOLD,
            711,
        ),
        "M153": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.EVENTS_ARE_STATE, 30003
        ),
        "M160": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.STALE_REPORTS, 49
        ),
        "M161": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.PROGRESS, 3168
        ),
        "M162": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.PROGRESS, 6
        ),
        "M19": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.LEGAL_CALLS, 3856
        ),
        "M20": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 728
        ),
        "M21": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.MATCH_HOLDS, 4475
        ),
        "M23": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 618
        ),
        "M24": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 46670
        ),
        "M25": FoundAlone("kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.PROGRESS, 943),
        "M26": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.PROGRESS, 30981
        ),
        "M27": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 2333
        ),
        "M28": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_SO_SERVED, 198
        ),
        "M29": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.STORED_ONCE, 603
        ),
        "M30": FoundAlone(
            "kvsm fuzz --target layers --seed 2 --runs 200", "layers", Property.CORRECT_BYTES, 4101
        ),
        "M31": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PUBLISH_AFTER_COMMIT, 1637
        ),
        "M32": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 16590),
        "M33": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PROGRESS, 1444),
        "M34": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LAST_STEP, 41),
        "M35": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.PROGRESS, 1274
        ),
        "M36": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.PROGRESS, 1461),
        "M37": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 78900),
        "M38": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.NO_STALE_DATA, 12313
        ),
        "M39": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.NO_STALE_DATA, 168),
        "M40": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 88887),
        "M42": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.MATCH_HOLDS, 2138
        ),
        "M43": FoundAlone(
            "kvsm fuzz --target policies --seed 2 --runs 200", "policies", Property.MATCH_HOLDS, 6136
        ),
        "M44": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.LEGAL_CALLS, 2825
        ),
        "M45": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.CONSERVATION, 58),
        "M47": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.LEGAL_CALLS, 1483),
        "M48": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.EVENTS_ARE_STATE, 6
        ),
        "M49": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 1203),
        "M50": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.STORED_ONCE, 134
        ),
        "M51": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 21289),
        "M52": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 485),
        "M53": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.LEGAL_CALLS, 118083
        ),
        "M54": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.CONSERVATION, 1103),
        "M55": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.ONE_RELEASE_PER_HOLD, 462
        ),
        "M56": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.NO_STALE_DATA, 6886
        ),
        "M57": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.STORED_ONCE, 181
        ),
        "M58": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.EVENTS_ARE_STATE, 486
        ),
        "M60": FoundAlone("kvsm fuzz --target core --seed 2 --runs 500", "core", Property.STORED_ONCE, 4940),
        "M61": FoundAlone(
            "kvsm fuzz --target core --seed 2 --runs 500", "core", Property.NO_REUSE_IN_FLIGHT, 8919
        ),
        "M62": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 12406),
        "M64": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 766),
        "M65": FoundAlone("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.LEGAL_CALLS, 2966),
        "M66": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 2977),
        "M68": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.CONSERVATION, 226),
        "M69": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 487),
        "M70": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 1713),
        "M71": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 2483),
        "M73": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 500
        ),
        "M74": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 1839
        ),
        "M75": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 4874
        ),
        "M76": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 1885
        ),
        "M77": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 558
        ),
        "M78": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 1363
        ),
        "M79": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 267
        ),
        "M80": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 7923
        ),
        "M82": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 31
        ),
        "M83": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 1337
        ),
        "M84": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 2157
        ),
        "M85": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.NO_STALE_DATA, 299
        ),
        "M86": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 6002
        ),
        "M87": FoundAlone(
            "kvsm fuzz --target log --seed 2 --runs 150", "log", Property.EVENTS_ARE_STATE, 9972
        ),
        "M88": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.LEGAL_CALLS, 7
        ),
        "M89": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.EVENTS_ARE_STATE, 18989
        ),
        "M90": FoundAlone(
            "kvsm fuzz --target log-ahead --seed 2 --runs 200", "log-ahead", Property.LEGAL_CALLS, 444
        ),
        "M91": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 123
        ),
        "M92": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 7
        ),
        "M93": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.MATCH_HOLDS, 88
        ),
        "M94": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50",
            "wrong-books",
            Property.NO_REUSE_IN_FLIGHT,
            97,
        ),
        "M95": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.NO_STALE_DATA, 19562
        ),
        "M96": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.STORED_ONCE, 8435
        ),
        "M97": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.MATCH_HOLDS, 19266
        ),
        "M98": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.PROGRESS, 20
        ),
        "M99": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50",
            "wrong-books",
            Property.NO_REUSE_IN_FLIGHT,
            4798,
        ),
    },
}

UNFOUND: Mapping[int, Mapping[str, int]] = {
    1: {
        "M114": 1,
        "M116": 1,
        "M118": 1,
        "M119": 1,
        "M120": 1,
        "M121": 1,
        "M13": 1,
        "M14": 1,
        "M140": 1,
        "M141": 1,
        "M142": 1,
        "M143": 1,
        "M144": 1,
        "M152": 1,
        "M153": 1,
        "M18": 1,
        "M22": 1,
        "M24": 1,
        "M41": 1,
        "M46": 1,
        "M59": 1,
        "M63": 1,
        "M67": 1,
        "M72": 1,
        "M81": 1,
        "M87": 2,
    },
    2: {
        "M05": 1,
        "M08": 1,
        "M114": 1,
        "M116": 1,
        "M118": 1,
        "M119": 1,
        "M120": 1,
        "M121": 1,
        "M13": 1,
        "M140": 1,
        "M141": 1,
        "M142": 1,
        "M143": 1,
        "M144": 1,
        "M17": 1,
        "M18": 1,
        "M22": 1,
        "M41": 1,
        "M46": 1,
        "M59": 1,
        "M63": 1,
        "M67": 1,
        "M72": 1,
        "M81": 1,
    },
}
"""Seed -> mutant that is not found -> the number of commands that have searched for it."""
