"""How far predictions were from real runs, and for which logs that holds.

The numbers are those of benchmarks/results/whatif.md: the largest difference between the predicted and the
real share of found blocks, in percentage points, over all comparisons of a kind. `kvsm whatif` prints them
beside its table. Change them only together with that page.
"""

from __future__ import annotations

from kvsm.errors import LogError
from kvsm.explain.whatif.demand import Demand
from kvsm.explain.whatif.simulate import Scenario, Served

ITSELF_POINTS = 0.6
"""For the configuration of the log itself."""

CHANGED_POINTS = 2.0
"""For another number of host slots, another policy or another threshold."""

COMPARISONS = 74
"""Real runs that predictions were compared with."""

FAILED_SHARE_MOST = 0.02
"""The share of copies that may have failed in a log. Simulated copies never fail."""

SCOPE = "eager store, one KV cache group, kvsm's serving engine, pools from 1/8 to 8 times the log's"
"""What the comparisons cover."""


def error_points(demand: Demand, scenario: Scenario) -> float:
    """How far a prediction may be from a real run (percentage points)."""
    return ITSELF_POINTS if scenario == Scenario.of(demand.config) else CHANGED_POINTS


def refuse_failing(log: str, demand: Demand) -> None:
    """Raises `LogError` if more copies failed in the log than in the logs that were measured."""
    if demand.failed_copies > FAILED_SHARE_MOST * demand.copies:
        raise LogError(
            f"{log}: {demand.failed_copies:,} of its {demand.copies:,} copies failed or were lost; whatif is "
            f"validated up to {FAILED_SHARE_MOST:.0%}. Mend the copies first: `kvsm report` names the rank"
        )


def refuse_unlike(log: str, itself: Served, as_logged: Served) -> None:
    """Raises `LogError` if the simulation does not give what the log says of its own configuration.

    Then the log is of an engine that behaves in another way than those that predictions were compared with.
    """
    points = 100 * (itself.found_share - as_logged.found_share)
    if abs(points) > 2 * CHANGED_POINTS:
        raise LogError(
            f"{log}: with this log's own configuration the simulation finds {itself.found_share:.1%} of the "
            f"blocks, and the log says {as_logged.found_share:.1%}; so whatif does not hold for its engine"
        )
