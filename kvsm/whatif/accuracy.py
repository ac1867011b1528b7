"""How far predictions were from real runs, and for which logs that holds.

The numbers are those of benchmarks/results/whatif.md: the largest difference between the predicted and the
real share of found blocks, in percentage points, over all comparisons of a kind. `kvsm whatif` prints them
beside its table. Change them only together with that page.
"""

from __future__ import annotations

from kvsm.errors import LogError
from kvsm.whatif.demand import Demand
from kvsm.whatif.simulate import Scenario, Served

ITSELF_POINTS = 0.7
"""For the configuration of the log itself."""

CAPACITY_POINTS = 2.5
"""For another number of host slots, or another policy."""

THRESHOLD_POINTS = 3.0
"""For another `store_threshold`."""

COMPARISONS = 60
"""Real runs that predictions were compared with."""

FAILED_COPIES_MOST = 0.05
"""The share of copies that may have failed in a log. Simulated copies never fail."""

SCOPE = "eager store, one KV cache group, kvsm's small serving engine"
"""What the comparisons cover."""


def error_points(demand: Demand, scenario: Scenario) -> float:
    """How far a prediction may be from a real run (percentage points)."""
    config = demand.config
    if scenario.store_threshold != config.store_threshold:
        return THRESHOLD_POINTS
    same = scenario == Scenario.of(config)
    return ITSELF_POINTS if same else CAPACITY_POINTS


def refuse_unlike(log: str, itself: Served, as_logged: Served) -> None:
    """Raises `LogError` if the simulation does not give what the log says of its own configuration.

    Then the log is of an engine that behaves in another way than those that predictions were compared with.
    """
    points = 100 * (itself.found_share - as_logged.found_share)
    if abs(points) > 2 * CAPACITY_POINTS:
        raise LogError(
            f"{log}: with this log's own configuration the simulation finds {itself.found_share:.1%} of the "
            f"blocks, and the log says {as_logged.found_share:.1%}; so whatif does not hold for its engine"
        )
