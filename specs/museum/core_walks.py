"""Core and hand-over worlds that make situations frequent which are rare in the targets of `kvsm fuzz`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import msgspec

from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.hand_over_options import draw_hand_over_options
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.core.policies import POLICIES


class WeightedCoreWorld(CoreWorld):
    """A core world with changed weights of some kinds of action.

    weights: kind -> factor of its weight; 1 for absent kinds.
    """

    def __init__(self, options: CoreOptions, weights: Mapping[str, float]) -> None:
        self._weights = weights
        super().__init__(options)

    def favour(self, share: Callable[[str], float]) -> None:
        super().favour(lambda name: share(name) * self._weights.get(name, 1.0))


_OFFERS = {
    "store": 5,
    "store_two": 2,
    "submit_all": 3,
    "touch": 2,
    "import_blocks": 3,
    "match": 0.3,
    "reset": 0.1,
    "restart": 0.1,
    "lose": 0.2,
    "cancel": 0.5,
    "fail": 0.5,
    "lose_overdue": 0,
    "advance": 0,
}
"""Mostly offers: a large pool must fill, and stay full."""


def large_core(random: Random) -> WeightedCoreWorld:
    """Return a core with a large pool (60 slots or more), and offers that need most of it.

    So victim searches reach blocks that the same offer has found resident, and all batches are arrays.
    """
    length = random.randint(60, 160)
    options = CoreOptions(
        host_blocks=random.randint(length, 3 * length // 2),
        chunks=random.randint(2 * length, 3 * length),
        workers=1,
        policy=random.choice(tuple(POLICIES)),
        max_live_transfers=random.randint(3, 6),
        defer_ticks=0,
        transfer_ticks=0,
        prompts=random.randint(2, 6),
        length=length,
        folds_log=False,
    )
    return WeightedCoreWorld(options, _OFFERS)


_DISTURBED = {
    "lose": 4,
    "reset": 4,
    "fail": 4,
    "store": 2,
    "submit_all": 2,
    "restart": 0,
    "advance": 0,
}


def crowded_core(random: Random) -> WeightedCoreWorld:
    """Return a core with one or two keys that several requests want, and many losses, failures and resets.

    So two requests often match one block, and the host is often empty while the device is not.
    """
    length = random.randint(1, 2)
    options = CoreOptions(
        host_blocks=random.randint(length, 3),
        chunks=random.randint(3, 5),
        workers=1,
        blocks_per_chunk=random.choice((1, 2)),
        policy=random.choice(tuple(POLICIES)),
        max_live_transfers=random.randint(2, 6),
        defer_ticks=random.choice((0, 1)),
        transfer_ticks=random.choice((0, 2)),
        requests=random.randint(2, 3),
        prompts=1,
        length=length,
        folds_log=random.random() < 0.1,
    )
    return WeightedCoreWorld(options, _DISTURBED)


def loading_hand_over(random: Random) -> HandOverWorld:
    """Return two engines that also load for their own requests, with failing copies.

    Nothing else goes wrong, so many hand-overs complete.
    """
    drawn = draw_hand_over_options(random)
    return HandOverWorld(
        msgspec.structs.replace(drawn, loads=60, failures=40, resets=0, cuts=0, losses=0, lies=0)
    )
