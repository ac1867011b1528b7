"""Options of the whole world: those of `kvsm.check.worlds.layer_options`, with a disk."""

from __future__ import annotations

from random import Random

import msgspec

from kvsm.check.worlds.layer_options import draw_layers
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_world import WholeBudgets, WholeOptions
from kvsm.core.policies import POLICIES
from kvsm.tiers import WritePolicy


def draw_whole(random: Random) -> WholeOptions:
    """Draw options: a workload with layers of every kind, a small host pool, and a disk below it."""
    layers = draw_layers(random)
    fields = msgspec.structs.asdict(layers)
    budgets = msgspec.structs.asdict(layers.budgets) | {
        "crashes": 0,
        "disk_failures": random.choice((0, 0, 10)),
        "disk_repeats": random.choice((0, 10)),
        "disk_losses": random.choice((0, 0, 0, 2)),
        "damages": random.choice((0, 0, 3)),
        "kills": random.choice((0, 0, 4)),
        "power_losses": random.choice((0, 0, 0, 3)),
    }
    if budgets["kills"] or budgets["power_losses"]:
        # Each client sends its request again, so none may have taken its name.
        fields["names"] = 0
        fields["requests"] *= 2
    places = random.randint(1, 6)
    return WholeOptions(
        **fields
        | {
            "defer_ticks": random.choice((0, 3, 20, 60)),
            "transfer_ticks": 0,
            "max_live_transfers": random.randint(2, 12),
            "budgets": WholeBudgets(**budgets),
            "disk": WholeDiskOptions(
                slots=random.choice((layers.slots, random.randint(2, 3 * layers.slots))),
                places=places,
                writes=random.choice(list(WritePolicy)),
                policy=random.choice(tuple(POLICIES)),
            ),
        }
    )
