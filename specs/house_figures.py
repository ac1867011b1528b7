"""Count lines of code: of the package, of an engine with kvsm, and of a first reading of the product.

    python specs/house_figures.py

Lines include comments and docstrings. They measure the size of the code, not its quality.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvsm"

FIRST_READING = (
    "states/*.py",
    "events.py",
    "ids.py",
    "errors.py",
    "properties.py",
    "core/plan.py",
    "core/ledger/__init__.py",
    "core/ledger/cache.py",
    "core/ledger/index.py",
    "core/ledger/key_index.py",
    "core/ledger/ledger.py",
    "core/ledger/loads.py",
    "core/ledger/order.py",
    "core/ledger/records.py",
    "core/ledger/requests.py",
    "core/ledger/restart.py",
    "core/ledger/state.py",
    "core/ledger/stores.py",
    "core/ledger/transfers.py",
    "core/policies/__init__.py",
    "core/policies/eviction_policy.py",
    "core/policies/slot_queue.py",
    "core/policies/lru.py",
    "core/offloader/*.py",
    "core/scheduler/*.py",
    "core/log/*.py",
    "copies/__init__.py",
    "copies/copy_engine.py",
    "copies/threaded.py",
    "copies/host.py",
    "copies/rank_memory.py",
    "copies/layout.py",
    "copies/pairs.py",
    "copies/geometry.py",
    "copies/worker.py",
    "copies/host_pools/host_pool.py",
)
"""The files of a first reading: one block's life, from a request to its bytes on the host."""


def lines(paths: Iterable[Path]) -> int:
    """The number of lines of these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in set(paths))


def module_at(name: str) -> Path | None:
    """The file of a module of kvsm; None if there is no such module."""
    place = ROOT.joinpath(*name.split("."))
    if (place / "__init__.py").is_file():
        return place / "__init__.py"
    return place.with_suffix(".py") if place.with_suffix(".py").is_file() else None


def imported(path: Path) -> Iterator[str]:
    """The modules of kvsm that a file imports at runtime, with their packages. They may not exist."""

    def of(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("kvsm"):
                yield str(child.module)
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            yield from of(child)

    for name in of(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        if parts[0] == "kvsm":
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def closure(start: str) -> set[Path]:
    """The files of kvsm that this module imports, directly or indirectly, also within functions."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        path = module_at(waiting.pop())
        if path is not None and path not in seen:
            seen.add(path)
            waiting += imported(path)
    return seen


def figures() -> dict[str, int]:
    """Name of a count -> number of lines."""
    python = set(PACKAGE.rglob("*.py"))
    checks = {path for room in ("check", "testing") for path in (PACKAGE / room).rglob("*.py")}
    return {
        "Python of kvsm/": lines(python),
        "Python of kvsm/ without check/ and testing/": lines(python - checks),
        "C of kvsm/": lines(PACKAGE.rglob("*.[ch]")),
        "an engine with KvsmConnector (its imports)": lines(closure("kvsm.vllm.connector")),
        "a first reading of the product": lines(
            path for pattern in FIRST_READING for path in PACKAGE.glob(pattern)
        ),
    }


if __name__ == "__main__":
    for name, count in figures().items():
        print(f"{count:7,} {name}")
