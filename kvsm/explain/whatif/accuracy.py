"""The measured errors of predictions, and the logs for which they are valid.

The errors are from benchmarks/results/whatif.md: the largest difference between the predicted and the real
share of found blocks, in percentage points, over all comparisons of a kind of workload. `kvsm whatif` prints
the error of the kind of workload that its log resembles most. Change them only together with that page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.errors import LogError
from kvsm.explain.whatif.demand import Demand
from kvsm.explain.whatif.simulate import Scenario, Served, counted_lookups


class WorkloadKind(NamedTuple):
    """A kind of workload for which predictions were compared with real runs.

    name: as in the results. about: the requests.
    repeated_least: the least share of repeated blocks (`repeated_share`) in a log of this kind.
    itself_points: largest error for the log's own configuration (percentage points).
    changed_points: largest error for another number of host slots, policy or threshold (percentage points).
    comparisons: number of real runs with which predictions were compared.
    """

    name: str
    about: str
    repeated_least: float
    itself_points: float
    changed_points: float
    comparisons: int

    def points(self, *, changed: bool) -> float:
        """The largest measured error. changed: for another configuration than the log's."""
        return self.changed_points if changed else self.itself_points


KINDS = (
    WorkloadKind("agents", "sessions of coding agents", 0.84, 0.3, 3.1, 21),
    WorkloadKind("mixed", "agents and chats together", 0.77, 0.1, 2.6, 10),
    WorkloadKind("chats", "generated conversations", 0.45, 0.1, 1.7, 54),
    WorkloadKind("trace", "a public trace of conversations", 0.0, 0.1, 0.3, 14),
)
"""All kinds, by `repeated_least`, descending. Each limit lies between the measured shares of two kinds, which
are in the results."""

ITSELF_POINTS = max(kind.itself_points for kind in KINDS)
CHANGED_POINTS = max(kind.changed_points for kind in KINDS)
"""The largest errors of all kinds."""

UNLIKE_POINTS = 4.0
"""A log is refused if the simulation of its own configuration differs from it by at least this much."""

FAILED_SHARE_MOST = 0.02
"""Largest share of failed copies in a log that is accepted. Simulated copies never fail."""

SCOPE = "eager store, one KV cache group, kvsm's serving engine, pools from 1/8 to 4 times the log's"
"""The engines and logs that the comparisons cover."""


def repeated_share(demand: Demand) -> float:
    """The share of the blocks in the prompts of a log whose keys an earlier prompt has too.

    It tells kinds of workload apart, independently of hits: an agent's prompt repeats nearly all of its
    previous prompt, and prompts of many users repeat little.
    """
    seen: NDArray[np.bool_] = np.zeros(len(demand.keys) + 1, dtype=np.bool_)
    repeated = blocks = 0
    for lookup in counted_lookups(demand):
        prompt = np.array(demand.chains[lookup.life][: lookup.end], dtype=np.int64)
        prompt = prompt[prompt >= 0]
        repeated, blocks = repeated + int(np.count_nonzero(seen[prompt])), blocks + len(prompt)
        seen[prompt] = True
    return repeated / blocks if blocks else 0.0


def kind_of(share: float) -> WorkloadKind:
    """The measured kind of workload that a log resembles. share: its `repeated_share`."""
    return next(kind for kind in KINDS if share >= kind.repeated_least)


def error_points(demand: Demand, scenario: Scenario) -> float:
    """The largest measured error for a prediction like this one (percentage points)."""
    return kind_of(repeated_share(demand)).points(changed=scenario != Scenario.of(demand.config))


def refuse_failing(log: str, demand: Demand) -> None:
    """Raise `LogError` if more copies failed in the log than in the logs that were measured."""
    if demand.failed_copies > FAILED_SHARE_MOST * demand.copies:
        raise LogError(
            f"{log}: {demand.failed_copies:,} of its {demand.copies:,} copies failed or were lost; whatif is "
            f"validated up to {FAILED_SHARE_MOST:.0%}. Mend the copies first: `kvsm report` names the rank"
        )


def refuse_unlike(log: str, itself: Served, as_logged: Served) -> None:
    """Raise `LogError` if the simulation of the log's own configuration differs too much from the log.

    Then the log's engine behaves differently from the engines with which predictions were compared.

    itself: the simulated result. as_logged: the result in the log.
    """
    points = 100 * (itself.found_share - as_logged.found_share)
    if abs(points) > UNLIKE_POINTS:
        raise LogError(
            f"{log}: with this log's own configuration the simulation finds {itself.found_share:.1%} of the "
            f"blocks, and the log says {as_logged.found_share:.1%}; so whatif does not hold for its engine"
        )
