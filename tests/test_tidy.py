"""The house stays in order: floors, the size of a function, and who may write to a ledger."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_trees import nodes_of

import kvsm.ledger

PACKAGE = Path(__file__).parent.parent / "kvsm"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    (
        "printable",
        "properties",
        "errors",
        "ids",
        "identity",
        "options",
        "states",
        "events",
        "plan",
        "private_files",
        "file_locks",
    ),
    (
        "copy_engines",
        "disk",
        "diagrams",
        "native",
        "key_index",
        "policies",
        "ledger",
        "canonical",
        "snapshot",
        "frozen",
        "kv_events",
        "log",
        "invariants",
        "executors",
    ),
    (
        "offloader",
        "tiers",
        "gauges",
        "metrics",
        "prometheus",
        "cuda_io",
        "worker",
        "replay",
        "restart",
        "hand_over",
    ),
    ("scheduler", "analysis"),
    ("traces", "serving", "worlds", "vllm", "vllm_fuzz"),
    ("checker", "timeline", "whatif"),
    ("testing",),
    ("cli", "__main__"),
)
"""docs/architecture.md, as data: a room imports its own floor and those below."""

FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module == "kvsm":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvsm."):
            rooms.add(str(node.module).split(".")[1])
    return rooms


def place(path: Path, node: ast.AST) -> str:
    """For a failure: where to look."""
    return f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"


def test_room_imports_only_its_floor_and_those_below() -> None:
    files = [path for path in FILES if path.parent != PACKAGE or path.stem != "__init__"]
    assert [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in files
        for room in sorted(imported_rooms(path))
        if FLOOR_OF[room] > FLOOR_OF[room_of(path)]
    ] == []


def test_function_fits_on_a_screen() -> None:
    assert [
        f"{place(path, node)} {node.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ] == []


def writes_to_a_ledger(node: ast.AST) -> bool:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign)
        else []
    )
    for target in targets:
        written = ast.unparse(target)
        if ".ledger." in written or (written.startswith("ledger.") and written != "ledger.listener"):
            return True
    commits = (".blocks.commit", ".leases.commit")
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(commits)


def test_only_the_fold_writes_to_a_ledger() -> None:
    """Rule 1: no other code assigns to a part of a ledger, or commits words.

    Restoring a snapshot makes a new ledger. A listener only hears.
    """
    others = [path for path in FILES if room_of(path) not in {"ledger", "snapshot"}]
    assert [place(path, node) for path in others for node in nodes_of(path) if writes_to_a_ledger(node)] == []


def test_a_property_is_named_by_its_member() -> None:
    """A bare "S3" can be misspelt, and tells a reader nothing. Docstrings are free to use it."""
    bare = re.compile(r"(?<![(\w])S([1-9]|1[0-8])(?![\w-])")
    found = []
    for path in FILES:
        texts = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
        found += [
            place(path, node)
            for node in nodes_of(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
            if path.name != "properties.py" and bare.search(node.value)
        ]
    assert found == []


def names_a_handler(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "kvsm.ledger":
        return not {alias.name for alias in node.names} <= set(kvsm.ledger.__all__) - {"HANDLERS"}
    if isinstance(node, ast.Import | ast.ImportFrom):
        named = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        return any(name.startswith("kvsm.ledger.") for name in named)
    return False


def test_nobody_else_has_the_functions_that_write_to_a_ledger() -> None:
    """The handlers of events, and what they share, are reached by `Ledger.apply` alone."""
    others = [path for path in FILES if room_of(path) != "ledger"]
    assert [place(path, node) for path in others for node in nodes_of(path) if names_a_handler(node)] == []


def public_functions(node: ast.AST) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Public functions of a module and its public classes, each with whether it is a method."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            yield one, isinstance(node, ast.ClassDef)
        elif isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
            yield from public_functions(one)


def test_every_public_function_says_what_it_does() -> None:
    """A method may leave that to a class of the package that documents a method of the same name."""
    found = [(path, *one) for path in FILES for one in public_functions(nodes_of(path)[0])]
    documented = {node.name for _, node, is_method in found if is_method and ast.get_docstring(node)}
    assert [
        f"{path.name}:{node.lineno} {node.name}"
        for path, node, is_method in found
        if not ast.get_docstring(node) and not (is_method and node.name in documented)
    ] == []


def test_every_file_of_the_package_is_installed() -> None:
    """A file that is not Python must be named, or a wheel lacks it."""
    named = (PACKAGE.parent / "pyproject.toml").read_text().split("[tool.setuptools.package-data]")[1]
    others = [
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc", ".so"}
    ]
    assert {path.name for path in others} >= {"py.typed", "copy.cu"}
    for path in others:
        assert f'{path.name}"' in named.split("[tool.")[0], path
