"""Measure how long kvsm takes to start: `import kvsm`, `kvsm --help`, and the help of each command.

Each start is a process of its own. The programs take turns with an empty program, whose CPU time is that of
Python itself.

    python benchmarks/startup.py --output benchmarks/results/startup.md
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
from page import markdown_table, publish

from kvsm.cli import COMMANDS

NOTE = (
    "seconds of CPU time of one process, user and system, on two cores that others use too; the median of "
    "{rounds} rounds, and the least"
)


def cpu_seconds(arguments: Sequence[str]) -> float:
    """Return the CPU time of one process with these arguments. Python may cache compiled modules, as after an
    install."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Starts of each program.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the table here, with the command.")
def main(rounds: int, output: Path | None) -> None:
    """Measure how long kvsm takes to start."""
    python = ("Python alone", ["-c", "pass"])
    programs = dict(
        [
            python,
            ("`import kvsm`", ["-c", "import kvsm"]),
            ("`kvsm --help`", ["-m", "kvsm", "--help"]),
            ("`import numpy`, for comparison", ["-c", "import numpy"]),
            *((f"`kvsm {name} --help`", ["-m", "kvsm", name, "--help"]) for name in COMMANDS),
        ]
    )
    for arguments in programs.values():
        cpu_seconds(arguments)  # the first start compiles the modules, and reads them from disk
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, arguments in programs.items():
            times[name].append(cpu_seconds(arguments))
    alone = times[python[0]]
    rows = [
        [
            name,
            f"{median(taken):.3f}",
            f"{min(taken):.3f}",
            f"{median(taken) - median(alone):.3f}",
            f"{median(taken) / median(alone):.1f}",
        ]
        for name, taken in times.items()
    ]
    header = ["program", "median (s)", "least (s)", "above Python alone (s)", "times Python alone"]
    publish("How long kvsm takes to start", NOTE.format(rounds=rounds), markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
