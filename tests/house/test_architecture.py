"""docs/architecture.md leads to the code: each place that it names exists, and each name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from places import ROOT
from source_trees import nodes_of

TEXT = (ROOT / "docs" / "architecture.md").read_text()
QUESTIONS = re.findall(r"^\| (.+\?) \| \[`([\w/.]+)`\]\(\.\./([\w/.]+)\): (.+) \|$", TEXT, re.MULTILINE)
"""(question, file as shown, file as linked, names in that file)."""


def defined_in(path: Path) -> set[str]:
    """Names of all functions, classes and assigned variables of a module, at any depth."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_the_index_answers_at_least_twenty_questions() -> None:
    assert len(QUESTIONS) >= 20


@pytest.mark.parametrize(("question", "shown", "linked", "names"), QUESTIONS)
def test_the_place_of_an_answer_exists(question: str, shown: str, linked: str, names: str) -> None:
    assert shown == linked, question
    wanted = set(re.findall(r"`(\w+)`", names))
    assert wanted, question
    assert wanted <= defined_in(ROOT / linked), question


def test_every_link_leads_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_path_in_the_documents_exists() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for path in re.findall(r"`((?:kvsm|tests|specs|benchmarks|examples)/[\w/.]+)`", document.read_text()):
            assert "NAME" in path or (ROOT / path).exists(), f"{document.name} names {path}"


def test_every_page_is_in_the_site() -> None:
    """Sphinx refuses a page that no list names. Lists are in docs/index.md."""
    listed = re.findall(r"^([\w-]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {*listed, "index"}


def test_a_class_name_means_one_thing() -> None:
    """No two classes of the package share a name."""
    places = defaultdict(set)
    for path in sorted((ROOT / "kvsm").rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}
