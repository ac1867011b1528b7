"""Syntax trees for tests that read code. Each file is parsed once per process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, the module first. They are shared: do not change them.

    Parse without garbage collection, which would visit the nodes of all files again and again: two thirds of
    the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    finally:
        if enabled:
            gc.enable()
