"""Toy models in the form that `kvsm check` runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from toy_models import TwoPhaseCommit

from kvsm.check.explore.checked_model import CheckedModel


class Options(msgspec.Struct, frozen=True):
    managers: int = 2
    hasty: bool = False


class Commit(CheckedModel):
    """The toy model, which has no event log."""

    name, says = "commit", "two-phase commit"
    scopes: Mapping[str, Any] = {"small": Options(), "full": Options(managers=4)}

    def model(self, scope: Options) -> TwoPhaseCommit:
        return TwoPhaseCommit(scope.managers, scope.hasty)
