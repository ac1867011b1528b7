"""The pages that list what the code declares say what it declares now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_field
from museum import EXHIBITS
from museum.checkers import CHECKERS
from museum.found import FOUND
from property_table import STARTS_OF_MODELS, definitions, named_by, property_table, symbol_of
from write_docs import DOCS, MUSEUM_README, museum_readme, pages, source_link

from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.models import MODELS
from kvsm.check.worlds.serving_world import EndingServing
from kvsm.properties import Property


def test_pages_are_current() -> None:
    """`PYTHONPATH=specs python -m write_docs` writes them."""
    for name, text in pages().items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name
    assert MUSEUM_README.read_text(encoding="utf-8") == museum_readme()


def test_the_pages_of_the_field_are_current() -> None:
    """`PYTHONPATH=.:specs python -m write_field render` writes them from the results that are kept."""
    for path, text in write_field.texts().items():
        assert path.read_text(encoding="utf-8") == text, path
    names = {path.name for path in write_field.PAGES.iterdir()}
    assert names == {f"{name}.{end}" for name in write_field.answers() for end in ("json", "md")}


def test_no_page_of_the_field_names_a_path_of_a_machine() -> None:
    path = f'"place": "{write_field.ROOT}/kvsm/a.py:1", "/tmp/b/lib/site-packages/vllm/c.py:2"'
    assert write_field.without_machine(path) == '"place": "kvsm/a.py:1", "vllm/c.py:2"'
    for page in write_field.PAGES.iterdir():
        assert "site-packages" not in page.read_text(encoding="utf-8"), page


def test_no_schema_is_left_of_an_answer_that_is_gone() -> None:
    written = {name for name in pages() if name.startswith("schemas/")}
    assert {f"schemas/{path.name}" for path in (DOCS / "schemas").iterdir()} == written


def test_every_property_has_its_row_in_the_page_on_verification() -> None:
    page = (DOCS / "verification.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([^|]* \(S\d+\)) \|(?:[^|]*\|){6}$", page, re.MULTILINE) == [*map(str, Property)]


def test_every_model_and_every_property_is_in_the_table_of_checks() -> None:
    """Each model of `kvsm check` says where its checks begin, and each property is checked somewhere."""
    declared = {name for name, model in MODELS.items() if isinstance(model, DeclaredModel)}
    assert declared | {*STARTS_OF_MODELS} == {*MODELS}
    for row in property_table().splitlines()[2:]:
        assert any(cell.strip() for cell in row.split("|")[2:7]), row


def test_a_check_that_goes_is_missing_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell of flush at last step (S17) follows from the check in the small engine's world."""
    assert Property.LAST_STEP in named_by(symbol_of(EndingServing))
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **how: read(path, **how).replace("Property.LAST_STEP", "Property.PROGRESS"),
    )
    definitions.cache_clear()
    assert Property.LAST_STEP not in named_by(symbol_of(EndingServing))
    definitions.cache_clear()


def test_every_bug_is_found_by_a_checker_that_exists() -> None:
    assert [*FOUND] == [*EXHIBITS]
    assert {one.checker for one in FOUND.values()} <= {one.name for one in CHECKERS}


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("vllm#41289", "vllm-project/vllm/issues/41289"),
        ("vllm#41956, review", "vllm-project/vllm/issues/41956"),
        ("dynamo PR 4171", "ai-dynamo/dynamo/pull/4171"),
        ("FlexKV 098aee6", "taco-project/FlexKV/commit/098aee6"),
        ("vllm, copy thread", "vllm-project/vllm"),
    ],
)
def test_a_source_is_a_link(source: str, place: str) -> None:
    assert source_link(source) == f"[{source}](https://github.com/{place})"


def test_a_finding_of_kvsm_links_to_its_heading() -> None:
    """Each exhibit that kvsm has found itself, and its finding names the exhibit."""
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    own = [one for one in EXHIBITS.values() if ", found by kvsm: " in one.source]
    headings = re.findall(r"^## (.+)\n\nExhibit (B\d+) of the museum", page, re.MULTILINE)
    assert {(one.source.partition(": ")[2], one.id) for one in own} == {(h.lower(), id) for h, id in headings}
    place = "findings.md#a-load-beside-a-store"
    assert source_link(EXHIBITS["B65"].source) == f"[vllm, found by kvsm: a load beside a store]({place})"
