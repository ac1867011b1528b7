"""The core world, in which an engine has one device block at several positions of a request's table."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvsm.worlds.core import CoreWorld
from kvsm.worlds.core_books import Offered
from kvsm.worlds.core_options import draw_options


class PositionsWorld(CoreWorld):
    """Where the core world offers what is left of keys that were computed in the same block, this one offers
    them all, if the first is to be stored: the block holds that one, and the others have to wait."""

    def _computed(self, keys: Sequence[bytes], on: int, same: bool) -> Offered:
        offered = super()._computed(keys[::-1] if same else keys, on, same)
        if not same or not offered or keys[0] in self.books.where or self.options.store_threshold > 1:
            return offered
        ((_, blocks),) = offered
        return [(key, blocks) for key in keys]


def draw_world(random: Random) -> PositionsWorld:
    return PositionsWorld(draw_options(random))
