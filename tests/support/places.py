"""Where the files of the project are, for tests that read them or start programs among them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

SUPPORT = Path(__file__).parent
"""What tests share."""


def search_path(*folders: Path) -> str:
    """The PYTHONPATH of a program that imports what tests share, kvsm, and files of these folders."""
    return os.pathsep.join(map(str, (*folders, SUPPORT, ROOT)))


TRACE_VARIABLE = "KVSM_TRACE"
