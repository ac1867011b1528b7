"""Claims on the pages about vLLM name their tests, and these tests exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from places import ROOT
from source_trees import nodes_of

PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("vllm.md", "vllm-operation.md", "disaggregated-prefill.md")
}
TABLES = (
    "Options",
    "Options of one request",
    "Models",
    "Modes",
    "Methods",
    "Options of vLLM's own connectors",
)
"""Sections of vllm.md whose table has a test's name in each row."""

NAMED = re.compile(r"`(test_\w+\.py)(?:::(\w+))?(?:\[([^\]`]+)\])?`")
"""A file of tests, a test in it, and a case of that test."""

MORE = re.compile(r"`\[([^\]`]+)\]`")
"""A further case of the test that was named before."""

NOT_RUN = "not run"
"""Used instead of a test, with the reason, if this machine or vLLM's CPU build cannot run the claim."""


@cache
def file_named(name: str) -> Path | None:
    """The file of tests with this name, which is unique."""
    found = [*(ROOT / "tests").rglob(name)]
    return found[0] if len(found) == 1 else None


@cache
def names_in(path: Path) -> set[str]:
    """The names of the tests in a file, also those that Hypothesis makes from a machine (`TestX = ...`)."""
    nodes = nodes_of(path)
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {name for name in defined | assigned if name.lower().startswith("test")}


@cache
def words_near(path: Path) -> set[str]:
    """Return the strings in a file of tests and in the modules that it imports; cases are named there."""
    imported = [node.module for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
    beside = [path.parent / f"{module}.py" for module in imported]
    return {
        node.value
        for module in (path, *beside)
        if module.exists()
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def wrong_name(file: str, test: str, case: str) -> str | None:
    """Return why there is no such test; None if there is one."""
    path = file_named(file)
    if path is None:
        return f"no file {file}, or several"
    if test and test not in names_in(path):
        return f"no test {test} in {file}"
    if case and case not in words_near(path):
        return f"no case {case!r} of {test} in {file}"
    return None


def names_on(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (file, test, case) of each test that the page names."""
    file = test = ""
    for span in re.findall(r"`[^`\n]+`", page):
        if named := NAMED.fullmatch(span):
            file, test, case = (part or "" for part in named.groups())
            yield file, test, case
        elif more := MORE.fullmatch(span):
            yield file, test, more[1]


def claims(page: str) -> Iterator[tuple[str, str]]:
    """Yield (row, its cell in the column `test`) of each table with such a column."""
    column = None
    for line in page.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if column is None:
            column = cells.index("test") if "test" in cells else -1
        elif column >= 0 and set(cells[0]) != {"-"}:
            yield line, cells[column]


each_page = pytest.mark.parametrize("name", PAGES)


@each_page
def test_every_test_that_the_page_names_exists(name: str) -> None:
    names = [*names_on(PAGES[name])]
    assert names
    assert [wrong for named in names if (wrong := wrong_name(*named))] == []


@each_page
def test_every_row_has_a_test_or_says_why_not(name: str) -> None:
    """A claim without a test would remain when it is no longer true."""
    rows = [*claims(PAGES[name])]
    assert rows
    assert [row for row, test in rows if not NAMED.search(test) and not test.startswith(NOT_RUN)] == []


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_a_table_with_tests(title: str) -> None:
    (section,) = re.findall(
        rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGES["vllm.md"], re.DOTALL | re.MULTILINE
    )
    assert [*claims(section)]


@pytest.mark.parametrize(
    "name",
    [
        "`test_no_such_file.py::test_x`",
        "`test_hybrid.py::test_no_such_test`",
        "`test_hybrid.py::test_tokens_are_those_without_offload[no such case]`",
    ],
)
def test_a_name_of_nothing_is_seen(name: str) -> None:
    ((file, test, case),) = NAMED.findall(name)
    assert wrong_name(file, test, case)
