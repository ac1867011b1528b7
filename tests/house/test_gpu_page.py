"""docs/vllm-gpu.md says what has run on a GPU, as the pages of results and the scripts have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "vllm-gpu.md"
BENCHMARKS = ROOT / "benchmarks"
IN_VLLM = BENCHMARKS / "results" / "vllm_gpu.md"


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


RUN = [*rows_of("What has run on a GPU"), *rows_of("Dry runs without a GPU")]
WITH_RESULTS = [row for row in RUN if "](../benchmarks/results/" in row[-1]]


@pytest.mark.parametrize("row", WITH_RESULTS, ids=[row[0][:30] for row in WITH_RESULTS])
def test_the_command_and_the_machine_are_those_of_the_results(row: list[str]) -> None:
    (link,) = re.findall(r"\]\(\.\./([^)]+)\)", row[-1])
    results = (ROOT / link).read_text(encoding="utf-8")
    command = next(cell.strip("`") for cell in row if cell.startswith("`"))
    assert f"    {command}\n" in results
    if "GPU" in results.partition("\n")[0]:
        assert "NVIDIA H200" in results
    else:
        assert f"\n{row[-2]}; " in results, "the date"


def test_a_run_in_vllm_is_claimed_exactly_if_there_are_results_of_it() -> None:
    """In the table, at the top of the page and in the README."""
    (row,) = (row for row in rows_of("What has run on a GPU") if row[0] == "kvsm in vLLM")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    claims = [
        row[-2] != "never",
        "has not run inside vLLM on a GPU yet" not in PAGE.read_text(encoding="utf-8"),
        "| in vLLM on a GPU | **never run**" not in readme,
        re.search(r"^\| vLLM on a GPU .*\| never \|", readme, re.MULTILINE) is None,
    ]
    assert claims == [IN_VLLM.exists()] * len(claims)


def test_a_row_has_a_command_and_a_date_or_says_never() -> None:
    for row in RUN:
        assert row[-2] == "never" or re.fullmatch(r"2026-\d\d-\d\d", row[-2]), row
        assert row[-2] == "never" or any(cell.startswith("`") for cell in row), row


def quoted(source: Path, pattern: str) -> list[str]:
    return re.findall(pattern, source.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_lists_the_operations_that_are_replaced() -> None:
    registered = quoted(BENCHMARKS / "vllm_gpu_ops.py", r'^    "(\w+::\w+)":')
    named = [name for row in rows_of("Compiled operations") for name in re.findall("`(.*?)`", row[0])]
    assert sorted(named) == sorted(registered)


def test_the_steps_are_those_of_the_script() -> None:
    (steps,) = quoted(BENCHMARKS / "vllm_gpu.py", r"^STEPS = \((.*)\)$")
    names = re.findall(r'"([\w-]+)"', steps)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"the steps {', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}`" in text
