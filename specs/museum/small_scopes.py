"""A small scope of `kvsm check serving` that alone refutes an exhibit, for each of the first forty.

    PYTHONPATH=specs:tests/support python -m museum.small_scopes B17 B24       search for these two
    PYTHONPATH=specs:tests/support python -m museum.small_scopes M02 M07       search for mutants
    PYTHONPATH=specs:tests/support python -m museum.small_scopes               search for the forty: an hour

These scopes were not made for the exhibits: `kvsm.check.scopes.serving_scopes` has hand-written ones;
`kvsm.check.scopes.serving_pairs` and `kvsm.check.scopes.serving_triples` generate others by rules. A slow
test searches for some of the exhibits every day.

The world's actions and checks were extended for four exhibits that were missed at first. The world also ends
a request at the core directly (B30). The engine checks that a match is over once its request has blocks
(B31). A saved world keeps fields that a change of the code adds (B39). `mistakes` are calls that the core
must refuse (B40).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from kvsm.check.explore.explorer import explore
from kvsm.check.scopes.models import MODELS
from kvsm.check.scopes.serving_scopes import ServingModel
from museum.search import BUGS, EXHIBITS

MOST_STATES = 2_000
"""Limit for each scope. A bug may make a scope larger; if it is not found within the limit, it is missed."""

REFUTED_BY: Mapping[str, str] = {
    "B01": "small",
    "B04": "no-references",
    "B05": "shared",
    "B06": "small",
    "B07": "pairs-31",
    "B08": "small",
    "B09": "no-references",
    "B11": "pairs-04",
    "B13": "small",
    "B14": "small",
    "B15": "small",
    "B16": "small",
    "B17": "pairs-07",
    "B18": "triples-040",
    "B19": "aborts",
    "B20": "small",
    "B21": "small",
    "B22": "triples-054",
    "B23": "pairs-40",
    "B24": "small",
    "B26": "router",
    "B27": "small",
    "B28": "small",
    "B29": "small",
    "B30": "aborts",
    "B31": "preemptions",
    "B32": "preemptions",
    "B33": "triples-040",
    "B34": "losing",
    "B35": "small",
    "B36": "evictions",
    "B38": "small",
    "B39": "losing",
    "B40": "triples-109",
}
"""Exhibit -> a scope that refutes it."""

_STREAMS = "a bug of the copy engine, which the serving world does not run: `kvsm check copies` refutes it"
MISSED: Mapping[str, str] = {
    "B02": _STREAMS,
    "B03": _STREAMS,
    "B25": _STREAMS,
    "B37": _STREAMS,
    "B10": "the small engine never offers one device block twice at once",
    "B12": "two stores of the same keys must be live, and the scheduler plans none while a reset drains",
}
"""Exhibit -> why no small scope refutes it."""


def refuting(id: str) -> str:
    """Return the name of the first small scope that refutes a bug; empty if none does."""
    model = MODELS["serving"]
    with BUGS[id].put_back():
        for name in model.families["every-small"]:
            if explore(ServingModel(model.scopes[name]), max_states=MOST_STATES).refutation is not None:
                return name
    return ""


def main() -> None:
    """Print a scope that refutes each given bug."""
    for id in sys.argv[1:] or [*EXHIBITS][:40]:
        print(id, refuting(id) or "missed", flush=True)


if __name__ == "__main__":
    main()
