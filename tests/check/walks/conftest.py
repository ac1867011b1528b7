"""Machines that a walk runs are seeded by the walk."""

from __future__ import annotations

import hypothesis.core
import pytest


@pytest.fixture(autouse=True)
def _walks_have_their_own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--hypothesis-seed` Hypothesis stores no failing example, so a walk could not shrink one."""
    monkeypatch.setattr(hypothesis.core, "global_force_seed", None)
