"""The layers of the house: a module imports its own layer and those below it, and never one above.

docs/architecture.md has the same layers in words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from places import ROOT
from source_trees import nodes_of

PACKAGE = ROOT / "kvsm"

LAYERS = (
    ("properties", "errors"),
    ("system",),
    ("ids", "identity", "states", "events"),
    ("core",),
    ("copies", "cuda_io"),
    ("tiers",),
    ("explain",),
    ("vllm",),
    ("serving",),
    ("check",),
    ("testing",),
    ("cli",),
)
"""From the bottom up. A layer is one or more folders or modules of `kvsm/`."""

CORE = (
    ("plan",),
    ("native",),
    ("ledger", "policies"),
    ("log", "kv_events"),
    ("offloader",),
    ("scheduler",),
)
"""The same inside `kvsm/core/`: the fold, what remembers it, and what decides by it."""

CHECK = (
    ("worlds",),
    ("explore",),
    ("protocol", "threads", "vllm_fuzz"),
    ("conformance", "proof", "walks"),
    ("scopes",),
)
"""The same inside `kvsm/check/`: worlds know no checker, and the explorer knows no world."""

HOUSES = [("kvsm", LAYERS), ("kvsm/core", CORE), ("kvsm/check", CHECK)]

ENTRY_POINTS = {"__init__", "__main__"}
"""`import kvsm` and `python -m kvsm` name what is above them, and import it when it is asked for."""


@cache
def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def imports_of(path: Path) -> set[str]:
    """The modules of kvsm that a file imports, wherever in it: `kvsm.core.ledger.words`."""
    return imports_in(nodes_of(path))


def imports_in(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {
                inner if is_module(inner := f"{module}.{alias.name}") else module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "kvsm"}


def heights(layers: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {room: height for height, rooms in enumerate(layers) for room in rooms}


def climbs(folder: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Each import by which a module of this folder reaches a layer above its own, or the folder itself."""
    height, prefix = heights(layers), ".".join(folder.relative_to(ROOT).parts)
    found = []
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in sorted(imports_of(path)):
            there = name.removeprefix(prefix).split(".")[1:2]
            inside = name == prefix or name.startswith(f"{prefix}.")
            if inside and room not in ENTRY_POINTS and height.get("".join(there), len(layers)) > height[room]:
                found.append(f"{path.relative_to(ROOT)} climbs to {name}")
    return found


@pytest.mark.parametrize(("folder", "layers"), HOUSES)
def test_an_import_never_climbs(folder: str, layers: tuple[tuple[str, ...], ...]) -> None:
    assert climbs(ROOT / folder, layers) == []


@pytest.mark.parametrize(("folder", "layers"), HOUSES)
def test_each_room_has_a_layer(folder: str, layers: tuple[tuple[str, ...], ...]) -> None:
    rooms = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - ENTRY_POINTS - {"__pycache__"} == set(heights(layers))


def test_the_package_has_at_most_twenty_entries() -> None:
    """A reader takes them in at one glance."""
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert len(entries) <= 20, sorted(entries)


def test_the_architecture_names_the_layers_in_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[page.index("## Layers") :]
    rows = re.findall(r"^\| \d+ \| (.+?) \|", table, re.MULTILINE)
    named = [tuple(re.findall(r"`(\w+)(?:\.py|/)`", row)) for row in rows]
    assert [set(row) for row in named] == [set(layer) for layer in LAYERS]


def test_no_modules_import_each_other() -> None:
    """A reader can take them one after the other. What is imported for types alone does not count."""
    running = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for_types = [node for node in nodes_of(path) if is_for_types(node)]
        left_out = {id(inner) for node in for_types for inner in ast.walk(node)}
        running[name] = imports_in([node for node in nodes_of(path) if id(node) not in left_out])
    while True:
        # What imports nothing that is left cannot be in a circle.
        free = {name for name, imported in running.items() if not (imported - {name}) & running.keys()}
        if not free:
            break
        running = {name: imported for name, imported in running.items() if name not in free}
    assert set(running) == set()


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
