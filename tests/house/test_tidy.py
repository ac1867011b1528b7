"""The house stays in order: the size of a function, and who may write to a ledger."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from places import ROOT
from source_trees import nodes_of

import kvsm.core.ledger

PACKAGE = ROOT / "kvsm"
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The folder of the package in which a file is: `core/ledger`, or `` for the package's own files."""
    return path.relative_to(PACKAGE).parent.as_posix()


def place(path: Path, node: ast.AST) -> str:
    """For a failure: where to look."""
    return f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"


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


_WRONG_ON_PURPOSE = "check/worlds/wrong_books.py"


def test_only_the_fold_writes_to_a_ledger() -> None:
    """Rule 1: no other code assigns to a part of a ledger, or commits words.

    Restoring a snapshot makes a new ledger. A listener only receives events. One world makes copies of
    ledgers wrong on purpose.
    """
    others = [path for path in FILES if room_of(path) != "core/ledger" and not path.match(_WRONG_ON_PURPOSE)]
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


BESIDE_THE_FOLD = {
    "canonical",
    "expected_times",
    "frozen",
    "invariants",
    "key_index",
    "snapshot",
    "state_copy",
}
"""Files of `kvsm/core/ledger/` that read a ledger or make one, and change none."""


def names_a_handler(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "kvsm.core.ledger":
        return not {alias.name for alias in node.names} <= set(kvsm.core.ledger.__all__) - {"HANDLERS"}
    if isinstance(node, ast.Import | ast.ImportFrom):
        named = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        return any(
            name.startswith("kvsm.core.ledger.") and name.split(".")[3] not in BESIDE_THE_FOLD
            for name in named
        )
    return False


def test_nobody_else_has_the_functions_that_write_to_a_ledger() -> None:
    """The handlers of events, and what they share, are reached by `Ledger.apply` alone."""
    others = [path for path in FILES if room_of(path) != "core/ledger"]
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
