"""docs/findings.md can be acted on: each finding has its parts, its test, its script and its report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from upstream_reports import PARTS, UPSTREAM, Finding, _finding, findings, pages
from write_docs import DOCS

ROOT = Path(__file__).parents[2]
FINDINGS = findings()


def test_a_section_without_one_of_the_parts_is_named() -> None:
    lacking = "\n".join(f"**{part}.** text\n" for part in PARTS if part != "Expected")
    with pytest.raises(AssertionError, match="Title: has the parts"):
        _finding(f"Title\n\n{lacking}")


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda one: one.number)
def test_a_named_test_exists(finding: Finding) -> None:
    names = re.findall(r"`([\w/.]+)`", finding.parts["Test"])
    assert len(names) >= 2
    tree = ast.parse((ROOT / names[0]).read_text(encoding="utf-8"))
    assert set(names[1:]) <= {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda one: one.number)
def test_the_cause_names_a_line_of_vllm(finding: Finding) -> None:
    """tests/in_vllm/test_upstream.py compares it with vLLM's source."""
    assert finding.cited
    assert finding.versions


def test_each_finding_stands_in_the_table_and_has_its_own_script() -> None:
    table = (DOCS / "findings.md").read_text(encoding="utf-8").partition("\n## ")[0]
    places = re.findall(r"^\| .*?\]\(#([a-z0-9-]+)\).* \| ([0-9., ]+) \|$", table, re.MULTILINE)
    assert places == [(one.title.lower().replace(" ", "-"), ", ".join(one.versions)) for one in FINDINGS]
    scripts = sorted(path.stem for path in (UPSTREAM / "scripts").glob("*.py"))
    assert [one.number for one in FINDINGS] == scripts
    patches = {path.stem for path in (UPSTREAM / "patches").glob("*.diff")}
    assert {one.patch for one in FINDINGS if one.patch} == patches


def test_no_report_is_left_of_a_finding_that_is_gone() -> None:
    written = {name for name in pages() if name.startswith("upstream/")}
    assert {f"upstream/{path.name}" for path in UPSTREAM.glob("*.md")} == written


def test_the_scripts_need_nothing_of_kvsm_and_have_one_engine() -> None:
    engines = set()
    for path in sorted((UPSTREAM / "scripts").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "kvsm" not in text, path.name
        if (begin := text.find("# An engine without a model")) >= 0:
            engines.add(text[begin : text.index("# End of the engine.")])
    assert len(engines) == 1
