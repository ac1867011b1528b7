"""Eviction policies that tests name in a configuration."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvsm.core.policies import Choice
from kvsm.core.policies.lru import LRUPolicy


class ChoosesByNumpy(LRUPolicy):
    """A policy whose victims are numpy integers."""

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        """Return the victims of the base class, as numpy integers."""
        choice = super().choose(count, protected)
        return None if choice is None else Choice(tuple(np.int64(one) for one in choice.victims), ())  # type: ignore[arg-type]
