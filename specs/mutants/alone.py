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
        "M11": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.LEGAL_CALLS, 65
        ),
        "M12": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.NO_REUSE_IN_FLIGHT, 1569
        ),
        "M15": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.ONE_RELEASE_PER_HOLD, 2431
        ),
        "M16": FoundAlone(
            "kvsm fuzz --target layers --seed 1 --runs 200", "layers", Property.CORRECT_BYTES, 717
        ),
        "M31": FoundAlone(
            "kvsm fuzz --target core --seed 1 --runs 500", "core", Property.PUBLISH_AFTER_COMMIT, 1016
        ),
        "M32": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LEGAL_CALLS, 6668),
        "M34": FoundAlone("kvsm fuzz --target core --seed 1 --runs 500", "core", Property.LAST_STEP, 7107),
        "M35": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.PROGRESS, 4986
        ),
        "M38": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150",
            "skewed-core",
            Property.NO_STALE_DATA,
            176854,
        ),
        "M42": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.MATCH_HOLDS, 39161
        ),
        "M43": FoundAlone(
            "kvsm fuzz --target policies --seed 1 --runs 200", "policies", Property.MATCH_HOLDS, 3266
        ),
        "M44": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.CONSERVATION, 3593
        ),
        "M48": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 1 --runs 50", "wrong-books", Property.EVENTS_ARE_STATE, 43
        ),
        "M50": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_ONCE, 56
        ),
        "M53": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 1 --runs 150", "skewed-core", Property.LEGAL_CALLS, 54412
        ),
        "M54": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.CONSERVATION, 211),
        "M57": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_ONCE, 1198
        ),
        "M62": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.STORED_ONCE, 839),
        "M64": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.NO_STALE_DATA, 18),
        "M65": FoundAlone("kvsm fuzz --target disk --seed 1 --runs 20", "disk", Property.LEGAL_CALLS, 349),
        "M66": FoundAlone("kvsm fuzz --target eras --seed 1 --runs 40", "eras", Property.NO_STALE_DATA, 576),
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
        "M86": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 1296
        ),
        "M88": FoundAlone(
            "kvsm fuzz --target restarts --seed 1 --runs 20", "restarts", Property.LEGAL_CALLS, 3
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
        "M135": FoundAlone(
            "kvsm fuzz --target audited --seed 1 --runs 100", "audited", Property.STORED_SO_SERVED, 46530
        ),
    },
    2: {
        "M35": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.PROGRESS, 1274
        ),
        "M38": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.NO_STALE_DATA, 12313
        ),
        "M42": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.MATCH_HOLDS, 2138
        ),
        "M43": FoundAlone(
            "kvsm fuzz --target policies --seed 2 --runs 200", "policies", Property.MATCH_HOLDS, 6136
        ),
        "M44": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.LEGAL_CALLS, 2825
        ),
        "M48": FoundAlone(
            "kvsm fuzz --target wrong-books --seed 2 --runs 50", "wrong-books", Property.EVENTS_ARE_STATE, 6
        ),
        "M50": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.STORED_ONCE, 134
        ),
        "M53": FoundAlone(
            "kvsm fuzz --target skewed-core --seed 2 --runs 150", "skewed-core", Property.LEGAL_CALLS, 118083
        ),
        "M54": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.CONSERVATION, 1103),
        "M57": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.STORED_ONCE, 181
        ),
        "M62": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 12406),
        "M64": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 766),
        "M65": FoundAlone("kvsm fuzz --target disk --seed 2 --runs 20", "disk", Property.LEGAL_CALLS, 2966),
        "M66": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 2977),
        "M69": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.NO_STALE_DATA, 487),
        "M70": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 1713),
        "M71": FoundAlone("kvsm fuzz --target eras --seed 2 --runs 40", "eras", Property.STORED_ONCE, 2483),
        "M73": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 500
        ),
        "M74": FoundAlone(
            "kvsm fuzz --target audited --seed 2 --runs 100", "audited", Property.EVENTS_ARE_STATE, 1839
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
        "M86": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.EVENTS_ARE_STATE, 6002
        ),
        "M87": FoundAlone(
            "kvsm fuzz --target log --seed 2 --runs 150", "log", Property.EVENTS_ARE_STATE, 9972
        ),
        "M88": FoundAlone(
            "kvsm fuzz --target restarts --seed 2 --runs 20", "restarts", Property.LEGAL_CALLS, 7
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
    },
}
"""Seed -> mutant -> how it is found."""

UNFOUND: Mapping[int, Mapping[str, int]] = {
    1: {
        "M13": 1,
        "M87": 1,
    },
    2: {},
}
"""Seed -> mutant that is not found -> the number of commands that have searched for it."""
