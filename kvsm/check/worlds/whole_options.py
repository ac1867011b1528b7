"""Options of the whole world: layers of every kind, a host pool with a disk, and a level of trouble."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.layer_options import draw_layers
from kvsm.check.worlds.serving_world import Budgets
from kvsm.check.worlds.whole_disk import WholeDiskOptions
from kvsm.check.worlds.whole_world import TroubleLevel, WholeBudgets, WholeOptions
from kvsm.tiers import WritePolicy

_STORM = 3
"""How much more often a disturbance happens in a storm than in rough weather."""
_CALM = ("partial", "waits", "preemptions")
"""What an engine does without any fault."""


def draw_whole(random: Random) -> WholeOptions:
    """Draw options: a workload with layers of every kind, a small host pool, a disk, and disturbances."""
    layers = draw_layers(random)
    trouble = random.choice((TroubleLevel.CALM, TroubleLevel.ROUGH, TroubleLevel.ROUGH, TroubleLevel.STORM))
    budgets = _draw_budgets(random, layers.budgets, trouble)
    fields = msgspec.structs.asdict(layers)
    if budgets.kills or budgets.power_losses or budgets.log_faults:
        # After a kill each client sends its request again, so no other request may have its name.
        fields |= {"names": 0, "requests": layers.requests * 2}
    return WholeOptions(
        **fields
        | {
            "trouble": trouble,
            "defer_ticks": random.choice((0, 3, 20, 60)),
            "transfer_ticks": 0,
            "max_live_transfers": random.randint(2, 12),
            "budgets": budgets,
            "disk": WholeDiskOptions(
                slots=random.choice((layers.slots, random.randint(2, 3 * layers.slots))),
                places=random.randint(1, 6),
                writes=random.choice(list(WritePolicy)),
                policy=draw_policy(random),
            ),
        }
    )


def _draw_budgets(random: Random, layers: Budgets, trouble: TroubleLevel) -> WholeBudgets:
    drawn: dict[str, Any] = msgspec.structs.asdict(layers) | {
        "crashes": 0,
        "disk_failures": random.choice((0, 0, 10)),
        "disk_repeats": random.choice((0, 10)),
        "disk_losses": random.choice((0, 0, 0, 2)),
        "damages": random.choice((0, 0, 3)),
        "kills": random.choice((0, 0, 4)),
        "power_losses": random.choice((0, 0, 0, 3)),
        "log_faults": random.choice((0, 0, 0, 4)),
    }
    if trouble is TroubleLevel.CALM:
        drawn = {name: drawn[name] for name in _CALM}
    elif trouble is TroubleLevel.STORM:
        drawn = {name: _STORM * budget for name, budget in drawn.items()}
    return WholeBudgets(**drawn)
