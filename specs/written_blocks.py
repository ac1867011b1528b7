"""The generated parts of pages in docs/: results of the museum, output of commands, and
programs of `examples/`.

<!-- written: museum -->            how many exhibits each checker has found
<!-- end -->

<!-- written: museum figures -->    how many exhibits are found, by the shipped commands
                                    alone and with the museum's worlds
<!-- end -->

<!-- written: alone -->             how many exhibits each shipped command has found, and which none has
<!-- end -->

<!-- written: own findings -->      the exhibits that kvsm found itself
<!-- end -->

<!-- written: symptoms -->          the exhibits in a taxonomy of bugs; `causes`: by root cause
<!-- end -->

<!-- written: properties -->        which checker looks at which property
<!-- end -->

<!-- written: bounds -->            the models of `kvsm check`, and the bounds of their widest scopes
<!-- end -->

<!-- written: kvsm why incident r50 -->
<!-- end -->                        the command and its output, for a log that is the same on every machine

<!-- written: examples/engine/engine.py, Compute. -->
<!-- end -->                        a section of a program, which begins with a comment between blank lines;
                                    `, start`: all before the first section; only the path: the whole program
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from click.testing import CliRunner
from museum import EXHIBITS
from museum.alone import ALONE, ALONE_AGAIN, AloneBy
from museum.found import FOUND
from museum.product_alone import SEEDS
from museum.taxonomy import causes_table, symptoms_table
from property_table import bounds_table, property_table

from kvsm.cli import main

ROOT = Path(__file__).resolve().parents[1]

INCIDENT = "run --requests 150 --device-blocks 64 --host-blocks 160 --copies simulated --log incident"
"""The command that writes the log `incident`: a run under memory pressure. Copies are simulated, so the log
is always the same."""

_SECTION = re.compile(r"^    # ([A-Z].*\.)(?=\n\n)", re.MULTILINE)
_BLOCK = re.compile(r"(<!-- written: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_written_blocks(page: str, link: Callable[[str], str]) -> str:
    """Return the page with up-to-date generated blocks. link: turns the source of a bug into a Markdown
    link."""

    tables: dict[str, Callable[[], str]] = {
        "museum": museum_table,
        "museum figures": museum_figures,
        "alone": alone_table,
        "own findings": lambda: own_findings_table(link),
        "symptoms": symptoms_table,
        "causes": causes_table,
        "properties": property_table,
        "bounds": bounds_table,
    }

    def block(found: re.Match[str]) -> str:
        what = found[2]
        if what in tables:
            text = tables[what]()
        elif what.startswith("examples/"):
            path, _, section = what.partition(", ")
            text = f"```python\n{program_text(path, section)}```\n"
        else:
            text = f"```text\n$ {what}\n{output_of(what)}```\n"
        return f"{found[1]}{text}{found[3]}"

    return _BLOCK.sub(block, page)


def museum_table() -> str:
    """Return a table of how many exhibits each kind of checker found first, and in how many steps."""
    steps: dict[str, list[int]] = {}
    for one in FOUND.values():
        steps.setdefault(re.split(",| with ", one.checker)[0], []).append(one.steps)
    rows = [
        f"| {checker} | {len(of_checker)} | {min(of_checker)} to {max(of_checker)} |\n"
        for checker, of_checker in sorted(steps.items(), key=lambda row: -len(row[1]))
    ]
    every = [one.steps for one in FOUND.values()]
    total = f"| all, of {len(EXHIBITS)} exhibits | {len(every)} | {min(every)} to {max(every)} |\n"
    return "| found first by | exhibits | steps |\n| --- | --- | --- |\n" + "".join(rows) + total


def museum_figures() -> str:
    """Return the two figures of the museum, as a paragraph."""
    count = len(EXHIBITS)
    alone = f"{len(ALONE)} of {count} by the shipped commands alone"
    again = "" if len(ALONE_AGAIN) == len(ALONE) else f" (with a second seed {len(ALONE_AGAIN)})"
    return f"**{alone}{again}, {len(FOUND)} of {count} with the museum's worlds.**\n"


def alone_table() -> str:
    """Return a table of the exhibits that each target finds by itself, and of those that none finds."""
    targets = sorted({one.target for rows in (ALONE, ALONE_AGAIN) for one in rows.values()})
    by_target = sorted(targets, key=lambda target: -sum(one.target == target for one in ALONE.values()))
    rows = [
        f"| {target} | {_found_by(target, ALONE)} | {_found_by(target, ALONE_AGAIN)} |\n"
        for target in by_target
    ]
    missed = [", ".join(id for id in EXHIBITS if id not in found) or "none" for found in (ALONE, ALONE_AGAIN)]
    rows.append(f"| nothing within the budget | {missed[0]} | | {missed[1]} | |\n")
    each = " | ".join(f"exhibits, seed {seed} | operations: median, most" for seed in SEEDS)
    head = f"| target | {each} |\n"
    return head + "| --- | --- | --- | --- | --- |\n" + "".join(rows)


def _found_by(target: str, found: Mapping[str, AloneBy]) -> str:
    """Return the cells of a target: number of exhibits; operations until the failure."""
    effort = [one.effort for one in found.values() if one.target == target]
    return f"{len(effort)} | {median(effort):,.0f}, {max(effort):,}" if effort else "0 | "


def own_findings_table(link: Callable[[str], str]) -> str:
    """Return a table of the exhibits that kvsm found itself, with the property that each breaks."""
    own = [one for one in EXHIBITS.values() if ", found by kvsm: " in one.source]
    rows = [f"| {one.id} | {link(one.source)} | {one.breaks} |\n" for one in own]
    return "| exhibit | defect | breaks |\n| --- | --- | --- |\n" + "".join(rows)


def program_text(path: str, section: str) -> str:
    """The text of a program of `examples/`, or of one section if it is not empty. Raises `KeyError` if there
    is no such section."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not section:
        return text
    starts = [0, *[found.start() for found in _SECTION.finditer(text)], len(text)]
    titles = ["start", *_SECTION.findall(text)]
    sections = {title: text[first:last] for title, first, last in zip(titles, starts, starts[1:])}
    return sections[section].rstrip("\n") + "\n"


@contextmanager
def working_in(place: str) -> Iterator[None]:
    """A `with` block in this directory, so that commands name their log without a path."""
    before = os.getcwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


@cache
def output_of(command: str) -> str:
    """Return the output of a command on the log `incident`. Raises `RuntimeError` if the command fails."""
    program, *arguments = shlex.split(command)
    assert program == "kvsm", command
    runner = CliRunner(env={"COLUMNS": "110", "NO_COLOR": "1"})
    with TemporaryDirectory() as place, working_in(place):
        for call in (shlex.split(INCIDENT), arguments):
            result = runner.invoke(main, call)
            if result.exit_code:
                raise RuntimeError(f"{call}: {result.output}")
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())
