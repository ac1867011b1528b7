"""Lines and branches of the native body that tests and walks execute, as counted by gcov.

    python specs/native_lines.py            # each line that is not executed, and a table by file

The body is built with counters in a copy of the checkout, where the programs of `RUNS` then run.
`tests/core/native/test_native_lines.py` requires `LEAST_LINES` and `LEAST_BRANCHES`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from native_house import ROOT, House

_TESTS = ("native", "native_calls", "native_offers", "native_hostile", "slot_queue", "frozen_state", "saving")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=1")
"""With a fixed seed, so that the same text of C has the same figures."""


def _walk(target: str, runs: int) -> tuple[str, ...]:
    options = ("--seed", "1", "--runs", str(runs), "--jobs", "1", "--reduce-seconds", "0")
    return ("-m", "kvsm", "fuzz", "--target", target, *options)


RUNS: tuple[tuple[str, ...], ...] = (
    ("tests/support/native_lockstep.py", "0", "80"),
    ("tests/support/hostile_native.py", "0", "60"),
    _walk("core", 60),
    _walk("serving", 25),
    _walk("layers", 25),
    (*_PYTEST, "-m", "slow or not slow", "tests/core/native/test_native_memory.py"),
    (*_PYTEST, "tests/copies/test_geometry.py"),
    (*_PYTEST, *(str(path) for name in _TESTS for path in sorted(ROOT.glob(f"tests/*/*/test_{name}.py")))),
)

LEAST_LINES, LEAST_BRANCHES = 95.0, 81.0
"""Percent of the lines and branches that must be executed. specs/mutation.md says which are not."""


class Line(NamedTuple):
    """A line of C with machine code.

    taken: how often it ran.
    branches: how often each of its branches was taken.
    """

    file: str
    number: int
    text: str
    taken: int
    branches: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


def lines() -> list[Line]:
    """Run `RUNS` with a body that counts, and return all lines of C."""
    with tempfile.TemporaryDirectory() as place:
        house = House(Path(place) / "house")
        house.count_memory()
        house.build("-O0", "--coverage")
        for command in RUNS:
            done = house.run(*command)
            if done.returncode:
                raise SystemExit(done.stdout[-6000:])
        return counted(house)


def counted(house: House) -> list[Line]:
    """What gcov has counted. A line of a header is summed over all files that include it."""
    found: dict[tuple[str, int], Line] = {}
    for data in sorted(house.native.glob("*.gcda")):
        command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", data.name]
        told = subprocess.run(command, cwd=house.native, capture_output=True, check=True).stdout
        for file in json.loads(told)["files"]:
            if "/" in file["file"]:
                continue
            texts = (house.native / file["file"]).read_text().splitlines()
            for line in file["lines"]:
                place = (file["file"], line["line_number"])
                before = found.get(place)
                branches = [one["count"] for one in line["branches"]]
                if before is not None:
                    branches = [a + b for a, b in zip(branches, before.branches)] or branches
                taken = line["count"] + (before.taken if before else 0)
                found[place] = Line(*place, texts[place[1] - 1].strip(), taken, tuple(branches))
    return sorted(found.values())


def share(counts: Sequence[int]) -> float:
    """The percentage of these counts that are not zero."""
    return 100 * (1 - counts.count(0) / len(counts))


def untaken(all_lines: list[Line]) -> list[Line]:
    """The lines that no run executes."""
    return [line for line in all_lines if line.taken == 0]


def table(all_lines: list[Line]) -> str:
    """Lines and branches by file, as a Markdown table."""
    rows = ["| file | lines | taken | branches | taken |", "| --- | --: | --: | --: | --: |"]
    for file in [*sorted({line.file for line in all_lines if line.branches}), "all"]:
        mine = [line for line in all_lines if file in (line.file, "all")]
        counts, branches = lines_and_branches(mine)
        shares = (f"{share(counts):.1f} %", f"{share(branches):.1f} %")
        rows.append(f"| {file} | {len(counts)} | {shares[0]} | {len(branches)} | {shares[1]} |")
    return "\n".join(rows)


def lines_and_branches(some: list[Line]) -> tuple[list[int], list[int]]:
    """How often each line and each branch was taken."""
    return [line.taken for line in some], [count for line in some for count in line.branches]


def main() -> None:
    measured = lines()
    print(*untaken(measured), sep="\n")
    print(table(measured))


if __name__ == "__main__":
    main()
