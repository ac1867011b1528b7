"""Count what `kvsm report` finds in generated logs, and how often a finding is the cause."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from generated_incidents import KINDS, Made, generate, make
from kvsm.cli.opened_tables import opened_tier
from kvsm.explain.report.log_report import make_report
from kvsm.explain.tables.opened import open as open_log

SHOWN = 2
"""So many findings may have the cause among them."""


class Found(msgspec.Struct, frozen=True):
    """What the report finds in one generated log.

    kinds: the kinds of its incidents. causes: for each of them, the troubles that tell its cause.
    troubles: the names of all findings, in the report's order.
    """

    seed: int
    background: str
    kinds: tuple[str, ...]
    causes: tuple[tuple[str, ...], ...]
    troubles: tuple[str, ...]
    events: int

    @property
    def first(self) -> tuple[str, ...]:
        """The findings that may have the cause among them."""
        return self.troubles[:SHOWN]

    @property
    def named(self) -> tuple[bool, ...]:
        """For each incident, whether its cause is among the first findings."""
        return tuple([not {*causes}.isdisjoint(self.first) for causes in self.causes])


def read(seed: int, made: Made) -> Found:
    """Read a generated log with the report, both tiers if there are two."""
    with open_log(made.directory) as log, opened_tier(log) as other:
        names = tuple([trouble.name for trouble in make_report(log, other=other).troubles])
        kinds = tuple([kind.name for kind in made.kinds])
        return Found(seed, made.background, kinds, made.causes, names, log.last)


def judged(seed: int, healthy: bool = False, kind: str | None = None) -> Found:
    """Make the log of a seed, and read it. healthy: without incidents; kind: with this incident only."""
    with tempfile.TemporaryDirectory(prefix="kvsm-findings-") as place:
        directory = Path(place) / "log"
        if kind is not None:
            return read(seed, make(seed, directory, KINDS[kind]))
        return read(seed, make(seed, directory) if healthy else generate(seed, directory))


def all_judged(seeds: Iterable[int], jobs: int, **only: object) -> Iterator[Found]:
    """Judge the logs of these seeds, in `jobs` processes."""
    if jobs == 1:
        yield from map(partial(judged, **only), seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(judged, **only), seeds)


class Findings(msgspec.Struct, frozen=True):
    """The sums over all logs.

    named: incidents whose cause is among the first two findings; single_named: of logs with one incident.
    alarms: healthy logs with a finding.
    precision: for each trouble, how often it was among the first two, and how often it was a true cause then.
    matrix: for each kind, how often each trouble was among the first two of its logs; `(none)`: no finding.
    """

    logs: int
    incidents: int
    named: int
    singles: int
    single_named: int
    healthy: int
    alarms: int
    by_kind: dict[str, tuple[int, int]]
    precision: dict[str, tuple[int, int]]
    matrix: dict[str, dict[str, int]]

    @classmethod
    def of(cls, found: Sequence[Found]) -> Findings:
        """Sum up what was found."""
        singles = [one for one in found if len(one.kinds) == 1]
        healthy = [one for one in found if not one.kinds]
        kinds: dict[str, list[bool]] = {}
        matrix: dict[str, Counter[str]] = {}
        shown: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for one in found:
            for kind, named in zip(one.kinds or ("(healthy)",), one.named or (not one.first,), strict=True):
                kinds.setdefault(kind, []).append(named)
                matrix.setdefault(kind, Counter()).update(one.first or ("(none)",))
            true = {cause for causes in one.causes for cause in causes}
            shown.update(set(one.first))
            right.update(true.intersection(one.first))
        return cls(
            logs=len(found),
            incidents=sum(len(one.kinds) for one in found),
            named=sum(sum(one.named) for one in found),
            singles=len(singles),
            single_named=sum(sum(one.named) for one in singles),
            healthy=len(healthy),
            alarms=sum(bool(one.troubles) for one in healthy),
            by_kind={kind: (sum(named), len(named)) for kind, named in sorted(kinds.items())},
            precision={name: (right[name], shown[name]) for name in sorted(shown)},
            matrix={kind: dict(row.most_common()) for kind, row in sorted(matrix.items())},
        )
