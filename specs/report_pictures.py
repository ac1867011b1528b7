"""Draw the pictures of docs/report.md as SVG texts, which are the same on every machine.

Each picture is drawn from tables of `specs/museum` or from a file in benchmarks/results. `write_docs` writes
them, and a test compares them with the current tables and files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from museum.alone import ALONE
from museum.found import FOUND
from museum.taxonomy import STUDY_BUGS, STUDY_SYMPTOMS, Symptom, symptoms

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WIDTH, LABELS, ROW, TOP, VALUES = 760, 270, 22, 44, 140
COLOURS = ("#3b6ea5", "#d9822b")
"""Colours of the first and of the second series of bars."""


class Bars(NamedTuple):
    """One row of a bar chart: its label, and for each series a value and the text beside its bar."""

    label: str
    values: tuple[float, ...]
    texts: tuple[str, ...]


def pictures() -> dict[str, str]:
    """Return file name -> SVG text."""
    return {
        "report-symptoms.svg": symptoms_picture(),
        "report-steps.svg": steps_picture(),
        "report-log-cost.svg": log_cost_picture(),
        "report-whatif.svg": whatif_picture(),
    }


def symptoms_picture() -> str:
    ours, of_study = symptoms(), sum(STUDY_SYMPTOMS.values())
    rows = []
    for one in Symptom:
        shares = STUDY_SYMPTOMS[one] / of_study, ours[one] / ours.total()
        rows.append(Bars(one.value, shares, tuple(f"{share:.0%}" for share in shares)))
    series = (
        f"{STUDY_BUGS} bugs of inference engines ({of_study} symptoms)",
        f"{ours.total()} bugs of KV-cache offload (the museum)",
    )
    return bar_chart("Symptoms: share of all", rows, series)


def steps_picture() -> str:
    sightings = [one.steps for one in FOUND.values()], [one.steps for one in ALONE.values()]
    limits = ((1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256))
    rows = []
    for first, last in limits:
        counts = tuple(sum(first <= number <= last for number in steps) for steps in sightings)
        rows.append(Bars(f"{first} to {last} steps", counts, tuple(map(str, counts))))
    series = tuple(
        f"{name}: {len(steps)}"
        for name, steps in zip(("with the museum's worlds", "by the shipped commands alone"), sightings)
    )
    return bar_chart("Exhibits of the museum, by the length of the trace that shows them", rows, series)


def log_cost_picture() -> str:
    rows = []
    for trace, contestant, median, text in control_plane():
        rows.append(Bars(f"{trace}: {contestant}", (median,), (text,)))
    return bar_chart("Control plane: microseconds for one life of a block (median)", rows)


def control_plane() -> Iterator[tuple[str, str, float, str]]:
    """Yield workload, contestant, median, and median with its range, from control_plane.md."""
    names = {"Trace at 16 tokens a block": "trace", "Requests of one block": "one block"}
    text = (RESULTS / "control_plane.md").read_text(encoding="utf-8")
    for part in text.split("\n### ")[1:]:
        title = part.split("\n")[0]
        for contestant, spread in re.findall(r"^\| ([^|]+) \| (\d[^|]+) \| [\d.]+ \|", part, re.MULTILINE):
            yield names[title], contestant, float(spread.split()[0]), spread


def whatif_picture() -> str:
    differences = whatif_differences()
    limits = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    rows = []
    for low, high in pairwise(limits):
        count = sum(low <= one < high for one in differences)
        rows.append(Bars(f"{low:g} to {high:g} points", (count,), (str(count),)))
    title = f"kvsm whatif: {len(differences)} predicted hit rates, by their difference from a real run"
    return bar_chart(title, rows)


def whatif_differences() -> list[float]:
    """Return the absolute differences of all comparisons of benchmarks/results/whatif.md, in points."""
    text = (RESULTS / "whatif.md").read_text(encoding="utf-8").split("### All comparisons")[1]
    row = r"^\|(?: [^|]+ \|){4} \d+ \| [\d.]+% \| [\d.]+% \| ([-+][\d.]+) \|"
    return [abs(float(one)) for one in re.findall(row, text, re.MULTILINE)]


def bar_chart(title: str, rows: Sequence[Bars], series: Sequence[str] = ()) -> str:
    """Draw horizontal bars, one group a row. series: names of the bars of a group, if there are several."""
    bars = max(len(row.values) for row in rows)
    pitch = ROW * bars + (8 if bars > 1 else 0)
    top = TOP + 20 * (len(series) > 0)
    height = top + pitch * len(rows) + 10
    most = max(value for row in rows for value in row.values)
    scale = (WIDTH - LABELS - VALUES - 40) / most
    parts = [_text(16, 24, title, "start", 15)]
    for number, name in enumerate(series):
        x = 16 + number * 340
        parts += [_box(x, 38, 12, 12, COLOURS[number]), _text(x + 18, 49, name, "start", 12)]
    for place, row in enumerate(rows):
        y = top + place * pitch
        parts.append(_text(LABELS - 10, y + ROW * bars / 2 + 2, row.label, "end", 12))
        for number, (value, text) in enumerate(zip(row.values, row.texts)):
            length = value * scale
            parts.append(_box(LABELS, y + number * ROW + 2, length, ROW - 6, COLOURS[number]))
            parts.append(_text(LABELS + length + 6, y + number * ROW + 14, text, "start", 12))
    box = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "".join(parts) + "</svg>\n"
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>\n'


def _text(x: float, y: float, text: str, anchor: str, size: int) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222222">{escape(text)}</text>\n'
