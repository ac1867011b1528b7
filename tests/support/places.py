"""Paths of the project's files, for tests that read them or start programs."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

SUPPORT = Path(__file__).parent
"""The directory of shared test helpers."""


def search_path(*folders: Path) -> str:
    """Return a PYTHONPATH with the shared test helpers, kvsm, and these folders."""
    return os.pathsep.join(map(str, (*folders, SUPPORT, ROOT)))


TRACE_VARIABLE = "KVSM_TRACE"
