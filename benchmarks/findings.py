"""Whether `kvsm report` names the causes of generated incidents, and is silent about healthy logs.

    python benchmarks/findings.py --logs 200 --seed 20261129 --jobs 2

Makes logs with no, one or two incidents (`tests/support/generated_incidents`), and reads each with the
report. Prints how often the true cause is among the first two findings, the confusion matrix by kind of
incident, and the precision of each trouble: how often it is a true cause when it is among the first two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

from generated_incidents import KINDS, Made, generate, make  # noqa: E402

from kvsm.cli.opened_tables import opened_tier  # noqa: E402
from kvsm.explain.report.log_report import make_report  # noqa: E402
from kvsm.explain.tables.opened import open as open_log  # noqa: E402

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


def lines(findings: Findings) -> Iterator[str]:
    """Format the findings as Markdown."""
    yield f"{findings.logs} logs, {findings.healthy} of them healthy, with {findings.incidents} incidents."
    yield ""
    yield f"- The cause is among the first two findings: {_share(findings.named, findings.incidents)}"
    yield f"- ... in logs with one incident: {_share(findings.single_named, findings.singles)}"
    yield f"- Healthy logs with a finding: {_share(findings.alarms, findings.healthy)}"
    yield from ("", "| incident | named | among the first two findings |", "| --- | --- | --- |")
    for kind, row in findings.matrix.items():
        named, logs = findings.by_kind[kind]
        cells = ", ".join(f"{name} {count}" for name, count in row.items())
        yield f"| {kind} | {named} of {logs} | {cells} |"
    yield from ("", "| trouble | precision |", "| --- | --- |")
    for name, (right, shown) in findings.precision.items():
        yield f"| {name} | {_share(right, shown)} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % ({part} of {whole})" if whole else "-"


def main() -> None:
    """Make the logs, and print what the report finds in them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=int, default=200, help="number of logs (200)")
    parser.add_argument("--seed", type=int, default=1, help="the first log's seed is SEED * 1,000,000")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--healthy", action="store_true", help="make healthy logs only")
    parser.add_argument("--kind", choices=sorted(KINDS), help="make logs with this incident only")
    parser.add_argument("--each", action="store_true", help="print what is found in each log, too")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    chosen = parser.parse_args()
    seeds = range(chosen.seed * 1_000_000, chosen.seed * 1_000_000 + chosen.logs)
    found: list[Found] = []
    for one in all_judged(seeds, chosen.jobs, healthy=chosen.healthy, kind=chosen.kind):
        found.append(one)
        if chosen.each:
            wrong = "" if all(one.named) and (one.kinds or not one.troubles) else "  <-- wrong"
            print(one.seed, one.background, one.kinds, "->", one.troubles, wrong)
        if sys.stderr.isatty():
            print(f"\r{len(found)} of {chosen.logs} logs", end="", file=sys.stderr, flush=True)
    sums = Findings.of(found)
    print(json.dumps(msgspec.to_builtins(sums), indent=1) if chosen.json else "\n".join(lines(sums)))


if __name__ == "__main__":
    main()
