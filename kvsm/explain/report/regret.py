"""`regret`: what the other eviction policies would have found with the lookups of a log.

It is the prediction of `kvsm whatif`, for the log's own pool size and store threshold. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvsm.core.log import LogReader
from kvsm.core.policies import POLICIES
from kvsm.errors import ConfigError, LogError
from kvsm.explain.story import Trust
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.whatif.comparison import compare, scenarios_of
from kvsm.explain.whatif.demand import read_demand


class PolicyShare(msgspec.Struct, frozen=True):
    """The share of the asked blocks that the device has, or the host serves, under a policy."""

    policy: str
    found_share: float


class Regret(msgspec.Struct, frozen=True):
    """What the log's policy finds in a simulation, and what others would have found in the same pool.

    own: the log's policy, simulated like the others.
    others: the other policies, the best first.
    bound_share: what no policy can exceed in this pool.
    error_points: measured error of the shares (percentage points): smaller differences count as none.
    why_not: why nothing can be predicted from this log; None: the other fields are known.
    """

    own: PolicyShare | None = None
    others: tuple[PolicyShare, ...] = ()
    bound_share: float = 0.0
    error_points: float = 0.0
    why_not: str | None = None


def regret(
    reader: LogReader,
    trust: Trust,
    window: Window = EVERYTHING,
    progress: Callable[[int], None] | None = None,
) -> Regret:
    """Simulate the log's own pool under each policy.

    window: only lookups in it count. All events before it warm the pool.
    progress: called with the number of each event that was read.
    """
    name = str(reader.directory)
    try:
        demand = read_demand(reader, trust, progress)
        config = demand.config
        policies = [config.policy, *(policy for policy in POLICIES if policy != config.policy)]
        scenarios = list(scenarios_of([config.host_blocks], policies, [config.store_threshold]))
        found = compare(name, demand, scenarios, window)
    except (ConfigError, LogError) as refusal:
        return Regret(why_not=str(refusal))
    own, *others = (PolicyShare(one.policy, one.found_share) for one in found.outcomes)
    return Regret(
        own,
        tuple(sorted(others, key=lambda one: -one.found_share)),
        found.itself.bound_share,
        max(one.error_points for one in found.outcomes),
    )
