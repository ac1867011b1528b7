"""`kvsm whatif`: simulate a log's lookups and offers with other host pools. It needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvsm.cli.jobs_options import chosen_executor, cluster_option, jobs_option
from kvsm.cli.log_answers import leave, print_rows
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.output import Command, say, say_json, say_table
from kvsm.core.log import LogReader
from kvsm.core.policies import POLICIES, refuse_foreign
from kvsm.errors import ConfigError
from kvsm.explain.story import Trust
from kvsm.explain.story.window import LogPoint, Window, find_window
from kvsm.explain.whatif.comparison import Outcome, PoolComparison, compare, scenarios_of, verdict
from kvsm.explain.whatif.demand import Demand, read_demand
from kvsm.explain.whatif.plot import plot
from kvsm.explain.whatif.simulate import EVERYTHING, Scenario

NUMBER_MOST = 1 << 24
SCENARIOS_MOST = 500
_RANGE = re.compile(r"(\d{1,10})(?:\.\.(\d{1,10})(?::(\d{1,10}))?)?")


class WhatIfAnswer(PoolComparison, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.whatif/1"):
    """What `kvsm whatif --json` prints: the predicted hit rates of a log with other host pools.

    first, last: numbers of the events that were read.
    """

    log: str
    first: int
    last: int


@click.command(cls=Command)
@log_argument()
@click.option(
    "--host-blocks",
    "sizes",
    metavar="SIZES",
    help="Host slots to try: 500,1000 or 300..2400 (doubling) or 300..2400:300 (steps of 300).  "
    "[default: a quarter of LOG's to four times as many]",
)
@click.option(
    "--policy",
    "policies",
    metavar="NAMES",
    help=f"Eviction policies to try, with commas: {', '.join(POLICIES)}, or all.  [default: as in LOG]",
)
@click.option(
    "--store-threshold",
    "thresholds",
    metavar="NUMBERS",
    help="Thresholds to try: 1,2,3 stores a block when it is offered for the n-th time.  "
    "[default: as in LOG]",
)
@jobs_option
@cluster_option
@window_options
@trust_options
@json_option
def whatif(
    log: Path,
    sizes: str | None,
    policies: str | None,
    thresholds: str | None,
    jobs: int | None,
    cluster: str | None,
    since: LogPoint | None,
    until: LogPoint | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Predict the hit rate of LOG with another pool size or policy.

    Simulates pools of other sizes, policies and store thresholds with the lookups and offers of LOG. A cell
    is the share of the looked-up blocks that need not be computed again: the device had them, or the host
    serves them. The column "bound" is what no policy can exceed in a pool of that size, even if it knew all
    requests to come. Requests and hits on the device are taken from LOG unchanged.

    --since and --until choose the lookups that count. All events before them warm the pool.

    \b
    Examples:
      kvsm whatif LOG                                       would a larger pool help?
      kvsm whatif LOG --host-blocks 300..2400 --policy all  which size, which policy?
      kvsm whatif LOG --store-threshold 1,2,3               are stores worth refusing?
      kvsm whatif LOG --host-blocks 1000..64000 --policy all --cluster ray://head:10001   on many machines
    """
    wanted_sizes = None if sizes is None else _numbers("--host-blocks", sizes)
    wanted_thresholds = None if thresholds is None else _numbers("--store-threshold", thresholds)
    reader = LogReader(log)
    window = EVERYTHING
    if since is not None or until is not None:
        window = find_window(reader, since, until)
    allowed = Trust(**trust)
    config = reader.head.config
    names = _policies(policies, config.policy, allowed)
    scenarios = list(
        scenarios_of(
            wanted_sizes or _around(config.host_blocks),
            names,
            wanted_thresholds or [config.store_threshold],
        )
    )
    _check(scenarios)
    demand, comparison = _with_progress(reader, allowed, scenarios, window, jobs, cluster)
    if as_json:
        answer = {name: getattr(comparison, name) for name in PoolComparison.__struct_fields__}
        say_json(WhatIfAnswer(log=str(log), first=demand.first, last=demand.last, **answer))
    else:
        _print(log, demand, comparison)
    leave(demand.condition)


