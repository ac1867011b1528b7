"""A declared protocol as a model: explored by arrays within bounds, and proved for any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvsm.check.explore.checked_model import CheckedModel, ExplorationLimits
from kvsm.check.explore.model import Exploration, Refutation
from kvsm.check.protocol.explore import explore as explore_declaration
from kvsm.check.protocol.plain import Move, ProtocolModel
from kvsm.check.protocol.terms import Declaration
from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent


class DeclaredModel(CheckedModel):
    """A declared protocol, which has its own explorer."""

    takes_depth = False

    def declared(self, scope: Any) -> Declaration:
        """The declaration within the bounds of a scope."""
        raise NotImplementedError

    def versions(self) -> dict[str, tuple[Declaration, ...]]:
        """Return what is proved for any size: version -> a declaration within several bounds, smallest first.

        The bounds matter only for examples.
        """
        raise NotImplementedError

    def events_of(self, _declared: Declaration, _path: Sequence[Move]) -> Sequence[OffloadingEvent]:
        """Return the events that a core emits on a path of a declaration; none if they are not known."""
        return ()

    def model(self, scope: Any) -> ProtocolModel:
        return ProtocolModel(self.declared(scope))

    def events(self, scope: Any, refutation: Refutation) -> Sequence[OffloadingEvent]:
        return self.events_of(self.declared(scope), refutation.path)

    def explore(self, scope: Any, limits: ExplorationLimits) -> Exploration:
        given = msgspec.structs.asdict(limits)
        del given["heard"]
        if given.pop("max_depth") is not None:
            raise ConfigError("the protocol is explored without a limit of depth; give --states or --seconds")
        if given.pop("executor") is not None:
            raise ConfigError(f"{self.name} is explored by arrays on one machine, without --cluster")
        return explore_declaration(self.declared(scope), **given)
