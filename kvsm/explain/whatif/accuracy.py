"""The measured errors of predictions, and the logs for which they are valid.

The errors are from benchmarks/results/whatif.md: the largest difference between the predicted and the real
share of found blocks, in percentage points, over all comparisons of a kind. `kvsm whatif` prints them beside
its table. Change them only together with that page.
"""

from __future__ import annotations

from kvsm.errors import LogError
from kvsm.explain.whatif.demand import Demand
from kvsm.explain.whatif.simulate import Scenario, Served

ITSELF_POINTS = 0.6
"""Largest error for the log's own configuration (percentage points)."""

CHANGED_POINTS = 2.0
"""Largest error for another number of host slots, policy or threshold (percentage points)."""

COMPARISONS = 74
"""Number of real runs with which predictions were compared."""

FAILED_SHARE_MOST = 0.02
"""Largest share of failed copies in a log that is accepted. Simulated copies never fail."""

SCOPE = "eager store, one KV cache group, kvsm's serving engine, pools from 1/8 to 8 times the log's"
"""The engines and logs that the comparisons cover."""


def error_points(demand: Demand, scenario: Scenario) -> float:
    """The largest measured error for a prediction like this one (percentage points)."""
    return ITSELF_POINTS if scenario == Scenario.of(demand.config) else CHANGED_POINTS


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
    if abs(points) > 2 * CHANGED_POINTS:
        raise LogError(
            f"{log}: with this log's own configuration the simulation finds {itself.found_share:.1%} of the "
            f"blocks, and the log says {as_logged.found_share:.1%}; so whatif does not hold for its engine"
        )
