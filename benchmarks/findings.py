"""Whether `kvsm report` names the causes of generated incidents, and is silent about healthy logs.

    python benchmarks/findings.py --logs 200 --seed 20261129 --jobs 2

Makes logs with no, one or two incidents (`tests/support/generated_incidents`), and reads each with the
report. Prints how often the true cause is among the first two findings, the confusion matrix by kind of
incident, and the precision of each trouble: the share of the logs with this trouble among the first two
findings in which it was a true cause.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

from generated_incidents import KINDS  # noqa: E402
from generated_incidents.findings import Findings, Found, all_judged  # noqa: E402


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


def write_confidence(module: Path, findings: Findings) -> None:
    """Replace the table in `kvsm/explain/report/confidence.py`."""
    rows = "".join(f"    {name!r}: {counts},\n" for name, counts in findings.precision.items())
    text = re.sub(
        r"(MEASURED: [^=]*= ){.*?}\n",
        lambda found: f"{found[1]}{{\n{rows}}}\n",
        module.read_text(),
        flags=re.DOTALL,
    )
    module.write_text(text.replace("'", '"'))


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
    parser.add_argument("--each", action="store_true", help="also print the findings of each log")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    parser.add_argument(
        "--confidence", type=Path, metavar="FILE", help="write the precision of the findings into this module"
    )
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
    if chosen.confidence is not None:
        write_confidence(chosen.confidence, sums)
    print(json.dumps(msgspec.to_builtins(sums), indent=1) if chosen.json else "\n".join(lines(sums)))


if __name__ == "__main__":
    main()