def _numbers(option: str, text: str) -> list[int]:
    """Parse a list of numbers and ranges into ascending numbers. Raises `ConfigError`."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{option} {text!r}: {part.strip()!r} is no number and no range; write 500,1000 or 300..2400 "
                "(doubling) or 300..2400:300 (steps)"
            )
        first, last, step = (None if one is None else int(one) for one in match.groups())
        assert first is not None
        last = first if last is None else last
        if not 1 <= first <= last <= NUMBER_MOST or step == 0:
            raise ConfigError(
                f"{option} {text!r}: a range goes up from at least 1 to at most {NUMBER_MOST:,}"
            )
        number = first
        while number < last and len(found) <= SCENARIOS_MOST:
            found.add(number)
            number = number + step if step else 2 * number
        found.add(last)
    return sorted(found)


def _around(host_blocks: int) -> list[int]:
    """Return sizes from a quarter of `host_blocks` to four times as much."""
    sizes = {
        max(1, host_blocks // 4),
        max(1, host_blocks // 2),
        host_blocks,
        2 * host_blocks,
        4 * host_blocks,
    }
    return sorted(size for size in sizes if size <= NUMBER_MOST)


def _policies(text: str | None, own: str, trust: Trust) -> list[str]:
    """Return the policies to try. Raises `ConfigError` for one that is unknown or not allowed."""
    if text is None:
        names = [own]
    elif text.strip() == "all":
        names = list(POLICIES)
    else:
        names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != own:
            _refuse(name, trust)
    return list(dict.fromkeys(names))


def _refuse(name: str, trust: Trust) -> None:
    if ":" in name:
        refuse_foreign(name, trust.allow_policies)
    elif name not in POLICIES:
        near = get_close_matches(name, POLICIES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--policy {name!r} is not one of {', '.join(POLICIES)}, or module:Class{hint}")


def _check(scenarios: Sequence[Scenario]) -> None:
    if len(scenarios) > SCENARIOS_MOST:
        raise ConfigError(f"{len(scenarios)} configurations; at most {SCENARIOS_MOST}. Name fewer sizes")


def _with_progress(
    reader: LogReader,
    trust: Trust,
    scenarios: Sequence[Scenario],
    window: Window,
    jobs: int | None,
    cluster: str | None,
) -> tuple[Demand, PoolComparison]:
    from rich.console import Console
    from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn

    console, name = Console(stderr=True), str(reader.directory)
    if not console.is_terminal:
        demand = read_demand(reader, trust)
        with chosen_executor(cluster, jobs) as executor:
            return demand, compare(name, demand, scenarios, window, executor=executor)
    columns = (TextColumn("{task.description} {task.completed:,.0f}"), TimeElapsedColumn())
    # Refreshed by hand, because a process must not fork beside a thread.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:

        def show(line: TaskID, done: int) -> None:
            progress.update(line, completed=done, refresh=True)

        demand = read_demand(reader, trust, partial(show, progress.add_task("events read:", total=None)))
        trying = progress.add_task(f"configurations of {len(scenarios)} tried:", total=None)
        with chosen_executor(cluster, jobs) as executor:
            return demand, compare(name, demand, scenarios, window, partial(show, trying), executor)


# For people.


def _print(log: Path, demand: Demand, found: PoolComparison) -> None:
    config, logged, itself = demand.config, found.logged, found.itself
    print_rows(
        ("log", str(log)),
        ("read", f"events {demand.first:,} to {demand.last:,}, {found.lookups:,} lookups that count"),
        ("asked", f"{found.asked:,} blocks; the device had {found.on_device / found.asked:.1%} of them"),
        (
            "logged",
            f"found {logged.found_share:.1%}, the host {logged.host_share:.1%} "
            f"({config.host_blocks:,} slots, {config.policy}, threshold {config.store_threshold})",
        ),
        (
            "simulated",
            f"found {itself.found_share:.1%}, the host {itself.host_share:.1%}: the same once more",
        ),
        ("no limit", f"found {found.unlimited_share:.1%} in a pool that never evicts"),
    )
    thresholds = list(dict.fromkeys(one.store_threshold for one in found.outcomes))
    for threshold in thresholds:
        outcomes = [one for one in found.outcomes if one.store_threshold == threshold]
        heading = (
            f"found on device or host, store threshold {threshold}"
            if len(thresholds) > 1
            else ("found on device or host")
        )
        say("", heading)
        say_table(_table(outcomes))
        if len({one.host_blocks for one in outcomes}) > 1:
            say("", *plot(*_curves(outcomes)))
    words = verdict(found)
    if words:
        say("", f"beside the log's own configuration (found {itself.found_share:.1%}):")
        say(*[f"  {line}" for line in words])
    say("", *_notes(demand, found))


def _by_size(outcomes: Sequence[Outcome]) -> dict[int, list[Outcome]]:
    rows: dict[int, list[Outcome]] = {}
    for one in outcomes:
        rows.setdefault(one.host_blocks, []).append(one)
    return rows


def _table(outcomes: Sequence[Outcome]) -> Any:
    """Return a table of `rich`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("host slots", justify="right")
    rows = _by_size(outcomes)
    for one in next(iter(rows.values())):
        table.add_column(one.policy, justify="right")
    table.add_column("bound", justify="right")
    for size, row in rows.items():
        cells = [f"{one.found_share:.1%}" for one in row]
        table.add_row(f"{size:,}", *cells, f"{max(one.bound_share for one in row):.1%}")
    return table


def _curves(outcomes: Sequence[Outcome]) -> tuple[list[int], dict[str, list[float]]]:
    rows = _by_size(outcomes)
    curves: dict[str, list[float]] = {}
    for row in rows.values():
        for one in row:
            curves.setdefault(one.policy, []).append(one.found_share)
    curves["bound"] = [max(one.bound_share for one in row) for row in rows.values()]
    return list(rows), curves


def _notes(demand: Demand, found: PoolComparison) -> list[str]:
    most = max(one.error_points for one in found.outcomes)
    lines = [
        f"error: up to {most:g} points, the largest difference in {found.comparisons} comparisons with real "
        f"runs of {found.workload}, which this log resembles most: {found.repeated_share:.0%} of the blocks "
        f"in its prompts are repeated. Measured for: {found.scope}.",
        "bound: what no policy can exceed at this size, even one that knows all requests to come.",
    ]
    if found.unknown_blocks:
        lines.append(
            f"{found.unknown_blocks:,} looked-up blocks have no key in the log, because their request never "
            "offered them; they count as not found."
        )
    if found.failed_copies:
        lines.append(f"{found.failed_copies:,} copies failed in the log; in the simulation none does.")
    if demand.first > 1:
        lines.append(
            f"The log begins with event {demand.first:,}. The pools begin with what the host had there, "
            "ordered by age; how often it was used before is not known. The comparisons were with whole logs."
        )
    return lines
