"""A log's own result beside those of other configurations: what `kvsm whatif` answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import msgspec

from kvsm.errors import ConfigError
from kvsm.explain.story.window import Window
from kvsm.explain.whatif.accuracy import SCOPE, error_points, refuse_failing, refuse_unlike
from kvsm.explain.whatif.demand import Demand
from kvsm.explain.whatif.optimum import Optimum
from kvsm.explain.whatif.simulate import EVERYTHING, Scenario, Served, counted_lookups, recorded, simulate
from kvsm.system.executors.executor import Executor, Item, Result


class Outcome(msgspec.Struct, frozen=True):
    """What one configuration would have given.

    host_blocks, policy, store_threshold: the configuration.
    host_share: share of the asked blocks that the host serves.
    found_share: share that the device has or the host serves; the rest is computed again.
    error_points: how far `found_share` may be from a real run (percentage points).
    bound_share: no policy finds more than this share in a pool of this size.
    stored, evicted: host slots that are filled, and emptied to make room.
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
    """The log, and what it would have been.

    lookups: lookups that are counted (`counted_lookups`).
    asked: device blocks that they asked for. on_device: of these, blocks that the device had.
    unknown_blocks: looked-up blocks whose key the log does not name. They count as not found.
    logged: what the log itself says. itself: what the simulation gives for the log's own configuration.
    unlimited_share: the share that is found in a pool that never evicts.
    outcomes: the configurations that were asked for, by threshold, then size, then policy.
    scope: for which logs `error_points` was measured.
    failed_copies: copies that failed in the log. In the simulation none does.
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
    scope: str = SCOPE


def compare(
    log: str,
    demand: Demand,
    scenarios: Sequence[Scenario],
    window: Window = EVERYTHING,
    progress: Callable[[int], None] | None = None,
    executor: Executor | None = None,
) -> PoolComparison:
    """Simulate all scenarios.

    log: its name, for errors.
    window: which lookups are counted.
    progress: is told how many scenarios are done.
    executor: who simulates, in place of this process. The result is the same.

    Raises `ConfigError` for a scenario that cannot be, and `LogError` if the log does not behave like those
    for which predictions were measured, or if the window holds no lookup.
    """
    refuse_failing(log, demand)
    lookups = counted_lookups(demand, window)
    as_logged, own = recorded(lookups), Scenario.of(demand.config)
    if not as_logged.asked:
        raise ConfigError(f"{log}: no lookup of a whole block is between --since and --until")
    itself = simulate(demand, own, lookups)
    refuse_unlike(log, itself, as_logged)
    optimum = Optimum(demand, lookups)
    others = [one for one in scenarios if one != own]
    served_by = {own: itself}
    with _results(executor, partial(simulate, demand, lookups=lookups), others) as results:
        for number, (scenario, served) in enumerate(zip(others, results), len(scenarios) - len(others) + 1):
            served_by[scenario] = served
            if progress is not None:
                progress(number)
    sizes = sorted({one.host_blocks for one in (own, *scenarios)})
    with _results(executor, optimum.found_share, sizes) as shares:
        bounds = dict(zip(sizes, shares))

    def outcome(scenario: Scenario, served: Served) -> Outcome:
        return _outcome(scenario, served, error_points(demand, scenario), bounds[scenario.host_blocks])

    return PoolComparison(
        lookups=as_logged.lookups,
        asked=as_logged.asked,
        on_device=as_logged.on_device,
        unknown_blocks=demand.unknown_blocks,
        failed_copies=demand.failed_copies,
        logged=outcome(own, as_logged),
        itself=outcome(own, itself),
        unlimited_share=optimum.unlimited,
        outcomes=tuple([outcome(one, served_by[one]) for one in scenarios]),
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
    """Results in order, made by an executor or in this process."""
    if executor is None or len(items) < 2:
        yield map(task, items)
        return
    with executor.results(task, items) as results:
        yield results


def verdict(found: PoolComparison) -> list[str]:
    """What would have helped, in words: a line for sizes, and one for policies and thresholds.

    A gain within the error is none. Both sides of it are simulated.
    """
    own = found.itself
    lines = []
    grown = [one for one in found.outcomes if one.host_blocks > own.host_blocks and _like(one, own)]
    if grown:
        first = min(grown, key=lambda one: one.host_blocks)
        most = max(grown, key=_found)
        lines += [
            f"{_gain(one, own)} with {one.host_blocks:,} slots instead of {own.host_blocks:,}"
            for one in dict.fromkeys((first, most))
        ]
    others = [one for one in found.outcomes if one.host_blocks == own.host_blocks and not _like(one, own)]
    if others:
        best = max(others, key=_found)
        name = f"{best.policy}, threshold {best.store_threshold}"
        lines.append(f"{_gain(best, own)} with the best other choice at {own.host_blocks:,} slots ({name})")
    return lines


def _found(one: Outcome) -> float:
    return one.found_share


def _like(one: Outcome, own: Outcome) -> bool:
    return (one.policy, one.store_threshold) == (own.policy, own.store_threshold)


def _gain(one: Outcome, own: Outcome) -> str:
    points = 100 * (one.found_share - own.found_share)
    if abs(points) <= one.error_points:
        return f"no difference beyond the error ({points:+.1f} points)"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"


def scenarios_of(
    sizes: Sequence[int], policies: Sequence[str], thresholds: Sequence[int]
) -> Iterator[Scenario]:
    """All combinations, by threshold, then size, then policy."""
    for threshold, size, policy in product(thresholds, sizes, policies):
        yield Scenario(size, policy, threshold)
