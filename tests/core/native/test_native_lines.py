"""Tests and walks take the lines and branches of the native body (`specs/native_lines.py`)."""

from __future__ import annotations

import shutil

import native_lines
import pytest
from native_house import COMPILER

from kvsm.core import native


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or shutil.which("gcov") is None, reason="there is no gcc, or no gcov")
def test_most_lines_and_branches_of_c_are_taken() -> None:
    """If this fails, new C text has no test: `python specs/native_lines.py` lists the lines."""
    assert not native.WHY_NOT
    counts, branches = native_lines.lines_and_branches(native_lines.lines())
    assert native_lines.share(counts) >= native_lines.LEAST_LINES
    assert native_lines.share(branches) >= native_lines.LEAST_BRANCHES
