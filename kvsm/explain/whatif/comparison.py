"""Compare a log's own result with predictions for other configurations: the answer of `kvsm whatif`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import msgspec

from kvsm.errors import ConfigError
from kvsm.explain.story.window import Window
from kvsm.explain.whatif.accuracy import SCOPE, kind_of, refuse_failing, refuse_unlike, repeated_share
from kvsm.explain.whatif.demand import Demand
from kvsm.explain.whatif.optimum import Optimum
from kvsm.explain.whatif.simulate import EVERYTHING, Scenario, Served, counted_lookups, recorded, simulate
from kvsm.system.executors.executor import Executor, Item, Result


class Outcome(msgspec.Struct, frozen=True):
    """The result of one configuration.

    host_blocks, policy, store_threshold: the configuration.
    host_share: share of the asked blocks that the host serves.
    found_share: share of the asked blocks that the device has or the host serves; the others are computed.
    error_points: measured error of `found_share` (percentage points).
    bound_share: upper bound of `found_share` for any policy in a pool of this size.
    stored, evicted: number of host slots filled, and emptied to make room; 0 in the log's own result.
    """

    host_blocks: int
    policy: str
    store_threshold: int
    host_share: float
    found_share: float
    error_points: float
    bound_share: float
    stored: int
    evicted: int


class PoolComparison(msgspec.Struct, frozen=True):
    """A log's own result, and predictions for other configurations.

    lookups: number of lookups that count (`counted_lookups`).
    asked: device blocks that they asked for.
    on_device: how many of these blocks the device had.
    unknown_blocks: looked-up blocks whose keys are not in the log. They count as not found.
    failed_copies: copies that failed in the log. Simulated copies never fail.
    logged: the log's own result.
    itself: the simulated result of the log's own configuration.
    unlimited_share: share of the asked blocks that are found in a pool that never evicts.
    outcomes: the requested configurations, sorted by threshold, then size, then policy.
    repeated_share: share of the blocks in the prompts whose keys an earlier prompt has too.
    workload: the measured kind of workload that the log resembles in this.
    comparisons: number of real runs of that kind with which predictions were compared.
    scope: the engines and logs for which `error_points` was measured.
    """

    lookups: int
    asked: int
    on_device: int
    unknown_blocks: int
    failed_copies: int
    logged: Outcome
    itself: Outcome
    unlimited_share: float
    outcomes: tuple[Outcome, ...]
    repeated_share: float
    workload: str
    comparisons: int
    scope: str = SCOPE


def compare(
    log: str,
    demand: Demand,
    scenarios: Sequence[Scenario],
    window: Window = EVERYTHING,
    progress: Callable[[int], None] | None = None,
    executor: Executor | None = None,
) -> PoolComparison:
    """Simulate all scenarios, and compare them with the log.

    log: the log's name, for error messages.
    window: only lookups in it count.
    progress: called with the number of finished scenarios.
    executor: runs the simulations; None: this process does. The result is the same.

    Raises `ConfigError` for an impossible scenario or if the window has no lookup of a whole block, and
    `LogError` if the log does not behave like those for which predictions were measured.
    """
    refuse_failing(log, demand)
    lookups = counted_lookups(demand, window)
    as_logged, own = recorded(lookups), Scenario.of(demand.config)
    if not as_logged.asked:
        raise ConfigError(f"{log}: no lookup of a whole block is between --since and --until")
    itself = simulate(demand, own, lookups)
    refuse_unlike(log, itself, as_logged)
    optimum = Optimum(demand, lookups)
    others = [scenario for scenario in scenarios if scenario != own]
    served_by = {own: itself}
    with _results(executor, partial(simulate, demand, lookups=lookups), others) as results:
        for number, (scenario, served) in enumerate(zip(others, results), len(scenarios) - len(others) + 1):
            served_by[scenario] = served
            if progress is not None:
                progress(number)
    sizes = sorted({scenario.host_blocks for scenario in (own, *scenarios)})
    with _results(executor, optimum.found_share, sizes) as shares:
        bounds = dict(zip(sizes, shares))

    share = repeated_share(demand)
    kind = kind_of(share)

    def outcome(scenario: Scenario, served: Served) -> Outcome:
        error = kind.points(changed=scenario != own)
        return _outcome(scenario, served, error, bounds[scenario.host_blocks])

    return PoolComparison(
        lookups=as_logged.lookups,
        asked=as_logged.asked,
        on_device=as_logged.on_device,
        unknown_blocks=demand.unknown_blocks,
        failed_copies=demand.failed_copies,
        logged=outcome(own, as_logged),
        itself=outcome(own, itself),
        unlimited_share=optimum.unlimited,
        outcomes=tuple([outcome(scenario, served_by[scenario]) for scenario in scenarios]),
        repeated_share=share,
        workload=kind.about,
        comparisons=kind.comparisons,
    )


def _outcome(scenario: Scenario, served: Served, error: float, bound: float) -> Outcome:
    return Outcome(
        scenario.host_blocks,
        scenario.policy,
        scenario.store_threshold,
        served.host_share,
        served.found_share,
        error,
        bound,
        served.stored,
        served.evicted,
    )


@contextmanager
def _results(
    executor: Executor | None, task: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Iterator[Result]]:
    """Yield an iterator over the results of `task` in the order of `items`. executor: as in `compare`."""
    if executor is None or len(items) < 2:
        yield map(task, items)
        return
    with executor.results(task, items) as results:
        yield results


def verdict(found: PoolComparison) -> list[str]:
    """Say what would have helped: lines for larger pools, and one for other policies and thresholds.

    Gains are differences between simulated results. A gain within the error counts as none.
    """
    own = found.itself
    lines = []
    larger = [other for other in found.outcomes if other.host_blocks > own.host_blocks and _like(other, own)]
    if larger:
        first = min(larger, key=lambda outcome: outcome.host_blocks)
        most = max(larger, key=_found)
        lines += [
            f"{_gain(outcome, own)} with {outcome.host_blocks:,} slots instead of {own.host_blocks:,}"
            for outcome in dict.fromkeys((first, most))
        ]
    others = [
        other for other in found.outcomes if other.host_blocks == own.host_blocks and not _like(other, own)
    ]
    if others:
        best = max(others, key=_found)
        name = f"{best.policy}, threshold {best.store_threshold}"
        lines.append(f"{_gain(best, own)} with the best other choice at {own.host_blocks:,} slots ({name})")
    return lines


def _found(outcome: Outcome) -> float:
    return outcome.found_share


def _like(outcome: Outcome, own: Outcome) -> bool:
    return (outcome.policy, outcome.store_threshold) == (own.policy, own.store_threshold)


def _gain(outcome: Outcome, own: Outcome) -> str:
    points = 100 * (outcome.found_share - own.found_share)
    if abs(points) <= outcome.error_points:
        return f"no difference beyond the error ({points:+.1f} points)"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"


def scenarios_of(
    sizes: Sequence[int], policies: Sequence[str], thresholds: Sequence[int]
) -> Iterator[Scenario]:
    """Yield all combinations, sorted by threshold, then size, then policy."""
    for threshold, size, policy in product(thresholds, sizes, policies):
        yield Scenario(size, policy, threshold)
