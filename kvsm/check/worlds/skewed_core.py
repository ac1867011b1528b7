"""Core worlds in which the weights of kinds of actions differ: some are frequent, others never happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.errors import ConfigError

_MOST_WEIGHT = 100.0


class SkewedCoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A core world with changed weights of actions. Raises `ConfigError`.

    factors: kind of action -> factor of its weight; 1 for absent kinds.
    """

    core: CoreOptions
    factors: Mapping[str, float] = {}

    def __post_init__(self) -> None:
        for name, weight in self.factors.items():
            if not 0 <= weight <= _MOST_WEIGHT:
                raise ConfigError(f"the weight of {name} is {weight}; it must be from 0 to {_MOST_WEIGHT}")


class SkewedCoreWorld(CoreWorld):
    """A `World`; worlds with the same options and actions are equal."""

    def __init__(self, options: SkewedCoreOptions) -> None:
        self._factors = options.factors
        super().__init__(options.core)

    def favour(self, share: Callable[[str], float]) -> None:
        """Scale the weight of each kind of action by `share(name)`, in addition to its own factor."""
        super().favour(lambda name: share(name) * self._factors.get(name, 1.0))
