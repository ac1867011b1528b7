"""docs/architecture.md leads to the code: each place that it names exists, and each name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from places import ROOT
from source_trees import nodes_of

import kvsm
import kvsm.copies
import kvsm.core.scheduler
import kvsm.testing

TEXT = (ROOT / "docs" / "architecture.md").read_text()
PLACE = r"\[`[\w/.]+`\]\(\.\./[\w/.]+\): `[\w.]+`(?:, `[\w.]+`)*"
"""A place in the code: [`file`](../file): `name`, `name`."""
QUESTIONS = re.findall(rf"^\| ([^|\n]+\?) \| ({PLACE}) \|$", TEXT, re.MULTILINE)
"""(question, place) of each row of the index."""


def part_of_page(title: str) -> str:
    """The text under a heading, up to the next heading of its level."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def steps_of(text: str) -> list[str]:
    """The steps of a numbered list, each on one line."""
    steps = re.findall(r"^\d+\. .+(?:\n {3,}\S.*)*", text, re.MULTILINE)
    return [" ".join(step.split()) for step in steps]


STORIES = {
    "One block's life": steps_of(part_of_page("One block's life")),
    **{
        story.partition("\n")[0]: steps_of(story.partition("\n")[2])
        for story in part_of_page("Ten stories that cross rooms").split("\n### ")[1:]
    },
}
"""Title -> its steps."""
STEPS = [(title, step) for title, steps in STORIES.items() for step in steps]


def defined_in(path: Path) -> set[str]:
    """Names of all functions, classes and assigned variables of a module, at any depth. A method also counts
    as `Class.method`."""
    if path.suffix == ".c":
        # A line that begins in the first column and names something before a bracket defines or declares it.
        return set(re.findall(r"^\w[\w \*]*?(\w+)[\[(]", path.read_text(), re.MULTILINE))
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def assert_place_exists(place: str, where: str) -> None:
    """Check a text of the form `PLACE`."""
    match = re.fullmatch(r"\[`(.+?)`\]\(\.\./(.+?)\): (.+)", place)
    assert match is not None, where
    shown, linked, names = match.groups()
    assert shown == linked, where
    assert set(re.findall(r"`([\w.]+)`", names)) <= defined_in(ROOT / linked), where


def test_the_index_is_short_enough_to_be_read() -> None:
    """A row of another form than `PLACE` is not counted here, so it is missed."""
    rows = [line for line in part_of_page("Where is it decided ...?").splitlines() if line.startswith("| ")]
    assert len(QUESTIONS) == len(rows) - 2
    assert 20 <= len(QUESTIONS) <= 40


@pytest.mark.parametrize(("question", "place"), QUESTIONS)
def test_the_place_of_an_answer_exists(question: str, place: str) -> None:
    assert_place_exists(place, question)


def test_there_are_ten_stories() -> None:
    titles = [title for title in STORIES if title[0].isdigit()]
    assert [int(title.partition(".")[0]) for title in titles] == [*range(1, 11)]


@pytest.mark.parametrize("title", STORIES)
def test_a_story_has_five_to_twelve_steps(title: str) -> None:
    """They are numbered in their order."""
    numbers = [int(step.partition(".")[0]) for step in STORIES[title]]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert 5 <= len(numbers) <= 12


@pytest.mark.parametrize(("title", "step"), STEPS)
def test_a_step_is_a_sentence_and_the_place_where_it_happens(title: str, step: str) -> None:
    where = f"{title}: {step}"
    match = re.fullmatch(rf"\d+\. ([^\[]+\.) ({PLACE}(?:; {PLACE})*)", step)
    assert match is not None, where
    sentence, places = match.groups()
    assert ". " not in sentence, where
    for place in places.split("; "):
        assert_place_exists(place, where)


def test_the_diagrams_name_files_that_exist() -> None:
    """A name with a slash in a diagram is a file or a folder of `kvsm/`."""
    named = re.findall(r"\w+(?:/\w+)+", "".join(re.findall(r"```mermaid\n(.+?)```", TEXT, re.DOTALL)))
    assert named
    for name in named:
        path = ROOT / "kvsm" / name
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_every_path_in_the_documents_exists() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for path in re.findall(r"`((?:kvsm|tests|specs|benchmarks|examples)/[\w/.]+)`", document.read_text()):
            assert "NAME" in path or (ROOT / path).exists(), f"{document.name} names {path}"


def test_a_page_links_to_the_source_that_it_names() -> None:
    """A reader of the site does not have the source files. NAME is a placeholder for a file of the reader."""
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        prose = re.sub(r"(?sm)^ *```.*?^ *```|<!--.*?-->|\[[^\]]*\]\([^)]*\)", "", document.read_text())
        # A code span with blanks is a message or a command.
        named = re.sub(r"`[^`]+`", lambda span: "" if " " in span[0] else span[0], prose)
        unlinked = [path for path in re.findall(r"kvsm/[\w/]+\.(?:py|c|h)\b", named) if "NAME" not in path]
        assert unlinked == [], f"{document.name} names {unlinked[:1]} without a link"


def test_the_reference_has_each_public_name_once() -> None:
    """Sphinx refuses a name that is documented twice."""
    text, documented = (ROOT / "docs" / "reference.md").read_text(), set[str]()
    for module in (kvsm, kvsm.core.scheduler, kvsm.copies, kvsm.testing):
        directive = (
            rf"automodule:: {re.escape(module.__name__)}\n   :members:\n(?:   :exclude-members: (.*)\n)?```"
        )
        found = re.search(directive, text)
        assert found is not None, module.__name__
        left_out = set(found[1].split(", ")) if found[1] else set()
        assert left_out == documented & set(module.__all__)
        documented |= set(module.__all__)


def test_every_page_is_in_the_site() -> None:
    """Sphinx refuses a page that no list names. Lists are in docs/index.md."""
    listed = re.findall(r"^([\w-]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {*listed, "index"}


def test_a_class_name_means_one_thing() -> None:
    """No two classes of the package share a name."""
    places = defaultdict(set)
    for path in sorted((ROOT / "kvsm").rglob("*.py")):
        code = re.sub(r'(?s)""".*?"""', "", path.read_text(encoding="utf-8"))
        for name in re.findall(r"^ *class (\w+)[(:]", code, re.MULTILINE):
            places[name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}
