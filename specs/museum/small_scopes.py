"""Which small scope of `kvsm check serving` alone refutes each of the first forty exhibits.

    PYTHONPATH=specs:tests python -m museum.small_scopes B17 B24       look for these two
    PYTHONPATH=specs:tests python -m museum.small_scopes M02 M07       look for mutants
    PYTHONPATH=specs:tests python -m museum.small_scopes               look for the forty: half an hour

These scopes were not chosen by the exhibits: `kvsm.checker.serving` has some by hand, and
`kvsm.checker.serving_pairs` those that a rule makes. A slow test looks for some of them every day.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from kvsm.checker.explorer import explore
from kvsm.checker.models import MODELS
from kvsm.checker.serving import ServingModel
from museum.search import BUGS, EXHIBITS

MOST_STATES = 2_000
"""Of each scope. A bug may make a scope larger, and what is not seen until then counts as missed."""

REFUTED_BY: Mapping[str, str] = {
    "B01": "small",
    "B04": "no-references",
    "B05": "shared",
    "B06": "small",
    "B07": "pairs-31",
    "B08": "small",
    "B09": "preemptions",
    "B11": "pairs-04",
    "B13": "small",
    "B14": "small",
    "B15": "small",
    "B16": "small",
    "B17": "pairs-07",
    "B19": "aborts",
    "B20": "small",
    "B21": "small",
    "B23": "pairs-40",
    "B24": "small",
    "B26": "router",
    "B27": "small",
    "B28": "small",
    "B29": "small",
    "B32": "preemptions",
    "B34": "losing",
    "B35": "small",
    "B36": "evictions",
    "B38": "small",
}
"""Exhibit -> the first scope that refutes it."""

_STREAMS = "a bug of the copy engine, which the serving world does not run: `kvsm check copies` refutes it"
_NOT_LED = "the small engine never makes this call"
_LARGER = "no scope shows it within its first 2,000 states"

MISSED: Mapping[str, str] = {
    "B02": _STREAMS,
    "B03": _STREAMS,
    "B25": _STREAMS,
    "B37": _STREAMS,
    "B10": _NOT_LED,
    "B40": _NOT_LED,
    "B12": _LARGER,
    "B18": _LARGER,
    "B22": _LARGER,
    "B30": _LARGER,
    "B31": _LARGER,
    "B33": _LARGER,
    "B39": _LARGER,
}
"""Exhibit -> why none does."""


def refuting(id: str) -> str:
    """The first small scope that refutes a bug; empty if none does."""
    model = MODELS["serving"]
    with BUGS[id].put_back():
        for name in model.families["every-small"]:
            if explore(ServingModel(model.scopes[name]), max_states=MOST_STATES).refutation is not None:
                return name
    return ""


def main() -> None:
    """Print the scope that refutes each bug that is named."""
    for id in sys.argv[1:] or [*EXHIBITS][:40]:
        print(id, refuting(id) or "missed", flush=True)


if __name__ == "__main__":
    main()
